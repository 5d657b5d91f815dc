"""One verdict for all ranks: the same error everywhere, whichever of them met it; one answer, which rank 0 finds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from xla_ckpt.errors import CheckpointError, LoadError, RankFailedError, SaveError, StorageError, from_json
from xla_ckpt.job.round import Round

Answer = TypeVar("Answer")


def as_checkpoint_error(
    error: BaseException, doing: str, rank: int, kind: type[CheckpointError] = SaveError, **facts: Any
) -> CheckpointError:
    """Any exception as an error of ours that can travel; the original stays its cause.

    `kind` is what an exception becomes that is no error of ours, and none of the operating system.
    """
    if isinstance(error, CheckpointError):
        problem = error
    elif isinstance(error, OSError):
        problem = StorageError.of(error, doing)
    else:
        problem = kind(f"{doing} failed: {type(error).__name__}: {error}")
    if problem is not error:
        problem.__cause__ = error
    return problem.at(rank=rank, **facts)


@contextlib.contextmanager
def agreed(exchange: Round, what: str) -> Iterator[None]:
    """A block that all ranks run: if it raises anywhere, the same error is raised everywhere (the lowest rank's).

    Rank 0 hears all and tells all: two messages a rank. `what` names the action in messages and keys.
    """
    if exchange.size == 1:
        yield
        return
    own_error: CheckpointError | None = None
    try:
        yield
    except Exception as error:
        # Told to all ranks, and raised below on all of them.
        own_error = as_checkpoint_error(error, what, exchange.rank, exchange.failure)
    exchange.say(f"{what}/{exchange.rank}", error=own_error)
    verdict = f"{what}/verdict"
    if exchange.rank == 0:
        first = _first_error(exchange, what)
        decision = exchange.settle(verdict, None if first is None else first.to_json())
    elif isinstance(own_error, RankFailedError) and own_error.rank == 0:
        # The verdict is rank 0's to give, and this rank has waited for it as long as it may: not once more.
        decision = exchange.settle(verdict, own_error.to_json())
    else:
        decision = exchange.hear_settled(verdict, 0, lambda lost: lost.to_json())
    if decision is not None:
        raise_as_told(from_json(decision), own_error)


def raise_as_told(verdict: CheckpointError, own_error: CheckpointError | None) -> NoReturn:
    """Raise the error that all ranks raise: as the one that this rank has met, if it is that, with its traceback."""
    if own_error is not None and own_error.rank == verdict.rank:
        raise own_error from own_error.__cause__
    if own_error is not None and own_error.to_json() | {"rank": verdict.rank} == verdict.to_json():
        raise verdict from None  # this rank has met the same: a traceback would show it twice
    raise verdict


class LateLoss:
    """A rank that is lost when this one needs the others no more: this one does its part all the same.

    Attributes:
        error: That a rank was lost; None if none was.
    """

    def __init__(self, exchange: Round) -> None:
        self._exchange = exchange
        self.error: RankFailedError | None = None

    @contextlib.contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """As `agreed`, but that another rank is lost is kept, and not raised, if this one has done its part.

        Later blocks are this rank's own business: nobody waits for that rank once more.
        """
        if self.error is not None:
            yield
            return
        done = False
        try:
            with agreed(self._exchange, what):
                yield
                done = True
        except RankFailedError as error:
            if not done:
                raise
            self.error = error


def _first_error(exchange: Round, what: str) -> CheckpointError | None:
    try:
        list(exchange.hear_each(what, range(exchange.size)))
    except CheckpointError as error:
        return error
    return None


def of_lead(exchange: Round, key: str, look: Callable[[], Answer]) -> Answer:
    """What rank 0 finds; it is told to all, and so is an error that it meets."""
    if exchange.size == 1:
        return look()
    if exchange.rank == 0:
        try:
            exchange.say(key, look())
        except Exception as error:
            # The others wait for it.
            exchange.say(key, error=as_checkpoint_error(error, "looking for tags", 0, LoadError))
    answer: Answer = exchange.hear(key, 0)
    return answer


def put_together(
    exchange: Round, name: str, own_value: Any, unite: Callable[[list[Any]], Any], ranks: Sequence[int]
) -> Any:
    """What rank 0 makes, by `unite`, of what some ranks say, in their order; it is told to all."""
    if exchange.size == 1:
        return unite([own_value])
    if exchange.rank in ranks:
        exchange.say(f"{name}/{exchange.rank}", own_value)
    if exchange.rank == 0:
        exchange.say(name, unite([*exchange.hear_each(name, ranks)]))
    return exchange.hear(name, 0)
