"""Differences between a checkpoint and the target of a load, and the one error that reports them all."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.path import format_leaves, is_under
from xla_ckpt.core.tree.skeleton import NOT_STORED
from xla_ckpt.display import join_lines
from xla_ckpt.errors import IncompatibleCheckpointError

MAX_DIFFERENCES = 12
"""Maximum number of differences that an error message lists; the others are only counted."""

UNEXPECTED = "stored, but not wanted"
"""Text of a problem with a name, like `ABSENT`."""

UNNAMED_PREFIX = "#"
"""Prefix of the name of a parameter that is only identified by its position in the optimizer."""

OTHER_BASE_PREFIX = "the adapters belong to another base model"
"""Prefix of the text of a problem with the base of adapters."""

_FUSED_PROJECTIONS = re.compile(r"\.(?:qkv|gate_up)_proj\.")
_SEPARATE_PROJECTIONS = re.compile(r"\.(?:q|gate)_proj\.")


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """A difference between a stored leaf and the target."""

    leaf: str
    text: str
    castable: bool = False
    """True if `cast=True` would be sufficient."""

    is_ignorable: bool = False
    """True if the program's value is equally good, so that a strict load continues."""

    has_fix: bool = False
    """True if the text contains the fix. A partial load does not help then: a data position would stay unchanged."""

    def __str__(self) -> str:
        return f"{self.leaf}: {self.text}"


def create_incompatible_error(
    problems: Sequence[LoadProblem],
    *,
    any_fits: bool,
    can_load_partially: bool,
    ranks: int = 1,
    misfit_hint: str = "",
    missing_rule_hint: str = "",
    has_master_weights: bool = False,
) -> IncompatibleCheckpointError:
    """Create one error for all differences.

    Args:
        problems: The differences.
        any_fits: True if anything fits.
        can_load_partially: True if the call has an option to load only the fitting parts.
        ranks: Number of ranks of the job.
        misfit_hint: The reason why the tag may not fit any target, and what to load instead.
        missing_rule_hint: The arrays that the caller's name rules do not match, if they convert another model.
        has_master_weights: True if the tag may contain master weights, and the call does not load an optimizer.
    """
    shown = [f"  {p}" for p in problems[:MAX_DIFFERENCES]]
    if len(problems) > MAX_DIFFERENCES:
        shown.append(f"  ... and {len(problems) - MAX_DIFFERENCES} more")
    wanted = {p.leaf for p in problems if p.text == NOT_STORED}
    unwanted = {p.leaf for p in problems if p.text == UNEXPECTED}
    forms = _suggest_projection_conversion(wanted, unwanted)
    count = f"{len(problems)} differences" if len(problems) > 1 else "1 difference"
    hints = []
    ungiven = (
        [p.leaf for p in problems if p.text == NOT_STORED and is_under(p.leaf, schema.MODEL)]
        if missing_rule_hint
        else []
    )
    if ungiven:
        hints.append(f"No rule of register_names gives {format_leaves(ungiven)}: add one. {missing_rule_hint}")
    elif missing_rule_hint and all(p.text.startswith("shape") and is_under(p.leaf, schema.MODEL) for p in problems):
        hints.append("The pattern of a rule of register_names orders the dims: 'in out -> out in' transposes an array.")
    elif any(p.text.startswith(("shape", NOT_STORED, UNEXPECTED)) for p in problems):
        target = "the model" if can_load_partially else "like="
        hints.append(
            misfit_hint or forms or f"Make {target} as it was at the save: xla-ckpt show lists what is stored."
        )
    if any(p.text.startswith("shape") for p in problems) and ranks > 1:
        hints.append("A rank that holds a part of an array says so with mesh= and shardings=.")
    if any(p.leaf.startswith(schema.get_state_path(UNNAMED_PREFIX)) for p in problems):
        hints.append(
            "Pass the optimizer's model, too (model=): the names of its parameters are those in the model. If the "
            "model was made anew after the optimizer, make that anew, too."
        )
    if any(p.castable for p in problems):
        hints.append("cast=True converts floating-point values to the type that is wanted.")
        if has_master_weights:
            hints.append(
                "Where a tag has master weights, a model of their type gets them if its optimizer is loaded with it "
                "(optimizer=)."
            )
    if any(p.text.startswith(OTHER_BASE_PREFIX) for p in problems):
        hints.append("Load the base model first, from where it was when the adapters were trained.")
    if (named := _suggest_prefix(wanted, unwanted)) is not None:
        hints.append(named)
    if any_fits and can_load_partially and not ungiven and forms is None and not all(p.has_fix for p in problems):
        hints.append("strict=False loads what fits.")
    nothing = "" if any_fits or not can_load_partially else ", and no array of it fits"
    return IncompatibleCheckpointError(
        f"the checkpoint does not fit the target: {count}{nothing}; nothing was changed",
        leaf=problems[0].leaf if len(problems) == 1 else None,
        hint=" ".join(hints) or None,
        details=join_lines(shown),
    )


