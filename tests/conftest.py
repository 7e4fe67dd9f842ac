"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("easyrl", deadline=None)  # machines are noisy: time proves nothing here
settings.load_profile("easyrl")
