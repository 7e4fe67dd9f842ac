"""Resolve and check a run before anything is started; nothing is written, no weights are loaded.

    config ─► model, data, functions, devices ─► prompts as tokens ─► memory, disk ─► Preflight
           └► devices, model ─► memory ─► data, functions ─► Plan, which `--dry-run` prints

Each stage has a typed result: `Measured`, `PromptStream`, `Interfaces`, `Placement`.
"""

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from easyrl import devices
from easyrl.agents.pool import check_agent
from easyrl.config import Config, ConfigError, change_config, to_arguments
from easyrl.config.algorithm import TEACHER_KEY, TEACHER_PROMPT_KEY
from easyrl.config.spec import ModelSpec, OptimizerSpec, RewardSpec, RunSpec
from easyrl.data import datasets
from easyrl.data.chat import check_prompts, render_prompt
from easyrl.data.hub import BUILT_IN_MODELS, HubUnreachable, describe_model
from easyrl.data.presets import PRESETS
from easyrl.data.streams import TEACHER_SUFFIX, PromptStream
from easyrl.environments.conversation import Conversations
from easyrl.environments.loading import Interfaces
from easyrl.environments.pool import check_environments
from easyrl.formatting import counted, printable, require, shorten
from easyrl.model.files import (
    FLOAT_BYTES,
    ModelFiles,
    ModelSize,
    check_positions,
    fingerprint,
    load_eos_token_ids,
    load_tokenizer,
    meta_model,
    model_config_of,
    model_size,
    read_model_files,
    tokenizer_of,
)
from easyrl.model.reward_model import check_reward_models
from easyrl.rewards.loading import (
    BUILT_IN,
    check_rewards,
    digest_code,
)
from easyrl.rewards.pool import try_rewards
from easyrl.runtime import memory_estimate, memory_fit
from easyrl.runtime.placement import Placement, describe, resolve_placement
from easyrl.runtime.resolve import resolve, with_eval_data
from easyrl.runtime.resume import Resume, check_resumed, differing, start_from
from easyrl.runtime.run_folder import folder_of, is_unstarted, refuse_existing
from easyrl.types import Messages, Prompt

SHOWN_CHARACTERS = 1000
LOPSIDED = 6
"""A split is lopsided if one side has at least this many times the other's devices. 7 engines
beside 1 trainer, the default on 8 devices, are."""


class Measured(NamedTuple):
    files: ModelFiles
    num_trained: int | None  # elements of LoRA's adapters; None: all weights are trained
    size: ModelSize | None  # None: its configuration does not have the usual names
    about_lora: str = ""  # which layers are adapted, and which stay frozen


@dataclass(frozen=True, slots=True)
class Preflight:
    config: Config  # with what fits the memory
    spec: RunSpec  # the same, resolved
    prompts: PromptStream  # without those that `data.long_prompts` skips
    num_prompts_skipped: int
    placement: Placement
    model: Measured
    identity: Mapping[str, Any]
    """Digests of model, data and held-out problems; those of a resumed run must be the same."""
    held_out: Sequence[Prompt]  # problems that accuracy is measured on; may be empty
    about_prompts: Sequence[str]  # `describe_prompts`
    warnings: Sequence[str]


def with_config(checked: Preflight, config: Config) -> Preflight:
    return replace(checked, config=config, spec=resolve(config))


