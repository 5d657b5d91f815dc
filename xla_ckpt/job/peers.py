"""The other ranks of this process's job: those of torch.distributed, or else those of jax.distributed.

Whichever the program has initialised, for more than one process: torch's first, because a program that has both trains
with torch. Nothing is imported to find out.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from xla_ckpt.errors import UsageError
from xla_ckpt.job.communicator import Communicator


def _torch_group() -> Any:
    """torch.distributed, if the program has initialised it; else None."""
    distributed: Any = sys.modules.get("torch.distributed")
    usable = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if usable else None


def _jax_service() -> Any:
    """What jax.distributed knows of this process, if the program has initialised it for several; else None."""
    distributed: Any = sys.modules.get("jax._src.distributed")
    state = getattr(distributed, "global_state", None)
    return state if state is not None and state.client is not None and state.num_processes > 1 else None


def _uninitialized_jax() -> int:
    """Processes that jax's devices are in, as far as it has looked for devices in this process; else 1."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    looked = bridge is not None and bridge.backends_are_initialized()
    return int(bridge.process_count()) if looked else 1


def channel() -> Communicator | None:
    """What this process meets the others through; None if it is alone."""
    group = _torch_group()
    if group is not None and group.get_world_size() > 1:
        from xla_ckpt.job import process_group

        return process_group.communicator()
    service = _jax_service()
    if service is None:
        return None
    from xla_ckpt.job import jax_service

    return jax_service.service_communicator(service)


def leads() -> bool:
    """Whether this process is rank 0 of its job, or alone; before it has joined the others, what the launcher says."""
    group, service = _torch_group(), _jax_service()
    if group is not None:
        return bool(group.get_rank() == 0)
    if service is not None:
        return bool(service.process_id == 0)
    return os.environ.get("RANK", "0") == "0"


def check_can_share() -> None:
    """Refuse to send array bytes between ranks where no library is there for it.

    Raises:
        UsageError: The ranks are jax's.
    """
    group = _torch_group()
    if (group is None or group.get_world_size() == 1) and _jax_service() is not None:
        raise UsageError(
            'replica_read="share" sends what was read through torch.distributed, and the ranks of this job are jax\'s',
            expected="a process group of torch.distributed",
            hint='Leave replica_read="each": each process reads what its own devices hold.',
        )


def check_can_meet() -> None:
    """Refuse to save or load as a rank that cannot meet the other ranks of its job.

    It would take itself for the whole job: each rank writes the same tag, and the last one to commit wins.

    Raises:
        UsageError: XLA, jax or the launcher knows of other ranks, and neither torch.distributed nor jax.distributed is
            there to meet them through; or the ranks are threads.
    """
    group = _torch_group()
    members = group.get_world_size() if group is not None else 1
    processes, devices = _xla_ranks()
    # torch_xla.launch runs a rank on a thread of its own, and its process group counts those ranks. Without either of
    # these signs the main thread saves for all devices of its process.
    if devices > processes and (threading.current_thread() is not threading.main_thread() or members == devices):
        raise UsageError(
            "torch_xla runs the ranks of this job as threads",
            expected="a process of its own for each rank",
            found=f"{devices} ranks in {processes} process{'es' if processes > 1 else ''}",
            hint="Start the program with torchrun, one process for each device, and call "
            'torch.distributed.init_process_group("gloo") (or "xla") before the first save or load; or use SPMD.',
        )
    if members > 1 or _jax_service() is not None:
        return
    if processes > 1:
        raise UsageError(
            f"XLA runs {processes} processes, and torch.distributed is not initialised",
            expected="a process group",
            hint='Call torch.distributed.init_process_group("gloo") (or "xla") before the first save or load.',
        )
    if (jax_processes := _uninitialized_jax()) > 1:
        raise UsageError(
            f"jax runs {jax_processes} processes, and jax.distributed is not initialised",
            expected="a coordination service",
            hint="Call jax.distributed.initialize() at the beginning of the program.",
        )
    launched = os.environ.get("WORLD_SIZE", "")
    if not launched.isdecimal() or int(launched) < 2:
        return
    if group is None:
        raise UsageError(
            f"this process is one of {launched} (WORLD_SIZE), and torch.distributed is not initialised",
            expected="a process group",
            hint='Call torch.distributed.init_process_group("gloo") (or "xla") before the first save or load, or '
            "jax.distributed.initialize() if the arrays are jax's. If this process works alone, remove WORLD_SIZE from "
            "its environment.",
        )
    if "xla" in str(group.get_backend()):
        # init_method="xla://" counts the devices of this process' XLA client, which on the CPU knows no other process.
        # A group of one that the program made itself is not refused: it says that this process works alone.
        raise UsageError(
            f"this process is one of {launched} (WORLD_SIZE), and the process group that XLA made has 1 rank",
            expected=f"a process group of {launched} ranks",
            hint='Call torch.distributed.init_process_group("gloo"), or "xla" without init_method="xla://".',
        )


def _xla_ranks() -> tuple[int, int]:
    """Processes and devices that take part in XLA's job, as far as XLA runs in this process; 1 and 1 otherwise.

    Devices are counted where each of them is a rank: not under SPMD, where a process is one.
    """
    runtime: Any = sys.modules.get("torch_xla.runtime")
    xla: Any = sys.modules.get("torch_xla")
    if runtime is None or xla is None or not xla._XLAC._xla_runtime_is_initialized():
        return 1, 1
    # torch_xla.runtime.world_size() is not asked: it keeps its first answer, and init_process_group may come later.
    devices = 1 if runtime.is_spmd() else xla._XLAC._xla_get_replication_devices_count()
    return int(runtime.process_count()), max(int(devices), 1)
