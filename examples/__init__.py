"""A tutorial as a notebook, and the program that trained the built-in models."""
