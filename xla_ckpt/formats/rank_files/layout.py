"""`RankLayout`: the base class of layouts with one file for each rank, and the values that such a layout declares.

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
    """True if it differs between expert-parallel ranks; None if the file does not record it."""

    file: str
    """Path of the file that contains it."""

    location: TensorLocation | None = None
    """Position in the file; None if `RankFiles.locate` determines it."""

    @classmethod
    def from_location(cls, location: TensorLocation) -> StoredTensor:
        """Return the tensor at a location, for files that do not record which tensors belong to experts."""
        return cls(dtype=location.dtype, shape=location.shape, is_expert=None, file=location.file, location=location)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptimizer:
    """One rank's optimizer state, whose parameters are numbered through all of its groups."""

    groups: Sequence[Mapping[str, Any]]
    """Hyperparameters, and the parameter numbers under ``params``."""

    states: Mapping[Any, Any]
    """State by parameter number. Entries with any other key belong to no parameter."""

    masters: Mapping[Any, Any] = field(default_factory=dict)
    """Master weights by number."""

    local_shapes: Mapping[Any, Sequence[int]] | None = None
    """Local shape of each parameter by number, if ZeRO-1 sharded the rows of states and master weights over dp;
    otherwise None."""

    expert_group_count: int = 0
    """Number of trailing groups that contain only experts; 0 if experts have no separate groups."""


def parse_numbered_optimizer(tree: Mapping[Any, Any]) -> RankOptimizer:
    """Parse an optimizer that is stored in the form of torch's `state_dict`.

    Raises:
        CorruptCheckpointError: It has no param_groups.
    """
    groups = schema.get_groups(tree)
    if groups is None:
        raise CorruptCheckpointError("the optimizer of a rank file has no param_groups", leaf=schema.OPTIMIZER)
    return RankOptimizer(groups=groups, states=tree.get(schema.STATE, {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContent:
    """Contents of one rank file, with a `StoredTensor` for each tensor."""

    model: Mapping[Any, Any] | None = None
    """This rank's part of each parameter and buffer, and plain values, by name."""

    optimizer: Mapping[Any, Any] | None = None
    """State of an optimizer, as stored in the file."""

    parts: Mapping[str, Any] = field(default_factory=dict)
    """Other members of the state (``scheduler``, ``user_content``, ``extras``). Only the first rank's are used.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFileFormat:
    """A checkpoint format in which each rank writes one file with all of its state."""

    file_names: Sequence[RankFileName]
    """Patterns of the file names that the program uses. A writer uses the first one that distinguishes the ranks of the
    job."""

    parse_content: Callable[[Mapping[Any, Any], RankCoords], RankContent]
    """Function that parses the dict in a file, given the coordinates of its rank. It returns names of the whole model:
    if pipeline stages number their layers from 0, it renumbers them. It raises a `CheckpointError` if the dict is
    not a state that the program writes."""

    parse_optimizer: Callable[[Mapping[Any, Any]], RankOptimizer] = parse_numbered_optimizer
    """Function that parses the state of an optimizer. It is not called if the optimizer is not requested."""

    build_tree: Callable[[RankState, RankCoords], Mapping[str, Any]] | None = None
    """Function that builds the dict of a rank's file from its state and coordinates, with a `LeafPlaceholder` for each
    array. None if the format is only read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTag:
    """A checkpoint written by another program, with one file for each rank."""

    tag: str
    complete: bool
    time: int
    """Modification time (ns) of its newest file, or of its marker file."""

    subfolder: str = ""
    """Folder of the rank files in the tag directory: empty, or a path that ends with ``/``."""

    note: str = ""
    """Remark in a listing."""

    marked: bool = True
    """False if only the file names identify the format."""

    def open_directory(self, store: Store) -> Directory:
        """Open the directory that contains its files."""
        return open_without_links(store, self.tag)

    def to_entry(self) -> TagEntry:
        """Return its entry for a listing."""
        created = format_timestamp(self.time)
        return TagEntry(tag=self.tag, created=created, directory=self.tag, complete=self.complete, note=self.note)


def find_named_tag(store: Store, tag: str, names: Sequence[RankFileName]) -> RankTag | None:
    """Find a checkpoint by file names: a directory with rank files that match one of the patterns.

    Returns:
        The checkpoint, which counts as complete; None if no file name matches.
    """
    times: list[int] = []
    for entry in store.list_names(tag):
        for name in names:
            if name.folder.parse(entry) is not None:
                time = get_modified_time(store, f"{tag}/{entry}{name.path_suffix}")
                times += [] if name.path_suffix and time is None else [time or 0]
    return RankTag(tag=tag, complete=True, marked=False, time=max(times)) if times else None


def get_modified_time(store: Store, path: str) -> int | None:
    """Return the modification time of a file in ns; None if it cannot be read."""
    try:
        return store.get_modified_time(path)
    except OSError:
        return None


class RankLayout(Layout):
    """Base class of layouts whose `file_format` describes names and contents of the rank files.

    A layout whose checkpoints have marker files, or several files for each rank, overrides `find_rank_tag` (which
    checkpoints exist), `create_files` (the class that reads their files) and `plan_files` (the files that a rank
    writes).
    """

    asks = True
    pickles = True  # each rank stores its own containers

    file_format: RankFileFormat
    """Format of checkpoints in which each rank has one file."""

    @property
    def file_names(self) -> Sequence[RankFileName]:
        """Patterns of the names of written files: the first one that distinguishes the ranks of the job is used."""
        return self.file_format.file_names

    def plan_files(self, planner: RankFilePlanner) -> list[FilePlan]:
        """Plan the files that a rank writes of its state (`planner.state`).

        Raises:
            UnsupportedStateError: The format cannot hold a part of the state.
        """
        assert self.file_format.build_tree is not None, f"{self.name} is only read"
        tree = self.file_format.build_tree(planner.state, RankCoords.from_mesh(planner.coordinates))
        return planner.plan_shared_file(self.file_names, tree, paths.ROOT, per_dp=planner.state.zero1)

    def wrote(self, manifest: Manifest) -> bool:
        names = self.file_names if self.converts else ()
        return any(name.parse(file.path) is not None for file in manifest.files for name in names)

    def find_rank_tag(self, store: Store, name: str) -> RankTag | None:
        """Return the checkpoint of this name; None if it does not have this layout. Only names are read."""
        return find_named_tag(store, name, self.file_format.file_names)

    def create_files(self, store: Store, tag: RankTag, directory: Directory) -> RankFiles:
        """Return the files of a checkpoint in an open directory."""
        from xla_ckpt.formats.rank_files.reading import OneFilePerRank

        return OneFilePerRank(directory, self.file_format, tag.subfolder)

    def require_tag(self, store: Store, name: str) -> RankTag:
        """Return the checkpoint of this name, which existed a moment ago.

        Raises:
            NoCheckpointError: It no longer exists.
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
