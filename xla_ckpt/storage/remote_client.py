"""A bucket, asked through obstore: requests in, bytes out, and refusals as the OSErrors that they mean.

obstore (https://developmentseed.org/obstore) repeats what fails in passing, and sends parts of a file side by side. It
is loaded when the first address of a bucket is used.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xla_ckpt.errors import UsageError
from xla_ckpt.storage.base import Changed

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az")
"""What an address of a bucket begins with: S3 and what speaks as it does, Google Cloud Storage, Azure."""

REQUEST_TIMEOUT = "120s"
"""For one request, the largest of which has a part of a file. At 140 kB/s a part of 16 MiB comes through."""

CONNECT_TIMEOUT = "10s"

RETRIES = 10
RETRY_TIMEOUT = datetime.timedelta(minutes=2)
"""How often, and how long, what fails in passing is repeated."""

_ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
"""Environment variables that permit requests without TLS, as obstore names them."""

_STATUS = re.compile(r"status code: (\d+ [A-Z][A-Za-z ]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")

_MEANINGS = {
    "NoSuchBucket": (errno.ENODEV, "there is no such bucket"),
    "ContainerNotFound": (errno.ENODEV, "there is no such container"),
    "InvalidAccessKeyId": (errno.EACCES, "the access key is not known there"),
    "SignatureDoesNotMatch": (errno.EACCES, "the secret key does not fit to the access key"),
    "ExpiredToken": (errno.EACCES, "the credentials have expired"),
    "RequestTimeTooSkewed": (errno.EACCES, "the clock of this machine differs from that of the store: set it"),
    "AccessDenied": (errno.EACCES, "these credentials have no permission for it"),
    "PermanentRedirect": (errno.EREMOTE, "the bucket is in another region: set AWS_REGION to that one"),
    "AuthorizationHeaderMalformed": (errno.EREMOTE, "the bucket is in another region: set AWS_REGION to that one"),
    "IllegalLocationConstraintException": (errno.EREMOTE, "the bucket is in another region: set AWS_REGION"),
    "QuotaExceeded": (errno.ENOSPC, "the quota of the bucket is used up"),
}
"""What the codes of S3 mean: an error number, and words."""

_NO_CREDENTIALS = (
    "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (which takes boto3), "
    "or run where the machine has a role"
)


class Client:
    """The files of a bucket, by their full names.

    Methods raise FileNotFoundError for a file that is not there, PermissionError, and other OSErrors for what else the
    store refuses or does not answer. Where one raises, what it does may be done all the same: answers get lost.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._pid = os.getpid()
        self._checked: set[str] = set()

    @contextlib.contextmanager
    def _asking(self, key: str) -> Iterator[ObjectStore]:
        """obstore, whose errors become those that they mean."""
        if os.getpid() != self._pid:
            raise UsageError(
                "this process was forked from one that had used an object store, whose connections it cannot use",
                hint='Start such processes with multiprocessing.get_context("spawn").',
            )
        from obstore import exceptions

        try:
            yield self._store
        except (exceptions.BaseError, FileNotFoundError) as error:
            raise os_error(error, key) from error

    def head(self, key: str) -> ObjectMeta:
        """Size, version and time of a file."""
        with self._asking(key) as store:
            return store.head(key)

    def read(self, key: str, offset: int, nbytes: int, version: str | None) -> tuple[memoryview, str | None]:
        """Some bytes of a file, fewer where it ends, and its version. With `version` it must have that one."""
        options: dict[str, Any] = {"range": (offset, offset + nbytes)}
        if version is not None:
            options["if_match"] = version
        with self._asking(key) as store:
            try:
                answer = store.get(key, options=options)  # type: ignore[arg-type]
                data = memoryview(answer.bytes()) if nbytes else memoryview(b"")
            except Exception as error:
                if "416 Range Not Satisfiable" in str(error):
                    return memoryview(b""), None  # the file ends before
                raise
        return data, answer.meta["e_tag"]

    def start(self, key: str, nbytes: int) -> tuple[memoryview, int, str | None]:
        """The first bytes of a file, its size, and its version."""
        with self._asking(key) as store:
            try:
                answer = store.get(key, options={"range": (0, nbytes)})
                data = memoryview(answer.bytes())
            except Exception as error:
                if "416 Range Not Satisfiable" not in str(error):
                    raise
                return memoryview(b""), 0, None  # it is empty
        return data, answer.meta["size"], answer.meta["e_tag"]

    def read_version(self, key: str) -> tuple[bytes, dict[str, str]]:
        """All of a small file, and what it takes to replace this version of it."""
        with self._asking(key) as store:
            answer = store.get(key)
            return bytes(answer.bytes()), _version_of(answer.meta)

    def send(self, key: str, data: Any, part_bytes: int, parts_at_once: int) -> None:
        """Write a file: from bytes, from a file, or from an iterator of bytes, which comes in parts."""
        with self._asking(key) as store:
            store.put(key, data, chunk_size=part_bytes, max_concurrency=parts_at_once)

    def write_if(self, key: str, data: bytes, version: dict[str, str] | None) -> dict[str, str]:
        """Write a small file if it has this version; with None, if there is none. The version that it has then.

        Raises:
            Changed: It has another one, or there is one. The store says so of a write of its own, too, that it has done
                and whose answer got lost.
        """
        from obstore import exceptions

        with self._asking(key) as store:
            try:
                mode: Any = "create" if version is None else version
                return _version_of(store.put(key, data, mode=mode, use_multipart=False))
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                raise Changed(key) from error

    def copy(self, source: str, target: str) -> None:
        """Have a file under a second name."""
        with self._asking(source) as store:
            store.copy(source, target)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete files, as far as they are there."""
        with self._asking(keys[0]) as store, contextlib.suppress(FileNotFoundError):
            store.delete(keys)

    def names_below(self, prefix: str) -> list[str]:
        """What lies directly below a prefix, sorted."""
        with self._asking(prefix) as store:
            answer = store.list_with_delimiter(prefix or None)
        keys = [*answer["common_prefixes"], *(meta["path"] for meta in answer["objects"])]
        return sorted(key.rstrip("/").rpartition("/")[2] for key in keys)

    def metas_below(self, prefix: str) -> Iterator[ObjectMeta]:
        """All files below a prefix."""
        with self._asking(prefix) as store:
            for some in store.list(prefix or None):
                yield from some

    def below(self, prefix: str) -> list[str]:
        """The full names of all files below a prefix, sorted."""
        return sorted(meta["path"] for meta in self.metas_below(prefix))

    def is_any_below(self, prefix: str) -> bool:
        """Whether there is a file below a prefix."""
        with self._asking(prefix) as store:
            return any(some for some in store.list(prefix or None, chunk_size=1))

    def check_conditions(self, prefix: str) -> None:
        """Find out, once for each prefix, whether the store replaces a file only on its condition.

        Some servers ignore the condition, and some write where it names a file that is not there.

        Raises:
            UsageError: It does not.
        """
        if prefix in self._checked:
            return
        key = f"{prefix}.probe-{uuid.uuid4().hex}"
        try:
            self.write_if(key, b"1", None)
            first = self.read_version(key)[1]
            self.write_if(key, b"2", first)
            wrong = [("replaced a file that it was to make", None), ("replaced another version of a file", first)]
            for what, condition in wrong:
                if self._writes(key, condition):
                    raise _careless(what)
            self.delete([key])
            if self._writes(key, first):
                raise _careless("made a file that it was to replace")
        finally:
            with contextlib.suppress(OSError):  # what is raised already says more
                self.delete([key])
        self._checked.add(prefix)

    def _writes(self, key: str, version: dict[str, str] | None) -> bool:
        try:
            self.write_if(key, b"3", version)
        except (Changed, FileNotFoundError):
            return False
        return True


def _careless(what: str) -> UsageError:
    return UsageError(
        "this server ignores the conditions of requests, so that two jobs would overwrite each other's tags",
        expected="a refusal of a conditional write (412 Precondition Failed)",
        found=f"it {what}",
        hint="Checkpoints can be read from it, and not saved to it. Save to a store that has conditional writes: "
        "docs/object-stores.md names some.",
    )


def _version_of(meta: ObjectMeta | PutResult) -> dict[str, str]:
    """What tells the versions of a file apart: an entity tag, and on Google's servers a generation."""
    return {name: value for name in ("e_tag", "version") if (value := meta.get(name))}  # type: ignore[misc]


