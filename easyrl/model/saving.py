"""Save a policy as a Hugging Face folder."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from easyrl.model.kept_parts import KeptParts
from easyrl.model.pictures import tower_parameters
from easyrl.model.policy import Policy
from easyrl.model.sharding import whole


def save_policy(
    policy: Policy,
    folder: Path,
    tokenizer: Any,
    *,
    kept: KeptParts | None = None,
    is_writer: bool = True,
    dtype: str | None = None,
    names_in_float32: Collection[str] = (),
) -> None:
    """Write a Hugging Face folder, adapters merged, with what is `kept` of the model's own, which
    includes a frozen tower. All ranks call this; one `is_writer`. With `dtype` the weights are
    rounded to it, the policy's own too, but not those with `names_in_float32`."""
    model = policy.model
    rounded_to = None if dtype is None else getattr(torch, dtype)
    left_out = set[Tensor]()
    if policy.vision is not None and not policy.vision.is_trained:
        left_out.update(tower_parameters(model))  # `kept` has the frozen tower
    state: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}  # by id of the parameter: tied weights share one
    named = model.state_dict(keep_vars=True).items()
    written = [(name, tensor) for name, tensor in named if tensor not in left_out]
    for weight in policy.exported(written):
        parameter = id(weight.reference)
        if parameter not in gathered:
            values = whole(weight.materialize())
            if rounded_to is not None and weight.name not in names_in_float32:
                values = values.to(rounded_to)
            gathered[parameter] = values.cpu() if is_writer else values.new_empty(0)
        state[weight.name] = gathered[parameter]
    if is_writer:
        if rounded_to is not None:
            model.to(rounded_to)  # config.json names it
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
        if kept is not None:
            kept.write(folder)
