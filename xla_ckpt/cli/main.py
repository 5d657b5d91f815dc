"""``xla-ckpt``: look into checkpoint directories, and write tags anew.

Exit codes: 0, all is well; 1, a problem (no such tag, damage); 2, wrong usage.

Each command imports what it needs when it runs, and gets its arguments when it is the one that is called: a person who
asks for help, or lists some tags, waits for nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from xla_ckpt import __version__
from xla_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from rich.console import RenderableType

PATH = (
    "root directory of tags, or one tag, or one file (.pt), or a set of SageMaker model parallel's parts "
    "(checkpoint.pt for checkpoint.pt_0_0, ...)"
)


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of a command line that calls the command `chosen`. Other commands have no arguments in it."""
    parser = argparse.ArgumentParser(
        prog="xla-ckpt", description="Look into checkpoint directories, and write tags anew."
    )
    parser.add_argument("--version", action="version", version=f"xla-ckpt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        made = commands.add_parser(name, help=command.help, description=command.help)
        if name == chosen:
            made.add_argument("path", metavar="PATH", help=PATH)
            made.add_argument("--json", action="store_true", help="print JSON, for scripts")
            made.set_defaults(action=command.action)
            command.add_arguments(made)
    return parser


def _add_nothing(_: argparse.ArgumentParser) -> None:
    """Arguments of a command that has those of all commands only."""


def _add_tag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tag", help="which one (default: the newest)")


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_tag(parser)
    parser.add_argument(
        "--report", action="store_true", help="where the time of its save went, stage by stage, rank by rank"
    )
    parser.add_argument("--leaf", metavar="PATTERN", help="only leaves like this: 'model/*', 'optimizer'")
    _add_model(parser)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_tag(parser)
    parser.add_argument("--all", action="store_true", help="all tags of the directory")
    parser.add_argument(
        "--repair", action="store_true", help="first give tags that were saved with parity back what they have lost"
    )


def _add_explain(parser: argparse.ArgumentParser) -> None:
    _add_tag(parser)
    parser.add_argument("--mesh", required=True, metavar="MESH", help="such as pp=1,dp=2,tp=4")
    _add_model(parser)


def _add_export(parser: argparse.ArgumentParser) -> None:
    from xla_ckpt.api.export import FLOATING
    from xla_ckpt.layouts.hugging_face import MAX_FILE_BYTES
    from xla_ckpt.tree import schema

    parser.add_argument("destination", metavar="DST", help="directory to make")
    parser.add_argument(
        "--hf",
        action="store_true",
        help="as Hugging Face safetensors: the default, and what there is so far; with --config also by its names",
    )
    parser.add_argument(
        "--dtype", choices=FLOATING, help="element type of all floating-point arrays (default: as stored)"
    )
    _add_tag(parser)
    parser.add_argument("--part", default=schema.MODEL, help="leaf path of what is exported (default: %(default)s)")
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default=MAX_FILE_BYTES,
        metavar="SIZE",
        help="largest size of a file (default: 5GB)",
    )
    _add_model(parser)
    _add_max_memory(parser)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    from xla_ckpt.layouts.registry import converted

    parser.add_argument(
        "destination",
        metavar="DST",
        help="root directory of the new tag; for safetensors the directory to make, for torch the file (out.pt)",
    )
    parser.add_argument("--to", required=True, choices=converted(), help="the layout; torch is one file of torch.save")
    parser.add_argument("--part", help="for torch: leaf path of what is written, such as model (default: everything)")
    _add_tag(parser)
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
    parser.add_argument("--trust-pickle", action="store_true", help="load pickled objects, which can run any code")
    _add_model(parser)
    _add_max_memory(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    """What a person may say of the model whose state a tag holds."""
    from xla_ckpt.api.llama import HARDWARE

    parser.add_argument(
        "--like",
        metavar="MODULE:FUNCTION",
        help="for tags of neuronx-distributed and SageMaker model parallel, and files whose optimizer numbers its "
        "parameters: a function, of a module in the current directory or on PYTHONPATH, that returns the model "
        "(its values do not matter), or (model, optimizer), which converting an optimizer's state needs",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the config.json of a Llama-like model, in place of --like; exports get Hugging Face's names by it",
    )
    parser.add_argument(
        "--kv-size-multiplier",
        type=int,
        metavar="N",
        help="with --config: how many tensor-parallel ranks hold each key-value head",
    )
    parser.add_argument(
        "--hardware", choices=HARDWARE, help="with --kv-size-multiplier: trn1 and trn2 order the heads differently"
    )
    _add_rules(parser)


def _add_max_memory(parser: argparse.ArgumentParser) -> None:
    from xla_ckpt.engine.stream import MAX_MEMORY

    parser.add_argument(
        "--max-memory",
        type=_size,
        default=MAX_MEMORY,
        metavar="SIZE",
        help="array data in memory at a time (default: 1 GiB)",
    )


def _size(text: str) -> int:
    from xla_ckpt.cli import facts

    try:
        return facts.nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sharding",
        nargs=2,
        action="append",
        metavar=("PATTERN", "SPEC"),
        help="split leaves in which PATTERN is found like SPEC, one word a dim: 'up_proj' 'tp,_', 'qkv' 'tp*3,_', "
        "'emb' 'dp+tp'; 'norm' '_' is not split",
    )


