"""Commands that put a root in order: ``clean``, ``adopt``, ``upload``."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from xla_ckpt.cli import options
from xla_ckpt.cli.output import print_answer, print_each
from xla_ckpt.errors import storage_errors

if TYPE_CHECKING:
    from xla_ckpt.tags.root import Root

WATCHED_AT_MOST = 120.0
"""Seconds that ``clean``, ``adopt`` and ``upload`` wait, at most, to see whether somebody saves there."""


def add_clean(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``clean``."""
    parser.add_argument("path", metavar="ROOT", help="root directory of tags")
    options.add_json(parser)


def clean_up(args: argparse.Namespace) -> int:
    """The command ``clean``; returns its exit code."""
    from xla_ckpt.cli import answers
    from xla_ckpt.layouts.listing import tag_names
    from xla_ckpt.layouts.no_tag import names_of_roots_below, no_tag, root_named

    with _held(root_named(args.path), "cleaning up") as root:
        cleaned = root.clean_all(WATCHED_AT_MOST)
        if not (cleaned.removed or cleaned.kept or tag_names(root.store)) and names_of_roots_below(root.store):
            raise no_tag(root.store, None)
    kept = [{"name": name, "why": why} for name, why in cleaned.kept.items()]
    print_answer(args, {"path": args.path, "removed": [*cleaned.removed], "kept": kept}, answers.cleaned)
    return 0


def add_adopt(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``adopt``."""
    parser.add_argument("path", metavar="ROOT", help="root directory of tags, in an object store")
    parser.add_argument("tags", metavar="TAG", nargs="*", help="which tags (default: all)")
    options.add_json(parser)


def adopt(args: argparse.Namespace) -> int:
    """The command ``adopt``; returns its exit code."""
    from xla_ckpt.layouts.no_tag import no_tag, root_named

    with _held(root_named(args.path), "adopting tags") as root:
        result = root.adopt(args.tags, WATCHED_AT_MOST)
        known = [entry.tag for entry in root.entries()]
        new = {*result.adopted}
        said = {tag: "adopted" if tag in new else "was known already" for tag in args.tags or result.adopted or known}
        said |= {tag: f"not adopted ({why})" for tag, why in result.refused.items()}
        if not said:
            raise no_tag(root.store, None)
        for tag in args.tags:
            if tag not in known and tag not in result.refused:
                raise no_tag(root.store, tag)
        print_each(args, [*said], said.__getitem__)
    return int(bool(result.refused))


def add_upload(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``upload``."""
    parser.add_argument("path", metavar="DIR", help="directory that a job saved to first (local=)")
    parser.add_argument("destination", metavar="ROOT", help="where its tags go: s3://bucket/run")
    options.add_json(parser)


def upload(args: argparse.Namespace) -> int:
    """The command ``upload``; returns its exit code."""
    from xla_ckpt.api.tags import near_and_far
    from xla_ckpt.engine.upload import UPLOADS
    from xla_ckpt.layouts.no_tag import no_tag, root_named
    from xla_ckpt.tags.upload_rules import place_after_upload

    near, far = near_and_far(args.destination, args.path)
    root_named(args.path)
    uploader = UPLOADS.of(near, far)
    with _held(uploader.root, "uploading") as root:
        if not root.entries():
            error = no_tag(root.store, None)
            error.problem = "there is no tag of this library, which could be uploaded"
            raise error
        uploader.root.remote.entries()  # where it cannot be read, this says so, and once
        root.hold(WATCHED_AT_MOST)
        entries = {entry.tag: entry for entry in root.entries()}
        before = {tag for tag, entry in entries.items() if uploader.root.journal(entry).is_remote}
        try:
            uploader.wake(None)
            uploader.finish()
        finally:
            uploader.end()  # if it is interrupted, its thread ends soon, and not with the last tag
        remote = {entry.tag: entry for entry in uploader.root.remote.entries()}

        def outcome(tag: str) -> str:
            uploader.uploaded(entries[tag].sequence, None)
            return place_after_upload(entries[tag], remote.get(tag)) if tag in before else "uploaded"

        print_each(args, [*entries], outcome)
    return 0


@contextlib.contextmanager
def _held(root: Root, doing: str) -> Iterator[Root]:
    """A root. The leases that this process takes are given back when the block ends."""
    from xla_ckpt.tags.lease import LEASES

    try:
        with storage_errors(doing, path=root.path):
            yield root
    finally:
        LEASES.give_back()
