"""Read SMP sets and directories: read each part, check that all parts exist, and merge their state.

Only metadata is read, no tensor data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import UnreadableArray
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.nested import KeyPath, iterate_leaves
from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError, annotate_errors
from xla_ckpt.formats.rank_files.arrays import StoredArray, merge_common_value
from xla_ckpt.formats.rank_files.file_names import RankCoords, RankGrid, format_names
from xla_ckpt.formats.rank_files.files import RankFiles
from xla_ckpt.formats.rank_files.layout import StoredTensor
from xla_ckpt.formats.rank_files.reading import TagContent, build_content
from xla_ckpt.formats.scan import CrcCheckedDirectory
from xla_ckpt.formats.smp import model as members
from xla_ckpt.formats.smp.model import (
    EXTENSION_KEY,
    INNER_OPTIMIZER_KEY,
    MASTERS_KEY,
    build_hints,
    join_uneven_parts,
    merge_models,
)
from xla_ckpt.formats.smp.optimizer import MergedOptimizer, merge_optimizers
from xla_ckpt.formats.smp.save_notes import (
    SetPart,
    exclude_other_saves,
    identify_part,
    make_two_saves_error,
    read_save_notes,
)
from xla_ckpt.formats.smp.tags import (
    FP16_SET,
    IS_PARTIAL,
    JOB_CONFIG,
    LOAD_INFO,
    MODEL_SET,
    OPTIMIZER_SETS,
    PP,
    SCHEDULER_FILE,
    TP,
    USER_CONTENT_FILE,
    ZERO_2D,
    FileSet,
    SmpTag,
)
from xla_ckpt.formats.state_dict_search import remove_paths
from xla_ckpt.formats.torch_save.pickle_stubs import AttributesStub
from xla_ckpt.formats.torch_save.state_file import read_stored_tree
from xla_ckpt.formats.torch_save.zip_reader import SMALL_READ_AHEAD_BYTES, ReadAheadFile, TensorLocation
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Directory

logger = get_logger(__name__)

_SCALER_MODULE = "smdistributed.modelparallel.torch.fp16.loss_scaler"
SCALERS = {
    name: AttributesStub.for_name(name)
    for name in (f"{_SCALER_MODULE}.LossScaler", f"{_SCALER_MODULE}.DynamicLossScaler")
}
"""Stubs of the SMP loss scaler classes, whose attributes are plain numbers."""

FIRST_RANK = RankCoords()


class SmpPartFiles(RankFiles):
    """Files of a checkpoint. The bytes of each storage are checked against its CRC-32 before they are returned."""

    def __init__(self, directory: Directory, tag: SmpTag) -> None:
        self.checked_directory = CrcCheckedDirectory(directory, tag.files)
        super().__init__(self.checked_directory)
        self.tag = tag
        self.full_directory = directory
        self._trees: dict[str, Any] = {}
        self.set_parts: dict[str, SetPart] = {}
        """Note and digest of each file that was read."""

    def list_rank_files(self) -> Mapping[str, RankCoords]:
        return dict.fromkeys(self.tag.files, RankCoords())

    def join_parts(self, array: StoredArray) -> ArrayRecord | None:
        return join_uneven_parts(self, array)

    def list_zip_files(self) -> list[str]:
        return list(self.tag.files)

    def read_tree(self, path: str, at: RankCoords = FIRST_RANK) -> Any:
        """Read a file, with a `StoredTensor` for each tensor, and an `UntrustedObject` for untrusted classes.

        Raises:
            CorruptCheckpointError: It is missing, truncated, damaged, or not written by torch.save.
            UnsupportedStateError: It has another byte order, or is compressed.
        """
        if path not in self._trees:
            with annotate_errors(file=path), closing(self._open_part(path)) as source:
                ahead = ReadAheadFile(source, path, SMALL_READ_AHEAD_BYTES)
                tree = read_stored_tree(self.checked_directory, ahead, _to_stored_tensor, SCALERS)
                self.set_parts[path] = identify_part(ahead, read_save_notes(self.full_directory, path))
                self._trees[path] = tree
        return self._trees[path]

    def _open_part(self, file: str) -> Any:
        try:
            return self.directory.open(file)
        except FileNotFoundError:
            raise CorruptCheckpointError("a part is missing", file=file) from None

    @property
    def is_one_save(self) -> bool:
        """True if the notes of all files that were read record the same save."""
        saves = {part.saved and part.saved.save for part in self.set_parts.values()}
        return None not in saves and len(saves) == 1

    def check_saves(self) -> None:
        """Check that all parts that were read are from one save, if they have notes.

        Raises:
            CorruptCheckpointError: They are not.
        """
        file_of: dict[str, str] = {}
        for file, part in sorted(self.set_parts.items()):
            if part.save is not None:
                file_of.setdefault(part.save, file)
        if len(file_of) > 1:
            raise make_two_saves_error(
                "; ".join(f"{file} of {save}" for save, file in file_of.items()), next(iter(file_of.values()))
            )


def _to_stored_tensor(at: TensorLocation) -> StoredTensor | UnreadableArray:
    if at.strides is not None:
        # The rest of the file is valid, so only a load of this array raises an error.
        return UnreadableArray(
            problem="a tensor is not contiguous",
            found=f"shape {list(at.shape)}, strides {list(at.strides)}",
            hint="Load it with torch, make it contiguous, and save it anew.",
            dtype=at.dtype,
            shape=at.shape,
            tensor_count=1,
        )
    return StoredTensor.from_location(at)


Degrees = tuple[int, int]
"""Numbers of (pipeline-parallel, tensor-parallel) ranks of a job."""


def place_parts(files: FileSet, degrees: Degrees | None) -> dict[RankCoords, str]:
    """Map the parts to the ranks that wrote them.

    Args:
        degrees: Numbers of ranks of the job, if known.

    Raises:
        CorruptCheckpointError: Parts are missing, or there are parts of more ranks than the files record.
    """
    pp, tp = degrees or (1, 1)
    parts = files.get_parts()
    count = len(next(iter(parts)))
    # A single number in names counts all model-parallel ranks. The versions that wrote such names had no tp.
    by_mp = count == 1 and tp > 1 and len(parts) > pp
    by_rank: dict[RankCoords, str] = {}
    for numbers, file in sorted(parts.items()):
        stage, *others = divmod(numbers[0], tp) if by_mp else numbers
        by_rank[RankCoords(pp=stage, tp=others[0] if others else 0, dp=others[1] if len(others) > 1 else 0)] = file

    def name(at: RankCoords) -> str:
        """Return the name of a rank's part. With tp it has at least two numbers."""
        return files.format_part_name(
            (at.pp * tp + at.tp,) if by_mp else (at.pp, at.tp, at.dp)[: max(count, 2 if at.tp else 1)]
        )

    _check_grid(files, by_rank, degrees, name)
    return by_rank


