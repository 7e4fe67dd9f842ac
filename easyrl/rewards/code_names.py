"""Names that graders of contest problems import before a program, so that it need not.

LiveCodeBench's grader imports all names of STAR_MODULES in this order, then all built-in ones, then
the modules themselves; PRIME's does the same. Those of APPS and TACO import fewer, and EXTRAS. What
the program itself defines or imports counts first, in all of them.
"""

import builtins
import functools
import importlib
import re

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
    return {word: names[word] for word in sorted(words & names.keys())}


@functools.cache
def _all_names() -> dict[str, tuple[str, str]]:
    names: dict[str, tuple[str, str]] = {}
    for module_name in STAR_MODULES:
        module = importlib.import_module(module_name)
        public = [name for name in vars(module) if not name.startswith("_")]
        for name in getattr(module, "__all__", public):
            names[name] = (module_name, name)
    names.update({name: (name, "") for name in STAR_MODULES})
    names.update({name: (module_name, "") for name, module_name in EXTRAS.items()})
    return {name: place for name, place in names.items() if not hasattr(builtins, name)}
