"""Prompts to token ids, with the arrays of their pictures where a run has such.

run without pictures    tokenizer with its chat template (`data.chat`)
run with pictures       the checkpoint's processor (`processor`), also for prompts without one
"""

from collections.abc import Mapping, Sequence
from typing import Any

from easyrl.config import ConfigError
from easyrl.config.spec import ModelSpec
from easyrl.data.chat import NO_CHAT_TEMPLATE, refusal_of, render_prompt
from easyrl.data.hub import KEY
from easyrl.data.picture_columns import KEY as COLUMN_KEY
from easyrl.data.pictures import PictureSize
from easyrl.model.files import tokenizer_of
from easyrl.model.processor import Processor, Rendered, load_processor
from easyrl.types import Messages, Picture, PromptMedia

FAMILIES = (
    "Qwen2.5-VL, Qwen3-VL, Qwen3.5, Gemma 3, Gemma 4, SmolVLM, Idefics 3, InternVL, LLaVA, "
    "Mistral 3 and LFM2-VL"
)
"""Models that understand pictures, for an error."""


class PromptRenderer:
    """Renders prompts by the tokenizer of a model, or by its processor if a run has pictures."""

    def __init__(self, model: ModelSpec, tokenizer: Any, path: str = "") -> None:
        """`path`: where the processor is, by default that of the model. Raises ConfigError if the
        run has pictures, and the model understands none."""
        self.tokenizer = tokenizer
        self.processor: Processor | None = None
        if model.has_pictures:
            self.processor = _load(model, path or model.path)
            if not tokenizer.chat_template:  # older checkpoints have it in a file of the processor
                tokenizer.chat_template = self.processor.chat_template or None

    @classmethod
    def of(cls, model: ModelSpec, path: str = "") -> "PromptRenderer":
        """Load the tokenizer, and the processor if the run has pictures. Raises ConfigError."""
        return cls(model, tokenizer_of(model, path), path)

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Tokens that stand for parts of pictures, and may be in no text; empty in other runs."""
        return frozenset() if self.processor is None else self.processor.placeholder_ids

    def render(
        self,
        content: str | Messages,
        pictures: Sequence[Picture] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Render a prompt. `variables` go to the chat template. Raises ConfigError if it cannot be
        rendered (`data.chat.render_prompt`, `Processor.render`)."""
        processor = self.processor
        if processor is None or isinstance(content, str):
            if processor is not None:
                processor.check_texts(content)
            return Rendered(render_prompt(content, self.tokenizer, variables), PromptMedia((), {}))
        template = self._template()
        try:
            return processor.render(content, pictures, variables, template)
        except Exception as error:  # a template is a program and may raise anything
            raise refusal_of(error) from error

    def length(
        self,
        content: str | Messages,
        sizes: Sequence[PictureSize] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> int:
        """Return the number of tokens of a prompt with pictures of these sizes. Raises as
        `render`."""
        processor = self.processor
        if processor is None or isinstance(content, str):
            return len(self.render(content, (), variables).token_ids)
        template = self._template()
        try:
            return processor.length(content, sizes, variables, template)
        except Exception as error:  # of a template
            raise refusal_of(error) from error

    def _template(self) -> str:
        template = self.tokenizer.chat_template
        if not template:
            raise ConfigError(NO_CHAT_TEMPLATE)
        return str(template)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return all tokens as text. A run of placeholders is one, with its length behind it; ids
        of pictures (`engines.shown`) are placeholders, too."""
        if not self.placeholder_ids:
            return str(self.tokenizer.decode(token_ids))
        placeholder_id = min(self.placeholder_ids)
        token_ids = [placeholder_id if token < 0 else token for token in token_ids]
        texts = []
        start = 0
        while start < len(token_ids):
            stop = start + 1
            is_placeholder = token_ids[start] in self.placeholder_ids
            while stop < len(token_ids) and (
                (token_ids[stop] in self.placeholder_ids) == is_placeholder
            ):
                stop += 1
            if is_placeholder:
                texts.append(f"{self.tokenizer.decode([token_ids[start]])}[x{stop - start}]")
            else:
                texts.append(self.tokenizer.decode(token_ids[start:stop]))
            start = stop
        return "".join(texts)


def _load(model: ModelSpec, path: str) -> Processor:
    processor = load_processor(
        path,
        max_image_pixels=model.max_image_pixels,
        trust_remote_code=model.trust_remote_code,
    )
    if processor is None:
        raise sees_nothing(model.path)
    return processor


def sees_nothing(path: str) -> ConfigError:
    """Return the error of a run with pictures whose model is for text alone."""
    return ConfigError(
        f"{KEY}: expected a model that understands pictures, because prompts of the data have "
        f"some, or rollout.takes_pictures is true, got the text model '{path}'; use one of "
        f"{FAMILIES}, or train on the texts alone with {COLUMN_KEY}= (empty)"
    )
