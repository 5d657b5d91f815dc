"""Raise the same error on all ranks, and share results: broadcast from the leader, gather and combine.

Each rank publishes success or its error, the leader decides, and all ranks raise the error of the lowest rank that
failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from xla_ckpt.distributed.exchange import Exchange
from xla_ckpt.errors import CheckpointError, LoadError, RankFailedError, SaveError, StorageError, from_json

Answer = TypeVar("Answer")


def as_checkpoint_error(
    error: BaseException, operation: str, rank: int, error_type: type[CheckpointError] = SaveError, **facts: Any
) -> CheckpointError:
    """Any exception as an error of ours that can travel; the original stays its cause.

    `error_type` is what an exception becomes that is no error of ours, and none of the operating system.
    """
    if isinstance(error, CheckpointError):
        problem = error
    elif isinstance(error, OSError):
        problem = StorageError.of(error, operation)
    else:
        problem = error_type(f"{operation} failed: {type(error).__name__}: {error}")
    if problem is not error:
        problem.__cause__ = error
    return problem.at(rank=rank, **facts)


@contextlib.contextmanager
def raise_on_all_ranks(exchange: Exchange, action: str) -> Iterator[None]:
    """A block that all ranks run: if it raises anywhere, the same error is raised everywhere (the lowest rank's).

    Rank 0 hears all and tells all: two messages a rank. `action` names the action in messages and keys.
    """
    if exchange.size == 1:
        yield
        return
    own_error: CheckpointError | None = None
    try:
        yield
    except Exception as error:
        # Told to all ranks, and raised below on all of them.
        own_error = as_checkpoint_error(error, action, exchange.rank, exchange.error_type)
    exchange.publish(f"{action}/{exchange.rank}", error=own_error)
    verdict = f"{action}/verdict"
    if exchange.rank == 0:
        first = _find_first_error(exchange, action)
        decision = exchange.publish_once(verdict, None if first is None else first.to_json())
    elif isinstance(own_error, RankFailedError) and own_error.rank == 0:
        # The verdict is rank 0's to give, and this rank has waited for it as long as it may: not once more.
        decision = exchange.publish_once(verdict, own_error.to_json())
    else:
        decision = exchange.receive_or_publish(verdict, 0, lambda lost: lost.to_json())
    if decision is not None:
        raise_agreed_error(from_json(decision), own_error)


def raise_agreed_error(verdict: CheckpointError, own_error: CheckpointError | None) -> NoReturn:
    """Raise the error that all ranks raise: as the one that this rank has met, if it is that, with its traceback."""
    if own_error is not None and own_error.rank == verdict.rank:
        raise own_error from own_error.__cause__
    if own_error is not None and own_error.to_json() | {"rank": verdict.rank} == verdict.to_json():
        raise verdict from None  # this rank has met the same: a traceback would show it twice
    raise verdict


class LatePeerLoss:
    """A rank that is lost when this one needs the others no more: this one does its part all the same.

    Attributes:
        error: That a rank was lost; None if none was.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.error: RankFailedError | None = None

    @contextlib.contextmanager
    def raise_on_all_ranks(self, action: str) -> Iterator[None]:
        """As `raise_on_all_ranks`, but that another rank is lost is kept, and not raised, if this one has done its
        part.

        Later blocks are this rank's own business: nobody waits for that rank once more.
        """
        if self.error is not None:
            yield
            return
        done = False
        try:
            with raise_on_all_ranks(self._exchange, action):
                yield
                done = True
        except RankFailedError as error:
            if not done:
                raise
            self.error = error


def _find_first_error(exchange: Exchange, action: str) -> CheckpointError | None:
    try:
        list(exchange.receive_each(action, range(exchange.size)))
    except CheckpointError as error:
        return error
    return None


def broadcast_from_leader(exchange: Exchange, key: str, compute: Callable[[], Answer]) -> Answer:
    """What rank 0 finds; it is told to all, and so is an error that it meets."""
    if exchange.size == 1:
        return compute()
    if exchange.rank == 0:
        try:
            exchange.publish(key, compute())
        except Exception as error:
            # The others wait for it.
            exchange.publish(key, error=as_checkpoint_error(error, "looking for tags", 0, LoadError))
    answer: Answer = exchange.receive(key, 0)
    return answer


def gather_and_combine(
    exchange: Exchange, name: str, own_value: Any, combine: Callable[[list[Any]], Any], ranks: Sequence[int]
) -> Any:
    """What rank 0 makes, by `combine`, of what some ranks say, in their order; it is told to all."""
    if exchange.size == 1:
        return combine([own_value])
    if exchange.rank in ranks:
        exchange.publish(f"{name}/{exchange.rank}", own_value)
    if exchange.rank == 0:
        exchange.publish(name, combine([*exchange.receive_each(name, ranks)]))
    return exchange.receive(name, 0)
