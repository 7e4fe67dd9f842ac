"""Section `data`."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from easyrl.config.section import (
    EACH_ONCE,
    Compared,
    NamesFiles,
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PromptForm,
    Section,
)
from easyrl.formatting import counted

REASONING_GYM = "reasoning_gym:"  # data sets that are tasks of this library


def _read_template(text: str) -> str:
    if "{{" in text or "{%" in text:
        return text
    try:
        return Path(text).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a chat template or a file that can be read ({error})") from None


def _check_text(text: str) -> str:
    is_one_word = len(text.split()) == 1
    if is_one_word and text.endswith((".jinja", ".j2", ".md", ".txt")):
        raise ValueError("expected the text itself, not a file's name")
    return text


Text = Annotated[str, AfterValidator(_check_text)]
ChatTemplate = Annotated[str, AfterValidator(_read_template)]


class DataConfig(Section):
    """Sources of the prompts."""

    dataset: NamesFiles[Annotated[str | list[str], EACH_ONCE]] = Field(
        default="arithmetic", min_length=1
    )
    """A preset (`arithmetic`, `countdown`, `countdown-small`, `picture-sums`, `guess`, `gsm8k`,
    `math`), a .jsonl, .csv or .parquet file, a folder of such or of `save_to_disk`, a hub id
    (`owner/name:subset:split`), a task of a library (`reasoning_gym:NAME`); a list is mixed."""
    options: PromptForm[dict[str, Any]] = Field(default_factory=dict)
    """Settings of a task of reasoning_gym, as in {max_digits: 2}; of several data sets by the names
    of the tasks: {chain_sum: {max_digits: 2}}."""
    preset: PromptForm[NonEmptyStr | None] = None
    """Preset whose form of prompts and reward are used for rows of your own, which must have its
    columns. Null: none."""
    weights: Compared[list[PositiveFloat] | None] = Field(default=None, min_length=1)
    """Shares of a list of data sets, exact to a thousandth; null: equal shares."""
    prompt_column: PromptForm[NonEmptyStr | None] = None
    """Column with the prompt: a string, or chat messages. All other columns go to the rewards.
    Null: the preset's, else `prompt`."""
    prompt_template: PromptForm[Text | None] = None
    """Template that makes the prompt from columns: "Solve: {question}"; {{ and }} are braces.
    Null: the preset's, else none."""
    system_prompt: PromptForm[Text | None] = None
    """System message before a prompt without one; it makes a chat of a string. Null: none."""
    chat: PromptForm[bool | None] = None
    """Send a prompt that is a string through the model's chat template, as a user's message. False:
    to the model as it is. Null: the preset's, else false. A system_prompt always makes a chat."""
    columns: PromptForm[dict[str, str] | list[dict[str, str]]] = Field(default_factory=dict)
    """Columns renamed: {answer: solution} passes `solution` to the rewards as `answer`. A part of
    one is {answer: "answers.text[0]"}. A list has names for each data set:
    [{}, {prompt: question}]."""
    answer_from: PromptForm[Literal["last_message"] | None] = None
    """`last_message`: the last message of a conversation, the assistant's, is the answer. The
    prompt ends before it, and rewards get its text as `answer`. Null: so for rows that have
    `messages` or `conversations` and no prompt; else rewards get the rows' own `answer`."""
    image_column: PromptForm[str | None] = None
    """Column with the pictures of the prompts: image files, their paths, or lists of these. Null:
    `images` or `image`, if its values are pictures. Empty (`data.image_column=`): none."""
    max_image_pixels: PromptForm[PositiveInt | None] = None
    """Largest size of a picture: one with more pixels is scaled down, by the setting that the
    model's processor has for that. Fewer pixels are fewer tokens. Null: the processor's own."""
    shuffle: bool = True
    """Visit the rows in a new random order every epoch, seeded by `runtime.seed`."""
    num_held_out: NonNegativeInt | None = None
    """Number of the data set's held-out problems that accuracy is measured on. Null: all; in a run
    on a mixture with rows of your own, none without `train.eval_every`."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens; in `easyrl eval` by default the preset's."""
    max_image_bytes: PositiveInt = 4 * 2**20
    """Largest size of the image files of a prompt, all together: in the ring buffer every slot has
    room for so many bytes, if prompts have pictures. Also of those that an episode shows
    (`rollout.takes_pictures`)."""
    long_prompts: Literal["stop", "skip"] = "stop"
    """Name a longer prompt and do not start (`stop`), or leave its row out (`skip`)."""
    chat_template: Compared[ChatTemplate | None] = None
    """Chat template (Jinja) for a model without one, or instead of its own: a file of which the
    text is kept, or the text. The trained model is saved with it. Null: the model's."""
    chat_template_kwargs: Compared[dict[str, Any]] = Field(default_factory=dict)
    """Variables for the model's chat template, as in {enable_thinking: false}."""

    @property
    def datasets(self) -> list[str]:
        return [self.dataset] if isinstance(self.dataset, str) else self.dataset

    @property
    def shown(self) -> str:
        return " + ".join(self.datasets)

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if not self._options_fit():
            expected = "expected {TASK: {OPTION: VALUE}} for tasks of reasoning_gym in"
            raise ValueError(f"data.options: {expected} {self.shown}, got {self.options}")
        num_datasets = len(self.datasets)
        weights = self.weights
        if weights and (len(weights) != num_datasets or min(weights) * 1000 < sum(weights)):
            raise ValueError(
                f"data.weights: expected one for each of {counted(num_datasets, 'data set')}, at "
                f"least a thousandth of their sum, got {weights}"
            )
        if isinstance(self.columns, list) and len(self.columns) != num_datasets:
            expected = f"expected a list of names for each of {counted(num_datasets, 'data set')}"
            raise ValueError(f"data.columns: {expected}, got {len(self.columns)}")
        return self

    def _options_fit(self) -> bool:
        """Return whether the options are those of a single task, or each names a task of `dataset`
        and has that task's options."""
        is_single_task = len(self.datasets) == 1 and self.datasets[0].startswith(REASONING_GYM)
        if is_single_task:
            return True
        for task, options in self.options.items():
            is_here = f"{REASONING_GYM}{task}" in self.datasets
            if not (is_here and isinstance(options, dict)):
                return False
        return True
