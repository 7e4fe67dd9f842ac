"""A process that holds environments or runs agents: all of a group are in the same one.

    rollout worker ──(number, method, arguments)──► host: threads, and an event loop
                   ◄──JSON (number, kind, value)───

`kind`: started, returned, failed (with a traceback) or misconfigured (with a ConfigError's message)

Calls of different episodes run at the same time, at most `rollout.concurrent_calls`; coroutines run
on one event loop. In deterministic runs calls run one after another, in the main thread, and
Python's and NumPy's global random numbers belong to the episode whose call runs. Agents run all at
the same time, in any case.
"""

import asyncio
import inspect
import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import numpy as np

from easyrl.agents.program import Agent, Value
from easyrl.config import Config, ConfigError
from easyrl.environments.loading import Environment, Interfaces, load_environments
from easyrl.environments.tool_calls import BadCall, Calls
from easyrl.processes import maybe_sleep, raise_open_files, set_name
from easyrl.rewards import worker
from easyrl.rewards.loading import accepted_arguments
from easyrl.types import Messages
from easyrl.user_code import user_traceback

PROCESS_NAME = "easyrl-env"
Key = tuple[int, ...]  # identifies a group
MAX_AGENTS, AGENT_STACK_BYTES = 4096, 2**21  # threads of agents: 8 MiB each would be too much

Request = tuple[int, str, tuple[Any, ...], bool]
"""Number, method of `Host`, arguments, and whether it is repeated: those that follow need it."""


class Acted(NamedTuple):
    """Results of an episode's calls, as messages; `is_done`: the environment ends the episode."""

    messages: Messages
    is_done: bool = False
    num_calls: int = 0
    num_errors: int = 0


@dataclass(slots=True)
class _Episode:
    name: str  # of the environment
    tools: Mapping[str, Callable[..., Any]]
    environment: Any = None
    random_states: tuple[Any, Any] | None = None  # Python's and NumPy's, in deterministic runs


