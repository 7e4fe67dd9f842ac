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
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from easyrl.formatting import ConfigError

FORMS = "file.py:function or package.module:function"
Kind = Literal["function", "class"]
sources: dict[str, str] = {}
"""Path -> content of the files that are loaded as they were at the start of the run."""
__path__: list[str] = []
"""Makes this module a package. Its modules are the user's files that have no name of their own."""
PREFIX = f"{__name__}."
"""Begin of such a module's name. The file's path in hex follows."""
CONTENT_DIGEST = re.compile(r"^# content \w{64}$", re.MULTILINE)
"""Line of a file that `api.inputs` has written, whose other lines differ between processes."""


class _Files(importlib.abc.MetaPathFinder):
    """Imports a file without a name of its own by its path, also in processes that the user's code
    starts."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        found = re.fullmatch(rf"{PREFIX}((?:[0-9a-f]{{2}})+)", fullname)
        if not found:
            return None
        file = os.fsdecode(bytes.fromhex(found[1]))
        return importlib.util.spec_from_file_location(fullname, file)


sys.meta_path.append(_Files())


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


def read_files(specs: Iterable[str]) -> dict[str, str]:
    """Read the files of these functions, by path: a worker that starts later must use the same."""
    contents = {}
    for path in map(_path_of, specs):
        if path.endswith(".py"):
            contents[path] = _file(path).read_text("utf-8")
    return contents


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
        for name in _imports(file):
            module = file.parent / name.replace(".", "/")
            for beside in (module.with_suffix(".py"), module / "__init__.py"):
                if beside.is_file() and beside not in files:
                    files.append(beside)
    return hashlib.sha256(text.encode()).hexdigest()


def _imports(file: Path) -> Iterator[str]:
    """Yield the names of modules that the file may import, without leading dots."""
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Import):
            for imported in node.names:
                yield imported.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield module
            for imported in node.names:  # a function, or a module of the package `module`
                yield f"{module}.{imported.name}" if module else imported.name


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
    spec = importlib.util.spec_from_file_location(_module_name(file), file)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if path in sources:
        exec(compile(sources[path], file, "exec", dont_inherit=True), module.__dict__)
    else:
        spec.loader.exec_module(module)
    return module


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
