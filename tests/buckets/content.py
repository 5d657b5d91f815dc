"""What is in a bucket, as another program sees it: boto3."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any


def client() -> Any:
    """boto3's, for the server that the environment names."""
    named = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return _client(os.getpid(), tuple(sorted(named.items())))


@cache
def _client(process: int, named: tuple[tuple[str, str], ...]) -> Any:
    """A new one takes as long as ten requests. (A fork has its own: connections are not shared.)"""
    import boto3  # here, because ranks import this module with those of their tests

    return boto3.client("s3", region_name="us-east-1")


def split(address: str) -> tuple[str, str]:
    """(bucket, name in it) of an address."""
    bucket, _, name = address.removeprefix("s3://").partition("/")
    return bucket, name


def names_below(address: str) -> list[str]:
    """Names of all files below an address, sorted."""
    bucket, name = split(address)
    pages = client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{name}/")
    return sorted(file["Key"].removeprefix(f"{name}/") for page in pages for file in page.get("Contents", ()))


def upload(folder: Path, address: str) -> None:
    """Copy a folder into a bucket."""
    bucket, name = split(address)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            client().put_object(Bucket=bucket, Key=f"{name}/{file.relative_to(folder)}", Body=file.read_bytes())


def download(address: str, folder: Path) -> None:
    """Copy what lies below an address into a folder."""
    for name in names_below(address):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(read(f"{address}/{name}"))


def read(address: str) -> bytes:
    """A file."""
    bucket, name = split(address)
    data: bytes = client().get_object(Bucket=bucket, Key=name)["Body"].read()
    return data


def write(address: str, data: bytes) -> None:
    """Write a file, or write over one."""
    bucket, name = split(address)
    client().put_object(Bucket=bucket, Key=name, Body=data)
