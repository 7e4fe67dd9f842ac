"""The checks of runs, plans and evaluations: one list of all that is asked before anything starts.

A check has what it needs to know (`FACTS`) and the stages that it applies to. `preflight` finds the
facts of a start and of a plan, `evaluation.command` those of an evaluation; each check is made as
soon as all that it needs is known. What a plan cannot know is not added, and so not checked: the
disk and the compiler of machines that are elsewhere, the rows of a hub that cannot be reached.

A new check is a function in one of this package's files and an entry in `CHECKS`. If it needs what
a stage does not add yet, that stage has to add it: `finish` fails otherwise. What cannot be
found at all is refused where it is looked for: a model's files, data, devices that do not exist.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from easyrl.runtime.checks import devices, engine, folders, functions, prompts, stopping, teacher
from easyrl.runtime.memory_estimate import check_memory


class Stage(Enum):
    """What is about to happen."""

    START = "a run starts, or resumes"
    PLAN = "a run is described (`--dry-run`), for this machine or for others (`--assume`)"
    EVALUATION = "a model is evaluated (`easyrl eval`)"


EVERYWHERE = frozenset(Stage)
TRAINING = frozenset({Stage.START, Stage.PLAN})
START = frozenset({Stage.START})
PLAN = frozenset({Stage.PLAN})
EVALUATION = frozenset({Stage.EVALUATION})

FACTS = {
    "config": "Config",
    "spec": "RunSpec: the config, resolved; an evaluation's has its own numbers and lengths",
    "folder": "Path of the run folder",
    "lengths_section": "section of the key that bounds completions: rollout, or eval",
    "is_resumed": "whether the run resumes in its folder",
    "model": "MeasuredModel: files and sizes of the model",
    "placement": "Placement: devices, engine, groups in flight",
    "parts": "list of Part: what every process takes of which memory",
    "disk": "Disk that the folder is written to",
    "written": "Written: what is certainly written to it",
    "has_compiler": "whether this machine has a C compiler",
    "prompts": "PromptStream",
    "example": "first prompt, which functions are tried on; None: functions are only loaded",
    "interfaces": "Interfaces of the environments",
    "renderer": "PromptRenderer of the prompts; None: every character is a token",
    "trained_datasets": "data sets of the run whose model is evaluated; empty: none is known",
    "saved_identity": "digests of model, data and functions that the resumed run was started with",
    "identity": "the same digests now",
}
"""What checks may need, and of which type it is."""


@dataclass(frozen=True, slots=True)
class Check:
    function: Callable[..., Sequence[str] | None]
    """Raises ConfigError for what has to be changed; may return warnings."""
    needs: tuple[str, ...]  # the facts that are its arguments
    stages: frozenset[Stage]


CHECKS = (
    # devices and the model's place on them
    Check(engine.check_vllm_weights, ("placement", "model"), TRAINING),
    Check(engine.check_episodes, ("spec", "placement", "model"), EVERYWHERE),
    Check(engine.check_lengths, ("spec", "lengths_section", "model"), EVERYWHERE),
    Check(devices.check_compiler, ("spec", "placement", "has_compiler"), EVERYWHERE),
    Check(check_memory, ("parts",), EVERYWHERE),
    Check(devices.check_disk, ("disk", "written"), EVERYWHERE),
    Check(devices.warn_of_float32, ("spec", "placement"), TRAINING),
    Check(devices.warn_of_unused_gpus, ("spec", "placement"), TRAINING),
    Check(devices.warn_of_lopsided_split, ("placement",), TRAINING),
    Check(devices.warn_of_slow_copies, ("placement",), TRAINING),
    # the folder
    Check(folders.check_new, ("folder", "is_resumed"), TRAINING),
    # A start has made it when it locked the folder (`resume.find_resume`).
    Check(folders.check_resumed_settings, ("config", "folder", "is_resumed"), PLAN),
    Check(folders.check_unchanged_files, ("spec", "folder", "saved_identity", "identity"), START),
    # what trains
    Check(teacher.check_signal, ("spec",), TRAINING),
    Check(teacher.check_teacher, ("spec",), TRAINING),
    Check(functions.check_loss, ("spec",), TRAINING),
    Check(functions.check_trackers, ("spec",), TRAINING),
    Check(stopping.check_stop_when, ("spec",), TRAINING),
    Check(functions.warn_of_biased_sampling, ("spec",), TRAINING),
    # data, and functions that are tried on it
    Check(functions.check_reward_functions, ("spec", "example"), EVERYWHERE),
    Check(prompts.check_pictures, ("spec", "prompts", "model"), EVERYWHERE),
    Check(functions.check_sources, ("spec", "prompts"), TRAINING),
    Check(engine.check_pictures, ("spec", "prompts"), TRAINING),
    Check(prompts.describe_rows, ("prompts",), EVERYWHERE),
    # A start and an evaluation look at every prompt, and may skip some (`prompts.find_too_long`).
    Check(prompts.check_first_prompt, ("spec", "example", "interfaces", "renderer"), PLAN),
    Check(prompts.warn_of_trained_rows, ("spec", "prompts", "trained_datasets"), EVALUATION),
)
"""In the order in which they are made if all is known at once."""


class Checks:
    """The checks of one stage. Warnings are collected; an error is raised where it is found."""

    def __init__(self, stage: Stage) -> None:
        self.warnings: list[str] = []
        self._facts: dict[str, Any] = {}
        self._waiting = [check for check in CHECKS if stage in check.stages]

    def add(self, **facts: Any) -> None:
        """Add facts, and make the checks that have waited for them. Raises ConfigError."""
        assert facts.keys() <= FACTS.keys()
        self._facts |= facts
        known = self._facts.keys()
        ready = [check for check in self._waiting if known >= set(check.needs)]
        self._waiting = [check for check in self._waiting if check not in ready]
        for check in ready:
            arguments = {name: self._facts[name] for name in check.needs}
            self.warnings += check.function(**arguments) or ()

    def finish(self, *, unknown: Collection[str] = ()) -> None:
        """Assert that all checks of the stage were made, but those that need an `unknown` fact."""
        forgotten = [check for check in self._waiting if not set(check.needs) & set(unknown)]
        assert not forgotten, f"facts of these checks were not added: {forgotten}"
