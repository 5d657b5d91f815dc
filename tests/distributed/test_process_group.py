"""The job's store as the place where ranks meet: what is waited for in vain costs its timeout, and nothing after it."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch.distributed as dist

from tests.jobs import finish, run_on_ranks, start_on_ranks
from xla_ckpt.distributed.torch_store import STORE_TIMEOUT_SECONDS, get_torch_communicator

TURNS = 5


def waits_in_vain(rank: int) -> dict[str, Any]:
    """Rank 1 waits for what comes too late, and takes it then; rank 0 sends it when the wait is over."""
    line = get_torch_communicator()
    taken = []
    for turn in range(TURNS):
        if rank == 1:
            with pytest.raises(TimeoutError):
                line.get(f"late/{turn}", 0.05)
        dist.barrier()
        if rank == 0:
            line.put(f"late/{turn}", str(turn).encode())
            taken.append(line.get(f"heard/{turn}", 60))
        else:
            taken.append(line.get(f"late/{turn}", 60))
            line.put(f"heard/{turn}", b"heard %d" % turn)
    return {"taken": taken, "connections": sum(t.name == "xla_ckpt-store" for t in threading.enumerate())}


def waits_shortly(rank: int) -> list[str]:
    """How waits for what never comes end, if they are no whole number of milliseconds."""
    line, ends = get_torch_communicator(), []
    for n in range(100):
        try:
            line.get("never", 0.01 + n * 9e-6)
        except (TimeoutError, ConnectionError) as error:
            ends.append(type(error).__name__)
    return ends


def test_a_wait_that_ran_out_is_no_broken_store() -> None:
    assert set(run_on_ranks(waits_shortly, 1)[0]) == {"TimeoutError"}


def asks_a_store_that_died(rank: int) -> list[str]:
    """Rank 1 kills rank 0, whose process holds the store; what rank 1 is told by its requests after that."""
    line, told = get_torch_communicator(), []
    if rank == 0:
        line.put("pid", str(os.getpid()).encode())
        line.get("never", 60)
    os.kill(int(line.get("pid", 60)), signal.SIGKILL)
    with pytest.raises(ConnectionError):
        line.get("never", 60)
    for _ in range(2):
        with pytest.raises(ConnectionError) as caught:
            line.put("never", b"")
        told.append(str(caught.value))
    return told


def test_who_has_found_the_store_gone_is_told_so_at_once() -> None:
    """torch connects anew, for as long as it is let: the others were told of a killed rank after 30 s."""
    killed, alive = start_on_ranks(asks_a_store_that_died, 2)
    finish([alive, killed])
    told: list[str] = alive.value()
    assert not [text for text in told if f"within {STORE_TIMEOUT_SECONDS:g} s" in text], told


def test_who_has_waited_in_vain_keeps_its_connection() -> None:
    first, second = run_on_ranks(waits_in_vain, 2)
    assert first["taken"] == [b"heard %d" % turn for turn in range(TURNS)]
    assert second["taken"] == [b"%d" % turn for turn in range(TURNS)]
    # A new connection may take five seconds where no name server answers.
    assert first["connections"] == second["connections"] == 1
