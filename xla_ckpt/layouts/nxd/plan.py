"""What one rank writes in neuronx-distributed's layouts: which files, with which of its tensors in them.

A rank file ``dp_rank_00_tp_rank_01_pp_rank_00.pt`` holds the state of one rank as a dict, with its own part of each
tensor. Ranks that differ along dp and cp only have one rank file in common. In the layout ``pt`` the first of these
ranks writes the file. In the layout ``xser`` each tensor lies in a file of its own, and the ranks share the writing.
Every rank decides alone what it writes.
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
from xla_ckpt.tree.nested import replaced_leaves

PARTS = (schema.MODEL, schema.OPTIMIZER, schema.SCHEDULER, schema.USER_CONTENT)
"""Members of a state that these layouts have a place for."""

_SHARING = ("edp", "cp")
"""Mesh axes along which ranks have a rank file in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensor:
    """One rank's part of an array, as it has it in memory."""

    leaf: str
    dtype: DType
    shape: tuple[int, ...]
    """Shape of the tensor itself, padding included."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of one rank, with a `LeafAt` for each array."""

    parts: Mapping[str, Any]
    tensors: Mapping[str, RankTensor]
    """The tensor of each array, by leaf path. Several paths of one shared array have the same tensor."""

    zero1: bool = False
    """Whether the rows of the optimizer's states are dealt out over dp."""

    by_name: bool = False
    """Whether the optimizer's state is kept by parameter name; else it is stored as it is."""

    shapes: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    """Local shape of each parameter of the optimizer, by name."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Plans the files of one rank. `xser`: whether each tensor lies in a file of its own."""

    mesh: Mesh
    rank: int
    xser: bool
    first: bool = False
    """Whether the first of the ranks that share a rank file writes all of its tensors: they may not be equal."""

    def files(self, state: RankState) -> tuple[FilePlan, ...]:
        """The files that this rank writes.

        Raises:
            UnsupportedStateError: Something in its state cannot be pickled.
        """
        made: list[FilePlan] = []
        if schema.MODEL in state.parts:
            made += self._rank_file(f"model/{self._name(0)}", state, state.parts[schema.MODEL], schema.MODEL, _SHARING)
        if schema.OPTIMIZER in state.parts:
            tree = numbered(state) if state.by_name else state.parts[schema.OPTIMIZER]
            if state.zero1:
                # Every dp rank has rows of its own, so only ranks along cp have a file in common.
                path = f"optim/{self._name(self._at['dp'], zero1=True)}"
                made += self._rank_file(path, state, tree, schema.OPTIMIZER, ("cp",))
            else:
                made += self._rank_file(f"optim/{self._name(0)}", state, tree, schema.OPTIMIZER, _SHARING)
        if self.rank == 0:
            for part in (schema.SCHEDULER, schema.USER_CONTENT):
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
        """What this rank writes of a rank file that the ranks along the axes `sharing` have in common."""
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
        ranks = 1 if self.first else prod(self.mesh.sizes[axis] for axis in sharing)
        for tid, writer in enumerate(_dealt([t.nbytes for _, t in tensors], ranks)):
            leaf, tensor = tensors[tid]
            # What is no expert's lies with the expert-parallel rank 0 alone: that is where readers look for it.
            if writer == mine and (self._at["ep"] == 0 or tensor.expert):
                name = f"tensor_{tid}"
                lengths, sources, entries = self._laid_out([(leaf, tensor)], sharing)
                codec = TorchFile(
                    stem=name, pickled=dumps(InFile(0, tensor.dtype, tensor.shape), leaf), storages=lengths
                )
                files.append(FilePlan(path=f"{path}.tensors/{name}.pt", codec=codec, sources=sources, entries=entries))
        if mine == 0:
            info = {tid: _info(tensor) for tid, (_, tensor) in enumerate(tensors)}
            # neuronx-distributed has this directory of every rank file, without tensors, too: programs look for it.
            codec = TorchFile(stem=_stem(path), pickled=pickled)
            files.append(FilePlan(path=path, codec=codec, folder=f"{path}.tensors"))
            files.append(
                FilePlan(
                    path=f"{path}.info.pt", codec=TorchFile(stem=_stem(f"{path}.info.pt"), pickled=dumps(info, part))
                )
            )
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
        return FilePlan(
            path=path,
            codec=TorchFile(stem=_stem(path), pickled=pickled, storages=lengths),
            sources=sources,
            entries=entries,
        )

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
            # The manifest finds an array once: under its first name, and on the first of the ranks that hold the same.
            is_first_name = path == tensor.leaf
            is_first_rank = all(self._at[axis] == 0 for axis in tensor.alike if axis not in sharing)
            is_copy = not (is_first_name and is_first_rank)
            lengths.append(tuple(b - a for a, b in pairwise(cuts)))
            sources += [RegionSource(leaf=tensor.leaf, shard=0, offset=a, nbytes=b - a) for a, b in pairwise(cuts)]
            region = {offset: first + i for i, offset in enumerate(cuts)}
            entries += [
                Entry(
                    leaf=tensor.leaf,
                    box=p.box,
                    region=region[at],
                    frame=frame,
                    copy=is_copy or (p.copy is not None and p.copy.index > 0),
                )
                for p, frame, at in frames
            ]
        return tuple(lengths), tuple(sources), tuple(entries)


