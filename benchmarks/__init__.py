"""For development, in a checkout of the repository only: suites of `easyrl bench`, and `make_tiny`,
which trains the built-in models."""
