"""The job of the current process: its rank, peers, communicator and mesh.

The peers are the processes of torch.distributed, otherwise of jax.distributed, if the program has initialized it for
more than one process; neither is imported for the check. `JaxCommunicator` wraps the key-value store of JAX's
coordination service, for which JAX has no public API: it uses the same part of `jax._src.distributed` as orbax. The
client of the torch store is in `torch_store`, which imports torch. `get_current_job` returns the `Job` of one save or
load.
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
"""Maximum time of one blocking call in JAX, during which no signal is handled (s). Longer waits consist of several
calls.
"""


def _encode_key(name: str) -> str:
    """Return the encoded name of a key. In the service, a slash separates folders, and deleting a key deletes the
    folder.
    """
    return f"xla_ckpt/{name.replace('/', '|')}"


class JaxCommunicator:
    """A rank's client of the JAX coordination service. Thread-safe, as the JAX client is."""

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
    """Return True if an error of the JAX client has a status, which is the prefix of its message."""
    return str(error).startswith(status)


_jax_communicator: list[JaxCommunicator] = register_fork_reset([], list.clear)


def get_jax_communicator(state: Any) -> JaxCommunicator:
    """Return the communicator of the current coordination service; a new service gets a new communicator."""
    if not _jax_communicator or _jax_communicator[0].client is not state.client:
        _jax_communicator[:] = [JaxCommunicator(state)]
    return _jax_communicator[0]


def _get_torch_distributed() -> Any:
    """Return torch.distributed if the program has initialized it, otherwise None."""
    distributed: Any = sys.modules.get("torch.distributed")
    usable = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if usable else None


def _get_jax_state() -> Any:
    """Return the jax.distributed state if the program has initialized it for several processes, otherwise None."""
    distributed: Any = sys.modules.get("jax._src.distributed")
    state = getattr(distributed, "global_state", None)
    return state if state is not None and state.client is not None and state.num_processes > 1 else None


def _count_jax_processes() -> int:
    """Return the number of JAX processes if JAX backends are initialized in this process, otherwise 1."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    looked = bridge is not None and bridge.backends_are_initialized()
    return int(bridge.process_count()) if looked else 1


def get_communicator() -> Communicator | None:
    """Return the communicator of the job, or None if the job consists of this process."""
    group = _get_torch_distributed()
    if group is not None and group.get_world_size() > 1:
        from xla_ckpt.distributed import torch_store

        return torch_store.get_torch_communicator()
    service = _get_jax_state()
    if service is None:
        return None

    return get_jax_communicator(service)


def is_leader() -> bool:
    """Return True if this process is rank 0 of its job. Uses the launcher's RANK before a process group is
    initialized.
    """
    group, service = _get_torch_distributed(), _get_jax_state()
    if group is not None:
        return bool(group.get_rank() == 0)
    if service is not None:
        return bool(service.process_id == 0)
    return os.environ.get("RANK", "0") == "0"


def check_cooperative_reads() -> None:
    """Raise an error if no library can send array bytes between the ranks of this job.

    Raises:
        UsageError: The ranks communicate through jax.distributed.
    """
    group = _get_torch_distributed()
    if (group is None or group.get_world_size() == 1) and _get_jax_state() is not None:
        raise UsageError(
            'replica_read="share" sends what was read through torch.distributed, and the ranks of this job are jax\'s',
            expected="a process group of torch.distributed",
            hint='Leave replica_read="each": each process reads what its own devices hold.',
        )


def check_peers_reachable() -> None:
    """Raise an error if this process belongs to a job with other ranks but cannot communicate with them.

    Otherwise each rank would act as a single-process job and write the same tag, and the last commit would win.

    Raises:
        UsageError: XLA, JAX or the launcher reports other ranks, but neither torch.distributed nor jax.distributed is
            initialized; or the ranks are threads.
    """
    group = _get_torch_distributed()
    members = group.get_world_size() if group is not None else 1
    processes, devices = _count_xla_ranks()
    # torch_xla.launch runs each rank on its own thread, and its process group counts these ranks. Without either of
    # these signs, the main thread saves for all devices of its process.
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
        # init_method="xla://" counts the devices of this process's XLA client, which on CPU does not see other
        # processes. A group of size one that the program created itself is accepted: it declares that this process
        # works independently.
        raise UsageError(
            f"this process is one of {launched} (WORLD_SIZE), and the process group that XLA made has 1 rank",
            expected=f"a process group of {launched} ranks",
            hint='Call torch.distributed.init_process_group("gloo"), or "xla" without init_method="xla://".',
        )


def _count_xla_ranks() -> tuple[int, int]:
    """Return the number of processes and of device ranks in the XLA job; (1, 1) if XLA is not initialized here.

    Devices are counted if each of them is a rank. Under SPMD, each process is one rank.
    """
    runtime: Any = sys.modules.get("torch_xla.runtime")
    xla: Any = sys.modules.get("torch_xla")
    if runtime is None or xla is None or not xla._XLAC._xla_runtime_is_initialized():
        return 1, 1
    # Not torch_xla.runtime.world_size(): it caches its first result, and init_process_group may be called later.
    devices = 1 if runtime.is_spmd() else xla._XLAC._xla_get_replication_devices_count()
    return int(runtime.process_count()), max(int(devices), 1)


_IN_PROCESS = InProcessCommunicator()


def create_single_rank_job(timeout: float) -> Job:
    """Return a job that consists of this process, for a load in which its peers do not participate.

    It has its own exchange sequence, because the exchanges of the process are numbered in step with the other ranks.
    """
    rounds = ExchangeSequence(_IN_PROCESS)
    return Job(rounds.begin("load", timeout), RankInfo(0, 1, Mesh()), rounds)


class JobOverride(threading.local):
    """Thread-local override of the current job.

    Used by tests that simulate the ranks of a job with threads of one process. Not intended for programs.
    """

    job: Job | None = None


JOB_OVERRIDE = JobOverride()


def get_world_size(root: str) -> int:
    """Return the number of ranks of this process's job without starting a call.

    Raises:
        UsageError: This rank cannot communicate with the others.
    """
    with annotate_errors(path=root):
        check_peers_reachable()
    return (get_communicator() or _IN_PROCESS).size


def get_current_job(root: str, mesh: Mesh | str | None, *, operation: str, timeout: float = DEFAULT_TIMEOUT) -> Job:
    """Return the job of this process for one save or load of `root`.

    All ranks must make the same calls in the same order, so that their messages match.

    Args:
        root: Root of the checkpoints, for error messages.
        mesh: Device mesh; by default the mesh of the training library, otherwise pure data parallelism.
        operation: Name of the call, such as ``save`` or ``load``.
        timeout: Seconds that a rank waits for another.

    Raises:
        UsageError: `mesh` does not match the number of processes, `timeout` is not positive, or this rank cannot
            communicate with the others.
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
