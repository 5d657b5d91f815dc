"""Which adapter answers for a value. Frameworks that the program has not loaded are not loaded to find out."""

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
from xla_ckpt.arrays.numpy_array import Numpy, fresh_numpy
from xla_ckpt.arrays.pytree import KeyRows, is_key, key_in_place_of_array, wanted_sharding
from xla_ckpt.arrays.torch_objects import is_of, is_torch_tensor, torch_is_installed, torch_is_loaded
from xla_ckpt.dtypes import DType, dtype
from xla_ckpt.engine.numpy_types import numpy_dtype
from xla_ckpt.engine.target import Target
from xla_ckpt.errors import IncompatibleCheckpointError, UnsupportedStateError, UsageError
from xla_ckpt.manifest.forms import ArrayForm
from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.sharding.sharding import Sharding
from xla_ckpt.tree.codec import ValueCodec

if TYPE_CHECKING:
    import torch

    from xla_ckpt.arrays.torch_arrays import TorchAdapters

_NUMPY: ArrayAdapter = Numpy()


def _torch_adapters() -> TorchAdapters | None:
    """The adapters of tensors; None in a program that has not imported torch, and so has no tensors."""
    if not torch_is_loaded():
        return None
    from xla_ckpt.arrays.torch_arrays import TorchAdapters

    return TorchAdapters()


def local_lanes() -> int:
    """Devices of this process that hold shards of their own: several under SPMD, else one."""
    runtime: Any = sys.modules.get("torch_xla.runtime")
    return int(runtime.addressable_runtime_device_count()) if runtime is not None and runtime.is_spmd() else 1


class Adapters:
    """The adapters of the arrays of one call."""

    def __init__(self) -> None:
        self._torch = _torch_adapters()
        self._jax: ArrayAdapter | None = None
        """Made for the first array of jax's: it knows where the arrays of this call lie, and goes with the call."""

    def of(self, value: Any) -> ArrayAdapter | None:
        """The adapter of an array; None for anything else."""
        if self._torch is not None and (adapter := self._torch.of(value)) is not None:
            return adapter
        if _NUMPY.accepts(value):
            return _NUMPY
        if "jax" in sys.modules and type(value).__module__.startswith(("jax", "jaxlib")):
            if self._jax is None:
                from xla_ckpt.arrays.jax_array import Jax

                self._jax = Jax()
            return self._jax if self._jax.accepts(value) else None
        return None

    def whole_target(self, value: Any, form: ArrayForm, *, owned: bool) -> Target | None:
        """The target that overwrites a dense tensor of a form, all of which this process has, if that takes no more.

        `owned` is as in `ArrayAdapter.into`. None for whatever has to be looked at more closely. A load asks this of
        each of its arrays.
        """
        return None if self._torch is None else self._torch.whole_target(value, form, owned=owned)

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
            raise UnsupportedStateError(
                f"a {type(value).__name__} is no plain array", leaf=path, hint="Give a dense tensor in its place."
            )
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
        dtype(_name(self.dtype))  # not only when the restore makes room for it

    def target(self, placement: Placement) -> Target:
        """Memory for it.

        Raises:
            UsageError: The sharding does not fit to the shape.
        """
        if self._kind == "jax":
            from xla_ckpt.arrays.jax_array import fresh_jax

            return fresh_jax(self.shape, numpy_dtype(dtype(_name(self.dtype))), self.sharding)
        try:
            local = Sharding.parse(self.sharding).part(self.shape, placement.mesh, placement.rank)
        except ValueError as error:
            raise UsageError(f"an ArraySpec makes no sense: {error}", found=repr(self)) from error
        return new_array(dtype(_name(self.dtype)), local, self._kind)

    @property
    def _kind(self) -> str:
        """The kind of the array that is made."""
        if self.sharding is not None and not isinstance(self.sharding, tuple | list | Sharding):
            return "jax"
        return "torch" if _names_tensor(self.dtype) and torch_is_installed() else "numpy"


def _names_tensor(element_type: Any) -> bool:
    """Whether an element type is one of torch's, or the name of one."""
    return isinstance(element_type, str) or is_of(element_type, "torch", "dtype")


def _name(element_type: Any) -> str:
    if _names_tensor(element_type):
        return str(element_type).removeprefix("torch.")
    try:
        return str(np.dtype(element_type).name)
    except TypeError as error:
        expected = 'torch.float32, "float32" or np.dtype("float32")'
        raise UsageError("the dtype of an ArraySpec is none", expected=expected, found=repr(element_type)) from error


def is_spec(value: Any) -> bool:
    """Whether `value` describes an array: an `ArraySpec`, or a `jax.ShapeDtypeStruct` of one. Keys are no arrays."""
    return isinstance(value, ArraySpec | KeyRows) or (type(value).__name__ == "ShapeDtypeStruct" and not is_key(value))


