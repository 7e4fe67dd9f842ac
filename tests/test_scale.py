"""Which engines a run may add and remove while it is live, and its spare devices."""

import signal
from dataclasses import replace

import pytest

from easyrl import devices
from easyrl.config import ConfigError, load_config
from easyrl.config.devices import parse_device_set
from easyrl.runtime.control import request
from easyrl.runtime.placement import EngineChoice, check_scale, first_engines, resolve_placement
from runs import SMALL, lines_of, start, succeed, summary_of, wait_for_line, wait_until

ON_CPU = ("devices.infer=cpu", "devices.train=cpu")
EIGHT = ("devices.infer=0-3", "devices.train=6-7", "devices.max_rollout_workers=5")
OTHER_FEATURES = (
    *("--train-devices", "cpu:2", "model.lora.rank=4", "algorithm.beta=0.04"),
    *("algorithm.dynamic_sampling=true", "train.updates_per_iteration=2"),
)


@pytest.fixture(autouse=True)
def _eight_gpus(monkeypatch):
    monkeypatch.setattr(devices, "accelerator", lambda *, is_asked: ("cuda", 8))


def place(*words):
    return resolve_placement(load_config(words=words))


def scale(wanted, *words, size=1, starting=None):
    """Scale a run with these settings; its engines span `size` devices each."""
    placement = place(*(words or EIGHT))
    placement = replace(placement, engine=EngineChoice("vllm", "", size))
    changing = () if starting is None else (starting,)
    check_scale(
        load_config(words=words), placement, placement.infer, parse_device_set(wanted), changing
    )


@pytest.mark.parametrize(("wanted", "named", "options"), [
    ("5-6", "unlike 6", {}),  # it trains
    ("0-5", "devices.max_rollout_workers", {}),
    ("0-3,8", "cuda devices 0-7", {}),
    ("cpu:2", "kind", {}),
    ("0-4", "starting or leaving.*rollout-4", {"starting": "rollout-4"}),  # one change at a time
    ("0-1,3-4", "unlike 3", {"size": 2}),  # an engine keeps its devices
])  # fmt: skip
def test_what_a_run_cannot_be_scaled_to_is_named(wanted, named, options):
    with pytest.raises(ConfigError, match=named):
        scale(wanted, **options)


def test_a_deterministic_run_is_not_scaled_and_large_engines_are():
    with pytest.raises(ConfigError, match=r"runtime\.deterministic"):
        scale("cpu:2", *ON_CPU, "runtime.deterministic=true")
    for wanted in ("0", "0-4", "1,3,5"):  # any free devices
        scale(wanted)
    scale("0-1,4-5", size=2)


def test_spare_devices_are_used_last_and_count_as_workers_a_run_may_have():
    placement = place("devices.spare=6-7")
    assert (str(placement.infer), str(placement.train)) == ("0-4", "5")
    assert str(first_engines(6, placement)) == "0-4,6"
    assert str(first_engines(2, place(*ON_CPU, "devices.spare=cpu:2"))) == "cpu:2"
    both = ("devices.infer=0-3", "devices.train=7")
    every = {(): 4, ("devices.spare=5-6",): 6, ("devices.max_rollout_workers=5",): 5}
    for words, most in every.items():
        assert place(*both, *words).max_rollout_workers == most
    assert place(*ON_CPU, "devices.spare=cpu:2").max_rollout_workers == 3


@pytest.mark.parametrize(("words", "key"), [
    (("devices.infer=0-3", "devices.train=4", "devices.spare=3-5"), "devices.spare"),
    (("devices.infer=0-3", "devices.train=4", "devices.spare=7-8"), "devices.spare"),
    (("devices.infer=0-3", "devices.max_rollout_workers=3"), "devices.max_rollout_workers"),
    (("runtime.autoscale=true",), "runtime.autoscale"),
])  # fmt: skip
def test_spare_devices_that_cannot_be_used_are_named(words, key):
    with pytest.raises(ConfigError, match=f"^{key}.*: expected .*, got"):
        place(*words)


@pytest.mark.alone
@pytest.mark.parametrize(
    "words",
    [(), pytest.param(OTHER_FEATURES, marks=pytest.mark.long)],
    ids=["plain", "other features"],
)
def test_engines_are_added_to_a_live_run_and_removed_from_it(tmp_path, words):
    run = tmp_path / "run"
    on_cpu = ("--infer-devices", "cpu", "--train-devices", "cpu", "devices.max_rollout_workers=2")
    process = start("--output", str(run), "--iterations", "100000", *SMALL, *on_cpu, *words)

    def status():
        reply = request(run, {"command": "status"})
        rollout = (each for each in reply["workers"] if each["kind"] == "rollout")
        return {each["name"]: each["state"] for each in rollout}, reply["iteration"]

    def wait_for(is_so):
        wait_until(lambda: is_so(*status()), process, seconds=600)
        return status()[1]

    def scale_to(wanted):
        request(run, {"command": "scale", "infer_devices": wanted})

    try:
        wait_for_line(process, "iteration 2/", timeout=600)
        with pytest.raises(ValueError, match="max_rollout_workers"):
            scale_to("cpu:3")
        scale_to("cpu:2")
        with pytest.raises(ValueError, match=r"starting or leaving.*rollout-1"):
            scale_to("cpu")
        wait_for(lambda states, _: states.get("rollout-1") == "working")
        scale_to("cpu")
        num_done = wait_for(lambda states, _: states.keys() == {"rollout-0"})
        wait_for(lambda _, iteration: iteration > num_done + 1)
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert err == "" and process.returncode == 128 + signal.SIGTERM
    lines = lines_of(run / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
    if words:
        num_iterations = len(lines) + 2
        out = succeed("--resume", str(run), "--iterations", str(num_iterations))
        assert "rollout-0: cpu" in out and "rollout-1" not in out  # those of devices.infer
        assert summary_of(run)["groups_trained"] == 4 * num_iterations
