"""Adapter protocol: where an array is located, what its bytes are, and how to create one from bytes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.loading.target import Target
from xla_ckpt.snapshot.shards import HostShard, LocalShard


class ArrayAdapter(Protocol):
    """One kind of array."""

    kind: str
    """Its name in the skeleton: ``torch``, ``numpy`` or ``jax``."""

    def can_handle(self, value: Any) -> bool:
        """Whether `value` is an array of this kind."""

    def get_identity(self, value: Any) -> Hashable | None:
        """Equal for two values that share all their elements; None where that cannot be told."""

    def get_dtype(self, value: Any, path: str = "") -> DType:
        """Its element type.

        Raises:
            UnsupportedStateError: It cannot be stored (sparse, quantized, an unknown dtype).
        """

    def get_form_key(self, value: Any) -> Hashable | None:
        """Equal for two arrays of one element type and shape that lie alike, as far as they say so; else None.

        A save asks `get_dtype`, `get_shape` and `locate` of one array of each look.
        """

    def get_shape(self, value: Any) -> tuple[int, ...]:
        """Shape of what this process holds in one tensor; for arrays that know their place, the global shape."""

    def locate(self, value: Any, path: str = "") -> LocalArray | None:
        """Where its elements are in the global array; None if the array itself does not know."""

    def get_host_shards(self, values: Sequence[tuple[Any, LocalArray]]) -> Sequence[Sequence[HostShard]]:
        """The bytes of each piece of each value, in host memory."""

    def get_shards(self, values: Sequence[tuple[Any, LocalArray]]) -> Sequence[Sequence[LocalShard]]:
        """The memory of each piece of each value, where it is: a device's that the program writes to stays there."""

    def create_in_place_target(self, value: Any, local: LocalArray, *, owned: bool) -> Target:
        """A target that overwrites `value`. `assign_owners`: it is the parameter itself, not an alias of it."""

    def create_target_like(self, value: Any, local: LocalArray, dtype: DType | None = None) -> Target:
        """A target that makes a new array like `value` (of another type, if one is named); `value` stays as it is."""
