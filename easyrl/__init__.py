"""EasyRL: strictly on-policy reinforcement learning of language models at asynchronous speed."""

__version__ = "0.2.0.dev0"
