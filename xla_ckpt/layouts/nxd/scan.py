"""Opening a tag of neuronx-distributed: scanned into a `Manifest`, without a byte of its tensors being read."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from xla_ckpt.engine.tag_reader import ForeignObject, TagReader
from xla_ckpt.errors import (
    CorruptCheckpointError,
    UnsupportedStateError,
    UntrustedObjectError,
    naming,
    storage_errors,
)
from xla_ckpt.layouts.nxd.optimizer import optimizer_of
from xla_ckpt.layouts.nxd.rank_files import At, RankFiles, Scan, StoredTensor, listed
from xla_ckpt.layouts.nxd.state import Missing, ScannedState, Stage, Trees, stages, trees
from xla_ckpt.layouts.nxd.tags import NxdTag
from xla_ckpt.layouts.one_file.objects import StoredObject
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt, read
from xla_ckpt.manifest.records import ArrayRecord, Head, Manifest, Shard, UnknownArray, array_record
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.storage.base import Directory, Store, read_whole
from xla_ckpt.tree import schema
from xla_ckpt.tree.codec import ValueCodec
from xla_ckpt.tree.flatten import flatten
from xla_ckpt.tree.nested import leaves

logger = logging.getLogger(__name__)

_ONLY_MASTERS = UnknownArray(
    problem="this weight was not saved; at most its master weight was, which the optimizer numbers",
    hint="Load with model= and optimizer= together.",
)
_NAMELESS = UnknownArray(
    problem="the stored optimizers of the pipeline stages number their parameters, and nothing says what the numbers "
    "mean",
    hint="Load with model= and optimizer=: their names and groups say so.",
)


class Around:
    """What lies around the files of the ranks, and is known of the arrays in them."""

    def hints(self, files: Scan, model: Mapping[int, Stage], mesh: Mesh, wanted: Hints) -> Hints:
        """What is known of the arrays: here only what the program says that wants them.

        Args:
            files: The tag's directory.
            model: What the ranks hold of the model, by pipeline stage.
            mesh: How the ranks were arranged that wrote it.
            wanted: What the program says.

        Raises:
            CheckpointError: What the tag says of them is damaged, or is not about this tag.
        """
        return wanted

    def parts(self, files: Scan) -> dict[str, Any]:
        """The parts of the state that have a file of their own.

        Raises:
            CorruptCheckpointError: One of them is damaged.
        """
        return {
            part: plain_file(files, file)
            for part in (schema.SCHEDULER, schema.USER_CONTENT)
            if (file := f"{files.below}{part}.pt") in files.names
        }

    def of_model(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Plain values of the model that are in no rank file.

        Args:
            model: What is in the rank files.

        Raises:
            CorruptCheckpointError: They are damaged.
        """
        return {}


def plain_file(files: Scan, file: str) -> Any:
    """What a file of plain values holds; a `Refused` if it names classes of the program.

    Raises:
        CorruptCheckpointError: It is damaged.
    """
    try:
        return read(files.directory, file)
    except UntrustedObjectError as error:
        return Refused(files.directory, file, error)


AS_NXD = Around()
"""What neuronx-distributed writes around its rank files."""


def open_scanned(store: Store, found: NxdTag, hints: Hints, codec: ValueCodec, around: Around = AS_NXD) -> TagReader:
    """A reader of a tag, for the restore engine.

    Raises:
        CorruptCheckpointError: Files are missing, damaged, or do not add up.
        UntrustedObjectError: A file names a class that is neither a tensor nor a plain value.
        IncompatibleCheckpointError: The stored optimizer is not the one that is wanted.
    """
    if not found.complete:
        logger.warning("tag %s has no done marker: its save may not have ended", found.tag)
    with storage_errors("opening a tag", path=store.path, tag=found.tag):
        directory = store.open(found.tag)
    try:
        with naming(path=store.path, tag=found.tag), storage_errors("reading a tag"):
            manifest, objects = scan(Scan(directory, found.below), found, hints, codec, around)
            return TagReader(directory, store.path, found.tag, manifest, objects)
    except BaseException:
        directory.close()  # nobody else will: it would count as being read for as long as the program runs
        raise


class Refused:
    """Stands for user content, or a scheduler, whose pickle names classes that are not read without trust."""

    def __init__(self, directory: Directory, file: str, error: UntrustedObjectError) -> None:
        self.directory = directory
        self.file = file
        self.error = error

    def load(self, leaf: str, *, trust: bool) -> Any:
        """The object in the file.

        Raises:
            UntrustedObjectError: `trust` is False. Nothing of it has run.
        """
        if not trust:
            self.error.hint = "Pass trust_pickle=True if you trust whoever wrote this file."
            raise self.error.at(leaf=leaf)
        data = read_whole(self.directory, self.file)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def scan(
    files: Scan, found: NxdTag, wanted: Hints, codec: ValueCodec, around: Around = AS_NXD
) -> tuple[Manifest, list[ForeignObject]]:
    """The manifest of a tag, and the objects that its skeleton numbers."""
    content = _legacy(files, wanted) if found.legacy else _current(files, wanted, around)
    return manifest_of(files, found.tag, content, wanted, codec)


