"""EasyRL against the sources of vLLM, vllm-ascend and torch_npu: names and keywords that it uses.

Nothing of the packages is built, installed or imported, so that no device is needed. The long tests
fetch the sources from the package index, and are skipped where it does not have them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from easyrl.engines.vllm import platforms

ROOT = Path(__file__).parent.parent
ENGINE, WORKER = (ROOT / f"easyrl/engines/vllm/{name}.py" for name in ("engine", "worker"))
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


def calls(*receivers: str) -> dict[str, set[str]]:
    """Functions that the engine calls on (or as) one of these, with their keywords."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(ENGINE.read_text())):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if (owner or name) in receivers:
                keywords = {keyword.arg for keyword in node.keywords if keyword.arg}
                found[name] = found.get(name, set()) | keywords
    return found


def methods(module: str, used: dict[str, set[str]]) -> Iterator[Wanted]:
    for name, keywords in used.items():
        yield module, rf"def {name}\("
        for keyword in keywords:
            yield module, rf"def {name}\((?:(?!\bdef\b).)*\b{keyword}\b"


def fields(module: str, names: Iterable[str]) -> list[Wanted]:
    return [(module, rf"^    {name}: ") for name in names]


# -- vLLM -----------------------------------------------------------------------------------------

TRANSFER = "vllm.distributed.weight_transfer.base"
SAMPLING = "temperature logprobs stop_token_ids stop detokenize output_kind top_k top_p"


def used_of_vllm() -> Iterator[Wanted]:
    for file in (ENGINE, WORKER):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                yield from ((node.module or "", rf"\b{alias.name}\b") for alias in node.names)
    yield from methods("vllm.v1.engine.async_llm", calls("engine", "self._engine"))
    arguments = calls("AsyncEngineArgs")["AsyncEngineArgs"]
    for kind in ("cpu", "npu"):
        arguments |= platforms.device_arguments(kind, 1).keys()
    yield from fields("vllm.engine.arg_utils", arguments)
    keywords = calls("SamplingParams")["SamplingParams"]
    yield from fields("vllm.sampling_params", keywords | set(SAMPLING.split()))
    transfer = ast.parse(WORKER.read_text())
    (ours,) = (n for n in transfer.body if isinstance(n, ast.ClassDef) and n.name.endswith("fer"))
    overrides = {n.name for n in ours.body if isinstance(n, ast.FunctionDef)} - {"__init__", "load"}
    yield from methods(TRANSFER, {name: set() for name in overrides})
    yield from ((TRANSFER, rf"self\.{n} = ") for n in ("model", "model_config", "vllm_config"))
    for executor in ("uniproc", "multiproc"):
        yield f"vllm.v1.executor.{executor}_executor", r"def _init_executor\("
    yield TRANSFER.replace("base", "factory"), r"def register_engine\("


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.28.0", "0.30.0", "0.32.0", "0.33.0"])
def test_vllm_has_what_our_code_uses(tmp_path: Path, version: str) -> None:
    assert missing(fetch("vllm", version, tmp_path), used_of_vllm()) == []


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
    *((ASCEND_WORKER, rf"def {name}_weight") for name in ("start", "update", "finish")),
    (ASCEND_WORKER, r"def init_weight_transfer_engine\("),
]


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.30.0rc2", "0.28.0rc1", "0.29.0rc1"])
def test_vllm_ascend_has_what_our_code_uses(tmp_path: Path, version: str) -> None:
    texts = fetch("vllm-ascend", version, tmp_path)
    assert missing(texts, USED_OF_ASCEND) == []
    assert "def easyrl_" not in texts[ASCEND_WORKER]
    assert missing(fetch("vllm", Version(version).base_version, tmp_path), used_of_vllm()) == []


@pytest.mark.long
@pytest.mark.parametrize("version", ["2.10.0.post4", "2.13.0"])
def test_torch_npu_has_what_our_code_uses(tmp_path: Path, version: str) -> None:
    texts = fetch("torch-npu", version, tmp_path, WHEEL)
    ours = "".join(path.read_text() for path in (ROOT / "easyrl").rglob("*.py"))
    functions = re.findall(r"device_module\([^)]*\)\.(\w+)\(", ours)
    assert {"is_available", "device_count", "set_rng_state"} <= {*functions}
    assert missing(texts, [("torch_npu.npu", rf"\b{name}\b") for name in functions]) == []
    everything = "\n".join(texts.values())
    names = "ProcessGroupHCCL.Options( _timeout _new_shared_npu _share_npu_ total_memory"
    assert all(name in everything for name in (*names.split(), "ASCEND_RT_VISIBLE_DEVICES"))
    _, _, text = everything.partition('"npu_fused_infer_attention_score",')
    query = re.search(r"^query: (.*)$", text, re.MULTILINE)
    assert query and "bfloat16" in query[1] and "float32" not in query[1]  # `unsupported_reason`


def test_bounds_are_those_of_the_package() -> None:
    bounds = {r.name: r.specifier for line in EXTRAS.values() for r in map(Requirement, line)}
    assert bounds["vllm"] == platforms.VLLM and bounds["vllm-ascend"] == platforms.VLLM_ASCEND
