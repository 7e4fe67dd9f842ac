"""Text in, numbers out: no engine, no trainer."""
