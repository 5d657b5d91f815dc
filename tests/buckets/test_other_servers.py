"""``s3://`` against other servers than moto: `make test-servers` brings them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
import torch
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

import xla_ckpt
from tests.buckets.s3_server import S3Server
from xla_ckpt.errors import StorageError, UsageError
from xla_ckpt.storage.remote_client import get_client

SERVERS = Path(__file__).parents[2] / ".servers"

S3RVER = Path(__file__).parents[2] / ".s3rver/node_modules/.bin/s3rver"

needs_servers = pytest.mark.skipif(not (SERVERS / ".ready").exists(), reason="make test-servers brings these servers")

TREE = {"w": torch.arange(1000.0), "v": torch.ones(3)}


@contextmanager
def served(
    command: list[str], port: int, monkeypatch: pytest.MonkeyPatch, key: str = "testing", **env: str
) -> Iterator[str]:
    """Start a server; the name of a bucket there."""
    url = f"http://127.0.0.1:{port}"
    path = os.pathsep.join(filter(None, (str(SERVERS), os.environ.get("PYTHONPATH"))))
    server = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, **env}, stderr=subprocess.DEVNULL)
    keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": key, "AWS_REGION": "us-east-1"}
    try:
        for name, value in {**keys, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        get_client.cache_clear()
        name = f"bucket-{uuid.uuid4().hex[:8]}"
        how = Config(retries={"max_attempts": 0}, connect_timeout=1, s3={"addressing_style": "path"})
        s3 = boto3.client("s3", endpoint_url=url, region_name="us-east-1", config=how)
        while True:
            try:
                s3.create_bucket(Bucket=name)
                break
            except (BotoCoreError, ClientError):
                assert server.poll() is None, "the server has ended"
        yield name
    finally:
        xla_ckpt.finalize_checkpoint()
        get_client.cache_clear()
        server.terminate()
        server.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@needs_servers
def test_ministack(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    env = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3"}
    command = [sys.executable, str(SERVERS / "bin/ministack")]
    with served(command, port, monkeypatch, **env) as bucket:
        root = f"s3://{bucket}/run"
        large = {"w": torch.arange(5_000_000.0), "v": torch.ones(3)}
        for tag in "abcd":
            xla_ckpt.save(root, tag, large if tag == "d" else TREE, num_kept_ckpts=2)
        assert xla_ckpt.list_tags(root) == ["c", "d"]
        assert torch.equal(xla_ckpt.restore(root).tree["w"], large["w"])
        assert torch.equal(xla_ckpt.restore(root, "c").tree["w"], TREE["w"])
        assert xla_ckpt.verify(root).ok
        xla_ckpt.save(root, "c", {"w": torch.zeros(2)})
        assert xla_ckpt.list_tags(root) == ["d", "c"]
        with pytest.raises(StorageError, match="no such bucket"):
            xla_ckpt.list_tags("s3://nobody-has-made-it/run")


def objects_of_a_run(s3: S3Server) -> dict[str, bytes]:
    """The objects of a root with one tag, which a server that keeps conditions has got: key -> content."""
    root = f"s3://{s3.new_bucket()}/run"
    xla_ckpt.save(root, "a", TREE)
    xla_ckpt.finalize_checkpoint()
    kept = get_client("s3", root.split("/")[2])
    return {key: bytes(kept.read_version(key)[0]) for key in kept.list_keys("run/")}


@needs_servers
def test_rclone_ignores_conditions_and_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, s3: S3Server
) -> None:
    """Loads fail, too: where a part is asked for that is as long as the file, it sends the file with status 200."""
    files, port = objects_of_a_run(s3), free_port()
    command = [str(SERVERS / "bin/rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key"]
    with served([*command, "testing,testing", str(tmp_path)], port, monkeypatch) as bucket:
        for key, data in files.items():
            (tmp_path / bucket / key).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / bucket / key).write_bytes(data)
        root = f"s3://{bucket}/run"
        assert xla_ckpt.list_tags(root) == ["a"]
        with pytest.raises(UsageError, match=r"ignores the conditions of requests.*Save to a store that has"):
            xla_ckpt.save(root, "b", TREE)
        assert xla_ckpt.list_tags(root) == ["a"]
        assert (tmp_path / bucket / "run/.ledger").read_bytes() == files["run/.ledger"]
        with pytest.raises(StorageError, match="sends all of a file where a part is asked for"):
            xla_ckpt.restore(root, "a")


@pytest.mark.skipif(not S3RVER.exists(), reason="npm install --prefix .s3rver s3rver@3.7.1 brings it")
def test_s3rver_ignores_conditions_and_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, s3: S3Server
) -> None:
    """What another store has written is read from it."""
    files, port = objects_of_a_run(s3), free_port()
    command = [str(S3RVER), "--directory", str(tmp_path), "--address", "127.0.0.1", "--port", str(port), "--silent"]
    with served(command, port, monkeypatch, key="S3RVER") as bucket:
        there = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1")
        for key, data in files.items():
            there.put_object(Bucket=bucket, Key=key, Body=data)
        root = f"s3://{bucket}/run"
        assert xla_ckpt.list_tags(root) == ["a"]
        with pytest.raises(UsageError, match=r"ignores the conditions of requests.*Save to a store that has"):
            xla_ckpt.save(root, "b", TREE)
        assert xla_ckpt.list_tags(root) == ["a"]
        assert torch.equal(xla_ckpt.restore(root, "a").tree["w"], TREE["w"])
