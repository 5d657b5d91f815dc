"""Promises on devices: bytes come back as they were, and a save in the background has the values of its call.

Each framework is looked at in a process of its own: two of them cannot have one TPU, and a backend may end its process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

import xla_ckpt
from xla_ckpt.cli.selftest.checks import NO_TIME, Bench, Check, Sighting, broken, holds, sighted, unseen
from xla_ckpt.dtypes import DTYPE_NAMES, dtype
from xla_ckpt.extras import is_installed

OF_EACH_TYPE = 256
"""Elements of each type."""

STEPS = 20
"""In-place steps while a save is in flight."""

MOVED = 1 << 22
"""Elements that these steps change."""

PROMISE = "its arrays come back byte for byte, and a save in the background has the values of its call"


def _see(framework: str, bench: Bench) -> Sighting:
    """What a process of its own says of the devices of a framework."""
    if not is_installed(framework):
        return unseen(f"{framework} is not installed.")
    with bench.child(framework, bench.below(framework)) as child:
        answer = child.lines.readline()
        if not answer:
            said = f"The process that uses {framework} ended with {child.ending()}."
            return unseen(said) if bench.left else NO_TIME
    return Sighting(**json.loads(answer))


DEVICE_CHECKS = [Check(framework, PROMISE, partial(_see, framework)) for framework in ("torch", "torch_xla", "jax")]
"""``python -m xla_ckpt.cli.selftest.child torch ROOT`` shows what the process of a framework prints."""


def _bits(name: str) -> Any:
    """Random bytes that are elements of a type."""
    bits = np.frombuffer(os.urandom(OF_EACH_TYPE * dtype(name).itemsize), np.uint8)
    return bits & 1 if name == "bool" or dtype(name).safetensors is None else bits  # int4 in a byte has 16 values


def _bytes(array: Any) -> bytes:
    """The bytes of an array, wherever it lies."""
    if hasattr(array, "detach"):
        import torch

        array = array.detach().cpu().contiguous().view(torch.uint8).numpy()
    return np.asarray(array).tobytes()


def _look(
    path: str, device: str, arrays: Mapping[str, tuple[Any, bytes]], first: Any, step: Callable[[Any], Any]
) -> Sighting:
    """Look at one device.

    Args:
        path: A root for its tags.
        device: Its name.
        arrays: Arrays that lie there, and the bytes that they were made of, by the names of their types.
        first: An array that lies there, of floats.
        step: Changes it in place, as far as the framework does so, and returns it.
    """
    xla_ckpt.save(path, "types", {name: array for name, (array, _) in arrays.items()})
    tree = xla_ckpt.restore(path, "types").tree
    # Some devices have other bytes than they are given (no float64), and some ways to the host change them (NaNs).
    changed = [name for name, (array, bits) in arrays.items() if _bytes(tree[name]) not in (bits, _bytes(array))]
    if changed:
        return broken(f"{device}: other bytes came back of {', '.join(changed)}.")
    value = _bytes(first)
    handle = xla_ckpt.save(path, "moving", {"w": first}, async_save=True)
    for _ in range(STEPS):
        first = step(first)
    moved = _bytes(first)
    handle.result()
    if _bytes(xla_ckpt.restore(path, "moving").tree["w"]) != value:
        return broken(f"{device}: a save in the background has bytes that were changed after its call.")
    if moved == value:
        return unseen(f"{device}: the steps changed nothing.")
    left_out = sorted(set(DTYPE_NAMES) - set(arrays))
    without = f" It does not take {', '.join(left_out)}." if left_out else ""
    return holds(f"{device}: {len(arrays)} types of elements, and {STEPS} steps beside a save.{without}")


def _answer(sightings: list[Sighting]) -> str:
    """The worst verdict, and all sentences, as a line."""
    order = ("does not hold", "could not be seen", "holds")
    worst = min((seen.verdict for seen in sightings), key=order.index)
    return json.dumps({"verdict": worst, "sentence": " ".join(seen.sentence for seen in sightings)})


def _torch(path: str, device: Any, name: str, after: Callable[[], object]) -> Sighting:
    import torch

    arrays = {}
    for kind_name in DTYPE_NAMES:
        if (kind := getattr(torch, kind_name, None)) is not None:
            try:
                bits = torch.from_numpy(_bits(kind_name).copy())
                arrays[kind_name] = bits.view(kind).to(device), _bytes(bits)
                after()
            except (RuntimeError, TypeError):
                continue  # the device has no such type: the sentence lists it

    def step(value: Any) -> Any:
        value.add_(1)
        after()
        return value

    first = torch.rand(MOVED, device=device)
    return sighted(lambda: _look(f"{path}-{device.type}", name, arrays, first, step))


def see_torch(path: str) -> Iterator[str]:
    """Say what holds on the CPU, and on the accelerator that torch has."""
    import torch

    devices = {"cpu": torch.device("cpu")}
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        model = getattr(torch.get_device_module(accelerator), "get_device_name", lambda: "of an unknown model")
        devices[f"{accelerator} ({model()})"] = accelerator
    yield _answer([_torch(path, device, name, lambda: None) for name, device in devices.items()])


def see_torch_xla(path: str) -> Iterator[str]:
    """Say what holds on the device that torch_xla has."""
    import torch_xla
    import torch_xla.runtime

    device = torch_xla.device()
    yield _answer([_torch(path, device, f"{torch_xla.runtime.device_type()}, {device}", torch_xla.sync)])


def see_jax(path: str) -> Iterator[str]:
    """Say what holds on the first device that jax has."""
    import jax
    import ml_dtypes

    jax.config.update("jax_enable_x64", True)
    arrays = {}
    for name in DTYPE_NAMES:
        kind = getattr(np, "bool_" if name == "bool" else name, None) or getattr(ml_dtypes, name, None)
        if kind is not None:
            try:
                bits = _bits(name)
                arrays[name] = jax.device_put(bits.view(kind)), bits.tobytes()
            except (TypeError, ValueError, NotImplementedError, RuntimeError):
                continue  # the device has no such type: the sentence lists it
    step = jax.jit(lambda value: value + 1, donate_argnums=0)  # its memory may be used again, as of training steps
    first = jax.numpy.arange(MOVED, dtype="float32")
    device = jax.devices()[0]
    name = device.platform if device.device_kind == device.platform else f"{device.platform} ({device.device_kind})"
    yield _answer([sighted(lambda: _look(path, name, arrays, first, step))])
