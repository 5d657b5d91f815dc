"""Checkpoints of more files than the process may have open: every call works in every layout."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import xla_ckpt
import xla_ckpt.dcp
from tests.jobs import run_alone

FILES = 120
MORE = 40
"""Descriptors that the process may have beside those that it has."""

LARGE = 20
"""Every so many of the arrays is large enough to be read around the page cache, which takes more descriptors."""


def arrays() -> dict[str, torch.Tensor]:
    return {f"w{i:03}": torch.full((1 << 18 if i % LARGE == 0 else 5,), float(i)) for i in range(FILES)}


def by_our_save(layout: str, **options: Any) -> Callable[[Path], Path]:
    def save(path: Path) -> Path:
        xla_ckpt.save_checkpoint(path, "t", arrays(), layout=layout, options=xla_ckpt.SaveOptions(**options))
        return path

    return save


def by_stock_dcp(path: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(path, single_file_per_rank=False)
    dcp.save({"model": arrays()}, storage_writer=writer)
    return path


def by_hugging_face(path: Path) -> Path:
    path.mkdir()
    places = {}
    for i, (name, array) in enumerate(arrays().items()):
        places[name] = f"model-{i + 1:05}-of-{FILES:05}.safetensors"
        safetensors.torch.save_file({name: array}, path / places[name])
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path


def by_ranks_of_dcp(path: Path) -> Path:
    """As HuggingFaceStorageWriter leaves a file of each of many ranks."""
    path.mkdir()
    for i, (name, array) in enumerate(arrays().items()):
        offsets = json.dumps({name: {"saved_offsets": [0]}})
        about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": offsets}
        file = path / f"shard-{i + 1:05}-model-00001-of-00001.safetensors"
        safetensors.torch.save_file({name: array}, file, metadata=about)
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "xser": by_our_save("xser"),
    "xser, with parity": by_our_save("xser", parity="file"),
    "orbax": by_our_save("orbax"),
    "native": by_our_save("native"),
    "stock DCP": by_stock_dcp,
    "Hugging Face": by_hugging_face,
    "ranks of DCP": by_ranks_of_dcp,
}


def with_few(root: Path, name: str) -> list[str]:
    """Try all calls in a process that may have few descriptors; those that failed."""
    path = WRITERS[name](root / "written")
    files = sum(len(names) for _, _, names in os.walk(path))
    limit = max(map(int, os.listdir("/proc/self/fd"))) + MORE
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    wanted = arrays()

    def load() -> bool:
        mine = {name: torch.zeros_like(array) for name, array in wanted.items()}
        xla_ckpt.load_checkpoint(path, model=mine)
        return same(mine)

    def same(found: Any) -> bool:
        return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)

    def restored(where: Path) -> bool:
        tree = xla_ckpt.restore(where).tree
        return same(tree.get("model", tree))

    def convert(to: str) -> bool:
        xla_ckpt.convert(path, root / f"to {to}", to=to)
        return restored(root / f"to {to}")

    def repair() -> bool:
        next(path.rglob("tensor_7.pt")).unlink()
        return bool(xla_ckpt.repair(path)) and xla_ckpt.verify(path).ok

    def load_by_dcp() -> bool:
        mine = {name: torch.zeros_like(array) for name, array in wanted.items()}
        xla_ckpt.dcp.load({"model": mine}, checkpoint_id=path)
        return same(mine)

    # Not all of them hold a model and nothing else, or say how large it is meant to be.
    other = "dcp" if name in ("Hugging Face", "ranks of DCP") else "xser"

    calls: dict[str, Callable[[], object]] = {
        "load": load,
        "restore": lambda: restored(path),
        "verify": lambda: xla_ckpt.verify(path).ok,
        "show": lambda: len(xla_ckpt.Checkpoints(path).show().arrays) == FILES,
        "sample": lambda: xla_ckpt.Checkpoints(path).sample(xla_ckpt.Checkpoints(path).show().arrays[9].leaf),
        "diff": lambda: xla_ckpt.diff(path, path).same,
        "to native": lambda: convert("native"),
        f"to {other}": lambda: convert(other),
        "diff with another": lambda: xla_ckpt.diff(path, root / f"to {other}").same,
        "save": lambda: xla_ckpt.save_checkpoint(root / "saved", "t", wanted, layout="xser"),
        "restore of the save": lambda: restored(root / "saved"),
    }
    if name == "xser, with parity":
        calls["repair"] = repair
    if name == "stock DCP":
        calls["dcp.load"] = load_by_dcp
    failed = [] if files >= FILES or name == "native" else [f"{files} files alone"]
    for call, does in calls.items():
        try:
            if not does():
                failed.append(f"{call}: other values")
        except Exception as error:
            failed.append(f"{call}: {type(error).__name__}: {error}")
    return failed


@pytest.mark.parametrize("name", WRITERS)
def test_more_files_than_descriptors(name: str, tmp_path: Path) -> None:
    assert run_alone(with_few, tmp_path, name) == []
