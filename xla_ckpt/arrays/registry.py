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
    """The adapters of tensors; None in a program that has not imported torch, and so has no tensors."""
    if not is_torch_loaded():
        return None
    from xla_ckpt.arrays.torch_registry import TorchAdapterRegistry

    return TorchAdapterRegistry()


def count_local_devices() -> int:
    """Devices of this process that hold shards of their own: several under SPMD, else one."""
    runtime: Any = sys.modules.get("torch_xla.runtime")
    return int(runtime.addressable_runtime_device_count()) if runtime is not None and runtime.is_spmd() else 1


class AdapterRegistry:
    """The adapters of the arrays of one call."""

    def __init__(self) -> None:
        self._torch_registry = _create_torch_registry()
        self._jax_adapter: ArrayAdapter | None = None
        """Made for the first array of jax's: it knows where the arrays of this call lie, and goes with the call."""

    def find(self, value: Any) -> ArrayAdapter | None:
        """The adapter of an array; None for anything else."""
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
        """The target that overwrites a dense tensor of a form, all of which this process has, if that takes no more.

        `assign_owners` is as in `ArrayAdapter.create_in_place_target`. None for whatever has to be looked at more
        closely. A load asks this of each of its arrays.
        """
        return (
            None if self._torch_registry is None else self._torch_registry.create_whole_target(value, form, owned=owned)
        )

    def get_kind(self, value: Any) -> str | None:
        """The kind of an array, as the skeleton names it; None for anything else."""
        adapter = self.find(value)
        return None if adapter is None else adapter.kind

    def require(self, value: Any, path: str = "") -> ArrayAdapter:
        """The adapter of an array.

        Raises:
            UnsupportedStateError: It is none.
        """
        adapter = self.find(value)
        if adapter is None:
            raise UnsupportedStateError(
                f"a {type(value).__name__} is no plain array", leaf=path, hint="Give a dense tensor in its place."
            )
        return adapter


def get_array_kind(value: Any) -> str | None:
    """The kind of a single array, as the skeleton names it; None for anything else."""
    return AdapterRegistry().get_kind(value)


def require_adapter(value: Any, path: str = "") -> ArrayAdapter:
    """The adapter of a single array.

    Raises:
        UnsupportedStateError: It is none.
    """
    return AdapterRegistry().require(value, path)


def check_has_memory(value: Any, path: str) -> None:
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
    return is_torch_tensor(value) and value.device.type == "meta"


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array to be restored, by its description: what `restore` takes in place of an array.

    The element type decides what is made: a torch dtype (or its name) a CPU tensor, a numpy dtype a numpy array, and
    with a `sharding` from jax a jax array. Where torch is not installed, a name makes a numpy array.

    Raises (on construction):
        UnsupportedStateError: There is no such element type. The error names those that there are.
        UsageError: The shape is none, or the element type is none at all.
    """

    shape: tuple[int, ...]
    """Global shape (elements)."""

    dtype: Any
    """``torch.float32``, ``"float32"`` or ``np.dtype("float32")``."""

    sharding: Any = None
    """None, a jax sharding, or a spec such as ``("tp", None)``: then the array is this rank's part of it."""

    def __post_init__(self) -> None:
        sizes = tuple(self.shape) if isinstance(self.shape, Iterable) else (None,)
        if not all(isinstance(size, SupportsIndex) and operator.index(size) >= 0 for size in sizes):
            raise UsageError(
                "shape of an ArraySpec is none", expected="sizes such as (4, 8)", found=repr(self.shape)[:80]
            )
        object.__setattr__(self, "shape", sizes)
        get_dtype(_get_dtype_name(self.dtype))  # not only when the restore makes room for it

    def target(self, placement: RankInfo) -> Target:
        """Memory for it.

        Raises:
            UsageError: The sharding does not fit to the shape.
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
        """The kind of the array that is made."""
        if self.sharding is not None and not isinstance(self.sharding, tuple | list | Sharding):
            return "jax"
        return "torch" if _is_torch_dtype(self.dtype) and is_torch_installed() else "numpy"


def _is_torch_dtype(dtype: Any) -> bool:
    """Whether an element type is one of torch's, or the name of one."""
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
    """Whether `value` describes an array: an `ArraySpec`, or a `jax.ShapeDtypeStruct` of one. Keys are no arrays."""
    return isinstance(value, ArraySpec | PRNGKeySpec) or (
        type(value).__name__ == "ShapeDtypeStruct" and not is_prng_key(value)
    )


def convert_stored_number(pattern: Any, stored: Any, codec: ValueCodec, *, allow_rounding: bool) -> Any:
    """An array like `pattern`, where something is stored that is none; NotImplemented where that makes no such array.

    A number is an array without dims: jax counts steps in a number until a step has been compiled, and in an array
    from then on. `codec` wrote what is stored; `allow_rounding` allows to round it to a floating-point type.

    Raises:
        IncompatibleCheckpointError: What is stored is a typed key, or a number that an array of this type changes.
        UsageError: jax makes no arrays of this type.
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
    """The number of Python's that is stored, as such or as a scalar of numpy's; NotImplemented if none is."""
    if isinstance(stored, dict) and len(stored) == 1 and next(iter(stored)).startswith(_NUMBER_PREFIXES):
        stored = codec.decode(stored)
        stored = stored.item() if isinstance(stored, np.generic) else stored
    return stored if type(stored) in (bool, int, float, complex) else NotImplemented


_NUMBER_PREFIXES = ("$int", "$float", "$complex", "$numpy.")
"""How the skeleton names numbers that are none of JSON's begin; other scalars of numpy's begin so, too."""


def _create_number_array(number: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """A number as an array without dims, rounded where the type does not have it; None where it makes none."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy 1 wraps integers, and warns of it
            return np.array(number, dtype)
    except (OverflowError, TypeError, ValueError):  # too large; a complex number; NaN as an integer
        return None


def _is_equal_number(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))


def _get_default_dtype(number: complex, *, for_torch: bool, for_numpy: bool) -> np.dtype[Any]:
    """The type of the array that torch, numpy or jax makes of a number by itself."""
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
    """A target that makes the array that is described (see `is_array_spec`), from what is stored of this form."""
    if isinstance(spec, ArraySpec):
        return spec.target(placement)
    from xla_ckpt.arrays.jax_array import create_jax_target

    if isinstance(spec, PRNGKeySpec):
        return create_jax_target(metadata.shape, to_numpy_dtype(metadata.dtype), spec.get_sharding(metadata.shape))
    return create_jax_target(
        tuple(spec.shape), spec.dtype, get_target_sharding(spec), weak_type=getattr(spec, "weak_type", False)
    )


def create_array_target(dtype: DType, local: LocalArray, kind: str, device: torch.device | None = None) -> Target:
    """A target that makes a new array (see `create_target_factory`)."""
    return create_target_factory(dtype, local, kind, device)()


def create_target_factory(
    dtype: DType, local: LocalArray, kind: str, device: torch.device | None = None, *, weak_type: bool = False
) -> Callable[[], Target]:
    """What makes targets, each of them for a new array of a kind, in host memory unless a torch device is named.

    What the arrays become is decided once for all that are alike: a torch tensor becomes one again if torch is
    installed and has the type, and a jax array if jax is loaded and has it; else they become numpy arrays.
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
