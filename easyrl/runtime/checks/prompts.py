"""Prompts as the model gets them: as tokens, not too long, and with the tools of the run."""

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from easyrl.config import ConfigError
from easyrl.config.spec import OptimizerSpec, RunSpec
from easyrl.data.chat import ShownPictures, check_prompts
from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.data.pictures import PictureError, PictureSize, size_of
from easyrl.data.presets import PRESETS
from easyrl.data.streams import PromptStream
from easyrl.environments.conversation import Conversations
from easyrl.environments.loading import Interfaces
from easyrl.formatting import counted, printable, shorten
from easyrl.model.files import load_eos_token_ids, model_config_of
from easyrl.model.processor import MAX_SIZES, Processor
from easyrl.model.prompt_renderer import PromptRenderer, sees_nothing
from easyrl.runtime.checks.engine import MeasuredModel
from easyrl.types import Messages, Prompt

Examples = Mapping[str, str | Messages]  # prompts by their locations, as "rows.jsonl:3"
Sizes = Mapping[str, Sequence[PictureSize]]  # of the pictures of prompts, by location

SHOWN_CHARACTERS = 1000  # of the first prompt
ENDS_WITH_ANSWER = (
    "warning: prompts end with an assistant's message, which the model continues; if it is the "
    "reference answer, the model sees it: data.answer_from=last_message takes it out of the prompt "
    "and passes it to the rewards as `answer`"
)


def short_problems(
    spec: RunSpec, problems: Mapping[str, Prompt], interfaces: Interfaces, tokenizer_path: str
) -> list[Prompt]:
    """Return the problems without those that are too long (`data.long_prompts=skip`)."""
    examples = {location: problem.content for location, problem in problems.items()}
    renderer = load_renderer(spec, examples, tokenizer_path)
    sizes = sizes_of(problems) if spec.model.has_pictures else {}
    skipped = find_too_long(spec, examples, interfaces, renderer, sizes)
    kept = []
    for location, problem in problems.items():
        if location not in skipped:
            kept.append(problem)
    return kept


def check_pictures(spec: RunSpec, prompts: PromptStream, model: MeasuredModel) -> None:
    """Raise ConfigError if there are pictures which the model, or an agent, cannot be shown."""
    if not prompts.has_pictures and not spec.shows_pictures_in_episodes:
        return
    if not model.files.config.get("vision_config"):
        raise sees_nothing(spec.model.path)
    if spec.rewards.acts == "agent" and not spec.shows_pictures_in_episodes:
        raise ConfigError(
            "rollout.takes_pictures: expected true, so that requests of the agent may show the "
            "pictures of the data set, got false; data.image_column= (empty) leaves them out"
        )


def sizes_of(problems: Mapping[str, Prompt]) -> Sizes:
    """Open the pictures of problems. Raises ConfigError for one that is no picture."""
    sizes: dict[str, list[PictureSize]] = {}
    for location, problem in problems.items():
        try:
            sizes[location] = [size_of(picture) for picture in problem.pictures]
        except PictureError as error:
            raise ConfigError(f"{location}: {error}") from None
    return sizes


def load_renderer(spec: RunSpec, examples: Examples, path: str = "") -> PromptRenderer | None:
    """Load the tokenizer of `path` (by default the model's), and the processor for pictures. None:
    every character is a token, as in the demo, which needs no transformers here."""
    path = path or spec.model.path
    data = spec.data.options
    is_demo = path in BUILT_IN_MODELS and set(data.datasets) <= set(PRESETS)
    has_template = data.chat_template or data.chat_template_kwargs
    if is_demo and not has_template and _are_short_texts(examples, data.max_prompt_length):
        return None
    return PromptRenderer.of(spec.model, path)


def _are_short_texts(examples: Examples, most: int) -> bool:
    for content in examples.values():
        if not isinstance(content, str) or len(content) > most:
            return False
    return True


