"""A stored state as the ranks of a neuronx-distributed job would have it: what a conversion to its layouts writes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.errors import CheckpointError, IncompatibleCheckpointError, UsageError
from xla_ckpt.layouts.nxd.plan import PARTS, RankState, RankTensor, with_experts
from xla_ckpt.layouts.torch_save.pickle_writer import leaves_in
from xla_ckpt.manifest.records import ArrayRecord, Manifest
from xla_ckpt.plan.place import (
    DEALT,
    even,
    parameters_in,
    rows_of,
    sharding_of,
    without,
)
from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.sharding.mesh import AXES, Mesh
from xla_ckpt.sharding.rules import Parsed
from xla_ckpt.sharding.sharding import Sharding, parts
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.skeleton import array_paths


@dataclass(frozen=True, slots=True)
class NewJob:
    """The job that the files are for."""

    manifest: Manifest
    """Of what is stored."""

    trees: Mapping[str, Any]
    """Members of the state that neuronx-distributed has a place for, with a `LeafAt` for each array."""

    mesh: Mesh
    rules: Parsed
    cuts: Sequence[str]
    """Names of the modules after which a pipeline stage ends."""

    zero1: bool
    _shardings: dict[str, Sharding] = field(default_factory=dict, init=False, repr=False)
    _stages: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    """The stage of each name of the model: it ends with the last parameter of the module that is cut after."""
    _parameters: frozenset[str] | None = field(default=None, init=False, repr=False)
    """Path components of the optimizer's parameters: asked for once for every array."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_parameters", parameters_in(self.manifest))
        if len(self.cuts) != self.mesh.pp - 1:
            raise UsageError(
                f"{self.mesh.pp} pipeline stages have {self.mesh.pp - 1} cuts between them",
                found=list(self.cuts),
                hint="Name the modules after which a stage ends, in order: pipeline_cuts=[...], or --cut for each.",
            )
        model = self.trees.get(schema.MODEL)
        names = [str(name) for name in model] if isinstance(model, Mapping) else []
        lasts: list[int] = []
        for cut in self.cuts:
            inside = [i for i, name in enumerate(names) if name.startswith(f"{cut}.")]
            if not inside:
                raise UsageError(
                    "no parameter belongs to a module of this name",
                    expected=f"the beginning of one of {names[:8]}",
                    found=cut,
                )
            lasts.append(inside[-1])
        if lasts != sorted(set(lasts)):
            raise UsageError("the cuts are not in the order of the model", found=list(self.cuts))
        self._stages.update((name, bisect_left(lasts, i)) for i, name in enumerate(names))
        if not self.zero1 and schema.MASTER in (self.trees.get(schema.OPTIMIZER) or {}):
            raise UsageError(
                "master weights have a place in ZeRO-1 files only",
                leaf=paths.join(schema.OPTIMIZER, schema.MASTER),
                found="zero1=False",
                hint="Leave zero1=False (--no-zero1) away, or convert to the native layout.",
            )
        if self.zero1 and self.mesh.ep > 1:
            raise UsageError("ZeRO-1 files with expert parallelism are not written: nothing in them tells experts")

    def state(self, rank: int) -> RankState:
        """What one rank has.

        Raises:
            CheckpointError: It cannot be told how an array is split, or it cannot be split like that.
        """
        stage = self.mesh.coordinates(rank)["pp"]
        trees: dict[str, Any] = {}
        if schema.MODEL in self.trees:
            trees[schema.MODEL] = self._model(stage)
        if schema.OPTIMIZER in self.trees:
            trees[schema.OPTIMIZER] = self._optimizer(stage)
        trees |= {part: self.trees[part] for part in (schema.SCHEDULER, schema.USER_CONTENT) if part in self.trees}
        tensors = {
            path: self._tensor(path, rank)
            for part in PARTS
            if part in self.trees
            for path in array_paths(self.manifest.skeleton[part], part)
        }
        return RankState(trees, with_experts(tensors, self.mesh), self.zero1, self._by_name(), self._shapes())

    def of_earlier_stages(self, rank: int) -> frozenset[str]:
        """Leaves that a stage before a rank's own has, too."""
        trees = [
            tree
            for stage in range(self.mesh.coordinates(rank)["pp"])
            for tree in (
                self._model(stage) if schema.MODEL in self.trees else None,
                self._optimizer(stage) if schema.OPTIMIZER in self.trees else None,
            )
        ]
        return frozenset(self.manifest.aliases.get(path, path) for path in leaves_in(trees))

    def _by_name(self) -> bool:
        optimizer = self.trees.get(schema.OPTIMIZER)
        return isinstance(optimizer, Mapping) and isinstance(optimizer.get(schema.GROUPS), list)

    def _model(self, stage: int) -> Any:
        if self.mesh.pp == 1:
            return self.trees[schema.MODEL]
        return {name: v for name, v in self.trees[schema.MODEL].items() if self._stages[str(name)] == stage}

    def _optimizer(self, stage: int) -> Any:
        tree = self.trees[schema.OPTIMIZER]
        if self.mesh.pp == 1 or not self._by_name():
            return tree
        mine = {self._stored_name(name) for name, s in self._stages.items() if s == stage}
        named = tree[schema.GROUPS]
        groups = [{**g, schema.PARAMS: [n for n in g[schema.PARAMS] if n in mine]} for g in named]
        others = {n for g in named for n in g[schema.PARAMS]} - mine
        states = [part for part in (schema.STATE, schema.MASTER) if part in tree]
        kept = {part: {n: v for n, v in tree[part].items() if n not in others} for part in states}
        return {**tree, **kept, schema.GROUPS: groups}

    def _stored_name(self, name: str) -> str:
        """The name that an optimizer has for a parameter of several names."""
        leaf = schema.weight(name)
        return paths.unescape(schema.below_member(self.manifest.aliases.get(leaf, leaf)))

    def _record(self, path: str) -> ArrayRecord:
        record = self.manifest.array(path)
        if record is None:
            raise IncompatibleCheckpointError("the checkpoint has no such array", leaf=path)
        return record

    def _owner(self, path: str) -> tuple[str, ArrayRecord | None]:
        """The parameter whose state an array is, and what is stored of it; of any other array nothing."""
        owner = schema.parameter_of(path)
        return ("", None) if owner is None else (owner, self.manifest.array(owner))

    def _sharding(self, path: str) -> Sharding:
        """How the job splits an array over tp and ep; a state follows its parameter."""
        if path not in self._shardings:
            owner, theirs = self._owner(path)
            leaf = owner if theirs is not None and theirs.shape == self._record(path).shape else path
            try:
                self._shardings[path] = without(sharding_of(leaf, self.manifest, self.rules), ("pp", *DEALT))
            except ValueError as error:
                raise IncompatibleCheckpointError(str(error), leaf=path) from error
        return self._shardings[path]

    def _tensor(self, path: str, rank: int) -> RankTensor:
        record = self._record(path)
        leaf = self.manifest.aliases.get(path, path)
        try:
            placed, local = self._placed(path, record, rank)
        except IncompatibleCheckpointError:
            raise
        except (ValueError, CheckpointError) as error:
            raise IncompatibleCheckpointError(
                f"it cannot be split over {self.mesh}: {error}",
                leaf=path,
                found=f"shape {list(record.shape)}, split like {self._sharding(path).spec}",
                hint="Say with a sharding rule how it is split.",
            ) from error
        alike = placed.group[1] if isinstance(placed.group, tuple) else AXES
        return RankTensor(leaf, record.dtype, local, placed.pieces, alike)

    def _placed(self, path: str, record: ArrayRecord, rank: int) -> tuple[LocalArray, tuple[int, ...]]:
        """Where a rank's tensor lies, and its shape, which padding may enlarge."""
        sharding, local = even(self._sharding(path), record.shape, self.mesh)
        if self.zero1 and record.shape and self._is_dealt(path, record):
            return sharding.zero1(local, self.mesh, rank, ("dp",)), (-(-local[0] // self.mesh.dp), *local[1:])
        return sharding.place(local, self.mesh, rank), local

    def doubts(self) -> list[str]:
        """What is possible, and most likely not meant.

        Raises:
            UsageError: Nothing is split over tp at all.
        """
        leaves = [path for part in PARTS if part in self.trees for path in leaves_in([self.trees[part]])]
        split = {path: self._sharding(path) for path in leaves}
        if self.mesh.tp > 1 and leaves and not any("tp" in s.axes for s in split.values()):
            raise UsageError(
                f"nothing is split over tp: each of the {self.mesh.tp} ranks would have the whole model",
                hint="Say what is split: shardings=[('up_proj', ('tp', None))], or --sharding up_proj tp,_.",
            )
        uneven = [
            path
            for path, sharding in split.items()
            if schema.member_of(path) == schema.MODEL
            for n, s in zip(self._record(path).shape, sharding.over(len(self._record(path).shape)), strict=True)
            if s is not None and n % parts(s.axes, self.mesh.sizes)
        ]
        if not uneven:
            return []
        more = f" and {len(uneven) - 5} more" if len(uneven) > 5 else ""
        return [f"padded, because they do not divide over {self.mesh}: {', '.join(uneven[:5])}{more}"]

    def spec(self, path: str) -> tuple[object, ...] | None:
        """How an array will be split, for the manifest."""
        return self._placed(path, self._record(path), 0)[0].spec

    def _is_dealt(self, path: str, record: ArrayRecord) -> bool:
        """Whether ZeRO-1 deals out the rows of an array: of states that have the shape of their parameter."""
        owner, theirs = self._owner(path)
        if self._is_shared(path):
            return False
        if theirs is not None or not owner:
            return theirs is not None and theirs.shape == record.shape
        if not rows_of(sharding_of(path, self.manifest, ())):
            raise IncompatibleCheckpointError(
                "the optimizer's rows cannot be dealt out: the parameter that this belongs to is not known",
                leaf=path,
                hint="Give the model and its optimizer (model=, optimizer=; --like on the command line).",
            )
        return True

    def _is_shared(self, path: str) -> bool:
        """Whether it is state of the optimizer that belongs to no parameter."""
        owner = schema.owner_of(path)
        return self._parameters is not None and owner is not None and owner not in self._parameters

    def _shapes(self) -> dict[Any, tuple[int, ...]]:
        """Local shape of each parameter that the optimizer has."""
        if not self._by_name():
            return {}
        shapes = {}
        tree = self.trees[schema.OPTIMIZER]
        for group in tree[schema.GROUPS]:
            for name in group[schema.PARAMS]:
                leaf = schema.weight(name)
                if self.manifest.array(leaf) is None:
                    own = [schema.state(name, what) for what in tree[schema.STATE].get(name, {})]
                    leaf = max(own, key=lambda p: len(r.shape) if (r := self.manifest.array(p)) else -1, default=leaf)
                record = self.manifest.array(leaf)
                if record is not None:
                    shapes[name] = even(self._sharding(leaf), record.shape, self.mesh)[1]
        return shapes


def deals_rows(manifest: Manifest) -> bool:
    """Whether the optimizer's states were dealt out by ZeRO-1 when they were saved."""
    return any(rows_of(sharding_of(leaf, manifest, ())) for leaf in manifest.arrays if schema.owner_of(leaf))