def array_instead(pattern: Any, stored: Any, codec: ValueCodec, *, cast: bool) -> Any:
    """An array like `pattern`, where something is stored that is none; NotImplemented where that makes no such array.

    A number is an array without dims: jax counts steps in a number until a step has been compiled, and in an array
    from then on. `codec` wrote what is stored; `cast` allows to round it to a floating-point type.

    Raises:
        IncompatibleCheckpointError: What is stored is a typed key, or a number that an array of this type changes.
        UsageError: jax makes no arrays of this type.
    """
    if (problem := key_in_place_of_array(stored)) is not None:
        raise problem
    number = NotImplemented if tuple(pattern.shape) else _number_of(stored, codec)
    if number is NotImplemented:
        return NotImplemented
    kind = pattern._kind if isinstance(pattern, ArraySpec) else None
    is_tensor = is_torch_tensor(pattern) or kind == "torch"
    is_numpy = isinstance(pattern, np.ndarray) or kind == "numpy"
    element = dtype(_name(pattern.dtype))
    array = _array_of_number(number, numpy_dtype(element))
    if array is None or not _is_same_number(array.item(), number):
        rounds = (cast and element.floating and type(number) is float) or (
            type(number) in (float, complex)
            and numpy_dtype(element) == _natural_type(number, tensor=is_tensor, numpy=is_numpy)
        )
        if array is None or not rounds or not np.isfinite(array):
            raise IncompatibleCheckpointError(
                f"the number {number!r} is stored, and an array of {element.name} changes its value",
                expected=f"a number that {element.name} has",
                found=f"{number!r} ({type(number).__name__})",
                hint="Put a number into `like`, or an array of a type that has its value."
                + (" cast=True rounds it." if element.floating and type(number) is float and not cast else ""),
            )
    if is_tensor:
        from xla_ckpt.arrays.torch_arrays import number_tensor

        return number_tensor(pattern, number)
    if is_numpy:
        return array
    from xla_ckpt.arrays.jax_array import number_array

    return number_array(pattern, array)


def _number_of(stored: Any, codec: ValueCodec) -> Any:
    """The number of Python's that is stored, as such or as a scalar of numpy's; NotImplemented if none is."""
    if isinstance(stored, dict) and len(stored) == 1 and next(iter(stored)).startswith(_NUMBERS):
        stored = codec.decode(stored)
        stored = stored.item() if isinstance(stored, np.generic) else stored
    return stored if type(stored) in (bool, int, float, complex) else NotImplemented


_NUMBERS = ("$int", "$float", "$complex", "$numpy.")
"""How the skeleton names numbers that are none of JSON's begin; other scalars of numpy's begin so, too."""


def _array_of_number(number: Any, element: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """A number as an array without dims, rounded where the type does not have it; None where it makes none."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy 1 wraps integers, and warns of it
            return np.array(number, element)
    except (OverflowError, TypeError, ValueError):  # too large; a complex number; NaN as an integer
        return None


def _is_same_number(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))


def _natural_type(number: complex, *, tensor: bool, numpy: bool) -> np.dtype[Any]:
    """The type of the array that torch, numpy or jax makes of a number by itself."""
    own = np.dtype(type(number))
    if tensor:
        import torch

        return numpy_dtype(dtype(_name(torch.tensor(number, device="cpu").dtype)))
    if numpy:
        return own
    import jax

    made: np.dtype[Any] = jax.dtypes.canonicalize_dtype(own)
    return made


def target_of_spec(value: Any, placement: Placement, stored: ArrayForm) -> Target:
    """A target that makes the array that is described (see `is_spec`), from what is stored of this form."""
    if isinstance(value, ArraySpec):
        return value.target(placement)
    from xla_ckpt.arrays.jax_array import fresh_jax

    if isinstance(value, KeyRows):
        return fresh_jax(stored.shape, numpy_dtype(stored.dtype), value.sharding(stored.shape))
    return fresh_jax(
        tuple(value.shape), value.dtype, wanted_sharding(value), weak_type=getattr(value, "weak_type", False)
    )


def new_array(element: DType, local: LocalArray, kind: str, device: torch.device | None = None) -> Target:
    """A target that makes a new array (see `making_new`)."""
    return making_new(element, local, kind, device)()


def making_new(
    element: DType, local: LocalArray, kind: str, device: torch.device | None = None, *, weak_type: bool = False
) -> Callable[[], Target]:
    """What makes targets, each of them for a new array of a kind, in host memory unless a torch device is named.

    What the arrays become is decided once for all that are alike: a torch tensor becomes one again if torch is
    installed and has the type, and a jax array if jax is loaded and has it; else they become numpy arrays.
    """
    shape = tuple(max((p.local.stop[d] for p in local.pieces), default=0) for d in range(len(local.shape)))
    if kind == "torch" and torch_is_installed():
        from xla_ckpt.arrays.torch_arrays import making_new_tensors

        if (making := making_new_tensors(element, shape, local, device)) is not None:
            return making
    if kind == "jax" and "jax" in sys.modules:
        from xla_ckpt.arrays.jax_array import fresh_jax, makes

        numpy_type = numpy_dtype(element)
        if makes(numpy_type):
            return functools.partial(fresh_jax, local.shape, numpy_type, None, weak_type=weak_type)
    return functools.partial(fresh_numpy, element, shape, numpy_dtype(element), local)
