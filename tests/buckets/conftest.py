"""A bucket of a server that answers as S3 does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.buckets.s3_server import S3Server
from xla_ckpt.storage.remote_client import client_of


@pytest.fixture(scope="session")
def server_of_all() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(server_of_all: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, without faults, and with its credentials in the environment."""
    for name, value in server_of_all.environment.items():
        monkeypatch.setenv(name, value)
    client_of.cache_clear()
    server_of_all.faults.clear()
    server_of_all.requests.clear()
    return server_of_all


@pytest.fixture
def root(s3: S3Server) -> str:
    """The address of an empty root."""
    root = f"s3://{s3.new_bucket()}/run"
    s3.requests.clear()
    return root
