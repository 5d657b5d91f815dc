"""The models of all parts as one: pipeline stages hold different parameters, tp ranks parts of the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, FormatError
from xla_ckpt.layouts.by_rank.arrays import Copies, RankArray
from xla_ckpt.layouts.by_rank.files import RankFiles
from xla_ckpt.layouts.by_rank.form import StoredTensor
from xla_ckpt.layouts.by_rank.grid import RankAt
from xla_ckpt.layouts.by_rank.state import Stage
from xla_ckpt.layouts.smp.marks import STATE_DICT_MARKS
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.arrays import ArrayRecord, array_record
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.plan.hints import ArrayHint, Hints
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.sharding import Sharding, Split
from xla_ckpt.tree import schema
from xla_ckpt.tree.parameter_names import program_names

logger = get_logger(__name__)

ADDED_KEY = "xla_ckpt"
"""Key in SMP's description of a job of what this library adds to it."""

SPECS = "specs"
"""Key there of how parameters are split, by name: specs as in a manifest."""

SHAPES = "shapes"
"""Key there of the global shapes of parameters, by name, where their local tensors are padded."""


@dataclass(frozen=True, slots=True)
class MergedModel:
    """A model, put together from all pipeline stages."""

    stage: Stage
    of_stage: Mapping[int, tuple[str, ...]]
    """Names of the parameters and buffers of each pipeline stage, in its order."""


def merged_model(files: RankFiles, models: Mapping[RankAt, Mapping[Any, Any]], hints: Hints) -> MergedModel:
    """One stage of all. A name that only tp rank 0 has is one of a parameter that SMP keeps there alone.

    Raises:
        CorruptCheckpointError: A rank has a name that tp rank 0 of its pipeline stage does not have.
    """
    names = {str(name): None for tree in models.values() for name in tree if name not in STATE_DICT_MARKS}
    called = {**{name: name for name in names}, **program_names(names, hints.arrays)}
    stage = Stage()
    of_stage: dict[int, tuple[str, ...]] = {}
    plain: dict[RankAt, dict[str, Any]] = {}
    for pp in sorted({at.pp for at in models}):
        of_ranks = {at: _members(tree, called) for at, tree in models.items() if at.pp == pp}
        first = of_ranks[min(of_ranks)]
        for at, members in of_ranks.items():
            if strange := next((name for name in members if name not in first), None):
                raise CorruptCheckpointError(
                    "a tp rank holds a name that tp rank 0 of its pipeline stage does not hold: the parts are not of "
                    "one model",
                    leaf=schema.weight(strange),
                    found=f"at pp {at.pp}, tp {at.tp}",
                )
        of_stage[pp] = tuple(name for name, value in first.items() if isinstance(value, StoredTensor | UnknownArray))
        for name in first:
            by_tp = {at.tp: members[name] for at, members in of_ranks.items() if name in members}
            if all(isinstance(value, StoredTensor) for value in by_tp.values()):
                copies = {(0, 0, tp): value for tp, value in by_tp.items()}
                _tell_other(files, name, stage.copies.get(name), copies)
                stage.copies[name] = copies
            else:
                for tp, value in by_tp.items():
                    plain.setdefault(RankAt(tp=tp), {})[name] = value
    stage.plain = plain
    return MergedModel(stage, of_stage)


def _members(tree: Mapping[Any, Any], called: Mapping[str, str]) -> dict[str, Any]:
    return {called[str(name)]: value for name, value in tree.items() if name not in STATE_DICT_MARKS}


def _tell_other(files: RankFiles, name: str, one: Copies | None, other: Copies) -> None:
    """Log that two pipeline stages have a name, with different values: as with SMP, the last of them counts."""
    if one is None:
        return
    if one.keys() != other.keys() or not all(files.same(one[key], other[key]) for key in one):
        logger.warning("%s is stored by several pipeline stages with different values: the last one counts", name)


