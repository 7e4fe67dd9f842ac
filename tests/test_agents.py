"""Agents: what they ask of the endpoint, and the tokens that are trained."""

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from easyrl.agents.endpoint import Endpoint
from easyrl.agents.program import Agent
from easyrl.config import load_config
from easyrl.config.rollout import SamplingChoice
from easyrl.data.hub import resolve_model
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.engines.sampling import SamplingSettings
from easyrl.environments.pool import CallFailed, HostKilled
from easyrl.model.files import tokenizer_of
from easyrl.model.policy import Policy
from easyrl.rewards.worker import Call, Scored
from easyrl.types import Prompt
from easyrl.workers.agents import AgentEpisodes

KEY = (0, 0, 0)
HELLO = [{"role": "user", "content": "0-99"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Threads:
    """Runs agents in threads of the test: the interface of `EnvironmentPool`."""

    connections = ()

    def __init__(self):
        self._threads, self._clients = ThreadPoolExecutor(256), {}
        self.solve = None  # the agent of a test
        self.notes = []
        self.report = self.notes.append

    def loaded(self):
        return {}, ()

    def run_agents(self, key, row, url, keys):
        self.url = url
        return [self._threads.submit(self._run, row, url, each) for each in keys]

    def _run(self, row, url, key):
        agent = Agent.__new__(Agent)
        agent.words, agent._clients, agent._solve = [], self._clients, self.solve
        is_async = asyncio.iscoroutinefunction(agent._solve)
        agent._kind = "AsyncOpenAI" if is_async else "OpenAI"
        try:
            return agent.run(row, url, key, asyncio.run)
        except HostKilled:
            raise
        except Exception as error:
            raise CallFailed(repr(error)) from error

    def poll(self):
        time.sleep(0.0002)  # the test's loop does not wait for anything

    def forget(self, key):
        pass

    def close(self):
        self._threads.shutdown(wait=False)


class Recorder:
    """Writes down what an engine samples, and behind which tokens."""

    def __init__(self, engine):
        self.sampled, self._known, self.most_rows = [], {}, 0
        submit, resume, take_turns = engine.submit, engine.resume, engine.take_turns

        def on_submit(request):
            for index in range(request.num_generations):
                self._known[request.key, index] = [*request.prompt_ids]
            submit(request)

        def on_resume(turn, tokens, most=None):
            self._known[turn.key, turn.sample_index] += tokens
            resume(turn, tokens, most)

        def on_take():
            turns = take_turns()
            for turn in turns:
                known, tokens = self._known[turn.key, turn.sample_index], turn.token_ids.tolist()
                self.sampled.append((tuple(known), tuple(tokens)))
                known += tokens
            return turns

        engine.submit, engine.resume, engine.take_turns = on_submit, on_resume, on_take


class Worker:
    """What a rollout worker does with groups, without a ring and rewards."""

    def __init__(self, model, *words, length=120, num=1, max_open=1, num_rows=None):
        settings = {"model.path": model, "rollout.agent": "own.py:solve"}
        words = (f"rollout.max_completion_length={length}", "data.max_prompt_length=32", *words)
        self.config = load_config(None, settings, words)
        self.num, self.length = num, length
        sampling = SamplingSettings(
            max_prompt_length=32 + length,
            max_completion_length=length,
            max_length=32 + length,
            stop=self.config.rollout.stop,
            seed=3,
        )
        policy = Policy.load(model, "cpu", trust_remote_code=False, dtype="float32")
        tokenizer = self.tokenizer = tokenizer_of(self.config)
        policy.stop_at(tokenizer.eos_token_id)
        rows = num_rows or max_open * num
        self.engine = EmbeddedEngine(policy, sampling, num_rows=rows, tokenizer=tokenizer)
        self.engine_log = Recorder(self.engine)
        choice = SamplingChoice(num, length, 1.0)
        endpoint = Endpoint(self.config, choice)
        self.pool = Threads()
        self.episodes = AgentEpisodes(self.config, self.pool, endpoint, max_open_groups=max_open)
        self.episodes.bind(self.engine, tokenizer, rows)

    def close(self):
        self.engine.close()
        self.episodes.close()

    def run(self, solve, *, num_groups=1, seconds=60):
        """Return the finished groups of an agent, by their keys."""
        self.pool.solve = solve
        found, deadline = {}, time.monotonic() + seconds
        for index in range(num_groups):
            prompt = Prompt(index, HELLO, {"answer": index})
            self.episodes.submit((0, 0, index), prompt, self.num)
        while len(found) < num_groups:
            assert time.monotonic() < deadline, "not in time"
            if self.engine.can_step:
                assert self.episodes.take(self.engine.step()) == []
            for request, completions in self.episodes.advance():
                key = request.key
                _, answers = self.episodes.finish(key, completions)
                judged = self.episodes.judge(key, Call(HELLO, answers, [], {}))
                error = None if judged is None else judged[1].exception()
                scored = error or Scored(*judged[1].result())
                found[key] = (request.prompt_ids, completions, answers, scored)
                found[key] += self.episodes.forget(key)
        assert not self.engine.has_work
        assert not (self.episodes._sequences or self.episodes._episodes)
        assert not self.episodes.endpoint.keys
        return found

    def paths(self, prompt_ids, completion):
        """Yield the tokens up to each sampled token of a completion, by its segments."""
        tokens = [*prompt_ids, *completion.token_ids.tolist()]
        starts = np.cumsum([0, *completion.segment_lengths])[:-1] + len(prompt_ids)
        before = [*range(-1, len(tokens) - 1)]
        for start, after in zip(starts, completion.segment_after, strict=True):
            assert after < start
            before[start] = after
        paths = []
        for index, token in enumerate(tokens):
            paths.append(([] if before[index] < 0 else paths[before[index]]) + [token])
        for index, is_sampled in enumerate(completion.is_sampled, len(prompt_ids)):
            if is_sampled:
                yield paths[index], completion.logprobs[index - len(prompt_ids)]

    def check(self, found):
        """Each token that the engine has sampled is trained once, behind the same tokens, and has
        the log-probability that transformers gives it."""
        sampled = Counter()
        for before, tokens in self.engine_log.sampled:
            sampled.update((*before, *tokens[: n + 1]) for n in range(len(tokens)))
        path = resolve_model(self.config.model.path)
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        trained, paths = Counter(), {}
        for prompt_ids, completions, *_ in found.values():
            assert 0 < len(prompt_ids) <= 32
            for completion in completions:
                assert len(completion.token_ids) <= self.length
                assert sum(completion.segment_lengths) == len(completion.token_ids)
                for path, logprob in self.paths(prompt_ids, completion):
                    trained[tuple(path)] += 1
                    paths[tuple(path)] = logprob
        assert trained == sampled
        for before, tokens in self.engine_log.sampled:
            with torch.inference_mode():
                scores = reference(torch.tensor([before + tokens])).logits[0].log_softmax(-1)
            for index, token in enumerate(tokens):
                found = paths[(*before, *tokens[: index + 1])]
                expected = float(scores[len(before) + index - 1, token])
                assert found == pytest.approx(expected, abs=1e-4)
        return len(trained)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def worker():
    with closing(Worker("tiny-guess", num=2)) as made:
        yield made


def chat(client, messages, **options):
    answer = client.chat.completions.create(model="any", messages=messages, **options)
    return answer.choices[0].message.content


def said(text):
    return {"role": "assistant", "content": text}


def asked(text):
    return {"role": "user", "content": text}


def test_branches_edits_and_sub_agents_are_trained_once_with_the_engines_tokens(worker):
    def solve(client, row):
        messages = list(HELLO)
        for _ in range(3):  # a conversation that goes on
            messages += [said(chat(client, messages)), asked("higher")]
        other = [*messages[:2], asked("lower")]  # another continuation of its first answer
        other += [said(chat(client, other)), asked("higher")]
        chat(client, other)
        chat(client, [asked("0-99"), said("5"), asked("lower")])  # an answer that was edited
        chat(client, [asked("7-8")])  # a sub-agent
        chat(client, [asked("7-8"), said("7"), *messages[-2:]])  # a compacted history
        last = chat(client, messages)  # the first conversation goes on
        return {"turns": 8, "length": len(last) / 100}

    found = worker.run(solve)
    assert worker.check(found) > 20
    _, completions, answers, scored, metrics, columns = found[KEY]
    for completion, messages, branches in zip(
        completions, answers, columns["branches"], strict=True
    ):
        assert len(completion.segment_lengths) >= 5
        assert [each["role"] for each in messages] == ["assistant", "user"] * 3 + ["assistant"]
        assert len(branches) == 4
    assert metrics["episodes/turns"] == 9
    assert scored.metrics["rewards/turns/mean"] == 8
    assert scored.scores == [[pytest.approx(8 + len(a[-1]["content"]) / 100) for a in answers]]


def test_a_continued_conversation_keeps_its_row_and_stores_no_token_twice(worker):
    def solve(client):
        messages = list(HELLO)
        for _ in range(4):
            messages += [said(chat(client, messages)), asked("higher")]

    found = worker.run(solve)
    worker.check(found)
    assert all(len(each.segment_lengths) == 1 for each in found[KEY][1])


def test_suspended_sequences_make_room_for_others():
    def solve(client):
        texts = {}
        for _ in range(2):
            for start in ("0-9", "1-8", "2-7", "3-6"):
                messages = texts.setdefault(start, [asked(start)])
                messages += [said(chat(client, messages)), asked("lower")]

    with closing(Worker("tiny-guess", num=3, max_open=2, num_rows=2)) as worker:
        found = worker.run(solve, num_groups=4)
        worker.check(found)
    assert all(each.is_sampled.any() for group in found.values() for each in group[1])


def test_requests_at_once_are_served_and_streams_and_choices_have_all_tokens():
    def solve(client):
        with ThreadPoolExecutor(100) as threads:
            own = list(threads.map(lambda n: chat(client, [asked(f"0-{n}")]), range(100)))
        n = client.chat.completions.create(model="m", messages=HELLO, n=3, max_tokens=20)
        parts = client.chat.completions.create(
            model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(parts)
        assert chunks[-1].usage.completion_tokens > 0 and chunks[-1].choices == []
        text = "".join(each.choices[0].delta.content or "" for each in chunks[:-1])
        whole = client.completions.create(model="m", prompt="0-5", max_tokens=3)
        more = client.completions.create(
            model="m", prompt=f"0-5{whole.choices[0].text}x", max_tokens=3
        )
        assert (more.usage.prompt_tokens, whole.usage.prompt_tokens) == (
            4 + whole.usage.completion_tokens,
            3,
        )
        assert [model.id for model in client.models.list()]
        assert n.usage.completion_tokens >= 3 and len(n.choices) == 3
        return float(len(own) == 100 and text.strip() != "")

    words = "rollout.max_turns=200"
    with closing(Worker("tiny-guess", words, num=1, length=1500)) as worker:
        found = worker.run(solve)
        worker.check(found)
    assert found[KEY][3].scores == [[1.0]], found[KEY][3].errors
