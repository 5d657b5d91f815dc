"""Table of object stores (s3, gs, az) and their settings from the environment.

To add a store, add an entry. Class and variable names are from obstore (https://developmentseed.org/obstore). A new
entry needs a test against a server, and its rows in docs/object-stores.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xla_ckpt.errors import UsageError


def _get_no_options() -> dict[str, Any]:
    return {}


def _get_endpoint() -> dict[str, Any]:
    """Return the S3 endpoint and region from the environment.

    Raises:
        UsageError: The endpoint is not a URL.
    """
    options: dict[str, Any] = {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        if not endpoint.startswith(("http://", "https://")):
            # obstore would panic
            raise UsageError(
                "the endpoint in the environment is no address",
                expected=f"http://{endpoint} or https://{endpoint}",
                found=f"AWS_ENDPOINT_URL={endpoint}",
            )
        options["endpoint"] = endpoint
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        options["region"] = region
    return options


def _check_one_server() -> dict[str, Any]:
    """Raise a UsageError if tensorstore would read ``gs://`` from a different server than this library."""
    here, there = os.environ.get("GOOGLE_BASE_URL", ""), os.environ.get("TENSORSTORE_GCS_HTTP_URL", "")
    if here.rstrip("/") != there.rstrip("/"):
        raise UsageError(
            "the environment names another server of gs:// to tensorstore than to this library",
            expected="both variables, with the same address, or none of them",
            found=f"GOOGLE_BASE_URL={here!r}, TENSORSTORE_GCS_HTTP_URL={there!r}",
        )
    return {}


def _get_endpoint_and_profile() -> dict[str, Any]:
    options = _get_endpoint()
    if (provider := _get_profile_credentials()) is not None:
        options.pop("region", None)  # the profile has one
        options["credential_provider"] = provider
    return options


def _get_profile_credentials() -> Any:
    """Return a boto3 credential provider if a profile or a credentials file is configured, otherwise None.

    Raises:
        UsageError: boto3 is not installed, or finds no credentials.
    """
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
    except (BotoCoreError, ValueError) as error:  # ValueError: boto3 found no credentials
        raise UsageError(
            "boto3 finds no credentials for s3://",
            found=f"{place}: {error}",
            hint="Look at AWS_PROFILE, AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE, or log in anew.",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A type of object store."""

    name: str
    example: str
    """Example address of a root, for documents and errors."""

    description: str
    """Name of the store in documents."""

    obstore_class: str
    """Class of ``obstore.store``."""

    allow_http_variable: str
    """Environment variable that allows requests without TLS."""

    credentials_hint: str
    """Clause that describes which variables to set if no credentials are found."""

    role_paths: tuple[str, ...]
    """Paths at which the provider's machines serve the credentials of their roles."""

    get_client_options: Callable[[], dict[str, Any]] = _get_no_options
    """Return the options for obstore that it does not find itself, such as the endpoint and a credential provider.

    Raises a `UsageError` if the environment is invalid or the credentials are missing.
    """

    get_server_options: Callable[[], dict[str, Any]] = _get_no_options
    """Return the ``endpoint`` and ``region`` set in the environment, for libraries that send requests themselves.

    Raises a `UsageError` if the environment is invalid.
    """

    tensorstore_driver: str = ""
    """Name of the tensorstore driver; empty if unsupported."""

    missing_settings: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    """Substring of an obstore error about a missing setting -> (problem, expected, hint)."""

    def is_http_allowed(self, settings: Mapping[str, Any]) -> bool:
        """Return True if requests may be sent without TLS.

        An ``http:`` endpoint, such as a local test server, implies it. Otherwise `allow_http_variable` must be set.
        """
        allowed = os.environ.get(self.allow_http_variable, "").lower() == "true"
        return allowed or settings.get("endpoint", "").startswith("http:")

    def make_settings_error(self, bucket: str, message: str) -> UsageError:
        """Return the error for settings that obstore rejects with `message`."""
        for sign, (problem, expected, hint) in self.missing_settings.items():
            if sign in message:
                return UsageError(problem, expected=expected, found=f"{self.name}://{bucket}", hint=hint)
        return UsageError(
            f"the settings for {self.name}:// in the environment make no sense",
            found=message.partition("\n")[0].rstrip("."),
            hint="docs/object-stores.md has the names and the meaning of the variables.",
        )


_MISSING_ACCOUNT = (
    "nothing says in which account of Azure's the container lies",
    "the environment variable AZURE_STORAGE_ACCOUNT_NAME",
    (
        "Set it, and beside it AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or AZURE_CLIENT_ID, "
        "AZURE_CLIENT_SECRET and AZURE_TENANT_ID, unless this machine has an identity of Azure's."
    ),
)

_SCHEMES = (
    Scheme(
        name="s3",
        example="s3://bucket/path",
        description="Amazon S3, and servers that speak as it does",
        obstore_class="S3Store",
        allow_http_variable="AWS_ALLOW_HTTP",
        credentials_hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, which takes boto3; "
        "a public bucket is read with AWS_SKIP_SIGNATURE=true",
        role_paths=("/latest/api/token", "/latest/meta-data"),
        get_client_options=_get_endpoint_and_profile,
        get_server_options=_get_endpoint,
        tensorstore_driver="s3",
    ),
    Scheme(
        name="gs",
        example="gs://bucket/path",
        description="Google Cloud Storage",
        obstore_class="GCSStore",
        allow_http_variable="GOOGLE_ALLOW_HTTP",
        credentials_hint="set GOOGLE_APPLICATION_CREDENTIALS",
        role_paths=("/computeMetadata/",),
        get_server_options=_check_one_server,
        tensorstore_driver="gcs",
    ),
    Scheme(
        name="az",
        example="az://container/path",
        description="Azure Blob Storage",
        obstore_class="AzureStore",
        allow_http_variable="AZURE_ALLOW_HTTP",
        credentials_hint="set AZURE_STORAGE_ACCOUNT_KEY",
        role_paths=("/metadata/identity/",),
        missing_settings={"Account must be specified": _MISSING_ACCOUNT},
    ),
)

SCHEMES = {scheme.name: scheme for scheme in _SCHEMES}
"""Scheme name, which precedes ``://`` in an address -> `Scheme`."""
