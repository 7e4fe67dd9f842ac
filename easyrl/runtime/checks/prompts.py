"""Prompts as the model gets them: as tokens, not too long, and with the tools of the run."""

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from easyrl.config.spec import OptimizerSpec, RunSpec
from easyrl.data.chat import check_prompts, render_prompt
from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.data.presets import PRESETS
from easyrl.data.streams import PromptStream
from easyrl.environments.conversation import Conversations
from easyrl.environments.loading import Interfaces
from easyrl.formatting import counted, printable, shorten
from easyrl.model.files import load_eos_token_ids, model_config_of, tokenizer_of
from easyrl.types import Messages, Prompt

Examples = Mapping[str, str | Messages]  # prompts by their locations, as "rows.jsonl:3"

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
    tokenizer = load_prompt_tokenizer(spec, examples, tokenizer_path)
    skipped = find_too_long(spec, examples, interfaces, tokenizer)
    kept = []
    for location, problem in problems.items():
        if location not in skipped:
            kept.append(problem)
    return kept


def load_prompt_tokenizer(spec: RunSpec, examples: Examples, path: str = "") -> Any:
    """Load the tokenizer of `path` (by default the model's). None: every character is a token, as
    in the demo, which needs no transformers here."""
    path = path or spec.model.path
    data = spec.data.options
    is_demo = path in BUILT_IN_MODELS and set(data.datasets) <= set(PRESETS)
    has_template = data.chat_template or data.chat_template_kwargs
    if is_demo and not has_template and _are_short_texts(examples, data.max_prompt_length):
        return None
    return tokenizer_of(spec.model, path)


def _are_short_texts(examples: Examples, most: int) -> bool:
    for content in examples.values():
        if not isinstance(content, str) or len(content) > most:
            return False
    return True


def find_too_long(
    spec: RunSpec, examples: Examples, interfaces: Interfaces, tokenizer: Any
) -> Collection[str]:
    """Check prompts as tokens of the model, the model's class on the way, and conversations with
    environments. Return the locations of the prompts to skip. Raises ConfigError."""
    if tokenizer is None or spec.rewards.acts == "agent":  # it makes its own prompts
        return ()
    skipped = check_prompts(examples, tokenizer, spec.data.options, longest_tools(interfaces))
    _check_conversations(spec, interfaces, tokenizer)
    return skipped


def _check_conversations(spec: RunSpec, interfaces: Interfaces, tokenizer: Any) -> None:
    """Raise ConfigError if the chat template cannot write the turns of an environment."""
    model_config = model_config_of(spec.model)
    for interface in interfaces.values():
        assert spec.episodes is not None
        end_tokens = {*load_eos_token_ids(spec.model.path, model_config), tokenizer.eos_token_id}
        Conversations(spec.episodes, tokenizer, interface, end_tokens - {None})


def check_first_prompt(
    spec: RunSpec, example: Prompt, interfaces: Interfaces, tokenizer: Any
) -> None:
    """Raise ConfigError if the first prompt, or a conversation, cannot be made, or if the prompt is
    too long and may not be skipped."""
    if tokenizer is None or spec.rewards.acts == "agent":
        return
    data = spec.data.options
    if data.long_prompts != "stop":  # others may be short enough, which a start finds out
        data = data.model_copy(update={"max_prompt_length": sys.maxsize})
    first = {"first prompt (a start checks all)": example.content}
    check_prompts(first, tokenizer, data, longest_tools(interfaces))
    _check_conversations(spec, interfaces, tokenizer)


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


def describe_first_prompt(
    spec: RunSpec, example: Prompt, interfaces: Interfaces, tokenizer: Any
) -> list[str]:
    """Show the first prompt as the model sees it, with special tokens and tools; with a warning for
    tools that the template does not show. Empty for an agent, which writes its own prompts."""
    if spec.rewards.acts == "agent":
        return []
    content = example.content
    tools = longest_tools(interfaces)
    if tokenizer is None:
        text = str(content)
        num_tokens = len(text)
    else:
        variables = dict(spec.data.options.chat_template_kwargs)
        if tools:
            variables["tools"] = tools
        ids = render_prompt(content, tokenizer, variables)
        text = tokenizer.decode(ids)
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
    has_template = tokenizer is not None and tokenizer.chat_template
    if has_template and is_text and spec.data.options.chat is None:
        lines.append("warning: prompts are plain text; data.chat=true makes chats for this model")
    return lines
