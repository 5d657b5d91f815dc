"""Adapter protocol of array types: their location in the global array, their bytes, and creation from bytes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.loading.target import Target
from xla_ckpt.snapshot.shards import HostShard, LocalShard


class ArrayAdapter(Protocol):
    """A protocol for one kind of array."""

    kind: str
    """Name of the kind in the skeleton: ``torch``, ``numpy`` or ``jax``."""

    def can_handle(self, value: Any) -> bool:
        """Return True if `value` is an array of this kind."""

    def get_identity(self, value: Any) -> Hashable | None:
        """Return a key that is equal for values that share all their elements; None if that is unknown."""

    def get_dtype(self, value: Any, path: str = "") -> DType:
        """Return the dtype.

        Raises:
            UnsupportedStateError: If the array cannot be stored (sparse, quantized, an unknown dtype).
        """

    def get_form_key(self, value: Any) -> Hashable | None:
        """Return a key that is equal for arrays with the same dtype, shape and own sharding; None if unknown.

        A save calls `get_dtype`, `get_shape` and `locate` for one array of each key.
        """

    def get_shape(self, value: Any) -> tuple[int, ...]:
        """Return the local shape, or the global shape for arrays with their own sharding."""

    def locate(self, value: Any, path: str = "") -> LocalArray | None:
        """Return the region of the array in the global array; None if it does not define a sharding."""

    def get_host_shards(self, values: Sequence[tuple[Any, LocalArray]]) -> Sequence[Sequence[HostShard]]:
        """Return the bytes of each piece of each value, in host memory."""

    def get_shards(self, values: Sequence[tuple[Any, LocalArray]]) -> Sequence[Sequence[LocalShard]]:
        """Return the memory of each piece of each value, in place: mutable device memory stays on the device."""

    def create_in_place_target(self, value: Any, local: LocalArray, *, owned: bool) -> Target:
        """Create a target that overwrites `value`. `owned` is True if `value` is the parameter itself, not an alias of
        it.
        """

    def create_target_like(self, value: Any, local: LocalArray, dtype: DType | None = None) -> Target:
        """Create a target for a new array like `value` (with another dtype, if passed); `value` stays unchanged."""
