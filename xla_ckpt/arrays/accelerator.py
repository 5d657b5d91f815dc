"""Tensors in the memory of an accelerator, CUDA's or any that torch.accelerator names, and how their bytes come out."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from xla_ckpt.logs import get_logger
from xla_ckpt.snapshot.memory import Bytes, allocate, backed
from xla_ckpt.snapshot.shards import Look
from xla_ckpt.storage.base import BLOCK

logger = get_logger(__name__)

_cuda: Any = torch.cuda
"""With functions that have no types."""


class TorchLink:
    """Copies from one device, on a stream of their own, into pinned memory where the backend has both.

    Without streams a copy is complete when it was begun, and is ordered after all that the device was asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = device.type
        self._stream = _side_stream(device)

    def allocate(self, nbytes: int) -> Bytes:
        """Pinned memory; ordinary memory where the backend pins none."""
        if nbytes == 0:
            return allocate(0)
        if self.name == "cuda":
            return self._registered(nbytes)
        memory = _pinned(nbytes)
        if memory is None:
            return allocate(nbytes)
        if memory.ctypes.data % BLOCK:  # files are written from it without the page cache
            memory = _pinned(nbytes + BLOCK)
            assert memory is not None, "it was pinned a moment ago"
            return memory[-memory.ctypes.data % BLOCK :][:nbytes]
        return memory

    def _registered(self, nbytes: int) -> Bytes:
        """Memory that CUDA is told to pin; ordinary memory if it refuses.

        torch's own pinned memory takes five times as long, and is rounded up to a power of two.
        """
        memory = backed(nbytes)
        with torch.cuda.device(self._device):
            cuda: Any = _cuda.cudart()
            try:
                torch.cuda.check_error(cuda.cudaHostRegister(memory.ctypes.data, nbytes, 0))
            except RuntimeError as error:
                _not_pinned(error)
                with contextlib.suppress(RuntimeError):  # CUDA has the program's next operation report it again
                    torch.zeros(1, device=self._device)
                return memory

        def free(address: int = memory.ctypes.data) -> None:
            if _cuda.is_initialized():  # not in a child that was forked
                self._stream.synchronize()  # an interrupted save leaves copies that are under way
                cuda.cudaHostUnregister(address)

        weakref.finalize(memory.base, free).atexit = False  # the process takes CUDA with it
        return memory

    def follow(self) -> None:
        if self._stream is None:
            torch.accelerator.synchronize(self._device)
        else:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def begin_copy(self, source: torch.Tensor, target: Bytes) -> None:
        """Begin to copy a flat tensor of bytes into host memory."""
        into = torch.from_numpy(target)
        if self._stream is None:
            into.copy_(source)
            return
        with self._stream:
            into.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        if self._stream is None:
            return lambda: None
        wait: Callable[[], None] = self._stream.record_event().synchronize
        return wait


@functools.cache
def link_of(device: torch.device) -> TorchLink:
    """The link of a device: one for the process."""
    return TorchLink(device)


def _side_stream(device: torch.device) -> Any:
    """A stream beside those of the program; None where the backend has no streams."""
    try:
        return torch.Stream(device=device)
    except (RuntimeError, NotImplementedError) as error:
        logger.warning("%s has no streams (%s): its tensors are copied in the order of its operations", device, error)
        return None


def _pinned(nbytes: int) -> Bytes | None:
    """Pinned host memory; None where the backend pins none."""
    try:
        memory: Bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
    except (RuntimeError, NotImplementedError) as error:
        _not_pinned(error)
        return None
    return memory


def _not_pinned(error: Exception) -> None:
    logger.warning("no pinned memory (%s): copies from the device are slower, and wait for each other", error)


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """A tensor, or a region of one, on a device; see `xla_ckpt.snapshot.shards.DeviceShard`.

    It holds the storage, and not the parameter that the program may give another one.
    """

    value: torch.Tensor
    immutable: bool = False

    @property
    def nbytes(self) -> int:
        return self.value.nbytes

    @property
    def version(self) -> Callable[[], Hashable] | None:
        return version_of(self.value)

    @property
    def link(self) -> TorchLink:
        return link_of(self.value.device)

    def begin_copy(self, offset: int, target: Bytes) -> None:
        self.link.begin_copy(_flat(self.value)[offset : offset + len(target)], target)

    def in_order(self) -> TensorShard:
        value = self.value
        if value.is_contiguous() and not (value.is_conj() or value.is_neg()):
            return self
        return TensorShard(value.resolve_conj().resolve_neg().contiguous(), immutable=True)

    def clone(self) -> TensorShard:
        plain = self.in_order()
        return TensorShard(plain.value.clone(), immutable=True) if plain is self else plain

    def look(self, look: Look) -> bytes:
        flat = _flat(self.in_order().value)[look.offset :]
        data: bytes = flat.as_strided((look.count, look.nbytes), (look.stride, 1)).cpu().numpy().tobytes()
        return data


def _flat(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return value.reshape(-1).view(torch.uint8)


def version_of(value: torch.Tensor) -> Callable[[], Hashable] | None:
    """What tells that a tensor was written to, or its storage was resized: another answer. None: it counts no writes.

    Views of a tensor count with it, and so does the parameter that they were detached from.
    """
    if value.is_inference():
        return None

    def version() -> Hashable:
        storage = value.untyped_storage()
        return value._version, storage.data_ptr(), storage.nbytes()

    return version
