"""Groups of equal rewards are replaced by fresh prompts, round by round."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyrl import events
from easyrl.config import load_config
from easyrl.runtime.controller import Controller
from easyrl.runtime.dispatch import Dispatcher, Rounds
from easyrl.runtime.metrics import IterationRecord
from easyrl.runtime.resume import SavedState
from easyrl.types import IndexedPrompt, Prompt
from runs import finish, lines_of, summary_of, without_timing

FIRST = 100
"""Of the stream's prompts the first that an iteration takes."""


class Numbers:
    """A stream whose prompts are nothing but their index."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, str(index), {})


def open_rounds(num_groups: int, max_replacements: int) -> Rounds:
    stream = cast(Any, Numbers())
    return Rounds(stream, FIRST, num_groups=num_groups, max_replacements=max_replacements)


def scored(indexed: IndexedPrompt, *, rejected: bool = False, **changes: Any) -> events.GroupScored:
    group_index, prompt = indexed
    fields: dict[str, Any] = {
        "rewards": [1.0, 1.0] if rejected else [0.0, 1.0],
        "completion_lengths": [3, 5],
        "num_truncated": 0,
        "busy_seconds": 0.0,
    }
    fields |= {"rewards_by_function": [fields["rewards"]], "is_unwanted": rejected} | changes
    return events.GroupScored(0, group_index, prompt.index, is_rejected=rejected, **fields)


def play(rounds: Rounds, is_equal: Callable[[int], bool], order: random.Random) -> dict[int, int]:
    """Go through the rounds, with groups in a random order; return the prompt of each index."""
    kept: dict[int, int] = {}
    while not rounds.is_complete:
        waiting = rounds.start()
        order.shuffle(waiting)
        for group_index, prompt in waiting:
            assert not rounds.is_over
            rejected = is_equal(prompt.index) and not rounds.is_last
            rounds.add(scored((group_index, prompt), rejected=rejected))
            if not rejected:
                assert group_index not in kept
                kept[group_index] = prompt.index
        assert rounds.is_over
    return kept


# -- rounds ---------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 4), st.sets(st.integers(FIRST, FIRST + 40)), st.integers())
def test_replacements_do_not_depend_on_order_of_arrival(
    num_groups: int, max_replacements: int, equal: set[int], seed: int
) -> None:
    ends = []
    for order in (random.Random(seed), random.Random(seed + 1)):
        rounds = open_rounds(num_groups, max_replacements)
        kept = play(rounds, equal.__contains__, order)
        assert kept.keys() == set(range(num_groups))
        assert rounds.number <= max_replacements
        if rounds.number < max_replacements:
            # Every prompt of the stream up to here, without a gap, but for those of equal rewards.
            assert sorted(kept.values()) == sorted({*range(FIRST, rounds.next_index)} - equal)
        ends.append((kept, rounds.next_index, rounds.number))
    assert ends[0] == ends[1]


def test_rejected_indices_get_the_next_prompts_in_ascending_order() -> None:
    rounds = open_rounds(4, 3)
    first = rounds.start()
    assert first == [(i, Prompt(FIRST + i, str(FIRST + i), {})) for i in range(4)]
    for i in (3, 0, 2):
        rounds.add(scored(first[i], rejected=i != 0))
        assert not rounds.is_over, "group 1 is missing"
    rounds.add(scored(first[1]))
    assert rounds.is_over and not rounds.is_complete
    assert [(i, prompt.index) for i, prompt in rounds.start()] == [(2, 104), (3, 105)]


def test_a_group_that_the_trainer_has_is_not_replaced() -> None:
    """Its report was lost with a node, and a second worker's completions have equal rewards."""
    rounds = open_rounds(2, 3)
    first = rounds.start()
    rounds.delivered = {1}
    rounds.add(scored(first[1], rejected=True))
    rounds.add(scored(first[0]))
    assert rounds.is_complete


# -- dispatch -------------------------------------------------------------------------------------


class Mailbox:
    """Stub of a worker that keeps what it is sent."""

    def __init__(self, number: int) -> None:
        self.name = f"rollout-{number}"
        self.can_work = True
        self.commands: list[events.Generate] = []

    def send(self, command: events.Generate) -> None:
        self.commands.append(command)

    def prompts(self) -> list[int]:
        return [index for command in self.commands for index, _ in command.prompts]


def open_dispatcher(*words: str) -> tuple[Dispatcher, list[Any]]:
    workers: list[Any] = [Mailbox(0), Mailbox(1)]
    placement = cast(Any, SimpleNamespace(max_concurrent_groups=2, max_rollout_workers=2))
    return Dispatcher(workers, load_config(words=words), placement), workers


def indexed(num_prompts: int) -> list[IndexedPrompt]:
    return [(index, Prompt(index, "", {})) for index in range(num_prompts)]


def answer(dispatcher: Dispatcher, worker: Any, index: int) -> None:
    dispatcher.on_event(worker, scored((index, Prompt(index, "", {})), checksum=index * 7))


def test_in_deterministic_mode_each_worker_gets_its_whole_list_at_once() -> None:
    dispatcher, workers = open_dispatcher("runtime.deterministic=true")
    for round_, num_prompts in enumerate((9, 3, 1)):
        dispatcher.start(0, indexed(num_prompts), is_last_round=round_ == 2)
        for index in range(num_prompts):
            assert not dispatcher.is_idle
            answer(dispatcher, workers[index % 2], index)  # nothing is dispatched for it
        received = [worker.prompts() for worker in workers]
        assert received == [list(range(0, num_prompts, 2)), list(range(1, num_prompts, 2))]
        for worker in workers:
            assert len(worker.commands) <= 1
            assert all(command.is_last_round == (round_ == 2) for command in worker.commands)
            worker.commands.clear()


