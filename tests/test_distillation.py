"""A teacher: gradients of every objective, whole runs, and teachers that do not fit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from easyrl.config import load_config
from easyrl.config.algorithm import POLICY
from easyrl.layout.row import pack
from easyrl.model import distillation
from easyrl.model.mixers.attention import ATTENTION_NAME, register_attention
from easyrl.model.policy import Policy
from easyrl.runtime.resolve import resolve
from easyrl.runtime.self_test_part import draw_rollouts
from easyrl.workers.learner import Learner
from mistakes import TINY, change_json
from runs import SMALL, both_schedules, easyrl, lines_of, succeed, write_rows
from tiny_models import VOCABULARY, largest_gradient_gap, tiny_model

TEMPERATURE, WEIGHT, MIXTURE = 0.8, 0.7, 0.3
WORDS = (
    f"algorithm.teacher_weight={WEIGHT}",
    f"rollout.temperature={TEMPERATURE}",
)
OWN_PROMPT = "algorithm.teacher=policy", "algorithm.teacher_prompt={answer};{prompt}"
SIZES = {"hidden_size": 48, "intermediate_size": 40, "vocab_size": VOCABULARY + 7}
"""The teacher's: other widths, and a vocabulary that is padded further."""


def probabilities(model, prompt_ids, completion_ids):
    ids = torch.from_numpy(np.concatenate([prompt_ids, completion_ids])).long()
    logits = model(input_ids=ids[None]).logits[0, len(prompt_ids) - 1 : -1, :VOCABULARY]
    return (logits / TEMPERATURE).softmax(-1)


def expected_loss(objective, rollout, student, teacher):
    """The loss of one completion by the formulas, in float64, without packing."""
    own = rollout.teacher_prompt_ids
    p = probabilities(student, rollout.prompt_ids, rollout.completion_ids)
    q = probabilities(teacher, own if len(own) else rollout.prompt_ids, rollout.completion_ids)
    q, chosen = q.detach(), torch.from_numpy(rollout.completion_ids).long()[:, None]
    logprobs = p.log().gather(1, chosen)[:, 0]
    advantage = rollout.advantage
    if objective is None:
        advantage = advantage + WEIGHT * (q.log().gather(1, chosen)[:, 0] - logprobs.detach())
    m = MIXTURE * q + (1 - MIXTURE) * p
    of_vocabulary = {
        None: p * 0.0,
        1: p * (p / q).log(),
        0: q * (q / p).log(),
        MIXTURE: MIXTURE * q * (q / m).log() + (1 - MIXTURE) * p * (p / m).log(),
    }[objective]
    ratio = (logprobs - logprobs.detach()).exp()
    loss = (WEIGHT * of_vocabulary.sum(-1) - ratio * advantage).mean()
    return loss, float((p * (p / q).log()).detach().sum())


