"""The built-in models, which `benchmarks/make_tiny.py` has trained."""
