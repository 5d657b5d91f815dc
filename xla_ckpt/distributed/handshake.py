"""Handshake at the start of a call: all ranks must make the same call before anything happens.

Each rank publishes its `CallSignature` and prepared value; rank 0 compares them and publishes the verdict.
`CallMismatches` detects a rank that has skipped calls, so that it catches up with the others instead of
deadlocking.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from xla_ckpt.core.plan.rank_consistency import RankMismatch
from xla_ckpt.display import join_lines
from xla_ckpt.distributed.consensus import as_checkpoint_error
from xla_ckpt.distributed.exchange import Exchange, Message
from xla_ckpt.errors import CheckpointError, RankFailedError, UsageError, from_json

DIFFERENT_CALLS = "the ranks make different calls"

_DIFFERENT_CALLS_HINT = (
    "All ranks make the same calls, in the same order, with the same arguments. If a rank has left a call out, this is "
    "its next one beside theirs: go on on all ranks. Those that are behind leave out the calls that it has made "
    "already, each with such an error, and the next call that all of them make works."
)
_EXIT_OPERATION = "the end of the process"
"""In the place of a call: the rank makes none any more."""

_HANDSHAKE_KEY, _VERDICT_KEY = "opening", "opening/verdict"


@dataclass(frozen=True, slots=True)
class CallSignature(Message):
    """A call that a rank makes, as far as all ranks have to make the same."""

    operation: str
    """What the program called: ``save``, for instance."""

    path: str = ""
    tag: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    """Other argument -> its value, as text."""

    @classmethod
    def create(cls, operation: str, path: str = "", tag: str | None = None, **options: object) -> CallSignature:
        """The call with these arguments."""
        return cls(operation, path, tag, {name: repr(value) for name, value in options.items()})

    def __str__(self) -> str:
        arguments = [repr(self.path)] * bool(self.path) + [repr(self.tag)] * (self.tag is not None)
        return f"{self.operation}({', '.join(arguments)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake(Message):
    """What a rank says of a call when it begins, and what rank 0 says for all in the end."""

    call: CallSignature
    value: Any = None
    """JSON; beside the error of ranks that make different calls, these calls, rank by rank."""

    error: CheckpointError | None = None

    @property
    def exit_error(self) -> CheckpointError | None:
        """The error of all calls from this one on, if a rank has ended that this one waits for."""
        return self.error if self.call.operation == _EXIT_OPERATION else None


def announce_exit(exchange: Exchange) -> None:
    """Say that the process of this rank ends, in the round of a call that others may make.

    Raises:
        RankFailedError: The store is gone.
    """
    error = RankFailedError(
        f"rank {exchange.rank} has ended, and this call waits for it",
        rank=exchange.rank,
        hint="All ranks must make the same calls: none of them may stand under `if rank == 0`, and no rank may end "
        "before the others.",
    )
    word = Handshake(call=CallSignature(_EXIT_OPERATION), error=error).to_json()
    if exchange.rank == 0:
        exchange.publish_once(_VERDICT_KEY, word)
    else:
        exchange.publish(f"{_HANDSHAKE_KEY}/{exchange.rank}", word)


def prepare_handshake(exchange: Exchange, call: CallSignature, prepare: Callable[[], Any]) -> Handshake:
    """What this rank has to say of its call, once `prepare` has run, whose value is JSON."""
    try:
        return Handshake(call=call, value=prepare())
    except Exception as error:
        # Told to all ranks, and raised on all of them.
        return Handshake(
            call=call, error=as_checkpoint_error(error, call.operation, exchange.rank, exchange.error_type)
        )


def exchange_handshakes(exchange: Exchange, handshake: Handshake, combine: Callable[[list[Any]], Any]) -> Handshake:
    """Say a word, and hear what rank 0 says of those of all ranks: an error, or what `combine` makes of their values.

    A rank that waits for rank 0 in vain says the error itself. The first to do so counts, for all ranks.
    """
    exchange.publish(f"{_HANDSHAKE_KEY}/{exchange.rank}", handshake.to_json())

    def given_up(lost: CheckpointError) -> dict[str, Any]:
        return _make_failure(handshake.call, lost).to_json()

    if exchange.rank == 0:
        verdict = exchange.publish_once(_VERDICT_KEY, _decide_verdict(exchange, handshake, combine).to_json())
    else:
        verdict = exchange.receive_or_publish(_VERDICT_KEY, 0, given_up)
    return Handshake.from_json(verdict)


def _decide_verdict(exchange: Exchange, handshake: Handshake, combine: Callable[[list[Any]], Any]) -> Handshake:
    words: list[Handshake] = []
    try:
        for said in chain(
            [handshake], map(Handshake.from_json, exchange.receive_each(_HANDSHAKE_KEY, range(1, exchange.size)))
        ):
            if said.exit_error is not None:
                return said
            if said.error is not None:
                raise said.error
            words.append(said)
        calls = [said.call for said in words]
        different = find_call_mismatch(calls)
        if different is not None:
            return Handshake(call=handshake.call, value=[call.to_json() for call in calls], error=different)
        return Handshake(call=handshake.call, value=combine([said.value for said in words]))
    except CheckpointError as error:
        return _make_failure(handshake.call, error)


def _make_failure(call: CallSignature, error: CheckpointError) -> Handshake:
    """The verdict that a call has failed. It says all that all ranks say: one with another call may not add to it."""
    return Handshake(call=call, error=error.at(path=call.path or None, tag=call.tag))


class CallMismatches:
    """The calls of all ranks in the latest rounds if they differed, by which a rank finds out that it is behind.

    A rank that has left calls out comes to the next one sooner than the others. They come to that one later, when it
    has failed already, in the same round as theirs, and its caller goes on. So they leave it out, without a round: then
    all of them are in the same round with the same call again. Of two ranks only one is behind the other: the first to
    claim it. Safe for several threads.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._calls: dict[int, list[CallSignature]] = {}
        """Number of a round -> the calls, rank by rank."""
        self._skipped: list[tuple[int, CallSignature]] = []
        """The calls that this rank has left out since, with the number of the round before each."""
        self._error: CheckpointError | None = None

    def add(self, number: int, calls: list[CallSignature], error: CheckpointError) -> None:
        """Note the calls of a round that differed. Those that differ in options alone are as far as each other."""
        if len({(call.operation, call.path, call.tag) for call in calls}) == 1:
            self.clear(number)
            return
        with self._lock:
            self._calls[number], self._error = calls, error

    def clear(self, number: int) -> None:
        """Forget all rounds before this one, in which the ranks were as far as each other."""
        with self._lock:
            self._calls = {other: calls for other, calls in self._calls.items() if other > number}
            self._skipped = [(other, call) for other, call in self._skipped if other > number]

    def find_skip_error(
        self, number: int, call: CallSignature, claim_behind: Callable[[int, int], bool]
    ) -> CheckpointError | None:
        """Return the error of a call that this rank leaves out because others have made it; None if it makes it.

        >>> a, b, c = (CallSignature.create("save", "/root", tag) for tag in "abc")
        >>> behind, ahead = CallMismatches(0), CallMismatches(1)
        >>> for rank in (behind, ahead):
        ...     rank.add(1, [a, b], UsageError(DIFFERENT_CALLS))
        >>> print(behind.find_skip_error(2, b, lambda first, other: True))
        the ranks make different calls, and this one leaves out save('/root', 'b'), which others have made already
        >>> [rank.find_skip_error(2, c, lambda first, other: True) for rank in (behind, ahead)]
        [None, None]

        Args:
            number: The number of the round that it would have.
            call: The call.
            claim_behind: Given the first of the rounds and another rank: claims that this rank is behind the other one;
                whether that one has not claimed the opposite.
        """
        with self._lock:
            rounds = sorted(self._calls)
            made = [(n, self._calls[n][self._rank]) for n in rounds]
            own = [its for _, its in sorted([*made, *self._skipped], key=lambda one: one[0])]
            others = zip(*(self._calls[n] for n in rounds), strict=True)
            ahead = [rank for rank, calls in enumerate(others) if call in calls[_count_caught_up(own, calls) :][:1]]
            error = self._error
        claimed = [rank for rank in ahead if claim_behind(rounds[0], rank)]
        if error is None or not claimed:
            return None
        with self._lock:
            self._skipped.append((number - 1, call))
        text = f"{error.problem}, and this one leaves out {call}, which others have made already"
        return from_json(error.to_json() | {"problem": text})


