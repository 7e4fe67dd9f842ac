"""The commands `easyrl` and `python -m easyrl`. This module is not in the package `easyrl`: another
project's package of that name may hide it, or have overwritten its first file."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Exits if the package `easyrl` is another project's."""
    try:
        from easyrl import DISTRIBUTION  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"easyrl: expected the package of easyrl-train, got {error.path or 'another one'}: "
            "pip uninstall easyrl, then pip install --force-reinstall --no-deps easyrl-train"
        )
    from easyrl.cli import main as run

    run()
