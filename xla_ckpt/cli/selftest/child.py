"""The processes of a selftest: one that saves until it is killed, one that asks for a lease, one for each framework.

``python -m xla_ckpt.cli.selftest.child WORD ARGUMENTS``. It says lines, and ends with its parent. What frameworks, and
compilers that they start, print goes to its errors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import numpy as np

import xla_ckpt
from xla_ckpt.cli.selftest.devices import see_jax, see_torch, see_torch_xla
from xla_ckpt.errors import RootInUseError
from xla_ckpt.storage.door import store_at
from xla_ckpt.tags.lease import LEASES
from xla_ckpt.tags.roots import root_of

ELEMENTS = 1 << 20
"""Numbers in each tag of the process that is killed: 8 MiB."""

REFUSED, TAKEN = "refused", "taken"
"""What the process says that asks for a lease."""


def save(path: str) -> Iterator[int]:
    """Save tag after tag, and say the number of each that is committed."""
    parent, number = os.getppid(), 0
    while os.getppid() == parent:  # else it would go on for ever after a parent that was killed
        number += 1
        tree = {"w": np.full(ELEMENTS, number, np.int64)}
        xla_ckpt.save(path, f"step_{number}", tree, options=xla_ckpt.SaveOptions(retention=xla_ckpt.LatestN(2)))
        yield number


def hold(path: str, within: str) -> Iterator[str]:
    """Say whether this process gets the lease of a root."""
    try:
        root_of(store_at(path)).hold(float(within))
    except RootInUseError:
        yield REFUSED
        return
    yield TAKEN
    LEASES.give_back()


DO: dict[str, Callable[..., Iterator[object]]] = {
    "save": save,
    "hold": hold,
    "torch": see_torch,
    "torch_xla": see_torch_xla,
    "jax": see_jax,
}

if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in DO[sys.argv[1]](*sys.argv[2:]):
            print(line, file=answers, flush=True)
