"""Places, spawns, watches, stops: the runtime knows no tensor."""
