"""Objects in other libraries' files that are read on trust only: their pickles name classes of the program's."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from xla_ckpt.errors import UntrustedObjectError

TRUST_IT = "Pass trust_pickle=True (--trust-pickle) if you trust whoever wrote this file."


class UntrustedObject:  # no dataclass: a state that holds one is flattened, and dataclasses are taken apart
    """Stands for such an object in a scanned state.

    Args:
        problem: Why it is not read without trust.
        file: Where it lies.
        read: Makes the object. This may run code.
        path: The keys and numbers that lead to it in what the file holds; empty for all of that.
        kind: The name of its class, as far as that is known.
        hint: What to do about it.
    """

    def __init__(
        self,
        problem: str,
        file: str,
        read: Callable[[], Any],
        path: tuple[Any, ...] = (),
        kind: str = "object",
        hint: str = TRUST_IT,
    ) -> None:
        self.problem = problem
        self.file = file
        self.path = path
        self.kind = kind
        self.hint = hint
        self._read = read

    def __eq__(self, other: object) -> bool:
        """Whether two may be the same object on two ranks: what is in them is not looked at."""
        if not isinstance(other, UntrustedObject):
            return NotImplemented
        return (self.problem, self.path) == (other.problem, other.path)

    def __hash__(self) -> int:
        return hash((self.problem, self.path))

    def load(self, leaf: str, *, trust: bool) -> Any:
        """The object.

        Raises:
            UntrustedObjectError: `trust` is False. Nothing of it has run.
        """
        if not trust:
            raise UntrustedObjectError(self.problem, leaf=leaf, file=self.file, hint=self.hint)
        return self._read()


def whole_file_on_trust(file: str, problem: str, data: Callable[[], bytes]) -> UntrustedObject:
    """Stands for all that a file of torch.save holds, or a zip in one, whose bytes `data` reads."""

    def read() -> Any:
        import torch

        return torch.load(io.BytesIO(data()), map_location="cpu", weights_only=False)

    return UntrustedObject(problem, file, read)
