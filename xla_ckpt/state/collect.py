"""A program's objects as one state tree, as the rank sees it that saves it."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

from xla_ckpt.arrays.base import Placement
from xla_ckpt.arrays.registry import array_kind
from xla_ckpt.manifest.digest import digest, to_hex
from xla_ckpt.plan.merge import Sample
from xla_ckpt.sharding.rules import Rules, idle, parse_rules
from xla_ckpt.snapshot.sample import sample
from xla_ckpt.snapshot.take import HostShard
from xla_ckpt.state import module, per_rank, pickles, stateful, zero1
from xla_ckpt.state import optimizer as optimizers
from xla_ckpt.state.describe import Described, describe
from xla_ckpt.state.placing import Layouts, Parameter
from xla_ckpt.state.values import CODEC
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.flatten import Flat, flatten
from xla_ckpt.tree.skeleton import find, renumbered

logger = logging.getLogger(__name__)

Json = Any


@dataclass(frozen=True, slots=True)
class State:
    """A state tree, and what is known about its members."""

    tree: Any
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    """Leaf paths of buffers, which may differ between ranks."""

    alone: tuple[str, ...] = ()
    """Leaf path prefixes of what this rank alone has."""

    parts: tuple[str, ...] = ("",)
    """Paths whose plain values all ranks have in common."""

    by_name: bool = False
    """Whether the optimizer's state is kept by parameter name."""

    zero1: tuple[str, ...] | None = None
    """Mesh axes over which a ZeRO-1 optimizer deals rows out; None for any other optimizer."""


def training_state(
    placement: Placement,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    user_content: Any,
    extras: Mapping[str, Any] | None,
) -> State:
    """The state of the usual objects, each of them optional.

    Raises:
        UnsupportedStateError: One of them cannot be stored.
    """
    rank, world = placement.rank, placement.world
    tree: dict[str, Any] = {}
    parts, alone, buffers = [], [], frozenset[str]()
    parameters: Mapping[str, Parameter] = {}
    by_name, axes = False, None
    if model is not None:
        tree["model"] = module.tree_of(model)
        buffers = frozenset(paths.join("model", paths.escape(name)) for name in module.buffer_names(model))
        parts.append("model")
    if optimizer is not None:
        names = module.parameter_names(model)
        tree["optimizer"] = optimizers.tree_of(optimizer, names)
        parameters = optimizers.parameters_of(optimizer, model, names, placement)
        by_name = optimizers.is_by_name(optimizer, tree["optimizer"])
        axes = zero1.mesh_axes(optimizer, placement) if zero1.is_zero1(optimizer) else None
        parts.append("optimizer")
    if scheduler is not None:
        tree["scheduler"] = stateful.tree_of(scheduler, "scheduler")
        parts.append("scheduler")
    if extras:
        tree["extras"] = {n: per_rank.tree_of(m, f"extras/{n}", rank, world) for n, m in extras.items()}
        alone += [per_rank.prefix_of(n, rank) for n, m in extras.items() if per_rank.is_per_rank(m)]
        parts += [paths.join("extras", paths.escape(n)) for n, m in extras.items() if not per_rank.is_per_rank(m)]
    if user_content is not None and rank == 0:
        tree["user_content"] = user_content
        alone += ["user_content/", "user_content"]
    return State(tree, parameters, buffers, tuple(alone), tuple(parts), by_name, axes)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A state, described: everything about it but its bytes."""

    described: Described
    skeleton: Json
    objects: list[bytes]
    speaks: bool
    """Whether this rank speaks for its pipeline stage."""

    alone: tuple[str, ...]
    parts: Mapping[str, str]
    buffers: frozenset[str]
    here: Json
    """The whole structure of the state as this rank has it, with the objects of `objects_here`."""

    objects_here: list[bytes]

    def named(self, path: str) -> bool:
        """Whether this rank reports type and shape of a leaf."""
        return self.speaks or path.startswith(self.alone)


def prepare(state: State, placement: Placement, rules: Rules | None, *, wholly: bool = False) -> Prepared:
    """Describe a state; `wholly`: with all objects of this rank, also those that others speak for.

    Raises:
        UnsupportedStateError: Something in it cannot be stored.
        UsageError: A sharding rule makes no sense or does not fit.
    """
    layouts = Layouts(placement, parse_rules(rules), state.parameters, state.alone)
    flat = flatten(state.tree, array_kind, CODEC)
    _warn_of_idle_rules(layouts, flat.arrays)
    described = describe(flat.arrays, layouts, state.buffers)
    mesh = placement.mesh
    speaks = placement.rank == mesh.rank({"pp": mesh.coordinates(placement.rank)["pp"]})
    parts = {p: _digest(find(flat.skeleton, p)) for p in state.parts} if placement.world > 1 else {}
    own = flat if speaks else _own_part(flat, state.alone)
    objects = [_pickle(leaf, value) for leaf, value in own.objects]
    here = objects if own is flat else [_pickle(leaf, value) for leaf, value in flat.objects] if wholly else []
    return Prepared(described, own.skeleton, objects, speaks, state.alone, parts, state.buffers, flat.skeleton, here)


def _warn_of_idle_rules(layouts: Layouts, arrays: Mapping[str, Any]) -> None:
    if layouts.placement.mesh.pp == 1 and layouts.placement.rank == 0:
        for message in idle(layouts.rules, arrays):
            logger.warning("%s", message)


def samples(
    prepared: Prepared, shards: Mapping[tuple[str, int], HostShard], wanted: Callable[[HostShard], bool]
) -> dict[str, Sample]:
    """Samples of the leaves that other ranks hold, too, and of whose shards `wanted` is true."""
    found = {}
    for leaf in prepared.described.leaves:
        if not any(s.replicas > 1 for s in leaf.shards):
            continue
        held = [*map(shards.__getitem__, takewhile(shards.__contains__, ((leaf.path, i) for i in count())))]
        if all(map(wanted, held)):
            place = f"{leaf.dtype.name} {leaf.shape} {' '.join(str(s.box) for s in leaf.shards)}"
            found[leaf.path] = Sample(
                to_hex(digest(place.encode())), sample([h.data for h in held]), leaf.path in prepared.buffers
            )
    return found


def _digest(skeleton: Json) -> str:
    return to_hex(digest(json.dumps(skeleton).encode()))


def _own_part(flat: Flat, alone: tuple[str, ...]) -> Flat:
    """What only this rank has of a flattened state: the others speak for the rest."""
    mine = [(n, leaf, value) for n, (leaf, value) in enumerate(flat.objects) if leaf.startswith(alone)]
    numbers = {n: i for i, (n, _, _) in enumerate(mine)}
    names = [paths.unescape(prefix.split("/")[1]) for prefix in alone if prefix.startswith("extras/")]
    own = {name: find(flat.skeleton, paths.join("extras", paths.escape(name))) for name in names}
    skeleton = {"extras": renumbered(own, numbers.__getitem__)} if own else None
    return Flat({}, [(leaf, value) for _, leaf, value in mine], skeleton)


def _pickle(leaf: str, value: Any) -> bytes:
    warnings.warn(
        f"{leaf}: a {type(value).__module__}.{type(value).__qualname__} is no plain value and will be pickled; "
        "loading it needs trust_pickle=True",
        stacklevel=5,
    )
    return pickles.dump(value, leaf)
