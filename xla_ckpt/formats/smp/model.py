"""Locate the members of SMP state dicts, and merge the models of all parts: pipeline stages hold different parameters,
tp ranks shards of the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.core.manifest.arrays import ArrayRecord, Shard, create_array_record
from xla_ckpt.core.manifest.manifest import UnreadableArray
from xla_ckpt.core.plan.hints import ArrayHint, LoadHints
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.sharding import DimSharding, Sharding
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.nested import KeyPath
from xla_ckpt.core.tree.state_dict import match_parameter_names
from xla_ckpt.errors import CorruptCheckpointError, FormatError, IncompatibleCheckpointError
from xla_ckpt.formats.rank_files.arrays import StoredArray, TensorCopies
from xla_ckpt.formats.rank_files.file_names import RankCoords
from xla_ckpt.formats.rank_files.files import RankFiles
from xla_ckpt.formats.rank_files.layout import StoredTensor
from xla_ckpt.formats.rank_files.model import StageModel
from xla_ckpt.formats.smp.tags import IS_PARTIAL, LOAD_INFO, STATE_DICT_MARKER_KEYS
from xla_ckpt.formats.state_dict_search import LocatedDict, StateClassifier, find_members
from xla_ckpt.logs import get_logger

MASTERS_KEY = "fp32_from_fp16"
"""Key of the master weights of a half-precision job, by group."""

INNER_OPTIMIZER_KEY = "optimizer_state_dict"
"""Key of the state of the optimizer itself, next to the master weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPaths:
    """Paths of the members of a training state in a saved dict; None for missing members."""

    model: KeyPath | None = None
    optimizer: KeyPath | None = None
    scheduler: KeyPath | None = None

    @property
    def paths(self) -> list[KeyPath]:
        """All paths."""
        return [path for path in (self.model, self.optimizer, self.scheduler) if path is not None]


def find_member_paths(tree: Mapping[Any, Any], hints: LoadHints) -> MemberPaths:
    """Find the paths of the members.

    Raises:
        IncompatibleCheckpointError: There are several models, or several optimizers, and the choice is ambiguous.
    """
    places = find_members({key: value for key, value in tree.items() if isinstance(key, str)}, hints, _SMP_CLASSIFIER)
    optimizer = places.optimizer
    if isinstance(optimizer, UnreadableArray) and not hints.wants_optimizer:
        # Its state still shows which parameters are sharded.
        optimizer = places.optimizers[0]
    return MemberPaths(
        model=_get_path(places.model, schema.MODEL, "Give the model: its names say so."),
        optimizer=_get_path(optimizer, schema.OPTIMIZER, "Load the model alone, and the others with torch.load."),
        scheduler=None if places.scheduler is None else places.scheduler.path,
    )


def _get_path(place: LocatedDict | UnreadableArray | None, leaf: str, hint: str) -> KeyPath | None:
    if isinstance(place, UnreadableArray):
        raise IncompatibleCheckpointError(place.problem, leaf=leaf, hint=hint)
    return None if place is None else place.path


def is_optimizer(value: Mapping[Any, Any]) -> bool:
    """Return True for the state dict of an optimizer: torch's, one with sharded state, or the SMP fp16 optimizer."""
    if MASTERS_KEY in value:
        return True
    return isinstance(value.get(schema.PARAM_GROUPS), list) and isinstance(value.get(schema.STATE), dict | list)


def get_member(tree: Any, path: KeyPath, file: str) -> Mapping[Any, Any]:
    """Return the dict at a path.

    Raises:
        CorruptCheckpointError: It does not exist, although another part of the set has one.
    """
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    if not isinstance(tree, Mapping):
        raise CorruptCheckpointError(
            "the parts hold different things",
            file=file,
            expected=f"a dict under {'.'.join(path)}, as in the first part",
            found=type(tree).__name__,
        )
    return tree


_SMP_CLASSIFIER = StateClassifier(
    is_array=lambda value: isinstance(value, StoredTensor),
    is_optimizer=is_optimizer,
    is_model=lambda content: (IS_PARTIAL in content or LOAD_INFO in content) and not is_optimizer(content),
    always_training=True,
)
"""Classifier of a state that SMP saved in parts, which is always a training state. SMP marks models, except in 1.6."""


logger = get_logger(__name__)

EXTENSION_KEY = "xla_ckpt"
"""Key of this library's additions to the SMP job description."""

SPECS_KEY = "specs"
"""Key of the shardings of parameters in these additions, by name: specs as in a manifest."""

