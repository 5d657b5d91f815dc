"""Adapter for jax arrays. Imports jax, and is only loaded if the program has imported it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from xla_ckpt.arrays.numpy_array import get_array_bytes
from xla_ckpt.arrays.pytree import get_target_sharding
from xla_ckpt.core import dtypes
from xla_ckpt.core.dtypes import DType, to_numpy_dtype
from xla_ckpt.core.lightweight import slots_dataclass
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray, Piece
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.loading.target import Target
from xla_ckpt.snapshot.memory import SlabAllocator
from xla_ckpt.snapshot.shards import HostShard
from xla_ckpt.storage.threads import HUGE_PAGE_BYTES


def _create_box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    bounds = [s.indices(n) for s, n in zip(index, shape, strict=True)]
    return Box(tuple(b[0] for b in bounds), tuple(b[1] for b in bounds))


def _get_device_boxes(sharding: Any, shape: tuple[int, ...]) -> list[Box]:
    """Return the region of each local device.

    Raises:
        UsageError: If the sharding cannot split the shape.
    """
    try:
        indices = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise _create_sharding_error(sharding, shape, error) from error
    return [_create_box(index, shape) for index in indices.values()]


def _create_sharding_error(sharding: Any, shape: tuple[int, ...], error: ValueError) -> UsageError:
    """Create the error for an array that a sharding cannot split."""
    expected = f"what fits to it: {error}"
    spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else ()
    for dim, (size, axes) in enumerate(zip(shape, spec, strict=False)):
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        count = math.prod(sharding.mesh.shape[name] for name in names)
        if size % count:
            of_axes = " and ".join(f"{name!r} of {sharding.mesh.shape[name]}" for name in names)
            expected = f"dim {dim}, which the mesh splits along {of_axes}, to be a multiple of {count}"
            break
    return UsageError(
        "the sharding of an array does not fit to its shape",
        expected=expected,
        found=f"shape {list(shape)}",
        hint="Split another dim, or no dim: jax has no arrays of unequal parts.",
    )


@slots_dataclass()
class _ArrayPlacement:
    """The regions of all arrays with one sharding and shape."""

    local: LocalArray
    """The regions that this process writes."""

    shard_numbers: tuple[int, ...]
    """Indices of these regions in `addressable_shards`."""

    @classmethod
    def from_array(cls, value: Any) -> _ArrayPlacement:
        """Return the placement of an array. Among replicas of a region, the one with `replica_id` 0 is written."""
        owned = [
            (n, _create_box(s.index, value.shape)) for n, s in enumerate(value.addressable_shards) if s.replica_id == 0
        ]
        boxes = [(number, box) for number, box in owned if box.size]
        pieces = tuple(Piece(Box.from_shape(box.shape), box) for _, box in boxes)
        return cls(LocalArray(shape=tuple(value.shape), pieces=pieces), tuple(number for number, _ in boxes))


@functools.lru_cache(maxsize=4096)
def _locate_on_devices(sharding: Any, shape: tuple[int, ...]) -> LocalArray:
    """Return the regions of all local devices, including replicas."""
    of_device = [Box.from_shape(shape)] if sharding is None else _get_device_boxes(sharding, shape)
    return LocalArray(shape=shape, pieces=tuple(Piece(Box.from_shape(b.shape), b) for b in of_device))


@functools.cache
def _find_dtype(numpy_dtype: Any) -> DType | None:
    """Return the dtype; None if it cannot be stored."""
    return dtypes.get_dtype(numpy_dtype.name) if dtypes.is_known_dtype(numpy_dtype.name) else None


@functools.cache
def _is_prng_key_dtype(dtype: Any) -> bool:
    """Return True for a dtype of typed PRNG keys."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


