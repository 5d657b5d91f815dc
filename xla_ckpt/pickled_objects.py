"""Pickled objects: serialize values that only pickle can store, and load them only if they are trusted."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from typing import Any, NoReturn

from xla_ckpt.core.files.pickle_limits import check_pickle
from xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    LoadError,
    UnsupportedStateError,
    UntrustedObjectError,
)
from xla_ckpt.storage.signals import defer_signals


def dump(value: Any, leaf: str) -> bytes:
    """Return `value` as a pickle.

    Raises:
        UnsupportedStateError: The value cannot be pickled.
    """
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        # pickle calls the object's own code, which may raise any exception.
        raise UnsupportedStateError(
            f"a {type(value).__name__} cannot be stored, not even by pickle: {error}",
            leaf=leaf,
            hint="Store plain values, arrays, or an object with state_dict().",
        ) from error


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, leaf: str) -> None:
        super().__init__(io.BytesIO(data))
        self.leaf = leaf

    def find_class(self, module: str, name: str) -> NoReturn:
        raise UntrustedObjectError(
            f"the checkpoint holds a pickled object of the class {module}.{name}; loading it would run its code",
            leaf=self.leaf,
            hint="Pass trust_pickle=True (--trust-pickle) if you trust whoever wrote this checkpoint.",
        )


@contextlib.contextmanager
def wrap_missing_classes() -> Iterator[None]:
    """Raise a failed lookup of a module or class as an `IncompatibleCheckpointError`.

    Raises:
        IncompatibleCheckpointError: The program does not have the module or class. (Not a `FormatError`, because the
            stored bytes are intact.)
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ImportError, AttributeError) as error:
        raise IncompatibleCheckpointError(
            f"the checkpoint holds an object that needs what this program does not have: {error}",
            hint="Define it as it was when the checkpoint was saved: in this script, if it was in __main__, else in "
            "the module of that name.",
        ) from error


def load(data: bytes, leaf: str, *, trust: bool) -> Any:
    """Load the object of a pickle whose bytes are verified.

    Raises:
        UntrustedObjectError: The object needs a class, and `trust` is False. None of its code has run.
        CorruptCheckpointError: The bytes are not a pickle, or expand to many times their size; `trust` is False.
        IncompatibleCheckpointError: This program does not have the class; `trust` is True.
        LoadError: The object's own code raised an exception; `trust` is True.
    """
    if trust:
        try:
            with wrap_missing_classes():
                return pickle.loads(data)
        except CheckpointError:
            raise
        except Exception as error:
            # Code of the object's class, which may raise any exception. The caller would turn some of them into a
            # FormatError, and the load would skip the tag as damaged.
            raise LoadError(f"a pickled object refuses its stored state: {type(error).__name__}: {error}") from error
    with defer_signals():  # an exception of a signal handler would be mistaken for damage
        try:
            check_pickle(data)
            return _RestrictedUnpickler(data, leaf).load()
        except CheckpointError:
            raise
        except Exception as error:
            # Damaged pickles raise arbitrary exceptions.
            raise CorruptCheckpointError(f"a pickle is damaged: {error}"[:300], leaf=leaf) from error
