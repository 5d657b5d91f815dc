"""Files that were made to do harm: each is refused with a typed error, in time and memory that fit to its size."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.fuzz.mutations import parts_of, sealed
from tests.jobs import run_alone
from xla_ckpt.cli.main import main as command
from xla_ckpt.core.checksum import compute_digest, to_hex
from xla_ckpt.core.sharding.box import Box, is_tiling
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, NotAFileError
from xla_ckpt.formats.torch_save.unpickler import load_pickle, replace_tensors

SECONDS = 60
"""A call that takes longer hangs: none of these takes one, and the machine may be busy."""

MEMORY = 2 << 30
"""Address space that a call may take besides (bytes): the threads of a load take a part of it."""

Members = dict[str, Any]
HASH = (1 << 61) - 1
"""Python's hash of an integer is its remainder by this."""


def runs(n: int) -> list[Any]:
    """So many shards of one byte, in a few characters."""
    return [[[[0, 1, n + 1]]], 0, [[4096, 1, n]]]


def array(shape: list[int], grids: list[Any], names: list[str] | None = None) -> dict[str, Any]:
    """A form: of all its grids, (cuts, files, offsets) each, the files and offsets are those of the last one."""
    files, offsets = grids[-1][1:] if grids else ([], [])
    cuts = [grid[0] for grid in grids]
    return {
        "dtype": "uint8", "shape": shape, "cuts": cuts, "names": names or ["w"], "files": files, "offsets": offsets,
    }  # fmt: skip


def only(members: Members, record: Any, nbytes: int = 0) -> None:
    """Leave one array, in a file that claims so many bytes."""
    members["arrays"], members["skeleton"] = [record], {"w": {"$array": "torch"}}
    members["files"][0][1] += nbytes


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def with_skeleton(skeleton: Any) -> Callable[[Members], None]:
    return lambda members: members.update(skeleton={**members["skeleton"], "x": skeleton})