class JaxAdapter:
    """An adapter for jax arrays, unsharded or sharded over the devices of this process."""

    kind = "jax"

    def __init__(self) -> None:
        self._placements: dict[tuple[Any, tuple[int, ...]], _ArrayPlacement] = {}
        """Placements by sharding and shape: most programs have few, and computing them per array would dominate the
        time."""
        self._shard_numbers: dict[int, tuple[int, ...]] = {}
        """Shard indices of each placement, by the id of its `local`."""

    def can_handle(self, value: Any) -> bool:
        return isinstance(value, jax.Array) and not _is_prng_key_dtype(value.dtype)

    def get_identity(self, value: Any) -> Hashable | None:
        return "jax", id(value)

    def get_dtype(self, value: Any, path: str = "") -> DType:
        element = _find_dtype(value.dtype)
        if element is None:
            raise UnsupportedStateError(f"a jax array of dtype {value.dtype} cannot be stored", leaf=path)
        return element

    def get_form_key(self, value: Any) -> Hashable | None:
        return None if isinstance(value, jax.core.Tracer) else (value.dtype, value.shape, value.sharding)

    def get_shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.shape)

    def locate(self, value: Any, path: str = "") -> LocalArray | None:
        if isinstance(value, jax.core.Tracer):
            raise UnsupportedStateError(
                "a jax array is being traced, and has no values yet",
                leaf=path,
                hint="Save and load outside of functions that jax.jit, grad or vmap trace.",
            )
        if value.is_deleted():  # donated by the program: a pattern whose sharding the new array gets
            return _locate_on_devices(value.sharding, value.shape)
        return self._get_placement(value).local

    def _get_placement(self, value: Any) -> _ArrayPlacement:
        key = value.sharding, value.shape
        if (place := self._placements.get(key)) is None:
            place = self._placements[key] = _ArrayPlacement.from_array(value)
            self._shard_numbers[id(place.local)] = place.shard_numbers
        return place

    def get_host_shards(self, values: Sequence[tuple[Any, LocalArray]]) -> list[list[HostShard]]:
        for value, _ in values:
            if value.is_deleted():
                raise UnsupportedStateError(
                    f"a jax array, {value.dtype} {list(value.shape)}, was deleted before the save",
                    hint="A step that donates its arguments deletes them: save what it returns.",
                )
        return [[_create_host_shard(data) for data in self._get_piece_data(value, local)] for value, local in values]

    get_shards = get_host_shards

    def create_in_place_target(self, value: Any, local: LocalArray, *, owned: bool) -> Target:
        return self.create_target_like(value, local)  # jax arrays are immutable: the new one replaces it

    def create_target_like(self, value: Any, local: LocalArray, dtype: DType | None = None) -> Target:
        element = to_numpy_dtype(dtype or self.get_dtype(value))
        return create_jax_target(value.shape, element, get_target_sharding(value), weak_type=value.weak_type)

    def _get_piece_data(self, value: Any, local: LocalArray) -> list[Any]:
        """Return the data of each piece."""
        numbers = self._shard_numbers.get(id(local))
        if numbers is not None:
            return [value.addressable_data(number) for number in numbers]
        return _get_copied_piece_data(value, local)


def _get_copied_piece_data(value: Any, local: LocalArray) -> list[Any]:
    """Return the data of each piece. For pieces with one region, which are replicas, the written one comes first."""
    copies: dict[Box, list[Any]] = {}
    for shard in sorted(value.addressable_shards, key=lambda s: s.replica_id):
        copies.setdefault(_create_box(shard.index, value.shape), []).append(shard.data)
    return [copies[piece.global_box].pop(0) for piece in local.pieces]


def _create_host_shard(data: Any) -> HostShard:
    # On CPU this is a view that holds the buffer: jax does not donate a buffer that is held, but copies it.
    plain = np.asarray(data)
    plain = plain if plain.flags.c_contiguous else np.ascontiguousarray(plain)
    return HostShard(get_array_bytes(plain), (data, plain), immutable=True)


@dataclass(slots=True)
class NewJaxTarget(Target):
    """A target that creates a new jax array. Only the regions of local devices are read, each region once."""

    dtype: DType
    local: LocalArray
    sharding: Any
    """None for jax's default device."""

    weak_type: bool

    buffers: dict[Box, Any] = field(default_factory=dict)
    """The memory of each region."""

    live = False

    def allocate(self, slabs: SlabAllocator) -> list[memoryview]:
        element = to_numpy_dtype(self.dtype)
        self.buffers = {box: _allocate_region(box.shape, element, slabs) for box in self.local.boxes}
        return [get_array_bytes(part) for part in self.buffers.values()]

    def install(self) -> Any:
        (array,) = self.install_all([self])
        return array

    @classmethod
    def install_all(cls, targets: Sequence[NewJaxTarget]) -> list[Any]:
        # One call for all arrays on the default device, and one for all others: a call for each takes more than twice
        # as long. These transfers are explicit, which jax.transfer_guard("disallow") allows.
        free = iter(jax.device_put([target._get_whole_buffer() for target in targets if target.sharding is None]))
        copies = [copy for target in targets if target.sharding is not None for copy in target._get_device_buffers()]
        placed = iter(jax.device_put([part for part, _ in copies], [device for _, device in copies]))
        arrays = [next(free) if target.sharding is None else target._assemble_array(placed) for target in targets]
        return [
            _set_weak_type(array) if target.weak_type else array for target, array in zip(targets, arrays, strict=True)
        ]

    def with_weak_type(self, weak_type: bool) -> NewJaxTarget:
        return replace(self, weak_type=weak_type)

    def _get_whole_buffer(self) -> Any:
        (part,) = self.buffers.values()
        return part

    def _get_device_buffers(self) -> list[tuple[Any, Any]]:
        """Return the buffer of each device, and its single-device sharding."""
        indices = self.sharding.addressable_devices_indices_map(self.local.shape)
        kind = self.sharding.memory_kind
        return [
            (
                self.buffers[_create_box(index, self.local.shape)],
                jax.sharding.SingleDeviceSharding(device, memory_kind=kind),
            )
            for device, index in indices.items()
        ]

    def _assemble_array(self, device_arrays: Iterator[Any]) -> Any:
        """Assemble the array from the next items of `device_arrays`."""
        of_devices = list(itertools.islice(device_arrays, len(self.local.pieces)))
        return jax.make_array_from_single_device_arrays(self.local.shape, self.sharding, of_devices)


