"""Commands that change which tags are kept: ``rm``, ``retain``, ``pin``, ``unpin``."""

from __future__ import annotations

import argparse
import datetime
import sys
from typing import TYPE_CHECKING

from xla_ckpt.cli import options
from xla_ckpt.cli.output import print_each
from xla_ckpt.display import make_printable
from xla_ckpt.errors import StorageError, UsageError, storage_errors

if TYPE_CHECKING:
    from xla_ckpt.api.checkpoints import Checkpoints
    from xla_ckpt.tags.retention import Retention

UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def add_tags(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``pin`` and ``unpin``."""
    parser.add_argument("path", metavar="PATH", help="root directory of tags, or one tag")
    parser.add_argument("tags", metavar="TAG", nargs="*", help="which tags, if PATH is a root directory")
    options.add_json(parser)


def _named_tags(args: argparse.Namespace) -> tuple[Checkpoints, list[str]]:
    """The root, and the tags that are meant; the path may be that of a tag. Each of them is there, and is ours.

    Raises:
        UsageError: The path is a root, and no tag is named: all of them, or the newest, would be a guess. Or another
            library wrote one of them.
        NoCheckpointError: One is not there.
    """
    from xla_ckpt.api.checkpoints import Checkpoints
    from xla_ckpt.api.tags import located
    from xla_ckpt.layouts.listing import tag_names
    from xla_ckpt.layouts.no_tag import check_is_own, no_tag

    store, tag = located(args.path, args.tags[0] if args.tags else None)
    if args.tags:
        tags = [*dict.fromkeys(args.tags)]
    elif tag is not None:
        tags = [tag]
    elif not (there := tag_names(store)):
        raise no_tag(store, None)
    else:
        raise UsageError(
            "nothing says which tags are meant",
            path=store.path,
            expected=f"{args.path} TAG ..., or {args.path.rstrip('/')}/TAG",
            hint=f"Tags there, oldest first: {', '.join(there[-10:])}.",
        )
    for name in tags:
        check_is_own(store, name)
    args.path = store.path
    return Checkpoints(store.path), tags


def add_rm(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``rm``."""
    add_tags(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where nobody can be asked")
    parser.add_argument(
        "--force", action="store_true", help="also tags that are pinned, being read, or the last that can be read"
    )


def rm(args: argparse.Namespace) -> int:
    """The command ``rm``; returns its exit code."""
    from xla_ckpt.storage.door import store_at
    from xla_ckpt.tags.deleting import check_deletable
    from xla_ckpt.tags.roots import root_of

    root, tags = _named_tags(args)
    check_deletable(root_of(store_at(root.path)), tags, force=args.force)
    if not args.yes and not _confirmed(f"Delete {', '.join(tags)} in {root.path}? [y/N] "):
        return _told_no()

    def delete(tag: str) -> str:
        root.delete(tag, force=args.force)
        return "deleted"

    print_each(args, tags, delete)
    return 0


def add_retain(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``retain``."""
    from xla_ckpt.tags.retention import PERIODS

    parser.add_argument("path", metavar="ROOT", help="root directory of tags")
    parser.add_argument("--newest", type=options.at_least_one, metavar="N", help="keep the N newest tags")
    parser.add_argument(
        "--best",
        action="append",
        default=[],
        metavar="NAME[:N[:max]]",
        help="keep the tags with the N smallest numbers of this name in user_content, or with the largest: "
        "loss, loss:2, eval.accuracy:3:max",
    )
    parser.add_argument(
        "--every", type=options.at_least_one, metavar="N", help="keep each tag whose step is a multiple of N"
    )
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
    from xla_ckpt.layouts.listing import tag_names
    from xla_ckpt.layouts.no_tag import check_is_own, no_tag, root_named
    from xla_ckpt.tags.deleting import refusals, retire
    from xla_ckpt.tags.roots import root_of

    policy, root = _policy(args), root_named(args.path)
    reasons = Checkpoints(args.path).why_kept(policy)
    if not reasons:
        for tag in tag_names(root.store)[-1:]:
            check_is_own(root.store, tag)  # another library's: the error says whose it is
        raise no_tag(root.store, None)
    doomed = [tag for tag, why in reasons.items() if not why]
    asks = doomed and not args.dry_run and not args.yes
    if asks and not _confirmed(f"Delete {', '.join(doomed)} in {args.path}? [y/N] "):
        return _told_no()
    # Somebody may have pinned one since, or read it. All are looked at in one listing, and not each before it goes.
    refused = {} if args.dry_run else refusals(root_of(root.store.look()), doomed, force=False)

    def act(tag: str) -> str:
        if reasons[tag]:
            return f"stays ({'; '.join(reasons[tag])})"
        if args.dry_run:
            return "would be deleted"
        if tag in refused:
            return f"stays ({refused[tag].problem})"
        try:
            retire(root, tag)
        except StorageError as error:  # another user's, perhaps: the others go
            failed.append(error)
            return f"stays ({error.problem})"
        return "deleted"

    failed: list[StorageError] = []
    print_each(args, [*reasons], act)
    if not args.dry_run:
        with storage_errors("deleting tags", path=args.path):
            root.clean()
    if failed:
        raise failed[0]
    return 0


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
        case ["", *_]:
            pass
        case [name]:
            return BestN(name)
        case [name, count] if options.is_at_least_one(count):
            return BestN(name, int(count))
        case [name, count, ("min" | "max") as mode] if options.is_at_least_one(count):
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
    root, tags = _named_tags(args)
    print_each(args, tags, lambda tag: "pinned" if root.pin(tag) else "was pinned already")
    return 0


def unpin(args: argparse.Namespace) -> int:
    """The command ``unpin``; returns its exit code."""
    root, tags = _named_tags(args)
    print_each(args, tags, lambda tag: "unpinned" if root.unpin(tag) else "was not pinned")
    return 0


def _confirmed(question: str) -> bool:
    """Whether a person says yes.

    Raises:
        UsageError: Nobody can be asked.
    """
    if not sys.stdin.isatty():
        raise UsageError("nobody can be asked whether tags may be deleted", expected="a terminal, or --yes")
    print(make_printable(question), end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _told_no() -> int:
    """What a person is told who said no; the exit code."""
    print("xla-ckpt: nothing was deleted", file=sys.stderr)
    return 1
