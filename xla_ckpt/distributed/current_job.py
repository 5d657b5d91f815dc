"""The job of the current process: its rank, peers, communicator and mesh.

The peers are those of torch.distributed or else of jax.distributed, whichever the program has initialized for more
than one process; neither is imported to find out. `JaxCommunicator` wraps the key-value store of jax's coordination
service, for which jax has no public API: it uses the same part of `jax._src.distributed` as orbax. The client of
torch's store is in `torch_store`, which imports torch. `get_current_job` returns the `Job` of one save or load.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from xla_ckpt.core.sharding.mesh import Mesh, RankInfo, parse_mesh
from xla_ckpt.distributed.exchange import Communicator, InProcessCommunicator
from xla_ckpt.distributed.job import DEFAULT_TIMEOUT, ExchangeSequence, Job, get_exchange_sequence
from xla_ckpt.distributed.mesh_source import get_current_mesh
from xla_ckpt.errors import UsageError, annotate_errors
from xla_ckpt.storage.process_state import register_fork_reset

WAIT_SLICE_SECONDS = 1.0
"""Seconds of one wait inside of jax, which hears no signal meanwhile: a longer wait consists of several."""


def _encode_key(name: str) -> str:
    """The name of a key. To the service a slash begins a folder, and to delete a key is to delete the folder, too."""
    return f"xla_ckpt/{name.replace('/', '|')}"


class JaxCommunicator:
    """A process's view of the coordination service. Safe for several threads, as jax's client is."""

    def __init__(self, state: Any) -> None:
        self.client: Any = state.client
        self.rank: int = state.process_id
        self.size: int = state.num_processes

    def put(self, key: str, value: bytes, _timeout: float = 0) -> None:
        _call_service(lambda: self.client.key_value_set_bytes(_encode_key(key), value, allow_overwrite=True))

    def put_if_absent(self, key: str, value: bytes, timeout: float = 0) -> bytes:
        try:
            self.client.key_value_set_bytes(_encode_key(key), value)
        except RuntimeError as error:
            if not _has_status(error, "ALREADY_EXISTS"):
                raise ConnectionError(str(error)) from error
            return self.get(key, timeout)
        return value

    def get(self, key: str, timeout: float) -> bytes:
        end = time.monotonic() + timeout
        while True:
            left = max(min(end - time.monotonic(), WAIT_SLICE_SECONDS), 0.001)
            try:
                return bytes(self.client.blocking_key_value_get_bytes(_encode_key(key), math.ceil(left * 1000)))
            except RuntimeError as error:
                if not _has_status(error, "DEADLINE_EXCEEDED"):
                    raise ConnectionError(str(error)) from error
                if time.monotonic() >= end:
                    raise TimeoutError(key) from error

    def has(self, keys: Sequence[str], _timeout: float = 0) -> bool:
        return all(map(self._has_key, keys))

    def _has_key(self, key: str) -> bool:
        try:
            self.client.key_value_try_get_bytes(_encode_key(key))
        except RuntimeError as error:
            if not _has_status(error, "NOT_FOUND"):
                raise ConnectionError(str(error)) from error
            return False
        return True

    def delete(self, key: str, _timeout: float = 0) -> None:
        _call_service(lambda: self.client.key_value_delete(_encode_key(key)))


def _call_service(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error


def _has_status(error: RuntimeError, status: str) -> bool:
    """Whether an error of jax's client has a status, with which its text begins."""
    return str(error).startswith(status)


_jax_communicator: list[JaxCommunicator] = register_fork_reset([], list.clear)


def get_jax_communicator(state: Any) -> JaxCommunicator:
    """The communicator of the current coordination service: a later one gets a new one."""
    if not _jax_communicator or _jax_communicator[0].client is not state.client:
        _jax_communicator[:] = [JaxCommunicator(state)]
    return _jax_communicator[0]


def _get_torch_distributed() -> Any:
    """torch.distributed, if the program has initialised it; else None."""
    distributed: Any = sys.modules.get("torch.distributed")
    usable = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if usable else None


def _get_jax_state() -> Any:
    """What jax.distributed knows of this process, if the program has initialised it for several; else None."""
    distributed: Any = sys.modules.get("jax._src.distributed")
    state = getattr(distributed, "global_state", None)
    return state if state is not None and state.client is not None and state.num_processes > 1 else None


