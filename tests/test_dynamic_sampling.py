"""Groups of equal rewards are replaced by fresh prompts, round by round."""

import json
from types import SimpleNamespace

import pytest

from easyrl import events
from easyrl.config import load_config
from easyrl.runtime.controller import Controller
from easyrl.runtime.resume import SavedState
from runs import finish, lines_of, summary_of, without_timing


@pytest.mark.parametrize("num_trained", [3, 5])
def test_an_iteration_with_a_wrong_count_ends_the_run(num_trained):
    ledger = SimpleNamespace(trained=events.IterationTrained(0, 1, num_trained, 16, 0.0, {}))
    controller = SimpleNamespace(
        config=load_config(words=["train.prompts_per_iteration=4"]), state=SavedState()
    )
    with pytest.raises(RuntimeError, match=r"expected 4 trained groups"):
        Controller._finish_iteration(controller, ledger, {})
    assert controller.state == SavedState()


NUM_GROUPS = 10
REWARD = """
import os, zlib

def score(prompts, completions, row, **_):
    with open(os.environ["ROWS"], "a") as file:
        file.write(f"{row[0]}\\n")
    if row[0] % 3 == 0:
        return [1.0] * len(completions)
    return [float(zlib.crc32(f"{row[0]} {text}".encode()) % 2) for text in completions]
"""


def run(folder, *words, iterations, seed=0):
    """A run over numbered rows, of which every third has equal rewards, and others by chance."""
    folder.mkdir()
    rows = [{"prompt": f"{10 + n % 80}+{20 + n % 70}=", "row": n} for n in range(500)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "r.py").write_text(REWARD)
    code, out, err = finish(
        *("--output", str(folder / "run"), "--dataset", str(folder / "data.jsonl")),
        *("--reward", f"{folder}/r.py:score", "--iterations", str(iterations)),
        *("--seed", str(seed), "--infer-devices", "cpu:2", "algorithm.dynamic_sampling=true"),
        *("data.shuffle=false", "data.max_prompt_length=32", "rollout.max_concurrent_groups=2"),
        *(f"train.prompts_per_iteration={NUM_GROUPS}", "rollout.num_generations=4"),
        *("rollout.max_completion_length=32", "train.max_tokens_per_micro_batch=200", *words),
        EASYRL_RANDOM_DELAYS="0.01",
        ROWS=str(folder / "rows"),
    )
    assert (code, err) == (0, "")
    return {
        "out": out,
        "rows": sorted(map(int, (folder / "rows").read_text().split())),
        "metrics": [without_timing(line) for line in lines_of(folder / "run" / "metrics.jsonl")],
        "summary": summary_of(folder / "run"),
    }


def assert_consistent(ended):
    metrics, summary = ended["metrics"], ended["summary"]
    num_groups = NUM_GROUPS * len(metrics)
    assert summary["groups_trained"] == num_groups
    num_generated = num_groups + summary["groups_replaced"]
    # The next prompts of the stream, each once: iterations follow each other without a gap.
    assert ended["rows"] == list(range(num_generated))
    for line in metrics:
        unwanted = line["groups_replaced"] + line["groups_not_replaced"]
        share = unwanted / (NUM_GROUPS + line["groups_replaced"])
        assert line["frac_reward_zero_std"] == pytest.approx(share)
        assert line["groups_not_replaced"] == 0 or line["replacement_rounds"] == 3
    assert 0 < summary["completion_tokens"] < summary["generated_tokens"]


@pytest.mark.long
@pytest.mark.parametrize(("iterations", "seed"), [(4, 0), (12, 1), (12, 2)])
def test_two_workers_and_replaced_groups_end_in_the_same_bits_under_both_schedules(
    tmp_path, iterations, seed
):
    """Random delays in engine, rewards, ring and trainer."""
    ends = {}
    for schedule in ("sync", "periodic"):
        ended = run(
            tmp_path / schedule,
            f"runtime.schedule={schedule}",
            "runtime.deterministic=true",
            iterations=iterations,
            seed=seed,
        )
        assert_consistent(ended)
        assert "without advantages" in ended["out"]
        ends[schedule] = ended["summary"]["weights_sha256"], ended["metrics"]
    assert ends["sync"] == ends["periodic"]
