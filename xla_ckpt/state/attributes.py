"""What neuronx-distributed's and Megatron's attributes on a parameter say of how it is split."""

from __future__ import annotations

from typing import Any

from xla_ckpt.arrays.chunks import GLOBAL_SHAPE, check_attributes, is_checkpointable
from xla_ckpt.arrays.torch_objects import is_torchs_own
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sections import Section, parse_section
from xla_ckpt.sharding.sharding import STAGE, Sharding, Split, number_of_parts

UNPADDED_SHAPE = "unpadded_shape"

_ATTRIBUTES = frozenset({"tensor_model_parallel", "expert_model_parallel", UNPADDED_SHAPE, GLOBAL_SHAPE})


def is_declared(value: Any) -> bool:
    """Whether attributes of a parameter say how it is split."""
    own = getattr(value, "__dict__", None)
    if not own and is_torchs_own(value):
        return False  # as of nearly all arrays
    return any(hasattr(value, name) for name in _ATTRIBUTES)


def declared_sharding(value: Any, path: str, mesh: Mesh | None = None) -> Sharding | None:
    """The sharding that a parameter's attributes name; None if they name none.

    They are ``tensor_model_parallel``, ``partition_dim``, ``partition_stride``, ``num_partitions``,
    ``expert_model_parallel`` (the first dim holds experts), and two of this library's own: ``unpadded_shape``, the
    global shape of a padded parameter without its padding, and ``partition_sections``, sections of different sizes as a
    rule spells them.

    Args:
        value: The parameter.
        path: Its leaf path, for errors.
        mesh: How the ranks of the job are arranged that holds it: axes of one rank split nothing, and
            ``num_partitions`` counts, which is 1 for a weight that every rank has whole. None asks how any other job
            splits it: then the sizes of this one say nothing.

    Raises:
        UnsupportedStateError: They contradict each other, the parameter or the mesh.
    """
    if not is_declared(value):
        return None  # as of nearly all arrays
    check_attributes(value, path)
    shape = tuple(getattr(value, "shape", ()))
    dims: list[Split | None] = [None] * len(shape)
    if getattr(value, "tensor_model_parallel", False):
        dim, stride = getattr(value, "partition_dim", None), getattr(value, "partition_stride", None) or 1
        partitions = getattr(value, "num_partitions", None) or None
        fits = type(dim) is int and -len(dims) <= dim < len(dims) and type(stride) is int and stride > 0
        axes = _axes(value, dim, partitions, mesh) if fits and dim is not None else None
        if dim is None or axes is None:
            raise UnsupportedStateError(
                "the tensor-parallel attributes do not fit",
                leaf=path,
                expected=f"a dim of {list(shape)}, a stride" + (f", {mesh.tp} partitions" if mesh is not None else ""),
                found=f"partition_dim {dim}, partition_stride {stride}, num_partitions {partitions}",
                hint="Check the mesh, or pass a shardings rule.",
            )
        sections = _sections(value, path, stride)
        if mesh is None or (number_of_parts(axes, mesh.sizes) > 1 and partitions != 1) or sections:
            dims[dim] = Split(axes, sections) if sections else Split.strided(axes, stride)
    if getattr(value, "expert_model_parallel", False) and (mesh is None or mesh.ep > 1):
        if not dims or dims[0] is not None:
            raise UnsupportedStateError(
                "experts and tensor parallelism split the same dim" if dims else "a number cannot hold experts",
                leaf=path,
                hint="Check the attributes of the parameter, or pass a shardings rule.",
            )
        dims[0] = Split(("ep",))
    true = true_shape(value)
    return Sharding(tuple(dims), true) if any(dims) or true is not None else None


def _axes(value: Any, dim: int, partitions: int | None, mesh: Mesh | None) -> tuple[str, ...] | None:
    """The mesh axes over which `num_partitions` says that a dim is split; None if the mesh has no such axes.

    They are tp, but for the numbers that neuronx-distributed's `SPMDRank` gives each rank of the world: its own number,
    and those of its experts. These are integers in rows of which each rank has one.
    """
    if not value.is_floating_point() and value.shape[dim] == 1 and (mesh is None or partitions == mesh.size != mesh.tp):
        return STAGE  # other stages have parameters of other names
    return ("tp",) if mesh is None or partitions in (None, 1, mesh.tp) else None


def true_shape(value: Any) -> tuple[int, ...] | None:
    """The global shape without padding, as a parameter's ``unpadded_shape`` names it; None without one that fits.

    Its older name is ``global_shape``, which torch's `CheckpointableTensor` has for another purpose, with other
    attributes beside it.
    """
    older = None if is_checkpointable(value) else getattr(value, GLOBAL_SHAPE, None)
    named = getattr(value, UNPADDED_SHAPE, older)
    return None if named is None or len(named) != len(value.shape) else tuple(named)


def _sections(value: Any, path: str, stride: int) -> tuple[Section, ...]:
    """The sections that a parameter's ``partition_sections`` name; none without it."""
    named = getattr(value, "partition_sections", None)
    if named is None:
        return ()
    try:
        sections = tuple(map(parse_section, named))
        Split(("tp",), sections)
    except (TypeError, ValueError) as error:
        raise UnsupportedStateError(
            f"the partition_sections of a parameter make no sense: {error}", leaf=path, found=repr(named)
        ) from error
    if stride not in (1, len(sections)):
        raise UnsupportedStateError(
            "a parameter has sections, and another number of strided blocks",
            leaf=path,
            found=f"partition_sections {list(named)}, partition_stride {stride}",
        )
    return sections
