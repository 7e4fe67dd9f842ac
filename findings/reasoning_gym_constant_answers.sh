#!/usr/bin/env bash
# reasoning-gym 0.1.25, Python 3.11, November 2026.
#
# Two of its tasks give full marks to one wrong answer, whatever the question, so that a model that is
# trained on them learns to write it:
#     game_of_life_halting  compares bool(text) with bool(text): every text that is not empty is right,
#                           also "False" where the answer is "True"
#     coin_flip             compares as many characters as the shorter of both has: "0" is right for
#                           0.25, 0.3125 and all others below 1
# And twelve tasks give 0.01 to 0.05 to the empty text; three of them are shown.
#
# Output seen:
#     game_of_life_halting: 'anything' has 1.0 for ['False', 'True']
#     coin_flip: '0' has 1.0 for 17 of 17 answers below 1
#     '' has sentence_reordering: 0.05, arc_agi: 0.05, puzzle24: 0.01
# Exits with 1 if the library behaves otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet reasoning-gym==0.1.25
PYTHONHASHSEED=0 venv/bin/python - <<'END'
import sys

from reasoning_gym import create_dataset

games = create_dataset("game_of_life_halting", seed=0, size=10)
of_games = [games.score_answer("anything", item) for item in games]
answers = sorted({item["answer"] for item in games})
print(f"game_of_life_halting: 'anything' has {min(of_games)} for {answers}")

flips = create_dataset("coin_flip", seed=0, size=20)
below_one = [item for item in flips if item["answer"].startswith("0.")]
right = sum(flips.score_answer("0", item) == 1.0 for item in below_one)
print(f"coin_flip: '0' has 1.0 for {right} of {len(below_one)} answers below 1")

of_nothing = {}
for name in ("sentence_reordering", "arc_agi", "puzzle24"):
    data = create_dataset(name, seed=0, size=3)
    of_nothing[name] = max(data.score_answer("", item) for item in data)
print("'' has", ", ".join(f"{name}: {score}" for name, score in of_nothing.items()))

is_as_before = (
    min(of_games) == 1.0
    and answers == ["False", "True"]
    and 0 < right == len(below_one)
    and all(score > 0 for score in of_nothing.values())
)
sys.exit(0 if is_as_before else 1)
END
