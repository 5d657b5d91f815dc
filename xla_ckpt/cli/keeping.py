"""Commands that change which tags are kept, or where: ``rm``, ``retain``, ``pin``, ``clean``, ``adopt``, ``upload``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from xla_ckpt.cli import options
from xla_ckpt.cli.output import print_answer
from xla_ckpt.errors import CheckpointError, UsageError, storage_errors

if TYPE_CHECKING:
    from xla_ckpt.tags.retention import Retention
    from xla_ckpt.tags.root import Root

UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def add_tags(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``pin`` and ``unpin``."""
    parser.add_argument("path", metavar="PATH", help="root directory of tags, or one tag")
    parser.add_argument("tags", metavar="TAG", nargs="*", help="which tags, if PATH is a root directory")
    options.add_json(parser)


def _name_tags(args: argparse.Namespace) -> None:
    """Have the path of a tag in the arguments say its root and its name, as commands that look at tags have it.

    Raises:
        UsageError: The path is a root, and no tag is named: all of them, or the newest, would be a guess.
    """
    from xla_ckpt.api.tags import located
    from xla_ckpt.layouts.listing import tag_names
    from xla_ckpt.layouts.no_tag import no_tag

    if args.tags:
        return
    store, tag = located(args.path, None)
    if tag is None:
        if not (tags := tag_names(store)):
            raise no_tag(store, None)
        raise UsageError(
            "nothing says which tags are meant",
            path=store.path,
            expected=f"{args.path} TAG ..., or {args.path.rstrip('/')}/TAG",
            hint=f"Tags there, oldest first: {', '.join(tags[-10:])}.",
        )
    args.path, args.tags = store.path, [tag]


