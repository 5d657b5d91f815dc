"""Stores that refuse one of the changes that are asked of them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from xla_ckpt.core.plan.read_costs import ReadCosts
from xla_ckpt.storage.base import (
    Directory,
    FileReader,
    FileSystem,
    FileSystemDirectory,
    FileWriter,
    Identity,
    ObjectStore,
    Store,
    StreamingDirectory,
)

T = TypeVar("T")


@dataclass
class Faults:
    """Counts the changes that a store is asked for, and says which of them it refuses."""

    at: int | None = None
    """Number of the change that is refused, from 0; None refuses none."""

    lasts: bool = False
    """Whether all later changes that need space are refused, too."""

    number: int = errno.ENOSPC
    applied: bool = False
    """Whether what is refused is done all the same, where that can be: an answer that is lost."""

    done: int = 0
    refused: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def change(self, what: str, *, needs_space: bool = True) -> None:
        """Something is about to change."""
        with self.lock:
            now = self.done
            self.done += 1
            if self.at is not None and (now == self.at or (self.lasts and needs_space and now > self.at)):
                self.refused.append(what)
                raise OSError(self.number, os.strerror(self.number), what)

    def act(self, what: str, action: Callable[[], T], *, needs_space: bool = True) -> T:
        """Do something that is about to change the store; or do it, and lose the answer."""
        try:
            self.change(what, needs_space=needs_space)
        except OSError:
            if self.applied:
                action()
            raise
        return action()


@dataclass
class FailingSink:
    """A file of such a store."""

    inner: FileWriter
    path: str
    faults: Faults

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        self.faults.change(f"write {self.path}")
        self.inner.write(buffer, nbytes, offset)

    def patch(self, data: bytes | memoryview, offset: int) -> None:
        self.faults.change(f"patch {self.path}")
        self.inner.patch(data, offset)

    def commit(self) -> None:
        self.faults.change(f"commit {self.path}")
        self.inner.commit()

    def abort(self) -> None:
        self.inner.abort()


@dataclass
class FailingDirectory:
    """A directory of such a store."""

    inner: FileSystemDirectory
    faults: Faults

    streaming = None

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def costs(self) -> ReadCosts:
        return self.inner.costs

    @property
    def fd(self) -> int:
        return self.inner.fd

    @property
    def identity(self) -> Identity:
        return self.inner.identity

    def create(self, path: str, size: int) -> FailingSink:
        self.faults.change(f"create {path}")
        return FailingSink(self.inner.create(path, size), path, self.faults)

    def make_directory(self, path: str) -> None:
        self.faults.change(f"make {path}")
        self.inner.make_directory(path)

    def move_in(self, other: Directory, path: str) -> None:
        assert isinstance(other, FailingDirectory)
        self.faults.change(f"adopt {path}", needs_space=False)
        self.inner.move_in(other.inner, path)

    def link(self, source: Directory, path: str, name: str) -> None:
        assert isinstance(source, FailingDirectory)
        self.faults.change(f"link {name}")
        self.inner.link(source.inner, path, name)

    def write_atomic(self, path: str, data: bytes) -> None:
        self.faults.change(f"replace {path}")
        self.inner.write_atomic(path, data)

    def open(self, path: str, size: int | None = None) -> FileReader:
        return self.inner.open(path, size)

    def list_files(self) -> list[str]:
        return self.inner.list_files()

    def sync(self) -> None:
        self.faults.change("sync a directory")
        self.inner.sync()

    def get_free_bytes(self) -> int | None:
        return self.inner.get_free_bytes()

    def is_at(self, name: str) -> bool:
        return self.inner.is_at(name)

    def close(self) -> None:
        self.inner.close()


class Unchanging:
    """What no fault concerns: the half of a store that reads."""

    inner: Store

    def snapshot_view(self) -> Any:
        return self

    def resolve_address(self, name: str) -> str:
        return self.inner.resolve_address(name)

    def prepare(self) -> bool:
        return self.inner.prepare()

    def list_names(self, path: str = "") -> list[str]:
        return self.inner.list_names(path)

    def has(self, path: str) -> bool:
        return self.inner.has(path)

    def is_directory(self, path: str) -> bool:
        return self.inner.is_directory(path)

    def read_start(self, path: str, nbytes: int, *, links: bool = True) -> bytes:
        return self.inner.read_start(path, nbytes, links=links)

    def get_modified_time(self, path: str) -> int | None:
        return self.inner.get_modified_time(path)


@dataclass
class FailingStore(Unchanging):
    """Another store behind an address of its own."""

    path: str
    inner: FileSystem
    faults: Faults

    object_store = None

    @property
    def file_system(self) -> FailingStore:
        return self

    def get_identity(self, name: str) -> Identity | None:
        return self.inner.get_identity(name)

    def open(self, name: str, *, lock: bool = True, links: bool = False) -> FailingDirectory:
        return FailingDirectory(self.inner.open(name, lock=lock, links=links), self.faults)

    def make_directory(self, name: str) -> FailingDirectory:
        self.faults.change(f"make {name}")
        return FailingDirectory(self.inner.make_directory(name), self.faults)

    def get_lock_state(self, name: str) -> bool | None:
        return self.inner.get_lock_state(name)

    def is_in_use(self, name: str) -> bool:
        return self.inner.is_in_use(name)

    def rename(self, old: str, new: str) -> None:
        self.faults.change(f"rename {old} to {new}", needs_space=False)
        self.inner.rename(old, new)

    def exchange(self, one: str, other: str) -> bool:
        self.faults.change(f"exchange {one} and {other}", needs_space=False)
        return self.inner.exchange(one, other)

    def remove(self, name: str) -> None:
        self.faults.change(f"remove {name}", needs_space=False)
        self.inner.remove(name)

    def remove_unused(self, name: str) -> bool:
        self.faults.change(f"remove {name}", needs_space=False)
        return self.inner.remove_unused(name)

    def remove_empty(self, name: str) -> bool:
        self.faults.change(f"remove {name}", needs_space=False)
        return self.inner.remove_empty(name)

    def sync(self) -> None:
        self.faults.change("sync the root")
        self.inner.sync()


@dataclass
class FailingObject:
    """A file of an object store that fails."""

    inner: FileWriter
    path: str
    faults: Faults

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        self.inner.write(buffer, nbytes, offset)

    def patch(self, data: bytes | memoryview, offset: int) -> None:
        self.inner.patch(data, offset)

    def commit(self) -> None:
        self.faults.act(f"put {self.path}", self.inner.commit)

    def abort(self) -> None:
        self.inner.abort()


@dataclass
class FailingFiles:
    """A directory of such a store."""

    inner: StreamingDirectory
    faults: Faults

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def costs(self) -> ReadCosts:
        return self.inner.costs

    @property
    def streaming(self) -> FailingFiles:
        return self

    def stream(self, path: str, size: int, chunks: Iterator[memoryview]) -> None:
        self.faults.act(f"put {path}", lambda: self.inner.stream(path, size, chunks))

    def create(self, path: str, size: int) -> FailingObject:
        return FailingObject(self.inner.create(path, size), path, self.faults)

    def make_directory(self, path: str) -> None:
        self.inner.make_directory(path)

    def open(self, path: str, size: int | None = None) -> FileReader:
        return self.inner.open(path, size)

    def link(self, source: Directory, path: str, name: str) -> None:
        assert isinstance(source, FailingFiles)
        inner = source.inner
        self.faults.act(f"copy {inner.name}/{path} to {self.name}/{name}", lambda: self.inner.link(inner, path, name))

    def list_files(self) -> list[str]:
        return self.inner.list_files()

    def sync(self) -> None:
        self.inner.sync()

    def get_free_bytes(self) -> int | None:
        return self.inner.get_free_bytes()

    def is_at(self, name: str) -> bool:
        return self.inner.is_at(name)

    def close(self) -> None:
        self.inner.close()


@dataclass
class FailingObjects(Unchanging):
    """Another object store behind an address of its own. What changes it is a put, a copy, a record, or a removal."""

    path: str
    inner: ObjectStore
    faults: Faults

    file_system = None

    @property
    def object_store(self) -> FailingObjects:
        return self

    def open(self, name: str, *, lock: bool = True, links: bool = False) -> Directory:
        return self.inner.open(name, lock=lock, links=links)

    def get_directory(self, name: str) -> FailingFiles:
        return FailingFiles(self.inner.get_directory(name), self.faults)

    def check_conditional_writes(self) -> None:
        self.inner.check_conditional_writes()

    def remove(self, name: str) -> None:
        self.faults.act(f"remove {name}", lambda: self.inner.remove(name), needs_space=False)

    def read_record(self, name: str) -> tuple[bytes, str] | None:
        return self.inner.read_record(name)

    def write_record(self, name: str, data: bytes, version: str | None) -> str:
        return self.faults.act(f"write {name}", lambda: self.inner.write_record(name, data, version))
