"""`edgespec`, as a console script and as `python -m edgespec`."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> int:
    """Run one command; returns the exit code. Ctrl-C is no error while the command line is imported, either."""
    try:
        from edgespec.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
