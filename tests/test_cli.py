"""The command line: quick help, the printed config, and exit codes."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from typer.testing import CliRunner, Result

import easyrl
from easyrl import cli
from easyrl.config import Config, load_config, to_commented_yaml

ROOT = Path(__file__).parent.parent


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.app, words)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configs that `grpo` would run; the run itself is left out."""
    configs: list[Config] = []
    run = ModuleType("easyrl.runtime.run")
    run.run = lambda config, observers: configs.append(config) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "easyrl.runtime.run", run)
    placement = ModuleType("easyrl.runtime.placement")
    placement.resolve_placement = lambda config: config.devices  # type: ignore[attr-defined]
    placement.describe = lambda devices: f"infer on {devices.infer}\ntrain"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "easyrl.runtime.placement", placement)
    return configs


def test_help_is_quick_and_imports_no_torch() -> None:
    program = (
        "import sys; sys.argv = ['easyrl', '--help']\n"
        "from easyrl.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    seconds = []
    for _ in range(3):  # the best of three: others use this machine too
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        seconds.append(time.monotonic() - began)
    assert done.stdout.endswith("[]\n")
    assert "grpo" in done.stdout
    assert min(seconds) < 0.5


def test_module_runs_like_the_console_script() -> None:
    command = [sys.executable, "-m", "easyrl", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"easyrl {easyrl.__version__}\n"


def test_default_config_file_is_what_easyrl_config_prints() -> None:
    committed = (ROOT / "configs" / "default.yaml").read_text(encoding="utf-8")
    assert committed == call("config").stdout, "run: easyrl config > configs/default.yaml"


def test_config_prints_the_resolved_values() -> None:
    file = str(ROOT / "configs" / "own_data.yaml")
    shown = yaml.safe_load(call("config", "--config", file, "train.iterations=7").stdout)
    assert shown["train"]["iterations"] == 7
    assert shown["reward"]["functions"] == ["exact_match", "my_rewards.py:score"]


def test_every_named_flag_reaches_its_key(runs: list[Config]) -> None:
    words = "--model m --dataset d.jsonl --reward exact_match --reward r.py:f --infer-devices 0"
    words += " --train-devices 1-2 --output out --iterations 3 --seed 4 --schedule sync"
    result = call("grpo", *words.split(), "train.learning_rate=1e-6")
    assert result.exit_code == 0, result.output
    (config,) = runs
    assert config == load_config(
        None,
        {
            "model.path": "m",
            "data.dataset": "d.jsonl",
            "reward.functions": ["exact_match", "r.py:f"],
            "devices.infer": "0",
            "devices.train": "1-2",
            "output.dir": "out",
            "train.iterations": 3,
            "runtime.seed": 4,
            "runtime.schedule": "sync",
            "train.learning_rate": 1e-6,
        },
    )


def test_flags_win_over_the_file_and_words_over_flags(runs: list[Config]) -> None:
    file = str(ROOT / "configs" / "own_data.yaml")
    call("grpo", "--config", file, "--iterations", "5", "train.iterations=6")
    call("grpo", "--config", file, "--iterations", "5")
    call("grpo", "--config", file)
    assert [config.train.iterations for config in runs] == [6, 5, 200]


def test_dry_run_prints_a_config_file_and_the_placement(runs: list[Config]) -> None:
    result = call("grpo", "--dry-run", "--infer-devices", "cpu:2")
    assert result.exit_code == 0
    assert runs == []
    config = load_config(None, {"devices.infer": "cpu:2"})
    assert result.stdout == to_commented_yaml(config) + "\n# infer on cpu:2\n# train\n"


@pytest.mark.parametrize(("words", "live"), [([], True), (["--no-live"], False)])
def test_no_live_asks_for_plain_lines(
    words: list[str], live: bool, runs: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    observers = ModuleType("easyrl.observe.observers")
    observers.make_observers = lambda config, live: asked.append(live) or []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "easyrl.observe.observers", observers)
    assert call("grpo", *words).exit_code == 0
    assert (asked, len(runs)) == ([live], 1)


def test_exit_code_is_the_runs(monkeypatch: pytest.MonkeyPatch, runs: list[Config]) -> None:
    monkeypatch.setattr(sys.modules["easyrl.runtime.run"], "run", lambda config, observers: 3)
    assert call("grpo").exit_code == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.lerning_rate=1"], "did you mean train.learning_rate?"),
        (["--infer-devices", "0-3", "--train-devices", "3"], "overlap"),
        (["--infer-devices", "3-1"], "devices.infer (--infer-devices): '3-1'"),
        (["--config", "none.yaml"], "there is no such file"),
        (["--schedule", "async"], "'periodic' or 'sync'"),
        (["--output", ""], "output.dir"),
        (["--iterations", "many"], "--iterations"),
        (["--lerning-rate", "1"], "No such option"),
    ],
)
def test_users_mistake_is_one_message_and_exit_code_2(
    words: list[str], told: str, runs: list[Config]
) -> None:
    result = call("grpo", *words)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert runs == []


def test_value_error_of_the_run_is_the_users(
    monkeypatch: pytest.MonkeyPatch, runs: list[Config]
) -> None:
    def refuse(config: Config, observers: list[object]) -> int:
        raise ValueError("model.path: there is no model 'x'")

    monkeypatch.setattr(sys.modules["easyrl.runtime.run"], "run", refuse)
    result = call("grpo")
    assert (result.exit_code, result.stderr) == (2, "easyrl: model.path: there is no model 'x'\n")


def test_commands_without_words_show_their_help() -> None:
    for words in ([], ["bench"]):
        assert "Usage" in call(*words).output


@pytest.fixture
def ring_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = ModuleType("easyrl.bench.ring")
    rows = [{"what": "ring", "gb_per_second": 3.14159}, {"what": "queue", "times": 15}]
    suite.run = lambda: rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "easyrl.bench.ring", suite)


@pytest.mark.usefixtures("ring_suite")
def test_bench_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    result = call("bench", "ring", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "gb per second" in result.stdout
    assert "3.142" in result.stdout
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["suite"] == "ring"
    assert report["results"][0] == {"what": "ring", "gb_per_second": 3.14159}
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["memory_bytes"] > 2**20
    assert {"cpu", "platform", "python", "torch", "transformers"} <= report["machine"].keys()


@pytest.mark.usefixtures("ring_suite")
def test_bench_refuses_an_unwritable_file_before_it_measures(tmp_path: Path) -> None:
    result = call("bench", "ring", "--json", str(tmp_path / "none" / "ring.json"))
    assert result.exit_code == 2
    assert "--json" in result.stderr
    assert result.stdout == ""
