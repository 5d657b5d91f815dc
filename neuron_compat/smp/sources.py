"""The whole set behind one part of a checkpoint: loaded by `xla_ckpt`, on any topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import xla_ckpt
from neuron_compat.smp import job
from xla_ckpt.state.wrappers import NamesOnly


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
            xla_ckpt.CheckpointError: It does not fit, or is damaged. Nothing was changed.
        """
        known = job.state.model if model is None else model
        target = None if known is None else known.xla_ckpt_plain
        xla_ckpt.load_checkpoint(
            self.path,
            self.tag,
            model=NamesOnly(target) if model is None and target is not None else target,
            optimizer=optimizer,
            strict=strict,
            mesh=job.ranks().mesh,
            shardings=None if known is None else known._rules,
            trust_pickle=self.trust_pickle,
        )
