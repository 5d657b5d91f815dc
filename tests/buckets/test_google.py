"""``gs://``, against a small server that answers as Google's documentation says. The real one is not verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

import xla_ckpt
from tests.buckets.gcs_server import GcsServer
from xla_ckpt.storage.base import Changed
from xla_ckpt.storage.door import store_at


@pytest.fixture
def gcs(use_store: Callable[[Mapping[str, str]], None]) -> Iterator[GcsServer]:
    server = GcsServer()
    use_store(server.environment)
    yield server
    xla_ckpt.finalize_checkpoint()  # what a save does after its commit would wait for a server that is gone
    server.close()


def test_saves_and_loads(gcs: GcsServer) -> None:
    root = "gs://bucket/run"
    state = {"w": torch.arange(10_000_000, dtype=torch.float32), "v": torch.ones(3)}
    for tag in "abc":
        xla_ckpt.save(root, tag, state, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(root) == ["c"]
    tree = xla_ckpt.restore(root).tree
    assert torch.equal(tree["w"], state["w"])
    assert torch.equal(tree["v"], state["v"])
    assert xla_ckpt.verify(root).ok
    xla_ckpt.save(root, "d", state, num_kept_ckpts=1)
    xla_ckpt.save(root, "e", state, num_kept_ckpts=1)
    assert not [key for key in gcs.objects if key.startswith("run/a/")], "a retired tag is swept"


def test_a_generation_decides(gcs: GcsServer) -> None:
    store = store_at("gs://bucket/run").object_store
    assert store is not None
    store.check_conditions()
    store.write_record("r", b"1", None)
    assert store.read_record("r") is not None
    data, version = store.read_record("r") or (b"", "")
    store.write_record("r", b"2", version)
    for stale in (None, version):
        with pytest.raises(Changed):
            store.write_record("r", b"3", stale)
    assert (store.read_record("r") or (b"", ""))[0] == b"2"
    assert data == b"1"