def _set_weak_type(array: Any) -> Any:
    """Return the array with a weak type. jax has no public function for this, except for scalars."""
    shards = [shard.data for shard in array.addressable_shards]
    return type(array)(array.aval.update(weak_type=True), array.sharding, shards, committed=array.committed)


def _allocate_region(shape: tuple[int, ...], dtype: np.dtype[Any], slabs: SlabAllocator) -> Any:
    """Allocate memory for a region. On a CPU, jax copies it unless it is aligned, as memory of the slab allocator
    is.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    return slabs.allocate(nbytes).view(dtype).reshape(shape) if nbytes >= HUGE_PAGE_BYTES else np.empty(shape, dtype)


def create_jax_target(shape: tuple[int, ...], dtype: Any, sharding: Any, *, weak_type: bool = False) -> Target:
    """Create a target for a new jax array; `sharding` None means jax's default device.

    The stored array determines the weak type, unless an older version stored it (see `Target.with_weak_type`).

    Raises:
        UsageError: If jax does not support the dtype, or the sharding does not fit the shape.
    """
    check_can_create_dtype(dtype)
    sharding = _resolve_abstract_mesh(sharding)
    return NewJaxTarget(
        dtypes.get_dtype(np.dtype(dtype).name), _locate_on_devices(sharding, shape), sharding, weak_type
    )


def _resolve_abstract_mesh(sharding: Any) -> Any:
    """Return a sharding over devices. An abstract mesh, as from `jax.eval_shape`, is replaced by the mesh of the
    context.

    Raises:
        UsageError: If there is no mesh in the context, or a different one.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding) or isinstance(sharding.mesh, jax.sharding.Mesh):
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.shape_tuple != sharding.mesh.shape_tuple:
        raise UsageError(
            "the sharding of an array is one over an abstract mesh, which has no devices",
            expected=f"jax.set_mesh with a mesh of {dict(sharding.mesh.shape)}",
            found="no mesh" if mesh.empty else f"a mesh of {dict(mesh.shape)}",
            hint="Call restore inside of `with jax.set_mesh(mesh):`, or put shardings over a mesh into `like`.",
        )
    return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def can_create_dtype(dtype: Any) -> bool:
    """Return True if jax creates arrays of a dtype without truncating it to 32 bits."""
    return bool(jax.dtypes.canonicalize_dtype(dtype) == dtype)


def check_can_create_dtype(dtype: Any) -> None:
    """Check that jax does not truncate a 64-bit dtype.

    Raises:
        UsageError: If jax_enable_x64 is off.
    """
    if not can_create_dtype(dtype):
        raise UsageError(
            "jax truncates arrays of 64 bits, since jax_enable_x64 is off",
            expected=f"an array of {np.dtype(dtype).name}",
            found=f"jax makes {jax.dtypes.canonicalize_dtype(dtype).name}",
            hint="Call jax.config.update('jax_enable_x64', True) first. Or ask for an array of numpy's, with "
            "ArraySpec(shape, np.dtype(...)); or for floating-point values of a smaller type, with cast=True.",
        )


def create_number_array(pattern: Any, number: Any) -> Any:
    """Convert a 0-d numpy array to a jax array like a pattern.

    Raises:
        UsageError: If jax does not support its dtype.
    """
    check_can_create_dtype(number.dtype)
    array = jax.device_put(number, _resolve_abstract_mesh(get_target_sharding(pattern)))
    return _set_weak_type(array) if getattr(pattern, "weak_type", False) else array
