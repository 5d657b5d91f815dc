"""Where the credentials, region and address of a store come from, as users of boto3 have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.buckets.s3_server import Fault, S3Server
from tests.buckets.test_errors import CALLS, NAMES, without
from xla_ckpt.errors import StorageError, UsageError
from xla_ckpt.storage.remote_client import get_client

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")


@pytest.fixture
def no_keys(s3: S3Server, root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The environment has none, and the shared file of credentials, which is absent, would be this one."""
    for name in KEYS:
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    get_client.cache_clear()
    return file


def signed(s3: S3Server) -> set[str]:
    """How the requests were signed: key, date, region."""
    parts = (request.headers.get("authorization", "").partition("Credential=")[2] for request in s3.requests)
    return {f"{part.split('/')[0]} {part.split('/')[2]}" if part else "" for part in parts}


def goes(root: str) -> None:
    xla_ckpt.save(root, "a", {"w": torch.ones(3)})
    xla_ckpt.finalize_checkpoint()
    assert torch.equal(xla_ckpt.restore(root).tree["w"], torch.ones(3))


def test_keys_of_the_environment(root: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of the session")
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    get_client.cache_clear()
    goes(root)
    assert signed(s3) == {"testing eu-west-3"}
    assert {request.headers["x_amz_security_token"] for request in s3.requests} == {"of the session"}


def test_an_account_of_azures_that_nothing_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=its;AccountKey=eA==")  # obstore reads none
    get_client.cache_clear()
    message = (
        "in which account.*expected the environment variable AZURE_STORAGE_ACCOUNT_NAME.*AZURE_STORAGE_ACCOUNT_KEY"
    )
    for call in (xla_ckpt.list_tags, xla_ckpt.restore, lambda path: xla_ckpt.save(path, "a", {"w": torch.ones(1)})):
        with pytest.raises(UsageError, match=message):
            call("az://box/run")


@pytest.mark.parametrize("variable", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_a_region_beside_a_profile(
    no_keys: Path, root: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    no_keys.write_text("[default]\naws_access_key_id = of_the_file\naws_secret_access_key = y\n")
    monkeypatch.setenv(variable, "eu-west-3")
    goes(root)
    assert signed(s3) == {"of_the_file eu-west-3"}


def test_a_profile(no_keys: Path, root: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    no_keys.write_text(
        "[default]\naws_access_key_id = wrong\naws_secret_access_key = y\n"
        "[work]\naws_access_key_id = of_work\naws_secret_access_key = y\naws_session_token = its\n"
    )
    (no_keys.parent / "config").write_text("[profile work]\nregion = eu-north-1\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    goes(root)
    assert signed(s3) == {"of_work eu-north-1"}
    assert {request.headers["x_amz_security_token"] for request in s3.requests} == {"its"}


def test_a_profile_that_is_absent(no_keys: Path, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "work")
    with pytest.raises(UsageError, match=r"boto3 finds no credentials.*work.*Look at AWS_PROFILE"):
        xla_ckpt.list_tags(root)


@pytest.mark.parametrize("call", NAMES)
def test_a_profile_without_boto3(no_keys: Path, root: str, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setenv("AWS_PROFILE", "work")
    without(monkeypatch, "boto3")
    with pytest.raises(UsageError, match=r"boto3, which reads profiles, is not installed.*pip install boto3"):
        CALLS[call](root)


@pytest.mark.parametrize("call", NAMES)
def test_no_credentials(no_keys: Path, root: str, monkeypatch: pytest.MonkeyPatch, call: str, s3: S3Server) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", s3.url)  # where a machine that has a role finds its credentials
    s3.faults.append(Fault("", "latest/api/token", "refuse403", 1_000_000))
    get_client.cache_clear()
    with pytest.raises(StorageError, match="no credentials were found.*set AWS_ACCESS_KEY_ID"):
        CALLS[call](root)


def test_unsigned_requests(no_keys: Path, root: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    no_keys.write_text("[default]\naws_access_key_id = of_the_file\naws_secret_access_key = y\n")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with pytest.raises(StorageError, match="no permission to write there"):  # the bucket is not public
        goes(root)
    assert signed(s3) == {""}


def test_the_address_of_s3_alone_goes_before_that_of_all_services(
    root: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    get_client.cache_clear()
    goes(root)


def test_the_bucket_is_in_the_path_unless_it_is_in_the_host(
    root: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = root.split("/")[2]
    goes(root)
    assert all(request.path.startswith(f"/{bucket}") for request in s3.requests)
    s3.forget()
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    get_client.cache_clear()
    with pytest.raises(StorageError, match="no such bucket"):  # the host's name has none here
        goes(root)
    # A list names what it wants behind the path.
    assert {request.path.partition("?")[0][:5] for request in s3.requests} <= {"/", "/run/"}


def test_credentials_that_are_renewed_meanwhile(no_keys: Path, root: str, s3: S3Server) -> None:
    """boto3 is asked again when those of a role or a login are about to expire."""
    from datetime import UTC, datetime, timedelta

    import boto3
    from botocore.credentials import RefreshableCredentials

    count = iter(range(100))

    def fresh() -> dict[str, str]:
        until = datetime.now(UTC) + timedelta(seconds=1)
        return {"access_key": f"key_{next(count)}", "secret_key": "y", "token": "t", "expiry_time": until.isoformat()}

    from obstore.auth.boto3 import Boto3CredentialProvider

    no_keys.write_text("[default]\naws_access_key_id = x\naws_secret_access_key = y\n")
    provider = Boto3CredentialProvider(boto3.Session(), ttl=timedelta(0))
    provider.credentials = RefreshableCredentials.create_from_metadata(fresh(), fresh, "test")
    assert provider()["access_key_id"] != provider()["access_key_id"]


AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "its", "AZURE_ALLOW_HTTP": "true"}


@pytest.mark.parametrize(
    ("settings", "asked", "told"),
    [
        ({"AZURE_MSI_ENDPOINT": "/metadata/identity/oauth2/token"}, "metadata/identity", "no credentials were found"),
        (
            {"AZURE_AUTHORITY_HOST": "", "AZURE_CLIENT_ID": "a", "AZURE_CLIENT_SECRET": "b", "AZURE_TENANT_ID": "c"},
            "c/oauth2/v2.0/token",
            "the credentials are refused: they are wrong, have expired",
        ),
    ],
    ids=["no identity", "a wrong application"],
)
def test_who_gives_tokens_for_azure_refuses(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], asked: str, told: str
) -> None:
    """The server has the part of the one that gives tokens; the store itself is never asked."""
    urls = {name: s3.url + value for name, value in settings.items() if name.endswith(("ENDPOINT", "HOST"))}
    for name, value in {**AZURE, **settings, **urls}.items():
        monkeypatch.setenv(name, value)
    s3.faults.append(Fault("", asked, "refuse403", 1_000_000))
    with pytest.raises(StorageError, match=told):
        xla_ckpt.list_tags("az://box/run")
    assert s3.requests
    assert all(asked in request.path for request in s3.requests)
