"""Names that graders of contest problems import before a program, so that it need not.

LiveCodeBench's grader imports all names of STAR_MODULES in this order, then all built-in ones, then
the modules themselves; PRIME's does the same. Those of APPS and TACO import fewer, and EXTRAS. What
the program itself defines or imports counts first, in all of them.
"""

import builtins
import functools
import importlib
import re
from types import ModuleType

STAR_MODULES = (
    *("typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math"),
    *("random", "statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
"""`typing` is the last there, and here the first: its `Counter` is an alias of the real one."""
EXTRAS = {"time": "time", "fractions": "fractions", "os": "os", "np": "numpy"}
"""Names of modules. LiveCodeBench's `time` is a class of `datetime`, which nobody means."""
WORD = re.compile(r"[^\W\d]\w*")


def names_used(program: str) -> dict[str, tuple[str, str]]:
    """Return those of the names that occur in a program, with the module of each and the attribute,
    or "" for the module itself. To import all of them takes as long as to start Python."""
    words = set(WORD.findall(program))
    if "np." not in program:  # it is slow to import, and `np` a usual variable
        words.discard("np")
    names = _all_names()
    used = sorted(words & names.keys())
    return {word: names[word] for word in used}


@functools.cache
def _all_names() -> dict[str, tuple[str, str]]:
    """Return all names, each with its module and its attribute, or "" for the module itself."""
    names: dict[str, tuple[str, str]] = {}
    for module_name in STAR_MODULES:
        for name in _names_of_star_import(importlib.import_module(module_name)):
            names[name] = (module_name, name)
    for module_name in STAR_MODULES:
        names[module_name] = (module_name, "")
    for name, module_name in EXTRAS.items():
        names[name] = (module_name, "")
    for name in vars(builtins):
        names.pop(name, None)
    return names


def _names_of_star_import(module: ModuleType) -> list[str]:
    public = getattr(module, "__all__", None)
    if public is not None:
        return list(public)
    return [name for name in vars(module) if not name.startswith("_")]
