"""The state of a `DistributedOptimizer`: SMP's calls that take it and load it, whoever steps the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuron_compat.smp import job
from neuron_compat.smp.errors import SMPCheckpointError, SMPValidationError
from neuron_compat.smp.optimizer_loading import load, load_masters
from neuron_compat.smp.optimizer_state import fp16_state, full_state, local_state, own_masters, own_state
from xla_ckpt.facade import IS_PARTIAL


class OptimizerCalls:
    """What a `DistributedOptimizer` does about its state."""

    _smp: Any
    """The numbers, names and shares of its parameters, its master weights and its loss scale."""
    param_groups: Any
    state: Any

    def local_state_dict(
        self, cast_to_cpu: bool = True, gather_if_shard: bool = True, fp32_states_only: bool = False
    ) -> dict[str, Any]:
        """The states of the parameters of this rank's partition, numbered over all parameters, as torch does.

        Args:
            cast_to_cpu: Bring tensors on an XLA device to the CPU.
            gather_if_shard: With ``shard_optimizer_state`` rank ``rdp_rank() == 0`` gets those of all ranks that hold
                the same parameters, and all of them make the call: ``state`` and ``param_groups`` are lists then.
            fp32_states_only: Leave out the loss scale and the master weights.

        Returns:
            ``state``, ``param_groups`` and ``_smp_is_partial: True``. On tensor-parallel ranks above 0 the state of a
            parameter that is not split is an empty dict. With ``fp16`` these are in ``optimizer_state_dict``, beside
            the loss scale and the master weights (``fp32_from_fp16``); with ``bf16`` the latter are beside them.

        Raises:
            TooFewRanksError: Not all of these ranks made the call in time.
        """
        return local_state(self, cast_to_cpu=cast_to_cpu, gather=gather_if_shard, bare=fp32_states_only)

    def local_optimizer_state_dict(self, cast_to_cpu: bool = True) -> dict[str, Any]:
        """This rank's states of the parameters of its partition: no rank leaves something to another one."""
        return own_state(self, cast_to_cpu=cast_to_cpu, drops_copies=False)

    def local_fp16_state_dict(self) -> dict[str, Any]:
        """The loss scale, and the master weights of this rank's partition.

        Raises:
            SMPValidationError: There are none.
        """
        if self._smp.masters is None:
            raise SMPValidationError("opt.local_fp16_state_dict can only be called when fp16 is enabled")
        return {**fp16_state(self), **own_masters(self)}

    def state_dict(
        self, cast_to_cpu: bool = True, fp32_states_only: bool = False, gather_to_rank0: bool = False
    ) -> dict[str, Any]:
        """The states of all parameters, whole and on the CPU, gathered tensor by tensor.

        All ranks with ``smp.rdp_rank() == 0`` make the call (without tensor parallelism: ``smp.dp_rank() == 0``), or
        all ranks of the job; with ``shard_optimizer_state`` all ranks of the job.

        Args:
            cast_to_cpu: Accepted: they are gathered on the CPU in any case.
            fp32_states_only: Leave out the loss scale and the master weights.
            gather_to_rank0: Rank 0 alone gets them, and the other ranks an empty dict.

        Returns:
            ``state`` and ``param_groups``, as a job of one process has them.

        Raises:
            TooFewRanksError: Not all of these ranks made the call in time.
            SMPUnsupportedError: A state of a parameter that is split has another shape than the parameter.
        """
        return full_state(self, gather_to_rank0, bare=fp32_states_only)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], gather_if_shard: bool = False, strict_partitions: bool = False
    ) -> None:
        """Load a full state dict, or this rank's partial one. The dict stays as it is; the load is done at once.

        With a partial one, all ranks of a model make the call together. If the parts are not of these ranks and
        partitions, they are loaded from their files, on any topology (see `DistributedModel.load_state_dict`).

        Args:
            state_dict: What `state_dict`, `local_state_dict` or `smp.load` returned.
            gather_if_shard: Accepted.
            strict_partitions: Refuse what does not fit as it is.

        Raises:
            SMPCheckpointError: It is of another optimizer or model. Nothing was changed.
            RdpSizeError: It is sharded over another number of ranks, and nobody knows its files.
            TooFewRanksError: Not all ranks of a model made the call in time.
        """
        load(self, state_dict, strict_partitions)

    def load_local_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `local_optimizer_state_dict` returned on this rank.

        Raises:
            SMPCheckpointError: It is not partial; or see `load_state_dict`.
        """
        if not isinstance(state_dict, Mapping) or not state_dict.get(IS_PARTIAL):
            raise SMPCheckpointError(
                "load_local_optimizer_state_dict does not support loading non-partial optimizer states",
                hint="Use load_state_dict.",
            )
        self.load_state_dict(state_dict)

    def load_local_fp16_state_dict(self, fp16_states: Mapping[str, Any]) -> None:
        """Load what `local_fp16_state_dict` returned on this rank. All ranks of a model make the call together.

        Raises:
            SMPValidationError: There is no master weight to load into.
            SMPCheckpointError: It is of another model.
        """
        if self._smp.masters is None:
            raise SMPValidationError("opt.load_local_fp16_state_dict can only be called when fp16 is enabled")
        load_masters(self, fp16_states)

    def drop_others(self) -> None:
        """With ``shard_optimizer_state``: forget the states of parameters that are in the share of another rank."""
        shares = self._smp.shares(self)
        if shares is not None:
            for parameter, rank in zip(self._smp.parameters(self), shares, strict=True):
                if rank != job.rdp_rank():
                    self.state.pop(parameter, None)
