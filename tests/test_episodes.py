"""Whole runs with environments: games and tools, exact and reproducible, whatever fails."""

import json
import os
import signal

import numpy as np
import pytest
from transformers import AutoTokenizer

from easyrl.environments.host import PROCESS_NAME
from easyrl.runtime.control import request
from runs import (
    ALL_SAMPLES,
    GUESS,
    assert_on_policy,
    assert_tokens_are_counted,
    descendants,
    finish,
    finish_after,
    kill_worker,
    lines_of,
    succeed,
    summary_of,
    wait_until,
)
from tool_models import call, chat_model, chat_tokenizer

GAME = (*GUESS, "--environment", "guess")
CALLS = (
    call("add", '{"a": 2, "b": 3}'),
    call("add", '{"a": 2}'),
    call("fly", "{}"),
    "<tool_call>{</tool_call>",
)
OWN = '''
import os

class Adder:
    def reset(self, word: str, **columns) -> str | None:
        self.num_calls, self.word = 0, word
        if word == "broken":
            raise RuntimeError("no such word")
        if word == "long":
            return " long" * 40
        return f" {word}"

    async def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        self.num_calls += 1
        if self.word == "fatal":
            os._exit(3)
        return a + b

    def get_reward(self) -> float:
        return self.num_calls + len(self.word) / 10
'''


def tool_run(folder, words, *arguments):
    """Arguments of a run in which a random model calls `Adder.add`, one row for each word."""
    model = chat_model(folder / "model", CALLS)
    (folder / "own.py").write_text(OWN)
    rows = [json.dumps({"prompt": "q", "word": word}) for word in words]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return (
        *("--model", model, "--dataset", f"{folder}/rows.jsonl", "--iterations", "2", "--no-live"),
        *("--environment", f"{folder}/own.py:Adder", "data.max_prompt_length=32"),
        *("rollout.max_completion_length=400", "train.prompts_per_iteration=4"),
        *("rollout.num_generations=4", "train.learning_rate=0.001", "data.shuffle=false"),
        *arguments,
    )


def hosts_of(process):
    return wait_until(
        lambda: [p.pid for p in descendants(process.pid) if p.name() == PROCESS_NAME], process
    )


def test_a_game_is_on_policy_and_no_bit_depends_on_schedule_delays_or_kills(tmp_path):
    sync, run = tmp_path / "sync", tmp_path / "periodic"
    words = (*GAME, "--infer-devices", "cpu:2", "--iterations", "2")
    words += ("runtime.deterministic=true", "rollout.max_concurrent_groups=4", ALL_SAMPLES)
    words += ("--schedule",)
    succeed(*words, "sync", "--output", str(sync), "rollout.environment_workers=1")
    assert_tokens_are_counted(sync, num_devices=3)

    def kill(process):
        os.kill(max(hosts_of(process)), signal.SIGKILL)
        kill_worker(process)

    more = ("periodic", "rollout.environment_workers=2", "--output", str(run))
    code, out, err = finish_after("iteration 1/", kill, *words, *more, EASYRL_RANDOM_DELAYS="0.03")
    assert code == 0, out + err
    summary = assert_on_policy(run)
    assert summary["weights_sha256"] == assert_on_policy(sync)["weights_sha256"]
    assert summary["worker_restarts"] == 1
    assert all(1 <= line["episodes/turns"] <= 12 for line in lines_of(run / "metrics.jsonl"))
    for sample in lines_of(run / "samples.jsonl"):
        roles = [message["role"] for message in sample["messages"]]
        assert roles[:2] == ["user", "assistant"] and set(roles) == {"user", "assistant"}
        assert sample["ended_by"] in ("done", "length", "max_turns")
        answers = [message["content"] for message in sample["messages"][2::2]]
        assert set(answers) <= {"higher", "lower", "yes", "not a number"}
        assert (sample["reward"] > 0) == (answers[-1:] == ["yes"])


