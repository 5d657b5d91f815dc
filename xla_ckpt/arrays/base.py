"""What every kind of array answers: where it is, what its bytes are, and how to make one from bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from xla_ckpt.dtypes import DType
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import Local
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.snapshot.take import HostShard


@dataclass(frozen=True, slots=True)
class Placement:
    """What a process knows about the layout of the job when it describes its arrays."""

    rank: int = 0
    world: int = 1
    mesh: Mesh = field(default_factory=Mesh)
    """How the ranks are arranged; pure data parallelism where nobody says otherwise."""


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

    def dtype(self, value: Any, path: str = "") -> DType:
        """Its element type.

        Raises:
            UnsupportedStateError: It cannot be stored (sparse, quantized, an unknown dtype).
        """

    def shape(self, value: Any) -> tuple[int, ...]:
        """Shape of what this process holds in one tensor; for arrays that know their place, the global shape."""

    def place(self, value: Any, path: str = "") -> Local | None:
        """Where its elements are in the global array; None if the array itself does not know."""

    def host(self, values: Sequence[tuple[Any, Local]]) -> list[list[HostShard]]:
        """The bytes of each piece of each value."""

    def into(self, value: Any, local: Local, *, owned: bool) -> Target:
        """A target that overwrites `value`. `owned`: it is the parameter itself, not an alias of it."""

    def like(self, value: Any, local: Local, dtype: DType | None = None) -> Target:
        """A target that makes a new array like `value` (of another type, if one is named); `value` stays as it is."""
