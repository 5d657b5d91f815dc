"""``nxd_convert_zero_checkpoints``: neuronx-distributed's converter for ZeRO-1 optimizers, with its options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import xla_ckpt
from neuron_compat.nxd.exports import attach_exports
from xla_ckpt.facade import convert_zero_checkpoints

__getattr__, __dir__ = attach_exports(__name__)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nxd_convert_zero_checkpoints",
        description="Write the ZeRO-1 optimizer of a checkpoint for another number of data-parallel ranks.",
    )
    parser.add_argument("--input_dir", required=True, help="directory of the tag: optim lies in it")
    parser.add_argument("--output_dir", required=True, help="directory to make; if it is there, without an optim")
    parser.add_argument("--num_workers", type=int, default=8, help="threads that read, at most (default: 8)")
    parser.add_argument("--dp_size", type=int, help="data-parallel ranks of the new job, for --convert_to_sharded")
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--convert_to_full", action="store_true", help="one file for each tp and pp rank")
    form.add_argument("--convert_to_sharded", action="store_true", help="one file for each dp, tp and pp rank")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 0, or 1 on failure (2 for invalid arguments)."""
    parser = _build_parser()
    args = parser.parse_args(arguments)
    if args.convert_to_sharded and args.dp_size is None:
        parser.error("--convert_to_sharded needs --dp_size")
    try:
        done = convert_zero_checkpoints(
            args.input_dir,
            args.output_dir,
            None if args.convert_to_full else args.dp_size,
            num_workers=args.num_workers,
        )
    except xla_ckpt.CheckpointError as error:
        print(f"nxd_convert_zero_checkpoints: {error}", file=sys.stderr)
        return 2 if isinstance(error, xla_ckpt.UsageError) else 1
    what = "all data-parallel ranks together" if done.dp is None else f"{done.dp} data-parallel ranks"
    print(f"{done.path}: {done.files} files for {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
