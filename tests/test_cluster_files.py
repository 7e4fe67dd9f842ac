"""The files in `configs/cluster/` and the commands in `docs/cluster.md`: every command exists, and
every run of them would be placed on a cluster of 24 GPUs."""

import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import typer
import yaml
from typer.testing import CliRunner

from easyrl.cli import app
from easyrl.config.devices import parse_device_set
from easyrl.runtime import placement, preflight
from easyrl.runtime.ray import cluster
from easyrl.runtime.resolve import resolve
from own_processes import WAIT_SECONDS, popen
from pages import make_tools
from runs import lines_of, wait_until, wait_until_gone

ROOT = Path(__file__).parent.parent
SLURM, RAY_JOB, PAGE = (
    ROOT / path
    for path in ("configs/cluster/slurm.sbatch", "configs/cluster/rayjob.yaml", "docs/cluster.md")
)
JOB = yaml.safe_load(RAY_JOB.read_text())


def easyrl_commands():
    page = "\n".join(re.findall(r"^```bash\n.*?^```|^    .*?$", PAGE.read_text(), re.M | re.S))
    text = "\n".join((SLURM.read_text(), page)).replace("\\\n", " ")
    for line in text.splitlines():
        if match := re.match(r"(?:.* -- )?\s*easyrl (.*?)(?: &)?$", line):
            yield shlex.split(match[1], comments=True)
    yield shlex.split(JOB["spec"]["entrypoint"])[1:]


COMMANDS = list(easyrl_commands())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_exists_and_its_run_would_be_placed(words, monkeypatch):
    assert len(COMMANDS) == 9
    monkeypatch.chdir(ROOT)
    machine = placement.Machine("cuda", 24, (64, 64, 64), "a cluster")
    monkeypatch.setattr(cluster, "connect", lambda address, num_workers: machine)
    monkeypatch.setattr(placement, "unsupported_reason", lambda kind, dtype: None)  # of vLLM
    placed = []

    def place(config, *_, **__):
        placed.append(placement.resolve_placement(resolve(config)))
        return SimpleNamespace(would_start=True)

    monkeypatch.setattr(preflight, "make_plan", place)
    command = importlib.import_module("easyrl.cli.grpo")
    monkeypatch.setattr(command, "_print_plan", lambda *_, **__: None)
    if words[0] == "grpo":
        result = CliRunner().invoke(app, [*words, "--dry-run"])
        assert result.exit_code == 0, result.output
        assert "--infer-devices" not in words or placed[0].is_ray
        return
    command = typer.main.get_command(app).commands[words[0]]
    parsed = command.make_context(words[0], words[1:]).params
    if words[0] == "scale":
        assert parse_device_set(parsed["infer_devices"]).is_ray


def test_the_slurm_file_is_a_script_with_its_options_before_the_code():
    subprocess.run(["bash", "-n", SLURM], check=True)
    options, code = SLURM.read_text().split("\nset -")  # Slurm reads no options behind it
    assert "#SBATCH --" in options and "#SBATCH" not in code


def test_the_cluster_of_the_kubernetes_file_has_the_devices_of_its_run():
    spec = JOB["spec"]["rayClusterSpec"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    containers = [pod["template"]["spec"]["containers"][0] for pod in pods]
    assert all(each["resources"]["limits"] == each["resources"]["requests"] for each in containers)
    user = re.search(r"ARG USER_ID=(\d+)", (ROOT / "Dockerfile").read_text())
    groups = {pod["template"]["spec"]["securityContext"]["fsGroup"] for pod in pods}
    assert user and groups == {int(user[1])}
    (group,) = spec["workerGroupSpecs"]
    num_gpus = group["replicas"] * int(containers[1]["resources"]["limits"]["nvidia.com/gpu"])
    words = COMMANDS[-1]
    sets = (words[words.index(f"--{role}-devices") + 1] for role in ("infer", "train"))
    assert sum(parse_device_set(each).count for each in sets) == num_gpus


SHORTER = (
    "--iterations 100000 --no-live --model tiny model.dtype=float32 data.max_prompt_length=32"
    " rollout.tensor_parallel_size=1 train.prompts_per_iteration=2 rollout.num_generations=2"
    " rollout.max_completion_length=8 data.num_held_out=2"
)
SRUN = """#!/bin/bash
# Every node is this machine.
while [[ "$1" == --* ]]; do shift; done
if [ "$1" = hostname ]; then echo 127.0.0.1; exit; fi
echo $$ >> "$FOLDER/pids"
exec "$@"
"""


@pytest.mark.long
@pytest.mark.alone
def test_the_slurm_file_runs_on_two_nodes_and_sigterm_leaves_a_checkpoint(tmp_path):
    pytest.importorskip("ray")
    if " " in sys.prefix:
        pytest.skip("`ray start` does not run from a folder with a space in its name")
    tools, folder = make_tools(tmp_path / "bin", {"grpo*": SHORTER}), tmp_path / "job"
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    words = '("${@/#gsm8k/arithmetic}"); words=("${words[@]/ray:*/ray:cpu:1}")'
    for name, program in {
        "srun": SRUN,
        "scontrol": "#!/bin/bash\nprintf 'one\\ntwo\\n'\n",
        "easyrl": (tools / "easyrl").read_text().replace('("$@")', words),
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
        job = popen(["bash", "job"], cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            wait_until((run / "metrics.jsonl").exists, job)
            job.send_signal(signal.SIGTERM)
            code = job.wait(WAIT_SECONDS)
        finally:
            pids = (folder / "pids").read_text().split()
            nodes = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
            for node in nodes:
                node.terminate()  # as Slurm does at a job's end
            job.kill()
            assert wait_until_gone(nodes) == []
            shutil.rmtree(short, ignore_errors=True)
            print((folder / "log").read_text())
    assert code == 128 + signal.SIGTERM
    num_done = len(lines_of(run / "metrics.jsonl"))
    assert (run / "checkpoints" / str(num_done)).is_dir()
