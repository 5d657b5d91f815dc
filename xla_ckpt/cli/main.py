"""Entry point of ``xla-ckpt``: the argument parsers, the table of commands, and exit codes.

Exit codes: 0, success; 1, a problem (missing tag, corruption, a difference); 2, an error before anything was changed,
for example invalid arguments (`USAGE_ERRORS`); 130, Ctrl-C. docs/command-line.md has the table.

Each command imports its dependencies when it runs, and only the called command builds its arguments. Help and ``ls``
therefore start without loading anything else.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

from xla_ckpt import __version__
from xla_ckpt.cli import commands, completion
from xla_ckpt.cli.output import translate_log_messages, translate_stdout_errors, translate_to_options
from xla_ckpt.cli.selftest import command as selftest
from xla_ckpt.display import make_lines_printable
from xla_ckpt.errors import CheckpointError, InvalidTagError, UsageError
from xla_ckpt.keywords import suggest

USAGE_ERRORS = (UsageError, InvalidTagError)
"""Errors that exit with code 2, as argparse errors do. All others exit with 1."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """Command without its arguments."""

    help: str
    action: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    examples: str
    """Example command lines at the end of the help."""


def _run_completion(args: argparse.Namespace) -> int:
    """Run ``completion``, which needs the arguments of all commands."""
    parsers = _build_parsers()[1]
    for name, command in COMMANDS.items():
        command.add_arguments(parsers[name])
    return completion.print_completion_script(args, parsers)


COMMANDS: dict[str, _Command] = {
    "ls": _Command(
        help="List the tags of a directory, oldest first; or the roots below it, where it has no tags itself. The size "
        "of a tag is that of its arrays, each counted once; where no index says that, that of its files.",
        action=commands.run_ls,
        add_arguments=commands.add_ls_arguments,
        examples="""\
  xla-ckpt ls runs/lm                      tags, oldest first
  xla-ckpt ls runs                         all roots below, and their newest tags
  xla-ckpt ls s3://bucket/lm --local /nvme/lm    where each tag is: local, uploading 40 %, remote, both
  xla-ckpt ls runs/lm | cut -f1            in a pipe: tabs between columns""",
    ),
    "show": _Command(
        help="Show what a tag holds: parts, arrays, plain values.",
        action=commands.run_show,
        add_arguments=commands.add_show_arguments,
        examples="""\
  xla-ckpt show runs/lm                    the newest tag
  xla-ckpt show runs/lm step_10 --leaf model/layers.0
  xla-ckpt show runs/lm --leaf 'optimizer/*/exp_avg'
  xla-ckpt show runs/lm --report           where the time of its save went""",
    ),
    "verify": _Command(
        help="Read all bytes of a tag and compare them with their digests, or CRC-32. It says how many bytes it read: "
        "copies and padding, too.",
        action=commands.run_verify,
        add_arguments=commands.add_verify_arguments,
        examples="""\
  xla-ckpt verify runs/lm                  the newest tag
  xla-ckpt verify runs/lm --all            every tag; exit code 1 if one is damaged""",
    ),
    "explain": _Command(
        help="Say what a restore over another mesh would read, before it reads it.",
        action=commands.run_explain,
        add_arguments=commands.add_explain_arguments,
        examples="""\
  xla-ckpt explain runs/lm --mesh dp=2,tp=4
  xla-ckpt explain runs/lm --mesh tp=8 --sharding up_proj tp,_""",
    ),
    "diff": _Command(
        help="Say what differs between two tags, and by how much. Exit code 1 if anything does.",
        action=commands.run_diff,
        add_arguments=commands.add_diff_arguments,
        examples="""\
  xla-ckpt diff runs/lm step_10 step_20    two tags of a root
  xla-ckpt diff runs/lm/step_10 runs/lm/step_20
  xla-ckpt diff runs/lm/step_10 step_20 --leaf model      another tag of the same root
  xla-ckpt diff runs/lm runs/dcp                          the newest tags of two roots, of any layouts""",
    ),
    "view": _Command(
        help="Show tags, arrays, comparisons and plans as pages in a browser of this machine, or as one file of HTML.",
        action=commands.run_view,
        add_arguments=commands.add_view_arguments,
        examples="""\
  xla-ckpt view runs/lm                    prints an address; Ctrl-C ends it
  xla-ckpt view s3://bucket/lm --port 8000
  xla-ckpt view runs/lm --html run.html --against step_10 --leaf 'model/layers.0'""",
    ),
    "export": _Command(
        help="Write the model of a tag as Hugging Face safetensors.",
        action=commands.run_export,
        add_arguments=commands.add_export_arguments,
        examples="""\
  xla-ckpt export runs/lm hf                              safetensors and their index, with the names of the tag
  xla-ckpt export runs/lm hf --config config.json         a Llama-like model by Hugging Face's names, with config.json
  xla-ckpt export runs/lm hf --config config.json --dtype bfloat16""",
    ),
    "convert": _Command(
        help="Write a tag anew, in another layout or for another topology.",
        action=commands.run_convert,
        add_arguments=commands.add_convert_arguments,
        examples="""\
  xla-ckpt convert runs/lm native --to native               any layout into this library's own
  xla-ckpt convert runs/lm nxd --to xser --mesh dp=2,tp=4   for neuronx-distributed on 8 ranks, with use_xser=True
  xla-ckpt convert runs/lm nxd --to nxd --mesh tp=8         the same with use_xser=False: nxd is another name of pt
  xla-ckpt convert runs/lm dcp --to dcp                     for torch.distributed.checkpoint
  xla-ckpt convert runs/lm lm.pt --to torch --part model    one file of torch.save, a bare state dict""",
    ),
    "rm": _Command(
        help="Delete tags, as the retention of a save would.",
        action=commands.run_rm,
        add_arguments=commands.add_rm_arguments,
        examples="""\
  xla-ckpt rm runs/lm step_10 step_20      asks first
  xla-ckpt rm runs/lm/step_10              the same of one tag, named by its path
  xla-ckpt rm runs/lm best --yes --force   does not ask, and takes a pinned tag, too""",
    ),
    "retain": _Command(
        help="Delete the tags that a policy does not keep, as the retention of a save would.",
        action=commands.run_retain,
        add_arguments=commands.add_retain_arguments,
        examples="""\
  xla-ckpt retain runs/lm --newest 3 --best loss:2 --dry-run   which would go, and why each other one stays
  xla-ckpt retain runs/lm --newest 3 --every 1000 --yes        what one of several keeps, stays
  xla-ckpt retain s3://bucket/lm --per-day --last 7d           asks first""",
    ),
    "pin": _Command(
        help="Exempt tags from the retention of saves.",
        action=commands.run_pin,
        add_arguments=commands.add_pin_arguments,
        examples="  xla-ckpt pin runs/lm step_10",
    ),
    "unpin": _Command(
        help="Let the retention of saves have tags again.",
        action=commands.run_unpin,
        add_arguments=commands.add_pin_arguments,
        examples="  xla-ckpt unpin runs/lm step_10",
    ),
    "clean": _Command(
        help="Remove what killed writers left. What somebody writes or reads stays.",
        action=commands.run_clean,
        add_arguments=commands.add_clean_arguments,
        examples="""\
  xla-ckpt clean runs/lm                   a save does so, too; this one says what it did
  xla-ckpt clean s3://bucket/lm            and lists all files there: some no save would find""",
    ),
    "adopt": _Command(
        help="Take complete tags in an object store into its record of tags, if that is damaged or was removed.",
        action=commands.run_adopt,
        add_arguments=commands.add_adopt_arguments,
        examples="""\
  xla-ckpt adopt s3://bucket/lm            all tags that have a manifest
  xla-ckpt adopt s3://bucket/lm step_10    this one""",
    ),
    "upload": _Command(
        help="Upload the tags of a directory that a job saved to first, and that are not in the object store yet.",
        action=commands.run_upload,
        add_arguments=commands.add_upload_arguments,
        examples="""\
  xla-ckpt upload /nvme/lm s3://bucket/lm  after a job that saved with local="/nvme/lm", and did not wait""",
    ),
    "selftest": _Command(
        help="Look whether the promises of this library hold on a storage and on the devices of this machine.",
        action=selftest.run_selftest,
        add_arguments=selftest.add_selftest_arguments,
        examples="""\
  xla-ckpt selftest /mnt/checkpoints       two minutes at most, in a folder that is removed; exit code 1 if one fails
  xla-ckpt selftest s3://bucket/path --json""",
    ),
    "completion": _Command(
        help="Print what makes a shell complete the words of this command.",
        action=_run_completion,
        add_arguments=completion.add_completion_arguments,
        examples="""\
  eval "$(xla-ckpt completion bash)"                      in ~/.bashrc
  xla-ckpt completion zsh > ~/.zfunc/_xla-ckpt            in a directory of zsh's fpath
  xla-ckpt completion fish > ~/.config/fish/completions/xla-ckpt.fish""",
    ),
}


