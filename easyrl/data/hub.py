"""The Hugging Face hub, and the names that `model.path` accepts."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from easyrl.config import ConfigError
from easyrl.config.hints import similar_file
from easyrl.config.model import BUILT_IN_MODELS as BUILT_IN_NAMES

HUB_TIMEOUT_SECONDS = 5.0
_BUILT_IN = Path(__file__).parent.parent / "model" / "built_in"
BUILT_IN_MODELS = {name: _BUILT_IN / name.replace("-", "_") for name in BUILT_IN_NAMES}
"""Name of a model that the package has -> its folder."""
KEY = "model.path (--model)"
_last_answer: bool | None = None
"""Last answer of `reach_hub` in this process; None: it was not asked."""
FORMS = f"use {', '.join(BUILT_IN_MODELS)}, a Hugging Face model folder, or a hub id"


class HubUnreachable(ConfigError):
    """Something on the hub is not in the cache and cannot be downloaded now."""


def resolve_model(path: str) -> str:
    """Return the folder of a built-in or local model, or `path` itself (a hub id). Commands have
    replaced a built-in name by the path of a local folder of that name (`runtime.resume`)."""
    folder = BUILT_IN_MODELS.get(path) or Path(path).expanduser()
    return str(folder) if folder.is_dir() else path


def loadable_model(path: str) -> str:
    """Return `resolve_model(path)`, or the hub's cached folder while the hub does not answer: its
    clients would retry for half a minute. Raises ConfigError if there is none."""
    path = resolve_model(path)
    if Path(path).is_dir():
        return path
    is_reachable = reach_hub() if _last_answer is None else _last_answer
    if is_reachable:
        return path
    return str(model_config_from_hub(path).parent)


def describe_model(path: str) -> str:
    """Describe the model that `path` names, for the run's plan."""
    kind = "folder" if Path(path).expanduser().is_dir() else "Hugging Face hub"
    return f"model: {path} ({'built-in' if path in BUILT_IN_MODELS else kind})"


def is_hub_id(path: str) -> bool:
    """Return whether `path` can be a hub id (`owner/name`, or an old one without an owner)."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path) is not None


def model_config_from_hub(repository: str) -> Path:
    """Return the model's `config.json`, downloaded or cached. Raises ConfigError without one."""
    path = Path(repository).expanduser()
    if path.is_file():
        raise ConfigError(f"{KEY}: '{repository}' is a file (GGUF files are quantized); {FORMS}")
    beside = similar_file(path, "*/")
    if not is_hub_id(repository):
        raise ConfigError(f"{KEY}: '{repository}' does not exist{beside}; {FORMS}")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    is_reachable = reach_hub()
    options: Any = {
        "endpoint": os.environ.get("HF_ENDPOINT"),
        "local_files_only": not is_reachable,
    }
    try:
        return Path(huggingface_hub.hf_hub_download(repository, "config.json", **options))
    except Exception as error:
        # The client reports some HTTP errors as "not in the cache", with the real one as cause.
        cause = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
        why = " ".join(str(cause).split()) if is_reachable else "the hub cannot be reached"
        raise ConfigError(
            f"{KEY}: '{repository}' is no local folder{beside} and cannot be "
            f"downloaded: {why}; check name, access (hf auth login) and network (HF_ENDPOINT names "
            f"a mirror); {FORMS}"
        ) from error


def model_folder(path: str) -> Path:
    """Return the folder with a model's files; for a hub id that of the hub's cache, to which files
    may still have to be downloaded."""
    folder = Path(resolve_model(path))
    return folder if folder.is_dir() else model_config_from_hub(path).parent


def download_small_files(path: str, patterns: Sequence[str]) -> None:
    """Download the files of a hub id that match the patterns, where the hub answers."""
    if Path(resolve_model(path)).is_dir() or not reach_hub():
        return
    import huggingface_hub

    endpoint = os.environ.get("HF_ENDPOINT")
    huggingface_hub.snapshot_download(path, allow_patterns=[*patterns], endpoint=endpoint)


def reach_hub() -> bool:
    """Return whether the hub (or its mirror, HF_ENDPOINT) answers within HUB_TIMEOUT_SECONDS."""
    global _last_answer  # noqa: PLW0603
    import huggingface_hub

    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        huggingface_hub.get_session().head(endpoint, timeout=HUB_TIMEOUT_SECONDS)
        _last_answer = True
    except Exception:  # of httpx or httpx2, depending on the client's version
        _last_answer = False
    return _last_answer
