"""Options of saves, loads and conversions: one dataclass for each, validated on construction.

A new option needs a field in one of these classes, the code that uses it, and documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from xla_ckpt.core.files.parity import ParityLevel
from xla_ckpt.core.plan.merge import ReplicaPolicy
from xla_ckpt.distributed.job import DEFAULT_TIMEOUT
from xla_ckpt.errors import CheckpointError, UsageError
from xla_ckpt.keywords import check_choice, check_option_fields
from xla_ckpt.snapshot.arena import BUDGET_BYTES
from xla_ckpt.snapshot.snapshot import SnapshotMode
from xla_ckpt.storage.resolve import PathLike
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.tags.entry import check_tag
from xla_ckpt.tags.retention import Retention, check_policy

DEFAULT_MAX_MEMORY = 1 << 30
"""Default maximum number of bytes of array data in memory while tags are converted or compared."""

OnError = Literal["raise", "warn"] | Callable[[CheckpointError], object]
"""Handling of the error of a failed save: raise it, log it, or pass it to a callback of the program."""

Stale = Literal["warn", "raise", "ignore"]
"""Action of a save whose model is unchanged since the previous save, although training continued."""

ReplicaRead = Literal["each", "share"]
"""Read mode: each rank reads everything it needs, or ranks that need the same bytes each read a part of them."""


@check_option_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Settings of a save, for `save_checkpoint`, `save` and `xla_ckpt.dcp`.

    Args:
        replicas: ``"equal"``: replicas on several ranks are compared, by samples, and a difference is an error.
            ``"first"``, for a job whose replicas have diverged: the first replica of each array is stored completely by
            its rank. Differences are logged, and recorded in the tag. With ``"first"``, parts of an array whose
            sharding is not declared look like diverged replicas, and all but the first would be lost.
        on_error: Handling of a failed save: ``"raise"``; ``"warn"``, which logs a warning, for runs that can wait for
            the next save; or a callback, which is called with the error on a thread of this library. With the last two,
            only ``handle.result()`` raises the error, and ``handle.error`` contains it. Errors of the program
            (`UsageError`, `UnsupportedStateError`, `InvalidTagError`) are always raised. Must be the same on all ranks.
        stale: Action if all arrays of the model have the same bytes as in the newest tag, although other state, or the
            number in the tag's name, shows that training continued: ``"warn"``, ``"raise"`` (a `SaveError`; nothing is
            committed) or ``"ignore"``.
        share: Share unchanged files with an earlier tag (docs/sharing.md): a file of that tag whose bytes are all
            unchanged becomes part of the new tag, too, and is not written again. True compares with the newest tag, and
            a name with that tag of the same root directory. Only the native layout supports this. Each tag remains
            complete: a shared file exists as long as one of its tags does.
        parity: Damage that the tag can be repaired from (docs/repair.md): ``"block"``, one damaged block of 1 MiB in
            each of its files, or ``"file"``, which also covers the loss of one file. `repair` restores the bytes. The
            files are read once more for ``"block"``, and twice more for ``"file"``, which needs as much space as the
            largest file.
        snapshot: Handling of memory that the program modifies during an asynchronous save (docs/snapshots.md):
            ``"host"`` copies it to host memory before the call returns; ``"device"`` clones arrays on the accelerator,
            and transfers the clones in the background; ``"overlap"`` copies parameters and optimizer state in the
            background, and makes the next optimizer step wait for the copy. Arrays of XLA and jax are never copied.
        snapshot_budget: Maximum host memory for background copies, in bytes; the state may be larger.
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal or in a notebook.
        trace: Path of a trace of the save for Perfetto: a file, or a directory that exists or ends with ``/``, in which
            each rank writes its own file. By default the directory in the environment variable ``XLA_CKPT_TRACE``, if
            set (docs/reports.md).
        timeout: Seconds that a finished rank waits for the others before all remaining ranks fail.
        retention: Retention policy that is applied after the commit, instead of ``num_kept_ckpts`` (docs/retention.md):
            ``LatestN(3)``, ``BestN("loss", n=2)``, ``EveryNSteps(1000)``, ``EveryNSeconds(86400)``,
            ``LatestDuration(timedelta(days=7))``, or a combination that keeps the union:
            ``LatestN(3) | BestN("loss")``. None keeps all. The newest tag and pinned tags are always kept.
        products: Tuple of `Product`s: exports of the tag for other readers, made after its commit, in the background on
            rank 0: a Hugging Face folder, another layout (docs/products.md). An error is logged, does not fail the
            save, and is raised by `finalize_checkpoint`, which waits for products.
        local: Local directory for saves to an address such as ``s3://bucket/run``, on a disk that all hosts of the job
            share, or on a disk of each host. The save commits there, and the first rank of each disk uploads the files
            on that disk in the background, after earlier tags. A failed upload is logged, does not fail the save, and
            is retried with the next one, in this process or a later one; `SaveHandle.uploaded` and
            `finalize_checkpoint` wait for it, and raise its error. Retention applies to both places; the directory
            keeps tags beyond it until they are in the bucket (docs/object-stores.md).

    Raises (on construction):
        UsageError: A choice or a number is invalid.

    Example:
        ``xla_ckpt.save_checkpoint("runs/lm", "step_10", model, options=xla_ckpt.SaveOptions(parity="file"))``
    """

    replicas: ReplicaPolicy = "equal"
    on_error: OnError = "raise"
    stale: Stale = "warn"
    share: bool | str = False
    parity: ParityLevel | None = None
    snapshot: SnapshotMode = "host"
    snapshot_budget: int = BUDGET_BYTES
    progress: bool | None = None
    trace: PathLike | None = None
    timeout: float = DEFAULT_TIMEOUT
    retention: Retention | None = None
    products: tuple[Any, ...] = ()
    local: PathLike | None = None

    def __post_init__(self) -> None:
        check_choice("replicas", self.replicas, get_args(ReplicaPolicy))
        check_choice("stale", self.stale, get_args(Stale))
        if not isinstance(self.share, bool | str):
            raise UsageError("share is no choice", expected="True, False, or the name of a tag", found=repr(self.share))
        if not isinstance(self.share, bool):
            check_tag(self.share)
        check_choice("parity", self.parity, (None, *get_args(ParityLevel)))
        check_choice("snapshot", self.snapshot, get_args(SnapshotMode))
        if not callable(self.on_error):
            check_choice("on_error", self.on_error, ("raise", "warn"), " or a function")
        if self.retention is not None:
            check_policy("retention", self.retention)
        if not isinstance(self.products, tuple) or not all(map(_is_product, self.products)):
            raise UsageError(
                "products= is no tuple of products",
                expected="(xla_ckpt.Product(...), ...)",
                found=repr(self.products)[:80],
            )
        check_positive_int("snapshot_budget", self.snapshot_budget, "bytes")
        _check_timeout(self.timeout)

    def in_common(self) -> dict[str, Any]:
        """Return the options that must be the same on all ranks of a job, by name."""
        return {
            "replicas": self.replicas,
            "share": self.share,
            "parity": self.parity,
            "stale": self.stale,
            "on_error": "a function" if callable(self.on_error) else self.on_error,
            "retention": self.retention,
            "products": self.products,
            "local": self.local is not None,  # each host may have a different directory
        }


