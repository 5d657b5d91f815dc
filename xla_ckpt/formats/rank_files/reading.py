"""Open and verify checkpoints of rank files: read model and optimizer, and build their manifest.

Only metadata is read, no tensor data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import Manifest, UnreadableArray
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.nested import KeyPath, iterate_leaves, map_leaves
from xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnsupportedStateError,
    UntrustedObjectError,
    wrap_os_errors,
)
from xla_ckpt.formats.rank_files.file_names import RankCoords, RankGrid, format_names, get_largest_sizes, index_by_rank
from xla_ckpt.formats.rank_files.files import RankFiles, to_stored_tensor
from xla_ckpt.formats.rank_files.layout import (
    RankContent,
    RankFileFormat,
    RankLayout,
    RankOptimizer,
    RankTag,
    StoredTensor,
)
from xla_ckpt.formats.rank_files.model import MissingTensor, RankStateBuilder, StageModel, group_by_stage, read_trees
from xla_ckpt.formats.rank_files.optimizer import UNNAMED_OPTIMIZER, build_optimizer
from xla_ckpt.formats.scan import (
    UntrustedObject,
    build_scanned_manifest,
    check_files,
    flatten_state,
    open_for_scan,
    start_verify_report,
    wrap_untrusted_file,
)
from xla_ckpt.formats.torch_save.stored_tensors import make_array_record
from xla_ckpt.formats.torch_save.zip_reader import TensorLocation, check_zip_file
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.loading.verify import VerifyReport, collect_problem
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import ReadDirectory, Store, read_file
from xla_ckpt.storage.threads import READ_THREADS

logger = get_logger(__name__)

_MASTER_WEIGHTS_ONLY = UnreadableArray(
    problem="this weight was not saved; at most its master weight was, which the optimizer numbers",
    hint="Give both: model= and optimizer= (--like).",
)


def read_plain_file(files: RankFiles, file: str) -> Any:
    """Read a file of plain values; return an `UntrustedObject` if it refers to classes of the program.

    Raises:
        CorruptCheckpointError: It is damaged.
    """
    try:
        return files.read(file)
    except UntrustedObjectError as error:
        return wrap_untrusted_file(file, error.problem, lambda: read_file(files.directory, file))


def build_rank_manifest(
    files: RankFiles, tag: str, content: TagContent, hints: LoadHints
) -> tuple[Manifest, list[UntrustedObject]]:
    """Build the manifest of a checkpoint, and the list of objects that its skeleton refers to by number.

    Raises:
        UnsupportedStateError: A value is neither an array nor plain.
    """
    flat = flatten_state({part: _convert_plain(files, value) for part, value in content.parts.items()})
    own = [leaf for leaf, record in flat.arrays.items() if isinstance(record, ArrayRecord) and record.is_rank_local]
    _log_divergence(tag, own, content.broken_ties, hints)
    mesh = content.mesh
    return build_scanned_manifest(tag, flat, files.records, mesh=str(mesh), world=mesh.size, left_out=content.left_out)


def _log_divergence(tag: str, own: list[str], apart: Mapping[str, str], hints: LoadHints) -> None:
    """Log arrays that differ between ranks, and broken ties, once for each pipeline stage."""
    at = hints.mesh.coordinates(hints.rank)
    if any(at[axis] for axis in ("dp", "cp", "tp")):
        return
    for name, first in apart.items():
        logger.warning(
            "tag %s: %s and %s are one parameter of the model, and are stored with different values: the one that is "
            "loaded last counts",
            tag,
            schema.get_weight_path(first),
            schema.get_weight_path(name),
        )
    if own:
        logger.warning(
            "tag %s: the ranks hold different tensors, and nothing says how they were split; each rank gets its own. "
            "They are parts of arrays, or copies that have drifted apart: %s",
            tag,
            format_names(own),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TagContent:
    """Content of a checkpoint."""

    parts: dict[str, Any]
    """Members of the state, with a record or an `UnreadableArray` for each tensor."""

    mesh: Mesh
    """Mesh of the ranks that wrote it, as far as the files show it."""

    left_out: tuple[str, ...]
    """Leaf paths of model tensors that were not written and have no master weights."""

    broken_ties: Mapping[str, str]
    """Names of tied parameters whose values differ, with the name that they should be tied to."""


def infer_mesh(grids: Iterable[RankGrid]) -> Mesh:
    """Infer the mesh of the ranks that wrote files, as far as the file names show it."""
    size = get_largest_sizes(grids)
    # Without ZeRO-1 only the first dp rank writes files. There were at least as many dp ranks as ep ranks.
    return Mesh(pp=size.pp, dp=size.dp if size.dp % size.ep == 0 else size.ep, ep=size.ep, tp=size.tp)


def build_content(
    files: RankFiles,
    hints: LoadHints,
    model: Mapping[int, StageModel],
    optimizer_sizes: RankCoords | None,
    read_optimizers: Callable[[], Mapping[RankCoords, RankOptimizer]],
    mesh: Mesh,
) -> TagContent:
    """Build model and optimizer, with a record or an `UnreadableArray` for each tensor.

    Args:
        model: Stored models of the ranks, by pipeline stage.
        optimizer_sizes: Number of optimizer files along each axis; None if there are none.
        read_optimizers: Function that reads these files. It is not called if the optimizer is not requested, or if its
        parameter names are unknown.
        mesh: Mesh of all ranks that wrote the checkpoint.

    Raises:
        CorruptCheckpointError: Files are missing, or do not fit together.
        IncompatibleCheckpointError: The stored optimizer is not the requested one.
    """
    state = RankStateBuilder(files, hints, model, Mesh(dp=mesh.ep, ep=mesh.ep, tp=mesh.tp))
    parts: dict[str, Any] = {}
    if model:
        parts[schema.MODEL] = state.build_model()
    if optimizer_sizes is not None:
        if not hints.wants_optimizer:
            parts[schema.OPTIMIZER] = UnreadableArray(problem="the optimizer was not asked for")
        elif hints.parameter_groups is None and not hints.saved_parameters and optimizer_sizes.pp > 1:
            parts[schema.OPTIMIZER] = UNNAMED_OPTIMIZER
        else:
            parts[schema.OPTIMIZER] = build_optimizer(state, read_optimizers(), optimizer_sizes.dp)
    optimizer = parts.get(schema.OPTIMIZER)
    masters = optimizer.get(schema.MASTER, {}) if isinstance(optimizer, dict) else {}
    weights: dict[str, Any] = {}
    apart: dict[str, str] = {}
    if model:
        weights = {name: _select_weights(name, stored, masters, hints) for name, stored in parts[schema.MODEL].items()}
        tied, apart = state.find_ties()
        # Tied names share one object, by which `build_scanned_manifest` recognizes the aliases of an array.
        weights |= {name: weights[first] for name, first in tied.items()}
        parts[schema.MODEL] = {name: value for name, value in weights.items() if value is not None}
    left_out = tuple(schema.get_weight_path(name) for name, value in weights.items() if value is None)
    return TagContent(parts=parts, mesh=mesh, left_out=left_out, broken_ties=apart)


def _select_weights(name: str, stored: Any, masters: Mapping[str, Any], hints: LoadHints) -> Any:
    """Select the source of a parameter: its own array, or its master weights if the array was not saved.

    Returns:
        The record; None to omit the parameter.

    Raises:
        CorruptCheckpointError: Neither the array nor any master weights are stored.
    """
    if not isinstance(stored, MissingTensor):
        return stored
    master = masters.get(name)
    if isinstance(master, ArrayRecord):
        return master.replace_metadata(original_dtype=stored.tensor.dtype)
    if not hints.wants_optimizer or hints.parameter_groups is None:
        return _MASTER_WEIGHTS_ONLY
    if not masters:
        raise CorruptCheckpointError(
            "the files of the tensors are missing, and there are no master weights to take their place",
            leaf=schema.get_weight_path(name),
            file=stored.tensor.file,
        )
    return master


def _convert_plain(files: RankFiles, value: Any) -> Any:
    """Convert a value that is the same on all ranks: each tensor is replaced by its record.

    Mappings without tensors are kept as they are, with their classes.
    """

    def recorded(keys: KeyPath, leaf: Any) -> Any:
        leaf = to_stored_tensor(keys, leaf)
        if not isinstance(leaf, StoredTensor):
            return leaf
        at = files.locate(leaf)
        return make_array_record(at, files.get_file_number(at.file))

    return map_leaves(value, recorded, is_leaf=lambda v: isinstance(v, Mapping) and not _has_tensors(v))


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, TensorLocation | StoredTensor) for leaf in iterate_leaves(value))


TAG_KIND = "tag"
"""Name of the files in errors."""


class OneFilePerRank(RankFiles):
    """Files of a checkpoint in which each rank has one file.

    Args:
        directory: The open checkpoint directory.
        file_format: Names and contents of the files.
        subfolder: Folder of the rank files in the directory.
    """

    def __init__(self, directory: ReadDirectory, file_format: RankFileFormat, subfolder: str = "") -> None:
        super().__init__(directory, subfolder)
        self.file_format = file_format

    def find_grids(self) -> dict[str, RankGrid]:
        return {
            TAG_KIND: RankGrid.from_paths(index_by_rank(self.file_names, self.file_format.file_names, self.subfolder))
        }

    def list_zip_files(self) -> list[str]:
        return sorted({*super().list_zip_files(), *self.list_rank_files()})

    def read_content(self, hints: LoadHints) -> TagContent:
        grid = self.find_grids()[TAG_KIND]
        grid.check(TAG_KIND, self.explain_missing(grid.sizes))
        of_ranks = {
            at: self._interpret_content(tree, at, grid.paths[at]) for at, tree in read_trees(self, grid).items()
        }
        # The model is the same on all dp ranks, as is the optimizer unless ZeRO-1 sharded its rows.
        models = {at: has.model for at, has in of_ranks.items() if has.model is not None and not at.dp}
        stored = {at: has.optimizer for at, has in of_ranks.items() if has.optimizer is not None}
        optimizers, of_optimizers = self.select_optimizers(stored, grid, hints)

        def optim() -> dict[RankCoords, RankOptimizer]:
            read = {at: self.file_format.parse_optimizer(tree) for at, tree in optimizers.items()}
            dealt = any(optimizer.local_shapes is not None for optimizer in read.values())
            return {at: optimizer for at, optimizer in read.items() if dealt or not at.dp}

        sizes, mesh = (of_optimizers.sizes if optimizers else None), infer_mesh([grid, of_optimizers])
        content = build_content(self, hints, group_by_stage(models), sizes, optim, mesh)
        content.parts.update(of_ranks[min(of_ranks)].parts)
        return content

    def _interpret_content(self, tree: Mapping[Any, Any], at: RankCoords, path: str) -> RankContent:
        """Parse the content of a rank file.

        Raises:
            CorruptCheckpointError: It is not in the form that the program writes.
        """
        try:
            return self.file_format.parse_content(tree, at)
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"a rank file does not hold what such files have: {type(error).__name__}: {error}",
                file=path,
                found=format_names([*map(str, tree)]) or "nothing",
            ) from error

    def select_optimizers(
        self, stored: Mapping[RankCoords, Mapping[Any, Any]], grid: RankGrid, hints: LoadHints
    ) -> tuple[Mapping[RankCoords, Mapping[Any, Any]], RankGrid]:
        """Select the optimizer states to read, and the grid of the files that contain them.

        Args:
            stored: Optimizer states in the rank files; empty if there are none.
            grid: The rank files.
            hints: The request of the load.
        """
        return stored, grid


def open_rank_files(layout: RankLayout, store: Store, tag: RankTag, hints: LoadHints) -> TagReader:
    """Open a checkpoint for the restore engine.

    Raises:
        CorruptCheckpointError: Files are missing, damaged, from different saves, or do not add up.
        UnsupportedStateError: They are of an unsupported kind.
        UntrustedObjectError: A file refers to a class that is neither a tensor nor a plain value.
        IncompatibleCheckpointError: The stored optimizer is not the requested one.
    """
    with open_for_scan(store, tag.tag, lambda: tag.open_directory(store)) as directory:
        files = layout.create_files(store, tag, directory)
        if not tag.complete and files.incomplete_message:
            logger.warning("%s", files.incomplete_message.format(tag=tag.tag))
        manifest, objects = build_rank_manifest(files, tag.tag, files.read_content(hints), hints)
        return TagReader(
            files.wrap_with_crc_checks(files.directory, files.file_names), store.path, tag.tag, manifest, objects
        )


def verify_rank_files(layout: RankLayout, store: Store, tag: RankTag, workers: int = READ_THREADS) -> VerifyReport:
    """Verify a checkpoint by reading all of its files.

    The files of all ranks and all tensors must exist, the zip files must match their CRC-32 checksums (neither torch
    nor the program that wrote them checks these), and the parts of the ranks must add up to whole arrays, as far as the
    checkpoint itself shows.

    Raises:
        StorageError: The checkpoint cannot be opened.
    """
    with start_verify_report(store, tag.tag) as report:
        try:
            with wrap_os_errors("opening a tag", path=store.path, tag=tag.tag):
                directory = tag.open_directory(store)
        except CorruptCheckpointError as error:
            report.problems.append(error)
            return report
        with closing(directory):
            files = layout.create_files(store, tag, directory)
            if not tag.complete and files.incomplete_message:
                report.problems.append(CorruptCheckpointError(files.incomplete_message.format(tag=tag.tag)))
            for check in files.list_checks():
                collect_problem(report, check)
            check_files(report, files.list_zip_files(), partial(check_zip_file, directory), workers)
            damaged = {problem.file for problem in report.problems}
            for file, at in files.list_rank_files().items():
                if file not in damaged:
                    collect_problem(report, partial(_check_tensors, files, file, at, report))
            # Report a missing file, or a file from another save, even if another file is damaged.
            collect_problem(report, partial(_check_content, files, report))
    return report


def _check_tensors(files: RankFiles, file: str, at: RankCoords, report: VerifyReport) -> None:
    """Check that every tensor in a rank file exists."""
    damaged = {problem.file for problem in report.problems}
    for leaf in iterate_leaves(files.read_tree(file, at)):
        if isinstance(leaf, StoredTensor):
            report.arrays += 1
            if leaf.file not in damaged and not files.is_left_out(leaf):
                collect_problem(report, partial(files.locate, leaf))


def _check_content(files: RankFiles, report: VerifyReport) -> None:
    """Check that the parts add up, without repeating problems in the report.

    Raises:
        CheckpointError: They do not add up.
    """
    reported = {(problem.problem, problem.file) for problem in report.problems}
    try:
        files.read_content(LoadHints())
    except (IncompatibleCheckpointError, UnsupportedStateError):
        return  # the files do not record the shardings, or are of an unsupported kind, but are not damaged
    except CheckpointError as error:
        if (error.problem, error.file) not in reported:
            raise
