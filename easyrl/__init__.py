"""EasyRL: strictly on-policy reinforcement learning of language models at asynchronous speed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

DISTRIBUTION = "easyrl-train"
"""Name on the package index, where `easyrl` is another project."""
__version__ = "0.2.0.dev0"
__all__ = ["Evaluation", "Run", "__version__", "evaluate", "train"]

if TYPE_CHECKING:
    from easyrl.api.calls import Evaluation, Run, evaluate, train


def __getattr__(name: str) -> Any:
    """Load the Python interface on first use: `import easyrl` imports no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'easyrl' has no attribute '{name}'")
    return getattr(import_module("easyrl.api.calls"), name)
