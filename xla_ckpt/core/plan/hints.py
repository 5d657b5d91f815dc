"""Load hints: properties of the target program's arrays (shapes, dtypes, shardings, rules).

They are needed to open checkpoints that do not record global shapes.
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
    """Known properties of one array of a model."""

    shape: tuple[int, ...] | None = None
    """Global shape in the program."""

    dtype: str | None = None

    sharding: Sharding | None = None
    """Sharding, from a rule or from attributes of the parameter. None if unknown."""

    rule_text: str | None = None
    """Text of the sharding rule for error messages, or None if no rule applies. A rule overrides stored shapes, unless
    the program's own shape contradicts it."""

    shape_excludes_padding: bool = False
    """True if `shape` is declared without the padding of local tensors."""

    is_rank_local: bool = False
    """True if each rank has its own tensor, which may differ from the others (not a part of a DTensor, for example)."""

    is_declared_in_tag: bool = False
    """True if the checkpoint itself declares `sharding`. Then it applies whatever the shapes are."""

    problem: UnreadableArray | None = None
    """Reason why the array cannot be read, if the program contradicts the checkpoint."""

    @property
    def has_rule(self) -> bool:
        """True if a rule defines the sharding."""
        return self.rule_text is not None

    @property
    def is_in_program(self) -> bool:
        """True if the program has this array. False if the hint only describes the stored one."""
        return self.dtype is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHints:
    """Hints from the targets of a load."""

    arrays: Mapping[str, ArrayHint] = field(default_factory=dict)
    """Hints by parameter or buffer name."""

    rules: ParsedRules = ()

    parameter_groups: Sequence[Sequence[str]] | None = None
    """Names of the optimizer's parameters by group, or None without an optimizer that has them."""

    saved_parameters: Sequence[str] = ()
    """Names of the parameters in the order of the saved model, if the checkpoint records it. Without `parameter_groups`
    they name the parameters of the stored optimizer, if that is unambiguous."""

    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """First name of each shared parameter -> all of its names, in the model's order."""

    model_order: Mapping[str, int] = field(default_factory=dict)
    """Position of each name in the model."""

    wants_optimizer: bool = True
    """True if the optimizer is requested."""

    optimizer_schema: OptimizerSchema = TORCH_SCHEMA
    """Layout of the optimizer states."""

    mesh: Mesh = field(default_factory=Mesh)
    """Mesh of the loading job."""

    rank: int = 0
    """Rank of this process."""

    model_config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of a transformers model. Empty for other models."""

    def get_hint(self, name: str) -> ArrayHint:
        """Return the hint for an array. A rule that matches any name of a shared parameter applies to it."""
        known = self.arrays.get(name, ArrayHint())
        names = [name, *(n for shared in self.aliases.values() if name in shared for n in shared)]
        rule = find_rule(self.rules, *(form for n in names for form in (schema.get_weight_path(n), n)))
        if rule is None:
            return known
        pattern, sharding = rule
        return replace(known, sharding=sharding, rule_text=f"({pattern.pattern!r}, {sharding.spec})")

    def can_want_state(self, name: object) -> bool:
        """Return True unless an optimizer is given that does not have the parameter on this rank."""
        return self.parameter_groups is None or name in self.arrays

    def check_attributes(self, manifest: Manifest) -> None:
        """Check that sharding attributes give stored arrays the same sizes as the parameters.

        A load compares the shapes anyway. But a conversion would write half of an array, or twice as much. Only unsplit
        dims are compared, because the program may hold a part of the others.

        Raises:
            IncompatibleCheckpointError: The size of an array differs.
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
    """Merge the parameter groups of all pipeline stages: group by group, each name once.

    Returns None if the groups of a stage are unknown.

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
