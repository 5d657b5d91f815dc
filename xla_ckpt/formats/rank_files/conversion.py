"""Convert a checkpoint to rank files: reshard the stored state for the ranks of another job, and plan its files."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.save_plan import FilePlan, SavePlan
from xla_ckpt.core.plan.stored_sharding import (
    ZERO1_AXES,
    exclude_axes,
    find_copy_mismatch,
    find_optimizer_parameters,
    get_zero1_axes,
    pad_evenly,
    resolve_sharding,
)
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.core.sharding.mesh import MESH_AXES, Mesh
from xla_ckpt.core.sharding.sharding import ParsedRules, Sharding, count_parts
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.skeleton import find_arrays
from xla_ckpt.core.tree.state_dict import copy_module_metadata
from xla_ckpt.errors import CheckpointError, IncompatibleCheckpointError, UsageError
from xla_ckpt.formats.base import ConversionPlan, StoredState, TargetTopology
from xla_ckpt.formats.native import RESHARD_HINT, plan_native_files
from xla_ckpt.formats.rank_files.layout import RankLayout
from xla_ckpt.formats.rank_files.optimizer import order_stage_parameters
from xla_ckpt.formats.rank_files.writing import (
    STATE_PARTS,
    RankFilePlanner,
    RankState,
    RankTensor,
    check_no_rank_local_state,
    choose_file_name,
    mark_experts,
)
from xla_ckpt.formats.torch_save.pickler import LeafPlaceholder, iterate_leaf_paths
from xla_ckpt.logs import get_logger

_KV_COPIES_WARNING = (
    "{leaf} was saved with kv_size_multiplier={old}, and over {mesh} it has {new}: the heads of the queries, and the "
    "columns of the output projection, stay in the order of the old job; a job with the new one computes something "
    "else. To reorder them give LlamaJob(config, kv_size_multiplier=...) (--config, --kv-size-multiplier)"
)


@dataclass(frozen=True, kw_only=True)
class ReshardedState:
    """State of a checkpoint, resharded for the ranks of the target job."""

    manifest: Manifest
    """Manifest of the checkpoint to convert."""

    trees: Mapping[str, Any]
    """Members of the state that the layout supports, with a `LeafPlaceholder` for each array."""

    mesh: Mesh
    rules: ParsedRules
    pipeline_cuts: Sequence[str]
    """Names of the modules that end a pipeline stage."""

    zero1: bool
    _shardings: dict[str, Sharding] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        _ = self.stages  # raises for invalid cuts

    @cached_property
    def _parameters(self) -> frozenset[str] | None:
        """Path components of the optimizer's parameters, cached because they are needed for every array."""
        return find_optimizer_parameters(self.manifest)

    @cached_property
    def stages(self) -> dict[str, int]:
        """Pipeline stage of each name of the model. A stage ends with the last parameter of its cut module.

        Raises:
            UsageError: A cut names no module, or the cuts are not in order, or there are too few or too many.
        """
        if len(self.pipeline_cuts) != self.mesh.pp - 1:
            raise UsageError(
                f"{self.mesh.pp} pipeline stages need {self.mesh.pp - 1} cut{'s' * (self.mesh.pp != 2)}",
                found=list(self.pipeline_cuts) or "none",
                hint="Name the modules after which a stage ends, in order: pipeline_cuts=[...] (--cut for each)."
                if len(self.pipeline_cuts) < self.mesh.pp - 1
                else "The mesh says how many stages there are: mesh='pp=2,tp=4' (--mesh pp=2,tp=4).",
            )
        model = self.trees.get(schema.MODEL)
        names = [str(name) for name in model] if isinstance(model, Mapping) else []
        lasts: list[int] = []
        for cut in self.pipeline_cuts:
            inside = [i for i, name in enumerate(names) if name.startswith(f"{cut}.")]
            if not inside:
                raise UsageError(
                    "no parameter belongs to a module of this name",
                    expected=f"the beginning of one of {names[:8]}",
                    found=cut,
                )
            lasts.append(inside[-1])
        if lasts != sorted(set(lasts)):
            raise UsageError("the cuts are not in the order of the model", found=list(self.pipeline_cuts))
        return {name: bisect_left(lasts, i) for i, name in enumerate(names)}

    def get_rank_state(self, rank: int) -> RankState:
        """Compute the state of one rank.

        Raises:
            CheckpointError: The sharding of an array is unknown, or the array cannot be sharded that way.
        """
        stage = self.mesh.coordinates(rank)["pp"]
        trees = {**self.trees, **self._select_stage(stage)}
        # With hundreds of ranks, building all tensors for each of them would dominate the run time.
        elsewhere = frozenset(iterate_leaf_paths(self.trees)) - frozenset(iterate_leaf_paths(trees))
        tensors = {
            path: self._make_tensor(path, rank)
            for part in STATE_PARTS
            if part in self.trees
            for path in find_arrays(self.manifest.skeleton[part], part)
            if path not in elsewhere
        }
        return RankState(
            parts=trees,
            tensors=mark_experts(tensors, self.mesh),
            zero1=self.zero1,
            keyed_by_name=self._is_keyed_by_name(),
            local_shapes=self._get_local_shapes(),
            expert_names=self._find_expert_names() if self.zero1 and self.mesh.ep > 1 else None,
        )

    def list_earlier_leaves(self, rank: int) -> frozenset[str]:
        """Return leaves that an earlier stage also contains: the manifest refers to that copy."""
        trees = [self._select_stage(stage) for stage in range(self.mesh.coordinates(rank)["pp"])]
        return frozenset(self.manifest.aliases.get(path, path) for path in iterate_leaf_paths(trees))

    def _select_stage(self, stage: int) -> dict[str, Any]:
        """Return the model and optimizer of one pipeline stage."""
        divided = {schema.MODEL: self._select_model, schema.OPTIMIZER: self._select_optimizer}
        return {part: of(stage) for part, of in divided.items() if part in self.trees}

    def _is_keyed_by_name(self) -> bool:
        """Return True if the optimizer state is keyed by parameter name, so that it can be divided among stages."""
        optimizer = self.trees.get(schema.OPTIMIZER)
        return isinstance(optimizer, Mapping) and isinstance(optimizer.get(schema.PARAM_GROUPS), list)

    def _select_model(self, stage: int) -> Any:
        """Return the model of one pipeline stage."""
        if self.mesh.pp == 1:
            return self.trees[schema.MODEL]
        model = self.trees[schema.MODEL]
        return copy_module_metadata(model, {name: v for name, v in model.items() if self.stages[str(name)] == stage})

    def _select_optimizer(self, stage: int) -> Any:
        """Return the optimizer of one pipeline stage. State that belongs to no parameter is kept in all stages."""
        tree = self.trees[schema.OPTIMIZER]
        if self.mesh.pp == 1 or not self._is_keyed_by_name():
            return tree
        own_names: dict[str, str] = {}
        for name, of in self.stages.items():
            if of == stage:
                own_names.setdefault(self._get_stored_name(name), name)
        order = {name: i for i, name in enumerate(self.stages)}
        groups = [
            {**g, schema.PARAMS: order_stage_parameters(g[schema.PARAMS], own_names, order)}
            for g in tree[schema.PARAM_GROUPS]
        ]
        others = set(schema.get_parameter_names(tree)) - own_names.keys()
        optimizer = {**tree, schema.PARAM_GROUPS: groups}
        for key in (schema.STATE, schema.MASTER):
            if key in tree:
                optimizer[key] = {name: value for name, value in tree[key].items() if name not in others}
        return optimizer

    def _get_stored_name(self, name: str) -> str:
        """Return the name that the optimizer uses for a parameter with several names."""
        leaf = schema.get_weight_path(name)
        return paths.unescape(schema.strip_member(self.manifest.aliases.get(leaf, leaf)))

    def _get_record(self, path: str) -> ArrayRecord:
        record = self.manifest.find_array(path)
        if record is None:
            raise IncompatibleCheckpointError("the checkpoint has no such array", leaf=path)
        return record

    def _find_owner(self, path: str) -> tuple[str, ArrayRecord | None]:
        """Return the parameter that an optimizer state belongs to, and its record; for any other array ("", None)."""
        owner = schema.get_parameter_path(path)
        return ("", None) if owner is None else (owner, self.manifest.find_array(owner))

    def _get_sharding(self, path: str) -> Sharding:
        """Return the sharding of an array over tp and ep.

        A state with the shape of its parameter is sharded like the parameter.

        Raises:
            IncompatibleCheckpointError: The sharding is unknown, or the checkpoint does not contain the array.
        """
        if path not in self._shardings:
            owner, parameter = self._find_owner(path)
            leaf = owner if parameter is not None and parameter.shape == self._get_record(path).shape else path
            try:
                self._shardings[path] = exclude_axes(
                    resolve_sharding(leaf, self.manifest, self.rules), ("pp", *ZERO1_AXES)
                )
            except ValueError as error:
                raise IncompatibleCheckpointError(str(error), leaf=path, hint=RESHARD_HINT) from error
        return self._shardings[path]

    def _make_tensor(self, path: str, rank: int) -> RankTensor:
        record = self._get_record(path)
        leaf = self.manifest.aliases.get(path, path)
        try:
            placed, local = self._place_tensor(path, record, rank)
        except IncompatibleCheckpointError:
            raise
        except (ValueError, CheckpointError) as error:
            raise IncompatibleCheckpointError(
                f"it cannot be split over {self.mesh}: {error}",
                leaf=path,
                found=f"shape {list(record.shape)}, split like {self._get_sharding(path).spec}",
                hint=RESHARD_HINT,
            ) from error
        alike = placed.group[1] if isinstance(placed.group, tuple) else MESH_AXES
        return RankTensor(
            leaf=leaf,
            dtype=record.dtype,
            shape=local,
            pieces=placed.pieces,
            replicated_axes=alike,
            global_shape=record.shape,
            spec=placed.spec,
        )

    def _place_tensor(self, path: str, record: ArrayRecord, rank: int) -> tuple[LocalArray, tuple[int, ...]]:
        """Compute the position of a rank's tensor in the global array, and its shape including padding."""
        dealt = self.zero1 and bool(record.shape) and self._is_zero1_sharded(path, record)
        return _compute_local_array(self._get_sharding(path), record.shape, self.mesh, rank, dealt)

    def collect_warnings(self) -> list[str]:
        """Return warnings about valid but probably unintended results.

        Raises:
            UsageError: No array is sharded over tp.
        """
        leaves = [path for part in STATE_PARTS if part in self.trees for path in iterate_leaf_paths([self.trees[part]])]
        split = {path: self._get_sharding(path) for path in leaves}
        if self.mesh.tp > 1 and leaves and not any("tp" in s.axes for s in split.values()):
            raise UsageError(
                f"nothing is split over tp: each of the {self.mesh.tp} ranks would have the whole model",
                hint="Say what is split: shardings=[('up_proj', ('tp', None))] (--sharding up_proj tp,_).",
            )
        uneven: list[str] = []
        for path, sharding in split.items():
            if schema.get_member(path) == schema.MODEL:
                shape = self._get_record(path).shape
                for n, dim in zip(shape, sharding.pad_dims(len(shape)), strict=True):
                    if dim is not None and dim.is_plain and n % count_parts(dim.axes, self.mesh.sizes):
                        uneven.append(path)
        messages = self._check_kv_copies(split)
        if uneven:
            more = f" and {len(uneven) - 5} more" if len(uneven) > 5 else ""
            messages.append(f"padded, because they do not divide over {self.mesh}: {', '.join(uneven[:5])}{more}")
        return messages

    def _check_kv_copies(self, split: Mapping[str, Sharding]) -> list[str]:
        """Return a warning if the number of KV replicas changes, because it determines the order of the query heads.

        Raises:
            IncompatibleCheckpointError: The ranks cannot hold equal numbers of replicas.
        """
        for path, sharding in split.items():
            try:
                counts = find_copy_mismatch(sharding, self.mesh)
            except ValueError as error:
                raise IncompatibleCheckpointError(str(error), leaf=path) from error
            if counts is not None:
                return [_KV_COPIES_WARNING.format(leaf=path, old=counts[0], new=counts[1], mesh=self.mesh)]
        return []

    def get_spec(self, path: str) -> tuple[object, ...] | None:
        """Return the new sharding of an array, for the manifest."""
        return self._place_tensor(path, self._get_record(path), 0)[0].spec

    def _is_zero1_sharded(self, path: str, record: ArrayRecord) -> bool:
        """Return True if ZeRO-1 shards the rows of an array: a state with the shape of its parameter.

        Raises:
            IncompatibleCheckpointError: The parameter is not stored, and the rows were not sharded by ZeRO-1 before.
        """
        owner, parameter = self._find_owner(path)
        if self._is_common_state(path) or not owner:
            return False
        if parameter is not None:
            return parameter.shape == record.shape
        if not get_zero1_axes(resolve_sharding(path, self.manifest, ())):
            raise IncompatibleCheckpointError(
                "the optimizer's rows cannot be dealt out: the parameter that this belongs to is not known",
                leaf=path,
                hint="Give the model and its optimizer: model= and optimizer= (--like).",
            )
        return True

    def _is_common_state(self, path: str) -> bool:
        """Return True if an array is optimizer state that belongs to no parameter."""
        owner = schema.get_owner(path)
        return self._parameters is not None and owner is not None and owner not in self._parameters

    def _get_local_shapes(self) -> dict[Any, tuple[int, ...]]:
        """Return the local shape of each parameter of the optimizer."""
        names = schema.get_parameter_names(self.trees[schema.OPTIMIZER]) if self._is_keyed_by_name() else ()
        leaves = {name: self._find_shape_leaf(name) for name in names}
        return {
            name: pad_evenly(self._get_sharding(leaf), record.shape, self.mesh)[1]
            for name, leaf in leaves.items()
            if (record := self.manifest.find_array(leaf)) is not None
        }

    def _find_expert_names(self) -> frozenset[str]:
        """Return the names of the optimizer's parameters that are sharded over ep."""
        names = self._get_local_shapes()
        return frozenset(name for name in names if "ep" in self._get_sharding(self._find_shape_leaf(name)).axes)

    def _find_shape_leaf(self, name: Any) -> str:
        """Return the leaf that determines a parameter's shape: the parameter, or one of its states if no model is
        stored.

        Among the states it is the one with the most dims, because a step count is a scalar.
        """
        leaf = schema.get_weight_path(name)
        if self.manifest.find_array(leaf) is not None:
            return leaf
        most = -1
        for what in self.trees[schema.OPTIMIZER][schema.STATE].get(name, {}):
            state = schema.get_state_path(name, what)
            record = self.manifest.find_array(state)
            dims = -1 if record is None else len(record.shape)
            if dims > most:
                leaf, most = state, dims
        return leaf


