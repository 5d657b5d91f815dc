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
    """`value` as a pickle.

    Raises:
        UnsupportedStateError: It cannot be pickled.
    """
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        # pickle calls the object's own code, which may raise anything.
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
    """Around code that finds modules and classes by name, which a program may not have, or not any more.

    Raises:
        IncompatibleCheckpointError: It does not. (Not FormatError: the stored bytes are as they were saved.)
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
    """The object in a pickle whose bytes are verified.

    Raises:
        UntrustedObjectError: It needs a class, and `trust` is False. Nothing of it has run.
        CorruptCheckpointError: It is no pickle, or one that stands for many times its size; `trust` is False.
        IncompatibleCheckpointError: This program does not have its class; `trust` is True.
        LoadError: Its own code raised an exception; `trust` is True.
    """
    if trust:
        try:
            with wrap_missing_classes():
                return pickle.loads(data)
        except CheckpointError:
            raise
        except Exception as error:
            # Code of the object's class, which may raise anything. A FormatError, which the caller would make of some
            # of it, would have a load pass the tag over as damaged.
            raise LoadError(f"a pickled object refuses its stored state: {type(error).__name__}: {error}") from error
    with defer_signals():  # what a signal handler raises would be taken for damage
        try:
            check_pickle(data)
            return _RestrictedUnpickler(data, leaf).load()
        except CheckpointError:
            raise
        except Exception as error:
            # Damaged pickles raise whatever the operation that they describe by accident raises.
            raise CorruptCheckpointError(f"a pickle is damaged: {error}"[:300], leaf=leaf) from error
