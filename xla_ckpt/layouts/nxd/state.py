"""Models of neuronx-distributed's rank files, as one tree with records in place of tensors.

Optimizers are in `xla_ckpt.layouts.nxd.optimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.layouts.nxd.arrays import Copies, as_stored, assembled, declared, record_of_copies, resolve
from xla_ckpt.layouts.nxd.copies import chosen, differ, in_common, mixed_adapters
from xla_ckpt.layouts.nxd.rank_files import At, RankFiles, Scan, StoredTensor
from xla_ckpt.manifest.records import ArrayRecord, UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sharding import Sharding
from xla_ckpt.tree import schema

Trees = Mapping[At, Mapping[Any, Any]]
"""What each rank file holds."""


@dataclass(slots=True)
class Stage:
    """The model of one pipeline stage."""

    copies: dict[str, Copies] = field(default_factory=dict)
    """By name: the tensors of all ranks."""

    plain: dict[At, dict[str, Any]] = field(default_factory=dict)
    """What is no tensor on each rank: a module's extra state."""


def trees(scan: Scan, files: RankFiles, *, dp: int | None = None) -> dict[At, Any]:
    """What the files hold; only those of one dp rank, if one is named."""
    found = {}
    for at, path in sorted(files.paths.items()):
        if dp is None or at.dp == dp:
            found[at] = scan.tree(path, at)
            if not isinstance(found[at], Mapping):
                raise CorruptCheckpointError("a rank file holds no dict", file=path, found=type(found[at]).__name__)
    return found


def stages(models: Trees) -> dict[int, Stage]:
    """The models by pipeline stage.

    Raises:
        CorruptCheckpointError: The ranks of a stage hold different names.
    """
    found: dict[int, Stage] = {}
    for at, tree in models.items():
        stage = found.setdefault(at.pp, Stage())
        fresh = not stage.plain  # the first rank of the stage says which names there are
        plain = stage.plain.setdefault(at, {})
        for name, value in tree.items():
            if not isinstance(value, StoredTensor):
                is_config = name == schema.LORA_CONFIG and isinstance(value, Mapping)
                plain[str(name)] = schema.lora_fields(value) if is_config else value
            elif fresh or name in stage.copies:
                copies: dict[tuple[int, int, int], StoredTensor] = stage.copies.setdefault(str(name), {})  # type: ignore[assignment]
                copies[at.dp, at.ep, at.tp] = value
        if [n for n, v in tree.items() if isinstance(v, StoredTensor)] != list(stage.copies):
            raise CorruptCheckpointError(
                "the ranks of a pipeline stage hold different names",
                leaf=schema.MODEL,
                found=f"(ep {at.ep}, tp {at.tp}, pp {at.pp}) against the first rank of the stage",
            )
    return found


