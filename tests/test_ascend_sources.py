"""EasyRL against the sources of vLLM, vllm-ascend and torch_npu: names and signatures.

Nothing of the packages is built, installed or imported, so that no device is needed. The long tests
fetch the sources from the package index, and are skipped where it does not have them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from easyrl.engines.vllm import platforms

ROOT = Path(__file__).parent.parent
ENGINE, WORKER = (
    (ROOT / f"easyrl/engines/vllm/{name}.py").read_text() for name in ("engine", "worker")
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FETCH = """
import sys
from pathlib import Path
from pip._internal.commands import create_command
from pip._vendor.packaging.specifiers import SpecifierSet

name, version, folder, *options = sys.argv[1:]
command = create_command("download")
with command.main_context():
    options, _ = command.parse_args(["--pre", "--no-input", "--retries", "0", *options, name])
    session = command.get_default_session(options)
    finder = command._build_package_finder(options, session, ignore_requires_python=True)
    link = finder.find_best_candidate(name, SpecifierSet("==" + version)).best_candidate.link
    answer = session.get(link.url_without_fragment)
    answer.raise_for_status()
    (Path(folder) / link.filename).write_bytes(answer.content)
"""
"""`pip download` would run code of a source distribution to learn its dependencies."""
SOURCE = ("--no-binary", ":all:")
WHEEL = ("--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64", "--no-deps")
WHEEL += ("--python-version", "3.11")


def fetch(name: str, version: str, folder: Path, options: Iterable[str] = SOURCE) -> dict[str, str]:
    """Fetch an archive with pip's configuration, or skip the test. Returns the text of each Python
    file by its module's name."""
    command = [sys.executable, "-c", FETCH, name, version, str(folder), *options]
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=300)
    except subprocess.SubprocessError:
        pytest.skip(f"{name} {version} could not be fetched from a package index")
    (archive,) = folder.glob(f"{name.replace('-', '[-_]')}-{version}*")
    texts = {}
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            texts = {path: wheel.read(path) for path in wheel.namelist() if path.endswith(".py")}
    else:
        with tarfile.open(archive, "r|gz") as members:
            for member in members:
                content = members.extractfile(member) if member.name.endswith(".py") else None
                if content is not None:
                    texts[member.name.partition("/")[2]] = content.read()
    module = {p: p.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for p in texts}
    return {module[path]: text.decode() for path, text in texts.items()}


Wanted = tuple[str, str]
"""A module, and a pattern that its text contains."""


def missing(texts: dict[str, str], wanted: Iterable[Wanted]) -> list[Wanted]:
    return [
        (module, pattern)
        for module, pattern in wanted
        if not re.search(pattern, texts.get(module, ""), re.MULTILINE | re.DOTALL)
    ]


Function = ast.FunctionDef | ast.AsyncFunctionDef


class Call(NamedTuple):
    name: str
    num_positional: int
    keywords: frozenset[str]


def calls(text: str, receivers: str) -> list[Call]:
    """Calls of these functions, or of any function of these objects or classes (a pattern)."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if re.fullmatch(receivers, owner or name):
                keywords = frozenset(keyword.arg for keyword in node.keywords if keyword.arg)
                found.append(Call(name, len(node.args), keywords))
    assert found, receivers
    return found


def functions(text: str, class_name: str | None = None) -> dict[str, Function]:
    """Functions of a module, or methods of one of its classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes
        body = ast.parse(text).body
    if class_name is not None:
        classes = [n for n in body if isinstance(n, ast.ClassDef) and n.name == class_name]
        body = [node for each in classes for node in each.body]
    return {node.name: node for node in body if isinstance(node, Function)}


def misfits(functions: dict[str, Function], calls: Iterable[Call]) -> list[str]:
    """Calls that their function does not accept: number of positional arguments, keywords, and
    whether all required parameters are given."""
    found = []
    for call in calls:
        if (function := functions.get(call.name)) is None:
            found.append(f"{call.name}: missing")
            continue
        args = function.args
        names = [a.arg for a in (*args.posonlyargs, *args.args) if a.arg not in ("self", "cls")]
        only = {
            a.arg: default for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        }
        required = {*names[: len(names) - len(args.defaults)]}
        required |= {name for name, default in only.items() if default is None}
        too_many = call.num_positional > len(names) and not args.vararg
        unknown = set() if args.kwarg else call.keywords - {*names[call.num_positional :], *only}
        if too_many or unknown or required - {*names[: call.num_positional]} - call.keywords:
            found.append(f"{call}: expected ({ast.unparse(args)})")
    return found


def fields(module: str, names: Iterable[str]) -> list[Wanted]:
    return [(module, rf"^    {name}: ") for name in names]


# -- vLLM -----------------------------------------------------------------------------------------

ASYNC_LLM = "vllm.v1.engine.async_llm"
ENGINE_CALLS = calls(ENGINE, r"engine|self\._engine|AsyncLLM")
TRANSFER = "vllm.distributed.weight_transfer.base"
SAMPLING = "temperature logprobs stop_token_ids stop detokenize output_kind top_k top_p"


