"""Compare what EasyRL uses of vLLM, vllm-ascend and torch_npu with their sources.

    python tests/ascend_sources.py FOLDER ...

Each FOLDER is an unpacked source archive (vllm, vllm-ascend) or wheel (torch-npu). Prints names and
calls that do not fit; imports nothing of theirs. Run it when a supported version moves.
"""

import ast
import re
import sys
from pathlib import Path

OURS = Path(__file__).parent.parent / "easyrl"
ENGINE, WORKER = ((OURS / f"engines/vllm/{n}.py").read_text() for n in ("engine", "worker"))
TRANSFER = "vllm.distributed.weight_transfer"
FIELDS = {  # a call in our code -> the module in which its keywords are fields
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "SamplingParams": "vllm.sampling_params",
    "WeightTransfer(Init|Update)Request": f"{TRANSFER}.base",
}
PATTERNS = [  # a module, and what its text contains
    ("vllm_ascend.platform", r"device_type: str = .npu.*ASCEND_RT_VISIBLE_DEVICES"),
    ("vllm_ascend.worker.worker", r"self\.device = .*def update_weights\("),
    ("vllm_ascend.worker.model_runner_v1", r"AscendSampler\(\).*self\.model\.compute_logits"),
    ("vllm_ascend.patch.platform", "DYNAMIC_EPLB.*EXPERT_MAP_RECORD"),
]
CALLS = [  # our code, the object or class whose functions it calls, and the module of these
    (ENGINE, r"engine|self\._engine|AsyncLLM", "vllm.v1.engine.async_llm"),
    (WORKER, "WeightTransferEngineFactory", f"{TRANSFER}.factory"),
    ((OURS / "devices.py").read_text(), r"device_module\(.*\)", "torch_npu.npu"),
]


def calls(text: str, owner: str) -> list[ast.Call]:
    """Calls of this function, or of any function of this object (a pattern)."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    names = (ast.unparse(call.func).rpartition(".") for call in found)
    return [c for c, (of, _, n) in zip(found, names, strict=True) if re.fullmatch(owner, of or n)]


def misfit(call: ast.Call, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    args, keywords = function.args, {each.arg for each in call.keywords if each.arg}  # no **
    names = [a.arg for a in (*args.posonlyargs, *args.args) if a.arg not in ("self", "cls")]
    left = {*names[len(call.args) :], *(a.arg for a in args.kwonlyargs)}
    needed = names[len(call.args) : len(names) - len(args.defaults)]
    too_many = len(call.args) > len(names) and not args.vararg
    return too_many or (not args.kwarg and not keywords <= left) or not keywords >= {*needed}


def misfits(folders: list[str]) -> list[str]:
    files = [(file.relative_to(f), file) for f in map(Path, folders) for file in f.rglob("*.py")]
    names = [".".join(name.with_suffix("").parts).removesuffix(".__init__") for name, _ in files]
    texts = {name: file.read_text() for name, (_, file) in zip(names, files, strict=True)}
    wanted = list(PATTERNS)
    for node in (node for text in (ENGINE, WORKER) for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.ImportFrom):
            wanted += [(str(node.module), rf"\b{alias.name}\b") for alias in node.names]
    for name, module in FIELDS.items():
        keywords = [each.arg for call in calls(ENGINE, name) for each in call.keywords]
        wanted += [(module, rf"^    {keyword}: ") for keyword in keywords if keyword]
    packages = {name.split(".")[0] for name in texts}
    assert packages, f"expected folders with Python files, got {folders}"
    missing = ((m, p) for m, p in wanted if not re.search(p, texts.get(m, ""), re.M | re.S))
    found = [f"{m}: {p}" for m, p in missing if m.split(".")[0] in packages]
    for text, owner, module in CALLS:
        chosen = [ast.parse(texts[name]) for name in texts if name.startswith(module)]
        nodes = [node for tree in chosen for node in ast.walk(tree)]
        functions = {
            f.name: f for f in nodes if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for call in calls(text, owner) if nodes else []:
            function = functions.get(ast.unparse(call.func).rpartition(".")[2])
            if function is None or misfit(call, function):
                found.append(f"{module}: {ast.unparse(call)}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(misfits(sys.argv[1:])) or 0)
