"""In place of `subprocess` in a program that starts others: what it starts is born in the nursery."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.jobs import places
from tests.nursery import Born, Program, bear
from tests.runs import environment
from tests.xla import HAS_XLA

TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
MODULE = "import runpy, sys; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


def parsed(command: Sequence[str]) -> tuple[int | None, Program]:
    """How many ranks run it under torchrun, or None; and what they run."""
    python, *rest = map(str, command)
    assert python == sys.executable, command
    ranks = None
    if tuple(rest[:3]) == TORCHRUN:
        option, equals, number = rest[3].partition("=")
        assert (option, equals) == ("--nproc-per-node", "="), command
        ranks, rest = int(number), rest[4:]
    if rest[0] == "-m":
        return ranks, Program(MODULE, tuple(rest[2:]), rest[1])
    return ranks, Program(Path(rest[0]).read_text(), tuple(rest[1:]), rest[0])


def names_xla(program: Program) -> bool:
    """Whether it gets torch_xla: if its text names it, and it is there. Else it may do without, or fails by itself."""
    return HAS_XLA and "torch_xla" in program.code


class Started:
    """A running command, as `subprocess.Popen` has it."""

    def __init__(self, born: Born) -> None:
        self._born, self.pid = born, born.pid

    def poll(self) -> int | None:
        return self.wait() if self._born.has_ended() else None

    def wait(self) -> int | None:
        self._born.communicate(240)
        return self._born.returncode


class Commands:
    """Has the names of `subprocess` that our programs and documents use.

    What the commands print is printed when they have ended.
    """

    PIPE = subprocess.PIPE

    @staticmethod
    def Popen(command: Sequence[str]) -> Started:
        ranks, program = parsed(command)
        assert ranks is None, "only a command without ranks can be stopped"
        return Started(bear(program, xla=names_xla(program)))

    @staticmethod
    def run(
        command: Sequence[str], *, check: bool, env: Mapping[str, str] | None = None,
        stdout: int | None = None, text: bool = True,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """What was printed is returned as text, also if nobody asks for it by `stdout`."""
        ranks, program = parsed(command)
        own = environment(env)
        started = [
            bear(program, env=place, xla=names_xla(program))
            for place in ([own] if ranks is None else places(ranks, own))
        ]
        told = [born.communicate(240) for born in started]
        for out, _ in told:
            sys.stdout.write(out)
        status = next((born.returncode for born in started if born.returncode), 0)
        if check and status:
            raise AssertionError(f"{os.fspath(program.name)} ended with exit code {status}\n{told}")
        return subprocess.CompletedProcess(command, status, "".join(o for o, _ in told), "".join(e for _, e in told))
