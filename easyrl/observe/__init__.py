"""Observers of a run: events in, lines, pictures and files out."""
