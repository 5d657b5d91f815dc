"""Tensors composed of several plain ones: sparse, quantized, nested and complex32 tensors, and subclasses.

Each is stored as its plain tensors and the metadata that rebuilds it. Nothing is pickled. Subclasses define their parts
with `__tensor_flatten__` and `__tensor_unflatten__`, the protocol of torch.compile (torch.utils._python_dispatch), as
torchao and bitsandbytes do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xla_ckpt.core.tree.values import Composite
from xla_ckpt.errors import FormatError, UnsupportedStateError

TensorMembers = Mapping[str, torch.Tensor]

_COMPRESSED_INDICES: dict[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


@dataclass(frozen=True, slots=True)
class _TensorKind:
    """A built-in torch kind of composite tensors."""

    split: Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], Any]]
    """Splits a tensor into plain tensors and the other metadata."""

    compose: Callable[[TensorMembers, Any], torch.Tensor]


def _split_coo(value: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    members = {"indices": value._indices(), "values": value._values()}
    return members, {"size": list(value.shape), "coalesced": value.is_coalesced()}


def _compose_coo(members: TensorMembers, extra: Any) -> torch.Tensor:
    indices, values = members["indices"], members["values"]
    tensor = torch.sparse_coo_tensor(indices, values, extra["size"], device=values.device, check_invariants=True)
    return tensor._coalesced_(extra["coalesced"])


def _create_compressed_kind(layout: torch.layout) -> _TensorKind:
    first, second = _COMPRESSED_INDICES[layout]

    def apart(value: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
        return {n: getattr(value, n)() for n in (first, second, "values")}, {"size": list(value.shape)}

    def compose(members: TensorMembers, about: Any) -> torch.Tensor:
        values = members["values"]
        return torch.sparse_compressed_tensor(
            members[first],
            members[second],
            values,
            about["size"],
            layout=layout,
            device=values.device,
            check_invariants=True,
        )

    return _TensorKind(apart, compose)


def _split_per_tensor(value: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    return {"values": value.int_repr()}, {
        "dtype": value.dtype,
        "scale": value.q_scale(),
        "zero_point": value.q_zero_point(),
    }


def _compose_per_tensor(members: TensorMembers, extra: Any) -> torch.Tensor:
    return torch._make_per_tensor_quantized_tensor(members["values"], extra["scale"], extra["zero_point"])


def _split_per_channel(value: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    members = {
        "values": value.int_repr(),
        "scales": value.q_per_channel_scales(),
        "zero_points": value.q_per_channel_zero_points(),
    }
    return members, {"dtype": value.dtype, "axis": value.q_per_channel_axis()}


def _compose_per_channel(members: TensorMembers, extra: Any) -> torch.Tensor:
    return torch._make_per_channel_quantized_tensor(
        members["values"], members["scales"], members["zero_points"], extra["axis"]
    )


def _split_complex(value: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    return {"parts": torch.view_as_real(value.resolve_conj())}, None


def _compose_complex(members: TensorMembers, _: Any) -> torch.Tensor:
    # view_as_complex would be widened under autocast.
    return members["parts"].contiguous().view(torch.complex32).squeeze(-1)


def _split_nested(value: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    return {str(i): part for i, part in enumerate(value.unbind())}, None


def _compose_nested(members: TensorMembers, _: Any) -> torch.Tensor:
    parts = [*members.values()]
    return torch.nested.nested_tensor(parts, device=parts[0].device if parts else "cpu")


def _split_jagged(value: Any) -> tuple[dict[str, torch.Tensor], Any]:
    members = {"values": value.values(), "offsets": value.offsets()}
    return members | ({"lengths": value.lengths()} if value.lengths() is not None else {}), {
        "ragged": value._ragged_idx
    }


def _compose_jagged(members: TensorMembers, extra: Any) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(
        members["values"], members["offsets"], members.get("lengths"), jagged_dim=extra["ragged"]
    )


_PER_CHANNEL_SCHEMES = (torch.per_channel_affine, torch.per_channel_symmetric, torch.per_channel_affine_float_qparams)

_TENSOR_KINDS = {
    "torch:sparse_coo": _TensorKind(_split_coo, _compose_coo),
    **{
        f"torch:{str(layout).removeprefix('torch.')}": _create_compressed_kind(layout) for layout in _COMPRESSED_INDICES
    },
    "torch:per_tensor": _TensorKind(_split_per_tensor, _compose_per_tensor),
    "torch:per_channel": _TensorKind(_split_per_channel, _compose_per_channel),
    "torch:complex32": _TensorKind(_split_complex, _compose_complex),
    "torch:nested": _TensorKind(_split_nested, _compose_nested),
    "torch:jagged": _TensorKind(_split_jagged, _compose_jagged),
}


_LAZY_OPERATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch:conj": lambda stored: stored.conj().resolve_conj(),
    "torch:neg": torch.neg,
}
"""Tensors that torch.save stores before they are conjugated or negated. Saves of this library store their values."""


def get_composite_name(value: torch.Tensor) -> str | None:
    """Return the composite kind of a tensor: the name of a kind, or ``module:class``; None for a plain tensor."""
    if value.layout is torch.jagged:
        return "torch:jagged"
    if value.is_nested:
        return "torch:nested"
    if value.layout is not torch.strided:
        name = f"torch:{str(value.layout).removeprefix('torch.')}"
        return name if name in _TENSOR_KINDS else None
    if value.is_quantized:
        axes = value.qscheme() in _PER_CHANNEL_SCHEMES
        whole = value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        return "torch:per_channel" if axes else "torch:per_tensor" if whole else None
    if value.dtype is torch.complex32:
        return "torch:complex32"
    kind = type(value)
    return f"{kind.__module__}:{kind.__qualname__}" if hasattr(kind, "__tensor_flatten__") else None


def split_value(value: Any) -> Composite | None:
    """Split a composite tensor into plain tensors; return None for anything else."""
    if not isinstance(value, torch.Tensor) or (name := get_composite_name(value)) is None:
        return None
    tensor = value.detach()
    if name in _TENSOR_KINDS:
        members, about = _TENSOR_KINDS[name].split(tensor)
        return Composite(name, members, about)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return Composite(
        name,
        {inner: getattr(tensor, inner) for inner in names},
        {"context": context, "size": list(tensor.shape), "stride": list(tensor.stride())},
    )


def resolve_composite_class(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """Return the class of a tensor that `split_value` has split; None for a built-in torch kind.

    Raises:
        IncompatibleCheckpointError: If the class is missing.
        UntrustedObjectError: If its module is not imported.
    """
    return (
        None
        if composite.name in _TENSOR_KINDS or composite.name in _LAZY_OPERATIONS
        else resolve(composite.name, torch.Tensor)
    )


def compose(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """Compose a tensor that `split_value` has split.

    Args:
        composite: Its parts.
        resolve: Finds the class of a tensor subclass.

    Raises:
        UnsupportedStateError: If its parts are not tensors here, because a layout has replaced them.
        FormatError: If its parts are invalid.
    """
    name, members, about = composite.name, composite.members, composite.extra
    if not all(isinstance(member, torch.Tensor) for member in members.values()):
        raise UnsupportedStateError(
            f"this layout has no place for a tensor that consists of several ({name})", hint='layout="native" has.'
        )
    try:
        if name in _TENSOR_KINDS:
            return _TENSOR_KINDS[name].compose(members, about)
        if name in _LAZY_OPERATIONS:
            return _LAZY_OPERATIONS[name](members["stored"])
        kind = resolve_composite_class(composite, resolve)
        return kind.__tensor_unflatten__(
            dict(members), about["context"], torch.Size(about["size"]), tuple(about["stride"])
        )
    except (RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise FormatError(f"a tensor cannot be put together again: {error}", found=name) from error
