"""`easyrl bench SUITE`: `run` of a suite yields a row of figures for everything it measures."""
