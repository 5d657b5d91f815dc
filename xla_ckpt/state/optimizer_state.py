"""Where the arrays of an optimizer's stored state go: memory for those that the optimizer does not have yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xla_ckpt.arrays.registry import array_kind, new_array
from xla_ckpt.engine.target import Target
from xla_ckpt.manifest.records import ArrayRecord
from xla_ckpt.sharding.local_array import whole
from xla_ckpt.state.loading import Loading, Stored
from xla_ckpt.tree import path as paths

ELEMENTWISE = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "prev",
        "ax",
    }
)
"""States of torch's optimizers that have the shape of their parameter (torch/optim, 2.9)."""


def component_of(name: Any) -> str:
    """The path component of a parameter's state: its name's, or its number's."""
    return paths.escape(name) if isinstance(name, str) else paths.escape_other(str(name))


class StateTargets:
    """State that the optimizer does not have yet: laid out as its parameter is, on the device of torch's own rule."""

    def __init__(
        self, stored: Stored, by_name: Mapping[Any, Any], group_of: Mapping[Any, Any], now: Mapping[str, Any]
    ) -> None:
        self._stored = stored
        self._now = now
        self._shardings = stored.shardings
        self._bases = tuple(paths.join(stored.prefix, kind) + "/" for kind in ("state", "master"))
        self._by_component = {component_of(n): (n, p) for n, p in by_name.items()}
        self._group_of = group_of
        self._owners = {component_of(name) for name in group_of}
        self._device = next((p.device for p in by_name.values()), None)

    def _component(self, path: str) -> str | None:
        base = next((b for b in self._bases if path.startswith(b)), None)
        return None if base is None else path[len(base) :].split("/", maxsplit=1)[0]

    def is_shared(self, path: str) -> bool:
        """Whether this is state that belongs to no parameter of the stored optimizer."""
        return path.startswith(self._bases[0]) and self._component(path) not in self._owners

    def name(self, path: str) -> Any:
        """The parameter whose state this is; None for anything else."""
        if self.is_shared(path):
            return None
        return self._by_component.get(self._component(path) or "", (None, None))[0]

    def is_kept(self, path: str, *, masters: bool) -> bool:
        """Whether the program has a use for this array."""
        if path.startswith(self._bases[1]) and not masters:
            return False
        component = self._component(path)
        return component is None or component in self._by_component or self.is_shared(path)

    def target(self, path: str, record: ArrayRecord, kind: str) -> Target | None:
        """Memory for one array of the state; None for one that is outside of it."""
        if self.is_shared(path):
            return self._shared(path, record, kind)
        name, parameter = self._by_component.get(self._component(path) or "", (None, None))
        known = self._shardings.parameter(path)
        if parameter is None or known is None:
            return None
        group = self._group_of.get(name, {})
        name_of_state = path.rpartition("/")[2]
        full = self._shardings.parameter_local(known).shape
        if (name_of_state in ELEMENTWISE or path.startswith(self._bases[1])) and record.shape != full:
            return new_array(record.dtype, whole(full), kind)  # which is found not to fit
        on_host = path.endswith("/step") and not (group.get("capturable") or group.get("fused"))
        if not on_host and (made := self._shardings.state_like(path, record, known)) is not None:
            return made
        return new_array(record.dtype, whole(record.shape), kind, None if on_host else parameter.device)

    def _shared(self, path: str, record: ArrayRecord, kind: str) -> Target:
        """Like what the program has there, where that fits; else a whole array beside the parameters."""
        value = self._now.get(path)
        if array_kind(value) == kind and Loading().want(path, made := self._stored.like(path, value), record):
            return made
        device = value.device if isinstance(value, torch.Tensor) else self._device
        return new_array(record.dtype, whole(record.shape), kind, device)
