"""`easyrl eval`: plan, answer what is not answered yet, summarize, compare. Nothing is trained."""
