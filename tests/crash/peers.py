"""The same faults in what other libraries do: stock torch.distributed.checkpoint, orbax, torch_xla.

Each is called as its documentation shows it, and what it lists as checkpoints is loaded through it. Errors of any class
are taken, since none of them promises one.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as stock

from tests.crash.operations import NEXT, Found, Lost, Operation, listed, module, the_number


def _state(number: int) -> dict[str, Any]:
    return {**module(number).state_dict(), "n": number}


# --- stock torch.distributed.checkpoint ----------------------------------------------------------------------------


def _dcp_save(path: Path, number: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save(_state(number), checkpoint_id=path, no_dist=True)


def _dcp_read(root: Path) -> Found:
    """Directories with a `.metadata`, which DCP writes last, are checkpoints."""
    found: Found = {}
    for name in sorted(name for name in listed(root) if (root / name / ".metadata").exists()):
        state = _state(-1)
        try:
            stock.load(state, checkpoint_id=root / name, no_dist=True)
        except (Exception, stock.CheckpointException) as error:
            raise Lost(f"{name} does not load: {error}") from error
        found[name] = the_number(name, state, state["n"])
    return found


# --- orbax ---------------------------------------------------------------------------------------------------------


def _orbax(root: Path, kept: int | None = None) -> Any:
    import orbax.checkpoint as ocp

    return ocp.CheckpointManager(
        root, options=ocp.CheckpointManagerOptions(max_to_keep=kept, enable_async_checkpointing=False)
    )


def _orbax_save(root: Path, step: int, number: int, kept: int | None = None) -> None:
    import orbax.checkpoint as ocp

    manager = _orbax(root, kept)
    state = {name: value.numpy() for name, value in module(number).state_dict().items()}
    manager.save(step, args=ocp.args.StandardSave({**state, "n": np.int64(number)}))
    manager.wait_until_finished()
    manager.close()


def _orbax_read(root: Path) -> Found:
    import orbax.checkpoint as ocp

    found: Found = {}
    manager = _orbax(root)
    for step in manager.all_steps():
        try:
            state = manager.restore(step, args=ocp.args.StandardRestore())
        except Exception as error:
            raise Lost(f"step {step} does not load: {error}") from error
        arrays = {name: torch.from_numpy(np.array(value)) for name, value in state.items() if name != "n"}
        found[str(step)] = the_number(f"step {step}", arrays, int(state["n"]))
    return dict(sorted(found.items()))


# --- torch_xla -----------------------------------------------------------------------------------------------------


def _xla_manager(root: Path, kept: int = 0) -> Any:
    import torch.distributed as dist
    from torch_xla.experimental.distributed_checkpoint import CheckpointManager

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return CheckpointManager(str(root), save_interval=1, max_to_keep=kept, chkpt_on_preemption=False)


def _xla_save(root: Path, step: int, number: int, kept: int = 0) -> None:
    if not _xla_manager(root, kept).save(step, _state(number)):
        raise RuntimeError("nothing was saved")


def _xla_read(root: Path) -> Found:
    found: Found = {}
    manager = _xla_manager(root)
    for step in manager.all_steps():
        state = _state(-1)
        try:
            manager.restore(step, state)
        except (Exception, stock.CheckpointException) as error:
            raise Lost(f"step {step} does not load: {error}") from error
        found[str(step)] = the_number(f"step {step}", state, state["n"])
    return dict(sorted(found.items()))


# -------------------------------------------------------------------------------------------------------------------


def _peer(
    name: str, save: Callable[..., None], read: Callable[[Path], Found], before: Found, to: Any, after: Found,
    **options: Any,
) -> Operation:  # fmt: skip
    """A save with the number 7. Checkpoints are named by their steps, or, for DCP, by their directories."""

    def place(root: Path, name: Any) -> tuple[Any, ...]:
        return (root / name,) if isinstance(to, str) else (root, int(name))

    def prepare(root: Path) -> None:
        for old, number in before.items():
            save(*place(root, old), number)

    def again(root: Path) -> None:
        step = "step_9" if isinstance(to, str) else "9"
        if (root / step).exists():
            shutil.rmtree(root / step)
        save(*place(root, step), NEXT)

    return Operation(
        name=name, prepare=prepare, run=lambda root: save(*place(root, to), 7, **options), read=read, again=again,
        before=before, after=after, names=listed, of_peer=True,
    )  # fmt: skip


PEERS: Mapping[str, Operation] = {
    made.name: made
    for made in (
        _peer("torch DCP: save", _dcp_save, _dcp_read, {"step_1": 1}, "step_2", {"step_1": 1, "step_2": 7}),
        _peer("torch DCP: replace", _dcp_save, _dcp_read, {"step_1": 1}, "step_1", {"step_1": 7}),
        _peer("orbax: save", _orbax_save, _orbax_read, {"1": 1}, 2, {"1": 1, "2": 7}),
        _peer("orbax: retention", _orbax_save, _orbax_read, {"1": 1, "2": 2}, 3, {"3": 7}, kept=1),
        _peer("torch_xla: save", _xla_save, _xla_read, {"1": 1}, 2, {"1": 1, "2": 7}),
        _peer("torch_xla: retention", _xla_save, _xla_read, {"1": 1, "2": 2}, 3, {"3": 7}, kept=1),
    )
}
"""What other libraries do, by name."""
