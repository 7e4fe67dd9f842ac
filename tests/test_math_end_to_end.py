"""Math rewards end to end: data rows, chat template, reward processes, reported results.

Only the engine is replaced, by one that returns the completions of tests/math_answers.py. The
rollout worker runs in a thread of the test process:

    prompt's tokens ──► ScriptedEngine ──► completion's tokens ──► reward processes ──► events
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
from easyrl.engines.base import FinishedGroup, GroupRequest, check_request
from easyrl.model.files import load_tokenizer
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

    def spawn(self, name: str, target: Any, settings: WorkerSettings, ring: None) -> Worker:
        ours, theirs = Pipe()
        thread = _Thread(target=_work, args=(settings, theirs))
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


def _work(settings: WorkerSettings, control: Connection) -> None:
    try:
        worker = RolloutWorker(settings, None, control)
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
    monkeypatch.setattr("easyrl.evaluate.command.Supervisor", ThreadSupervisor)


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
        {"problem": problem(n), "solution": "It is left to the reader.", "answer": answer}
        for n, (answer, _, _) in enumerate(answers)
    ]


def math_rows(answers: Answers) -> list[dict[str, Any]]:
    """Rows whose answer is in the solution's `\\boxed`."""

    def solution(answer: str) -> str:
        boxed = answer if "boxed" in answer else rf"\boxed{{{answer.strip('$')}}}"
        return f"As $1 + 1 = 2$ and $x^2 \\ge 0$, the answer is {boxed}."

    return [
        {"problem": problem(n), "solution": solution(answer)}
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
    "gsm8k": (GSM8K, gsm8k_rows, 1, "answer"),
    "math500": (MATH + KNOWN, math500_rows, 4, "answer"),
    "math": ((MATH + KNOWN)[::3], math_rows, 1, "solution"),
}


@pytest.mark.parametrize("preset", EVALUATED)
def test_evaluation_reports_the_score_of_every_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    answers, rows, num_samples, column = EVALUATED[preset]
    use_scripted_engine(monkeypatch, texts_of(answers))
    words = ["--model", str(model), "--infer-devices", "cpu", "--output", str(tmp_path / "ev")]
    words += ["--dataset", write_rows(tmp_path / "d.jsonl", rows(answers)), f"data.preset={preset}"]
    words += [f"data.columns={{answer: {column}}}"]
    done = CliRunner().invoke(cli.app, ["eval", "--no-live", *words])
    assert done.exit_code == 0, done.output
    check_samples(lines_of(tmp_path / "ev" / "samples.jsonl"), answers, num_samples)
    results = json.loads((tmp_path / "ev" / "eval.json").read_text())
    share = sum(score for _, _, score in answers) / len(answers)
    assert results["accuracy"] == pytest.approx(share / num_samples)
    assert results["pass_at_k"][str(num_samples)] == share
    assert (results["num_problems"], results["num_samples"]) == (len(answers), num_samples)
