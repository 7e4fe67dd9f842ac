"""The user's own functions that the config names: `file.py:function`, `package.module:function`."""

import ast
import concurrent.futures
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
sources: dict[str, str] = {}  # by path, of the files that are loaded as they were at the start
__path__: list[str] = []  # makes this module a package, of the files without a name of their own
PREFIX = f"{__name__}."  # of the modules' names; the file's path in hex follows


class _Files(importlib.abc.MetaPathFinder):
    """Imports such a file by its path, also in processes that the user's code starts."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        found = re.fullmatch(rf"{PREFIX}((?:[0-9a-f]{{2}})+)", fullname)
        file = os.fsdecode(bytes.fromhex(found[1])) if found else ""
        return importlib.util.spec_from_file_location(fullname, file) if file else None


sys.meta_path.append(_Files())


def load_function(
    spec: str, key: str, forms: str = FORMS, kind: Kind = "function"
) -> Callable[..., Any]:
    """Load the function or class that `spec` names. Raises ConfigError with `key` and `forms`."""
    path, _, name = spec.rpartition(":")
    if own := _list_file(spec.rstrip(":"), kind):
        raise ConfigError(f"{key}: expected one {kind} of the file, {own}, got '{spec}'")
    if not path or not name:
        raise ConfigError(f"{key}: expected {forms}, got '{spec}'")
    try:
        function: Callable[..., Any] | None = getattr(_load(path), name, None)
        if callable(function):
            inspect.signature(function)
            return function
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: cannot load '{spec}':\n{user_traceback(error)}") from error
    own = f"; it has {own}" if (own := _list_file(path, kind)) else ""
    raise ConfigError(f"{key}: '{path}' has no {kind} '{name}'{own}")


def _list_file(file: str, kind: Kind) -> str:
    """List the functions or classes of a Python file as `file.py:function or …`."""
    wanted = ast.ClassDef if kind == "class" else ast.FunctionDef | ast.AsyncFunctionDef
    found = [each for each in _parsed(_file(file)).body if isinstance(each, wanted)]
    return " or ".join(f"{file}:{each.name}" for each in found if each.name[0] != "_")


def module_of(spec: str) -> ModuleType:
    return _load(spec.rpartition(":")[0])


def forget() -> None:
    """Load files anew from now on."""
    _load.cache_clear()


def read_files(specs: Iterable[str]) -> dict[str, str]:
    """Read the files of these functions, by path: a worker that starts later must use the same."""
    paths = (spec.rpartition(":")[0] for spec in specs)
    return {path: _file(path).read_text("utf-8") for path in paths if path.endswith(".py")}


def digest_files(specs: Iterable[str]) -> str:
    """Digest the files of these functions and the modules beside them that they import, if any."""
    paths = dict.fromkeys(spec.rpartition(":")[0] for spec in specs)
    named = [path if path.endswith(".py") else _load(path).__file__ for path in paths if path]
    files, text = [_file(path) for path in named if path], ""
    for file in files:  # which grows
        content = file.read_text("utf-8", "replace")
        text += next(iter(re.findall(r"^# content \w{64}$", content, re.MULTILINE)), content)
        places = [file.parent / name.replace(".", "/") for name in _imports(file)]
        beside = [path for at in places for path in (at.with_suffix(".py"), at / "__init__.py")]
        files += [path for path in dict.fromkeys(beside) if path.is_file() and path not in files]
    return hashlib.sha256(text.encode()).hexdigest() if files else ""


def _imports(file: Path) -> Iterator[str]:
    """Yield the names of modules that the file may import, without leading dots."""
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            of = f"{node.module}." if node.module else ""
            yield from (of[:-1], *(of + each.name for each in node.names))


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes()) if file.suffix == ".py" else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _file(path: str) -> Path:
    return Path(path).expanduser().resolve()


@functools.cache  # functions of the same file share one module
def _load(path: str) -> ModuleType:
    """Import a file or a module. The user's code can import what lies beside it."""
    file, is_file = _file(path), path.endswith(".py")
    sys.path.append(str(file.parent if is_file else Path.cwd()))  # last: it shadows nothing
    if not is_file:
        return importlib.import_module(path)
    name = file.stem  # by which processes that it starts can import it, unless it is another's
    is_taken = name in sys.modules and getattr(sys.modules[name], "__file__", "") != str(file)
    found = None if "." in name or is_taken else PathFinder.find_spec(name)
    if found is None or _file(found.origin or "") != file:
        name = PREFIX + os.fsencode(file).hex()
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    if path in sources:
        exec(compile(sources[path], file, "exec", dont_inherit=True), module.__dict__)
    else:
        spec.loader.exec_module(module)
    return module


def user_traceback(error: BaseException) -> str:
    """Format the traceback without EasyRL's and the standard library's frames at its start."""
    frame = error.__traceback__
    folders = (Path(file).parent for file in (__file__, concurrent.futures.__file__))
    ignored = (*(f"{each}{os.sep}" for each in folders), importlib.__file__, "<frozen importlib")
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(ignored):
        frame = frame.tb_next
    text = "".join(traceback.format_exception(type(error), error, frame)).rstrip()
    return re.sub(rf"{PREFIX}[0-9a-f]+\.", "", text)
