"""A module imports from its own or lower packages, never upward."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "easyrl"
LAYERS = (
    [
        "__init__",
        "formatting",
        "types",
        "events",
        "processes",
        "devices",
    ],
    ["config"],
    ["algorithm"],
    ["data"],
    ["rewards"],
    ["channels"],
    ["model"],
    ["engines"],
    ["workers"],
    ["runtime"],
    ["observe"],
    ["evaluate"],
    ["bench"],
    ["doctor"],
    ["cli", "__main__"],
)
"""Lowest first."""
LAYER_OF = {name: number for number, layer in enumerate(LAYERS) for name in layer}
NO_TORCH = ("config", "types", "events", "rewards", "observe")
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(dotted: str) -> str:
    """`easyrl.channels.weights` -> `channels`"""
    return dotted.split(".")[1] if "." in dotted else "__init__"


def imports_of(module: Path) -> set[str]:
    found = set()
    tree = ast.parse(module.read_text())
    for guarded in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
        if isinstance(guarded.test, ast.Name) and guarded.test.id == "TYPE_CHECKING":
            guarded.body = []  # names for the type checker alone
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "easyrl":
                found |= {f"easyrl.{a.name}" for a in node.names if not a.name.startswith("__")}
            else:
                found.add(node.module)
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_from_its_own_or_lower_layers(module: Path) -> None:
    own = module.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imports_of(module):
        if not name.startswith("easyrl"):
            continue
        room = room_of(name)
        assert LAYER_OF[room] <= LAYER_OF[own], (
            f"{own} (floor {LAYER_OF[own]}) imports {name} (floor {LAYER_OF[room]})"
        )


@pytest.mark.parametrize("room", NO_TORCH)
def test_rooms_that_know_no_tensor_import_no_torch(room: str) -> None:
    files = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").exists() else []
    for module in files or sorted((PACKAGE / room).glob("*.py")):
        assert not any(name.split(".")[0] == "torch" for name in imports_of(module)), module


def test_only_devices_spells_the_names_of_accelerators() -> None:
    words = ("cuda", "npu", "nccl", "hccl", "VISIBLE_DEVICES")
    for module in MODULES:
        if module.name == "devices.py":
            continue
        code = ast.parse(module.read_text())
        names = {n.id for n in ast.walk(code) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(code) if isinstance(n, ast.Attribute)}
        docstrings = {
            id(n.body[0].value)
            for n in ast.walk(code)
            if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and n.body
            and isinstance(n.body[0], ast.Expr)
        }
        names |= {
            n.value
            for n in ast.walk(code)
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docstrings
        }
        for name in names:
            assert not any(word.lower() in name.lower().split("_") for word in words), module
