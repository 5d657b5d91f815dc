"""State dicts that `smp.load` returns, and the set of files that each is part of.

A `StoredState` references its `CheckpointSource`. If this rank's part does not fit the job, the model and the
optimizer load from the whole set instead, on any topology.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import xla_ckpt
from neuron_compat.smp import job
from xla_ckpt.facade import FP16_SET, ModelView, NamesOnly, iterate_leaves
from xla_ckpt.logs import get_logger


class Source(Protocol):
    """Set of files that a partial state was read from."""

    def load(self, model: Any = None, optimizer: Any = None, strict: bool = True) -> None:
        """Load the whole set into the given objects, on any topology. Call it on all ranks of the job."""


def _list_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in dicts, lists and tuples, in order."""
    return [leaf for leaf in iterate_leaves(value) if isinstance(leaf, torch.Tensor)]


class StoredState(dict[Any, Any]):
    """Dict of a loaded file, or nested in one.

    If this rank's part does not fit the program, the `load_state_dict` of a `DistributedModel` and of its optimizer
    load from the whole set instead (`source`). A dict that the program has changed no longer has a source, because its
    changes would be lost. It pickles as an ordinary dict, so that files contain no classes of this package.

    Attributes:
        fits: False if the set is of another job (other degrees, other partitions). This part is then never loaded
            separately, because its missing entries could not be detected.
    """

    def __init__(self, values: Any = (), source: Source | None = None, *, fits: bool = True) -> None:
        super().__init__(values)
        self.fits = fits
        self._source = source
        self._tensor_versions = [(t, t._version) for t in _list_tensors(dict(self))] if source is not None else []

    @property
    def source(self) -> Source | None:
        """Set of files; None if there is none, or if this dict or a tensor in it was changed after the load."""
        return self._source if self._source is not None and not self._is_changed() else None

    def _is_changed(self) -> bool:
        """Return True if the program has replaced a tensor in it, or written to one, since the load."""
        tensors = _list_tensors(dict(self))
        same = len(tensors) == len(self._tensor_versions) and all(
            a is b for a, (b, _) in zip(tensors, self._tensor_versions, strict=True)
        )
        return not same or any(tensor._version != version for tensor, version in self._tensor_versions)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def copy(self) -> StoredState:
        """Return a dict with the same entries and the same source."""
        return StoredState(self, self.source, fits=self.fits)

    __copy__ = copy


def _wrap_mutator(name: str) -> Callable[..., Any]:
    """Wrap a mutating method of dict to clear the source."""
    original = getattr(dict, name)

    def method(self: StoredState, *args: Any, **kwargs: Any) -> Any:
        self._source = None
        return original(self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = original.__doc__
    return method


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(StoredState, _name, _wrap_mutator(_name))


logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """Set of files, or a tag, as the `source` of a `StoredState`."""

    path: str
    """Path for `xla_ckpt.load_checkpoint`."""

    tag: str | None = None
    trust_pickle: bool = False

    def load(self, model: Any = None, optimizer: Any = None, strict: bool = True) -> None:
        """Load the whole set into the given objects, on any topology. Call it on all ranks of the job.

        Each rank reads only the data that its own parameters need, from all files. For an optimizer without its model,
        the parameter names come from the process's `DistributedModel`, whose weights are unchanged.

        Raises:
            xla_ckpt.CheckpointError: It does not fit, or is damaged. Nothing was changed, except that the weights of
                the model are already loaded if the master weights are damaged.
        """
        known = job.state.model if model is None else model
        plain = None if known is None else known.xla_ckpt_plain
        masters = None if optimizer is None else optimizer._smp.masters
        if masters is None:
            names = NamesOnly(plain) if model is None and plain is not None else plain
            self._load(names, optimizer, strict, known)
        else:
            if model is not None:
                self._load(plain, None, strict, known)
            # Its parameters are the master weights, under the names of the model's parameters.
            self._load(NamesOnly(_view_with_masters(plain, masters)), optimizer, strict, known)
            self._load_masters(optimizer, known)
        if optimizer is not None:
            optimizer.drop_others()

    def _load(self, model: Any, optimizer: Any, strict: bool, known: Any) -> None:
        xla_ckpt.load_checkpoint(
            self.path,
            self.tag,
            model=model,
            optimizer=optimizer,
            strict=strict,
            mesh=job.get_rank_info().mesh,
            shardings=None if known is None else known._rules,
            trust_pickle=self.trust_pickle,
        )

    def _restore_tree(self, like: Any, known: Any) -> Any:
        """Return the tree `like` with the stored values."""
        return xla_ckpt.restore(
            self.path,
            self.tag,
            like,
            mesh=job.get_rank_info().mesh,
            shardings=known._rules,
            trust_pickle=self.trust_pickle,
        ).tree

    @torch.no_grad()
    def _load_masters(self, optimizer: Any, known: Any) -> None:
        """Load master weights and the loss scale; copy the weights of the model if no master weights are stored."""
        runtime = optimizer._smp
        masters, names = runtime.masters, runtime.names(optimizer)
        wanted = {names[number]: master for number, master in runtime.masters_by_number(optimizer).items()}
        try:
            loaded = self._restore_tree({"optimizer": {"master": wanted}}, known)["optimizer"]["master"]
        except xla_ckpt.IncompatibleCheckpointError as error:
            logger.warning("no master weights are stored for this optimizer (%s): the model's weights are taken", error)
            masters.take_weights()
        else:
            for name, master in wanted.items():
                master.copy_(loaded[name])
            masters.give_weights()
        try:
            like = {"extras": {FP16_SET: dict.fromkeys(("loss_scaler", "dynamic_loss_scale", "overflow"))}}
            runtime.take_scale(self._restore_tree(like, known)["extras"][FP16_SET])
        except xla_ckpt.IncompatibleCheckpointError:
            logger.info("no loss scale is stored")


def _view_with_masters(module: Any, masters: Any) -> ModelView:
    """Return a view of a module with the master weights in place of its parameters."""
    master_of = {id(narrow): master for narrow, master in masters}
    return ModelView(
        {name: master_of.get(id(value), value) for name, value in module.state_dict(keep_vars=True).items()},
        parameters=[
            (name, master_of.get(id(value), value)) for name, value in module.named_parameters(remove_duplicate=False)
        ],
        wrapped_modules=[module],
        load_entries=lambda state_dict: None,
    )
