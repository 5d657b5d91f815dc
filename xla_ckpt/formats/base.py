"""The `Layout` base class: one checkpoint format on disk, and the value classes that a format reads and returns.

A layout may be *readable*: it finds checkpoints that other tools wrote, which have no manifest, and scans their files
into one. It may be *writable*: it decides the files of a save and of a conversion; a manifest of this library is then
stored with them, and later loads do not depend on the layout. To add a format, derive from `Layout`, override the
supported operations, and register an instance (`xla_ckpt.formats.registry`). Also here: sort the checkpoints of other
libraries by number and time.
"""

from __future__ import annotations

import datetime
import enum
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.plan.save_plan import FilePlan
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import ParsedRules
from xla_ckpt.core.tree import path as paths
from xla_ckpt.errors import CorruptCheckpointError, UsageError
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.loading.verify import VerifyReport, verify_tag
from xla_ckpt.saving.finalize import IndexBuilder, build_no_index
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.tags.entry import TagEntry

if TYPE_CHECKING:
    from xla_ckpt.saving.finalize import WritePlanner
    from xla_ckpt.state.describe import StateDescription


T = TypeVar("T")

_DIGITS = re.compile(r"\d+")


def format_timestamp(time: int) -> str:
    """Format a timestamp (ns) for a listing: UTC, ISO 8601; empty for 0, which means unknown.

    >>> format_timestamp(1_700_000_000_000_000_000)
    '2023-11-14T22:13:20.000000+00:00'
    """
    return datetime.datetime.fromtimestamp(time / 1e9, datetime.UTC).isoformat(timespec="microseconds") if time else ""


def merge_by_time(ordered: Sequence[T], others: Iterable[T], time: Callable[[T], int]) -> list[T]:
    """Insert items that have only timestamps into an ordered sequence, each after the last item that is not newer.

    >>> merge_by_time([30, 10, 50], [20, 40], lambda time: time)
    [30, 10, 20, 40, 50]
    """
    tags = list(ordered)
    for other in reversed(list(others)):
        at = next((i for i in range(len(tags), 0, -1) if time(tags[i - 1]) <= time(other)), 0)
        tags.insert(at, other)
    return tags


def sort_by_numbers(entries: Iterable[TagEntry]) -> list[TagEntry]:
    """Sort tags. Names that differ only in numbers are sorted by these numbers, because a copied root may have other
    timestamps; all others are sorted by their timestamps.
    """
    groups: dict[str, list[TagEntry]] = {}
    for entry in entries:
        groups.setdefault(_DIGITS.sub("0", entry.tag), []).append(entry)
    ordered: list[tuple[str, TagEntry]] = []
    for group in groups.values():
        latest = ""
        for entry in sorted(group, key=lambda e: ([int(n) for n in _DIGITS.findall(e.tag)], e.created)):
            latest = max(latest, entry.created)
            ordered.append((latest, entry))
    return [entry for _, entry in sorted(ordered, key=lambda pair: pair[0])]


class ModelNames(enum.Enum):
    """Naming scheme of the arrays of a model."""

    PROGRAM = "those of the program that saved it"
    HUGGING_FACE = "Hugging Face's"
    FUSED = "those of training scripts that fuse the projections"
    RULES = "those that rules make of Hugging Face's"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTopology:
    """Topology and sharding of the job that a conversion is for."""

    mesh: Mesh
    rules: ParsedRules = ()
    """Sharding of arrays in the job where it differs from the old job."""

    pipeline_cuts: Sequence[str] = ()
    """Modules after which a pipeline stage ends, in order."""

    zero1: bool | None = None
    """True if the optimizer states are sharded over dp; None keeps the choice of the old job, or of the layout."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of the config.json of the model; empty without a config.json."""


class StoredState(Protocol):
    """Source of a conversion: an open tag, and its pickled objects."""

    @property
    def manifest(self) -> Manifest:
        """Manifest of the stored state."""

    @property
    def trust(self) -> bool:
        """True if pickled objects are trusted. Loading them can run arbitrary code."""

    @property
    def part(self) -> str:
        """Leaf path of the state to convert: the root, or a part that the caller selected."""

    def beside(self, name: str, limit: int) -> bytes | None:
        """Return up to `limit` first bytes of a file in the root, outside the tags; None if it does not exist."""

    def tree(self, part: str, array: Callable[[str, str], Any]) -> Any:
        """Build a part of the state, with the result of `array` for (leaf path, kind) in place of each array.

        Raises:
            UntrustedObjectError: The part contains pickled objects that are not trusted.
        """


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Files that a conversion writes."""

    files: Sequence[tuple[FilePlan, ...]]
    """Files of each rank of the new job."""

    specs: Mapping[str, tuple[object, ...] | None] = field(default_factory=dict)
    """Leaf path -> sharding spec of the array, for the manifest."""

    marks: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that are written after all other files are durable."""

    index: IndexBuilder = build_no_index
    """Builder of the files that depend on the manifest."""

    @property
    def nbytes(self) -> int:
        """Bytes of arrays in all files, including replicas and padding."""
        return sum(file.data_bytes for of_rank in self.files for file in of_rank)


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """Model of a tag in the Hugging Face format."""

    manifest: Manifest
    """Manifest that contains only the model, under its Hugging Face names."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that belong to the model."""


