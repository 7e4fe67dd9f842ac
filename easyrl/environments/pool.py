"""The environments of a rollout worker, in processes of their own (`host`), and their check.

    start(group) ─► a host process; the group stays there ─► act, judge ─► forget
    poll() ─► answers since the last call, without waiting

A call that takes longer than its limit fails. Its process, where it may still run, gets no new
groups and ends with its last one. A process that starts no calls any more is killed. Calls of a
killed process are repeated in others, once. A process that ends otherwise ends its groups.
"""

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from easyrl.agents.program import fill_in
from easyrl.config import Config, ConfigError
from easyrl.data.streams import ENVIRONMENT_COLUMN
from easyrl.environments.host import Key, Request, serve
from easyrl.environments.loading import KEY, Interface, Interfaces
from easyrl.processes import send_all
from easyrl.rewards.functions import GroupLost
from easyrl.rewards.loading import reward_specs
from easyrl.rewards.worker import Call
from easyrl.types import Prompt

LOAD_SECONDS = 120.0  # longest time to start a process and load environments and rewards


class HostLost(RuntimeError):
    """The process of an environment has died."""


class HostKilled(HostLost):
    """The process of an agent was killed."""


class CallFailed(RuntimeError):
    """A call raised an error; the message has its traceback."""


FAILURES = (HostLost, CallFailed, GroupLost, TimeoutError)  # what the result of a call may raise


@dataclass(slots=True, eq=False)
class _Call:
    method: str  # of `host.Host`
    arguments: tuple[Any, ...]  # the first is the group's key
    limit: float  # seconds
    future: Future[Any] = field(default_factory=Future)
    started: float | None = None  # None: other calls run before it


@dataclass(slots=True, eq=False)
class _Host:
    process: BaseProcess
    connection: Connection
    requests: SimpleQueue[Request | None] = field(default_factory=SimpleQueue)  # see `send_all`
    pending: dict[int, _Call] = field(default_factory=dict)
    last_heard: float = field(default_factory=time.monotonic)
    is_stuck: bool = False  # a call has taken too long, and may still run


@dataclass(slots=True, eq=False)
class _Group:
    host: _Host
    calls: list[_Call] = field(default_factory=list)  # but those that took too long
    is_repeated: bool = False  # after a kill


