"""Section `rollout` of the config: how completions are sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from easyrl.config.section import EACH_ONCE, Section


class RolloutConfig(Section):
    """How completions are sampled."""

    num_generations: int = Field(default=8, ge=2)
    """Completions per prompt: the group whose rewards are compared."""
    max_completion_length: int = Field(default=256, ge=1)
    """Longest completion in tokens; a longer one is cut off."""
    stop: Annotated[list[str], EACH_ONCE] = Field(default_factory=list)
    """Strings that end a completion, as in ["\\n\\n", END]: after the token with which its text
    first contains one. The stop string's own tokens stay: they are trained, and rewards see them.
    """
    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature, of generation and of the trained distribution alike."""
    top_k: int = Field(default=0, ge=0)
    """Sample only from this many most probable tokens; 0: all. Other values make sampling differ
    from the trained distribution."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample only from the most probable tokens with this sum of probabilities; 1: all. Other
    values make sampling differ from the trained distribution."""
    max_concurrent_groups: int | None = Field(default=None, ge=1)
    """Groups in flight per engine: more make it efficient, fewer finish one after another; null:
    chosen from `train.prompts_per_iteration`."""
    ring_slots: int | None = Field(default=None, ge=1)
    """Finished groups that the ring buffer holds; null: `train.prompts_per_iteration`."""
    engine: Literal["auto", "embedded", "vllm"] = "auto"
    """Inference engine: `vllm`, or EasyRL's own engine over transformers' model code (`embedded`).
    `auto`: vLLM on accelerators where a suitable one is installed; the run prints which."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that one vLLM engine spans: a divisor of their number."""
    memory_fraction: float | None = Field(default=None, gt=0.0, le=1.0)
    """Fraction of its accelerator's memory that a rollout worker may take for weights and KV cache.
    Null: 0.9, or 0.5 of an accelerator that it shares with a train worker."""

    @property
    def processors(self) -> dict[str, Any]:
        """The keys besides the temperature that change the sampled distribution."""
        neutral = {"top_k": 0, "top_p": 1.0}
        return {key: value for key, value in self if value != neutral.get(key, value)}
