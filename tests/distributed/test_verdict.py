"""Messages between ranks that are threads on one board: values, errors, and the one verdict that all of them raise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.rounds import agree
from xla_ckpt.distributed.exchange import (
    COMPRESS_BYTES,
    LEADER_TIMEOUT_FRACTION,
    Deadline,
    Exchange,
    InProcessCommunicator,
)
from xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    RankFailedError,
    SaveError,
    StorageError,
    UsageError,
)


class Board(InProcessCommunicator):
    """A store that can be lost, and that shows what is in it."""

    def __init__(self, size: int) -> None:
        self.contents: dict[str, bytes] = {}
        super().__init__(0, size, self.contents)


class Lost(InProcessCommunicator):
    """A store that is gone."""

    def get(self, key: str, timeout: float) -> bytes:
        raise ConnectionError(key)

    def has(self, keys: Sequence[str], timeout: float = 0) -> bool:
        raise ConnectionError(keys)

    def delete(self, key: str, timeout: float = 0) -> None:
        raise ConnectionError(key)


def on_all(
    board: InProcessCommunicator, call: Callable[[Exchange], Any], timeout: float = 30, name: str = "save/1"
) -> list[Any]:
    """What the call returned, or raised, on each rank."""
    outcome: dict[int, Any] = {}

    def rank_of_job(rank: int) -> None:
        try:
            outcome[rank] = call(Exchange(board.create_peer(rank), name, timeout))
        except CheckpointError as error:
            outcome[rank] = error

    threads = [threading.Thread(target=rank_of_job, args=(rank,)) for rank in range(board.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcome[rank] for rank in range(board.size)]


def raising(errors: dict[int, Exception]) -> Callable[[Exchange], Any]:
    """Agree on an action that raises on these ranks."""

    def call(made: Exchange) -> int:
        def action() -> int:
            if made.rank in errors:
                raise errors[made.rank]
            return made.rank

        return agree(made, "doing", action)

    return call


def test_without_an_error_each_rank_has_its_own_value() -> None:
    board = Board(4)
    assert on_all(board, raising({})) == [0, 1, 2, 3]
    assert len(board.contents) == 4 + 1, "two messages a rank: its own, and the verdict that all hear"


def test_alone_nothing_is_said() -> None:
    board = Board(1)
    assert agree(Exchange(board, "save/1", 1), "doing", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):  # as it is: nobody else has to be told
        agree(Exchange(board, "save/1", 1), "doing", lambda: 1 // 0)
    assert board.contents == {}


def test_an_error_that_all_have_met_is_shown_once() -> None:
    told = on_all(Board(3), raising({rank: UsageError("no" if rank < 2 else "late", tag="a") for rank in range(3)}))
    assert [str(error) for error in told] == ["no [tag a, rank 0]"] * 3
    assert [error.__suppress_context__ for error in told] == [True, True, False]


def test_the_error_of_the_lowest_rank_is_raised_on_all() -> None:
    mine = CorruptCheckpointError("torn", leaf="model/w", expected="a", found="b", tag="t", path="/p", hint="h")
    told = on_all(Board(4), raising({3: UsageError("late"), 1: mine}))
    assert told[1] is mine, "the rank itself raises its own, with its traceback"
    facts = [(type(e), str(e), e.rank, e.leaf, e.tag, e.path, e.expected, e.found) for e in told]
    assert facts == [facts[0]] * 4
    assert facts[0][2] == 1


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (OSError(28, "No space left on device", "/disk/file"), StorageError, "No space left on device"),
        (KeyError("w"), SaveError, "doing failed: KeyError: 'w'"),
    ],
)
def test_other_exceptions_travel_as_errors_of_ours(raised: Exception, kind: type, text: str) -> None:
    told = on_all(Board(3), raising({2: raised}))
    assert [(type(e), e.rank, text in str(e)) for e in told] == [(kind, 2, True)] * 3
    assert told[2].__cause__ is raised
    assert getattr(told[0], "errno", None) == getattr(raised, "errno", None)


def test_a_rank_that_says_nothing_is_named_by_all_and_rank_0_is_the_first_to_say_so() -> None:
    timeout = 2.0
    began: dict[int, float] = {}

    def call(made: Exchange) -> None:
        if made.rank != 2:
            start = time.monotonic()
            try:
                agree(made, "doing", lambda: None)
            finally:
                began[made.rank] = time.monotonic() - start

    told = on_all(Board(4), call, timeout)
    assert told[2] is None
    assert {(type(told[r]), told[r].rank, str(told[r])) for r in (0, 1, 3)} == {(RankFailedError, 2, str(told[0]))}, (
        "the verdict of rank 0 comes before the others give rank 0 up"
    )
    assert f"rank 2 did not answer within {LEADER_TIMEOUT_FRACTION * timeout:g} s" in str(told[0])
    assert LEADER_TIMEOUT_FRACTION * timeout <= began[0] < timeout


def test_without_rank_0_the_others_give_it_up() -> None:
    told = on_all(Board(3), lambda made: agree(made, "doing", lambda: None) if made.rank else None, 0.2)
    assert [(type(e), e.rank) for e in told[1:]] == [(RankFailedError, 0)] * 2
    assert "rank 0 did not answer within 0.2 s" in str(told[1])


def test_who_has_waited_for_rank_0_in_vain_does_not_wait_for_its_verdict() -> None:
    """The call would take the timeout twice (found by `make crash-ranks`)."""
    timeout, full_waits = 1.0, list[int]()

    def call(made: Exchange) -> None:
        def waited(whose: int, began: float) -> None:
            if time.perf_counter() - began >= timeout:
                full_waits.append(made.rank)

        made.on_wait = waited
        if made.rank:
            agree(made, "doing", lambda: made.receive("its word", 0))

    told = on_all(Board(3), call, timeout)
    assert [(type(e), e.rank) for e in told[1:]] == [(RankFailedError, 0)] * 2
    assert sorted(full_waits) == [1, 2]


def test_one_deadline_is_for_all_waits_together() -> None:
    made, deadline = Exchange(Board(9), "save/1", 60), Deadline(0.3)
    began = time.monotonic()
    for rank in range(1, 9):
        with pytest.raises(RankFailedError, match=r"within 0\.3 s"):
            made.receive(f"x/{rank}", rank, deadline)
    assert 0.3 <= time.monotonic() - began < 1.5


@pytest.mark.parametrize("size", [1, COMPRESS_BYTES // 2, 40 * COMPRESS_BYTES])
def test_values_of_any_length_arrive(size: int) -> None:
    board = Board(2)
    value = {"text": "wä" * size, "list": [1, None, True, 2.5]}
    Exchange(board, "a", 1).publish("k", value)
    assert Exchange(board.create_peer(1), "a", 1).receive("k", 0) == value
    (data,) = board.contents.values()
    assert len(data) < 2 * COMPRESS_BYTES + 100


def test_rounds_do_not_hear_each_other() -> None:
    board = Board(2)
    first, second = Exchange(board, "save/1", 0.05), Exchange(board.create_peer(1), "save/2", 0.05)
    first.publish("k", 1)
    first.create_nested("tag").publish("k", 2)
    assert not second.is_published("k")
    with pytest.raises(RankFailedError):
        second.receive("k", 0)
    again = Exchange(board.create_peer(1), "save/1", 0.05)
    assert (again.receive("k", 0), again.create_nested("tag").receive("k", 0)) == (1, 2)
    assert len(first.published_keys) == 2, "what was said in a round inside is forgotten with it"
    first.delete_published()
    second.delete_published()  # it gave up, and has left word
    assert board.contents == {}


def test_a_round_is_closed_when_all_have_closed_it() -> None:
    board = Board(3)
    rounds = [Exchange(board.create_peer(rank), "save/1", 30) for rank in range(3)]
    for made in rounds[:2]:
        made.close()
    assert not rounds[0].is_closed()
    with pytest.raises(RankFailedError, match="rank 2") as caught:
        rounds[0].wait_closed(Deadline(0.05))
    assert caught.value.rank == 2
    rounds[2].close()
    assert rounds[0].is_closed()
    rounds[0].wait_closed(Deadline(0.05))


def test_a_rank_that_does_not_close_a_failed_round_is_told_as_that() -> None:
    """Found by `make soak`: the end of a program raised the error of a save that it had been told of long before."""
    board = Board(2)
    rounds = [Exchange(board.create_peer(rank), "save/1", 30) for rank in range(2)]
    assert rounds[0].decide_outcome(StorageError("no room", rank=0)) is not None
    rounds[0].close()
    with pytest.raises(RankFailedError, match="rank 1"):
        rounds[0].wait_closed(Deadline(0.05))


def test_a_store_that_is_gone_is_no_rank_that_is() -> None:
    made = Exchange(Lost(1, 3), "save/1", 60)
    for ask in (lambda: made.receive("k", 0), lambda: made.is_published("k"), made.is_closed):
        with pytest.raises(RankFailedError, match="store through which the ranks of the job meet is gone") as caught:
            ask()
        assert isinstance(caught.value.__cause__, ConnectionError)
        assert caught.value.rank is None


def test_all_that_give_up_name_the_rank_that_was_named_first() -> None:
    """Ranks that wait for different ones would name different ones."""
    board = Board(4)
    first = Exchange(board.create_peer(3), "load/1", 0.05)
    with pytest.raises(RankFailedError, match="rank 2 did not answer"):
        first.create_nested("tag").receive("a", 2)
    for rank, whose in ((0, 1), (1, 0)):
        with pytest.raises(RankFailedError, match="rank 2 did not answer") as caught:
            Exchange(board.create_peer(rank), "load/1", 0.05).receive("b", whose)
        assert caught.value.rank == 2


def test_of_giving_up_and_committing_one_counts() -> None:
    lost = RankFailedError("rank 0 did not answer", rank=0)
    early, late = Exchange(Board(2), "save/1", 1), Exchange(Board(2), "save/1", 1)
    assert early.decide_outcome() is None
    assert early.decide_outcome(lost) is None, "rank 0 has begun to commit"
    assert late.decide_outcome(lost) is lost
    told = late.decide_outcome()
    assert told is not None
    assert told.to_json() == lost.to_json(), "rank 0 must not commit what others have given up"


def test_a_verdict_that_comes_too_late_for_one_is_no_verdict_for_the_others() -> None:
    board, instead = Board(2), RankFailedError.to_json
    told = Exchange(board.create_peer(1), "load/1", 0.05).receive_or_publish("doing/verdict", 0, instead)
    assert (told["kind"], told["rank"]) == ("RankFailedError", 0)
    zero = Exchange(board, "load/1", 1)
    assert zero.publish_once("doing/verdict", None) == told
    assert zero.receive_or_publish("doing/verdict", 0, instead) == told


def test_a_long_wait_names_the_rank_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("xla_ckpt.distributed.exchange.WARN_AFTER_SECONDS", 0.05)
    board = Board(2)
    told = threading.Event()
    add = caplog.handler.emit

    def emit(record: Any) -> None:
        add(record)
        told.set()

    monkeypatch.setattr(caplog.handler, "emit", emit)

    def call(exchange: Exchange) -> Any:
        if exchange.rank == 1:
            assert told.wait(30)
            exchange.publish("late", 7)
        return exchange.receive("late", 1) if exchange.rank == 0 else None

    assert on_all(board, call) == [7, None]
    (record,) = caplog.records
    assert "rank 0 has been waiting for rank 1 for 0.05 s" in record.getMessage()
    assert "if rank == 0" in record.getMessage()
