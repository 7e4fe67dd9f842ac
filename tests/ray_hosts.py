"""Hosts of a Ray cluster as Linux namespaces: each with an address, processes, /dev/shm and
/tmp/ray of its own. They share the disk. The first one, 10.99.0.1, has the bridge and Ray's head.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

UNSHARE = ["setpriv", "--pdeathsig=KILL", "unshare", "--net", "--mount", "--pid", "--uts", "--ipc"]
UNSHARE += ["--mount-proc", "--fork", "--kill-child", "sh", "-c"]
SET_UP = """
set -e
mkdir -p /tmp/ray
for folder in /dev/shm /tmp/ray; do mount -t tmpfs tmpfs $folder; done
hostname host-{number}
echo '127.0.0.1 localhost\n{address} host-{number}' > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
ip link set lo up
echo ready
sleep infinity
true
"""
"""The last line keeps the shell, which is process 1 there and reaps orphans."""
RAY_WORDS = ("--block", "--disable-usage-stats", "--object-store-memory=100000000")
RAY_PORT = 6379
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
LISTENING = "0A"  # in /proc/net/tcp
WAIT_FOR_NODES = """
import ray, sys, time
ray.init(address=sys.argv[1], log_to_driver=False)
end = time.time() + 60
while len(ray.nodes()) < int(sys.argv[2]): time.sleep(0.1); assert time.time() < end
"""


def unsupported_reason():
    """Why there can be no such hosts here; empty if there can."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "needs unshare and ip (util-linux, iproute2)"
    command = [*UNSHARE, "mount -t tmpfs tmpfs /dev/shm && ip link add type veth"]
    has_right = subprocess.run(command, check=False, capture_output=True).returncode == 0
    return "" if has_right else "needs the right to make network, mount and process namespaces"


class Host:
    def __init__(self, number):
        self.address = f"10.99.0.{number}"
        set_up = SET_UP.format(number=number, address=self.address)
        self._holder = subprocess.Popen([*UNSHARE, set_up], stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"
        (first,) = psutil.Process(self._holder.pid).children()
        self.pid = first.pid  # of its process 1, as counted here

    def popen(self, *words, **options):
        """Start a process here."""
        command = ["nsenter", "--all", f"--target={self.pid}", *words]
        return subprocess.Popen(command, text=True, env={**os.environ, **TOKEN}, **options)

    def ip(self, words):
        command = ["nsenter", "--net", f"--target={self.pid}", "ip", *words.split()]
        subprocess.run(command, check=True)

    def start_ray(self, *words):
        ray = (sys.executable, "-m", "ray.scripts.scripts", "start", *RAY_WORDS, *words)
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.popen(*ray, f"--node-ip-address={self.address}", **silent)

    def processes(self):
        """All that run here."""
        ours = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if Path(f"/proc/{process.pid}/ns/pid").readlink() == ours:
                    found.append(process)
        return found

    def named(self, name):
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith(name):  # Ray appends the method that is running
                    found.append(process)
        return found

    def workers(self):
        """EasyRL's workers, by the name of their log."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                log = Path(f"/proc/{process.pid}/fd/1").readlink()
                if log.suffix == ".log" and "spawn_main" in " ".join(process.cmdline()):
                    found[log.stem] = process
        return found

    def listening(self, process):
        """Addresses on which a process listens; psutil looks at our own network alone."""
        sockets = set()
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(str(fd.readlink()))
        found = set()
        for family in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process.pid}/net/{family}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING and f"socket:[{words[9]}]" in sockets:
                    raw = bytes.fromhex(words[1].partition(":")[0])
                    found.add(".".join(map(str, raw[::-1])) if len(raw) == 4 else raw.hex())
        return found

    def kill(self):
        """End all of the host's processes at once."""
        self._holder.kill()
        self._holder.wait()
        while psutil.pid_exists(self.pid):
            time.sleep(0.02)
        assert self._holder.stdout is not None
        self._holder.stdout.close()


class Hosts:
    """A Ray cluster: a head without CPUs on the first host, a node on each other one."""

    def __init__(self, num_hosts, num_cpus):
        self._exit = contextlib.ExitStack()
        self.all = []
        try:
            for number in range(1, num_hosts + 1):
                self.all.append(Host(number))
                self._exit.callback(self.all[-1].kill)
            self.head, self.nodes = self.all[0], self.all[1:]
            self._bridge()
            self.address = f"{self.head.address}:{RAY_PORT}"
            self.head.start_ray(
                "--head", f"--port={RAY_PORT}", "--num-cpus=0", "--include-dashboard=false"
            )
            self._wait_for_nodes(1)  # a node gives up if it does not find the head in time
            for node in self.nodes:
                node.start_ray(f"--address={self.address}", f"--num-cpus={num_cpus}")
            self._wait_for_nodes(len(self.all))
        except BaseException:
            self._exit.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._exit.close()

    def _bridge(self):
        """Connect the hosts by veth pairs and a bridge on the first one."""
        self.head.ip("link add eth0 type bridge")
        for host in self.nodes:
            port = f"port-{host.address.rpartition('.')[2]}"
            self.head.ip(f"link add {port} type veth peer name eth0 netns {host.pid}")
            self.head.ip(f"link set {port} master eth0 up")
        for host in self.all:
            host.ip(f"addr add {host.address}/24 dev eth0")
            host.ip("link set eth0 up")

    def _wait_for_nodes(self, number):
        words = (sys.executable, "-c", WAIT_FOR_NODES, self.address, str(number))
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self.head.popen(*words, stderr=subprocess.DEVNULL).wait() == 0:
                return
            time.sleep(0.5)
        raise TimeoutError("the Ray cluster did not start")

    def start(self, *words):
        """Start `easyrl grpo` on the first host."""
        command = (sys.executable, "-m", "easyrl", "grpo", "--ray-address", self.address, *words)
        return self.head.popen(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def host_of(self, worker):
        return next(host for host in self.all if worker in host.workers())
