"""The planner: rates of an iteration from recorded events, and throughput of splits of devices."""
