"""Section `train`."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from easyrl.config.section import (
    AS_LIST,
    EACH_ONCE,
    MayChange,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from easyrl.config.stopping import parse_condition


def _check_conditions(texts: list[str] | None) -> list[str] | None:
    for text in texts or ():
        parse_condition(text)
    return texts


StopConditions = Annotated[list[str] | None, AS_LIST, EACH_ONCE, AfterValidator(_check_conditions)]
HostMemoryParts = Annotated[list[Literal["reference", "old", "optimizer"]], EACH_ONCE]


class TrainConfig(Section):
    """Iterations and the optimizer: AdamW (betas 0.9 and 0.99, epsilon 1e-8, weight decay 0)."""

    iterations: MayChange[PositiveInt] = 60
    """Iterations of the run: weights out, groups in, `train.updates_per_iteration` steps."""
    prompts_per_iteration: PositiveInt = 16
    """Prompts, and so groups, per iteration."""
    updates_per_iteration: PositiveInt = 1
    """Optimizer steps per iteration, each on an equal share of its prompts. Only the first is
    strictly on-policy: the others train on rollouts of the policy before it."""
    learning_rate: MayChange[NonNegativeFloat | None] = None
    """Peak learning rate; null: 3e-4 for a built-in model, else 1e-6; with LoRA ten times that."""
    lr_scheduler_type: MayChange[Literal["constant", "linear", "cosine"]] = "linear"
    """Course of the learning rate after warm-up; linear and cosine fall to 0."""
    warmup_iterations: MayChange[NonNegativeInt] = 2
    """Iterations in which the learning rate rises linearly to its peak."""
    max_grad_norm: MayChange[PositiveFloat] = 1.0
    """The gradient's norm is clipped to this."""
    max_tokens_per_micro_batch: MayChange[PositiveInt | None] = None
    """Tokens trained at a time, those that sequences share counted once. It does not change the
    result. Null: 4096, or the longest prompt + completion if that is more; on accelerators up to
    32768 if its memory allows, unless the run is deterministic."""
    activation_checkpointing: MayChange[bool] = False
    """Compute each layer again in backward: the same result, far less memory, a third more time."""
    compile: MayChange[bool] = False
    """Compile the model's layers with torch.compile, which fuses their elementwise operations. The
    first iterations take seconds to minutes longer. On the CPU it needs a C++ compiler. Not for
    deterministic runs."""
    offload: MayChange[HostMemoryParts] = Field(default_factory=list)
    """List of what to keep in host memory, which costs time: weights of the `reference` (with
    algorithm.beta) and of the `old` policy (updates_per_iteration over 1); the `optimizer`, which
    then steps on the CPU, with gradients and the policy's float32 weights."""
    reshard: MayChange[Literal["auto"] | bool] = "auto"
    """Drop weights that train devices gathered as soon as a layer has computed, and sum gradients
    over the devices after each micro-batch. False: once per update, which is faster and takes the
    memory of the whole model and its gradient. Auto: false on accelerators where that fits."""
    save_every: MayChange[PositiveInt | None] = 10
    """Iterations between checkpoints; null: only the last iteration, also of a stopped run."""
    keep_checkpoints: MayChange[NonNegativeInt] = 2
    """Newest checkpoints to keep, each three times the trained weights; 0: none, no resuming."""
    eval_every: MayChange[NonNegativeInt] = 0
    """Iterations between evaluations on held-out problems (`eval.dataset`, `data.num_held_out`),
    whose best checkpoint is kept as checkpoints/best. 0: before the first and after the last."""
    stop_when: MayChange[StopConditions] = Field(default=None, min_length=1)
    """Condition on a metric, or a list of them of which one is enough, that ends the run as
    `easyrl stop` does: `eval/accuracy without a rise for 5` (values of it; `a rise of 0.01`: a
    smaller one does not count; also `a fall`), `reward >= 0.9`, `kl > 1 for 3` (in a row)."""