def _regions(tensor: RankTensor) -> tuple[list[int], list[tuple[Piece, Box | None, int]]]:
    """Where a tensor's bytes are cut into regions; and for each piece (piece, its frame, offset of its region).

    A piece that is one run of bytes is a region of its own, so that a reader verifies no more than it reads. If some
    piece is scattered, the whole tensor is one region, and each piece has the frame that says where it lies in it.
    """
    whole, itemsize = Box.whole(tensor.shape), tensor.dtype.itemsize
    pieces = [p for p in tensor.pieces if p.box.size]
    places = [runs(p.local, whole, itemsize) for p in pieces]
    if all(where.contiguous for where in places):
        cuts = {0, tensor.nbytes} | {w.offset for w in places} | {w.offset + w.nbytes for w in places}
        return sorted(cuts), [(p, None, w.offset) for p, w in zip(pieces, places, strict=True)]
    return [0, tensor.nbytes], [(p, p.frame(tensor.shape), 0) for p in pieces]


def _dealt(sizes: Sequence[int], ranks: int) -> list[int]:
    """Who writes each of these files: the large ones are dealt out first, each to the rank with the least so far."""
    load = [0] * ranks
    writer = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        writer[i] = load.index(min(load))
        load[writer[i]] += max(sizes[i], 1)  # an empty tensor is a file to write, too
    return writer


def _info(tensor: RankTensor) -> dict[str, Any]:
    """What neuronx-distributed's loader wants to know of a tensor before it opens its file."""
    return {
        "dtype": getattr(torch, tensor.dtype.name),
        "shape": torch.Size(tensor.shape),
        "expert_model_parallel": tensor.expert,
    }


def with_experts(tensors: Mapping[str, RankTensor], mesh: Mesh) -> dict[str, RankTensor]:
    """The same tensors. Those of experts are marked: parameters that are split over ep, and all states of these."""
    if mesh.ep == 1:
        return dict(tensors)
    parameters = {path: schema.parameter_of(path) or path for path in tensors}
    experts = {parameters[path] for path, tensor in tensors.items() if "ep" not in tensor.alike}
    return {path: replace(tensor, expert=parameters[path] in experts) for path, tensor in tensors.items()}


def _stem(path: str) -> str:
    """What torch.save calls the folder in a zip: the file's own name without its ending."""
    return path.rpartition("/")[2].removesuffix(".pt")


def numbered(state: RankState) -> dict[str, Any]:
    """The optimizer's state as neuronx-distributed keeps it: by the running number of each parameter."""
    tree = state.parts[schema.OPTIMIZER]
    names = [name for group in tree[schema.GROUPS] for name in group[schema.PARAMS]]
    number = {name: i for i, name in enumerate(names)}
    groups = []
    for group in tree[schema.GROUPS]:
        options = {k: v for k, v in group.items() if k != schema.PARAMS}
        groups.append({**options, "params": [number[name] for name in group[schema.PARAMS]]})
    others = {k: v for k, v in tree.items() if k not in schema.OF_OPTIMIZER}
    if not state.zero1:
        return {"state": _by_number(tree[schema.STATE], number), "param_groups": groups, **others}
    made = {
        "state": {},
        "param_groups": groups,
        "base_state": _by_number(tree[schema.STATE], number),
        "shape_info": {i: list(state.shapes[name]) for name, i in number.items()},
    }
    if schema.MASTER in tree:
        made["sharded_master_weights"] = _by_number(tree[schema.MASTER], number)
    return {**made, **others}


def _by_number(members: Mapping[Any, Any], number: Mapping[Any, int]) -> dict[Any, Any]:
    """Members by the number of their parameter, in that order; what belongs to no parameter comes last."""
    ordered = sorted(members.items(), key=lambda item: number.get(item[0], len(number)))
    return {number.get(name, name): value for name, value in ordered}


def _plain(tree: Any) -> Any:
    """The same tree in the containers that neuronx-distributed's rank files have: dicts and lists."""
    return replaced_leaves(tree, lambda _, leaf: leaf, "", tuples=False)


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


def check_common(skeleton: Mapping[str, Any]) -> None:
    """Refuse state of an optimizer that every rank has its own of: ranks that differ along dp share a file.

    Raises:
        UnsupportedStateError: There is such state.
    """
    optimizer = skeleton.get(schema.OPTIMIZER)
    if isinstance(optimizer, Mapping) and schema.OWN in optimizer:
        raise UnsupportedStateError(
            "neuronx-distributed's layout has no place for state that every rank has its own of",
            leaf=schema.own_states(),
            hint="Save in the native format, which holds any state.",
        )
