"""What is interrupted: calls of the library in a program that goes on afterwards, and what that program then has."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xla_ckpt
import xla_ckpt.dcp
from tests.crash.operations import (
    LIVE,
    OPERATIONS,
    Operation,
    arrays_of,
    dcp_state,
    handle_of_save,
    module,
    momentum_of,
    saves,
    saving,
)
from tests.xla import HAS_XLA
from xla_ckpt.loading import restore
from xla_ckpt.storage.signals import defer_signals


class _Dataset:
    """An object of the program's with a state."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.number = state["number"]


@dataclass
class Program:
    """What a program has in one run of a scene."""

    changes: bool = True
    """Whether it goes on with other weights after the call."""

    numbers: Callable[[], list[float]] = list
    """The different numbers in the objects that it had loaded."""

    waits: Callable[[], object] = lambda: None
    """What it waits for after the call, besides `finalize_checkpoint`."""

    promised: bool = False
    """Whether an asynchronous save has returned."""

    code: int | None = None
    """Exit code of a command line."""

    printed: str = ""
    """What that has printed as errors."""


PROGRAM = Program()
"""That of this process, which runs one scene only."""


def before_and_after(returned: bool, signalled: str) -> list[str]:
    """What is wrong with objects that a load had in hand: they have all of their former state, or all of the new."""
    numbers = PROGRAM.numbers() or [5]  # none: the program had not come to the load yet
    if returned:
        return [] if numbers == [7] else [f"loaded, and has {numbers}"]
    return [] if numbers in ([5], [7]) else [f"half loaded: {numbers}"]


