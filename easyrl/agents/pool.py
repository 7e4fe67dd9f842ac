"""The processes that run the user's agent, and the check of it before a run."""

import math
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from easyrl.agents.leftovers import adopt_orphans, end_all, end_leftovers
from easyrl.agents.program import Agent, Value, fill_in
from easyrl.config.spec import EpisodeSpec
from easyrl.environments.host import Host, Key
from easyrl.environments.host_pool import HostPool, TimeLimit
from easyrl.environments.pool import row_of
from easyrl.processes import children_of, raise_open_files
from easyrl.rewards import worker
from easyrl.types import Prompt

MAX_AGENTS = 4096  # threads, each of which runs an episode
STACK_BYTES = 2**21  # of such a thread: the usual 8 MiB each would be too much


class AgentHost(Host):
    """Runs all episodes of its groups at the same time, in deterministic runs, too."""

    num_threads = MAX_AGENTS

    def __init__(self, spec: EpisodeSpec) -> None:
        super().__init__(spec)
        threading.stack_size(STACK_BYTES)
        raise_open_files()

        self._lock = threading.Lock()
        self._num_running = 0
        self._kept: set[int] = set()  # processes that all episodes share

    def load(self, is_first: bool = False) -> None:
        self._agent = Agent(self._spec)
        self._kept = children_of(os.getpid())
        adopt_orphans()

    def run_agent(self, _: Key, row: Mapping[str, Any], base_url: str, api_key: str) -> Value:
        worker.BoundedOutput.begin_call()
        with self._lock:
            self._num_running += 1
        try:
            return self._agent.run(row, base_url, api_key, self.awaited)
        finally:
            end_leftovers(threading.get_native_id(), api_key)
            with self._lock:
                self._num_running -= 1
                if self._num_running == 0:
                    end_all(self._kept)


class AgentPool(HostPool):
    """Episodes of a killed process are not repeated: their requests have been answered already."""

    host_class = AgentHost
    repeats_calls = False

    def __init__(self, spec: EpisodeSpec, sources: Mapping[str, str]) -> None:
        longest = spec.episode_timeout_seconds
        if longest is None:
            seconds = math.inf
            silence_seconds = spec.tool_timeout_seconds
        else:
            # Requests are refused after `longest`, so an agent may still end by itself.
            seconds = longest + spec.tool_timeout_seconds
            silence_seconds = longest
        super().__init__(
            spec,
            sources,
            call_limit=TimeLimit(seconds, "rollout.episode_timeout_seconds"),
            silence_seconds=silence_seconds,
            has_endless_calls=longest is None,
        )

    def loaded(self) -> None:
        """Wait until the agent is loaded. Raises ConfigError."""
        self._wait_until_loaded()

    def run_agents(
        self, key: Key, row: Mapping[str, Any], base_url: str, api_keys: Sequence[str]
    ) -> list[Future[Any]]:
        """Run a group's episodes of the agent, one for each key of the endpoint. The results have
        the fields of `program.Value`."""
        self._open(key)
        return [self._call(key, "run_agent", row, base_url, api_key) for api_key in api_keys]

    def give_up(self, future: Future[Any]) -> None:
        """Let a call fail that does not return, as one that takes too long."""
        for host in self._hosts:
            for number, call in list(host.pending.items()):
                if call.future is future:
                    self._give_up(host, number, "a call did not return")


def check_agent(spec: EpisodeSpec, example: Prompt | None) -> None:
    """Load the agent in a process of its own; fill in a command with a prompt's columns, if there
    is one. Raises ConfigError."""
    with closing(AgentPool(spec, {})) as pool:
        pool.loaded()
    if example is not None:
        fill_in(spec.agent_words, row_of(example))
