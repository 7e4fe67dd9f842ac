"""The user's own functions that the config names: `file.py:function`, `package.module:function`."""

import ast
import concurrent.futures
import contextlib
import functools
import hashlib
import importlib
import importlib.abc
import importlib.util
import inspect
import os
import re
import sys
import tokenize
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from easyrl.formatting import ConfigError

FORMS = "file.py:function or package.module:function"
Kind = Literal["function", "class"]
sources: dict[str, str] = {}
"""Path -> content of the files, and of the modules beside them, that are loaded as they were at the
start of the run. They may lie on another machine."""
_folders: dict[str, list[Path]] = {}
"""The folders of the files that are loaded, by their places on this machine, as `sources` names
them."""
_folders_of_modules: dict[str, Path] = {}
"""The folders of the modules beside the files that are loaded, by the modules' names."""
_folders_of_files: dict[str, Path] = {}
"""The folders of those files, by their names without `.py`."""
__path__: list[str] = []
"""Makes this module a package. Its modules are the user's files that have no name of their own."""
PREFIX = f"{__name__}."
"""Begin of such a module's name. The file's path in hex follows."""
CONTENT_DIGEST = re.compile(r"^# content \w{64}$", re.MULTILINE)
"""Line of a file that `api.inputs` has written, whose other lines differ between processes."""


class _Files(importlib.abc.MetaPathFinder):
    """Imports a file without a name of its own by its path, also in processes that the user's code
    starts; and on a machine without the user's files what lies beside them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        found = re.fullmatch(rf"{PREFIX}((?:[0-9a-f]{{2}})+)", fullname)
        if found:
            file = os.fsdecode(bytes.fromhex(found[1]))
            return importlib.util.spec_from_file_location(fullname, file)
        for folders in _folders.values():
            for folder in folders:
                spec = self._find_beside(fullname, path, folder)
                if spec is not None:
                    return spec
        return None

    def _find_beside(
        self, fullname: str, path: Sequence[str] | None, folder: Path
    ) -> ModuleSpec | None:
        """Find a module in one folder. `path`: where the package is that has it, if one has."""
        base = folder / fullname.replace(".", "/")
        place = _file(str(base))
        if path is not None and str(place.parent) not in path:
            return None
        for file in _files_of_module(base):
            if str(file) in sources:
                return importlib.util.spec_from_loader(fullname, _Source(file))
        has_modules = any(each.startswith(f"{base}{os.sep}") for each in sources)
        if has_modules:
            spec = ModuleSpec(fullname, None, is_package=True)  # a folder without __init__.py
            spec.submodule_search_locations = [str(place)]
            return spec
        return None


class _Source(importlib.abc.ExecutionLoader):
    """Loads a module from `sources`."""

    def __init__(self, file: Path) -> None:
        """`file`: as `sources` names it."""
        self._file = file

    def get_filename(self, fullname: str) -> str:
        return str(_file(str(self._file)))

    def get_source(self, fullname: str) -> str:
        return sources[str(self._file)]

    def is_package(self, fullname: str) -> bool:
        return self._file.name == "__init__.py"


def _files_of_module(base: Path) -> tuple[Path, Path]:
    """Return the files that a module may be, given its path without a suffix."""
    return base.with_name(f"{base.name}.py"), base / "__init__.py"


def _is_never_beside(name: str) -> bool:
    """Return whether a module belongs to Python or EasyRL, which no file beside a user's shadows.
    A user's file may lie in a clone of EasyRL."""
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or top == __package__


sys.meta_path.append(_Files())  # the last: it finds what no other one does


def load_function(
    spec: str, key: str, forms: str = FORMS, kind: Kind = "function"
) -> Callable[..., Any]:
    """Load the function or class that `spec` names. Raises ConfigError with `key` and `forms`."""
    path, _, name = spec.rpartition(":")
    in_file = _list_file(spec.rstrip(":"), kind)
    if in_file:
        raise ConfigError(f"{key}: expected one {kind} of the file, {in_file}, got '{spec}'")
    if not path or not name:
        raise ConfigError(f"{key}: expected {forms}, got '{spec}'")
    try:
        function: Callable[..., Any] | None = getattr(_load(path), name, None)
        if callable(function):
            inspect.signature(function)
            return function
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: cannot load '{spec}':\n{user_traceback(error)}") from error
    in_file = _list_file(path, kind)
    hint = f"; it has {in_file}" if in_file else ""
    raise ConfigError(f"{key}: '{path}' has no {kind} '{name}'{hint}")