def one_line(returned: bool, signalled: str) -> list[str]:
    """What is wrong with the end of a command line."""
    if PROGRAM.code is None and signalled == "SIGINT":
        return ["Ctrl-C left the command with a traceback"]
    if PROGRAM.code in (None, 0):
        return []
    right = (130, "xla-ckpt: interrupted\n")
    return [] if (PROGRAM.code, PROGRAM.printed) == right else [f"exit code {PROGRAM.code}: {PROGRAM.printed}"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """An operation, and what a program asks of its own objects when it is over."""

    operation: Operation
    judge: Callable[[bool, str], list[str]] = lambda returned, signalled: []
    """What is wrong with them, from whether the call has returned, and the name of the signal."""

    xla: bool = False
    heard: bool = True
    """Whether the program hears of each exception: asyncio only logs those that a callback of its own meets."""


# --- saves ---------------------------------------------------------------------------------------------------------


def _finalizes(root: Path) -> None:
    handle_of_save(root, "b", 7, async_save=True)
    _promised()
    xla_ckpt.finalize_checkpoint()


def _waits(root: Path) -> None:
    handle = handle_of_save(root, "b", 7, async_save=True)
    _promised()
    assert handle.wait()
    handle.result()


def _promised() -> None:
    """The call has returned: the program goes on with other weights, and the tag will be there."""
    PROGRAM.promised = True
    for array in LIVE:
        array.detach().fill_(-1)


def _in_a_guard(root: Path) -> None:
    former = signal.getsignal(signal.SIGHUP)
    try:
        with xla_ckpt.PreemptionGuard(signals=[signal.SIGHUP]) as guard:
            signal.raise_signal(signal.SIGHUP)
            assert guard.should_save()
            saves(root, "b", 7)
    finally:
        PROGRAM.numbers = lambda: [5.0 if signal.getsignal(signal.SIGHUP) == former else 0.0]


def _former_handler(returned: bool, signalled: str) -> list[str]:
    return [] if PROGRAM.numbers() == [5] else ["a handler of the program's was not given back"]


def _cancelled(root: Path) -> None:
    """A save that runs in a thread is cancelled, which does not end it."""

    async def saved(pool: ThreadPoolExecutor) -> None:
        with defer_signals():
            saving = pool.submit(saves, root, "b", 7)
            PROGRAM.waits = saving.exception
        task = asyncio.ensure_future(asyncio.wrap_future(saving))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    PROGRAM.changes = False  # it cannot know what the thread still reads
    with ThreadPoolExecutor(1) as pool:
        asyncio.run(saved(pool))


# --- loads ---------------------------------------------------------------------------------------------------------


def _state(number: int, lr: float) -> dict[str, Any]:
    made = module(number)
    optimizer = momentum_of(made, number)
    optimizer.param_groups[0]["lr"] = lr
    return {"model": made, "optimizer": optimizer, "extras": {"data": _Dataset(number)}}


def _numbers_of(state: Mapping[str, Any]) -> list[float]:
    made, optimizer = state["model"], state["optimizer"]
    arrays = arrays_of([dict(made.named_parameters()), *map(dict, optimizer.state.values())])
    numbers = {float(n) for array in arrays for n in array.detach().unique()}
    numbers |= {state["extras"]["data"].number, {0.25: 5, 0.5: 7}[optimizer.param_groups[0]["lr"]]}
    return sorted(numbers)


def _prepare_load(root: Path) -> None:
    xla_ckpt.save_checkpoint(root, "a", **_state(7, 0.5), user_content=7)
    xla_ckpt.finalize_checkpoint()


def _loads(root: Path) -> None:
    state = _state(5, 0.25)
    PROGRAM.numbers, PROGRAM.changes = lambda: _numbers_of(state), False
    xla_ckpt.load_checkpoint(root, **state, num_workers=2)


def _loads_twice_read(root: Path) -> None:
    """As a load of large arrays: the program's memory is overwritten by the readers."""
    restore.MAX_STAGED_BYTES = 0
    _loads(root)


def _dcp_loads(root: Path) -> None:
    state = dcp_state(5)
    PROGRAM.numbers, PROGRAM.changes = lambda: _numbers_in(state), False
    xla_ckpt.dcp.load(state, checkpoint_id=root / "step")


def _numbers_in(state: Mapping[str, Any]) -> list[float]:
    return sorted({float(n) for array in arrays_of(state) for n in array.unique()} | {state["n"]})


def _dcp_saves_later(root: Path) -> None:
    state = dcp_state(7)
    LIVE.extend(arrays_of(state))
    future: Any = xla_ckpt.dcp.async_save(state, checkpoint_id=root / "step")
    PROGRAM.waits = future.exception
    _promised()
    future.result()


# --- the command line ----------------------------------------------------------------------------------------------


def _commands(*words: str) -> Callable[[Path], None]:
    """A call of the command line, with ROOT for the directory. Its clock begins when its modules are there."""
    import xla_ckpt.cli.main  # noqa: F401
    from xla_ckpt.__main__ import main

    def run(root: Path) -> None:
        said, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
            sys.argv[1:] = [word.replace("ROOT", str(root)) for word in words]
            PROGRAM.code = main()
        PROGRAM.printed = errors.getvalue()

    return run


# --- all of them ---------------------------------------------------------------------------------------------------

_SAVE, _LOAD = OPERATIONS["save"], saving("load", {"a": 7}, "b", after={"a": 7})
_CONVERT = OPERATIONS["convert to native"]

SCENES: Mapping[str, Scene] = {
    made.operation.name: made
    for made in (
        *(Scene(operation=OPERATIONS[name]) for name in (
            "first save", "save", "save, asynchronous", "save, parity", "save, xser", "replace the only tag",
            "replace, retention", "convert to native", "convert to xser", "convert to torch", "export_hf", "repair",
            "dcp.save", "dcp.save, replacing",
        )),
        Scene(operation=saving("save, num_kept_ckpts=1", {"a": 1}, "b", after={"b": 7}, num_kept_ckpts=1)),
        Scene(operation=saving("save, XLA tensors", {"a": 1}, "b", device="xla"), xla=True),
        Scene(operation=replace(_SAVE, name="finalize_checkpoint", run=_finalizes)),
        Scene(operation=replace(_SAVE, name="handle.result", run=_waits)),
        Scene(operation=replace(_SAVE, name="PreemptionGuard", run=_in_a_guard), judge=_former_handler),
        Scene(operation=replace(_SAVE, name="asyncio, cancelled", run=_cancelled), heard=False),
        Scene(operation=replace(OPERATIONS["dcp.save"], name="dcp.async_save", run=_dcp_saves_later)),
        Scene(operation=replace(_LOAD, prepare=_prepare_load, run=_loads), judge=before_and_after),
        Scene(
            operation=replace(_LOAD, name="load, read twice", prepare=_prepare_load, run=_loads_twice_read),
            judge=before_and_after,
        ),
        Scene(operation=replace(_LOAD, name="restore", run=lambda root: xla_ckpt.restore(root))),
        Scene(operation=replace(_LOAD, name="verify", run=lambda root: xla_ckpt.verify(root))),
        Scene(
            operation=replace(
                OPERATIONS["dcp.save, replacing"], name="dcp.load", run=_dcp_loads, before={"step": 7},
                prepare=OPERATIONS["dcp.save"].run,
            ),
            judge=before_and_after,
        ),
        Scene(operation=replace(_LOAD, name="xla-ckpt verify", run=_commands("verify", "ROOT")), judge=one_line),
        Scene(
            operation=replace(
                _CONVERT, name="xla-ckpt convert",
                run=_commands("convert", "ROOT/source", "ROOT/made", "--tag", "a", "--to", "native"),
            ),
            judge=one_line,
        ),
    )
    if HAS_XLA or not made.xla
}  # fmt: skip
"""Every scene, by the name of its operation."""
