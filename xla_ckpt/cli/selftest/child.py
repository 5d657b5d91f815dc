"""Child processes of the selftest: save until killed, acquire a lease, or check one framework's devices.

Run as ``python -m xla_ckpt.cli.selftest.child TASK ARGUMENTS``. It writes one line for each result, and exits when
its parent does. Output of frameworks, and of compilers that they start, goes to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import numpy as np

import xla_ckpt
from xla_ckpt.cli.selftest.device_checks import check_jax, check_torch, check_torch_xla
from xla_ckpt.errors import RootInUseError
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags.lease import LEASES
from xla_ckpt.tags.resolve import open_root

ELEMENT_COUNT = 1 << 20
"""Number of elements in each tag of the process that is killed: 8 MiB."""

REFUSED, TAKEN = "refused", "taken"
"""Output lines of the process that tries to acquire a lease."""


def save_until_killed(path: str) -> Iterator[int]:
    """Save tags in a loop, and yield the number of each committed one."""
    parent, number = os.getppid(), 0
    while os.getppid() == parent:  # otherwise it would continue forever after its parent was killed
        number += 1
        tree = {"w": np.full(ELEMENT_COUNT, number, np.int64)}
        xla_ckpt.save(path, f"step_{number}", tree, options=xla_ckpt.SaveOptions(retention=xla_ckpt.LatestN(2)))
        yield number


def acquire_lease(path: str, timeout: str) -> Iterator[str]:
    """Try to acquire the lease of a root, and yield the result."""
    try:
        open_root(open_store(path)).acquire_lease(float(timeout))
    except RootInUseError:
        yield REFUSED
        return
    yield TAKEN
    LEASES.release_all()


TASKS: dict[str, Callable[..., Iterator[object]]] = {
    "save": save_until_killed,
    "hold": acquire_lease,
    "torch": check_torch,
    "torch_xla": check_torch_xla,
    "jax": check_jax,
}

if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in TASKS[sys.argv[1]](*sys.argv[2:]):
            print(line, file=answers, flush=True)
