"""The torch device "sim": an accelerator that is simulated on the CPU (sim.cpp), as torch.accelerator knows it.

It is compiled when it is first asked for, and kept in build/ for the next time. It can be loaded once in a process, and
not beside torch_xla, so that tests have it in a process of its own: `run_alone(function)`, in which `load()` is called.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import shutil
import types
from pathlib import Path
from typing import Any

import torch

from tests.runs import ROOT

SOURCE = Path(__file__).with_name("sim.cpp")
BUILD = ROOT / "build" / f"sim-{torch.__version__}"
LIBRARY = BUILD / "xla_ckpt_sim.so"


def missing() -> str | None:
    """What it takes to compile the device, and is not here."""
    return next(
        (f"no {program} to compile the simulated device" for program in ("c++", "ninja") if not shutil.which(program)),
        None,
    )


def build() -> None:
    """Compile the device; about 13 s of one core. A library that is newer than its source stays."""
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > SOURCE.stat().st_mtime:
        return
    from torch.utils import cpp_extension

    BUILD.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        "xla_ckpt_sim", [str(SOURCE)], build_directory=str(BUILD), extra_cflags=["-O0", "-g0"], is_python_module=False
    )


@functools.cache
def load() -> Any:
    """Make "sim" the accelerator of this process. What is returned sets its bandwidth, and counts copies."""
    torch.utils.rename_privateuse1_backend("sim")
    loader = importlib.machinery.ExtensionFileLoader("xla_ckpt_sim", str(LIBRARY))
    spec = importlib.util.spec_from_loader("xla_ckpt_sim", loader)
    assert spec is not None
    device = importlib.util.module_from_spec(spec)
    loader.exec_module(device)
    torch._register_device_module("sim", _module(device))  # type: ignore[no-untyped-call]
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return device


def _module(device: Any) -> types.ModuleType:
    """What torch calls ``torch.sim``."""
    module = types.ModuleType("torch.sim")
    random = [torch.zeros(16, dtype=torch.uint8)]

    def set_rng_state(state: torch.Tensor, number: object = "sim") -> None:
        random[0] = state.clone()

    members: dict[str, Any] = {
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "synchronize": lambda where=None: device.synchronize(),
        "manual_seed_all": lambda seed: random[0].fill_(seed % 256),
        "get_rng_state": lambda number="sim": random[0].clone(),
        "set_rng_state": set_rng_state,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module
