"""What `smp.load` returns: dicts that know the set of files that they are a part of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch

from xla_ckpt.facade import leaves


class Source(Protocol):
    """The whole set of files that a partial state was read from."""

    def load(self, model: Any = None, optimizer: Any = None, strict: bool = True) -> None:
        """Load all of it into what is given, whatever the topology. All ranks of the job make the same call."""


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in dicts, lists and tuples, in their order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


class StoredState(dict[Any, Any]):
    """A dict of a loaded file, or one inside of it.

    Where this rank's part does not fit the program, `DistributedModel.load_state_dict` and that of the optimizer load
    from the whole set instead (`source`). A dict that the program has changed has no source any more: what the program
    wrote into it would be lost. It pickles as an ordinary dict, so that a file it is saved to names no class of ours.

    Attributes:
        fits: False if the set is of another job (other degrees, other partitions): then this part is never loaded by
            itself, since nobody could see from it alone what it lacks.
    """

    def __init__(self, values: Any = (), source: Source | None = None, *, fits: bool = True) -> None:
        super().__init__(values)
        self.fits = fits
        self._source = source
        self._seen = [(t, t._version) for t in _tensors(dict(self))] if source is not None else []

    @property
    def source(self) -> Source | None:
        """The whole set; None if there is none, or if this dict or a tensor in it was changed after the load."""
        return self._source if self._source is not None and not self._is_changed() else None

    def _is_changed(self) -> bool:
        """Whether the program has replaced a tensor in it, or written to one, since the load."""
        tensors = _tensors(dict(self))
        same = len(tensors) == len(self._seen) and all(a is b for a, (b, _) in zip(tensors, self._seen, strict=True))
        return not same or any(tensor._version != version for tensor, version in self._seen)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def copy(self) -> StoredState:
        """A dict of the same entries, of the same set."""
        return StoredState(self, self.source, fits=self.fits)

    __copy__ = copy


def _forgetting(name: str) -> Callable[..., Any]:
    """A method of dict that changes a dict, and has it forget its source."""
    original = getattr(dict, name)

    def method(self: StoredState, *args: Any, **kwargs: Any) -> Any:
        self._source = None
        return original(self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = original.__doc__
    return method


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(StoredState, _name, _forgetting(_name))