def _list_file(file: str, kind: Kind) -> str:
    """List the functions or classes of a Python file as `file.py:function or …`."""
    wanted = ast.ClassDef if kind == "class" else ast.FunctionDef | ast.AsyncFunctionDef
    found = []
    for node in _parsed(_file(file)).body:
        if isinstance(node, wanted) and not node.name.startswith("_"):
            found.append(f"{file}:{node.name}")
    return " or ".join(found)


def module_of(spec: str) -> ModuleType:
    """Return the module of a function, `file.py:function`."""
    return _load(_path_of(spec))


def _path_of(spec: str) -> str:
    """Return the file or module that `spec` names; empty for a built-in function's name."""
    path, _, _ = spec.rpartition(":")
    return path


def forget() -> None:
    """Load files anew from now on."""
    _load.cache_clear()
    _folders_of_modules.clear()
    _folders_of_files.clear()


def read_files(specs: Iterable[str]) -> dict[str, str]:
    """Read the files of these functions and the modules beside them that they import, by path: a
    worker that starts later, perhaps on another machine, must use the same."""
    contents = {}
    for path in map(_path_of, specs):
        if not path.endswith(".py"):
            continue
        file = _file(path)
        contents[path] = _read(file)
        for module in _modules_beside(file):
            beside = Path(path).parent / module.relative_to(file.parent)
            with contextlib.suppress(OSError, SyntaxError, UnicodeError):  # its import says so
                contents[str(beside)] = _read(module)
    return contents


def _read(file: Path) -> str:
    """Read Python source in the encoding that it says it has."""
    with tokenize.open(file) as opened:
        return opened.read()


def digest_files(specs: Iterable[str]) -> str:
    """Digest the files of these functions and the modules beside them that they import, if any."""
    files: list[Path] = []
    for path in dict.fromkeys(map(_path_of, specs)):
        named = path if path.endswith(".py") or not path else _load(path).__file__
        if named:
            files.append(_file(named))
    if not files:
        return ""
    text = ""
    for file in files:  # grows by the modules that the files import
        content = file.read_text("utf-8", "replace")
        digest_line = CONTENT_DIGEST.search(content)
        text += digest_line[0] if digest_line else content
        # As in earlier versions, whose runs can be resumed: fewer than `_modules_beside`.
        for imported in _imports(file):
            for beside in _files_of_module(file.parent / imported.name.replace(".", "/")):
                if beside.is_file() and beside not in files:
                    files.append(beside)
    return hashlib.sha256(text.encode()).hexdigest()


def _modules_beside(file: Path) -> list[Path]:
    """Return the modules in the folder of a file, and in folders of it, that the file needs: those
    that it imports, and those that these import."""
    root = file.parent
    found: list[Path] = []
    waiting = deque([file])
    while waiting:
        importing = waiting.popleft()
        for imported in _imports(importing):
            for folder in imported.folders(importing, root):
                for module in _modules_in(folder, imported.name):
                    is_new = module not in found and module != file
                    if is_new and module.is_relative_to(root):
                        found.append(module)
                        waiting.append(module)
    return found


class _Import(NamedTuple):
    name: str  # of a module, without leading dots
    num_dots: int

    def folders(self, file: Path, root: Path) -> Iterable[Path]:
        """Return the folders in which the module may lie for a file that imports it. `root`: the
        folder of the user's file that needs both."""
        if self.num_dots > 0:
            return file.parents[self.num_dots - 1 : self.num_dots]
        if _is_never_beside(self.name):
            return []
        return dict.fromkeys([file.parent, root])


