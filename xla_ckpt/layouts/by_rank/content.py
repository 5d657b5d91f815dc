"""What the rank files of a tag hold together: a model, an optimizer, and their manifest. No tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, UntrustedObjectError
from xla_ckpt.layouts.by_rank.files import RankFiles, stored_leaf
from xla_ckpt.layouts.by_rank.form import RankOptimizer, StoredTensor
from xla_ckpt.layouts.by_rank.grid import RankAt, RankGrid, largest_of, listed_names
from xla_ckpt.layouts.by_rank.optimizer import NAMELESS, optimizer_of
from xla_ckpt.layouts.by_rank.state import Missing, ScannedState, Stage
from xla_ckpt.layouts.scanned import flattened, scanned_manifest
from xla_ckpt.layouts.torch_save.strided import record_at
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt
from xla_ckpt.layouts.untrusted import UntrustedObject, whole_file_on_trust
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import Manifest, UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.tree import schema
from xla_ckpt.tree.nested import Keys, leaves, replaced_leaves

logger = get_logger(__name__)

_ONLY_MASTERS = UnknownArray(
    problem="this weight was not saved; at most its master weight was, which the optimizer numbers",
    hint="Give both: model= and optimizer= (--like).",
)


def plain_file(files: RankFiles, file: str) -> Any:
    """What a file of plain values holds; an `UntrustedObject` if it names classes of the program.

    Raises:
        CorruptCheckpointError: It is damaged.
    """
    try:
        return files.read(file)
    except UntrustedObjectError as error:
        return whole_file_on_trust(file, error.problem, lambda: read_whole(files.directory, file))


def manifest_of(files: RankFiles, tag: str, content: Content, hints: Hints) -> tuple[Manifest, list[UntrustedObject]]:
    """The manifest of what the files of a tag hold, and the objects that its skeleton numbers.

    Raises:
        UnsupportedStateError: A value is neither array nor plain.
    """
    flat = flattened({part: _plain(files, value) for part, value in content.parts.items()})
    own = [leaf for leaf, record in flat.arrays.items() if isinstance(record, ArrayRecord) and record.own]
    _report(tag, own, content.apart, hints)
    mesh = content.mesh
    return scanned_manifest(tag, flat, files.records, mesh=str(mesh), world=mesh.size, left_out=content.left_out)


def _report(tag: str, own: list[str], apart: Mapping[str, str], hints: Hints) -> None:
    """Say once for each pipeline stage which arrays each rank gets its own of, and which ties have come apart."""
    at = hints.mesh.coordinates(hints.rank)
    if any(at[axis] for axis in ("dp", "cp", "tp")):
        return
    for name, first in apart.items():
        logger.warning(
            "tag %s: %s and %s are one parameter of the model, and are stored with different values: the one that is "
            "loaded last counts",
            tag,
            schema.weight(first),
            schema.weight(name),
        )
    if own:
        logger.warning(
            "tag %s: the ranks hold different tensors, and nothing says how they were split; each rank gets its own. "
            "They are parts of arrays, or copies that have drifted apart: %s",
            tag,
            listed_names(own),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a tag holds."""

    parts: dict[str, Any]
    """Members of the state, with a record or an `UnknownArray` for each tensor."""

    mesh: Mesh
    """How the ranks were arranged that wrote it, as far as the files show it."""

    left_out: tuple[str, ...]
    """Leaf paths of tensors of the model that were not written, and that nothing stands for."""

    apart: Mapping[str, str]
    """Names of the model that should be tied to another one, with that one, and that hold other values."""


def mesh_of(grids: Iterable[RankGrid]) -> Mesh:
    """How the ranks were arranged, as far as their files show it."""
    size = largest_of(grids)
    # Without ZeRO-1 there are no files for dp ranks but the first: there were at least as many as ep ranks.
    return Mesh(pp=size.pp, dp=size.dp if size.dp % size.ep == 0 else size.ep, ep=size.ep, tp=size.tp)


def content_of(
    files: RankFiles,
    wanted: Hints,
    model: Mapping[int, Stage],
    optimizers: RankAt | None,
    optim: Callable[[], Mapping[RankAt, RankOptimizer]],
    mesh: Mesh,
) -> Content:
    """Model and optimizer, with a record or an `UnknownArray` for each tensor.

    Args:
        model: What the ranks hold of the model, by pipeline stage.
        optimizers: Number of optimizer files along each axis; None if there are none.
        optim: What these files hold. It is not called if the optimizer is not wanted, or has no names.
        mesh: How the ranks were arranged that wrote all of them.

    Raises:
        CorruptCheckpointError: Files are missing, or do not fit together.
        IncompatibleCheckpointError: The stored optimizer is not the one that is wanted.
    """
    state = ScannedState(files, wanted, model, Mesh(dp=mesh.ep, ep=mesh.ep, tp=mesh.tp))
    parts: dict[str, Any] = {}
    if model:
        parts[schema.MODEL] = state.model()
    if optimizers is not None:
        if not wanted.optimizer:
            parts[schema.OPTIMIZER] = UnknownArray(problem="the optimizer was not asked for")
        elif wanted.groups is None and not wanted.sequence and optimizers.pp > 1:
            parts[schema.OPTIMIZER] = NAMELESS
        else:
            parts[schema.OPTIMIZER] = optimizer_of(state, optim(), optimizers.dp)
    optimizer = parts.get(schema.OPTIMIZER)
    masters = optimizer.get(schema.MASTER, {}) if isinstance(optimizer, dict) else {}
    weights: dict[str, Any] = {}
    apart: dict[str, str] = {}
    if model:
        weights = {name: _weights(name, stored, masters, wanted) for name, stored in parts[schema.MODEL].items()}
        tied, apart = state.ties()
        # One object: that is how `scanned_manifest` knows the names of one array.
        weights |= {name: weights[first] for name, first in tied.items()}
        parts[schema.MODEL] = {name: value for name, value in weights.items() if value is not None}
    left_out = tuple(schema.weight(name) for name, value in weights.items() if value is None)
    return Content(parts=parts, mesh=mesh, left_out=left_out, apart=apart)


def _weights(name: str, stored: Any, masters: Mapping[str, Any], hints: Hints) -> Any:
    """What a parameter is loaded from: its own array, or its master weights if that was not saved.

    None leaves it out.
    """
    if not isinstance(stored, Missing):
        return stored
    master = masters.get(name)
    if isinstance(master, ArrayRecord):
        return master.changed(stands_for=stored.tensor.dtype)
    if not hints.optimizer or hints.groups is None:
        return _ONLY_MASTERS
    if not masters:
        raise CorruptCheckpointError(
            "the files of the tensors are missing, and there are no master weights to take their place",
            leaf=schema.weight(name),
            file=stored.tensor.file,
        )
    return master


def _plain(files: RankFiles, value: Any) -> Any:
    """A value that belongs to no rank in particular, with a record for each tensor: all ranks have those whole.

    Mappings without tensors stay as they are, with their classes.
    """

    def recorded(keys: Keys, leaf: Any) -> Any:
        leaf = stored_leaf(keys, leaf)
        if not isinstance(leaf, StoredTensor):
            return leaf
        at = files.place(leaf)
        return record_at(at, files.number(at.file))

    return replaced_leaves(value, recorded, is_leaf=lambda v: isinstance(v, Mapping) and not _has_tensors(v))


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, TensorAt | StoredTensor) for leaf in leaves(value))
