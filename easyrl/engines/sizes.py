"""How much memory an engine takes, for the estimate before a run: this module imports no torch.

The sizes are the largest ones: prompts and completions have the greatest length allowed.
"""

from dataclasses import dataclass, replace

from easyrl.engines import (
    MAX_PREFILL_TOKENS,
    MAX_PREFIXES,
    SLOT_STEP,
    padded,
    row_cells,
    started_sequences,
)
from easyrl.model import FEATURES_BYTES
from easyrl.model.files import DTYPE_BYTES, FLOAT_BYTES, ModelSize
from easyrl.processes import MemoryNeed

SAMPLE_BYTES = 12  # of a logit while a token is drawn: also its score, and that exponentiated
SCORE_BYTES = 12  # of an attention score without a fused kernel: three float32 tensors
GROUPS_KEY = "rollout.max_concurrent_groups"
WEIGHTS_KEYS = "model.path, model.dtype, rollout.memory_fraction, train.offload"
CACHE_KEYS = f"{GROUPS_KEY}, rollout.num_generations, rollout.max_completion_length"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The sequences that an engine holds at a time, and how it computes them."""

    num_groups: int  # in flight
    num_generations: int
    max_prompt_length: int  # in tokens, as the next one
    max_completion_length: int
    dtype: str  # `model.dtype`
    is_on_cpu: bool
    has_graphs: bool = False  # its steps are captured as CUDA graphs
    is_evaluating: bool = False  # each sequence may have a prompt of its own
    has_episodes: bool = False  # tokens are inserted between the turns of a sequence
    has_branches: bool = False  # of an agent: each may be a new prompt, of any length

    @property
    def max_sequence_length(self) -> int:
        return self.max_prompt_length + self.max_completion_length

    @property
    def longest_prompt(self) -> int:
        return self.max_sequence_length if self.has_branches else self.max_prompt_length

    @property
    def num_rows(self) -> int:
        """Sequences that are decoded at a time."""
        return self.num_groups * self.num_generations

    @property
    def num_started(self) -> int:
        """Sequences in rows, and those that are ready for the next free rows."""
        return started_sequences(self.num_rows)

    @property
    def num_prompts_started(self) -> int:
        """Prompts of the sequences that have started, the shared prompt of a group counted once."""
        if self.has_branches or self.is_evaluating:
            return self.num_started
        return -(-self.num_started // self.num_generations)


def weights_needs(model: ModelSize, load: EngineLoad) -> list[MemoryNeed]:
    """Return what the weights of any engine need."""
    dtype_bytes = DTYPE_BYTES[load.dtype]
    weights = dtype_bytes * (model.num_weights + model.num_frozen_weights)
    needs = [MemoryNeed("weights", weights, WEIGHTS_KEYS, is_certain=True)]
    if model.num_frozen_weights:
        needs.append(MemoryNeed("features of pictures", FEATURES_BYTES))
    if model.num_trained is not None:  # LoRA: adapters are added to a copy
        bare = dtype_bytes * model.layer_weights
        key = "model.lora.target_modules"
        needs.append(MemoryNeed("weights without adapters", bare, key, is_certain=True))
    # Where nothing is converted, the pages of the files are shared, and the system can drop them.
    if not load.is_on_cpu and model.stored_dtype != load.dtype:
        needs.append(MemoryNeed("weights being loaded", weights, is_on_host=True))
    return needs


def embedded_needs(model: ModelSize, load: EngineLoad) -> list[MemoryNeed]:
    """Return what the embedded engine needs besides its weights and the buckets of new ones."""
    if not model.is_batched:  # `engines.generate` computes one group at a time
        load = replace(load, num_groups=1, has_graphs=False)
    step = logits_bytes(model, load) + score_bytes(model, load)
    cache = cache_tokens(model, load) * DTYPE_BYTES[load.dtype] * model.kv_elements
    needs = [
        MemoryNeed("KV cache", cache, CACHE_KEYS, is_certain=True),
        MemoryNeed("engine's step", step + prefill_bytes(model, load), GROUPS_KEY),
    ]
    if model.state_elements:
        num_states = load.num_rows + num_nodes(load)
        states = num_states * FLOAT_BYTES * model.state_elements
        needs.append(MemoryNeed("states", states, CACHE_KEYS, is_certain=True))
    if load.has_graphs:
        needs.append(MemoryNeed("CUDA graphs", step, GROUPS_KEY))
    is_plain_float32 = load.is_on_cpu and load.dtype == "float32"
    may_have_fused_decoder = is_plain_float32 and model.is_batched and not model.state_elements
    if may_have_fused_decoder:  # it keeps a copy of the weights in its own layout
        head_weights = model.vocabulary_size * model.width
        copied = FLOAT_BYTES * (model.layer_weights + head_weights)
        needs.append(MemoryNeed("weights for decoding", copied))
    return needs


def cache_tokens(model: ModelSize, load: EngineLoad) -> int:
    """Return how many tokens' keys and values the embedded engine's cache has room for."""
    if not model.is_batched:
        return load.num_rows * load.max_sequence_length
    row = row_cells(load.max_prompt_length, load.max_completion_length)
    return load.num_rows * row + num_nodes(load) * padded(load.longest_prompt)


def num_nodes(load: EngineLoad) -> int:
    """Return how many nodes the embedded engine's cache has room for."""
    # In training, the last completions of as many groups again may be in flight.
    num_prompts = min(load.num_started, 2 * load.num_prompts_started)
    num_nodes = num_prompts + MAX_PREFIXES
    if load.has_graphs:
        num_nodes = padded(num_nodes, SLOT_STEP)
    return num_nodes


def logits_bytes(model: ModelSize, load: EngineLoad) -> int:
    """Return what the logits of one step take while tokens are drawn from them, and those that are
    kept: of the token behind each prompt, where it may be asked for again."""
    num_bytes = load.num_started * model.vocabulary_size * SAMPLE_BYTES
    if load.has_branches:
        num_bytes += load.num_started * model.vocabulary_size * FLOAT_BYTES
    return num_bytes


def score_bytes(model: ModelSize, load: EngineLoad) -> int:
    """Return what the scores of one attention take where no kernel fuses them."""
    if load.is_on_cpu or not model.is_batched:
        return 0
    row = row_cells(load.max_prompt_length, load.max_completion_length)
    # Attention to prompts has as many rows for each of them.
    num_scores = load.num_rows * max(row, 2 * padded(load.longest_prompt))
    if load.has_episodes:  # inserted tokens are computed together
        num_scores = max(num_scores, MAX_PREFILL_TOKENS * row)
    if load.has_branches:  # the new tokens of one step may continue a long prompt
        num_scores = max(num_scores, MAX_PREFILL_TOKENS * padded(load.longest_prompt))
    return num_scores * SCORE_BYTES * model.num_heads


def prefill_bytes(model: ModelSize, load: EngineLoad) -> int:
    """Return what a layer allocates for the prompts that one step computes."""
    num_tokens = load.num_prompts_started * padded(load.longest_prompt)
    per_token = 2 * model.width + 3 * model.mlp_width
    return min(MAX_PREFILL_TOKENS, num_tokens) * DTYPE_BYTES[load.dtype] * per_token
