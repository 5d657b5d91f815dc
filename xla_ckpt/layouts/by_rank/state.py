"""The models in rank files, as one tree with records in place of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.engine.tag_reader import DAMAGED
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.layouts.by_rank.arrays import Copies, RankArray, assembled, record_of_copies, with_stored_shape
from xla_ckpt.layouts.by_rank.copies import chosen_copy, differ, in_common
from xla_ckpt.layouts.by_rank.files import RankFiles
from xla_ckpt.layouts.by_rank.form import StoredTensor
from xla_ckpt.layouts.by_rank.grid import RankAt, RankGrid
from xla_ckpt.layouts.by_rank.splits import declared, resolve
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sharding import Sharding
from xla_ckpt.tree import schema
from xla_ckpt.tree.nested import leaves


@dataclass(slots=True)
class Stage:
    """The model of one pipeline stage."""

    copies: dict[str, Copies] = field(default_factory=dict)
    """By name: the tensors of all ranks."""

    plain: dict[RankAt, dict[str, Any]] = field(default_factory=dict)
    """What is no tensor on each rank: a module's extra state."""


def trees(files: RankFiles, grid: RankGrid, *, dp: int | None = None) -> dict[RankAt, Any]:
    """What the files of a grid hold; only those of one dp rank, if one is named."""
    contents = {}
    for at, path in sorted(grid.paths.items()):
        if dp is None or at.dp == dp:
            contents[at] = files.tree(path, at)
            if not isinstance(contents[at], Mapping):
                raise CorruptCheckpointError("a rank file holds no dict", file=path, found=type(contents[at]).__name__)
    files.look_up(leaf for tree in contents.values() for leaf in leaves(tree) if isinstance(leaf, StoredTensor))
    return contents


def stages(models: Mapping[RankAt, Mapping[Any, Any]]) -> dict[int, Stage]:
    """The models by pipeline stage.

    Raises:
        CorruptCheckpointError: The ranks of a stage hold different names.
    """
    by_stage: dict[int, Stage] = {}
    for at, tree in models.items():
        stage = by_stage.setdefault(at.pp, Stage())
        fresh = not stage.plain  # the first rank of the stage says which names there are
        plain = stage.plain.setdefault(at, {})
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


