"""A bucket of a server that answers as S3 does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import xla_ckpt
from tests.buckets.s3_server import S3Server
from xla_ckpt.storage.remote_client import client_of


@pytest.fixture(scope="session")
def server_of_all() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(server_of_all: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server, without faults, and with its credentials in the environment."""
    for name, value in server_of_all.environment.items():
        monkeypatch.setenv(name, value)
    client_of.cache_clear()
    server_of_all.forget()
    yield server_of_all
    server_of_all.forget()
    xla_ckpt.finalize_checkpoint()  # what saves do after their commit is not to meet the next test's faults
    client_of.cache_clear()


@pytest.fixture
def root(s3: S3Server) -> str:
    """The address of an empty root."""
    root = f"s3://{s3.new_bucket()}/run"
    s3.requests.clear()
    return root
