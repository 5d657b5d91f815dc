"""Load state through the program's own `load_state_dict`, with rollback if it fails.

Such code runs on all ranks before anything else of the program changes, because it may raise: then the model is still
unchanged. Members that have loaded their state by then are rolled back.
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
    """The load of one member through `load_state_dict`. The targets of its arrays are new arrays."""

    leaf: str
    """Leaf path of the member."""

    load: Callable[[Mapping[str, Any]], object]
    """Called with the restored arrays by leaf path."""

    backup: Callable[[], Rollback] | None
    """Copies the member's current state, and returns the rollback. None for a model, which is too large to copy."""

    get_arrays: Callable[[], Iterable[Any]] = tuple
    """Returns the arrays of a member that is not copied, to detect changes."""

    paths: Collection[str] | None = None
    """Leaf paths of the arrays that it loads; None for its whole part."""


def backup_state_dict(member: Any) -> Rollback:
    """Copy the `state_dict` of a member, and return the rollback."""
    former = copy_state_dict(member.state_dict())
    return lambda: member.load_state_dict(former)


def copy_state_dict(state: Any) -> Any:
    """Copy a state dict, including the metadata of modules.

    Tensors are copied to host memory, because a device may have no room for them.
    """
    return map_leaves(state, lambda _, leaf: _copy_leaf(leaf), keep_classes=True)


def _copy_leaf(leaf: Any) -> Any:
    if is_torch_tensor(leaf):
        plain = leaf.detach()
        return plain.clone() if leaf.device.type == "cpu" else plain.cpu()
    return copy.deepcopy(leaf)


def count_writes(arrays: Iterable[Any]) -> list[tuple[int, int | None]]:
    """Return the id and torch's write counter of each tensor; None for a tensor without a counter."""
    tensors = [t for t in arrays if is_torch_tensor(t)]
    return [(id(t), None if is_lazy(t) or t.is_inference() else t._version) for t in tensors]


@dataclass(frozen=True, slots=True)
class _LoadedMember:
    """A member whose state was loaded."""

    member_load: StateDictLoad
    rollback: Rollback | None
    write_counts: Sequence[tuple[int, int | None]]
    """Write counters before the load, for a member that cannot be rolled back."""

    def is_unchanged(self) -> bool:
        """Return True if no write to its arrays was counted since."""
        counted = all(count is not None for _, count in self.write_counts)
        return (
            bool(self.write_counts)
            and counted
            and list(self.write_counts) == count_writes(self.member_load.get_arrays())
        )


class StateDictLoader:
    """Loads several members in order, and can roll them back."""

    def __init__(self, loads: Sequence[StateDictLoad]) -> None:
        # Members that cannot be rolled back come last, after all others have loaded their state.
        self._loads = sorted(loads, key=lambda h: h.backup is None)
        self._loaded_members: list[_LoadedMember] = []

    def run(self, install: Callable[[], Mapping[str, Any]], exchange: Exchange) -> None:
        """Load all members, on all ranks; `install` creates the arrays by leaf path.

        Raises:
            LoadError: If a member of any rank rejects its state.
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
        """Context manager for the rest of a load: roll the members back if it fails."""
        try:
            yield
        except BaseException as error:
            with defer_signals():
                lost = [problem for problem in map(_try_rollback, reversed(self._loaded_members)) if problem]
            if lost and isinstance(error, CheckpointError):
                error.details = "\n".join(filter(None, [error.details, join_lines(lost)]))
            elif lost:
                error.add_note(join_lines(lost))  # raised by a signal handler
            raise
        finally:
            self._loaded_members.clear()


def _try_backup(member_load: StateDictLoad) -> Rollback | None:
    if member_load.backup is None:
        return None
    try:
        return member_load.backup()
    except Exception as error:  # a load must not fail because of a copy that is only needed if it fails
        logger.warning("%s cannot be copied, so that it is not put back if the load fails: %s", member_load.leaf, error)
        return None


def _try_rollback(member: _LoadedMember) -> str | None:
    """Roll a member back. Return the reason if that is not possible."""
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
    """Convert exceptions of the program's code to `LoadError`; errors of this library pass unchanged.

    Raises:
        LoadError: If the program's code raises an exception.
    """
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
    """Convert exceptions while the program is being changed, explaining their consequences.

    Raises:
        LoadError: If installation fails.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise LoadError(
            f"installing failed: {type(error).__name__}: {error}; a part of the objects has its new state already"
        ) from error
