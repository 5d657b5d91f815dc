"""The state of a `DistributedModel`: SMP's calls that take it and load it, whoever runs the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from neuron_compat.smp import job
from neuron_compat.smp.entries import Entry, Partitions, entries_of, spec_of
from neuron_compat.smp.gathering import full_state
from neuron_compat.smp.loading import load_model_state
from xla_ckpt.facade import IS_PARTIAL, LOAD_INFO, Parsed, hosted
from xla_ckpt.keywords import known_names


class ModelCalls:
    """What a `DistributedModel` does about its state. It has `module`, and says what this rank owns of it."""

    module: torch.nn.Module
    _rules: Parsed
    """How parameters are split that do not say it themselves."""

    @property
    def partitions(self) -> Partitions:
        """The partition of each module, by its name."""
        raise NotImplementedError

    def enforce_partitions(self, partitions: Partitions) -> None:
        """Take the partitions of a checkpoint."""
        raise NotImplementedError

    def taken(self) -> None:
        """Called when a state was loaded."""
        raise NotImplementedError

    @property
    def xla_ckpt_plain(self) -> torch.nn.Module:
        """What `xla_ckpt` saves and loads in the place of this: the module that was given."""
        return self.module

    def entries(self) -> list[Entry]:
        """The entries of the module's state dict, with their partitions and splits."""
        return entries_of(self.module, self.partitions, self._rules)

    def local_entries(self) -> list[Entry]:
        """The entries that this rank's partition owns."""
        here = job.pp_rank()
        return [entry for entry in self.entries() if here in entry.owners]

    @known_names()
    def local_state_dict(
        self,
        cast_to_cpu: bool = True,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> OrderedDict[str, Any]:
        """What this rank's partition owns, and this rank's part of what is split; no other rank is asked.

        Args:
            cast_to_cpu: Bring tensors on an XLA device to the CPU, all in one batch.
            destination: A dict to put it in.
            prefix: What to put before the names.
            keep_vars: Parameters themselves, not their values.

        Returns:
            The entries by name, with ``_smp_is_partial: True`` and ``_smp_load_info``: the degrees, the partition of
            each module, and under ``xla_ckpt`` how parameters are split (``specs``) and the shapes of padded ones.
        """
        job.state.apply_pending()
        entries = self.local_entries()
        state: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
        tensors = [entry.value for entry in entries if entry.is_tensor]
        if not keep_vars:
            tensors = hosted(tensors) if cast_to_cpu else [tensor.detach() for tensor in tensors]
        values = iter(tensors)
        for entry in entries:
            state[prefix + entry.name] = next(values) if entry.is_tensor else entry.value
        state[IS_PARTIAL] = True
        state[LOAD_INFO] = self._load_info(entries)
        return state

    def _load_info(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """What a partial state says of the job that saved it: ``_smp_load_info``."""
        cfg = job.state.cfg
        split = [e for e in entries if e.sharding is not None]
        padded = {e.name: list(e.global_shape) for e in split if e.sharding is not None and e.sharding.shape}
        return {
            "tensor_parallel_degree": cfg.tensor_parallel_degree,
            "pipeline_parallel_degree": cfg.pipeline_parallel_degree,
            "partition_info": dict(self.partitions),
            "xla_ckpt": {"specs": {e.name: spec_of(e) for e in split}, **({"shapes": padded} if padded else {})},
        }

    @known_names()
    def state_dict(  # SMP's signature
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        cast_to_cpu: bool = True,  # it is gathered on the CPU in any case
        gather_to_rank0: bool = True,
    ) -> Any:
        """The whole model, on the CPU, gathered from the owners of its parts tensor by tensor.

        All ranks with ``smp.rdp_rank() == 0`` make the call (without tensor parallelism: ``smp.dp_rank() == 0``), or
        all ranks of the job.

        Args:
            destination: A dict to put it in.
            prefix: What to put before the names.
            keep_vars: Parameters themselves, where this rank has the model for itself.
            cast_to_cpu: Accepted.
            gather_to_rank0: Rank 0 alone gets it, and the other ranks an empty dict. With False all ranks get it.

        Raises:
            TooFewRanksError: Not all of these ranks made the call in time.
            SMPRuntimeError: The ranks have different models.
        """
        job.state.apply_pending()
        state: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
        if gather_to_rank0 and job.ranks().of("rdp") > 0:
            return state
        entries = self.entries()
        alone = len(job.get_mp_group()) == 1
        whole = full_state(entries, "model.state_dict()", gather_to_rank0)
        if alone and keep_vars:
            whole = OrderedDict((e.name, e.value) for e in entries)
        state.update((prefix + name, value) for name, value in whole.items())
        return state

    @known_names()
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        translate_function: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        same_partition_load: bool = True,
        strict_partitions: bool = False,
    ) -> Any:
        """Load a full state dict, or this rank's partial one. The dict stays as it is; the load is done at once.

        A full one is loaded by every rank on its own. With a partial one, all ranks of a model make the call together:
        a pipeline rank runs the whole model, so it takes the other partitions from their ranks. If the parts are not of
        this number of ranks and these partitions, they are loaded from their files (`smp.load` returns dicts that know
        them), on any topology; then all ranks of the job make the call.

        Args:
            state_dict: What `state_dict`, `local_state_dict` or `smp.load` returned.
            strict: Whether names that are missing or unknown are an error.
            translate_function: Makes names of this model of those of a full state dict of another one.
            same_partition_load: Take the partitions of the checkpoint, if the degrees are the same.
            strict_partitions: Refuse a partial state of another number of ranks, as SMP does.

        Returns:
            The missing and the unexpected names, as `torch.nn.Module.load_state_dict` does.

        Raises:
            MissingKeysInCheckpointError: Names of the model are missing, and `strict` is True.
            SMPCheckpointError: There are unknown names, and `strict` is True; or a shape differs. Nothing was changed.
            IncompatibleCheckpointFoundError: See `strict_partitions`.
            TooFewRanksError: Not all ranks of a model made the call in time.
        """
        keys = load_model_state(self, state_dict, strict, translate_function, same_partition_load, strict_partitions)
        self.taken()
        return keys
