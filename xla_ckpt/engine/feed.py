"""What feeds the writers where a snapshot is still in the program's memory: segments of files, copied ahead of them.

One thread copies segment after segment, in the order in which they are written, into an `Arena`. It runs ahead of the
writers as far as the budget reaches, and waits for them then. What it has copied is settled: the program may write to
that memory again.

Where nobody waits for that, and the host makes the copies itself, each writer copies its segment into its own buffer.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import numpy as np

from xla_ckpt.errors import CheckpointError, SaveError
from xla_ckpt.snapshot.arena import Arena, ArenaPiece
from xla_ckpt.snapshot.freezing import Deferred
from xla_ckpt.snapshot.memory import Bytes
from xla_ckpt.snapshot.shards import HOST, Link
from xla_ckpt.storage.worker import Worker


@dataclass(frozen=True, slots=True)
class Extract:
    """Bytes of a region, and where they stand in the image of a segment."""

    at: int
    """Offset in the image."""

    source: memoryview | Deferred
    offset: int
    """Of the first byte in `source`."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What makes the image of a segment."""

    nbytes: int
    """Bytes of the segment."""

    extracts: Sequence[Extract]


class Feed:
    """Images of segments, made in the background. A context: nothing is copied any more when it is left.

    Args:
        wanted: What is in each segment, in the order in which they are asked for.
        deferred: All shards that are still in the program's memory. Those that no segment has are let go of at once.
        budget: Bytes of host memory at most.
    """

    def __init__(self, wanted: Mapping[Hashable, Wanted], deferred: Iterable[Deferred], budget: int) -> None:
        self._wanted = wanted
        sources = [extract.source for image in wanted.values() for extract in image.extracts]
        self._left = Counter(source for source in sources if isinstance(source, Deferred))
        for shard in deferred:
            if shard not in self._left:
                shard.drop()
        self._arena = Arena(_filled_by(self._left), budget)
        self._lock = threading.Lock()
        self._images: dict[Hashable, ArenaPiece] = {}
        self._error: BaseException | None = None
        self._ahead = any(source.changes or source.link is not HOST for source in self._left)
        """Whether somebody gains by copies that are made ahead of the writers: the program, or a device."""
        self._worker = Worker("xla_ckpt-feed", daemon=True)
        self._has_thread = False
        """Not so before it is entered, and where nobody gains by it or none is to be had: then whoever asks for a
        segment copies it."""

    def __contains__(self, segment: Hashable) -> bool:
        return segment in self._wanted

    def __enter__(self) -> Feed:
        if self._ahead and (self._worker.submit(self._copy_all, self._failed)):
            self._has_thread = True
            self._worker.submit(self._complete_copies, self._failed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._arena.stop()
        if self._has_thread:
            self._worker.wait()
        self._arena.close()

    def image(self, segment: Hashable, buffer: memoryview) -> ArenaPiece:
        """The image of a segment, to be given back. Waits until it is there, or makes it in `buffer`.

        Raises:
            CheckpointError: The bytes could not be copied, or were written to before.
        """
        if not self._has_thread:
            memory = np.frombuffer(buffer, np.uint8)
            self._begin(self._wanted[segment].extracts, memory)()
            return ArenaPiece(memory, _kept_by_its_owner)
        self._worker.wait(lambda: segment in self._images or self._error is not None)
        if (piece := self._images.pop(segment, None)) is not None:
            return piece
        raise self._error or SaveError("the thread that copies to host memory has ended")

    def _complete_copies(self) -> None:
        """Wait for all copies: the arena's memory must not be lent to others while one into it is on its way."""
        for link in {source.link for source in self._left}:
            link.mark()()

    def _copy_all(self) -> None:
        """Copy one segment after the other. While one is on its way, the one before it is handed out."""
        under_way: Callable[[], None] | None = None
        for segment, wanted in self._wanted.items():
            room = self._arena.take(wanted.nbytes, wait=False)
            if room is None and under_way is not None:
                under_way()  # the writers can give memory back only after they have had it
                under_way = None
            room = room or self._arena.take(wanted.nbytes, wait=True)
            if room is None:  # left before all was written: the save has failed
                return
            begun = partial(self._hand_out, segment, room, self._begin(wanted.extracts, room.memory))
            if under_way is not None:
                under_way()
            under_way = begun
        if under_way is not None:
            under_way()

    def _failed(self, error: BaseException) -> None:
        """Have the writers raise an error, where they wait for an image."""
        self._error = self._error or error
        self._worker.notify()

    def _hand_out(self, segment: Hashable, image: ArenaPiece, complete: Callable[[], None]) -> None:
        """Let the writers have an image, when its copies are complete."""
        complete()
        self._images[segment] = image
        self._worker.notify()

    def _begin(self, extracts: Sequence[Extract], memory: Bytes) -> Callable[[], None]:
        """Begin the copies of one segment; how to wait for them, and settle what is complete."""
        moved: list[Deferred] = []
        for extract in extracts:
            target = memory[extract.at : extract.at + extract.nbytes]
            if isinstance(extract.source, Deferred):
                with _copying(extract.source):
                    extract.source.begin_copy(extract.offset, target)
                moved.append(extract.source)
            else:
                source_bytes = np.frombuffer(extract.source, np.uint8)
                np.copyto(target, source_bytes[extract.offset : extract.offset + extract.nbytes])
        waits = [link.mark() for link in {source.link for source in moved}]

        def finish() -> None:
            with _copying(moved[0]):
                for wait in waits:
                    wait()
            for source in moved:
                with self._lock:
                    self._left[source] -= 1
                    last = self._left[source] == 0
                if last:
                    source.settle()

        return finish


def _kept_by_its_owner() -> None:
    """A writer's own buffer: nothing is to be given back."""


def _filled_by(sources: Iterable[Deferred]) -> Link:
    """What the arena's memory is for: a device's copies run in the background only into memory of its own making."""
    return next((source.link for source in sources if source.link is not HOST), HOST)


@contextlib.contextmanager
def _copying(source: Deferred) -> Iterator[None]:
    """Say which leaf it was whose copy failed."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        # A driver raises what it likes.
        raise SaveError(
            f"a copy to host memory failed: {type(error).__name__}: {error}",
            leaf=source.leaf,
            hint='See what the device says. snapshot="host" copies before the call returns.',
        ) from error
