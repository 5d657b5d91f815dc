"""Schedulers, and whatever else has `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_ckpt.arrays.registry import new_array
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.sharding.local_array import whole
from xla_ckpt.state.handover import Handover, kept
from xla_ckpt.state.loading import Loading, Stored, arrays_of
from xla_ckpt.state.module import load_dict
from xla_ckpt.state.rng import RNGState
from xla_ckpt.tree.skeleton import array_paths


def tree_of(member: Any, name: str) -> Any:
    """The state of a member.

    Raises:
        UnsupportedStateError: It is neither a dict nor has it `state_dict`.
    """
    if isinstance(member, Mapping):
        return member
    if not callable(getattr(member, "state_dict", None)) or not callable(getattr(member, "load_state_dict", None)):
        raise UnsupportedStateError(
            f"a {type(member).__name__} has no state_dict() and load_state_dict()",
            leaf=name,
            hint="Pass an object that has both, or put plain values into user_content.",
        )
    return member.state_dict()


def load(stored: Stored, member: Any) -> Loading:
    """Prepare to load a member: its state is restored as new values, and handed to its `load_state_dict`."""
    if isinstance(member, dict):
        return load_dict(stored, member)
    loading = Loading()
    current = arrays_of(tree_of(member, stored.prefix), stored.prefix)
    for path, kind in array_paths(stored.skeleton, stored.prefix).items():
        record, now = stored.record(path), current.get(path)
        like = None if now is None else stored.like(path, now)
        fits = like is not None and (like.shape, like.dtype) == (record.shape, record.dtype)
        # Such state may have grown or changed since: the object itself knows best whether it fits.
        loading.want(path, like if fits and like else new_array(record.dtype, whole(record.shape), kind), record)

    def take(arrays: Mapping[str, Any]) -> None:
        member.load_state_dict(stored.build(lambda path, _: arrays[path]))

    if isinstance(member, RNGState):
        loading.finish = take  # last of all: whatever else is loaded may draw random numbers
    else:
        loading.handover = Handover(leaf=stored.prefix, take=take, keep=lambda: kept(member))
    return loading