SHAPES_KEY = "shapes"
"""Key of the global shapes of parameters with padded local tensors in these additions, by name."""


@dataclass(frozen=True, slots=True)
class MergedModel:
    """A model merged from all pipeline stages."""

    stage: StageModel
    names_by_stage: Mapping[int, tuple[str, ...]]
    """Names of the parameters and buffers of each pipeline stage, in the order of the stage."""


def merge_models(files: RankFiles, models: Mapping[RankCoords, Mapping[Any, Any]], hints: LoadHints) -> MergedModel:
    """Merge the models of all ranks into one stage. SMP stores some parameters only on tp rank 0.

    Raises:
        CorruptCheckpointError: A rank has a name that tp rank 0 of its pipeline stage does not have.
    """
    names = {str(name): None for tree in models.values() for name in tree if name not in STATE_DICT_MARKER_KEYS}
    called = {**{name: name for name in names}, **match_parameter_names(names, hints.arrays)}
    stage = StageModel()
    of_stage: dict[int, tuple[str, ...]] = {}
    plain: dict[RankCoords, dict[str, Any]] = {}
    for pp in sorted({at.pp for at in models}):
        of_ranks = {at: _rename_members(tree, called) for at, tree in models.items() if at.pp == pp}
        first = of_ranks[min(of_ranks)]
        for at, members in of_ranks.items():
            if strange := next((name for name in members if name not in first), None):
                raise CorruptCheckpointError(
                    "a tp rank holds a name that tp rank 0 of its pipeline stage does not hold: the parts are not of "
                    "one model",
                    leaf=schema.get_weight_path(strange),
                    found=f"at pp {at.pp}, tp {at.tp}",
                )
        of_stage[pp] = tuple(name for name, value in first.items() if isinstance(value, StoredTensor | UnreadableArray))
        for name in first:
            by_tp = {at.tp: members[name] for at, members in of_ranks.items() if name in members}
            if all(isinstance(value, StoredTensor) for value in by_tp.values()):
                copies = {(0, 0, tp): value for tp, value in by_tp.items()}
                _warn_about_difference(files, name, stage.copies.get(name), copies)
                stage.copies[name] = copies
            else:
                for tp, value in by_tp.items():
                    plain.setdefault(RankCoords(tp=tp), {})[name] = value
    stage.other_values = plain
    return MergedModel(stage, of_stage)


def _rename_members(tree: Mapping[Any, Any], called: Mapping[str, str]) -> dict[str, Any]:
    return {called[str(name)]: value for name, value in tree.items() if name not in STATE_DICT_MARKER_KEYS}


def _warn_about_difference(files: RankFiles, name: str, one: TensorCopies | None, other: TensorCopies) -> None:
    """Log a warning if two pipeline stages store different values under a name. As in SMP, the last one is used."""
    if one is None:
        return
    if one.keys() != other.keys() or not all(files.is_same(one[key], other[key]) for key in one):
        logger.warning("%s is stored by several pipeline stages with different values: the last one counts", name)


def build_hints(
    model: MergedModel, infos: list[Mapping[Any, Any]], tp: int, unsplit_names: frozenset[str], wanted: LoadHints
) -> LoadHints:
    """Build the hints for the arrays, from the files, and otherwise from the loading program.

    SMP shards an array along one dim, and its parts are concatenated in the order of the tp ranks. Therefore a sharding
    that is not recorded follows from the shapes if they leave one choice.

    Args:
        infos: The SMP job description from each part.
        unsplit_names: Names of parameters that each rank has in full, according to the optimizer's state.
        wanted: Hints of the loading program.
    """
    specs: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    for info in infos:
        ours = info.get(EXTENSION_KEY)
        if isinstance(ours, Mapping):
            specs |= {str(k): v for k, v in _as_mapping(ours.get(SPECS_KEY)).items()}
            shapes |= {
                str(k): tuple(v) for k, v in _as_mapping(ours.get(SHAPES_KEY)).items() if isinstance(v, list | tuple)
            }
    hints: dict[str, ArrayHint] = {name: wanted.get_hint(name) for name in wanted.arrays}
    nothing = ArrayHint()
    for name, copies in model.stage.copies.items():
        hint = wanted.get_hint(name)
        if name in specs:
            hints[name] = _parse_hint(name, hint, specs[name], shapes.get(name))
        elif tp == 1 or len(copies) == 1 or name in unsplit_names:
            hints[name] = _set_sharding(hint, Sharding())
        else:
            hints[name] = _infer_hint(hint, copies, tp)
        if hints[name] == nothing:
            # It is a parameter of another pipeline stage than the program's. With a hint its state would also be
            # requested, and would raise an error because its sharding is unknown.
            del hints[name]
    return replace(wanted, arrays=hints, rules=())


