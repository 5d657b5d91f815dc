"""The `Layout` base class: one checkpoint format on disk, and the value classes that a format reads and returns.

A layout may be *read*: it finds checkpoints that its own tools wrote, which have no manifest of ours, and scans their
files into one. It may be *written*: it decides the files of a save and of a conversion; our manifest is then stored
beside them, and later loads do not depend on the layout. To add a format, derive from `Layout`, override what it can
do, and register an object (`xla_ckpt.formats.registry`). Also here: sorting the checkpoints of other libraries by
number and time.
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
    """A time stamp (ns) as a listing has it: UTC, ISO 8601; empty for 0, which says nothing.

    >>> format_timestamp(1_700_000_000_000_000_000)
    '2023-11-14T22:13:20.000000+00:00'
    """
    return datetime.datetime.fromtimestamp(time / 1e9, datetime.UTC).isoformat(timespec="microseconds") if time else ""


def merge_by_time(ordered: Sequence[T], others: Iterable[T], time: Callable[[T], int]) -> list[T]:
    """Tags whose order is known, and others that have only time stamps: one of these comes before those that are newer.

    >>> merge_by_time([30, 10, 50], [20, 40], lambda time: time)
    [30, 10, 20, 40, 50]
    """
    tags = list(ordered)
    for other in reversed(list(others)):
        at = next((i for i in range(len(tags), 0, -1) if time(tags[i - 1]) <= time(other)), 0)
        tags.insert(at, other)
    return tags


def sort_by_numbers(entries: Iterable[TagEntry]) -> list[TagEntry]:
    """Tags in order: those whose names differ in numbers only by these numbers, for a copy of a root may have other
    time stamps; all others by their time stamps.
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
    """Whose names the arrays of a model have."""

    PROGRAM = "those of the program that saved it"
    HUGGING_FACE = "Hugging Face's"
    FUSED = "those of training scripts that fuse the projections"
    RULES = "those that rules make of Hugging Face's"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTopology:
    """The job that a conversion is for."""

    mesh: Mesh
    rules: ParsedRules = ()
    """How the job splits arrays, where it is not as the old one did."""

    pipeline_cuts: Sequence[str] = ()
    """The modules after which a pipeline stage ends, in order."""

    zero1: bool | None = None
    """Whether the optimizer's states are dealt out over dp; None does as the old job did, or as the layout has it."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """What the config.json of the model says; empty if there is none."""


class StoredState(Protocol):
    """What a conversion reads: an open tag, and the objects in it."""

    @property
    def manifest(self) -> Manifest:
        """What is stored."""

    @property
    def trust(self) -> bool:
        """Whether pickled objects are trusted, which can run any code."""

    @property
    def part(self) -> str:
        """Leaf path of what is wanted of it: all of it, or a part, where a caller names one."""

    def beside(self, name: str, limit: int) -> bytes | None:
        """The first bytes of a file that lies in the root, beside the tags; None if there is none."""

    def tree(self, part: str, array: Callable[[str, str], Any]) -> Any:
        """A part of the state, with what `array` makes of (leaf path, kind) in place of each array.

        Raises:
            UntrustedObjectError: It holds pickled objects, and they are not trusted.
        """


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The files of a conversion."""

    files: Sequence[tuple[FilePlan, ...]]
    """Those of each rank of the new job."""

    specs: Mapping[str, tuple[object, ...] | None] = field(default_factory=dict)
    """Leaf path -> how the array is split, for the manifest."""

    marks: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that are written when all else is durable."""

    index: IndexBuilder = build_no_index
    """Makes the files that are made from the manifest."""

    @property
    def nbytes(self) -> int:
        """Bytes of arrays in all files, replicas and padding included."""
        return sum(file.data_bytes for of_rank in self.files for file in of_rank)


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """The model of a tag as Hugging Face has it."""

    manifest: Manifest
    """One that finds it under those names, and nothing else."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that belong to it."""


