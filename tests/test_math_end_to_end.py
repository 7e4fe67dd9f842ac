"""Math rewards end to end: data rows, chat template, reward processes, reported results.

Only the engine is replaced, by one that returns the completions of tests/math_answers.py. The
rollout worker runs in a thread of the test process:

    prompt's tokens ──► ScriptedEngine ──► completion's tokens ──► reward processes ──► ring, events
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from easyrl import cli, events
from easyrl.channels.ring_buffer import RingBuffer
from easyrl.config import Config, load_config
from easyrl.engines.base import FinishedGroup, GroupRequest, check_request
from easyrl.model.files import load_tokenizer
from easyrl.rewards.loading import reward_names
from easyrl.runtime import supervisor
from easyrl.runtime.dispatch import Rounds
from easyrl.runtime.metrics import IterationRecord
from easyrl.runtime.placement import ring_layout
from easyrl.runtime.preflight import check_run
from easyrl.runtime.supervisor import Worker, WorkerFailure
from easyrl.types import Completion
from easyrl.workers.rollout import RolloutWorker, sampling_settings
from easyrl.workers.settings import WorkerSettings
from math_answers import GSM8K, KNOWN, MATH
from runs import lines_of

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|im_end|>"


def as_chat_prompt(content: str) -> str:
    """A user's message in the chat template."""
    return f"<|im_start|>user\n{content}{END}\n<|im_start|>assistant\n"


