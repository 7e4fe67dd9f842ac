"""A live run's control socket, RUN/control.sock: `easyrl status` and `easyrl scale` use it.

    client ──request (JSON)──► controller, in `Supervisor.wait` ──reply (JSON)──► client

One message each way, then the server closes. The socket's type (SOCK_SEQPACKET) keeps messages
whole, so the server never waits for the rest of one. It is the user's alone (mode 0600, and the
client's user is checked). Its path may be too long for a Unix socket (107 bytes), so both sides
name it relative to the open folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from easyrl.config import ConfigError
from easyrl.config.devices import DeviceSet, parse_device_set
from easyrl.events import Note, Observer
from easyrl.runtime.run_folder import is_locked
from easyrl.runtime.supervisor import Supervisor

SOCKET = "control.sock"
MAX_BYTES = 2**16  # of a message
MAX_CLIENTS = 16  # then the oldest is dropped
REPLY_SECONDS = 10.0  # the controller answers between two events: usually within milliseconds
PEER = "iII"  # struct ucred: pid, uid, gid

Message = dict[str, Any]


class ControlSocket:
    """The server. It has no thread: who owns it waits in `wait`, or for `wakers` and calls `serve`.
    No client can make it block."""

    def __init__(self, folder: Path, handle: Callable[[Message], Message]) -> None:
        """Listen in the run folder, which this process has locked; the socket of a killed run is
        replaced. `handle` turns a request into a reply, or raises ValueError. Raises OSError if the
        file system has no sockets."""
        self.num_refused = 0
        self._handle = handle
        self._clients: list[socket.socket] = []
        self._buffer = bytearray(MAX_BYTES + 1)  # one for all: new ones fragment the heap
        self._listener = _unix_socket()
        self._folder = os.open(folder, os.O_RDONLY)
        try:
            self._unlink()
            self._listener.bind(_address(self._folder))
            os.chmod(SOCKET, 0o600, dir_fd=self._folder)  # nobody can connect before `listen`
            self._listener.listen(MAX_CLIENTS)
            self._listener.setblocking(False)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the socket."""
        for each in (self._listener, *self._clients):
            each.close()
        with contextlib.suppress(OSError):  # the folder may be gone
            self._unlink()
        os.close(self._folder)

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET, dir_fd=self._folder)

    def wakers(self) -> Sequence[socket.socket]:
        return self._listener, *self._clients

    def wait(self, objects: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Answer requests until one of `objects` is ready: `multiprocessing.connection.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            wakers = self.wakers()
            ready = wait([*objects, *wakers], left)
            if not ready:
                return []
            self.serve()
            if ready := [each for each in ready if each not in wakers]:
                return ready

    def serve(self) -> None:
        """Accept new clients, and answer those that have sent their request."""
        with contextlib.suppress(OSError):  # none left, or no descriptor left
            while True:
                client, _ = self._listener.accept()
                client.setblocking(False)
                self._clients.append(client)
                if len(self._clients) > MAX_CLIENTS:
                    self._clients.pop(0).close()
        for client in list(self._clients):
            try:
                message = self._buffer[: client.recv_into(self._buffer)]
            except BlockingIOError:
                continue
            except OSError:
                message = bytearray()
            with contextlib.suppress(OSError):  # the client does not wait for the reply
                client.send(json.dumps(self._answer(client, message)).encode())
            client.close()
            self._clients.remove(client)

    def _answer(self, client: socket.socket, message: bytearray) -> Message:
        try:
            peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(PEER))
            uid = struct.unpack(PEER, peer)[1]
            if uid not in (0, os.geteuid()):
                raise ValueError(f"expected a request of user {os.geteuid()} or root, got {uid}")
            if len(message) > MAX_BYTES:
                raise ValueError(f"expected at most {MAX_BYTES} bytes")
            request = json.loads(message)
            if not isinstance(request, dict):
                raise ValueError('expected a JSON object, as {"command": "status"}')
            return self._handle(request)
        except (ValueError, RecursionError) as error:
            self.num_refused += 1
            return {"error": str(error)}


@contextmanager
def serving(
    folder: Path,
    supervisor: Supervisor,
    notify: Observer,
    *,
    status: Callable[[], Message],
    scale: Callable[[DeviceSet], Message],
) -> Iterator[None]:
    """Answer requests wherever the controller waits. Without sockets the run continues."""

    def handle(request: Message) -> Message:
        match request:
            case {"command": "status"} if len(request) == 1:
                return {**status(), "requests_refused": control.num_refused}
            case {"command": "scale", "infer_devices": str(wanted)} if len(request) == 2:
                try:
                    devices = parse_device_set(wanted)
                except ValueError as error:
                    raise ConfigError(f"--infer-devices: {error}, got '{wanted:.80}'") from None
                return scale(devices)
        raise ValueError("expected the command status, or scale with infer_devices")

    try:
        control = ControlSocket(folder, handle)
    except OSError as error:
        why = f"{folder / SOCKET} cannot be created ({error.strerror})"
        notify(Note(f"no easyrl status and scale for this run: {why}"))
        yield
        return
    supervisor.wait_for = control.wait
    try:
        yield
    finally:
        supervisor.wait_for = wait
        control.close()


def request(folder: Path, message: Message, timeout_seconds: float = REPLY_SECONDS) -> Message:
    """Send a request to the run in `folder`; return the reply. Raises ValueError if there is no
    such run, or if it refuses the request or does not answer."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            if not (folder / "config.yaml").is_file():
                raise FileNotFoundError
            if not is_locked(folder):
                raise ValueError(f"the run in '{folder}' has ended; see easyrl watch {folder}")
            connection = stack.enter_context(_unix_socket())
            connection.settimeout(timeout_seconds)
            return _exchange(connection, _address(descriptor), folder, message)
        except PermissionError:
            raise ValueError(f"'{folder}': expected a run of your own: permission denied") from None
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"expected the folder of a run, got '{folder}'") from None


def _exchange(connection: socket.socket, address: str, folder: Path, message: Message) -> Message:
    try:
        connection.connect(address)
        connection.send(json.dumps(message).encode())
        received = connection.recv(MAX_BYTES)
    except (TimeoutError, BlockingIOError):
        raise ValueError(
            f"the run in '{folder}' has not answered in {connection.gettimeout():g} s; is its "
            "process stopped (Ctrl-Z), or its disk full?"
        ) from None
    except (FileNotFoundError, ConnectionError):
        received = b""
    if not received:
        raise ValueError(
            f"nobody answers at {folder / SOCKET}: the run is starting or has just ended, or its "
            "file system has no sockets (then see its log)"
        )
    reply: Message = json.loads(received)
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(folder: int) -> str:
    """A short path of the socket in the open folder."""
    return f"/proc/self/fd/{folder}/{SOCKET}"
