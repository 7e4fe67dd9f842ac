"""The environments of a rollout worker, in processes of their own (`host`).

    start(group) ─► a host process; the group stays there ─► act, judge ─► forget
    finished() ─► answers since the last call, without waiting

A call that takes longer than its limit fails. Its process gets no new groups and is replaced when
its last group is over, because the call may still run there. A process that dies ends its groups.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.environments.host import Key, Loaded, Reply, Request, serve
from easyrl.rewards.worker import Call

LOAD_SECONDS = 120.0
"""Longest time that a process takes to start and to load environments and rewards."""


class HostLost(RuntimeError):
    """The process of an environment has died."""


class CallFailed(RuntimeError):
    """A call raised an error; the message has its traceback."""


@dataclass(slots=True)
class _Pending:
    future: Future[Any]
    limit: float  # seconds
    started: float | None = None  # None: other calls run before it


@dataclass(slots=True, eq=False)
class _Host:
    process: BaseProcess
    connection: Connection
    requests: SimpleQueue[Request | None]
    """Sent by a thread, since a process that hangs reads nothing. None ends it."""
    groups: set[Key] = field(default_factory=set)
    pending: dict[int, _Pending] = field(default_factory=dict)
    last_heard: float = field(default_factory=time.monotonic)
    is_loaded: bool = False
    is_stuck: bool = False  # a call has taken too long, and may still run


class EnvironmentPool:
    """Create it in a thread that lives as long as the pool: Linux ends the processes with it."""

    def __init__(self, config: Config, sources: Mapping[str, str]) -> None:
        self._config, self._sources = config, sources
        self._context = get_context("spawn")
        self._hosts = [self._spawn()]
        self._of_group: dict[Key, _Host] = {}
        self._numbers = count()
        self._loaded = self._send(self._hosts[0], LOAD_SECONDS, "load", True)

    def _spawn(self) -> _Host:
        own, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(theirs, self._config, self._sources), daemon=True
        )
        process.start()
        theirs.close()
        requests: SimpleQueue[Request | None] = SimpleQueue()
        threading.Thread(target=_send_all, args=(requests, own), daemon=True).start()
        return _Host(process, own, requests)

    def loaded(self) -> Loaded:
        """Wait until the environments are loaded. Raises ConfigError where they cannot be."""
        try:
            loaded: Loaded = self.wait_for(self._loaded)
        except (HostLost, TimeoutError) as error:
            reason = str(error) or f"took longer than {LOAD_SECONDS:g} s"
            raise ConfigError(f"rollout.environment: cannot be loaded: {reason}") from None
        return loaded

    def wait_for(self, future: Future[Any]) -> Any:
        """Return the result of a call in the first process, when it is there."""
        while not future.done():
            self._hosts[0].connection.poll(0.1)
            self.poll()
        return future.result()

    # -- groups -----------------------------------------------------------------------------------

    def start(
        self, key: Key, name: str, row: Mapping[str, Any], seeds: Sequence[int]
    ) -> list[Future[str | None]]:
        """Start the episodes of a group; return their observations."""
        host = self._choose()
        host.groups.add(key)
        self._of_group[key] = host
        return [
            self._call(key, "reset", index, name, row, seed) for index, seed in enumerate(seeds)
        ]

    def act(self, key: Key, index: int, calls: Any) -> Future[Any]:
        """Send a turn's calls to its episode (`host.Host.act`)."""
        return self._call(key, "act", index, calls)

    def judge(self, key: Key, call: Call) -> Future[Any]:
        """Score a group by the reward functions that need its environments."""
        limit = self._config.reward.timeout_seconds or self._config.runtime.timeout_seconds
        return self._send(self._of_group.get(key), limit, "judge", key, call)

    def forget(self, key: Key) -> None:
        """End a group."""
        host = self._of_group.pop(key, None)
        if host is None:
            return
        host.groups.discard(key)
        self._send(host, float("inf"), "forget", key)
        if host.is_stuck and not host.groups:
            self._end(host)

    def _choose(self) -> _Host:
        """Return the process with fewest groups; start one more while all have some."""
        usable = [host for host in self._hosts if not host.is_stuck]
        least = min(usable, key=lambda host: len(host.groups), default=None)
        if least is None or (
            least.groups and len(usable) < self._config.rollout.environment_workers
        ):
            least = self._spawn()
            self._hosts.append(least)
            self._send(least, LOAD_SECONDS, "load")
        return least

    def _call(self, key: Key, method: str, *arguments: Any) -> Future[Any]:
        limit = self._config.rollout.tool_timeout_seconds
        return self._send(self._of_group.get(key), limit, method, key, *arguments)

    def _send(self, host: _Host | None, limit: float, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if host is None:  # it has died
            future.set_exception(HostLost("the process of its environment has died"))
            return future
        number = next(self._numbers)
        if not host.pending:
            host.last_heard = time.monotonic()
        host.pending[number] = _Pending(future, limit)
        host.requests.put(Request(number, method, arguments))
        return future

    # -- answers ----------------------------------------------------------------------------------

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
                    self._resolve(host, host.connection.recv())
            except (EOFError, OSError):
                self._bury(host)
                continue
            for number, call in list(host.pending.items()):
                # Calls that wait for others start when these are over, so something is heard.
                since = host.last_heard if call.started is None else call.started
                limit = call.limit if host.is_loaded else LOAD_SECONDS
                if now > since + limit:
                    del host.pending[number]
                    host.is_stuck = True
                    call.future.set_exception(TimeoutError())

    def _resolve(self, host: _Host, reply: Reply) -> None:
        host.last_heard = time.monotonic()
        call = host.pending.get(reply.number)
        if call is None:  # the reply came too late
            return
        if reply.has_started:
            call.started = host.last_heard
            return
        del host.pending[reply.number]
        host.is_loaded = True
        if reply.is_config_error:
            call.future.set_exception(ConfigError(reply.error))
        elif reply.error:
            call.future.set_exception(CallFailed(reply.error))
        else:
            call.future.set_result(reply.value)

    def _bury(self, host: _Host) -> None:
        host.process.join()
        self._hosts.remove(host)
        for key in host.groups:
            self._of_group.pop(key, None)
        code = host.process.exitcode
        error = HostLost(f"the process of its environment ended (exit code {code})")
        for call in host.pending.values():
            call.future.set_exception(error)
        host.requests.put(None)
        host.connection.close()

    def _end(self, host: _Host) -> None:
        self._hosts.remove(host)
        host.process.kill()
        host.process.join()
        host.requests.put(None)
        host.connection.close()

    def close(self) -> None:
        """End all processes at once, whatever they are doing."""
        for host in list(self._hosts):
            self._end(host)


def _send_all(requests: SimpleQueue[Request | None], connection: Connection) -> None:
    with contextlib.suppress(OSError):  # the process has ended
        while (request := requests.get()) is not None:
            connection.send(request)