def find_too_long(
    spec: RunSpec,
    examples: Examples,
    interfaces: Interfaces,
    renderer: PromptRenderer | None,
    sizes: Sizes,
) -> Collection[str]:
    """Check prompts as tokens of the model, the model's class on the way, and conversations with
    environments. Return the locations of the prompts to skip. `sizes`: those of their pictures, by
    location. Raises ConfigError."""
    if renderer is None or spec.rewards.acts == "agent":  # it makes its own prompts
        return ()
    tokenizer = renderer.tokenizer
    tools = longest_tools(interfaces)
    shown = _measured(renderer, examples, sizes)
    skipped = check_prompts(examples, tokenizer, spec.data.options, tools, shown)
    _check_conversations(spec, interfaces, tokenizer)
    return skipped


def _measured(renderer: PromptRenderer, examples: Examples, sizes: Sizes) -> ShownPictures | None:
    """Return the tokens that the pictures of prompts take. None: the run has no pictures."""
    if renderer.processor is None:
        return None
    by_size = tokens_by_size(renderer.processor, sizes)
    num_tokens = {}
    for location in examples:
        own = sizes.get(location)
        if own is not None and all(size in by_size for size in own):
            num_tokens[location] = sum(by_size[size] for size in own)

    def length(location: str, content: str | Messages, variables: Mapping[str, Any]) -> int:
        return renderer.length(content, sizes[location], variables)

    return ShownPictures(num_tokens, length)


def tokens_by_size(processor: Processor, sizes: Sizes) -> dict[PictureSize, int]:
    """Return the tokens of pictures by their sizes; of MAX_SIZES sizes, those with the most
    pixels."""
    different = set[PictureSize]()
    for of_prompt in sizes.values():
        different.update(of_prompt)
    largest = sorted(different, key=_by_pixels, reverse=True)[:MAX_SIZES]
    return {size: processor.num_tokens(size) for size in largest}


def _by_pixels(size: PictureSize) -> tuple[int, PictureSize]:
    """Order sizes by their pixels, and those with as many always in the same way."""
    num_pixels = size.height * size.width
    return num_pixels, size


def _check_conversations(spec: RunSpec, interfaces: Interfaces, tokenizer: Any) -> None:
    """Raise ConfigError if the chat template cannot write the turns of an environment."""
    model_config = model_config_of(spec.model)
    for interface in interfaces.values():
        assert spec.episodes is not None
        end_tokens = {*load_eos_token_ids(spec.model.path, model_config), tokenizer.eos_token_id}
        Conversations(spec.episodes, tokenizer, interface, end_tokens - {None})


def check_first_prompt(
    spec: RunSpec, example: Prompt, interfaces: Interfaces, renderer: PromptRenderer | None
) -> None:
    """Raise ConfigError if the first prompt, or a conversation, cannot be made, or if the prompt is
    too long and may not be skipped."""
    if renderer is None or spec.rewards.acts == "agent":
        return
    data = spec.data.options
    if data.long_prompts != "stop":  # others may be short enough, which a start finds out
        data = data.model_copy(update={"max_prompt_length": sys.maxsize})
    location = "first prompt (a start checks all)"
    first = {location: example.content}
    shown = _measured(renderer, first, sizes_of({location: example}))
    check_prompts(first, renderer.tokenizer, data, longest_tools(interfaces), shown)
    _check_conversations(spec, interfaces, renderer.tokenizer)


def describe_rows(prompts: PromptStream) -> Sequence[str]:
    """Say what form of rows was recognised, and warn of answers that may be wrong."""
    return prompts.warnings()


def warn_of_trained_rows(
    spec: RunSpec, prompts: PromptStream, trained_datasets: Collection[str]
) -> Sequence[str]:
    """Remark that the evaluated model was trained on these problems."""
    shared = {*trained_datasets} & {*spec.data.options.datasets} - {*PRESETS}
    if not shared or prompts.held_out():
        return ()
    return ["note: the model's run trained on rows of this data set (--dataset)"]


def longest_tools(interfaces: Interfaces) -> list[Any]:
    """Return the tools of the environment whose descriptions are the longest."""
    schemas = [interface.schemas for interface in interfaces.values()]
    return max(schemas, key=lambda each: len(str(each)), default=[])


# -- descriptions ----------------------------------------------------------------------------------


