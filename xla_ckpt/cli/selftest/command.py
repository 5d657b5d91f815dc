"""The command ``selftest``: it looks at all promises, in a folder of its own that it removes at the end."""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from xla_ckpt.cli import options
from xla_ckpt.cli.output import print_answer
from xla_ckpt.errors import UsageError, storage_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xla_ckpt.storage.base import Store

LASTING = 120.0
"""How long a selftest takes, at most, unless the storage keeps it waiting."""

REMOVAL = 10.0
"""Seconds for which its folder may be in use by processes that were just killed."""


def add_selftest(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``selftest``."""
    parser.add_argument("path", metavar="ROOT", help="a directory that is there, or s3://bucket/path")
    parser.add_argument(
        "--seconds", type=float, default=LASTING, metavar="N", help="how long it may take (default: 120)"
    )
    options.add_json(parser)


def selftest(args: argparse.Namespace) -> int:
    """The command ``selftest``; returns its exit code."""
    from xla_ckpt.storage.door import store_at

    answers = []
    for answer in _seen(store_at(args.path), args.seconds):
        answers.append(answer)
        if not args.json:
            print_answer(args, answer, _line)
    if args.json:
        print_answer(args, {"path": args.path, "checks": answers}, _line)
    return int(any(answer["verdict"] == "does not hold" for answer in answers))


def _line(answer: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    styles = {"holds": "green", "does not hold": "bold red", "could not be seen": "yellow"}
    text = Text(f"{answer['verdict']:17}", style=styles[answer["verdict"]])
    return text.append(f"  {answer['check']}: {answer['promise']}. {answer['sentence']}", style="default")


def _seen(store: Store, seconds: float) -> Iterator[dict[str, Any]]:
    """What each check has seen, one after the other. The folder is gone afterwards, also if this is given up."""
    from xla_ckpt.cli.selftest.checks import Bench
    from xla_ckpt.cli.selftest.devices import DEVICE_CHECKS
    from xla_ckpt.cli.selftest.storage import storage_checks
    from xla_ckpt.storage.door import store_at
    from xla_ckpt.storage.undisturbed import undisturbed
    from xla_ckpt.tags.roots import root_of

    if store.object_store is None and not store.is_directory(""):
        raise UsageError("there is no such directory", path=store.path, hint="Make it, or name the one above.")
    root_of(store).check_commits()
    until, name = time.monotonic() + seconds, f".selftest-{uuid.uuid4().hex}"
    checks = (*storage_checks(objects=store.object_store is not None), *DEVICE_CHECKS)
    try:
        with storage_errors(
            "making a folder for the selftest", path=store.path, hint="Name one in which this user may make files."
        ):
            store_at(f"{store.path}/{name}").prepare()
        for number, check in enumerate(checks):
            path = f"{store.path}/{name}/{number}"
            store_at(path).prepare()
            now = time.monotonic()
            bench = Bench(path, now + (until - now) * check.share)
            yield {"check": check.name, "promise": check.promise, **asdict(check(bench))}
    finally:
        with undisturbed():
            _remove(store, name)


def _remove(store: Store, name: str) -> None:
    """Remove the folder. What commits for a killed process may go on in it for an instant."""
    from xla_ckpt.tags.lease import LEASES

    LEASES.give_back()
    place = store.file_system or store.object_store
    assert place is not None, "a store is one of the two"
    until = time.monotonic() + REMOVAL
    while store.is_directory(name):
        try:
            place.remove(name)
        except FileNotFoundError:
            continue
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
