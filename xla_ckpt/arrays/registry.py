"""Find the adapter of an array, and create targets for new arrays. Imports no framework that is not loaded."""

from __future__ import annotations

import functools
import operator
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.numpy_array import NumpyAdapter, create_numpy_target
from xla_ckpt.arrays.pytree import PRNGKeySpec, find_key_mismatch, get_target_sharding, is_prng_key
from xla_ckpt.arrays.torch_objects import is_instance_of, is_torch_installed, is_torch_loaded, is_torch_tensor
from xla_ckpt.core.dtypes import DType, get_dtype, to_numpy_dtype
from xla_ckpt.core.manifest.arrays import ArrayMetadata
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.core.sharding.sharding import Sharding
from xla_ckpt.core.tree.values import ValueCodec
from xla_ckpt.errors import IncompatibleCheckpointError, UnsupportedStateError, UsageError
from xla_ckpt.loading.target import Target

if TYPE_CHECKING:
    import torch

    from xla_ckpt.arrays.torch_registry import TorchAdapterRegistry

_NUMPY_ADAPTER: ArrayAdapter = NumpyAdapter()


def _create_torch_registry() -> TorchAdapterRegistry | None:
    """Create the adapters of tensors; None if the program has not imported torch, and so has no tensors."""
    if not is_torch_loaded():
        return None
    from xla_ckpt.arrays.torch_registry import TorchAdapterRegistry

    return TorchAdapterRegistry()


def count_local_devices() -> int:
    """Return the number of local devices with separate shards: several under SPMD, otherwise one."""
    runtime: Any = sys.modules.get("torch_xla.runtime")
    return int(runtime.addressable_runtime_device_count()) if runtime is not None and runtime.is_spmd() else 1


class AdapterRegistry:
    """The adapters of the arrays of one call."""

    def __init__(self) -> None:
        self._torch_registry = _create_torch_registry()
        self._jax_adapter: ArrayAdapter | None = None
        """Created for the first jax array: it caches placements of this call's arrays, and is freed with the call."""

    def find(self, value: Any) -> ArrayAdapter | None:
        """Return the adapter of an array; None for anything else."""
        if self._torch_registry is not None and (adapter := self._torch_registry.find(value)) is not None:
            return adapter
        if _NUMPY_ADAPTER.can_handle(value):
            return _NUMPY_ADAPTER
        if "jax" in sys.modules and type(value).__module__.startswith(("jax", "jaxlib")):
            if self._jax_adapter is None:
                from xla_ckpt.arrays.jax_array import JaxAdapter

                self._jax_adapter = JaxAdapter()
            return self._jax_adapter if self._jax_adapter.can_handle(value) else None
        return None

    def create_whole_target(self, value: Any, form: ArrayMetadata, *, owned: bool) -> Target | None:
        """Create a target that overwrites a dense, unsharded tensor; None if further checks are needed.

        `owned` is as in `ArrayAdapter.create_in_place_target`. A load calls this for each of its arrays.
        """
        return (
            None if self._torch_registry is None else self._torch_registry.create_whole_target(value, form, owned=owned)
        )

    def get_kind(self, value: Any) -> str | None:
        """Return the kind of an array in the skeleton; None for anything else."""
        adapter = self.find(value)
        return None if adapter is None else adapter.kind

    def require(self, value: Any, path: str = "") -> ArrayAdapter:
        """Return the adapter of an array.

        Raises:
            UnsupportedStateError: If the value is not an array.
        """
        adapter = self.find(value)
        if adapter is None:
            raise UnsupportedStateError(
                f"a {type(value).__name__} is no plain array", leaf=path, hint="Give a dense tensor in its place."
            )
        return adapter


def get_array_kind(value: Any) -> str | None:
    """Return the kind of a single array in the skeleton; None for anything else."""
    return AdapterRegistry().get_kind(value)


def require_adapter(value: Any, path: str = "") -> ArrayAdapter:
    """Return the adapter of a single array.

    Raises:
        UnsupportedStateError: If the value is not an array.
    """
    return AdapterRegistry().require(value, path)