class ScannedState:
    """Builds the parts of one tag."""

    def __init__(self, files: RankFiles, hints: Hints, model: Mapping[int, Stage], mesh: Mesh) -> None:
        self.files = files
        self.hints = hints
        self.stages = model
        self.mesh = mesh
        """How the ranks of one pipeline stage were arranged that have different parts of the model.

        It has no pp, and as many dp ranks as ep ranks: further dp ranks have copies, which nobody stored.
        """

    def model(self) -> dict[str, Any]:
        """The model by name, with a record or an `UnknownArray` for each tensor."""
        members: dict[str, Any] = {}
        first: dict[str, tuple[int, Copies]] = {}
        for number, stage in sorted(self.stages.items()):
            for name, copies in stage.copies.items():
                earlier, of_earlier = first.setdefault(name, (number, copies))
                if earlier == number:
                    members[name] = self._parameter(schema.weight(name), name, copies)
                elif not self._same(of_earlier, copies):
                    if not self.hints.hint(name).ruled:
                        members[name] = _of_two_stages(earlier, number)
                    elif isinstance(record := members[name], ArrayRecord):
                        # As in `record`: a rule is taken at its word, the first counts, and that others differ is told.
                        members[name] = record.changed(divergent=True)
            names = dict.fromkeys(name for plain in stage.plain.values() for name in plain)
            members = {**{name: in_common(self.files, stage.plain, name) for name in names}, **members}
        return members

    def ties(self) -> tuple[dict[str, str], dict[str, str]]:
        """Names of tied parameters that are stored under several, with the first of these names.

        The program says which parameters are tied. Their copies are compared: a tie may have come apart.

        Returns:
            The names whose tensors are those of the first name, and the names whose tensors are others.

        Raises:
            CorruptCheckpointError: A file is missing, or holds another tensor.
        """
        stored = {name: copies for _, stage in sorted(self.stages.items()) for name, copies in stage.copies.items()}
        tied: dict[str, str] = {}
        apart: dict[str, str] = {}
        for names in self.hints.aliases.values():
            first, *others = [name for name in names if name in stored] or [""]
            for name in others:
                (tied if self._same(stored[first], stored[name]) else apart)[name] = first
        return tied, apart

    def same(self, one: Copies, other: Copies) -> bool:
        """Whether the tensors of two names are stored, and are equal on every rank.

        Raises:
            CorruptCheckpointError: A file holds another tensor.
        """
        return self._same(one, other) and all(map(self.files.has, one.values()))

    def _same(self, one: Copies, other: Copies) -> bool:
        """Whether the tensors of two names are equal on every rank, or none of their files was written."""
        if one.keys() != other.keys():
            return False
        for key, a in one.items():
            b = other[key]
            if (a.shape, a.dtype, there := self.files.has(a)) != (b.shape, b.dtype, self.files.has(b)):
                return False
            if there and not self.files.same(a, b):
                return False
        return True

    def _parameter(self, leaf: str, name: str, copies: Copies) -> ArrayRecord | UnknownArray | Missing:
        """What stands for a parameter of the model.

        Raises:
            CorruptCheckpointError: The file of one of its tensors is missing, and others of that rank are there.
        """
        first = next(iter(copies.values()))
        lost = [h.file for h in copies.values() if not self.files.has(h)]
        if lost:
            if all(map(self.files.left_out, copies.values())):
                return Missing(first)
            raise CorruptCheckpointError("a file is missing", leaf=leaf, file=lost[0], hint=DAMAGED)
        sharding = resolve(name, first.shape, self.mesh, first.expert, self.hints.hint(name))
        if isinstance(sharding, Sharding):
            sharding = self.files.misfit(name, copies, self.mesh, self.hints.hint(name)) or sharding
        if isinstance(sharding, UnknownArray):
            return with_stored_shape(sharding, copies)
        array = RankArray(leaf=leaf, copies=copies, mesh=self.mesh, local=first.shape)
        return self.record(array, name, sharding)

    def record(
        self, array: RankArray, parameter: str, sharding: Sharding, of_state: Sharding | None = None
    ) -> ArrayRecord | UnknownArray:
        """The record of a parameter, or of a state of it; unknown if ranks differ and nothing says why.

        Args:
            of_state: How the array was split, if it is a state of another shape than its parameter.
        """
        if (joined := self.files.joined(array)) is not None:
            return joined
        hint, split = self.hints.hint(parameter), sharding if of_state is None else of_state
        axes, own = (*split.axes, *array.rows), False
        # Copies are compared unless the program has said how the array was split. What it says of a parameter does not
        # count for a state of another shape, which may not be split like the parameter.
        if not declared(array.local, hint) or len(split.axes) < len(sharding.axes):
            alone = hint.alone and _global_shape(sharding, array) == hint.shape
            choice = chosen_copy(self.files, array, axes, self.hints, alone=alone)
            if isinstance(choice, UnknownArray):
                return with_stored_shape(choice, array.copies)
            copies, own = choice
            array = replace(array, copies=copies)
        if split.copies and not hint.ruled:
            compared = record_of_copies(self.files, array, split)
            return compared if isinstance(compared, ArrayRecord) else with_stored_shape(compared, array.copies)
        parts = assembled(self.files, array, split)
        # A rule is taken at its word, and the first copies count. That others differ is told, and recorded.
        divergent = (
            hint.ruled and not own and (differ(self.files, array, axes) or parts.different(self.files) is not None)
        )
        return parts.record.changed(own=own, divergent=divergent) if own or divergent else parts.record


@dataclass(frozen=True, slots=True)
class Missing:
    """A tensor of a model whose file was never written, because its master weights stand for it."""

    tensor: StoredTensor


def _global_shape(sharding: Sharding, array: RankArray) -> tuple[int, ...] | None:
    """The shape that local tensors make together; None if they cannot be parts of an array that is split like that."""
    try:
        return sharding.place(array.local, array.mesh, 0).shape
    except ValueError:
        return None


def _of_two_stages(one: int, other: int) -> UnknownArray:
    """What stands for a name under which two pipeline stages hold other tensors: one of them would be lost."""
    return UnknownArray(
        problem="pipeline stages hold different arrays under this name, and nothing says which of them is meant",
        expected="the same in all stages, or names that differ",
        found=f"pp {other} differs from pp {one}",
        hint="A weight that stages share has come apart, or each stage numbers its layers from 0. If that of the first "
        "stage is meant, give a rule for it: shardings= (--sharding).",
    )
