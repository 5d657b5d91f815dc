"""Commands of ``xla-ckpt``: for each, a function that adds its arguments and one that runs it.

The functions are in the order of `xla_ckpt.cli.main.COMMANDS`: inspect (``ls``, ``show``, ``verify``, ``explain``,
``diff``, ``view``), write (``export``, ``convert``), retention (``rm``, ``retain``, ``pin``, ``unpin``) and
maintenance (``clean``, ``adopt``, ``upload``). ``run_...`` returns the exit code. Imports of the library are inside
the functions, because this module is loaded for every call.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from xla_ckpt.cli import options
from xla_ckpt.cli.output import print_result, run_for_each_tag
from xla_ckpt.display import make_printable
from xla_ckpt.errors import StorageError, UsageError, wrap_os_errors
from xla_ckpt.logs import get_logger
from xla_ckpt.rendering.formatting import format_bytes

if TYPE_CHECKING:
    from xla_ckpt.cli.view.server import CheckpointSite
    from xla_ckpt.inspection.checkpoints import Checkpoints
    from xla_ckpt.tags.retention import Retention
    from xla_ckpt.tags.root import Root


logger = get_logger(__name__)


def add_ls_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ls``."""
    options.add_path(parser)
    options.add_json(parser)
    parser.add_argument(
        "--local", metavar="DIR", help="the directory whose tags go to the bucket PATH: say of each tag where it is"
    )


def run_ls(args: argparse.Namespace) -> int:
    """Run the command ``ls``, and return its exit code."""
    from xla_ckpt.cli import results
    from xla_ckpt.garbage_collection import pause_gc
    from xla_ckpt.rendering import reports

    root, tag = results.resolve_location(args.path, None)
    with pause_gc():
        answer = results.list_root(root, args.local) if tag is None else results.list_single_tag(root, tag)
        print_result(args, answer, reports.render_tag_list)
    return int(any(t["problem"] for t in answer["tags"]))


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``show``."""
    options.add_path_and_tag(parser)
    options.add_json(parser)
    parser.add_argument(
        "--report", action="store_true", help="where the time of its save went, stage by stage, rank by rank"
    )
    options.add_leaf(parser)
    options.add_model(parser)


def run_show(args: argparse.Namespace) -> int:
    """Run the command ``show``, and return its exit code."""
    from xla_ckpt.cli import results
    from xla_ckpt.garbage_collection import pause_gc
    from xla_ckpt.inspection.checkpoints import Checkpoints
    from xla_ckpt.rendering import reports

    root, tag = results.resolve_location(args.path, args.tag)
    if args.report:
        print_result(args, Checkpoints(root).timings(tag), reports.render_save_report)
        return 0
    with pause_gc():
        contents = Checkpoints(root).show(
            results.resolve_tag(root, tag), leaf=args.leaf, **options.build_state_hints(args)
        )
        print_result(args, contents.to_json(), reports.render_tag)
    return 0


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    options.add_path_and_tag(parser)
    options.add_json(parser)
    parser.add_argument("--all", action="store_true", help="all tags of the directory")
    parser.add_argument(
        "--repair", action="store_true", help="first give tags that were saved with parity back what they have lost"
    )


def run_verify(args: argparse.Namespace) -> int:
    """Run the command ``verify``, and return its exit code."""
    from xla_ckpt.cli import results
    from xla_ckpt.core.tree import path
    from xla_ckpt.rendering import reports

    root, tag = results.resolve_location(args.path, args.tag)
    if args.all and tag is not None:
        args.parser.error(f"--all means all tags of a root directory, and {tag!r} names one of them: leave one out")
    if args.all:
        listed = results.list_root(root)
        tags = [t["tag"] for t in listed["tags"]]
        if not tags:
            results.resolve_tag(root, None)  # raises the error for a missing tag
        if others := [b["name"] for b in listed["beside"]]:
            about = "%s: not verified, since they are no tags, or not complete: %s. Give the path of one to verify it"
            logger.warning(about, root, path.format_leaves(others))
    else:
        tags = [results.resolve_tag(root, tag)]
    answers = []
    for name in tags:
        answer = results.verify_tag(root, name, repair_first=args.repair, errors_as_problems=args.all)
        answers.append(answer | {"unverified": 0 if args.all or tag else results.count_other_tags(root, name)})
        if not args.json:
            print_result(args, answers[-1], reports.render_verification)
    if args.json:
        print_result(args, answers if args.all else answers[0], reports.render_verification)
    return int(not all(a["ok"] for a in answers))


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``explain``."""
    options.add_path_and_tag(parser)
    options.add_json(parser)
    parser.add_argument("--mesh", required=True, metavar="MESH", help="such as pp=1,dp=2,tp=4")
    options.add_model(parser)


