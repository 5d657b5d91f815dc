"""The command ``selftest``: it looks at all promises, in a folder of its own that it removes at the end."""

from __future__ import annotations

import argparse
import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from xla_ckpt.cli import options
from xla_ckpt.cli.output import print_answer
from xla_ckpt.errors import StorageError, UsageError, storage_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xla_ckpt.storage.base import Store

LASTING = 120.0
"""How long a selftest takes, at most, unless the storage keeps it waiting."""

LONGEST = 86400.0
"""How long one may take at most (s)."""

FAILURES = ("does not hold", "was not looked at")
"""Verdicts with which the exit code is 1. What no program can see is no failure; what there was no time for is one."""

REMOVAL = 10.0
"""Seconds for which its folder may be in use by processes that were just killed."""


def add_selftest(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``selftest``."""
    parser.add_argument("path", metavar="ROOT", help="a directory that is there, or s3://bucket/path")
    parser.add_argument(
        "--seconds", type=_seconds, default=LASTING, metavar="N", help="how long it may take (default: 120)"
    )
    options.add_json(parser)


def _seconds(text: str) -> float:
    """A length of time, as argparse wants it."""
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= LONGEST:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds between 0 and {LONGEST:.0f}")


def selftest(args: argparse.Namespace) -> int:
    """The command ``selftest``; returns its exit code."""
    from xla_ckpt.cli.selftest.surroundings import surroundings
    from xla_ckpt.storage.door import store_at

    store, answers = store_at(args.path), []
    _check_root(store)
    where = surroundings(store)
    with _folder(store) as folder:
        if not args.json:
            print_answer(args, where, _surroundings)
        for answer in _seen(folder, args.seconds):
            answers.append(answer)
            if not args.json:
                print_answer(args, answer, _line)
        if args.json:  # here, since the folder's removal may fail
            print_answer(args, {"path": args.path, **where, "checks": answers}, _line)
    return int(any(answer["verdict"] in FAILURES for answer in answers))


def _surroundings(where: dict[str, str]) -> RenderableType:
    return "\n".join(f"{fact:17}  {words}" for fact, words in where.items())


def _line(answer: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    style = {"holds": "green", "could not be seen": "yellow"}.get(answer["verdict"], "bold red")
    text = Text(f"{answer['verdict']:17}", style=style)
    return text.append(f"  {answer['check']}: {answer['promise']}. {answer['sentence']}", style="default")


def _check_root(store: Store) -> None:
    """Refuse a root in which no process of a selftest can save."""
    from xla_ckpt.tags.roots import root_of

    if store.path.startswith("memory:"):
        raise UsageError(
            "what is in the memory of one process is seen by no other one, and a selftest starts several",
            path=store.path,
            hint="Name a directory or a bucket.",
        )
    if store.object_store is None and not store.is_directory(""):
        hint = "It is a file: name a directory." if store.has("") else "Make it, or name the one above."
        raise StorageError("there is no such directory", path=store.path, hint=hint)
    root_of(store).check_commits()


@contextlib.contextmanager
def _folder(store: Store) -> Iterator[Store]:
    """A new folder in the root. It is gone afterwards, also if the selftest is given up.

    Raises:
        StorageError: It cannot be written, or cannot be removed.
    """
    name = f".selftest-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, store, name)
        try:
            folder = _make(store, name)
        except StorageError:
            stack.pop_all()
            if store.file_system is not None:  # it may be there, and not be durable; in a bucket nothing is
                with contextlib.suppress(StorageError):
                    _remove(store, name, patience=0.0)
            raise
        yield folder


def _make(store: Store, name: str) -> Store:
    from xla_ckpt.storage.door import store_at
    from xla_ckpt.storage.small_files import write_small

    hint = "Name a place in which this user may make files."
    with storage_errors("making a folder for the selftest", path=store.path, hint=hint):
        folder = store_at(f"{store.path}/{name}")
        folder.prepare()
        if folder.object_store is not None:  # a bucket has no folders: only a file shows that one can be written
            write_small(folder.object_store.fill("begun"), "file", b"")
    return folder


def _seen(folder: Store, seconds: float) -> Iterator[dict[str, Any]]:
    """What each check has seen, one after the other."""
    from xla_ckpt.cli.selftest.checks import Bench
    from xla_ckpt.cli.selftest.devices import DEVICE_CHECKS
    from xla_ckpt.cli.selftest.storage import storage_checks

    until = time.monotonic() + seconds
    checks = (*storage_checks(objects=folder.object_store is not None), *DEVICE_CHECKS)
    for number, check in enumerate(checks):
        now = time.monotonic()
        bench = Bench(f"{folder.path}/{number}", now + (until - now) * check.share)
        yield {"check": check.name, "promise": check.promise, **asdict(check(bench))}


def _remove(store: Store, name: str, patience: float = REMOVAL) -> None:
    """Remove the folder. What commits for a killed process may go on in it for an instant.

    Raises:
        StorageError: The storage refuses it, and has done so for `patience` seconds.
    """
    from xla_ckpt.storage.undisturbed import undisturbed
    from xla_ckpt.tags.lease import LEASES

    place = store.file_system or store.object_store
    assert place is not None, "a store is one of the two"
    until, path = time.monotonic() + patience, f"{store.path}/{name}"
    with undisturbed(), storage_errors("removing the selftest's folder", path=path, hint="Remove it by hand."):
        LEASES.give_back()
        while True:
            try:
                if not store.is_directory(name):
                    return
                place.remove(name)
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
