"""Runs that lose rollout workers, or are killed or stopped and continue with `--resume`."""

import os
import random
import signal
import time
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from easyrl import events
from easyrl.config import load_config
from easyrl.model.checkpoint_files import UNFINISHED, checkpoints_in, read_checkpoint
from easyrl.runtime.controller import Controller
from easyrl.runtime.resolve import resolve
from easyrl.runtime.resume import SavedState
from mistakes import TINY
from own_processes import WAIT_SECONDS
from runs import (
    SMALL,
    bits_of,
    both_schedules,
    descendants,
    finish_after,
    kill_worker,
    lines_of,
    start,
    succeed,
    summary_of,
    wait_for_line,
    wait_until_gone,
    workers,
    write_rows,
)

SAME = ("runtime.deterministic=true", "rollout.max_completion_length=100", "train.save_every=1")
SMALL_AND_SAME = (*SMALL, *SAME)
FAST = ("--iterations", "6", "train.learning_rate=1e-3")
ONE_UPDATE = ("--iterations", "6", "--train-devices")


@pytest.mark.parametrize("num_trained", [3, 5])
def test_an_iteration_with_a_wrong_count_ends_the_run(num_trained):
    ledger = SimpleNamespace(trained=events.IterationTrained(0, 1, num_trained, 16, 0.0, {}))
    spec = resolve(load_config(words=["train.prompts_per_iteration=4"]))
    controller = SimpleNamespace(spec=spec, state=SavedState())
    with pytest.raises(RuntimeError, match=r"expected 4 trained groups"):
        Controller._finish_iteration(controller, ledger, {})
    assert controller.state == SavedState()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Folder of a whole run with these words; made once for all tests of this file."""
    folders = {}

    def run(*words):
        if words not in folders:
            folders[words] = tmp_path_factory.mktemp("whole") / "run"
            # Under the other schedule, which ends in the same bits, too.
            succeed(*words, "--output", str(folders[words]), "--schedule", "sync")
            assert summary_of(folders[words])["worker_restarts"] == 0
        return folders[words]

    return run


def run_until(line, folder, *words):
    process = start("--output", str(folder), *words)
    wait_for_line(process, line)
    processes = descendants(process.pid)
    process.kill()
    process.communicate()
    assert wait_until_gone(processes) == []


HARDER = (
    *("algorithm.dynamic_sampling=true", "train.updates_per_iteration=2", "algorithm.beta=0.04"),
    *("train.learning_rate=1e-3", "train.prompts_per_iteration=6", "train.save_every=1"),
)
TWO_ENGINES = (
    *(*SMALL, "--infer-devices", "cpu:2", "--no-live", "runtime.deterministic=true"),
    *("rollout.max_completion_length=48", "rollout.max_concurrent_groups=2"),
    "train.eval_every=3",
)


EVEN_SUMS = """
def score(completion_ids, **columns):
    return [sum(ids) % 2 for ids in completion_ids]
