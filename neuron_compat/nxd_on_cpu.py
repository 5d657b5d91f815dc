"""The real neuronx-distributed on CPUs: an installed package runs under torchrun, one process for each device.

    torchrun --nproc-per-node=4 -m neuron_compat.nxd_on_cpu train.py --its-own-options

runs a script as it is. A program may also call `prepare` before it imports neuronx-distributed, and `begin` before its
`init_process_group`. What runs is neuronx-distributed's own code: layers, pipelines, experts, LoRA, ZeRO-1 and its
checkpoints. Three things are replaced:

- Modules of the Neuron SDK that it imports, such as ``torch_neuronx`` and ``neuronxcc``. They can be imported, and what
  is in them stands for anything; kernels compute nothing.
- torch_xla's collectives and queries, by `neuron_compat.emulate`.
- Connections to other machines are refused: neuronx-distributed asks an address of AWS for the type of the machine, and
  would wait for an answer.
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
"""The packages of the Neuron SDK that neuronx-distributed imports."""

PLATFORM_TARGET = "trn1"
"""The machine that neuronx-distributed is told of."""


# -- what the Neuron SDK has


class _StubMeta(type):
    """The class of classes that have every attribute, each another such class."""

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
    """Raise AttributeError for a special name such as `__len__`: Python asks objects for those that they may lack."""
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)


def _unwrap_decorator_call(arguments: Sequence[Any], otherwise: Any) -> Any:
    """What a decorator is given, if that is what was called: the function stays as it is."""
    is_decorator = len(arguments) == 1 and isinstance(arguments[0], types.FunctionType | type)
    return arguments[0] if is_decorator else otherwise


def _make_stub(name: str) -> Any:
    """A class of this name: a type for annotations, a base class, a decorator, or a function that does nothing."""

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
    """A module of the Neuron SDK."""

    __path__ = []  # noqa: RUF012  # as the import system has it: modules below it are looked for
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        _refuse_dunder(name)
        stand_in = _make_stub(name)
        setattr(self, name, stand_in)
        return stand_in


class _StubLoader(importlib.abc.Loader):
    """Makes the modules of the Neuron SDK, where they are not installed."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StubModule(spec.name)
        if spec.name == "torch_neuronx.utils":
            vars(module)["get_platform_target"] = lambda: PLATFORM_TARGET
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def _make_stub_spec(fullname: str) -> importlib.machinery.ModuleSpec:
    """How a module of the SDK is imported: as a package of stand-ins."""
    return importlib.machinery.ModuleSpec(fullname, _StubLoader(), is_package=True)


# -- connections


@functools.cache  # once, however often `prepare` is called
def _block_remote_connections() -> None:
    """Refuse connections to other machines at once."""
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and not str(address[0]).startswith(("127.", "::1", "localhost")):
            raise OSError(f"{address[0]} is not this machine, and neuron_compat.nxd_on_cpu connects to no other one")
        connect(self, address)

    socket.socket.connect = connect_here  # type: ignore[method-assign, assignment]


# -- the job


def prepare() -> None:
    """Import neuronx-distributed, without the Neuron SDK. No device is used yet: a process may fork after it.

    Raises:
        xla_ckpt.UsageError: There is no neuronx-distributed.
    """
    import torch

    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("HOST_WORLD_SIZE", "1")  # launchers of Neuron's set it
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")  # boto3 asks for one where it is imported
    import_module("torch_xla.core.xla_model")  # before the finder: it looks for a libneuronxla that is one
    # neuronx-distributed reads a name that torch_xla has no more.
    import_module("torch_xla.core.xla_env_vars").HOST_WORLD_SIZE = "HOST_WORLD_SIZE"
    vars(torch.classes)["neuron"] = _make_stub("neuron")  # a library of Neuron's registers it, for annotations
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
    """In each process of a torchrun job, after `prepare`: torch_xla answers for all processes of it."""
    emulate(join=False)


def main() -> None:
    """Run a script, with its options."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: torchrun ... -m neuron_compat.nxd_on_cpu script.py [options]")
    prepare()
    begin()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
