"""A live run answers `easyrl status` and `easyrl scale`, and nobody else."""

import json
import os
import random
import socket
import threading

import psutil
import pytest

from easyrl.config.devices import DeviceSet
from easyrl.runtime.control import MAX_BYTES, ControlSocket, request, serving
from easyrl.runtime.run_folder import lock_folder
from easyrl.runtime.supervisor import Supervisor
from own_processes import WAIT_SECONDS
from runs import easyrl

STATUS = {"command": "status"}


@pytest.fixture
def folder(tmp_path):
    """A run folder, locked as that of a live run. Its path is too long for a Unix socket."""
    run = tmp_path / ("x" * 200)
    run.mkdir()
    (run / "config.yaml").touch()
    lock = lock_folder(run)
    yield run
    os.close(lock)


def refuse_all(message):
    raise ValueError(f"expected nothing, got {message!r:.100}")


def connect(folder):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = os.open(folder, os.O_RDONLY)
    connection.connect(f"/proc/self/fd/{descriptor}/control.sock")
    os.close(descriptor)
    return connection


def test_requests_are_checked_before_they_reach_the_run(folder):
    """Also in the place of the socket that a killed run has left."""
    scaled, file, stop = [], folder / "control.sock", threading.Event()
    ControlSocket(folder, refuse_all)._listener.close()
    with pytest.raises(ValueError, match="does not answer"):
        request(folder, STATUS)

    def scale(wanted):
        scaled.append(wanted)
        return {"message": "done"}

    def live_run():
        with (
            Supervisor() as supervisor,
            serving(folder, supervisor, lambda event: None, status=dict, scale=scale),
        ):
            is_served.set()
            while not stop.is_set():
                supervisor.wait(0.05)

    is_served, run = threading.Event(), threading.Thread(target=live_run)
    run.start()
    try:
        assert is_served.wait(WAIT_SECONDS)
        assert file.is_socket() and file.stat().st_mode & 0o777 == 0o600
        for wanted in ("3-1", 3, None):
            with pytest.raises(ValueError, match="expected"):
                request(folder, {"command": "scale", "infer_devices": wanted})
        assert request(folder, STATUS) == {}
        assert easyrl("scale", folder, "--infer-devices", "0,2-3").stdout == "done\n"
    finally:
        stop.set()
        run.join()
    assert scaled == [DeviceSet("accelerator", (0, 2, 3))] and not file.exists()


def test_without_sockets_the_run_continues(folder):
    (folder / "control.sock").mkdir()  # bind fails, as on a file system without sockets
    notes, answers = [], {"status": dict, "scale": refuse_all}
    with Supervisor() as supervisor, serving(folder, supervisor, notes.append, **answers):
        assert supervisor.wait(timeout_seconds=0.0) == []
    assert len(notes) == 1


def test_random_inputs_are_refused(folder):
    control = ControlSocket(folder, refuse_all)
    rng, process, num_inputs = random.Random(0), psutil.Process(), 1000
    whole = json.dumps({"command": "scale", "infer_devices": "0-3"}).encode()
    descriptors = process.num_fds()
    for number in range(num_inputs):
        client, at = connect(folder), rng.randrange(len(whole))
        kinds = [
            rng.randbytes(rng.randrange(200)),
            whole[:at] + rng.randbytes(1 + rng.randrange(3)) + whole[at:],
            json.dumps(rng.choice([None, [], 1, "status", {"command": {}}])).encode(),
            b"[" * rng.choice([10, 1000, MAX_BYTES]),
            rng.randbytes(1) * (MAX_BYTES + rng.randrange(3)),
        ]
        if number % 100:
            client.send(kinds[number % len(kinds)])
        is_gone = rng.random() < 0.1  # before the reply; some clients send nothing
        if is_gone:
            client.close()
        control.serve()
        if not is_gone:
            reply = client.recv(1000)
            assert json.loads(reply).keys() == {"error"} if number % 100 else reply == b""
            client.close()
    assert process.num_fds() <= descriptors
    control.close()
