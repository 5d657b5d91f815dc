"""`RankLayout`: the base class of layouts with one file for each rank, and what such a layout declares.

`RankFileFormat` describes names and contents of rank files as values. `RankTag` is a checkpoint of such files in a root
directory. Files are read and written by the other modules of this folder, which are imported on first use because they
load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.plan.save_plan import FilePlan
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.formats.base import ConversionPlan, Layout, StoredState, TargetTopology, format_timestamp
from xla_ckpt.formats.rank_files.file_names import RankCoords, RankFileName
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.loading.verify import VerifyReport
from xla_ckpt.storage.base import Directory, Store, open_without_links
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.root import make_no_such_tag_error

if TYPE_CHECKING:
    from xla_ckpt.formats.rank_files.files import RankFiles
    from xla_ckpt.formats.rank_files.writing import RankFilePlanner, RankState
    from xla_ckpt.formats.torch_save.zip_reader import TensorLocation
    from xla_ckpt.saving.finalize import WritePlanner
    from xla_ckpt.state.describe import StateDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a rank file."""

    dtype: DType
    shape: tuple[int, ...]
    is_expert: bool | None
    """Whether it differs between expert-parallel ranks; None if the file does not say."""

    file: str
    """Where it lies."""

    location: TensorLocation | None = None
    """The exact place; None where `RankFiles.place` finds it."""

    @classmethod
    def from_location(cls, location: TensorLocation) -> StoredTensor:
        """The tensor that lies there, of which nobody says whether it is an expert's."""
        return cls(dtype=location.dtype, shape=location.shape, is_expert=None, file=location.file, location=location)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptimizer:
    """What one rank stored of an optimizer, whose parameters are numbers that run through its groups."""

    groups: Sequence[Mapping[str, Any]]
    """Hyper-parameters, and under ``params`` the numbers."""

    states: Mapping[Any, Any]
    """By number. What has another key is state that belongs to no parameter."""

    masters: Mapping[Any, Any] = field(default_factory=dict)
    """Master weights by number."""

    local_shapes: Mapping[Any, Sequence[int]] | None = None
    """Local shape of each parameter by number, if the rows of states and master weights are dealt out over dp (ZeRO-1);
    else None."""

    expert_group_count: int = 0
    """How many groups, the last ones, are of experts only; 0 if no groups are kept apart for these."""


