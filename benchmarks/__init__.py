"""For development, in a checkout of the repository only: suites of `easyrl bench`."""
