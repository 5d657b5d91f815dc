"""What lies where in the dict that a program gave to ``smp.save``: its keys are the program's own. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError
from xla_ckpt.layouts.by_rank.files import StoredTensor
from xla_ckpt.layouts.smp.marks import IS_PARTIAL, LOAD_INFO
from xla_ckpt.layouts.training_state import MAX_NESTING, MODEL_NAMES, SCHEDULER_NAMES, program_names
from xla_ckpt.plan.hints import Hints
from xla_ckpt.tree import schema

MASTERS = "fp32_from_fp16"
"""Key of the master weights of a job in half precision, by group."""

INNER = "optimizer_state_dict"
"""Key beside it of the state of the optimizer itself."""

MemberPath = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where the members of a training state lie in what a program saved; None for what is not there."""

    model: MemberPath | None = None
    optimizer: MemberPath | None = None
    scheduler: MemberPath | None = None

    @property
    def paths(self) -> list[MemberPath]:
        """All of them."""
        return [path for path in (self.model, self.optimizer, self.scheduler) if path is not None]


def where_is(tree: Mapping[Any, Any], hints: Hints) -> Where:
    """Where the members lie.

    Raises:
        IncompatibleCheckpointError: There are several models, and nothing says which one is meant.
    """
    places = list(_dicts(tree, ()))
    optimizers = [path for path, content in places if is_optimizer(content)]
    apart = [(path, content) for path, content in places if not any(_is_below(path, other) for other in optimizers)]
    model = _model(apart, hints)
    optimizer = _nearest(optimizers, model, hints)
    scheduler = next(
        (path for path, _ in apart if path and path[-1] in SCHEDULER_NAMES and not _is_below(path, model)), None
    )
    return Where(model=model, optimizer=optimizer, scheduler=scheduler)


def is_optimizer(value: Mapping[Any, Any]) -> bool:
    """Whether this is the state dict of an optimizer: of torch's, of one whose state is sharded, or of SMP's fp16."""
    if MASTERS in value:
        return True
    return isinstance(value.get(schema.GROUPS), list) and isinstance(value.get(schema.STATE), dict | list)


def at(tree: Any, path: MemberPath, file: str) -> Mapping[Any, Any]:
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


def _dicts(tree: Mapping[Any, Any], path: MemberPath) -> Iterator[tuple[MemberPath, Mapping[Any, Any]]]:
    """The dicts in a dict, and itself, those further up first. What is a member has none in it."""
    yield path, tree
    if len(path) < MAX_NESTING and not is_optimizer(tree) and not _is_told(tree):
        for key, value in tree.items():
            if isinstance(value, Mapping) and isinstance(key, str):
                yield from _dicts(value, (*path, key))


def _is_told(content: Mapping[Any, Any]) -> bool:
    """Whether SMP itself has marked this as a model."""
    return (IS_PARTIAL in content or LOAD_INFO in content) and not is_optimizer(content)


def _has_tensors(content: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, StoredTensor) for value in content.values()) and all(
        isinstance(key, str) for key in content
    )


def _is_below(path: MemberPath, other: MemberPath | None) -> bool:
    return other is not None and path[: len(other)] == other


def _model(places: Sequence[tuple[MemberPath, Mapping[Any, Any]]], hints: Hints) -> MemberPath | None:
    marked = [(path, content) for path, content in places if _is_told(content)]
    candidates = marked or [(path, content) for path, content in places if _has_tensors(content)]
    if len(candidates) > 1 and hints.arrays:
        scores = [len(program_names(content, hints.arrays)) for _, content in candidates]
        best = max(scores)
        candidates = [place for place, n in zip(candidates, scores, strict=True) if n == best] if best else candidates
    if len(candidates) > 1:
        ranks = [_rank(path) for path, _ in candidates]
        candidates = [place for place, n in zip(candidates, ranks, strict=True) if n == min(ranks)]
    if len(candidates) > 1 and marked:
        raise IncompatibleCheckpointError(
            "several models are stored, and nothing says which one is meant",
            leaf=schema.MODEL,
            found=", ".join(".".join(path) for path, _ in candidates),
            hint="Give the model: its names say so.",
        )
    # Without a mark, dicts of tensors beside each other may be anything: nothing is taken for a model by chance.
    return candidates[0][0] if len(candidates) == 1 else None


def _rank(path: MemberPath) -> int:
    """How likely a model is called so: the smaller, the likelier."""
    return MODEL_NAMES.index(path[-1]) if path and path[-1] in MODEL_NAMES else len(MODEL_NAMES)


def _nearest(optimizers: Sequence[MemberPath], model: MemberPath | None, hints: Hints) -> MemberPath | None:
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
