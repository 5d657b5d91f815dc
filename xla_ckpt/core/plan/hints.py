"""Load hints: what the target program knows of its arrays (shapes, dtypes, shardings, rules).

Checkpoints without global shapes are opened with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.core.manifest.manifest import Manifest, UnreadableArray
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import ParsedRules, Sharding, find_rule
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.optimizer_schema import TORCH_SCHEMA, OptimizerSchema
from xla_ckpt.errors import IncompatibleCheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayHint:
    """What is known about one array of a model."""

    shape: tuple[int, ...] | None = None
    """Global shape that the program wants."""

    dtype: str | None = None

    sharding: Sharding | None = None
    """How any job splits it, by a rule or by attributes of the parameter; None if nobody says."""

    rule_text: str | None = None
    """The rule that says so, as errors name it; None if no rule does. It counts whatever the shapes are, unless the
    program's own shape contradicts it."""

    shape_excludes_padding: bool = False
    """Whether `shape` is declared to be without the padding that local tensors have."""

    is_rank_local: bool = False
    """Whether each rank has a tensor of its own, which need not be what other ranks have: no part of a DTensor, say."""

    is_declared_in_tag: bool = False
    """Whether the tag itself says that it was split by `sharding`. Then it was, whatever the shapes are."""

    problem: UnreadableArray | None = None
    """Why the array cannot be read for this program, where what it says contradicts what the tag says."""

    @property
    def has_rule(self) -> bool:
        """Whether a rule says how it is split."""
        return self.rule_text is not None

    @property
    def is_in_program(self) -> bool:
        """Whether a program has such an array, and not only a description of what is stored."""
        return self.dtype is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHints:
    """What the targets of a load say."""

    arrays: Mapping[str, ArrayHint] = field(default_factory=dict)
    """By parameter or buffer name."""

    rules: ParsedRules = ()

    parameter_groups: Sequence[Sequence[str]] | None = None
    """Names of the parameters of the optimizer, by group; None without an optimizer that has them."""

    saved_parameters: Sequence[str] = ()
    """Names of the parameters in the order of the model that was saved, where the tag itself says so. Without
    `parameter_groups` it names the parameters of the stored optimizer, if there is only one way to do so."""

    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """All names of a shared parameter, in the model's order, by the first of them."""

    model_order: Mapping[str, int] = field(default_factory=dict)
    """Place of each name in the model."""

    wants_optimizer: bool = True
    """Whether an optimizer is wanted at all."""

    optimizer_schema: OptimizerSchema = TORCH_SCHEMA
    """How the states of the optimizer lie."""

    mesh: Mesh = field(default_factory=Mesh)
    """How the ranks of the job are arranged that wants it."""

    rank: int = 0
    """Which of them this one is."""

    model_config: Mapping[str, Any] = field(default_factory=dict)
    """What the configuration of a model of transformers says; empty if the model is none."""

    def get_hint(self, name: str) -> ArrayHint:
        """What is known about an array; a rule for any name of a shared parameter holds for it."""
        known = self.arrays.get(name, ArrayHint())
        names = [name, *(n for shared in self.aliases.values() if name in shared for n in shared)]
        rule = find_rule(self.rules, *(form for n in names for form in (schema.get_weight_path(n), n)))
        if rule is None:
            return known
        pattern, sharding = rule
        return replace(known, sharding=sharding, rule_text=f"({pattern.pattern!r}, {sharding.spec})")

    def can_want_state(self, name: object) -> bool:
        """Whether state of a parameter can be wanted: not if the optimizer is there and does not have it here."""
        return self.parameter_groups is None or name in self.arrays

    def check_attributes(self, manifest: Manifest) -> None:
        """Refuse attributes of parameters that make other sizes of what ranks had than the parameters themselves have.

        A load compares the shapes. What writes a tag anew would write half of an array, or twice as much. Only dims are
        compared that nobody splits: of others the program may have a part.

        Raises:
            IncompatibleCheckpointError: An array has another size there.
        """
        for name in self.arrays:
            leaf = schema.get_weight_path(name)
            record, hint = manifest.arrays.get(leaf), self.get_hint(name)
            if (
                record is None
                or hint.shape is None
                or hint.sharding is None
                or hint.has_rule
                or hint.is_declared_in_tag
            ):
                continue
            if len(hint.shape) != len(record.shape):
                continue
            splits = hint.sharding.pad_dims(len(record.shape))
            if any(a != b for a, b, split in zip(hint.shape, record.shape, splits, strict=True) if split is None):
                raise IncompatibleCheckpointError(
                    f"the model says {hint.sharding.spec} of the array, which makes another shape than the model has",
                    leaf=leaf,
                    expected=f"{list(hint.shape)}, as the model has it",
                    found=f"{list(record.shape)} of what the ranks have",
                    hint="Correct partition_dim of the parameter, or its shape, in the model of model= (--like).",
                )


def merge_groups(stages: Sequence[Sequence[Sequence[str]] | None]) -> list[list[str]] | None:
    """The groups of an optimizer's parameters over all pipeline stages: group by group, each name once.

    None if a stage does not know its own.

    >>> merge_groups([[["a", "tied"], ["b"]], [["tied", "c"]]])
    [['a', 'tied', 'c'], ['b']]
    """
    known = [groups for groups in stages if groups is not None]
    if len(known) < len(stages):
        return None
    merged: list[list[str]] = [[] for _ in range(max(map(len, known), default=0))]
    for groups in known:
        for n, names in enumerate(groups):
            merged[n] += [name for name in names if name not in merged[n]]
    return merged
