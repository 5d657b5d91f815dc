"""What ranks say to each other stays until all have heard it, and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.rounds import agree
from xla_ckpt.distributed.exchange import InProcessCommunicator
from xla_ckpt.distributed.job import ExchangeSequence
from xla_ckpt.errors import CheckpointError, RankFailedError, UsageError


def test_the_store_is_tidied_behind_the_slowest() -> None:
    board: dict[str, bytes] = {}
    solo = InProcessCommunicator(0, 3, board)
    ranks = [ExchangeSequence(solo.create_peer(rank)) for rank in range(3)]
    most = 0

    def call(rank: int, action: Callable[[], object] = lambda: None) -> None:
        rounds = ranks[rank]
        made = rounds.begin("call", 5)
        with rounds.participate(made):
            rounds.delete_finished(5)
            agree(made, "doing", action)

    def calls(rank: int) -> None:
        for _ in range(30):
            call(rank)

    for _ in range(3):
        threads = [threading.Thread(target=calls, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _ in range(3):  # rank 0 sees that all have closed a round, the others see that it has
            for rank in range(3):
                ranks[rank].delete_finished(5)
        most = max(most, len(board))
    assert most == 1, board  # the number up to which all is settled

    def bad() -> None:
        raise UsageError("no")

    for _ in range(20):  # rank 0 fails and runs ahead, rank 1 follows, and rank 2 is slow
        for rank in (0, 1):
            with pytest.raises(UsageError):
                call(rank, bad if rank == 0 else lambda: None)
    for _ in range(20):
        with pytest.raises(UsageError, match="no") as caught:
            call(2)
        assert caught.value.rank == 0
    ranks[0].wait_at_exit(5)


def test_rounds_of_a_rank_that_is_gone_are_given_up() -> None:
    ranks = [ExchangeSequence(InProcessCommunicator(0, 2, {}))]
    made = ranks[0].begin("call", 0.05)
    with pytest.raises(RankFailedError), ranks[0].participate(made):
        agree(made, "doing", lambda: None)
    ranks[0].wait_at_exit(60)  # returns at once


def test_an_error_in_a_call_is_what_the_call_raises_though_nobody_can_be_told() -> None:
    class Gone(InProcessCommunicator):
        def put(self, key: str, value: bytes, timeout: float = 0) -> None:
            raise ConnectionError(key)

    rounds = ExchangeSequence(Gone(0, 2, {}))
    made = rounds.begin("call", 1)
    with pytest.raises(CheckpointError, match="mine"), rounds.participate(made):
        raise UsageError("mine")


def test_a_rank_that_is_interrupted_tells_the_others_which_do_not_wait_for_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("xla_ckpt.distributed.exchange.WARN_AFTER_SECONDS", 0.05)
    solo = InProcessCommunicator(0, 2, {})
    ranks = [ExchangeSequence(solo.create_peer(rank)) for rank in range(2)]
    made = [rounds.begin("load", 300) for rounds in ranks]
    with pytest.raises(KeyboardInterrupt), ranks[1].participate(made[1]):
        raise KeyboardInterrupt
    with pytest.raises(RankFailedError, match="rank 1 was interrupted by KeyboardInterrupt"):
        agree(made[0].create_nested("a"), "reading", lambda: None)