def add_rm(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``rm``."""
    add_tags(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where nobody can be asked")
    parser.add_argument(
        "--force", action="store_true", help="also tags that are pinned, being read, or the last that can be read"
    )


def rm(args: argparse.Namespace) -> int:
    """The command ``rm``; returns its exit code."""
    from xla_ckpt.api.checkpoints import Checkpoints
    from xla_ckpt.layouts.no_tag import no_tag
    from xla_ckpt.storage.door import store_at

    _name_tags(args)
    root = Checkpoints(args.path)
    existing = root.tags()
    tags = [*dict.fromkeys(args.tags)]
    for tag in tags:
        if tag not in existing:
            raise no_tag(store_at(args.path), tag)  # before any other one is deleted
    if not args.yes and not _confirmed(f"Delete {', '.join(tags)} in {args.path}? [y/N] "):
        print("xla-ckpt: nothing was deleted", file=sys.stderr)
        return 1

    def delete(tag: str) -> str:
        root.delete(tag, force=args.force)
        return "deleted"

    return _each(args, tags, delete)


def add_retain(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``retain``."""
    from xla_ckpt.tags.retention import PERIODS

    parser.add_argument("path", metavar="ROOT", help="root directory of tags")
    parser.add_argument("--newest", type=int, metavar="N", help="keep the N newest tags")
    parser.add_argument(
        "--best",
        action="append",
        default=[],
        metavar="NAME[:N[:max]]",
        help="keep the tags with the N smallest numbers of this name in user_content, or with the largest: "
        "loss, loss:2, eval.accuracy:3:max",
    )
    parser.add_argument("--every", type=int, metavar="N", help="keep each tag whose step is a multiple of N")
    for seconds, name in PERIODS.items():
        parser.add_argument(
            f"--per-{name}",
            dest="per",
            action="append_const",
            const=seconds,
            default=[],
            help=f"keep the first of each {name} (UTC)",
        )
    parser.add_argument(
        "--last", metavar="TIME", help="keep tags that are at most so much older than the newest: 30m, 12h, 7d, 4w"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="delete nothing: say which would go, and why others stay"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where nobody can be asked")
    options.add_json(parser)


def retain(args: argparse.Namespace) -> int:
    """The command ``retain``; returns its exit code."""
    from xla_ckpt.api.checkpoints import Checkpoints
    from xla_ckpt.layouts.no_tag import no_tag
    from xla_ckpt.storage.door import store_at

    root = Checkpoints(args.path)
    reasons = root.why_kept(_policy(args))
    if not reasons:
        raise no_tag(store_at(root.path), None)
    doomed = [tag for tag, why in reasons.items() if not why]
    asks = doomed and not args.dry_run and not args.yes
    if asks and not _confirmed(f"Delete {', '.join(doomed)} in {args.path}? [y/N] "):
        print("xla-ckpt: nothing was deleted", file=sys.stderr)
        return 1

    def act(tag: str) -> str:
        if reasons[tag]:
            return f"stays ({'; '.join(reasons[tag])})"
        if args.dry_run:
            return "would be deleted"
        try:
            root.delete(tag)
        except UsageError as refused:
            return f"stays ({refused.problem})"  # another one may go all the same
        return "deleted"

    return _each(args, [*reasons], act)


def _policy(args: argparse.Namespace) -> Retention:
    """What the arguments of ``retain`` say."""
    from xla_ckpt.tags.retention import AnyOf, EveryNSeconds, EveryNSteps, LatestN

    policies: list[Retention] = [] if args.newest is None else [LatestN(args.newest)]
    policies += [_best(text) for text in args.best]
    policies += [] if args.every is None else [EveryNSteps(args.every)]
    policies += [EveryNSeconds(seconds) for seconds in args.per]
    policies += [] if args.last is None else [_last(args.last)]
    if not policies:
        raise UsageError(
            "nothing says which tags are kept", expected="--newest, --best, --every, --per-hour, --per-day or --last"
        )
    return AnyOf(tuple(policies))


def _best(text: str) -> Retention:
    from xla_ckpt.tags.retention import BestN

    match text.split(":"):
        case [name]:
            return BestN(name)
        case [name, count] if count.isdecimal():
            return BestN(name, int(count))
        case [name, count, ("min" | "max") as mode] if count.isdecimal():
            return BestN(name, int(count), mode)
    raise UsageError("--best makes no sense", expected="NAME, NAME:N or NAME:N:max, such as loss:2", found=text)


def _last(text: str) -> Retention:
    from xla_ckpt.tags.retention import LatestDuration

    count, unit = text[:-1], UNITS.get(text[-1:])
    if unit is None or not count.isdecimal():
        raise UsageError("--last is no time", expected="a number and a unit: 30m, 12h, 7d, 4w", found=text)
    try:
        return LatestDuration(datetime.timedelta(**{unit: int(count)}))
    except (OverflowError, ValueError) as error:  # ValueError: more digits than Python makes an int of
        raise UsageError(
            "--last is longer than any time that can be counted",
            expected=f"at most {datetime.timedelta.max.days}d",
            found=text[:40],
        ) from error


def pin(args: argparse.Namespace) -> int:
    """The command ``pin``; returns its exit code."""
    from xla_ckpt.api.checkpoints import Checkpoints

    _name_tags(args)
    root = Checkpoints(args.path)
    return _each(args, args.tags, lambda tag: "pinned" if root.pin(tag) else "was pinned already")


def unpin(args: argparse.Namespace) -> int:
    """The command ``unpin``; returns its exit code."""
    from xla_ckpt.api.checkpoints import Checkpoints

    _name_tags(args)
    root = Checkpoints(args.path)
    return _each(args, args.tags, lambda tag: "unpinned" if root.unpin(tag) else "was not pinned")


WATCHED_AT_MOST = 120.0
"""Seconds that ``clean``, ``adopt`` and ``upload`` wait, at most, to see whether somebody saves there."""


def add_clean(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``clean``."""
    parser.add_argument("path", metavar="ROOT", help="root directory of tags")
    options.add_json(parser)


def clean_up(args: argparse.Namespace) -> int:
    """The command ``clean``; returns its exit code."""
    from xla_ckpt.cli import answers

    with _held(_root_at(args.path), "cleaning up") as root:
        cleaned = root.clean_all(WATCHED_AT_MOST)
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
    from xla_ckpt.layouts.no_tag import no_tag
    from xla_ckpt.tags.missing import existing

    with _held(_root_at(args.path), "adopting tags") as root:
        adopted = root.adopt(args.tags, WATCHED_AT_MOST)
        tags = args.tags or adopted or [entry.tag for entry in root.entries()]
        if not tags:
            raise no_tag(root.store, None)

        def told(tag: str) -> str:
            existing(root, tag)
            return "adopted" if tag in adopted else "was known already"

        return _each(args, tags, told)


def add_upload(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``upload``."""
    parser.add_argument("path", metavar="DIR", help="directory that a job saved to first (local=)")
    parser.add_argument("destination", metavar="ROOT", help="where its tags go: s3://bucket/run")
    options.add_json(parser)


def upload(args: argparse.Namespace) -> int:
    """The command ``upload``; returns its exit code."""
    from xla_ckpt.api.tags import near_and_far
    from xla_ckpt.engine.upload import UPLOADS
    from xla_ckpt.layouts.no_tag import no_tag
    from xla_ckpt.tags.upload_rules import place_after_upload

    uploader = UPLOADS.of(*near_and_far(args.destination, args.path))
    with _held(uploader.root, "uploading") as root:
        if not root.entries():
            error = no_tag(root.store, None)
            error.problem = "there is no tag of this library, which could be uploaded"
            raise error
        root.hold(WATCHED_AT_MOST)
        entries = {entry.tag: entry for entry in root.entries()}
        before = {tag for tag, entry in entries.items() if uploader.root.journal(entry).is_remote}
        try:
            uploader.wake(None)
            uploader.finish()
        finally:
            uploader.end()  # if it is interrupted, its thread ends soon, and not with the last tag
        remote = {entry.tag: entry for entry in uploader.root.remote.entries()}

        def told(tag: str) -> str:
            uploader.uploaded(entries[tag].sequence, None)
            return place_after_upload(entries[tag], remote.get(tag)) if tag in before else "uploaded"

        return _each(args, [*entries], told)


def _root_at(path: str) -> Root:
    from xla_ckpt.storage.door import full_path, store_at
    from xla_ckpt.tags.roots import root_of

    return root_of(store_at(full_path(path)))


@contextlib.contextmanager
def _held(root: Root, doing: str) -> Iterator[Root]:
    """A root that is there. The leases that this process takes are given back when the block ends."""
    from xla_ckpt.tags.lease import LEASES
    from xla_ckpt.tags.missing import no_such_tag

    try:
        with storage_errors(doing, path=root.path):
            if not root.store.is_directory(""):
                raise no_such_tag(root, None)
            yield root
    finally:
        LEASES.give_back()


def _each(args: argparse.Namespace, tags: list[str], act: Callable[[str], str]) -> int:
    """Do something with each tag. What was done before a refusal is told."""
    from xla_ckpt.cli import answers

    done: list[dict[str, str]] = []
    refused: CheckpointError | None = None
    for tag in tags:
        try:
            done.append({"tag": tag, "done": act(tag)})
        except CheckpointError as error:
            refused = error
            break
    if done:
        print_answer(args, {"path": args.path, "tags": done}, answers.done)
    if refused is not None:
        raise refused
    return 0


def _confirmed(question: str) -> bool:
    """Whether a person says yes.

    Raises:
        UsageError: Nobody can be asked.
    """
    if not sys.stdin.isatty():
        raise UsageError("nobody can be asked whether tags may be deleted", expected="a terminal, or --yes")
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