def manifest_of(
    files: Scan, tag: str, content: Content, wanted: Hints, codec: ValueCodec
) -> tuple[Manifest, list[ForeignObject]]:
    """The manifest of what the files of a tag hold, and the objects that its skeleton numbers.

    Raises:
        UnsupportedStateError: A value is neither array nor plain.
    """
    flat = flatten({part: _plain(files, value) for part, value in content.parts.items()}, _kind, codec)
    objects: list[ForeignObject] = [v for _, v in flat.objects if isinstance(v, Refused | StoredObject)]
    stray = next(((leaf, v) for leaf, v in flat.objects if not isinstance(v, Refused | StoredObject)), None)
    if stray is not None:
        raise UnsupportedStateError(f"a {type(stray[1]).__name__} is neither array nor plain value", leaf=stray[0])
    known = {leaf: v for leaf, v in flat.arrays.items() if isinstance(v, ArrayRecord)}
    unknown = {leaf: v for leaf, v in flat.arrays.items() if isinstance(v, UnknownArray)}
    _report(tag, [leaf for leaf, record in known.items() if record.own], content.apart, wanted)
    aliases = _shared(known)
    head = Head(tag=tag, sequence=0, pinned=False, created="")
    manifest = Manifest(
        head=head,
        skeleton=flat.skeleton,
        arrays={leaf: record for leaf, record in known.items() if leaf not in aliases},
        aliases=aliases,
        files=tuple(files.files),
        mesh=str(content.mesh),
        world=content.mesh.size,
        unknown=unknown,
        left_out=content.left_out,
    )
    return manifest, objects


def _shared(known: Mapping[str, ArrayRecord]) -> dict[str, str]:
    """Leaf paths of the model that have the same record as one before them, with that one."""
    first: dict[int, str] = {}
    model = {leaf: record for leaf, record in known.items() if schema.member_of(leaf) == schema.MODEL}
    return {leaf: same for leaf, record in model.items() if (same := first.setdefault(id(record), leaf)) != leaf}


def _report(tag: str, own: list[str], apart: Mapping[str, str], wanted: Hints) -> None:
    """Say once for each pipeline stage which arrays each rank gets its own of, and which ties have come apart."""
    at = wanted.mesh.coordinates(wanted.rank)
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
            listed(own),
        )


def _kind(value: Any) -> str | None:
    return "torch" if isinstance(value, ArrayRecord | UnknownArray) else None


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


def _current(files: Scan, wanted: Hints, around: Around) -> Content:
    """A tag of the present layout."""
    if wanted.optimizer:
        files.check_optimizer()
    grids = files.rank_files()
    model = stages(trees(files, grids["model"], dp=0)) if "model" in grids else {}
    wanted = around.hints(files, model, _mesh(grids), wanted)
    content = _content(files, wanted, grids, model, lambda: trees(files, grids["optim"]))
    if model:
        content.parts[schema.MODEL] |= around.of_model(content.parts[schema.MODEL])
    content.parts.update(around.parts(files))
    return content


def _legacy(files: Scan, wanted: Hints) -> Content:
    """A tag of the older layout, in which a rank has one file for all parts."""
    grid = files.legacy_files()
    held = trees(files, grid)
    first = held[min(held)]
    if "model" not in first and all(isinstance(v, StoredTensor) for v in first.values()):
        # Nothing but tensors: the program saved a bare state dict of its model.
        held = {at: {"model": tree} for at, tree in held.items()}
        first = held[min(held)]
    # All dp ranks have the same model, and the same optimizer if ZeRO-1 did not deal it out.
    models = {at: tree["model"] for at, tree in held.items() if at.dp == 0 and isinstance(tree.get("model"), Mapping)}
    optim = {at: tree["optimizer"] for at, tree in held.items() if isinstance(tree.get("optimizer"), Mapping)}
    if optim and "base_state" not in optim[min(optim)]:
        optim = {at: tree for at, tree in optim.items() if at.dp == 0}
    grids = {"model": grid}
    if optim:
        grids["optim"] = grid
    elif wanted.optimizer and (beside := files.legacy_optimizer()) is not None:
        optim = trees(files, beside)
        grids["optim"] = beside
    content = _content(files, wanted, grids, stages(models), lambda: optim)
    rest = {k: v for k, v in first.items() if k not in ("model", "optimizer")}
    if "scheduler" in rest:
        content.parts[schema.SCHEDULER] = rest.pop("scheduler")
    if rest:
        content.parts[schema.USER_CONTENT] = rest
    return content


