"""Models as Hugging Face folders: those that a run writes, and those that evaluation loads.

Weights have checkpoint names. `--model` of an evaluation may name:

    built-in, folder, hub id   unchanged
    run folder                 its model/; for an unfinished run its newest checkpoint
    checkpoint                 exported     (`export_checkpoint`)
    adapter (peft's)           merged into the model that it was trained on, or trained further

Finding a model imports no torch; making one does.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

from easyrl.config import Config, ConfigError, load_config
from easyrl.config.model import DType, LoraConfig
from easyrl.config.spec import ModelSpec
from easyrl.data.hub import BUILT_IN_MODELS, KEY, loadable_model, model_folder, resolve_model
from easyrl.formatting import install_command
from easyrl.model import files
from easyrl.model.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    copy_adapter,
    read_adapter,
)
from easyrl.model.checkpoint_files import STATE, UNFINISHED, Checkpoint, find_checkpoint
from easyrl.model.weight_files import FLOAT32, read_headers, read_json

TRUST = "model.trust_remote_code"  # never taken from the files of a run, which may be another's
ADAPTER = "adapter"  # name of the adapter's folder beside a LoRA run's `model/`
MERGED = "merged_adapter"
"""Folder, in a model that was made of an adapter, with that adapter."""
CARD = "README.md"
CARD_MARK = "\n<!-- card of easyrl export, sha256 of the text above: "
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "params.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "tf_model*.h5",
    ADAPTER_CONFIG,
    "adapter_model*.bin",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model*",
    "tekken.json",
    "tiktoken.model",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "*processor_config.json",
    "quantize_config.json",
)
"""Patterns of the files that belong to a model: those that are removed when it is replaced. What
they match is lost, so they are narrow, but vLLM loads any safetensors file beside a model's own."""
MODEL_FOLDERS = (MERGED, "additional_chat_templates")

StrPath = str | os.PathLike[str]


class DiskError(ConfigError):
    """A model cannot be written, because the disk is full or read-only, for example."""


@contextmanager
def replace_folder(folder: Path, *, is_writer: bool = True, is_new: bool = False) -> Iterator[Path]:
    """Yield a path to write a model to. Afterwards it replaces the model in `folder`, which must
    not exist if `is_new`; what else is there stays. One of a sharded model's ranks `is_writer`.
    Raises DiskError."""
    from safetensors import SafetensorError

    folder = folder.resolve()
    new = _beside(folder)
    old = _beside(folder)
    try:
        yield new
        if is_writer:
            for file in new.glob("*.safetensors"):  # created with mode 0600 by the library
                shutil.copymode(next(new.glob("*config.json")), file)
            if folder.exists() and not is_new:
                _link_others(folder, new)
                folder.rename(old)
            new.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise DiskError(f"'{folder}' cannot be written: {error}") from error


def _beside(folder: Path) -> Path:
    """Return a path of its own beside `folder`, which is removed if it is left behind."""
    return folder.with_name(f"{folder.name}.{token_hex(4)}{UNFINISHED}")


def _link_others(folder: Path, new: Path) -> None:
    """Put what is in `folder` beside a model into the new folder, too. Links to the same files cost
    no time and no space, and `folder` has all of it until it is replaced. Raises OSError."""
    for entry in folder.iterdir():
        target = new / entry.name
        if _is_of_model(entry) or os.path.lexists(target):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target, symlinks=True, copy_function=_link)
        else:
            _link(entry, target)


def _is_of_model(entry: Path) -> bool:
    if entry.is_dir():
        return entry.name in MODEL_FOLDERS
    if entry.name == CARD:
        return not _has_own_card(entry.parent)
    return any(entry.match(pattern) for pattern in MODEL_FILES)


def _link(source: StrPath, target: StrPath) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # the file system has no such links
        shutil.copy2(source, target, follow_symlinks=False)


def _has_own_card(folder: Path) -> bool:
    """Return whether a folder has a model card that an export has not written as it is."""
    file = folder / CARD
    if not file.is_file():
        return False
    content = file.read_bytes()
    text, mark, _ = content.rpartition(CARD_MARK.encode())
    return not mark or content != _marked(text)