def _count_caught_up(own: Sequence[CallSignature], other: Sequence[CallSignature]) -> int:
    """Return how many of another rank's calls this one has made later, too, of those that it begins with.

    >>> a, b, c = (CallSignature.create("save", "/root", tag) for tag in "abc")
    >>> _count_caught_up([a, b], [b, c]), _count_caught_up([b, c], [a, b])
    (1, 0)
    """
    count = 0
    for call in own:
        count += call in other[count : count + 1]
    return count


def is_skipped_call(call: CallSignature, verdict: Handshake) -> bool:
    """Whether a verdict is about another call, which this rank has left out, and for which the others gave it up."""
    return isinstance(verdict.error, RankFailedError) and verdict.exit_error is None and verdict.call != call


def find_call_mismatch(calls: Sequence[CallSignature]) -> UsageError | None:
    """The error for ranks that make different calls; None if they make the same.

    >>> a, b = CallSignature.create("save", "/root", "a"), CallSignature.create("save", "/root", "b")
    >>> find_call_mismatch([a, a])
    >>> print(find_call_mismatch([a, b, a]).found)
    save('/root', 'b') on rank 1
    >>> calls = [CallSignature.create("save", layout="pt"), CallSignature.create("load", strict=True)]
    >>> print(find_call_mismatch(calls).details)
    None
    """
    if all(call == calls[0] for call in calls):
        return None
    alike = all(
        call.operation == calls[0].operation for call in calls
    )  # else their options have other names, and say no more
    names = {name: None for call in calls for name in call.options if alike}
    said = [[str(call) for call in calls]]
    said += [[f"{name}={call.options.get(name, 'nothing')}" for call in calls] for name in names]
    differing = [
        disagreement for texts in said if (disagreement := RankMismatch.find(dict(enumerate(texts)))) is not None
    ]
    first, *more = differing
    return UsageError(
        DIFFERENT_CALLS,
        path=calls[0].path or None,
        tag=calls[0].tag,
        rank=first.rank,
        expected=first.expected,
        found=first.found,
        hint=_DIFFERENT_CALLS_HINT,
        details=join_lines(f"  expected {also.expected}, found {also.found}" for also in more) or None,
    )
