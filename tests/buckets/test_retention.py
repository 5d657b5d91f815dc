"""Policies of retention in a bucket, and in a directory whose tags go there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.buckets.s3_server import Fault, S3Server
from tests.cli.test_cli import call
from xla_ckpt import BestN, EveryNSteps, LatestN, SaveOptions
from xla_ckpt.storage import remote_client
from xla_ckpt.tags import retention_inputs

LOSSES = [0.9, 0.2, 0.5, 0.7, 0.4]
BEST = LatestN(1) | BestN("loss", 2)


def save(root: str, step: int, loss: float, **options: Any) -> xla_ckpt.SaveHandle:
    options = {"retention": BEST, "stale": "ignore"} | options
    model = {"w": torch.ones(3)}
    return xla_ckpt.save_checkpoint(
        root, f"step_{step}", model, user_content={"loss": loss}, options=SaveOptions(**options)
    )


def test_the_best_tags_stay(root: str, s3: S3Server) -> None:
    for step, loss in enumerate(LOSSES):
        save(root, step, loss)
    assert xla_ckpt.list_tags(root) == ["step_1", "step_4"]
    retention_inputs._metric_cache.clear()  # as in a new process
    s3.forget()
    save(root, 5, 0.3)
    manifests = [r.path for r in s3.requests if r.method == "GET" and "manifest.json" in r.path]
    assert {path.split("/")[-3] for path in manifests} >= {"step_1", "step_4"}
    assert xla_ckpt.list_tags(root) == ["step_1", "step_5"]
    assert xla_ckpt.verify(root, "step_1").ok


def test_a_manifest_that_the_store_does_not_give_fails_no_save(
    root: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_client, "MAX_RETRIES", 0)
    for step, loss in enumerate(LOSSES):
        save(root, step, loss)
    retention_inputs._metric_cache.clear()
    s3.faults.append(Fault("GET", "step_1", "before503", count=10**6))
    save(root, 5, 0.1)
    s3.faults.clear()
    assert "the tag is kept, as loss is not known of it" in caplog.text
    assert xla_ckpt.list_tags(root) == ["step_1", "step_4", "step_5"]
    save(root, 6, 0.15)
    assert xla_ckpt.list_tags(root) == ["step_5", "step_6"]


def test_local_first_keeps_the_same_in_both_places(root: str, tmp_path: Path) -> None:
    for step, loss in enumerate(LOSSES):
        save(root, step, loss, local=tmp_path).uploaded(60)
    xla_ckpt.finalize_checkpoint()
    assert xla_ckpt.list_tags(root) == xla_ckpt.list_tags(tmp_path) == ["step_1", "step_4"]
    save(root, 6, 1.0, local=tmp_path, retention=EveryNSteps(4)).uploaded(60)
    xla_ckpt.finalize_checkpoint()
    assert xla_ckpt.list_tags(root) == xla_ckpt.list_tags(tmp_path) == ["step_4", "step_6"]


def test_the_command(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    for step, loss in enumerate(LOSSES):
        save(root, step, loss, retention=None)
    assert "step_0: would be deleted" in call(capsys, "retain", root, "--best", "loss:2", "--dry-run")[1]
    assert call(capsys, "retain", root, "--best", "loss:2", "--yes")[0] == 0
    assert xla_ckpt.list_tags(root) == ["step_1", "step_4"]