def _marked(card: bytes) -> bytes:
    """Return a card with its digest, which shows whether somebody has changed it."""
    return card + f"{CARD_MARK}{hashlib.sha256(card).hexdigest()} -->\n".encode()


def export_checkpoint(
    source: Path,
    folder: Path,
    *,
    trust: bool = False,
    force: bool = False,
    verify: bool = True,
    dtype: DType | Literal["own", "trained"] = "own",
    card: Callable[[Checkpoint], str | None] = lambda _: None,
) -> str:
    """Export a checkpoint, or the newest one of a run folder; return a message for the user.
    `trust`: run code that comes with the model; `force`: replace a model in `folder`, but not what
    else is there; `dtype` of the weights: `own` is that of the model's files, `trained` as in the
    run. Raises ConfigError."""
    if os.path.lexists(folder) and not (force and (folder / "config.json").is_file()):
        raise ConfigError(f"DIR: expected a new folder (or a model and --force), got '{folder}'")
    checkpoint = find_checkpoint(source, verify=verify)
    from easyrl.model.checkpoint import names_in, read_tensors
    from easyrl.model.loading import load_policy, picture_input
    from easyrl.model.saving import save_policy
    from easyrl.model.towers import find_kept_parts, has_tower_weights

    config = load_config(None, {**checkpoint.state["config"], TRUST: trust})
    model = config.model
    stored = files.read_loaded_files(model.path, trust_remote_code=trust)
    if not files.has_fingerprint(model.path, checkpoint.state["identity"]["model.path"]):
        raise ConfigError(
            f"model.path: the files of {model.path} have changed since the run of "
            f"'{checkpoint.path}' started; restore them"
        )
    spec = ModelSpec.of(config)
    tokenizer = files.tokenizer_of(spec)
    trained = "float32" if model.lora.rank is None else model.dtype  # as in the trainer
    if model.vision == "trained":
        model_config = files.model_config_of(spec)
        has_tower = has_tower_weights(model_config, names_in(checkpoint.path))
        spec = replace(spec, has_pictures=has_tower)
    policy = load_policy(
        model.path, trust_remote_code=trust, dtype=trained, pictures=picture_input(spec)
    )
    kept = find_kept_parts(model.path, policy.model)
    if model.lora.rank is not None:
        policy.add_adapter(model.lora, path=model.path, seed=config.runtime.seed)
    read_tensors(checkpoint.path, policy.model)
    chosen: str = dtype
    names_in_float32 = set[str]()
    if dtype == "own":
        chosen = stored.main_dtype
        for weight in read_headers(model_folder(model.path), is_whole=False).values():
            if weight.dtype == FLOAT32:
                names_in_float32.add(weight.name)
    elif dtype == "trained":
        chosen = trained
    sha256 = policy.weights_sha256()
    text = card(checkpoint)
    keeps_card = _has_own_card(folder)
    with replace_folder(folder, is_new=not force) as new:
        rounded_to = None if chosen == trained else chosen
        save_policy(
            policy,
            new,
            tokenizer,
            kept=kept,
            dtype=rounded_to,
            names_in_float32=names_in_float32,
        )
        if text is not None and not keeps_card:
            (new / CARD).write_bytes(_marked(text.encode(errors="replace")))
    message = (
        f"{checkpoint.path}, iteration {checkpoint.state['num_iterations']}, is exported to "
        f"{folder} in {chosen} (weights as trained: sha256 {sha256})"
    )
    if keeps_card:
        message += f"; {folder / CARD} is not as an export writes it, and is kept"
    return message