def check_run(config: Config, resume: Resume | None = None, tokenizer: str = "") -> Preflight:
    """Resolve and check a run. Raises ConfigError, with the key to change, if it cannot start.
    `tokenizer`: the model's tokenizer, where it is not in `model.path`."""
    folder = folder_of(config.output.dir, config.data.datasets)
    if resume is None:
        refuse_existing(folder)
    spec = resolve(config)
    _check_teacher(spec)
    model = measure_model(spec)
    prompts = datasets.open_prompts(spec.data)
    interfaces, warnings = check_functions(spec, prompts.prompt(0))
    warnings += _check_mixture(spec.rewards, prompts)
    placement = resolve_placement(spec)  # imports torch where it must look for accelerators
    check_compiler(spec, placement)
    loaded = load_prompt_tokenizer(spec, prompts.examples(), tokenizer)
    too_long = too_long_prompts(spec, prompts.examples(), interfaces, loaded)
    skipped = {location.removesuffix(TEACHER_SUFFIX) for location in too_long}
    prompts = prompts.without(skipped)
    held_out, of_eval = _held_out(config, prompts, interfaces, tokenizer)
    notes = describe_prompts(spec, prompts, interfaces, loaded, len(held_out))
    check_engine(spec, placement, model.size)
    warnings += [*of_eval, *choice_warnings(spec, placement)]
    config = memory_fit.use_memory(config, placement, model.size)
    spec = resolve(config)
    try:
        warnings += memory_estimate.check_memory(
            memory_estimate.estimate_memory(spec, placement, model.size)
        )
    except ConfigError as error:
        raise ConfigError(f"{error}{_what_fits(config, placement, model.size)}") from None
    # A resumed run was checked when it started; the checkpoints of adapters are small.
    is_small = resume is not None or model.num_trained is not None
    num_kept = config.train.keep_checkpoints
    num_kept += num_kept > 0 and config.train.eval_every > 0  # the best one
    check_disk(folder, model.files, 0 if is_small else num_kept)
    identity = {
        "model.path": fingerprint(config.model.path),
        "data.dataset": prompts.fingerprint(),
        "eval.dataset": datasets.identity_of(datasets.problem_ids(held_out)),
        **identify_code(spec),
    }
    if spec.teacher is not None and spec.teacher.path is not None:
        identity[TEACHER_KEY] = fingerprint(spec.teacher.path)
    if resume and (changed := differing(resume.state.identity, identity)):
        raise ConfigError(
            f"{', '.join(changed)}: the files have changed since the run in '{resume.folder}' "
            "started; restore them, or start a new run (--output)"
        )
    return Preflight(
        config,
        spec,
        prompts,
        len(skipped),
        placement,
        model,
        identity,
        held_out,
        notes,
        list(dict.fromkeys(warnings)),
    )


class Plan(NamedTuple):
    """Description of a run that is not started: its devices, memory and data."""

    text: str
    would_start: bool
    changes: Mapping[str, Any] | None  # with which everything fits; None: nothing that was tried


def make_plan(
    config: Config, assumed: devices.AssumedDevices | None = None, *, is_resumed: bool = False
) -> Plan:
    """Plan a run for what this machine has, or for `assumed` accelerators. Nothing is started, and
    no weights are read. Raises ConfigError for devices that are missing."""
    spec = resolve(config)
    placement = resolve_placement(spec, assumed)
    lines = [describe(placement), *never_run(placement), ""]
    warnings, size = choice_warnings(spec, placement), None
    is_refused, is_tight, described = False, False, describe_model(config.model.path)
    try:
        given, source = start_from(config, is_resumed=is_resumed)
        config, spec = given, resolve(given)
        model = measure_model(spec, is_whole=False)
        tokenizer = source.tokenizer if source else ""
        size, described = model.size, describe_weights(model, spec.model)
        if source is not None:
            has_new_adapter = config.model.lora.rank is not None
            about_source = source.describe(has_new_adapter=has_new_adapter)
            lines = [about_source, *lines] if about_source else lines
        check_engine(spec, placement, size)
        config = memory_fit.use_memory(config, placement, size)
        parts = memory_estimate.estimate_memory(resolve(config), placement, size)
        if size is None:
            lines.append("memory: unknown, as the model's config.json gives no sizes")
        else:
            lines.append(memory_estimate.memory_table(parts))
        is_tight = True  # if the next line raises
        tight = memory_estimate.check_memory(parts)
        is_tight, warnings = bool(tight), warnings + tight
        folder = folder_of(given.output.dir, given.data.datasets)
        if is_resumed:
            check_resumed(given, folder)
        elif given.runtime.resume == "never" and not is_unstarted(folder):
            refuse_existing(folder)
        # Last: what is known of the memory is shown first.
        warnings += check_inputs(config, tokenizer)
    except ConfigError as refused:
        warnings, is_refused = [*warnings, f"a run would not start: {refused}"], True
    changes: Mapping[str, Any] | None = {}
    if size is not None and is_tight and placement.accelerator != "cpu":
        changes = memory_fit.propose_changes(config, placement, size)
    return Plan("\n".join([described, *lines, *warnings]), not is_refused, changes)


