"""What one rank writes in neuronx-distributed's layouts: which files, with which of its tensors in them.

A rank file ``dp_rank_00_tp_rank_01_pp_rank_00.pt`` holds the state of one rank as a dict, with its own part of each
tensor: ranks that differ along dp (and cp) only have one in common. In the layout of torch.save (`Layout` without
xser) the first of them writes it; in that of torch_xla's `serialization.save` each tensor lies in a file of its own,
and they share the work. Every rank decides its part alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.files.torch_file import TorchFile
from xla_ckpt.layouts.torch_save.pickle_writer import InFile, dumps
from xla_ckpt.layouts.torch_save.restricted_pickle import Reference
from xla_ckpt.plan.save_plan import Entry, FilePlan, RegionSource
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import Piece
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.ranges import runs
from xla_ckpt.sharding.sharding import position
from xla_ckpt.tree import schema

PARTS = (schema.MODEL, schema.OPTIMIZER, schema.SCHEDULER, schema.USER_CONTENT)
"""Members of a state that these layouts have a place for."""

_SHARING = ("edp", "cp")
"""Mesh axes along which ranks have a rank file in common."""


@dataclass(frozen=True, slots=True)
class RankTensor:
    """One rank's part of an array, as it has it in memory."""

    leaf: str
    dtype: DType
    shape: tuple[int, ...]
    """Of the tensor itself, padding included."""

    pieces: tuple[Piece, ...]
    """Which elements of the global array it consists of."""

    alike: tuple[str, ...]
    """Mesh axes along which ranks hold the same."""

    expert: bool = False
    """Whether it belongs to an expert, which only some ranks have."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return Box.whole(self.shape).size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank, with a `LeafAt` for each array."""

    parts: Mapping[str, Any]
    tensors: Mapping[str, RankTensor]
    """By the leaf path at which an array stands; names of the same array have the same tensor."""

    zero1: bool = False
    """Whether the rows of the optimizer's states are dealt out over dp."""

    by_name: bool = False
    """Whether the optimizer's state is kept by parameter name; else it is stored as it is."""

    shapes: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    """Local shape of each parameter of the optimizer, by name."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Plans the files of one rank."""

    mesh: Mesh
    rank: int
    xser: bool

    def files(self, state: RankState) -> tuple[FilePlan, ...]:
        """The files that this rank writes.

        Raises:
            UnsupportedStateError: Something in its state cannot be pickled.
        """
        made: list[FilePlan] = []
        if schema.MODEL in state.parts:
            tree = state.parts[schema.MODEL]
            made += self._rank_file(f"model/{self._name(0)}", state, tree, schema.MODEL, _SHARING)
        if schema.OPTIMIZER in state.parts:
            tree = numbered(state) if state.by_name else state.parts[schema.OPTIMIZER]
            dp, sharing = (self._at["dp"], ("cp",)) if state.zero1 else (0, _SHARING)
            made += self._rank_file(f"optim/{self._name(dp, state.zero1)}", state, tree, schema.OPTIMIZER, sharing)
        for part in (schema.SCHEDULER, schema.USER_CONTENT) if self.rank == 0 else ():
            if part in state.parts:
                made.append(self._whole(f"{part}.pt", state, state.parts[part], part, tuple(self.mesh.sizes)))
        return tuple(made)

    @property
    def _at(self) -> dict[str, int]:
        return self.mesh.coordinates(self.rank)

    def _name(self, dp: int, zero1: bool = False) -> str:
        at = self._at
        ep = f"_ep_rank_{at['ep']:02d}" if self.mesh.ep > 1 and not zero1 else ""
        return f"dp_rank_{dp:02d}{ep}_tp_rank_{at['tp']:02d}_pp_rank_{at['pp']:02d}.pt"

    def _rank_file(self, path: str, state: RankState, tree: Any, part: str, sharing: Sequence[str]) -> list[FilePlan]:
        mine = position(sharing, self.mesh, self.rank)
        if not self.xser:
            return [] if mine else [self._whole(path, state, _plain(tree), part, sharing)]
        tensors: list[tuple[str, RankTensor]] = []

        def reference(path: str) -> Reference:
            made = Reference()
            made.tid = len(tensors)
            tensors.append((path, state.tensors[path]))
            return made

        pickled = dumps(_plain(tree), part, reference)
        files = []
        ranks = prod(self.mesh.sizes[axis] for axis in sharing)
        for tid, writer in enumerate(_dealt([t.nbytes for _, t in tensors], ranks)):
            leaf, tensor = tensors[tid]
            # What is no expert's lies with the expert-parallel rank 0 alone: that is where readers look for it.
            if writer == mine and (self._at["ep"] == 0 or tensor.expert):
                name = f"tensor_{tid}"
                lengths, sources, entries = self._laid_out([(leaf, tensor)], sharing)
                codec = TorchFile(name, dumps(InFile(0, tensor.dtype, tensor.shape), leaf), lengths)
                files.append(FilePlan(f"{path}.tensors/{name}.pt", codec, sources, entries))
        if mine == 0:
            info = {tid: _info(tensor) for tid, (_, tensor) in enumerate(tensors)}
            files.append(FilePlan(path, TorchFile(_stem(path), pickled)))
            files.append(FilePlan(f"{path}.info.pt", TorchFile(_stem(f"{path}.info.pt"), dumps(info, part))))
        return files

    def _whole(self, path: str, state: RankState, tree: Any, part: str, sharing: Sequence[str]) -> FilePlan:
        """A file that holds its tensors itself."""
        tensors: list[tuple[str, RankTensor]] = []

        def in_file(path: str) -> InFile:
            tensor = state.tensors[path]
            tensors.append((path, tensor))
            return InFile(len(tensors) - 1, tensor.dtype, tensor.shape)

        pickled = dumps(tree, part, in_file)
        lengths, sources, entries = self._laid_out(tensors, sharing)
        return FilePlan(path, TorchFile(_stem(path), pickled, lengths), sources, entries)

    def _laid_out(
        self, tensors: Sequence[tuple[str, RankTensor]], sharing: Sequence[str]
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[RegionSource, ...], tuple[Entry, ...]]:
        """(bytes of the regions of each storage, sources of all regions, entries of the manifest)."""
        lengths: list[tuple[int, ...]] = []
        sources: list[RegionSource] = []
        entries: list[Entry] = []
        for path, tensor in tensors:
            first = len(sources)
            cuts, frames = _regions(tensor)
            found = path == tensor.leaf
            found &= all(self._at[axis] == 0 for axis in tensor.alike if axis not in sharing)
            lengths.append(tuple(b - a for a, b in pairwise(cuts)))
            sources += [RegionSource(tensor.leaf, 0, a, b - a) for a, b in pairwise(cuts)]
            region = {offset: first + i for i, offset in enumerate(cuts)}
            entries += [Entry(tensor.leaf, p.box, region[at], frame, copy=not found) for p, frame, at in frames]
        return tuple(lengths), tuple(sources), tuple(entries)