def test_tools_are_called_and_their_errors_and_tokens_counted(tmp_path):
    words = tool_run(tmp_path, ["one", "three"], "rollout.max_turns=3", "data.num_held_out=0")
    run = tmp_path / "run"
    succeed(*words, "--output", str(run), ALL_SAMPLES)
    assert_on_policy(run)
    of_characters = chat_tokenizer(CALLS)
    # Beside a model of Qwen 2 transformers splits texts in its own way, which loses spaces here.
    of_run = AutoTokenizer.from_pretrained(tmp_path / "model")

    def num_tokens(text, tokenizer=of_characters):
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    def inserted_in(sample):
        """Count the tokens of results that the model has gone on from, as the template has them."""
        total, results = 0, ""
        for message in sample["messages"]:
            if message["role"] == "tool":
                results += f"T{message['content']}\n"
            elif results:
                total += num_tokens(f"\n{results}A", of_run)
                results = ""
        return total

    assert_tokens_are_counted(run, inserted_in, num_tokens)
    metrics, contents = lines_of(run / "metrics.jsonl"), set()
    calls, errors = (sum(line[f"tools/{name}"] for line in metrics) for name in ("calls", "errors"))
    assert calls > errors
    for sample in lines_of(run / "samples.jsonl"):
        messages = sample["messages"]
        results = [message["content"] for message in messages if message["role"] == "tool"]
        contents |= {*results}
        _, word = messages[0]["content"].split()
        assert sum(message["role"] == "assistant" for message in messages) <= 3
        assert sample["reward"] == pytest.approx(results.count("5") + len(word) / 10)
    assert "5" in contents and any("fly" in content for content in contents)


@pytest.mark.long
def test_broken_environments_are_handled_as_rewards_are(tmp_path):
    words = tool_run(tmp_path, ["one", "broken", "fatal", "long"])
    code, _, err = finish(*words, "--output", str(tmp_path / "stop"))
    assert code == 1 and "rollout.environment" in err
    run = tmp_path / "zero"
    succeed(*words, "--output", str(run), "reward.on_error=zero")
    rewards = [s["reward"] for s in lines_of(run / "samples.jsonl")]
    assert np.isfinite(rewards).all() and summary_of(run)["groups_trained"] == 8


UNLUCKY = """
import os, random, signal, time
from pathlib import Path

class Game:
    def reset(self, **columns):
        self.texts = []
        once("reset", time.sleep, 1000)

    def step(self, text):
        self.texts.append(text)
        once("kill", os.kill, os.getpid(), signal.SIGKILL)
        once("hang", time.sleep, 1000)
        return f"{random.random()}", len(self.texts) > 1

    def get_reward(self): return len(self.texts)

def once(name, function, *arguments):
    try: Path(__file__).with_name(name).touch(exist_ok=False)
    except FileExistsError: return
    function(*arguments)
"""


@pytest.mark.long
def test_slow_and_killed_environments_do_not_end_a_run(tmp_path):
    (tmp_path / "unlucky.py").write_text(UNLUCKY)
    words = ("--iterations", "2", "--environment", f"{tmp_path}/unlucky.py:Game")
    words += ("rollout.tool_timeout_seconds=3", "reward.check=false")
    run = tmp_path / "run"
    succeed(*GUESS, *words, "--output", str(run))
    assert all((tmp_path / name).exists() for name in ("reset", "kill", "hang"))
    assert summary_of(run)["groups_trained"] == 12


@pytest.mark.long
def test_other_features_go_with_environments(tmp_path):
    folder = tmp_path / "run"
    code, out, err = finish_after(
        "iteration 1/",
        lambda process: request(folder, {"command": "scale", "infer_devices": "cpu:3"}),
        *(*GAME, "--iterations", "30", "--infer-devices", "cpu:2", "--train-devices", "cpu:2"),
        *("algorithm.dynamic_sampling=true", "train.updates_per_iteration=2", "model.lora.rank=4"),
        *("train.eval_every=10", "data.num_held_out=4", "devices.max_rollout_workers=3"),
        *("--output", str(folder)),
        timeout=400,
    )
    assert code == 0, out + err
    assert assert_on_policy(folder)["groups_trained"] == 180
    assert (folder / "logs" / "rollout-2.log").exists()


@pytest.mark.long
def test_a_lost_worker_loses_no_episode_and_a_resumed_run_ends_in_the_same_bits(tmp_path):
    words = (*GAME, "--infer-devices", "cpu:2", "runtime.deterministic=true")
    words += ("train.save_every=1",)
    whole, folder = tmp_path / "whole", tmp_path / "lost"
    succeed(*words, "--iterations", "4", "--output", str(whole))
    words += ("--iterations", "3", "--output", str(folder))
    how = {"EASYRL_RANDOM_DELAYS": "0.02"}
    code, out, err = finish_after("iteration 1/", kill_worker, *words, **how)
    assert code == 0, out + err
    assert summary_of(folder)["worker_restarts"] == 1
    succeed("--resume", str(folder), "--iterations", "4", "--no-live")
    assert summary_of(folder)["weights_sha256"] == summary_of(whole)["weights_sha256"]
