"""The checkpoints that stock torch.distributed.checkpoint wrote (tests/fixtures/dcp), and what is really in them."""

from __future__ import annotations

import datetime
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from tests.same import same

FOLDER = Path(__file__).resolve().parents[1] / "fixtures/dcp"


@dataclass(frozen=True)
class Stock:
    """One checkpoint: a fixture, or one tag of a fixture that has several."""

    name: str
    tag: str = ""

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def root(self) -> Path:
        """The directory in which the tags are."""
        return self.folder / "ckpt" if self.tag else self.folder

    @property
    def path(self) -> Path:
        """The directory that DCP wrote."""
        return self.folder / "ckpt" / self.tag

    @property
    def recipe(self) -> dict[str, Any]:
        """`kind`, `about`, `torch`, `ranks`; and `reader`, if another one than FileSystemReader, or none, reads it.

        `needs_torch` is the version that wrote it, if older ones do not read it.
        """
        recipe: dict[str, Any] = json.loads((self.folder / "recipe.json").read_text())
        return recipe

    @property
    def readable(self) -> bool:
        """Whether `dcp.load(checkpoint_id=path)` of the present torch reads it."""
        present = tuple(int(part) for part in torch.__version__.split(".")[:2])
        return "reader" not in self.recipe and present >= tuple(self.recipe.get("needs_torch", (0,)))

    def contents(self) -> dict[str, torch.Tensor]:
        """The whole, unsharded tensor of each tensor item, by DCP's key."""
        return {key: tensor for key, tensor in self._tensors().items() if not key.startswith("$/")}

    def objects(self) -> dict[str, Any]:
        """The value of each other item, by DCP's key."""
        tensors = self._tensors()
        return {key: _value(form, tensors) for key, form in self._json()["objects"].items()}

    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """Where each item lies in the state that was saved, by DCP's key."""
        return {key: tuple(path) for key, path in self._json()["paths"].items()}

    def _json(self) -> dict[str, Any]:
        text: dict[str, Any] = json.loads((self.folder / f"objects{self._dot}.json").read_text())
        return text

    def _tensors(self) -> dict[str, torch.Tensor]:
        with safe_open(self.folder / f"contents{self._dot}.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
            tensors = {key: file.get_tensor(key) for key in file.keys()}
            waves = json.loads(file.metadata()["complex"])
        return tensors | {key: torch.view_as_complex(tensors[key]) for key in waves}

    @property
    def _dot(self) -> str:
        return f".{self.tag}" if self.tag else ""

    def __str__(self) -> str:
        return f"{self.name}-{self.tag}" if self.tag else self.name


def _all() -> list[Stock]:
    found = []
    for recipe in sorted(FOLDER.glob("*/recipe.json")):
        tags = json.loads(recipe.read_text()).get("tags", [""])
        found += [Stock(recipe.parent.name, tag) for tag in tags]
    return found


STOCK = _all()


def stock(name: str, tag: str = "") -> Stock:
    """One of them by its name."""
    found = Stock(name, tag)
    assert found in STOCK, f"{found} is none of {[str(s) for s in STOCK]}"
    return found


def _value(form: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The way back from make.py's `plain`."""
    if isinstance(form, list):
        return [_value(item, tensors) for item in form]
    if not isinstance(form, dict):
        return form
    if len(form) != 1 or not next(iter(form)).startswith("$"):
        return {key: _value(item, tensors) for key, item in form.items()}
    ((kind, inside),) = form.items()
    if kind == "$tensor":
        return tensors[inside]
    return _KINDS[kind](_value(inside, tensors))


_KINDS: dict[str, Callable[[Any], Any]] = {
    "$dict": lambda pairs: dict(map(tuple, pairs)),
    "$OrderedDict": lambda pairs: OrderedDict(map(tuple, pairs)),
    "$Size": torch.Size,
    "$tuple": tuple,
    "$set": set,
    "$bytes": bytes.fromhex,
    "$complex": lambda parts: complex(*parts),
    "$scalar": lambda parts: np.frombuffer(bytes.fromhex(parts[1]), parts[0])[0],
    "$ndarray": lambda parts: np.frombuffer(bytes.fromhex(parts[2]), parts[0]).reshape(parts[1]).copy(),
    "$datetime": datetime.datetime.fromisoformat,
    "$timedelta": lambda parts: datetime.timedelta(*parts),
    "$dtype": lambda name: getattr(torch, name),
    "$device": torch.device,
}


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What is not bit for bit as it should be."""
    bad = [f"{key} is missing" for key in wanted.keys() - found.keys()]
    bad += [f"{key} is too much" for key in found.keys() - wanted.keys()]
    return sorted(bad + [f"{key} differs" for key in wanted.keys() & found.keys() if not same(found[key], wanted[key])])
