"""The host processes of a rollout worker (`host`), which run environments or agents.

    open(group) ─► a host process; the group stays there ─► call … call ─► forget
    poll() ─► answers since the last call, without waiting

A call that takes longer than its limit fails. Its process, where it may still run, gets no new
groups and ends with its last one. A process that starts no calls any more is killed. Calls of a
killed process are repeated in others, once, if the pool `repeats_calls`. A process that ends
otherwise ends its groups.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, ClassVar

from easyrl.config import ConfigError
from easyrl.config.spec import EpisodeSpec
from easyrl.environments.host import Host, Key, Request, serve
from easyrl.processes import kill_with_descendants, send_all
from easyrl.rewards.functions import GroupLost


class HostLost(RuntimeError):
    """The process of a group has ended."""


class HostKilled(HostLost):
    """The process of a group was killed, and its calls cannot be repeated."""


class CallFailed(RuntimeError):
    """A call raised an error; the message has its traceback."""


FAILURES = (HostLost, CallFailed, GroupLost, TimeoutError)  # what the result of a call may raise


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The longest time that a call may take."""

    seconds: float
    setting: str = ""  # that gives it; "": none


LOAD_LIMIT = TimeLimit(120.0)  # to start a process and load the user's code
NO_LIMIT = TimeLimit(math.inf)
WAIT_SECONDS = 0.1  # between two looks at calls that take too long


@dataclass(slots=True, eq=False)
class _Call:
    method: str  # of `Host`
    arguments: tuple[Any, ...]
    limit: TimeLimit
    key: Key | None  # of its group; None: it loads the user's code
    future: Future[Any] = field(default_factory=Future)
    started: float | None = None  # when the host began it; None: others run before it


@dataclass(slots=True, eq=False)
class _HostProcess:
    process: BaseProcess
    connection: Connection
    loading: _Call
    requests: SimpleQueue[Request | None] = field(default_factory=SimpleQueue)  # see `send_all`
    pending: dict[int, _Call] = field(default_factory=dict)  # by the numbers of their requests
    last_heard: float = field(default_factory=time.monotonic)
    is_stuck: bool = False  # a call has taken too long, and may still run


@dataclass(slots=True, eq=False)
class _Group:
    host: _HostProcess
    calls: list[_Call] = field(default_factory=list)  # without those that took too long
    is_repeated: bool = False  # its calls were repeated after a kill