def _as_mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _set_sharding(hint: ArrayHint, sharding: Sharding) -> ArrayHint:
    if not sharding.axes and hint.has_rule and hint.sharding is not None and not hint.sharding.axes:
        return hint
    # A rule with the same sharding uses the first of copies that have diverged; otherwise they are compared.
    same = hint.has_rule and hint.sharding is not None and hint.sharding.axes == sharding.axes
    return replace(hint, sharding=sharding, rule_text=hint.rule_text if same else None, is_declared_in_tag=True)


def _parse_hint(name: str, hint: ArrayHint, spec: Any, shape: tuple[int, ...] | None) -> ArrayHint:
    """Build a hint from the sharding and shape that the files record.

    Raises:
        FormatError: The recorded sharding is invalid.
    """
    try:
        sharding = Sharding.parse(_to_tuples(spec))
    except (ValueError, TypeError) as error:
        raise FormatError(
            "what the files say of a split cannot be understood",
            leaf=schema.get_weight_path(name),
            found=str(spec)[:200],
        ) from error
    said = _set_sharding(hint, sharding)
    return said if shape is None else replace(said, shape=shape, shape_excludes_padding=True)


def _to_tuples(spec: Any) -> Any:
    return tuple(map(_to_tuples, spec)) if isinstance(spec, list | tuple) and not _is_sections(spec) else spec


def _is_sections(spec: Any) -> bool:
    """Return True for a list of sections within a spec, which remains a list."""
    return isinstance(spec, list) and bool(spec) and not any(s is None or isinstance(s, list | tuple) for s in spec)


def _infer_hint(hint: ArrayHint, copies: TensorCopies, tp: int) -> ArrayHint:
    """Infer the sharding from the local shapes and the requested shape."""
    shapes = [tensor.shape for _, tensor in sorted(copies.items())]
    if len(set(shapes)) > 1:
        dim = find_uneven_dim(shapes)
        return hint if dim is None else _set_sharding(hint, _shard_along(dim))
    local, shape = shapes[0], hint.shape
    if shape is None or hint.sharding is not None or len(shape) != len(local) or shape == local:
        return hint
    dims = [d for d, (n, total) in enumerate(zip(local, shape, strict=True)) if n != total]
    return (
        _set_sharding(hint, _shard_along(dims[0])) if len(dims) == 1 and local[dims[0]] * tp == shape[dims[0]] else hint
    )


def _shard_along(dim: int) -> Sharding:
    return Sharding((*(None,) * dim, DimSharding(("tp",))))


def find_uneven_dim(shapes: list[tuple[int, ...]]) -> int | None:
    """Return the only dim in which shapes differ; None if they differ in no dim or in several.

    >>> find_uneven_dim([(4, 3), (4, 2)]), find_uneven_dim([(4, 3), (3, 2)]), find_uneven_dim([(4,), (4, 1)])
    (1, None, None)
    """
    if len({len(shape) for shape in shapes}) > 1:
        return None
    dims = [d for d in range(len(shapes[0])) if len({shape[d] for shape in shapes}) > 1]
    return dims[0] if len(dims) == 1 else None


def join_uneven_parts(files: RankFiles, array: StoredArray) -> ArrayRecord | None:
    """Concatenate parts along the only dim in which their sizes differ; None if they do not.

    SMP tp ranks may have parts of different sizes: the first ranks have larger parts.
    """
    ordered = [array.copies[key] for key in sorted(array.copies)]
    dim = find_uneven_dim([tensor.shape for tensor in ordered]) if len(ordered) == array.mesh.tp else None
    if dim is None or len({tensor.dtype for tensor in ordered}) > 1:
        return None
    whole = Box.from_shape(ordered[0].shape)
    shards: list[Shard] = []
    start = 0
    for tensor in ordered:
        place, stop = files.locate(tensor), start + tensor.shape[dim]
        if (box := whole.slice_dim(dim, start, stop)).size:
            shards.append(Shard(box, files.get_file_number(place.file), place.offset))
        start = stop
    return create_array_record(ordered[0].dtype, whole.slice_dim(dim, 0, start).stop, shards, _shard_along(dim).spec)
