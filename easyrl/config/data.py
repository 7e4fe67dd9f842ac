"""Section `data` of the config: where prompts come from."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from easyrl.config.text import Section, each_once
from easyrl.formatting import counted

TEMPLATE_ARGUMENTS = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "padding",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
}
"""Arguments of `apply_chat_template` that EasyRL sets; they are not variables of the template."""


class DataConfig(Section):
    """Where prompts come from."""

    dataset: str | list[str] = "arithmetic"
    """A preset (`arithmetic`, `countdown`, `gsm8k`, `math`), a .jsonl, .csv or .parquet file, a
    folder of `save_to_disk`, or a hub id (`owner/name`, `owner/name:subset:split`); a list of them
    is mixed."""
    preset: str | None = Field(default=None, min_length=1)
    """A preset whose prompts, columns, reward and evaluation settings apply to rows of your own (a
    file, a folder, a hub id) that have its columns. Null: none."""
    weights: list[float] | None = None
    """Shares of a list of data sets, exact to a thousandth; null: equal shares."""
    prompt_column: str | None = Field(default=None, min_length=1)
    """Column with the prompt: a string, or chat messages. All other columns go to the rewards.
    Null: the preset's, else `prompt`."""
    prompt_template: str | None = None
    """Makes the prompt from the row's columns instead: "Solve: {question}"; {{ and }} are braces.
    Null: the preset's, else none."""
    system_prompt: str | None = None
    """System message before a prompt that has none; a string becomes a chat. Null: the preset's,
    else none."""
    chat: bool | None = None
    """Whether a prompt that is a string goes through the model's chat template as a user's message
    (true) or to the model as it is (false). Null: the preset's, else false unless there is a
    system_prompt."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns renamed for the rewards: {answer: solution} passes the column `solution` as the
    argument `answer`."""
    shuffle: bool = True
    """Visit the rows in a new random order every epoch, seeded by `runtime.seed`."""
    num_held_out: int | None = Field(default=None, ge=0)
    """Number of held-out problems that accuracy is measured on, where the preset has any; null: all
    of them."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Longest prompt in tokens; in `easyrl eval` by default the preset's."""
    long_prompts: Literal["stop", "skip"] = "stop"
    """What to do about a longer prompt: name it and do not start (`stop`), or leave its row out and
    count it (`skip`)."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the model's chat template, as in {enable_thinking: false}."""

    @property
    def datasets(self) -> list[str]:
        """`dataset` as a list, of one or several."""
        return [self.dataset] if isinstance(self.dataset, str) else self.dataset

    @property
    def shown(self) -> str:
        """`dataset` as one line of text."""
        return " + ".join(self.datasets)

    @field_validator("dataset", mode="before")
    @classmethod
    def _are_names(cls, value: Any) -> Any:
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(
                f"data.dataset: expected a data set, or a list of them as in [a, b], got {value!r}"
            )
        each_once("data.dataset", names)
        return value

    @model_validator(mode="after")
    def _one_weight_per_data_set(self) -> Self:
        if self.weights is None:
            return self
        if len(self.weights) != len(self.datasets):
            raise ValueError(
                "data.weights: expected one for each of "
                f"{counted(len(self.datasets), 'data set')}, got {self.weights}"
            )
        if min(self.weights) * 1000 < sum(self.weights) or min(self.weights) <= 0:
            raise ValueError(
                "data.weights: expected positive numbers, each at least a thousandth of their sum, "
                f"got {self.weights}"
            )
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_of_the_template(cls, value: dict[str, Any]) -> dict[str, Any]:
        if ours := sorted(TEMPLATE_ARGUMENTS & value.keys()):
            raise ValueError(
                "data.chat_template_kwargs: expected variables of the template, as in "
                f"{{enable_thinking: false}}, got {', '.join(ours)}, which EasyRL sets"
            )
        return value
