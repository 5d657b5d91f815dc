"""Pickles and zips of torch.save, changed in their structure: opcodes, their arguments, and the fields of zips."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import struct
import zipfile

PIECES: tuple[bytes, ...] = (
    b"r\0\0\0\4",  # LONG_BINPUT 2**26
    b"r\0\0\0\1",
    b"p99999999\n",
    b"j\xff\xff\xff\x7f",
    b"(" * 300,
    b"]" * 1000,
    b"cos\nsystem\n(X\4\0\0\0trueetR",
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"ctorch\nload\n",
    b"cbuiltins\nbytearray\n\x8a\5\0\0\0\0\1\x85R",
    b"cbuiltins\nbytearray\nJ\0\0\0\x40\x85R",
    b"ctorch\nSize\n(J\0\0\0\x40J\0\0\0\x40tR",
    b"cdecimal\nDecimal\nX\x0c\0\0\x001e1000000000\x85R",
    b"cbuiltins\nset\n",
    b"ccollections\nOrderedDict\n",
    b"ccollections\ndeque\n]M\xff\xff\x86R",
    b"\x8a\xff" + b"\xff" * 254 + b"\x7f",
    b"\x8b\0\x10\0\0" + b"\x7f" * 4096,
    b"L" + b"9" * 5000 + b"L\n",
    b"X\xff\xff\xff\x7f",
    b"B\xff\xff\xff\x7f",
    b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x8d\xff\xff\xff\xff\0\0\0\0",
    b"}", b"]", b")", b"N", b"K\1", b"2", b"0", b"1", b"a", b"e", b"s", b"u", b"t", b"\x85", b"\x86", b"R", b"b", b"Q",
    b"o", b"\x81", b"\x93", b"\x94", b"\x8f", b"\x90", b"\x91", b"P1\n", b".", b"\x80\5",
    b"(" + b"2" * 50 + b"t",
    b"]" + b"2e" * 3,
    b"(" + b"22t" * 20,
    b"".join(b"\x86q%c" % n + b"h%c" % n for n in range(200, 240)),
)  # fmt: skip
"""Pieces of pickles: names, huge numbers, deep nests, values that stand for more than there is memory."""

NAMED = (b"cos\nsystem\n", b"ctorch\nint4\n", b"ctorch\nfloat8_e4m3fn\n", b"ctorch\nTensor\n",
         b"ccollections\nOrderedDict\n", b"ctorch\nByteStorage\n", b"cbuiltins\nset\n")  # fmt: skip

NUMBERS = (0, 1, 2, 255, 1 << 16, (1 << 31) - 1, -(1 << 31), -1)


def _pieces(data: bytes) -> list[tuple[str, bytes]]:
    """The opcodes of a pickle, (name, bytes) each."""
    found = list(pickletools.genops(data))
    ends = [*(at for _, _, at in found[1:]), len(data)]
    return [(op.name, data[at:end]) for (op, _, at), end in zip(found, ends, strict=True)]


def odd_pickle(data: bytes, random_: random.Random) -> tuple[str, bytes]:
    """A pickle with a few of its opcodes changed; (what was done, bytes)."""
    pieces = [_pieces(part) for part in _pickles_in(data)]
    done = []
    for _ in range(random_.choice((1, 1, 1, 2, 4))):
        ops = random_.choice(pieces)
        at = random_.randrange(len(ops))
        name, text = ops[at]
        how = random_.choice(("insert", "insert", "argument", "argument", "drop", "twice", "exchange", "move"))
        if how == "insert":
            ops.insert(at, ("", random_.choice(PIECES)))
        elif how == "argument":
            ops[at] = (name, _other_argument(name, text, random_))
        elif how == "drop":
            del ops[at]
        elif how == "twice":
            ops.insert(at, ops[at])
        elif how == "exchange":
            other = random_.randrange(len(ops))
            ops[at], ops[other] = ops[other], ops[at]
        else:
            ops.insert(random_.randrange(len(ops)), ops.pop(at))
        done.append(f"{how} {name} at {at}")
        if not ops:
            ops.append(("", b"."))
    return "; ".join(done), b"".join(text for ops in pieces for _, text in ops)


def _pickles_in(data: bytes) -> list[bytes]:
    """A file may hold several pickles, one after the other."""
    found, at = [], 0
    while at < len(data):
        held = io.BytesIO(data[at:])
        try:
            for _ in pickletools.genops(held):
                pass
        except ValueError:
            found.append(data[at:])
            break
        found.append(data[at : at + held.tell()])
        at += held.tell()
    whole = [part for part in found if part.endswith(b".")]
    return whole or [pickle.dumps({}, protocol=2)]


def _other_argument(name: str, text: bytes, random_: random.Random) -> bytes:
    number = random_.choice(NUMBERS)
    if name == "BININT1":
        return (
            b"J" + struct.pack("<i", number) if random_.random() < 0.5 else text[:1] + bytes([random_.randrange(256)])
        )
    if name in ("BININT", "BININT2"):
        return b"J" + struct.pack("<i", number)
    if name in ("LONG_BINPUT", "LONG_BINGET", "BINPUT", "BINGET"):
        return (b"r" if "PUT" in name else b"j") + struct.pack("<I", number & 0x0FFFFFF)
    if name == "BINUNICODE":
        word = random_.choice((b"", b"float32", b"0", b"1", b"../x", b"\xff\xfe", b"x" * 3000, b"data.pkl", b"cuda:99"))
        return b"X" + struct.pack("<I", len(word)) + word
    if name == "GLOBAL":
        return random_.choice(NAMED)
    if name == "BINFLOAT":
        return b"G" + random_.randbytes(8)
    if name == "NEWTRUE":
        return b"\x89"
    return text[:1] + random_.randbytes(len(text) - 1)


def odd_zip(data: bytes, random_: random.Random) -> tuple[str, bytes]:
    """A zip of torch.save (or several, one after the other) with another pickle, or with changed fields."""
    start = random_.choice(_starts(data))
    if random_.random() < 0.6 and (made := _with_pickle(data, start, random_)) is not None:
        return made
    # The fields of a local header, of an entry of the directory and of its end, wherever they stand.
    found = [at for mark in (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7") for at in _all(data, mark)]
    changed, at = bytearray(data), random_.choice(found or [0])
    offset = at + 4 + random_.randrange(42)
    size = random_.choice((1, 2, 4, 8))
    number = random_.choice(
        (0, 1, 0xFF, 0xFFFF, 0xFFFFFFFF, 0x7FFFFFFF, (1 << 64) - 1, len(data), len(data) - 1, offset)
    )
    text = number.to_bytes(8, "little")[:size]
    changed[offset : offset + size] = text
    return f"{text.hex()} at {offset}", bytes(changed[: max(len(data), 1)])


def _all(data: bytes, mark: bytes) -> list[int]:
    found, at = [], data.find(mark)
    while at >= 0:
        found.append(at)
        at = data.find(mark, at + 1)
    return found


def _starts(data: bytes) -> list[int]:
    """Where a whole zip begins."""
    ends = [at + 22 for at in _all(data, b"PK\5\6")]
    return [0, *(end for end in ends if data[end : end + 4] == b"PK\3\4")]


def _with_pickle(data: bytes, start: int, random_: random.Random) -> tuple[str, bytes] | None:
    """One of the zips with another pickle of the same length or, if it is alone, of any."""
    ends = [at + 22 for at in _all(data, b"PK\5\6") if at >= start]
    if not ends:
        return None
    whole = data[start : ends[0]]
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as new:
        done = ""
        for info in old.infolist():
            held = old.read(info)
            if info.filename.endswith("data.pkl"):
                done, held = odd_pickle(held, random_)
            elif random_.random() < 0.02:
                done, held = f"{done}; {info.filename} cut", held[: len(held) // 2]
            new.writestr(info.filename, held)
    text = made.getvalue()
    if len(text) <= len(whole) and (start or ends[0] < len(data)):
        text = text[:-22] + bytes(len(whole) - len(text)) + text[-22:]  # room before its end: a reader looks at the end
    return done, data[:start] + text + data[ends[0] :]