def run_explain(args: argparse.Namespace) -> int:
    """Run the command ``explain``, and return its exit code."""
    from xla_ckpt.cli import results
    from xla_ckpt.conversion.explain import explain
    from xla_ckpt.rendering import reports

    root, tag = results.resolve_location(args.path, args.tag)
    explanation = explain(root, tag, mesh=args.mesh, **options.build_state_hints(args))
    print_result(args, explanation.to_json(), reports.render_explanation)
    return int(not explanation.ok)


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``diff``."""
    parser.add_argument("a", metavar="A", help=options.PATH_HELP)
    parser.add_argument("b", metavar="B", help="the same; or the name of another tag of A's root directory")
    parser.add_argument(
        "second", metavar="TAG", nargs="?", help="where A is a root directory, and B one of its tags: the other one"
    )
    options.add_json(parser)
    parser.add_argument("--tag-a", metavar="TAG", help="which tag of A (default: the newest)")
    parser.add_argument("--tag-b", metavar="TAG", help="which tag of B (default: the newest)")
    options.add_leaf(parser)
    options.add_model(parser)
    options.add_max_memory(parser)


def run_diff(args: argparse.Namespace) -> int:
    """Run the command ``diff``, and return its exit code."""
    from xla_ckpt.cli import results
    from xla_ckpt.conversion.diff import diff
    from xla_ckpt.rendering import reports

    if args.second is not None:
        if args.tag_a is not None or args.tag_b is not None:
            args.parser.error("three words name a root directory and two of its tags: leave --tag-a and --tag-b out")
        args.tag_a, args.b = args.b, args.second
    a = results.resolve_location(args.a, args.tag_a)
    b = results.resolve_second_location(a[0], args.b, args.tag_b)
    how = options.build_convert_options(args)
    difference = diff(a[0], b[0], a[1], b[1], leaf=args.leaf, options=how, **options.build_state_hints(args))
    print_result(args, difference.to_json(), reports.render_diff)
    return int(not difference.same)


MAX_PORT = 65535


def add_view_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``view``."""
    options.add_path_and_tag(parser)
    parser.add_argument("--port", type=_parse_port, default=0, help="of this machine (default: any that is free)")
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


def run_view(args: argparse.Namespace) -> int:
    """Run the command ``view``, and return its exit code."""
    from xla_ckpt.cli.view.server import CheckpointSite

    site = CheckpointSite(args.path, args.tag, **options.build_state_hints(args))
    asked = {"leaf": args.leaf, "mesh": args.mesh, "a": args.against}
    address = {name: text for name, text in asked.items() if text is not None}
    if args.html is not None:
        _check_overwritable(Path(args.html))
        page = site.render_single_document(address)
        with wrap_os_errors("writing the page", path=args.html, hint="Name a file in a directory that is there."):
            Path(args.html).write_bytes(page)
        print(f"{make_printable(args.html)}: {format_bytes(len(page))}")
        return 0
    if address:
        named = [option for option in ("leaf", "mesh", "against") if getattr(args, option) is not None]
        raise UsageError(
            "pages that are served ask for this themselves",
            expected="--html FILE with it",
            found=", ".join(f"--{option}" for option in named),
        )
    return _serve_pages(site, args.port)


def _parse_port(text: str) -> int:
    """Parse a port number for argparse."""
    if not text.isdecimal() or len(text) > len(str(MAX_PORT)) or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: they are numbers from 0 to {MAX_PORT}")
    return int(text)


def _check_overwritable(path: Path) -> None:
    """Raise an error if the file exists and is not an older page: it may be the manifest of a tag, for example.

    Pipes and devices are accepted.
    """
    from xla_ckpt.cli.view.pages import DOCUMENT_START

    with wrap_os_errors("looking at the file for the page", path=str(path)):
        if not path.is_file() or not path.stat().st_size:
            return
        with path.open("rb") as opened:
            beginning = opened.read(len(DOCUMENT_START.encode()))
    if beginning != DOCUMENT_START.encode():
        raise UsageError(
            "this file is there, and is no page that view wrote",
            path=str(path),
            expected="a new file, or an older page of view --html",
            hint="Name another file for --html, or remove this one.",
        )


