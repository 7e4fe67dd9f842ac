"""Token ids in, completions out: an engine knows no reward and no task."""
