"""Uploads that end at any change of the object store, with or without their answer: the next process goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.storage.failing import FailingFiles, FailingObjects, Faults
from xla_ckpt.errors import CheckpointError
from xla_ckpt.features.local_first.upload import Uploader
from xla_ckpt.storage.base import Directory, read_file
from xla_ckpt.storage.memory import MemoryFiles
from xla_ckpt.storage.remote import RemoteStore
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags.ledger_root import ACTIVE_DRAFTS, LedgerRoot

SOON = 60.0
NONE_HAS = 1 << 30
"""The number of no tag: who waits for it waits for the end of the try."""


@dataclass
class CountedFiles(FailingFiles):
    streamed: Counter[str] = field(default_factory=Counter)

    def stream(self, path: str, size: int, chunks: Iterator[memoryview]) -> None:
        self.streamed[f"{self.name}/{path}"] += 1
        super().stream(path, size, chunks)


@dataclass
class Counted(FailingObjects):
    """A store that counts how often each file is streamed to it."""

    streamed: Counter[str] = field(default_factory=Counter)

    @property
    def object_store(self) -> Counted:
        return self

    def get_directory(self, name: str) -> CountedFiles:
        return CountedFiles(self.inner.get_directory(name), self.faults, self.streamed)


@dataclass
class Machine:
    """A directory, a store, and the process that brings the tags of one to the other."""

    local: Path
    far: Counted
    uploader: Uploader = field(init=False)

    def __post_init__(self) -> None:
        self.starts_again()

    def starts_again(self) -> None:
        """Go on as a new process does, which knows nothing."""
        ACTIVE_DRAFTS.clear()
        near = open_store(self.local).file_system
        assert near is not None
        self.uploader = Uploader(near, self.far)

    def save(self, tag: str) -> None:
        xla_ckpt.save(self.local, tag, {"w": torch.arange(100), "tag": tag})

    def upload(self) -> None:
        """Try once."""
        self.uploader.wake(None)
        self.uploader.wait_uploaded(NONE_HAS, SOON)

    def files(self, directory: Directory) -> dict[str, bytes]:
        files = {path: read_file(directory, path) for path in directory.list_files()}
        directory.close()
        return {path: data for path, data in files.items() if path not in ("upload.json", "report.json")}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("XLA_CKPT_LEASE", "off")  # the signs of life of a lease would count as changes
    return Machine(tmp_path / "run", Counted("root", RemoteStore("memory://store", MemoryFiles()), Faults()))


def changes_of_an_upload(tmp_path: Path) -> int:
    machine = Machine(tmp_path / "counted", Counted("root", RemoteStore("memory://store", MemoryFiles()), Faults()))
    machine.save("a")
    machine.upload()
    machine.save("b")
    machine.far.faults.done = 0
    machine.upload()
    return machine.far.faults.done


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("same_process", [False, True])
def test_an_upload_that_ends_anywhere_goes_on(
    machine: Machine, tmp_path: Path, *, applied: bool, lasts: bool, same_process: bool
) -> None:
    faults = machine.far.faults
    for at in range(changes_of_an_upload(tmp_path / f"{applied}{lasts}{same_process}")):
        before, tag = LedgerRoot(machine.far).list_entries(), f"t{at}"
        machine.save(tag)
        machine.far.streamed.clear()
        faults.at, faults.lasts, faults.applied, faults.done = at, lasts, applied, 0
        try:
            machine.upload()
        except CheckpointError:
            assert [entry.tag for entry in LedgerRoot(machine.far).list_entries()][: len(before)] == [
                e.tag for e in before
            ]
        assert faults.refused
        faults.at = None
        if not same_process:
            machine.starts_again()
        machine.upload()
        root = LedgerRoot(machine.far)
        assert [entry.tag for entry in root.list_entries()] == [*(entry.tag for entry in before), tag]
        assert machine.files(root.open(tag)) == machine.files(machine.uploader.root.open(tag))
        assert all(count <= 2 for count in machine.far.streamed.values()), machine.far.streamed
        assert sum(count == 2 for count in machine.far.streamed.values()) <= 1
        faults.refused.clear()
    root.clean()
    attempts = {entry.directory for entry in root.list_entries()}
    assert {f"{tag}/{name}" for tag in machine.far.list_names() for name in machine.far.list_names(tag)} == attempts


@dataclass
class NoReports(Faults):
    """Refuses the file that comes between the manifest and the commit."""

    def change(self, what: str, *, needs_space: bool = True) -> None:
        if what.endswith("report.json"):
            raise OSError(what)


def test_a_pin_that_changes_before_the_upload_goes_on(machine: Machine) -> None:
    machine.save("a")
    machine.far.faults = NoReports()
    with pytest.raises(CheckpointError, match="report.json"):
        machine.upload()
    assert machine.uploader.root.pin("a", True)
    machine.far.faults = Faults()
    machine.starts_again()
    machine.upload()
    (entry,) = LedgerRoot(machine.far).list_entries()
    assert entry.pinned
    assert machine.files(LedgerRoot(machine.far).open("a")) == machine.files(machine.uploader.root.open("a"))
    assert [path for path, count in machine.far.streamed.items() if count > 1] == [f"{entry.directory}/manifest.json"]
