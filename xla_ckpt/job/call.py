"""How the ranks of a job begin a call: each says which call it makes, and nothing is done before all say the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from xla_ckpt.display import join_lines
from xla_ckpt.errors import CheckpointError, RankFailedError, UsageError, from_json
from xla_ckpt.job.messages import Message
from xla_ckpt.job.round import Round
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.plan.agreement import Disagreement

DIFFERENT = "the ranks make different calls"

_HINT = (
    "All ranks make the same calls, in the same order, with the same arguments. If a rank has left a call out, this is "
    "its next one beside theirs: go on on all ranks. Those that are behind leave out the calls that it has made "
    "already, each with such an error, and the next call that all of them make works."
)
_END = "the end of the process"
"""In the place of a call: the rank makes none any more."""

_WORD, _VERDICT = "opening", "opening/verdict"


@dataclass(frozen=True, slots=True)
class Call(Message):
    """A call that a rank makes, as far as all ranks have to make the same."""

    doing: str
    """What the program called: ``save``, for instance."""

    path: str = ""
    tag: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    """Other argument -> its value, as text."""

    @classmethod
    def of(cls, doing: str, path: str = "", tag: str | None = None, **options: object) -> Call:
        """The call with these arguments."""
        return cls(doing, path, tag, {name: repr(value) for name, value in options.items()})

    def __str__(self) -> str:
        arguments = [repr(self.path)] * bool(self.path) + [repr(self.tag)] * (self.tag is not None)
        return f"{self.doing}({', '.join(arguments)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Word(Message):
    """What a rank says of a call when it begins, and what rank 0 says for all in the end."""

    call: Call
    value: Any = None
    """JSON; beside the error of ranks that make different calls, these calls, rank by rank."""

    error: CheckpointError | None = None

    @property
    def ended(self) -> CheckpointError | None:
        """The error of all calls from this one on, if a rank has ended that this one waits for."""
        return self.error if self.call.doing == _END else None


def say_end(exchange: Round) -> None:
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
    word = Word(call=Call(_END), error=error).to_json()
    if exchange.rank == 0:
        exchange.settle(_VERDICT, word)
    else:
        exchange.say(f"{_WORD}/{exchange.rank}", word)


def word_of(exchange: Round, call: Call, prepare: Callable[[], Any]) -> Word:
    """What this rank has to say of its call, once `prepare` has run, whose value is JSON."""
    try:
        return Word(call=call, value=prepare())
    except Exception as error:
        # Told to all ranks, and raised on all of them.
        return Word(call=call, error=as_checkpoint_error(error, call.doing, exchange.rank, exchange.failure))


def open_together(exchange: Round, word: Word, unite: Callable[[list[Any]], Any]) -> Word:
    """Say a word, and hear what rank 0 says of those of all ranks: an error, or what `unite` makes of their values.

    A rank that waits for rank 0 in vain says the error itself. The first to do so counts, for all ranks.
    """
    exchange.say(f"{_WORD}/{exchange.rank}", word.to_json())

    def given_up(lost: CheckpointError) -> dict[str, Any]:
        return _failed(word.call, lost).to_json()

    if exchange.rank == 0:
        verdict = exchange.settle(_VERDICT, _judged(exchange, word, unite).to_json())
    else:
        verdict = exchange.hear_settled(_VERDICT, 0, given_up)
    return Word.from_json(verdict)


def _judged(exchange: Round, word: Word, unite: Callable[[list[Any]], Any]) -> Word:
    words: list[Word] = []
    try:
        for said in chain([word], map(Word.from_json, exchange.hear_each(_WORD, range(1, exchange.size)))):
            if said.ended is not None:
                return said
            if said.error is not None:
                raise said.error
            words.append(said)
        calls = [said.call for said in words]
        different = different_calls(calls)
        if different is not None:
            return Word(call=word.call, value=[call.to_json() for call in calls], error=different)
        return Word(call=word.call, value=unite([said.value for said in words]))
    except CheckpointError as error:
        return _failed(word.call, error)


def _failed(call: Call, error: CheckpointError) -> Word:
    """The verdict that a call has failed. It says all that all ranks say: one with another call may not add to it."""
    return Word(call=call, error=error.at(path=call.path or None, tag=call.tag))


class DifferentCalls:
    """The calls of all ranks in the latest rounds if they differed, by which a rank finds out that it is behind.

    A rank that has left calls out comes to the next one sooner than the others. They come to that one later, when it
    has failed already, in the same round as theirs, and its caller goes on. So they leave it out, without a round: then
    all of them are in the same round with the same call again. Of two ranks only one is behind the other: the first to
    claim it. Safe for several threads.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._calls: dict[int, list[Call]] = {}
        """Number of a round -> the calls, rank by rank."""
        self._left_out: list[tuple[int, Call]] = []
        """The calls that this rank has left out since, with the number of the round before each."""
        self._error: CheckpointError | None = None

    def add(self, number: int, calls: list[Call], error: CheckpointError) -> None:
        """Note the calls of a round that differed. Those that differ in options alone are as far as each other."""
        if len({(call.doing, call.path, call.tag) for call in calls}) == 1:
            self.clear(number)
            return
        with self._lock:
            self._calls[number], self._error = calls, error

    def clear(self, number: int) -> None:
        """Forget all rounds before this one, in which the ranks were as far as each other."""
        with self._lock:
            self._calls = {other: calls for other, calls in self._calls.items() if other > number}
            self._left_out = [(other, call) for other, call in self._left_out if other > number]

    def left_out(self, number: int, call: Call, claims: Callable[[int, int], bool]) -> CheckpointError | None:
        """Return the error of a call that this rank leaves out because others have made it; None if it makes it.

        >>> a, b, c = (Call.of("save", "/root", tag) for tag in "abc")
        >>> behind, ahead = DifferentCalls(0), DifferentCalls(1)
        >>> for rank in (behind, ahead):
        ...     rank.add(1, [a, b], UsageError(DIFFERENT))
        >>> print(behind.left_out(2, b, lambda first, other: True))
        the ranks make different calls, and this one leaves out save('/root', 'b'), which others have made already
        >>> print(behind.left_out(2, c, lambda first, other: True), ahead.left_out(2, c, lambda first, other: True))
        None None

        Args:
            number: The number of the round that it would have.
            call: The call.
            claims: Given the first of the rounds and another rank: claims that this rank is behind the other one;
                whether that one has not claimed the opposite.
        """
        with self._lock:
            rounds = sorted(self._calls)
            made = [(n, self._calls[n][self._rank]) for n in rounds]
            own = [its for _, its in sorted([*made, *self._left_out], key=lambda one: one[0])]
            others = zip(*(self._calls[n] for n in rounds), strict=True)
            ahead = [rank for rank, calls in enumerate(others) if call in calls[_caught_up(own, calls) :][:1]]
            error = self._error
        claimed = [rank for rank in ahead if claims(rounds[0], rank)]
        if error is None or not claimed:
            return None
        with self._lock:
            self._left_out.append((number - 1, call))
        text = f"{error.problem}, and this one leaves out {call}, which others have made already"
        return from_json(error.to_json() | {"problem": text})