"""
"""Of random text, too; sometimes equal in a whole group."""


def prompts_that_begin_alike(folder):
    """Words of a run whose prompts have 70 tokens in common, and 4 to 6 of their own."""
    common = "Add the two numbers, and say nothing but the sum. ".ljust(70, "-")
    rows = [{"prompt": f"{common}{n}+{3 * n}=", "answer": str(4 * n)} for n in range(5, 45)]
    data = write_rows(folder / "sums.jsonl", rows)
    rewards = folder / "rewards.py"
    rewards.write_text(EVEN_SUMS)
    return (
        *("--dataset", data, "--reward", f"{rewards}:score", "data.max_prompt_length=80"),
        *("data.num_held_out=0", "train.eval_every=0"),
    )


SLOWLY = {"EASYRL_RANDOM_DELAYS": "0.05"}
"""Iterations take about a second, most of it in the rollout workers."""


@pytest.mark.parametrize(
    "begin_alike", [pytest.param(False, id="demo"), pytest.param(True, id="prompts begin alike")]
)
def test_a_run_that_is_killed_resumed_and_loses_a_worker_ends_in_the_same_bits(
    tmp_path, undisturbed, begin_alike
):
    words, folder = (*TWO_ENGINES, *HARDER, "--iterations", "4"), tmp_path / "run"
    if begin_alike:
        words += prompts_that_begin_alike(tmp_path)
    run_until("checkpoint of iteration 2:", folder, *words)
    assert not (folder / "summary.json").exists()
    done = int(checkpoints_in(folder / "checkpoints")[-1].name) // 2

    def kill(process):
        time.sleep(random.Random(1).uniform(0.0, 0.5))
        kill_worker(process, "rollout-1")

    resumed = ("--resume", str(folder), "--no-live")
    code, out, err = finish_after(f"iteration {max(3, done + 1)}/4", kill, *resumed, **SLOWLY)
    assert (code, err) == (0, "") and "iteration 4/4" in out
    assert summary_of(folder)["worker_restarts"] == 1
    once = undisturbed(*words)
    assert bits_of(folder) == bits_of(once)
    assert lines_of(once / "metrics.jsonl")[-1]["groups_replaced"] > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("way", [(), HARDER[:3]], ids=["plain", "replaced groups, two updates"])
def test_a_run_that_lost_a_worker_ends_in_the_same_bits(tmp_path, undisturbed, seed, way):
    folder, draw = tmp_path / "run", random.Random(seed)
    words = (*TWO_ENGINES, *HARDER[3:5], "--iterations", "6", *way)

    def kill(process):
        number, seconds = draw.randrange(2), draw.uniform(0.0, 3.0)
        time.sleep(seconds)
        kill_worker(process, f"rollout-{number}")

    moment = "held-out accuracy"  # the workers have started
    how = {**SLOWLY}
    code, _, err = finish_after(moment, kill, "--output", str(folder), *words, **how)
    assert (code, err) == (0, "")
    assert summary_of(folder)["worker_restarts"] == 1
    assert bits_of(folder) == bits_of(undisturbed(*words))


def test_a_worker_that_native_code_aborts_leaves_its_stack_in_the_log(tmp_path):
    """As malloc does when it finds a broken heap."""

    def abort(process):
        workers(process.pid)["train-0"].send_signal(signal.SIGABRT)

    code, _, err = finish_after("iteration 1/", abort, "--output", str(tmp_path / "run"), *SMALL)
    assert code == 1
    assert "train-0" in err and "SIGABRT" in err
    log = (tmp_path / "run" / "logs" / "train-0.log").read_text()
    assert "Fatal Python error: Aborted" in log and "in run_worker" in log


POINTS = {
    "in the first broadcast": "rollout-1@weights:0",
    "in a later broadcast": "rollout-0@weights:2",
    "both in one iteration": "rollout-0@iteration:1,rollout-1@iteration:1",
    "in an evaluation": "rollout-0@evaluation:4",
    "one after the other": "rollout-0@evaluation:0,rollout-1@iteration:0",
}


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_a_worker_lost_at_this_point_changes_no_bit(tmp_path, undisturbed, point):
    folder, points = tmp_path / "run", POINTS[point]
    words = (*TWO_ENGINES, *HARDER[3:5], "--iterations", "6")
    succeed("--output", str(folder), *words, altered=True, LOSE=points)
    assert summary_of(folder)["worker_restarts"] == len(points.split(","))
    assert bits_of(folder) == bits_of(undisturbed(*words))


WAYS = {
    "two rollout workers": ("--infer-devices", "cpu:2", "rollout.max_concurrent_groups=1"),
    "a reference and two updates": ("algorithm.beta=0.05", "train.updates_per_iteration=2"),
    "dynamic sampling": ("algorithm.dynamic_sampling=true", "algorithm.beta=0.05"),
    "LoRA": ("model.lora.rank=4", "algorithm.beta=0.05"),
    "two train ranks, all offloaded": (
        *("--train-devices", "cpu:2", "algorithm.beta=0.05", "model.dtype=bfloat16"),
        "train.offload=[optimizer, reference]",
    ),
}
TWO_UPDATES = (*WAYS["a reference and two updates"], *FAST)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_killed_and_resumed_run_ends_in_the_same_bits(tmp_path, undisturbed, way):
    words, folder = (*SMALL_AND_SAME, *WAYS[way], *FAST), tmp_path / "run"
    once = undisturbed(*words)
    run_until("checkpoint of iteration 3:", folder, *words)
    done = int(checkpoints_in(folder / "checkpoints")[-1].name)
    done //= 2 if "two updates" in way else 1
    out = succeed("--resume", str(folder), EASYRL_RANDOM_DELAYS="0.01")
    assert f"{done} of 6 iterations done" in out and f"iteration {done + 1}/6" in out
    assert f"iteration {done}/6" not in out and "iteration 6/6" in out
    assert bits_of(folder) == bits_of(once)
    assert summary_of(folder)["wall_seconds"] > 0


@pytest.mark.long
def test_more_iterations_continue_a_finished_run(tmp_path, undisturbed):
    twice, words = tmp_path / "twice", (*SMALL_AND_SAME, "train.lr_scheduler_type=constant")
    once = undisturbed(*words, "--iterations", "4")
    out = succeed("--output", str(twice), "--iterations", "2", *words)
    assert f"easyrl grpo --resume {twice}" in out
    before = (twice / "metrics.jsonl").read_bytes()
    assert "has finished its 2 iterations" in succeed("--resume", str(twice))
    assert (twice / "metrics.jsonl").read_bytes() == before
    # The newest is cut off: the run resumes from the one before it.
    (tensors,) = (twice / "checkpoints" / "2").glob("*.safetensors")
    os.truncate(tensors, tensors.stat().st_size // 2)
    out = succeed("--resume", str(twice), "--iterations", "4")
    assert f"complete checkpoint, {twice}/checkpoints/1: 1 of 4 iterations done" in out
    assert f"'{twice}/checkpoints/2' cannot be read" in out
    assert bits_of(twice) == bits_of(once)
    assert summary_of(twice)["iterations"] == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("signum", "words", "every"),
    [
        (signal.SIGTERM, TWO_UPDATES, "null"),
        (signal.SIGINT, (*ONE_UPDATE, "cpu:2"), "null"),
        (signal.SIGTERM, (*ONE_UPDATE, "cpu:2"), "1"),
    ],
)
def test_a_signal_saves_the_last_whole_iteration(tmp_path, undisturbed, signum, words, every):
    once, folder = undisturbed(*SMALL_AND_SAME, *words), tmp_path / "run"
    saving = (*SMALL_AND_SAME, *words, f"train.save_every={every}")
    process = start("--output", str(folder), *saving, EASYRL_RANDOM_DELAYS="0.05")
    if every == "1":
        wait_for_saving(process, folder)
    else:
        wait_for_line(process, "iteration 2/")
        time.sleep(random.Random(len(words) * signum).random())
    assert process.poll() is None
    process.send_signal(signum)
    out, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 128 + signum and err == ""
    assert out.count("stopped by") == 1 and f"to resume: easyrl grpo --resume {folder}" in out
    assert not list((folder / "checkpoints").glob(f"*{UNFINISHED}"))
    *_, saved = checkpoints_in(folder / "checkpoints")
    done = len(lines_of(folder / "metrics.jsonl"))
    assert read_checkpoint(saved).state["num_iterations"] == done >= 2  # no whole one is lost
    succeed("--resume", str(folder))
    assert bits_of(folder) == bits_of(once)


def wait_for_saving(process, folder):
    deadline = time.monotonic() + WAIT_SECONDS
    while process.poll() is None and not any(
        int(path.name.removesuffix(UNFINISHED)) > 1
        for path in (folder / "checkpoints").glob(f"*{UNFINISHED}")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [("cpu:2", "cpu"), ("cpu", "cpu:2")])
def test_another_number_of_ranks_continues_to_the_same_weights(
    tmp_path, undisturbed, before, after
):
    words = (*SMALL_AND_SAME, "algorithm.beta=0.05", *ONE_UPDATE, before)
    twice = tmp_path / "twice"
    once = undisturbed(*words)
    run_until("checkpoint of iteration 3:", twice, *words)
    newest = checkpoints_in(twice / "checkpoints")[-1]
    assert len(list(newest.glob("*.safetensors"))) == (2 if before == "cpu:2" else 1)
    out = succeed("--resume", str(twice), "--train-devices", after)
    assert ("train-1: cpu" in out) == (after == "cpu:2")
    assert f"{newest.name} of 6 iterations done" in out
    got, expected = (load_file(folder / "model/model.safetensors") for folder in (twice, once))
    start_weights = load_file(TINY / "model.safetensors")
    for name, weight in expected.items():
        gap = float((got[name] - weight).norm() / weight.norm())
        moved = float((start_weights[name] - weight).norm() / weight.norm())
        assert gap <= 1e-5 and gap < moved / 100, name
    assert summary_of(twice)["groups_trained"] == summary_of(once)["groups_trained"] == 24


NUM_GROUPS = 10
REWARD = """
import zlib
from pathlib import Path