@dataclass(frozen=True, slots=True)
class ModelSource:
    kind: Literal["model", "checkpoint", "adapter", "continued"]
    """`adapter`: it is merged; `continued`: the run trains it further."""
    path: str  # the folder or hub id
    base: str  # the model with its configuration: itself, or the one it was trained from
    tokenizer: str = ""  # an adapter's folder, if it has a tokenizer of its own
    reason_for_new: str = ""  # why a run with LoRA merges an adapter, and trains a new one

    def describe(self, lora: LoraConfig) -> str:
        """Say what becomes of an adapter that a run with these settings starts from; "" for other
        models."""
        if self.kind == "continued":
            return f"the adapter {self.path} of {self.base} is trained further"
        if self.kind != "adapter":
            return ""
        text = f"the adapter {self.path} is merged into its base, {self.base}"
        adapter = read_adapter(Path(self.path))
        if lora.rank is None:
            further = f"to train it further: model.lora.rank={adapter.rank}"
            return f"{text}, and all weights of the merged model are trained ({further})"
        text += f", and a new one of rank {lora.rank} is trained on that: {self.reason_for_new}"
        if adapter.other_kind:
            return f"{text}; the new one fits only the merged model (RUN/inputs)"
        rank = adapter.largest_rank + lora.rank
        return f"{text}; RUN/adapter will have both, with rank {rank}, for the base"

    def identity(self) -> str:
        """Return an identity of the content, which changes if the files change."""
        text = files.fingerprint(self.base)
        generation = Path(resolve_model(self.base)) / "generation_config.json"
        if generation.is_file():  # it has end tokens
            text += generation.read_text()
        digest = hashlib.sha256(text.encode())
        if self.kind == "model":
            return digest.hexdigest()
        folder = Path(self.path)
        weights = STATE if self.kind == "checkpoint" else ADAPTER_WEIGHTS
        digest.update((folder / weights).read_bytes())
        digest.update(files.tokenizer_content(folder))
        if self.kind in ("adapter", "continued"):  # its factor; the base counts by its content
            settings = json.loads((folder / ADAPTER_CONFIG).read_text())
            settings["base_model_name_or_path"] = ""
            digest.update(json.dumps(settings).encode())
        return digest.hexdigest()

    def make(self, folder: Path, *, trust: bool = False) -> str:
        """Return a complete model's path, made in `folder` if necessary; of an adapter that is
        trained further, a copy of it. Raises ConfigError."""
        if self.kind == "model":
            return self.path
        if self.kind == "continued":
            if not folder.exists():
                copy_adapter(Path(self.path), folder)
        elif self.kind == "adapter" and not folder.exists():
            self._merge(folder)
        elif not folder.exists():
            # It is verified already.
            export_checkpoint(Path(self.path), folder, trust=trust, verify=False, dtype="trained")
        return str(folder)

    def made_bytes(self, num_weights: int, num_kept_bytes: int) -> int:
        """Return the size of the weights that `make` writes, of a model with so many elements that
        are loaded and so many bytes that are kept."""
        if self.kind in ("model", "continued"):
            return 0
        run = run_of(self.path) if self.kind == "checkpoint" else None
        is_lora = run is not None and run.model.lora.rank is not None
        dtype = run.model.dtype if run is not None and is_lora else "float32"
        return files.DTYPE_BYTES[dtype] * num_weights + num_kept_bytes

    def _merge(self, folder: Path) -> None:
        """Write the base model with the adapter merged, in float32, and the tokenizer."""
        from easyrl.model.towers import find_kept_parts

        tokenizer = files.load_tokenizer(self.tokenizer or self.base)
        try:
            base = self._load_base()
            kept = find_kept_parts(self.base, base)
            merged = self._merged(base, len(tokenizer))
        except Exception as error:  # of many types
            raise ConfigError(
                f"{KEY}: the adapter '{self.path}' cannot be merged into '{self.base}'; needed are "
                "the model that it was trained on (--base), and peft "
                f"({install_command('lora')}): {error!s:.500}"
            ) from error
        with replace_folder(folder) as new:
            merged.save_pretrained(new)
            tokenizer.save_pretrained(new)
            if kept is not None:
                kept.write(new)
            copy_adapter(Path(self.path), new / MERGED)

    def _load_base(self) -> Any:
        """Load the base model. Raises an error of any type."""
        import torch

        from easyrl.model.towers import model_class

        config = files.load_model_config(self.base)
        return model_class(config).from_pretrained(
            loadable_model(self.base), config=config, dtype=torch.float32
        )

    def _merged(self, base: Any, num_tokens: int) -> Any:
        """Return transformers' model with the adapter merged. `num_tokens`: of its tokenizer.
        Raises an error of any type."""
        import peft
        from safetensors.torch import load_file

        saved = load_file(Path(self.path) / ADAPTER_WEIGHTS)
        num_embeddings = _resize_embeddings(base, saved)
        if num_tokens > max(num_embeddings, len(files.load_tokenizer(self.base))):
            raise ValueError(f"{num_tokens} tokens, but {num_embeddings} embeddings")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old names
            warnings.filterwarnings("error", "Found missing adapter keys")
            model = peft.PeftModel.from_pretrained(base, self.path)
            unused = saved.keys() - peft.get_peft_model_state_dict(model).keys()
            for key in sorted(unused):
                if ".lora_" in key:
                    raise ValueError(f"it has no layer for {key}")
            return model.merge_and_unload()