@check_option_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Settings of a load, for `load_checkpoint` and `restore`.

    Args:
        replica_read: ``"each"``: every rank reads the bytes it needs. ``"share"``: ranks that need the same bytes, or
            columns of the same rows, each read a part and send it to the others, so that the storage is read once.
            State that goes through an object's `load_state_dict` is always read by each rank itself.
        prove: Read back the loaded arrays, after everything is installed, from their devices, and compare them with the
            tag block by block; a difference raises an `UnprovenLoadError` on all ranks. ``report.unproven`` names
            arrays whose bytes cannot be compared (docs/reports.md).
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal or in a notebook.
        trace: Path of a trace of the load (see `SaveOptions`).
        timeout: Seconds that a rank waits for another one.
        local: Directory of `SaveOptions.local`. The newest tag of both places is loaded, by its commit number; a tag
            that is in both is read from the directory, and from the bucket if it is damaged there.

    Raises (on construction):
        UsageError: A choice or a number is invalid.

    Example:
        ``xla_ckpt.load_checkpoint("runs/lm", model=model, options=xla_ckpt.LoadOptions(replica_read="share"))``
    """

    replica_read: ReplicaRead = "each"
    prove: bool = False
    progress: bool | None = None
    trace: PathLike | None = None
    timeout: float = DEFAULT_TIMEOUT
    local: PathLike | None = None

    def __post_init__(self) -> None:
        check_choice("replica_read", self.replica_read, get_args(ReplicaRead))
        _check_timeout(self.timeout)

    def in_common(self) -> dict[str, Any]:
        """Return the options that must be the same on all ranks of a job, by name."""
        return {
            "replica_read": self.replica_read,
            "prove": self.prove,
            "local": self.local is not None,  # each host may have a different directory
        }


@check_option_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Settings for reading and rewriting tags without a job, for `convert`, `export_hf` and `diff`.

    Args:
        max_memory: Maximum number of bytes of array data in memory, in addition to the readers' own buffers.
        num_workers: Maximum number of reader threads.
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal or in a notebook.
            `diff` never shows one.

    Raises (on construction):
        UsageError: A number is invalid.

    Example:
        ``xla_ckpt.convert("runs/lm", "out", to="dcp", options=xla_ckpt.ConvertOptions(max_memory=256 * 1024**2))``
    """

    max_memory: int = DEFAULT_MAX_MEMORY
    num_workers: int = READ_THREADS
    progress: bool | None = None

    def __post_init__(self) -> None:
        check_positive_int("max_memory", self.max_memory, "bytes")
        check_positive_int("num_workers", self.num_workers, "threads")


