"""`easyrl doctor --test` on this machine's CPU, and how a run on accelerators uses its result."""

import math
import os
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from easyrl import devices
from easyrl.config import load_config
from easyrl.config.devices import DeviceSet
from easyrl.runtime import run as run_module
from easyrl.runtime import self_test
from easyrl.runtime.placement import resolve_placement
from easyrl.runtime.resolve import resolve
from easyrl.runtime.self_test import before_run
from easyrl.runtime.self_test_part import Result, errors
from own_processes import WAIT_SECONDS
from runs import customized, start_process

ON_CPU = {"devices.infer": "cpu", "devices.train": "cpu"}
WRONG_ATTENTION = """
import sys
if "easyrl.runtime.self_test_part" in sys.orig_argv:
    from easyrl.model.mixers.packed_row import PackedRow
    attend = PackedRow.attend
    def attend_wrongly(self, query, key, value, settings, sinks):
        if self._kernels._may_use_flex:
            value = value.clone()
            value[1] = 0
        return attend(self, query, key, value, settings, sinks)
    PackedRow.attend = attend_wrongly
"""
"""One of a prompt's tokens has no value, as by a kernel with a wrong mask."""


@pytest.mark.long
def test_wrong_kernel_is_named_with_the_setting_that_passes(tmp_path):
    words = [sys.executable, "-m", "easyrl", "doctor", "--test"]
    process = start_process(words, customized(tmp_path, WRONG_ATTENTION))
    out, err = process.communicate(timeout=WAIT_SECONDS)
    lines = out.splitlines()
    status = {line.split()[1]: line.split()[0] for line in lines if line[0] != " "}
    found = [status[part] for part in ("weights", "attention", "embedded")]
    assert found == ["ok", "failed", "ok"], out + err
    failed = next(number for number, line in enumerate(lines) if line.startswith("failed"))
    assert "model.attention=without_flex" in lines[failed + 1]
    assert process.returncode == 1 and "runs can start" in out


def test_a_gradient_that_is_not_a_number_is_an_error():
    logprobs = torch.zeros(2)
    expected = Result(logprobs, {"first": torch.ones(2), "last": torch.ones(2)})
    wrong = Result(logprobs, {"first": torch.ones(2), "last": torch.full((2,), math.nan)})
    assert math.isnan(errors(wrong, expected).gradient)
    assert errors(expected, expected) == (0.0, 0.0)


def test_crash_and_hang_are_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(self_test, "PART_SECONDS", 0.5)
    for code, error in {
        "import os; os.kill(os.getpid(), 9)": "killed by signal 9",
        "import time; time.sleep(60)": "no answer in 0.5 s",
    }.items():
        assert self_test._error(["weights", "cpu", "cpu"], customized(tmp_path, code)) == error


class Machine:
    """Two GPUs on which parts fail unless they run with a safe setting."""

    def __init__(self, folder, monkeypatch):
        self.errors = {}  # the part that fails: the setting with which it passes
        self.label = "H100"
        self.ran = []
        self.notes = []
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.setenv("NCCL_P2P_DISABLE", "0")  # restored afterwards
        monkeypatch.setattr(self_test, "_error", self._run)
        monkeypatch.setattr(devices, "device_label", lambda *_: self.label)

    def _run(self, arguments, environment):
        part, *words = arguments
        self.ran.append((part, environment))
        return "" if self.errors.get(part, "") in {*words, ""} else "wrong values"

    def start(self):
        sets = {"infer": DeviceSet("accelerator", (0,)), "train": DeviceSet("accelerator", (1,))}
        on_cpu = resolve_placement(resolve(load_config(None, ON_CPU)))
        gpus = replace(on_cpu, accelerator="cuda", **sets)
        return before_run(gpus, self.notes.append)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_devices_are_tested_once_for_their_versions(machine):
    assert machine.start() == ({}, [])
    seen = [environment.get("CUDA_VISIBLE_DEVICES") for _, environment in machine.ran]
    assert [part for part, _ in machine.ran] == ["weights", "attention", "attention"]
    assert seen == [None, "0", "1"] and len(machine.notes) == 1
    assert machine.start() == ({}, []) and len(machine.ran) == 3
    machine.label = "H200"
    machine.start()
    assert len(machine.ran) == 6


def test_run_uses_what_passes_and_says_so(machine):
    machine.errors = {"weights": "NCCL_P2P_DISABLE=1", "attention": "model.attention=without_flex"}
    for _ in range(2):  # the second time from the cache
        os.environ["NCCL_P2P_DISABLE"] = "0"
        changes, warnings = machine.start()
        assert changes == {"model.attention": "without_flex"}
        assert os.environ["NCCL_P2P_DISABLE"] == "1"
        for setting, warning in zip(machine.errors.values(), warnings, strict=True):
            assert setting in warning
    assert len(machine.notes) == 1


def test_part_that_never_passes_is_tested_again(machine):
    machine.errors = {"attention": "no such setting"}
    for _ in range(2):
        changes, (warning,) = machine.start()
        assert changes == {} and "attention" in warning
    assert len(machine.notes) == 2


def test_controller_gets_the_safe_settings(machine, tmp_path, monkeypatch):
    machine.errors = {"attention": "model.attention=without_flex"}
    controller = Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(run_module, "Controller", controller)
    monkeypatch.setattr(self_test, "before_run", lambda *_: machine.start())
    with pytest.raises(ZeroDivisionError):
        run_module.run(load_config(None, {**ON_CPU, "output.dir": str(tmp_path / "run")}))
    checked = controller.call_args.args[0]
    assert checked.run.config.model.attention == "without_flex"
    assert "model.attention" in checked.warnings[-1]
