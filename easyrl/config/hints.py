"""Names and values that users of other trainers type, and what they are called here."""

import difflib
import re
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

CLOSE = 0.75  # similarity, of at most 1, from which a name is suggested
INSTEAD = {  # for values that a key does not take
    ("algorithm.loss_type", "gspo"): "algorithm.importance_sampling_level=sequence",
    ("algorithm.loss_type", "rloo"): "algorithm.advantage_estimator=rloo",
    ("algorithm.loss_type", "drgrpo"): "algorithm.loss_type=dr_grpo",
    ("algorithm.scale_rewards", "false"): "algorithm.scale_rewards=none",
    ("model.lora.target_modules", "all-linear"): "model.lora.target_modules=null",
}


@cache
def names_of_others() -> dict[str, str]:
    """The last parts of others' names, and what they are called here (docs/trl_and_verl.md)."""
    table = Path(__file__).with_name("trl_and_verl.md").read_text()
    found: dict[str, str] = {}
    for ours, *others in (line.split("|")[1:4] for line in table.splitlines() if "|" in line):
        here = re.sub(r" — \((.*)\) ", r"\1", ours.replace("`", "")).strip()
        for typed in re.findall("`([^`]+)`", " ".join(others)):
            for name in re.findall(r"[\w.]+", typed):
                found.setdefault(name.rpartition(".")[2], here)
    del found["name"], found["path"], found[""]  # of anything
    return found


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question in brackets that names the most similar one; empty if there is none."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=CLOSE)
    return f" (did you mean {near[0]}?)" if near else ""


def similar_file(path: Path, pattern: str = "*") -> str:
    """As `did_you_mean`, of what is beside a path that does not exist. `*/`: only folders."""
    names = [each.name for each in path.parent.glob(pattern)]
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=CLOSE)
    return f" (did you mean {path.with_name(near[0])}?)" if near else ""


def similar_names(name: str, names: Collection[str]) -> list[str]:
    """Return up to three of `names` that an unknown one, as `train.lr`, may mean."""
    typed = name.lower().replace("-", "_")
    same = [each for each in names if each.rpartition(".")[2] == typed.rpartition(".")[2]]
    return same[:3] or difflib.get_close_matches(typed, names, 1, CLOSE)
