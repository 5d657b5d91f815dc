"""What names a save, so that parts of different saves are told apart."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator
from typing import Any

import torch

from xla_ckpt.logs import get_logger

logger = get_logger(__name__)


_job_ids: list[tuple[Any, str]] = []
"""The current process group, if there is one, and what names its job. A later group is another job."""

_counters: dict[tuple[str, str, bool], Iterator[int]] = {}
"""(job, checkpoint, v3) -> the numbers of its saves. All ranks that save it count alike."""


def save_of(f: str, v3: bool) -> str | None:
    """What names this save: the same on all ranks. None if the ranks of the job cannot agree on that any more."""
    job = job_id()
    if job is None:
        return None
    key = job, os.path.abspath(f), v3
    return f"{job}-{next(_counters.setdefault(key, itertools.count()))}"


def job_id() -> str | None:
    """What names this job: the rank that comes first says it, and nobody waits.

    `smp.init` asks for it, too: later on the process that holds the job's store may have ended. None then, if it was
    not asked for before.
    """
    distributed: Any = torch.distributed
    joined = distributed.is_available() and distributed.is_initialized()
    group = distributed.group.WORLD if joined else None
    if not _job_ids or _job_ids[0][0] is not group:
        name = uuid.uuid4().hex[:16]
        if joined:
            store = distributed.distributed_c10d._get_default_store()
            try:
                name = store.compare_set("neuron_compat.smp/job", "", name).decode()
            except RuntimeError as error:  # torch has no other one for a store that is gone
                logger.warning("the store of the job is gone: a file is saved without a note of its save: %s", error)
                return None
        _job_ids[:] = [(group, name)]
    return _job_ids[0][1]
