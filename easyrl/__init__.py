"""EasyRL: strictly on-policy reinforcement learning of language models at asynchronous speed."""

__version__ = "0.1.0"
