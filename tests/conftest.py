"""Settings of all tests."""

import signal

from hypothesis import settings

settings.register_profile("easyrl", deadline=None)  # machines are noisy: time proves nothing here
settings.load_profile("easyrl")

# Where the tests run in the background (`&`) Ctrl-C is ignored, here and in every run that they
# start, which then never hears the one that a test sends.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
