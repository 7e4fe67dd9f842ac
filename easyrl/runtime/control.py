"""A live run's control socket, RUN/control.sock: `easyrl status`, `scale` and `stop` use it.

    client ──request (JSON)──► controller, in `Supervisor.wait` ──reply (JSON)──► client

One message each way, then the server closes; SOCK_SEQPACKET keeps messages whole. The socket's mode
is 0600: only the run's user and root can connect.
"""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from shlex import quote
from typing import Any

from easyrl.config import ConfigError
from easyrl.config.devices import DeviceSet, parse_device_set
from easyrl.events import Note, Observer
from easyrl.runtime.run_folder import is_locked
from easyrl.runtime.supervisor import Supervisor

SOCKET = "control.sock"
MAX_BYTES = 2**16  # of a message
SEND_SECONDS = 0.1
"""A client that has connected and sent nothing is dropped after this time."""
REPLY_SECONDS = 10.0
"""How long a client waits. The controller answers between two events, usually in milliseconds."""

Reply = dict[str, Any]


class ControlSocket:
    """The server. It has no thread: its owner waits in `wait`."""

    def __init__(self, folder: Path, handle: Callable[[Any], Reply]) -> None:
        """Listen in the run folder, which this process has locked. `handle` turns a request into a
        reply, or raises ValueError. Raises OSError if the file system has no sockets."""
        self._handle = handle
        self._file = folder / SOCKET
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._file.unlink(missing_ok=True)
        with _address(folder) as address:
            self._listener.bind(address)
        self._file.chmod(0o600)  # nobody can connect before `listen`
        self._listener.listen()

    def close(self) -> None:
        self._listener.close()
        with contextlib.suppress(OSError):  # the folder may be gone
            self._file.unlink()

    def wait(self, objects: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Wait as `multiprocessing.connection.wait`; also return when a client was answered."""
        ready = wait([*objects, self._listener], timeout)
        if self._listener in ready:
            ready.remove(self._listener)
            self.serve()
        return ready

    def serve(self) -> None:
        """Answer a client that has connected."""
        with contextlib.suppress(OSError):  # it sends nothing, or does not wait for the reply
            client, _ = self._listener.accept()
            with client:
                client.settimeout(SEND_SECONDS)
                try:
                    reply = self._handle(json.loads(client.recv(MAX_BYTES)))
                except (ValueError, RecursionError) as error:
                    reply = {"error": str(error)}
                client.send(json.dumps(reply).encode())


@contextlib.contextmanager
def serving(
    folder: Path,
    supervisor: Supervisor,
    notify: Observer,
    status: Callable[[], Reply],
    scale: Callable[[DeviceSet], Reply],
) -> Iterator[None]:
    """Answer requests wherever the controller waits. Without sockets the run continues."""

    def handle(request: Any) -> Reply:
        match request:
            case {"command": "status"}:
                return status()
            case {"command": "scale", "infer_devices": str(wanted)}:
                try:
                    devices = parse_device_set(wanted)
                except ValueError as error:
                    raise ConfigError(f"--infer-devices: {error}, got '{wanted:.80}'") from None
                return scale(devices)
            case {"command": "stop"}:
                supervisor.interrupt()
                return {"message": "stopping after the last complete iteration"}
        raise ValueError("expected the command status or stop, or scale with infer_devices")

    try:
        control = ControlSocket(folder, handle)
    except OSError as error:
        why = f"{folder / SOCKET} cannot be created ({error.strerror})"
        notify(Note(f"no easyrl status, scale and stop for this run: {why}"))
        yield
        return
    supervisor.wait_for = control.wait
    try:
        yield
    finally:
        supervisor.wait_for = wait
        control.close()


def request(folder: Path, message: Any) -> Reply:
    """Send a request to the run in `folder`; return the reply. Raises ConfigError."""
    try:
        if not (folder / "config.yaml").is_file():
            raise ConfigError(f"expected the folder of a run, got '{folder}'")
        if not is_locked(folder):
            raise ConfigError(f"the run has ended; see easyrl watch {quote(str(folder))}")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with connection, _address(folder) as address:
            connection.settimeout(REPLY_SECONDS)
            connection.connect(address)
            connection.send(json.dumps(message).encode())
            received = connection.recv(MAX_BYTES)
    except OSError:
        received = b""
    if not received:
        raise ConfigError(
            f"the run in '{folder}' does not answer: it is starting, ending or stopped (Ctrl-Z), "
            "or another user's, or its file system has no sockets (then its log says so)"
        )
    reply: Reply = json.loads(received)
    if "error" in reply:
        raise ConfigError(reply["error"])
    return reply


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield a path of the socket that fits into the 107 bytes that a Unix socket's path may have,
    however long the folder's own path is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)
