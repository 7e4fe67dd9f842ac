"""Agents in threads of a test, with the embedded engine: what they ask, and the tokens trained."""

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
from easyrl.agents.episodes import AgentEpisodes
from easyrl.agents.program import Agent
from easyrl.config import load_config
from easyrl.config.rollout import SamplingChoice
from easyrl.data.hub import resolve_model
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.engines.sampling import SamplingSettings
from easyrl.environments.host_pool import CallFailed, HostKilled
from easyrl.model.files import tokenizer_of
from easyrl.model.loading import load_policy, picture_input
from easyrl.model.prompt_renderer import PromptRenderer
from easyrl.rewards.worker import Call, Scored
from easyrl.runtime.resolve import resolve
from easyrl.types import Prompt
from own_processes import WAIT_SECONDS

KEY = (0, 0, 0)
HELLO = [{"role": "user", "content": "0-99"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def num_branches(completion):
    """Of how many runs of tokens a completion consists, each behind a token of another."""
    continues_another = completion.tree.predecessors != np.arange(completion.tree.num_tokens) - 1
    first = completion.tree.num_tokens - len(completion.token_ids)
    return 1 + int(continues_another[first + 1 :].sum())


class Threads:
    """Runs agents in threads of the test: the interface of `AgentPool`."""

    connections = ()

    def __init__(self):
        self._threads, self._agent = ThreadPoolExecutor(256), Agent.__new__(Agent)
        self._agent.words, self._agent._openai = [], None
        self.solve = None  # the agent of a test
        self.notes = []
        self.report = self.notes.append

    def loaded(self):
        return {}, ()

    def run_agents(self, key, row, url, keys):
        self.url = url
        return [self._threads.submit(self._run, row, url, each) for each in keys]

    def give_up(self, future):
        future.set_exception(TimeoutError())  # its thread ends when it cannot set another result

    def _run(self, row, url, key):
        agent, agent._solve = self._agent, self.solve
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
    """Generate groups as a rollout worker does, without a ring and rewards."""

    def __init__(
        self, model, *words, length=120, num=1, max_open=1, num_rows=None, prompt_length=32
    ):
        settings = {"model.path": model, "rollout.agent": "own.py:solve"}
        lengths = (
            f"rollout.max_completion_length={length}",
            f"data.max_prompt_length={prompt_length}",
        )
        spec = resolve(load_config(None, settings, (*lengths, *words)))
        self.path = spec.model.path
        self.num, self.length, self.prompt_length = num, length, prompt_length
        sampling = SamplingSettings(
            max_prompt_length=prompt_length + length,
            max_completion_length=length,
            max_length=prompt_length + length,
            stop=spec.engine.stop,
            seed=3,
        )
        pictures = picture_input(spec.model)
        policy = load_policy(
            model, "cpu", trust_remote_code=False, dtype="float32", pictures=pictures
        )
        tokenizer = self.tokenizer = tokenizer_of(spec.model)
        policy.stop_at(tokenizer.eos_token_id)
        rows = num_rows or max_open * num
        self.engine = EmbeddedEngine(policy, sampling, num_rows=rows, tokenizer=tokenizer)
        self.engine_log = Recorder(self.engine)
        choice = SamplingChoice(num, length, 1.0)
        endpoint = Endpoint(spec.episodes, choice)
        self.pool = Threads()
        self.episodes = AgentEpisodes(spec.episodes, self.pool, endpoint, max_open_groups=max_open)
        self.episodes.bind(self.engine, PromptRenderer(spec.model, tokenizer), rows)

    def close(self):
        self.engine.close()
        self.episodes.close()

    def run(self, solve, *, num_groups=1, seconds=WAIT_SECONDS, **columns):
        self.pool.solve = solve
        found, deadline = {}, time.monotonic() + seconds
        for index in range(num_groups):
            prompt = Prompt(index, HELLO, {"answer": index, **columns})
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
        """Yield the tokens up to each sampled token of a completion, by its tree."""
        tokens = [*prompt_ids, *completion.token_ids.tolist()]
        before = completion.tree.predecessors.tolist()
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
        path = resolve_model(self.path)
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        trained, paths = Counter(), {}
        for prompt_ids, completions, *_ in found.values():
            assert 0 < len(prompt_ids) <= self.prompt_length
            for completion in completions:
                assert len(completion.token_ids) <= self.length
                assert completion.tree.num_tokens == len(prompt_ids) + len(completion.token_ids)
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


def played(solve, *words, model="tiny-guess", num_groups=1, columns=None, **how):
    with closing(Worker(model, *words, **how)) as worker:
        found = worker.run(solve, num_groups=num_groups, **columns or {})
        worker.check(found)
    return found


def chat(client, messages, **options):
    answer = client.chat.completions.create(model="any", messages=messages, **options)
    return answer.choices[0].message.content


def said(text):
    return {"role": "assistant", "content": text}


def asked(text):
    return {"role": "user", "content": text}
