"""A module around another one: its names are the inner module's own, and this rank owns a partition of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from neuron_compat.emulated.moving import preserve_parallel_attributes, preserve_shared_weights
from neuron_compat.emulated.smp.partitions import assigned, divided
from neuron_compat.emulated.transparent import Transparent
from neuron_compat.smp import job
from neuron_compat.smp.entries import Entry, Partitions, partition_of, sharding_of
from neuron_compat.smp.model_calls import ModelCalls
from xla_ckpt.facade import Parsed

Self = TypeVar("Self", bound="Wrapper")


class Wrapper(ModelCalls, Transparent):  # type: ignore[misc]  # SMP's load_state_dict takes more than torch's
    """A transparent wrapper: names, parameters and attributes are those of `module`.

    Args:
        rules: How parameters are split that do not say it themselves.
    """

    def __init__(self, module: torch.nn.Module, rules: Parsed) -> None:
        super().__init__(module)
        self.training = module.training
        self._rules = rules
        self._partitions: Partitions | None = None

    # -- partitions

    @property
    def partitions(self) -> Partitions:
        """The partition of each module, by its name."""
        if self._partitions is None:
            cfg = job.state.cfg
            count = cfg.pipeline_parallel_degree
            if cfg.auto_partition or count == 1:
                self._partitions = divided(self.module, count)
            else:
                self._partitions = assigned(self.module, cfg.default_partition, count)
        return self._partitions

    def enforce_partitions(self, partitions: Partitions) -> None:
        """Take the partitions of a checkpoint. Without effect after the first step."""
        self._partitions = dict(partitions)

    def forget_partitions(self) -> None:
        """Find the partitions anew when they are asked for."""
        self._partitions = None

    def size(self) -> int:
        """The bytes of this rank's parameters."""
        return sum(p.numel() * p.element_size() for p in self.module.parameters())

    def buffer_entries(self) -> list[Entry]:
        """The buffers, those included that are not saved."""
        mesh = job.ranks().mesh
        entries: dict[int, Entry] = {}
        for name, part in self.module.named_modules():
            for own, buffer in part.named_buffers(recurse=False):
                called = f"{name}.{own}" if name else own
                lies = sharding_of(buffer, called, mesh, self._rules)
                entries.setdefault(id(buffer), Entry(called, buffer, (partition_of(name, self.partitions),), lies))
        return list(entries.values())

    # -- this rank's partition

    def local_named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = ""
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """The modules of this rank's partition, with their names."""
        here = job.pp_rank()
        for name, module in self.module.named_modules(memo=memo):
            if partition_of(name, self.partitions) == here:
                yield f"{prefix}.{name}" if prefix and name else prefix or name, module

    def local_modules(self) -> Iterator[torch.nn.Module]:
        """The modules of this rank's partition."""
        for _, module in self.local_named_modules():
            yield module

    def _local_ids(self) -> set[int]:
        """The parameters and buffers that are registered in modules of this rank's partition."""
        parts = self.local_modules()
        return {id(t) for m in parts for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}

    def local_named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters of this rank's partition, with their names."""
        local = self._local_ids()
        for name, parameter in self.module.named_parameters(recurse=recurse):
            if id(parameter) in local:
                yield name, parameter

    def local_parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """The parameters of this rank's partition."""
        for _, parameter in self.local_named_parameters(recurse):
            yield parameter

    def local_named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of this rank's partition, with their names."""
        local = self._local_ids()
        for name, buffer in self.module.named_buffers(prefix=prefix, recurse=recurse):
            if id(buffer) in local:
                yield name, buffer

    def local_buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """The buffers of this rank's partition."""
        for _, buffer in self.local_named_buffers(recurse=recurse):
            yield buffer

    def is_local_parameter(self, param: str | torch.Tensor) -> bool:
        """Whether a parameter, or one of this name, is in this rank's partition."""
        return any(param is p or param == n for n, p in self.local_named_parameters())

    def is_local_buffer(self, buffer: str | torch.Tensor) -> bool:
        """Whether a buffer, or one of this name, is in this rank's partition."""
        return any(buffer is b or (isinstance(buffer, str) and buffer == n) for n, b in self.local_named_buffers())

    def is_distributed_parameter(self, param: torch.Tensor) -> bool:
        """Whether tensor-parallel ranks hold different parts of a parameter."""
        return any(entry.value is param and entry.is_split for entry in self.entries())

    def cpu(self: Self) -> Self:
        """Move parameters and buffers to the CPU. Every rank has all partitions already."""
        return self.to("cpu")

    def _apply(self: Self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # On the way to XLA torch makes new parameters, without ties and attributes.
        with preserve_shared_weights(self.module), preserve_parallel_attributes(self.module):
            return super()._apply(fn, recurse)
