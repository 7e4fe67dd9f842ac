"""Check a run before anything is started, or plan it (`--dry-run`). Nothing is written, and no
weights are loaded.

    start   config ─► model ─► data, functions ─► devices ─► prompts ─► memory ─► Preflight
    plan    devices ─► config, model ─► data ─► memory ─► functions ─► first prompt ─► Plan

What is found on the way are the facts of `runtime.checks`, which has the list of checks.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from easyrl import devices
from easyrl.config import Config, ConfigError, to_arguments
from easyrl.config.algorithm import TEACHER_KEY
from easyrl.config.spec import ModelSpec, RunSpec
from easyrl.data import datasets
from easyrl.data.hub import HubUnreachable, describe_model
from easyrl.data.streams import TEACHER_SUFFIX, PromptStream
from easyrl.model.adapter_files import KEY as ADAPTER_KEY
from easyrl.model.adapter_files import digest_of
from easyrl.model.export import ModelSource
from easyrl.model.files import ModelSize, fingerprint
from easyrl.model.prompt_renderer import PromptRenderer
from easyrl.rewards.pool import try_rewards
from easyrl.runtime.checks import Checks, Stage
from easyrl.runtime.checks.devices import find_disk, never_run, written_by_run
from easyrl.runtime.checks.engine import MeasuredModel, describe_weights, measure_model
from easyrl.runtime.checks.functions import find_interfaces, identify_code
from easyrl.runtime.checks.prompts import (
    describe_data,
    describe_first_prompt,
    describe_pictures,
    describe_rate,
    describe_sources,
    find_too_long,
    load_renderer,
    short_problems,
)
from easyrl.runtime.checks.stopping import describe_stop_when
from easyrl.runtime.memory_estimate import (
    Part,
    bytes_by_memory,
    estimate_memory,
    find_shortages,
    in_gib,
    memory_table,
)
from easyrl.runtime.memory_fit import Changes, choose_split, propose_changes, use_memory
from easyrl.runtime.placement import Placement, describe, resolve_placement
from easyrl.runtime.resolve import ResolvedRun, resolve, with_eval_data
from easyrl.runtime.resume import (
    Resume,
    as_started,
    describe_resumed,
    resumes_by_itself,
    saved_state,
    start_from,
    with_absolute_paths,
)
from easyrl.runtime.run_folder import folder_of
from easyrl.types import Prompt

LORA_KEY = "model.lora.rank"
LORA_RANK = 16  # which a plan tries where training all weights does not fit
NUM_DEVICES = (2, 4, 8)  # which a plan tries where nothing fits


@dataclass(frozen=True, slots=True)
class Preflight:
    """A run that may start."""

    run: ResolvedRun  # with what fits the memory
    prompts: PromptStream  # without those that `data.long_prompts` skips
    num_prompts_skipped: int
    placement: Placement
    model: MeasuredModel
    identity: Mapping[str, Any]
    """Digests of model, data and held-out problems; those of a resumed run must be the same."""
    held_out: Sequence[Prompt]  # problems that accuracy is measured on; may be empty
    about_prompts: Sequence[str]  # lines of text, with the first prompt as the model sees it
    warnings: Sequence[str]

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return the run with other values of these keys, which are not checked again. Raises
        ConfigError for a value that a key cannot have."""
        return replace(self, run=self.run.changed(changes))


