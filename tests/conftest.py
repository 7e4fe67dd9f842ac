"""Settings of all tests."""

import signal

from hypothesis import settings

settings.register_profile("easyrl", deadline=None)  # machines are noisy: time proves nothing here
settings.load_profile("easyrl")

# Where the tests run in the background (`&`, nohup) these signals are ignored, here and in every
# run that they start, which then never hears the ones that a test sends.
for signum in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(
            signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
        )