_COMMAND_SYNONYMS = {
    **dict.fromkeys(("repair", "mend", "fix"), "verify --repair"),
    **dict.fromkeys(("list", "dir"), "ls"),
    **dict.fromkeys(("inspect", "info", "cat"), "show"),
    **dict.fromkeys(("delete", "remove", "del"), "rm"),
    "check": "verify",
    "compare": "diff",
}
"""Common wrong command names -> the matching command."""


class _SuggestingParser(argparse.ArgumentParser):
    """Argument parser that suggests the closest choice for an invalid one."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            elsewhere = (
                _COMMAND_SYNONYMS.get(value) if action.nargs == argparse.PARSER else None
            )  # a synonym of a command
            there = f": {elsewhere} does that" if elsewhere else suggest(value, choices)
            raise argparse.ArgumentError(action, f"there is no {value!r}{there} (choose from {', '.join(choices)})")

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(make_lines_printable(message), file)


def _build_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the main parser, and the parser of each command, without its arguments."""
    parser = _SuggestingParser(
        prog="xla-ckpt", description="Look into checkpoint directories, keep them, and write tags anew."
    )
    parser.add_argument("--version", action="version", version=f"xla-ckpt {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, command in COMMANDS.items():
        parsers[name] = subparsers.add_parser(
            name,
            help=command.help,
            description=command.help,
            epilog=f"examples:\n{command.examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parsers[name].set_defaults(action=command.action, parser=parsers[name])
    return parser, parsers


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. The error for an invalid word suggests the closest valid one."""
    parser, parsers = _build_parsers()
    at = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    parser.parse_args(argv[: at + 1])
    command = parsers[argv[at]]
    COMMANDS[argv[at]].add_arguments(command)
    # Otherwise an optional positional argument, such as TAG, would have to come before all options.
    try:
        args, unknown = command.parse_known_intermixed_args(argv[at + 1 :])
    except AttributeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # argparse fails to clean up after an early interrupt
            raise error.__context__ from None
        raise
    if unknown:
        options = [option for option, _ in completion.list_long_options(command)]
        near = suggest(unknown[0].partition("=")[0], options)
        command.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C. `xla_ckpt.__main__` handles it, because it also covers the import of this module.
    """
    words = sys.argv[1:] if argv is None else argv
    if argv is None:
        # The process exits after this call. A last garbage collection of all objects would take 60 ms.
        atexit.register(gc.freeze)
    try:
        args = parse_arguments(words)
        if sys.stdout is None:  # Python's value for a closed stream (`>&-`)
            # The next file that is opened, for example one of a tag, would get its number, and the output of libraries.
            raise UsageError("the standard output is closed", hint="Where nobody reads it, send it to /dev/null.")
        with translate_log_messages():
            code = int(args.action(args))
        with translate_stdout_errors():
            sys.stdout.flush()  # handles a broken pipe here; at exit the interpreter would print an error
    except CheckpointError as error:
        print(f"xla-ckpt: {translate_to_options(str(error))}", file=sys.stderr)  # the text is escaped for terminals
        return 2 if isinstance(error, USAGE_ERRORS) else 1
    except BrokenPipeError:
        sys.stderr.close()  # `| head` has closed the pipe; this avoids an error of the interpreter at exit
        return 0
    return code