def infer_degrees(sets: Iterable[FileSet]) -> Degrees | None:
    """Infer the degrees of a job from the names of parts in its sets; None if names do not show them."""
    numbers = [n for files in sets for form in files.by_pattern.values() for n in form if len(n) > 1]
    return (1 + max(n[0] for n in numbers), 1 + max(n[1] for n in numbers)) if numbers else None


def _check_grid(
    files: FileSet, by_rank: Mapping[RankCoords, str], degrees: Degrees | None, name: Callable[[RankCoords], str]
) -> None:
    named = RankGrid.from_paths(by_rank).sizes
    pp, tp = (max(named.pp, degrees[0]), max(named.tp, degrees[1])) if degrees else (named.pp, named.tp)
    for axis, known, there in zip(("pp", "tp"), degrees or (pp, tp), (named.pp, named.tp), strict=True):
        if there > known:
            raise CorruptCheckpointError(
                f"there are parts of more {axis} ranks than the job had that wrote them",
                file=files.name,
                expected="parts of pp {}, tp {}, as they say themselves".format(*degrees or ()),
                found=f"{len(by_rank)} parts, of {axis} ranks up to {there - 1}",
                hint="Parts of another save lie under the same name: move them away. Or the name of the set is "
                "another one, which has a number at its end.",
            )
    grid = RankGrid(by_rank, replace(named, pp=pp, tp=tp))
    if not (missing := grid.find_missing(files.name)):
        return
    total = grid.count
    # A common mistake: SMP counts tp within dp, so `if smp.dp_rank() == 0` is true only on tp rank 0.
    never = tp > 1 and not any(at.tp for at in by_rank) and all(at.tp for at in missing)
    raise CorruptCheckpointError(
        "the parts of all ranks tp > 0 are missing" if never else f"parts are missing: {len(missing)} of {total}",
        file=name(missing[0]),
        expected=f"{total} parts: pp {pp}, tp {tp}" + (f", rdp {named.dp}" * (named.dp > 1)),
        found=f"{len(by_rank)}; missing: {format_names([name(at) for at in missing])}",
        hint="If they were there once, restore them from a copy. Else the job saved under `if smp.dp_rank() == 0`, "
        "which is true on tp rank 0 only, and what the other tp ranks held was never written: save under "
        "`if smp.rdp_rank() == 0`."
        if never
        else "They were lost, or never written: restore them from a copy, or take another checkpoint.",
    )


