"""A module imports from its own or lower packages, never upward."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "easyrl"
LAYERS = (
    ["__init__", "formatting", "types", "events", "processes", "devices"],
    *(
        ["config", "user_code"],
        ["algorithm"],
        ["data"],
        ["rewards"],
        ["environments"],
        ["channels"],
        ["model"],
        ["engines"],
    ),
    *(["workers"], ["runtime"], ["observe"], ["planning"], ["evaluation"], ["bench"]),
    *(["api"], ["cli", "__main__"]),
)
"""Lowest first."""
LAYER_OF = {name: number for number, layer in enumerate(LAYERS) for name in layer}
NO_TORCH = ("config", "types", "events", "rewards", "observe")
ACCELERATORS = {"cuda", "npu", "nccl", "hccl"}


def parse(module: Path) -> ast.Module:
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
"""Modules by the parts of their names below `easyrl`."""
CHANGING = {
    *("recv", "receive", "send", "get", "put", "pop", "popleft", "popitem", "submit", "wait"),
    *("add", "append", "discard", "extend", "insert", "remove", "update", "setdefault", "next"),
    *("acquire", "release", "close", "join", "read", "write", "step", "next_event", "unlink"),
}
"""Functions and methods that change something, or may."""
each_module = pytest.mark.parametrize("module", TREES, ids=".".join)


def imports_of(module: tuple[str, ...]) -> set[str]:
    """Full names of the modules that a module imports."""
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "easyrl":
            found |= {f"easyrl.{alias.name}" for alias in node.names if alias.name[0].islower()}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@each_module
def test_a_module_imports_from_its_own_or_lower_layers(module: tuple[str, ...]) -> None:
    for name in imports_of(module):
        if name.startswith("easyrl."):
            assert LAYER_OF[name.split(".")[1]] <= LAYER_OF[module[0]], f"imports {name}"


@each_module
def test_packages_without_tensors_import_no_torch(module: tuple[str, ...]) -> None:
    if module[0] in NO_TORCH:
        assert not any(name.split(".")[0] == "torch" for name in imports_of(module))


def changes_in_asserts(tree: ast.Module) -> list[str]:
    """Asserts that `python -O` must not leave out."""
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    return [
        ast.unparse(check)
        for check in checks
        for node in ast.walk(check)
        if isinstance(node, ast.NamedExpr)
        or (isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in CHANGING)
    ]


def test_no_assert_has_a_side_effect() -> None:
    for check in ("assert pipe.recv() == PACKED", "assert all([p.pop() for p in parts])"):
        assert changes_in_asserts(ast.parse(check)) == [check]
    for module, tree in TREES.items():
        assert not changes_in_asserts(tree), module


@each_module
def test_only_devices_spells_the_names_of_accelerators(module: tuple[str, ...]) -> None:
    if module[-1] == "devices":
        return
    names = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Name | ast.Attribute):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    words = {word for name in names for word in (name.lower(), *name.lower().split("_"))}
    assert not words & ACCELERATORS