@functools.lru_cache(maxsize=32)
def client_of(scheme: str, bucket: str) -> Client:
    """The client of a bucket. All roots in it share their connections.

    Raises:
        UsageError: obstore is not installed, or the address names no bucket.
    """
    if not bucket:
        raise UsageError("the address names no bucket", expected=f"{scheme}://bucket/path", found=f"{scheme}://")
    try:
        from obstore import store
    except ImportError as error:
        raise UsageError(
            f"{scheme}:// needs the package obstore, which is not installed",
            found=f"{scheme}://{bucket}",
            hint="Install it: pip install 'xla-ckpt[objects]'.",
        ) from error
    endpoint = (os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")) if scheme == "s3" else None
    # A test server on this machine speaks no TLS. Who asks any other one without it says so.
    plain = os.environ.get(_ALLOW_HTTP[scheme], "").lower() == "true" or (endpoint or "").startswith("http:")
    options: dict[str, Any] = {
        "client_options": {"timeout": REQUEST_TIMEOUT, "connect_timeout": CONNECT_TIMEOUT, "allow_http": plain},
        "retry_config": {"max_retries": RETRIES, "retry_timeout": RETRY_TIMEOUT},
    }
    if scheme == "gs":
        return Client(store.GCSStore(bucket, **options))
    if scheme == "az":
        return Client(store.AzureStore(bucket, **options))
    if endpoint:
        options["endpoint"] = endpoint
    if (provider := _profile()) is not None:
        options["credential_provider"] = provider
    elif region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        options["region"] = region
    return Client(store.S3Store(bucket, **options))


def _profile() -> Any:
    """Credentials as boto3 finds them, where the environment names a profile, or nothing but a file has them."""
    env = os.environ
    file = Path(env.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    if env.get("AWS_ACCESS_KEY_ID") or env.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return None  # obstore finds these itself
    if not (env.get("AWS_PROFILE") or file.is_file()):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise UsageError(
            "the credentials for s3:// stand in a profile, and boto3, which reads profiles, is not installed",
            found=env.get("AWS_PROFILE") or str(file),
            hint="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        ) from error
    return Boto3CredentialProvider()


def os_error(error: BaseException, key: str) -> OSError:
    """The OSError that an error of obstore means, in the words of a person who looks for the cause.

    >>> os_error(FileNotFoundError("Object at location a not found"), "a")
    FileNotFoundError(2, 'there is no such file')
    """
    text = str(error)
    code = next(iter(_CODE.findall(text)), "")
    number, words = _MEANINGS.get(code, (0, ""))
    if not number and "169.254.169.254" in text:
        number, words = errno.EACCES, _NO_CREDENTIALS
    if not number and isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "there is no such file", key)
    status = next(iter(_STATUS.findall(text)), "")
    if not number:
        denied = type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
        number = errno.EACCES if denied else errno.EIO
        words = f"the store answered {status}" if status else text.partition("\n")[0][:300]
    detail = " ".join(part for part in (status, code) if part)
    kind: type[OSError] = PermissionError if number == errno.EACCES else OSError
    return kind(number, f"{words} ({detail})" if detail and detail not in words else words, key)