class ScannedState:
    """Builds the parts of one tag."""

    def __init__(self, scan: Scan, wanted: Hints, model: Mapping[int, Stage], mesh: Mesh) -> None:
        self.scan = scan
        self.wanted = wanted
        self.stages = model
        self.mesh = mesh
        """How the ranks of one pipeline stage were arranged that have different parts of the model.

        It has no pp, and as many dp ranks as ep ranks: further dp ranks have copies, which nobody stored.
        """

    def model(self) -> dict[str, Any]:
        """The model by name, with a record or an `UnknownArray` for each tensor."""
        made: dict[str, Any] = {}
        for _, stage in sorted(self.stages.items()):
            for name, copies in stage.copies.items():
                if name not in made:
                    made[name] = self._parameter(schema.weight(name), name, copies)
            names = dict.fromkeys(name for plain in stage.plain.values() for name in plain)
            made = {**{name: in_common(self.scan, stage.plain, name) for name in names}, **made}
        return made

    def ties(self) -> tuple[dict[str, str], dict[str, str]]:
        """Names of shared parameters that are stored under several, with the first of these names.

        The program says which parameters are shared. Their copies are compared: a tie may have come apart.

        Returns:
            The names whose tensors are those of the first name, and the names whose tensors are others.

        Raises:
            CorruptCheckpointError: A file is missing, or holds another tensor.
        """
        stored = {name: copies for _, stage in sorted(self.stages.items()) for name, copies in stage.copies.items()}
        tied: dict[str, str] = {}
        apart: dict[str, str] = {}
        for names in self.wanted.aliases.values():
            first, *others = [name for name in names if name in stored] or [""]
            for name in others:
                (tied if self._same(stored[first], stored[name]) else apart)[name] = first
        return tied, apart

    def same(self, one: Copies, other: Copies) -> bool:
        """Whether the tensors of two names are stored, and are equal on every rank.

        Raises:
            CorruptCheckpointError: A file holds another tensor.
        """
        return self._same(one, other) and not any(map(self._is_missing, one.values()))

    def _same(self, one: Copies, other: Copies) -> bool:
        """Whether the tensors of two names are equal on every rank, or none of their files was written."""
        if one.keys() != other.keys():
            return False
        for key, a in one.items():
            b = other[key]
            if (a.shape, a.dtype, self._is_missing(a)) != (b.shape, b.dtype, self._is_missing(b)):
                return False
            if not self._is_missing(a) and not self.scan.same(a, b):
                return False
        return True

    def _is_missing(self, held: StoredTensor) -> bool:
        return held.at is None and held.file not in self.scan.names

    def _parameter(self, leaf: str, name: str, copies: Copies) -> ArrayRecord | UnknownArray | Missing:
        """What stands for a parameter of the model.

        Raises:
            CorruptCheckpointError: The file of one of its tensors is missing, and others of that rank are there.
        """
        held = next(iter(copies.values()))
        lost = [h.file for h in copies.values() if self._is_missing(h)]
        if lost:
            # A job may leave out all files of its tensors on purpose (avoid_saving_lower_precision_weights): then not
            # even their folder is there.
            if all(h.at is None and h.file.rpartition("/")[0] not in self.scan.folders for h in copies.values()):
                return Missing(held)
            raise CorruptCheckpointError("a file is missing", leaf=leaf, file=lost[0])
        sharding = resolve(name, held.shape, self.mesh, held.expert, self.wanted.hint(name))
        if schema.ADAPTER in name and isinstance(sharding, Sharding):
            sharding = mixed_adapters(self.scan, copies, self.mesh, self.wanted.hint(name)) or sharding
        if isinstance(sharding, UnknownArray):
            return as_stored(sharding, copies)
        return self.record(leaf, name, copies, self.mesh, sharding=sharding, local=held.shape)

    def record(
        self,
        leaf: str,
        name: str,
        copies: Copies,
        mesh: Mesh,
        *,
        sharding: Sharding,
        local: tuple[int, ...],
        state: Sharding | None = None,
        rows: tuple[str, ...] = (),
        dealt: bool = False,
    ) -> ArrayRecord | UnknownArray:
        """The record of a parameter, or of a state of it; unknown if ranks differ and nothing says why.

        Args:
            leaf: Leaf path of the array.
            name: Name of the parameter.
            copies: The tensors of all ranks.
            mesh: How the ranks were arranged that stored them.
            sharding: How the parameter was split.
            local: Shape of the parameter on each rank.
            state: How the state was split, if its shape is not the parameter's.
            rows: Mesh axes over which ZeRO-1 dealt out the rows of the state.
            dealt: Whether each dp rank has a file of its own, as ZeRO-1 writes them.
        """
        if (joined := self.joined(copies, mesh)) is not None:
            return joined
        wish = self.wanted.hint(name)
        own = divergent = False
        split = sharding if state is None else state
        # Copies are compared unless the program has said how the array was split. What it says of a parameter does not
        # count for a state of another shape, which may not be split like the parameter.
        if not declared(local, wish) or len(split.axes) < len(sharding.axes):
            fits = wish.alone and _whole(sharding, local, mesh) == wish.shape
            found = chosen(
                self.scan,
                copies,
                mesh,
                split=(*split.axes, *rows),
                dealt=dealt,
                wanted=self.wanted,
                alone=fits,
            )
            if isinstance(found, UnknownArray):
                return as_stored(found, copies)
            copies, own = found
        whole = local if rows else ()
        if split.copies and not wish.ruled:
            compared = record_of_copies(self.scan, leaf, copies, mesh, split, rows=rows, local=whole)
            return compared if isinstance(compared, ArrayRecord) else as_stored(compared, copies)
        made = assembled(self.scan, leaf, copies, mesh, split, rows=rows, local=whole)
        if wish.ruled and not own:
            # A rule is taken at its word, and the first copies count. That others differ is told, and recorded.
            divergent = differ(self.scan, copies, mesh, split=(*split.axes, *rows), dealt=dealt) or (
                made.different(self.scan) is not None
            )
        return replace(made.record, own=own, divergent=divergent) if own or divergent else made.record

    def joined(self, copies: Copies, mesh: Mesh) -> ArrayRecord | None:  # for derived classes
        """An array whose parts have different sizes, which no split describes; None if there are no such arrays."""
        return None


@dataclass(frozen=True, slots=True)
class Missing:
    """A tensor of a model whose file was never written, because its master weights stand for it."""

    held: StoredTensor


def _whole(sharding: Sharding, local: tuple[int, ...], mesh: Mesh) -> tuple[int, ...] | None:
    """The global shape that local tensors make; None if they cannot be parts of such an array."""
    try:
        return sharding.place(local, mesh, 0).shape
    except ValueError:
        return None