def make_chat_model(folder: Path) -> Path:
    """Save a random model with one layer, a byte-level tokenizer and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.add_special_tokens([AddedToken("<|im_start|>"), AddedToken(END)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token=END)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    shape = Qwen2Config(vocab_size=len(tokenizer), max_position_embeddings=40960, **sizes, **heads)
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    return folder


class ScriptedEngine:
    """Engine that returns `texts[prompt]`, then "I do not know." for the other samples."""

    def __init__(self, worker: RolloutWorker, tokenizer: Any, texts: Mapping[str, Sequence[str]]):
        self._sampling = sampling_settings(worker.config, worker.sampling)
        self._tokenizer = tokenizer
        self._texts = texts
        self._waiting: deque[GroupRequest] = deque()
        self.num_prompt_tokens = self.num_completion_tokens = 0

    def submit(self, request: GroupRequest) -> None:
        check_request(request, self._sampling)
        self._waiting.append(request)

    def step(self) -> list[FinishedGroup]:
        request = self._waiting.popleft()
        prompt = self._tokenizer.decode(request.prompt_ids)
        assert prompt in self._texts, f"unexpected prompt {prompt!r}"
        texts = [*self._texts[prompt], *["I do not know."] * request.num_generations]
        completions = [self._completion(text) for text in texts[: request.num_generations]]
        self.num_prompt_tokens += len(request.prompt_ids)
        self.num_completion_tokens += sum(len(each.token_ids) for each in completions)
        return [FinishedGroup(request, completions)]

    def _completion(self, text: str) -> Completion:
        ids = self._tokenizer(text + END)["input_ids"]
        logprobs = np.zeros(len(ids), dtype=np.float32)
        return Completion(np.array(ids, dtype=np.int32), logprobs, "stop")

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def receive_weights(self, policy_version: int) -> None:
        pass

    def close(self) -> None:
        pass


class ThreadSupervisor:
    """A `Supervisor` whose workers are threads."""

    def __init__(self) -> None:
        self._workers: list[tuple[Worker, threading.Thread]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker, thread in self._workers:
            worker.send(events.Stop())
            thread.join()
            worker.close()

    def spawn(self, name: str, target: Any, settings: WorkerSettings, ring: Any) -> Worker:
        ours, theirs = Pipe()
        port = None if ring is None else ring.attach(settings.owner_id)
        thread = _Thread(target=_work, args=(settings, port, theirs))
        worker = Worker(name, thread, ours)  # type: ignore[arg-type]
        self._workers.append((worker, thread))
        thread.start()
        return worker

    def wait(self, seconds: float | None = None, *, needed: Any = None) -> list[tuple[Worker, Any]]:
        pipes = {worker.control: worker for worker, _ in self._workers}
        ready = wait(list(pipes), seconds)
        received = [(worker, pipe.recv()) for pipe, worker in pipes.items() if pipe in ready]
        for worker, event in received:
            if isinstance(event, events.Failed):
                raise WorkerFailure(f"{worker.name} failed: {event.message}")
        return received


class _Thread(threading.Thread):
    pid = os.getpid()  # for checks of the worker process


def _work(settings: WorkerSettings, port: Any, control: Connection) -> None:
    try:
        worker = RolloutWorker(settings, port, control)
        control.send(events.Ready())
        worker.run()
    except BaseException as error:
        control.send(events.Failed(repr(error), "", is_user_error=False))


def use_scripted_engine(
    monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, Sequence[str]]
) -> None:
    """Run rollout workers in threads, with a ScriptedEngine."""

    def load(worker: RolloutWorker) -> Any:
        tokenizer = load_tokenizer(worker.config.model.path, trust_remote_code=False)
        return tokenizer, ScriptedEngine(worker, tokenizer, texts)

    monkeypatch.setattr(RolloutWorker, "_load", load)
    monkeypatch.setattr(supervisor, "Supervisor", ThreadSupervisor)


Answers = Sequence[tuple[str, str, int]]
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model") / "chat")


def problem(number: int) -> str:
    return f"{number}. What is $\\frac{{1}}{{{number + 1}}}$ of {{all}}, in €?"


def gsm8k_rows(answers: Answers) -> list[dict[str, Any]]:
    return [{"question": problem(n), "answer": answer} for n, (answer, _, _) in enumerate(answers)]


def math500_rows(answers: Answers) -> list[dict[str, Any]]:
    return [
        {
            "problem": problem(n),
            "solution": "It is left to the reader.",
            "answer": answer,
            "subject": "Algebra",
            "level": 3,
            "unique_id": f"test/algebra/{n}.json",
        }
        for n, (answer, _, _) in enumerate(answers)
    ]


def math_rows(answers: Answers) -> list[dict[str, Any]]:
    """Rows whose answer is in the solution's `\\boxed`."""

    def solution(answer: str) -> str:
        boxed = answer if "boxed" in answer else rf"\boxed{{{answer.strip('$')}}}"
        return f"As $1 + 1 = 2$ and $x^2 \\ge 0$, the answer is {boxed}."

    return [
        {
            "problem": problem(n),
            "level": "Level 3",
            "type": "Algebra",
            "solution": solution(answer),
        }
        for n, (answer, _, _) in enumerate(answers)
    ]


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def texts_of(answers: Answers) -> dict[str, list[str]]:
    return {as_chat_prompt(problem(n) + BOXED): [text] for n, (_, text, _) in enumerate(answers)}


def check_samples(samples: Sequence[dict[str, Any]], answers: Answers, num_samples: int) -> None:
    """The first sample of each problem has the table's text and score, all others score 0."""
    assert len(samples) == num_samples * len(answers)
    for sample in samples:
        _, text, score = answers[sample["prompt_index"]]
        expected = (text, score) if sample["sample"] == 0 else ("I do not know.", 0)
        assert (sample["completion"], sample["reward"]) == expected, sample
        assert list(sample["rewards"].values()) == [sample["reward"]]
        assert sample["prompt"] == f"user: {problem(sample['prompt_index'])}{BOXED}"


EVALUATED = {
    "gsm8k": (GSM8K, gsm8k_rows, 1),
    "math500": (MATH + KNOWN, math500_rows, 4),
}


