"""Tensors that declare their chunks of a global array with the protocols of torch.distributed.checkpoint.

A plain tensor has the attributes of torch 2.15's `CheckpointableTensor`: ``global_shape``, ``global_offsets``,
``local_offsets`` and ``local_sizes``. The local tensor of a DTensor may have the methods ``__create_chunk_list__`` and
``__create_write_items__``, which replace its placements; Megatron-FSDP sets them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from xla_ckpt.core.sharding.box import Box, find_overlap
from xla_ckpt.core.sharding.local_array import LocalArray, Piece
from xla_ckpt.errors import UnsupportedStateError

GLOBAL_SHAPE = "global_shape"

CHUNK_ATTRIBUTES = ("global_offsets", "local_offsets", "local_sizes")
"""Attributes of a tensor in addition to its ``global_shape``."""

CHUNK_HOOKS = ("__create_chunk_list__", "__create_write_items__")
"""Methods that the local tensor of a DTensor may have. One of them is sufficient to declare its chunk."""


def is_checkpointable(value: Any) -> bool:
    """Return True if a tensor has all attributes of a torch `CheckpointableTensor`."""
    return hasattr(value, GLOBAL_SHAPE) and all(hasattr(value, name) for name in CHUNK_ATTRIBUTES)


def has_chunk_hooks(value: Any) -> bool:
    """Return True if the local tensor of a DTensor has hooks that declare its chunks."""
    local = getattr(value, "_local_tensor", None)
    return any(hasattr(local, name) for name in CHUNK_HOOKS)


def has_declared_chunks(value: Any) -> bool:
    """Return True if a tensor declares its chunks by attributes or by hooks."""
    return is_checkpointable(value) or has_chunk_hooks(value)


def get_local_shape(value: Any) -> tuple[int, ...]:
    """Return the shape of the local part of a tensor."""
    return tuple(getattr(value, "_local_tensor", value).shape)


def check_chunk_attributes(value: Any, path: str) -> None:
    """Check that a tensor with ``global_shape`` has all of `CHUNK_ATTRIBUTES` or none.

    Raises:
        UnsupportedStateError: If it has some, but not all of them.
    """
    found = [name for name in CHUNK_ATTRIBUTES if hasattr(value, name)]
    if found and len(found) < len(CHUNK_ATTRIBUTES) and hasattr(value, GLOBAL_SHAPE):
        raise UnsupportedStateError(
            "the attributes of a CheckpointableTensor are incomplete",
            leaf=path,
            expected=", ".join((GLOBAL_SHAPE, *CHUNK_ATTRIBUTES)),
            found=", ".join((GLOBAL_SHAPE, *found)),
            hint="Set all of them, or remove them. The shape of a parameter without its padding is unpadded_shape.",
        )


def locate_checkpointable(value: Any, path: str) -> LocalArray:
    """Return the regions of a tensor that `is_checkpointable`.

    Raises:
        UnsupportedStateError: If its attributes contradict each other or the tensor.
    """
    fields = [getattr(value, name) for name in (GLOBAL_SHAPE, *CHUNK_ATTRIBUTES)]
    try:
        shape = _parse_ints(fields[0])
        starts, locals_, sizes = ([_parse_ints(entry) for entry in field] for field in fields[1:])
    except (TypeError, AttributeError) as error:
        raise _create_chunk_error(path, "tuples of whole numbers", fields) from error
    if not len(starts) == len(locals_) == len(sizes):
        raise _create_chunk_error(path, "as many global_offsets as local_offsets and local_sizes", fields)
    held = tuple(value.shape)
    if len(shape) != len(held) or any(len(entry) != len(held) for entry in (*starts, *locals_, *sizes)):
        raise _create_chunk_error(path, f"{len(held)} dims in each, as the tensor has", fields)
    if any(n < 0 for entry in (shape, *starts, *locals_, *sizes) for n in entry):
        raise _create_chunk_error(path, "no negative number", fields)
    pieces = [
        Piece(_create_box(local, size), _create_box(start, size))
        for start, local, size in zip(starts, locals_, sizes, strict=True)
    ]
    return _create_local_array(path, shape, held, pieces, fields)


def locate_hooked(value: Any, path: str) -> LocalArray:
    """Return the region of a DTensor that `has_chunk_hooks`.

    Raises:
        UnsupportedStateError: If a hook returns anything but one chunk with the shape of the local tensor.
    """
    local, shape, held = value._local_tensor, tuple(value.shape), get_local_shape(value)
    listed, written = (getattr(local, name, None) for name in CHUNK_HOOKS)
    named: dict[str, list[Box]] = {}
    if listed is not None:
        named[CHUNK_HOOKS[0]] = [_parse_chunk(chunk) for chunk in listed()]
    if written is not None:
        named[CHUNK_HOOKS[1]] = [_parse_chunk(item.tensor_data.chunk) for item in written(path, value)]
    found = "; ".join(f"{name}: {', '.join(map(str, boxes)) or 'none'}" for name, boxes in named.items())
    chunks, *others = ([box for box in boxes if box.size] for boxes in named.values())
    if [box.shape for box in chunks] != [held] * (0 not in held) or any(other != chunks for other in others):
        raise UnsupportedStateError(
            "the hooks of a DTensor do not name one chunk of the shape of its local tensor",
            leaf=path,
            expected=f"a chunk of shape {list(held)}, the same in both hooks",
            found=found,
            hint="Compute the hooks anew, or remove them from the local tensor.",
        )
    return _create_local_array(path, shape, held, [Piece(Box.from_shape(held), box) for box in chunks], found)


def copy_declared_chunks(source: Any, target: Any) -> Any:
    """Copy the attributes that declare chunks to a new tensor, and return it."""
    names = (
        (GLOBAL_SHAPE, *CHUNK_ATTRIBUTES)
        if is_checkpointable(source)
        else CHUNK_HOOKS
        if has_chunk_hooks(source)
        else ()
    )
    source, receiver = (value._local_tensor if names is CHUNK_HOOKS else value for value in (source, target))
    for name in names:
        if hasattr(source, name):
            setattr(receiver, name, getattr(source, name))
    return target


def _create_local_array(
    path: str, shape: tuple[int, ...], local_shape: tuple[int, ...], pieces: Iterable[Piece], found: Any
) -> LocalArray:
    kept = tuple(piece for piece in pieces if piece.global_box.size)
    _check_boxes(path, "global shape", shape, [piece.global_box for piece in kept], found)
    _check_boxes(path, "shape of the tensor", local_shape, [piece.local_box for piece in kept], found)
    return LocalArray(shape=shape, pieces=kept)


def _check_boxes(path: str, shape_name: str, shape: tuple[int, ...], boxes: Sequence[Box], found: Any) -> None:
    whole = Box.from_shape(shape)
    if not all(whole.contains(box) for box in boxes):
        raise _create_chunk_error(path, f"chunks inside of the {shape_name} {list(shape)}", found)
    if find_overlap(boxes) is not None:
        raise _create_chunk_error(path, f"chunks that do not overlap in the {shape_name}", found)


def _create_chunk_error(path: str, expected: str, found: Any) -> UnsupportedStateError:
    if isinstance(found, list):
        found = ", ".join(f"{n} {v}" for n, v in zip((GLOBAL_SHAPE, *CHUNK_ATTRIBUTES), found, strict=True))
    return UnsupportedStateError(
        "the chunks that a tensor names do not fit", leaf=path, expected=expected, found=str(found),
        hint="Correct its attributes (torch.distributed.checkpoint.CheckpointableTensor), or remove them.",
    )  # fmt: skip


def _parse_ints(values: Any) -> tuple[int, ...]:
    return tuple(value.__index__() for value in values)


def _create_box(start: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    return Box(start, tuple(first + n for first, n in zip(start, sizes, strict=True)))


def _parse_chunk(chunk: Any) -> Box:
    return _create_box(_parse_ints(chunk.offsets), _parse_ints(chunk.sizes))