def _resize_embeddings(model: Any, adapter: Mapping[str, Any]) -> int:
    """Resize a model's embeddings to those that an adapter's weights have, if they have any; return
    their number."""
    embedding = model.get_input_embeddings()
    [name] = (name for name, module in model.named_modules() if module is embedding)
    lengths = set[int]()
    for key, weight in adapter.items():
        if f".{name}." in key and key.endswith(".weight"):
            lengths.add(len(weight))
    resized = model.resize_token_embeddings(*lengths, mean_resizing=False)
    return int(resized.num_embeddings)


def find_model(path: str, base: str | None = None) -> ModelSource:
    """Find the model of `path`, or an adapter's (`base` if it names none). Raises ConfigError."""
    folder = Path(path).expanduser()
    is_folder = path not in BUILT_IN_MODELS and folder.is_dir()
    has_adapter = is_folder and (folder / ADAPTER_CONFIG).is_file()
    if has_adapter and not any(folder.glob("model*.safetensors")):
        return _adapter(folder, base)
    if base is not None:
        raise ConfigError(f"--base: '{path}' is no adapter (it has no {ADAPTER_CONFIG}); omit it")
    found = ModelSource("model", path, path)
    final_model = folder / "model"
    has_run = (folder / STATE).is_file() or (folder / "config.yaml").is_file()
    # A run has ended once its summary exists.
    if is_folder and final_model.is_dir() and (folder / "summary.json").is_file():
        found = ModelSource("model", str(final_model), str(final_model))
    elif is_folder and has_run:
        checkpoint = find_checkpoint(folder)
        trained_from = checkpoint.state["config"]["model"]["path"]
        found = ModelSource("checkpoint", str(checkpoint.path), trained_from)
    files.read_model_files(found.base, is_whole=False)  # a plan needs no weights; a run checks them
    return found


def run_of(path: str) -> Config | None:
    """Return the config of the run, or of the checkpoint's run, at `path`. It trusts no code."""
    folder = Path(path).expanduser()
    run = folder.parent.parent if (folder / STATE).is_file() else folder
    is_run = path not in BUILT_IN_MODELS and (run / "config.yaml").is_file()
    return load_config(run / "config.yaml", {TRUST: False}) if is_run else None


def _adapter(folder: Path, base: str | None) -> ModelSource:
    config = read_json(folder / ADAPTER_CONFIG)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(f"{KEY}: the adapter '{folder}' has no {ADAPTER_WEIGHTS}")
    further = (
        f"easyrl grpo --model MODEL model.lora.adapter={folder} model.lora.rank={config.get('r')}"
    )
    advice = (
        f"name the model ({further}; easyrl eval --base MODEL), write its path into "
        f"{ADAPTER_CONFIG}, or use the model/ folder of the adapter's run"
    )
    base = base or config.get("base_model_name_or_path")
    if not base:
        raise ConfigError(
            f"{KEY}: the adapter '{folder}' does not name the model that it was trained on "
            f"(base_model_name_or_path in {ADAPTER_CONFIG}); {advice}"
        )
    try:
        files.read_model_files(base)
    except ConfigError as error:
        raise ConfigError(
            f"{KEY}: '{base}', on which the adapter '{folder}' was trained, cannot be read; "
            f"{advice}\n{error}"
        ) from None
    tokenizer = str(folder) if files.tokenizer_content(folder) else ""
    return ModelSource("adapter", str(folder), base, tokenizer)
