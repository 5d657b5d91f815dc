"""What a pickle would cost, found out before it is read: it must be in proportion to the pickle's size.

Python's unpickler believes what a pickle says. A few bytes have it make a table for 2**26 objects, or take the hash of
a tuple that holds another one twice, forty levels deep. The format is described in python's `pickletools`.
"""

from __future__ import annotations

import pickletools
from collections import defaultdict
from typing import Any

MAX_SHARING = 16
"""Values for each byte of a pickle. Each takes a byte or more, unless it stands in several places: a pickle may hold
one list many times, each of whose members holds another one many times, and stand for more than there is memory."""

FEW_VALUES = 100_000
"""So many are never too many."""

MAX_MEMO = 1 << 16
"""A place in the memo below this is never too far. The unpickler makes a table up to twice the place that is named."""

MAX_LONG = 1024
"""Most bytes of an integer: python writes no number of more than 4,300 digits as text."""

MAX_ALIKE_INTEGERS = 1000
"""Most different integers with the same hash. As keys of one dict they would be compared each with each."""

FEW_SHARED = 6
"""So many shared tuples cannot stand for too much. Where there are more, what they stand for is worked out."""

_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}

_STEPS = [0] * 256
"""Bytes of each opcode with its argument; 0 where there is more to look at."""

for _opcode in pickletools.opcodes:
    _STEPS[_CODES[_opcode.name]] = 1 + max(0 if _opcode.arg is None else _opcode.arg.n, -1)

_PLAIN = frozenset(
    opcode
    for name, opcode in _CODES.items()
    if name in {"NONE", "NEWTRUE", "NEWFALSE", "GLOBAL", "BINPERSID"}
    or name.startswith("EMPTY_")
    or (
        any(kind in name for kind in ("INT", "LONG", "FLOAT", "STRING", "UNICODE", "BYTES", "BYTEARRAY"))
        and not name.endswith(("PUT", "GET"))
    )
)
"""What leaves no tuple on top of the stack, and nothing else that has a hash and others inside."""

_LINES = frozenset(_CODES[op.name] for op in pickletools.opcodes if op.arg is not None and op.arg.n == -1)
_TWO_LINES = frozenset((_CODES["GLOBAL"], _CODES["INST"]))
_LENGTHS = {**dict.fromkeys(b"U\x8cC\x8a", 1), **dict.fromkeys(b"TXB\x8b", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8)}
"""Bytes of the length that stands before an argument."""

_STOP, _DUP, _MEMOIZE, _PUT, _BINPUT, _LONG_BINPUT = b".2\x94pqr"
_GET, _BINGET, _LONG_BINGET, _LONG1, _LONG4 = b"ghj\x8a\x8b"
_PUTS = frozenset((_BINPUT, _LONG_BINPUT, _MEMOIZE, _PUT))
_GETS = frozenset((_BINGET, _LONG_BINGET, _GET))

for _code in (_STOP, _DUP, _MEMOIZE, _BINPUT, _LONG_BINPUT, _BINGET, _LONG_BINGET):
    _STEPS[_code] = 0


def check(data: bytes) -> None:
    """Check that reading a pickle takes time and memory in proportion to its size.

    Raises:
        ValueError: It would not, or it is no pickle.
    """
    if _Scan(data).shared > FEW_SHARED:
        _weigh(data)


