"""What all scans of other libraries' files have in common: how a directory is opened, and how a manifest is made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from xla_ckpt.errors import UnsupportedStateError, naming, storage_errors
from xla_ckpt.layouts.saved_files import SavedFiles
from xla_ckpt.layouts.untrusted import UntrustedObject
from xla_ckpt.manifest.arrays import ArrayRecord, Arrays
from xla_ckpt.manifest.records import FileRecord, Head, Manifest, UnknownArray
from xla_ckpt.storage.base import ReadDirectory, Store
from xla_ckpt.tree import schema
from xla_ckpt.tree.codec import ValueCodec
from xla_ckpt.tree.flatten import Flat, flatten

if TYPE_CHECKING:
    from xla_ckpt.layouts.torch_save.zip_reader import StorageAt  # this loads torch

R = TypeVar("R", bound=ReadDirectory)


class ScannedFiles:
    """The files of a scan, as its manifest has them."""

    def __init__(self) -> None:
        self.records: list[FileRecord] = []
        self.numbers: dict[str, int] = {}
        """Path of each file -> its place among the records."""
        self.storages: defaultdict[str, list[StorageAt]] = defaultdict(list)
        """The storages that the tensors lie in, by their files of torch.save."""

    def add(self, record: FileRecord) -> int:
        """The number of a further file."""
        self.numbers[record.path] = len(self.records)
        self.records.append(record)
        return self.numbers[record.path]

    def compared(self, directory: ReadDirectory, files: Collection[str]) -> ReadDirectory:
        """The directory of the scan, for the reader that is made of it: storages are compared with their CRC-32s.

        `files` are all that is in it, which takes a while to find out.
        """
        return SavedFiles(directory, files, self.storages) if any(self.storages.values()) else directory


@contextmanager
def directory_to_scan(store: Store, tag: str, opened: Callable[[], R]) -> Iterator[R]:
    """A directory that stays open for the reader which is made of it. Errors name the tag, and close the directory.

    Raises:
        StorageError: It cannot be opened, or a file in it cannot be read.
    """
    with storage_errors("opening a checkpoint", path=store.path, tag=tag):
        directory = opened()
    try:
        with naming(path=store.path, tag=tag), storage_errors("reading a checkpoint"):
            yield directory
    except BaseException:
        directory.close()  # nobody else will: it would count as being read for as long as the program runs
        raise


MAX_JSON = 1 << 26
"""Bytes that a file of JSON of another library's may have: none is nearly as large, and all of it is read."""


def foreign_head(tag: str, created: str = "") -> Head:
    """The first line of a manifest that is made of another library's files: they have no commit number, and no pins."""
    return Head(tag=tag, sequence=0, pinned=False, created=created)


def is_scanned_array(value: Any) -> bool:
    """Whether a value of a scanned state stands for an array."""
    return isinstance(value, ArrayRecord | UnknownArray)


def _kind(value: Any) -> str | None:
    return "torch" if is_scanned_array(value) else None


def flattened_model(members: Mapping[str, Any]) -> Flat:
    """A scanned model, whose members are arrays and what JSON has, without its arrays. This needs no framework."""
    return flatten({schema.MODEL: members}, _kind, ValueCodec())


def flattened(state: Any) -> Flat:
    """A scanned state without its arrays."""
    from xla_ckpt.state.values import CODEC  # this loads torch, which listings do without

    return flatten(state, _kind, CODEC)


def scanned_manifest(
    tag: str,
    flat: Flat,
    files: Sequence[FileRecord],
    *,
    created: str = "",
    mesh: str | None = None,
    world: int = 1,
    left_out: tuple[str, ...] = (),
) -> tuple[Manifest, list[UntrustedObject]]:
    """The manifest of a scanned state, and the objects that its skeleton numbers.

    Leaf paths that have one record, the same object, are names of one array.

    Raises:
        UnsupportedStateError: A value is neither array nor plain, and nothing says how it is read on trust.
    """
    objects: list[UntrustedObject] = []
    for leaf, value in flat.objects:
        if not isinstance(value, UntrustedObject):
            raise UnsupportedStateError(f"a {type(value).__name__} is neither array nor plain value", leaf=leaf)
        objects.append(value)
    arrays = {leaf: record for leaf, record in flat.arrays.items() if isinstance(record, ArrayRecord)}
    first: dict[int, str] = {}
    aliases = {leaf: same for leaf, record in arrays.items() if (same := first.setdefault(id(record), leaf)) != leaf}
    manifest = Manifest(
        head=foreign_head(tag, created),
        skeleton=flat.skeleton,
        arrays=Arrays.of({leaf: record for leaf, record in arrays.items() if leaf not in aliases}),
        aliases=aliases,
        files=tuple(files),
        mesh=mesh,
        world=world,
        unknown={leaf: array for leaf, array in flat.arrays.items() if isinstance(array, UnknownArray)},
        left_out=left_out,
        module_metadata=flat.module_metadata,
    )
    return manifest, objects