def describe_sources(spec: RunSpec) -> str:
    """Name the data and the rewards with their weights ("gsm8k, format x 0.5"), and the teacher."""
    data = spec.data.options
    rewards = spec.rewards
    sources = _with_weights(data.datasets, data.weights or [], " + ")
    scores = _with_weights(rewards.names, rewards.weights, ", ") or "not set"
    if rewards.is_none:
        held_out = "" if scores == "none" else f" (held-out problems: {scores})"
        scores = f"none{held_out}"
    text = f"data: {sources}; reward: {scores}"
    if spec.teacher is not None:
        text += f"; teacher: {spec.teacher.shown}"
    return text


def _with_weights(names: Sequence[str], weights: Sequence[float], separator: str) -> str:
    """Return the names, those with another weight than 1 as "format x 0.5". `weights`: one for
    each name, or none."""
    described = [*names]
    for index, weight in enumerate(weights):
        if weight != 1:
            described[index] += f" x {weight:g}"
    return separator.join(described)


def describe_data(spec: RunSpec, prompts: PromptStream, num_held_out: int) -> str:
    """Say how many rows there are, and how often the run goes through them."""
    schedule = spec.schedule
    num_rows = prompts.epoch_length
    rows = "made as the run goes, for"
    if num_rows is not None:
        epochs = schedule.iterations * schedule.prompts_per_iteration / num_rows
        plural = "" if epochs == 1 else "s"
        rows = f"{counted(num_rows, 'row')}, {epochs:.3g} epoch{plural} in"
    size = f"{schedule.prompts_per_iteration} x {schedule.num_generations} completions"
    text = f"prompts: {rows} {counted(schedule.iterations, 'iteration')} of {size}; "
    text += counted(num_held_out, "held-out problem")
    if spec.rewards.acts == "agent":
        text += "; the agent writes what the model sees"
    return text


def describe_rate(optimizer: OptimizerSpec) -> str:
    warmup = counted(optimizer.warmup_iterations, "iteration")
    schedule = f"{optimizer.lr_scheduler_type}, {warmup} of warm-up"
    return f"learning rate: {optimizer.learning_rate:g} ({schedule})"


def describe_pictures(renderer: PromptRenderer | None, sizes: Sizes) -> list[str]:
    """Say how many tokens the pictures of the prompts take; empty for a run without pictures."""
    if renderer is None or renderer.processor is None:
        return []
    by_size = tokens_by_size(renderer.processor, sizes)
    counts = [len(of_prompt) for of_prompt in sizes.values()]
    tokens = by_size.values()
    each = _range_of(tokens, "token")
    return [f"pictures: {_range_of(counts, 'picture')} in a prompt, {each} for each"]


def _range_of(counts: Collection[int], noun: str) -> str:
    """Return `1 to 3 pictures`, or `1 picture` if all counts are equal."""
    least = min(counts, default=0)
    most = max(counts, default=0)
    if least == most:
        return counted(most, noun)
    return f"{least} to {counted(most, noun)}"


def describe_first_prompt(
    spec: RunSpec, example: Prompt, interfaces: Interfaces, renderer: PromptRenderer | None
) -> list[str]:
    """Show the first prompt as the model sees it, with special tokens and tools; with a warning for
    tools that the template does not show. Empty for an agent, which writes its own prompts."""
    if spec.rewards.acts == "agent":
        return []
    content = example.content
    tools = longest_tools(interfaces)
    if renderer is None:
        text = str(content)
        num_tokens = len(text)
    else:
        variables = dict(spec.data.options.chat_template_kwargs)
        if tools:
            variables["tools"] = tools
        ids = renderer.render(content, example.pictures, variables).token_ids
        text = renderer.decode(ids)
        num_tokens = len(ids)
    shown = printable(shorten(text, SHOWN_CHARACTERS), keep="\n")
    lines = [f"first prompt, {counted(num_tokens, 'token')}:"]
    lines += [f"  {line}" for line in shown.split("\n")]

    names = [tool["function"]["name"] for tool in tools]
    hidden = [name for name in names if name not in text]
    if hidden:
        lines.append(f"warning: the chat template does not show the tools {', '.join(hidden)}")
    is_text = isinstance(content, str)
    if not isinstance(content, str) and content[-1]["role"] == "assistant":
        lines.append(ENDS_WITH_ANSWER)
    has_template = renderer is not None and renderer.tokenizer.chat_template
    if has_template and is_text and spec.data.options.chat is None:
        lines.append("warning: prompts are plain text; data.chat=true makes chats for this model")
    return lines
