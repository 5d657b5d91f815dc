"""What is saved and loaded: states of a given size on the CPU, on a device, or of jax arrays."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

MIB = 1 << 20
MANY = 20_000
LINK = 1.0
"""GB/s between the simulated accelerator and the host."""


def shapes(gb: float, count: int = 0) -> list[tuple[int, ...]]:
    """The shapes of a state of `gb` GB (10^9 bytes) of float32.

    By default it is like a small language model with AdamW: mostly large matrices, some middling, many small vectors.
    With `count` it has that many tensors, all alike.
    """
    if count:
        return [(max(1, round(gb * 1e9 / 4 / count)),)] * count
    large = round(gb * 1e9 / (64 * MIB) * 0.83)
    middling = max(1, round(gb * 1e9 / (4 * MIB) * 0.16))
    return [(4096, 4096)] * large + [(1024, 1024)] * middling + [(1024,)] * 30


def size_of(shapes_: list[tuple[int, ...]]) -> int:
    """Bytes of a state of float32."""
    return sum(4 * math.prod(s) for s in shapes_)


ON_JAX = ("jax", "rows", "columns")
"""The devices of jax arrays."""
DEVICES = 8
"""Devices of ``rows`` and ``columns``."""
PAGE = 4096
"""Bytes of a page of memory."""


class State:
    """A state on one kind of device: ``cpu``, ``xla``, ``jax``, or ``sim``, the simulated accelerator of the tests.

    ``rows`` and ``columns`` are jax arrays that 8 devices hold a part of each.

    ``new`` is CPU memory that is not there yet: such a state is empty until a load puts its `arrays` in place.

    The values are those of one random block, with another number added in each tensor: making them takes no longer
    than writing to fresh memory does, and no compressor finds anything in them.
    """

    def __init__(self, device: str, gb: float, count: int = 0, seed: int = 0) -> None:
        import torch

        self.device = device
        self.shapes = sizes = shapes(gb, count)
        self.nbytes = size_of(sizes)
        self.arrays: dict[str, Any] = {}
        self.module: Any = None
        if device == "new":
            return
        block = torch.rand(max(math.prod(s) for s in sizes), generator=torch.Generator().manual_seed(seed))
        host = [torch.add(block[: math.prod(s)], float(i)).view(s) for i, s in enumerate(sizes)]
        if device in ON_JAX:
            self.arrays = {str(i): array for i, array in enumerate(_onto_jax(host, device))}
            return
        values = [_onto_xla(t) for t in host] if device == "xla" else host
        self.module = torch.nn.ParameterList(torch.nn.Parameter(v, requires_grad=False) for v in values)
        if device == "sim":
            self.module.to(_simulated())
        wait_for_device(device)

    def state_dict(self) -> dict[str, Any]:
        """The tensors by name, live."""
        values: dict[str, Any] = self.arrays or self.module.state_dict()
        return values

    def host_bytes(self) -> Iterator[Any]:
        """The bytes of each array, sorted by name, without a copy: numpy arrays of uint8."""
        import numpy as np
        import torch

        for _, value in sorted(self.state_dict().items()):  # orbax brings its names back in this order
            if self.device in ON_JAX:
                yield np.asarray(value).reshape(-1).view(np.uint8)
            else:
                host = _view_of_xla(value.detach()) if self.device == "xla" else value.detach()
                yield host.view(-1).view(torch.uint8).numpy()

    def touch(self) -> int:
        """Read a byte of every page of all values, so that a loader that only mapped a file, or began a copy, has to
        bring everything here."""
        return sum(int(part[::PAGE].sum()) for part in self.host_bytes())

    def digest(self) -> str:
        """A digest of all values."""
        import xxhash

        hashed = xxhash.xxh3_64()
        for part in self.host_bytes():
            hashed.update(part)
        return str(hashed.hexdigest())


def wait_for_device(device: str) -> None:
    """Wait until everything is computed and transferred."""
    if device == "xla":
        import torch_xla

        torch_xla._XLAC._xla_wait_device_ops([])


def _simulated() -> str:
    """The simulated accelerator, with its link to the host as fast as `LINK` says."""
    sim = importlib.import_module("tests.device.sim")
    sim.build()
    sim.load().bandwidth(LINK)
    return "sim"


def _onto_jax(host: list[Any], device: str) -> list[Any]:
    """jax arrays of the same values: on one device of the same memory, else a part on each device."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_platforms", "cpu")
    if device == "jax":
        return [jax.dlpack.from_dlpack(tensor) for tensor in host]
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    spec = PartitionSpec("x") if device == "rows" else PartitionSpec(None, "x")
    places = [NamedSharding(mesh, spec if t.ndim == 2 else PartitionSpec("x")) for t in host]
    return [jax.device_put(t.numpy(), place) for t, place in zip(host, places, strict=True)]


def _onto_xla(host: Any) -> Any:
    """An XLA tensor of the same memory: device memory of CPU PJRT is host memory."""
    import torch
    from torch_xla.utils.dlpack import from_dlpack

    return from_dlpack(torch.utils.dlpack.to_dlpack(host))


def _view_of_xla(value: Any) -> Any:
    """A CPU tensor of an XLA tensor's memory."""
    import torch
    from torch_xla.utils.dlpack import to_dlpack

    return torch.utils.dlpack.from_dlpack(to_dlpack(value))