def check_inputs(config: Config, tokenizer: str = "") -> list[str]:
    """Make the checks of a start that need no weights, and describe the prompts; with warnings.
    Data or a tokenizer on a hub that cannot be reached is not checked. `tokenizer`: as of
    `check_run`. Raises ConfigError."""
    spec = resolve(config)
    try:
        _check_teacher(spec)
        prompts = datasets.open_prompts(spec.data)
        interfaces, warnings = check_functions(spec, prompts.prompt(0))
        warnings += _check_mixture(spec.rewards, prompts)
        held_out, of_eval = _held_out(config, prompts, None)
        warnings += of_eval
        first = {"first prompt (a start checks all)": prompts.prompt(0).content}
        try:
            loaded = load_prompt_tokenizer(spec, first, tokenizer)
            if loaded is not None and len(loaded) < 2:  # transformers makes an empty one
                raise ConfigError("the model's folder has no tokenizer")
        except ConfigError as error:  # in a plan the model need not be here
            return [_describe_rate(spec.optimizer), f"first prompt: not shown: {error}", *warnings]
        is_checked = config.data.long_prompts == "stop" and config.rollout.agent is None
        if loaded is not None and is_checked:
            check_prompts(first, loaded, config.data, _longest_tools(interfaces))
        about = describe_prompts(spec, prompts, interfaces, loaded, len(held_out))
        return [*about, *warnings]
    except HubUnreachable as error:
        return [*check_functions(spec, None)[1], f"warning: not checked: {error}"]


def measure_model(spec: RunSpec, *, is_whole: bool = True) -> Measured:
    """Measure `model.path`. A model that is not downloaded yet is counted by its configuration, and
    unless `is_whole`, weights and tokenizer of a folder may be missing. Raises ConfigError, also
    for too few positions, or LoRA without layers for it."""
    lora, num_trained, about_lora = spec.model.lora, None, ""
    files = read_model_files(spec.model.path, is_whole=is_whole)
    check_positions(spec.limits, files)
    found, num_weights = files.config, files.num_weights
    if lora.rank is not None or num_weights is None:
        full = model_config_of(spec.model)
        model = meta_model(full, trust_remote_code=spec.model.trust_remote_code)
        if num_weights is None:
            num_weights = sum(weight.numel() for weight in model.parameters())
            found = full.to_dict()
    if lora.rank is not None:
        from easyrl.model.lora import check_lora, describe_lora

        num_trained = check_lora(lora, spec.model.path, model)
        about_lora = describe_lora(lora, spec.model.path, model)
    return Measured(files, num_trained, model_size(found, num_weights, num_trained), about_lora)


def describe_weights(model: Measured, spec: ModelSpec) -> str:
    total, trained = model.files.num_weights, model.num_trained
    text = describe_model(spec.path)
    if trained is None:
        return text if total is None else f"{text}, {total:,} weights, all trained"
    share = "" if total is None else f" of {total + trained:,} ({trained / (total + trained):.1%})"
    text += f"; LoRA of rank {spec.lora.rank} trains {trained:,}{share}, base frozen"
    return f"{text}\n{model.about_lora}"


