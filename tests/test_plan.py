"""`easyrl grpo --dry-run --assume`: planning for devices that this machine does not have."""

import functools
import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from easyrl import devices
from easyrl.config import load_config
from easyrl.runtime import memory_estimate
from easyrl.runtime.resume import with_absolute_paths
from mistakes import QWEN, QWEN3_5
from runs import easyrl

ROOT = Path(__file__).parent.parent
SMALL_BATCHES = ("train.max_tokens_per_micro_batch=1024",)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(QWEN))
    return str(folder)


@pytest.fixture(autouse=True)
def _hub_is_unreachable(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


def dry_run(*words):
    result = easyrl("grpo", "--dry-run", *words)
    return result.exit_code, result.output


def proposed(output):
    lines = [line.removeprefix("# ") for line in output.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("easyrl grpo")]
    assert len(commands) <= 1
    return commands[0][2:] if commands else None


@pytest.mark.parametrize(
    ("assume", "words", "changed", "starts"),
    [
        # One device that both groups share; float32 weights alone fill more than half of it.
        ("24GiB", [], "train.offload=[optimizer]", False),
        (
            "4x23.5gb",
            [*SMALL_BATCHES, "--infer-devices", "0-2", "--train-devices", "3"],
            "--infer-devices 0 --train-devices 1-3",
            False,
        ),
        ("8x4090", ["--infer-devices", "0-3", "--train-devices", "4-7"], "", True),
    ],
)
def test_the_proposed_command_fits(assume, words, changed, starts, qwen):
    code, output = dry_run("--assume", assume, "--model", qwen, "--dataset", "countdown", *words)
    assert code == (0 if starts else 2)
    assert starts == ("a run would not start" not in output)
    better = proposed(output)
    assert better is not None and changed in " ".join(better)
    assert better[:4] == ["--model", qwen, "--dataset", "countdown"]
    code, output = dry_run("--assume", assume, *better)
    assert code == 0 and "available" in output
    assert output.count("warning") == output.count("in float32") == 1 and proposed(output) is None


def test_the_recipe_for_a_model_with_states_fits_on_the_devices_that_it_names(tmp_path):
    """Its data set is on the hub, so that another one is given."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_5))
    recipe = ROOT / "configs" / "qwen3_5.yaml"
    words = "--config", recipe, "--model", str(tmp_path), "--dataset", "countdown"
    code, output = dry_run("--assume", "2x40GiB", *words)
    assert code == 0 and proposed(output) is None
    code, output = dry_run("--assume", "2x24GiB", *words)
    assert proposed(output) is not None, "it names GPUs that are larger"
    checkpointing = "train.activation_checkpointing=true"
    code, output = dry_run("--assume", "2x24GiB", *words, checkpointing)
    assert code == 0 and proposed(output) is None


def test_a_model_larger_than_a_device_gets_engines_that_span_several(tmp_path):
    large = {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, **large, "num_attention_heads": 64}))
    code, output = dry_run("--assume", "8x80GiB", "--model", str(tmp_path))
    better = proposed(output)
    assert code == 2 and better is not None and "rollout.engine=vllm" in better
    assert any(word.startswith("rollout.tensor_parallel_size=") for word in better)
    assert dry_run("--assume", "8x80GiB", *better)[0] == 0


def test_a_model_that_vllm_would_refuse_later_gets_no_command_with_it(tmp_path):
    experts = {"model_type": "mixtral", "num_local_experts": 8, "tie_word_embeddings": False}
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, **experts, **large}))
    words = "--assume", "8x80GiB", "--model", str(tmp_path)
    code, output = dry_run(*words, "rollout.engine=vllm")
    assert code == 2 and "would not start: rollout.engine: expected embedded" in output
    assert proposed(output) is None
    code, output = dry_run(*words)
    assert code == 2 and proposed(output) is None and "nothing that was tried fits" in output


@pytest.mark.parametrize(
    ("assume", "never_run"),
    [
        ("80GiB", ""),
        ("8x80GiB rollout.engine=vllm", "several accelerators, vLLM on accelerators"),
        ("910bx2", "Ascend NPUs, several accelerators"),
    ],
)
def test_a_plan_remarks_what_has_never_run_and_a_lopsided_split(assume, never_run, qwen):
    words = "--model", qwen, "--assume", *assume.split(), "model.dtype=bfloat16"
    code, output = dry_run(*words)
    assert code == 0 and (f"so far: {never_run} (" in output) == bool(never_run)
    assert never_run or "so far" not in output
    assert "easyrl plan" not in output  # the default is not lopsided
    if "8x" in assume:
        output = dry_run(*words, "--infer-devices", "0-6", "--train-devices", "7")[1]
        assert "easyrl plan RUN --devices 8" in output


def test_where_nothing_fits_no_command_is_proposed(qwen):
    code, output = dry_run("--assume", "2x2GiB", "--model", qwen)
    assert code == 2 and proposed(output) is None
    assert "nothing that was tried fits" in output
    assert "LoRA (model.lora.rank) does not fit either" in output


QWEN3_8B = {
    **QWEN,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
LENGTHS = ("data.max_prompt_length=512", "rollout.max_completion_length=1024")


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3-8b")
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    return ("--model", str(folder), "model.dtype=bfloat16", *LENGTHS)


def test_the_default_split_of_eight_devices_starts_with_any_model_that_they_hold(eight_billion):
    code, output = dry_run("--assume", "8x80GiB", *eight_billion)
    assert code == 0 and proposed(output) is None
    # 123 GiB of weights, gradients and moments do not fit one trainer, nor two: five hold them.
    assert output.startswith(
        "# a run would start: at its peak, by estimate, 73.21 GiB of 80.00 GiB"
    )
    assert "# rollout-2: cuda:2\n# train-0: cuda:3\n" in output
    code, output = dry_run("--assume", "8x80GiB", *eight_billion, "model.lora.rank=16")
    assert code == 0 and "# rollout-5: cuda:5\n# train-0: cuda:6\n" in output  # a quarter trains
    named = ("--infer-devices", "0-6", "--train-devices", "7")
    assert dry_run("--assume", "8x80GiB", *eight_billion, *named)[0] == 2  # as it is named
    # The sums of a deterministic run do not depend on the memory that is free.
    words = ("runtime.deterministic=true", "rollout.engine=embedded")
    code, output = dry_run("--assume", "8x80GiB", *eight_billion, *words)
    assert "# train-0: cuda:6\n" in output and "its memory may not suffice" in output


def test_the_verdict_stands_first_and_advises_only_what_fits(eight_billion):
    code, output = dry_run("--assume", "24GiB", *eight_billion)
    first, second, third, *_ = output.splitlines()
    assert code == 2 and first.startswith("# a run would not start: this run needs")
    assert "nothing that was tried fits" in second and "does not fit either" in second
    assert third.startswith("# 2 such devices are enough") and "--assume 2x24GiB" in third
    code, output = dry_run("--assume", "2x24GiB", *eight_billion)
    assert dry_run("--assume", "2x24GiB", *proposed(output))[0] == 0
    output = dry_run("--assume", "24GiB", *eight_billion, "model.lora.rank=16")[1]
    assert "or LoRA" not in output and "does not fit either" not in output


def test_lora_is_advised_where_it_alone_fits(eight_billion, monkeypatch):
    """One device of 80 GiB holds all weights with the optimizer on the host, which is too small."""
    monkeypatch.setattr(devices, "accelerator", lambda **_: ("cuda", 1))
    monkeypatch.setattr(devices, "total_memory_bytes", lambda kind, index: 80 * 2**30)
    monkeypatch.setattr(devices, "memory_in_use", functools.cache(lambda *_: (0, "")))
    monkeypatch.setattr(devices, "has_c_compiler", lambda: True)
    monkeypatch.setattr(memory_estimate, "available_memory_bytes", lambda: 32 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**50))
    code, output = dry_run(*eight_billion)
    better = proposed(output)
    assert code == 2 and "or LoRA (model.lora.rank), which fits" in output
    assert "model.lora.rank=16" in better
    code, output = dry_run(*better)
    assert code == 0 and output.startswith("# a run would start: at its peak")


def test_engines_that_span_devices_get_a_default_split(tmp_path):
    words = ("rollout.engine=vllm", "rollout.tensor_parallel_size=4", "model.dtype=bfloat16")
    code, output = dry_run("--assume", "8x80GiB", *words)
    assert code == 0 and "# rollout-0: cuda:0,1,2,3\n# train-0: cuda:4\n" in output


def test_a_plan_is_a_config_file(tmp_path):
    for full in ([], ["--full"]):
        code, output = dry_run("--assume", "2x80GiB", "model.dtype=bfloat16", "--seed", "7", *full)
        assert code == 0 and bool(full) == ("learning_rate" in output)
        (tmp_path / "plan.yaml").write_text(output)
        expected = load_config(words=["model.dtype=bfloat16", "runtime.seed=7"])
        assert load_config(tmp_path / "plan.yaml") == with_absolute_paths(expected)


def test_a_plan_names_data_rewards_and_what_ends_it_early(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "17+58=", "answer": "75"}\n')
    data = ["--dataset", str(tmp_path / "rows.jsonl"), "--reward", "gsm8k"]
    code, output = dry_run(*data)
    assert code == 0 and "rows.jsonl; reward: gsm8k\n" in output and "ends early" not in output
    more = ["--reward", "length_penalty", "reward.weights=[1, 0.5]"]
    conditions = "train.stop_when=[reward >= 0.9, reward without a rise for 20]"
    code, output = dry_run(*data, *more, conditions)
    assert code == 0 and "rows.jsonl; reward: gsm8k, length_penalty x 0.5\n" in output
    assert "# ends early: reward >= 0.9, or reward without a rise for 20 (train.stop_" in output
    mixed = ["--dataset", "arithmetic", "data.weights=[3, 1]"]
    teacher = ["--reward", "none", "algorithm.teacher=tiny"]
    code, output = dry_run(*data[:2], *mixed, *teacher)
    assert code == 0 and "rows.jsonl x 3 + arithmetic; reward: none" in output
    assert "no reward scores" not in output
    own_problems = f"eval.dataset={tmp_path}/rows.jsonl"
    code, output = dry_run(*data[:2], *teacher, own_problems)
    assert code == 0 and "warning: eval.dataset: no reward scores its problems" in output
    code, output = dry_run(*teacher)
    assert code == 0 and "reward: none (held-out problems: score); teacher: tiny" in output


def test_a_plan_that_is_refused_says_so_again_at_its_end():
    """Its first line has left a small screen, or is in a file."""
    plan = easyrl("grpo", "--dry-run", "--dataset", "gone.jsonl", "--reward", "exact_match")
    assert plan.exit_code == 2 and "a run would not start" not in plan.stdout.splitlines()[-1]
    assert plan.stderr.startswith("easyrl: a run would not start: data.dataset")
    assert plan.stdout.startswith("# a run would not start: data.dataset")


def test_data_on_a_hub_that_is_unreachable_is_a_warning(tmp_path, capfd):
    reward = "print('here')\ndef score(completions, answer):\n    print('here')\n    return [0.0]"
    (tmp_path / "own.py").write_text(reward + " * len(completions)\n")
    code, output = dry_run("--dataset", "hub/data", "--reward", f"{tmp_path}/own.py:score")
    assert code == 0 and "all on cpu" in output and "warning: not checked: data.dataset" in output
    assert output.startswith("# a run would start if its data, which were not checked, can be")
    assert "here" not in output and capfd.readouterr().out == ""  # the plan is a config file
    code, output = dry_run("--dataset", "gone.jsonl", "--reward", "exact_match")
    assert code == 2 and "all on cpu" in output  # the memory that it would need
    assert "data.dataset" in output.partition("a run would not start: ")[2]