def _regions(tensor: RankTensor) -> tuple[list[int], list[tuple[Piece, Box | None, int]]]:
    """Where a tensor's bytes are cut into regions, and (piece, its frame, offset of its region) for each piece.

    A piece that is one run of bytes is a region of its own, so that a reader verifies no more than it reads.
    """
    whole, itemsize = Box.whole(tensor.shape), tensor.dtype.itemsize
    pieces = [p for p in tensor.pieces if p.box.size]
    places = [runs(p.local, whole, itemsize) for p in pieces]
    if all(where.contiguous for where in places):
        cuts = {0, tensor.nbytes} | {w.offset for w in places} | {w.offset + w.nbytes for w in places}
        return sorted(cuts), [(p, None, w.offset) for p, w in zip(pieces, places, strict=True)]
    return [0, tensor.nbytes], [(p, _frame(p, tensor.shape), 0) for p in pieces]


def _frame(piece: Piece, shape: tuple[int, ...]) -> Box:
    start = tuple(b - a for a, b in zip(piece.local.start, piece.box.start, strict=True))
    return Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))


def _dealt(sizes: Sequence[int], ranks: int) -> list[int]:
    """Who writes what: large ones first, each to whoever has the least so far."""
    load = [0] * ranks
    writer = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        writer[i] = load.index(min(load))
        load[writer[i]] += max(sizes[i], 1)
    return writer


