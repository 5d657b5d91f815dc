"""What tests of uploads have in common: a store that is slow or away, and what is saved."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.buckets.s3_server import Fault, S3Server
from xla_ckpt import SaveOptions
from xla_ckpt.cli.main import main

SOON = 60.0


class Gate(Fault):
    """Requests that the server has got, and answers when `go` is set."""

    def __init__(self, part: str, method: str = "PUT", count: int = 1) -> None:
        self.method, self.part, self.kind, self.count = method, part, "slow", count
        self.reached, self.go = threading.Event(), threading.Event()

    @property
    def seconds(self) -> float:  # type: ignore[override]
        self.reached.set()
        assert self.go.wait(SOON), "nobody has opened the gate"
        return 0.0


class Away:
    """The store answers nothing but errors, until it is back."""

    def __init__(self, s3: S3Server) -> None:
        self._s3 = s3
        s3.faults += [Fault(method, "run", "before503", count=10**6) for method in ("GET", "PUT", "HEAD")]

    def is_back(self) -> None:
        self._s3.faults.clear()


def tree(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(1000) + number, "v": torch.ones(3)}


def save(root: str, local: Path, tag: str, number: int = 0, **more: Any) -> xla_ckpt.SaveHandle:
    return xla_ckpt.save(root, tag, tree(number), options=SaveOptions(local=local), **more)


def is_number(root: object, number: int, tag: str | None = None, **more: Any) -> bool:
    restored = xla_ckpt.restore(root, tag, **more).tree  # type: ignore[arg-type]
    return torch.equal(restored["w"], tree(number)["w"])


def bytes_of(root: str | Path, tag: str) -> dict[str, bytes]:
    """The files of a tag, but for what the directory and the bucket each have for themselves."""
    from xla_ckpt.storage.base import read_file
    from xla_ckpt.storage.resolve import open_store
    from xla_ckpt.tags.resolve import open_root

    directory = open_root(open_store(root)).open(tag)
    files = {path: read_file(directory, path) for path in directory.list_files()}
    directory.close()
    return {path: data for path, data in files.items() if path not in ("upload.json", "report.json")}


def puts(s3: S3Server) -> Counter[str]:
    """How often each file of a tag went up."""
    return Counter(r.path for r in s3.requests if r.method == "PUT" and "/." in r.path and "/run/." not in r.path)


def attempt_of(path: str) -> str:
    return path.partition("/.")[2].partition("/")[0]


def listed(root: str, local: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Where each tag is, as ``xla-ckpt ls`` says it."""
    capsys.readouterr()
    assert main(["ls", root, "--local", str(local), "--json"]) == 0
    return {t["tag"]: t["where"] for t in json.loads(capsys.readouterr().out)["tags"]}


def damage(local: Path, tag: str) -> None:
    (file,) = (local / tag).rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
