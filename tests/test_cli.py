"""The command line: quick help, the printed config, and exit codes."""

import os
import pkgutil
import shlex
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml

import easyrl
import easyrl_train
from easyrl import events
from easyrl.config import ConfigError, load_config, options_by_key
from easyrl.runtime.worker_process import describe_failure
from own_processes import WAIT_SECONDS
from runs import easyrl as run_easyrl


def python(*words, **environment):
    environment = {**os.environ, **environment}
    command = [sys.executable, *words]
    return subprocess.check_output(command, text=True, timeout=WAIT_SECONDS, env=environment)


@pytest.fixture
def runs(monkeypatch):
    """The configs that `grpo` would run; the run itself is left out."""
    configs = []

    def run(config, observers, resume):
        configs.append(config)
        return events.RunEnded(0, "")

    monkeypatch.setitem(sys.modules, "easyrl.runtime.run", SimpleNamespace(run=run))
    return configs


@pytest.mark.alone
def test_help_is_quick_and_neither_it_nor_a_runs_controller_imports_torch(tmp_path):
    """Its import, of seconds, would hold up the workers, which import it as well. Help imports 340
    modules: what makes it slow are others', as numpy's or pydantic's."""
    unwanted = "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    program = (
        "import sys; sys.argv = ['easyrl', '--help']\n"
        "from easyrl.cli import main\n"
        "try: main()\nfinally: print(len(sys.modules), *{'numpy', 'pydantic'} & set(sys.modules))\n"
    )
    shown = python("-c", program)
    assert "grpo" in shown and int(shown.splitlines()[-1]) < 500
    program = (
        "import pathlib, sys\n"
        "from easyrl import devices\n"
        "from easyrl.config import load_config\n"
        "from easyrl.observe.observers import make_observers\n"
        "from easyrl.runtime import controller, preflight, run, supervisor\n"
        "devices.DEVICE_NODES, devices.CUDA_DRIVER = pathlib.Path('none'), 'libnone.so'\n"
        f"config = load_config(words=[{f'output.dir={tmp_path}/run'!r}])\n"
        f"make_observers(live=False)\npreflight.check_run(config)\n{unwanted}"
    )
    assert python("-c", program) == "[]\n"


def test_module_runs_like_the_console_script_and_prints_versions():
    first, *others = python("-m", "easyrl", "--version").splitlines()
    assert first == f"easyrl {easyrl.__version__}"
    assert dict(line.split(" ", 1) for line in others).keys() == {
        *("Python", "torch", "transformers", "vllm", "accelerators:")
    }


def test_every_named_flag_reaches_its_key(runs):
    words = "--model m --dataset d.jsonl --reward exact_match --reward r.py:f --infer-devices 0"
    words += " --train-devices 1-2 --output out --iterations 3 --seed 4 --schedule sync"
    result = run_easyrl("grpo", *words.split(), "train.learning_rate=1e-6")
    assert result.exit_code == 0, result.output
    flags = {"model": "m", "dataset": "d.jsonl", "reward": ["exact_match", "r.py:f"]}
    flags |= {"infer_devices": "0", "train_devices": "1-2", "output": "out", "iterations": 3}
    settings = options_by_key(**flags, seed=4, schedule="sync")
    assert runs == [load_config(None, settings | {"train.learning_rate": 1e-6})]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("error", "code"), [
    (KeyboardInterrupt(), 130), (ConfigError("a\x1b[2J"), 2), (KeyError(), 1),
    (ValueError("a bug"), 1), (OSError(5, "a bug"), 1),
])  # fmt: skip
def test_exit_codes_and_whose_mistake_it_is(error, code, monkeypatch):
    monkeypatch.setattr(sys.modules["easyrl.runtime.run"], "run", lambda *_: events.RunEnded(3, ""))
    assert run_easyrl("grpo").exit_code == 3
    monkeypatch.setattr(sys.modules["easyrl.runtime.run"], "run", Mock(side_effect=error))
    result, of_worker = run_easyrl("grpo"), describe_failure(error)
    assert result.exit_code == code and "\x1b" not in result.stderr
    assert isinstance(result.exception, type(error) if code == 1 else SystemExit)
    assert of_worker.is_user_error == (code == 2) and bool(of_worker.traceback) != (code == 2)


def test_debug_shows_the_traceback_of_a_mistake():
    plain, debug = run_easyrl("config", "train.lr"), run_easyrl("--debug", "config", "train.lr")
    assert plain.exit_code == debug.exit_code == 2
    assert "Traceback" not in plain.stderr and debug.stderr.endswith(plain.stderr)
    assert "Traceback" in debug.stderr


def test_a_full_disk_is_named_without_a_traceback():
    command = f"{shlex.quote(sys.executable)} -m easyrl config > /dev/full"
    done = subprocess.run(command, check=False, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "easyrl: [Errno 28] No space left on device\n")


@pytest.mark.usefixtures("runs")
def test_a_missing_permission_is_named_without_a_traceback(monkeypatch):
    forbidden = Mock(side_effect=PermissionError(13, "Permission denied", "run/config.yaml"))
    monkeypatch.setattr(sys.modules["easyrl.runtime.run"], "run", forbidden)
    result = run_easyrl("grpo")
    assert result.exit_code == 2
    assert result.stderr == "easyrl: [Errno 13] Permission denied: 'run/config.yaml'\n"


@pytest.mark.parametrize(("place", "name", "value", "message"), [
    (vars(sys), "platform", "darwin", "expected Linux, got darwin"),
    (vars(sys), "platform", "win32", "expected Linux, got win32"),
    (vars(sys), "version_info", (3, 10, 0), "Python 3.11 or newer"),
    (sys.modules, "easyrl", ModuleType("easyrl"), "pip uninstall easyrl"),
])  # fmt: skip
def test_what_cannot_run_is_named_before_any_import(place, name, value, message, monkeypatch):
    monkeypatch.setitem(place, name, value)
    with pytest.raises(SystemExit, match=message):
        easyrl_train.main()


def test_import_loads_no_torch_and_public_names_are_loaded_on_first_use():
    program = (
        "import sys, easyrl\n"
        "found = lambda: sorted({'torch', 'typer', 'pydantic'} & set(sys.modules))\n"
        "before = found()\n"
        "for name in easyrl.__all__: getattr(easyrl, name)\n"
        "print(before, issubclass(easyrl.ConfigError, ValueError), easyrl.Config().runtime.seed)"
    )
    assert python("-c", program) == "[] True 0\n"
    assert not {*easyrl.__all__} & {each.name for each in pkgutil.iter_modules(easyrl.__path__)}


def test_a_dry_run_prints_no_escapes_of_a_name():
    done = run_easyrl("grpo", "--dry-run", "--model", "a\x1b[2J\nb")
    assert "\x1b" not in done.output and 'path: "a\\e[2J\\nb"' in done.output


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["train.iterations"], {"train": {"iterations": 60}}),
        (["runtime.seed", "runtime.seed=3"], {"runtime": {"seed": 3}}),
        (["--search", "KL divergence"], {"algorithm": {"beta": 0.0}}),
    ],
)
def test_config_prints_the_settings_that_are_named_or_found(words, shown):
    for unknown in (["train.lr"], ["--search", "unicorn"]):
        assert run_easyrl("config", *unknown).exit_code == 2
    assert "train.warmup_iterations" in run_easyrl("config", "--search", "warmup_ratio").output
    result = run_easyrl("config", *words)
    assert (result.exit_code, yaml.safe_load(result.stdout)) == (0, shown)
    assert "# Values: " in result.stdout and "# Default: " in result.stdout
    assert "# Values: " not in run_easyrl("config").stdout