def score(prompts, completions, row, **_):
    with Path(__file__).with_name("rows").open("a") as file:
        file.write(f"{row[0]}\\n")
    if row[0] % 3 == 0:
        return [1.0] * len(completions)
    return [float(zlib.crc32(f"{row[0]} {text}".encode()) % 2) for text in completions]
"""


@pytest.mark.long
@pytest.mark.parametrize(("iterations", "seed"), [(4, 0), (12, 1), (12, 2)])
def test_two_workers_and_replaced_groups_end_in_the_same_bits_under_both_schedules(
    tmp_path, iterations, seed
):
    rows = [{"prompt": f"{10 + n % 80}+{20 + n % 70}=", "row": n} for n in range(500)]
    (tmp_path / "r.py").write_text(REWARD)
    folder = both_schedules(
        *(tmp_path, "--dataset", write_rows(tmp_path / "data.jsonl", rows)),
        *("--reward", f"{tmp_path}/r.py:score", "reward.check=false"),
        *("--iterations", str(iterations)),
        *("--seed", str(seed), "--infer-devices", "cpu:2", "algorithm.dynamic_sampling=true"),
        *("data.shuffle=false", "data.max_prompt_length=32", "rollout.max_concurrent_groups=2"),
        *(f"train.prompts_per_iteration={NUM_GROUPS}", "rollout.num_generations=4"),
        *("rollout.max_completion_length=32", "train.max_tokens_per_micro_batch=200"),
    )
    metrics, summary = lines_of(folder / "metrics.jsonl"), summary_of(folder)
    assert summary["groups_trained"] == NUM_GROUPS * iterations
    num_generated = summary["groups_trained"] + summary["groups_replaced"]
    # The next prompts of the stream, once in each run: iterations follow each other without a gap.
    used = sorted(map(int, (tmp_path / "rows").read_text().split()))
    assert used == sorted([*range(num_generated)] * 2)
    for line in metrics:
        unwanted = line["groups_replaced"] + line["groups_not_replaced"]
        share = unwanted / (NUM_GROUPS + line["groups_replaced"])
        assert line["frac_reward_zero_std"] == pytest.approx(share)
        assert line["groups_not_replaced"] == 0 or line["replacement_rounds"] == 3
    assert 0 < summary["completion_tokens"] < summary["generated_tokens"]
