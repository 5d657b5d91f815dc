"""Run the real neuronx-distributed on CPUs: an installed package under torchrun, one process for each device.

    torchrun --nproc-per-node=4 -m neuron_compat.nxd_on_cpu train.py --its-own-options

runs a script unchanged. A program may also call `prepare` before it imports neuronx-distributed, and `begin` before its
`init_process_group`. neuronx-distributed's own code runs: layers, pipelines, experts, LoRA, ZeRO-1 and its checkpoints.
Three things are replaced:

- Modules of the Neuron SDK that it imports, such as ``torch_neuronx`` and ``neuronxcc``, are stubs with arbitrary
  attributes; kernels compute nothing.
- torch_xla's collectives and queries are emulated by `neuron_compat.emulate`.
- Connections to other machines are blocked: neuronx-distributed requests the machine type from an AWS address, and
  would wait for a response.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import runpy
import socket
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from neuron_compat.emulation import emulate
from neuron_compat.lazy_imports import FallbackFinder, import_module
from xla_ckpt import UsageError

SDK_PACKAGES = ("libneuronxla", "neuronpy", "neuronxcc", "neuronxlogger", "nki", "nkilib", "torch_neuronx")
"""Packages of the Neuron SDK that neuronx-distributed imports."""

PLATFORM_TARGET = "trn1"
"""Machine type reported to neuronx-distributed."""


# -- stubs of the Neuron SDK


class _StubMeta(type):
    """Metaclass of stub classes, which have every attribute, each another stub class."""

    def __getattr__(cls, name: str) -> Any:
        _refuse_dunder(name)
        stand_in = _make_stub(name)
        setattr(cls, name, stand_in)
        return stand_in

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


def _refuse_dunder(name: str) -> None:
    """Raise AttributeError for a special name such as `__len__`, which Python looks up on objects that may lack it."""
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)


def _unwrap_decorator_call(arguments: Sequence[Any], otherwise: Any) -> Any:
    """Return the decorated function unchanged if the call is a decorator call; `otherwise` if it is not."""
    is_decorator = len(arguments) == 1 and isinstance(arguments[0], types.FunctionType | type)
    return arguments[0] if is_decorator else otherwise


def _make_stub(name: str) -> Any:
    """Return a stub class that works as a type annotation, base class, decorator, or function that does nothing."""

    def make(cls: Any, *arguments: Any, **_: Any) -> Any:
        return _unwrap_decorator_call(arguments, object.__new__(cls))

    def ignore(self: Any, *arguments: Any, **options: Any) -> None:
        pass

    def call(self: Any, *arguments: Any, **_: Any) -> Any:
        return _unwrap_decorator_call(arguments, self)

    def attribute(_: Any, name: str) -> Any:
        _refuse_dunder(name)
        return _make_stub(name)

    members = {
        "__new__": make,
        "__init__": ignore,
        "__call__": call,
        "__getattr__": attribute,
        "__getitem__": call,
    }
    return _StubMeta(name, (), members)


class _StubModule(types.ModuleType):
    """Stub module of the Neuron SDK."""

    __path__ = []  # noqa: RUF012  # as in the import system, which then searches for submodules
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        _refuse_dunder(name)
        stand_in = _make_stub(name)
        setattr(self, name, stand_in)
        return stand_in


class _StubLoader(importlib.abc.Loader):
    """Loader of stub modules for a Neuron SDK that is not installed."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StubModule(spec.name)
        if spec.name == "torch_neuronx.utils":
            vars(module)["get_platform_target"] = lambda: PLATFORM_TARGET
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""


def _make_stub_spec(fullname: str) -> importlib.machinery.ModuleSpec:
    """Return the import spec of an SDK module, as a package of stubs."""
    return importlib.machinery.ModuleSpec(fullname, _StubLoader(), is_package=True)


# -- connections


@functools.cache  # only once, even if `prepare` is called again
def _block_remote_connections() -> None:
    """Make connections to other machines fail immediately."""
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and not str(address[0]).startswith(("127.", "::1", "localhost")):
            raise OSError(f"{address[0]} is not this machine, and neuron_compat.nxd_on_cpu connects to no other one")
        connect(self, address)

    socket.socket.connect = connect_here  # type: ignore[method-assign, assignment]


# -- the job


def prepare() -> None:
    """Import neuronx-distributed without the Neuron SDK. No device is used yet, so the process may fork afterwards.

    Raises:
        xla_ckpt.UsageError: neuronx-distributed is not installed.
    """
    import torch

    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("HOST_WORLD_SIZE", "1")  # set by Neuron's launchers
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")  # boto3 needs one at import
    import_module("torch_xla.core.xla_model")  # before the finder, because it looks for a libneuronxla
    # neuronx-distributed reads a name that torch_xla has removed.
    import_module("torch_xla.core.xla_env_vars").HOST_WORLD_SIZE = "HOST_WORLD_SIZE"
    vars(torch.classes)["neuron"] = _make_stub("neuron")  # registered by a Neuron library; used in annotations
    _block_remote_connections()
    FallbackFinder(SDK_PACKAGES, _make_stub_spec).install()
    try:
        importlib.import_module("neuronx_distributed")
    except ModuleNotFoundError as error:
        if error.name != "neuronx_distributed":
            raise
        raise UsageError(
            "there is no neuronx-distributed to run on CPUs",
            hint="Install its package; the other packages of the Neuron SDK are not needed.",
        ) from error


def begin() -> None:
    """Set up the emulation in each process of a torchrun job, after `prepare`."""
    emulate(join=False)


def main() -> None:
    """Run a script with its options."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: torchrun ... -m neuron_compat.nxd_on_cpu script.py [options]")
    prepare()
    begin()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