def _serve_pages(site: CheckpointSite, port: int) -> int:
    from xla_ckpt.cli.view.server import ViewServer

    hint = "Name another one, or leave --port out: then one is taken that is free."
    with wrap_os_errors(f"opening the port {port}", hint=hint), ViewServer(site, port) as server:
        print(f"{server.url}\nCtrl-C ends it.", flush=True)
        server.serve_forever()
    return 0


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``."""
    options.add_path(parser)
    options.add_json(parser)
    from xla_ckpt.conversion.export import FLOATING_DTYPES
    from xla_ckpt.core.tree import schema
    from xla_ckpt.formats.hugging_face.layout import MAX_FILE_BYTES

    parser.add_argument("destination", metavar="DST", help="directory to make")
    parser.add_argument(
        "--dtype", choices=FLOATING_DTYPES, help="element type of all floating-point arrays (default: as stored)"
    )
    options.add_tag(parser)
    parser.add_argument(
        "--part",
        default=schema.MODEL,
        help="leaf path of what is exported, such as model/master (default: %(default)s)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=options.parse_size_argument,
        default=MAX_FILE_BYTES,
        metavar="SIZE",
        help="largest size of a file (default: 5GB)",
    )
    options.add_model(parser)
    options.add_max_memory(parser)


def run_export(args: argparse.Namespace) -> int:
    """Run the command ``export``, and return its exit code."""
    from xla_ckpt.cli import results
    from xla_ckpt.conversion.export import export_hf
    from xla_ckpt.storage.resolve import open_store

    root, tag = results.resolve_location(args.path, args.tag)
    model, _ = results.build_targets(args.like)
    report = export_hf(
        root,
        args.destination,
        tag,
        part=args.part,
        max_shard_bytes=args.max_shard_size,
        dtype=args.dtype,
        model=model,
        shardings=options.parse_sharding_rules(args),
        llama=options.build_llama_job(args),
        options=options.build_convert_options(args),
    )
    answer = {
        "path": report.path,
        "tag": report.tag,
        "files": list(report.files),
        "arrays": report.arrays,
        "nbytes": report.nbytes,
        "config": open_store(report.path).has("config.json"),
    }
    print_result(args, answer, results.format_export)
    return 0


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``convert``."""
    options.add_path(parser)
    options.add_json(parser)
    from xla_ckpt.formats.registry import list_convertible_layouts

    parser.add_argument(
        "destination",
        metavar="DST",
        help="root directory of the new tag; for safetensors, peft the directory to make, for torch the file (out.pt)",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=list_convertible_layouts(),
        help="the layout; torch is one file of torch.save",
    )
    parser.add_argument(
        "--part", help="for torch: leaf path of what is written, such as model or model/master (default: everything)"
    )
    options.add_tag(parser)
    parser.add_argument(
        "--as",
        dest="as_tag",
        metavar="TAG",
        help="name of the new tag (default: the old one's, or the file's without .pt)",
    )
    parser.add_argument(
        "--mesh", help="the topology that the files are for, such as pp=1,dp=4,tp=2 (default: one rank)"
    )
    parser.add_argument(
        "--cut",
        action="append",
        default=[],
        metavar="MODULE",
        help="with pp in the mesh: a module after which a pipeline stage ends, such as model.layers.15; repeat it, "
        "in order, for more stages",
    )
    parser.add_argument(
        "--zero1",
        action=argparse.BooleanOptionalAction,
        help="whether xser, pt and smp have the optimizer dealt out over dp (default: as the old job did; smp: no)",
    )
    parser.add_argument(
        "--fuse-qkv",
        action=argparse.BooleanOptionalAction,
        help="from a directory of Hugging Face's: whether the job has queries, keys and values in one array",
    )
    parser.add_argument(
        "--qkv-linear",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="likewise: whether it has neuronx-distributed's layer for grouped-query attention (default: yes)",
    )
    parser.add_argument(
        "--parity", choices=("block", "file"), help="the new tag survives damaged blocks, or also the loss of a file"
    )
    parser.add_argument("--trust-pickle", action="store_true", help="load pickled objects, which can run any code")
    options.add_model(parser)
    options.add_max_memory(parser)


