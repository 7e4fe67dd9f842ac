"""EasyRL against the sources of vLLM, vllm-ascend and torch_npu: names and signatures, read by ast.

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
from collections.abc import Iterator
from importlib import metadata
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from easyrl import devices
from easyrl.config import ConfigError, load_config
from easyrl.config.devices import parse_device_set
from easyrl.engines.vllm import platforms
from easyrl.runtime.placement import EngineChoice, choose_engine

ROOT = Path(__file__).parent.parent
ENGINE, WORKER = (ROOT / f"easyrl/engines/vllm/{name}.py" for name in ("engine", "worker"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TORCH_NPU = "2.10.0.post4"
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


def fetch(name: str, version: str, folder: Path, *, is_wheel: bool = False) -> Sources:
    """Fetch an archive with pip's configuration, or skip the test."""
    options = ["--no-binary", ":all:"]
    if is_wheel:
        options = ["--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64"]
        options += ["--python-version", "3.11", "--no-deps"]
    command = [sys.executable, "-c", FETCH, name, version, str(folder), *options]
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=300)
    except subprocess.SubprocessError:
        pytest.skip(f"{name} {version} could not be fetched from a package index")
    (archive,) = folder.glob(f"{name.replace('-', '[-_]')}-{version}*")
    return Sources(archive)


class Sources:
    """The Python files of an archive by their path."""

    def __init__(self, archive: Path) -> None:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                names = [name for name in wheel.namelist() if name.endswith(".py")]
                self.texts = {name: wheel.read(name).decode() for name in names}
            return
        self.texts = {}
        with tarfile.open(archive, "r|gz") as members:
            for member in members:
                path, content = member.name.partition("/")[2], members.extractfile(member)
                if content is not None and path.endswith((".py", "PKG-INFO")):
                    self.texts[path] = content.read().decode()

    def tree(self, module: str) -> ast.Module:
        """Parse a module given by its dotted name; empty if there is none."""
        path = module.replace(".", "/")
        text = self.texts.get(f"{path}.py") or self.texts.get(f"{path}/__init__.py") or ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes
            return ast.parse(text)

    def members(self, module: str, name: str) -> dict[str, ast.AST]:
        """Methods and fields of a class and of its bases in the same module."""
        found: dict[str, ast.AST] = {}
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                for base in node.bases:
                    found |= self.members(module, ast.unparse(base).partition("[")[0])
                for statement in node.body:
                    found |= dict.fromkeys(_names(statement), statement)
                for inner in ast.walk(found.get("__init__", ast.Pass())):
                    if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                        found[inner.attr] = inner
        return found