def _mesh(grids: Mapping[str, RankFiles]) -> Mesh:
    """How the ranks were arranged, as far as the files show it."""
    sizes = [g.sizes for g in grids.values()] or [At(pp=1, dp=1, ep=1, tp=1)]
    pp, dp, ep, tp = (max(getattr(s, axis) for s in sizes) for axis in ("pp", "dp", "ep", "tp"))
    # Without ZeRO-1 there are no files for dp ranks but the first: there were at least as many as ep ranks.
    return Mesh(pp=pp, dp=dp if dp % ep == 0 else ep, ep=ep, tp=tp)


def _content(
    files: Scan, wanted: Hints, grids: Mapping[str, RankFiles], model: Mapping[int, Stage], optim: Callable[[], Trees]
) -> Content:
    """Model and optimizer, with a record or an `UnknownArray` for each tensor."""
    mesh = _mesh(grids)
    state = ScannedState(files, wanted, model, Mesh(dp=mesh.ep, ep=mesh.ep, tp=mesh.tp))
    return content_of(state, grids["optim"].sizes if "optim" in grids else None, optim, mesh)


def content_of(state: ScannedState, optimizers: At | None, optim: Callable[[], Trees], mesh: Mesh) -> Content:
    """Model and optimizer, with a record or an `UnknownArray` for each tensor.

    Args:
        state: The models.
        optimizers: Number of optimizer files along each axis; None if there are none.
        optim: What these files hold. It is not called if the optimizer is not wanted, or has no names.
        mesh: How the ranks were arranged that wrote all of them.

    Raises:
        CorruptCheckpointError: Files are missing, or do not fit together.
        IncompatibleCheckpointError: The stored optimizer is not the one that is wanted.
    """
    wanted, model = state.wanted, state.stages
    parts: dict[str, Any] = {}
    if model:
        parts[schema.MODEL] = state.model()
    if optimizers is not None:
        if not wanted.optimizer:
            parts[schema.OPTIMIZER] = UnknownArray(problem="the optimizer was not asked for")
        elif wanted.groups is None and not wanted.sequence and optimizers.pp > 1:
            parts[schema.OPTIMIZER] = _NAMELESS
        else:
            parts[schema.OPTIMIZER] = optimizer_of(state, optim(), optimizers.dp)
    optimizer = parts.get(schema.OPTIMIZER)
    masters = optimizer.get(schema.MASTER, {}) if isinstance(optimizer, dict) else {}
    weights: dict[str, Any] = {}
    apart: dict[str, str] = {}
    if model:
        weights = {name: _weights(name, stored, masters, wanted) for name, stored in parts[schema.MODEL].items()}
        tied, apart = state.ties()
        weights |= {name: weights[first] for name, first in tied.items()}  # one object: this is how `scan` knows them
        parts[schema.MODEL] = {name: value for name, value in weights.items() if value is not None}
    left_out = tuple(schema.weight(name) for name, value in weights.items() if value is None)
    return Content(parts=parts, mesh=mesh, left_out=left_out, apart=apart)


def _weights(name: str, stored: Any, masters: Mapping[str, Any], wanted: Hints) -> Any:
    """What a parameter is loaded from: as a rule its own array, else its master weights. None leaves it out.

    Master weights are taken if nothing else is stored, or if exactly their type is wanted.
    """
    master = masters.get(name)
    if isinstance(stored, Missing):
        if isinstance(master, ArrayRecord):
            return replace(master, stands_for=stored.held.dtype)
        if not wanted.optimizer or wanted.groups is None:
            return _ONLY_MASTERS
        if not masters:
            raise CorruptCheckpointError(
                "the files of the tensors are missing, and there are no master weights to take their place",
                leaf=schema.weight(name),
                file=stored.held.file,
            )
        return master
    if isinstance(stored, ArrayRecord) and isinstance(master, ArrayRecord) and stored.shape == master.shape:
        asked = wanted.hint(name).dtype
        if asked == master.dtype.name and asked != stored.dtype.name:
            return master
    return stored


def _plain(files: Scan, value: Any) -> Any:
    """A value that belongs to no rank in particular, with a record for each tensor: all ranks have those whole.

    Mappings without tensors stay as they are, with their classes.
    """
    if isinstance(value, TensorAt):
        value = StoredTensor(dtype=value.dtype, shape=value.shape, expert=None, file=value.file, at=value)
    if isinstance(value, StoredTensor):
        at = files.place(value)
        box = Box.whole(at.shape)
        return array_record(at.dtype, at.shape, [Shard(box, files.number(at.file), at.offset)])
    if isinstance(value, Mapping) and any(isinstance(leaf, TensorAt | StoredTensor) for leaf in leaves(value)):
        return {k: _plain(files, v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(files, v) for v in value)
    return value
