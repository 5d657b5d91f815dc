"""jax arrays. Loaded only where jax already is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from xla_ckpt import dtypes
from xla_ckpt.adapters.base import Placement, Target
from xla_ckpt.adapters.numpy_array import bytes_of, fresh, numpy_dtype
from xla_ckpt.dtypes import DType
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.layout.box import Box
from xla_ckpt.plan.leaf import Leaf, LocalShard
from xla_ckpt.snapshot.take import HostShard


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    bounds = [s.indices(n) for s, n in zip(index, shape, strict=True)]
    return Box(tuple(b[0] for b in bounds), tuple(b[1] for b in bounds))


class Jax:
    """jax arrays, whole or sharded over the devices of this process."""

    kind = "jax"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, jax.Array)

    def identity(self, value: Any) -> Hashable | None:
        return "jax", id(value)

    def leaf(self, path: str, value: Any, placement: Placement) -> Leaf:
        if not dtypes.known(value.dtype.name):
            raise UnsupportedStateError(
                f"a jax array of dtype {value.dtype} cannot be stored", leaf=path,
                hint="Store jax.random.key_data(key) of a random key.",
            )  # fmt: skip
        shards = tuple(LocalShard(_box(s.index, value.shape)) for s in _firsts(value))
        return Leaf(path, dtypes.dtype(value.dtype.name), tuple(value.shape), shards)

    def host(self, values: Sequence[Any]) -> list[list[HostShard]]:
        return [[_host(s.data) for s in _firsts(v)] for v in values]

    def into(self, value: Any, *, owned: bool) -> Target:
        return self.like(value)  # a jax array cannot be overwritten: its place takes the new one

    def like(self, value: Any) -> Target:
        return fresh_jax(tuple(value.shape), value.dtype, value.sharding)


def _firsts(value: Any) -> list[Any]:
    """One local shard of each region that this process holds."""
    found: dict[str, Any] = {}
    for shard in value.addressable_shards:
        found.setdefault(str(shard.index), shard)
    return list(found.values())


def _host(data: Any) -> HostShard:
    # On CPU this is a view that holds the buffer: jax copies rather than donate a buffer that is held.
    plain = np.asarray(data)
    plain = plain if plain.flags.c_contiguous else np.ascontiguousarray(plain)
    return HostShard(bytes_of(plain), (data, plain), immutable=True)


def fresh_jax(shape: tuple[int, ...], numpy_type: Any, sharding: Any) -> Target:
    """A target that makes a new jax array; `sharding` None means jax's default device."""
    dtype: DType = dtypes.dtype(np.dtype(numpy_type).name)
    whole = fresh(dtype, shape, numpy_dtype(dtype))

    def install() -> Any:
        made = whole.install()
        if sharding is None:
            return jax.device_put(made)
        return jax.make_array_from_callback(shape, sharding, lambda index: made[index])

    return Target(dtype, shape, whole.boxes, False, whole.memory, install)
