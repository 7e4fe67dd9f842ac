"""The commands `easyrl` and `python -m easyrl`. This module is not in the package `easyrl`: another
project's package of that name may hide it, or have overwritten its first file."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Exits where nothing of it would work: on another system, with an older
    Python, or if the package `easyrl` is another project's."""
    if sys.platform != "linux":
        sys.exit(
            f"easyrl: expected Linux, got {sys.platform}: use a Linux machine, container or "
            "WSL 2 (docs/install.md)"
        )
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(f"easyrl: expected Python 3.11 or newer, got {sys.version.split()[0]}")
    try:
        from easyrl import DISTRIBUTION  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"easyrl: expected the package of easyrl-train, got {error.path or 'another one'}: "
            "pip uninstall easyrl, then pip install --force-reinstall --no-deps easyrl-train"
        )
    from easyrl.cli import main as run

    run()
