"""Section `model`, with `model.lora`."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from easyrl.config.section import (
    EACH_ONCE,
    Compared,
    MayChange,
    NamesFiles,
    NonEmptyStr,
    PositiveInt,
    Section,
)

AttentionMode = Literal["auto", "without_flex", "shared_prompt", "repeated"]
VisionMode = Literal["frozen", "trained"]
SHORT = {"bf16": "bfloat16", "fp32": "float32"}
DType = Annotated[
    Literal["float32", "bfloat16"], BeforeValidator(lambda text: SHORT.get(str(text), text))
]
BUILT_IN_MODELS = ("tiny", "tiny-hybrid", "tiny-vision", "tiny-countdown", "tiny-guess")
"""Names of the models that the package has (`data.hub` knows their folders)."""


class LoraConfig(Section):
    """LoRA: train small adapters beside the linear layers instead of the model's own weights.
    Needs peft: pip install 'easyrl-train[lora]'. Without dropout, as engines sample without it."""

    rank: PositiveInt | None = None
    """Rank of the adapters; null: no LoRA, all weights are trained."""
    alpha: PositiveInt | None = None
    """An adapter's output is multiplied by alpha / rank; null: twice the rank."""
    target_modules: Annotated[list[str] | None, EACH_ONCE] = Field(default=None, min_length=1)
    """Linear layers to adapt, by the ends of their names ([q_proj]); null: all except the head."""
    adapter: NamesFiles[NonEmptyStr | None] = None
    """Folder of an adapter of `model.path`, in peft's format, to train further instead of a new
    one; null: a new one. `--model ADAPTER` sets it, if rank, alpha and layers are the adapter's."""

    @model_validator(mode="after")
    def _has_rank(self) -> Self:
        for key in ("alpha", "target_modules", "adapter"):
            value = getattr(self, key)
            if self.rank is None and value is not None:
                raise ValueError(f"model.lora.{key}: expected model.lora.rank too, got {value}")
        return self


class ModelConfig(Section):
    """The policy that is trained."""

    path: NamesFiles[NonEmptyStr] = "tiny"
    """A Hugging Face folder, a hub id, or a built-in model (`tiny`, `tiny-hybrid`,
    `tiny-vision`, `tiny-countdown`, `tiny-guess`). Its weights must not be quantized."""
    dtype: Compared[DType] = "float32"
    """Data type of the computation. The trainer keeps trained weights, sums of gradients, optimizer
    state and log-probabilities in float32."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""
    attention: MayChange[AttentionMode] = "auto"
    """Train a group's prompt once for all completions (`shared_prompt`) or once for each
    (`repeated`), with the same result. `auto`: shared where the model's layers support it.
    `without_flex`: as `auto`, but FlexAttention is not used, which is slower on NVIDIA GPUs."""
    vision: VisionMode = "frozen"
    """What becomes of the tower of a model that reads pictures, if prompts have some. `frozen`: it
    stays as it is, and encodes a picture once for all models and groups that show it. `trained`: it
    is trained too, and encodes once for each group."""
    lora: LoraConfig = LoraConfig()