def check_run(
    config: Config, resume: Resume | None = None, source: ModelSource | None = None
) -> Preflight:
    """Resolve and check a run. Raises ConfigError, with the key to change, if it cannot start.
    `source`: what the model is made from, if it is not `model.path` as it is."""
    run = ResolvedRun.of(config)
    spec = run.spec
    is_resumed = resume is not None
    checks = Checks(Stage.START)
    folder = folder_of(config.output.dir, config.data.datasets)
    checks.add(folder=folder, is_resumed=is_resumed, spec=spec)
    model = measure_model(spec.model)
    checks.add(
        lengths_section="rollout",
        model=model,
        disk=find_disk(folder),
        written=written_by_run(spec, model, source, is_resumed=is_resumed),
    )
    prompts = datasets.open_prompts(spec.data)
    run = run.with_pictures(prompts.has_pictures)
    spec = run.spec
    if spec.model.has_pictures:
        model = measure_model(spec.model)  # with its tower
        checks.add(spec=spec, model=model)
    example = prompts.prompt(0)
    interfaces, warnings = find_interfaces(spec.episodes, example)
    checks.warnings += warnings
    checks.add(example=example, interfaces=interfaces, prompts=prompts)

    placement = resolve_placement(spec)  # imports torch where it must look for accelerators
    placement = choose_split(run, placement, model.size)
    checks.add(placement=placement, has_compiler=devices.has_c_compiler())

    tokenizer_path = "" if source is None else source.tokenizer
    examples = prompts.examples()
    renderer = load_renderer(spec, examples, tokenizer_path)
    sizes = prompts.picture_sizes() if prompts.has_pictures else {}
    too_long = find_too_long(spec, examples, interfaces, renderer, sizes)
    skipped = {location.removesuffix(TEACHER_SUFFIX) for location in too_long}
    prompts = prompts.without(skipped)
    held_out = _find_held_out(run, prompts)
    checks.warnings += held_out.warnings
    problems = list(held_out.problems.values())
    if not held_out.is_checked:
        problems = short_problems(held_out.spec, held_out.problems, interfaces, tokenizer_path)
    about_prompts = [
        describe_data(spec, prompts, len(problems)),
        describe_rate(spec.optimizer),
        *describe_pictures(renderer, sizes),
        *describe_first_prompt(spec, prompts.prompt(0), interfaces, renderer),
    ]

    run = use_memory(run, placement, model.size)
    spec = run.spec
    parts = estimate_memory(spec, placement, model.size)
    try:
        checks.add(parts=parts)
    except ConfigError as error:
        raise ConfigError(f"{error}{_what_fits(run, placement, model.size)}") from None

    identity = _identity(spec, prompts, problems)
    if resume is None:
        checks.finish(unknown=["saved_identity"])
    else:
        checks.add(saved_identity=resume.state.identity, identity=identity)
        checks.finish()
    return Preflight(
        run,
        prompts,
        len(skipped),
        placement,
        model,
        identity,
        problems,
        about_prompts,
        warnings=list(dict.fromkeys(checks.warnings)),
    )


class HeldOut(NamedTuple):
    """The problems that accuracy is measured on during a run; may be none."""

    problems: Mapping[str, Prompt]  # by location
    spec: RunSpec  # its part `data` makes their prompts
    warnings: Sequence[str]
    is_checked: bool  # they are of the run's data, whose prompts are checked already


def _find_held_out(run: ResolvedRun, prompts: PromptStream) -> HeldOut:
    """Open the held-out problems of `eval.dataset`, else of `data.dataset`. Raises ConfigError."""
    config = run.config
    spec = run.spec
    is_asked = config.data.num_held_out is not None or config.train.eval_every > 0
    is_only_part = prompts.is_partly_held_out and not is_asked
    has_none = not prompts.held_out() or is_only_part
    has_own_data = config.eval.dataset is not None
    if config.data.num_held_out == 0 or (has_none and not has_own_data):
        return HeldOut({}, spec, _without_held_out(config), is_checked=True)
    if not has_own_data:
        problems = datasets.problems_of(prompts, config.data)
        return HeldOut(problems, spec, (), is_checked=True)
    other = resolve(with_eval_data(config))
    try:
        stream = datasets.open_prompts(other.data, is_trained=False)
        other = other.with_pictures(stream.has_pictures)
        problems = datasets.problems_of(stream, other.data.options)
    except ConfigError as error:
        text = str(error).replace("data.dataset (--dataset)", "eval.dataset")
        raise type(error)(text) from None
    if other.model.has_pictures and not spec.model.has_pictures:
        raise ConfigError(
            "eval.dataset: expected problems without pictures, as the prompts of data.dataset are "
            "(the model is trained without its part for them), got some in "
            f"'{other.data.options.shown}'"
        )
    first = next(iter(problems.values()))
    warnings = [*try_rewards(spec.rewards, first)]
    if spec.rewards.scores_nothing:
        warnings.append(
            "warning: eval.dataset: no reward scores its problems, so that their accuracy is 0 "
            "(--reward none); measure the trained model: easyrl eval --model RUN --reward NAME"
        )
    return HeldOut(problems, other, warnings, is_checked=False)