def _rules(args: argparse.Namespace) -> list[tuple[str, Any]]:
    from xla_ckpt.cli import facts

    return [(pattern, facts.spec(text)) for pattern, text in args.sharding or ()]


def _model_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says about a Llama-like model."""
    return {
        "config": args.config,
        "kv_size_multiplier": args.kv_size_multiplier,
        "hardware": args.hardware,
    }


def _convert(args: argparse.Namespace) -> int:
    from xla_ckpt.api.convert import convert
    from xla_ckpt.cli import facts, render

    root, tag = facts.locate(args.path, args.tag)
    model, optimizer = facts.targets(args.like)
    report = convert(
        root,
        args.destination,
        tag,
        to=args.to,
        part=args.part,
        mesh=args.mesh,
        as_tag=args.as_tag,
        model=model,
        optimizer=optimizer,
        fuse_qkv=args.fuse_qkv,
        qkv_linear=args.qkv_linear,
        shardings=_rules(args),
        **_model_of(args),
        pipeline_cuts=args.cut,
        zero1=args.zero1,
        max_memory=args.max_memory,
        trust_pickle=args.trust_pickle,
        progress=False if args.json else None,
    )
    _print(args, dataclasses.asdict(report), render.conversion)
    return 0


def _export(args: argparse.Namespace) -> int:
    from xla_ckpt.api.export import export_hf
    from xla_ckpt.cli import facts, render

    root, tag = facts.locate(args.path, args.tag)
    model, _ = facts.targets(args.like)
    report = export_hf(
        root,
        args.destination,
        tag,
        part=args.part,
        max_shard_bytes=args.max_shard_size,
        dtype=args.dtype,
        model=model,
        shardings=_rules(args),
        **_model_of(args),
        max_memory=args.max_memory,
        progress=False if args.json else None,
    )
    answer = {
        "path": report.path,
        "tag": report.tag,
        "files": list(report.files),
        "arrays": report.arrays,
        "nbytes": report.nbytes,
    }
    _print(args, answer, render.exported)
    return 0


def _explain(args: argparse.Namespace) -> int:
    from xla_ckpt.cli import facts, render

    root, tag = facts.locate(args.path, args.tag)
    known = _model_of(args)
    answer = facts.explain_facts(
        root, facts.newest(root, tag), args.mesh, _rules(args), *facts.targets(args.like), **known
    )
    _print(args, answer, render.explanation)
    return int(not answer["ok"])


def _ls(args: argparse.Namespace) -> int:
    from xla_ckpt.cli import facts, render

    root, tag = facts.locate(args.path, None)
    answer = facts.list_facts(root) if tag is None else facts.tag_list_facts(root, tag)
    _print(args, answer, render.tag_table)
    return int(any(t["problem"] for t in answer["tags"]))


def _show(args: argparse.Namespace) -> int:
    from xla_ckpt.cli import bars, facts, render

    root, tag = facts.locate(args.path, args.tag)
    if args.report:
        _print(args, facts.report_facts(root, facts.newest(root, tag)), bars.report)
        return 0
    known = _model_of(args)
    answer = facts.show_facts(
        root, facts.newest(root, tag), args.leaf, _rules(args), *facts.targets(args.like), **known
    )
    _print(args, answer, render.tag)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from xla_ckpt.cli import facts, render

    root, tag = facts.locate(args.path, args.tag)
    if args.all and tag is None:
        tags = [t["tag"] for t in facts.list_facts(root)["tags"]]
        if not tags:
            facts.newest(root, None)  # says that there is none
    else:
        tags = [facts.newest(root, tag)]
    answers = []
    for name in tags:
        answers.append(facts.verify_facts(root, name, repairs=args.repair))
        if not args.json:
            _print(args, answers[-1], render.verdict)
    if args.json:
        _print(args, answers if args.all else answers[0], render.verdict)
    return int(not all(a["ok"] for a in answers))


def _print(args: argparse.Namespace, answer: Any, how: Callable[[Any], RenderableType]) -> None:
    if args.json:
        print(json.dumps(answer, indent=1))
    else:
        from rich.console import Console

        from xla_ckpt.cli import render

        # Long paths and errors are folded, never cut; a pipe gets lines as long as they are.
        console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
        console.print(how(answer), soft_wrap=not sys.stdout.isatty() and how is render.verdict)


@dataclasses.dataclass(frozen=True, slots=True)
class _Command:
    """A command, without its arguments."""

    help: str
    action: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None]


_COMMANDS = {
    "ls": _Command("List the tags of a directory, oldest first.", _ls, _add_nothing),
    "show": _Command("Show what a tag holds.", _show, _add_show),
    "verify": _Command("Read all bytes of a tag and compare them with their digests, or CRC-32.", _verify, _add_verify),
    "explain": _Command("Say what a restore over another mesh would read, before it reads it.", _explain, _add_explain),
    "export": _Command("Write the model of a tag as Hugging Face safetensors.", _export, _add_export),
    "convert": _Command("Write a tag anew, in another layout or for another topology.", _convert, _add_convert),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    args = _parser(next((word for word in words if not word.startswith("-")), None)).parse_args(words)
    try:
        return int(args.action(args))
    except CheckpointError as error:
        print(f"xla-ckpt: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # `| head` has seen enough; the interpreter must not complain about it at exit
        return 0


if __name__ == "__main__":
    sys.exit(main())