def check_has_memory(value: Any, path: str) -> None:
    """Check that a target has memory; otherwise the loaded values would be lost silently.

    Raises:
        UsageError: If it is on the meta device.
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
    """Return True for a torch tensor on the meta device."""
    return is_torch_tensor(value) and value.device.type == "meta"


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The shape, dtype and sharding of an array to restore, which `restore` accepts in place of an array.

    The dtype determines the result: a torch dtype (or its name) a CPU tensor, a numpy dtype a numpy array, and with a
    jax `sharding` a jax array. If torch is not installed, a name creates a numpy array.

    Raises:
        UnsupportedStateError: If the dtype is unknown. The error lists the supported ones (on construction).
        UsageError: If the shape or dtype is invalid (on construction).
    """

    shape: tuple[int, ...]
    """Global shape (elements)."""

    dtype: Any
    """``torch.float32``, ``"float32"`` or ``np.dtype("float32")``."""

    sharding: Any = None
    """None, a jax sharding, or a spec such as ``("tp", None)``, with which the result is this rank's shard."""

    def __post_init__(self) -> None:
        sizes = tuple(self.shape) if isinstance(self.shape, Iterable) else (None,)
        if not all(isinstance(size, SupportsIndex) and operator.index(size) >= 0 for size in sizes):
            raise UsageError(
                "shape of an ArraySpec is none", expected="sizes such as (4, 8)", found=repr(self.shape)[:80]
            )
        object.__setattr__(self, "shape", sizes)
        get_dtype(_get_dtype_name(self.dtype))  # checked here, and not only when memory is allocated

    def target(self, placement: RankInfo) -> Target:
        """Create a target for the array.

        Raises:
            UsageError: If the sharding does not fit the shape.
        """
        if self._kind == "jax":
            from xla_ckpt.arrays.jax_array import create_jax_target

            return create_jax_target(self.shape, to_numpy_dtype(get_dtype(_get_dtype_name(self.dtype))), self.sharding)
        try:
            local = Sharding.parse(self.sharding).map_global_shape(self.shape, placement.mesh, placement.rank)
        except ValueError as error:
            raise UsageError(f"an ArraySpec makes no sense: {error}", found=repr(self)) from error
        return create_array_target(get_dtype(_get_dtype_name(self.dtype)), local, self._kind)

    @property
    def _kind(self) -> str:
        """The kind of the created array."""
        if self.sharding is not None and not isinstance(self.sharding, tuple | list | Sharding):
            return "jax"
        return "torch" if _is_torch_dtype(self.dtype) and is_torch_installed() else "numpy"


def _is_torch_dtype(dtype: Any) -> bool:
    """Return True for a torch dtype, or the name of one."""
    return isinstance(dtype, str) or is_instance_of(dtype, "torch", "dtype")


def _get_dtype_name(dtype: Any) -> str:
    if _is_torch_dtype(dtype):
        return str(dtype).removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except TypeError as error:
        expected = 'torch.float32, "float32" or np.dtype("float32")'
        raise UsageError("the dtype of an ArraySpec is none", expected=expected, found=repr(dtype)) from error


def is_array_spec(value: Any) -> bool:
    """Return True for an `ArraySpec`, or a `jax.ShapeDtypeStruct` of an array, but not of typed keys."""
    return isinstance(value, ArraySpec | PRNGKeySpec) or (
        type(value).__name__ == "ShapeDtypeStruct" and not is_prng_key(value)
    )


def convert_stored_number(pattern: Any, stored: Any, codec: ValueCodec, *, allow_rounding: bool) -> Any:
    """Convert a stored number to an array like `pattern`; NotImplemented if that is not possible.

    A number is a 0-d array: jax counts steps in a number until a step has been compiled, and in an array from then on.
    `codec` encoded the stored value; `allow_rounding` allows rounding to a floating-point dtype.

    Raises:
        IncompatibleCheckpointError: If a typed key is stored, or the dtype cannot represent the number.
        UsageError: If jax does not support the dtype.
    """
    if (problem := find_key_mismatch(stored)) is not None:
        raise problem
    number = NotImplemented if tuple(pattern.shape) else _parse_number(stored, codec)
    if number is NotImplemented:
        return NotImplemented
    kind = pattern._kind if isinstance(pattern, ArraySpec) else None
    is_tensor = is_torch_tensor(pattern) or kind == "torch"
    is_numpy = isinstance(pattern, np.ndarray) or kind == "numpy"
    element = get_dtype(_get_dtype_name(pattern.dtype))
    array = _create_number_array(number, to_numpy_dtype(element))
    if array is None or not _is_equal_number(array.item(), number):
        rounds = (allow_rounding and element.is_floating and type(number) is float) or (
            type(number) in (float, complex)
            and to_numpy_dtype(element) == _get_default_dtype(number, for_torch=is_tensor, for_numpy=is_numpy)
        )
        if array is None or not rounds or not np.isfinite(array):
            raise IncompatibleCheckpointError(
                f"the number {number!r} is stored, and an array of {element.name} changes its value",
                expected=f"a number that {element.name} has",
                found=f"{number!r} ({type(number).__name__})",
                hint="Put a number into `like`, or an array of a type that has its value."
                + (
                    " cast=True rounds it."
                    if element.is_floating and type(number) is float and not allow_rounding
                    else ""
                ),
            )
    if is_tensor:
        from xla_ckpt.arrays.torch_registry import create_number_tensor

        return create_number_tensor(pattern, number)
    if is_numpy:
        return array
    from xla_ckpt.arrays.jax_array import create_number_array

    return create_number_array(pattern, array)


