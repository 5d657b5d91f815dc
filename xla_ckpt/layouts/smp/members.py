"""What lies where in the dict that a program gave to ``smp.save``: its keys are the program's own. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError
from xla_ckpt.layouts.by_rank.form import StoredTensor
from xla_ckpt.layouts.member_places import StateForm, member_places
from xla_ckpt.layouts.places import DictAt
from xla_ckpt.layouts.smp.marks import IS_PARTIAL, LOAD_INFO
from xla_ckpt.manifest.records import UnknownArray
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
        IncompatibleCheckpointError: There are several models, or several optimizers, and nothing says which one is
            meant.
    """
    places = member_places({key: value for key, value in tree.items() if isinstance(key, str)}, hints, _FORM)
    optimizer = places.optimizer
    if isinstance(optimizer, UnknownArray) and not hints.optimizer:
        # It shows all the same which parameters are split.
        optimizer = places.optimizers[0]
    return Where(
        model=_path(places.model, schema.MODEL, "Give the model: its names say so."),
        optimizer=_path(optimizer, schema.OPTIMIZER, "Load the model alone, and the others with torch.load."),
        scheduler=None if places.scheduler is None else places.scheduler.path,
    )


def _path(place: DictAt | UnknownArray | None, leaf: str, hint: str) -> Keys | None:
    if isinstance(place, UnknownArray):
        raise IncompatibleCheckpointError(place.problem, leaf=leaf, hint=hint)
    return None if place is None else place.path


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


_FORM = StateForm(
    is_array=lambda value: isinstance(value, StoredTensor),
    is_optimizer=is_optimizer,
    is_model=lambda content: (IS_PARTIAL in content or LOAD_INFO in content) and not is_optimizer(content),
    of_training=True,
)
"""What is known of a state that SMP saved in parts: it is one of a training. SMP marks models, but 1.6 does not."""
