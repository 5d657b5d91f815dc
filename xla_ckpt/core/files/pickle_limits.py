"""Limits for pickles: check that loading one takes time and memory proportional to its size.

Python's unpickler trusts a pickle. A few bytes can make it allocate a table for 2**26 objects, or hash a tuple that
contains another one twice, forty levels deep. Python's `pickletools` describes the format.
"""

from __future__ import annotations

import pickletools
from collections import defaultdict

MAX_VALUES_PER_BYTE = 16
"""Maximum number of values per byte of a pickle. A value takes at least a byte unless it is referenced several times.
Nested lists that contain the same list many times could represent more values than fit into memory."""

MIN_VALUE_LIMIT = 100_000
"""Number of values that is always allowed."""

MAX_MEMO_INDEX = 1 << 16
"""Memo index that is always allowed. The unpickler allocates a table of up to twice the index."""

MAX_INTEGER_BYTES = 1024
"""Maximum number of bytes of an integer. Python does not format numbers of more than 4,300 digits."""

MAX_HASH_COLLISIONS = 1000
"""Maximum number of different integers with equal hashes. As dict keys, each would be compared with all others."""

_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}

_OPCODE_BYTES = [0] * 256
"""Number of bytes of each opcode with its argument, or 0 if the length is variable."""

_POPPED_VALUES = [-1] * 256
"""Number of values that each opcode pops before it pushes one, or -1 for other effects."""

_POPPED_BELOW_MARK: dict[int, int] = {}
"""Number of values below the mark that an opcode pops, for opcodes that pop everything down to the mark."""

for _opcode in pickletools.opcodes:
    _code, _before = _CODES[_opcode.name], _opcode.stack_before
    _OPCODE_BYTES[_code] = 1 + max(0 if _opcode.arg is None else _opcode.arg.n, -1)
    if len(_opcode.stack_after) == 1 and _opcode.name not in {"MARK", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"}:
        if pickletools.markobject in _before:
            _POPPED_BELOW_MARK[_code] = _before.index(pickletools.markobject)
        else:
            _POPPED_VALUES[_code] = len(_before)

_LINE_OPCODES = frozenset(_CODES[op.name] for op in pickletools.opcodes if op.arg is not None and op.arg.n == -1)
_TWO_LINE_OPCODES = frozenset((_CODES["GLOBAL"], _CODES["INST"]))
_LENGTH_BYTES = {**dict.fromkeys(b"U\x8cC\x8a", 1), **dict.fromkeys(b"TXB\x8b", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8)}
"""Number of bytes of the length prefix of an argument."""

_STOP, _MARK, _POP, _POP_MARK, _DUP, _MEMOIZE, _LONG1, _LONG4 = b".(012\x94\x8a\x8b"
_PUT_OPCODES, _GET_OPCODES = frozenset(b"pqr"), frozenset(b"ghj")


def check_pickle(data: bytes) -> None:
    """Check that loading a pickle takes time and memory proportional to its size.

    Raises:
        ValueError: It would not, or the data is not a pickle.
    """
    try:
        _PickleScanner(data).scan()
    except IndexError:
        raise ValueError("it is cut off, or takes more off its stack than lies there") from None


class _PickleScanner:
    """Scanner that visits each opcode of a pickle once and tracks the number of values that each value represents."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._integers_by_hash: dict[int, set[int]] = defaultdict(set)
        """Hash -> the large integers with this hash."""

    def scan(self) -> None:
        """Scan the pickle (see `check_pickle`).

        Raises:
            ValueError: A limit is exceeded, or the data is not a pickle.
            IndexError: The pickle is truncated.
        """
        data, at = self.data, 0
        left = most = max(MIN_VALUE_LIMIT, MAX_VALUES_PER_BYTE * len(data))
        stack: list[int] = []
        marks: list[int] = []
        memo: dict[int, int] = {}
        while True:
            opcode = data[at]
            step, taken = _OPCODE_BYTES[opcode], _POPPED_VALUES[opcode]
            if taken == 0:
                stack.append(1)
            elif taken > 0:
                weight = 1
                for _ in range(taken - 1):
                    weight += stack.pop()
                stack[-1] += weight
            elif opcode == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif opcode in _GET_OPCODES or opcode == _DUP:
                weight = stack[-1] if opcode == _DUP else memo.get(self._read_memo_index(at + 1, step), 1)
                left -= weight
                if left < 0:
                    raise ValueError(f"it stands for more than {most} values")
                stack.append(weight)
            elif opcode == _MARK:
                marks.append(len(stack))
            elif (below := _POPPED_BELOW_MARK.get(opcode)) is not None:
                bottom = marks.pop()
                weight = 1 + sum(stack[bottom:])
                del stack[bottom:]
                for _ in range(below):
                    weight += stack.pop()
                stack.append(weight)
            elif opcode in _PUT_OPCODES:
                place = self._read_memo_index(at + 1, step)
                if place > max(len(data), MAX_MEMO_INDEX):
                    raise ValueError(f"it has place {place} in a memo, and {len(data)} bytes")
                memo[place] = stack[-1]
            elif opcode == _POP and not (marks and marks[-1] == len(stack)):
                stack.pop()
            elif opcode in (_POP, _POP_MARK):
                del stack[marks.pop() :]
            elif opcode == _STOP:
                return
            at = at + step if step else self._find_argument_end(opcode, at + 1)

    def _read_memo_index(self, at: int, step: int) -> int:
        """Return the memo index in the argument of an opcode.

        Args:
            at: Offset of the argument.
            step: Number of bytes of the opcode with its argument, or 0 if the length is variable.
        """
        if step:
            return int.from_bytes(self.data[at : at + step - 1], "little")
        return int(self.data[at : self.data.find(b"\n", at)][:20])

    def _find_argument_end(self, opcode: int, at: int) -> int:
        """Return the end of the argument of variable length that starts at `at`."""
        data = self.data
        if (width := _LENGTH_BYTES.get(opcode)) is not None:
            nbytes = int.from_bytes(data[at : at + width], "little")
            at += width
            if nbytes > len(data) - at:
                raise ValueError("it is cut off")
            if opcode in (_LONG1, _LONG4) and nbytes >= 8:
                self._check_integer(data[at : at + nbytes])
            return at + nbytes
        if opcode not in _LINE_OPCODES:
            raise ValueError(f"there is no opcode {opcode:#x}")
        for _ in range(2 if opcode in _TWO_LINE_OPCODES else 1):
            at = data.find(b"\n", at) + 1
            if not at:
                raise ValueError("it is cut off")
        return at

    def _check_integer(self, text: bytes) -> None:
        if len(text) > MAX_INTEGER_BYTES:
            raise ValueError(f"it has an integer of {len(text)} bytes")
        number = int.from_bytes(text, "little", signed=True)
        alike = self._integers_by_hash[hash(number)]
        alike.add(number)
        if len(alike) > MAX_HASH_COLLISIONS:
            raise ValueError(f"it has more than {MAX_HASH_COLLISIONS} integers with one hash")
