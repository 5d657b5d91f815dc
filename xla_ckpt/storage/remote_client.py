"""A bucket, asked through obstore: requests in, bytes out, and refusals as the OSErrors that they mean.

obstore (https://developmentseed.org/obstore) repeats what fails in passing, and sends parts of a file side by side. It
is loaded when the first address of a bucket is used.
"""

from __future__ import annotations

import datetime
import errno
import functools
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from xla_ckpt.errors import UsageError
from xla_ckpt.extras import naming_extras
from xla_ckpt.plan.costs import Costs
from xla_ckpt.storage.base import Changed
from xla_ckpt.storage.process_state import process_wide
from xla_ckpt.storage.remote_errors import NO_STORE, os_error, said_by
from xla_ckpt.storage.schemes import SCHEMES
from xla_ckpt.storage.threads import started
from xla_ckpt.storage.waiting import Outcome

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult
    from obstore.store import ObjectStore

CONNECT_TIMEOUT = "5s"

READ_TIMEOUT = "15s"
"""How long a store may take for the first byte of an answer, and between two of them. A store takes milliseconds."""

PART_TIMEOUT = "120s"
"""For one request that sends a part of a file, or copies one. At 140 kB/s a part of 16 MiB comes through."""

RETRY_TIMEOUT = datetime.timedelta(seconds=30)
"""How long what fails in passing is repeated.

With `CONNECT_TIMEOUT` and `READ_TIMEOUT` that makes at most 50 seconds for a request. So long a load takes to fail
whose store does not answer, and a save, which asks once more to clean up, twice as long.
"""

RETRIES = 1000
"""How often it is repeated: until the time is over."""

LISTED_AT_ONCE = 1000
"""Names in one answer that lists files, at most: S3's answers have as many."""

BROKEN_OFF = 3
"""How often it is asked again, at once, where an answer broke off."""

PAUSES = {"init_backoff": datetime.timedelta(seconds=0.1), "max_backoff": datetime.timedelta(seconds=5)}
"""The first pause between two tries, and the longest one, which adds to `RETRY_TIMEOUT`."""

COSTS = Costs(
    batch_bytes=16 * 1024 * 1024,
    piece_bytes=16 * 1024 * 1024,
    max_gap=2 * 1024 * 1024,
    straight_bytes=4 * 1024 * 1024,
    in_flight=32,
    cached=False,
)
"""A request takes some 25 ms before its first byte, in which 2 MiB come through another one."""

PROBE = ".probe"
"""A small file in each root by which it is found out whether conditions of requests are kept."""

T = TypeVar("T")
P = ParamSpec("P")


