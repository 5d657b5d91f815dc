"""What lies where in the dict that a program gave to ``smp.save``: its keys are the program's own. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError
from xla_ckpt.layouts.dcp.names import MODEL_NAMES, SCHEDULER_NAMES, program_names
from xla_ckpt.layouts.nxd.rank_files import StoredTensor
from xla_ckpt.layouts.smp.marks import IS_PARTIAL, LOAD_INFO
from xla_ckpt.plan.hints import Hints
from xla_ckpt.tree import schema

MASTERS = "fp32_from_fp16"
"""Key of the master weights of a job in half precision, by group."""

INNER = "optimizer_state_dict"
"""Key beside it of the state of the optimizer itself."""

MAX_NESTING = 3
"""How deep in a dict a model or an optimizer is looked for."""

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where the members of a training state lie in what a program saved; None for what is not there."""

    model: Path | None = None
    optimizer: Path | None = None
    scheduler: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """All of them."""
        return [path for path in (self.model, self.optimizer, self.scheduler) if path is not None]


def where_is(tree: Mapping[Any, Any], hints: Hints) -> Where:
    """Where the members lie.

    Raises:
        IncompatibleCheckpointError: There are several models, and nothing says which one is meant.
    """
    places = list(_dicts(tree, ()))
    optimizers = [path for path, held in places if is_optimizer(held)]
    apart = [(path, held) for path, held in places if not any(_is_below(path, other) for other in optimizers)]
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


def at(tree: Any, path: Path, file: str) -> Mapping[Any, Any]:
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


def without(tree: Mapping[Any, Any], paths: Sequence[Path]) -> dict[Any, Any]:
    """What lies beside some members: dicts of which nothing is left are left out."""
    made: dict[Any, Any] = {}
    for key, value in tree.items():
        below = [path[1:] for path in paths if path[:1] == (key,)]
        if () in below:
            continue
        left = without(value, below) if below and isinstance(value, Mapping) else value
        if not below or left:
            made[key] = left
    return made


def _dicts(tree: Mapping[Any, Any], path: Path) -> Iterator[tuple[Path, Mapping[Any, Any]]]:
    """The dicts in a dict, and itself, those further up first. What is a member has none in it."""
    yield path, tree
    if len(path) < MAX_NESTING and not is_optimizer(tree) and not _is_told(tree):
        for key, value in tree.items():
            if isinstance(value, Mapping) and isinstance(key, str):
                yield from _dicts(value, (*path, key))


def _is_told(held: Mapping[Any, Any]) -> bool:
    """Whether SMP itself has marked this as a model."""
    return (IS_PARTIAL in held or LOAD_INFO in held) and not is_optimizer(held)


def _has_tensors(held: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, StoredTensor) for value in held.values()) and all(isinstance(key, str) for key in held)


def _is_below(path: Path, other: Path | None) -> bool:
    return other is not None and path[: len(other)] == other


def _model(places: Sequence[tuple[Path, Mapping[Any, Any]]], hints: Hints) -> Path | None:
    told = [(path, held) for path, held in places if _is_told(held)]
    found = told or [(path, held) for path, held in places if _has_tensors(held)]
    if len(found) > 1 and hints.arrays:
        scores = [len(program_names(held, hints.arrays)) for _, held in found]
        best = max(scores)
        found = [place for place, n in zip(found, scores, strict=True) if n == best] if best else found
    if len(found) > 1:
        ranks = [_rank(path) for path, _ in found]
        found = [place for place, n in zip(found, ranks, strict=True) if n == min(ranks)]
    if len(found) > 1 and told:
        raise IncompatibleCheckpointError(
            "several models are stored, and nothing says which one is meant",
            leaf=schema.MODEL,
            found=", ".join(".".join(path) for path, _ in found),
            hint="Give the model: its names say so.",
        )
    # Without a mark, dicts of tensors beside each other may be anything: nothing is taken for a model by chance.
    return found[0][0] if len(found) == 1 else None


def _rank(path: Path) -> int:
    """How likely a model is called so: the smaller, the likelier."""
    return MODEL_NAMES.index(path[-1]) if path and path[-1] in MODEL_NAMES else len(MODEL_NAMES)


def _nearest(optimizers: Sequence[Path], model: Path | None, hints: Hints) -> Path | None:
    """The optimizer that is meant: of several that which lies beside the model."""
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    beside = [path for path in optimizers if model is not None and path[:-1] == model[:-1]]
    found = beside or list(optimizers)
    named = [path for path in found if path and path[-1].startswith("optim")]
    if len(found) == 1 or len(named) == 1 or not hints.optimizer:
        return (named or found)[0]
    raise IncompatibleCheckpointError(
        "several optimizers are stored, and nothing says which one is meant",
        leaf=schema.OPTIMIZER,
        found=", ".join(".".join(path) for path in found),
        hint="Load the model alone, and the others with torch.load.",
    )