_COUNTER_NAMES = re.compile(r"(?:^|_)(?:steps?|epochs?|iters?|iterations?)(?:$|_)", re.IGNORECASE)
"""Pattern of names of counters, which are equal on all ranks."""


class SmpFiles(SmpPartFiles):
    """Files of a set, or of a directory of sets."""

    def __init__(self, directory: Directory, tag: SmpTag) -> None:
        super().__init__(directory, tag)
        # A missing part of a set raises an error when the parts are mapped to ranks.
        self.incomplete_message = (
            "{tag}: its save may not have ended, neither newest nor a file says so" if tag.directory else ""
        )

    def list_checks(self) -> list[Callable[[], object]]:
        return [self.drop_other_saves]

    def drop_other_saves(self) -> None:
        """Exclude the files of other saves with the name of the set.

        Raises:
            CorruptCheckpointError: It is from several saves.
        """
        self.tag = exclude_other_saves(self.full_directory, self.tag)

    def read_content(self, hints: LoadHints) -> TagContent:
        self.drop_other_saves()
        tag = self.tag
        stored = _read_set(self, tag, hints) if "" in tag.sets else _read_directory(self, tag)
        self.check_saves()
        content = _build_content(self, stored, hints, same_save=self.is_one_save)
        # Record all files, even those this rank does not read: ranks compare the digests to check that they opened the
        # same files.
        for file in tag.files:
            number = self.get_file_number(file)
            self.records[number] = replace(self.records[number], framing_digest=int(self.set_parts[file].digest, 16))
        return content


class PartContents:
    """Contents of the parts of a checkpoint."""

    def __init__(self, degrees: Degrees | None) -> None:
        self.degrees = degrees
        self.models: Mapping[RankCoords, Mapping[Any, Any]] = {}
        self.optimizers: Mapping[RankCoords, Mapping[Any, Any]] = {}
        self.user_values: Mapping[RankCoords, Mapping[Any, Any]] = {}
        """Other values that the ranks stored, under names chosen by the program."""

        self.scheduler: Mapping[RankCoords, Mapping[Any, Any]] = {}
        self.parts: dict[str, Any] = {}
        """Members of the state that have a separate file."""

    @property
    def infos(self) -> list[Mapping[Any, Any]]:
        """SMP job descriptions from all parts that have one."""
        return [tree[LOAD_INFO] for tree in self.models.values() if isinstance(tree.get(LOAD_INFO), Mapping)]


