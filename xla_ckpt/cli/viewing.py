"""The command ``view``: pages for a browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from xla_ckpt.cli import options
from xla_ckpt.display import make_printable
from xla_ckpt.errors import UsageError, storage_errors
from xla_ckpt.tables.texts import size

if TYPE_CHECKING:
    from xla_ckpt.view.site import ViewedRoot

MAX_PORT = 65535


def add_view(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``view``."""
    options.add_path_and_tag(parser)
    parser.add_argument("--port", type=_port, default=0, help="of this machine (default: any that is free)")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write all pages into one file, and serve nothing; of files that are there it takes the place of an older "
        "such page, and of no other one",
    )
    parser.add_argument("--mesh", metavar="MESH", help="with --html: plan a restore of the tag over it")
    parser.add_argument("--against", metavar="TAG", help="with --html: what differs between this other tag and the tag")
    options.add_leaf(parser)
    options.add_model(parser)


def view(args: argparse.Namespace) -> int:
    """The command ``view``; returns its exit code."""
    from xla_ckpt.view.site import ViewedRoot

    site = ViewedRoot(args.path, args.tag, **options.about(args))
    asked = {"leaf": args.leaf, "mesh": args.mesh, "a": args.against}
    address = {name: text for name, text in asked.items() if text is not None}
    if args.html is not None:
        _check_may_be_written(Path(args.html))
        page = site.one_document(address)
        with storage_errors("writing the page", path=args.html, hint="Name a file in a directory that is there."):
            Path(args.html).write_bytes(page)
        print(f"{make_printable(args.html)}: {size(len(page))}")
        return 0
    if address:
        named = [option for option in ("leaf", "mesh", "against") if getattr(args, option) is not None]
        raise UsageError(
            "pages that are served ask for this themselves",
            expected="--html FILE with it",
            found=", ".join(f"--{option}" for option in named),
        )
    return _serve(site, args.port)


def _port(text: str) -> int:
    """A port, as argparse wants it."""
    if not text.isdecimal() or len(text) > len(str(MAX_PORT)) or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: they are numbers from 0 to {MAX_PORT}")
    return int(text)


def _check_may_be_written(file: Path) -> None:
    """Refuse a file that is there and holds something else than an older page: a tag's manifest, for instance.

    Pipes and devices are written to as they are.
    """
    from xla_ckpt.view.document import BEGINNING

    with storage_errors("looking at the file for the page", path=str(file)):
        if not file.is_file() or not file.stat().st_size:
            return
        with file.open("rb") as opened:
            beginning = opened.read(len(BEGINNING.encode()))
    if beginning != BEGINNING.encode():
        raise UsageError(
            "this file is there, and is no page that view wrote",
            path=str(file),
            expected="a new file, or an older page of view --html",
            hint="Name another file for --html, or remove this one.",
        )


def _serve(site: ViewedRoot, port: int) -> int:
    from xla_ckpt.view.server import ViewServer

    hint = "Name another one, or leave --port out: then one is taken that is free."
    with storage_errors(f"opening the port {port}", hint=hint), ViewServer(site, port) as server:
        print(f"{server.address}\nCtrl-C ends it.", flush=True)
        server.serve_forever()
    return 0
