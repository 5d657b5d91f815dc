"""What tests/neuron/test_real_experts.py has the real neuronx-distributed do: a mixture of experts, saved and loaded.

Every weight and moment of a rank is its part of a global array that its name determines, so that a job of any topology
knows what it has to find. Master weights equal the weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

SAVES = ("native", "ours_xser", "ours_pt", "theirs_xser", "theirs_pt")
MASTERS = {"use_master_weights": True, "use_fp32_grad_acc": False, "use_master_weights_in_ckpt": True}
WIPED = 7.0


def saves(rank: int, root: str, tp: int, ep: int, zero1: bool) -> dict[str, list[str]]:
    """Save in all ways, and load all of it again; with what is wrong after each load, by who wrote and who read."""
    job = Experts(rank, tp, ep, zero1)
    job.put(job.truth)
    for name in job.written():
        job.save(root, name)
    told = {}
    for name in job.written():
        told[f"{name}, read by us"] = job.after(job.ours, root, name, numbers=job.has_numbers(name))
        if name.startswith("ours"):
            # Without master weights of experts in its files, it makes them of the weights of before the load.
            told[f"{name}, read by them"] = job.after(
                job.theirs, root, name, masters=False, numbers=True if job.alone else None
            )
    return told


def loads(rank: int, root: str, tp: int, ep: int, zero1: bool) -> dict[str, list[str]]:
    """Load in another job what `saves` left; with what is wrong."""
    job = Experts(rank, tp, ep, zero1)
    there = [name for name in SAVES if (Path(root) / name).is_dir()]
    return {name: job.after(job.ours, root, name, numbers=False) for name in there}


class Experts:
    """A rank of a job that trains a mixture of experts."""

    def __init__(self, rank: int, tp: int, ep: int, zero1: bool) -> None:
        import neuronx_distributed as nxd
        from neuronx_distributed.parallel_layers import parallel_state as ps

        size = torch.distributed.get_world_size()
        about = {"rank_src_tgt_pairs": dict.fromkeys(range(size))}
        ps.CollectivesConfig = lambda replica_groups: type("Config", (), about)()
        torch.manual_seed(rank)
        config = nxd.neuronx_distributed_config(
            tensor_parallel_size=tp,
            expert_parallel_size=ep,
            optimizer_config={"zero_one_enabled": zero1, "grad_clipping": False},
            mixed_precision_config=MASTERS if zero1 else None,
        )
        self.rank, self.tp, self.ep, self.zero1, self.ps = rank, tp, ep, zero1, ps
        self.model = nxd.initialize_parallel_model(config, _model(ep))
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.numbers = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
        groups = [
            {"params": [p for name, p in named.items() if ("down" in name) is late], "weight_decay": 0.1 * late}
            for late in (False, True)
        ]
        self.optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, groups, lr=1e-2)
        self.alone = size == tp * ep
        """Whether no other rank has the same experts."""
        self.names = {id(p): name for name, p in named.items()}
        sum(p.sum() for p in named.values()).backward()  # type: ignore[union-attr]
        self.optimizer.step()  # the states are there

    def arrays(self) -> Iterator[tuple[str, str, Any, Any, Any]]:
        """(kind, name, parameter, tensor, ZeRO-1 optimizer or None) of all that is trained."""
        inner = self.optimizer.optimizer
        parts = (
            [inner.non_ep_zero_optimizer, inner.ep_zero_optimizer] if hasattr(inner, "ep_zero_optimizer") else [inner]
        )
        for part in parts:
            base = getattr(part, "base_optimizer", part)
            for group, own in zip(part.param_groups, base.param_groups, strict=True):
                for p, shard in zip(group["params"], own["params"], strict=True):
                    name = self.names[id(p)]
                    yield "weight", name, p, p, None
                    if shard is not p:
                        yield "weight", name, p, shard, part
                    for kind, value in base.state[shard].items():
                        yield kind, name, p, value, part if value.ndim and shard is not p else None

    def truth(self, kind: str, name: str, p: Any, tensor: Any, zero1: Any) -> torch.Tensor:
        """What a tensor of this rank has to be."""
        if kind == "step":
            return torch.tensor(40.0)
        shape, dim = list(p.shape), getattr(p, "partition_dim", None)
        split = self.tp > 1 and getattr(p, "tensor_model_parallel", False)
        expert = self.ep > 1 and getattr(p, "expert_model_parallel", False)
        if split:
            shape[dim] *= self.tp
        if expert:
            shape[0] *= self.ep
        part = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{kind} of {name}".encode())))
        if expert:
            part = part.chunk(self.ep)[self.ps.get_expert_model_parallel_rank()]
        if split:
            blocks = part.chunk(self.tp * p.partition_stride, dim)
            part = torch.cat(blocks[self.ps.get_tensor_model_parallel_rank() :: self.tp], dim)
        if zero1 is not None:
            missing = -part.shape[0] % zero1.local_world_size
            padded = torch.cat([part, torch.zeros(missing, *part.shape[1:])])
            part = padded.chunk(zero1.local_world_size)[zero1.local_rank]
        return part

    def number(self, name: str) -> torch.Tensor:
        """What a rank knows of its place in the job, in rows of its own."""
        count = self.numbers[name].shape[-1]
        if name.endswith(".rank"):
            return torch.tensor([self.rank], dtype=torch.int32)
        first = self.ps.get_expert_model_parallel_rank() * count
        return torch.arange(first, first + count, dtype=torch.int32)[None]

    @torch.no_grad()
    def put(self, values: Callable[..., torch.Tensor]) -> None:
        """Overwrite all that is trained, and the numbers of the rank."""
        for about in self.arrays():
            about[3].data.copy_(values(*about))
        for name, number in self.numbers.items():
            number.data.copy_(self.number(name))

    def written(self) -> list[str]:
        """The ways to save. Without ZeRO-1 they leave out the optimizer of other experts in plain files."""
        return [name for name in SAVES if name != "theirs_pt" or self.zero1 or self.ep == 1]

    def has_numbers(self, name: str) -> bool:
        """Whether a tag has the numbers of each rank: in theirs ranks share files, and in xser those of all experts."""
        return not name.startswith("theirs") or self.ep == 1 or (self.alone and name.endswith("pt"))

    def save(self, root: str, name: str) -> None:
        """Save in one of the ways."""
        import neuronx_distributed as nxd

        import xla_ckpt
        from neuron_compat import nxd as ours

        objects = {"model": self.model, "optimizer": self.optimizer}
        if name == "native":
            xla_ckpt.save_checkpoint(f"{root}/{name}", "a", **objects)
        else:
            library = ours if name.startswith("ours") else nxd
            library.save_checkpoint(f"{root}/{name}", "a", **objects, use_xser=name.endswith("xser"))
        torch.distributed.barrier()

    def ours(self, root: str, name: str) -> None:
        """Have the library load."""
        from neuron_compat import nxd as ours

        ours.load_checkpoint(f"{root}/{name}", "a", model=self.model, optimizer=self.optimizer)

    def theirs(self, root: str, name: str) -> None:
        """Have neuronx-distributed itself load."""
        import neuronx_distributed as nxd

        nxd.load_checkpoint(f"{root}/{name}", "a", model=self.model, optimizer=self.optimizer)

    def after(
        self,
        load: Callable[[str, str], None],
        root: str,
        name: str,
        *,
        masters: bool = True,
        numbers: bool | None = True,
    ) -> list[str]:
        """What is wrong after a load over other values. `numbers`: whether those of the rank are loaded, or stay."""
        self.put(lambda *about: torch.full(about[3].shape, WIPED))
        for number in self.numbers.values():
            number.data.fill_(int(WIPED))
        load(root, name)
        torch.distributed.barrier()
        wrong = []
        for kind, called, p, tensor, zero1 in self.arrays():
            if kind == "weight" and tensor is not p and not masters:
                continue
            want = self.truth(kind, called, p, tensor, zero1)
            if not torch.equal(tensor.detach().cpu(), want):
                wrong.append(f"{kind} of {called}")
        for called, number in self.numbers.items() if numbers is not None else ():
            want = self.number(called) if numbers else torch.full_like(number.data.cpu(), int(WIPED))
            if not torch.equal(number.data.cpu(), want):
                wrong.append(f"{called}: {number.data.tolist()}")
        return wrong


def _model(ep: int) -> type:
    from neuronx_distributed.modules.moe import ExpertMLPs
    from neuronx_distributed.modules.moe.model import MoE
    from neuronx_distributed.modules.moe.routing import RouterTopK
    from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = ColumnParallelLinear(16, 32, bias=False, gather_output=False)
            self.down = RowParallelLinear(32, 16, bias=False, input_is_parallel=True)
            self.scale = torch.nn.Parameter(torch.ones(5))
            experts = ExpertMLPs(
                num_experts=4, top_k=2, hidden_size=16, intermediate_size=32, hidden_act="silu", glu_mlp=True,
                capacity_factor=2.0, normalize_top_k_affinities=True, enable_spmd_rank=ep > 1,
            )  # fmt: skip
            self.moe = MoE(router=RouterTopK(num_experts=4, top_k=2, hidden_size=16), expert_mlps=experts)

    return Model
