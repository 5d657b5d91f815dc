"""Write barrier: block optimizer steps and loads until a save has copied the memory that they overwrite.

Used with ``snapshot="overlap"``. Writers that wait are the steps of torch optimizers, `load_state_dict` of the saved
modules, and loads of this library. In most programs nothing else writes to parameters and to the tensors of an
optimizer's state, so only these are left in place while training continues.

The hooks are documented by torch: `torch.optim.optimizer.register_optimizer_step_pre_hook` runs before the step of
every optimizer of the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xla_ckpt.arrays.torch_objects import is_parameter, is_torch_optimizer, is_torch_tensor
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.nested import iterate_leaves
from xla_ckpt.snapshot.snapshot import SnapshotProgress
from xla_ckpt.state.wrappers import get_modules
from xla_ckpt.storage.process_state import fork_safe_lock, register_fork_reset

if TYPE_CHECKING:
    import torch


def select_optimizer_written(arrays: Mapping[str, Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """Select the arrays that only the optimizer's step writes to.

    Args:
        arrays: The saved arrays, by leaf path.
        optimizer: The saved optimizer, or None. Nothing is selected without one, or if torch does not call hooks before
            its step.
    """
    if optimizer is not None and not isinstance(optimizer, Mapping) and not _has_step_hooks(optimizer):
        return {}
    moments = {_get_storage_address(tensor) for tensor in _iterate_tensors(getattr(optimizer, schema.STATE, None))}
    return {
        path: value
        for path, value in arrays.items()
        if is_parameter(value) or (is_torch_tensor(value) and _get_storage_address(value) in moments)
    }


def _has_step_hooks(optimizer: Any) -> bool:
    """Return True if torch calls hooks before the step of an optimizer."""
    return is_torch_optimizer(optimizer) and bool(getattr(type(optimizer).step, "hooked", False))


class _WatchedSave:
    """A save that has not copied all memory yet."""

    def __init__(self, progress: SnapshotProgress, tensors: Sequence[torch.Tensor], *, with_optimizer: bool) -> None:
        self.progress = progress
        self.tensors = tensors  # a reference, so that no other tensor gets the same identity
        self.with_optimizer = with_optimizer
        self.storages = {_get_storage_address(tensor) for tensor in tensors}
        self.tensor_ids = set(map(id, tensors))
        self.hooks: list[Any] = []

    def is_written_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the step of an optimizer may write to saved memory.

        An optimizer with any saved tensor waits for all of them: a wrapper may copy tensors of another precision into
        parameters that it does not list. If no optimizer is saved, every optimizer may be such a wrapper.
        """
        return not self.with_optimizer or any(
            id(tensor) in self.tensor_ids or _get_storage_address(tensor) in self.storages
            for tensor in _iterate_tensors([[group["params"] for group in optimizer.param_groups], optimizer.state])
        )


class WriteBarrier:
    """Saves of this process that have not copied all memory yet, and the hooks that wait for them."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._watches: list[_WatchedSave] = []
        self._hook: Any = None
        self._running_loads = 0

    def watch(
        self, progress: SnapshotProgress, tensors: Sequence[torch.Tensor], *, model: Any = None, with_optimizer: bool
    ) -> None:
        """Block writers until `progress` is complete.

        Args:
            progress: Progress of the snapshot.
            tensors: Tensors that must not be written to.
            model: Module whose `load_state_dict` waits, if any.
            with_optimizer: True if an optimizer is saved; otherwise every optimizer waits.
        """
        self._remove_finished()
        if progress.is_frozen or not tensors:
            return
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        watch = _WatchedSave(progress, tensors, with_optimizer=with_optimizer)
        for module in {id(part): part for top in get_modules(model) for part in top.modules()}.values():
            if any(id(p) in watch.tensor_ids for p in module.parameters(recurse=False)):
                watch.hooks.append(module.register_load_state_dict_pre_hook(_before_load))  # type: ignore[no-untyped-call]
        with self._lock:
            self._watches.append(watch)
            if self._hook is None:
                self._hook = register_optimizer_step_pre_hook(_wait_before_step)

    def wait(self) -> None:
        """Wait until no save needs the program's memory."""
        for watch in self._get_watches():
            watch.progress.wait()
        self._remove_finished()

    def close(self) -> None:
        """Remove the hooks if no save needs them."""
        self._remove_finished()
        with self._lock:
            if not self._watches and self._hook is not None:
                self._hook.remove()
                self._hook = None

    def wait_before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for saves of memory that an optimizer writes to."""
        for watch in self._get_watches():
            if not watch.progress.is_frozen and watch.is_written_by(optimizer):
                watch.progress.wait()
        self._remove_finished()

    def wait_before_load(self) -> None:
        """Wait for all saves, because a saved module is about to be overwritten."""
        with self._lock:
            self._running_loads += 1
        try:
            for watch in self._get_watches():
                watch.progress.wait()
        finally:
            with self._lock:
                self._running_loads -= 1

    def reset_after_fork(self) -> None:
        """Reset the barrier in a forked process, whose saves belong to the parent."""
        self._running_loads = 0
        for watch in self._watches:
            watch.progress.finish()

    def _get_watches(self) -> list[_WatchedSave]:
        with self._lock:
            return list(self._watches)

    def _remove_finished(self) -> None:
        """Remove saves that have copied all memory.

        Only called by threads of the program, and not from a module's hook: torch iterates over the hooks while it
        calls them, and fails if one is removed during the iteration.
        """
        with self._lock:
            if self._running_loads:
                return
            over = [watch for watch in self._watches if watch.progress.is_frozen]
            self._watches = [watch for watch in self._watches if not watch.progress.is_frozen]
        for watch in over:
            for hook in watch.hooks:
                hook.remove()


WRITE_BARRIER = register_fork_reset(WriteBarrier(), WriteBarrier.reset_after_fork)
"""The write barrier of this process."""


# Module-level functions, because a model with these hooks may be pickled.


def _wait_before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    WRITE_BARRIER.wait_before_step(optimizer)


def _before_load(*_: Any) -> None:
    WRITE_BARRIER.wait_before_load()


def _get_storage_address(tensor: torch.Tensor) -> int | None:
    """Return the storage address, which tensors that share memory have in common; None without a storage."""
    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's local tensor
    try:
        return local.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # some subclasses have no storage
        return None


def _iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in nested containers."""
    return (leaf for leaf in iterate_leaves(value) if is_torch_tensor(leaf))
