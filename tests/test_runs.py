"""Whole runs of `easyrl grpo`, as a user starts them."""

import hashlib
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mistakes import TINY
from runs import HARDER, SMALL, assert_on_policy, lines_of, succeed, summary_of, write_rows
from runs import without_timing as plain
from tiny_models import model_with_sinks, untied_model


def test_a_run_writes_metrics_samples_and_summary(finished_run):
    folder, out = finished_run
    assert "iteration 3/3" in out
    summary = summary_of(folder)
    assert summary["reward_last"] is not None and summary["tokens_per_second_per_device"] > 0
    assert summary["groups_trained"] == 12
    assert summary["policy_version"] == 3
    metrics = lines_of(folder / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert 0 < line["sampling/sampling_logp_difference/max"] <= 1e-4
        assert line["num_updates_not_finite"] == 0
        assert all(math.isfinite(v) for v in line.values() if isinstance(v, float))
        assert line["num_trainer_tokens"] == line["num_completion_tokens"] > 0
        assert line["num_tokens"] > line["num_generated_tokens"] >= line["num_completion_tokens"]
        assert "completions/mean_inserted_length" not in line
    assert summary["inserted_tokens"] == metrics[-1]["num_inserted_tokens"] == 0
    samples = lines_of(folder / "samples.jsonl")
    assert len(samples) == 3 * 2 * 4 and all(s["prompt"].endswith("=") for s in samples)
    assert {"completion", "reward", "rewards", "advantage", "answer"} <= samples[0].keys()
    assert all(sample["length"] > 0 == sample["inserted_tokens"] for sample in samples)
    for sample in samples:  # with the end token
        assert sample["raw"][0] == sample["prompt"]
        assert sample["raw"][1].endswith("<eos>") != sample["truncated"]


def test_the_saved_model_loads_in_transformers_and_has_the_weights_of_the_summary(finished_run):
    folder = finished_run.folder
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.decode(tokenizer("12+34=")["input_ids"]) == "12+34="
    before, digest = load_file(TINY / "model.safetensors"), hashlib.sha256()
    weights = dict(sorted(model.named_parameters()))
    for name, tensor in weights.items():
        digest.update(name.encode() + tensor.detach().numpy().tobytes())
    assert digest.hexdigest() == summary_of(folder)["weights_sha256"]
    assert any(not torch.equal(before[n], t) for n, t in weights.items()), "nothing was trained"


CONFIGS = Path(__file__).parent.parent / "configs"
SCHEDULED = {
    "plain": (),
    "two rollout workers": (*HARDER, "--infer-devices", "cpu:2"),
    "two train ranks": (*HARDER, "--train-devices", "cpu:2"),
    "layers with a state": ("--model", "tiny-hybrid"),
    "all at once": (
        *(*HARDER, "model.lora.rank=4", "algorithm.dynamic_sampling=true", "eval.dataset={}"),
        *("--infer-devices", "cpu:2", "--train-devices", "cpu:2"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", SCHEDULED)
def test_sync_and_periodic_end_in_the_same_bits_whatever_the_timing(tmp_path, case):
    """One of the two is evaluated on its way, which changes nothing either."""
    more = SCHEDULED[case]
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 30)]
    problems = write_rows(tmp_path / "problems.jsonl", rows)  # of the case with an eval.dataset
    ends = {}
    for schedule in ("sync", "periodic"):
        folder = tmp_path / schedule
        words = [*SMALL, "train.prompts_per_iteration=6", "rollout.max_completion_length=48"]
        words += ["runtime.deterministic=true", "rollout.max_concurrent_groups=2"]
        words += ["train.max_tokens_per_micro_batch=100", *(word.format(problems) for word in more)]
        words += ["train.eval_every=2"] * (schedule == "periodic")
        out = succeed(
            *("--output", str(folder), "--iterations", "4", "--schedule", schedule),
            *words,
            EASYRL_RANDOM_DELAYS="0.01",
        )
        summary = summary_of(folder)
        assert summary["groups_trained"] == 24
        metrics = [plain(line) for line in lines_of(folder / "metrics.jsonl")]
        if more[:3] == HARDER:
            assert "only the first is strictly on-policy" in out
            assert summary["policy_version"] == 8 and all(line["kl"] > 0 for line in metrics[1:])
        evaluations = [
            {name: line.pop(name) for name in [*line] if name.startswith("eval/")}
            for line in metrics
        ]
        due = [schedule == "periodic" and number % 2 == 1 for number in range(4)]
        assert [bool(evaluation) for evaluation in evaluations] == due
        ends[schedule] = summary["weights_sha256"], metrics
    assert evaluations[-1]["eval/accuracy"] == summary["accuracy_after"]
    # Not the weights alone: every metric of every iteration, the engine's last bits among them.
    assert ends["sync"] == ends["periodic"]


VARIED_REWARD = """
def score(completion_ids, **columns):
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""
"""Of random text, too."""


@pytest.mark.long
def test_a_model_with_sinks_trains_exactly_and_in_the_same_bits_under_both_schedules(tmp_path):
    path = model_with_sinks(tmp_path / "model")
    rewards = tmp_path / "rewards.py"
    rewards.write_text(VARIED_REWARD)
    ends = {}
    for schedule in ("sync", "periodic"):
        folder = tmp_path / schedule
        out = succeed(
            *("--model", path, "--output", str(folder), "--iterations", "3"),
            *("--schedule", schedule, *SMALL, "runtime.deterministic=true"),
            *("--reward", f"{rewards}:score", "model.attention=shared_prompt"),
            EASYRL_RANDOM_DELAYS="0.01",
        )
        assert "rollout.engine" not in out  # its own engine serves it
        for line in lines_of(folder / "metrics.jsonl"):
            assert 0 < line["sampling/sampling_logp_difference/max"] <= 1e-4
        ends[schedule] = summary_of(folder)["weights_sha256"]
    assert ends["sync"] == ends["periodic"]
    before = load_file(Path(path) / "model.safetensors")
    trained = load_file(folder / "model/model.safetensors")
    sinks = [name for name in before if name.endswith("sinks")]
    assert len(sinks) == 3 and before.keys() == trained.keys()
    assert all(not torch.equal(before[name], trained[name]) for name in sinks)


TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }}\\n{% endfor %}a="
REWARDS = """
def score(prompts, completions, completion_ids, answer, **columns):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer)
    return [min(len(c[0]["content"]), 40) / 40 for c in completions]

def sometimes(completions, **columns):
    return [None if number % 2 else 1.0 for number, _ in enumerate(completions)]
"""


@pytest.mark.long
@pytest.mark.parametrize("size", [1.0, 1e25])
def test_a_run_with_an_own_model_data_and_rewards(tmp_path, size):
    """With 1e25 the model's output is an ordinary one, but its gradient is larger than float32
    holds: each update is dropped, counted and shown."""
    untied_model(tmp_path / "model")  # without a chat template
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.norm.weight"] /= size
    weights["lm_head.weight"] *= size
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    question = [{"role": "1", "content": "1+2="}]
    rows = [{"question": question, "answer": str(i)} for i in range(5)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    rewards, folder = tmp_path / "my_rewards.py", tmp_path / "run"
    rewards.write_text(REWARDS)
    out = succeed(
        *("--model", str(tmp_path / "model"), "--dataset", data),
        *("--reward", f"{rewards}:score", "--reward", f"{rewards}:sometimes"),
        *("--infer-devices", "cpu", "--train-devices", "cpu", "--output", str(folder)),
        *("--iterations", "3", "data.prompt_column=question", "reward.weights=[1.0, 0.5]", *SMALL),
        *(f"data.chat_template={tmp_path / 'chat.jinja'}", "train.learning_rate=1e-3"),
    )
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template == TEMPLATE
    lines, is_finite = lines_of(folder / "metrics.jsonl"), size == 1.0
    for line in lines:
        assert line["rewards/sometimes/mean"] == 1.0 and line["reward_std"] > 0
        assert line["reward"] == pytest.approx(line["rewards/score/mean"] + 0.25, abs=1e-5)
        assert line["sampling/sampling_logp_difference/max"] <= 1e-4
        assert line["num_updates_not_finite"] == 1 - is_finite
        assert (line["grad_norm"] is not None) == is_finite
    assert [line["policy_version"] for line in lines] == [1, 2, 3]  # all stays in step
    assert summary_of(folder)["updates_not_finite"] == 3 * (1 - is_finite)
    assert ("not finite" in out) != is_finite
    after = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], after[name]) for name in after) != is_finite


@pytest.mark.long
@pytest.mark.parametrize("is_lora", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_demo_learns(tmp_path, is_lora, seed):
    folder = tmp_path / "run"
    words = ("--config", str(CONFIGS / "lora.yaml")) if is_lora else ()
    succeed(*words, "--output", str(folder), "--seed", str(seed), timeout=600)
    summary = assert_on_policy(folder)
    assert 0.2 <= summary["accuracy_before"] <= 0.6
    assert summary["accuracy_after"] >= 0.85
    assert summary["reward_last"] >= 0.9
    assert summary["updates_not_finite"] == 0


@pytest.mark.long
def test_the_demo_with_a_model_that_has_states_learns(tmp_path):
    """Its accuracies have standard errors of 0.02."""
    folder = tmp_path / "run"
    succeed("--model", "tiny-hybrid", "--output", str(folder), timeout=900)
    summary = assert_on_policy(folder)
    assert 0.25 <= summary["accuracy_before"] <= 0.42
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.08
    assert summary["updates_not_finite"] == 0
