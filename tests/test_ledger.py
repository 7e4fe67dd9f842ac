"""The book about the groups of an iteration, under any order of reports and deaths."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl import events
from easyrl.config import load_config
from easyrl.runtime.fleet import Fleet
from easyrl.runtime.ledger import ledger_of_evaluation, ledger_of_iteration
from easyrl.runtime.resolve import resolve
from easyrl.types import Prompt

FIRST = 100
"""Index in the stream of an iteration's first prompt."""
MAX_ROUNDS = 4


def open_ledger(*words, num_groups=6, num_workers=2):
    placement = SimpleNamespace(
        max_concurrent_groups=2, max_rollout_workers=num_workers, num_rollout_workers=num_workers
    )
    words = [f"train.prompts_per_iteration={num_groups}", *words]
    schedule = resolve(load_config(words=words)).schedule
    stream = SimpleNamespace(prompt=lambda index: Prompt(index, "", {}))
    return ledger_of_iteration(schedule, placement, 0, stream, FIRST)


def report(indexed, *, is_rejected=False, **changes):
    group_index, prompt = indexed
    fields = {
        "rewards": [1.0, 1.0] if is_rejected else [0.0, 1.0],
        "completion_lengths": [3, 5],
        "num_truncated": 0,
        "busy_seconds": 0.0,
        "checksum": prompt.index * 7,
    }
    fields |= {"rewards_by_function": [fields["rewards"]], "is_unwanted": is_rejected} | changes
    return events.GroupScored(0, group_index, prompt.index, is_rejected=is_rejected, **fields)


class Run:
    """An iteration with workers and a ring that follow the protocol, in a random order."""

    def __init__(self, ledger, num_workers, rejected):
        self.ledger, self.rejected = ledger, rejected
        self.has = {f"rollout-{number}": {} for number in range(num_workers)}
        """By worker, its prompts in progress: group index, and whether it may be rejected."""
        self.known = {name: set() for name in self.has}
        self.reported = {name: {} for name in self.has}
        """By worker, what it has reported and not put into the ring."""
        self.ring = Counter()  # by group index: also late duplicates
        self.prompts = {}  # of the first group of each index in the ring
        self.lists = {}  # by worker and first prompt

    def hand_out(self):
        for name, command in self.ledger.take([*self.has]).items():
            assert isinstance(command, events.Generate)
            indices = [prompt.index for _, prompt in command.prompts]
            others = {each for has in self.has.values() for each in has}
            assert not others.intersection(indices), "given to two workers"
            self.has[name] |= {p.index: (i, not command.is_last_round) for i, p in command.prompts}
            self.known[name] |= command.known.keys()
            if self.ledger._fixed_workers:
                before = self.lists.setdefault((name, indices[0]), indices)
                assert before == indices, "a replacement generates the same list"

    def report(self, name, prompt_index):
        group_index, may_reject = self.has[name].pop(prompt_index)
        if prompt_index in self.known[name]:
            self.ledger.on_event(name, events.GroupRecomputed(prompt_index))
            return
        is_rejected = may_reject and prompt_index in self.rejected
        scored = report((group_index, Prompt(prompt_index, "", {})), is_rejected=is_rejected)
        self.ledger.on_event(name, scored)
        if not is_rejected:
            self.reported[name][group_index] = prompt_index

    def put(self, name, group_index):
        prompt_index = self.reported[name].pop(group_index)
        self.ring[group_index] += 1
        assert self.prompts.setdefault(group_index, prompt_index) == prompt_index

    def die(self, name, *, is_report_lost=False):
        """End a worker. The report of its last group may be lost with its node, although that group
        is in the ring."""
        if is_report_lost and self.has[name]:
            prompt_index, (group_index, may_reject) = next(iter(self.has[name].items()))
            is_rejected = may_reject and prompt_index in self.rejected
            if not is_rejected and prompt_index not in self.known[name]:
                self.reported[name][group_index] = prompt_index
                self.put(name, group_index)
        for own in (self.has[name], self.known[name], self.reported[name]):
            own.clear()
        self.ledger.on_worker_lost(name, {*self.ring})

    def play(self, order, death_rate):
        while not self.ledger.is_complete or any(self.reported.values()):
            self.hand_out()
            choices = [(self.report, n, p) for n, has in self.has.items() for p in has]
            choices += [(self.put, n, g) for n, own in self.reported.items() for g in own]
            act, name, number = order.choice(choices)
            if order.random() < death_rate:
                self.die(name, is_report_lost=order.random() < 0.5)
            else:
                act(name, number)


