"""A root in a bucket of a server that answers as S3 does, and uploads to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.buckets.s3_server import S3Server
from tests.buckets.uploads import Gate
from xla_ckpt.features.local_first.upload import UPLOADS
from xla_ckpt.storage import remote_client


@pytest.fixture
def root(s3: S3Server) -> str:
    """The address of an empty root."""
    root = f"s3://{s3.new_bucket()}/run"
    s3.forget()
    return root


@pytest.fixture
def gate(s3: S3Server) -> Iterator[Callable[[str], Gate]]:
    gates: list[Gate] = []

    def new(part: str, **more: Any) -> Gate:
        gates.append(Gate(part, **more))
        s3.faults.append(gates[-1])
        return gates[-1]

    yield new
    for one in gates:
        one.go.set()


@pytest.fixture
def own_uploads(s3: S3Server, gate: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What fails fails at once, and no test has the uploads of another one."""
    monkeypatch.setattr(remote_client, "MAX_RETRIES", 0)
    UPLOADS.__init__()  # type: ignore[misc]
    yield
    s3.faults.clear()
    UPLOADS.finish_at_exit()
