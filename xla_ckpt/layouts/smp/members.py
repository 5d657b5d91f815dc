"""What lies where in the dict that a program gave to ``smp.save``: its keys are the program's own. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError
from xla_ckpt.layouts.by_rank.files import StoredTensor
from xla_ckpt.layouts.places import MODEL_NAMES, SCHEDULER_NAMES, DictAt, best, is_below, places_in, program_names
from xla_ckpt.layouts.smp.marks import IS_PARTIAL, LOAD_INFO
from xla_ckpt.plan.hints import Hints
from xla_ckpt.tree import schema
from xla_ckpt.tree.nested import Keys

MASTERS = "fp32_from_fp16"
"""Key of the master weights of a job in half precision, by group."""

INNER = "optimizer_state_dict"
"""Key beside it of the state of the optimizer itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where the members of a training state lie in what a program saved; None for what is not there."""

    model: Keys | None = None
    optimizer: Keys | None = None
    scheduler: Keys | None = None

    @property
    def paths(self) -> list[Keys]:
        """All of them."""
        return [path for path in (self.model, self.optimizer, self.scheduler) if path is not None]


def where_is(tree: Mapping[Any, Any], hints: Hints) -> Where:
    """Where the members lie.

    Raises:
        IncompatibleCheckpointError: There are several models, and nothing says which one is meant.
    """
    places = [*places_in(tree, closed=lambda members: is_optimizer(members) or _is_told(members))]
    optimizers = [place.path for place in places if is_optimizer(place.members)]
    apart = [place for place in places if not is_below(place.path, optimizers)]
    place = _model(apart, hints)
    model = None if place is None else place.path
    beside = [path for at in apart if (path := at.path) and (place is None or not is_below(path, [place.path]))]
    scheduler = next((path for path in beside if path[-1] in SCHEDULER_NAMES), None)
    return Where(model=model, optimizer=_nearest(optimizers, model, hints), scheduler=scheduler)


def is_optimizer(value: Mapping[Any, Any]) -> bool:
    """Whether this is the state dict of an optimizer: of torch's, of one whose state is sharded, or of SMP's fp16."""
    if MASTERS in value:
        return True
    return isinstance(value.get(schema.GROUPS), list) and isinstance(value.get(schema.STATE), dict | list)


def at(tree: Any, path: Keys, file: str) -> Mapping[Any, Any]:
    """The dict at a path.

    Raises:
        CorruptCheckpointError: There is none, although another part of the set has one.
    """
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    if not isinstance(tree, Mapping):
        raise CorruptCheckpointError(
            "the parts hold different things",
            file=file,
            expected=f"a dict under {'.'.join(path)}, as in the first part",
            found=type(tree).__name__,
        )
    return tree


def _is_told(content: Mapping[Any, Any]) -> bool:
    """Whether SMP itself has marked this as a model."""
    return (IS_PARTIAL in content or LOAD_INFO in content) and not is_optimizer(content)


def _has_tensors(content: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, StoredTensor) for value in content.values()) and all(
        isinstance(key, str) for key in content
    )


def _model(places: Sequence[DictAt], hints: Hints) -> DictAt | None:
    marked = [place for place in places if _is_told(place.members)]
    candidates = marked or [place for place in places if _has_tensors(place.members)]
    if len(candidates) > 1:
        candidates = best(candidates, lambda place: len(program_names(place.members, hints.arrays))) or candidates
    if len(candidates) > 1:
        candidates = best(candidates, _likely) or candidates
    if len(candidates) > 1 and marked:
        raise IncompatibleCheckpointError(
            "several models are stored, and nothing says which one is meant",
            leaf=schema.MODEL,
            found=", ".join(".".join(place.path) for place in candidates),
            hint="Give the model: its names say so.",
        )
    # Without a mark, dicts of tensors beside each other may be anything: nothing is taken for a model by chance.
    return candidates[0] if len(candidates) == 1 else None


def _likely(place: DictAt) -> int:
    """How likely a model is called so."""
    name = place.path[-1] if place.path else ""
    return len(MODEL_NAMES) - MODEL_NAMES.index(name) if name in MODEL_NAMES else 0


def _nearest(optimizers: Sequence[Keys], model: Keys | None, hints: Hints) -> Keys | None:
    """The optimizer that is meant: of several that which lies beside the model."""
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    beside = [path for path in optimizers if model is not None and path[:-1] == model[:-1]]
    candidates = beside or list(optimizers)
    named = [path for path in candidates if path and path[-1].startswith("optim")]
    if len(candidates) == 1 or len(named) == 1 or not hints.optimizer:
        return (named or candidates)[0]
    raise IncompatibleCheckpointError(
        "several optimizers are stored, and nothing says which one is meant",
        leaf=schema.OPTIMIZER,
        found=", ".join(".".join(path) for path in candidates),
        hint="Load the model alone, and the others with torch.load.",
    )
