"""Options of saves, loads and conversions: one dataclass for each, validated on construction.

A new option takes a field of one of these classes, its use, and its documentation.
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
"""Bytes of array data in memory at a time while tags are converted or compared, by default."""

OnError = Literal["raise", "warn"] | Callable[[CheckpointError], object]
"""What happens to the error of a save that failed: it is raised, or logged, or handed to a function of the program."""

Stale = Literal["warn", "raise", "ignore"]
"""What a save does that has the model of the save before it, although training went on."""

ReplicaRead = Literal["each", "share"]
"""Whether each rank reads all that it needs, or ranks that need the same bytes read a part each."""


@check_option_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a save goes about its work, for `save_checkpoint`, `save` and `xla_ckpt.dcp`.

    Args:
        replicas: ``"equal"``: what several ranks hold alike is compared, by samples, and a difference is an error.
            ``"first"``, for a job whose replicas have drifted apart: the first replica of each array is stored, whole,
            and the rank that has it writes all of it. What differed is logged, and recorded in the tag. Parts of an
            array that nobody declared as such look like drifted replicas, and all but the first would be lost.
        on_error: What happens if the save fails: ``"raise"``; ``"warn"``, which logs a warning, so that a run goes on
            that can wait for its next save; or a function, which is called with the error, on a thread of this
            library. With the last two nothing is raised but by ``handle.result()``, and
            ``handle.error`` has the error. Mistakes of the program (`UsageError`, `UnsupportedStateError`,
            `InvalidTagError`) are raised in any case. All ranks say the same.
        stale: What happens if all arrays of the model have the bytes of the newest tag, although something else in the
            state, or the number in the tag's name, says that training went on: ``"warn"``, ``"raise"`` (a `SaveError`;
            nothing is committed) or ``"ignore"``.
        share: Whether a tag shares files with the one before it (docs/sharing.md): a file of that tag of which all
            bytes are still the same appears in the new one, too, and is not written again. True compares with the
            newest tag, and a name with that tag of the same root directory. Only the native layout does it. Each tag
            stays whole by itself: what is shared is there as long as one of the tags is.
        parity: What the tag is to survive (docs/repair.md): ``"block"``, a damaged block of 1 MiB in each of its files,
            or ``"file"``, that and the loss of one file. `repair` gives the bytes back. The files are read once more
            for ``"block"``, and twice more for ``"file"``, which takes as much room as the largest file.
        snapshot: How an asynchronous save freezes memory that the program writes to (docs/snapshots.md): ``"host"``
            copies it to host memory before the call returns; ``"device"`` clones what is on an accelerator there, and
            transfers the clones in the background; ``"overlap"`` copies parameters and optimizer state in the
            background, and has the next optimizer step wait for that. XLA's and jax's arrays are never copied.
        snapshot_budget: Host memory for what is copied in the background (bytes); the state may be larger.
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal or in a notebook.
        trace: Where a trace of the save goes that Perfetto shows: a file, or a directory that is there or ends with
            ``/``, in which each rank makes a file of its own. By default the directory that ``XLA_CKPT_TRACE`` names in
            the environment, if it does (docs/reports.md).
        timeout: Seconds that a rank which is done waits for the others before all that are left give up.
        retention: Which tags are kept after the commit, in place of ``num_kept_ckpts`` (docs/retention.md):
            ``LatestN(3)``, ``BestN("loss", n=2)``, ``EveryNSteps(1000)``, ``EveryNSeconds(86400)``,
            ``LatestDuration(timedelta(days=7))``, or what one of several keeps: ``LatestN(3) | BestN("loss")``. None
            keeps all. The newest tag and pinned ones are kept in any case.
        products: `Product`s: what is made of the tag after its commit, in the background on rank 0, for other readers:
            a directory of Hugging Face's, another layout (docs/products.md). An error is logged, does not fail the
            save, and is raised by `finalize_checkpoint`, which waits for products.
        local: Where the path is an address such as ``s3://bucket/run``: a directory of this machine's file systems, on
            a disk that all hosts of the job see, or on one of each host's own. The save commits there, and the first
            rank of each disk uploads what the disk has in the background, after the tags before it. An upload that
            fails is logged, does not fail the save, and is repeated with the next one, in this process or a later one;
            `SaveHandle.uploaded` and `finalize_checkpoint` wait for it, and raise its error. Retention counts in both
            places; the directory keeps tags beyond it until they are in the bucket (docs/object-stores.md).

    Raises (on construction):
        UsageError: There is no such choice, or a number makes no sense.

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
        """What all ranks of a job have to say alike, by name."""
        return {
            "replicas": self.replicas,
            "share": self.share,
            "parity": self.parity,
            "stale": self.stale,
            "on_error": "a function" if callable(self.on_error) else self.on_error,
            "retention": self.retention,
            "products": self.products,
            "local": self.local is not None,  # each host may have one of its own
        }


@check_option_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a load goes about its work, for `load_checkpoint` and `restore`.

    Args:
        replica_read: ``"each"``: every rank reads what it needs. ``"share"``: ranks that need the same bytes, or
            columns of the same rows, read a part each and send it to the others, so that the storage is read once. Each
            rank reads itself what goes through a `load_state_dict` of an object.
        prove: Read back what was loaded, when everything is installed, from the device where it is: the bytes have to
            be those of the tag, block by block, or the load raises an `UnprovenLoadError` on all ranks.
            ``report.unproven`` names arrays whose bytes cannot be compared (docs/reports.md).
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal or in a notebook.
        trace: Where a trace of the load goes (see `SaveOptions`).
        timeout: Seconds that a rank waits for another one.
        local: The directory of `SaveOptions.local`. The newest tag of both places is loaded, by the number of its
            commit; a tag that is in both is read from the directory, and from the bucket if it is damaged there.

    Raises (on construction):
        UsageError: There is no such choice, or a number makes no sense.

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
        """What all ranks of a job have to say alike, by name."""
        return {
            "replica_read": self.replica_read,
            "prove": self.prove,
            "local": self.local is not None,  # each host may have one of its own
        }


@check_option_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """How tags are read and written anew without a job, for `convert`, `export_hf` and `diff`.

    Args:
        max_memory: Bytes of array data in memory at a time, beside the readers' own buffers.
        num_workers: Threads that read, at most.
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal or in a notebook.
            `diff` never shows one.

    Raises (on construction):
        UsageError: A number makes no sense.

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
    """For a block, the options of calls that say no ``options=`` themselves.

    An explicit ``options=`` counts as a whole: its fields are not mixed with those of a block. Of blocks inside of each
    other the innermost counts that has options of the call's class, likewise as a whole. An asynchronous save keeps the
    options that it began with.

    The options are bound to the context (`contextvars`): tasks of asyncio that are begun in the block have them, and
    other threads have not.

    Args:
        options: At most one of each class.

    Raises:
        UsageError: Something is no such value, or two are of one class.

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
    """The options of a call: its own, or those of the block that it is in, or the usual ones.

    Raises:
        UsageError: They are none of this kind.
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
    """Whether a value is a `Product`, whose class knows the layouts, which lie above this module."""
    return hasattr(value, "every_n_steps") and not isinstance(value, type)


def check_positive_int(name: str, number: Any, unit: str) -> None:
    """Refuse what is no number of so many.

    Raises:
        UsageError: It is none, or not positive.
    """
    if type(number) is not int or number <= 0:
        raise UsageError(f"{name} is no number of {unit}", expected="a positive int", found=repr(number))


def _check_timeout(timeout: Any) -> None:
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise UsageError("a timeout is a number of seconds above 0", found=repr(timeout))