class HostPool:
    """Host processes. Create it in a thread that lives as long as the pool: Linux ends the
    processes with it."""

    report: Callable[[str], None] = staticmethod(print)  # called when processes were killed
    host_class: type[Host]
    repeats_calls: ClassVar[bool]
    """Whether calls of a killed process run again in another one. Else they raise HostKilled."""

    def __init__(
        self,
        spec: EpisodeSpec,
        sources: Mapping[str, str],
        *,
        call_limit: TimeLimit,
        silence_seconds: float,
        has_endless_calls: bool = False,
    ) -> None:
        """`sources`: the user's files, as they were at the run's start. `call_limit`: of calls that
        have no limit of their own. `silence_seconds`: a process that starts none of its calls for
        so long is killed. So is one that reports nothing for so long after a call took too long,
        unless it is normal that calls run without a limit (`has_endless_calls`)."""
        self._spec = spec
        self._sources = sources
        self._call_limit = call_limit
        self._silence_seconds = silence_seconds
        self._has_endless_calls = has_endless_calls
        self._context = get_context("spawn")
        self._hosts: list[_HostProcess] = []
        self._groups: dict[Key, _Group] = {}
        self._numbers = count()
        self._loading = self._spawn(is_first=True).loading.future

    def _wait_until_loaded(self) -> Any:
        """Return the result of `Host.load` in the first process. Raises ConfigError."""
        try:
            return self.wait_for(self._loading)
        except FAILURES as error:
            raise ConfigError(f"{self._spec.key}: cannot be loaded: {error}") from None

    def wait_for(self, future: Future[Any]) -> Any:
        """Return the result of a call when it is there."""
        while not future.done():
            wait(self.connections, WAIT_SECONDS)
            self.poll()
        return future.result()

    @property
    def connections(self) -> list[Connection]:
        """Readable when `poll` has something to read."""
        return [host.connection for host in self._hosts]

    def forget(self, key: Key) -> None:
        """Drop a group, and end its process if that is stuck and has no other."""
        group = self._groups.pop(key, None)
        if group is None:
            return
        self._send(group.host, _Call("forget", (key,), NO_LIMIT, key))
        if group.host.is_stuck and not self._keys_of(group.host):
            self._end(group.host)

    def close(self) -> None:
        for host in list(self._hosts):
            self._end(host)

    # -- groups and their calls -------------------------------------------------------------------

    def _open(self, key: Key) -> None:
        """Give a group, with its calls so far, to a process."""
        host = self._choose_host()
        group = self._groups.setdefault(key, _Group(host))
        group.host = host
        for call in group.calls:
            self._send(host, call)

    def _choose_host(self) -> _HostProcess:
        """Return the process with fewest groups. If it has some, a new one is better."""
        usable = [host for host in self._hosts if not host.is_stuck]
        if usable:
            emptiest = min(usable, key=lambda host: len(self._keys_of(host)))
            is_full = len(usable) >= self._spec.num_processes
            if is_full or not self._keys_of(emptiest):
                return emptiest
        return self._spawn()

    def _keys_of(self, host: _HostProcess) -> list[Key]:
        return [key for key, group in self._groups.items() if group.host is host]

    def _call(
        self, key: Key, method: str, *arguments: Any, limit: TimeLimit | None = None
    ) -> Future[Any]:
        """Call a method of a group's host, with the group's key as its first argument."""
        call = _Call(method, (key, *arguments), limit or self._call_limit, key)
        group = self._groups.get(key)
        if group is None:
            call.future.set_exception(HostLost("the environment's process has ended"))
        else:
            group.calls.append(call)
            self._send(group.host, call)
        return call.future

    def _send(self, host: _HostProcess, call: _Call) -> None:
        if not host.pending:
            host.last_heard = time.monotonic()
        number = next(self._numbers)
        call.started = None
        host.pending[number] = call
        is_repeated = call.future.done()
        host.requests.put(Request(number, call.method, call.arguments, is_repeated))

    def _lose(self, key: Key, error: Exception) -> None:
        """Give up a group: its unfinished calls raise `error`."""
        group = self._groups.get(key)
        if group is None:
            return
        self.forget(key)
        for call in group.calls:
            if not call.future.done():
                call.future.set_exception(error)

    # -- answers ----------------------------------------------------------------------------------

    def poll(self) -> None:
        """Read answers, and find calls that take too long and processes that have died."""
        now = time.monotonic()
        for host in list(self._hosts):
            try:
                while host.connection.poll():
                    number, kind, value = json.loads(host.connection.recv_bytes())
                    self._on_report(host, number, kind, value)
            except (EOFError, OSError, ValueError):
                self._on_death(host)
                continue
            if self._is_hanging(host, now):
                self._kill(host)
            for number, call in list(host.pending.items()):
                limit = call.limit
                if call.started is not None and now > call.started + limit.seconds:
                    setting = f" ({limit.setting})" if limit.setting else ""
                    reason = f"a call took longer than {limit.seconds:g} s{setting}"
                    self._give_up(host, number, reason)

    def _on_report(self, host: _HostProcess, number: int, kind: str, value: Any) -> None:
        """Handle what a host reports of a call (`host`)."""
        host.last_heard = time.monotonic()
        if number not in host.pending:  # the call has failed meanwhile: it took too long
            return
        match kind:
            case "started":
                host.pending[number].started = host.last_heard
            case "returned":
                self._on_returned(host.pending.pop(number), value)
            case "misconfigured":
                self._on_failed(host.pending.pop(number), ConfigError(value))
            case "failed":
                self._on_failed(host.pending.pop(number), CallFailed(value))

    def _on_returned(self, call: _Call, value: Any) -> None:
        if not call.future.done():
            call.future.set_result(value)
        elif call.future.exception() or call.future.result() != value:
            self._on_other_result(call)

    def _on_failed(self, call: _Call, error: Exception) -> None:
        if not call.future.done():
            call.future.set_exception(error)
        else:
            self._on_other_result(call)

    def _on_other_result(self, call: _Call) -> None:
        """Give up a group whose calls, repeated after a kill, do not do again what they did."""
        if call.key is not None:
            kind = HostLost if self._spec.is_deterministic else GroupLost
            reason = "its process was killed, and repeated calls had other results"
            self._lose(call.key, kind(reason))

    def _is_hanging(self, host: _HostProcess, now: float) -> bool:
        """Whether a process has calls, and has been silent for too long."""
        if not host.pending:
            return False
        runs_nothing = all(call.started is None for call in host.pending.values())
        if not runs_nothing and (self._has_endless_calls or not host.is_stuck):
            return False
        is_loading = not host.loading.future.done()
        longest = LOAD_LIMIT.seconds if is_loading else self._silence_seconds
        return now > host.last_heard + longest

    def _give_up(self, host: _HostProcess, number: int, reason: str) -> None:
        """Let a call fail that has taken too long, and may still run."""
        host.is_stuck = True
        call = host.pending.pop(number)
        group = None if call.key is None else self._groups.get(call.key)
        if group is not None:
            group.calls.remove(call)
        self._on_failed(call, TimeoutError(reason))

    # -- processes --------------------------------------------------------------------------------

    def _spawn(self, *, is_first: bool = False) -> _HostProcess:
        own_end, host_end = self._context.Pipe()
        process = self._context.Process(
            target=serve,
            args=(host_end, self.host_class, self._spec, self._sources),
            daemon=True,
        )
        process.start()
        host_end.close()
        loading = _Call("load", (is_first,), LOAD_LIMIT, None)
        host = _HostProcess(process, own_end, loading)
        threading.Thread(target=send_all, args=(host.requests, own_end), daemon=True).start()
        self._hosts.append(host)
        self._send(host, loading)
        return host

    def _on_death(self, host: _HostProcess) -> None:
        """Repeat the calls of a process that was killed, where that is possible; give up others."""
        self._end(host)
        code = host.process.exitcode
        was_killed = code == -signal.SIGKILL
        if was_killed:
            self.report("an environment's or agent's process was killed; its calls are repeated")
        ended = HostLost(f"the environment's process ended (exit code {code})")
        if not host.loading.future.done():
            host.loading.future.set_exception(ended)
        for key in self._keys_of(host):
            group = self._groups[key]
            if was_killed and not self.repeats_calls:
                self._lose(key, HostKilled("the agent's process was killed"))
            elif was_killed and host.is_stuck:
                self._open(key)  # the call that hangs is not among those that are repeated
            elif was_killed and not group.is_repeated:
                group.is_repeated = True
                self._open(key)
            else:
                self._lose(key, ended)

    def _kill(self, host: _HostProcess) -> None:
        """Kill a process with what its calls have started, as agents that are commands."""
        if host.process.pid is not None and host.process.is_alive():
            kill_with_descendants([host.process.pid])
        host.process.kill()

    def _end(self, host: _HostProcess) -> None:
        self._hosts = [each for each in self._hosts if each is not host]
        self._kill(host)
        host.process.join()
        host.requests.put(None)
        host.connection.close()
