"""jax arrays. Loaded only where jax already is."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from xla_ckpt import dtypes
from xla_ckpt.arrays.numpy_array import bytes_of_array
from xla_ckpt.arrays.pytree import wanted_sharding
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.numpy_types import numpy_dtype
from xla_ckpt.engine.target import Target
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.lightweight import lightweight
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import LocalArray, Piece
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.snapshot.shards import HostShard
from xla_ckpt.storage.pool import HUGE_BYTES


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    bounds = [s.indices(n) for s, n in zip(index, shape, strict=True)]
    return Box(tuple(b[0] for b in bounds), tuple(b[1] for b in bounds))


def _boxes(sharding: Any, shape: tuple[int, ...]) -> list[Box]:
    """What each device of this process holds of an array."""
    try:
        indices = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise _unfit(sharding, shape, error) from error
    return [_box(index, shape) for index in indices.values()]


def _unfit(sharding: Any, shape: tuple[int, ...], error: ValueError) -> UsageError:
    """The error for an array that a sharding cannot split."""
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


@lightweight()
class _Place:
    """Where all arrays of one sharding and shape lie."""

    local: LocalArray
    """What this process writes of them."""

    numbers: tuple[int, ...]
    """In which of its shards that is."""

    @classmethod
    def of(cls, value: Any) -> _Place:
        """That of an array. Of the copies of a region, jax counts one as the first: this is written."""
        owned = [(n, _box(s.index, value.shape)) for n, s in enumerate(value.addressable_shards) if s.replica_id == 0]
        boxes = [(number, box) for number, box in owned if box.size]
        pieces = tuple(Piece(Box.whole(box.shape), box) for _, box in boxes)
        return cls(LocalArray(shape=tuple(value.shape), pieces=pieces), tuple(number for number, _ in boxes))


@functools.lru_cache(maxsize=4096)
def _on_devices(sharding: Any, shape: tuple[int, ...]) -> LocalArray:
    """What the devices of this process hold of an array, copies included."""
    of_device = [Box.whole(shape)] if sharding is None else _boxes(sharding, shape)
    return LocalArray(shape=shape, pieces=tuple(Piece(Box.whole(b.shape), b) for b in of_device))


@functools.cache
def _element_type(numpy_type: Any) -> DType | None:
    """Its type; None for one that cannot be stored."""
    return dtypes.dtype(numpy_type.name) if dtypes.known(numpy_type.name) else None


@functools.cache
def _is_key_type(element_type: Any) -> bool:
    """Whether it is the type of typed keys of random numbers."""
    return bool(jax.dtypes.issubdtype(element_type, jax.dtypes.prng_key))


class Jax:
    """jax arrays, whole or sharded over the devices of this process."""

    kind = "jax"

    def __init__(self) -> None:
        self._places: dict[tuple[Any, tuple[int, ...]], _Place] = {}
        """By sharding and shape, of which most programs have few: to ask each array takes longer than all the rest."""
        self._numbers: dict[int, tuple[int, ...]] = {}
        """The numbers of each place, by the identity of what is written."""

    def accepts(self, value: Any) -> bool:
        return isinstance(value, jax.Array) and not _is_key_type(value.dtype)

    def identity(self, value: Any) -> Hashable | None:
        return "jax", id(value)

    def dtype(self, value: Any, path: str = "") -> DType:
        element = _element_type(value.dtype)
        if element is None:
            raise UnsupportedStateError(f"a jax array of dtype {value.dtype} cannot be stored", leaf=path)
        return element

    def look(self, value: Any) -> Hashable | None:
        return None if isinstance(value, jax.core.Tracer) else (value.dtype, value.shape, value.sharding)

    def shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.shape)

    def place(self, value: Any, path: str = "") -> LocalArray | None:
        if isinstance(value, jax.core.Tracer):
            raise UnsupportedStateError(
                "a jax array is being traced, and has no values yet",
                leaf=path,
                hint="Save and load outside of functions that jax.jit, grad or vmap trace.",
            )
        if value.is_deleted():  # a pattern that the program has donated: it says where the new one is to lie
            return _on_devices(value.sharding, value.shape)
        return self._place(value).local

    def _place(self, value: Any) -> _Place:
        key = value.sharding, value.shape
        if (place := self._places.get(key)) is None:
            place = self._places[key] = _Place.of(value)
            self._numbers[id(place.local)] = place.numbers
        return place

    def host(self, values: Sequence[tuple[Any, LocalArray]]) -> list[list[HostShard]]:
        for value, _ in values:
            if value.is_deleted():
                raise UnsupportedStateError(
                    f"a jax array, {value.dtype} {list(value.shape)}, was deleted before the save",
                    hint="A step that donates its arguments deletes them: save what it returns.",
                )
        return [[_host(data) for data in self._data(value, local)] for value, local in values]

    shards = host

    def into(self, value: Any, local: LocalArray, *, owned: bool) -> Target:
        return self.like(value, local)  # a jax array cannot be overwritten: its place takes the new one

    def like(self, value: Any, local: LocalArray, dtype: DType | None = None) -> Target:
        element = numpy_dtype(dtype or self.dtype(value))
        return fresh_jax(value.shape, element, wanted_sharding(value), weak_type=value.weak_type)

    def _data(self, value: Any, local: LocalArray) -> list[Any]:
        """The data of each piece."""
        numbers = self._numbers.get(id(local))
        if numbers is not None:
            return [value.addressable_data(number) for number in numbers]
        return _data_of_copies(value, local)


def _data_of_copies(value: Any, local: LocalArray) -> list[Any]:
    """The data of each piece. Pieces of one region are its copies on several devices: first the one that is written."""
    copies: dict[Box, list[Any]] = {}
    for shard in sorted(value.addressable_shards, key=lambda s: s.replica_id):
        copies.setdefault(_box(shard.index, value.shape), []).append(shard.data)
    return [copies[piece.box].pop(0) for piece in local.pieces]


def _host(data: Any) -> HostShard:
    # On CPU this is a view that holds the buffer: jax copies rather than donate a buffer that is held.
    plain = np.asarray(data)
    plain = plain if plain.flags.c_contiguous else np.ascontiguousarray(plain)
    return HostShard(bytes_of_array(plain), (data, plain), immutable=True)


@dataclass(slots=True)
class NewJax(Target):
    """A target that makes a new jax array. Only what the devices of this process hold is read, each region once."""

    dtype: DType
    local: LocalArray
    sharding: Any
    """None means jax's default device."""

    weak_type: bool

    parts: dict[Box, Any] = field(default_factory=dict)
    """The memory of each region."""

    live = False

    def memory(self, slabs: Slabs) -> list[memoryview]:
        element = numpy_dtype(self.dtype)
        self.parts = {box: _room(box.shape, element, slabs) for box in self.local.boxes}
        return [bytes_of_array(part) for part in self.parts.values()]

    def install(self) -> Any:
        (array,) = self.install_all([self])
        return array

    @classmethod
    def install_all(cls, targets: Sequence[NewJax]) -> list[Any]:
        # One call for all that go to the default device, and one for all others: a call for each takes more than twice
        # as long. These transfers are explicit, which jax.transfer_guard("disallow") allows.
        free = iter(jax.device_put([target._whole() for target in targets if target.sharding is None]))
        copies = [copy for target in targets if target.sharding is not None for copy in target._copies()]
        placed = iter(jax.device_put([part for part, _ in copies], [device for _, device in copies]))
        arrays = [next(free) if target.sharding is None else target._placed(placed) for target in targets]
        return [_weak(array) if target.weak_type else array for target, array in zip(targets, arrays, strict=True)]

    def with_weak_type(self, weak_type: bool) -> NewJax:
        return replace(self, weak_type=weak_type)

    def _whole(self) -> Any:
        (part,) = self.parts.values()
        return part

    def _copies(self) -> list[tuple[Any, Any]]:
        """The part of each device, and the sharding of that device alone."""
        indices = self.sharding.addressable_devices_indices_map(self.local.shape)
        kind = self.sharding.memory_kind
        return [
            (self.parts[_box(index, self.local.shape)], jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
            for device, index in indices.items()
        ]

    def _placed(self, placed: Iterator[Any]) -> Any:
        """The array of the next ones that are `placed`."""
        of_devices = list(itertools.islice(placed, len(self.local.pieces)))
        return jax.make_array_from_single_device_arrays(self.local.shape, self.sharding, of_devices)


def _weak(array: Any) -> Any:
    """The same array with a weak type. jax has no public function that makes one of more than a number."""
    shards = [shard.data for shard in array.addressable_shards]
    return type(array)(array.aval.update(weak_type=True), array.sharding, shards, committed=array.committed)


def _room(shape: tuple[int, ...], element: np.dtype[Any], slabs: Slabs) -> Any:
    """Memory for a region. On a CPU, jax copies it unless it is aligned, as what slabs give is."""
    nbytes = math.prod(shape) * element.itemsize
    return slabs.take(nbytes).view(element).reshape(shape) if nbytes >= HUGE_BYTES else np.empty(shape, element)


def fresh_jax(shape: tuple[int, ...], numpy_type: Any, sharding: Any, *, weak_type: bool = False) -> Target:
    """A target that makes a new jax array; `sharding` None means jax's default device.

    The stored array decides on the weak type, unless an older version stored it (see `Target.with_weak_type`).

    Raises:
        UsageError: jax makes no arrays of this type, or the sharding does not fit to the shape.
    """
    check_makes(numpy_type)
    sharding = _concrete(sharding)
    return NewJax(dtypes.dtype(np.dtype(numpy_type).name), _on_devices(sharding, shape), sharding, weak_type)


def _concrete(sharding: Any) -> Any:
    """A sharding over devices. One over an abstract mesh, as `jax.eval_shape` makes it, takes that of the context.

    Raises:
        UsageError: There is none, or it is another one.
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


def makes(numpy_type: Any) -> bool:
    """Whether jax makes arrays of a type, which it truncates to 32 bits otherwise."""
    return bool(jax.dtypes.canonicalize_dtype(numpy_type) == numpy_type)


def check_makes(numpy_type: Any) -> None:
    """Refuse an element type of 64 bits where jax truncates it.

    Raises:
        UsageError: jax_enable_x64 is off.
    """
    if not makes(numpy_type):
        raise UsageError(
            "jax truncates arrays of 64 bits, since jax_enable_x64 is off",
            expected=f"an array of {np.dtype(numpy_type).name}",
            found=f"jax makes {jax.dtypes.canonicalize_dtype(numpy_type).name}",
            hint="Call jax.config.update('jax_enable_x64', True) first. Or ask for an array of numpy's, with "
            "ArraySpec(shape, np.dtype(...)); or for floating-point values of a smaller type, with cast=True.",
        )


def number_array(pattern: Any, number: Any) -> Any:
    """A numpy array without dims as one of jax's like a pattern.

    Raises:
        UsageError: jax makes no arrays of its type.
    """
    check_makes(number.dtype)
    array = jax.device_put(number, _concrete(wanted_sharding(pattern)))
    return _weak(array) if getattr(pattern, "weak_type", False) else array