def _count_jax_processes() -> int:
    """Processes that jax's devices are in, as far as it has looked for devices in this process; else 1."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    looked = bridge is not None and bridge.backends_are_initialized()
    return int(bridge.process_count()) if looked else 1


def get_communicator() -> Communicator | None:
    """What this process meets the others through; None if it is alone."""
    group = _get_torch_distributed()
    if group is not None and group.get_world_size() > 1:
        from xla_ckpt.distributed import torch_store

        return torch_store.get_torch_communicator()
    service = _get_jax_state()
    if service is None:
        return None

    return get_jax_communicator(service)


def is_leader() -> bool:
    """Whether this process is rank 0 of its job, or alone; before it has joined the others, what the launcher says."""
    group, service = _get_torch_distributed(), _get_jax_state()
    if group is not None:
        return bool(group.get_rank() == 0)
    if service is not None:
        return bool(service.process_id == 0)
    return os.environ.get("RANK", "0") == "0"


def check_cooperative_reads() -> None:
    """Refuse to send array bytes between ranks where no library is there for it.

    Raises:
        UsageError: The ranks are jax's.
    """
    group = _get_torch_distributed()
    if (group is None or group.get_world_size() == 1) and _get_jax_state() is not None:
        raise UsageError(
            'replica_read="share" sends what was read through torch.distributed, and the ranks of this job are jax\'s',
            expected="a process group of torch.distributed",
            hint='Leave replica_read="each": each process reads what its own devices hold.',
        )


def check_peers_reachable() -> None:
    """Refuse to save or load as a rank that cannot meet the other ranks of its job.

    It would take itself for the whole job: each rank writes the same tag, and the last one to commit wins.

    Raises:
        UsageError: XLA, jax or the launcher knows of other ranks, and neither torch.distributed nor jax.distributed is
            there to meet them through; or the ranks are threads.
    """
    group = _get_torch_distributed()
    members = group.get_world_size() if group is not None else 1
    processes, devices = _count_xla_ranks()
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
    if members > 1 or _get_jax_state() is not None:
        return
    if processes > 1:
        raise UsageError(
            f"XLA runs {processes} processes, and torch.distributed is not initialised",
            expected="a process group",
            hint='Call torch.distributed.init_process_group("gloo") (or "xla") before the first save or load.',
        )
    if (jax_processes := _count_jax_processes()) > 1:
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


def _count_xla_ranks() -> tuple[int, int]:
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


_IN_PROCESS = InProcessCommunicator()


def create_single_rank_job(timeout: float) -> Job:
    """A job of this process alone, for a load in which its peers take no part.

    Its rounds are its own: those of the process are numbered as those of the other ranks.
    """
    rounds = ExchangeSequence(_IN_PROCESS)
    return Job(rounds.begin("load", timeout), RankInfo(0, 1, Mesh()), rounds)


class JobOverride(threading.local):
    """The job in which the saves and loads of this thread take part, if it is given: whatever process this is.

    Tests play the ranks of a job with it, each in a thread of one process. Programs have no use for it.
    """

    job: Job | None = None


JOB_OVERRIDE = JobOverride()


def get_world_size(root: str) -> int:
    """Return the number of ranks of this process's job, without beginning a call.

    Raises:
        UsageError: This rank cannot meet the others.
    """
    with annotate_errors(path=root):
        check_peers_reachable()
    return (get_communicator() or _IN_PROCESS).size


def get_current_job(root: str, mesh: Mesh | str | None, *, operation: str, timeout: float = DEFAULT_TIMEOUT) -> Job:
    """The job of this process, for one save or load of `root`.

    All ranks make the same calls in the same order; that is how they find each other's messages.

    Raises:
        UsageError: `mesh` does not fit to the number of processes, or this rank cannot meet the others.
    """
    if JOB_OVERRIDE.job is not None:
        return JOB_OVERRIDE.job
    if not timeout > 0:
        raise UsageError("a timeout is a number of seconds above 0", path=root, found=timeout)
    check_peers_reachable()
    communicator = get_communicator() or _IN_PROCESS
    mesh = parse_mesh(mesh)
    if mesh is None:
        mesh = get_current_mesh(communicator.rank, communicator.size) or Mesh(dp=communicator.size)
    if mesh.size != communicator.size:
        raise UsageError(
            "the mesh does not fit the job",
            path=root,
            expected=f"{communicator.size} rank{'s' * (communicator.size > 1)}",
            found=f"{mesh.size} ({mesh})",
            hint="Start the job with as many ranks (with torchrun, or jax.distributed), or leave mesh= out.",
        )
    rounds = get_exchange_sequence(communicator)
    return Job(rounds.begin(operation, timeout), RankInfo(communicator.rank, communicator.size, mesh), rounds)
