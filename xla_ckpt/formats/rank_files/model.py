"""Merge the models in rank files into one tree, with a record or an `UnreadableArray` for each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import UnreadableArray
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import Sharding
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.nested import iterate_leaves
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.formats.rank_files.arrays import (
    StoredArray,
    TensorCopies,
    add_stored_shape,
    assemble_array,
    assemble_replicated,
    choose_copies,
    has_differing_copies,
    merge_common_value,
)
from xla_ckpt.formats.rank_files.file_names import RankCoords, RankGrid
from xla_ckpt.formats.rank_files.files import RankFiles
from xla_ckpt.formats.rank_files.layout import StoredTensor
from xla_ckpt.formats.rank_files.split_inference import is_declared, resolve_sharding
from xla_ckpt.loading.tag_reader import DAMAGED_FILE_HINT


@dataclass(slots=True)
class StageModel:
    """The model of one pipeline stage."""

    copies: dict[str, TensorCopies] = field(default_factory=dict)
    """Tensors of all ranks, by name."""

    other_values: dict[RankCoords, dict[str, Any]] = field(default_factory=dict)
    """Values that are not tensors, by rank: the extra state of modules."""


def read_trees(files: RankFiles, grid: RankGrid, *, dp: int | None = None) -> dict[RankCoords, Any]:
    """Read the files of a grid, optionally of only one dp rank.

    Raises:
        CorruptCheckpointError: A file is missing or damaged, or does not contain a dict.
    """
    contents = {}
    for at, path in sorted(grid.paths.items()):
        if dp is None or at.dp == dp:
            contents[at] = files.read_tree(path, at)
            if not isinstance(contents[at], Mapping):
                raise CorruptCheckpointError("a rank file holds no dict", file=path, found=type(contents[at]).__name__)
    files.prefetch_tensors(
        leaf for tree in contents.values() for leaf in iterate_leaves(tree) if isinstance(leaf, StoredTensor)
    )
    return contents


def group_by_stage(models: Mapping[RankCoords, Mapping[Any, Any]]) -> dict[int, StageModel]:
    """Group the models of ranks by pipeline stage.

    Raises:
        CorruptCheckpointError: The ranks of a stage contain different names.
    """
    by_stage: dict[int, StageModel] = {}
    for at, tree in models.items():
        stage = by_stage.setdefault(at.pp, StageModel())
        fresh = not stage.other_values  # the first rank of the stage defines the names
        plain = stage.other_values.setdefault(at, {})
        for name, value in tree.items():
            if not isinstance(value, StoredTensor):
                plain[str(name)] = value
            elif fresh or name in stage.copies:
                copies: dict[tuple[int, int, int], StoredTensor] = stage.copies.setdefault(str(name), {})  # type: ignore[assignment]
                copies[at.dp, at.ep, at.tp] = value
        if [n for n, v in tree.items() if isinstance(v, StoredTensor)] != list(stage.copies):
            raise CorruptCheckpointError(
                "the ranks of a pipeline stage hold different names",
                leaf=schema.MODEL,
                found=f"(ep {at.ep}, tp {at.tp}, pp {at.pp}) against the first rank of the stage",
            )
    return by_stage


class RankStateBuilder:
    """Builder of the model and optimizer trees of one checkpoint."""

    def __init__(self, files: RankFiles, hints: LoadHints, model: Mapping[int, StageModel], mesh: Mesh) -> None:
        self.files = files
        self.hints = hints
        self.stages = model
        self.mesh = mesh
        """Mesh of the ranks in one pipeline stage that have different parts of the model.

        It has no pp, and as many dp ranks as ep ranks, because replicas on further dp ranks are not stored.
        """

    def build_model(self) -> dict[str, Any]:
        """Build the model by name, with a record or an `UnreadableArray` for each tensor."""
        members: dict[str, Any] = {}
        first: dict[str, tuple[int, TensorCopies]] = {}
        for number, stage in sorted(self.stages.items()):
            for name, copies in stage.copies.items():
                earlier, of_earlier = first.setdefault(name, (number, copies))
                if earlier == number:
                    members[name] = self._build_parameter(schema.get_weight_path(name), name, copies)
                elif not self._is_same(of_earlier, copies):
                    if not self.hints.get_hint(name).has_rule:
                        members[name] = _make_stage_conflict(earlier, number)
                    elif isinstance(record := members[name], ArrayRecord):
                        # As in `build_record`: a rule overrides the comparison. The first copy is used, and the record
                        # is marked as divergent.
                        members[name] = record.replace_metadata(is_divergent=True)
            names = dict.fromkeys(name for plain in stage.other_values.values() for name in plain)
            members = {**{name: merge_common_value(self.files, stage.other_values, name) for name in names}, **members}
        return members

    def find_ties(self) -> tuple[dict[str, str], dict[str, str]]:
        """Find names of tied parameters that are stored under several names.

        The program declares which parameters are tied. Their copies are compared, because a tie may be broken.

        Returns:
            The names with the same tensors as the first name, and the names with other tensors; each with the first
            name.

        Raises:
            CorruptCheckpointError: A file is missing, or contains another tensor.
        """
        stored = {name: copies for _, stage in sorted(self.stages.items()) for name, copies in stage.copies.items()}
        tied: dict[str, str] = {}
        apart: dict[str, str] = {}
        for names in self.hints.aliases.values():
            first, *others = [name for name in names if name in stored] or [""]
            for name in others:
                (tied if self._is_same(stored[first], stored[name]) else apart)[name] = first
        return tied, apart

    def is_same(self, one: TensorCopies, other: TensorCopies) -> bool:
        """Return True if the tensors of two names are stored, and are equal on every rank.

        Raises:
            CorruptCheckpointError: A file contains another tensor.
        """
        return self._is_same(one, other) and all(map(self.files.has_tensor_file, one.values()))

    def _is_same(self, one: TensorCopies, other: TensorCopies) -> bool:
        """Return True if the tensors of two names are equal on every rank, or none of their files was written."""
        if one.keys() != other.keys():
            return False
        for key, a in one.items():
            b = other[key]
            if (a.shape, a.dtype, there := self.files.has_tensor_file(a)) != (
                b.shape,
                b.dtype,
                self.files.has_tensor_file(b),
            ):
                return False
            if there and not self.files.is_same(a, b):
                return False
        return True

    def _build_parameter(
        self, leaf: str, name: str, copies: TensorCopies
    ) -> ArrayRecord | UnreadableArray | MissingTensor:
        """Build the record of a parameter of the model, or its replacement if it is unreadable or was not written.

        Raises:
            CorruptCheckpointError: The file of one of its tensors is missing, while other files of that rank exist.
        """
        first = next(iter(copies.values()))
        lost = [h.file for h in copies.values() if not self.files.has_tensor_file(h)]
        if lost:
            if all(map(self.files.is_left_out, copies.values())):
                return MissingTensor(first)
            raise CorruptCheckpointError("a file is missing", leaf=leaf, file=lost[0], hint=DAMAGED_FILE_HINT)
        sharding = resolve_sharding(name, first.shape, self.mesh, first.is_expert, self.hints.get_hint(name))
        if isinstance(sharding, Sharding):
            sharding = self.files.find_mismatch(name, copies, self.mesh, self.hints.get_hint(name)) or sharding
        if isinstance(sharding, UnreadableArray):
            return add_stored_shape(sharding, copies)
        array = StoredArray(leaf=leaf, copies=copies, mesh=self.mesh, local_shape=first.shape)
        return self.build_record(array, name, sharding)

    def build_record(
        self, array: StoredArray, parameter: str, sharding: Sharding, state_sharding: Sharding | None = None
    ) -> ArrayRecord | UnreadableArray:
        """Build the record of a parameter, or of one of its states.

        Args:
            state_sharding: Sharding of the array, if it is a state with another shape than its parameter.

        Returns:
            The record; an `UnreadableArray` if ranks differ and the sharding is not declared.
        """
        if (joined := self.files.join_parts(array)) is not None:
            return joined
        hint, split = self.hints.get_hint(parameter), sharding if state_sharding is None else state_sharding
        axes, own = (*split.axes, *array.row_axes), False
        # Copies are compared unless the program declared the sharding. The declaration for a parameter does not apply
        # to a state of another shape, which may be sharded differently.
        if not is_declared(array.local_shape, hint) or len(split.axes) < len(sharding.axes):
            alone = hint.is_rank_local and _compute_global_shape(sharding, array) == hint.shape
            choice = choose_copies(self.files, array, axes, self.hints, per_rank=alone)
            if isinstance(choice, UnreadableArray):
                return add_stored_shape(choice, array.copies)
            copies, own = choice
            array = replace(array, copies=copies)
        if split.has_copies and not hint.has_rule:
            compared = assemble_replicated(self.files, array, split)
            return compared if isinstance(compared, ArrayRecord) else add_stored_shape(compared, array.copies)
        parts = assemble_array(self.files, array, split)
        # A rule overrides the comparison, and the first copies are used. A difference is recorded and reported.
        divergent = (
            hint.has_rule
            and not own
            and (has_differing_copies(self.files, array, axes) or parts.find_mismatch(self.files) is not None)
        )
        return (
            parts.record.replace_metadata(is_rank_local=own, is_divergent=divergent)
            if own or divergent
            else parts.record
        )


@dataclass(frozen=True, slots=True)
class MissingTensor:
    """A tensor of a model whose file was never written, because its master weights replace it."""

    tensor: StoredTensor


def _compute_global_shape(sharding: Sharding, array: StoredArray) -> tuple[int, ...] | None:
    """Compute the global shape of local tensors; None if they cannot be shards of an array with this sharding."""
    try:
        return sharding.map_local_shape(array.local_shape, array.mesh, 0).shape
    except ValueError:
        return None


def _make_stage_conflict(one: int, other: int) -> UnreadableArray:
    """Return the placeholder for a name under which two pipeline stages store different tensors."""
    return UnreadableArray(
        problem="pipeline stages hold different arrays under this name, and nothing says which of them is meant",
        expected="the same in all stages, or names that differ",
        found=f"pp {other} differs from pp {one}",
        hint="A weight that stages share has come apart, or each stage numbers its layers from 0. If that of the first "
        "stage is meant, give a rule for it: shardings= (--sharding).",
    )
