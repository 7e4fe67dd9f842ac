"""Modules that are imported for a program: those of names that it may use without an import, and
those that are slow to import.

Graders of contest problems import names before a program, so that it need not. LiveCodeBench's
grader imports all names of STAR_MODULES in this order, then all built-in ones, then
the modules themselves; PRIME's does the same. Those of APPS and TACO import fewer, and EXTRAS. What
the program itself defines or imports counts first, in all of them.
"""

import ast
import builtins
import functools
import importlib
import re
import warnings
from collections.abc import Iterator
from types import ModuleType

STAR_MODULES = (
    "typing",
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
)
"""In LiveCodeBench's grader `typing` is the last. Here it is the first, since its `Counter` is only
an alias of the one in `collections`."""
EXTRAS = {"time": "time", "fractions": "fractions", "os": "os", "np": "numpy"}
"""Further modules by their names. (In LiveCodeBench's grader `time` is the class of `datetime`,
which no program means.)"""
SLOW_LIBRARIES = ("numpy", "pandas", "scipy", "sympy", "networkx")
"""NumPy takes 0.1 s to import: with 100 tests that is the usual time limit of a program."""
WORD = re.compile(r"[^\W\d]\w*")


def names_used(program: str) -> dict[str, tuple[str, str]]:
    """Return the names that occur in a program, each with its module and its attribute, or "" for
    the module itself. Importing all modules would take as long as starting Python."""
    words = set(WORD.findall(program))
    if "np." not in program:  # it is slow to import, and `np` a usual variable
        words.discard("np")
    names = _all_names()
    used: dict[str, tuple[str, str]] = {}
    for word in sorted(words):
        if word in names:
            used[word] = names[word]
    return used


def slow_imports(program: str) -> list[str]:
    """Return the modules of SLOW_LIBRARIES that a program imports at its start. What a function
    imports may never be needed."""
    if not any(library in program for library in SLOW_LIBRARIES):
        return []
    slow = [name for name in _imported(program) if name.partition(".")[0] in SLOW_LIBRARIES]
    return list(dict.fromkeys(slow))


def _imported(program: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its texts
            tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a model has written it
        return
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            for each in node.names:
                yield each.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


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
