"""Object-store client over obstore: requests, retries, timeouts, conditional writes and error translation.

obstore is imported when the first bucket is used. Its errors become OSErrors with the cause and the fix. Requests
from the main thread run on another thread, so that Ctrl-C interrupts them.
"""

from __future__ import annotations

import datetime
import errno
import functools
import re
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from xla_ckpt.core.plan.read_costs import ReadCosts
from xla_ckpt.errors import UsageError
from xla_ckpt.extras import wrap_missing_packages
from xla_ckpt.storage.base import VersionConflict
from xla_ckpt.storage.process_state import register_fork_reset
from xla_ckpt.storage.schemes import SCHEMES
from xla_ckpt.storage.synchronization import Future
from xla_ckpt.storage.threads import start_thread

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult
    from obstore.store import ObjectStore


_STATUS = re.compile(r"status code: (\d+ [A-Z][A-Za-z -]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)")
_NOT_FOUND_BODY = re.compile(r"status code: 404 [A-Za-z ]*: *\S")
_REQUEST = re.compile(r"performing ([A-Z]+) (\S+)")
_ENDPOINT = re.compile(r"https?://[^/\s]+")
_ELAPSED = re.compile(r" in ([\d.]+)s\b")

_WRONG_REGION = "the bucket is in another region: set AWS_REGION to that one"

_BAD_CREDENTIALS = "the credentials are refused: they are wrong, have expired, or may not be used from here"

_MEANINGS = {
    "NoSuchBucket": (errno.ENODEV, "there is no such bucket: make it first, or correct its name"),
    "ContainerNotFound": (errno.ENODEV, "there is no such container: make it first, or correct its name"),
    "InvalidAccessKeyId": (
        errno.EACCES,
        "the access key is not known there: look at it, and at the endpoint",
    ),
    "AuthenticationFailed": (errno.EACCES, _BAD_CREDENTIALS),  # an Azure code
    "AuthorizationFailure": (errno.EACCES, _BAD_CREDENTIALS),
    "SignatureDoesNotMatch": (errno.EACCES, "the secret key does not fit to the access key: set both anew"),
    "ExpiredToken": (errno.EACCES, "the credentials have expired: get new ones, and start again"),
    "InvalidToken": (errno.EACCES, "the session token does not fit to the access key: set all three anew"),
    "RequestTimeTooSkewed": (errno.EACCES, "the clock of this machine differs from that of the store: set it"),
    "PermanentRedirect": (errno.EREMOTE, _WRONG_REGION),
    "AuthorizationHeaderMalformed": (errno.EREMOTE, _WRONG_REGION),
    "IllegalLocationConstraintException": (errno.EREMOTE, _WRONG_REGION),
    "QuotaExceeded": (errno.ENOSPC, "the quota of the bucket is used up"),
    "SlowDown": (errno.EBUSY, "the store had too many requests, for longer than they were repeated"),
}
"""Error codes of stores -> (errno, message)."""

_REQUIRED_PERMISSIONS = {
    "list": "list what lies there (on S3: s3:ListBucket)",
    "GET": "read there (on S3: s3:GetObject; without s3:ListBucket it also says this of a file that is absent)",
    "PUT": "write there (on S3: s3:PutObject)",
    "DELETE": "delete there (on S3: s3:DeleteObject)",
}
"""Request kind -> the permission that a rejected request lacks."""

_NO_CREDENTIALS = "no credentials were found, and this machine has no role. " + ". ".join(
    f"For {scheme.name}://: {scheme.credentials_hint}" for scheme in SCHEMES.values()
)

_ROLE_PATHS = [path for scheme in SCHEMES.values() for path in scheme.role_paths]
"""Paths at which cloud machines serve the credentials of their roles."""

NOT_A_STORE = "what answers there is no object store: look at the endpoint (for s3://, AWS_ENDPOINT_URL)"


