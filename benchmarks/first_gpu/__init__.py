"""The first quarter of an hour on a GPU: `make first-gpu` (docs/devices.md)."""
