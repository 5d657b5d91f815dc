"""Commands that look at tags: ``ls``, ``show``, ``verify``, ``explain``, ``diff``."""

from __future__ import annotations

import argparse

from xla_ckpt.cli import options
from xla_ckpt.cli.output import print_answer
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)


def add_ls(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``ls``."""
    options.add_path(parser)
    options.add_json(parser)
    parser.add_argument(
        "--local", metavar="DIR", help="the directory whose tags go to the bucket PATH: say of each tag where it is"
    )


def ls(args: argparse.Namespace) -> int:
    """The command ``ls``; returns its exit code."""
    from xla_ckpt.cli import facts
    from xla_ckpt.engine.garbage_collection import collector_paused
    from xla_ckpt.tables import render

    root, tag = facts.locate(args.path, None)
    with collector_paused():
        answer = facts.list_facts(root, args.local) if tag is None else facts.tag_list_facts(root, tag)
        print_answer(args, answer, render.tag_table)
    return int(any(t["problem"] for t in answer["tags"]))


def add_show(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``show``."""
    options.add_path_and_tag(parser)
    options.add_json(parser)
    parser.add_argument(
        "--report", action="store_true", help="where the time of its save went, stage by stage, rank by rank"
    )
    options.add_leaf(parser)
    options.add_model(parser)


def show(args: argparse.Namespace) -> int:
    """The command ``show``; returns its exit code."""
    from xla_ckpt.api.checkpoints import Checkpoints
    from xla_ckpt.cli import facts
    from xla_ckpt.engine.garbage_collection import collector_paused
    from xla_ckpt.tables import bars, render

    root, tag = facts.locate(args.path, args.tag)
    if args.report:
        print_answer(args, Checkpoints(root).timings(tag), bars.report)
        return 0
    with collector_paused():
        contents = Checkpoints(root).show(facts.newest(root, tag), leaf=args.leaf, **options.about(args))
        print_answer(args, contents.to_json(), render.tag)
    return 0


def add_verify(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``verify``."""
    options.add_path_and_tag(parser)
    options.add_json(parser)
    parser.add_argument("--all", action="store_true", help="all tags of the directory")
    parser.add_argument(
        "--repair", action="store_true", help="first give tags that were saved with parity back what they have lost"
    )


def verify(args: argparse.Namespace) -> int:
    """The command ``verify``; returns its exit code."""
    from xla_ckpt.cli import facts
    from xla_ckpt.tables import render
    from xla_ckpt.tree import path

    root, tag = facts.locate(args.path, args.tag)
    if args.all and tag is not None:
        args.parser.error(f"--all means all tags of a root directory, and {tag!r} names one of them: leave one out")
    if args.all:
        listed = facts.list_facts(root)
        tags = [t["tag"] for t in listed["tags"]]
        if not tags:
            facts.newest(root, None)  # says that there is none
        if others := [b["name"] for b in listed["beside"]]:
            about = "%s: not verified, since they are no tags, or not complete: %s. Give the path of one to verify it"
            logger.warning(about, root, path.listed(others))
    else:
        tags = [facts.newest(root, tag)]
    answers = []
    for name in tags:
        answer = facts.verify_facts(root, name, repairs=args.repair, of_many=args.all)
        answers.append(answer | {"unverified": 0 if args.all or tag else facts.tags_beside(root, name)})
        if not args.json:
            print_answer(args, answers[-1], render.verdict)
    if args.json:
        print_answer(args, answers if args.all else answers[0], render.verdict)
    return int(not all(a["ok"] for a in answers))


def add_explain(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``explain``."""
    options.add_path_and_tag(parser)
    options.add_json(parser)
    parser.add_argument("--mesh", required=True, metavar="MESH", help="such as pp=1,dp=2,tp=4")
    options.add_model(parser)


def explain(args: argparse.Namespace) -> int:
    """The command ``explain``; returns its exit code."""
    from xla_ckpt.api.explain import explain
    from xla_ckpt.cli import facts
    from xla_ckpt.tables import render

    root, tag = facts.locate(args.path, args.tag)
    explanation = explain(root, tag, mesh=args.mesh, **options.about(args))
    print_answer(args, explanation.to_json(), render.explanation)
    return int(not explanation.ok)


def add_diff(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diff``."""
    parser.add_argument("a", metavar="A", help=options.PATH)
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


def diff(args: argparse.Namespace) -> int:
    """The command ``diff``; returns its exit code."""
    from xla_ckpt.api.diff import diff
    from xla_ckpt.cli import facts
    from xla_ckpt.tables import moves

    if args.second is not None:
        if args.tag_a is not None or args.tag_b is not None:
            args.parser.error("three words name a root directory and two of its tags: leave --tag-a and --tag-b out")
        args.tag_a, args.b = args.b, args.second
    a = facts.locate(args.a, args.tag_a)
    b = facts.locate_beside(a[0], args.b, args.tag_b)
    how = options.of_conversion(args)
    difference = diff(a[0], b[0], a[1], b[1], leaf=args.leaf, options=how, **options.about(args))
    print_answer(args, difference.to_json(), moves.difference)
    return int(not difference.same)
