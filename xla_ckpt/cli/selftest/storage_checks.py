"""Selftest checks of the storage.

They check names, renames, fsync, conditional writes, bytes, free space, clock skew, leases, throughput, and atomicity
of saves whose process is killed.
"""

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
from xla_ckpt.cli.selftest.checks import (
    OUT_OF_TIME,
    Check,
    CheckContext,
    CheckResult,
    ChildProcess,
    failed,
    inconclusive,
    passed,
    skipped,
)
from xla_ckpt.cli.selftest.child import TAKEN
from xla_ckpt.errors import RootInUseError, StorageError, UsageError
from xla_ckpt.rendering.formatting import format_bytes, format_count
from xla_ckpt.snapshot.memory import ByteArray, allocate
from xla_ckpt.storage.base import Directory, FileSystem, read_file, write_file
from xla_ckpt.tags.lease import DIRECTORY_EXPIRY_SECONDS, RECORD_EXPIRY_SECONDS

MAX_BYTES = 1 << 29
"""Maximum number of bytes that a selftest stores in its folder at a time."""

MEASURED_BYTES = 1 << 26
"""Number of bytes that the throughput checks write and read back."""

EXIT_TIMEOUT_SECONDS = 5.0
"""Seconds to wait for the exit of a process that releases its lease when it exits."""

MIN_FSYNC_SECONDS = 20e-6
"""Minimum duration of a real fsync (s). A faster one has not waited for a disk."""

MAX_CLOCK_SKEW_SECONDS = 60.0
"""Maximum clock skew of a file server (s)."""

MAX_SLOWDOWN = 3.0
"""Maximum duration of a save or a load, relative to plain writes or reads of the same bytes."""

KILL_FRACTIONS = (0.5, 0.25, 0.75, 0.1, 0.9, 0.4, 0.6, 0.98)
"""Times at which a process is killed, as fractions of the duration of its previous save."""


def _check_names(context: CheckContext) -> CheckResult:
    names = ("tag", "Tag", "caf\u00e9", "cafe\u0301", "t" * 200)
    for name in names:
        try:
            with context.make_folder(name) as folder:
                write_file(folder, "name", name.encode())
        except FileExistsError as error:
            return failed(f"{name!r} is taken by a name that differs from it: {error}.")
    for name in names:
        with contextlib.closing(context.store.open(name, lock=False)) as directory:
            if read_file(directory, "name") != name.encode():
                return failed(f"What was written as {name!r} is something else.")
    return passed("Names that differ in case or in how an accent is spelt, and one of 200 letters, stay apart.")


def _check_rename(context: CheckContext) -> CheckResult:
    system = _get_file_system(context)
    for name in ("one", "other"):
        with context.make_folder(name) as folder:
            write_file(folder, name, b"")
    try:
        system.rename("one", "other")
        return failed("A directory that was renamed has taken the place of one that was not empty.")
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if not (system.has("one/one") and system.has("other/other")):
        return failed("A rename was refused, and has changed something all the same.")
    if not system.exchange("one", "other"):
        return passed(
            "None replaces what is not empty. Two names cannot be exchanged in one step: while a tag is replaced, its "
            "old version stands under another name for an instant, where readers of this library find it."
        )
    missed = 0
    with ThreadPoolExecutor(1) as pool:
        exchanges = pool.submit(lambda: [system.exchange("one", "other") for _ in range(200)])
        while not exchanges.done():
            missed += not (system.has("one") and system.has("other"))
    if missed or not all(exchanges.result()):
        return failed(
            f"While two names were exchanged 200 times, {format_count(missed, 'look')} found one of them gone."
        )
    return passed("None replaces what is not empty. Two names were exchanged 200 times, and were always there.")


def _get_file_system(context: CheckContext) -> FileSystem:
    assert context.store.file_system is not None, "only file systems have this check"
    return context.store.file_system