class Host:
    """The methods that a rollout worker calls."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._environments: Mapping[str, Environment] = {}
        self._groups: dict[Key, dict[int, _Episode]] = {}
        self._spare: dict[str, list[Any]] = {}  # instances that are not in use
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _awaited(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        return asyncio.run_coroutine_threadsafe(cast(Any, value), self._loop).result()

    def load(self, _: Key = (), with_schemas: bool = False) -> tuple[Interfaces, Sequence[int]]:
        """Load environments and reward functions; return the interfaces by name, and the numbers of
        the reward functions that need environments. Raises ConfigError."""
        if self._config.rollout.agent is not None:
            self._agent = Agent(self._config)
            return {}, ()
        self._environments = load_environments(self._config, with_schemas=with_schemas)
        interfaces = {name: each.interface for name, each in self._environments.items()}
        self._spare = {name: [each.first] for name, each in self._environments.items()}
        return interfaces, worker.functions_with_environments()

    def reset(
        self, key: Key, index: int, name: str, row: Mapping[str, Any], seed: int
    ) -> str | None:
        """Start episode `index` of a group; return the observation. Instances are reset often."""
        if not self._environments:  # `load` failed in this process
            self.load()
        kind, spare = self._environments[name], self._spare[name]
        episode = self._groups.setdefault(key, {})[index] = _Episode(name, kind.tools)
        if kind.make is None:
            return None
        episode.environment = environment = spare.pop() if spare else kind.make()
        own = {method: getattr(environment, method) for method in kind.methods}
        episode.tools = {**kind.tools, **own}
        if self._config.runtime.deterministic:
            drawn = np.random.RandomState(seed % 2**32)
            episode.random_states = random.Random(seed).getstate(), drawn.get_state()
        if "seed" in inspect.signature(environment.reset).parameters:
            row = {"seed": seed, **row}
        arguments = accepted_arguments(environment.reset, row)
        observation = self._call(episode, environment.reset, **arguments)
        if not isinstance(observation, str | None):
            raise TypeError(f"reset: expected a string or None, got {observation!r:.80}")
        return observation

    def run_agent(self, key: Key, row: Mapping[str, Any], base_url: str, api_key: str) -> Value:
        worker.BoundedOutput.begin_call()
        return self._agent.run(row, base_url, api_key, self._awaited)

    def act(self, key: Key, index: int, calls: Calls | str) -> Acted:
        """Execute a turn's tool calls, or give the text of a turn to a game."""
        episode = self._groups[key][index]
        if isinstance(calls, str):
            returned = self._call(episode, episode.environment.step, calls)
            match returned:
                case (str() as observation, done):
                    return Acted([{"role": "user", "content": observation}], bool(done), 1)
            raise TypeError(f"step: expected (observation, done), got {returned!r:.80}")
        messages, num_errors = [], 0
        for call in calls:
            message = {"role": "tool", "name": call.name, "content": ""}
            if call.call_id:
                message["tool_call_id"] = call.call_id
            try:
                if isinstance(call, BadCall):
                    raise ValueError(call.reason)
                if call.name not in episode.tools:
                    raise ValueError(f"there is no tool '{call.name}'")
                returned = self._call(episode, episode.tools[call.name], **call.arguments)
                message["content"] = str(returned)
            except BaseException as error:  # of the user's tool, SystemExit too, or of a wrong call
                num_errors += 1
                message["content"] = str({"error": str(error)})
            messages.append(message)
        return Acted(messages, False, len(calls), num_errors)

    def _call(
        self, episode: _Episode, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        worker.BoundedOutput.begin_call()
        if episode.random_states is None:
            return self._awaited(function(*args, **kwargs))
        before = _exchange_random_states(episode.random_states)
        try:
            return self._awaited(function(*args, **kwargs))
        finally:
            episode.random_states = _exchange_random_states(before)

    def judge(self, key: Key, call: worker.Call) -> worker.Scored:
        """Call the reward functions that need the group's environments."""
        episodes = self._groups[key]
        environments = [episodes[index].environment for index in sorted(episodes)]
        return worker.run_call(call, environments, self._awaited)

    def forget(self, key: Key) -> None:
        """Drop a group. Its environments are used again."""
        for episode in self._groups.pop(key, {}).values():
            if episode.environment is not None:
                self._spare[episode.name].append(episode.environment)


def _exchange_random_states(states: tuple[Any, Any]) -> tuple[Any, Any]:
    before = random.getstate(), np.random.get_state()
    random.setstate(states[0])
    np.random.set_state(states[1])
    return before


def serve(connection: Connection, config: Config, sources: Mapping[str, str]) -> None:
    worker.start(config, sources)
    set_name(PROCESS_NAME)
    host, sending = Host(config), threading.Lock()

    def send(number: int, kind: str, value: Any = None) -> None:
        content = json.dumps((number, kind, value)).encode()
        with sending:
            connection.send_bytes(content)

    def answer(request: Request) -> None:
        number, method, arguments, _ = request
        maybe_sleep()
        send(number, "started")
        try:
            send(number, "returned", getattr(host, method)(*arguments))
        except ConfigError as error:
            send(number, "misconfigured", str(error))
        except BaseException as error:  # SystemExit too: the process belongs to the environments
            send(number, "failed", user_traceback(error))

    num_threads = 1 if config.runtime.deterministic else config.rollout.concurrent_calls
    if config.rollout.agent is not None:
        num_threads = MAX_AGENTS
        threading.stack_size(AGENT_STACK_BYTES)
        raise_open_files()
    with ThreadPoolExecutor(num_threads) as threads:
        answer(connection.recv())  # `load`, which all others need
        while request := connection.recv():
            *_, is_repeated = request
            if num_threads == 1 or is_repeated:
                answer(request)  # in the main thread, where `signal` works
            else:
                threads.submit(answer, request)
