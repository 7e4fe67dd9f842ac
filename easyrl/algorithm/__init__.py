"""Pure functions of arrays and tensors: no I/O, no device, no config files."""