def run_convert(args: argparse.Namespace) -> int:
    """Run the command ``convert``, and return its exit code."""
    from xla_ckpt.cli import results
    from xla_ckpt.conversion.convert import convert

    root, tag = results.resolve_location(args.path, args.tag)
    report = convert(
        root,
        args.destination,
        tag,
        to=args.to,
        part=args.part,
        mesh=args.mesh,
        as_tag=args.as_tag,
        **options.build_state_hints(args),
        pipeline_cuts=args.cut,
        zero1=args.zero1,
        parity=args.parity,
        trust_pickle=args.trust_pickle,
        options=options.build_convert_options(args),
    )
    print_result(args, dataclasses.asdict(report), results.format_conversion)
    return 0


TIME_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def add_pin_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``pin`` and ``unpin``."""
    parser.add_argument("path", metavar="PATH", help="root directory of tags, or one tag")
    parser.add_argument("tags", metavar="TAG", nargs="*", help="which tags, if PATH is a root directory")
    options.add_json(parser)


def _resolve_named_tags(args: argparse.Namespace) -> tuple[Checkpoints, list[str]]:
    """Return the root and the given tags, after checking that each exists and was written by this library.

    The path may also be the path of a tag.

    Raises:
        UsageError: The path is a root, and no tag is given; there is no default, because it would be a guess. Or
            another library wrote one of the tags.
        NoCheckpointError: A tag does not exist.
    """
    from xla_ckpt.formats.tags import check_own_tag, list_tag_names, make_not_found_error
    from xla_ckpt.inspection.checkpoints import Checkpoints
    from xla_ckpt.inspection.tags import locate_checkpoint

    store, tag = locate_checkpoint(args.path, args.tags[0] if args.tags else None)
    if args.tags:
        tags = [*dict.fromkeys(args.tags)]
    elif tag is not None:
        tags = [tag]
    elif not (there := list_tag_names(store)):
        raise make_not_found_error(store, None)
    else:
        raise UsageError(
            "nothing says which tags are meant",
            path=store.path,
            expected=f"{args.path} TAG ..., or {args.path.rstrip('/')}/TAG",
            hint=f"Tags there, oldest first: {', '.join(there[-10:])}.",
        )
    for name in tags:
        check_own_tag(store, name)
    args.path = store.path
    return Checkpoints(store.path), tags


def add_rm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rm``."""
    add_pin_arguments(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where nobody can be asked")
    parser.add_argument(
        "--force", action="store_true", help="also tags that are pinned, being read, or the last that can be read"
    )


def run_rm(args: argparse.Namespace) -> int:
    """Run the command ``rm``, and return its exit code."""
    from xla_ckpt.storage.resolve import open_store
    from xla_ckpt.tags.deletion import check_deletable
    from xla_ckpt.tags.resolve import open_root

    root, tags = _resolve_named_tags(args)
    check_deletable(open_root(open_store(root.path)), tags, force=args.force)
    if not args.yes and not _confirm(f"Delete {', '.join(tags)} in {root.path}? [y/N] "):
        return _report_nothing_deleted()

    def delete(tag: str) -> str:
        root.delete(tag, force=args.force)
        return "deleted"

    run_for_each_tag(args, tags, delete)
    return 0


def add_retain_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``retain``."""
    from xla_ckpt.tags.retention import PERIOD_NAMES

    parser.add_argument("path", metavar="ROOT", help="root directory of tags")
    parser.add_argument("--newest", type=options.parse_positive_int, metavar="N", help="keep the N newest tags")
    parser.add_argument(
        "--best",
        action="append",
        default=[],
        metavar="NAME[:N[:max]]",
        help="keep the tags with the N smallest numbers of this name in user_content, or with the largest: "
        "loss, loss:2, eval.accuracy:3:max",
    )
    parser.add_argument(
        "--every", type=options.parse_positive_int, metavar="N", help="keep each tag whose step is a multiple of N"
    )
    for seconds, name in PERIOD_NAMES.items():
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


def run_retain(args: argparse.Namespace) -> int:
    """Run the command ``retain``, and return its exit code."""
    from xla_ckpt.formats.tags import check_own_tag, list_tag_names, make_not_found_error, resolve_root
    from xla_ckpt.inspection.checkpoints import Checkpoints
    from xla_ckpt.tags.deletion import find_refusals, retire_tag
    from xla_ckpt.tags.resolve import open_root

    policy, root = _build_policy(args), resolve_root(args.path)
    reasons = Checkpoints(args.path).why_kept(policy)
    if not reasons:
        for tag in list_tag_names(root.store)[-1:]:
            check_own_tag(root.store, tag)  # written by another library, which the error names
        raise make_not_found_error(root.store, None)
    doomed = [tag for tag, why in reasons.items() if not why]
    asks = doomed and not args.dry_run and not args.yes
    if asks and not _confirm(f"Delete {', '.join(doomed)} in {args.path}? [y/N] "):
        return _report_nothing_deleted()
    # Another process may have pinned or opened a tag since. One listing checks all tags, instead of one for each tag.
    refused = {} if args.dry_run else find_refusals(open_root(root.store.snapshot_view()), doomed, force=False)

    def act(tag: str) -> str:
        if reasons[tag]:
            return f"stays ({'; '.join(reasons[tag])})"
        if args.dry_run:
            return "would be deleted"
        if tag in refused:
            return f"stays ({refused[tag].problem})"
        try:
            retire_tag(root, tag)
        except StorageError as error:  # perhaps another user's tag: continue with the others
            failed.append(error)
            return f"stays ({error.problem})"
        return "deleted"

    failed: list[StorageError] = []
    run_for_each_tag(args, [*reasons], act)
    if not args.dry_run:
        with wrap_os_errors("deleting tags", path=args.path):
            root.clean()
    if failed:
        raise failed[0]
    return 0


def _build_policy(args: argparse.Namespace) -> Retention:
    """Return the retention policy that the arguments of ``retain`` describe."""
    from xla_ckpt.tags.retention import AnyOf, EveryNSeconds, EveryNSteps, LatestN

    policies: list[Retention] = [] if args.newest is None else [LatestN(args.newest)]
    policies += [_parse_best(text) for text in args.best]
    policies += [] if args.every is None else [EveryNSteps(args.every)]
    policies += [EveryNSeconds(seconds) for seconds in args.per]
    policies += [] if args.last is None else [_parse_last(args.last)]
    if not policies:
        raise UsageError(
            "nothing says which tags are kept", expected="--newest, --best, --every, --per-hour, --per-day or --last"
        )
    return AnyOf(tuple(policies))


def _parse_best(text: str) -> Retention:
    from xla_ckpt.tags.retention import BestN

    match text.split(":"):
        case ["", *_]:
            pass
        case [name]:
            return BestN(name)
        case [name, count] if options.is_positive_int(count):
            return BestN(name, int(count))
        case [name, count, ("min" | "max") as mode] if options.is_positive_int(count):
            return BestN(name, int(count), mode)
    raise UsageError("--best makes no sense", expected="NAME, NAME:N or NAME:N:max, such as loss:2", found=text)


def _parse_last(text: str) -> Retention:
    from xla_ckpt.tags.retention import LatestDuration

    count, unit = text[:-1], TIME_UNITS.get(text[-1:])
    if unit is None or not count.isdecimal():
        raise UsageError("--last is no time", expected="a number and a unit: 30m, 12h, 7d, 4w", found=text)
    try:
        return LatestDuration(datetime.timedelta(**{unit: int(count)}))
    except (OverflowError, ValueError) as error:  # ValueError: more digits than Python converts to an int
        raise UsageError(
            "--last is longer than any time that can be counted",
            expected=f"at most {datetime.timedelta.max.days}d",
            found=text[:40],
        ) from error


def run_pin(args: argparse.Namespace) -> int:
    """Run the command ``pin``, and return its exit code."""
    root, tags = _resolve_named_tags(args)
    run_for_each_tag(args, tags, lambda tag: "pinned" if root.pin(tag) else "was pinned already")
    return 0


def run_unpin(args: argparse.Namespace) -> int:
    """Run the command ``unpin``, and return its exit code."""
    root, tags = _resolve_named_tags(args)
    run_for_each_tag(args, tags, lambda tag: "unpinned" if root.unpin(tag) else "was not pinned")
    return 0


def _confirm(question: str) -> bool:
    """Return True if the user confirms.

    Raises:
        UsageError: The input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise UsageError("nobody can be asked whether tags may be deleted", expected="a terminal, or --yes")
    print(make_printable(question), end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _report_nothing_deleted() -> int:
    """Print that nothing was deleted, and return the exit code."""
    print("xla-ckpt: nothing was deleted", file=sys.stderr)
    return 1


MAX_LEASE_WAIT_SECONDS = 120.0
"""Maximum number of seconds that ``clean``, ``adopt`` and ``upload`` wait to see if another process saves there."""


def add_clean_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``clean``."""
    parser.add_argument("path", metavar="ROOT", help="root directory of tags")
    options.add_json(parser)


def run_clean(args: argparse.Namespace) -> int:
    """Run the command ``clean``, and return its exit code."""
    from xla_ckpt.cli import results
    from xla_ckpt.formats.tags import list_roots_below, list_tag_names, make_not_found_error, resolve_root

    with _use_root(resolve_root(args.path), "cleaning up") as root:
        cleaned = root.clean_all(MAX_LEASE_WAIT_SECONDS)
        if not (cleaned.removed or cleaned.kept or list_tag_names(root.store)) and list_roots_below(root.store):
            raise make_not_found_error(root.store, None)
    kept = [{"name": name, "why": why} for name, why in cleaned.kept.items()]
    print_result(args, {"path": args.path, "removed": [*cleaned.removed], "kept": kept}, results.format_cleanup)
    return 0


def add_adopt_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``adopt``."""
    parser.add_argument("path", metavar="ROOT", help="root directory of tags, in an object store")
    parser.add_argument("tags", metavar="TAG", nargs="*", help="which tags (default: all)")
    options.add_json(parser)


def run_adopt(args: argparse.Namespace) -> int:
    """Run the command ``adopt``, and return its exit code."""
    from xla_ckpt.formats.tags import make_not_found_error, resolve_root

    with _use_root(resolve_root(args.path), "adopting tags") as root:
        result = root.adopt(args.tags, MAX_LEASE_WAIT_SECONDS)
        known = [entry.tag for entry in root.list_entries()]
        new = {*result.adopted}
        said = {tag: "adopted" if tag in new else "was known already" for tag in args.tags or result.adopted or known}
        said |= {tag: f"not adopted ({why})" for tag, why in result.refused.items()}
        if not said:
            raise make_not_found_error(root.store, None)
        for tag in args.tags:
            if tag not in known and tag not in result.refused:
                raise make_not_found_error(root.store, tag)
        run_for_each_tag(args, [*said], said.__getitem__)
    return int(bool(result.refused))


def add_upload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``upload``."""
    parser.add_argument("path", metavar="DIR", help="directory that a job saved to first (local=)")
    parser.add_argument("destination", metavar="ROOT", help="where its tags go: s3://bucket/run")
    options.add_json(parser)


def run_upload(args: argparse.Namespace) -> int:
    """Run the command ``upload``, and return its exit code."""
    from xla_ckpt.features.local_first.upload import UPLOADS
    from xla_ckpt.features.local_first.upload_rules import describe_upload_state
    from xla_ckpt.formats.tags import make_not_found_error, resolve_root
    from xla_ckpt.inspection.tags import resolve_local_and_remote

    near, far = resolve_local_and_remote(args.destination, args.path)
    resolve_root(args.path)
    uploader = UPLOADS.get_uploader(near, far)
    with _use_root(uploader.root, "uploading") as root:
        if not root.list_entries():
            error = make_not_found_error(root.store, None)
            error.problem = "there is no tag of this library, which could be uploaded"
            raise error
        uploader.root.remote.list_entries()  # raises the error once if it cannot be read
        root.acquire_lease(MAX_LEASE_WAIT_SECONDS)
        entries = {entry.tag: entry for entry in root.list_entries()}
        before = {tag for tag, entry in entries.items() if uploader.root.read_journal(entry).is_remote}
        try:
            uploader.wake(None)
            uploader.finish()
        finally:
            uploader.stop()  # after an interrupt, its thread ends soon instead of after the last tag
        remote = {entry.tag: entry for entry in uploader.root.remote.list_entries()}

        def outcome(tag: str) -> str:
            uploader.wait_uploaded(entries[tag].sequence, None)
            return describe_upload_state(entries[tag], remote.get(tag)) if tag in before else "uploaded"

        run_for_each_tag(args, [*entries], outcome)
    return 0


@contextlib.contextmanager
def _use_root(root: Root, operation: str) -> Iterator[Root]:
    """Yield a root, and release the leases of this process when the block ends."""
    from xla_ckpt.tags.lease import LEASES

    try:
        with wrap_os_errors(operation, path=root.path):
            yield root
    finally:
        LEASES.release_all()