def translate_error(error: BaseException, key: str) -> OSError:
    """Return the OSError that corresponds to an error of obstore.

    >>> translate_error(FileNotFoundError("Object at location a not found"), "a")
    FileNotFoundError(2, 'there is no such file')
    """
    text = get_error_text(error)
    code = next((one or other for one, other in _CODE.findall(text)), "")
    method, url = next(iter(_REQUEST.findall(text)), ("", ""))
    status = next(iter(_STATUS.findall(text)), "")
    number, words = _MEANINGS.get(code, (0, ""))
    if not number:
        number, words = _match_error_text(text, method, url, code)
    if not number and isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "there is no such file", key)
    if not number:
        denied = status.startswith(("401", "403")) or code == "AccessDenied"
        number = errno.EACCES if denied else errno.EIO
        if denied:
            needed = _REQUIRED_PERMISSIONS[_find_needed_permission(text, method, url)]
            words = f"these credentials have no permission to {needed}"
        else:
            words = f"the store answered {status}" if status else text.partition("\n")[0][:300]
    detail = " ".join(part for part in (status, code) if part)
    kind: type[OSError] = PermissionError if number == errno.EACCES else OSError
    return kind(number, f"{words} ({detail})" if detail and detail not in words else words, key)


def get_error_text(error: BaseException) -> str:
    """Return the message of an obstore error, without the debug output that repeats it with escaped bodies."""
    return str(error).partition("Debug source:")[0].rstrip()


def _match_error_text(text: str, method: str, url: str, code: str) -> tuple[int, str]:
    """Return (errno, message) for a response without an error code of a store, or (0, "") if unknown."""
    if any(place in url for place in _ROLE_PATHS):
        return errno.EACCES, _NO_CREDENTIALS
    if "performing token request" in text and _STATUS.search(text):
        return errno.EACCES, _BAD_CREDENTIALS
    if "redirect without LOCATION" in text:
        return errno.EREMOTE, _WRONG_REGION
    if "error sending request" in text:
        endpoint = next(iter(_ENDPOINT.findall(url)), "the store")
        tried = next(iter(_ELAPSED.findall(text)), "")
        after = f", tried for {float(tried):.0f} s" if tried else ""
        return errno.EHOSTUNREACH, f"{endpoint} does not answer{after}: look at the endpoint and the network"
    if "non-partial response" in text:
        return errno.EPROTO, "the server sends all of a file where a part is asked for, so that it cannot be read from"
    # A real store returns an error code if a file does not exist, except for HEAD, whose response has no body.
    strange = "Header missing from response" in text or "invalid DeleteObjects response" in text
    if strange or (not code and method != "HEAD" and _NOT_FOUND_BODY.search(text)):
        return errno.EPROTO, NOT_A_STORE
    return 0, ""


def _find_needed_permission(text: str, method: str, url: str) -> str:
    """Return the key of `_REQUIRED_PERMISSIONS` for a request."""
    if "list-type=" in url or "comp=list" in url or "performing list request" in text:
        return "list"
    if method == "DELETE" or "?delete" in url or "DeleteObjects" in text:
        return "DELETE"
    return "PUT" if method in ("PUT", "POST") else "GET"


CONNECT_TIMEOUT = "5s"

READ_TIMEOUT = "15s"
"""Timeout for the first byte of a response and between two reads. Stores typically respond in milliseconds."""

PART_TIMEOUT = "120s"
"""Timeout of one request that uploads or copies a part of a file. A part of 16 MiB completes at 140 kB/s."""

RETRY_TIMEOUT = datetime.timedelta(seconds=30)
"""Period for which transient failures are retried.

With `CONNECT_TIMEOUT` and `READ_TIMEOUT`, a request takes at most 50 seconds. A load from an unreachable store fails
after this time, and a save, which sends another request to clean up, after twice this time.
"""

MAX_RETRIES = 1000
"""Maximum number of retries, large enough that only `RETRY_TIMEOUT` matters."""

LIST_PAGE_SIZE = 1000
"""Maximum number of keys in one list response, as in S3."""

TRUNCATED_RETRIES = 3
"""Number of immediate retries if a response is truncated."""

BACKOFF = {"init_backoff": datetime.timedelta(seconds=0.1), "max_backoff": datetime.timedelta(seconds=5)}
"""First and longest pause between retries. The longest one adds to `RETRY_TIMEOUT`."""

