"""The key-value store of jax.distributed answers as a job's store has to."""

from __future__ import annotations

import time

import pytest

from tests.jobs import run_on_jax_processes
from xla_ckpt.distributed import current_job


def talks(rank: int) -> bytes:
    channel = current_job.get_communicator()
    assert channel is not None
    assert channel is current_job.get_communicator()
    assert (channel.rank, channel.size, current_job.is_leader()) == (rank, 2, rank == 0)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.get("nobody/says/this", 1.5)
    assert time.monotonic() - began >= 1.5
    assert not channel.has(["a"], 1)
    first = channel.put_if_absent("first", f"rank {rank}".encode(), 10)
    channel.put(f"a/{rank}", bytes([rank, 255]), 10)
    channel.put(f"a/{rank}", bytes([rank, 0]), 10)  # a later word takes the place of an earlier one
    channel.get(f"a/{1 - rank}", 60)
    assert channel.get(f"a/{rank}", 1) == bytes([rank, 0])
    if rank == 0:
        channel.put("a", b"", 10)
        assert channel.has(["a", "a/0", "a/1"], 1)
        channel.delete("a", 10)
        assert not channel.has(["a"], 1)
        assert channel.has(["a/0", "a/1"], 1), "no key below it is removed"
        channel.put("end", b"1", 10)
    channel.get("end", 60)
    return first


def test_words_are_heard_and_the_first_counts() -> None:
    first, same = run_on_jax_processes(talks, 2, 1)
    assert first == same
    assert first in (b"rank 0", b"rank 1")
