"""Saves into a bucket that share files with an earlier tag: the server copies them."""

from __future__ import annotations

import pytest
import torch

import xla_ckpt
from tests.buckets.s3_server import S3Server

WIDTH = 600


def save(root: str, seed: int) -> xla_ckpt.SaveReport:
    state = {"still": torch.ones(WIDTH, WIDTH), "trained": torch.full((9,), float(seed))}
    options = xla_ckpt.SaveOptions(share=True, stale="ignore")
    return xla_ckpt.save_checkpoint(root, f"step_{seed}", state, options=options, num_kept_ckpts=1).result()


def test_the_server_copies_what_has_not_changed(root: str, s3: S3Server) -> None:
    reports = []
    for seed in range(4):
        s3.forget()
        reports.append(save(root, seed))
    assert [report.shared for report in reports] == [0, 0, WIDTH * WIDTH * 4, WIDTH * WIDTH * 4]
    assert reports[3].nbytes == 9 * 4
    copies = [r.headers["x_amz_copy_source"] for r in s3.requests if "x_amz_copy_source" in r.headers]
    assert [source.rpartition("/")[2] for source in copies] == ["00001-of-00001-shared-1.safetensors"]
    assert xla_ckpt.list_tags(root) == ["step_3"]
    assert xla_ckpt.verify(root).ok
    tree = xla_ckpt.restore(root).tree["model"]
    assert torch.equal(tree["still"], torch.ones(WIDTH, WIDTH))
    assert torch.equal(tree["trained"], torch.full((9,), 3.0))


def test_what_the_server_does_not_copy_is_sent(
    root: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from xla_ckpt.storage.remote import RemoteDirectory

    def refuses(*_: object) -> None:
        raise OSError(5, "The specified copy source is larger than the maximum allowable size")

    monkeypatch.setattr(RemoteDirectory, "link", refuses)
    assert [save(root, seed).shared for seed in range(3)] == [0, 0, 0]
    assert xla_ckpt.verify(root).ok
    assert "written again, and not shared" in caplog.text
