"""Those who watch a run: records in, lines, pictures and files out."""