READ_COSTS = ReadCosts(
    batch_bytes=16 * 1024 * 1024,
    chunk_bytes=16 * 1024 * 1024,
    max_gap=2 * 1024 * 1024,
    direct_bytes=4 * 1024 * 1024,
    concurrent_reads=32,
    is_cached=False,
)
"""Read costs of object stores. A request takes about 25 ms to its first byte; another one transfers 2 MiB meanwhile."""

PROBE_FILE = ".probe"
"""Small file in each root that is used to check that conditional writes are enforced."""

T = TypeVar("T")
P = ParamSpec("P")


def _translate_errors(
    method: Callable[Concatenate[ObjectStoreClient, P], T],
) -> Callable[Concatenate[ObjectStoreClient, P], T]:
    """Wrap a method that calls obstore, translating its errors. The first argument of the method is the key or keys."""

    @functools.wraps(method)
    def ask(client: ObjectStoreClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        _check_not_forked()
        from obstore import exceptions

        try:
            return method(client, *args, **kwargs)
        except (exceptions.BaseError, FileNotFoundError) as error:
            cause = type(error)(get_error_text(error))  # shown in the traceback
            raise translate_error(cause, _get_first_key(args)) from cause
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # PyO3 does not export the class
                raise
            raise OSError(errno.EIO, f"obstore has panicked: {error}", _get_first_key(args)) from error

    return ask


def _get_first_key(args: Sequence[Any]) -> str:
    """Return the key, or the first of several keys, of a request."""
    return args[0] if isinstance(args[0], str) else args[0][0]


def _allow_interrupts(
    method: Callable[Concatenate[ObjectStoreClient, P], T],
) -> Callable[Concatenate[ObjectStoreClient, P], T]:
    """Wrap an idempotent method so that signal handlers can interrupt a call from the main thread.

    obstore does not check for signals while it waits, so a call from the main thread, where handlers run, is made on
    another thread, and Ctrl-C takes effect immediately. The operation may complete after an interruption.
    """
    asked = _translate_errors(method)

    @functools.wraps(method)
    def ask(client: ObjectStoreClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if threading.current_thread() is not threading.main_thread():
            return asked(client, *args, **kwargs)
        answer = Future[T]()
        call = functools.partial(asked, client, *args, **kwargs)
        if start_thread(functools.partial(answer.run, call), "object store") is None:
            return call()  # no thread available: handlers are delayed
        return answer.result()

    return ask


def _retry_truncated(
    method: Callable[Concatenate[ObjectStoreClient, P], T],
) -> Callable[Concatenate[ObjectStoreClient, P], T]:
    """Wrap a read method to retry truncated responses.

    obstore itself retries the body of a file, but not a truncated list or a truncated "not found" response.
    """

    @functools.wraps(method)
    def ask(client: ObjectStoreClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(TRUNCATED_RETRIES):
            try:
                return method(client, *args, **kwargs)
            except Exception as error:
                if "response body error" not in str(error):
                    raise
        return method(client, *args, **kwargs)

    return ask


@dataclass
class _ProcessUse:
    """Use of obstore by this process and its parents. Its threads and connections do not survive a fork."""

    by_this_process: bool = False
    by_parent: bool = False

    def reset_after_fork(self) -> None:
        self.by_parent |= self.by_this_process


_PROCESS_USE = register_fork_reset(_ProcessUse(), _ProcessUse.reset_after_fork)


def _check_not_forked() -> None:
    """Raise an error if obstore is used in a forked process, where it would wait for its threads forever.

    Raises:
        UsageError: The parent process has used obstore.
    """
    _PROCESS_USE.by_this_process = True
    if _PROCESS_USE.by_parent:
        raise UsageError(
            "this process was forked from one that had used an object store, whose connections it cannot use",
            hint='Start such processes with multiprocessing.get_context("spawn").',
        )


class ObjectStoreClient:
    """Client of a bucket, whose files are addressed by key.

    Methods raise FileNotFoundError if a file does not exist, PermissionError if access is denied, and OSError if the
    store fails or does not respond. An operation that raises an error may still have succeeded, because responses can
    be lost.

    Args:
        quick: obstore client with a read timeout.
        patient: obstore client for uploads and copies, without a read timeout.
    """

    costs = READ_COSTS

    def __init__(self, quick: ObjectStore, patient: ObjectStore) -> None:
        self._quick, self._patient = quick, patient
        self._checked: set[str] = set()

    @_allow_interrupts
    def get_metadata(self, key: str) -> ObjectMeta:
        """Return the size, version and modification time of a file."""
        return self._quick.head(key)

    @_allow_interrupts
    def read(self, key: str, offset: int, nbytes: int, version: str | None) -> tuple[memoryview, int, str | None]:
        """Return (bytes, file size, version) of a range of a file, which must have `version` if given.

        Fewer bytes are returned at the end of the file. If the range begins after the end, the returned size is only an
        upper bound, the offset.
        """
        options: dict[str, Any] = {"range": (offset, offset + nbytes)}
        if version is not None:
            options["if_match"] = version
        try:
            answer = self._quick.get(key, options=options)  # type: ignore[arg-type]
            data = memoryview(answer.bytes()) if nbytes else memoryview(b"")
        except Exception as error:
            if "416 Range Not Satisfiable" in str(error):
                return memoryview(b""), offset, None
            raise
        return data, answer.meta["size"], answer.meta["e_tag"]

    @_allow_interrupts
    @_retry_truncated
    def read_version(self, key: str) -> tuple[bytes, dict[str, str]]:
        """Return the contents of a small file and the version needed to replace it."""
        answer = self._quick.get(key)
        version = _get_version(answer.meta)
        if not version:  # for example a web page, which must not be treated as a corrupt file
            raise OSError(errno.EPROTO, NOT_A_STORE, key)
        return bytes(answer.bytes()), version

    @_translate_errors
    def send(self, key: str, data: Any, part_bytes: int, parts_at_once: int) -> None:
        """Write a file from bytes, a file object, or an iterator of bytes. Large files are sent in parts."""
        self._patient.put(key, data, chunk_size=part_bytes, max_concurrency=parts_at_once)

    @_allow_interrupts
    def put_if_match(self, key: str, data: bytes, version: dict[str, str] | None) -> dict[str, str]:
        """Write a small file if it has this version; with None, if it does not exist. Return its new version.

        Raises:
            VersionConflict: The file has a different version, exists, or does not exist. Also raised if this write
                succeeded but its response was lost, so that it was sent again.
        """
        from obstore import exceptions

        try:
            mode: Any = "create" if version is None else version
            return _get_version(self._quick.put(key, data, mode=mode, use_multipart=False))
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise VersionConflict(key) from error
        except FileNotFoundError as error:
            if version is not None and isinstance(translate_error(error, key), FileNotFoundError):
                raise VersionConflict(key) from error
            raise

    @_translate_errors
    def copy(self, source: str, target: str) -> None:
        """Copy a file to another key."""
        self._patient.copy(source, target)

    @_allow_interrupts
    def delete(self, keys: Sequence[str]) -> None:
        """Delete files, ignoring missing ones."""
        try:
            self._quick.delete(keys)
        except FileNotFoundError as error:
            if not isinstance(translate_error(error, ""), FileNotFoundError):
                raise

    @_allow_interrupts
    @_retry_truncated
    def list_names(self, prefix: str) -> list[str]:
        """Return the names directly below a prefix, sorted."""
        answer = self._quick.list_with_delimiter(prefix or None)
        keys = [*answer["common_prefixes"], *(meta["path"] for meta in answer["objects"])]
        return sorted(key.rstrip("/").rpartition("/")[2] for key in keys)

    @_allow_interrupts
    @_retry_truncated
    def list_metadata(self, prefix: str) -> list[ObjectMeta]:
        """Return the metadata of all files below a prefix."""
        return [meta for some in self._quick.list(prefix or None) for meta in some]

    @_allow_interrupts
    @_retry_truncated
    def list_page(self, prefix: str, after: str) -> tuple[Sequence[ObjectMeta], bool]:
        """Return the metadata of the first files below a prefix with keys after `after`, and True if these are all."""
        page = next(iter(self._quick.list(prefix or None, offset=after, chunk_size=LIST_PAGE_SIZE)), ())
        return page, len(page) < LIST_PAGE_SIZE

    def list_keys(self, prefix: str) -> list[str]:
        """Return the keys of all files below a prefix, sorted."""
        return sorted(meta["path"] for meta in self.list_metadata(prefix))

    @_allow_interrupts
    @_retry_truncated
    def is_any_below(self, prefix: str) -> bool:
        """Return True if there is a file below a prefix."""
        return any(some for some in self._quick.list(prefix or None, chunk_size=1))

    def check_conditional_writes(self, prefix: str) -> None:
        """Check, once per prefix, that the store enforces conditional writes.

        Some servers ignore the condition, and some write even if it refers to a missing file. The probe file is kept,
        because a job that creates and deletes one would leave it behind if the job is killed or lacks the permission to
        delete.

        Raises:
            UsageError: The store does not enforce them.
            OSError: The storage failed.
        """
        if prefix in self._checked:
            return
        key, absent = prefix + PROBE_FILE, f"{prefix}{PROBE_FILE}-{uuid.uuid4().hex}"
        if self._try_write(key, None) and self._try_write(key, None):
            raise _make_ignored_condition_error("replaced a file that it was to make")
        old = self.read_version(key)[1]
        if self._try_write(key, old) and self._try_write(
            key, old
        ):  # otherwise another job has written it, which is equally good
            raise _make_ignored_condition_error("replaced another version of a file")
        if self._try_write(absent, old):
            self.delete([absent])
            raise _make_ignored_condition_error("made a file that it was to replace")
        self._checked.add(prefix)

    def _try_write(self, key: str, version: dict[str, str] | None) -> bool:
        try:
            self.put_if_match(key, uuid.uuid4().hex.encode(), version)  # equal bytes would be an equal version
        except VersionConflict:
            return False
        return True


def _make_ignored_condition_error(what: str) -> UsageError:
    return UsageError(
        "this server ignores the conditions of requests, so that two jobs would overwrite each other's tags",
        expected="a refusal of a conditional write (412 Precondition Failed)",
        found=f"it {what}",
        hint="Save to a store that has conditional writes: docs/object-stores.md names some.",
    )


def _get_version(meta: ObjectMeta | PutResult) -> dict[str, str]:
    """Return the values that identify a version of a file: an entity tag, and a generation on Google Cloud Storage."""
    return {name: value for name in ("e_tag", "version") if (value := meta.get(name))}  # type: ignore[misc]


@functools.lru_cache(maxsize=32)
def get_client(scheme: str, bucket: str) -> ObjectStoreClient:
    """Return the client of a bucket. All roots in a bucket share its connections.

    Raises:
        UsageError: obstore is not installed (`MissingPackageError`), the address contains no bucket name, or the
            settings in the environment are invalid.
    """
    of_scheme = SCHEMES[scheme]
    if not bucket:
        raise UsageError("the address names no bucket", expected=of_scheme.example, found=f"{scheme}://")
    with wrap_missing_packages(f"{scheme}://"):
        from obstore import exceptions, store
    _check_not_forked()  # before the client is created, which may start a thread
    kind = getattr(store, of_scheme.obstore_class)
    options = of_scheme.get_client_options()
    plain = of_scheme.is_http_allowed(options)
    patient = {"timeout": PART_TIMEOUT, "connect_timeout": CONNECT_TIMEOUT, "allow_http": plain}
    quick = {**patient, "read_timeout": READ_TIMEOUT}
    options["retry_config"] = {
        "max_retries": MAX_RETRIES,
        "retry_timeout": RETRY_TIMEOUT,
        "backoff": BACKOFF,
    }
    try:
        return ObjectStoreClient(*(kind(bucket, client_options=its, **options) for its in (quick, patient)))
    except exceptions.BaseError as error:
        raise of_scheme.make_settings_error(bucket, str(error)) from error
