"""Names and values that users of other trainers type, and what they are called here."""

import difflib
import re
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

CLOSE = 0.75
"""Similarity, from 0 to 1, from which a name is suggested."""
INSTEAD = {
    ("algorithm.loss_type", "gspo"): "algorithm.importance_sampling_level=sequence",
    ("algorithm.loss_type", "rloo"): "algorithm.advantage_estimator=rloo",
    ("algorithm.loss_type", "drgrpo"): "algorithm.loss_type=dr_grpo",
    ("algorithm.scale_rewards", "false"): "algorithm.scale_rewards=none",
    ("model.lora.target_modules", "all-linear"): "model.lora.target_modules=null",
    ("report_to", "none"): "output.log_to=[]",
    ("save_strategy", "no"): "train.keep_checkpoints=0",
    ("save_strategy", "best"): "train.eval_every=5",
}
"""(key or another tool's name, value that it does not take) -> the word that does what is meant."""
TRACKERS = ("tensorboard", "wandb", "trackio")
NAMES_FOR_TRACKERS = ("report_to", "logger")
"""TRL's and verl's names of the setting that takes trackers."""


@cache
def names_of_others() -> dict[str, str]:
    """Return what the settings of other trainers are called here, by the last parts of their names:
    {"lr": "train.learning_rate", …}. docs/trl_and_verl.md has the table."""
    table = Path(__file__).with_name("trl_and_verl.md").read_text()
    found: dict[str, str] = {}
    for line in table.splitlines():
        if "|" not in line:
            continue
        ours, *theirs = line.split("|")[1:4]
        plain = ours.replace("`", "")
        here = re.sub(r" — \((.*)\) ", r"\1", plain).strip()  # " — (TEXT) ": there is no such key
        for quoted in re.findall("`([^`]+)`", " ".join(theirs)):
            for name in re.findall(r"[\w.]+", quoted):
                found.setdefault(name.rpartition(".")[2], here)
    for unspecific in ("name", "path", ""):
        del found[unspecific]
    return found


def word_for(name: str, value: Any) -> str:
    """Return the word that does what is meant by a key (or another tool's name) with this value, as
    `output.log_to=[wandb]` for `report_to=wandb`; empty if none is known."""
    if name in NAMES_FOR_TRACKERS:
        given = value if isinstance(value, list) else [value]
        trackers = [each for each in given if each in TRACKERS]
        if trackers:
            return f"output.log_to=[{', '.join(trackers)}]"
    return INSTEAD.get((name, str(value).lower()), "")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return text to append to an error: " (did you mean NAME?)" with the most similar of `names`,
    or "" if none is similar."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=CLOSE)
    return f" (did you mean {near[0]}?)" if near else ""


def similar_file(path: Path, pattern: str = "*") -> str:
    """Return text to append to an error about a path that does not exist, as `did_you_mean` does:
    the most similar path in the same folder. `pattern`: of the paths to choose from; "*/" gives
    folders alone."""
    names = [each.name for each in path.parent.glob(pattern)]
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=CLOSE)
    return f" (did you mean {path.with_name(near[0])}?)" if near else ""


def similar_names(name: str, names: Collection[str]) -> list[str]:
    """Return up to three of `names` that an unknown one may mean: those with the same last part, as
    `train.seed` for `runtime.seed`, or else the most similar one."""
    typed = name.lower().replace("-", "_")
    last_part = typed.rpartition(".")[2]
    same = [each for each in names if each.rpartition(".")[2] == last_part]
    return same[:3] or difflib.get_close_matches(typed, names, 1, CLOSE)
