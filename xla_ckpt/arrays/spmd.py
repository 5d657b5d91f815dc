"""torch_xla SPMD: one tensor, spread over many devices by the compiler. Loaded only where torch_xla already is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch_xla

from xla_ckpt.arrays.torch_elements import check_dense, cut, dtype_of, overwriting, torch_type
from xla_ckpt.arrays.torch_host import Spread
from xla_ckpt.arrays.xla import materialize, shard_of
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.target import ComposedTarget, Target
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import LocalArray, Piece
from xla_ckpt.sharding.strided import packed
from xla_ckpt.snapshot.memory import Bytes, Slabs
from xla_ckpt.snapshot.shards import HOST, HostShard, Link, Look

_XLAC: Any = torch_xla._XLAC


def global_tensor(value: torch.Tensor) -> torch.Tensor:
    """The tensor inside of an `XLAShardedTensor`; any other as it is."""
    inner: torch.Tensor = getattr(value, "global_tensor", value)
    return inner


def is_sharded(value: torch.Tensor) -> bool:
    """Whether a tensor on an XLA device is annotated as sharded."""
    return bool(_XLAC._get_xla_sharding_spec(global_tensor(value)))


def _regions(value: torch.Tensor) -> list[tuple[int, Box]]:
    """(replica, region without padding) of each local device."""
    if any(_XLAC._check_tensor_need_materialization([value])):
        materialize([value])  # with all others: the next line would compile a graph for each pending tensor alone
    _XLAC._xla_wait_device_ops([])  # the next line fails for what a running step has yet to compute
    shape = tuple(value.shape)
    (entries,) = _XLAC._get_local_shard_replica_and_indices([value])
    regions = []
    for replica, index in entries:
        if not isinstance(index, list):  # Ellipsis: the device holds all of it
            regions.append((replica, Box.whole(shape)))
            continue
        bounds = [s.indices(n) for s, n in zip(index, shape, strict=True)]
        start = tuple(min(b[0], n) for b, n in zip(bounds, shape, strict=True))
        regions.append((replica, Box(start, tuple(max(a, b[1]) for a, b in zip(start, bounds, strict=True)))))
    return regions


class Spmd:
    """Tensors with a sharding annotation (`mark_sharding`), partial replication and uneven dims included."""

    kind = "torch"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == "xla" and is_sharded(value)

    def identity(self, value: torch.Tensor) -> Hashable | None:
        return "xla", _XLAC._xla_get_tensor_id(global_tensor(value))

    def dtype(self, value: torch.Tensor, path: str = "") -> DType:
        check_dense(global_tensor(value), path)
        return dtype_of(value, path)

    def look(self, value: torch.Tensor) -> Hashable | None:
        return None

    def shape(self, value: torch.Tensor) -> tuple[int, ...]:
        return tuple(value.shape)

    def place(self, value: torch.Tensor, path: str = "") -> LocalArray | None:
        pieces = [
            Piece(Box.whole(box.shape), box, lane)
            for lane, (replica, box) in enumerate(_regions(global_tensor(value)))
            if replica == 0 and box.size
        ]
        return LocalArray(shape=tuple(value.shape), pieces=tuple(pieces))

    def host(self, values: Sequence[tuple[torch.Tensor, LocalArray]]) -> list[list[HostShard]]:
        return [[shard.on_host() for shard in shards] for shards in self.shards(values)]

    def shards(self, values: Sequence[tuple[torch.Tensor, LocalArray]]) -> list[list[SpmdShard]]:
        tensors = [global_tensor(v).detach() for v, _ in values]
        if tensors:
            materialize(tensors)
        return [_Copies(tensor, local.pieces).shards() for tensor, (_, local) in zip(tensors, values, strict=True)]

    def into(self, value: torch.Tensor, local: LocalArray, *, owned: bool) -> Target:
        inner = global_tensor(value)
        shards = _Shards(inner, dtype_of(inner), inner.dtype)

        whole = packed(self.identity(value), 0, tuple(value.shape), value.element_size())

        def install() -> torch.Tensor:
            with overwriting(inner):
                if shards.are_copies:
                    inner.copy_(shards.filled()[0])  # torch_xla loads no shards into a tensor that is replicated
                else:
                    _XLAC._load_local_shards(inner, shards.filled(), _XLAC._xla_get_runtime_devices())
            return value

        return ComposedTarget(
            dtype=shards.dtype,
            local=shards.local,
            live=False,
            fill=shards.memory,
            finish=install,
            lies=lambda: [whole.cut(box) for box in shards.local.boxes],
        )

    def like(self, value: torch.Tensor, local: LocalArray, dtype: DType | None = None) -> Target:
        inner = global_tensor(value)
        element = dtype or dtype_of(inner)
        shards = _Shards(inner, element, torch_type(element, inner))
        sharding, shape = _XLAC._get_xla_op_sharding(inner), tuple(value.shape)

        def install() -> torch.Tensor:
            tensor: torch.Tensor = _XLAC._global_tensor_from_cpu_shards(shards.filled(), sharding, shape)
            return tensor

        return ComposedTarget(dtype=element, local=shards.local, live=False, fill=shards.memory, finish=install)


class _Copies:
    """What the local devices hold of a tensor, in host memory. It is copied when it is first asked for.

    torch_xla copies the shards of all devices at once, and has no view of one.
    """

    def __init__(self, tensor: torch.Tensor, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()
        self._tensor = tensor
        self._shards: list[HostShard] | None = None

    def shards(self) -> list[SpmdShard]:
        """All pieces of the tensor, none of them copied yet."""
        itemsize = self._tensor.element_size()
        return [SpmdShard(self, number, piece.local.size * itemsize) for number, piece in enumerate(self._pieces)]

    def shard(self, number: int) -> HostShard:
        """A piece of the tensor, in host memory."""
        with self._lock:
            if self._shards is None:
                (copies,) = _XLAC._get_local_shards([self._tensor])
                # Once for all: without its padding, a piece may be one copy more.
                self._shards = [shard_of(cut(copies[piece.lane][0], piece.local)) for piece in self._pieces]
            return self._shards[number]


@dataclass(frozen=True, slots=True)
class SpmdShard:
    """What one device holds of a tensor; see `xla_ckpt.snapshot.shards.DeviceShard`.

    The copy of all devices' shards is made when one of them is asked for, and is there as long as one of them is: a
    save that the program waits for needs memory for a few tensors, and writes while it copies.
    """

    copies: _Copies
    number: int
    """Of its piece."""

    nbytes: int
    immutable: bool = False
    """Whether it is copied. The tensor that is held becomes another one when the program writes to it."""

    version: Callable[[], Hashable] | None = None

    @property
    def link(self) -> Link:
        return HOST

    def begin_copy(self, offset: int, target: Bytes) -> None:
        self.on_host().begin_copy(offset, target)

    def in_order(self) -> SpmdShard:
        return self

    def clone(self) -> SpmdShard:
        self.on_host()
        return replace(self, immutable=True)

    def look(self, look: Look) -> bytes:
        return look.of(self.on_host().data)

    def on_host(self) -> HostShard:
        """Its bytes in host memory."""
        return self.copies.shard(self.number)


class _Shards:
    """Host memory for what the local devices hold of a tensor: each region once, padded as XLA wants it."""

    def __init__(self, value: torch.Tensor, dtype: DType, torch_dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._torch_dtype = torch_dtype
        self._of_device = [box for _, box in _regions(value)]
        sizes = zip(*(box.shape for box in self._of_device), strict=True)
        self._padded = tuple(max(n) for n in sizes)
        pieces = [Piece(Box.whole(box.shape), box, lane) for lane, box in enumerate(self._of_device) if box.size]
        self.local = LocalArray(shape=tuple(value.shape), pieces=tuple(pieces))
        self._spreads = {piece.box: Spread(replace(self.local, pieces=(piece,))) for piece in pieces}
        self._made: dict[Box, torch.Tensor] = {}

    @property
    def are_copies(self) -> bool:
        """Whether each device holds the whole tensor."""
        return all(box.shape == self.local.shape for box in self._of_device)

    def memory(self, _: Slabs) -> list[memoryview]:
        views = []
        for box, spread in self._spreads.items():
            self._made[box] = torch.zeros(self._padded, dtype=self._torch_dtype, device="cpu")
            views += spread.over(self._made[box])
        return views

    def filled(self) -> list[torch.Tensor]:
        """One padded shard for each local device."""
        for box, spread in self._spreads.items():
            spread.fill(self._made[box])
        nothing = torch.zeros(self._padded, dtype=self._torch_dtype, device="cpu")
        return [self._made.get(box, nothing) for box in self._of_device]
