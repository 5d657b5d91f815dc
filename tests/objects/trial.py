"""One try of an object: trained, saved, loaded into a fresh one, compared bit for bit, and trained on.

A `Program` is what a user would write: it makes a step and gives its loss, and says what is saved of it.
"""

from __future__ import annotations

import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import xla_ckpt
from xla_ckpt.core.manifest import manifest_json

STEPS = 3
"""Steps before the save, and after it."""


class Program(Protocol):
    """A training program."""

    def step(self) -> float:
        """Train one step; its loss."""

    def save(self, root: Path, *, asynchronous: bool) -> xla_ckpt.SaveHandle:
        """Save it under the tag `a`."""

    def load(self, root: Path) -> None:
        """Load it."""

    def state(self) -> Any:
        """All that has to be equal after a load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something to be tried."""

    package: str
    """The distribution that it is from."""

    name: str
    make: Callable[[int], Program]
    """Makes the program, from a seed."""

    xfail: str = ""
    """What the error has to say, where it is known to fail."""

    because: str = ""
    """Why it is known to fail: what the table says of it."""

    over_old: bool = True
    """Whether it is loaded over old state, too, and not only into a fresh object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case."""

    case: Case
    error: str = ""
    """Why it failed; empty if it did not."""

    expected: bool = False
    """Whether that was known."""

    pickled: int = 0
    """Objects in the tag that are pickled."""


@dataclass(slots=True)
class Training:
    """The usual objects of a training run."""

    model: Any
    optimizer: Any
    loss: Callable[[], torch.Tensor]
    scheduler: Any = None
    extras: dict[str, Any] | None = None
    before_load: Callable[[], object] = lambda: None

    def step(self) -> float:
        """Train one step; its loss."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward(create_graph=bool(getattr(self.optimizer, "wants_graph", False)))
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return float(loss.detach())

    def _objects(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "extras": self.extras or {},
        }

    def save(self, root: Path, *, asynchronous: bool) -> xla_ckpt.SaveHandle:
        """Save it under the tag `a`."""
        return xla_ckpt.save_checkpoint(root, "a", **self._objects(), async_save=asynchronous)

    def load(self, root: Path) -> None:
        """Load it. What is pickled is this program's own."""
        self.before_load()
        xla_ckpt.load_checkpoint(root, "a", **self._objects(), trust_pickle=True)

    def state(self) -> Any:
        """All that has to be equal after a load."""
        held = {k: v.state_dict() for k, v in self._objects().items() if hasattr(v, "state_dict")}
        return held | {k: v.state_dict() for k, v in (self.extras or {}).items()}


def bits(value: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, type, bits) of everything in a state."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, about = value.__tensor_flatten__()
        yield path, kind, str(about)
        for name in names:
            yield from bits(getattr(value, name), f"{path}/{name}")
    elif isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        yield path, f"{kind} {value.dtype} {tuple(value.shape)} {value.device.type}", data.hex()
    elif isinstance(value, np.ndarray):
        yield path, f"{value.dtype} {value.shape}", value.tobytes().hex()
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from bits(value[key], f"{path}/{key}")
    elif isinstance(value, list | tuple):
        yield path, kind, str(len(value))
        for number, item in enumerate(value):
            yield from bits(item, f"{path}/{number}")
    elif type(value).__repr__ is object.__repr__ or callable(value):
        yield from bits(getattr(value, "__dict__", {}), f"{path}({kind})")
    else:
        yield path, kind, repr(value)


def differences(one: Any, other: Any) -> list[str]:
    """Paths under which two states differ."""
    first, second = set(bits(one)), set(bits(other))
    return sorted({path for path, _, _ in first ^ second})


def _tried(case: Case, root: Path, *, asynchronous: bool) -> int:
    """Try it once; how many objects are pickled.

    Raises:
        AssertionError: It does not continue as it was.
    """
    torch.manual_seed(0)
    program = case.make(0)
    for _ in range(STEPS):
        program.step()
    expected = list(bits(program.state()))
    torch.manual_seed(1)
    handle = program.save(root, asynchronous=asynchronous)
    losses = [program.step() for _ in range(STEPS)]
    handle.result()
    torch.manual_seed(2)
    for stale in (False, True) if case.over_old else (False,):
        fresh = case.make(3)
        if stale:
            fresh.step()
        fresh.load(root)
        wrong = {path for path, _, _ in set(expected) ^ set(bits(fresh.state()))}
        assert not wrong, f"differs after the load{' over old state' if stale else ''}: {sorted(wrong)[:3]}"
        torch.manual_seed(1)
        again = [fresh.step() for _ in range(STEPS)]
        assert losses == again, f"losses differ after the load: {again}, not {losses}"
    assert xla_ckpt.verify(root, "a").ok
    return len(manifest_json.parse_manifest((root / "a" / "manifest.json").read_bytes()).object_files)


def tried(case: Case) -> Outcome:
    """Try a case, saved in the foreground and in the background."""
    root = Path(tempfile.mkdtemp(prefix="objects-"))
    pickled = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for asynchronous in (False, True):
                pickled = _tried(case, root / str(asynchronous), asynchronous=asynchronous)
    except Exception as error:
        if case.xfail and case.xfail in str(error):
            return Outcome(case=case, error=case.because, expected=True)
        traceback.print_exc()
        return Outcome(case=case, error=f"{type(error).__name__}: {error}".splitlines()[0][:160])
    finally:
        shutil.rmtree(root)
    return Outcome(case=case, pickled=pickled)