def _names(statement: ast.AST) -> list[str]:
    """Names that a statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, ast.AnnAssign):
        return [ast.unparse(statement.target)]
    return [ast.unparse(t) for t in statement.targets] if isinstance(statement, ast.Assign) else []


def _misfit(node: ast.AST | None, num_positional: int, keywords: tuple[str, ...]) -> str | None:
    """Why a function cannot be called this way."""
    if node is None:
        return "missing"
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg != "self"]
    required = names[: len(names) - len(node.args.defaults)]
    accepted = {*names, *(a.arg for a in node.args.kwonlyargs)}
    is_open = node.args.kwarg is not None or set(keywords) <= accepted
    given = {*names[:num_positional], *keywords}
    is_fit = num_positional <= len(names) and is_open and set(required) <= given
    return None if is_fit else f"has parameters ({', '.join(sorted(accepted))})"


def _calls(tree: ast.AST, receivers: tuple[str, ...]) -> set[tuple[str, int, tuple[str, ...]]]:
    """Method, number of positional arguments and keywords of each call on these receivers."""
    return {
        (node.func.attr, len(node.args), tuple(str(keyword.arg) for keyword in node.keywords))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if ast.unparse(node.func.value) in receivers
    }


# -- vLLM -----------------------------------------------------------------------------------------

ENGINE_CALLS = _calls(ast.parse(ENGINE.read_text()), ("self._engine", "engine"))
names = [n for n in signature(platforms.engine_arguments).parameters if n not in ("kind", "more")]
ARGUMENTS = set(platforms.engine_arguments(devices.ASCEND, **dict.fromkeys(names)))
ARGUMENTS |= {"model", "dtype", "gpu_memory_utilization", "worker_extension_cls", "logprobs_mode"}
ARGUMENTS |= {"trust_remote_code", "skip_tokenizer_init", "kv_cache_memory_bytes"}
SAMPLING = {"temperature", "logprobs", "stop_token_ids", "stop", "detokenize", "output_kind"}
SAMPLING |= {"top_k", "top_p", "n", "max_tokens", "seed"}
TRANSFER = "vllm.distributed.weight_transfer.base"
OVERRIDES = {"init_transfer_engine", "start_weight_update", "receive_weights", "shutdown"}
OVERRIDES |= {"finish_weight_update", "model", "model_config", "vllm_config", "device"}


def vllm_problems(vllm: Sources) -> Iterator[str]:
    """What our code uses of vLLM and these sources do not have."""
    for tree in (ast.parse(ENGINE.read_text()), ast.parse(WORKER.read_text())):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                there = ast.unparse(vllm.tree(node.module or ""))
                names = [alias.name for alias in node.names]
                yield from (
                    f"{node.module}.{n}" for n in names if not re.search(rf"\b{n}\b", there)
                )
    methods = vllm.members("vllm.v1.engine.async_llm", "AsyncLLM")
    for name, num_positional, keywords in ENGINE_CALLS:
        if problem := _misfit(methods.get(name), num_positional, keywords):
            yield f"AsyncLLM.{name}: {problem}"
    for module, class_name, used in (
        ("vllm.engine.arg_utils", "AsyncEngineArgs", ARGUMENTS),
        ("vllm.sampling_params", "SamplingParams", SAMPLING),
        (TRANSFER, "WeightTransferEngine", OVERRIDES),
        ("vllm.v1.executor.uniproc_executor", "UniProcExecutor", {"_init_executor"}),
        ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor", {"_init_executor"}),
    ):
        yield from (f"{class_name}.{n}" for n in used - set(vllm.members(module, class_name)))
    factory = vllm.members(TRANSFER[:-4] + "factory", "WeightTransferEngineFactory")
    if problem := _misfit(factory.get("register_engine"), 3, ()):  # with cls
        yield f"register_engine: {problem}"


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.28.0", "0.30.0", "0.32.0", "0.33.0"])
def test_vllm_has_what_our_code_uses(tmp_path: Path, version: str) -> None:
    vllm = fetch("vllm", version, tmp_path)
    assert list(vllm_problems(vllm)) == []


# -- vllm-ascend ----------------------------------------------------------------------------------

ASCEND_WORKER = "vllm_ascend.worker.worker"
RUNNER = "vllm_ascend.worker.model_runner_v1"
ASCEND_CONTAINS = [  # module, class (or ""), method (or ""), text
    ("setup", "", "", "'vllm.platform_plugins': ['ascend = vllm_ascend:register']"),
    ("vllm_ascend", "", "", "return 'vllm_ascend.platform.NPUPlatform'"),
    ("vllm_ascend.platform", "NPUPlatform", "device_type", "'npu'"),
    ("vllm_ascend.platform", "NPUPlatform", "device_control_env_var", "ASCEND_RT_VISIBLE_DEVICES"),
    ("vllm_ascend.platform", "NPUPlatform", "import_kernels", "def"),
    (ASCEND_WORKER, "NPUWorker", "init_device", "self.device = "),
    (ASCEND_WORKER, "NPUWorker", "load_model", "WeightTransferEngineFactory.create_engine("),
    (ASCEND_WORKER, "NPUWorker", "load_model", "self.model_runner.get_model()"),
    (ASCEND_WORKER, "NPUWorker", "_check_nz_disabled", "weight_nz_mode"),
    (RUNNER, "NPUModelRunner", "get_model", "self.model"),
    (RUNNER, "NPUModelRunner", "__init__", "self.sampler = AscendSampler()"),
    (RUNNER, "NPUModelRunner", "", "self.model.compute_logits("),
    ("vllm_ascend.sample.sampler", "AscendSampler", "__init__", "self.topk_topp_sampler = "),
    ("vllm_ascend.sample.sampler", "AscendTopKTopPSampler", "forward_native", "logprobs_mode"),
    ("vllm_ascend.ascend_config", "AscendConfig", "weight_nz_mode", "int"),
    ("vllm_ascend.ascend_config", "AscendConfig", "enable_cpu_binding", "bool"),
    ("vllm_ascend.patch.platform", "", "", "DYNAMIC_EPLB"),
    ("vllm_ascend.patch.platform", "", "", "EXPERT_MAP_RECORD"),
]


def ascend_problems(ascend: Sources, vllm: Sources) -> Iterator[str]:
    """What our code uses of vllm-ascend and these sources do not have."""
    for module, class_name, method, text in ASCEND_CONTAINS:
        members = ascend.members(module, class_name) if class_name else {"": ascend.tree(module)}
        nodes = [node for name, node in members.items() if method in ("", name)]
        if not any(text in ast.unparse(node) for node in nodes):
            yield f"{module} {class_name}.{method}: no {text}"
    methods = ascend.members(ASCEND_WORKER, "NPUWorker")
    used = {name for name, *_ in ENGINE_CALLS} - {"collective_rpc"}
    engine = vllm.members("vllm.v1.engine.async_llm", "AsyncLLM")
    for node in (inner for name in used for inner in ast.walk(engine[name])):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.collective_rpc":
            kwargs = [k.value for k in node.keywords if k.arg == "kwargs"]
            keys = [ast.literal_eval(k) for d in kwargs for k in getattr(d, "keys", ()) if k]
            method = str(ast.literal_eval(node.args[0]))
            if problem := _misfit(methods.get(method), 0, tuple(keys)):
                yield f"NPUWorker.{method}: {problem}"
    yield from (f"NPUWorker.{name}: is ours" for name in methods if name.startswith("easyrl_"))


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.30.0rc2", "0.28.0rc1", "0.29.0rc1"])
def test_vllm_ascend_has_what_our_code_uses(tmp_path: Path, version: str) -> None:
    ascend = fetch("vllm-ascend", version, tmp_path)
    vllm = fetch("vllm", Version(version).base_version, tmp_path)
    assert list(ascend_problems(ascend, vllm)) == []
    lines = re.findall(r"^Requires-Dist: (.*==.*)$", ascend.texts["PKG-INFO"], re.MULTILINE)
    pinned = list(map(Requirement, lines))
    for ours in map(Requirement, PROJECT["dependencies"]):
        versions = {s.version for p in pinned if p.name == ours.name for s in p.specifier}
        assert all(map(ours.specifier.contains, versions)), (ours, versions)


# -- torch_npu ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("version", [TORCH_NPU, "2.13.0"])
def test_torch_npu_has_what_our_code_uses(tmp_path: Path, version: str) -> None:
    wheel = fetch("torch-npu", version, tmp_path, is_wheel=True)
    ours = [ast.parse(path.read_text()) for path in (ROOT / "easyrl").rglob("*.py")]
    everything = "\n".join(wheel.texts.values())
    functions = {
        node.name: node
        for path, text in wheel.texts.items()
        if path.startswith("torch_npu/npu/")
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }
    nodes = [node for tree in ours for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [node for node in nodes if ast.unparse(node.func).endswith("device_module")]
    calls = {call for tree in ours for call in _calls(tree, tuple(map(ast.unparse, made)))}
    assert {"is_available", "device_count", "mem_get_info"} <= {name for name, *_ in calls}
    for name, num_positional, keywords in calls:
        if name in functions:
            assert _misfit(functions[name], num_positional, keywords) is None, name
        else:
            assert re.search(rf"\b{name}\b", wheel.texts["torch_npu/npu/__init__.py"]), name
    names = "ProcessGroupHCCL.Options( _timeout _new_shared_npu _share_npu_ total_memory"
    assert all(name in everything for name in (*names.split(), "ASCEND_RT_VISIBLE_DEVICES"))
    _, _, text = everything.partition('"npu_fused_infer_attention_score",')
    query = re.search(r"^query: (.*)$", text, re.MULTILINE)
    assert query and "bfloat16" in query[1] and "float32" not in query[1]  # ASCEND_DTYPE


# -- what is installed ----------------------------------------------------------------------------


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Make packages look installed, each with the requirements of its real release."""
    find = metadata.distribution
    installed: dict[str, str | None] = {"vllm": "0.30.0+empty", "vllm-ascend": "0.30.0rc2"}
    installed |= {"torch": "2.10.0+cpu", "torch-npu": TORCH_NPU}
    requires = {
        "vllm": ["torch==2.13.0"],  # vLLM's wheel for GPUs: irrelevant on NPUs
        "vllm-ascend": ["torch==2.10.0", f"torch-npu=={TORCH_NPU}"],
    }

    def distribution(name: str) -> object:
        if name not in installed:
            return find(name)
        if (version := installed[name]) is None:
            raise metadata.PackageNotFoundError(name)
        return SimpleNamespace(name=name, version=version, requires=requires.get(name))

    monkeypatch.setattr(metadata, "distribution", distribution)
    return lambda **versions: installed.update(
        {name.replace("_", "-"): version for name, version in versions.items()}
    )


