"""Pictures of the pages for docs/view.md: ``make screens``. It needs a Chromium (`tests/view/browser.py`)."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

from tests.runs import ROOT
from tests.view import demo
from tests.view.browser import CHROMIUM, browser
from xla_ckpt.cli.view.server import CheckpointSite, ViewServer, build_url_query

SCREENS = ROOT / "docs/drawings/view"
SIZES = {"desktop": (1280, 800), "phone": (390, 720)}
ON_A_PHONE = ("root", "array", "save")
MAX_BYTES = 100_000


def main() -> None:
    """Take a picture of each page in each size."""
    if not CHROMIUM:
        sys.exit("XLA_CKPT_CHROMIUM names no Chromium")
    SCREENS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="runs-") as folder, browser() as chromium:
        root = Path(folder, "lm")
        demo.make(root)
        with ViewServer(CheckpointSite(str(root))) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            for name, address in demo.PAGES.items():
                for size, (width, height) in SIZES.items():
                    if size == "phone" and name not in ON_A_PHONE:
                        continue
                    chromium.open(server.url + build_url_query(address), width, height)
                    picture = chromium.picture(whole=False)
                    assert len(picture) <= MAX_BYTES, (name, size, len(picture))
                    (SCREENS / f"{name}-{size}.png").write_bytes(picture)
            server.shutdown()


if __name__ == "__main__":
    main()
