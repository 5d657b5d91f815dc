"""Shell completion scripts for bash, zsh and fish, generated from the argument parsers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from xla_ckpt.cli.output import translate_stdout_errors

SHELLS = ("bash", "zsh", "fish")


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``completion``."""
    parser.add_argument("shell", choices=SHELLS, help="which shell")


def print_completion_script(args: argparse.Namespace, commands: dict[str, argparse.ArgumentParser]) -> int:
    """Print the completion script of a shell, for the parsers of all commands by name."""
    with translate_stdout_errors():
        print(
            {"bash": _build_bash_script, "zsh": _build_zsh_script, "fish": _build_fish_script}[args.shell](commands),
            flush=True,
        )
    return 0


def list_long_options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Yield each long option of a command."""
    for action in parser._actions:  # argparse has no public list of them
        for option in action.option_strings:
            if option.startswith("--"):
                yield option, action


def _get_option_choices(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return {option: choices} for the options that have choices."""
    return {o: " ".join(map(str, a.choices)) for o, a in list_long_options(parser) if a.choices is not None}


def _get_positional_choices(parser: argparse.ArgumentParser) -> str:
    """Return the choices of a positional argument; empty for a path."""
    choices = (a.choices for a in parser._actions if not a.option_strings and a.choices is not None)
    return " ".join(map(str, next(choices, ())))


def _build_case_arms(commands: dict[str, argparse.ArgumentParser]) -> str:
    """Return the arms of a shell ``case``: the words that may follow a command, and the choices of its options."""
    arms = []
    for name, parser in commands.items():
        arms += [
            f"    {name}:{option}) offered={shlex.quote(choices)} ;;"
            for option, choices in _get_option_choices(parser).items()
        ]
        words = " ".join(
            [*(option for option, _ in list_long_options(parser)), _get_positional_choices(parser)]
        ).strip()
        arms.append(f"    {name}:*) offered={shlex.quote(words)} ;;")
    return "\n".join(arms)


def _build_bash_script(commands: dict[str, argparse.ArgumentParser]) -> str:
    return f"""\
_xla_ckpt() {{
  local offered command=${{COMP_WORDS[1]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  if [ "$COMP_CWORD" -eq 1 ]; then command=; fi
  case "$command:$before" in
    :*) offered={shlex.quote(" ".join([*commands, "--help", "--version"]))} ;;
{_build_case_arms(commands)}
    *) offered= ;;
  esac
  COMPREPLY=($(compgen -W "$offered" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _xla_ckpt xla-ckpt"""


def _build_zsh_script(commands: dict[str, argparse.ArgumentParser]) -> str:
    return f"""\
#compdef xla-ckpt
_xla_ckpt() {{
  local offered command=${{words[2]}} before=${{words[CURRENT-1]}} current=$CURRENT
  if (( current == 2 )); then command=; fi
  case "$command:$before" in
    :*) offered={shlex.quote(" ".join([*commands, "--help", "--version"]))} ;;
{_build_case_arms(commands)}
    *) offered= ;;
  esac
  compadd -- ${{=offered}}
  if (( current > 2 )); then _files; fi
}}
if [ "$funcstack[1]" = _xla-ckpt ]; then _xla_ckpt "$@"; else compdef _xla_ckpt xla-ckpt; fi"""


def _build_fish_script(commands: dict[str, argparse.ArgumentParser]) -> str:
    lines = ["complete -c xla-ckpt -n __fish_use_subcommand -l version -d 'Say which version this is'"]
    for name, parser in commands.items():
        about = shlex.quote(parser.description or "")
        lines.append(f"complete -c xla-ckpt -n __fish_use_subcommand -f -a {name} -d {about}")
        seen = shlex.quote(f"__fish_seen_subcommand_from {name}")
        if positional := _get_positional_choices(parser):
            lines.append(f"complete -c xla-ckpt -n {seen} -f -a {shlex.quote(positional)}")
        choices = _get_option_choices(parser)
        for option, action in list_long_options(parser):
            line = f"complete -c xla-ckpt -n {seen} -l {option.removeprefix('--')}"
            if option in choices:
                line += f" -x -a {shlex.quote(choices[option])}"
            elif action.nargs != 0:
                line += " -r"
            lines.append(line)
    return "\n".join(lines)