def check_functions(
    spec: RunSpec, example: Prompt | None, *, is_trained: bool = True
) -> tuple[Interfaces, list[str]]:
    """Load the user's loss, rewards and environments, and try them on a prompt, if there is one;
    with warnings. `is_trained`: not by `easyrl eval`, which needs no loss."""
    interfaces: Interfaces = {}
    warnings: list[str] = []
    if spec.episodes is not None and spec.episodes.agent is not None:
        check_agent(spec.episodes, example)
    elif spec.episodes is not None:
        interfaces, warnings = check_environments(spec.episodes, example)
    check_reward_models(spec.rewards, example)
    warnings = try_rewards(spec.rewards, example) + warnings
    if is_trained and spec.loss.is_own:
        from easyrl.algorithm.losses import load_loss

        load_loss(spec.loss)
    for name in spec.trackers if is_trained else ():
        require(name, f"output.log_to: '{name}'")
    return interfaces, warnings


def _check_mixture(rewards: RewardSpec, prompts: PromptStream) -> list[str]:
    """Try the rewards on every source of a mixture; return warnings. They get None for columns that
    a source lacks, but a built-in one that is alone must have its column. Raises ConfigError."""
    specs, warnings, tried = rewards.functions, list[str](), prompts.prompt(0)
    for name, own, example in prompts.first_of_each():
        try:
            if (example.content, example.columns) != (tried.content, tried.columns):
                warnings += [f"{each} ('{name}')" for each in try_rewards(rewards, example)]
            if len(specs) == 1 and specs[0] in BUILT_IN:
                check_rewards(rewards, own)
        except ConfigError as error:
            raise ConfigError(f"'{name}': {error}") from None
    return warnings


def identify_code(spec: RunSpec) -> dict[str, str]:
    """Digests of the user's files, and of the reward models, by the keys that name them."""
    digests, key = digest_code(spec.code, spec.rewards.options.judge), "reward.functions"
    digests[key] = " ".join([digests[key], *map(fingerprint, spec.rewards.models)]).strip()
    return digests


def _check_teacher(spec: RunSpec) -> None:
    """Raise ConfigError for a teacher that cannot score the policy's completions, and for a run
    without rewards that needs them."""
    teacher = spec.teacher
    if spec.rewards.is_none and (teacher is None or spec.advantages.dynamic_sampling):
        other = TEACHER_KEY if teacher is None else "algorithm.dynamic_sampling=false"
        raise ConfigError(f"reward.functions: expected a reward (--reward) or {other}, got none")
    if teacher is None:
        return
    if teacher.path is None and not teacher.has_own_prompt:
        raise ConfigError(
            f"{TEACHER_PROMPT_KEY}: expected a column or a template, without which the policy "
            "agrees with itself (algorithm.teacher=policy), got null"
        )
    path = teacher.path
    if path is None:
        return
    its_files = read_model_files(path, TEACHER_KEY)
    check_positions(spec.limits, its_files)
    trusts, paths = spec.model.trust_remote_code, (spec.model.path, path)
    mine, others = (load_tokenizer(each, trust_remote_code=trusts).get_vocab() for each in paths)
    if unlike := mine.items() ^ others.items():
        token, number = min(unlike, key=itemgetter(1))
        raise ConfigError(
            f"{TEACHER_KEY}: expected the policy's tokens, as it scores them, got '{path}', which "
            f"differs in token {number} ({token!r} in one of them); use a model of the same family"
        )
    files = read_model_files(spec.model.path), its_files
    sizes = [(of.config.get("text_config") or of.config).get("vocab_size", 0) for of in files]
    if sizes[0] > sizes[1]:  # a sampled token might be padding that the teacher lacks
        expected = f"expected a vocabulary of at least {sizes[0]} with its padding, as the policy's"
        raise ConfigError(f"{TEACHER_KEY}: {expected}, got {sizes[1]} in '{path}'")


