"""Objects that only pickle can store: written with a warning, read only on trust."""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn

from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError, UntrustedObjectError
from xla_ckpt.files.pickle_bounds import check


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


class _Refusing(pickle.Unpickler):
    def __init__(self, data: bytes, leaf: str) -> None:
        super().__init__(io.BytesIO(data))
        self.leaf = leaf

    def find_class(self, module: str, name: str) -> NoReturn:
        raise UntrustedObjectError(
            f"the checkpoint holds a pickled object of the class {module}.{name}; loading it would run its code",
            leaf=self.leaf,
            hint="Pass trust_pickle=True if you trust whoever wrote this checkpoint.",
        )


def load(data: bytes, leaf: str, *, trust: bool) -> Any:
    """The object in a pickle.

    Raises:
        UntrustedObjectError: It needs a class, and `trust` is False. Nothing of it has run.
        CorruptCheckpointError: It is no pickle, or one that stands for many times its size; `trust` is False.
    """
    if trust:
        return pickle.loads(data)
    try:
        check(data)
        return _Refusing(data, leaf).load()
    except CheckpointError:
        raise
    except Exception as error:
        # Damaged pickles raise whatever the operation that they describe by accident raises.
        raise CorruptCheckpointError(f"a pickle is damaged: {error}"[:300], leaf=leaf) from error
