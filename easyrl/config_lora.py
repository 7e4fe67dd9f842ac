"""The settings of LoRA: the section `model.lora` of the config. Floor 0: no torch."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from easyrl.config_text import Section


class LoraConfig(Section):
    """LoRA: train small adapters beside the linear layers instead of the model's own weights. Needs
    peft: pip install 'easyrl[lora]'. There is no dropout: engines sample without, so that the
    policy that is trained would be another one. Adapters and frozen weights are kept in float32."""

    rank: int | None = Field(default=None, ge=1)
    """Rank of the adapters; null: no LoRA, all weights are trained."""
    alpha: int | None = Field(default=None, ge=1)
    """An adapter's output is multiplied by alpha / rank; null: twice the rank."""
    target_modules: list[str] | None = Field(default=None, min_length=1)
    """Linear layers that get an adapter, a list of names or ends of names (`[q_proj, v_proj]`);
    null: all of them, the head excepted."""

    @field_validator("target_modules")
    @classmethod
    def _names_each_once(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and (len(set(value)) < len(value) or "" in value):
            raise ValueError(f"model.lora.target_modules: {value} came; accepted: names, each once")
        return value

    @model_validator(mode="after")
    def _rank_turns_it_on(self) -> Self:
        if self.rank is None:
            for key in ("alpha", "target_modules"):
                if (value := getattr(self, key)) is not None:
                    raise ValueError(
                        f"model.lora.{key}: {value} came, but without a rank there is no LoRA; "
                        "accepted: model.lora.rank=16, or another, beside it"
                    )
        return self

    @property
    def resolved_alpha(self) -> int:
        """`alpha`, the default resolved, where there is a rank."""
        assert self.rank is not None
        return 2 * self.rank if self.alpha is None else self.alpha