Options = TypeVar("Options", SaveOptions, LoadOptions, ConvertOptions)

_DEFAULTS: ContextVar[Mapping[type[Any], Any]] = ContextVar("xla_ckpt.options", default={})  # noqa: B039  # never changed


@contextmanager
def default_options(*options: SaveOptions | LoadOptions | ConvertOptions) -> Iterator[None]:
    """Set the default options of calls in a block, for calls without ``options=``.

    An explicit ``options=`` replaces the defaults completely: fields are not merged. In nested blocks, the innermost
    block with options of the call's class is used, also without merging. An asynchronous save keeps the options with
    which it began.

    The options are bound to the context (`contextvars`): asyncio tasks that are started in the block inherit them,
    other threads do not.

    Args:
        options: At most one of each class.

    Raises:
        UsageError: A value is not an options object, or two are of the same class.

    Example:
        ``with xla_ckpt.default_options(SaveOptions(parity="block"), LoadOptions(replica_read="share")): train()``
    """
    defaults = dict(_DEFAULTS.get())
    for number, value in enumerate(options):
        if type(value) not in (SaveOptions, LoadOptions, ConvertOptions):
            raise UsageError(
                "default_options takes options",
                expected="SaveOptions, LoadOptions or ConvertOptions",
                found=type(value).__name__,
            )
        if type(value) in map(type, options[:number]):
            raise UsageError("default_options has two values of one class", found=type(value).__name__)
        defaults[type(value)] = value
    token = _DEFAULTS.set(defaults)
    try:
        yield
    finally:
        _DEFAULTS.reset(token)


def resolve_options(kind: type[Options], options: Options | None) -> Options:
    """Return the options of a call: its own, the defaults of the enclosing block, or the defaults of the class.

    Raises:
        UsageError: The options are of another class.
    """
    if options is None:
        of_block: Options | None = _DEFAULTS.get().get(kind)
        return kind() if of_block is None else of_block
    if not isinstance(options, kind):
        raise UsageError(
            "options= is of another class", expected=f"xla_ckpt.{kind.__name__}", found=type(options).__name__
        )
    return options


def _is_product(value: Any) -> bool:
    """Return True if a value is a `Product`, without an import of its class, which belongs to a higher layer."""
    return hasattr(value, "every_n_steps") and not isinstance(value, type)


def check_positive_int(name: str, number: Any, unit: str) -> None:
    """Raise an error if a number is not a positive int.

    Raises:
        UsageError: The number is not a positive int.
    """
    if type(number) is not int or number <= 0:
        raise UsageError(f"{name} is no number of {unit}", expected="a positive int", found=repr(number))


def _check_timeout(timeout: Any) -> None:
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise UsageError("a timeout is a number of seconds above 0", found=repr(timeout))
