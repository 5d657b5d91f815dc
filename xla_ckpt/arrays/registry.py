"""Which adapter answers for a value. Frameworks that the program has not loaded are not loaded to find out."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.composite import name_of
from xla_ckpt.arrays.numpy_array import Numpy, fresh_numpy
from xla_ckpt.arrays.pytree import is_key
from xla_ckpt.arrays.torch_host import DENSE, PLAIN, TorchHost, fresh_torch, is_plain, is_xla, torch_dtype, type_name
from xla_ckpt.dtypes import DType, dtype
from xla_ckpt.engine.numpy_types import numpy_dtype
from xla_ckpt.engine.target import Target
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.manifest.arrays import ArrayForm
from xla_ckpt.sharding.local_array import LocalArray, whole
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.sharding.sharding import Sharding

if TYPE_CHECKING:
    from xla_ckpt.arrays.xla import Xla

_TORCH_HOST = TorchHost()
_NUMPY: ArrayAdapter = Numpy()


@functools.cache
def _xla(spmd: bool) -> Xla:
    from xla_ckpt.arrays.xla import Xla

    return Xla(spmd=spmd)


@functools.cache
def _jax() -> ArrayAdapter:
    from xla_ckpt.arrays.jax_array import Jax

    return Jax()


@functools.cache
def _spmd() -> ArrayAdapter:
    from xla_ckpt.arrays.spmd import Spmd

    return Spmd()


@functools.cache
def _dtensor() -> ArrayAdapter:
    from xla_ckpt.arrays.dtensor import DTensors

    return DTensors(_plain_torch)


@functools.cache
def _sharded_tensor() -> ArrayAdapter:
    from xla_ckpt.arrays.sharded_tensor import ShardedTensors

    return ShardedTensors(_plain_torch)


def _plain_torch(value: torch.Tensor) -> ArrayAdapter:
    return Adapters()._plain(value)


def _uses_spmd() -> bool:
    runtime: Any = sys.modules.get("torch_xla.runtime")
    return runtime is not None and bool(runtime.is_spmd())


def local_lanes() -> int:
    """Devices of this process that hold shards of their own: several under SPMD, else one."""
    return int(sys.modules["torch_xla.runtime"].addressable_runtime_device_count()) if _uses_spmd() else 1


class Adapters:
    """The adapters of the arrays of one call.

    Whether torch_xla runs in SPMD mode is asked once: it asks the environment, which takes longer than all the rest.
    """

    def __init__(self) -> None:
        self._spmd = _uses_spmd()
        self._facts: dict[Any, tuple[str, LocalArray]] = {}

    def of(self, value: Any) -> ArrayAdapter | None:
        """The adapter of an array; None for anything else."""
        if type(value) in PLAIN:  # as nearly all arrays
            if is_xla(value):
                return self._on_xla(value)
            if is_plain(value):
                return _TORCH_HOST
        if isinstance(value, torch.Tensor):
            if type(value).__name__ == "XLAShardedTensor":
                return self._on_xla(value)
            if "torch.distributed.tensor" in sys.modules and _dtensor().accepts(value):
                return _dtensor()
            if "torch.distributed._shard.sharded_tensor" in sys.modules and _sharded_tensor().accepts(value):
                return _sharded_tensor()
            return self._plain(value) if name_of(value) is None else None
        if _NUMPY.accepts(value):
            return _NUMPY
        if "jax" in sys.modules and type(value).__module__.startswith(("jax", "jaxlib")) and _jax().accepts(value):
            return _jax()
        return None

    def _plain(self, value: torch.Tensor) -> ArrayAdapter:
        return self._on_xla(value) if is_xla(value) else _TORCH_HOST

    def _on_xla(self, value: torch.Tensor) -> ArrayAdapter:
        return _spmd() if self._spmd and _spmd().accepts(value) else _xla(self._spmd)

    def whole_target(self, value: Any, form: ArrayForm, *, owned: bool) -> Target | None:
        """The target that overwrites a dense tensor of a form, all of which this process has, if that takes no more.

        `owned` is as in `ArrayAdapter.into`. None for whatever has to be looked at more closely. A load asks this of
        each of its arrays.
        """
        if type(value) not in DENSE:
            return None
        dtype, shape = value.dtype, value.shape
        facts = self._facts.get((dtype, shape))
        if facts is None:
            facts = self._facts[dtype, shape] = (type_name(dtype), whole(tuple(shape)))
        name, local = facts
        if name != form.dtype.name or local.shape != form.shape or not value.numel():
            return None
        adapter = _TORCH_HOST if value.is_cpu else _xla(self._spmd) if is_xla(value) else None
        return None if adapter is None else adapter.over_whole(value, form.dtype, local, owned=owned)

    def kind(self, value: Any) -> str | None:
        """The kind of an array, as the skeleton names it; None for anything else."""
        adapter = self.of(value)
        return None if adapter is None else adapter.kind

    def require(self, value: Any, path: str = "") -> ArrayAdapter:
        """The adapter of an array.

        Raises:
            UnsupportedStateError: It is none.
        """
        adapter = self.of(value)
        if adapter is None:
            raise UnsupportedStateError(f"{type(value).__name__} is no array", leaf=path)
        return adapter


def array_kind(value: Any) -> str | None:
    """The kind of a single array, as the skeleton names it; None for anything else."""
    return Adapters().kind(value)


def require(value: Any, path: str = "") -> ArrayAdapter:
    """The adapter of a single array.

    Raises:
        UnsupportedStateError: It is none.
    """
    return Adapters().require(value, path)


def check_memory(value: Any, path: str) -> None:
    """Refuse a target that has no memory: what is read into it would be lost without a word.

    Raises:
        UsageError: It is on the meta device.
    """
    if is_meta(value):
        raise UsageError(
            "a tensor on the meta device has no memory to load into",
            leaf=path,
            expected="a tensor on another device",
            found=f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on meta",
            hint="Call model.to_empty(device=...) first, and make the optimizer after it. To describe an array to "
            "restore(), use xla_ckpt.ArraySpec.",
        )


def is_meta(value: Any) -> bool:
    """Whether a value is a torch tensor that has a shape and no elements."""
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array to be restored, by its description: what `restore` takes in place of an array.

    The element type decides what is made: a torch dtype (or its name) a CPU tensor, a numpy dtype a numpy array, and
    with a `sharding` from jax a jax array.
    """

    shape: tuple[int, ...]
    """Global shape (elements)."""

    dtype: Any
    """``torch.float32``, ``"float32"`` or ``np.dtype("float32")``."""

    sharding: Any = None
    """None, a jax sharding, or a spec such as ``("tp", None)``: then the array is this rank's part of it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))

    def target(self, placement: Placement) -> Target:
        """Memory for it.

        Raises:
            UsageError: The sharding does not fit to the shape.
        """
        if self.sharding is not None and not isinstance(self.sharding, tuple | list | Sharding):
            from xla_ckpt.arrays.jax_array import fresh_jax

            return fresh_jax(self.shape, numpy_dtype(dtype(_name(self.dtype))), self.sharding)
        try:
            local = Sharding.parse(self.sharding).part(self.shape, placement.mesh, placement.rank)
        except ValueError as error:
            raise UsageError(f"an ArraySpec makes no sense: {error}", found=repr(self)) from error
        kind = "torch" if isinstance(self.dtype, str | torch.dtype) else "numpy"
        return new_array(dtype(_name(self.dtype)), local, kind)


def _name(element_type: Any) -> str:
    if isinstance(element_type, str | torch.dtype):
        return str(element_type).removeprefix("torch.")
    import numpy as np

    return str(np.dtype(element_type).name)


def is_spec(value: Any) -> bool:
    """Whether `value` describes an array: an `ArraySpec`, or a `jax.ShapeDtypeStruct` of one. Keys are no arrays."""
    return isinstance(value, ArraySpec) or (type(value).__name__ == "ShapeDtypeStruct" and not is_key(value))


def number_like(pattern: Any, number: float) -> Any:
    """A plain number as an array without dims, like `pattern`; NotImplemented if that has dims.

    jax counts steps in a number until a step has been compiled, and in an array from then on.
    """
    if tuple(pattern.shape):
        return NotImplemented
    if isinstance(pattern, torch.Tensor):
        return torch.tensor(number, dtype=pattern.dtype, device=pattern.device)
    if isinstance(pattern, ArraySpec) and isinstance(pattern.dtype, str | torch.dtype):
        return torch.tensor(number, dtype=getattr(torch, _name(pattern.dtype)))
    import numpy as np

    array = np.asarray(number, numpy_dtype(dtype(_name(pattern.dtype))))
    if isinstance(pattern, np.ndarray | ArraySpec):
        return array
    import jax

    return jax.device_put(array, getattr(pattern, "sharding", None))


def target_of_spec(value: Any, placement: Placement) -> Target:
    """A target that makes the array that an `ArraySpec` or a `jax.ShapeDtypeStruct` describes."""
    if isinstance(value, ArraySpec):
        return value.target(placement)
    from xla_ckpt.arrays.jax_array import fresh_jax

    return fresh_jax(tuple(value.shape), value.dtype, getattr(value, "sharding", None))


def new_array(element: DType, local: LocalArray, kind: str, device: torch.device | None = None) -> Target:
    """A target that makes a new array of a kind, in host memory unless a torch device is named.

    A jax array becomes one again if jax is loaded and has the type; else a numpy array.
    """
    shape = tuple(max((p.local.stop[d] for p in local.pieces), default=0) for d in range(len(local.shape)))
    if kind == "torch" and (torch_type := torch_dtype(element)) is not None:
        if device is not None and device.type == "xla":
            from xla_ckpt.arrays.xla import fresh_xla

            return fresh_xla(element, shape, torch_type, device, local)
        return fresh_torch(element, shape, torch_type, device, local)
    if kind == "jax" and "jax" in sys.modules:
        import jax

        from xla_ckpt.arrays.jax_array import fresh_jax

        numpy_type = numpy_dtype(element)
        if jax.dtypes.canonicalize_dtype(numpy_type) == numpy_type:
            return fresh_jax(local.shape, numpy_type, None)
    return fresh_numpy(element, shape, numpy_dtype(element), local)
