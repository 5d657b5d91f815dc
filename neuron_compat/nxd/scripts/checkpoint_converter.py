"""Base class of NxD checkpoint converters: parses their options and names the `xla-ckpt` command to run."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from xla_ckpt import UsageError


class CheckpointConverterBase:
    """Base class of `CheckpointConverterLlama` and others. It converts nothing; its error names the command to use."""

    def get_arg_parser(self) -> argparse.ArgumentParser:
        """Return the parser of the options that describe the conversion. `run` needs no others."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--input_dir", required=True)
        parser.add_argument("--output_dir", required=True)
        parser.add_argument("--config", help="config.json of the model")
        for axis in ("tp", "pp", "ep"):
            parser.add_argument(f"--{axis}_size", type=int, default=1)
        parser.add_argument("--kv_size_multiplier", type=int, default=1)
        parser.add_argument("--model_key", default="model")
        parser.add_argument("--load_xser", type=int, default=0)
        parser.add_argument("--save_xser", type=int, default=0)
        direction = parser.add_mutually_exclusive_group()
        for name in ("convert_from_full_state", "convert_to_full_state", "convert_from_xser", "convert_to_xser"):
            direction.add_argument(f"--{name}", action="store_true")
        return parser

    def run(self, args: Any) -> None:
        """Raise an error that names the equivalent command.

        Raises:
            xla_ckpt.UsageError: Always.
        """
        # Scripts pass the folder of the model in a tag; the commands read the tag.
        source = args.input_dir if args.convert_from_full_state else args.input_dir.rstrip("/").removesuffix("/model")
        command = ["xla-ckpt", "export", source, args.output_dir]
        if not args.convert_to_full_state:
            layout = "xser" if args.save_xser or args.convert_to_xser else "pt"
            sizes = {"pp": args.pp_size, "dp": args.ep_size, "ep": args.ep_size, "tp": args.tp_size}  # ep divides dp
            mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items())
            command = ["xla-ckpt", "convert", source, args.output_dir, "--to", layout, "--mesh", mesh]
        if args.config:
            command += ["--config", args.config]
        if args.kv_size_multiplier > 1:
            command += ["--kv-size-multiplier", str(args.kv_size_multiplier)]
        raise UsageError(
            f"{type(self).__name__} is not there to convert checkpoints", hint=f"Run: {shlex.join(command)}"
        )
