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
    """Return any exception as a `CheckpointError`, which can be sent to other ranks, with the original as its cause.

    `error_type` is used for exceptions that are neither a `CheckpointError` nor an OSError.
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
    """Run a block on all ranks. If it raises on any rank, raise the error of the lowest such rank on all ranks.

    Rank 0 receives all results and publishes the verdict: two messages per rank. `action` names the block in messages
    and keys.

    Raises:
        CheckpointError: The block failed on a rank.
        RankFailedError: A rank did not publish its result in time.
    """
    if exchange.size == 1:
        yield
        return
    own_error: CheckpointError | None = None
    try:
        yield
    except Exception as error:
        # Published to all ranks, and raised below on all of them.
        own_error = as_checkpoint_error(error, action, exchange.rank, exchange.error_type)
    exchange.publish(f"{action}/{exchange.rank}", error=own_error)
    verdict = f"{action}/verdict"
    if exchange.rank == 0:
        first = _find_first_error(exchange, action)
        decision = exchange.publish_once(verdict, None if first is None else first.to_json())
    elif isinstance(own_error, RankFailedError) and own_error.rank == 0:
        # Only rank 0 publishes the verdict, and this rank has already waited for it for the full timeout.
        decision = exchange.publish_once(verdict, own_error.to_json())
    else:
        decision = exchange.receive_or_publish(verdict, 0, lambda lost: lost.to_json())
    if decision is not None:
        raise_agreed_error(from_json(decision), own_error)


def raise_agreed_error(verdict: CheckpointError, own_error: CheckpointError | None) -> NoReturn:
    """Raise the error that all ranks raise, with the original traceback if it occurred on this rank."""
    if own_error is not None and own_error.rank == verdict.rank:
        raise own_error from own_error.__cause__
    if own_error is not None and own_error.to_json() | {"rank": verdict.rank} == verdict.to_json():
        raise verdict from None  # this rank has the same error: a chained traceback would show it twice
    raise verdict


class LatePeerLoss:
    """The loss of a rank at a point where this rank no longer depends on others, so that it still completes its part.

    Attributes:
        error: The error of the lost rank; None if no rank was lost.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.error: RankFailedError | None = None

    @contextlib.contextmanager
    def raise_on_all_ranks(self, action: str) -> Iterator[None]:
        """Run a block like `raise_on_all_ranks`, but store the loss of another rank if the block succeeded here.

        After a loss, later blocks run on this rank only, so that it does not wait for the lost rank again.
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
    """Return the result of `compute` on rank 0, on all ranks. An error on rank 0 is raised on all ranks."""
    if exchange.size == 1:
        return compute()
    if exchange.rank == 0:
        try:
            exchange.publish(key, compute())
        except Exception as error:
            # The other ranks wait for it.
            exchange.publish(key, error=as_checkpoint_error(error, "looking for tags", 0, LoadError))
    answer: Answer = exchange.receive(key, 0)
    return answer


def gather_and_combine(
    exchange: Exchange, name: str, own_value: Any, combine: Callable[[list[Any]], Any], ranks: Sequence[int]
) -> Any:
    """Gather a value from `ranks` on rank 0, in their order, and return `combine(values)` on all ranks."""
    if exchange.size == 1:
        return combine([own_value])
    if exchange.rank in ranks:
        exchange.publish(f"{name}/{exchange.rank}", own_value)
    if exchange.rank == 0:
        exchange.publish(name, combine([*exchange.receive_each(name, ranks)]))
    return exchange.receive(name, 0)
