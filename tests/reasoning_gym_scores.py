"""Score fixed texts with every task of the installed reasoning-gym, and print what is noteworthy.

    PYTHONHASHSEED=0 python tests/reasoning_gym_scores.py     (half a minute)

Run it when the library moves. `test_reasoning_gym.py` compares the result with RECORDED. The tasks
that give a constant full marks are in `easyrl.data.reasoning_gym.REFUSED`; docs/data.md lists the
others.
"""

import contextlib
import io
import json
import random
import sys
import warnings
from fractions import Fraction

import numpy as np

from easyrl.data.reasoning_gym import is_never_right

NUM_ITEMS = 6
SIZE = 10  # of the data sets: items of `acre` depend on it
CONSTANTS = [
    *(
        "0",
        "1",
        "2",
        "-1",
        "0.5",
        "yes",
        "no",
        "Yes",
        "True",
        "False",
        "None",
        "A",
        "[]",
        "{}",
        "()",
    ),
    *("anything", "no solution", "I do not know."),
    *("nan", "nan + nani", "inf", "-inf", "1e400", "0.0", "x", "?", "[[]]", "1/2", "10"),
]
SENTENCES = [
    "The answer is {}.",
    "I think that the answer is {}, as computed.",
    "{}\nI am sure.",
]
RECORDED = {  # reasoning-gym 0.1.25
    # full marks for a constant that is not the answer
    "constant": ["coin_flip", "game_of_life_halting"],
    # a part for the empty text
    "empty": [
        *("advanced_geometry", "arc_agi", "color_cube_rotation", "countdown", "emoji_mystery"),
        *("fraction_simplification", "power_function", "prime_factorization", "puzzle24", "rearc"),
        *("rubiks_cube", "sentence_reordering"),
    ],
    # full marks for the answer in one of SENTENCES, with every item
    "sentence": [
        *("game_of_life_halting", "gsm_symbolic", "kakurasu", "knights_knaves", "sokoban", "survo"),
    ],
    # less than full marks for the task's own answer
    "own": [],
    # no own answer in an item
    "no answer": ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"],
}


def are_equal(text: str, answer: str) -> bool:
    if text.casefold().strip() == answer.casefold().strip():
        return True
    try:
        return Fraction(text) == Fraction(answer)
    except (ValueError, ZeroDivisionError):
        return False


def findings_of(name: str) -> set[str]:
    """Return the keys of RECORDED that the task belongs to."""
    from reasoning_gym.factory import create_dataset

    data = create_dataset(name, seed=0, size=SIZE)
    items = []
    for index in range(NUM_ITEMS):
        random.seed(index)
        np.random.seed(index)
        items.append(data[index])

    def score(text, item):
        try:
            return float(data.score_answer(text, item))
        except Exception:  # the reward `reasoning_gym` gives 0 then
            return 0.0

    answers = [item["answer"] for item in items]
    found = set()
    if any(score("", item) > 0 for item in items):
        found.add("empty")
    for text in CONSTANTS:
        if is_never_right(name, text):
            continue
        for item, answer in zip(items, answers, strict=True):
            # Of a task that has no answers nobody knows here whether the constant is one.
            if answer is not None and score(text, item) == 1 and not are_equal(text, answer):
                found.add("constant")
    if None in answers:
        return found | {"no answer"}
    if any(score(answer, item) != 1 for item, answer in zip(items, answers, strict=True)):
        found.add("own")
    for sentence in SENTENCES:
        scores = [score(sentence.format(item["answer"]), item) for item in items]
        if min(scores) == 1:
            found.add("sentence")
    return found


def findings() -> dict[str, list[str]]:
    """Return the names of the tasks by the keys of RECORDED."""
    from reasoning_gym.factory import DATASETS

    by_key: dict[str, list[str]] = {key: [] for key in RECORDED}
    for name in sorted({*DATASETS} - {"composite"}):
        with contextlib.redirect_stdout(io.StringIO()):  # some tasks print
            found = findings_of(name)
        for key in sorted(found):
            by_key[key].append(name)
    return by_key


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = findings()
    json.dump(found, sys.stdout, indent=1)
    if found != RECORDED:
        sys.exit("\nThis is not what RECORDED says.")
