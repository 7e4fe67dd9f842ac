"""The files in `configs/cluster/` and the commands in `docs/cluster.md`: every command exists, and
every run of them would be placed on a cluster of 24 GPUs."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
import yaml
from test_readme import EASYRL
from typer.testing import CliRunner

from easyrl.cli import app
from easyrl.config.devices import parse_device_set
from easyrl.runtime import placement
from easyrl.runtime.ray import cluster
from easyrl.runtime.ray.cluster import HTTP2_SETTINGS
from runs import SMALL, descendants, finish, lines_of, summary_of, wait_until_gone

ROOT = Path(__file__).parent.parent
SLURM, RAY_JOB, PAGE = (
    ROOT / path
    for path in ("configs/cluster/slurm.sbatch", "configs/cluster/rayjob.yaml", "docs/cluster.md")
)
SBATCH_OPTIONS = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "exclusive"),
    *("time", "output", "signal", "requeue"),
}


def manifest() -> Any:
    return yaml.safe_load(RAY_JOB.read_text())


def easyrl_commands() -> Iterator[list[str]]:
    """Words behind `easyrl` of each command."""
    page = "\n".join(re.findall(r"^```bash\n.*?^```|^    .*?$", PAGE.read_text(), re.M | re.S))
    text = "\n".join((SLURM.read_text(), page)).replace("\\\n", " ")
    for line in text.splitlines():
        if match := re.match(r"(?:.* -- )?\s*easyrl (.*?)(?: &)?$", line):
            yield shlex.split(match[1], comments=True)
    yield shlex.split(manifest()["spec"]["entrypoint"])[1:]


COMMANDS = list(easyrl_commands())


def test_all_three_places_have_commands() -> None:
    assert len(COMMANDS) == 9
    words = " ".join(COMMANDS[0])
    # The same run, up to the folder.
    assert words.replace("$PWD", "/shared").replace("--ray-address $ip:$port ", "") == " ".join(
        COMMANDS[-1]
    )


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_exists_and_its_run_would_be_placed(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    resources = cluster.Resources("cuda", 24, (64, 64, 64))
    monkeypatch.setattr(cluster, "connect", lambda config, num_workers: resources)
    monkeypatch.setattr(placement, "unsupported_reason", lambda kind, dtype: None)  # of vLLM
    placed: list[placement.Placement] = []

    def place(config: Any, *_: Any, **__: Any) -> int:
        placed.append(placement.resolve_placement(config))
        return 0

    monkeypatch.setattr(importlib.import_module("easyrl.cli.grpo"), "_print_plan", place)
    if words[0] == "grpo":
        result = CliRunner().invoke(app, [*words, "--dry-run"])
        assert result.exit_code == 0, result.output
        assert "--infer-devices" not in words or placed[0].is_ray
        return
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    parsed = command.make_context(words[0], words[1:]).params
    if words[0] == "scale":
        assert parse_device_set(parsed["infer_devices"]).is_ray


def test_the_slurm_file_is_a_script_with_known_options() -> None:
    subprocess.run(["bash", "-n", SLURM], check=True)
    lines = re.findall(r"^#SBATCH (.*)", SLURM.read_text(), re.M)
    options = [re.fullmatch(r"--([a-z-]+)(?:=\S+)?", line) for line in lines]
    assert {option and option[1] for option in options} == SBATCH_OPTIONS
    before_code = SLURM.read_text().partition("\nset -")[0]  # Slurm reads no options behind it
    assert before_code.count("#SBATCH --") == len(lines) == len(SBATCH_OPTIONS)


def test_the_cluster_of_the_kubernetes_file_has_the_devices_of_its_run() -> None:
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]["rayClusterSpec"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    containers = [pod["template"]["spec"]["containers"][0] for pod in pods]
    for pod, container in zip(pods, containers, strict=True):
        volumes = {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert container["resources"]["limits"] == container["resources"]["requests"]
    user = re.search(r"ARG USER_ID=(\d+)", (ROOT / "Dockerfile").read_text())
    groups = {pod["template"]["spec"]["securityContext"]["fsGroup"] for pod in pods}
    assert user and groups == {int(user[1])}
    assert len({container["image"] for container in containers}) == 1
    (group,) = spec["workerGroupSpecs"]
    num_gpus = group["replicas"] * int(containers[1]["resources"]["limits"]["nvidia.com/gpu"])
    words = COMMANDS[-1]
    sets = (words[words.index(f"--{role}-devices") + 1] for role in ("infer", "train"))
    assert sum(parse_device_set(each).count for each in sets) == num_gpus
    assert set(yaml.safe_load(job["spec"]["runtimeEnvYAML"])) == {"env_vars"}
    extras = re.search(r"EXTRAS=(\S+)", PAGE.read_text())
    assert extras and "ray-jobs" in extras[1].split(",")


def ray_start_commands() -> list[list[str]]:
    lines = re.findall(r"^ray start .*", PAGE.read_text(), re.M)
    in_job = re.findall(r"ray_start=\(ray (.*)\)|\{ray_start\[@\]\}\" (.*?)(?: &)?$",
                        SLURM.read_text(), re.M)  # fmt: skip
    common = shlex.split(in_job[0][0])
    pods = manifest()["spec"]["rayClusterSpec"]
    groups = (pods["headGroupSpec"], *pods["workerGroupSpecs"])
    return [
        *(shlex.split(line)[1:] for line in lines),
        *([*common, *shlex.split(more)] for _, more in in_job[1:]),
        *(
            ["start", *(f"--{k}={v}" for k, v in group["rayStartParams"].items())]
            for group in groups
        ),
    ]


def test_options_of_ray_start_exist() -> None:
    cli = pytest.importorskip("ray.scripts.scripts").cli
    commands = ray_start_commands()
    assert len(commands) == 6
    for words in commands:
        numbers = [re.sub(r"\$\w+", "1", word) for word in words[1:]]
        cli.commands[words[0]].make_context("ray start", numbers)


def _answer(listener: socket.socket) -> None:
    """Answer as Ray does."""
    client, _ = listener.accept()
    with client:
        client.sendall(bytes(3) + HTTP2_SETTINGS + bytes(5))
        client.recv(100)


def test_a_missing_token_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=_answer, args=(listener,), daemon=True).start()
        code, _, err = finish(
            *("--infer-devices", "ray:cpu:1", "--ray-address", address),
            HOME=str(tmp_path),  # where Ray would find a token
            RAY_AUTH_MODE="token",
        )
    assert code == 2 and "--ray-address" in err and "token" in err


# -- the Slurm file, run --------------------------------------------------------------------------

SRUN = """#!/bin/bash
# Every node is this machine.
while [[ "$1" == --* ]]; do shift; done
if [ "$1" = hostname ]; then echo 127.0.0.1; exit; fi
echo $$ >> "$FOLDER/pids"
exec "$@"
"""


@pytest.mark.long
@pytest.mark.alone
def test_the_slurm_file_runs_on_two_nodes_and_sigterm_leaves_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    tools, folder = tmp_path / "bin", tmp_path / "job"
    tools.mkdir()
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    easyrl = EASYRL.replace(
        '("$@")', '("${@/#gsm8k/arithmetic}"); words=("${words[@]/ray:*/ray:cpu:1}")'
    )
    more = "--iterations 100000 --model tiny model.dtype=float32 rollout.tensor_parallel_size=1"
    for name, program in {
        "srun": SRUN,
        "scontrol": "#!/bin/bash\nprintf 'one\\ntwo\\n'\n",
        "python": '#!/bin/bash\nexec "$PYTHON" "$@"\n',
        "easyrl": easyrl.replace("--iterations 2", more),
    }.items():
        (tools / name).write_text(program)
        (tools / name).chmod(0o755)
    path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {"JOB_ID": os.getpid(), "JOB_NUM_NODES": 2, "JOB_NODELIST": "", "CPUS_PER_TASK": 1}
    environment = os.environ | {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    environment |= {"PATH": path, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    short = tempfile.mkdtemp()  # the path of a socket has at most 107 bytes
    environment |= {"FOLDER": str(folder), "RAY_TMPDIR": short}
    shutil.copy(SLURM, folder / "job")
    run = folder / "runs/gsm8k"
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(["bash", "job"], cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 180
            while not (run / "metrics.jsonl").exists():
                assert job.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            job.send_signal(signal.SIGTERM)
            code = job.wait(60)
        finally:
            pids = (folder / "pids").read_text().split()
            nodes = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
            for node in nodes:
                node.terminate()  # as Slurm does at a job's end
            job.kill()
            assert wait_until_gone(nodes, 30) == []
            shutil.rmtree(short, ignore_errors=True)
            print((folder / "log").read_text())
    assert code == 128 + signal.SIGTERM
    num_done = len(lines_of(run / "metrics.jsonl"))
    assert (run / "checkpoints" / str(num_done)).is_dir()


# -- ray job submit -------------------------------------------------------------------------------


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def job_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster with a job server, for `ray job`. Its token is made for it."""
    pytest.importorskip("aiohttp_cors", reason="needs pip install 'easyrl-train[ray-jobs]'")
    short = tempfile.mkdtemp()
    gcs, dashboard, agent, client = free_ports(4)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_TMPDIR", short)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{dashboard}")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    ports = (f"--port={gcs}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}")
    more = (*ports, f"--dashboard-agent-listen-port={agent}", "--num-cpus=2")
    head = subprocess.Popen([*RAY, "start", "--head", "--block", "--disable-usage-stats", *more])
    try:
        deadline = time.monotonic() + 60
        while ray_job("list")[0] != 0:
            assert head.poll() is None and time.monotonic() < deadline
            time.sleep(1)
        yield
    finally:
        processes = [psutil.Process(head.pid), *descendants(head.pid)]
        head.terminate()
        assert wait_until_gone(processes, 60) == []
        shutil.rmtree(short, ignore_errors=True)


