"""Arguments that several commands share, and the values parsed from them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xla_ckpt.conversion.llama.job import LlamaJob
    from xla_ckpt.options import ConvertOptions

MAX_DIGITS = 18
"""Maximum number of digits in an argument, because Python rejects thousands of them."""

PATH_HELP = (
    "root directory of tags, or one tag, or one file (.pt), or a set of SageMaker model parallel's parts "
    "(checkpoint.pt for checkpoint.pt_0_0, ...)"
)


def add_path(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the path of the tags."""
    parser.add_argument("path", metavar="PATH", help=PATH_HELP)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option for JSON output."""
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def add_path_and_tag(parser: argparse.ArgumentParser) -> None:
    """Add the path, and the tag as an option or as the word after the path, as in commands that keep tags."""
    add_path(parser)
    parser.add_argument(
        "tag", metavar="TAG", nargs="?", default=argparse.SUPPRESS, action=_SingleTagAction, help="the same as --tag"
    )
    add_tag(parser)


def add_tag(parser: argparse.ArgumentParser) -> None:
    """Add the option for the tag."""
    parser.add_argument("--tag", action=_SingleTagAction, help="which one (default: the newest)")


class _SingleTagAction(argparse.Action):
    """Argparse action that stores a tag, and raises an error for a second one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        named = getattr(namespace, self.dest, None)
        if named not in (None, values):
            raise argparse.ArgumentError(
                self, f"two tags are named, {named!r} and {values!r}, and only one can be meant"
            )
        setattr(namespace, self.dest, values)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the model whose state a tag contains."""
    from xla_ckpt.conversion.llama.job import HARDWARE_ADJACENCY

    parser.add_argument(
        "--like",
        metavar="MODULE:FUNCTION",
        help="for tags of neuronx-distributed and SageMaker model parallel, and files whose optimizer numbers its "
        "parameters: a function, of a module in the current directory or on PYTHONPATH, that returns the model "
        "(its values do not matter; a float32 one takes master weights into layouts that have no place for them), or "
        "(model, optimizer), which converting an optimizer's state needs",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the config.json of a Llama-like model, in place of --like; exports get Hugging Face's names by it, and "
        "conversions the splits of a tag without any",
    )
    parser.add_argument(
        "--kv-size-multiplier",
        type=parse_positive_int,
        metavar="N",
        help="with --config: how many tensor-parallel ranks hold each key-value head",
    )
    parser.add_argument(
        "--hardware",
        choices=HARDWARE_ADJACENCY,
        help="with --kv-size-multiplier: trn1 and trn2 order the heads differently",
    )
    add_sharding(parser)


def add_leaf(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects leaves."""
    parser.add_argument(
        "--leaf",
        metavar="PATTERN",
        help="only leaves at or below a name, or like a pattern: 'model/layers.0', 'optimizer', 'model/*bias'",
    )


def add_max_memory(parser: argparse.ArgumentParser) -> None:
    """Add the option that limits the memory of arrays."""
    from xla_ckpt.options import DEFAULT_MAX_MEMORY

    parser.add_argument(
        "--max-memory",
        type=parse_size_argument,
        default=DEFAULT_MAX_MEMORY,
        metavar="SIZE",
        help="array data in memory at a time (default: 1 GiB)",
    )


def is_positive_int(text: str) -> bool:
    """Return True if a text is an integer of at least 1."""
    return text.isdecimal() and len(text) <= MAX_DIGITS and int(text) > 0


def parse_positive_int(text: str) -> int:
    """Parse an integer of at least 1 for argparse."""
    if not is_positive_int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def parse_size_argument(text: str) -> int:
    """Parse a number of bytes for argparse."""
    from xla_ckpt.cli import results

    try:
        return results.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_sharding(parser: argparse.ArgumentParser) -> None:
    """Add the option for sharding rules."""
    parser.add_argument(
        "--sharding",
        nargs=2,
        action="append",
        metavar=("PATTERN", "SPEC"),
        help="split leaves in which PATTERN is found like SPEC, one word a dim: 'up_proj' 'tp,_', 'qkv' 'tp*3,_', "
        "'emb' 'dp+tp', 'experts.gate_up' 'ep,_,tp*2'; 'norm' '_' is not split",
    )


def parse_sharding_rules(args: argparse.Namespace) -> list[tuple[str, Any]]:
    """Return the sharding rules of the command line."""
    from xla_ckpt.cli import results

    return [(pattern, results.parse_spec(text)) for pattern, text in args.sharding or ()]


def build_state_hints(args: argparse.Namespace) -> dict[str, Any]:
    """Return the hints about the state in a tag from the command line, as keyword arguments."""
    from xla_ckpt.cli import results

    model, optimizer = results.build_targets(args.like)
    return {
        "shardings": parse_sharding_rules(args),
        "model": model,
        "optimizer": optimizer,
        "llama": build_llama_job(args),
    }


def build_llama_job(args: argparse.Namespace) -> LlamaJob:
    """Return the Llama-like model and job described on the command line."""
    from xla_ckpt.conversion.llama.job import LlamaJob

    return LlamaJob(
        args.config,
        kv_size_multiplier=args.kv_size_multiplier,
        hardware=args.hardware,
        fuse_qkv=getattr(args, "fuse_qkv", None),
        qkv_linear=getattr(args, "qkv_linear", True),
    )


def build_convert_options(args: argparse.Namespace) -> ConvertOptions:
    """Return the options of a conversion."""
    from xla_ckpt.options import ConvertOptions

    return ConvertOptions(max_memory=args.max_memory, progress=False if args.json else None)