def test_otherwise_the_faster_worker_gets_more_and_every_prompt_is_dispatched_once() -> None:
    dispatcher, workers = open_dispatcher()
    dispatcher.start(0, indexed(20), is_last_round=False)
    assert [len(worker.prompts()) for worker in workers] == [3, 3]
    for number in range(14):
        answer(dispatcher, workers[1], workers[1].prompts()[number])
    assert [len(worker.prompts()) for worker in workers] == [3, 17]
    assert sorted(workers[0].prompts() + workers[1].prompts()) == list(range(20))


def test_what_a_dead_worker_had_not_delivered_goes_to_the_others_first() -> None:
    dispatcher, workers = open_dispatcher()
    dispatcher.start(0, indexed(20), is_last_round=False)
    answer(dispatcher, workers[0], 0)
    answer(dispatcher, workers[0], 2)  # reported, but not put into the ring
    assert workers[0].prompts() == [0, 2, 4, 6, 7]
    dispatcher.reopen(workers[0], 2)
    dead, workers[0] = workers[0], Mailbox(0)
    workers[0].can_work = False  # it starts
    dispatcher.on_event(dead, events.Lost("was killed"))
    for index in (1, 3, 5):
        answer(dispatcher, workers[1], index)
    assert workers[1].prompts() == [1, 3, 5, 2, 4, 6]
    workers[0].can_work = True
    dispatcher.on_joined(workers[0])
    assert workers[0].prompts() == [7, 8, 9]
    while not dispatcher.is_idle:
        for worker in workers:
            for index in worker.prompts():
                answer(dispatcher, worker, index)
    prompts = workers[0].prompts() + workers[1].prompts()
    assert sorted([0, *prompts]) == list(range(20)), "each once, but for what was delivered"


def test_a_deterministic_replacement_gets_the_whole_list_and_what_is_known_of_it() -> None:
    dispatcher, workers = open_dispatcher("runtime.deterministic=true")
    dispatcher.start(0, indexed(6), is_last_round=False)
    for index in (1, 3, 5):
        answer(dispatcher, workers[1], index)
    answer(dispatcher, workers[0], 2)
    for _ in range(2):  # the replacement dies as well
        dead, workers[0] = workers[0], Mailbox(0)
        dispatcher.on_event(dead, events.Lost("was killed"))
        dispatcher.on_joined(workers[0])
        (command,) = workers[0].commands
        assert [index for index, _ in command.prompts] == [0, 2, 4]
        assert command.known == {2: 14}
    dead, workers[1] = workers[1], Mailbox(1)
    dispatcher.on_event(dead, events.Lost("was killed"))
    dispatcher.on_joined(workers[1])
    assert workers[1].commands == [], "all of its groups had been delivered"
    answer(dispatcher, workers[0], 0)
    answer(dispatcher, workers[0], 4)
    assert not dispatcher.is_idle, "the known group is still being generated"
    dispatcher.on_event(workers[0], events.GroupRecomputed(2))
    assert dispatcher.is_idle


# -- metrics --------------------------------------------------------------------------------------


def test_metrics_include_replaced_groups() -> None:
    record = IterationRecord(0, num_replacement_rounds=2)
    arrivals = [
        scored((1, Prompt(1, "", {})), rejected=True, busy_seconds=3.0),
        scored((0, Prompt(0, "", {})), busy_seconds=2.0),  # it had to wait for a slot
        scored((1, Prompt(2, "", {})), rewards=[1.0, 1.0], is_unwanted=True, busy_seconds=4.0),
    ]
    for group in arrivals:
        record.add_group("rollout-0", group)
    record.trained = events.IterationTrained(0, 1, 2, 16, 0.0, {})
    metrics = record.metrics(["score"], {"num_tokens": 4}, seconds=2.0, num_devices=2)
    assert metrics["reward"] == pytest.approx(2.5 / 3)
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert (metrics["groups_replaced"], metrics["groups_not_replaced"]) == (1, 1)
    assert metrics["replacement_rounds"] == 2
    assert (metrics["num_tokens"], metrics["num_generated_tokens"]) == (20, 24)
    assert metrics["perf/tokens_per_second_per_device"] == 4.0
    assert metrics["perf/infer_seconds"] == 4.0


@pytest.mark.parametrize("num_trained", [3, 5])
def test_an_iteration_with_a_wrong_count_ends_the_run(num_trained: int) -> None:
    trained = events.IterationTrained(0, 1, num_trained, 16, 0.0, {})
    controller: Any = SimpleNamespace(
        config=load_config(words=["train.prompts_per_iteration=4"]), state=SavedState()
    )
    with pytest.raises(RuntimeError, match=r"expected 4 trained groups"):
        Controller._finish_iteration(controller, IterationRecord(0), trained, 1.0)
    assert controller.state == SavedState()


# -- runs -----------------------------------------------------------------------------------------

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


def run(folder: Path, *words: str, iterations: int, seed: int = 0) -> dict[str, Any]:
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


def assert_consistent(ended: dict[str, Any]) -> None:
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
    tmp_path: Path, iterations: int, seed: int
) -> None:
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