RAY = (sys.executable, "-m", "ray.scripts.scripts")
TINY_RUN = ("easyrl", "grpo", "--infer-devices", "ray:cpu:1", "--train-devices", "ray:cpu:1")


def ray_job(*words: str) -> tuple[int, str]:
    done = subprocess.run([*RAY, "job", *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.usefixtures("job_server")
def test_ray_jobs_finish_fail_and_stop_with_a_checkpoint(tmp_path: Path) -> None:
    work, folder = tmp_path / "work", tmp_path / "runs"
    work.mkdir()
    (work / "data.jsonl").write_text('{"prompt": "17+58=", "answer": "75"}\n')
    (work / "rewards.py").write_text("def one(completions, **_): return [1.0] * len(completions)\n")
    own = ("--dataset", "data.jsonl", "--reward", "rewards.py:one")
    run = (*TINY_RUN, *own, *SMALL, "data.num_held_out=0")
    submit = ("submit", "--working-dir", str(work))
    code, out = ray_job(*submit, "--", *run, "--iterations", "2", "--output", f"{folder}/1")
    assert code == 0 and summary_of(folder / "1")["iterations"] == 2, out
    code, out = ray_job(*submit, "--", *TINY_RUN, "train.iteration=2")
    assert code == 1 and "did you mean train.iterations?" in out and "exit code 2" in out

    words = ("--submission-id", "endless", "--no-wait", "--runtime-env-json")
    patience = '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}'
    endless = ("--iterations", "100000", "--output", f"{folder}/2")
    assert ray_job(*submit, *words, patience, "--", *run, *endless)[0] == 0
    deadline = time.monotonic() + 120
    while not (folder / "2/metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert ray_job("stop", "endless")[0] == 0
    num_done = len(lines_of(folder / "2/metrics.jsonl"))
    assert (folder / "2/checkpoints" / str(num_done)).is_dir(), ray_job("logs", "endless")
