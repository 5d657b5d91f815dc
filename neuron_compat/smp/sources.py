"""The whole set behind one part of a checkpoint: loaded by `xla_ckpt`, on any topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import xla_ckpt
from neuron_compat.smp import job
from xla_ckpt.facade import FP16_SET, ModelView, NamesOnly
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A set of files, or a tag, as the `source` of a `StoredState`."""

    path: str
    """What `xla_ckpt.load_checkpoint` takes."""

    tag: str | None = None
    trust_pickle: bool = False

    def load(self, model: Any = None, optimizer: Any = None, strict: bool = True) -> None:
        """Load all of it into what is given, whatever the topology. All ranks of the job make the same call.

        Each rank reads what its own parameters need of all files. An optimizer without its model gets the names of the
        parameters from the process' `DistributedModel`, whose weights stay as they are.

        Raises:
            xla_ckpt.CheckpointError: It does not fit, or is damaged. Nothing was changed, but that the model has its
                weights already where it is the master weights that are damaged.
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
            # Its parameters are the master weights, which have the names of the model's.
            self._load(NamesOnly(_with_masters(plain, masters)), optimizer, strict, known)
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
            mesh=job.ranks().mesh,
            shardings=None if known is None else known._rules,
            trust_pickle=self.trust_pickle,
        )

    def _restored(self, like: Any, known: Any) -> Any:
        """The tree `like`, with the stored values in it."""
        return xla_ckpt.restore(
            self.path,
            self.tag,
            like,
            mesh=job.ranks().mesh,
            shardings=known._rules,
            trust_pickle=self.trust_pickle,
        ).tree

    @torch.no_grad()
    def _load_masters(self, optimizer: Any, known: Any) -> None:
        """Load master weights and the loss scale; where none are stored, the weights of the model are taken."""
        runtime = optimizer._smp
        masters, names = runtime.masters, runtime.names(optimizer)
        wanted = {names[number]: master for number, master in runtime.masters_by_number(optimizer).items()}
        try:
            loaded = self._restored({"optimizer": {"master": wanted}}, known)["optimizer"]["master"]
        except xla_ckpt.IncompatibleCheckpointError as error:
            logger.warning("no master weights are stored for this optimizer (%s): the model's weights are taken", error)
            masters.take_weights()
        else:
            for name, master in wanted.items():
                master.copy_(loaded[name])
            masters.give_weights()
        try:
            like = {"extras": {FP16_SET: dict.fromkeys(("loss_scaler", "dynamic_loss_scale", "overflow"))}}
            runtime.take_scale(self._restored(like, known)["extras"][FP16_SET])
        except xla_ckpt.IncompatibleCheckpointError:
            logger.info("no loss scale is stored")


def _with_masters(module: Any, masters: Any) -> ModelView:
    """A module with the master weights in the place of its parameters."""
    master_of = {id(narrow): master for narrow, master in masters}
    return ModelView(
        {name: master_of.get(id(value), value) for name, value in module.state_dict(keep_vars=True).items()},
        parameters=[
            (name, master_of.get(id(value), value)) for name, value in module.named_parameters(remove_duplicate=False)
        ],
        parts=[module],
        put=lambda state_dict: None,
    )