def never_run(placement: Placement) -> list[str]:
    """Name what of a plan has never run on real hardware (README, "What has run where")."""
    kind, used = placement.accelerator, placement.accelerators
    is_vllm = placement.engine.name == "vllm" and placement.infer.kind == "accelerator"
    parts = {
        "Ascend NPUs": kind == devices.ASCEND and bool(used),
        "several accelerators": len(used) > 1,
        "vLLM on accelerators": is_vllm,
        "Ray with accelerators or over several machines": placement.is_ray,
    }
    found = [part for part, is_planned in parts.items() if is_planned]
    text = f"never run on real hardware so far: {', '.join(found)} (README, What has run where)"
    return [text] * bool(found)


def check_compiler(spec: RunSpec, placement: Placement) -> None:
    """Raise ConfigError if kernels are to be compiled for GPUs without a C compiler."""
    uses_kernels = spec.optimizer.compile or spec.model.dtype != "float32"
    is_on_gpu = placement.train.kind == "accelerator" and uses_kernels
    is_on_gpu |= placement.infer.kind == "accelerator" and placement.engine.name == "vllm"
    is_on_gpu &= placement.accelerator != devices.ASCEND and not placement.is_ray
    if is_on_gpu and not devices.has_c_compiler():
        raise ConfigError(
            "devices: expected a C compiler for GPU kernels (CC, or apt install gcc), got none"
        )


def check_disk(folder: Path, model: ModelFiles, num_checkpoints: int) -> None:
    """Raise ConfigError if the final model and `num_checkpoints`, with the one that is being
    written, do not fit the disk of `folder`."""
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    weights, free = FLOAT_BYTES * (model.num_weights or 0), shutil.disk_usage(existing).free
    copies = 3 * (num_checkpoints + 1) if num_checkpoints else 0  # weights and two moments
    needed = weights * (1 + copies)
    if needed > free:
        raise ConfigError(
            f"output.dir (--output): model and checkpoints take {needed / 2**30:.2f} GiB, but "
            f"'{folder}' has {free / 2**30:.2f} GiB left; keep fewer (train.keep_checkpoints)"
        )


def _what_fits(config: Config, placement: Placement, size: ModelSize | None) -> str:
    """Name settings with which a run that is refused for its memory fits, as text to append."""
    if placement.accelerator == "cpu" or placement.is_ray or size is None:
        return ""
    changes = memory_fit.propose_changes(config, placement, size)
    if changes is None:
        return "; nothing that was tried fits"
    words = to_arguments(change_config(config, changes), config)
    return f"; this fits, by estimate: {shlex.join(words)}"


def check_engine(spec: RunSpec, placement: Placement, size: ModelSize | None) -> None:
    """Raise ConfigError for a model that the engine would refuse once it has started."""
    path, is_vllm = spec.model.path, placement.engine.name == "vllm"
    if size is not None and is_vllm and not size.is_in_vllm:
        raise ConfigError(
            f"rollout.engine: expected embedded, because vLLM names weights of '{path}' otherwise "
            "than transformers, so it cannot receive updates, got vllm"
        )
    is_served = is_vllm or size is None or size.is_batched
    if spec.episodes is not None and not is_served:
        raise ConfigError(
            f"{spec.episodes.key}: expected a model that the embedded engine or vLLM can serve, "
            f"got '{path}', which has layers without attention to all tokens or a window"
        )


