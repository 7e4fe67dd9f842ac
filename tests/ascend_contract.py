"""What EasyRL's code uses of torch_npu, and whether a wheel of it has that: both read, not run.

The wheel's Python sources are parsed and its libraries searched; nothing of it is imported, so that
neither Ascend's libraries nor a device is needed. Used are, by the forms they have in our code:

    device_module(kind).NAME(arguments)     a function of `torch.npu`, called so
    device_module(kind).NAME(…).FIELD       a field of what it returns
    from torch_npu.MODULE import CLASS      a class of its C++ part: called so, its attributes
    storage._share_npu_(…)                  a method that it gives torch's classes
    "ASCEND_…"                              a variable that it obeys
"""

from __future__ import annotations

import ast
import re
import warnings
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "torch_npu"
NOT_READ = ("_inductor/", "_op_plugin_docs", "contrib/", "onnx/", "testing/")
"""Half of its lines, and none of what is looked for."""
MODULE_OF_DEVICES = "torch_npu/npu/__init__.py"


@dataclass(frozen=True, order=True)
class Call:
    """A name as it is called: with so many arguments by position, and these by name."""

    name: str
    num_positional: int
    keywords: tuple[str, ...]


@dataclass
class Used:
    device_calls: set[Call] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    class_calls: set[Call] = field(default_factory=set)
    class_attributes: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)

    def names(self) -> set[str]:
        calls = {call.name for call in self.device_calls | self.class_calls}
        return calls | self.fields | self.class_attributes | self.methods | self.variables


def used_by(sources: list[str]) -> Used:
    """What our sources use of torch_npu."""
    used = Used()
    for tree in map(ast.parse, sources):
        classes = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE + ".")
            for alias in node.names
        }
        made_by_classes: set[str] = set()  # variables that hold what such a class has made
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                base = _dotted(node.value.func).partition(".")[0]
                if base in classes:
                    made_by_classes |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                _note_call(node, classes, used)
            elif isinstance(node, ast.Attribute):
                if _is_device_call(node.value):
                    used.fields.add(node.attr)
                elif isinstance(node.value, ast.Name) and node.value.id in made_by_classes:
                    used.class_attributes.add(node.attr)
                elif "npu" in node.attr.split("_"):
                    used.methods.add(node.attr)
            elif isinstance(node, ast.Constant) and re.fullmatch("ASCEND_[A-Z_]+", str(node.value)):
                used.variables.add(str(node.value))
    return used


def _note_call(node: ast.Call, classes: set[str], used: Used) -> None:
    keywords = tuple(sorted(keyword.arg or "**" for keyword in node.keywords))
    if _is_device_call(node):
        assert isinstance(node.func, ast.Attribute)
        used.device_calls.add(Call(node.func.attr, len(node.args), keywords))
    elif (name := _dotted(node.func)).partition(".")[0] in classes:
        used.class_calls.add(Call(name, len(node.args), keywords))


def _is_device_call(node: ast.AST) -> bool:
    """Whether it is `device_module(…).NAME(…)`, in our code the only way to `torch.npu`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Call)
        and _dotted(node.func.value.func).rpartition(".")[2] == "device_module"
    )


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


class Wheel:
    """The sources and libraries of a torch-npu wheel."""

    def __init__(self, file: Path) -> None:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its docstrings have escapes that are none
                self.trees = {
                    name: ast.parse(archive.read(name))
                    for name in names
                    if name.endswith(".py") and name.startswith(PACKAGE + "/")
                    if not name.removeprefix(PACKAGE + "/").startswith(NOT_READ)
                }
            self._libraries = b"".join(
                archive.read(name)
                for name in names
                if name.startswith(PACKAGE + "/") and Path(name).name.startswith(("lib", "_C"))
            )
        nodes = [node for tree in self.trees.values() for node in ast.walk(tree)]
        self.calls = {
            Call(_dotted(n.func), len(n.args), tuple(sorted(k.arg or "**" for k in n.keywords)))
            for n in nodes
            if isinstance(n, ast.Call)
        }
        self.set_attributes = {
            n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
        }
        self.strings = {
            n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }

    def lacks(self, used: Used) -> list[str]:
        """One line for everything that is used and that the wheel has not, or not so."""
        return sorted(
            [
                *filter(None, (self._problem(call) for call in used.device_calls)),
                *(
                    f"{name}: no library has a field of this name"
                    for name in used.fields
                    if re.search(rb"\0" + name.encode() + rb"\0", self._libraries) is None
                ),
                *(f"{call}: not called so" for call in used.class_calls if not self._calls(call)),
                *(f"{name}: not set" for name in used.class_attributes - self.set_attributes),
                *(f"{name}: not given to torch's classes" for name in used.methods - self.strings),
                *(f"{name}: not obeyed" for name in used.variables - self.strings),
            ]
        )

    def _calls(self, wanted: Call) -> bool:
        """Whether the wheel itself calls its C++ class so: they have no other signature to read."""
        return any(
            (call.name == wanted.name or call.name.endswith("." + wanted.name))
            and (call.num_positional, call.keywords) == (wanted.num_positional, wanted.keywords)
            for call in self.calls
        )

    def _problem(self, call: Call) -> str | None:
        function = self._find(MODULE_OF_DEVICES, call.name)
        if function is None:
            return f"{call.name}: torch.npu has no function of this name"
        parameters = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        required = len(parameters) - len(function.args.defaults)
        accepted = {*parameters, *(a.arg for a in function.args.kwonlyargs)}
        unknown = set(call.keywords) - accepted
        num_given = call.num_positional + len(call.keywords)
        if unknown or call.num_positional > len(parameters) or num_given < required:
            return f"{call}: torch.npu has {call.name}({', '.join(parameters)})"
        return None

    def _find(self, module: str, name: str) -> ast.FunctionDef | None:
        """The function that `name` is in a module, wherever it comes from."""
        for node in self.trees[module].body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name in (alias.asname, alias.name) or alias.name == "*":
                        source = self._module(module, node)
                        found = self._find(source, alias.name if alias.name != "*" else name)
                        if found is not None:
                            return found
        return None

    def _module(self, importer: str, node: ast.ImportFrom) -> str:
        parts = importer.split("/")[: -node.level] if node.level else []
        path = "/".join([*parts, *(node.module or "").split(".")]).strip("/")
        return f"{path}.py" if f"{path}.py" in self.trees else f"{path}/__init__.py"
