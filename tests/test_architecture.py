"""Rules of the package's sources: layers, no torch where there are no tensors, asserts."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

from easyrl.formatting import EXTRAS

PACKAGE = Path(__file__).parent.parent / "easyrl"
LAYERS = (
    ["__init__", "formatting", "layout", "types", "events", "processes", "devices"],
    *(["config", "user_code"], ["algorithm"], ["data"], ["rewards"], ["channels"], ["model"]),
    *(["engines"], ["environments"], ["agents"], ["workers"], ["runtime"], ["observe"]),
    *(["evaluation"], ["bench"], ["api"], ["cli", "__main__"]),
)
"""Lowest first."""
LAYER_OF = {name: number for number, layer in enumerate(LAYERS) for name in layer}
NO_TORCH = ("config", "types", "events", "rewards", "observe")
ACCELERATORS = {"cuda", "npu", "nccl", "hccl"}
CHANGING = {
    *("recv", "receive", "send", "get", "put", "pop", "popleft", "popitem", "submit", "wait"),
    *("add", "append", "discard", "extend", "insert", "remove", "update", "setdefault", "next"),
    *("acquire", "release", "close", "join", "read", "write", "step", "next_event", "unlink"),
}
"""Functions and methods that change something, or may."""


def parse(module):
    """Without docstrings and what is imported for the type checker alone."""
    tree = ast.parse(module.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return tree


TREES = {
    module.relative_to(PACKAGE).with_suffix("").parts: parse(module)
    for module in sorted(PACKAGE.rglob("*.py"))
}


def imports_of(tree):
    """Parts of the names of imported modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "easyrl":
            yield from (["easyrl", alias.name] for alias in node.names if alias.name[0].islower())
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")


def test_modules_import_from_their_own_or_lower_layers_and_torch_where_tensors_are():
    for module, tree in TREES.items():
        for first, *rest in imports_of(tree):
            if first == "easyrl" and rest:
                assert LAYER_OF[rest[0]] <= LAYER_OF[module[0]], f"{module} imports {rest}"
            assert first != "torch" or module[0] not in NO_TORCH, module


def test_the_core_has_the_libraries_that_are_used_and_no_others():
    file = PACKAGE.parent / "pyproject.toml"
    project = tomllib.loads(file.read_text())["project"]
    core = {Requirement(line).name for line in project["dependencies"]}
    assert len(core) <= 12 and EXTRAS.keys() <= project["optional-dependencies"].keys()
    modules = {name[0] for tree in TREES.values() for name in imports_of(tree)}
    ours = {"easyrl", "easyrl_train", "benchmarks", *sys.stdlib_module_names}
    with_extras = {"accelerate", "jinja2", "markupsafe", "openai", "pyarrow", "starlette"}
    optional = {*EXTRAS.values(), *with_extras, "torch_npu", "vllm_ascend"}
    distributions = packages_distributions()
    used = {distributions.get(name, [name])[0] for name in modules - ours - optional}
    assert {name.lower() for name in used} == core


def test_no_assert_has_a_side_effect():
    """`python -O` leaves asserts out."""
    for module, tree in TREES.items():
        for check in (node for node in ast.walk(tree) if isinstance(node, ast.Assert)):
            for node in ast.walk(check):
                assert not isinstance(node, ast.NamedExpr), module
                if isinstance(node, ast.Call):
                    assert ast.unparse(node.func).split(".")[-1] not in CHANGING, module


def test_only_devices_spells_the_names_of_accelerators():
    for module, tree in TREES.items():
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
        words = {word for name in names for word in (name.lower(), *name.lower().split("_"))}
        assert not words & ACCELERATORS or module[-1] == "devices", module