def has_zero1_rows(manifest: Manifest) -> bool:
    """Return True if ZeRO-1 sharded the optimizer's states when they were saved."""
    return any(
        get_zero1_axes(resolve_sharding(leaf, manifest, ())) for leaf in manifest.arrays if schema.get_owner(leaf)
    )


@lru_cache(maxsize=1 << 14)
def _compute_local_array(
    sharding: Sharding, shape: tuple[int, ...], mesh: Mesh, rank: int, zero1: bool
) -> tuple[LocalArray, tuple[int, ...]]:
    """Compute the result of `ReshardedState._place_tensor`.

    Cached because layers and optimizer states repeat the same arguments.
    """
    sharding, local = pad_evenly(sharding, shape, mesh)
    if not zero1:
        return sharding.map_local_shape(local, mesh, rank), local
    axes = ("edp",) if "ep" in sharding.axes else ("dp",)
    ranks = count_parts(axes, mesh.sizes)
    return sharding.map_zero1_shape(local, mesh, rank, axes), (-(-local[0] // ranks), *local[1:])


logger = get_logger(__name__)


def reshard_state(layout: RankLayout, stored: StoredState, to: TargetTopology) -> ReshardedState:
    """Reshard the members of a stored state that the layout supports for the target job.

    Raises:
        UsageError: There are no such members, or the pipeline cuts are invalid.
        UnsupportedStateError: The layout does not support such a job, or state that differs on every rank.
    """
    skeleton = stored.manifest.skeleton if isinstance(stored.manifest.skeleton, dict) else {}
    parts = [part for part in STATE_PARTS if part in skeleton]
    if not parts:
        raise UsageError(
            f"the tag holds nothing that the layout {layout.name} has a place for",
            expected=", ".join(STATE_PARTS),
            found=paths.format_leaves([*map(str, skeleton)]) or "no dict",
            hint='Convert it to another layout: to="dcp" (--to dcp), for instance.',
        )
    check_no_rank_local_state(skeleton, layout.name)
    zero1 = bool(to.zero1)
    choose_file_name(layout.file_names, to.mesh, per_dp=zero1)
    trees = {part: stored.tree(part, lambda path, _: LeafPlaceholder(path)) for part in parts}
    return ReshardedState(
        manifest=stored.manifest, trees=trees, mesh=to.mesh, rules=to.rules, pipeline_cuts=to.pipeline_cuts, zero1=zero1
    )


def plan_rank_file_conversion(
    layout: RankLayout,
    job: ReshardedState,
    to: TargetTopology,
    plan_files: Callable[[RankFilePlanner], Sequence[FilePlan]] | None = None,
) -> ConversionPlan:
    """Plan the files of a conversion: files of the layout, and native files for state that the layout does not support.

    Args:
        plan_files: Function that plans the layout's files of a rank. Default: `RankLayout.plan_files`.
    """
    manifest, plan_files = job.manifest, plan_files or layout.plan_files
    for message in job.collect_warnings():
        logger.warning("%s", message)
    native, specs = plan_native_files(
        manifest, [p for p in manifest.arrays if schema.get_member(p) not in job.trees], to
    )
    files = []
    for rank in range(to.mesh.size):
        plan = SavePlan(tuple(plan_files(RankFilePlanner(to.mesh, rank, job.get_rank_state(rank)))))
        files.append((*native[rank], *plan.exclude_leaves(job.list_earlier_leaves(rank)).files))
    specs |= {path: job.get_spec(path) for path in manifest.arrays if path not in specs}
    return ConversionPlan(files, specs, layout.marks)
