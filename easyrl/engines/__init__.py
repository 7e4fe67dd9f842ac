"""Token ids in, completions out: an engine knows no reward and no task. The sizes of the embedded
engine are here for the memory estimate, which imports no torch."""

MAX_PREFILL_TOKENS = 2048  # per step, unless one prompt is longer: bounds a step's delay
COPIED_TOKENS = 64  # longest prompt that is copied to its rows: measured on one core, demo's model
MIN_PREFIX_TOKENS = 32  # shortest beginning of several prompts that is computed once
MIN_TOKENS_OF_LEVEL = 256  # the same, where rows then attend to one node more at every token
MAX_PREFIXES = 4  # beginnings that are stored at a time: bounds the memory
CELLS = 16
"""Rows and prompts take a multiple of this many tokens in the KV cache: kernels are faster then."""
SLOT_STEP = 4  # prompts are allocated in multiples of this many where steps are captured as graphs


def padded(number: int, step: int = CELLS) -> int:
    """Round up to a multiple of `step`: by default, to the cells of a row or prompt."""
    return -(-number // step) * step


def row_cells(max_prompt_length: int, max_completion_length: int) -> int:
    """Return the cells of a row: a completion, and a prompt that is copied."""
    return padded(max_completion_length + min(max_prompt_length, COPIED_TOKENS))


def started_sequences(num_rows: int) -> int:
    """Return how many sequences are in rows or ready to start, at most about."""
    return num_rows + max(1, num_rows // 4)