def _read_set(parts: SmpPartFiles, tag: SmpTag, hints: LoadHints) -> PartContents:
    """Read a set named by the program: each part is a dict with keys chosen by the program."""
    files = tag.sets[""]
    trees = {file: _read_dict(parts, file) for _, file in sorted(files.get_parts().items())}
    where = members.find_member_paths(next(iter(trees.values())), hints)
    stored = PartContents(
        parse_degrees(
            [members.get_member(tree, where.model or (), file).get(LOAD_INFO) for file, tree in trees.items()]
        )
    )
    ranks = place_parts(files, stored.degrees)

    def member(path: KeyPath | None) -> dict[RankCoords, Mapping[Any, Any]]:
        return {} if path is None else {at: members.get_member(trees[file], path, file) for at, file in ranks.items()}

    stored.models = {at: tree for at, tree in member(where.model).items() if not at.dp}
    stored.optimizers = member(where.optimizer)
    stored.scheduler = member(where.scheduler)
    if () not in where.paths:
        stored.user_values = {at: remove_paths(trees[file], where.paths) for at, file in ranks.items()}
    return stored


def _read_directory(parts: SmpPartFiles, tag: SmpTag) -> PartContents:
    """Read a directory written by `save_checkpoint`: a set for each part of the state."""
    trees = {
        kind: {file: _read_dict(parts, file) for file in stored.get_parts().values()}
        for kind, stored in tag.sets.items()
    }
    config = parts.read_tree(JOB_CONFIG) if JOB_CONFIG in tag.others else None
    infos = [config, *(tree.get(LOAD_INFO) for tree in trees.get(MODEL_SET, {}).values())]
    stored = PartContents(parse_degrees(infos) or infer_degrees(tag.sets.values()))
    grids = {
        kind: {at: trees[kind][file] for at, file in place_parts(of_kind, stored.degrees).items()}
        for kind, of_kind in tag.sets.items()
    }
    stored.models = {at: tree for at, tree in grids.get(MODEL_SET, {}).items() if not at.dp}
    states = {at: tree for kind in OPTIMIZER_SETS for at, tree in grids.get(kind, {}).items()}
    fp16 = grids.get(FP16_SET, {})
    stored.optimizers = {
        at: {INNER_OPTIMIZER_KEY: tree, **fp16[at]} if at in fp16 else tree for at, tree in states.items()
    }
    if config is not None:
        stored.parts[schema.EXTRAS] = {JOB_CONFIG.removesuffix(".pt"): config}
    for part, file in ((schema.USER_CONTENT, USER_CONTENT_FILE), (schema.SCHEDULER, SCHEDULER_FILE)):
        if file in tag.others:
            stored.parts[part] = parts.read_tree(file)
    return stored


def _read_dict(parts: SmpPartFiles, file: str) -> Mapping[Any, Any]:
    tree = parts.read_tree(file)
    if not isinstance(tree, Mapping):
        raise CorruptCheckpointError("a part holds no dict", file=file, found=type(tree).__name__)
    if tree.get(ZERO_2D):
        raise UnsupportedStateError(
            "sharded data parallelism (sharded_data_parallel_degree) wrote this: its files hold flat pieces of all "
            "parameters, and no names",
            file=file,
            hint="Load it with SMP, and save the full model: smp.save_checkpoint(..., partial=False).",
        )
    return tree


def parse_degrees(infos: list[Any]) -> Degrees | None:
    """Parse the degrees of the job from its files; None if no file records them.

    Raises:
        CorruptCheckpointError: They contradict each other, or are not valid numbers of ranks.
    """
    pairs = [(i.get(PP, 1), i.get(TP, 1)) for i in infos if isinstance(i, Mapping) and {PP, TP} & i.keys()]
    wrong = next((pair for pair in pairs if any(type(n) is not int or n < 1 for n in pair)), None)
    if wrong is not None:
        raise CorruptCheckpointError(
            "the files describe a job that there cannot be", found=f"pp {wrong[0]}, tp {wrong[1]}"
        )
    distinct = set(pairs)
    if len(distinct) > 1:
        raise make_two_saves_error("; ".join(f"a job of pp {pp}, tp {tp}" for pp, tp in sorted(distinct)))
    return next(iter(distinct), None)


