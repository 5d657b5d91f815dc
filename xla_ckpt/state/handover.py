"""State that goes back through code of the program, which may refuse it.

Such code gets its state before anything else of the program is changed, and on all ranks: what one member refuses is
found out while the model is still as it was. The members that have taken their state by then get their former one back.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.arrays.torch_objects import is_lazy, is_torch_tensor
from xla_ckpt.display import join_lines
from xla_ckpt.errors import CheckpointError, LoadError
from xla_ckpt.job.round import Round
from xla_ckpt.job.verdict import agreed
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.undisturbed import undisturbed
from xla_ckpt.tree.nested import replaced_leaves

logger = get_logger(__name__)

PutBack = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """What a member of the program is given to take. The targets of its arrays are new arrays."""

    leaf: str
    """Leaf path of the member."""

    take: Callable[[Mapping[str, Any]], object]
    """Called with the restored arrays by leaf path."""

    keep: Callable[[], PutBack] | None
    """Copies the member's state of now, and returns what puts it back. None for a model: it is too large to copy."""

    arrays: Callable[[], Iterable[Any]] = tuple
    """The arrays of a member that is not copied, by which can be seen whether it has changed."""

    paths: Collection[str] | None = None
    """Leaf paths of the arrays that it takes; None for all of its part."""


def kept_state(member: Any) -> PutBack:
    """Copy what a member's `state_dict` says, and return what puts it back."""
    former = copied(member.state_dict())
    return lambda: member.load_state_dict(former)


def copied(state: Any) -> Any:
    """A copy of a state dict, with the metadata of modules in it.

    Tensors are copied to host memory: a device may have no room for them.
    """
    return replaced_leaves(state, lambda _, leaf: _copied(leaf), classes=True)


def _copied(leaf: Any) -> Any:
    if is_torch_tensor(leaf):
        plain = leaf.detach()
        return plain.clone() if leaf.device.type == "cpu" else plain.cpu()
    return copy.deepcopy(leaf)


def writes(arrays: Iterable[Any]) -> list[tuple[int, int | None]]:
    """Which tensors these are, and how often torch has counted a write to each: None for one that has no count."""
    tensors = [t for t in arrays if is_torch_tensor(t)]
    return [(id(t), None if is_lazy(t) or t.is_inference() else t._version) for t in tensors]


@dataclass(frozen=True, slots=True)
class _Taken:
    """A member that was given its state."""

    handover: Handover
    put_back: PutBack | None
    writes: Sequence[tuple[int, int | None]]
    """Before that, of one that cannot be put back."""

    def is_as_it_was(self) -> bool:
        """Whether no write to an array of it was counted since."""
        counted = all(count is not None for _, count in self.writes)
        return bool(self.writes) and counted and list(self.writes) == writes(self.handover.arrays())


class Handing:
    """Hands over what several members are to take, in their order, and can put back what they had."""

    def __init__(self, handovers: Sequence[Handover]) -> None:
        # What cannot be put back comes last: by then all the others have taken theirs.
        self._handovers = sorted(handovers, key=lambda h: h.keep is None)
        self._taken: list[_Taken] = []

    def run(self, install: Callable[[], Mapping[str, Any]], exchange: Round) -> None:
        """Hand over to all members, on all ranks; `install` makes the arrays, by leaf path.

        Raises:
            LoadError: A member of this rank, or of another one, refuses its state.
        """
        with agreed(exchange, "handing over"):
            arrays = install()
            for handover in self._handovers:
                self._taken.append(_Taken(handover, _kept(handover), writes(handover.arrays())))
                with refusal(handover.leaf):
                    handover.take(arrays)

    @contextlib.contextmanager
    def put_back_on_failure(self) -> Iterator[None]:
        """Around the rest of a load: if it fails, the members get back what they had."""
        try:
            yield
        except BaseException as error:
            with undisturbed():
                lost = [problem for problem in map(_put_back, reversed(self._taken)) if problem]
            if lost and isinstance(error, CheckpointError):
                error.details = "\n".join(filter(None, [error.details, join_lines(lost)]))
            elif lost:
                error.add_note(join_lines(lost))  # what a signal handler has raised
            raise
        finally:
            self._taken.clear()


def _kept(handover: Handover) -> PutBack | None:
    if handover.keep is None:
        return None
    try:
        return handover.keep()
    except Exception as error:  # a load must not fail for a copy that is needed only if it fails
        logger.warning("%s cannot be copied, so that it is not put back if the load fails: %s", handover.leaf, error)
        return None


def _put_back(taken: _Taken) -> str | None:
    """Put back what a member had; why that is not possible."""
    handover = taken.handover
    if taken.put_back is None:
        if taken.is_as_it_was():
            return f"torch has counted no write to the arrays of {handover.leaf}"
        return f"{handover.leaf} is changed in part, or has its new state already"
    try:
        taken.put_back()
    except Exception as error:  # it becomes a part of the error that is being raised
        logger.exception("%s cannot be put back", handover.leaf)
        return f"{handover.leaf} is changed in part: it does not take back what it had: {type(error).__name__}: {error}"
    return None


@contextlib.contextmanager
def refusal(leaf: str) -> Iterator[None]:
    """Raise what the program's code raises as an error of this library; such errors pass as they are."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise LoadError(
            f"the program's own code refuses its stored state: {type(error).__name__}: {error}",
            leaf=leaf,
            hint="Its load_state_dict() raised that. All other objects are as they were.",
        ) from error


@contextlib.contextmanager
def changing() -> Iterator[None]:
    """Around what changes the program, when nothing should fail any more: an exception says what that means."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise LoadError(
            f"installing failed: {type(error).__name__}: {error}; a part of the objects has its new state already"
        ) from error