def _suggest_projection_conversion(wanted: Set[str], stored: Set[str]) -> str | None:
    """Suggest a conversion if only one of tag and target has fused projections, as in neuronx-distributed's Llama.

    A partial load would be useless, because attention would keep its new weights.

    >>> _suggest_projection_conversion({"model/a.q_proj.w"}, {"model/a.qkv_proj.w_q"})[:36]
    'The tag has projections as neuronx-d'
    """
    if any(map(_FUSED_PROJECTIONS.search, stored)) and any(map(_SEPARATE_PROJECTIONS.search, wanted)):
        return (
            "The tag has projections as neuronx-distributed's models do, and the target has those of Hugging Face's: "
            "xla_ckpt.export_hf(..., llama=LlamaJob('config.json')) (xla-ckpt export --config) writes such files."
        )
    if any(map(_FUSED_PROJECTIONS.search, wanted)) and any(map(_SEPARATE_PROJECTIONS.search, stored)):
        return (
            "The tag has projections as Hugging Face's models do, and the target has those of neuronx-distributed's: "
            "xla_ckpt.convert(..., llama=LlamaJob(fuse_qkv=...)) (xla-ckpt convert --fuse-qkv) makes a tag of it."
        )
    return None


def _suggest_prefix(wanted: Set[str], stored: Set[str]) -> str | None:
    """Suggest a fix if the wanted names are the stored ones except for a prefix; None otherwise.

    There may be additional names with the prefix, if a part of the saved state is wanted, or a part is stored.

    >>> _suggest_prefix({"model/module.w"}, {"model/w"})
    "The names of the target begin with 'module.', which those that are stored lack: load into model.module."
    """
    if of_target := _find_prefixes(wanted, stored):
        return (
            f"The names of the target begin with {_join_alternatives(of_target)}, which those that are stored lack: "
            f"load into {' or '.join(f'model.{prefix[:-1]}' for prefix in of_target)}."
        )
    if of_stored := _find_prefixes(stored, wanted):
        return (
            f"The names that are stored begin with {_join_alternatives(of_stored)}, which those of the target lack: "
            f"load into the module that has the target as its {' or '.join(prefix[:-1] for prefix in of_stored)}."
        )
    return None


def _join_alternatives(prefixes: Sequence[str]) -> str:
    return " or ".join(map(repr, prefixes))


def _find_prefixes(longer: Set[str], shorter: Set[str]) -> list[str]:
    """Return the prefixes with which all shorter names are among the longer ones.

    >>> _find_prefixes({"model/m.a", "model/m.b", "model/head"}, {"model/a", "model/b"})
    ['m.']
    """
    if not shorter or len(shorter) == 1 < len(longer):  # a single name may match the end of another by chance
        return []
    member, _, name = min(shorter).partition("/")
    candidates = {leaf[len(member) + 1 : -len(name)] for leaf in longer if leaf.endswith(f".{name}")}
    return sorted(
        prefix
        for prefix in candidates
        if all(f"{member}/{prefix}{leaf.removeprefix(f'{member}/')}" in longer for leaf in shorter)
    )