def choose(*words: str) -> EngineChoice:
    config = load_config(None, {}, ("model.dtype=bfloat16", *words))
    return choose_engine(config, parse_device_set("0-3"), accelerator=devices.ASCEND)


@pytest.mark.parametrize(
    ("vllm", "ascend"),
    [("0.28.0+empty", "0.28.0rc1"), ("0.30.0", "0.30.0rc1"), ("0.30.0+empty", "0.30.0.post1")],
)
def test_vllm_is_used_where_the_releases_match(install, vllm: str, ascend: str) -> None:
    install(vllm=vllm, vllm_ascend=ascend)
    assert choose().name == "vllm"
    assert choose("rollout.tensor_parallel_size=2").tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("versions", "words", "expected"),
    [
        ({"vllm": None}, (), "vLLM is not installed"),
        ({"vllm_ascend": None}, (), "expected vllm-ascend"),
        ({"vllm_ascend": "0.26.0rc1"}, (), "got 0.26.0rc1"),
        ({"vllm_ascend": "0.31.0rc1"}, (), "got 0.31.0rc1"),
        ({"vllm_ascend": "0.29.0rc1"}, (), "expected vLLM 0.29.0, got 0.30.0+empty"),
        ({"torch": "2.11.0"}, (), "expected torch ==2.10.0, got 2.11.0"),
        ({"torch_npu": "2.11.0"}, (), "expected torch-npu ==2.10.0.post4, got 2.11.0"),
        ({"torch_npu": None}, (), "expected torch-npu ==2.10.0.post4, got none"),
        ({}, ("model.dtype=float32",), "model.dtype=bfloat16"),
        ({}, ("runtime.deterministic=true",), "runtime.deterministic"),
    ],
)
def test_otherwise_the_embedded_engine_is_used(
    install, versions: dict[str, str | None], words: tuple[str, ...], expected: str
) -> None:
    install(**versions)
    assert choose(*words).name == "embedded" and expected in choose(*words).reason
    with pytest.raises(ConfigError, match=r"^rollout\.engine: ") as refused:
        choose("rollout.engine=vllm", *words)
    assert expected in str(refused.value)
    assert words or platforms.INSTALL_ASCEND in str(refused.value)


def test_bounds_are_those_of_the_package() -> None:
    bounds = {r.name: r.specifier for line in EXTRAS.values() for r in map(Requirement, line)}
    assert bounds["vllm"] == platforms.VLLM and bounds["vllm-ascend"] == platforms.VLLM_ASCEND
    assert bounds["torch-npu"] == SpecifierSet(">=2.10,<2.14")