class _Scan:
    """One look at each opcode of a pickle."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.shared = 0
        """How often something is named again that may be a tuple."""
        self._memo: dict[int, bool] = {}
        """Place in the memo -> whether that may be what lies there."""
        self._alike: dict[int, set[int]] = defaultdict(set)
        """Hash -> the large integers that have it."""
        self._run()

    def _run(self) -> None:
        data, steps, at, opcode = self.data, _STEPS, 0, 0
        try:
            while True:
                before, opcode = opcode, data[at]
                step = steps[opcode]
                if step:
                    at += step
                elif opcode == _STOP:
                    return
                else:
                    at = self._look_at(opcode, at + 1, before)
        except IndexError:
            raise ValueError("it is cut off") from None

    def _look_at(self, opcode: int, at: int, before: int) -> int:
        """Take the argument of an opcode, which begins at `at`; where the next opcode begins."""
        data = self.data
        if opcode in _PUTS:
            place, at = (len(self._memo), at) if opcode == _MEMOIZE else self._number(opcode, at)
            if place > max(len(data), MAX_MEMO):
                raise ValueError(f"it has place {place} in a memo, and {len(data)} bytes")
            self._memo[place] = before not in _PLAIN
        elif opcode in _GETS:
            place, at = self._number(opcode, at)
            self.shared += self._memo.get(place, True)
        elif opcode == _DUP:
            self.shared += 1
        elif (width := _LENGTHS.get(opcode)) is not None:
            nbytes = int.from_bytes(data[at : at + width], "little")
            at += width
            if nbytes > len(data) - at:
                raise ValueError("it is cut off")
            if opcode in (_LONG1, _LONG4) and nbytes >= 8:
                self._long(data[at : at + nbytes])
            at += nbytes
        elif opcode in _LINES:
            for _ in range(2 if opcode in _TWO_LINES else 1):
                at = data.find(b"\n", at) + 1
                if not at:
                    raise ValueError("it is cut off")
        else:
            raise ValueError(f"there is no opcode {opcode:#x}")
        return at

    def _number(self, opcode: int, at: int) -> tuple[int, int]:
        """A place in the memo, and where the next opcode begins."""
        if opcode in (_PUT, _GET):
            end = self.data.index(b"\n", at)
            return int(self.data[at:end][:20]), end + 1
        width = 1 if opcode in (_BINPUT, _BINGET) else 4
        return int.from_bytes(self.data[at : at + width], "little"), at + width

    def _long(self, text: bytes) -> None:
        if len(text) > MAX_LONG:
            raise ValueError(f"it has an integer of {len(text)} bytes")
        number = int.from_bytes(text, "little", signed=True)
        alike = self._alike[hash(number)]
        alike.add(number)
        if len(alike) > MAX_ALIKE_INTEGERS:
            raise ValueError(f"it has more than {MAX_ALIKE_INTEGERS} integers with one hash")


def _weigh(data: bytes) -> None:
    """Follow a pickle with numbers in the place of values: how many values each one stands for.

    Raises:
        ValueError: All of them together are too many.
    """
    most = max(FEW_VALUES, MAX_SHARING * len(data))
    total = 0
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name == "MARK":
            marks.append(len(stack))
        elif name == "MEMOIZE" or name.endswith("PUT"):
            memo[len(memo) if argument is None else argument] = _last(stack)
        elif name == "DUP" or name.endswith("GET"):
            weight = _last(stack) if argument is None else memo.get(argument, 1)
            total += weight
            if total > most:
                raise ValueError(f"it stands for more than {most} values")
            stack.append(weight)
        elif name == "POP_MARK" or (name == "POP" and marks and marks[-1] == len(stack)):
            del stack[_last(marks) :]
            marks.pop()
        else:
            _step(opcode, stack, marks)


def _step(opcode: Any, stack: list[int], marks: list[int]) -> None:
    """Take what an opcode takes off the stack, and put down what that weighs together."""
    taken = opcode.stack_before
    weight = len(opcode.stack_after)
    if pickletools.markobject in taken:
        at = _last(marks)
        marks.pop()
        weight += sum(stack[at:])
        del stack[at:]
        taken = taken[: taken.index(pickletools.markobject)]
    for _ in taken:
        weight += _last(stack)
        stack.pop()
    if opcode.stack_after:
        stack.append(weight)


def _last(stack: list[int]) -> int:
    if not stack:
        raise ValueError("it takes more off its stack than lies there")
    return stack[-1]