FORGED: dict[str, Callable[[Members], None]] = {
    "a million shards in 440 bytes would take half a minute": lambda m: only(m, array([10**6], [runs(10**6)]), 10**6),
    "sixteen million shards would take gigabytes": lambda m: only(m, array([1 << 24], [runs((1 << 24) - 1)]), 1 << 24),
    "sixteen million regions of a file would take gigabytes": lambda m: m["files"].append(
        ["x", 10 + (1 << 24), 10, "0" * 16, [1 << 24, [[10, 1, 1 << 24]], 1, "AAAA"]]
    ),
    "six thousand slices that overlap would be compared in pairs": lambda m: only(
        m, array([2, 6000], [[[[0, 2], [i // 2, i // 2 + 1]], 0, 4096] for i in range(6000)]), 12_000
    ),
    "an array of four terabytes would be allocated": lambda m: only(
        m, array([1 << 21, 1 << 21], [[[[0, 1 << 21], [0, 1 << 21]], 0, 4096]]), 1 << 42
    ),
    "the same bytes would be thousands of arrays": lambda m: m.update(
        arrays=[array([48], [[[[0, 48]], 0, 4096]], [f"w{i}" for i in range(5000)])],
        skeleton={f"w{i}": {"$array": "torch"} for i in range(5000)},
    ),
    "frameworks cannot make an array of 0 times 2**61 elements": lambda m: only(m, array([0, 1 << 61], [])),
    "numpy cannot make one of 2**40 times 0 times 2**40": lambda m: only(m, array([1 << 40, 0, 1 << 40], [])),
    "an integer of 5,000 digits cannot be told": lambda m: m["files"][0].__setitem__(1, 10**4200),
    "a file name would be no text": lambda m: m["files"][0].__setitem__(0, "\ud800"),
    "a fraction would have ten million digits": with_skeleton({"$fraction": ["1e10000000", 1]}),
    "a fraction of floats would be another one": with_skeleton({"$fraction": [0.5, 1]}),
    "a deque cannot be that long": with_skeleton({"$deque": [1e30, []]}),
    "containers would be nested without end": with_skeleton(nested(300)),
    "keys with one hash would be compared in pairs": with_skeleton({"$dict": [[5 + k * HASH, 1] for k in range(9000)]}),
    "members with one hash would be compared in pairs": with_skeleton({"$set": [5 + k * HASH for k in range(9000)]}),
    "a dict of pairs that are none": with_skeleton({"$dict": [1]}),
    "a dict of pairs of three": with_skeleton({"$Counter": [[1, 2, 3]]}),
    "a dataclass without fields": with_skeleton({"$dataclass": []}),
    "a dict in place of a list": with_skeleton({"$defaultdict": {"a": 1}}),
    "a number in place of fields": with_skeleton({"$namespace": 5}),
    "an object without a number": with_skeleton({"$object": []}),
    "a zone would be another file": with_skeleton({"$ZoneInfo": "../../../../etc/passwd"}),
    "a zone would be an empty name": with_skeleton({"$ZoneInfo": ""}),
    "a zone would be a number": with_skeleton({"$datetime_in_zone": ["2026-01-01T00:00:00", 0, 5]}),
    "an array of an unknown type": with_skeleton({"$array.array": ["X", 1, ""]}),
    "an array of items of another size": with_skeleton({"$array.array": ["q", 1, "AAAA"]}),
    "an array of half an item": with_skeleton({"$array.array": ["i", 4, "AAA="]}),
    "an array of what is no text": with_skeleton({"$array.array": ["u", 4, "/////w=="]}),
    "an integer without digits": with_skeleton({"$int": "gg"}),
    "an integer that is a number": with_skeleton({"$int": 5}),
    "flags that are text": with_skeleton({"$flags": ["re:RegexFlag", "1"]}),
    "flags of a module that is not imported": with_skeleton({"$flags": ["antigravity:Fly", 1]}),
    "a class that extends nothing": with_skeleton({"$extended": []}),
    "a class of a module that is not imported": with_skeleton({"$extended": ["antigravity:Fly", {}, 1]}),
    "a scalar of objects": with_skeleton({"$numpy.void": [[["a", "O"]], [], "AAAAAAAAAAA="]}),
    "a record without bytes": with_skeleton({"$numpy.record": [[["a", "<f4"]], [], ""]}),
    "records of an unknown type": with_skeleton({"$numpy.recarray": [[["a", "<f4"], 5], [1], ""]}),
    "a generator of four bytes": with_skeleton({"$torch.Generator": "AAAAAA=="}),
    "a generator that no seed makes": with_skeleton({"$torch.Generator": "A" * 6740 + "AA=="}),
}
"""What would happen -> how the manifest is changed. All digests of the manifest are right."""


def refused(call: Callable[[], object]) -> str | None:
    """The class of the error that a call raises; None if it returns. Everything but a typed error is raised."""
    try:
        call()
    except CheckpointError as error:
        return type(error).__name__ if str(error) else "an error without a text"
    return None


def looked_at(root: Path) -> dict[str, str | None]:
    """What all readers make of the tag ``a``; in a process that has a limited address space, and a limited time."""
    signal.alarm(SECONDS)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    model = torch.nn.Linear(3, 4)
    with contextlib.redirect_stdout(open(os.devnull, "w")):  # noqa: SIM115
        for words in (
            ["show", str(root), "--tag", "a"],
            ["show", "--json", str(root), "--tag", "a"],
            ["ls", str(root)],
        ):
            assert command(words) in (0, 1), words
    return {
        "list": refused(lambda: xla_ckpt.list_tags(root)),
        "restore": refused(lambda: xla_ckpt.restore(root, "a", num_workers=1)),
        "load": refused(lambda: xla_ckpt.load_checkpoint(root, "a", model=model, num_workers=1)),
        "explain": refused(lambda: xla_ckpt.explain(root, "a", mesh="dp=2")),
        "verify": refused(lambda: xla_ckpt.verify(root, "a", num_workers=1)),
    }


@pytest.mark.parametrize("harm", FORGED)
def test_a_forged_manifest_is_refused(harm: str, tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "a", {"w": torch.arange(12.0).reshape(3, 4)})
    manifest = tmp_path / "a/manifest.json"
    head, members = parts_of(manifest.read_bytes())
    FORGED[harm](members)
    manifest.write_bytes(sealed(head, members))
    found = run_alone(looked_at, tmp_path)
    assert found["list"] is None
    assert found["restore"] in ("FormatError", "CorruptCheckpointError", "UntrustedObjectError"), found
    assert found["load"] is not None


MANY = b"".join(b"0h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60))

PICKLES = {
    "a table of 2**26 places would be made": b"\x80\x02Nr\0\0\0\4.",
    "a table would be made for a place in text": b"\x80\x02Np99999999\n.",
    "the hash of a tuple of 2**60 values would be taken": b"\x80\x02K\1K\1\x86q\0" + MANY + b"}h\x3cK\1s.",
    "keys with one hash would be compared in pairs": b"\x80\2}("
    + b"".join(b"\x8a\x0a" + (5 + k * HASH).to_bytes(10, "little") + b"N" for k in range(9000)) + b"u.",
    "a list would stand for 10**8 values": b"\x80\2K\1"
    + b"".join(b"q%c0](" % n + b"h%c" % n * 10 + b"e" for n in range(8)) + b".",
    "one list would be copied thousands of times": b"\x80\2ctorch\nSize\nq\0(" + b"K\1" * 30_000 + b"lq\1]("
    + b"h\0h\1\x85R" * 3000 + b"e.",
    "text would be made of what a list stands for": b"\x80\2ctorch\ndevice\n]\x85R.",
    "bytes would be taken that are not there": b"\x80\2B\xff\xff\xff\x7f",
    "an integer would have too many digits": b"\x80\2\x8b\0\x10\0\0" + b"\x7f" * 4096 + b".",
    "a function would be called": b"\x80\2cos\nsystem\nX\4\0\0\0true\x85R.",
    "lists would be nested without end": b"\x80\2" + b"](" * 5000 + b"e" * 5000 + b".",
}  # fmt: skip


def unpickled(data: bytes) -> str | None:
    """What becomes of a pickle."""
    signal.alarm(SECONDS)
    return refused(lambda: replace_tensors(load_pickle(data, "x.pt"), lambda value: value, "x.pt", len(data)))


@pytest.mark.parametrize("harm", PICKLES)
def test_a_forged_pickle_is_refused(harm: str) -> None:
    assert run_alone(unpickled, PICKLES[harm]) in ("CorruptCheckpointError", "UntrustedObjectError")


def put_in_place(path: Path, what: str) -> None:
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to({"link": "/etc/passwd", "device": "/dev/zero", "circle": path.name}[what])


def reads_and_saves(root: Path) -> list[str | None]:
    signal.alarm(SECONDS)
    found = [
        refused(lambda: xla_ckpt.list_tags(root)),
        refused(lambda: xla_ckpt.restore(root, "b", num_workers=1)),
        refused(lambda: xla_ckpt.explain(root, "b", mesh="dp=1")),
        refused(lambda: xla_ckpt.verify(root, "b")),
    ]
    xla_ckpt.save(root, "c", {"w": torch.ones(3)}, num_kept_ckpts=1)
    xla_ckpt.finalize_checkpoint()
    assert xla_ckpt.verify(root, "c").ok
    return found


@pytest.mark.parametrize("what", ["pipe", "directory", "link", "device", "circle"])
@pytest.mark.parametrize("file", ["manifest.json", "_CHECKPOINT_METADATA", "tree/00001-of-00001.safetensors"])
def test_what_is_no_file_is_not_waited_for(file: str, what: str, tmp_path: Path) -> None:
    for tag in "ab":
        xla_ckpt.save(tmp_path, tag, {"w": torch.ones(3)})
    xla_ckpt.finalize_checkpoint()
    put_in_place(tmp_path / "b" / file, what)
    listed, restored, *_ = run_alone(reads_and_saves, tmp_path)
    assert listed is None
    assert restored == (None if file == "_CHECKPOINT_METADATA" else "NotAFileError")


def test_a_damaged_newest_tag_with_a_pipe_is_passed_over(tmp_path: Path) -> None:
    for number, tag in enumerate("ab"):
        xla_ckpt.save_checkpoint(tmp_path, tag, {"w": torch.full((3,), float(number))})
    put_in_place(next((tmp_path / "b").rglob("*.safetensors")), "pipe")
    held = {"w": torch.zeros(3)}
    loaded = xla_ckpt.load_checkpoint(tmp_path, model=held)
    assert loaded.report.tag == "a"
    assert loaded.report.corrupt_tags == ("b",)
    assert issubclass(NotAFileError, CorruptCheckpointError)


def test_a_tiling_is_told_from_what_is_none() -> None:
    whole = Box((0, 0), (60, 4))
    rows = [Box((i, 0), (i + 1, 4)) for i in range(60)]
    assert is_tiling(rows, whole)
    assert not is_tiling(rows[1:], whole)
    assert not is_tiling([*rows[1:], rows[1]], whole)
    assert not is_tiling([*rows, rows[1]], whole)
    assert not is_tiling([], whole)
    assert is_tiling([], Box((0, 0), (0, 4)))
    assert is_tiling([Box((0,) * 9, (1,) * 9), Box((1,) + (0,) * 8, (2,) + (1,) * 8)], Box((0,) * 9, (2,) + (1,) * 8))
    assert is_tiling([Box((0,) * 9, (1,) * 9)], Box((0,) * 9, (2,) * 9)) is None


@pytest.mark.parametrize("mark", ["done", "checkpoint", "commit_success.txt"])
def test_a_mark_that_is_a_link_in_a_circle_is_no_mark(mark: str, tmp_path: Path) -> None:
    """A look for what another library has saved over the tag met it, and no error of ours said so."""
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(3)}, layout="xser")
    (tmp_path / "a" / mark).unlink()
    (tmp_path / "a" / mark).symlink_to(mark)
    assert xla_ckpt.restore(tmp_path, "a").tree["model"]["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize("depth", [90, 300, 900, 5000])
def test_a_look_at_values_in_each_other_ends_well_or_in_an_error_of_ours(
    depth: int, form: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To copy them took several calls for each, and Python ended that with an error of its own."""
    xla_ckpt.save(tmp_path, "a", {"deep": 1})
    manifest = tmp_path / "a/manifest.json"
    head, members = parts_of(manifest.read_bytes())
    members["skeleton"] = {"deep": None}
    text = sealed(head, members).replace(b'"deep":null', b'"deep":{"$odd":' + b"[" * depth + b"1" + b"]" * depth + b"}")
    body = text.rpartition(b',\n"digest":')[0]
    manifest.write_bytes(body + b',\n"digest":"' + to_hex(compute_digest(body)).encode() + b'"}\n')
    code = command(["show", str(tmp_path), *form])
    assert code == 0 or "Traceback" not in capsys.readouterr().err
    assert code in (0, 1)
