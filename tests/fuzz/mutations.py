"""How a file of a checkpoint is changed: at random in its bytes, or in its structure, with its digests made right.

Everything follows from the random numbers that are handed in, so that an input can be made again from its seed.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzz import pickles
from xla_ckpt.core.checksum import compute_digest, to_hex

PAGE = 4096

NUMBERS = (0, -1, 1, 2, 3, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 61) - 1, 1 << 61, (1 << 62) - 1, 1 << 63,
           1 << 64, 10**30, 10**400, -(10**30), 1e308, -0.0, 0.5, 1e-320)  # fmt: skip

TEXTS = ("", "/", "..", "../old/manifest.json", "/etc/passwd", "a/../../b", "\0", "\ud800", "x" * 5000, "float32",
         "int4", "uint64", "complex128", "$array", "model", "~1", "~(0)", "~(", "step_1", "1e10000000", "0" * 5000,
         "9" * 5000, "2026-01-01T00:00:00", "nan", "AAAA", "7ff0000000000001")  # fmt: skip

KINDS = ("array", "object", "dict", "OrderedDict", "Counter", "defaultdict", "tuple", "deque", "set", "frozenset",
         "slice", "namedtuple", "namespace", "dataclass", "enum", "float", "bytes", "bytearray", "complex", "range",
         "ellipsis", "datetime", "date", "time", "timedelta", "timezone", "decimal", "fraction", "uuid", "dtype",
         "layout", "torch.device", "torch.Size", "Path", "numpy.int64", "numpy.float32", "numpy.str_",
         "numpy.datetime64", "numpy.dtype", "numpy.ndarray", "nothing")  # fmt: skip

BODIES = (None, 0, "", [], {}, [[]], [1, 2], [1, 2, 3], "1", "torch", ["a:b", {}], [0, [1, 2]], 1e30)


# --- bytes ---------------------------------------------------------------------------------------------------------


def rotten(data: bytes, random_: random.Random, others: list[bytes]) -> tuple[str, bytes]:
    """What a disk, or a copy that went wrong, may make of a file; (what was done, bytes). `others` are other files."""
    how = random_.choice(("flip", "flip", "flip", "flip", "cut", "grow", "zero page", "swap", "empty", "repeat"))
    if how == "flip" and data:
        changed = bytearray(data)
        for _ in range(random_.choice((1, 1, 1, 2, 8))):
            changed[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        return how, bytes(changed)
    if how == "cut" and data:
        return how, data[: random_.randrange(len(data))]
    if how == "zero page" and data:
        at = random_.randrange(len(data)) // PAGE * PAGE
        return how, data[:at] + bytes(len(data[at : at + PAGE])) + data[at + PAGE :]
    if how == "swap" and others:
        return how, random_.choice(others)
    if how == "repeat" and data:
        at = random_.randrange(len(data))
        return how, data[:at] + data[at // 2 : at] + data[at:]
    return ("empty", b"") if how == "empty" else ("grow", data + random_.randbytes(random_.choice((1, 64, 5000))))


# --- JSON ----------------------------------------------------------------------------------------------------------


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield from _places(member, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _odd(random_: random.Random, whole: Any, places: list[tuple[Any, ...]]) -> Any:
    """A value that may stand anywhere."""
    match random_.randrange(9):
        case 0 | 1:
            return random_.choice(NUMBERS)
        case 2:
            return random_.choice(TEXTS)
        case 3:
            return random_.choice((None, True, False, [], {}, [[]], [{}], {"": 0}))
        case 4:
            return json.loads(json.dumps(_at(whole, random_.choice(places))))  # from elsewhere
        case 5:
            body = random_.choice(
                (None, 0, "", [], {}, [[]], [1, 2], [1, 2, 3], "1", "torch", ["a:b", {}], [0, [1, 2]], 1e30)
            )
            return {"$" + random_.choice(KINDS): body if random_.random() < 0.6 else _odd(random_, whole, places)}
        case 6:
            deep: Any = _odd(random_, 0, [()])
            key = random_.choice(("a", "$tuple", "$set"))
            for _ in range(random_.choice((5, 60, 150, 400))):
                deep = [deep] if random_.random() < 0.5 else {key: [deep]}
            return deep
        case 7:
            return [random_.choice((0, 1, [0, 1, 4], [5, 0, 1 << 24], "a", [0, 0], [[0, 1]]))] * random_.choice(
                (1, 3, 1000)
            )
        case _:
            return [random_.choice(NUMBERS) for _ in range(random_.randrange(5))]


MAX_JSON = 1 << 20
"""Most bytes of a changed file of JSON."""


def odd_json(value: Any, random_: random.Random) -> tuple[str, Any]:
    """The value with a few of its nodes changed, duplicated or left out."""
    while True:
        try:
            done, made = _odd_json(value, random_)
            json.dumps(made)
        except (ValueError, RecursionError, OverflowError):
            continue  # a node was put below itself, or it became too large or too deep
        return done, made


def _odd_json(value: Any, random_: random.Random) -> tuple[str, Any]:
    value = json.loads(json.dumps(value))
    done = []
    for _ in range(random_.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        path = random_.choice(places)
        if not path:
            continue
        *above, key = path
        holder = _at(value, tuple(above))
        how = random_.choice(("odd", "odd", "odd", "near", "drop", "twice", "exchange", "rename"))
        old = holder[key]
        if how == "near" and type(old) is int:
            holder[key] = random_.choice((old + 1, old - 1, 2 * old, -old, old << 32, str(old), float(old), [old]))
        elif how == "drop":
            del holder[key]
        elif how == "twice" and isinstance(holder, list):
            holder.insert(key, old)
        elif how == "exchange":
            other = random_.choice(places)
            if other and other[: len(path)] != path and path[: len(other)] != other:
                beside = _at(value, other[:-1])
                holder[key], beside[other[-1]] = beside[other[-1]], old
        elif how == "rename" and isinstance(holder, dict):
            holder[random_.choice((*TEXTS, *map(str, holder)))] = holder.pop(key)
        else:
            holder[key] = _odd(random_, value, places)
        done.append(f"{how} {'/'.join(map(str, path))[:80]}")
        if len(json.dumps(value)) > MAX_JSON:
            raise ValueError("time and memory are measured against the size of the file")
    return "; ".join(done), value


def odd_json_text(data: bytes, random_: random.Random) -> tuple[str, bytes]:
    """A file of JSON, changed."""
    done, value = odd_json(json.loads(data), random_)
    return done, json.dumps(value, separators=(",", ":")).encode()


# --- files with digests, which are made right again ------------------------------------------------------------------


def parts_of(manifest: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The head and the other members of a manifest."""
    first, _, rest = manifest.partition(b',"head":"')
    members = json.loads(b"{" + rest.partition(b'",\n')[2])
    members.pop("digest")
    return json.loads(first + b"}"), members


