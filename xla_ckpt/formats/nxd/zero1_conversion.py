"""Convert NxD ZeRO-1 optimizer files to another number of data-parallel ranks (`convert_zero_checkpoints`).

The files record neither parameter names nor the sharding over tp. Neither is needed: for each (tp, pp) rank the rows of
all dp ranks are concatenated to the shape in `shape_info`, and sharded again.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.conversion.stream import stream_files
from xla_ckpt.core.manifest.arrays import ArrayRecord, ArrayTable
from xla_ckpt.core.manifest.manifest import Manifest, UnreadableArray
from xla_ckpt.core.plan.save_plan import FilePlan
from xla_ckpt.core.sharding.local_array import create_unsharded
from xla_ckpt.core.sharding.mesh import MESH_AXES, Mesh
from xla_ckpt.core.sharding.sharding import Sharding
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.nested import KeyPath, map_leaves
from xla_ckpt.errors import (
    CorruptCheckpointError,
    NoCheckpointError,
    UnsupportedStateError,
    UsageError,
    annotate_errors,
    wrap_os_errors,
)
from xla_ckpt.formats.nxd.files import OPTIMIZER_FOLDER, FolderFiles, plan_rank_files
from xla_ckpt.formats.nxd.layout import MARKER_FILES
from xla_ckpt.formats.nxd.optimizer import ZERO1_SHARDED_KEYS
from xla_ckpt.formats.rank_files.arrays import StoredArray, assemble_array, check_zero1_rows, merge_common_value
from xla_ckpt.formats.rank_files.file_names import RankCoords
from xla_ckpt.formats.rank_files.layout import StoredTensor
from xla_ckpt.formats.rank_files.model import read_trees
from xla_ckpt.formats.rank_files.writing import RankFilePlanner, RankState, RankTensor
from xla_ckpt.formats.scan import make_foreign_head
from xla_ckpt.formats.torch_save.pickler import LeafPlaceholder
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.options import DEFAULT_MAX_MEMORY
from xla_ckpt.progress import IoContext, ProgressBar
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.resolve import PathLike, is_same_directory, normalize_path, open_parent
from xla_ckpt.storage.threads import READ_THREADS, WORKER_BUFFER_BYTES
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.root import Transaction, TransactionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero1Files:
    """ZeRO-1 optimizer files of a checkpoint."""

    manifest: Manifest
    """Manifest of their arrays, with the rows of all dp ranks, by ``pp/tp/<path in the file>``."""

    stages: Mapping[tuple[int, int], Any]
    """Contents of the files by (pp, tp), with a `LeafPlaceholder` for each tensor."""

    sharded_leaves: frozenset[str]
    """Arrays whose rows are sharded over dp."""

    full: bool
    """True for files of the NxD converter, which contain the states of all dp ranks."""

    xser: bool
    dp: int
    """Number of data-parallel ranks that have separate files."""

    def plan_files(self, dp: int | None) -> list[FilePlan]:
        """Plan the files for `dp` data-parallel ranks; for None, one file for each (tp, pp) with the states of all
        ranks.
        """
        pp = 1 + max(pp for pp, _ in self.stages)
        tp = 1 + max(tp for _, tp in self.stages)
        mesh = Mesh(pp=pp, dp=dp or 1, tp=tp)
        files: list[FilePlan] = []
        for rank in range(mesh.size):
            at = mesh.coordinates(rank)
            tensors = {
                path: self._make_tensor(path, record, mesh, rank)
                for path, record in self.manifest.arrays.items()
                if path.startswith(f"{at['pp']}/{at['tp']}/")
            }
            state = RankState(parts={schema.OPTIMIZER: self.stages[at["pp"], at["tp"]]}, tensors=tensors, zero1=True)
            files += plan_rank_files(RankFilePlanner(mesh, rank, state), xser=self.xser)
        if dp is not None:
            return files
        return [replace(f, path=f.path.replace("optim/dp_rank_00_", "optim/full_", 1)) for f in files]

    def _make_tensor(self, path: str, record: ArrayRecord, mesh: Mesh, rank: int) -> RankTensor:
        """Return one rank's part of an array: its rows, with padding in the last ones, or the whole array."""
        if path not in self.sharded_leaves:
            place = create_unsharded(record.shape)
            return RankTensor(
                leaf=path, dtype=record.dtype, shape=record.shape, pieces=place.pieces, replicated_axes=MESH_AXES
            )
        place = Sharding().map_zero1_shape(record.shape, mesh, rank, ("dp",))
        shape = (-(-record.shape[0] // mesh.dp), *record.shape[1:])
        return RankTensor(leaf=path, dtype=record.dtype, shape=shape, pieces=place.pieces, replicated_axes=("cp",))


def scan_zero1_optimizer(files: FolderFiles, tag: str) -> Zero1Files:
    """Scan the ZeRO-1 optimizer under ``optim`` in a checkpoint directory. No tensor data is read.

    Raises:
        UsageError: The directory does not contain an optimizer, or not one of ZeRO-1.
        CorruptCheckpointError: Files are missing, or do not fit together.
        UnsupportedStateError: It is the optimizer of an expert-parallel job.
    """
    grid = files.require_grids().get(OPTIMIZER_FOLDER)
    if grid is None:
        raise UsageError(
            "there are no optimizer files of neuronx-distributed",
            file="optim",
            found="nothing",
            hint="Pass the directory of a tag, in which the folder optim lies.",
        )
    names = [posixpath.basename(path) for path in grid.paths.values()]
    full = [name for name in names if name.startswith("full_")]
    if full and len(full) < len(names):
        raise CorruptCheckpointError(
            "files for each dp rank lie beside files for all of them", file="optim", found=", ".join(names[:4])
        )
    by_rank = read_trees(files, grid)
    for at, tree in by_rank.items():
        _check_zero1_file(grid.paths[at], tree)
    work = _ArrayCollector(files=files, by_rank=by_rank, dp=grid.sizes.dp)
    stages = {(pp, tp): work.build_stage(pp, tp) for pp in range(grid.sizes.pp) for tp in range(grid.sizes.tp)}
    manifest = Manifest(
        header=make_foreign_head(tag),
        skeleton=None,
        arrays=ArrayTable.from_records(work.records),
        files=tuple(files.records),
    )
    xser = any(map(files.has_separate_tensors, grid.paths.values()))
    return Zero1Files(
        manifest=manifest,
        stages=stages,
        sharded_leaves=frozenset(work.sharded_leaves),
        full=bool(full),
        xser=xser,
        dp=grid.sizes.dp,
    )


def _check_zero1_file(path: str, tree: Any) -> None:
    """Check that a file contains a ZeRO-1 optimizer.

    Raises:
        UnsupportedStateError: It is the optimizer of an expert-parallel job.
        UsageError: It was not saved with ZeRO-1.
    """
    if "_ep_rank_" in path or any(str(key).startswith("ep_") for key in tree):
        raise UnsupportedStateError(
            "this is the optimizer of an expert-parallel job: fewer ranks have its experts in common than the rest",
            file=path,
            hint="Convert the whole tag: xla-ckpt convert --like, with a model that says which is which.",
        )
    if "base_state" not in tree or not isinstance(tree.get("shape_info"), Mapping):
        raise UsageError(
            "this optimizer was not saved with ZeRO-1: it is the same for any number of data-parallel ranks", file=path
        )


@dataclass(slots=True, kw_only=True)
class _ArrayCollector:
    """Collector of the arrays of all files."""

    files: FolderFiles
    by_rank: Mapping[RankCoords, Any]
    dp: int
    records: dict[str, ArrayRecord] = field(default_factory=dict)
    sharded_leaves: list[str] = field(default_factory=list)

    def build_stage(self, pp: int, tp: int) -> Any:
        """Merge the files of one (tp, pp), with a `LeafPlaceholder` for each tensor.

        Raises:
            CorruptCheckpointError: Some dp ranks lack rows of a state.
            IncompatibleCheckpointError: Values other than rows differ between dp ranks.
        """
        ranks = {RankCoords(dp=dp): self.by_rank[RankCoords(pp=pp, dp=dp, tp=tp)] for dp in range(self.dp)}
        first = ranks[RankCoords()]

        def of_all(keys: KeyPath, leaf: Any) -> Any:
            path = "/".join(map(str, (pp, tp, *keys)))
            # A tensor in a container that is a state is not sharded by rows.
            if (
                keys[0] in ZERO1_SHARDED_KEYS
                and type(keys[1]) is int
                and len(keys) <= 3
                and isinstance(leaf, StoredTensor)
            ):
                rows = [_get_member(tree, keys) for tree in ranks.values()]
                return self._merge_rows(path, rows, first["shape_info"].get(keys[1]))
            return self._add_whole_tensor(path, leaf)

        def alike(keys: KeyPath) -> Any:
            """Return the value at a path: tensors that are rows from the first rank, other values as common to all
            ranks.
            """
            of_ranks = {at: _get_member(tree, keys[:-1]) or {} for at, tree in ranks.items()}
            value = of_ranks[RankCoords()][keys[-1]]
            if keys[0] not in ZERO1_SHARDED_KEYS or (len(keys) > 1 and type(keys[1]) is not int):
                return merge_common_value(self.files, of_ranks, keys[-1])
            if isinstance(value, Mapping) and len(keys) < 3:
                return {key: alike((*keys, key)) for key in value}
            return value if isinstance(value, StoredTensor) else merge_common_value(self.files, of_ranks, keys[-1])

        return map_leaves({key: alike((key,)) for key in first}, of_all)

    def _merge_rows(self, path: str, ranks: list[Any], shape: Any) -> Any:
        """Merge the rows of all dp ranks to one array; `shape` is its shape.

        Raises:
            CorruptCheckpointError: Some dp ranks lack rows, or the shape is missing.
        """
        missing = next((dp for dp, tensor in enumerate(ranks) if not isinstance(tensor, StoredTensor)), None)
        if missing is not None or shape is None:
            raise CorruptCheckpointError(
                "the dp ranks hold different states",
                leaf=path,
                found=f"none on dp rank {missing}",
                expected="a tensor on each, and its whole shape in shape_info",
            )
        copies = {(dp, 0, 0): tensor for dp, tensor in enumerate(ranks)}
        if not ranks[0].shape:
            return self._add_whole_tensor(path, ranks[0])
        local = tuple(map(int, shape))
        array = StoredArray(leaf=path, copies=copies, mesh=Mesh(dp=self.dp), local_shape=local, row_axes=("dp",))
        check_zero1_rows(array, self.dp, self.files.missing_rows_hint)
        self.records[path] = assemble_array(self.files, array, Sharding()).record
        self.sharded_leaves.append(path)
        return LeafPlaceholder(path)

    def _add_whole_tensor(self, path: str, value: Any) -> Any:
        """Record a tensor that is replicated on all dp ranks, and return a `LeafPlaceholder`; return any other value
        unchanged.

        Raises:
            IncompatibleCheckpointError: It differs between dp ranks.
        """
        if isinstance(value, UnreadableArray):
            raise value.create_error(path)
        if not isinstance(value, StoredTensor):
            return value
        array = StoredArray(leaf=path, copies={(0, 0, 0): value}, mesh=Mesh(), local_shape=value.shape)
        self.records[path] = assemble_array(self.files, array, Sharding()).record
        return LeafPlaceholder(path)


def _get_member(tree: Any, keys: KeyPath) -> Any:
    """Return the value at a path of keys; None if it does not exist."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


_COPIED_PATHS = ("model", "scheduler.pt", "user_content.pt", *MARKER_FILES)
"""Files and folders of a tag other than its optimizer. The marker file of a complete tag comes last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero1ConversionReport:
    """Result of a conversion."""

    path: str
    files: int
    nbytes: int
    dp: int | None
    """Number of data-parallel ranks of the new files; None for files that contain the states of all ranks."""


def convert_zero_checkpoints(
    input_dir: PathLike,
    output_dir: PathLike,
    dp_size: int | None = None,
    *,
    num_workers: int = READ_THREADS,
    max_memory: int = DEFAULT_MAX_MEMORY,
    progress: bool | None = None,
) -> Zero1ConversionReport:
    """Convert the ZeRO-1 optimizer of a neuronx-distributed tag to another number of data-parallel ranks.

    States, step counts and master weights are converted. If `output_dir` does not exist, the new directory is a
    complete tag, with copies of model, scheduler and user content. It, or its ``optim``, is created atomically.

    Args:
        input_dir: Directory of the tag, which contains ``optim``.
        output_dir: Directory of the new tag; it must not have an ``optim``.
        dp_size: Number of data-parallel ranks of the new job; None writes ``full_*`` files with the states of all
            ranks.
        num_workers: Maximum number of reading threads.
        max_memory: Maximum number of bytes of array data in memory.
        progress: Show a progress bar: True, False, or None to show it only on a terminal if the conversion takes long.

    Raises:
        NoCheckpointError: `input_dir` does not exist.
        UsageError: It has no ZeRO-1 optimizer, or already in the requested form; or the output exists.
        CorruptCheckpointError: Files are missing, damaged, or do not fit together.
        UnsupportedStateError: It is the optimizer of an expert-parallel job.
        StorageError: The output cannot be written.
    """
    (store, name), (target, target_name) = open_parent(input_dir), open_parent(output_dir)
    source_path, target_path = normalize_path(input_dir), normalize_path(output_dir)
    if dp_size is not None and dp_size < 1:
        raise UsageError("dp_size is a number of ranks", found=dp_size)
    if is_same_directory(store, name, target, target_name) or target.has(f"{target_name}/{OPTIMIZER_FOLDER}"):
        raise UsageError("the output has an optimizer already", path=target_path, hint="Name a directory without one.")
    if target.has(target_name) and not target.is_directory(target_name):
        raise UsageError("the output is no directory", path=target_path)
    directory = _open_tag_directory(store, name, source_path)
    try:
        with annotate_errors(path=source_path), wrap_os_errors("converting", path=target_path, tag=name):
            optimizer = scan_zero1_optimizer(FolderFiles(directory), name)
            if optimizer.full and dp_size is None:
                raise UsageError(
                    "these files hold the states of all data-parallel ranks already", hint="Give a dp_size."
                )
            files = optimizer.plan_files(dp_size)
            total = sum(f.data_bytes for f in files)
            reader = TagReader(directory, source_path, name, optimizer.manifest, ())
            fresh = not target.has(target_name)
            if not fresh:  # the optimizer's directory is added to the existing one
                target, target_name = open_parent(f"{target_path}/{OPTIMIZER_FOLDER}")
                files = [replace(file, path=file.path.removeprefix(f"{OPTIMIZER_FOLDER}/")) for file in files]
            with Transaction(open_root(target), target_name, TransactionKind.NEW_DIRECTORY) as transaction:
                draft = transaction.directory
                try:
                    with ProgressBar(f"convert {name}", total, progress) as bar:
                        stream_files(
                            reader, draft, files, IoContext(workers=num_workers, progress=bar), max_memory=max_memory
                        )
                finally:
                    reader.close_files()
                if fresh:
                    for path in _list_copied_files(directory):
                        _copy_file(directory, draft, path)
                transaction.seal({})
                transaction.commit()
    finally:
        directory.close()
    return Zero1ConversionReport(path=target_path, files=len(files), nbytes=total, dp=dp_size)


def _open_tag_directory(store: Store, name: str, path: str) -> Directory:
    with wrap_os_errors("opening a tag", path=path):
        try:
            return store.open(open_root(store).get_directory_name(name))
        except (FileNotFoundError, NotADirectoryError):
            raise NoCheckpointError("there is no such directory", path=path) from None


def _list_copied_files(directory: Directory) -> list[str]:
    """Return the files of a tag to copy: all except the optimizer, and the marker files last."""
    wanted = [path for path in directory.list_files() if path.split("/")[0] in _COPIED_PATHS]
    return sorted(wanted, key=lambda path: _COPIED_PATHS.index(path.split("/")[0]))


def _copy_file(source: Directory, target: Directory, path: str) -> None:
    """Copy a file durably."""
    with closing(source.open(path)) as file:
        sink = target.create(path, file.size)
        try:
            buffer = memoryview(bytearray(min(file.size, WORKER_BUFFER_BYTES)))
            for at in range(0, file.size, WORKER_BUFFER_BYTES):
                got = file.read_into(buffer[: min(WORKER_BUFFER_BYTES, file.size - at)], at)
                sink.patch(buffer[:got], at)
            sink.commit()
        except BaseException:
            sink.abort()
            raise
