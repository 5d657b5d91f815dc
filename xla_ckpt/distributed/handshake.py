"""Handshake at the start of a call: all ranks must make the same call before anything happens.

Each rank publishes its `CallSignature` and prepared value; rank 0 compares them and publishes the verdict.
`CallMismatches` detects a rank that has skipped calls, so that it catches up with the others instead of deadlocking.
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
"""Operation of a pseudo-call that announces the exit of a rank."""

_HANDSHAKE_KEY, _VERDICT_KEY = "opening", "opening/verdict"


@dataclass(frozen=True, slots=True)
class CallSignature(Message):
    """The parts of a call that must be equal on all ranks."""

    operation: str
    """Name of the called function, such as ``save``."""

    path: str = ""
    tag: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    """Other arguments -> their values, as text."""

    @classmethod
    def create(cls, operation: str, path: str = "", tag: str | None = None, **options: object) -> CallSignature:
        """Return the signature of a call with these arguments."""
        return cls(operation, path, tag, {name: repr(value) for name, value in options.items()})

    def __str__(self) -> str:
        arguments = [repr(self.path)] * bool(self.path) + [repr(self.tag)] * (self.tag is not None)
        return f"{self.operation}({', '.join(arguments)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake(Message):
    """The message of a rank at the start of a call, and the verdict of rank 0."""

    call: CallSignature
    value: Any = None
    """JSON value. With an error about different calls: the calls of all ranks, by rank."""

    error: CheckpointError | None = None

    @property
    def exit_error(self) -> CheckpointError | None:
        """The error of all calls from now on, if a rank has exited that this call waits for; otherwise None."""
        return self.error if self.call.operation == _EXIT_OPERATION else None


def announce_exit(exchange: Exchange) -> None:
    """Announce the exit of this rank's process in the exchange of a call that other ranks may make.

    Raises:
        RankFailedError: The store is unreachable.
    """
    error = RankFailedError(
        f"rank {exchange.rank} has ended, and this call waits for it",
        rank=exchange.rank,
        hint="All ranks must make the same calls: none of them may stand under `if rank == 0`, and no rank may end "
        "before the others.",
    )
    message = Handshake(call=CallSignature(_EXIT_OPERATION), error=error).to_json()
    if exchange.rank == 0:
        exchange.publish_once(_VERDICT_KEY, message)
    else:
        exchange.publish(f"{_HANDSHAKE_KEY}/{exchange.rank}", message)


def prepare_handshake(exchange: Exchange, call: CallSignature, prepare: Callable[[], Any]) -> Handshake:
    """Return the handshake of this rank after running `prepare`, whose result must be JSON."""
    try:
        return Handshake(call=call, value=prepare())
    except Exception as error:
        # Published to all ranks, and raised on all of them.
        return Handshake(
            call=call, error=as_checkpoint_error(error, call.operation, exchange.rank, exchange.error_type)
        )


def exchange_handshakes(exchange: Exchange, handshake: Handshake, combine: Callable[[list[Any]], Any]) -> Handshake:
    """Publish a handshake and return the verdict of rank 0: an error, or `combine` applied to the values of all ranks.

    A rank whose wait for rank 0 times out publishes the error itself. The first verdict counts on all ranks.
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
    handshakes: list[Handshake] = []
    try:
        for received in chain(
            [handshake], map(Handshake.from_json, exchange.receive_each(_HANDSHAKE_KEY, range(1, exchange.size)))
        ):
            if received.exit_error is not None:
                return received
            if received.error is not None:
                raise received.error
            handshakes.append(received)
        calls = [received.call for received in handshakes]
        different = find_call_mismatch(calls)
        if different is not None:
            return Handshake(call=handshake.call, value=[call.to_json() for call in calls], error=different)
        return Handshake(call=handshake.call, value=combine([received.value for received in handshakes]))
    except CheckpointError as error:
        return _make_failure(handshake.call, error)


def _make_failure(call: CallSignature, error: CheckpointError) -> Handshake:
    """Return the verdict that a call has failed. It is complete, because a rank with another call must not add to
    it.
    """
    return Handshake(call=call, error=error.at(path=call.path or None, tag=call.tag))


class CallMismatches:
    """The latest calls of all ranks that differed, from which a rank detects that it is behind. Thread-safe.

    A rank that has skipped calls reaches its next call before the others. When they make that call, it has already
    failed, in the exchange in which they made a different one, and the caller of the first rank has continued. The
    others therefore skip it without an exchange, and all ranks make the same call in the same exchange again. Only one
    of two ranks can be behind the other: the first that claims it.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._calls: dict[int, list[CallSignature]] = {}
        """Number of an exchange -> the calls, by rank."""
        self._skipped: list[tuple[int, CallSignature]] = []
        """Calls that this rank has skipped since, with the number of the preceding exchange."""
        self._error: CheckpointError | None = None

    def add(self, number: int, calls: list[CallSignature], error: CheckpointError) -> None:
        """Record the calls of an exchange in which they differed. Ranks that only differ in options are in step."""
        if len({(call.operation, call.path, call.tag) for call in calls}) == 1:
            self.clear(number)
            return
        with self._lock:
            self._calls[number], self._error = calls, error

    def clear(self, number: int) -> None:
        """Drop all exchanges up to this one, in which the ranks were in step."""
        with self._lock:
            self._calls = {other: calls for other, calls in self._calls.items() if other > number}
            self._skipped = [(other, call) for other, call in self._skipped if other > number]

    def find_skip_error(
        self, number: int, call: CallSignature, claim_behind: Callable[[int, int], bool]
    ) -> CheckpointError | None:
        """Return the error of a call that this rank skips because others have made it, or None if it makes the call.

        >>> a, b, c = (CallSignature.create("save", "/root", tag) for tag in "abc")
        >>> behind, ahead = CallMismatches(0), CallMismatches(1)
        >>> for rank in (behind, ahead):
        ...     rank.add(1, [a, b], UsageError(DIFFERENT_CALLS))
        >>> print(behind.find_skip_error(2, b, lambda first, other: True))
        the ranks make different calls, and this one leaves out save('/root', 'b'), which others have made already
        >>> [rank.find_skip_error(2, c, lambda first, other: True) for rank in (behind, ahead)]
        [None, None]

        Args:
            number: Number of the exchange that the call would have.
            call: The call.
            claim_behind: Called with the number of the first mismatch and another rank to claim that this rank is
                behind that rank. Returns False if the other rank has already claimed the opposite.
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
    """Return the number of another rank's first calls that this rank has made later.

    >>> a, b, c = (CallSignature.create("save", "/root", tag) for tag in "abc")
    >>> _count_caught_up([a, b], [b, c]), _count_caught_up([b, c], [a, b])
    (1, 0)
    """
    count = 0
    for call in own:
        count += call in other[count : count + 1]
    return count


def is_skipped_call(call: CallSignature, verdict: Handshake) -> bool:
    """Return True if a verdict is about another call that this rank has skipped and the others have given up."""
    return isinstance(verdict.error, RankFailedError) and verdict.exit_error is None and verdict.call != call


def find_call_mismatch(calls: Sequence[CallSignature]) -> UsageError | None:
    """Return the error for ranks that make different calls, or None if all calls are equal.

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
    )  # options of different functions are not comparable
    names = {name: None for call in calls for name in call.options if alike}
    parts = [[str(call) for call in calls]]
    parts += [[f"{name}={call.options.get(name, 'nothing')}" for call in calls] for name in names]
    differing = [
        disagreement for texts in parts if (disagreement := RankMismatch.find(dict(enumerate(texts)))) is not None
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