def _check_fsync(context: CheckContext) -> CheckResult:
    times = []
    with context.make_folder("synced") as folder:
        for number in range(20):
            sink = folder.create(str(number), 4096)
            sink.write(memoryview(os.urandom(4096)), 4096, 0)
            begin = time.perf_counter()
            sink.commit()
            times.append(time.perf_counter() - begin)
    took = sorted(times)[len(times) // 2]
    sentence = f"The fsync of 4096 bytes takes {took * 1e3:.3f} ms"
    if took < MIN_FSYNC_SECONDS:
        return failed(f"{sentence}: that reaches no disk, and a loss of power takes away what is saved here.")
    return inconclusive(
        f"{sentence}, so it waits for something. Whether that outlasts a loss of power, no program can see."
    )


def _check_conditional_writes(context: CheckContext) -> CheckResult:
    assert context.store.object_store is not None, "only object stores have this check"
    try:
        context.store.object_store.check_conditional_writes()
    except UsageError as error:
        return failed(str(error))
    return passed("A write was refused whose condition was not met: of a new file, of a changed one, of an absent one.")


def _make_random_bytes() -> ByteArray:
    data = allocate(MEASURED_BYTES)
    data[:] = np.frombuffer(os.urandom(MEASURED_BYTES), np.uint8)
    return data


def _read_file(folder: Directory, path: str, into: ByteArray) -> None:
    """Read a file plainly, bypassing the page cache if it is not cached."""
    with contextlib.closing(folder.open(path, MEASURED_BYTES)) as source:
        source.read_once(into.data, 0, allocate(1 << 23).data)


def _check_bytes(context: CheckContext) -> CheckResult:
    data, again = _make_random_bytes(), allocate(MEASURED_BYTES)
    with context.make_folder("bytes") as folder:
        write_file(folder, "file", data.data)
        _read_file(folder, "file", again)
    if not np.array_equal(data, again):
        return failed("Other bytes were read than were written.")
    return passed(
        f"{format_bytes(MEASURED_BYTES)} were read as they were written, around the page cache where that can be done."
    )


def _check_free_space(context: CheckContext) -> CheckResult:
    with context.make_folder("room") as folder:
        write_file(folder, "file", b"")
        free = folder.get_free_bytes()
    if free is None:
        return inconclusive("The storage does not say how much may be written.")
    return (passed if free >= MAX_BYTES else failed)(
        f"{format_bytes(free)} may be written; a selftest takes {format_bytes(MAX_BYTES)} at most."
    )


def _check_clock(context: CheckContext) -> CheckResult:
    begin = time.time()
    with context.make_folder("clock") as folder:
        write_file(folder, "file", b"now")
    modified = context.store.get_modified_time("clock/file")
    if modified is None:
        return inconclusive("The storage does not say when a file was written.")
    sentence = f"They differ by {abs(modified / 1e9 - begin):.1f} s"
    if abs(modified / 1e9 - begin) > MAX_CLOCK_SKEW_SECONDS:
        return failed(f"{sentence}. Where there are no locks, what killed saves left is removed too early, or late.")
    return passed(f"{sentence}.")


def _check_lease(context: CheckContext) -> CheckResult:
    path = context.get_root_path("lease")
    with context.start_child("save", path) as child:
        if not child.output.readline():
            return _report_early_exit(context, "The process that was to save ended before its first commit", child)
        with context.start_child("hold", path, "10") as other:
            word = other.output.readline().strip()
            if not word:
                return _report_early_exit(context, "A second process that wanted to save there ended", other)
        if word == TAKEN:
            return _report_lost_lease(context, child)
    begin = time.monotonic()
    silence = DIRECTORY_EXPIRY_SECONDS if context.store.object_store is None else RECORD_EXPIRY_SECONDS
    with context.start_child("hold", path, str(silence + 10)) as other:
        word = other.output.readline().strip()
    if word == TAKEN:
        return passed(f"A second process was refused, and had the lease {time.monotonic() - begin:.1f} s after a kill.")
    if not context.seconds_left:
        return skipped("A second process was refused. There was no time to wait for the lease of a killed one.")
    return failed("After the first process was killed, another one did not get its lease.")


def _report_early_exit(context: CheckContext, what: str, child: ChildProcess) -> CheckResult:
    """Return the result for a process that ended by itself, unless it ended at the deadline."""
    return inconclusive(f"{what}, with {child.describe_exit()}.") if context.seconds_left else OUT_OF_TIME


def _report_lost_lease(context: CheckContext, child: ChildProcess) -> CheckResult:
    """Return the result for a second process that acquired the lease of a process that saves in a loop."""
    try:
        child.process.wait(EXIT_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return failed("A second process that wanted to save there was not refused.")
    if RootInUseError.__name__ in child.describe_exit():
        return failed("A second process took the lease of one that was saving.")
    return _report_early_exit(context, "The process that saves ended while a second one asked for its lease", child)


def _check_speed(context: CheckContext) -> CheckResult:
    data, again, path = _make_random_bytes(), allocate(MEASURED_BYTES), context.get_root_path("speed")
    xla_ckpt.save(path, "first", {"w": data[:1024]})  # starts the process that commits
    best = dict.fromkeys(("write", "save", "read", "load"), float("inf"))
    with context.make_folder("raw") as folder:
        for file in map(str, range(3)):
            actions: dict[str, Callable[[], object]] = {
                "write": partial(write_file, folder, file, data.data),
                "save": partial(xla_ckpt.save, path, "tag", {"w": data}),
                "read": partial(_read_file, folder, file, again),
                "load": partial(xla_ckpt.restore, path, "tag"),
            }
            for what, action in actions.items():
                begin = time.perf_counter()
                action()
                best[what] = min(best[what], time.perf_counter() - begin)
            if context.seconds_left < 2 * sum(best.values()):
                break
    save, load = best["save"] / best["write"], best["load"] / best["read"]
    rates = ", ".join(f"{what} {format_bytes(int(MEASURED_BYTES / seconds))}/s" for what, seconds in best.items())
    measured = f"Save: {save:.2f} times, load: {load:.2f} times; {rates}."
    if max(save, load) <= MAX_SLOWDOWN:
        return passed(measured)
    # Another program that uses the storage at the same time would give the same result.
    return inconclusive(f"{measured} Try it again while nothing else uses this storage.")


def _check_kill(context: CheckContext) -> CheckResult:
    begin, kills, ended = time.monotonic(), 0, OUT_OF_TIME
    for instant in KILL_FRACTIONS:
        if kills and context.seconds_left < 2 * (time.monotonic() - begin) / kills:
            break
        path = context.get_root_path(f"killed-{kills}")
        with context.start_child("save", path) as child:
            times, said = [], []
            for _ in range(3):
                said.append(child.output.readline())
                times.append(time.monotonic())
            if not said[-1]:
                ended = _report_early_exit(context, "The process that saves ended before its third commit", child)
                break
            time.sleep(instant * (times[-1] - times[-2]))
            child.process.kill()
            said += child.output.readlines()
        if (problem := find_tag_problem(path, max(map(int, said)))) is not None:
            return failed(f"After a kill -9 at {instant:.0%} of a save, {problem}.")
        kills += 1
    if not kills:
        return ended
    whole = f"A process was killed in mid-save, {format_count(kills, 'time')}: all tags were whole, and none was lost."
    return passed(whole if ended is OUT_OF_TIME else f"{whole} {ended.sentence}")


def find_tag_problem(path: str, newest: int) -> str | None:
    """Return the problem with the tags of a killed process that had committed up to a number; None if there is none.

    Raises:
        StorageError: They cannot be read.
    """
    tags = xla_ckpt.list_tags(path)
    for tag in tags:
        for problem in xla_ckpt.verify(path, tag).problems:
            if isinstance(problem, StorageError):  # gives no information about the bytes
                raise problem
            return f"{tag} is damaged: {problem}"
        if (np.asarray(xla_ckpt.restore(path, tag).tree["w"]) != int(tag.removeprefix("step_"))).any():
            return f"{tag} is a mixture of two saves"
    if not tags or int(tags[-1].removeprefix("step_")) < newest:
        return f"step_{newest}, which was committed, is gone"
    return None


def list_storage_checks(*, is_object_store: bool) -> list[Check]:
    """Return the checks for an object store or a file system: free space first, then the quick ones."""
    of_kind = [
        Check("conditional writes", "a record is replaced on its condition, or not at all", _check_conditional_writes)
    ]
    if not is_object_store:
        of_kind = [
            Check("rename", "a name changes in one step, and replaces nothing by mistake", _check_rename),
            Check("fsync", "what was synced outlasts a loss of power", _check_fsync),
        ]
    return [
        Check("room", "there is room", _check_free_space),
        Check("names", "tags that differ in one letter are different tags", _check_names),
        *of_kind,
        Check("bytes", "what is read is what was written", _check_bytes),
        Check("clock", "the clocks of the storage and of this machine agree", _check_clock),
        Check("lease", "one job at a time saves to a root, and a killed one is no hindrance", _check_lease),
        Check("speed", f"a save and a load take at most {MAX_SLOWDOWN:g} times as long as plain files", _check_speed),
        Check(
            "kill", "a save is there wholly or not at all, whenever its process is killed", _check_kill, time_share=0.4
        ),
    ]