def _modules_in(folder: Path, name: str) -> list[Path]:
    """Return the files in a folder that an import of a module executes: its own, and those of the
    packages that have it."""
    base = folder / name.replace(".", "/")
    packages = [parent / "__init__.py" for parent in base.parents if parent != folder]
    files = [*_files_of_module(base), *packages]
    return [file for file in files if file.is_relative_to(folder) and file.is_file()]


def _imports(file: Path) -> Iterator[_Import]:
    """Yield the modules that the file may import."""
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Import):
            for imported in node.names:
                yield _Import(imported.name, 0)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield _Import(module, node.level)
            for imported in node.names:  # a function, or a module of the package `module`
                name = f"{module}.{imported.name}" if module else imported.name
                yield _Import(name, node.level)


def _parsed(file: Path) -> ast.Module:
    """Return the parsed file; an empty module for one that is not there or is no Python."""
    if file.suffix == ".py":
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            return ast.parse(file.read_bytes())
    return ast.Module([], [])


def _file(path: str) -> Path:
    return Path(path).expanduser().resolve()


@functools.cache  # functions of the same file share one module
def _load(path: str) -> ModuleType:
    """Import a file or a module. The user's code can import what lies beside it."""
    if not path.endswith(".py"):
        sys.path.append(str(Path.cwd()))  # last: it shadows nothing
        return importlib.import_module(path)
    file = _file(path)
    sys.path.append(str(file.parent))
    _folders.setdefault(str(file.parent), []).append(Path(path).parent)
    if path not in sources:  # else it was checked before the run
        _check_names_beside(file)
    spec = importlib.util.spec_from_file_location(_module_name(file), file)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if path in sources:
        exec(compile(sources[path], file, "exec", dont_inherit=True), module.__dict__)
    else:
        spec.loader.exec_module(module)
    return module


def _check_names_beside(file: Path) -> None:
    """Raise ConfigError if a file needs another module of a name than one in another folder does:
    Python has one module of a name."""
    names = set()
    for module in _modules_beside(file):
        first_part = module.relative_to(file.parent).parts[0]
        names.add(first_part.removesuffix(".py"))
    for name in sorted(names):
        if _is_installed(name):
            continue
        for folders in (_folders_of_modules, _folders_of_files):
            _check_folder(name, folders.get(name, file.parent), file.parent)
        _folders_of_modules[name] = file.parent
    _check_folder(file.stem, _folders_of_modules.get(file.stem, file.parent), file.parent)
    _folders_of_files.setdefault(file.stem, file.parent)


def _is_installed(name: str) -> bool:
    """Return whether a module is found elsewhere than beside the user's files: they shadow none."""
    found = PathFinder.find_spec(name)
    if found is None or found.origin is None:
        return False
    origin = Path(found.origin)
    is_package = origin.name == "__init__.py"
    folder = origin.parent.parent if is_package else origin.parent
    return str(folder) not in _folders


def _check_folder(name: str, other: Path, folder: Path) -> None:
    if other != folder:
        raise ConfigError(
            f"expected one module '{name}' beside the files of functions, got one in {other} and "
            f"one in {folder}: rename one, or put the files into one folder"
        )


def _module_name(file: Path) -> str:
    """Return the name of a file's module. Processes that the user's code starts can import its
    functions by this name: the file's own, unless another module has it."""
    name = file.stem
    is_taken = name in sys.modules and getattr(sys.modules[name], "__file__", "") != str(file)
    if "." not in name and not is_taken:
        found = PathFinder.find_spec(name)
        if found is not None and _file(found.origin or "") == file:
            return name
    return PREFIX + os.fsencode(file).hex()


def user_traceback(error: BaseException) -> str:
    """Format the traceback without EasyRL's and the standard library's frames at its start."""
    ignored = (
        f"{Path(__file__).parent}{os.sep}",
        f"{Path(concurrent.futures.__file__).parent}{os.sep}",
        importlib.__file__,
        "<frozen importlib",
    )
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(ignored):
        frame = frame.tb_next
    text = "".join(traceback.format_exception(type(error), error, frame)).rstrip()
    return re.sub(rf"{PREFIX}[0-9a-f]+\.", "", text)
