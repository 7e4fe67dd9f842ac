"""The Python interface: `easyrl.train` and `easyrl.evaluate`."""
