"""Selftest checks of devices: bytes round-trip, and an asynchronous save contains the values at its call.

Each framework runs in its own process, because two frameworks cannot share a TPU and a backend may abort its process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

import xla_ckpt
from xla_ckpt.cli.selftest.checks import (
    OUT_OF_TIME,
    Check,
    CheckContext,
    CheckResult,
    failed,
    inconclusive,
    passed,
    run_catching_errors,
)
from xla_ckpt.core.dtypes import DTYPE_NAMES, get_dtype
from xla_ckpt.extras import is_installed

ELEMENTS_PER_TYPE = 256
"""Number of elements of each dtype."""

STEPS = 20
"""Number of in-place steps while a save is in flight."""

CHANGED_ELEMENTS = 1 << 22
"""Number of elements that these steps change."""

PROMISE = "its arrays come back byte for byte, and a save in the background has the values of its call"


def _check_framework(framework: str, context: CheckContext) -> CheckResult:
    """Check the devices of a framework in a separate process."""
    if not is_installed(framework):
        return inconclusive(f"{framework} is not installed.")
    with context.start_child(framework, context.get_root_path(framework)) as child:
        answer = child.output.readline()
        if not answer:
            said = f"The process that uses {framework} ended with {child.describe_exit()}."
            return inconclusive(said) if context.seconds_left else OUT_OF_TIME
    return CheckResult(**json.loads(answer))


DEVICE_CHECKS = [
    Check(framework, PROMISE, partial(_check_framework, framework)) for framework in ("torch", "torch_xla", "jax")
]
"""Device checks. ``python -m xla_ckpt.cli.selftest.child torch ROOT`` shows the output of a framework's process."""


def _make_random_elements(name: str) -> Any:
    """Return random bytes that are valid elements of a dtype."""
    bits = np.frombuffer(os.urandom(ELEMENTS_PER_TYPE * get_dtype(name).itemsize), np.uint8)
    return bits & 1 if name == "bool" or get_dtype(name).safetensors is None else bits  # int4 in a byte has 16 values


def _get_bytes(array: Any) -> bytes:
    """Return the bytes of an array on any device."""
    if hasattr(array, "detach"):
        import torch

        array = array.detach().cpu().contiguous().view(torch.uint8).numpy()
    return np.asarray(array).tobytes()


def _check_device(
    path: str, device: str, arrays_and_bytes: Mapping[str, tuple[Any, bytes]], tensor: Any, step: Callable[[Any], Any]
) -> CheckResult:
    """Check one device.

    Args:
        path: A root for its tags.
        device: Its name.
        arrays_and_bytes: Arrays on the device, and the bytes that they were made from, by dtype name.
        tensor: An array of floats on the device.
        step: Changes the array in place, as far as the framework supports that, and returns it.
    """
    xla_ckpt.save(path, "types", {name: array for name, (array, _) in arrays_and_bytes.items()})
    tree = xla_ckpt.restore(path, "types").tree
    # Some devices change the bytes that they are given (no float64), and so do some copies to the host (NaNs).
    changed = [
        name
        for name, (array, bits) in arrays_and_bytes.items()
        if _get_bytes(tree[name]) not in (bits, _get_bytes(array))
    ]
    if changed:
        return failed(f"{device}: other bytes came back of {', '.join(changed)}.")
    value = _get_bytes(tensor)
    handle = xla_ckpt.save(path, "moving", {"w": tensor}, async_save=True)
    for _ in range(STEPS):
        tensor = step(tensor)
    moved = _get_bytes(tensor)
    handle.result()
    if _get_bytes(xla_ckpt.restore(path, "moving").tree["w"]) != value:
        return failed(f"{device}: a save in the background has bytes that were changed after its call.")
    if moved == value:
        return inconclusive(f"{device}: the steps changed nothing.")
    left_out = sorted(set(DTYPE_NAMES) - set(arrays_and_bytes))
    without = f" It does not take {', '.join(left_out)}." if left_out else ""
    return passed(f"{device}: {len(arrays_and_bytes)} types of elements, and {STEPS} steps beside a save.{without}")


def _dump_worst_result(results: list[CheckResult]) -> str:
    """Return the worst verdict, and all messages, as a line."""
    order = ("does not hold", "could not be seen", "holds")
    worst = min((seen.verdict for seen in results), key=order.index)
    return json.dumps({"verdict": worst, "sentence": " ".join(seen.sentence for seen in results)})


def _check_torch_device(path: str, device: Any, name: str, synchronize: Callable[[], object]) -> CheckResult:
    import torch

    arrays = {}
    for kind_name in DTYPE_NAMES:
        if (kind := getattr(torch, kind_name, None)) is not None:
            try:
                bits = torch.from_numpy(_make_random_elements(kind_name).copy())
                arrays[kind_name] = bits.view(kind).to(device), _get_bytes(bits)
                synchronize()
            except (RuntimeError, TypeError):
                continue  # the device does not support the dtype, which the message lists

    def step(value: Any) -> Any:
        value.add_(1)
        synchronize()
        return value

    first = torch.rand(CHANGED_ELEMENTS, device=device)
    return run_catching_errors(lambda: _check_device(f"{path}-{device.type}", name, arrays, first, step))


def check_torch(path: str) -> Iterator[str]:
    """Yield the results for the CPU, and for the accelerator that torch has."""
    import torch

    devices = {"cpu": torch.device("cpu")}
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        model = getattr(torch.get_device_module(accelerator), "get_device_name", lambda: "of an unknown model")
        devices[f"{accelerator} ({model()})"] = accelerator
    yield _dump_worst_result(
        [_check_torch_device(path, device, name, lambda: None) for name, device in devices.items()]
    )


def check_torch_xla(path: str) -> Iterator[str]:
    """Yield the result for the device that torch_xla has."""
    import torch_xla
    import torch_xla.runtime

    device = torch_xla.device()
    yield _dump_worst_result(
        [_check_torch_device(path, device, f"{torch_xla.runtime.device_type()}, {device}", torch_xla.sync)]
    )


def check_jax(path: str) -> Iterator[str]:
    """Yield the result for the first device that jax has."""
    import jax
    import ml_dtypes

    jax.config.update("jax_enable_x64", True)
    arrays = {}
    for name in DTYPE_NAMES:
        kind = getattr(np, "bool_" if name == "bool" else name, None) or getattr(ml_dtypes, name, None)
        if kind is not None:
            try:
                bits = _make_random_elements(name)
                arrays[name] = jax.device_put(bits.view(kind)), bits.tobytes()
            except (TypeError, ValueError, NotImplementedError, RuntimeError):
                continue  # the device does not support the dtype, which the message lists
    step = jax.jit(lambda value: value + 1, donate_argnums=0)  # its memory may be reused, as in training steps
    first = jax.numpy.arange(CHANGED_ELEMENTS, dtype="float32")
    device = jax.devices()[0]
    name = device.platform if device.device_kind == device.platform else f"{device.platform} ({device.device_kind})"
    yield _dump_worst_result([run_catching_errors(lambda: _check_device(path, name, arrays, first, step))])