def parse_numbered_optimizer(tree: Mapping[Any, Any]) -> RankOptimizer:
    """An optimizer that lies in a file as torch's own `state_dict` has it.

    Raises:
        CorruptCheckpointError: It has no groups.
    """
    groups = schema.get_groups(tree)
    if groups is None:
        raise CorruptCheckpointError("the optimizer of a rank file has no param_groups", leaf=schema.OPTIMIZER)
    return RankOptimizer(groups=groups, states=tree.get(schema.STATE, {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContent:
    """What one rank file holds, with a `StoredTensor` for each tensor."""

    model: Mapping[Any, Any] | None = None
    """By name: this rank's part of each parameter and buffer, and plain values."""

    optimizer: Mapping[Any, Any] | None = None
    """The state of an optimizer, as it lies in the file."""

    parts: Mapping[str, Any] = field(default_factory=dict)
    """Other members of the state (``scheduler``, ``user_content``, ``extras``). Those of the first rank count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFileFormat:
    """A form of tags in which each rank has one file, with all that it stored."""

    file_names: Sequence[RankFileName]
    """What the file of a rank is called, in each of the ways that the program has. Of a file that is written the first
    one counts that tells the ranks of the job apart."""

    parse_content: Callable[[Mapping[Any, Any], RankCoords], RankContent]
    """Makes of the dict in a file, and of the place of its rank, what it means. Names are those in the whole model: if
    the stages of a program number their layers from 0, they are numbered anew here. It raises a `CheckpointError` if
    the dict is no state of the program's."""

    parse_optimizer: Callable[[Mapping[Any, Any]], RankOptimizer] = parse_numbered_optimizer
    """Makes of the state of an optimizer what it means. It is not asked where nobody wants it."""

    build_tree: Callable[[RankState, RankCoords], Mapping[str, Any]] | None = None
    """Makes of what a rank has, and of its place, the dict in its file, with a `LeafPlaceholder` for each array. None
    where none is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTag:
    """A tag that another program wrote, with a file for each of its ranks."""

    tag: str
    complete: bool
    time: int
    """Time stamp (ns) of its newest file, or of its mark."""

    subfolder: str = ""
    """Where in the tag's directory the files of the ranks lie: empty, or a path that ends with ``/``."""

    note: str = ""
    """What a listing says of it besides."""

    marked: bool = True
    """Whether anything but the names of its files says what it is."""

    def open_directory(self, store: Store) -> Directory:
        """The directory in which its files lie."""
        return open_without_links(store, self.tag)

    def to_entry(self) -> TagEntry:
        """What a listing shows of it."""
        created = format_timestamp(self.time)
        return TagEntry(tag=self.tag, created=created, directory=self.tag, complete=self.complete, note=self.note)


def find_named_tag(store: Store, tag: str, names: Sequence[RankFileName]) -> RankTag | None:
    """The tag in a directory that has files of ranks with such names; None if it has none. It counts as complete."""
    times: list[int] = []
    for entry in store.list_names(tag):
        for name in names:
            if name.folder.parse(entry) is not None:
                time = get_modified_time(store, f"{tag}/{entry}{name.path_suffix}")
                times += [] if name.path_suffix and time is None else [time or 0]
    return RankTag(tag=tag, complete=True, marked=False, time=max(times)) if times else None


def get_modified_time(store: Store, path: str) -> int | None:
    """The time stamp of a file; None if there is none."""
    try:
        return store.get_modified_time(path)
    except OSError:
        return None


class RankLayout(Layout):
    """A layout says in a `file_format` how the files of its ranks are called, and what they hold.

    One whose tags have marks, or several files for each rank, says itself which tags there are (`find_rank_tag`), which
    class reads their files (`create_files`), and which of them a rank writes (`plan_files`).
    """

    asks = True
    pickles = True  # each rank stores its own containers

    file_format: RankFileFormat
    """What tags are in which each rank has one file."""

    @property
    def file_names(self) -> Sequence[RankFileName]:
        """What a file is called that a rank writes: the first one counts that tells the ranks of the job apart."""
        return self.file_format.file_names

    def plan_files(self, planner: RankFilePlanner) -> list[FilePlan]:
        """The files that a rank writes of what it has (`planner.state`).

        Raises:
            UnsupportedStateError: There is no place for something in it.
        """
        assert self.file_format.build_tree is not None, f"{self.name} is only read"
        tree = self.file_format.build_tree(planner.state, RankCoords.from_mesh(planner.coordinates))
        return planner.plan_shared_file(self.file_names, tree, paths.ROOT, per_dp=planner.state.zero1)

    def wrote(self, manifest: Manifest) -> bool:
        names = self.file_names if self.converts else ()
        return any(name.parse(file.path) is not None for file in manifest.files for name in names)

    def find_rank_tag(self, store: Store, name: str) -> RankTag | None:
        """The tag of this name; None if it is none of this layout's. Looks at names only."""
        return find_named_tag(store, name, self.file_format.file_names)

    def create_files(self, store: Store, tag: RankTag, directory: Directory) -> RankFiles:
        """The files of a tag, whose directory is open."""
        from xla_ckpt.formats.rank_files.reading import OneFilePerRank

        return OneFilePerRank(directory, self.file_format, tag.subfolder)

    def require_tag(self, store: Store, name: str) -> RankTag:
        """The tag of this name, which was there a moment ago.

        Raises:
            NoCheckpointError: It is gone.
        """
        if (tag := self.find_rank_tag(store, name)) is None:
            raise make_no_such_tag_error(open_root(store), name)
        return tag

    def find(self, store: Store, tag: str) -> TagEntry | None:
        of_ranks = self.find_rank_tag(store, tag) if self.origin else None
        return None if of_ranks is None else of_ranks.to_entry()

    def open(self, store: Store, entry: TagEntry, hints: LoadHints) -> TagReader:
        from xla_ckpt.formats.rank_files.reading import open_rank_files

        return open_rank_files(self, store, self.require_tag(store, entry.tag), hints)

    def verify(self, store: Store, entry: TagEntry, workers: int = READ_THREADS) -> VerifyReport:
        from xla_ckpt.formats.rank_files.reading import verify_rank_files

        return verify_rank_files(self, store, self.require_tag(store, entry.tag), workers)

    def writing(self, description: StateDescription) -> WritePlanner:
        from xla_ckpt.formats.rank_files.writing import RankWritePlanner

        return RankWritePlanner.from_description(self, description)

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        from xla_ckpt.formats.rank_files.conversion import plan_rank_file_conversion, reshard_state

        return plan_rank_file_conversion(self, reshard_state(self, stored, to), to)
