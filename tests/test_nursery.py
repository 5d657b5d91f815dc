"""The test helpers themselves: what comes back from other processes, and what is said when they end badly."""

from __future__ import annotations

import functools
import os
import pickle
import select
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import xla_ckpt
from tests import nursery
from tests.jobs import finish, run_on_ranks, start_on_ranks
from tests.nursery import Call, NurseryError, ProcessError, Program, bear


def sums(rank: int, factor: int) -> tuple[int, float]:
    total = torch.tensor([float(rank * factor)])
    dist.all_reduce(total)
    return rank, total.item()


def loaded(rank: int) -> bool:
    return "torch_xla" in sys.modules


def refuses(rank: int) -> None:
    print("rank", rank, "was here")
    if rank == 1:
        raise xla_ckpt.UsageError("not like this")
    dist.barrier()  # which never ends: the failure of another one takes it down


class Odd(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")  # cannot be unpickled: it wants two arguments and keeps one


def odd(rank: int) -> None:
    raise Odd(1, 2)


def dies(rank: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "lives"


def test_values_come_back_from_all_ranks() -> None:
    assert run_on_ranks(sums, 3, 10) == [(0, 30.0), (1, 30.0), (2, 30.0)]
    assert run_on_ranks(loaded, 1) == [False]


@pytest.mark.xla
def test_ranks_have_torch_xla_if_that_is_said() -> None:
    assert run_on_ranks(loaded, 1, xla=True) == [True]


def test_an_exception_of_a_rank_is_raised_with_what_all_of_them_printed() -> None:
    with pytest.raises(xla_ckpt.UsageError, match="not like this") as caught:
        run_on_ranks(refuses, 2)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1 was here" in notes
    assert "rank 1 ended with exit code 1" in notes
    assert "Fatal Python error: Aborted" in notes
    with pytest.raises(ProcessError, match="Odd: 1 and 2"):
        run_on_ranks(odd, 1)


@pytest.mark.xla
def test_a_module_with_torch_xla_is_not_called_where_it_is_not() -> None:
    born = bear(Call("tests.neuron.training", "begin", pickle.dumps(())))
    born.communicate(60)
    with pytest.raises(ProcessError, match=r"tests\.neuron\.training imports torch_xla: say xla=True"):
        born.value()


def test_a_rank_that_dies() -> None:
    with pytest.raises(ProcessError, match="exit code -9"):
        run_on_ranks(dies, 2)
    ranks = start_on_ranks(dies, 2)
    assert [code for code, _, _ in finish(ranks)] == [0, -signal.SIGKILL]
    assert ranks[0].value() == "lives"


def test_a_signal_to_who_has_ended_already() -> None:
    ended = bear(Program("raise SystemExit(3)"))
    select.select([ended], [], [])
    ended.kill()
    assert ended.communicate() == ("", "")
    assert ended.returncode == 3


def test_a_function_that_no_other_process_finds() -> None:
    with pytest.raises(TypeError, match="not at the top of its module"):
        run_on_ranks(lambda rank: None, 1)


AT_EXIT = "import atexit, sys; atexit.register(lambda: print('b', file=sys.stderr))"
THREAD = """
import sys, threading, time
threading.Thread(target=lambda: (time.sleep(0.1), print("c", file=sys.stderr))).start()
"""


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        ("print('a')", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        (AT_EXIT, 0, "b\n"),
        (THREAD, 0, "c\n"),
    ],
)
@pytest.mark.parametrize("end", ["as python", "soon"])
def test_programs_end_as_python_ends_them(code: str, status: int, says: str, end: nursery.End) -> None:
    born = bear(Program(code), end=end)
    out, err = born.communicate(60)
    assert (born.returncode, err, out) == (status, says, "a\n" if "'a'" in code else "")


def test_a_program_runs_where_and_as_what_it_is_told(tmp_path: Path) -> None:
    code = "import os, sys; print(__name__, __file__, sys.argv, os.getcwd(), os.environ['X'])"
    born = bear(Program(code, ("a", "b"), "p.py"), env={"X": "y"}, cwd=tmp_path)
    assert born.communicate(60)[0] == f"__main__ p.py ['p.py', 'a', 'b'] {tmp_path} y\n"


def test_a_nursery_that_cannot_begin_says_what_is_missing() -> None:
    alone = functools.partial(nursery._of_python, sys.executable)
    for start in (alone, nursery._nursery().fork):
        broken = nursery._Nursery(("no_such_module",), start)
        for _ in range(2):  # and says it again, in place of errors of a pipe
            with pytest.raises(NurseryError, match=r"(?s)exit code 1.*imports no_such_module.*ModuleNotFoundError"):
                broken.bear(b"", live=False)


def test_where_torch_xla_is_missing_nothing_is_forked_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery, "HAS_XLA", False)
    with pytest.raises(NurseryError, match="torch_xla is not installed.*mark the test with xla"):
        bear(Program("import torch_xla"), xla=True)


def test_a_nursery_that_dies_says_so() -> None:
    alone = nursery._Nursery(("json",), functools.partial(nursery._of_python, sys.executable))
    os.kill(int(alone._process.pid), signal.SIGKILL)
    alone._process.wait()
    for _ in range(2):
        with pytest.raises(NurseryError, match="exit code -9"):
            alone.bear(b"", live=False)
        with pytest.raises(NurseryError, match="exit code -9"):
            nursery._Nursery(("json", "csv"), alone.fork)
