"""Commands that write tags anew: ``export`` and ``convert``."""

from __future__ import annotations

import argparse
import dataclasses

from xla_ckpt.cli import options
from xla_ckpt.cli.output import print_answer


def add_export(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``export``."""
    options.add_path(parser)
    options.add_json(parser)
    from xla_ckpt.api.export import FLOATING
    from xla_ckpt.layouts.hugging_face import MAX_FILE_BYTES
    from xla_ckpt.tree import schema

    parser.add_argument("destination", metavar="DST", help="directory to make")
    parser.add_argument(
        "--dtype", choices=FLOATING, help="element type of all floating-point arrays (default: as stored)"
    )
    options.add_tag(parser)
    parser.add_argument(
        "--part",
        default=schema.MODEL,
        help="leaf path of what is exported, such as model/master (default: %(default)s)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=options.size,
        default=MAX_FILE_BYTES,
        metavar="SIZE",
        help="largest size of a file (default: 5GB)",
    )
    options.add_model(parser)
    options.add_max_memory(parser)


def export(args: argparse.Namespace) -> int:
    """The command ``export``; returns its exit code."""
    from xla_ckpt.api.export import export_hf
    from xla_ckpt.cli import answers, facts
    from xla_ckpt.storage.door import store_at

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
        shardings=options.rules(args),
        llama=options.llama_job(args),
        options=options.of_conversion(args),
    )
    answer = {
        "path": report.path,
        "tag": report.tag,
        "files": list(report.files),
        "arrays": report.arrays,
        "nbytes": report.nbytes,
        "config": store_at(report.path).has("config.json"),
    }
    print_answer(args, answer, answers.exported)
    return 0


def add_convert(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``convert``."""
    options.add_path(parser)
    options.add_json(parser)
    from xla_ckpt.layouts.registry import converted

    parser.add_argument(
        "destination",
        metavar="DST",
        help="root directory of the new tag; for safetensors, peft the directory to make, for torch the file (out.pt)",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=converted(),
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


def convert(args: argparse.Namespace) -> int:
    """The command ``convert``; returns its exit code."""
    from xla_ckpt.api.convert import convert
    from xla_ckpt.cli import answers, facts

    root, tag = facts.locate(args.path, args.tag)
    report = convert(
        root,
        args.destination,
        tag,
        to=args.to,
        part=args.part,
        mesh=args.mesh,
        as_tag=args.as_tag,
        **options.about(args),
        pipeline_cuts=args.cut,
        zero1=args.zero1,
        parity=args.parity,
        trust_pickle=args.trust_pickle,
        options=options.of_conversion(args),
    )
    print_answer(args, dataclasses.asdict(report), answers.conversion)
    return 0
