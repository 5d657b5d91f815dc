"""What becomes of the report of a call that is done: its trace is written, and the program's functions hear of it.

And who hears of the error of a save that runs in the background.
"""

from __future__ import annotations

from collections.abc import Callable

from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.report import LoadReport, SaveReport
from xla_ckpt.engine.trace import Trace
from xla_ckpt.errors import CheckpointError, InvalidTagError, SaveError, UnsupportedStateError, UsageError, from_json
from xla_ckpt.keywords import known_options
from xla_ckpt.logs import get_logger
from xla_ckpt.options import OnError
from xla_ckpt.storage.process_state import process_lock
from xla_ckpt.storage.undisturbed import comes_from_outside

logger = get_logger(__name__)

Report = SaveReport | LoadReport
Listener = Callable[[Report], object]

MISTAKES = (UsageError, UnsupportedStateError, InvalidTagError)
"""Errors of the program, which fail every save and not this one alone. They are raised in any case."""


class Listeners:
    """The functions that hear of each report of this process. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = process_lock()
        self._functions: dict[object, Listener] = {}

    def add(self, function: Listener) -> Callable[[], None]:
        """Have a function hear of each report from now on; returns what removes it again."""
        key = object()  # the same function may be added twice, and is removed once then
        with self._lock:
            self._functions[key] = function

        def remove() -> None:
            with self._lock:
                self._functions.pop(key, None)

        return remove

    def tell(self, report: Report) -> None:
        """Call all functions, in the order in which they were added."""
        with self._lock:
            functions = list(self._functions.values())
        for function in functions:
            try:
                function(report)
            except BaseException as error:
                # It is the program's own code, and may raise anything; the save or load is done, and stays what it is.
                if comes_from_outside(error):
                    raise
                logger.exception("a function that on_report was given failed for the tag %s", report.tag)


LISTENERS = Listeners()
"""Those of this process."""


@known_options
def on_report(function: Callable[[SaveReport | LoadReport], object]) -> Callable[[], None]:
    """Have a function called with the report of each save and each load of this process, when it is done.

    Saves by `xla_ckpt.dcp` are told, too: their `path` is the directory above the checkpoint, and `tag` is its name.
    Loads by it, conversions and exports have no reports.

    A `SaveReport` comes from the thread of the save, before `handle.result()` returns; a `LoadReport` from the thread
    that loads. What failed is reported, too: then `report.error` says why. Each rank hears of its own part. What the
    function raises is logged, and changes nothing. The next save of the same path waits until it has returned; it must
    not wait for saves itself.

    Args:
        function: Called with the report as its only argument. What it returns is ignored.

    Returns:
        A function without arguments that removes it. A second call of that does nothing.

    >>> import torch, xla_ckpt
    >>> remove = xla_ckpt.on_report(lambda report: print(type(report).__name__, report.tag, report.nbytes, "bytes"))
    >>> handle = xla_ckpt.save("memory://reported", "a", {"w": torch.ones(2)})
    SaveReport a 8 bytes
    >>> remove()
    """
    return LISTENERS.add(function)


def end(report: Report, phases: Phases, trace: Trace | None) -> None:
    """Write the trace of a call that is done, if one is wanted, and tell the program's functions."""
    if trace is not None:
        trace.write(phases, report.tag, report.error)
    LISTENERS.tell(report)


def tell_error(on_error: OnError, error: BaseException) -> bool:
    """Tell of the error of a save as its caller wishes; whether that is enough."""
    if on_error == "raise" or not isinstance(error, CheckpointError) or isinstance(error, MISTAKES):
        return False
    if on_error == "warn":
        logger.warning("a save failed, and the program goes on: %s", error)
        return True
    try:
        on_error(error)
    except BaseException as raised:
        if comes_from_outside(raised):
            raise
        logger.exception("the function that hears of failed saves has failed itself")
        return False  # the error is raised, as if there were no such function
    return True


def for_later_call(error: BaseException, consequence: str = "") -> CheckpointError:
    """Return the error of a save for a later call to raise. That of the save's handle stays what it was.

    Args:
        error: The error of the save.
        consequence: What the later call has not done for it.
    """
    problem = error if isinstance(error, CheckpointError) else SaveError(f"{type(error).__name__}: {error}")
    # Its tag is a fact of the error, the same on all ranks. That of the handle is another one on a rank that has left a
    # save out.
    text = f"an asynchronous save before this call has failed{consequence}: {problem.problem}"
    later = from_json(problem.to_json() | {"problem": text})
    later.__cause__ = error
    return later
