"""Where the arrays of an optimizer's stored state go: memory for those that the optimizer does not have yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_ckpt.arrays.registry import array_kind, new_array
from xla_ckpt.arrays.torch_objects import is_torch_tensor
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.cast import can_cast
from xla_ckpt.engine.target import Target
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.sharding.local_array import whole
from xla_ckpt.state.loading import Loading, Stored
from xla_ckpt.tree import schema
from xla_ckpt.tree.flatten import component
from xla_ckpt.tree.optimizer_schema import STEP_ON_DEVICE, Lies, StateRule


class StateTargets:
    """State that the optimizer does not have yet: laid out as its parameter is, on the device of torch's own rule."""

    def __init__(
        self,
        stored: Stored,
        by_name: Mapping[Any, Any],
        group_of: Mapping[Any, Any],
        now: Mapping[str, Any],
        *,
        usual: bool,
        casts: bool,
    ) -> None:
        """Take note of an optimizer and what it is to load.

        Args:
            stored: What it is to load.
            by_name: Name of each parameter -> the tensor under which its state is kept.
            group_of: Name of each stored parameter -> the options that its group will have.
            now: The arrays of its state, by leaf path.
            usual: Whether the optimizer is one of torch's, whose states have the shapes of torch's keys.
            casts: Whether state takes the dtype of its parameter; else code of the program decides.
        """
        self._usual = usual
        self._casts = casts
        self._stored = stored
        self._now = now
        self._shardings = stored.shardings
        self._by_component = {component(n): (n, p) for n, p in by_name.items()}
        self._group_of = group_of
        self._owners = {component(name) for name in group_of}
        self._device = next((p.device for p in by_name.values()), None)

    def is_common(self, path: str) -> bool:
        """Whether this is state that belongs to no parameter of the stored optimizer."""
        place = schema.place_of(path)
        return place.role is schema.Role.STATE and place.owner not in self._owners

    def name(self, path: str) -> Any:
        """The parameter whose state this is; None for anything else."""
        if self.is_common(path):
            return None
        return self._owner(schema.place_of(path))[0]

    def _owner(self, place: schema.LeafPlace) -> tuple[Any, Any]:
        """(name, tensor) of the parameter whose state, or master weight, this is; twice None for anything else."""
        if place.owner is None or place.role not in (schema.Role.STATE, schema.Role.MASTER):
            return None, None
        return self._by_component.get(place.owner, (None, None))

    def is_kept(self, path: str, *, masters: bool) -> bool:
        """Whether the program has a use for this array."""
        place = schema.place_of(path)
        if place.role is schema.Role.MASTER and not masters:
            return False
        return schema.owner_of(path) is None or place.owner in self._by_component or self.is_common(path)

    def target(self, path: str, record: ArrayRecord, kind: str) -> Target | None:
        """Memory for one array of the state; None for one that is outside of it."""
        if self.is_common(path):
            return self._common(path, record, kind)
        place = schema.place_of(path)
        name, parameter = self._owner(place)
        known = self._shardings.parameter(path)
        if parameter is None or known is None:
            return None
        group = self._group_of.get(name, {})
        rule, full = known.rule(path), self._shardings.parameter_local(known).shape
        dtype = self._dtype(path, record, rule, parameter)
        if rule.lies is Lies.ELEMENTWISE and record.shape != full and self._was_elementwise(path, record, rule):
            return new_array(dtype, whole(full), kind)  # which is found not to fit
        on_device = not rule.declared and any(group.get(option) for option in STEP_ON_DEVICE)
        if rule.lies is Lies.ON_HOST and not on_device:
            return new_array(record.dtype, whole(record.shape), kind)
        if not self._was_whole(path, record, rule):
            like = self._shardings.state_like(path, record, known, dtype)
            if like is not None:
                return like
        return new_array(dtype, whole(record.shape), kind, parameter.device)

    def _dtype(self, path: str, record: ArrayRecord, rule: StateRule, parameter: Any) -> DType:
        """The dtype of a state: that of its parameter, as torch's `load_state_dict` has it, if the two were alike.

        A program may keep state of a higher precision than its parameters, and it keeps it. State of master weights is
        cast to the dtype of parameters that have none only if the call says so, and so is state of torch's own
        optimizers beside which no parameters are stored.
        """
        if not self._casts or rule.lies in (Lies.ON_HOST, Lies.REPLICATED, Lies.PER_RANK):
            return record.dtype
        master = self._stored.manifest.arrays.get(schema.master(self._owner(schema.place_of(path))[0]))
        weight = self._weight(path)
        if master is None and weight is not None:
            alike = weight.dtype == record.dtype
        else:
            alike = self._stored.cast and (self._usual if master is None else master.dtype == record.dtype)
        adapter = self._shardings.adapters.of(parameter)
        if not alike or adapter is None:
            return record.dtype
        own = adapter.dtype(parameter, path)
        return own if can_cast(record.dtype, own) else record.dtype

    def _weight(self, path: str) -> ArrayRecord | None:
        """The stored parameter whose state this is; None where only the optimizer is stored."""
        manifest, leaf = self._stored.manifest, schema.parameter_of(path) or ""
        return manifest.arrays.get(manifest.aliases.get(leaf, leaf))

    def _was_elementwise(self, path: str, record: ArrayRecord, rule: StateRule) -> bool:
        """Whether a state had the shape of its parameter when it was saved.

        Optimizers of low rank keep factors under torch's usual keys, and others one number for each parameter. What
        was saved is the truth about them: the program's parameter says nothing about their shape.
        """
        if self._usual or rule.declared or schema.place_of(path).role is schema.Role.MASTER:
            return True
        weight = self._weight(path)
        if weight is not None:
            return bool(weight.shape == record.shape)
        return len(record.shape) == int(self._owner(schema.place_of(path))[1].ndim)

    def _was_whole(self, path: str, record: ArrayRecord, rule: StateRule) -> bool:
        """Whether ranks had all of a state each that had a part of its parameter, and nobody says how it lies.

        Its shape alone could mean a part: a factor of as many rows as the parameter, and one column.
        """
        weight = self._weight(path)
        by_shape = rule.lies is Lies.BY_SHAPE or (rule.lies is Lies.ELEMENTWISE and not rule.declared)
        if not by_shape or weight is None or weight.shape == record.shape:
            return False
        own = (*(record.spec or ()), *(None,) * len(record.shape))
        split = [d for d, axes in enumerate(weight.spec or ()) if axes is not None and d < len(record.shape)]
        return any(own[d] is None and record.shape[d] == weight.shape[d] for d in split)

    def _common(self, path: str, record: ArrayRecord, kind: str) -> Target:
        """Like what the program has there, where that fits; else a whole array beside the parameters."""
        value = self._now.get(path)
        if array_kind(value) == kind and Loading().want(path, like := self._stored.like(path, value), record.form):
            return like
        device = value.device if is_torch_tensor(value) else self._device
        return new_array(record.dtype, whole(record.shape), kind, device)
