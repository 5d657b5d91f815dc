"""What the environment says of buckets: where their servers are, and who asks them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from xla_ckpt.errors import UsageError

_ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
"""Environment variables that permit requests without TLS, as obstore names them."""


def server_of(scheme: str) -> dict[str, str]:
    """Where the servers of a scheme are, as far as the environment says it: for a library that asks them itself.

    Raises:
        UsageError: What it says makes no sense.
    """
    options: dict[str, str] = {}
    if scheme == "gs":
        _check_one_server()
    if scheme != "s3":
        return options
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        if not endpoint.startswith(("http://", "https://")):
            # obstore panics
            raise UsageError(
                "the endpoint in the environment is no address",
                expected=f"http://{endpoint} or https://{endpoint}",
                found=f"AWS_ENDPOINT_URL={endpoint}",
            )
        options["endpoint"] = endpoint
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        options["region"] = region
    return options


def _check_one_server() -> None:
    """Refuse a read by tensorstore from another server of ``gs://`` than that whose files are listed."""
    here, there = os.environ.get("GOOGLE_BASE_URL", ""), os.environ.get("TENSORSTORE_GCS_HTTP_URL", "")
    if here.rstrip("/") != there.rstrip("/"):
        raise UsageError(
            "the environment names another server of gs:// to tensorstore than to this library",
            expected="both variables, with the same address, or none of them",
            found=f"GOOGLE_BASE_URL={here!r}, TENSORSTORE_GCS_HTTP_URL={there!r}",
        )


def client_settings(scheme: str) -> dict[str, Any]:
    """Where the servers of a scheme are, and who asks them, as options of obstore's, as far as it does not find them.

    Raises:
        UsageError: What the environment says makes no sense, or there are no such credentials.
    """
    options: dict[str, Any] = {**server_of(scheme)} if scheme == "s3" else {}
    if scheme == "s3" and (provider := _profile()) is not None:
        options.pop("region", None)  # the profile has one
        options["credential_provider"] = provider
    return options


def allows_http(scheme: str, settings: dict[str, Any]) -> bool:
    """Whether requests may go without TLS.

    A test server on this machine speaks none. Who asks any other one without it says so.
    """
    return os.environ.get(_ALLOW_HTTP[scheme], "").lower() == "true" or settings.get("endpoint", "").startswith("http:")


def _profile() -> Any:
    """Credentials as boto3 finds them, where the environment names a profile, or nothing but a file has them."""
    env = os.environ
    file = Path(env.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    if any(env.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")):
        return None  # obstore finds these itself
    if not (env.get("AWS_PROFILE") or file.is_file()):
        return None
    place = env.get("AWS_PROFILE") or str(file)
    try:
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise UsageError(
            "the credentials for s3:// stand in a profile, and boto3, which reads profiles, is not installed",
            found=place,
            hint="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        ) from error
    try:
        return Boto3CredentialProvider()
    except (BotoCoreError, ValueError) as error:  # ValueError: it has found none
        raise UsageError(
            "boto3 finds no credentials for s3://",
            found=f"{place}: {error}",
            hint="Look at AWS_PROFILE, AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE, or log in anew.",
        ) from error


def no_account(container: str) -> UsageError:
    """The error for a container of Azure's of which nobody says whose it is."""
    return UsageError(
        "nothing says in which account of Azure's the container lies",
        expected="the environment variable AZURE_STORAGE_ACCOUNT_NAME",
        found=f"az://{container}",
        hint="Set it, and beside it AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or AZURE_CLIENT_ID, "
        "AZURE_CLIENT_SECRET and AZURE_TENANT_ID, unless this machine has an identity of Azure's.",
    )
