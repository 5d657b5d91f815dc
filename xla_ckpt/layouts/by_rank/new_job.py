"""A stored state as the ranks of another job would have it, for a conversion to files of ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from xla_ckpt.errors import CheckpointError, IncompatibleCheckpointError, UsageError
from xla_ckpt.layouts.by_rank.plan import PARTS, RankState, RankTensor, with_experts
from xla_ckpt.layouts.by_rank.stage_numbers import in_stage
from xla_ckpt.layouts.new_ranks import CORRECT
from xla_ckpt.layouts.torch_save.pickle_writer import leaves_in
from xla_ckpt.lightweight import cached_property
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.row_order import other_copies
from xla_ckpt.plan.stored_shardings import DEALT, even, parameters_in, rows_of, sharding_of, without_axes
from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.sharding.mesh import AXES, Mesh
from xla_ckpt.sharding.rules import Parsed
from xla_ckpt.sharding.sharding import Sharding, number_of_parts
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.module_metadata import with_metadata_of
from xla_ckpt.tree.skeleton import array_paths

_OTHER_HEADS = (
    "{leaf} was saved with kv_size_multiplier={old}, and over {mesh} it has {new}: the heads of the queries, and the "
    "columns of the output projection, stay in the order of the old job; a job with the new one computes something "
    "else. To reorder them give LlamaJob(config, kv_size_multiplier=...) (--config, --kv-size-multiplier)"
)


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """The job that the files are for."""

    manifest: Manifest
    """The manifest of the tag that is converted."""

    trees: Mapping[str, Any]
    """Members of the state that the layout has a place for, with a `LeafAt` for each array."""

    mesh: Mesh
    rules: Parsed
    cuts: Sequence[str]
    """Names of the modules after which a pipeline stage ends."""

    zero1: bool
    _shardings: dict[str, Sharding] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        _ = self.stages  # raises for cuts that do not fit

    @cached_property
    def _parameters(self) -> frozenset[str] | None:
        """Path components of the parameters of the optimizer: they are needed for every array."""
        return parameters_in(self.manifest)

    @cached_property
    def stages(self) -> dict[str, int]:
        """The stage of each name of the model. A stage ends with the last parameter of the module that is cut after.

        Raises:
            UsageError: A cut names no module, or the cuts are not in order, or they are too few or too many.
        """
        if len(self.cuts) != self.mesh.pp - 1:
            raise UsageError(
                f"{self.mesh.pp} pipeline stages need {self.mesh.pp - 1} cut{'s' * (self.mesh.pp != 2)}",
                found=list(self.cuts) or "none",
                hint="Name the modules after which a stage ends, in order: pipeline_cuts=[...] (--cut for each)."
                if len(self.cuts) < self.mesh.pp - 1
                else "The mesh says how many stages there are: mesh='pp=2,tp=4' (--mesh pp=2,tp=4).",
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
        return {name: bisect_left(lasts, i) for i, name in enumerate(names)}

    def state(self, rank: int) -> RankState:
        """What one rank has.

        Raises:
            CheckpointError: It cannot be told how an array is split, or it cannot be split like that.
        """
        stage = self.mesh.coordinates(rank)["pp"]
        trees = {**self.trees, **self._of_stage(stage)}
        # At hundreds of ranks all tensors for each of them would take longer than all else.
        elsewhere = frozenset(leaves_in(self.trees)) - frozenset(leaves_in(trees))
        tensors = {
            path: self._tensor(path, rank)
            for part in PARTS
            if part in self.trees
            for path in array_paths(self.manifest.skeleton[part], part)
            if path not in elsewhere
        }
        return RankState(
            parts=trees,
            tensors=with_experts(tensors, self.mesh),
            zero1=self.zero1,
            by_name=self._by_name(),
            shapes=self._shapes(),
            experts=self._experts() if self.zero1 and self.mesh.ep > 1 else None,
        )

    def of_earlier_stages(self, rank: int) -> frozenset[str]:
        """Leaves that a stage before a rank's own has, too: the manifest finds them there."""
        trees = [self._of_stage(stage) for stage in range(self.mesh.coordinates(rank)["pp"])]
        return frozenset(self.manifest.aliases.get(path, path) for path in leaves_in(trees))

    def _of_stage(self, stage: int) -> dict[str, Any]:
        """Model and optimizer of one pipeline stage."""
        divided = {schema.MODEL: self._model, schema.OPTIMIZER: self._optimizer}
        return {part: of(stage) for part, of in divided.items() if part in self.trees}

    def _by_name(self) -> bool:
        """Whether the optimizer's state is kept by parameter name, and can be divided among stages."""
        optimizer = self.trees.get(schema.OPTIMIZER)
        return isinstance(optimizer, Mapping) and isinstance(optimizer.get(schema.GROUPS), list)

    def _model(self, stage: int) -> Any:
        """The model of one pipeline stage."""
        if self.mesh.pp == 1:
            return self.trees[schema.MODEL]
        model = self.trees[schema.MODEL]
        return with_metadata_of(model, {name: v for name, v in model.items() if self.stages[str(name)] == stage})

    def _optimizer(self, stage: int) -> Any:
        """The optimizer of one pipeline stage. State that belongs to no parameter stays in all stages."""
        tree = self.trees[schema.OPTIMIZER]
        if self.mesh.pp == 1 or not self._by_name():
            return tree
        own_names: dict[str, str] = {}
        for name, of in self.stages.items():
            if of == stage:
                own_names.setdefault(self._stored_name(name), name)
        order = {name: i for i, name in enumerate(self.stages)}
        groups = [{**g, schema.PARAMS: in_stage(g[schema.PARAMS], own_names, order)} for g in tree[schema.GROUPS]]
        others = set(schema.grouped_names(tree)) - own_names.keys()
        optimizer = {**tree, schema.GROUPS: groups}
        for key in (schema.STATE, schema.MASTER):
            if key in tree:
                optimizer[key] = {name: value for name, value in tree[key].items() if name not in others}
        return optimizer

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
        """The parameter whose state an array is, and the record of that parameter; of any other array ("", None)."""
        owner = schema.parameter_of(path)
        return ("", None) if owner is None else (owner, self.manifest.array(owner))

    def _sharding(self, path: str) -> Sharding:
        """How the job splits an array over tp and ep. A state of its parameter's shape is split like the parameter."""
        if path not in self._shardings:
            owner, parameter = self._owner(path)
            leaf = owner if parameter is not None and parameter.shape == self._record(path).shape else path
            try:
                self._shardings[path] = without_axes(sharding_of(leaf, self.manifest, self.rules), ("pp", *DEALT))
            except ValueError as error:
                raise IncompatibleCheckpointError(str(error), leaf=path, hint=CORRECT) from error
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
                hint=CORRECT,
            ) from error
        alike = placed.group[1] if isinstance(placed.group, tuple) else AXES
        return RankTensor(
            leaf=leaf,
            dtype=record.dtype,
            shape=local,
            pieces=placed.pieces,
            alike=alike,
            full=record.shape,
            spec=placed.spec,
        )

    def _placed(self, path: str, record: ArrayRecord, rank: int) -> tuple[LocalArray, tuple[int, ...]]:
        """Where a rank's tensor lies, and its shape, which padding may enlarge."""
        dealt = self.zero1 and bool(record.shape) and self._is_dealt(path, record)
        return _part(self._sharding(path), record.shape, self.mesh, rank, dealt)

    def doubts(self) -> list[str]:
        """What is possible, and most likely not what was meant.

        Raises:
            UsageError: Nothing is split over tp at all.
        """
        leaves = [path for part in PARTS if part in self.trees for path in leaves_in([self.trees[part]])]
        split = {path: self._sharding(path) for path in leaves}
        if self.mesh.tp > 1 and leaves and not any("tp" in s.axes for s in split.values()):
            raise UsageError(
                f"nothing is split over tp: each of the {self.mesh.tp} ranks would have the whole model",
                hint="Say what is split: shardings=[('up_proj', ('tp', None))] (--sharding up_proj tp,_).",
            )
        uneven: list[str] = []
        for path, sharding in split.items():
            if schema.member_of(path) == schema.MODEL:
                shape = self._record(path).shape
                for n, dim in zip(shape, sharding.over(len(shape)), strict=True):
                    if dim is not None and dim.plain and n % number_of_parts(dim.axes, self.mesh.sizes):
                        uneven.append(path)
        messages = self._other_heads(split)
        if uneven:
            more = f" and {len(uneven) - 5} more" if len(uneven) > 5 else ""
            messages.append(f"padded, because they do not divide over {self.mesh}: {', '.join(uneven[:5])}{more}")
        return messages

    def _other_heads(self, split: Mapping[str, Sharding]) -> list[str]:
        """A warning if other ranks will hold other numbers of copies of the keys, which order the heads of the queries.

        Raises:
            IncompatibleCheckpointError: They cannot hold equally many copies.
        """
        for path, sharding in split.items():
            try:
                counts = other_copies(sharding, self.mesh)
            except ValueError as error:
                raise IncompatibleCheckpointError(str(error), leaf=path) from error
            if counts is not None:
                return [_OTHER_HEADS.format(leaf=path, old=counts[0], new=counts[1], mesh=self.mesh)]
        return []

    def spec(self, path: str) -> tuple[object, ...] | None:
        """How an array will be split, for the manifest."""
        return self._placed(path, self._record(path), 0)[0].spec

    def _is_dealt(self, path: str, record: ArrayRecord) -> bool:
        """Whether ZeRO-1 deals out the rows of an array. It does for states that have the shape of their parameter.

        Raises:
            IncompatibleCheckpointError: The parameter is not stored, and the rows were not dealt out before.
        """
        owner, parameter = self._owner(path)
        if self._is_common(path) or not owner:
            return False
        if parameter is not None:
            return parameter.shape == record.shape
        if not rows_of(sharding_of(path, self.manifest, ())):
            raise IncompatibleCheckpointError(
                "the optimizer's rows cannot be dealt out: the parameter that this belongs to is not known",
                leaf=path,
                hint="Give the model and its optimizer: model= and optimizer= (--like).",
            )
        return True

    def _is_common(self, path: str) -> bool:
        """Whether an array is state of the optimizer that belongs to no parameter."""
        owner = schema.owner_of(path)
        return self._parameters is not None and owner is not None and owner not in self._parameters

    def _shapes(self) -> dict[Any, tuple[int, ...]]:
        """Local shape of each parameter that the optimizer has."""
        names = schema.grouped_names(self.trees[schema.OPTIMIZER]) if self._by_name() else ()
        leaves = {name: self._leaf_of_shape(name) for name in names}
        return {
            name: even(self._sharding(leaf), record.shape, self.mesh)[1]
            for name, leaf in leaves.items()
            if (record := self.manifest.array(leaf)) is not None
        }

    def _experts(self) -> frozenset[str]:
        """Names of the optimizer's parameters that are split over ep."""
        names = self._shapes()
        return frozenset(name for name in names if "ep" in self._sharding(self._leaf_of_shape(name)).axes)

    def _leaf_of_shape(self, name: Any) -> str:
        """The leaf that has a parameter's shape: the parameter, or where no model is stored a state of it.

        Of its states that is the one with the most dims, because a step count is a single number.
        """
        leaf = schema.weight(name)
        if self.manifest.array(leaf) is not None:
            return leaf
        most = -1
        for what in self.trees[schema.OPTIMIZER][schema.STATE].get(name, {}):
            state = schema.state(name, what)
            record = self.manifest.array(state)
            dims = -1 if record is None else len(record.shape)
            if dims > most:
                leaf, most = state, dims
        return leaf


def deals_rows(manifest: Manifest) -> bool:
    """Whether the optimizer's states were dealt out by ZeRO-1 when they were saved."""
    return any(rows_of(sharding_of(leaf, manifest, ())) for leaf in manifest.arrays if schema.owner_of(leaf))


@lru_cache(maxsize=1 << 14)
def _part(
    sharding: Sharding, shape: tuple[int, ...], mesh: Mesh, rank: int, dealt: bool
) -> tuple[LocalArray, tuple[int, ...]]:
    """What `NewJob._placed` returns: the layers of a model, and the states of an optimizer, ask the same of it."""
    sharding, local = even(sharding, shape, mesh)
    if not dealt:
        return sharding.place(local, mesh, rank), local
    axes = ("edp",) if "ep" in sharding.axes else ("dp",)
    ranks = number_of_parts(axes, mesh.sizes)
    return sharding.zero1(local, mesh, rank, axes), (-(-local[0] // ranks), *local[1:])
