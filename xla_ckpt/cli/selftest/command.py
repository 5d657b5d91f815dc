"""Command ``selftest``: run all checks in a scratch directory, which is removed at the end."""

from __future__ import annotations

import argparse
import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from xla_ckpt.cli import options
from xla_ckpt.cli.output import print_result
from xla_ckpt.errors import StorageError, UsageError, wrap_os_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xla_ckpt.storage.base import Store

MAX_SECONDS = 86400.0
"""Maximum time limit (s)."""

FAILURE_VERDICTS = ("does not hold", "was not looked at")
"""Verdicts that set exit code 1. They include checks that ran out of time, not checks that are impossible."""

REMOVE_TIMEOUT_SECONDS = 10.0
"""Seconds for which processes that were just killed may still use the folder."""


def add_selftest_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``selftest``."""
    from xla_ckpt.cli.selftest.checks import DEFAULT_SECONDS

    parser.add_argument("path", metavar="ROOT", help="a directory that is there, or s3://bucket/path")
    parser.add_argument(
        "--seconds",
        type=_parse_seconds,
        default=DEFAULT_SECONDS,
        metavar="N",
        help="how long it may take (default: 120)",
    )
    options.add_json(parser)


def _parse_seconds(text: str) -> float:
    """Parse a duration for argparse."""
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= MAX_SECONDS:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds between 0 and {MAX_SECONDS:.0f}")


def run_selftest(args: argparse.Namespace) -> int:
    """Run the command ``selftest``, and return its exit code."""
    from xla_ckpt.cli.selftest.environment import describe_environment
    from xla_ckpt.storage.resolve import open_store

    store, answers = open_store(args.path), []
    _check_root(store)
    where = describe_environment(store)
    with _use_scratch_folder(store) as folder:
        if not args.json:
            print_result(args, where, _format_environment)
        for answer in _run_checks(folder, args.seconds):
            answers.append(answer)
            if not args.json:
                print_result(args, answer, _format_result)
        if args.json:  # here, because the removal of the folder may fail
            print_result(args, {"path": args.path, **where, "checks": answers}, _format_result)
    return int(any(answer["verdict"] in FAILURE_VERDICTS for answer in answers))


def _format_environment(environment: dict[str, str]) -> RenderableType:
    return "\n".join(f"{fact:17}  {words}" for fact, words in environment.items())


def _format_result(result: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    style = {"holds": "green", "could not be seen": "yellow"}.get(result["verdict"], "bold red")
    text = Text(f"{result['verdict']:17}", style=style)
    return text.append(f"  {result['check']}: {result['promise']}. {result['sentence']}", style="default")


def _check_root(store: Store) -> None:
    """Raise an error for a root in which a selftest cannot save."""
    from xla_ckpt.tags.resolve import open_root

    if store.path.startswith("memory:"):
        raise UsageError(
            "what is in the memory of one process is seen by no other one, and a selftest starts several",
            path=store.path,
            hint="Name a directory or a bucket.",
        )
    if store.object_store is None and not store.is_directory(""):
        hint = "It is a file: name a directory." if store.has("") else "Make it, or name the one above."
        raise StorageError("there is no such directory", path=store.path, hint=hint)
    open_root(store).check_can_commit()


@contextlib.contextmanager
def _use_scratch_folder(store: Store) -> Iterator[Store]:
    """Create a folder in the root, and remove it at the end, also if the selftest is interrupted.

    Raises:
        StorageError: It cannot be written, or cannot be removed.
    """
    name = f".selftest-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_scratch_folder, store, name)
        try:
            folder = _make_scratch_folder(store, name)
        except StorageError:
            stack.pop_all()
            if store.file_system is not None:  # it may exist without being durable; a bucket contains nothing
                with contextlib.suppress(StorageError):
                    _remove_scratch_folder(store, name, timeout=0.0)
            raise
        yield folder


def _make_scratch_folder(store: Store, name: str) -> Store:
    from xla_ckpt.storage.base import write_file
    from xla_ckpt.storage.resolve import open_store

    hint = "Name a place in which this user may make files."
    with wrap_os_errors("making a folder for the selftest", path=store.path, hint=hint):
        folder = open_store(f"{store.path}/{name}")
        folder.prepare()
        if folder.object_store is not None:  # a bucket has no folders: only a file shows that it can be written
            write_file(folder.object_store.get_directory("begun"), "file", b"")
    return folder


def _run_checks(folder: Store, seconds: float) -> Iterator[dict[str, Any]]:
    """Run the checks sequentially, and yield their results."""
    from xla_ckpt.cli.selftest.checks import CheckContext
    from xla_ckpt.cli.selftest.device_checks import DEVICE_CHECKS
    from xla_ckpt.cli.selftest.storage_checks import list_storage_checks

    until = time.monotonic() + seconds
    checks = (*list_storage_checks(is_object_store=folder.object_store is not None), *DEVICE_CHECKS)
    for number, check in enumerate(checks):
        now = time.monotonic()
        bench = CheckContext(f"{folder.path}/{number}", now + (until - now) * check.time_share)
        yield {"check": check.name, "promise": check.promise, **asdict(check(bench))}


def _remove_scratch_folder(store: Store, name: str, timeout: float = REMOVE_TIMEOUT_SECONDS) -> None:
    """Remove the folder, with retries: the committer of a killed process may still write to it for a moment.

    Raises:
        StorageError: The folder cannot be removed within `timeout` seconds.
    """
    from xla_ckpt.storage.signals import defer_signals
    from xla_ckpt.tags.lease import LEASES

    place = store.file_system or store.object_store
    assert place is not None, "a store is one of the two"
    until, path = time.monotonic() + timeout, f"{store.path}/{name}"
    with defer_signals(), wrap_os_errors("removing the selftest's folder", path=path, hint="Remove it by hand."):
        LEASES.release_all()
        while True:
            try:
                if not store.is_directory(name):
                    return
                place.remove(name)
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