def choice_warnings(spec: RunSpec, placement: Placement) -> list[str]:
    """Warn of settings that are allowed and rarely meant, and of slow devices."""
    texts, top_k, top_p = [], spec.sampling.top_k, spec.sampling.top_p
    if (top_k, top_p) != (0, 1.0):
        given = f"rollout.top_k={top_k}, rollout.top_p={top_p}"
        biased = "are not sampled from the trained distribution, so the gradient is biased"
        texts.append(f"with {given} completions {biased}")
    is_demo = spec.model.path in BUILT_IN_MODELS
    if placement.train.kind == "accelerator" and spec.model.dtype == "float32" and not is_demo:
        text = "in float32 accelerators take twice the memory and several times as long"
        texts.append(f"{text}: model.dtype=bfloat16")
    on_cpu = placement.train.kind == "cpu" and not placement.assumed
    if on_cpu and spec.devices.infer is None and (reason := devices.unusable_reason()):
        texts.append(f"the CPU is used, since torch cannot use the GPUs: {reason}")
    infer, train = placement.infer.count, placement.train.count
    if max(infer, train) >= LOPSIDED * min(infer, train):
        default = " by default" if spec.devices.infer is spec.devices.train is None else ""
        text = f"{counted(infer, 'device')} for generation and {train} for training{default} is "
        text += "lopsided"
        advice = f"a short run, then easyrl plan RUN --devices {infer + train}"
        texts.append(f"{text}; to find the fastest split: {advice}")
    kind, is_here = placement.accelerator, not (placement.assumed or placement.is_ray)
    pairs = combinations(placement.accelerators if is_here else (), 2)
    apart = [f"{a} and {b}" for a, b in pairs if not devices.has_peer_access(kind, a, b)]
    if apart:
        text = f"{kind} devices {', '.join(apart)} cannot read each other's memory"
        texts.append(f"{text}: copies through the host's memory are slower")
    return [f"warning: {text}" for text in texts]


def _held_out(
    config: Config, prompts: PromptStream, interfaces: Interfaces | None, tokenizer: str = ""
) -> tuple[list[Prompt], list[str]]:
    """Open the held-out problems of `eval.dataset`, else of `data.dataset`; with warnings. Without
    `interfaces`, their tokens are not counted."""
    is_asked = config.data.num_held_out is not None or config.train.eval_every > 0
    has_none = not prompts.held_out() or (prompts.is_partly_held_out and not is_asked)
    if config.data.num_held_out == 0 or (config.eval.dataset is None and has_none):
        if config.train.eval_every:
            raise ConfigError(
                "train.eval_every: expected 0, because there are no held-out problems, got "
                f"{config.train.eval_every}; set eval.dataset, or data.num_held_out if it is 0"
            )
        ignored = "warning: data.num_held_out is ignored: the data has none (set eval.dataset)"
        return [], [ignored] if config.data.num_held_out else []
    if config.eval.dataset is None:
        return list(datasets.problems_of(prompts, config.data).values()), []
    other = with_eval_data(config)
    spec = resolve(other)
    try:
        stream = datasets.open_prompts(spec.data, is_trained=False)
        problems = datasets.problems_of(stream, other.data)
    except ConfigError as error:
        raise type(error)(str(error).replace("data.dataset (--dataset)", "eval.dataset")) from None
    warnings = try_rewards(resolve(config).rewards, next(iter(problems.values())))
    if interfaces is None:
        return list(problems.values()), warnings
    return short_problems(spec, problems, interfaces, tokenizer), warnings


def short_problems(
    spec: RunSpec, problems: Mapping[str, Prompt], interfaces: Interfaces, tokenizer: str
) -> list[Prompt]:
    examples = {location: problem.content for location, problem in problems.items()}
    loaded = load_prompt_tokenizer(spec, examples, tokenizer)
    skipped = too_long_prompts(spec, examples, interfaces, loaded)
    return [problem for location, problem in problems.items() if location not in skipped]


def load_prompt_tokenizer(
    spec: RunSpec, examples: Mapping[str, str | Messages], path: str = ""
) -> Any:
    """Load the tokenizer of `path` (by default the model's). None: every character is a token, as
    in the demo, which needs no transformers here."""
    data, path = spec.data.options, path or spec.model.path
    is_demo = path in BUILT_IN_MODELS and set(data.datasets) <= set(PRESETS)
    if is_demo and not data.chat_template and not data.chat_template_kwargs:
        longest = data.max_prompt_length
        if all(isinstance(text, str) and len(text) <= longest for text in examples.values()):
            return None
    return tokenizer_of(spec.model, path)


