"""What the embedded engine has stored is continued: by branches of a conversation, at any depth.

Prompts of one family begin with tokens of earlier ones: within a prompt, within what was sampled
behind it, or at an end of either. Every log-probability is that of a plain forward, and a token
that is stored is not computed again.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import recorded_graphs
from easyrl.engines import started_sequences, step_graphs
from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.cache import cache as node_cache
from easyrl.engines.cache.nodes import NodeTree, num_common
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.model.mixers.attention import ATTENTION_NAME, register_attention
from easyrl.model.policy import Policy
from tiny_models import VOCABULARY, WITH_STATES, pieces_of, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")
register_attention()

SAMPLING = SamplingSettings(
    max_prompt_length=50, max_completion_length=24, max_length=60, temperature=1.0, seed=3
)
ENDS = range(2, 9)  # so many tokens end a turn that there are several
FAMILIES = ((1,), (2,))


def make_policy(family="qwen3"):
    model = tiny_model(family, ATTENTION_NAME, **WITH_STATES.get(family, {}))
    policy = Policy(model, torch.device("cpu"))
    for token in ENDS:
        policy.stop_at(token)
    return policy


def make_engine(policy, num_rows=6, **changes):
    return EmbeddedEngine(policy, replace(SAMPLING, **changes), num_rows=num_rows)


class Conversations:
    """Requests that branch at random, their turns, and what has finished."""

    def __init__(self, engine, seed, num_requests=40):
        self.engine = engine
        self.random = np.random.default_rng(seed)
        self.num_left = num_requests
        self.texts = {}  # tokens of each sequence, by key and index
        self.requests = {}
        self.finished = {}
        self.waiting = []  # suspended turns, in their order

    def tokens(self, number):
        return self.random.integers(9, VOCABULARY, number).tolist()

    def submit(self):
        """A prompt that begins as another sequence of its family, or as nothing."""
        self.num_left -= 1
        key = (self.num_left,)
        family = FAMILIES[self.random.integers(2)]
        known = [ids for of, ids in self.texts.items() if self.requests[of[0]].family == family]
        prompt = []
        if known and self.random.random() < 0.9:
            other = known[self.random.integers(len(known))]
            prompt = other[: self.random.integers(len(other)) + 1]
        prompt = prompt[:49] + self.tokens(self.random.choice([0, 1, 2, 5, 20]))
        prompt = prompt[:50] or self.tokens(12)
        number = int(self.random.integers(1, 4))
        request = GroupRequest(
            key,
            prompt,
            number,
            has_turns=True,
            max_turn_tokens=int(self.random.integers(1, 9)),
            max_new_tokens=int(self.random.integers(9, 25)),
            family=family,
        )
        self.requests[key] = request
        for index in range(number):
            self.texts[key, index] = [*prompt]
        self.engine.submit(request)

    def answer(self, turn):
        """Resume a turn, or end it."""
        number = int(self.random.integers(1, 6))
        if self.random.random() < 0.5 and number < turn.num_left:
            inserted = self.tokens(number)
            self.texts[turn.key, turn.sample_index] += inserted
            self.engine.resume(turn, inserted, int(self.random.integers(1, 9)))
        else:
            self.engine.end(turn, "stop", may_continue=self.random.random() < 0.7)

    def run(self, check=lambda: None):
        while self.num_left or self.engine.has_work:
            while self.num_left and self.random.random() < 0.5:
                self.submit()
            if self.engine.can_step:
                for request, completions in self.engine.step():
                    self.finished[request.key] = completions
            for turn in self.engine.take_turns():
                self.texts[turn.key, turn.sample_index] += turn.token_ids.tolist()
                self.waiting.append(turn)
            while self.waiting and (self.random.random() < 0.4 or not self.engine.can_step):
                self.answer(self.waiting.pop(0))
                check()
            check()
        return self.finished

    def assert_exact(self, reference, tolerance=2e-5):
        for key, completions in self.finished.items():
            prompt = list(self.requests[key].prompt_ids)
            for index, completion in enumerate(completions):
                assert prompt + completion.token_ids.tolist() == self.texts[key, index]
                ids = torch.tensor([self.texts[key, index]])
                with torch.no_grad():
                    logits = reference(input_ids=ids, use_cache=False).logits[0]
                logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
                mask = completion.is_sampled
                expected = logprobs[len(prompt) - 1 :].numpy()[mask]
                np.testing.assert_allclose(completion.logprobs[mask], expected, atol=tolerance)


def check_cache(engine):
    """Users are counted, slots are used once, and rows continue the nodes that they should."""
    cache = engine.cache
    nodes = cache.tree.nodes
    users = Counter(sequence.node for sequence in engine._ready)
    for row in range(engine.num_held):
        sequence = engine._sequences[row]
        users[sequence.node] += 1
        state = engine._rows[row]
        assert state["position"] - state["cell"] == sequence.row_start
        assert state["slots"].tolist() == cache.slots_of(sequence.node).tolist()
        end = 0 if sequence.node is None else sequence.node.stop
        assert sequence.row_start == end
    assert len({node.slot for node in nodes}) == len(nodes)
    assert np.count_nonzero(cache.lengths) == len(nodes)
    for node in nodes:
        assert node.num_sequences == users[node]
        assert node.is_stored
        assert len(node) > 0
        assert (cache.lengths[node.slot], cache.starts[node.slot]) == (len(node), node.start)
        path = node.path()
        # What an ended sequence has left may be one level deeper: nothing continues it there.
        assert len(path) <= node_cache.MAX_LEVELS + (not node.is_used)
        assert all(a.stop == b.start and b in a.children for a, b in pairwise(path))
        assert all(np.array_equal(each.ids, node.ids[: each.stop]) for each in path)


@pytest.mark.parametrize("copied_tokens", [0, 3, 64])
@pytest.mark.parametrize(
    "family", ["qwen3", "mistral", "gemma2", "gpt_oss", "qwen3_5_text", "falcon_h1"]
)
def test_branches_have_the_logprobs_of_a_plain_forward(family, copied_tokens, monkeypatch):
    """At any depth, whatever is cut, copied or dropped; also within sliding windows, and in layers
    with a state."""
    monkeypatch.setattr(node_cache, "COPIED_TOKENS", copied_tokens)
    for seed, num_rows in ((0, 6), (1, 3), (2, 30)):
        engine = make_engine(make_policy(family), num_rows)
        played = Conversations(engine, seed)
        played.run(lambda engine=engine: check_cache(engine))
        changes = WITH_STATES.get(family, {})
        played.assert_exact(tiny_model(family, **changes), 1e-4 if changes else 2e-5)
        assert not engine.cache.tree.nodes  # nothing is in progress


def test_replayed_steps_serve_branches(monkeypatch):
    for name, step in {"ROW": 3, "CELL": 4, "SLOT": 2}.items():
        monkeypatch.setattr(step_graphs, f"{name}_STEP", step)
    monkeypatch.setattr(step_graphs, "CAPTURED_AT", 1)
    monkeypatch.setattr(node_cache, "COPIED_TOKENS", 2)
    recorded_graphs.install(monkeypatch)
    engine = make_engine(make_policy(), 8)
    levels = set()
    prepare = engine.graphs._prepare

    def watched(*arguments):
        sizes, inputs = prepare(*arguments)
        levels.add(len(sizes.levels))
        return sizes, inputs

    monkeypatch.setattr(engine.graphs, "_prepare", watched)
    played = Conversations(engine, 5, 80)
    played.run()
    played.assert_exact(tiny_model("qwen3"))
    assert levels >= {1, 2, 3}
    assert engine.graphs.num_replays > 3


def test_a_tree_is_searched_as_if_every_path_were_spelled_out():
    random = np.random.default_rng(0)
    for _ in range(200):
        tree = NodeTree()
        for slot in range(8):
            parent = None
            if tree.nodes and random.random() < 0.8:
                parent = tree.nodes[random.integers(len(tree.nodes))]
            before = [] if parent is None else parent.ids.tolist()
            own = random.integers(0, 2, random.integers(1, 5)).tolist()
            node = tree.add(np.array(before + own, np.int32), parent, (0,), slot)
            if len(node) > 1 and random.random() < 0.5:
                position = int(random.integers(node.start + 1, node.stop))
                upper = tree.cut(node, position, 10 + slot)
                assert (upper.slot, node.slot, node.parent) == (slot, 10 + slot, upper)
                assert upper.parent is parent
        ids = random.integers(0, 2, 9).astype(np.int32)
        found, length = tree.longest((0,), ids)
        assert length == max(num_common(node.ids, ids) for node in tree.nodes)
        assert length == 0 or found.start < length <= num_common(found.ids, ids)
        assert tree.longest((1,), ids) == (None, 0)


def computed_tokens(engine, monkeypatch):
    """Return the numbers of tokens that the model is given from now on, forward by forward."""
    counts = []
    run_model = engine._run_model

    def counted(inputs):
        counts.append(len(inputs.ids))
        return run_model(inputs)

    monkeypatch.setattr(engine, "_run_model", counted)
    return counts


def finish(engine):
    """Let all sequences come to their end or be suspended; return the turns."""
    while engine.can_step:
        engine.step()
    return engine.take_turns()


@pytest.mark.parametrize("question_length", [10, 100])
def test_four_branches_behind_a_long_prompt_compute_each_token_of_the_tree_once(
    question_length, monkeypatch
):
    """What was sampled last by a turn that nothing follows is never computed."""
    engine = make_engine(
        make_policy(), 8, max_prompt_length=2000, max_completion_length=300, max_length=2300
    )
    counts = computed_tokens(engine, monkeypatch)
    random = np.random.default_rng(0)

    def tokens(number):
        return random.integers(9, VOCABULARY, number).tolist()

    common = tokens(1500)
    sequences = []
    for branch in range(4):
        prompt = common + tokens(question_length)
        more = {"has_turns": True, "max_turn_tokens": 20, "max_new_tokens": 150}
        engine.submit(GroupRequest((branch,), prompt, 1, family=(0,), **more))
        (turn,) = finish(engine)
        sampled = turn.token_ids.tolist()
        inserted = tokens(7)
        engine.resume(turn, inserted, 20)
        (turn,) = finish(engine)
        sequences.append(prompt + sampled + inserted + turn.token_ids.tolist())
    # A branch of an answer: at a token that one of the sequences has sampled.
    answer = sequences[2][: 1500 + question_length + 1] + tokens(90)
    engine.submit(GroupRequest((4,), answer, 2, family=(0,), **more))
    finish(engine)
    for row in range(engine.num_held):
        if engine._sequences[row].request.key == (4,):
            newest = engine._rows["count"][row]
            sequences.append(answer + engine._rows["tokens"][row][:newest].tolist())
    tree = set()  # every path to a token that is computed: the newest one is not
    for ids in sequences:
        tree |= {tuple(ids[:length]) for length in range(1, len(ids))}
    assert sum(counts) == len(tree)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_layers_with_a_state_continue_what_ended_and_nothing_within(family):
    """A state is that behind a node's last token: a branch within a node begins where the node
    does."""
    engine = make_engine(make_policy(family), 4)
    random = np.random.default_rng(0)
    prompt = random.integers(9, VOCABULARY, 30).tolist()
    more = {"has_turns": True, "max_turn_tokens": 12, "family": (0,)}
    engine.submit(GroupRequest((0,), prompt, 1, **more))
    (turn,) = finish(engine)
    computed = []
    said = turn.token_ids.tolist()
    for key, history in enumerate(
        ([*prompt, *said, 11, 12], [*prompt, 11], [*prompt[:20], 11, 12])
    ):
        before = engine.num_prompt_tokens
        engine.submit(GroupRequest((1 + key,), history, 1, **more))
        finish(engine)
        computed.append(engine.num_prompt_tokens - before)
    # The newest token of what was said has not been computed.
    assert computed == [1 + 2, 1, 20 + 2]


def test_a_prompt_that_is_asked_again_is_not_computed_again():
    """Whether its first sequences are ready, in flight, suspended or ended."""
    engine = make_engine(make_policy(), 4)
    prompt = np.random.default_rng(0).integers(9, VOCABULARY, 40).tolist()
    more = {"has_turns": True, "max_turn_tokens": 5, "family": (0,)}
    engine.submit(GroupRequest((0,), prompt, 2, **more))
    engine.step()
    engine.submit(GroupRequest((1,), prompt, 1, **more))
    engine.step()
    for number in range(2, 5):
        for turn in finish(engine)[:1]:
            engine.end(turn, "stop")
        engine.submit(GroupRequest((number,), prompt, 1, **more))
    finish(engine)
    assert engine.num_prompt_tokens == len(prompt)


def test_an_ended_sequence_is_continued_if_it_may_be():
    random = np.random.default_rng(0)
    prompt = random.integers(9, VOCABULARY, 30).tolist()
    computed = {}
    for may_continue in (False, True):
        engine = make_engine(make_policy(), 2)
        more = {"has_turns": True, "max_turn_tokens": 12, "family": (0,)}
        engine.submit(GroupRequest((9,), [9] * 10, 1, **more))  # keeps the engine at work
        finish(engine)
        engine.submit(GroupRequest((0,), prompt, 1, **more))
        (turn,) = finish(engine)
        engine.end(turn, "stop", may_continue=may_continue)
        before = engine.num_prompt_tokens
        engine.submit(GroupRequest((1,), prompt + turn.token_ids.tolist() + [11, 12], 1, **more))
        finish(engine)
        computed[may_continue] = engine.num_prompt_tokens - before
        assert computed[False] == len(turn.token_ids) + 2
    assert computed[True] == 1 + 2  # the last sampled token was not computed before


def test_unused_nodes_make_room_oldest_first_and_are_no_reason_to_grow():
    engine = make_engine(make_policy(), 4)
    random = np.random.default_rng(0)
    prompts = [random.integers(9, VOCABULARY, 40).tolist() for _ in range(30)]
    more = {"has_turns": True, "max_turn_tokens": 3}
    engine.submit(GroupRequest((99,), [9] * 10, 1, **more))  # keeps the engine at work
    finish(engine)
    for number, prompt in enumerate(prompts):
        engine.submit(GroupRequest((number,), prompt, 1, family=(number,), **more))
        for turn in finish(engine):
            engine.end(turn, "stop")
    capacity = started_sequences(4)
    kept = [node.family for node in engine.cache.tree.nodes if node.family is not None]
    assert kept == [(number,) for number in range(30 - len(kept), 30)]
    assert len(engine.cache.tree.nodes) == capacity == len(engine.cache.lengths)


def test_new_weights_leave_nothing_of_the_old_ones():
    policy = make_policy()
    engine = make_engine(policy)
    prompt = np.random.default_rng(0).integers(9, VOCABULARY, 40).tolist()
    for _ in range(2):
        request = GroupRequest((0,), prompt, 2, family=(0,))
        engine.submit(request)
        before = engine.num_prompt_tokens
        while engine.has_work:
            engine.step()
        assert engine.num_prompt_tokens - before == len(prompt)
        engine.load_weights(pieces_of(policy.weights()))


def test_bits_do_not_depend_on_what_was_served_before():
    """A worker that takes another's place has not served it, and has allocated less memory."""
    used = make_engine(make_policy(), 8)
    Conversations(used, 11).run()
    results = []
    for engine in (used, make_engine(make_policy(), 8)):
        played = Conversations(engine, 12).run()
        bits = dict[object, list[bytes]]()
        for key, completions in sorted(played.items()):
            bits[key] = [c.token_ids.tobytes() + c.logprobs.tobytes() for c in completions]
        results.append(bits)
    assert results[0] == results[1]
