"""The command ``xla-ckpt``, and ``python -m xla_ckpt``."""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""Exit code after Ctrl-C: what a shell says of a program that SIGINT has ended."""


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        # Here, because Ctrl-C may come while it is imported, which takes longer than most commands.
        from xla_ckpt.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("xla-ckpt: interrupted\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
