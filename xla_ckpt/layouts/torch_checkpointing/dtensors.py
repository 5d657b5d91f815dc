"""DTensors in files of torch.save: the names that their pickles have, and what stands for each.

A DTensor becomes the view of its local tensor, with a `MeshCutting` as its `part`. torch.distributed is not loaded.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from xla_ckpt.errors import CheckpointError, UnsupportedStateError
from xla_ckpt.layouts.torch_save.pickle_names import NAMES_IN_PICKLES
from xla_ckpt.layouts.torch_save.stand_ins import Attributes, Factory, Function, Opaque, TensorView, of_type, sizes_in
from xla_ckpt.sharding.mesh_cuts import MeshCut, MeshCutting, cutting_of

_REBUILT = "torch._tensor._rebuild_from_type_v2"

_DTENSOR = Factory("DTensor")


class _Fields:
    """Stands for a named tuple: its fields, in order."""

    def __init__(self, *fields: Any) -> None: ...  # what `__new__` is given, is given to this, too, where it is called

    def __new__(cls, *fields: Any) -> _Fields:
        stand_in = super().__new__(cls)
        stand_in.fields = fields
        return stand_in

    fields: tuple[Any, ...]

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a state for a named tuple, which has none")


def _wrapper(*_: Any) -> Any:
    raise ValueError("a tensor of a class of its own")


def _rebuilt(make: Any, kind: Any, args: Any, state: Any = None) -> Any:
    """What torch makes of a tensor with attributes: the view of a DTensor, or of a plain tensor."""
    if kind is _DTENSOR and isinstance(make, Function) and make.make is _wrapper:
        # Attributes in slots come behind those that are in none.
        slots = state[1] if isinstance(state, tuple) and len(state) == 2 else state
        local = slots.get("_local_tensor") if isinstance(slots, dict) else None
        if isinstance(local, TensorView):
            return replace(local, part=_cutting(slots.get("_spec")))
        return Opaque.of("torch.distributed.tensor.DTensor")()
    try:
        return NAMES_IN_PICKLES[_REBUILT](make, kind, args)
    except (CheckpointError, ValueError):
        return Opaque.of(_REBUILT)()


NAMES_OF_DTENSORS: dict[str, Any] = {
    _REBUILT: _rebuilt,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch.distributed.tensor.DTensor": _DTENSOR,
    "torch.serialization._get_layout": lambda name: None,
    **{
        name: Attributes.of(name)
        for name in (
            "torch.distributed.tensor._dtensor_spec.DTensorSpec",
            "torch.distributed.device_mesh.DeviceMesh",
            "torch.distributed._mesh_layout._MeshLayout",
            "torch.distributed._mesh_layout._FlatLayout",
            *(
                f"torch.distributed.tensor.placement_types.{placement}"
                for placement in ("Shard", "_StridedShard", "Replicate", "Partial", "_NormPartial", "_MaskPartial")
            ),
        )
    },
    **{
        f"torch.distributed.tensor._dtensor_spec.{name}": type(name, (_Fields,), {})
        for name in ("TensorMeta", "ShardOrderEntry")
    },
}
"""What `Zip.value` takes as `more`."""


def _cutting(spec: Any) -> MeshCutting:
    """How a DTensor with this spec was cut."""
    try:
        facts = _attributes(spec)
        shape = sizes_in(of_type(_Fields, facts["tensor_meta"]).fields[0])
        try:
            _check_order(facts.get("shard_order"))
            mesh = _attributes(facts["mesh"])
            coordinate = mesh["_coordinate_on_dim"]
            if coordinate is None:  # the rank is not in the mesh, and holds nothing
                return MeshCutting(shape=shape)
            names = mesh.get("_mesh_dim_names")
            placements = [_placement(placement) for placement in of_type(_SEQUENCE, facts["placements"])]
            return cutting_of(
                shape,
                _mesh_sizes(mesh),
                sizes_in(coordinate),
                placements,
                None if names is None else tuple(of_type(str, name) for name in of_type(_SEQUENCE, names)),
            )
        except UnsupportedStateError as error:
            return MeshCutting(shape=shape, problem=error.problem)
    except (LookupError, ValueError, TypeError) as error:
        return MeshCutting(
            shape=(), problem=f"its mesh and placements are not described as torch 2.11 and newer do it: {error}"
        )


_SEQUENCE = (tuple, list)


def _mesh_sizes(mesh: dict[str, Any]) -> tuple[int, ...]:
    """Size of each dim of a mesh, whose form differs between versions of torch."""
    layout = _attributes(mesh["_layout"])
    axes = layout.get("shape")
    if "axes" in layout:
        axes = [_attributes(axis)["shape"] for axis in of_type(_SEQUENCE, layout["axes"])]
    return tuple(prod(sizes_in([axis] if type(axis) is int else axis)) for axis in of_type(_SEQUENCE, axes))


def _check_order(order: Any) -> None:
    for entry in order or ():
        _, mesh_dims = of_type(_Fields, entry).fields
        if list(mesh_dims) != sorted(mesh_dims):
            raise UnsupportedStateError("a DTensor that is cut in another order than that of its mesh dims is not read")


def _placement(placement: Any) -> MeshCut:
    facts = _attributes(placement)
    kind = placement.called.rpartition(".")[2]
    if kind == "Replicate":
        return MeshCut(None)
    if kind not in ("Shard", "_StridedShard"):
        raise UnsupportedStateError(f"a DTensor with the placement {kind} has no values of its own")
    return MeshCut(of_type(int, facts["dim"]), of_type(int, facts["split_factor"]) if kind == "_StridedShard" else 1)


def _attributes(value: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = vars(of_type(Attributes, value))
    return attributes