def too_long_prompts(
    spec: RunSpec,
    examples: Mapping[str, str | Messages],
    interfaces: Interfaces,
    tokenizer: Any,
) -> set[str]:
    """Check prompts by their locations as tokens of the model, the model's class on the way, and
    conversations with environments. Return the locations of those to skip."""
    if tokenizer is None or spec.rewards.acts == "agent":  # it makes its own prompts
        return set()
    model_config = model_config_of(spec.model)
    tools = _longest_tools(interfaces)
    skipped = check_prompts(examples, tokenizer, spec.data.options, tools)
    for interface in interfaces.values():
        assert spec.episodes is not None
        end_tokens = {*load_eos_token_ids(spec.model.path, model_config), tokenizer.eos_token_id}
        Conversations(spec.episodes, tokenizer, interface, end_tokens - {None})
    return skipped


def describe_prompts(
    spec: RunSpec,
    prompts: PromptStream,
    interfaces: Interfaces,
    tokenizer: Any,
    num_held_out: int,
) -> list[str]:
    """Describe the rows, the learning rate, and the first prompt as the model sees it, with special
    tokens and tools; with a warning for tools that the template does not show."""
    schedule, num_rows, content = spec.schedule, prompts.epoch_length, prompts.prompt(0).content
    rows = "made as the run goes, for"
    if num_rows is not None:
        epochs = schedule.iterations * schedule.prompts_per_iteration / num_rows
        rows = f"{counted(num_rows, 'row')}, {epochs:.3g} epoch{'s' * (epochs != 1)} in"
    size = f"{schedule.prompts_per_iteration} x {schedule.num_generations} completions"
    rows = f"prompts: {rows} {counted(schedule.iterations, 'iteration')} of {size}"
    rows += f"; {counted(num_held_out, 'held-out problem')}"
    rate = _describe_rate(spec.optimizer)
    if spec.rewards.acts == "agent":
        return [f"{rows}; the agent writes what the model sees", rate]
    ids: Sequence[Any] = str(content)
    text, tools = str(content), _longest_tools(interfaces)
    if tokenizer is not None:
        variables = spec.data.options.chat_template_kwargs | ({"tools": tools} if tools else {})
        ids = render_prompt(content, tokenizer, variables)
        text = tokenizer.decode(ids)
    lines = printable(shorten(text, SHOWN_CHARACTERS), keep="\n").split("\n")
    names = [tool["function"]["name"] for tool in tools]
    hidden = [name for name in names if name not in text]
    lines = [f"first prompt, {counted(len(ids), 'token')}:", *(f"  {each}" for each in lines)]
    if hidden:
        lines.append(f"warning: the chat template does not show the tools {', '.join(hidden)}")
    if not isinstance(content, str) and content[-1]["role"] == "assistant":
        lines.append("note: prompts end with an assistant's message, which the model continues")
    is_for_chats = bool(tokenizer and tokenizer.chat_template)
    if is_for_chats and isinstance(content, str) and spec.data.options.chat is None:
        lines.append("warning: prompts are plain text; data.chat=true makes chats for this model")
    return [rows, rate, *lines]


def _describe_rate(optimizer: OptimizerSpec) -> str:
    warmup = counted(optimizer.warmup_iterations, "iteration")
    schedule = f"{optimizer.lr_scheduler_type}, {warmup} of warm-up"
    return f"learning rate: {optimizer.learning_rate:g} ({schedule})"


def _longest_tools(interfaces: Interfaces) -> list[Any]:
    schemas = [each.schemas for each in interfaces.values()]
    return max(schemas, key=lambda each: len(str(each)), default=[])
