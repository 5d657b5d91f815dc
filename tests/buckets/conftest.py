"""A root in a bucket of a server that answers as S3 does."""

from __future__ import annotations

import pytest

from tests.buckets.s3_server import S3Server


@pytest.fixture
def root(s3: S3Server) -> str:
    """The address of an empty root."""
    root = f"s3://{s3.new_bucket()}/run"
    s3.forget()
    return root