def used_of_vllm() -> Iterator[Wanted]:
    for text in (ENGINE, WORKER):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                yield from ((node.module or "", rf"\b{alias.name}\b") for alias in node.names)
    (arguments,), (parameters,) = calls(ENGINE, "AsyncEngineArgs"), calls(ENGINE, "SamplingParams")
    yield from fields("vllm.engine.arg_utils", arguments.keywords)
    for kind in ("cpu", "npu"):
        yield from fields("vllm.engine.arg_utils", platforms.device_arguments(kind, 1))
    yield from fields("vllm.sampling_params", parameters.keywords | {*SAMPLING.split()})
    for request in calls(ENGINE, "WeightTransfer(Init|Update)Request"):
        yield from fields(TRANSFER, request.keywords)
    overrides = functions(WORKER, "BucketTransfer").keys() - {"__init__", "load"}
    yield from ((TRANSFER, rf"def {name}\(") for name in overrides)
    yield from ((TRANSFER, rf"self\.{n} = ") for n in ("model", "model_config", "vllm_config"))
    for executor in ("uniproc", "multiproc"):
        yield f"vllm.v1.executor.{executor}_executor", r"def _init_executor\("
    yield ASYNC_LLM, r"def errored\("


def misfits_of_vllm(texts: dict[str, str]) -> list[str]:
    factory = "WeightTransferEngineFactory"
    registry = functions(texts[TRANSFER.replace("base", "factory")], factory)
    found = misfits(functions(texts[ASYNC_LLM], "AsyncLLM"), ENGINE_CALLS)
    return found + misfits(registry, calls(WORKER, factory))


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.28.0", "0.30.0", "0.32.0", "0.33.0"])
def test_vllm_has_what_our_code_uses(tmp_path: Path, version: str) -> None:
    vllm = fetch("vllm", version, tmp_path)
    assert missing(vllm, used_of_vllm()) == [] and misfits_of_vllm(vllm) == []


# -- vllm-ascend and torch_npu --------------------------------------------------------------------

ASCEND_WORKER = "vllm_ascend.worker.worker"
RUNNER, SAMPLER = "vllm_ascend.worker.model_runner_v1", "vllm_ascend.sample.sampler"
USED_OF_ASCEND = [
    ("setup", r"vllm\.platform_plugins.*ascend = vllm_ascend:register"),
    ("vllm_ascend", r"vllm_ascend\.platform\.NPUPlatform"),
    ("vllm_ascend.platform", r"device_type: str = .npu.*ASCEND_RT_VISIBLE_DEVICES.*import_kernels"),
    (ASCEND_WORKER, r"class NPUWorker.*self\.device = .*WeightTransferEngineFactory.create_engine"),
    (ASCEND_WORKER, r"weight_nz_mode.*self\.model_runner\.get_model\(\)"),
    (RUNNER, r"self\.sampler = AscendSampler\(\).*self\.model\.compute_logits\("),
    (SAMPLER, r"self\.topk_topp_sampler = .*AscendTopKTopPSampler.*logprobs_mode"),
    ("vllm_ascend.ascend_config", "weight_nz_mode.*enable_cpu_binding"),
    ("vllm_ascend.patch.platform", "DYNAMIC_EPLB.*EXPERT_MAP_RECORD"),
]


def calls_of_workers(vllm: dict[str, str]) -> Iterator[Call]:
    """Methods that AsyncLLM calls by name in each worker, in those of its methods that we call."""
    methods = functions(vllm[ASYNC_LLM], "AsyncLLM")
    for name in {call.name for call in ENGINE_CALLS}:
        for node in ast.walk(methods[name]):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.collective_rpc":
                kwargs = [k.value for k in node.keywords if k.arg == "kwargs"]
                keys = [ast.literal_eval(key) for d in kwargs for key in getattr(d, "keys", ())]
                yield Call(ast.literal_eval(node.args[0]), 0, frozenset(keys))


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.30.0rc2", "0.28.0rc1", "0.29.0rc1"])
def test_vllm_ascend_has_what_our_code_uses(tmp_path: Path, version: str) -> None:
    ascend = fetch("vllm-ascend", version, tmp_path)
    vllm = fetch("vllm", Version(version).base_version, tmp_path)
    assert missing(ascend, USED_OF_ASCEND) == []
    assert missing(vllm, used_of_vllm()) == [] and misfits_of_vllm(vllm) == []
    assert "def easyrl_" not in ascend[ASCEND_WORKER]
    called = list(calls_of_workers(vllm))
    assert {"init_weight_transfer_engine", "update_weights"} <= {call.name for call in called}
    assert misfits(functions(ascend[ASCEND_WORKER], "NPUWorker"), called) == []


@pytest.mark.long
@pytest.mark.parametrize("version", ["2.10.0.post4", "2.13.0"])
def test_torch_npu_has_what_our_code_uses(tmp_path: Path, version: str) -> None:
    texts = fetch("torch-npu", version, tmp_path, WHEEL)
    called = calls((ROOT / "easyrl/devices.py").read_text(), r"device_module\(.*\)")
    assert {"is_available", "device_count"} <= {call.name for call in called}
    theirs = [functions(text) for name, text in texts.items() if name.startswith("torch_npu.npu")]
    defined = {name: function for each in theirs for name, function in each.items()}
    assert misfits(defined, called) == []
    assert missing(texts, [("torch_npu.npu", rf"\b{call.name}\b") for call in called]) == []
    everything = "\n".join(texts.values())
    names = "ProcessGroupHCCL.Options( _timeout _new_shared_npu _share_npu_ total_memory"
    names += " abort_hccl_comm"
    assert all(name in everything for name in (*names.split(), "ASCEND_RT_VISIBLE_DEVICES"))
    _, _, text = everything.partition('"npu_fused_infer_attention_score",')
    query = re.search(r"^query: (.*)$", text, re.MULTILINE)
    assert query and "bfloat16" in query[1] and "float32" not in query[1]  # `unsupported_reason`


def test_bounds_are_those_of_the_package() -> None:
    bounds = {r.name: r.specifier for line in EXTRAS.values() for r in map(Requirement, line)}
    assert bounds["vllm"] == platforms.VLLM and bounds["vllm-ascend"] == platforms.VLLM_ASCEND
