"""Agents: programs that call an OpenAI-compatible endpoint, and are trained as they are."""
