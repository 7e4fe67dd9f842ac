"""Workers on a Ray cluster (`--infer-devices ray:16`). The extra `ray` installs what it needs."""