class Layout:
    """Checkpoint format on disk. Operations that a layout does not override raise an error that names the layout."""

    name: str = ""
    """Name for callers: ``layout="native"``."""

    other_names: tuple[str, ...] = ()
    """Alternative names in conversions."""

    origin: str = ""
    """Library that writes tags of this layout without our manifest, for listings. Empty if no library does."""

    saves: bool = False
    """True if a job can save in this layout."""

    shares: bool = False
    """True if a tag may share files with an earlier tag (`SaveOptions.share`)."""

    converts: bool = True
    """True if conversions can write this layout. Otherwise it is read-only."""

    tagged: bool = True
    """True if it is stored as a tag. Otherwise it is a directory of files for other programs, or a single file."""

    one_file: bool = False
    """True if it is a single file, addressed by its own path."""

    holds: str = paths.ROOT
    """Leaf path of the only part of a state that the layout supports; by default the full state."""

    may_hold_tags: bool = False
    """True if a directory that looks like this layout may contain tags, and is their root in that case."""

    pickles: bool = False
    """True if it pickles the structure of a state, so that a save needs the objects of each rank."""

    takes_apart: bool = False
    """True if it stores the attributes of objects separately; other layouts pickle the objects."""

    asks: bool = False
    """True if its files lack information that only a program has, so that opening one needs `LoadHints`."""

    keeps_masters: bool = False
    """True if its readers find master weights in addition to the weights. A conversion to another layout replaces the
    weights with them, if the given model has their dtype."""

    model_names: ModelNames = ModelNames.PROGRAM
    """Names of the arrays of a Llama-like model in this layout."""

    marks: Mapping[str, bytes] = types.MappingProxyType({})
    """Small marker files of fixed content by which the library of the layout recognizes its tags. The manifest does not
    list them. That library writes the first one before all other files: in an object store, where tags of this library
    have other names, a converted tag is therefore written where that library expects it."""

    def check_findable(self, store: Store, tag: str) -> None:
        """Check that the readers of the layout would find a new tag with this name in this store.

        Raises:
            InvalidTagError: They require other names.
            UsageError: They do not support such a store.
        """

    def wrote(self, manifest: Manifest) -> bool:
        """Return True if a tag of this library was written in this layout, given its manifest."""
        return False

    def tags(self, store: Store, names: Sequence[str]) -> list[TagEntry]:
        """List the complete tags, oldest first (see `sort_by_numbers`). Cheap, and imports no framework.

        Args:
            names: Names in the store that are not tags of this library.

        Raises:
            StorageError: The store cannot be read.
        """
        if not self.origin:
            return []
        entries = (self.find(store, name) for name in names)
        return sort_by_numbers(tag for tag in entries if tag is not None and tag.complete)

    def find(self, store: Store, tag: str) -> TagEntry | None:
        """Return the tag with this name; None if it does not exist. Called only if there is no manifest."""
        return None

    def beside(self, store: Store, tag: str) -> str:
        """Describe files of this layout with the same name as a tag of another layout; empty if there are none.

        The caller may have meant these files. Called when such a tag is opened; the result is logged.
        """
        return ""

    def saved_over(self, store: Store, tag: str) -> str:
        """Return a hint for a tag that another library may have overwritten: how to read it as that library's."""
        return ""

    def tag_of(self, entry: TagEntry) -> str:
        """Return the default name of a tag that is converted from this entry."""
        return entry.tag

    def open(self, store: Store, entry: TagEntry, hints: LoadHints) -> TagReader:
        """Scan a tag into a manifest. No tensor is read.

        Raises:
            CheckpointError: The tag is corrupt, or `hints` contradict it.
        """
        raise UsageError(f"tags of the layout {self.name} are not read without a manifest", path=store.path)

    def check(self, reader: TagReader) -> None:
        """Check that an open tag written in this layout still matches its manifest. Cheap.

        Raises:
            CorruptCheckpointError: It does not, for example because another program overwrote it.
        """

    def as_saved(self, reader: TagReader) -> TagReader:
        """Return a reader of the state that an open tag of this layout was written from; by default the same reader.

        Raises:
            CheckpointError: The tag does not contain this information any more.
        """
        return reader

    def as_hugging_face(self, store: Store, entry: TagEntry, reader: TagReader) -> HuggingFaceModel | None:
        """Return the model of a tag in the Hugging Face format; None if the tag does not contain the mapping.

        Raises:
            CheckpointError: The tag contains a mapping that does not match its arrays.
        """
        return None

    def verify(self, store: Store, entry: TagEntry, workers: int = READ_THREADS) -> VerifyReport:
        """Read a tag and check the information in its files: by default only their sizes and headers.

        Raises:
            StorageError: The tag cannot be opened.
        """
        try:
            with self.open(store, entry, LoadHints()) as reader:
                report = verify_tag(reader, workers=workers)
        except CorruptCheckpointError as error:
            report = VerifyReport(path=store.path, tag=entry.tag, problems=[error])
        report.digests = False
        return report

    def writing(self, description: StateDescription) -> WritePlanner:
        """Return the plan of this rank for writing a state in this layout. Does not communicate with other ranks.

        Raises:
            UnsupportedStateError: The layout cannot store a part of the state.
        """
        raise UsageError(f"the layout {self.name} is not written by saves", hint="Convert a tag to it.")

    def source(self, reader: TagReader, part: str, to: TargetTopology) -> tuple[TagReader, str]:
        """Return the reader and part that a conversion to this layout reads; by default the same.

        Raises:
            CheckpointError: The tag lacks data that the layout needs.
        """
        return reader, part

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        """Plan the files of a stored state in this layout, for another job.

        Raises:
            CheckpointError: The old or new sharding of an array is unknown, or the layout cannot store the state.
        """
        raise UsageError(f"nothing is converted to the layout {self.name}")
