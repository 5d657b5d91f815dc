"""Entry point of the command ``xla-ckpt`` and of ``python -m xla_ckpt``."""

from __future__ import annotations

import contextlib
import io
import os
import sys

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C: the code that shells use for a process ended by SIGINT."""


def main() -> int:
    """Run the command line, and return the exit code."""
    open_closed_streams()
    try:
        # Imported here, because Ctrl-C may arrive during the import, which takes longer than most commands.
        from xla_ckpt.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("xla-ckpt: interrupted\n")
        return EXIT_INTERRUPTED


def open_closed_streams() -> None:
    """Prepare the standard streams of a process that only runs the command line.

    Closed streams (``2>&-``; Python sets them to None) are opened at /dev/null, because otherwise a file of a
    checkpoint would get their descriptor, and with it the output of libraries. Standard output is an exception: output
    that cannot be written is an error. Characters that the encoding of a stream does not support are escaped.
    """
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # open as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # the descriptor was a file and is now a pipe, which has no position
                stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