@pytest.mark.parametrize("num_rows", [3, 1000], ids=["chunks", "whole"])
@pytest.mark.parametrize("objective", [None, 0, 1, MIXTURE])
@pytest.mark.parametrize(
    ("name", "length"),
    [("any", 0), ("any", 5), (POLICY, 15), ("padded", 5)],
    ids=["same prompt", "own prompt", "policy with own prompt", "padded teacher"],
)
def test_gradients_are_those_of_a_plain_loop_over_sequences(
    name, length, objective, num_rows, monkeypatch
):
    """`length`: tokens of the teacher's own prompt. A padded teacher is one whose layers cannot run
    packed rows, as those of jamba."""
    register_attention()
    chunk_bytes = num_rows * 2 * 4 * VOCABULARY
    monkeypatch.setattr(distillation, "CPU_CHUNK_BYTES", chunk_bytes)
    student, teacher = tiny_model("qwen3"), tiny_model("llama", seed=2, **SIZES)
    is_padded = name == "padded"
    cpu = torch.device("cpu")
    policy = Policy(tiny_model("qwen3", ATTENTION_NAME), cpu)
    own_teacher = None
    if is_padded:
        padded = tiny_model("llama", "sdpa", seed=2, **SIZES)
        own_teacher = Policy(padded, cpu, no_packing_reason="its layers ignore the state")
    elif name != POLICY:
        own_teacher = Policy(tiny_model("llama", ATTENTION_NAME, seed=2, **SIZES), cpu)
    own = f"algorithm.teacher={name}", f"algorithm.teacher_divergence={objective}"
    spec = resolve(load_config(words=[*WORDS, *own])).for_training
    learner = Learner(policy, spec, teacher=own_teacher)
    rollouts = draw_rollouts(9, [4, 12, 7], VOCABULARY)
    own_prompt = np.arange(length, dtype=np.int32) % VOCABULARY
    rollouts = [replace(each, teacher_prompt_ids=own_prompt) for each in rollouts]
    rollouts[1:] = [replace(each, advantage=0.0) for each in rollouts[1:]]
    learner.accumulate(pack(rollouts, shares_prompts=not is_padded))
    gradients = {n: p.grad.clone() for n, p in policy.model.named_parameters()}
    student, teacher = student.double(), teacher.double()
    teacher = student if name == POLICY else teacher
    losses = [expected_loss(objective, rollout, student, teacher) for rollout in rollouts]
    sum(loss for loss, _ in losses).backward()
    expected = {n: p.grad for n, p in student.named_parameters()}
    assert largest_gradient_gap(gradients, expected, floor=1e-4) <= 1e-5
    learner.step(num_completions=3, num_tokens=23)
    metrics = learner.metrics()
    assert metrics["teacher/kl"] == pytest.approx(sum(kl for _, kl in losses) / 23, rel=1e-4)
    assert 0.0 <= metrics["teacher/top_token_agreement"] < 0.5
    mean = sum(loss.item() for loss, _ in losses) / 3
    assert metrics["loss"] == pytest.approx(mean, rel=1e-4)


TEACHERS = pytest.mark.parametrize(
    "teacher",
    [("algorithm.teacher=tiny-countdown",), pytest.param(OWN_PROMPT, marks=pytest.mark.long)],
    ids=["another model", "own prompt"],
)
NO_REWARD = *SMALL, "--reward", "none", "--iterations", "2", "--no-live"


@TEACHERS
def test_a_teacher_alone_trains_and_both_schedules_end_in_the_same_bits(tmp_path, teacher):
    run = both_schedules(tmp_path, *NO_REWARD, *teacher)
    for line in lines_of(run / "metrics.jsonl"):
        assert line["teacher/kl"] > 0.05 and line["grad_norm"] > 0.01


@pytest.mark.long
@TEACHERS
def test_two_train_ranks_learn_from_a_teacher_as_one_does(tmp_path, teacher):
    words, lines = (*NO_REWARD, *teacher, "runtime.deterministic=true"), []
    for devices in ("cpu", "cpu:2"):
        where = "--train-devices", devices, "--output", str(tmp_path / devices)
        out = succeed(*words, *where)
        assert "learn nothing" not in out and "held-out accuracy" in out and "; teacher: " in out
        lines.append(lines_of(tmp_path / devices / "metrics.jsonl"))
    for one, two in zip(*lines, strict=True):
        assert one["teacher/kl"] == pytest.approx(two["teacher/kl"], rel=0.05)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=0.05)


