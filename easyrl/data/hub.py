"""The Hugging Face hub, and the names that `model.path` accepts.

The hub's client retries an unreachable hub for half a minute, so reachability is tested first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from easyrl.config import ConfigError

HUB_TIMEOUT_SECONDS = 5.0
BUILT_IN_MODELS = {
    name: Path(__file__).parent.parent / "model" / "built_in" / name.replace("-", "_")
    for name in ("tiny", "tiny-countdown")
}
KEY = "model.path (--model)"
FORMS = f"use {', '.join(BUILT_IN_MODELS)}, a Hugging Face model folder, or a hub id"


def resolve_model(path: str) -> str:
    """Return the folder of a built-in model or of a local one, or else `path` itself (a hub id).

    A built-in name is the built-in model here: commands have replaced it by the path of a local
    folder of that name, where there is one (`runtime.resume`).
    """
    folder = BUILT_IN_MODELS.get(path) or Path(path).expanduser()
    return str(folder) if folder.is_dir() else path


def describe_model(path: str) -> str:
    """Say which model `path` names, for the run's plan."""
    if path in BUILT_IN_MODELS:
        return f"model: {path} (built-in)"
    is_folder = Path(path).expanduser().is_dir()
    return f"model: the folder {path}" if is_folder else f"model: {path} (Hugging Face hub)"


def is_hub_id(path: str) -> bool:
    """Return whether `path` can be a hub id (`owner/name`, or an old one without an owner)."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path) is not None


def model_config_from_hub(repository: str) -> Path:
    """Return the model's `config.json`, downloaded or from the cache.

    Raises ConfigError, with the hub's own explanation, if it cannot be downloaded.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError

    if not hub_answers():
        cached = huggingface_hub.try_to_load_from_cache(repository, "config.json")
        if not isinstance(cached, str):
            raise ConfigError(
                f"{KEY}: '{repository}' is not a local folder, and the hub cannot be reached. "
                f"Check the name and the network (HF_ENDPOINT names a mirror); {FORMS}"
            )
        # Read everything else from the cache too, here and in the workers.
        os.environ["HF_HUB_OFFLINE"] = "1"
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        return Path(cached)
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        return Path(huggingface_hub.hf_hub_download(repository, "config.json", endpoint=endpoint))
    except (OSError, EntryNotFoundError) as error:
        # The client reports some HTTP errors as "not in the cache", with the real one as cause.
        cause = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
        why = " ".join(str(cause).split())
        is_gated = isinstance(cause, GatedRepoError)
        advice = "request access and log in (hf auth login, or HF_TOKEN)" if is_gated else FORMS
        raise ConfigError(f"{KEY}: '{repository}' cannot be downloaded: {why}; {advice}") from error


@contextmanager
def offline_unless_reachable() -> Iterator[None]:
    """Let `datasets` use the cache alone while the hub does not answer."""
    import datasets
    import huggingface_hub

    switches: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in switches]
    is_offline = any(before) or not hub_answers()
    try:
        for module in switches:
            module.HF_HUB_OFFLINE = is_offline
        yield
    finally:
        for module, value in zip(switches, before, strict=True):
            module.HF_HUB_OFFLINE = value


def hub_answers() -> bool:
    """Return whether the hub (or its mirror, HF_ENDPOINT) answers within HUB_TIMEOUT_SECONDS."""
    import huggingface_hub

    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        huggingface_hub.get_session().head(endpoint, timeout=HUB_TIMEOUT_SECONDS)
    except Exception:  # of httpx or httpx2, depending on the client's version
        return False
    return True
