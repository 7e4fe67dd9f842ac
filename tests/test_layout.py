"""Trees of tokens against a naive reference, in which every token's path is spelled out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.layout.prefixes import Beginning, merge_prefixes
from easyrl.layout.tree import NONE, TokenTree


@st.composite
def drawn_trees(draw):
    """Any forest: parents stand before their children, in no particular order."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=9))
    parents = [draw(st.integers(NONE, number - 1)) for number in range(len(lengths))]
    return TokenTree(np.array(lengths), np.array(parents))


@st.composite
def drawn_predecessors(draw):
    number = draw(st.integers(1, 14))
    return [draw(st.just(token - 1) | st.integers(NONE, token - 1)) for token in range(number)]


def paths_of(predecessors):
    """The tokens up to each token, itself included."""
    paths = []
    for token, before in enumerate(predecessors):
        paths.append([*(paths[before] if before != NONE else []), token])
    return paths


def naive_predecessors(tree):
    before, last = [], []
    for length, parent in zip(tree.lengths.tolist(), tree.parents.tolist(), strict=True):
        first = len(before)
        before += [last[parent] if parent != NONE else NONE, *range(first, first + length - 1)]
        last.append(len(before) - 1)
    return before


TREES = drawn_trees()


@given(TREES)
def test_positions_and_predecessors_are_those_of_the_paths(tree):
    before = naive_predecessors(tree)
    paths = paths_of(before)
    assert tree.num_tokens == len(paths)
    assert tree.predecessors.tolist() == before
    assert tree.positions.tolist() == [len(path) - 1 for path in paths]
    for node, stop in enumerate(tree.stops):
        assert tree.tokens_of(tree.path(node)).tolist() == paths[stop - 1]
    continued = {*before} - {NONE}
    is_leaf = [int(stop) - 1 not in continued for stop in tree.stops]
    assert tree.leaves == np.flatnonzero(is_leaf).tolist()


@given(drawn_predecessors(), st.data())
def test_tokens_are_cut_where_others_continue_and_nowhere_else(before, data):
    cuts = data.draw(st.sets(st.integers(0, len(before) - 1)))
    tree = TokenTree.of_predecessors(np.array(before), cuts)
    assert naive_predecessors(tree) == before
    needed = {0, *cuts}
    for token, other in enumerate(before):
        if other != token - 1:
            needed |= {token} | ({other + 1} if other != NONE else set())
    assert {*tree.starts.tolist()} == needed - {len(before)}


@given(TREES)
def test_depth_first_order_keeps_every_path_and_gathers_what_is_below_a_node(tree):
    row, tokens = tree.depth_first()
    assert sorted(tokens) == [*range(tree.num_tokens)]
    assert row.is_depth_first
    paths = paths_of(naive_predecessors(tree))
    for place, path in enumerate(paths_of(naive_predecessors(row))):
        assert tokens[path].tolist() == paths[tokens[place]]
    # What is below a node are the tokens up to its end, and no others.
    numbers = np.arange(row.num_tokens)
    path_sets = [{*path} for path in paths_of(naive_predecessors(row))]
    for start, end in zip(row.starts, row.ends, strict=True):
        sees = [int(start) in path for path in path_sets]
        assert np.flatnonzero(sees).tolist() == numbers[start:end].tolist()
    # No node could be joined to the one before it.
    of_tree = TokenTree.of_predecessors(row.predecessors)
    assert of_tree.lengths.tolist() == row.lengths.tolist()


@given(TREES)
def test_depth_first_order_is_told_from_others(tree):
    before = naive_predecessors(tree)
    below = [{node for node in range(tree.num_nodes) if own in tree.path(node)}
             for own in range(tree.num_nodes)]  # fmt: skip
    is_gathered = all(max(nodes) - min(nodes) == len(nodes) - 1 for nodes in below)
    assert tree.is_depth_first == is_gathered
    assert len(before) == tree.num_tokens


@given(TREES, st.data())
def test_a_node_that_is_cut_on_purpose_is_not_joined(tree, data):
    cut = data.draw(st.integers(0, tree.num_tokens - 1))
    row, tokens = tree.depth_first(cuts=[cut])
    assert int(np.flatnonzero(tokens == cut)[0]) in row.starts.tolist()


@given(TREES, st.data())
def test_repeated_rows_hold_the_whole_path_to_each_leaf(tree, data):
    leaves = data.draw(st.lists(st.sampled_from(tree.leaves), min_size=1, unique=True))
    arranged = tree.repeated(leaves)
    assert (arranged.tree.parents == NONE).all()
    paths = paths_of(naive_predecessors(tree))
    expected = sorted(paths[tree.stops[leaf] - 1] for leaf in leaves)
    bounds = zip(arranged.tree.starts, arranged.tree.stops, strict=True)
    found = [arranged.tokens[start:stop].tolist() for start, stop in bounds]
    assert sorted(found) == expected
    places = arranged.first_places(tree.num_tokens)
    for token in {*arranged.tokens.tolist()}:
        assert places[token] == arranged.tokens.tolist().index(token)