def _without_held_out(config: Config) -> Sequence[str]:
    """Return the warnings of a run that has no held-out problems, but may have asked for some."""
    if config.train.eval_every:
        raise ConfigError(
            "train.eval_every: expected 0, because there are no held-out problems, got "
            f"{config.train.eval_every}; set eval.dataset, or data.num_held_out if it is 0"
        )
    if config.data.num_held_out:
        return ["warning: data.num_held_out is ignored: the data has none (set eval.dataset)"]
    return ()


def _what_fits(run: ResolvedRun, placement: Placement, size: ModelSize | None) -> str:
    """Name settings with which a run that is refused for its memory fits, as text to append."""
    if placement.accelerator == "cpu" or placement.is_ray or size is None:
        return ""
    changes = propose_changes(run, placement, size)
    if changes is None:
        return "; nothing that was tried fits"
    words = to_arguments(run.changed(changes).config, run.config)
    return f"; this fits, by estimate: {shlex.join(words)}"


def _identity(
    spec: RunSpec, prompts: PromptStream, held_out: Sequence[Prompt]
) -> dict[str, str | None]:
    """Digest what a resumed run must find unchanged, by the keys that name it."""
    identity = {
        "model.path": fingerprint(spec.model.path),
        "data.dataset": prompts.fingerprint(),
        "eval.dataset": datasets.identity_of(datasets.problem_ids(held_out)),
        **identify_code(spec),
    }
    if spec.model.lora.adapter is not None:
        identity[ADAPTER_KEY] = digest_of(Path(spec.model.lora.adapter))
    if spec.teacher is not None and spec.teacher.path is not None:
        identity[TEACHER_KEY] = fingerprint(spec.teacher.path)
    return identity


class Plan(NamedTuple):
    """Description of a run that is not started: its devices, memory and data."""

    verdict: str  # whether it would start, and how full the memory would be
    text: str
    would_start: bool
    changes: Changes | None  # with which everything fits; None: nothing that was tried
    advice: Sequence[str] = ()  # where nothing fits: LoRA if that does, or more devices
    lora_changes: Changes | None = None  # as `changes`, with LoRA instead of all weights


def make_plan(
    config: Config, assumed: devices.AssumedDevices | None = None, *, is_resumed: bool = False
) -> Plan:
    """Plan a run for what this machine has, or for `assumed` accelerators. Nothing is started, and
    no weights are read. Raises ConfigError for devices that are missing."""
    run = ResolvedRun.of(config)
    planner = _Planner(run, resolve_placement(run.spec, assumed))
    refusal = ""
    try:
        planner.plan_model(is_resumed=is_resumed)
        planner.plan_data()
    except ConfigError as error:
        refusal = f"a run would not start: {error}"
        planner.warn_of_memory()
    placement = planner.placement
    lines = [planner.about_model, *planner.about_source, describe(placement)]
    lines += [*never_run(placement), "", *planner.about_memory, *planner.checks.warnings]
    lines += planner.about_prompts
    text = "\n".join(lines)
    changes = planner.propose_changes()
    plan = Plan(refusal or planner.describe_start(), text, not refusal, changes)
    if changes is not None:
        return plan
    lora_changes, about_lora = planner.try_lora()
    advice = [about_lora, *planner.try_more_devices()]
    return plan._replace(advice=advice, lora_changes=lora_changes)


class LoraTrial(NamedTuple):
    changes: Changes | None  # with LoRA, so that the run fits; None: it does not, or is unknown
    text: str