def _caught_up(own: Sequence[Call], other: Sequence[Call]) -> int:
    """Return how many of another rank's calls this one has made later, too, of those that it begins with.

    >>> a, b, c = (Call.of("save", "/root", tag) for tag in "abc")
    >>> _caught_up([a, b], [b, c]), _caught_up([b, c], [a, b])
    (1, 0)
    """
    count = 0
    for call in own:
        count += call in other[count : count + 1]
    return count


def is_missed(call: Call, verdict: Word) -> bool:
    """Whether a verdict is about another call, which this rank has left out, and for which the others gave it up."""
    return isinstance(verdict.error, RankFailedError) and verdict.ended is None and verdict.call != call


def different_calls(calls: Sequence[Call]) -> UsageError | None:
    """The error for ranks that make different calls; None if they make the same.

    >>> a, b = Call.of("save", "/root", "a"), Call.of("save", "/root", "b")
    >>> different_calls([a, a])
    >>> print(different_calls([a, b, a]).found)
    save('/root', 'b') on rank 1
    >>> print(different_calls([Call.of("save", layout="pt"), Call.of("load", strict=True)]).details)
    None
    """
    if all(call == calls[0] for call in calls):
        return None
    alike = all(call.doing == calls[0].doing for call in calls)  # else their options have other names, and say no more
    names = {name: None for call in calls for name in call.options if alike}
    said = [[str(call) for call in calls]]
    said += [[f"{name}={call.options.get(name, 'nothing')}" for call in calls] for name in names]
    differing = [
        disagreement for texts in said if (disagreement := Disagreement.among(dict(enumerate(texts)))) is not None
    ]
    first, *more = differing
    return UsageError(
        DIFFERENT,
        path=calls[0].path or None,
        tag=calls[0].tag,
        rank=first.rank,
        expected=first.expected,
        found=first.found,
        hint=_HINT,
        details=join_lines(f"  expected {also.expected}, found {also.found}" for also in more) or None,
    )
