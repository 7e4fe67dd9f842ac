"""Events in, pictures and files out."""