def _build_content(files: RankFiles, stored: PartContents, program_hints: LoadHints, *, same_save: bool) -> TagContent:
    ranks = [*stored.models, *stored.optimizers, *stored.user_values]
    if not ranks:
        raise CorruptCheckpointError("there is neither a model nor an optimizer")
    pp, tp, dp = (1 + max(getattr(at, axis) for at in ranks) for axis in ("pp", "tp", "dp"))
    model = merge_models(files, stored.models, program_hints)
    # Also for a load of only the model: the optimizer's state shows which parameters are sharded, and whether the parts
    # are from one save.
    united = (
        merge_optimizers(files, stored.optimizers, model, program_hints, same_save=same_save)
        if stored.optimizers
        else MergedOptimizer()
    )
    hints = build_hints(model, stored.infos, tp, united.unsplit_names, program_hints)
    stages = {0: model.stage} if stored.models else {}
    has_optimizer = bool(stored.optimizers) and united.problem is None
    shares = 1 + max((at.dp for at in united.by_rank), default=0)
    sizes = RankCoords(pp=1, dp=shares, ep=1, tp=tp) if has_optimizer else None
    content = build_content(files, hints, stages, sizes, lambda: united.by_rank, Mesh(pp=pp, dp=dp, tp=tp))
    if united.problem is not None:
        content.parts[schema.OPTIMIZER] = united.problem
    content.parts.update(stored.parts)
    _add_extras(files, stored, united, content.parts, first_rank=program_hints.rank == 0)
    return content


def _add_extras(
    files: RankFiles, stored: PartContents, united: MergedOptimizer, parts: dict[str, Any], *, first_rank: bool
) -> None:
    """Add values outside model and optimizer: the program's own values, and other state of the SMP fp16 optimizer."""
    extras: dict[str, Any] = dict(parts.get(schema.EXTRAS, {}))
    if stored.scheduler:
        parts[schema.SCHEDULER] = merge_common_value(files, {at: {0: tree} for at, tree in stored.scheduler.items()}, 0)
    content, own = _split_user_content(files, stored.user_values)
    if own and first_rank:
        logger.warning(
            "the ranks stored different values of %s: they are in extras, each rank's own", ", ".join(sorted(own))
        )
    if content and schema.USER_CONTENT not in parts:
        parts[schema.USER_CONTENT] = content
    extras |= own
    states = {at: tree for at, tree in stored.optimizers.items() if MASTERS_KEY in tree}
    if states:
        first = states[min(states)]
        names = [
            name
            for name in first
            if name
            not in (INNER_OPTIMIZER_KEY, MASTERS_KEY, IS_PARTIAL, EXTENSION_KEY, schema.STATE, schema.PARAM_GROUPS)
        ]
        extras[FP16_SET] = {name: merge_common_value(files, states, name) for name in names}
        if united.masters_problem is not None:
            extras[FP16_SET][MASTERS_KEY] = united.masters_problem
    if extras:
        parts[schema.EXTRAS] = extras


def _split_user_content(
    files: RankFiles, by_rank: Mapping[RankCoords, Mapping[Any, Any]]
) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Split the program's values into those that are equal on all ranks, and those that differ.

    Raises:
        CorruptCheckpointError: Counters differ, so the parts are from different saves.
    """
    common: dict[Any, Any] = {}
    own: dict[str, Any] = {}
    ordered = [by_rank[at] for at in sorted(by_rank)]
    for name in dict.fromkeys(name for tree in ordered for name in tree):
        value = merge_common_value(files, by_rank, name)
        if not _has_differences(value):
            common[name] = value
            continue
        values = [tree.get(name) for tree in ordered]
        if isinstance(name, str) and _COUNTER_NAMES.search(name) and all(type(one) in (int, float) for one in values):
            raise make_two_saves_error(f"{name} is {' and '.join(map(str, sorted(set(values))))}")  # type: ignore[type-var]
        own[str(name)] = {schema.RANK_COUNT: len(values), schema.RANKS: {str(n): one for n, one in enumerate(values)}}
    return common, own


def _has_differences(value: Any) -> bool:
    """Return True if a part of a value differs between ranks."""
    return any(isinstance(leaf, UnreadableArray) and leaf.dtype is None for leaf in iterate_leaves(value))