def _asked(method: Callable[Concatenate[Client, P], T]) -> Callable[Concatenate[Client, P], T]:
    """A method that asks obstore, whose errors become those that they mean. Its first argument names the file."""

    @functools.wraps(method)
    def ask(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        _check_process()
        from obstore import exceptions

        try:
            return method(client, *args, **kwargs)
        except (exceptions.BaseError, FileNotFoundError) as error:
            cause = type(error)(said_by(error))  # whoever reads the traceback sees it
            raise os_error(cause, _first_key(args)) from cause
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of PyO3: no module has it by name
                raise
            raise OSError(errno.EIO, f"obstore has panicked: {error}", _first_key(args)) from error

    return ask


def _first_key(args: Sequence[Any]) -> str:
    """The file that a request is about, the first of several."""
    return args[0] if isinstance(args[0], str) else args[0][0]


def _quickly(method: Callable[Concatenate[Client, P], T]) -> Callable[Concatenate[Client, P], T]:
    """A method that only asks, so that nothing depends on it any more when its caller was interrupted.

    obstore does not look for signals while it waits. So another thread asks when the caller is the main one, in which
    their handlers run: Ctrl-C comes through at once. What was asked for may be done all the same.
    """
    asked = _asked(method)

    @functools.wraps(method)
    def ask(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if threading.current_thread() is not threading.main_thread():
            return asked(client, *args, **kwargs)
        answer = Outcome[T]()
        call = functools.partial(asked, client, *args, **kwargs)
        if started(functools.partial(answer.run, call), "object store") is None:
            return call()  # handlers wait: there is no thread that could ask
        return answer.result()

    return ask


def _whole(method: Callable[Concatenate[Client, P], T]) -> Callable[Concatenate[Client, P], T]:
    """A method that reads, which asks again if its answer breaks off.

    obstore asks again for the rest of a file, and not where a list breaks off, or the answer that a file is not there.
    """

    @functools.wraps(method)
    def ask(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(BROKEN_OFF):
            try:
                return method(client, *args, **kwargs)
            except Exception as error:
                if "response body error" not in str(error):
                    raise
        return method(client, *args, **kwargs)

    return ask


@dataclass
class _Use:
    """Whether a process has used obstore, whose threads and connections are not there in one that is forked from it."""

    by_this_process: bool = False
    by_parent: bool = False

    def reset_after_fork(self) -> None:
        self.by_parent |= self.by_this_process


_USE = process_wide(_Use(), _Use.reset_after_fork)


def _check_process() -> None:
    """Refuse the use of obstore in a forked process, where it would wait for its threads for ever."""
    _USE.by_this_process = True
    if _USE.by_parent:
        raise UsageError(
            "this process was forked from one that had used an object store, whose connections it cannot use",
            hint='Start such processes with multiprocessing.get_context("spawn").',
        )


class Client:
    """The files of a bucket, by their full names.

    Methods raise FileNotFoundError for a file that is not there, PermissionError, and other OSErrors for what else the
    store refuses or does not answer. Where one raises, what it does may be done all the same: answers get lost.
    """

    costs = COSTS

    def __init__(self, quick: ObjectStore, patient: ObjectStore) -> None:
        self._quick, self._patient = quick, patient
        self._checked: set[str] = set()

    @_quickly
    def head(self, key: str) -> ObjectMeta:
        """Size, version and time of a file."""
        return self._quick.head(key)

    @_quickly
    def read(self, key: str, offset: int, nbytes: int, version: str | None) -> tuple[memoryview, int, str | None]:
        """Some bytes of a file, its size, and its version. With `version` it must have that one.

        Bytes are fewer where it ends. If it ends before them, its size is at most the offset.
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

    @_quickly
    @_whole
    def read_version(self, key: str) -> tuple[bytes, dict[str, str]]:
        """All of a small file, and what it takes to replace this version of it."""
        answer = self._quick.get(key)
        version = _version_of(answer.meta)
        if not version:  # a web page, for instance, which is not to be taken for a damaged file
            raise OSError(errno.EPROTO, NO_STORE, key)
        return bytes(answer.bytes()), version

    @_asked
    def send(self, key: str, data: Any, part_bytes: int, parts_at_once: int) -> None:
        """Write a file: from bytes, from a file, or from an iterator of bytes, which comes in parts."""
        self._patient.put(key, data, chunk_size=part_bytes, max_concurrency=parts_at_once)

    @_quickly
    def write_if(self, key: str, data: bytes, version: dict[str, str] | None) -> dict[str, str]:
        """Write a small file if it has this version; with None, if there is none. The version that it has then.

        Raises:
            Changed: It has another one, or there is one, or none. The store says so of a write of its own, too, that it
                has done and whose answer got lost.
        """
        from obstore import exceptions

        try:
            mode: Any = "create" if version is None else version
            return _version_of(self._quick.put(key, data, mode=mode, use_multipart=False))
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise Changed(key) from error
        except FileNotFoundError as error:
            if version is not None and isinstance(os_error(error, key), FileNotFoundError):
                raise Changed(key) from error
            raise

    @_asked
    def copy(self, source: str, target: str) -> None:
        """Have a file under a second name."""
        self._patient.copy(source, target)

    @_quickly
    def delete(self, keys: Sequence[str]) -> None:
        """Delete files, as far as they are there."""
        try:
            self._quick.delete(keys)
        except FileNotFoundError as error:
            if not isinstance(os_error(error, ""), FileNotFoundError):
                raise

    @_quickly
    @_whole
    def names_below(self, prefix: str) -> list[str]:
        """What lies directly below a prefix, sorted."""
        answer = self._quick.list_with_delimiter(prefix or None)
        keys = [*answer["common_prefixes"], *(meta["path"] for meta in answer["objects"])]
        return sorted(key.rstrip("/").rpartition("/")[2] for key in keys)

    @_quickly
    @_whole
    def metas_below(self, prefix: str) -> list[ObjectMeta]:
        """All files below a prefix."""
        return [meta for some in self._quick.list(prefix or None) for meta in some]

    @_quickly
    @_whole
    def page_below(self, prefix: str, after: str) -> tuple[Sequence[ObjectMeta], bool]:
        """Return the first files below a prefix whose names come after another one, and whether these are all."""
        page = next(iter(self._quick.list(prefix or None, offset=after, chunk_size=LISTED_AT_ONCE)), ())
        return page, len(page) < LISTED_AT_ONCE

    def below(self, prefix: str) -> list[str]:
        """The full names of all files below a prefix, sorted."""
        return sorted(meta["path"] for meta in self.metas_below(prefix))

    @_quickly
    @_whole
    def is_any_below(self, prefix: str) -> bool:
        """Whether there is a file below a prefix."""
        return any(some for some in self._quick.list(prefix or None, chunk_size=1))

    def check_conditions(self, prefix: str) -> None:
        """Find out, once for each prefix, whether the store replaces a file only on its condition.

        Some servers ignore the condition, and some write where it names a file that is not there. The file by which
        they are tried stays: one that each job makes and deletes would be left by those that are killed meanwhile, or
        that may not delete.

        Raises:
            UsageError: It does not.
        """
        if prefix in self._checked:
            return
        key, absent = prefix + PROBE, f"{prefix}{PROBE}-{uuid.uuid4().hex}"
        if self._writes(key, None) and self._writes(key, None):
            raise _careless("replaced a file that it was to make")
        old = self.read_version(key)[1]
        if self._writes(key, old) and self._writes(key, old):  # else another job has come before, which is as good
            raise _careless("replaced another version of a file")
        if self._writes(absent, old):
            self.delete([absent])
            raise _careless("made a file that it was to replace")
        self._checked.add(prefix)

    def _writes(self, key: str, version: dict[str, str] | None) -> bool:
        try:
            self.write_if(key, uuid.uuid4().hex.encode(), version)  # equal bytes would be an equal version
        except Changed:
            return False
        return True


def _careless(what: str) -> UsageError:
    return UsageError(
        "this server ignores the conditions of requests, so that two jobs would overwrite each other's tags",
        expected="a refusal of a conditional write (412 Precondition Failed)",
        found=f"it {what}",
        hint="Save to a store that has conditional writes: docs/object-stores.md names some.",
    )


def _version_of(meta: ObjectMeta | PutResult) -> dict[str, str]:
    """What tells the versions of a file apart: an entity tag, and on Google's servers a generation."""
    return {name: value for name in ("e_tag", "version") if (value := meta.get(name))}  # type: ignore[misc]


@functools.lru_cache(maxsize=32)
def client_of(scheme: str, bucket: str) -> Client:
    """The client of a bucket. All roots in it share their connections.

    Raises:
        UsageError: obstore is not installed (`MissingPackageError`), or the address names no bucket.
    """
    of_scheme = SCHEMES[scheme]
    if not bucket:
        raise UsageError("the address names no bucket", expected=of_scheme.address, found=f"{scheme}://")
    with naming_extras(f"{scheme}://"):
        from obstore import exceptions, store
    _check_process()  # before the store is made, which may begin a thread
    kind = getattr(store, of_scheme.obstore_class)
    options = of_scheme.client()
    plain = of_scheme.allows_http(options)
    patient = {"timeout": PART_TIMEOUT, "connect_timeout": CONNECT_TIMEOUT, "allow_http": plain}
    quick = {**patient, "read_timeout": READ_TIMEOUT}
    options["retry_config"] = {
        "max_retries": RETRIES,
        "retry_timeout": RETRY_TIMEOUT,
        "backoff": PAUSES,
    }
    try:
        return Client(*(kind(bucket, client_options=its, **options) for its in (quick, patient)))
    except exceptions.BaseError as error:
        raise of_scheme.refusal(bucket, str(error)) from error
