"""What one rank writes in neuronx-distributed's layouts: which files, with which of its tensors in them.

A rank file ``dp_rank_00_tp_rank_01_pp_rank_00.pt`` holds the state of one rank as a dict, with its own part of each
tensor. Ranks that differ along dp and cp only have one rank file in common. In the layout ``pt`` the first of these
ranks writes the file. In the layout ``xser`` each tensor lies in a file of its own, and the ranks share the writing.
Every rank decides alone what it writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from xla_ckpt.errors import UsageError
from xla_ckpt.files.torch_file import TorchFile
from xla_ckpt.layouts.by_rank.folders import OF_EXPERTS, OF_RANK
from xla_ckpt.layouts.by_rank.grid import RankAt
from xla_ckpt.layouts.by_rank.plan import SHARING, Laying, RankState, RankTensor, by_number, stem
from xla_ckpt.layouts.torch_save.pickle_writer import InFile, dumps
from xla_ckpt.layouts.torch_save.restricted_pickle import Reference
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sharding import position
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.nested import in_dicts_and_lists

WHOSE_NXD = "neuronx-distributed's"
"""Whose layout it is, in errors."""


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
        laying = Laying(self.mesh, self.rank, state.tensors)
        plans: list[FilePlan] = []
        if schema.MODEL in state.parts:
            path = f"model/{self._name(0)}"
            plans += self._rank_file(path, laying, state.parts[schema.MODEL], schema.MODEL, SHARING)
        if schema.OPTIMIZER in state.parts:
            tree = numbered(state) if state.by_name else state.parts[schema.OPTIMIZER]
            if state.zero1:
                # Every dp rank has rows of its own, so only ranks along cp have a file in common.
                path = f"optim/{self._name(self._at['dp'], zero1=True)}"
                plans += self._rank_file(path, laying, tree, schema.OPTIMIZER, ("cp",))
            else:
                plans += self._rank_file(f"optim/{self._name(0)}", laying, tree, schema.OPTIMIZER, SHARING)
        if self.rank == 0:
            for part in (schema.SCHEDULER, schema.USER_CONTENT):
                if part in state.parts:
                    plans.append(laying.whole(f"{part}.pt", state.parts[part], part, tuple(self.mesh.sizes)))
        return tuple(plans)

    @property
    def _at(self) -> dict[str, int]:
        return self.mesh.coordinates(self.rank)

    def _name(self, dp: int, zero1: bool = False) -> str:
        at = RankAt(dp=dp, **{axis: self._at[axis] for axis in ("pp", "ep", "tp")})
        return (OF_EXPERTS if self.mesh.ep > 1 and not zero1 else OF_RANK).of(at)

    def _rank_file(self, path: str, laying: Laying, tree: Any, part: str, sharing: Sequence[str]) -> list[FilePlan]:
        """What this rank writes of a rank file that the ranks along the axes `sharing` have in common."""
        if not self.xser:
            return laying.shared(path, in_dicts_and_lists(tree), part, sharing)
        writer_number = position(sharing, self.mesh, self.rank)
        among_experts = "edp" in sharing  # else each dp rank has a file, and so each expert-parallel rank
        tensors: list[tuple[str, RankTensor]] = []

        def reference(path: str) -> Reference:
            stand_in = Reference()
            stand_in.tid = len(tensors)
            tensors.append((path, laying.tensors[path]))
            return stand_in

        pickled = dumps(in_dicts_and_lists(tree), part, reference)
        files = []
        ranks = 1 if self.first else prod(self.mesh.sizes[axis] for axis in sharing)
        for tid, writer in enumerate(_dealt([t.nbytes for _, t in tensors], ranks)):
            leaf, tensor = tensors[tid]
            # What is no expert's lies with the expert-parallel rank 0 alone: that is where readers look for it.
            if writer == writer_number and (self._at["ep"] == 0 or tensor.expert or not among_experts):
                name = f"tensor_{tid}"
                lengths, sources, entries = laying.regions([(leaf, tensor)], sharing)
                codec = TorchFile(
                    stem=name, pickled=dumps(InFile(0, tensor.dtype, tensor.shape), leaf), storages=lengths
                )
                files.append(FilePlan(path=f"{path}.tensors/{name}.pt", codec=codec, sources=sources, entries=entries))
        if writer_number == 0:
            info = {tid: _info(tensor) for tid, (_, tensor) in enumerate(tensors)}
            # neuronx-distributed has this directory of every rank file, without tensors, too: programs look for it.
            codec = TorchFile(stem=stem(path), pickled=pickled)
            files.append(FilePlan(path=path, codec=codec, folder=f"{path}.tensors"))
            files.append(
                FilePlan(
                    path=f"{path}.info.pt", codec=TorchFile(stem=stem(f"{path}.info.pt"), pickled=dumps(info, part))
                )
            )
        return files


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


def numbered(state: RankState) -> dict[str, Any]:
    """The optimizer's state as neuronx-distributed keeps it: by the running number of each parameter."""
    tree = state.parts[schema.OPTIMIZER]
    parts = _parts(tree[schema.GROUPS], state.experts)
    names = [[name for group in part for name in group[schema.PARAMS]] for part in parts]
    number = {name: i for i, name in enumerate(name for part in names for name in part)}
    groups = []
    for part, called in zip(parts, names, strict=True):
        own = {name: i for i, name in enumerate(called)}
        groups += [{**group, schema.PARAMS: [own[name] for name in group[schema.PARAMS]]} for group in part]
    others = {k: v for k, v in tree.items() if k not in schema.OF_OPTIMIZER}
    if not state.zero1:
        return {"state": by_number(tree[schema.STATE], number), "param_groups": groups, **others}
    content: dict[str, Any] = {
        "state": {},
        "param_groups": groups,
        "base_state": by_number(tree[schema.STATE], number),
        "shape_info": {i: list(state.shapes[name]) for name, i in number.items()},
    }
    if schema.MASTER in tree:
        content["sharded_master_weights"] = by_number(tree[schema.MASTER], number)
    if len(parts) > 1:
        content |= {f"ep_{key}_offset": len(names[0]) for key in ("base_state", "shape_info")}
        content |= {"ep_param_id_offset": 1, "ep_param_group_offset": len(parts[0])}
    return {**content, **others}


def _parts(groups: Sequence[Mapping[str, Any]], experts: frozenset[str] | None) -> list[list[dict[str, Any]]]:
    """The groups of each optimizer, ordinary parameters first: `NeuronEPZero1Optimizer` has another one for experts."""
    if experts is None:
        return [[*map(dict, groups)]]
    return [
        [{**g, schema.PARAMS: [name for name in g[schema.PARAMS] if (name in experts) is apart]} for g in groups]
        for apart in (False, True)
    ]


def check_job(trees: Mapping[str, Any], *, zero1: bool) -> None:
    """Refuse a job that these files are not written for.

    Args:
        trees: Members of the state that is converted.
        zero1: Whether it deals out the rows of the optimizer's states.

    Raises:
        UsageError: Something would be lost.
    """
    if not zero1 and schema.MASTER in (trees.get(schema.OPTIMIZER) or {}):
        raise UsageError(
            "master weights have a place in ZeRO-1 files only",
            leaf=paths.join(schema.OPTIMIZER, schema.MASTER),
            found="zero1=False",
            hint="Leave zero1=False (--no-zero1) away, or convert to the native layout.",
        )
