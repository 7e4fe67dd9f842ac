"""EasyRL: strictly on-policy reinforcement learning of language models at asynchronous speed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

DISTRIBUTION = "easyrl-train"  # name on the package index, where `easyrl` is another project
__version__ = "0.2.0.dev0"
__all__ = ["Callback", "Config", "ConfigError", "Evaluation", "LossInputs", "LossOutputs", "Run"]
__all__ += ["__version__", "evaluate", "train"]

if TYPE_CHECKING:
    from easyrl.algorithm.losses import LossInputs, LossOutputs
    from easyrl.api.callbacks import Callback
    from easyrl.api.calls import Evaluation, Run, evaluate, train
    from easyrl.config import Config, ConfigError


def __getattr__(name: str) -> Any:
    """Load the Python interface on first use: `import easyrl` imports no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'easyrl' has no attribute '{name}'")
    module = "algorithm.losses" if name.startswith("Loss") else "api.calls"
    return getattr(import_module(f"easyrl.{module}"), name)