def _info(tensor: RankTensor) -> dict[str, Any]:
    """What neuronx-distributed's loader wants to know of a tensor before it opens its file."""
    return {
        "dtype": getattr(torch, tensor.dtype.name),
        "shape": torch.Size(tensor.shape),
        "expert_model_parallel": tensor.expert,
    }


def with_experts(tensors: Mapping[str, RankTensor], mesh: Mesh) -> dict[str, RankTensor]:
    """The same, with those marked that are split over ep, and all states of such parameters."""
    if mesh.ep == 1:
        return dict(tensors)

    experts = {schema.parameter_of(path) or path for path, t in tensors.items() if "ep" not in t.alike}
    return {path: replace(t, expert=(schema.parameter_of(path) or path) in experts) for path, t in tensors.items()}


def _stem(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".pt")


def numbered(state: RankState) -> dict[str, Any]:
    """The optimizer's state as neuronx-distributed keeps it: by the running number of each parameter."""
    tree = state.parts[schema.OPTIMIZER]
    names = [name for group in tree[schema.GROUPS] for name in group[schema.PARAMS]]
    number = {name: i for i, name in enumerate(names)}

    def by_number(members: Mapping[Any, Any]) -> dict[Any, Any]:
        ordered = sorted(members.items(), key=lambda kv: number.get(kv[0], len(number)))
        return {number.get(name, name): value for name, value in ordered}

    groups = [
        {**{k: v for k, v in g.items() if k != schema.PARAMS}, "params": [number[n] for n in g[schema.PARAMS]]}
        for g in tree[schema.GROUPS]
    ]
    others = {k: v for k, v in tree.items() if k not in schema.OF_OPTIMIZER}
    if not state.zero1:
        return {"state": by_number(tree[schema.STATE]), "param_groups": groups, **others}
    made = {
        "state": {},
        "param_groups": groups,
        "base_state": by_number(tree[schema.STATE]),
        "shape_info": {i: list(state.shapes[name]) for name, i in number.items()},
    }
    if schema.MASTER in tree:
        made["sharded_master_weights"] = by_number(tree[schema.MASTER])
    return {**made, **others}


def _plain(value: Any) -> Any:
    """The same tree in the containers that neuronx-distributed's rank files have: dicts and lists."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def check_fits(state: RankState, mesh: Mesh, axes: Sequence[str]) -> None:
    """Refuse what these layouts have no place for; `axes` are those over which ZeRO-1 deals rows out.

    Raises:
        UnsupportedStateError: It would lose data, as neuronx-distributed does.
    """
    if not state.zero1:
        return
    why = None
    over = [axis for axis in axes if mesh.sizes[axis] > 1]
    if mesh.ep > 1:
        why = "it has one ZeRO-1 optimizer for experts and others, with names that no file tells"
    elif set(over) - {"dp", "edp"}:
        why = f"its files are named by dp, and these ZeRO-1 shards are dealt out over {' and '.join(over)}"
    elif mesh.dp > 1 and not over:
        why = "its ZeRO-1 files are one for each dp rank, and these shards are not dealt out over dp"
    if why is not None:
        raise UnsupportedStateError(
            f"neuronx-distributed's layout cannot hold this optimizer: {why}",
            leaf=schema.OPTIMIZER,
            found=str(mesh),
            hint="Save in the native format, which holds any state and loads on any topology.",
        )