@pytest.mark.parametrize("is_deterministic", ["true", "false"])
@given(st.integers(1, 8), st.integers(1, 3), st.sets(st.integers(FIRST, FIRST + 24)), st.integers())
@settings(max_examples=300)
def test_every_group_is_delivered_whatever_dies(
    is_deterministic, num_groups, num_workers, rejected, seed
):
    """Also: no prompt is with two workers, the prompts depend on the rewards alone, and a
    deterministic worker's list does not change."""
    runs = []
    for death_rate in (0.2, 0.0):
        words = f"runtime.deterministic={is_deterministic}"
        ledger = open_ledger(words, num_groups=num_groups, num_workers=num_workers)
        runs.append(Run(ledger, num_workers, rejected))
        runs[-1].play(random.Random(seed), death_rate)
    run, calm = runs
    ledger = run.ledger
    assert run.prompts.keys() == set(range(num_groups)), "a group is lost"
    assert (run.prompts, ledger.next_index) == (calm.prompts, calm.ledger.next_index)
    ledger.on_event("train-0", events.IterationTrained(0, 1, num_groups, 1, 0.0, {}))
    assert ledger.is_complete
    states = Counter(group.state for group in ledger.groups.values())
    assert states.keys() <= {"ACCEPTED", "REJECTED"}
    assert states["ACCEPTED"] == num_groups
    assert sorted(report.prompt_index for report in ledger.reports) == [*ledger.groups]
    if ledger.round < MAX_ROUNDS - 1:  # the next prompts of the stream, without a gap
        expected = {*range(FIRST, ledger.next_index)} - rejected
        assert {*run.prompts.values()} == expected


def indices(command):
    return [prompt.index - FIRST for _, prompt in command.prompts]


def answer(ledger, worker, *numbers):
    for number in numbers:
        group = ledger.groups[FIRST + number]
        ledger.on_event(worker, report((group.index, group.prompt)))


WORKERS = ["rollout-0", "rollout-1"]


def test_the_faster_worker_gets_more_and_the_groups_of_a_dead_one_come_first():
    ledger = open_ledger(num_groups=20)
    one, two = WORKERS
    first = ledger.take(WORKERS)
    assert [indices(first[name]) for name in WORKERS] == [[0, 2, 4], [1, 3, 5]]
    for number in (1, 3, 5):
        answer(ledger, two, number)
    assert indices(ledger.take(WORKERS)[two]) == [6, 7, 8]
    answer(ledger, one, 0, 2)
    ledger.on_worker_lost(one, in_ring={0, 1, 3, 5})  # 2 is reported, and died with its worker
    answer(ledger, two, 6)
    assert indices(ledger.take([two])[two]) == [2]
    assert {name: indices(each) for name, each in ledger.take(WORKERS).items()} == {
        one: [4, 9, 10]  # the replacement
    }
    states = [ledger.groups[FIRST + n].state for n in (0, 6, 7, 11)]
    assert states == ["ACCEPTED", "REPORTED", "GIVEN", "WAITING"]


def test_a_late_duplicate_is_dropped():
    ledger = open_ledger(num_groups=2)
    ledger.take(WORKERS)
    ledger.on_worker_lost("rollout-0", in_ring=())
    ledger.take(["rollout-1"])
    answer(ledger, "rollout-0", 0)
    assert ledger.groups[FIRST].state == "GIVEN"
    answer(ledger, "rollout-1", 0, 0, 1)
    assert ledger.is_complete and len(ledger.reports) == 2


def test_answers_of_an_evaluation_outlive_their_worker():
    schedule = resolve(load_config(words=["rollout.num_generations=4"])).schedule
    numbers = {"max_concurrent_groups": 2, "max_rollout_workers": 2, "num_rollout_workers": 2}
    problems = [Prompt(index, "", {}) for index in (3, 5, 8, 9)]
    placement = SimpleNamespace(**numbers)
    ledger = ledger_of_evaluation(schedule, placement, 1, problems, num_samples=6)

    def taken():
        return [[p.index for p in each.prompts] for each in ledger.take(WORKERS).values()]

    def answered(worker, index):
        answer = events.PromptEvaluated(1, index, ())
        ledger.on_event(worker, answer)
        return answer

    def steps():
        yield answered(WORKERS[0], 3)
        ledger.on_worker_lost(WORKERS[0], in_ring=())
        assert taken() == [[8]]
        yield answered(WORKERS[1], 5)
        yield answered(WORKERS[1], 9)
        yield answered(ledger.groups[8].worker, 8)

    fleet = SimpleNamespace(ledger=None, next_event=steps().__next__)
    assert taken() == [[3, 8], [5, 9]]
    found = [each.prompt_index for each in Fleet.answers(fleet, ledger)]
    assert found == [3, 5, 9, 8] and fleet.ledger is None
