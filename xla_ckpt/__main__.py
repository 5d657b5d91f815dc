"""The command ``xla-ckpt``, and ``python -m xla_ckpt``."""

from __future__ import annotations

import contextlib
import io
import os
import sys

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C: what a shell says of a program that SIGINT has ended."""


def main() -> int:
    """Run the command line; returns the exit code."""
    open_closed_streams()
    try:
        # Here, because Ctrl-C may come while it is imported, which takes longer than most commands.
        from xla_ckpt.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("xla-ckpt: interrupted\n")
        return EXIT_INTERRUPTED


def open_closed_streams() -> None:
    """Prepare the standard streams of a process that is only for the command line.

    Streams that are closed (``2>&-``; Python has None for them) are opened at /dev/null, or a file of a checkpoint
    would get their descriptor, and with it what libraries print. The standard output is an exception: an answer that
    nobody gets is an error. Characters that the encoding of a stream lacks are escaped.
    """
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # its descriptor was a file, and is a pipe now: it has no position
                stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