def known_hints(
    model: MergedModel, infos: list[Mapping[Any, Any]], tp: int, whole: frozenset[str], wanted: Hints
) -> Hints:
    """What is known of the arrays: from the files, and for the rest from the program that wants them.

    SMP cuts an array along one dim, and its parts are put together in the order of the tp ranks. So what is not said
    follows from the shapes, where they leave one choice.

    Args:
        infos: SMP's description of the job, from each part.
        whole: Names of parameters that each rank has whole, as the optimizer's state shows.
    """
    specs: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    for info in infos:
        ours = info.get(ADDED_KEY)
        if isinstance(ours, Mapping):
            specs |= {str(k): v for k, v in _mapping(ours.get(SPECS)).items()}
            shapes |= {str(k): tuple(v) for k, v in _mapping(ours.get(SHAPES)).items() if isinstance(v, list | tuple)}
    hints: dict[str, ArrayHint] = {name: wanted.hint(name) for name in wanted.arrays}
    nothing = ArrayHint()
    for name, copies in model.stage.copies.items():
        hint = wanted.hint(name)
        if name in specs:
            hints[name] = _said(name, hint, specs[name], shapes.get(name))
        elif tp == 1 or len(copies) == 1 or name in whole:
            hints[name] = _told(hint, Sharding())
        else:
            hints[name] = _inferred(hint, copies, tp)
        if hints[name] == nothing:
            # It is a parameter of another pipeline stage than that of the program. With a hint its state would be
            # wanted, too, and refused because nothing says how it was split.
            del hints[name]
    return replace(wanted, arrays=hints, rules=())


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _told(hint: ArrayHint, sharding: Sharding) -> ArrayHint:
    if not sharding.axes and hint.ruled and hint.sharding is not None and not hint.sharding.axes:
        return hint
    # A rule that says the same takes the first of copies that have drifted apart; otherwise they are compared.
    same = hint.ruled and hint.sharding is not None and hint.sharding.axes == sharding.axes
    return replace(hint, sharding=sharding, rule=hint.rule if same else None, told=True)


def _said(name: str, hint: ArrayHint, spec: Any, shape: tuple[int, ...] | None) -> ArrayHint:
    """What the files say of an array in so many words."""
    try:
        sharding = Sharding.parse(_tuples(spec))
    except (ValueError, TypeError) as error:
        raise FormatError(
            "what the files say of a split cannot be understood", leaf=schema.weight(name), found=str(spec)[:200]
        ) from error
    said = _told(hint, sharding)
    return said if shape is None else replace(said, shape=shape, padded=True)


def _tuples(spec: Any) -> Any:
    return tuple(map(_tuples, spec)) if isinstance(spec, list | tuple) and not _is_sections(spec) else spec


def _is_sections(spec: Any) -> bool:
    """Whether this is the list of sections within a spec, which stays a list."""
    return isinstance(spec, list) and bool(spec) and not any(s is None or isinstance(s, list | tuple) for s in spec)


def _inferred(hint: ArrayHint, copies: Copies, tp: int) -> ArrayHint:
    """What shapes say: those of the ranks, and the one that the program wants."""
    shapes = [tensor.shape for _, tensor in sorted(copies.items())]
    if len(set(shapes)) > 1:
        dim = uneven_dim(shapes)
        return hint if dim is None else _told(hint, _along(dim))
    local, shape = shapes[0], hint.shape
    if shape is None or hint.sharding is not None or len(shape) != len(local) or shape == local:
        return hint
    dims = [d for d, (n, total) in enumerate(zip(local, shape, strict=True)) if n != total]
    return _told(hint, _along(dims[0])) if len(dims) == 1 and local[dims[0]] * tp == shape[dims[0]] else hint


def _along(dim: int) -> Sharding:
    return Sharding((*(None,) * dim, Split(("tp",))))


def uneven_dim(shapes: list[tuple[int, ...]]) -> int | None:
    """The only dim in which shapes differ; None if there is another number of them.

    >>> uneven_dim([(4, 3), (4, 2)]), uneven_dim([(4, 3), (3, 2)]), uneven_dim([(4,), (4, 1)])
    (1, None, None)
    """
    if len({len(shape) for shape in shapes}) > 1:
        return None
    dims = [d for d in range(len(shapes[0])) if len({shape[d] for shape in shapes}) > 1]
    return dims[0] if len(dims) == 1 else None


def joined_parts(files: RankFiles, array: RankArray) -> ArrayRecord | None:
    """An array whose parts lie behind each other along the only dim in which they differ; None if they do not.

    SMP's tp ranks may have parts of different sizes: the first ones have more.
    """
    ordered = [array.copies[key] for key in sorted(array.copies)]
    dim = uneven_dim([tensor.shape for tensor in ordered]) if len(ordered) == array.mesh.tp else None
    if dim is None or len({tensor.dtype for tensor in ordered}) > 1:
        return None
    whole = Box.whole(ordered[0].shape)
    shards: list[Shard] = []
    start = 0
    for tensor in ordered:
        place, stop = files.place(tensor), start + tensor.shape[dim]
        if (box := whole.along(dim, start, stop)).size:
            shards.append(Shard(box, files.number(place.file), place.offset))
        start = stop
    return array_record(ordered[0].dtype, whole.along(dim, 0, start).stop, shards, _along(dim).spec)