def _parse_number(stored: Any, codec: ValueCodec) -> Any:
    """Parse a stored Python number or numpy scalar; NotImplemented for anything else."""
    if isinstance(stored, dict) and len(stored) == 1 and next(iter(stored)).startswith(_NUMBER_PREFIXES):
        stored = codec.decode(stored)
        stored = stored.item() if isinstance(stored, np.generic) else stored
    return stored if type(stored) in (bool, int, float, complex) else NotImplemented


_NUMBER_PREFIXES = ("$int", "$float", "$complex", "$numpy.")
"""Prefixes of the skeleton's names of numbers that JSON does not support, and of other numpy scalars."""


def _create_number_array(number: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """Convert a number to a 0-d array, rounded if necessary; None if that is not possible."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy 1 wraps integers with a warning
            return np.array(number, dtype)
    except (OverflowError, TypeError, ValueError):  # too large; a complex number; NaN as an integer
        return None


def _is_equal_number(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))


def _get_default_dtype(number: complex, *, for_torch: bool, for_numpy: bool) -> np.dtype[Any]:
    """Return the default dtype of torch, numpy or jax for a number."""
    own = np.dtype(type(number))
    if for_torch:
        import torch

        return to_numpy_dtype(get_dtype(_get_dtype_name(torch.tensor(number, device="cpu").dtype)))
    if for_numpy:
        return own
    import jax

    made: np.dtype[Any] = jax.dtypes.canonicalize_dtype(own)
    return made


def create_spec_target(spec: Any, placement: RankInfo, metadata: ArrayMetadata) -> Target:
    """Create a target for a spec (see `is_array_spec`), and the metadata of the stored array."""
    if isinstance(spec, ArraySpec):
        return spec.target(placement)
    from xla_ckpt.arrays.jax_array import create_jax_target

    if isinstance(spec, PRNGKeySpec):
        return create_jax_target(metadata.shape, to_numpy_dtype(metadata.dtype), spec.get_sharding(metadata.shape))
    return create_jax_target(
        tuple(spec.shape), spec.dtype, get_target_sharding(spec), weak_type=getattr(spec, "weak_type", False)
    )


def create_array_target(dtype: DType, local: LocalArray, kind: str, device: torch.device | None = None) -> Target:
    """Create a target for a new array (see `create_target_factory`)."""
    return create_target_factory(dtype, local, kind, device)()


def create_target_factory(
    dtype: DType, local: LocalArray, kind: str, device: torch.device | None = None, *, weak_type: bool = False
) -> Callable[[], Target]:
    """Return a factory of targets for new arrays of a kind, in host memory unless a torch device is passed.

    The array type is determined once: torch tensors if torch is installed and supports the dtype, jax arrays if jax is
    loaded and supports it, otherwise numpy arrays.
    """
    shape = tuple(max((p.local_box.stop[d] for p in local.pieces), default=0) for d in range(len(local.shape)))
    if kind == "torch" and is_torch_installed():
        from xla_ckpt.arrays.torch_registry import create_tensor_target_factory

        if (making := create_tensor_target_factory(dtype, shape, local, device)) is not None:
            return making
    if kind == "jax" and "jax" in sys.modules:
        from xla_ckpt.arrays.jax_array import can_create_dtype, create_jax_target

        numpy_type = to_numpy_dtype(dtype)
        if can_create_dtype(numpy_type):
            return functools.partial(create_jax_target, local.shape, numpy_type, None, weak_type=weak_type)
    return functools.partial(create_numpy_target, dtype, shape, to_numpy_dtype(dtype), local)