@pytest.mark.parametrize("preset", EVALUATED)
def test_evaluation_reports_the_score_of_every_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    answers, rows, num_samples = EVALUATED[preset]
    use_scripted_engine(monkeypatch, texts_of(answers))
    words = ["--model", str(model), "--infer-devices", "cpu", "--output", str(tmp_path / "ev")]
    words += ["--dataset", write_rows(tmp_path / "d.jsonl", rows(answers)), f"data.preset={preset}"]
    done = CliRunner().invoke(cli.app, ["eval", "--no-live", *words])
    assert done.exit_code == 0, done.output
    samples = lines_of(tmp_path / "ev" / "samples.jsonl")
    check_samples(samples, answers, num_samples)
    results = json.loads((tmp_path / "ev" / "eval.json").read_text())
    share = sum(score for _, _, score in answers) / len(answers)
    assert results["accuracy"] == pytest.approx(share / num_samples)
    assert results["avg_at_k"]["1"] == results["pass_at_k"][str(num_samples)] == share
    assert (results["num_problems"], results["num_samples"]) == (len(answers), num_samples)
    for number, (answer, text, score) in enumerate(answers):  # a wrong score would be noticed
        wrong = [*answers[:number], (answer, text, 1 - score), *answers[number + 1 :]]
        with pytest.raises(AssertionError):
            check_samples(samples, wrong, num_samples)


TRAINED = {
    "gsm8k": (GSM8K, gsm8k_rows, "answer"),
    "math": ((MATH + KNOWN)[::3], math_rows, "solution"),  # the evaluation has all
}


@pytest.mark.parametrize("preset", TRAINED)
def test_training_gets_the_reward_and_advantage_of_every_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    answers, rows, column = TRAINED[preset]
    use_scripted_engine(monkeypatch, texts_of(answers))
    flags = {
        "model.path": str(model),
        "data.dataset": write_rows(tmp_path / "d.jsonl", rows(answers)),
        "data.preset": preset,
        "data.columns": {"answer": column},
        "train.prompts_per_iteration": len(answers),
        "rollout.num_generations": 2,
        "devices.infer": "cpu",
        "devices.train": "cpu",
        "output.dir": str(tmp_path / "run"),
    }
    config = load_config(None, flags)
    record, groups = roll_out(config, tmp_path)
    for number, (_, text, score) in enumerate(answers):
        rewards, advantages = groups[as_chat_prompt(problem(number) + BOXED)]
        assert rewards == [score, 0], text
        spread = 0.5**0.5 + 1e-4  # of 0 and 1, with n - 1
        expected = [0.5 / spread, -0.5 / spread] if score else [0, 0]
        assert advantages == pytest.approx(expected)
    share = sum(score for _, _, score in answers) / len(answers)
    metrics = record.metrics(reward_names(config))
    assert metrics["reward"] == metrics[f"rewards/{preset}/mean"] == pytest.approx(share / 2)
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 - share)
    assert metrics["groups_skipped"] == metrics["reward_errors"] == 0


Groups = dict[str, tuple[list[float], list[float]]]
"""Rewards and advantages by prompt text."""


def roll_out(config: Config, folder: Path) -> tuple[IterationRecord, Groups]:
    """Run one iteration up to the ring's reader and the metrics, without a trainer."""
    preflight = check_run(config)
    placement = preflight.placement
    ring = RingBuffer(ring_layout(config, placement))
    reader = ring.attach(1)
    rounds = Rounds(
        preflight.prompts, 0, num_groups=config.train.prompts_per_iteration, max_replacements=0
    )
    settings = WorkerSettings(
        name="rollout-0",
        owner_id=0,
        config=config,
        device="cpu",
        weights_cross_on_cpu=True,
        num_threads=1,
        max_concurrent_groups=placement.max_concurrent_groups,
        store_path="",
        log_file=str(folder / "rollout-0.log"),
    )
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=False)
    record, groups = IterationRecord(0), Groups()
    with ThreadSupervisor() as threads:
        worker = threads.spawn("rollout-0", None, settings, ring)
        worker.send(events.ExchangeWeights(0))
        worker.send(events.Generate(0, rounds.start(), is_last_round=True))
        while not rounds.is_over:
            for _, event in threads.wait():
                if isinstance(event, events.GroupScored):
                    rounds.add(event)
                    record.add_group("rollout-0", event, 1.0)
                    lease = reader.get(1.0)
                    assert lease is not None
                    with lease as group:
                        prompt = tokenizer.decode(group.prompt_ids)
                        groups[prompt] = group.rewards.tolist(), group.advantages.tolist()
    ring.close()
    record.trained = events.IterationTrained(0, 1, len(groups), 0, 0, 1.0, {})
    return record, groups