class _Planner:
    """The lines of a plan, found one after the other until something refuses the run."""

    def __init__(self, run: ResolvedRun, placement: Placement) -> None:
        self.checks = Checks(Stage.PLAN)
        self.about_model = describe_model(run.spec.model.path)
        self.about_source: list[str] = []
        self.about_memory: list[str] = []
        self.about_prompts: list[str] = []
        self._given = run  # settings as the user gave them
        self._run = run  # with those chosen for the memory
        self.placement = placement
        self._parts: Sequence[Part] = ()
        self._model: MeasuredModel | None = None
        self._has_checked_memory = False
        self._is_tight = False  # by estimate, a memory does not suffice
        self._has_checked_data = True  # unless its hub cannot be reached
        self._tokenizer_path = ""

    def plan_model(self, *, is_resumed: bool) -> None:
        """Measure the model, and estimate the memory. What is known of it is shown first."""
        config = self._given.config
        source = None
        folder = folder_of(config.output.dir, config.data.datasets)
        is_restarted = not is_resumed and resumes_by_itself(config, folder)
        state = saved_state(folder) if is_restarted else None
        if state is None:
            config, source = start_from(config, is_resumed=is_resumed)
        else:
            config = as_started(with_absolute_paths(config), state)
        is_resumed = is_resumed or is_restarted
        self._given = ResolvedRun.of(config)
        self._run = self._given
        if is_resumed:
            self.about_source = describe_resumed(config, folder)
        spec = self._given.spec
        model = self._measure_model(spec.model)
        if source is not None:
            self._tokenizer_path = source.tokenizer
            about = source.describe(spec.model.lora)
            self.about_source = [about] if about else []

        self._plan_memory(model)
        if self.placement.assumed is None:  # of other machines these are not known
            written = written_by_run(spec, model, source, is_resumed=is_resumed)
            has_compiler = devices.has_c_compiler()
            self.checks.add(disk=find_disk(folder), written=written, has_compiler=has_compiler)
        self.checks.add(config=config, folder=folder, is_resumed=is_resumed)
        self.checks.add(spec=self._run.spec, lengths_section="rollout")

    def _measure_model(self, spec: ModelSpec) -> MeasuredModel:
        model = measure_model(spec, is_whole=False)
        self.about_model = describe_weights(model, spec)
        return model

    def _plan_memory(self, model: MeasuredModel) -> None:
        """Choose devices and settings that fit the memory, and estimate what the run needs."""
        self._model = model
        size = model.size
        self.placement = choose_split(self._given, self.placement, size)
        self._run = use_memory(self._given, self.placement, size)
        self._parts = estimate_memory(self._run.spec, self.placement, size)
        self.about_memory = ["memory: unknown, as the model's config.json gives no sizes"]
        if self._parts:
            self.about_memory = [memory_table(self._parts)]

    def plan_data(self) -> None:
        """Open the data, and try the functions on the first prompt. Data on a hub that cannot be
        reached is not checked, and functions are then only loaded."""
        spec = self._run.spec
        about_rate = describe_rate(spec.optimizer)
        about_run = [describe_sources(spec), *describe_stop_when(spec.schedule)]
        self.about_prompts = [*about_run, about_rate]
        try:
            prompts = datasets.open_prompts(spec.data)
            if prompts.has_pictures or spec.shows_pictures_in_episodes:
                self._use_pictures()
                spec = self._run.spec
            example = prompts.prompt(0)
            held_out = _find_held_out(self._run, prompts)
        except HubUnreachable as error:
            self._check_memory()
            _, warnings = find_interfaces(spec.episodes, None)
            self.checks.warnings += warnings
            self.checks.add(example=None)
            self.checks.warnings.append(f"warning: not checked: {error}")
            self._has_checked_data = False
            return
        self._check_memory()
        interfaces, warnings = find_interfaces(spec.episodes, example)
        self.checks.warnings += warnings
        self.checks.add(example=example, interfaces=interfaces, prompts=prompts)
        self.checks.warnings += held_out.warnings
        try:
            renderer = self._load_renderer(example)
        except ConfigError as error:
            self.about_prompts.append(f"first prompt: not shown: {error}")
            return
        self.checks.add(renderer=renderer)
        self.about_prompts = [
            *about_run,
            describe_data(spec, prompts, len(held_out.problems)),
            about_rate,
            *describe_first_prompt(spec, example, interfaces, renderer),
        ]

    def _use_pictures(self) -> None:
        """Plan with the model's tower."""
        given = self._given.with_pictures(True)
        model = self._measure_model(given.spec.model)
        self.placement = resolve_placement(given.spec, self.placement.assumed)
        self._given = given
        self._plan_memory(model)
        self.checks.add(spec=self._run.spec)

    def _check_memory(self) -> None:
        """Check devices and memory, once it is known whether there are pictures."""
        self._has_checked_memory = True
        self.checks.add(placement=self.placement, model=self._model)
        self._is_tight = bool(find_shortages(self._parts))
        self.checks.add(parts=self._parts)

    def warn_of_memory(self) -> None:
        """Add what is known of the memory to a plan that something else has refused."""
        if self._model is None or self._has_checked_memory:
            return
        self._is_tight = bool(find_shortages(self._parts))
        try:
            self.checks.add(parts=self._parts)
        except ConfigError as error:
            self.checks.warnings.append(f"warning: {error}")

    def _load_renderer(self, example: Prompt) -> PromptRenderer | None:
        """Load what renders the first prompt. Raises ConfigError: the model need not be here, and
        transformers makes an empty tokenizer for a folder without one."""
        first = {"": example.content}
        renderer = load_renderer(self._run.spec, first, self._tokenizer_path)
        if renderer is not None and len(renderer.tokenizer) < 2:
            raise ConfigError("the model's folder has no tokenizer")
        return renderer

    def propose_changes(self) -> Changes | None:
        """Return settings with which the run fits; empty if it does, or if none can be proposed."""
        if self._size is None or not self._is_tight or self.placement.accelerator == "cpu":
            return {}
        return propose_changes(self._run, self.placement, self._size)

    @property
    def _size(self) -> ModelSize | None:
        return None if self._model is None else self._model.size

    def describe_start(self) -> str:
        """Say that the run would start, and how full the fullest memory would be."""
        shares = {}
        for memory, needed_bytes in bytes_by_memory(self._parts).items():
            if memory.num_bytes < math.inf:
                shares[memory] = needed_bytes / memory.num_bytes
        starts = "a run would start"
        if not self._has_checked_data:
            starts += " if its data, which were not checked, can be loaded"
        if not shares:
            return f"{starts}; whether its memory suffices is unknown"
        fullest = max(shares, key=lambda memory: shares[memory])
        taken = in_gib(shares[fullest] * fullest.num_bytes)
        about = f"{taken} of {in_gib(fullest.num_bytes)} on {fullest.name}"
        if self._is_tight:
            return f"{starts}, but its memory may not suffice: at its peak {about}"
        return f"{starts}: at its peak, by estimate, {about}"

    def try_lora(self) -> LoraTrial:
        """Find out whether the run fits with LoRA instead of all weights, and describe that."""
        others = "use more or larger devices, a smaller model, shorter sequences"
        if self._run.spec.model.lora.rank is not None:
            return LoraTrial(None, others)
        try:
            run = self._run.changed({LORA_KEY: LORA_RANK})
            size = measure_model(run.spec.model, is_whole=False).size
        except ConfigError as error:
            return LoraTrial(None, f"{others}; LoRA was not tried: {error}")
        assert size is not None
        changes = propose_changes(run, self.placement, size)
        if changes is None:
            return LoraTrial(None, f"{others}; LoRA ({LORA_KEY}) does not fit either")
        about = f"{others}, or LoRA ({LORA_KEY}), which fits by the same estimate:"
        return LoraTrial({LORA_KEY: LORA_RANK, **changes}, about)

    def try_more_devices(self) -> Sequence[str]:
        """Name the smallest number of the assumed devices on which the run fits, if any does."""
        assumed = self.placement.assumed
        if assumed is None or self._size is None:
            return ()
        run = self._run.changed({"devices.infer": None, "devices.train": None})
        for count in NUM_DEVICES:
            if count <= assumed.count:
                continue
            more = replace(assumed, count=count)
            try:
                placement = resolve_placement(run.spec, more)
            except ConfigError:
                continue
            if propose_changes(run, placement, self._size) is not None:
                devices_text = f"{count}x{assumed.num_bytes / 2**30:g}GiB"
                about = f"{count} such devices are enough, by the same estimate"
                return [f"{about}: --assume {devices_text} names the settings"]
        return ()
