"""What every kind of array answers: where it is, what its bytes are, and how to make one from bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from xla_ckpt.dtypes import DType
from xla_ckpt.layout.box import Box
from xla_ckpt.layout.mesh import Mesh
from xla_ckpt.plan.leaf import Leaf
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.snapshot.take import HostShard


@dataclass(frozen=True, slots=True)
class Placement:
    """What a process knows about the layout of the job when it describes its arrays."""

    rank: int = 0
    world: int = 1
    mesh: Mesh | None = None


@dataclass(slots=True)
class Target:
    """Memory that a restore fills, and what becomes of it."""

    dtype: DType
    shape: tuple[int, ...]
    """Global shape that the target wants."""

    boxes: tuple[Box, ...]
    """The regions of the global array that this process wants."""

    live: bool
    """Whether the memory is the caller's own, so that a failed read would leave it half-written."""

    memory: Callable[[Slabs], list[memoryview]]
    """The memory of each box, in C order. Called once, when everything has been checked."""

    install: Callable[[], Any]
    """Called when the memory is filled: puts it in place, and returns the array."""


class ArrayAdapter(Protocol):
    """One kind of array."""

    kind: str
    """Its name in the skeleton: ``torch``, ``numpy`` or ``jax``."""

    def accepts(self, value: Any) -> bool:
        """Whether `value` is an array of this kind."""

    def identity(self, value: Any) -> Hashable | None:
        """Equal for two values that share all their elements; None where that cannot be told."""

    def leaf(self, path: str, value: Any, placement: Placement) -> Leaf:
        """Where its elements are.

        Raises:
            UnsupportedStateError: It cannot be stored (sparse, quantized, an unknown dtype).
        """

    def host(self, values: Sequence[Any]) -> list[list[HostShard]]:
        """The bytes of each local shard of each value, in the order of `leaf`'s shards."""

    def into(self, value: Any, *, owned: bool) -> Target:
        """A target that overwrites `value`. `owned`: it is the parameter itself, not an alias of it."""

    def like(self, value: Any) -> Target:
        """A target that makes a new array like `value`, which stays as it is."""
