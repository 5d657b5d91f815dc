"""``python -m xla_ckpt``: the command ``xla-ckpt``."""

from __future__ import annotations

import sys

from xla_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
