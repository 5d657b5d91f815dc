"""Load state through the program's own `load_state_dict`, with rollback if it fails.

Such code runs on all ranks before anything else of the program changes, because it may refuse its state: then the
model is still as it was. Members that have loaded their state by then get their former state back.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.arrays.torch_objects import is_lazy, is_torch_tensor
from xla_ckpt.core.tree.nested import map_leaves
from xla_ckpt.display import join_lines
from xla_ckpt.distributed.consensus import raise_on_all_ranks
from xla_ckpt.distributed.exchange import Exchange
from xla_ckpt.errors import CheckpointError, LoadError
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.signals import defer_signals

logger = get_logger(__name__)

Rollback = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDictLoad:
    """What a member of the program is given to take. The targets of its arrays are new arrays."""

    leaf: str
    """Leaf path of the member."""

    load: Callable[[Mapping[str, Any]], object]
    """Called with the restored arrays by leaf path."""

    backup: Callable[[], Rollback] | None
    """Copies the member's state of now, and returns what puts it back. None for a model: it is too large to copy."""

    get_arrays: Callable[[], Iterable[Any]] = tuple
    """The arrays of a member that is not copied, by which can be seen whether it has changed."""

    paths: Collection[str] | None = None
    """Leaf paths of the arrays that it takes; None for all of its part."""


def backup_state_dict(member: Any) -> Rollback:
    """Copy what a member's `state_dict` says, and return what puts it back."""
    former = copy_state_dict(member.state_dict())
    return lambda: member.load_state_dict(former)


def copy_state_dict(state: Any) -> Any:
    """A copy of a state dict, with the metadata of modules in it.

    Tensors are copied to host memory: a device may have no room for them.
    """
    return map_leaves(state, lambda _, leaf: _copy_leaf(leaf), keep_classes=True)


def _copy_leaf(leaf: Any) -> Any:
    if is_torch_tensor(leaf):
        plain = leaf.detach()
        return plain.clone() if leaf.device.type == "cpu" else plain.cpu()
    return copy.deepcopy(leaf)


def count_writes(arrays: Iterable[Any]) -> list[tuple[int, int | None]]:
    """Which tensors these are, and how often torch has counted a write to each: None for one that has no count."""
    tensors = [t for t in arrays if is_torch_tensor(t)]
    return [(id(t), None if is_lazy(t) or t.is_inference() else t._version) for t in tensors]


@dataclass(frozen=True, slots=True)
class _LoadedMember:
    """A member that was given its state."""

    member_load: StateDictLoad
    rollback: Rollback | None
    write_counts: Sequence[tuple[int, int | None]]
    """Before that, of one that cannot be put back."""

    def is_unchanged(self) -> bool:
        """Whether no write to an array of it was counted since."""
        counted = all(count is not None for _, count in self.write_counts)
        return (
            bool(self.write_counts)
            and counted
            and list(self.write_counts) == count_writes(self.member_load.get_arrays())
        )


class StateDictLoader:
    """Hands over what several members are to take, in their order, and can put back what they had."""

    def __init__(self, loads: Sequence[StateDictLoad]) -> None:
        # What cannot be put back comes last: by then all the others have taken theirs.
        self._loads = sorted(loads, key=lambda h: h.backup is None)
        self._loaded_members: list[_LoadedMember] = []

    def run(self, install: Callable[[], Mapping[str, Any]], exchange: Exchange) -> None:
        """Hand over to all members, on all ranks; `install` makes the arrays, by leaf path.

        Raises:
            LoadError: A member of this rank, or of another one, refuses its state.
        """
        with raise_on_all_ranks(exchange, "handing over"):
            arrays = install()
            for handover in self._loads:
                self._loaded_members.append(
                    _LoadedMember(handover, _try_backup(handover), count_writes(handover.get_arrays()))
                )
                with wrap_member_errors(handover.leaf):
                    handover.load(arrays)

    @contextlib.contextmanager
    def restore_on_failure(self) -> Iterator[None]:
        """Around the rest of a load: if it fails, the members get back what they had."""
        try:
            yield
        except BaseException as error:
            with defer_signals():
                lost = [problem for problem in map(_try_rollback, reversed(self._loaded_members)) if problem]
            if lost and isinstance(error, CheckpointError):
                error.details = "\n".join(filter(None, [error.details, join_lines(lost)]))
            elif lost:
                error.add_note(join_lines(lost))  # what a signal handler has raised
            raise
        finally:
            self._loaded_members.clear()


def _try_backup(member_load: StateDictLoad) -> Rollback | None:
    if member_load.backup is None:
        return None
    try:
        return member_load.backup()
    except Exception as error:  # a load must not fail for a copy that is needed only if it fails
        logger.warning("%s cannot be copied, so that it is not put back if the load fails: %s", member_load.leaf, error)
        return None


def _try_rollback(member: _LoadedMember) -> str | None:
    """Put back what a member had; why that is not possible."""
    handover = member.member_load
    if member.rollback is None:
        if member.is_unchanged():
            return f"torch has counted no write to the arrays of {handover.leaf}"
        return f"{handover.leaf} is changed in part, or has its new state already"
    try:
        member.rollback()
    except Exception as error:  # it becomes a part of the error that is being raised
        logger.exception("%s cannot be put back", handover.leaf)
        return f"{handover.leaf} is changed in part: it does not take back what it had: {type(error).__name__}: {error}"
    return None


@contextlib.contextmanager
def wrap_member_errors(leaf: str) -> Iterator[None]:
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
def wrap_install_errors() -> Iterator[None]:
    """Around what changes the program, when nothing should fail any more: an exception says what that means."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise LoadError(
            f"installing failed: {type(error).__name__}: {error}; a part of the objects has its new state already"
        ) from error
