"""The built-in models, which `examples/make_tiny.py` has trained."""
