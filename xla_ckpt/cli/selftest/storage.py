"""Promises on storage: names, renames, fsync, conditional writes, bytes, room, clock, leases, speed, atomic commits."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

import xla_ckpt
from xla_ckpt.cli.selftest.checks import NO_TIME, Bench, Check, Child, Sighting, broken, holds, skipped, unseen
from xla_ckpt.cli.selftest.child import TAKEN
from xla_ckpt.errors import RootInUseError, StorageError, UsageError
from xla_ckpt.snapshot.memory import Bytes, allocate
from xla_ckpt.storage.base import Directory, FileSystem
from xla_ckpt.storage.small_files import read_whole, write_small
from xla_ckpt.tables.texts import count, size
from xla_ckpt.tags.lease_places import DIRECTORY_SILENCE, RECORD_SILENCE

ROOM = 1 << 29
"""Bytes that a selftest has in its folder at a time, at most."""

MEASURED = 1 << 26
"""Bytes that are written and read back, and for their speed."""

LINGERING = 5.0
"""Seconds in which a process has ended that has given back its lease because it ends."""

TOO_QUICK = 20e-6
"""An fsync that takes less (s) has waited for no disk."""

CLOCKS_APART = 60.0
"""Seconds by which the clock of a file server may differ."""

SLOWEST = 3.0
"""A save or a load may take so many times as long as plain writing or reading."""

INSTANTS = (0.5, 0.25, 0.75, 0.1, 0.9, 0.4, 0.6, 0.98)
"""When a process is killed, as parts of the length of its save before."""


def _names(bench: Bench) -> Sighting:
    names = ("tag", "Tag", "caf\u00e9", "cafe\u0301", "t" * 200)
    for name in names:
        try:
            with bench.folder(name) as folder:
                write_small(folder, "name", name.encode())
        except FileExistsError as error:
            return broken(f"{name!r} is taken by a name that differs from it: {error}.")
    for name in names:
        with contextlib.closing(bench.store.open(name, lock=False)) as directory:
            if read_whole(directory, "name") != name.encode():
                return broken(f"What was written as {name!r} is something else.")
    return holds("Names that differ in case or in how an accent is spelt, and one of 200 letters, stay apart.")


def _rename(bench: Bench) -> Sighting:
    system = _file_system(bench)
    for name in ("one", "other"):
        with bench.folder(name) as folder:
            write_small(folder, name, b"")
    try:
        system.rename("one", "other")
        return broken("A directory that was renamed has taken the place of one that was not empty.")
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if not (system.has("one/one") and system.has("other/other")):
        return broken("A rename was refused, and has changed something all the same.")
    if not system.exchange("one", "other"):
        return holds(
            "None replaces what is not empty. Two names cannot be exchanged in one step: while a tag is replaced, its "
            "old version stands under another name for an instant, where readers of this library find it."
        )
    missed = 0
    with ThreadPoolExecutor(1) as pool:
        exchanges = pool.submit(lambda: [system.exchange("one", "other") for _ in range(200)])
        while not exchanges.done():
            missed += not (system.has("one") and system.has("other"))
    if missed or not all(exchanges.result()):
        return broken(f"While two names were exchanged 200 times, {count(missed, 'look')} found one of them gone.")
    return holds("None replaces what is not empty. Two names were exchanged 200 times, and were always there.")


def _file_system(bench: Bench) -> FileSystem:
    assert bench.store.file_system is not None, "only file systems have this check"
    return bench.store.file_system


def _fsync(bench: Bench) -> Sighting:
    times = []
    with bench.folder("synced") as folder:
        for number in range(20):
            sink = folder.create(str(number), 4096)
            sink.write(memoryview(os.urandom(4096)), 4096, 0)
            begin = time.perf_counter()
            sink.commit()
            times.append(time.perf_counter() - begin)
    took = sorted(times)[len(times) // 2]
    sentence = f"The fsync of 4096 bytes takes {took * 1e3:.3f} ms"
    if took < TOO_QUICK:
        return broken(f"{sentence}: that reaches no disk, and a loss of power takes away what is saved here.")
    return unseen(f"{sentence}, so it waits for something. Whether that outlasts a loss of power, no program can see.")


def _conditions(bench: Bench) -> Sighting:
    assert bench.store.object_store is not None, "only object stores have this check"
    try:
        bench.store.object_store.check_conditions()
    except UsageError as error:
        return broken(str(error))
    return holds("A write was refused whose condition was not met: of a new file, of a changed one, of an absent one.")


def _random() -> Bytes:
    data = allocate(MEASURED)
    data[:] = np.frombuffer(os.urandom(MEASURED), np.uint8)
    return data


def _read(folder: Directory, path: str, into: Bytes) -> None:
    """Read a file plainly, around the page cache if it is not in it."""
    with contextlib.closing(folder.open(path, MEASURED)) as source:
        source.read_once(into.data, 0, allocate(1 << 23).data)


def _bytes(bench: Bench) -> Sighting:
    data, again = _random(), allocate(MEASURED)
    with bench.folder("bytes") as folder:
        write_small(folder, "file", data.data)
        _read(folder, "file", again)
    if not np.array_equal(data, again):
        return broken("Other bytes were read than were written.")
    return holds(f"{size(MEASURED)} were read as they were written, around the page cache where that can be done.")


def _room(bench: Bench) -> Sighting:
    with bench.folder("room") as folder:
        write_small(folder, "file", b"")
        free = folder.free()
    if free is None:
        return unseen("The storage does not say how much may be written.")
    return (holds if free >= ROOM else broken)(f"{size(free)} may be written; a selftest takes {size(ROOM)} at most.")


def _clock(bench: Bench) -> Sighting:
    begin = time.time()
    with bench.folder("clock") as folder:
        write_small(folder, "file", b"now")
    modified = bench.store.modified("clock/file")
    if modified is None:
        return unseen("The storage does not say when a file was written.")
    sentence = f"They differ by {abs(modified / 1e9 - begin):.1f} s"
    if abs(modified / 1e9 - begin) > CLOCKS_APART:
        return broken(f"{sentence}. Where there are no locks, what killed saves left is removed too early, or late.")
    return holds(f"{sentence}.")


def _lease(bench: Bench) -> Sighting:
    path = bench.below("lease")
    with bench.child("save", path) as child:
        if not child.lines.readline():
            return _ended(bench, "The process that was to save ended before its first commit", child)
        with bench.child("hold", path, "10") as other:
            word = other.lines.readline().strip()
            if not word:
                return _ended(bench, "A second process that wanted to save there ended", other)
        if word == TAKEN:
            return _taken_from(bench, child)
    begin = time.monotonic()
    silence = DIRECTORY_SILENCE if bench.store.object_store is None else RECORD_SILENCE
    with bench.child("hold", path, str(silence + 10)) as other:
        word = other.lines.readline().strip()
    if word == TAKEN:
        return holds(f"A second process was refused, and had the lease {time.monotonic() - begin:.1f} s after a kill.")
    if not bench.left:
        return skipped("A second process was refused. There was no time to wait for the lease of a killed one.")
    return broken("After the first process was killed, another one did not get its lease.")


def _ended(bench: Bench, what: str, child: Child) -> Sighting:
    """What is said of a process that ended by itself, if it did not do so because the time is over."""
    return unseen(f"{what}, with {child.ending()}.") if bench.left else NO_TIME


def _taken_from(bench: Bench, child: Child) -> Sighting:
    """What it means that a second process had the lease of one that was to save without an end."""
    try:
        child.process.wait(LINGERING)
    except subprocess.TimeoutExpired:
        return broken("A second process that wanted to save there was not refused.")
    if RootInUseError.__name__ in child.ending():
        return broken("A second process took the lease of one that was saving.")
    return _ended(bench, "The process that saves ended while a second one asked for its lease", child)


def _speed(bench: Bench) -> Sighting:
    data, again, path = _random(), allocate(MEASURED), bench.below("speed")
    xla_ckpt.save(path, "first", {"w": data[:1024]})  # from now on the process runs that commits
    best = dict.fromkeys(("write", "save", "read", "load"), float("inf"))
    with bench.folder("raw") as folder:
        for file in map(str, range(3)):
            actions: dict[str, Callable[[], object]] = {
                "write": partial(write_small, folder, file, data.data),
                "save": partial(xla_ckpt.save, path, "tag", {"w": data}),
                "read": partial(_read, folder, file, again),
                "load": partial(xla_ckpt.restore, path, "tag"),
            }
            for what, action in actions.items():
                begin = time.perf_counter()
                action()
                best[what] = min(best[what], time.perf_counter() - begin)
            if bench.left < 2 * sum(best.values()):
                break
    save, load = best["save"] / best["write"], best["load"] / best["read"]
    rates = ", ".join(f"{what} {size(int(MEASURED / seconds))}/s" for what, seconds in best.items())
    measured = f"Save: {save:.2f} times, load: {load:.2f} times; {rates}."
    if max(save, load) <= SLOWEST:
        return holds(measured)
    # Another program that uses the storage meanwhile looks the same.
    return unseen(f"{measured} Try it again while nothing else uses this storage.")


def _killed(bench: Bench) -> Sighting:
    begin, kills, ended = time.monotonic(), 0, NO_TIME
    for instant in INSTANTS:
        if kills and bench.left < 2 * (time.monotonic() - begin) / kills:
            break
        path = bench.below(f"killed-{kills}")
        with bench.child("save", path) as child:
            times, said = [], []
            for _ in range(3):
                said.append(child.lines.readline())
                times.append(time.monotonic())
            if not said[-1]:
                ended = _ended(bench, "The process that saves ended before its third commit", child)
                break
            time.sleep(instant * (times[-1] - times[-2]))
            child.process.kill()
            said += child.lines.readlines()
        if (problem := torn(path, max(map(int, said)))) is not None:
            return broken(f"After a kill -9 at {instant:.0%} of a save, {problem}.")
        kills += 1
    if not kills:
        return ended
    whole = f"A process was killed in mid-save, {count(kills, 'time')}: all tags were whole, and none was lost."
    return holds(whole if ended is NO_TIME else f"{whole} {ended.sentence}")


def torn(path: str, newest: int) -> str | None:
    """What is wrong with the tags of a process that was killed, after it had committed those up to a number.

    Raises:
        StorageError: They cannot be read.
    """
    tags = xla_ckpt.list_tags(path)
    for tag in tags:
        for problem in xla_ckpt.verify(path, tag).problems:
            if isinstance(problem, StorageError):  # it says nothing of the bytes
                raise problem
            return f"{tag} is damaged: {problem}"
        if (np.asarray(xla_ckpt.restore(path, tag).tree["w"]) != int(tag.removeprefix("step_"))).any():
            return f"{tag} is a mixture of two saves"
    if not tags or int(tags[-1].removeprefix("step_")) < newest:
        return f"step_{newest}, which was committed, is gone"
    return None


def storage_checks(*, objects: bool) -> list[Check]:
    """The checks of an object store, or of a file system: first that of the room, and then the quick ones."""
    of_kind = [Check("conditional writes", "a record is replaced on its condition, or not at all", _conditions)]
    if not objects:
        of_kind = [
            Check("rename", "a name changes in one step, and replaces nothing by mistake", _rename),
            Check("fsync", "what was synced outlasts a loss of power", _fsync),
        ]
    return [
        Check("room", "there is room", _room),
        Check("names", "tags that differ in one letter are different tags", _names),
        *of_kind,
        Check("bytes", "what is read is what was written", _bytes),
        Check("clock", "the clocks of the storage and of this machine agree", _clock),
        Check("lease", "one job at a time saves to a root, and a killed one is no hindrance", _lease),
        Check("speed", f"a save and a load take at most {SLOWEST:g} times as long as plain files", _speed),
        Check("kill", "a save is there wholly or not at all, whenever its process is killed", _killed, share=0.4),
    ]
