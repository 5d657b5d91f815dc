"""One error for all ranks: what DCP gathers of a failed call, as an error of this library, which is DCP's, too."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from xla_ckpt.errors import CheckpointError, IncompatibleCheckpointError, RankFailedError
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.keywords import nearest
from xla_ckpt.tree.path import listed

_MISSING = re.compile(r"Missing key in checkpoint state_dict: (?P<key>.*?)\.?", re.DOTALL)
_SIZE = re.compile(
    r"Size mismatch between saved (?:torch\.Size\()?(?P<stored>\[.*?\])\)? and current: (?:torch\.Size\()?"
    r"(?P<wanted>\[.*?\])\)? for (?P<key>.*)",
    re.DOTALL,
)
_KIND = re.compile(r"Invalid checkpoint metadata for (?P<key>.*), expected BytesStorageMetadata but found ", re.DOTALL)
PARTIAL_LOAD = "planner=DefaultLoadPlanner(allow_partial_load=True)"
"""The argument of `load` for state dicts with keys that are not stored."""

_NO_GROUP = "Default process group has not been initialized"
_OTHER_SIZE = (
    "Make the model as it was at the save. If it is a part of a tensor-parallel rank, give the call "
    "xla_ckpt.dcp.sharded(state_dict, model, mesh)."
)
_NO_TENSOR = "Give a tensor of its shape to load into, as the state_dict() of the model has it."
_NO_MEMORY = "Give it some before the load: model.to_empty(device=...)."
_COLLECTIVE = re.compile(r"gloo|ProcessGroup|[Cc]onnection (closed|reset|refused)|[Ss]ocket|Broken pipe")
"""What stands in the errors of collectives, which are plain RuntimeErrors."""


@contextlib.contextmanager
def one_error(
    doing: str, kind: type[CheckpointError], path: str | None, stored: Callable[[], Iterable[str]] = tuple
) -> Iterator[None]:
    """A block that calls stock DCP: what fails on any rank is raised here, and is the same on all ranks.

    What DCP has gathered is raised as an error that is a `CheckpointException`, too, with the same `failures`. DCP's
    own one, whose text has the tracebacks of all ranks, is its cause.

    Args:
        kind: What an exception becomes that is no error of ours, and none of the operating system.
        stored: The keys of what is loaded, for an error about one that is not there.
    """
    try:
        yield
    except CheckpointException as gathered:
        raise _as_both(_verdict(gathered, doing, kind, stored()).at(path=path), gathered) from gathered
    except CheckpointError as error:
        error.at(path=path)
        raise
    except Exception as error:
        if dist.is_available() and (isinstance(error, dist.DistError) or _COLLECTIVE.search(str(error))):
            raise RankFailedError(
                f"{doing} failed, because a rank did not answer",
                path=path,
                hint="It died, hangs, or never made this call: all ranks must make the same calls.",
                details=str(error)[:2000],
            ) from error
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        raise as_checkpoint_error(error, doing, rank, kind, path=path) from error


def _as_both(error: CheckpointError, gathered: CheckpointException) -> CheckpointError:
    """The error with a class that is also DCP's: programs written for stock DCP catch that one."""
    if not isinstance(error, CheckpointException):
        error.__class__ = _both(type(error))  # type: ignore[arg-type]  # classes have a hash
    error._failures = gathered.failures  # type: ignore[attr-defined]  # where `CheckpointException` has them
    return error


@functools.cache
def _both(kind: type[CheckpointError]) -> type[CheckpointError]:
    """A kind of error as a `CheckpointException`, of the same name, under which it travels to other ranks."""

    def reduce(self: CheckpointError) -> Any:
        return _unpickled, (kind, self.problem), vars(self)

    body = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__str__": kind.__str__, "__reduce__": reduce}
    return type(kind.__name__, (kind, CheckpointException), body)


def _unpickled(kind: type[CheckpointError], problem: str) -> CheckpointError:
    return _both(kind)(problem)  # type: ignore[arg-type]  # likewise


def _verdict(
    gathered: CheckpointException, doing: str, kind: type[CheckpointError], stored: Iterable[str]
) -> CheckpointError:
    """The error of the lowest rank that has one of ours; of the lowest rank, if none has."""
    failures: dict[int, BaseException] = {rank: failure[0] for rank, failure in sorted(gathered.failures.items())}
    for error in failures.values():
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
    ours = [(rank, error) for rank, error in failures.items() if isinstance(error, CheckpointError)]
    if ours:
        rank, error = ours[0]
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return error if len(failures) > 1 or not several else error.at(rank=rank)
    rank, first = next(iter(failures.items()))
    return _of_stock(first, stored) or as_checkpoint_error(first, doing, rank, kind)


def _of_stock(error: BaseException, stored: Iterable[str]) -> CheckpointError | None:
    """An error of stock's planners about a state dict that does not fit, as one of ours; None for any other."""
    text = str(error)
    facts: dict[str, Any] = {}
    if (match := _MISSING.fullmatch(text)) is not None:
        keys = [*stored]
        facts = {"hint": f"{_beside(match['key'], keys)}{PARTIAL_LOAD} leaves out what is not stored."}
        text = f"Missing key in checkpoint state_dict: {match['key']}{nearest(match['key'], keys)}"
    elif (match := _SIZE.fullmatch(text)) is not None:
        facts = {"expected": match["stored"], "found": match["wanted"], "hint": _OTHER_SIZE}
    elif (match := _KIND.match(text)) is not None:
        text, facts = "a tensor is stored under this key, and the state dict has none there", {"hint": _NO_TENSOR}
    elif text.startswith(_NO_GROUP):
        # Stock makes a tensor for one on the meta device, on the device of the process group.
        return IncompatibleCheckpointError("a tensor on the meta device has no memory to load into", hint=_NO_MEMORY)
    else:
        return None
    problem = IncompatibleCheckpointError(text, leaf=match["key"], **facts)
    problem.__cause__ = error
    return problem


def _beside(key: str, stored: Iterable[str]) -> str:
    """What is stored where a key was looked for, as a sentence; nothing if it is not known.

    >>> _beside("optimizer.step", ["model.w", "optim.step"]), _beside("model.v", ["model.w"])
    ('Stored there: model, optim. ', 'Stored below model: w. ')
    """
    parts, names = key.split("."), [name.split(".") for name in stored]
    for depth in reversed(range(len(parts))):
        if beside := dict.fromkeys(name[depth] for name in names if name[:depth] == parts[:depth] and name[depth:]):
            where = f"below {'.'.join(parts[:depth])}" if depth else "there"
            return f"Stored {where}: {listed(list(beside))}. "
    return ""