def test_prompts_alone_are_enough_and_such_a_run_can_be_evaluated(tmp_path):
    recipe = Path(__file__).parent.parent / "configs" / "distill.yaml"
    assert load_config(recipe).reward.functions == ["none"]
    rows = write_rows(tmp_path / "data.jsonl", [{"prompt": f"{n}+7="} for n in range(9)])
    loss = "def loss(i): return LossOutputs(i.logprobs.sum(), {})"
    (tmp_path / "own.py").write_text(f"from easyrl.algorithm.losses import LossOutputs\n{loss}")
    own = f"algorithm.loss_type={tmp_path}/own.py:loss"
    run, words = str(tmp_path / "run"), [*SMALL[:4], "reward.functions=none", "--iterations", "1"]
    words += ["algorithm.teacher=tiny", "--dataset", rows]
    out = succeed("--no-live", "--output", run, *words, own)
    (line,) = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert line["reward"] is None and "no spread" not in out and "reward  " not in out
    assert line["teacher/kl"] == pytest.approx(0.0, abs=1e-5)
    assert {sample["reward"] for sample in lines_of(tmp_path / "run" / "samples.jsonl")} == {None}
    shown = easyrl("samples", run)
    assert shown.exit_code == 0 and "reward none" in shown.stdout
    page = easyrl("report", run, "--output", tmp_path / "page.html")
    assert page.exit_code == 0, page.output
    idle = succeed("--no-live", "--output", f"{run}-idle", *words)  # the teacher is the policy
    end = idle[idle.index("finished") :]
    assert "the teacher gave no gradient" in end and "algorithm.teacher" in end
    assert "data.columns" not in end and "rollout.temperature" not in end
    words = ["--model", run, "--dataset", "arithmetic", "data.num_held_out=4", "--no-live"]
    out = easyrl("eval", *words, "--output", tmp_path / "eval")
    assert out.exit_code == 0 and "accuracy" in out.stdout, out.output
    # Nothing scores these problems: their answers count as wrong, not as failed reward calls.
    words = ["--model", run, "--dataset", rows, "--no-live", "--output", tmp_path / "unscored"]
    out = easyrl("eval", *words)
    assert out.exit_code == 0, out.output
    unscored = json.loads((tmp_path / "unscored" / "eval.json").read_text())
    assert (unscored["accuracy"], unscored["num_problems"]) == (0.0, 9)


@pytest.mark.parametrize(("words", "named"), [
    (["--reward", "none"], "algorithm.teacher, got none"),
    (["--reward", "none", "--reward", "math"], "none alone, got none, math"),
    (["--reward", "none", "algorithm.teacher=tiny", "algorithm.dynamic_sampling=true"], "false"),
    (["algorithm.teacher=tiny", "data.max_prompt_length=1020"], "at most 1024"),
    (["algorithm.teacher=TEACHER"], "differs in token 99 ('new' "),
    (["algorithm.teacher=FEWER"], "at least 99 with its padding, as the policy's, got 98"),
    (["algorithm.teacher=./nothing_here"], "algorithm.teacher: "),
    (["algorithm.teacher_prompt={answer}"], "algorithm.teacher_prompt: expected null"),
    (["algorithm.teacher=policy"], "algorithm.teacher_prompt: expected a column"),
    (["algorithm.teacher=tiny", "algorithm.teacher_prompt=hint"], "teacher_prompt: expected a"),
    ([*OWN_PROMPT, "data.max_prompt_length=24"], "24 tokens (data.max_prompt_length), got "),
    ([*OWN_PROMPT, "--environment", "guess"], "algorithm.teacher_prompt: expected "),
    (["algorithm.teacher=tiny", "algorithm.teacher_divergence=kl"], "teacher_divergence"),
    (["algorithm.teacher=tiny", "algorithm.teacher_divergence=1.5"], "teacher_divergence"),
])  # fmt: skip
def test_a_teacher_that_does_not_fit_is_refused(words, named, tmp_path):
    folder = tmp_path / "teacher"
    shutil.copytree(TINY, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(folder)
    fewer = shutil.copytree(TINY, tmp_path / "fewer")
    change_json("config.json", vocab_size=98)(fewer)
    words = [word.replace("TEACHER", str(folder)).replace("FEWER", str(fewer)) for word in words]
    result = easyrl("grpo", "--output", tmp_path / "run", *words)
    assert result.exit_code == 2 and named in result.stderr, result.output
    assert {*tmp_path.iterdir()} == {folder, fewer}
