"""Section `train`."""

from typing import Annotated, Literal

from pydantic import Field

from easyrl.config.section import EACH_ONCE, MAY_CHANGE, Section


class TrainConfig(Section):
    """Iterations and the optimizer: AdamW (betas 0.9 and 0.99, epsilon 1e-8, weight decay 0)."""

    iterations: Annotated[int, MAY_CHANGE] = Field(default=60, ge=1)
    """Iterations of the run: weights out, groups in, `train.updates_per_iteration` steps."""
    prompts_per_iteration: int = Field(default=16, ge=1)
    """Prompts, and so groups, per iteration."""
    updates_per_iteration: int = Field(default=1, ge=1)
    """Optimizer steps per iteration, each on an equal share of its prompts. Only the first is
    strictly on-policy: the others train on rollouts of the policy before it."""
    learning_rate: Annotated[float | None, MAY_CHANGE] = Field(default=None, ge=0.0)
    """Peak learning rate; null: 3e-4 for a built-in model, else 1e-6; with LoRA ten times that."""
    lr_scheduler_type: Annotated[Literal["constant", "linear", "cosine"], MAY_CHANGE] = "linear"
    """Course of the learning rate after warm-up; linear and cosine fall to 0."""
    warmup_iterations: Annotated[int, MAY_CHANGE] = Field(default=2, ge=0)
    """Iterations in which the learning rate rises linearly to its peak."""
    max_grad_norm: Annotated[float, MAY_CHANGE] = Field(default=1.0, gt=0.0)
    """The gradient's norm is clipped to this."""
    max_tokens_per_micro_batch: Annotated[int | None, MAY_CHANGE] = Field(default=None, ge=1)
    """Tokens trained at a time, those that sequences share counted once. It does not change the
    result. Null: 4096, or the longest prompt + completion if that is more; on accelerators up to
    32768 if its memory allows, unless the run is deterministic."""
    activation_checkpointing: Annotated[bool, MAY_CHANGE] = False
    """Compute each layer again in backward: the same result, far less memory, a third more time."""
    compile: Annotated[bool, MAY_CHANGE] = False
    """Compile the model's layers with torch.compile, which fuses their elementwise operations. The
    first iterations take seconds to minutes longer. On the CPU it needs a C++ compiler. Not for
    deterministic runs."""
    offload: Annotated[list[Literal["reference", "old", "optimizer"]], EACH_ONCE, MAY_CHANGE] = (
        Field(default_factory=list)
    )
    """List of what to keep in host memory, which costs time: weights of the `reference` (with
    algorithm.beta) and of the `old` policy (updates_per_iteration over 1); the `optimizer`, which
    then steps on the CPU, with gradients and the policy's float32 weights."""
    reshard: Annotated[Literal["auto"] | bool, MAY_CHANGE] = "auto"
    """Drop weights that train devices gathered as soon as a layer has computed, and sum gradients
    over the devices after each micro-batch. False: once per update, which is faster and takes the
    memory of the whole model and its gradient. Auto: false on accelerators where that fits."""
    save_every: Annotated[int | None, MAY_CHANGE] = Field(default=10, ge=1)
    """Iterations between checkpoints; null: only the last iteration, also of a stopped run."""
    keep_checkpoints: Annotated[int, MAY_CHANGE] = Field(default=2, ge=0)
    """Newest checkpoints to keep, each three times the trained weights; 0: none, no resuming."""
    eval_every: Annotated[int, MAY_CHANGE] = Field(default=0, ge=0)
    """Iterations between evaluations on held-out problems (`eval.dataset`, `data.num_held_out`),
    whose best checkpoint is kept as checkpoints/best. 0: before the first and after the last."""