class EnvironmentPool:
    """Create it in a thread that lives as long as the pool: Linux ends the processes with it."""

    report: Callable[[str], None] = staticmethod(print)  # called when processes were killed

    def __init__(self, config: Config, sources: Mapping[str, str]) -> None:
        self._config, self._sources = config, sources
        rollout = config.rollout
        limit = rollout.episode_timeout_seconds if rollout.agent is not None else 0.0
        self._agent_seconds = math.inf if limit is None else limit + rollout.tool_timeout_seconds
        self._silence_seconds = min(self._agent_seconds, limit or rollout.tool_timeout_seconds)
        self._context = get_context("spawn")
        self._hosts: list[_Host] = []
        self._groups: dict[Key, _Group] = {}
        self._numbers = count()
        self._open(())  # a group without episodes, until all is loaded
        self._loaded = self._call((), "load", True, limit=LOAD_SECONDS)

    def _spawn(self) -> _Host:
        own, theirs = self._context.Pipe()
        arguments = theirs, self._config, self._sources
        process = self._context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        host = _Host(process, own)
        threading.Thread(target=send_all, args=(host.requests, own), daemon=True).start()
        return host

    def loaded(self) -> tuple[Interfaces, Sequence[int]]:
        """Wait until all is loaded; return the results of `host.Host.load`. Raises ConfigError."""
        try:
            interfaces, reward_functions = self.wait_for(self._loaded)
        except FAILURES as error:
            raise ConfigError(f"{self._config.rollout.acts}: cannot be loaded: {error}") from None
        self.forget(())
        return {key: Interface(*each) for key, each in interfaces.items()}, reward_functions

    def wait_for(self, future: Future[Any]) -> Any:
        """Return the result of a call in the first process, when it is there."""
        while not future.done():
            self._hosts[0].connection.poll(0.1)
            self.poll()
        return future.result()

    def start(
        self, key: Key, name: str, row: Mapping[str, Any], seeds: Sequence[int]
    ) -> list[Future[str | None]]:
        """Start the episodes of a group; return their observations."""
        self._open(key)
        return [self._call(key, "reset", n, name, row, seed) for n, seed in enumerate(seeds)]

    def act(self, key: Key, index: int, calls: Any) -> Future[Any]:
        """Send a turn's calls to its episode; the result has the arguments of `host.Acted`."""
        return self._call(key, "act", index, calls)

    def run_agents(
        self, key: Key, row: Mapping[str, Any], base_url: str, api_keys: Sequence[str]
    ) -> list[Future[Any]]:
        """Run a group's episodes of the agent, one for each key of the endpoint; the results have
        the form of `program.Value`. They are not repeated: see `HostKilled`."""
        self._open(key)
        own = [(row, base_url, api_key) for api_key in api_keys]
        return [self._call(key, "run_agent", *each, limit=self._agent_seconds) for each in own]

    def give_up(self, future: Future[Any]) -> None:
        """Let a call fail that does not return, as one that takes too long."""
        for host in self._hosts:
            for number in [n for n, call in host.pending.items() if call.future is future]:
                host.is_stuck = True
                self._settle(host, number, TimeoutError("a call did not return"))

    def judge(self, key: Key, call: Call) -> Future[Any]:
        """Score a group by functions that need environments; with the arguments of `Scored`."""
        limit = self._config.reward.timeout_seconds or self._config.runtime.timeout_seconds
        return self._call(key, "judge", call, limit=limit)

    def forget(self, key: Key) -> None:
        if group := self._groups.pop(key, None):
            self._send(group.host, _Call("forget", (key,), float("inf")))
            if group.host.is_stuck and not self._keys_of(group.host):
                self._end(group.host)

    def _open(self, key: Key) -> None:
        """Give a group, with its calls so far, to the process with fewest groups, or a new one."""
        num_groups = {host: len(self._keys_of(host)) for host in self._hosts if not host.is_stuck}
        host = min(num_groups, key=num_groups.__getitem__, default=None)
        is_full = len(num_groups) >= self._config.rollout.environment_workers
        if host is None or (num_groups[host] and not is_full):
            self._hosts.append(host := self._spawn())
            if key:  # () loads
                self._send(host, _Call("load", ((),), LOAD_SECONDS))
        group = self._groups.setdefault(key, _Group(host))
        group.host = host
        for call in group.calls:
            self._send(host, call)

    def _keys_of(self, host: _Host) -> list[Key]:
        return [key for key, group in self._groups.items() if group.host is host]

    def _call(self, key: Key, method: str, *arguments: Any, limit: float = 0.0) -> Future[Any]:
        limit = limit or self._config.rollout.tool_timeout_seconds
        call = _Call(method, (key, *arguments), limit)
        if group := self._groups.get(key):
            group.calls.append(call)
            self._send(group.host, call)
        else:
            call.future.set_exception(HostLost("the environment's process has ended"))
        return call.future

    def _send(self, host: _Host, call: _Call) -> None:
        if not host.pending:
            host.last_heard = time.monotonic()
        number, call.started = next(self._numbers), None
        host.pending[number] = call
        host.requests.put((number, call.method, call.arguments, call.future.done()))

    @property
    def connections(self) -> list[Connection]:
        """Readable when `poll` has something to read."""
        return [host.connection for host in self._hosts]

    def poll(self) -> None:
        """Read answers, and find calls that take too long and processes that have died."""
        now = time.monotonic()
        for host in list(self._hosts):
            try:
                while host.connection.poll():
                    self._resolve(host, *json.loads(host.connection.recv_bytes()))
            except (EOFError, OSError, ValueError):
                self._bury(host)
                continue
            is_loading = any(call.method == "load" for call in host.pending.values())
            limit = LOAD_SECONDS if is_loading else self._silence_seconds
            is_idle = all(call.started is None for call in host.pending.values())
            is_stuck = host.is_stuck and self._agent_seconds < math.inf  # else silence is normal
            if host.pending and (is_idle or is_stuck) and now > host.last_heard + limit:
                host.process.kill()
            for number, call in list(host.pending.items()):
                if now > (call.started or now) + call.limit:
                    host.is_stuck = True
                    if group := self._groups.get(call.arguments[0]):
                        group.calls.remove(call)
                    name = "episode" if call.method == "run_agent" else "tool"
                    key = "" if call.method == "load" else f" (rollout.{name}_timeout_seconds)"
                    error = TimeoutError(f"a call took longer than {call.limit:g} s{key}")
                    self._settle(host, number, error)

    def _resolve(self, host: _Host, number: int, kind: str, value: Any) -> None:
        host.last_heard = time.monotonic()
        if number not in host.pending:  # it came too late
            return
        if kind == "started":
            host.pending[number].started = host.last_heard
        elif kind == "returned":
            self._settle(host, number, None, value)
        else:
            error = ConfigError if kind == "misconfigured" else CallFailed
            self._settle(host, number, error(value))

    def _settle(self, host: _Host, number: int, error: Exception | None, value: Any = None) -> None:
        call = host.pending.pop(number)
        future = call.future
        if future.done():  # it is repeated, or its group is lost
            if error or future.exception() or future.result() != value:
                kind = HostLost if self._config.runtime.deterministic else GroupLost
                reason = "its process was killed, and repeated calls had other results"
                self._lose(call.arguments[0], kind(reason))
        elif error:
            future.set_exception(error)
        else:
            future.set_result(value)

    def _bury(self, host: _Host) -> None:
        self._end(host)
        code = host.process.exitcode
        if code == -signal.SIGKILL:
            self.report("an environment's or agent's process was killed; its calls are repeated")
        for key in self._keys_of(host):
            group = self._groups[key]
            if code == -signal.SIGKILL and self._config.rollout.agent is not None:
                self._lose(key, HostKilled("the agent's process was killed"))
            elif code == -signal.SIGKILL and (host.is_stuck or not group.is_repeated):
                group.is_repeated |= not host.is_stuck  # a call that hangs is not repeated
                self._open(key)
            else:
                self._lose(key, HostLost(f"the environment's process ended (exit code {code})"))

    def _lose(self, key: Key, error: Exception) -> None:
        if group := self._groups.get(key):
            self.forget(key)
            for call in group.calls:
                if not call.future.done():
                    call.future.set_exception(error)

    def _end(self, host: _Host) -> None:
        self._hosts = [each for each in self._hosts if each is not host]
        for file in Path(f"/proc/{host.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # agents that are commands lead process groups
                for pid in map(int, file.read_text().split()):
                    if os.getpgid(pid) == pid:
                        os.killpg(pid, signal.SIGKILL)
        host.process.kill()
        host.process.join()
        host.requests.put(None)
        host.connection.close()

    def close(self) -> None:
        for host in self._hosts:
            self._end(host)


def check_environments(config: Config, example: Prompt | None) -> tuple[Interfaces, list[str]]:
    """Load all environments in a process of their own, and reset that of a prompt, if there is one
    (`reward.check`). Return their interfaces, and warnings. Raises ConfigError."""
    if not config.rollout.has_environments:
        return {}, []
    pool = EnvironmentPool(config, {})
    try:
        interfaces, _ = pool.loaded()
        if config.rollout.agent is not None:
            if example is not None:
                fill_in(config.rollout.agent_words, row_of(example, ""))
            return {}, []
        if config.reward.check and example is not None:
            name = name_of(example, interfaces)
            (future,) = pool.start((0,), name, row_of(example, name), [0])
            pool.wait_for(future)
    except FAILURES as error:
        raise ConfigError(f"{KEY}: reset failed on the first row:\n{error}") from None
    finally:
        pool.close()
    is_used = "environment" in reward_specs(config)
    has_reward = any(each.has_reward for each in interfaces.values())
    if is_used and not has_reward:
        raise ConfigError(
            "reward.functions (--reward): expected reward functions, because the environment has "
            "no method get_reward, got none"
        )
    warning = "warning: get_reward is not used; to use it: 'environment' in reward.functions"
    return interfaces, [warning] if has_reward and not is_used else []


def name_of(prompt: Prompt, interfaces: Interfaces) -> str:
    return "" if "" in interfaces else str(prompt.columns[ENVIRONMENT_COLUMN])


def row_of(prompt: Prompt, name: str) -> dict[str, Any]:
    """Return the arguments of `reset`: the row, without the name of its environment."""
    row = {"prompt": prompt.content, **prompt.columns}
    if name:
        del row[ENVIRONMENT_COLUMN]
    return row
