"""Programs for ranks that torch_xla runs as threads. They use no collective: on two CPU devices these wait for ever."""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed
import torch_xla
import torch_xla.distributed.xla_backend

import xla_ckpt

TIMEOUT = 120.0
"""Seconds that a save waits for other ranks: far more than a refusal takes."""

_LOCK = threading.Lock()
"""The group is one for all threads, and torch refuses the second one that makes it, unless both do so at once."""


def train(index: int, folder: str, init_method: str | None) -> None:
    """Save, load and look, and write down what came of it."""
    if init_method is not None:
        with _LOCK:
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group("xla", init_method=init_method)
    root, began = os.path.join(folder, "ckpt"), time.monotonic()
    with open(os.path.join(folder, f"said.{index}"), "w") as said:
        try:
            state = {"x": torch.full((3,), float(index), device=torch_xla.device())}
            xla_ckpt.save(root, "a", state, options=xla_ckpt.SaveOptions(timeout=TIMEOUT))
            print("saved", file=said)
        except xla_ckpt.UsageError as error:
            print(error, file=said)
        try:
            print("loaded", xla_ckpt.restore(root, options=xla_ckpt.LoadOptions(timeout=TIMEOUT)).tree, file=said)
        except xla_ckpt.CheckpointError as error:
            print(error, file=said)
        print(xla_ckpt.has_checkpoint(root), xla_ckpt.list_tags(root), file=said)
        print("in time" if time.monotonic() - began < TIMEOUT / 4 else "late", file=said)
