"""What one rank has of a state that is saved: described, planned and frozen. The program may go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.unchanged import Fixed
from xla_ckpt.engine.writing import Writing
from xla_ckpt.plan.leaf import Leaves
from xla_ckpt.plan.same_arrays import ArrayFact
from xla_ckpt.snapshot.take import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """What one rank has of the state that is saved: frozen, and described."""

    leaves: Leaves

    layout: str
    """The name of the layout in which it is written."""

    writing: Writing
    snapshot: Snapshot
    skeleton: Any
    """The structure of the state, if this rank speaks for its stage; else what only this rank has of it, or None."""

    module_metadata: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """As `Manifest.module_metadata`, of the state dicts in `skeleton`."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    objects: Sequence[bytes] = ()
    """Pickled objects, by their index in the skeleton."""

    speaks: bool = True
    """Whether this rank reports type and shape of its leaves for its whole pipeline stage."""

    alone: tuple[str, ...] = ()
    """Prefixes of the leaf paths that this rank reports in any case: nobody else has them."""

    parts: Mapping[str, str] = field(default_factory=dict)
    """Part of the state -> fingerprint of its plain values, which all ranks have in common."""

    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    """Parameters that are not trained, by leaf path; known only where `SaveOptions.share` asks for it."""

    def reports(self, path: str) -> bool:
        """Whether this rank reports type and shape of a leaf."""
        return self.speaks or path.startswith(self.alone)

    def has_in_common(self, path: str) -> bool:
        """Whether all ranks of this pipeline stage have a leaf."""
        return not path.startswith(self.alone)

    def types(self, which: Callable[[str], bool]) -> dict[str, ArrayFact]:
        """What the manifest says of some leaves, by leaf path."""
        with collector_paused():
            leaves = self.leaves
            facts = [(dtype.name, holding.shape, holding.spec, holding.weak_type) for dtype, holding in leaves.forms]
            rows = zip(leaves.paths, leaves.form.tolist(), strict=True)
            return {path: facts[form] for path, form in rows if which(path)}