class Layout:
    """One form on disk. What a layout cannot do stays as it is here, and is refused by name."""

    name: str = ""
    """What callers call it: ``layout="native"``."""

    other_names: tuple[str, ...] = ()
    """What it is called, too, where a conversion is asked for."""

    origin: str = ""
    """Who writes tags of it without our manifest; listings show it. Empty where nobody does."""

    saves: bool = False
    """Whether a job can save in it."""

    shares: bool = False
    """Whether a tag of it may share files with an earlier one (`SaveOptions.share`)."""

    converts: bool = True
    """Whether conversions make it. If not, it is only read."""

    tagged: bool = True
    """Whether it is a tag. If not, it is a directory of files for other programs, or a single file."""

    one_file: bool = False
    """Whether it is a single file, which a path names itself."""

    holds: str = paths.ROOT
    """Leaf path of the part of a state that it has a place for, if it has none for the rest."""

    may_hold_tags: bool = False
    """Whether tags may lie in a directory that looks like one of its own, and which is their root then."""

    pickles: bool = False
    """Whether it stores the structure of a state by pickle, so that a save needs the objects of each rank."""

    takes_apart: bool = False
    """Whether it has a place for the attributes of objects, which are pickled by others."""

    asks: bool = False
    """Whether its files leave open what only a program knows, so that opening one takes `LoadHints`."""

    keeps_masters: bool = False
    """Whether its readers find master weights beside the weights. A conversion into another layout puts them in the
    place of the weights, if the model that it is given is of their type."""

    model_names: ModelNames = ModelNames.PROGRAM
    """Whose names a Llama-like model has in it."""

    marks: Mapping[str, bytes] = types.MappingProxyType({})
    """Small files of fixed content by which its own library knows its tags, and which the manifest does not list. That
    library writes the first one before all else: so an object store, where ours lie under names of their own, gets a
    converted tag where it looks for it."""

    def check_findable(self, store: Store, tag: str) -> None:
        """Refuse a new tag that the readers of the layout would not find under this name, or in this store.

        Raises:
            InvalidTagError: They look for other names.
            UsageError: They look nowhere in such a store.
        """

    def wrote(self, manifest: Manifest) -> bool:
        """Whether a tag of ours, given its manifest, was written in this layout."""
        return False

    def tags(self, store: Store, names: Sequence[str]) -> list[TagEntry]:
        """The complete tags of it, oldest first (see `sort_by_numbers`). Cheap, and without a framework.

        Args:
            names: What lies in it and is not ours.

        Raises:
            StorageError: It cannot be read.
        """
        if not self.origin:
            return []
        entries = (self.find(store, name) for name in names)
        return sort_by_numbers(tag for tag in entries if tag is not None and tag.complete)

    def find(self, store: Store, tag: str) -> TagEntry | None:
        """The tag of it that has this name; None if there is none. Asked only where there is no manifest of ours."""
        return None

    def beside(self, store: Store, tag: str) -> str:
        """What of it lies beside a tag of another layout, under the same name; empty if there is nothing.

        A caller may have meant it. Asked when such a tag is opened, and told in the log.
        """
        return ""

    def saved_over(self, store: Store, tag: str) -> str:
        """Of a tag of ours whose files another library may have written over: how to have them read as its own."""
        return ""

    def tag_of(self, entry: TagEntry) -> str:
        """What a tag is called that is made of it, unless its maker says."""
        return entry.tag

    def open(self, store: Store, entry: TagEntry, hints: LoadHints) -> TagReader:
        """Scan such a tag into a manifest. No tensor is read.

        Raises:
            CheckpointError: It is damaged, or `hints` contradict it.
        """
        raise UsageError(f"tags of the layout {self.name} are not read without a manifest", path=store.path)

    def check(self, reader: TagReader) -> None:
        """Check that an open tag of ours, written in this layout, is still what its manifest says. Cheap.

        Raises:
            CorruptCheckpointError: It is not: another program has saved over it, say.
        """

    def as_saved(self, reader: TagReader) -> TagReader:
        """A reader of the state that an open tag of ours, written in this layout, was made of: by default the same.

        Raises:
            CheckpointError: The tag does not say it any more.
        """
        return reader

    def as_hugging_face(self, store: Store, entry: TagEntry, reader: TagReader) -> HuggingFaceModel | None:
        """The model of such a tag as Hugging Face has it; None if the tag does not say how that is.

        Raises:
            CheckpointError: It says it, and it does not fit.
        """
        return None

    def verify(self, store: Store, entry: TagEntry, workers: int = READ_THREADS) -> VerifyReport:
        """Read all of such a tag, and compare what its files say themselves: by default only their sizes and headers.

        Raises:
            StorageError: It cannot be opened.
        """
        try:
            with self.open(store, entry, LoadHints()) as reader:
                report = verify_tag(reader, workers=workers)
        except CorruptCheckpointError as error:
            report = VerifyReport(path=store.path, tag=entry.tag, problems=[error])
        report.digests = False
        return report

    def writing(self, description: StateDescription) -> WritePlanner:
        """How this rank writes a state in this layout. Asks no other rank.

        Raises:
            UnsupportedStateError: The layout has no place for something in it.
        """
        raise UsageError(f"the layout {self.name} is not written by saves", hint="Convert a tag to it.")

    def source(self, reader: TagReader, part: str, to: TargetTopology) -> tuple[TagReader, str]:
        """What a conversion to it reads instead of an open tag and a part of it: by default the same.

        Raises:
            CheckpointError: The tag does not have what it needs.
        """
        return reader, part

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        """The files of a stored state in this layout, for another job.

        Raises:
            CheckpointError: It cannot be told how an array was or will be split, or the layout has no place for it.
        """
        raise UsageError(f"nothing is converted to the layout {self.name}")
