"""Reward models: sequence classifiers of transformers that score a prompt with its completion.

Each rollout worker has one process for all of them (`rewards.pool`), which alone loads torch. There
`score` is called as a reward function: a group is one batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from easyrl.config import ConfigError
from easyrl.config.spec import RewardSpec
from easyrl.devices import CONTEXT_BYTES, TORCH_BYTES, accelerator
from easyrl.model.files import (
    DTYPE_BYTES,
    load_part,
    max_positions,
    model_size,
    read_model_files,
)
from easyrl.processes import MemoryNeed
from easyrl.rewards.loading import KEY
from easyrl.types import Messages, Prompt

LABEL_KEY = "reward.model_label"
DEVICE_KEY = "reward.model_device"
CLASSIFIER = "ForSequenceClassification"


class _Loaded(NamedTuple):
    model: Any
    tokenizer: Any


_loaded: dict[str, _Loaded] = {}  # by path


def check_reward_models(rewards: RewardSpec, example: Prompt | None) -> None:
    """Check what can be known of the reward models without their weights. Raises ConfigError."""
    label = rewards.options.model_label
    is_configured = label is not None or rewards.options.model_device != "cpu"
    if is_configured and not rewards.models:
        raise ConfigError(f"{LABEL_KEY}, {DEVICE_KEY}: expected a reward model in {KEY}, got none")
    for path in rewards.models:
        names = read_model_files(path, KEY).config.get("architectures") or ["none"]
        if not all(name.endswith(CLASSIFIER) for name in names):
            expected = f"expected a model with the architecture ...{CLASSIFIER} (config.json)"
            raise ConfigError(f"{KEY}: {expected}, got {', '.join(names)} in '{path}'")
        labels = _load(rewards, path, "AutoConfig", "configuration").id2label
        if len(labels) > 1 and (label is None or label >= len(labels)):
            raise ConfigError(
                f"{LABEL_KEY}: expected which of the labels of '{path}' is the score, 0 to "
                f"{len(labels) - 1} ({labels}), got {label}"
            )
        tokenizer = _load(rewards, path, "AutoTokenizer", "tokenizer")
        is_chat = example is not None and not isinstance(example.content, str)
        if is_chat and not tokenizer.chat_template:
            raise ConfigError(
                f"{KEY}: expected a reward model with a chat template, because the prompts are "
                f"chats, got none in '{path}' (data.chat=false makes strings of them)"
            )


def score(
    rewards: RewardSpec,
    path: str,
    /,
    prompts: Sequence[str | Messages],
    completions: Sequence[str | Messages],
    **_: Any,
) -> list[float]:
    """Return the logit of the label for each prompt with its completion. Chats are written with the
    model's own template. Strings are joined, and get the tokenizer's special tokens."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    if path not in _loaded:
        _loaded[path] = _load_model(rewards, path)
    model, tokenizer = _loaded[path]
    rows = list[torch.Tensor]()
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = _encode(tokenizer, prompt, completion)
        rows.append(torch.tensor(ids))
    longest = max(map(len, rows), default=0)
    most = max_positions(model.config.to_dict())
    if most is not None and longest > most:
        raise ValueError(f"expected at most {most} tokens of prompt and completion, got {longest}")
    padding = model.config.pad_token_id
    batches = [[row] for row in rows]
    # transformers finds the last token of a padded row by the pad token.
    if rows and padding is not None:
        batches = [rows]
    label = rewards.options.model_label if model.config.num_labels > 1 else 0
    scores = list[float]()
    for batch in batches:
        batch_ids = pad_sequence(batch, batch_first=True, padding_value=padding or 0)  # [B, T]
        mask = pad_sequence([torch.ones_like(row) for row in batch], batch_first=True)
        on_device = {
            "input_ids": batch_ids.to(model.device),
            "attention_mask": mask.to(model.device),
        }
        with torch.inference_mode():
            logits = model(**on_device).logits  # [B, labels]
        scores += logits[:, label].tolist()
    return scores


def _encode(tokenizer: Any, prompt: str | Messages, completion: str | Messages) -> list[int]:
    if isinstance(prompt, str):
        whole = tokenizer(f"{prompt}{completion}")
        return list(whole["input_ids"])
    messages: list[Any] = [*prompt, *completion]
    last_of_prompt: Any = prompt[-1]
    if last_of_prompt["role"] in ("assistant", "model"):  # the beginning of the answer
        first: Any = completion[0]
        content = last_of_prompt["content"] + first["content"]
        answer = {**first, "content": content}
        messages = [*prompt[:-1], answer, *completion[1:]]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    rendered = tokenizer(text, add_special_tokens=False)  # the template writes them
    return list(rendered["input_ids"])


def _load_model(rewards: RewardSpec, path: str) -> _Loaded:
    """Load model and tokenizer onto the device, which is the only one that this process sees."""
    import torch

    if rewards.is_deterministic:  # how sums are split between threads changes their bits
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
    is_on_cpu = rewards.options.model_device == "cpu"
    device = "cpu" if is_on_cpu else accelerator(is_asked=True)[0]
    if device == "cpu" and not is_on_cpu:
        raise ConfigError(f"{DEVICE_KEY}: torch cannot use the device in a process of its own")
    tokenizer = _load(rewards, path, "AutoTokenizer", "tokenizer")
    model = _load(rewards, path, f"AutoModel{CLASSIFIER}", "model", dtype="auto")
    model = model.to(device).eval()
    padding = model.config.pad_token_id
    if padding is None or padding < 0:
        model.config.pad_token_id = tokenizer.pad_token_id
    return _Loaded(model, tokenizer)


def _load(rewards: RewardSpec, path: str, auto_class: str, what: str, **options: Any) -> Any:
    import transformers

    options["trust_remote_code"] = rewards.trust_remote_code
    return load_part(getattr(transformers, auto_class), what, path, KEY, **options)


def reward_model_needs(
    paths: Sequence[str], *, num_tokens: int, is_on_cpu: bool
) -> list[MemoryNeed]:
    """Return what the process of one rollout worker's reward models takes. `num_tokens`: of the
    largest group, which is one batch."""
    weights_bytes = 0
    batch_bytes = 0
    for path in paths:
        files = read_model_files(path, KEY)
        dtype_bytes = DTYPE_BYTES["float32" if files.main_dtype == "float32" else "bfloat16"]
        weights_bytes += dtype_bytes * (files.num_weights or 0)
        size = model_size(files.config, 0)
        if size is not None:
            per_token = 4 * size.width + 3 * size.mlp_width
            batch_bytes = max(batch_bytes, dtype_bytes * num_tokens * per_token)
    keys = f"{KEY}, {DEVICE_KEY}"
    return [
        MemoryNeed("Python and torch", TORCH_BYTES if is_on_cpu else CONTEXT_BYTES),
        MemoryNeed("reward models", weights_bytes, keys, is_certain=True),
        MemoryNeed("their batch", batch_bytes),
    ]