def sealed(head: dict[str, Any], members: dict[str, Any]) -> bytes:
    """A manifest with the digests that fit to it, whatever is in it."""
    first = json.dumps(head, separators=(",", ":")).encode()[:-1]
    lines = [first + b',"head":"' + to_hex(compute_digest(first)).encode() + b'"']
    lines += [json.dumps(k).encode() + b":" + json.dumps(v, separators=(",", ":")).encode() for k, v in members.items()]
    body = b",\n".join(lines)
    return body + b',\n"digest":"' + to_hex(compute_digest(body)).encode() + b'"}\n'


def forged_manifest(data: bytes, random_: random.Random) -> tuple[str, bytes]:
    """A manifest with changed members and right digests."""
    head, members = parts_of(data)
    if random_.random() < 0.05:
        done, head = odd_json(head, random_)
        head = head if isinstance(head, dict) else {}
    else:
        name = random_.choice(("skeleton", "skeleton", "arrays", "arrays", "files", "aliases", "objects", ""))
        if name:
            done, members[name] = odd_json([members[name]], random_)
            members[name] = members[name][0] if isinstance(members[name], list) and members[name] else None
        else:
            done, members = odd_json(members, random_)
        done = f"{name}: {done}"
    return done, sealed(head, members)


def header_of(data: bytes) -> tuple[Any, int]:
    """The header of a safetensors file, and where its data begin."""
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:end]), end


def odd_header(data: bytes, random_: random.Random) -> tuple[str, bytes]:
    """A safetensors file with a changed header of the same length, or of another one."""
    header, end = header_of(data)
    done, header = odd_json(header, random_)
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(end - 8) if random_.random() < 0.8 else text
    length = len(text) if random_.random() < 0.95 else random_.choice((0, 1, 1 << 40, (1 << 64) - 1))
    return done, struct.pack("<Q", length) + text + data[end:]


def resealed(manifest: bytes, path: str, data: bytes) -> bytes:
    """A manifest that has the size, and the digest of the header, of a safetensors file that was changed."""
    head, members = parts_of(manifest)
    length = 8 + struct.unpack("<Q", data[:8].ljust(8, b"\0"))[0]
    for entry in members["files"]:
        if entry[0] == path and length <= len(data):
            entry[1:4] = [len(data), length, to_hex(compute_digest(data[:length]))]
    return sealed(head, members)


# --- which of them ------------------------------------------------------------------------------------------------


def is_json(data: bytes) -> bool:
    """Whether a file is JSON that can be changed as such."""
    try:
        return isinstance(json.loads(data), dict | list)
    except (ValueError, RecursionError):
        return False


Change = Callable[[bytes, random.Random], tuple[str, bytes]]


def kind_of(path: str, data: bytes) -> str:
    """What kind of file it is, as the table says it."""
    name = path.rpartition("/")[2]
    if name == "manifest.json":
        return "manifest"
    if name.endswith(".distcp"):
        return "file of DCP's"
    if data[:4] == b"PK\3\4":
        return "zip of torch.save"
    if name.endswith(".safetensors"):
        return "safetensors"
    if data[:2] in (b"\x80\2", b"\x80\4", b"\x80\5"):
        return "pickle"
    return "JSON" if is_json(data) else "small file"


def crafted(kind: str) -> Change | None:
    """How the structure of such a file is changed; None if it has none."""
    return {
        "manifest": forged_manifest,
        "safetensors": odd_header,
        "JSON": odd_json_text,
        "pickle": pickles.odd_pickle,
        "zip of torch.save": pickles.odd_zip,
        "file of DCP's": pickles.odd_zip,
    }.get(kind)