@given(st.lists(TREES, min_size=1, max_size=3))
def test_joined_trees_stand_side_by_side(trees):
    joined = TokenTree.joined(trees)
    before, start = [], 0
    for tree in trees:
        before += [other if other == NONE else other + start for other in naive_predecessors(tree)]
        start += tree.num_tokens
    assert joined.predecessors.tolist() == before


@settings(max_examples=20)
@given(st.integers(1, 5), st.lists(st.integers(1, 4), max_size=4))
def test_a_group_is_a_prompt_that_its_completions_continue(prompt, completions):
    tree = TokenTree.of_group(prompt, completions)
    assert tree.is_depth_first and tree.num_tokens == prompt + sum(completions)
    assert (tree.first_positions[1:] == prompt).all() and tree.first_positions[0] == 0


@pytest.mark.parametrize(("lengths", "parents"), [([1, 0], [-1, 0]), ([1, 1], [1, -1])])
def test_a_tree_that_is_none_is_refused(lengths, parents):
    with pytest.raises(AssertionError):
        TokenTree(np.array(lengths), np.array(parents))


@st.composite
def drawn_trees_with_ids(draw):
    """Some trees, with ids of few values, so that several begin alike."""
    trees = draw(st.lists(TREES, min_size=1, max_size=4))
    number = sum(tree.num_tokens for tree in trees)
    ids = draw(st.lists(st.integers(0, 1), min_size=number, max_size=number))
    return trees, np.array(ids)


def merge_roots(trees, ids, min_shared=1):
    joined = TokenTree.joined(trees)
    roots = [
        Beginning(int(start), int(stop), min_shared)
        for start, stop, parent in zip(joined.starts, joined.stops, joined.parents, strict=True)
        if parent == NONE
    ]
    return merge_prefixes(trees, ids, roots)


@given(drawn_trees_with_ids(), st.integers(1, 3))
def test_trees_that_begin_alike_share_their_beginnings_and_keep_every_path(drawn, min_shared):
    trees, ids = drawn
    merged = merge_roots(trees, ids, min_shared)
    before = naive_predecessors(TokenTree.joined(trees))
    row_paths = paths_of(naive_predecessors(merged.row.tree))
    row_ids = ids[merged.row.tokens]
    for token, path in enumerate(paths_of(before)):
        place = merged.places[token]
        assert row_ids[row_paths[place]].tolist() == ids[path].tolist()
    assert merged.row.tree.is_depth_first
    assert {*merged.places.tolist()} == {*range(merged.row.tree.num_tokens)}
    assert merged.num_saved == len(ids) - merged.row.tree.num_tokens
    joined = TokenTree.joined(trees)
    if joined.is_depth_first and merged.num_saved == 0:
        assert merged.row.tree.lengths.tolist() == joined.lengths.tolist()
        assert merged.row.tokens.tolist() == [*range(len(ids))]


@given(drawn_trees_with_ids(), st.integers(1, 3))
def test_as_many_tokens_of_the_roots_are_shared_as_can_be(drawn, min_shared):
    trees, ids = drawn
    joined = TokenTree.joined(trees)
    roots = [
        tuple(ids[start:stop].tolist())
        for start, stop, parent in zip(joined.starts, joined.stops, joined.parents, strict=True)
        if parent == NONE
    ]
    num_saved = 0
    for number, root in enumerate(roots):
        shared = [0]
        for other in roots[:number]:
            length = max(k for k in range(len(root) + 1) if root[:k] == other[:k])
            shared.append(length)
        num_saved += max(shared) if max(shared) >= min_shared else 0
    assert merge_roots(trees, ids, min_shared).num_saved == num_saved


def test_groups_behind_one_system_prompt_become_one_tree():
    trees = [TokenTree.of_group(3, [2, 1]), TokenTree.of_group(4, [1])]
    ids = np.array([7, 8, 1, 5, 5, 6, 7, 8, 2, 2, 9])
    merged = merge_roots(trees, ids)
    assert ids[merged.row.tokens].tolist() == [7, 8, 1, 5, 5, 6, 2, 2, 9]
    assert merged.row.tree.lengths.tolist() == [2, 1, 2, 1, 2, 1]
    assert merged.row.tree.parents.tolist() == [NONE, 0, 1, 1, 0, 4]
    assert merge_roots(trees, ids, 3).num_saved == 0
