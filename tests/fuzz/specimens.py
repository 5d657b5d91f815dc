"""Small checkpoints of every layout, as this library and others write them."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import fractions
import pathlib
import re
import shutil
import uuid
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import xla_ckpt
from tests.crash.operations import module
from tests.formats import orbax_saves
from tests.runs import ROOT

TAG = "new"
"""The tag whose files are changed; before it lies the tag ``old``."""


@dataclass(frozen=True, slots=True)
class Specimen:
    """A checkpoint whose files are changed."""

    name: str
    make: Callable[[Path], object]
    """Makes it in a directory."""

    digests: bool = False
    """Whether every byte that a load needs is covered by a digest."""

    fits: bool = True
    """Whether it has the parameters of the model that is loaded."""

    single: str = ""
    """The name of the checkpoint, where it lies in the directory by itself, without tags."""

    def path(self, root: Path) -> Path:
        """What a caller passes."""
        return root / self.single if self.single else root

    @property
    def tag(self) -> str | None:
        """What a caller passes besides."""
        return None if self.single else TAG


def optimizer_of(made: torch.nn.Module, number: float) -> torch.optim.Optimizer:
    """An optimizer with state."""
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.125)
    for parameter in made.parameters():
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    return optimizer


def _saved(root: Path, **options: Any) -> None:
    for number, tag in enumerate(("old", TAG), 1):
        made = module(number)
        optimizer = optimizer_of(made, number)
        xla_ckpt.save_checkpoint(root, tag, made, optimizer, user_content={"step": number}, num_workers=1, **options)
    xla_ckpt.finalize_checkpoint()


def _values() -> dict[str, Any]:
    """A tree with a value of every kind."""
    return {
        "w": torch.arange(5000, dtype=torch.float32).reshape(50, 100),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7),
        "n": np.arange(6).reshape(2, 3),
        "plain": [1, 2.5, float("inf"), None, True, "text", b"bytes", bytearray(b"x"), 1 + 2j, range(3), ...,
                  (1, (2,))],
        "sets": [{1, 2}, frozenset({"a"}), slice(1, None, 2), collections.deque([1, 2], maxlen=3)],
        "dicts": [{1: "a", (1, 2): "b"}, collections.OrderedDict(a=1), collections.Counter("aab"),
                  collections.defaultdict(list, a=[1])],
        "times": [datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), datetime.date(2026, 1, 2), datetime.time(1),
                  datetime.timedelta(1)],
        "numbers": [decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.UUID(int=7), np.float32(1), np.str_("a"),
                    np.array(["a", "bc"]), np.dtype("int16"), np.datetime64("2026-01-01")],
        "torch": [torch.float32, torch.device("cpu"), torch.Size((1, 2)), pathlib.Path("a/b"), torch.Generator()],
        "zones": [zoneinfo.ZoneInfo("UTC"), datetime.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC"))],
        "c": [array.array("i", [1, 2]), np.void(b"abc"), np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])],
        "large": [10**5000, re.ASCII | re.IGNORECASE],
    }  # fmt: skip


def _tree(root: Path) -> None:
    for tag in ("old", TAG):
        # Digests tell files of different bytes apart: no array of one tag is in the other.
        tree = {"number": tag, **_values()}
        tree["w"] = tree["w"] + len(xla_ckpt.list_tags(root))
        tree["model"] = dict(module(len(xla_ckpt.list_tags(root))).state_dict())
        tree["shared"] = tree["w"]
        xla_ckpt.save(root, tag, tree)


def _bare(layout: str) -> Callable[[Path], None]:
    """As the other library has it: without our manifest and digests."""

    def make(root: Path) -> None:
        _saved(root, layout=layout)
        for tag in ("old", TAG):
            for path in (root / tag).iterdir():
                if path.name in ("manifest.json", "_CHECKPOINT_METADATA", "commit_success.txt"):
                    path.unlink()
                elif path.name.startswith("digests"):
                    path.unlink()

    return make


def _converted(root: Path, to: str, name: str, **options: Any) -> None:
    _saved(root / "source")
    xla_ckpt.convert(
        root / "source", root / name, TAG, to=to, options=xla_ckpt.ConvertOptions(num_workers=1), **options
    )
    shutil.rmtree(root / "source")


def _replicas(root: Path) -> None:
    _saved(root / "source")
    for tag in ("old", TAG):
        xla_ckpt.convert(
            root / "source", root, tag, to="pt", mesh="tp=2,dp=2", zero1=False, shardings=[("weight", ("tp", None))]
        )
    shutil.rmtree(root / "source")


def _copied(fixture: str) -> Callable[[Path], object]:
    return lambda root: shutil.copytree(ROOT / "tests/fixtures" / fixture, root / "ckpt")


def _stock_dcp(root: Path) -> None:
    import torch.distributed.checkpoint as dcp

    made = module(2)
    dcp.save({"model": made.state_dict(), "plain": [1, "a", (2, 3)], "step": 7}, checkpoint_id=root / "ckpt")


def _orbax(name: str) -> Callable[[Path], object]:
    """One that real orbax writes, which has no digests."""

    def make(root: Path) -> None:
        orbax_saves.save_all(root / "all")
        (root / "all" / name).rename(root / "ckpt")
        shutil.rmtree(root / "all")

    return make


SPECIMENS = {
    specimen.name: specimen
    for specimen in (
        Specimen("native", _saved, digests=True),
        Specimen("native, a tree", _tree, digests=True),
        Specimen("xser", lambda root: _saved(root, layout="xser"), digests=True),
        Specimen("pt", lambda root: _saved(root, layout="pt"), digests=True),
        Specimen("pt, four ranks", _replicas, digests=True),
        Specimen("dcp", lambda root: _saved(root, layout="dcp"), digests=True),
        Specimen("smp", lambda root: _saved(root, layout="smp"), digests=True),
        Specimen("torch_checkpointing of ours", lambda root: _saved(root, layout="torch_checkpointing"), digests=True),
        Specimen("torch", lambda root: _converted(root, "torch", "one.pt"), single="one.pt"),
        Specimen("safetensors", lambda root: _converted(root, "safetensors", "hf"), single="hf"),
        Specimen("xser of others", _bare("xser")),
        Specimen("pt of others", _bare("pt")),
        Specimen("smp of others", _bare("smp")),
        Specimen("stock dcp", _stock_dcp, single="ckpt"),
        Specimen("stock dcp, fsdp", _copied("dcp/fsdp2_uneven/ckpt"), fits=False, single="ckpt"),
        Specimen("orbax", _orbax("host"), fits=False, single="ckpt"),
        Specimen("orbax, files", _orbax("host-files"), fits=False, single="ckpt"),
        Specimen("torch_checkpointing", _copied("torch_checkpointing/items"), fits=False, single="ckpt"),
        Specimen("torch_checkpointing, four ranks", _copied("torch_checkpointing/fsdp2_tp"), fits=False, single="ckpt"),
        Specimen("hugging face", _copied("dcp/hugging_face/ckpt"), fits=False, single="ckpt"),
    )
}
"""Every specimen by its name."""
