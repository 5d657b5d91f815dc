"""A toy training state whose every value is known, split by any mesh with code of the test's own.

The optimizer works element by element, so a split state after some steps is exactly the split of the whole state after
the same steps: that is the truth that every restore is compared with.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch

from xla_ckpt import Mesh

WHOLE = {  # name: (shape, tensor-parallel dim, stride)
    "embed.weight": ((10, 6), 0, 1),  # 10 rows: padded to a multiple of tp
    "layers.0.qkv.weight": ((36, 6), 0, 3),  # fused: strided blocks
    "layers.0.out.weight": ((6, 12), 1, 1),
    "layers.0.norm.weight": ((6,), None, 1),
    "layers.0.experts": ((4, 12, 5), 1, 1),
    "layers.1.qkv.weight": ((36, 6), 0, 3),
    "layers.1.out.weight": ((6, 12), 1, 1),
    "layers.1.norm.weight": ((6,), None, 1),
    "layers.1.scale": ((1,), None, 1),
}
STAGES = {"embed.weight": 0, "layers.0": 0, "layers.1": -1}
GROUPS = ({"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.03, "weight_decay": 0.0})


def stage_of(name: str, pp: int) -> int:
    return 0 if not name.startswith("layers.1") else pp - 1


def names_of(mesh: Mesh, rank: int) -> list[str]:
    return [n for n in WHOLE if stage_of(n, mesh.pp) == mesh.coordinates(rank)["pp"]]


def whole(name: str, what: str = "weight") -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {what}".encode()))
    return torch.randn(WHOLE[name][0], generator=generator)


def ceil_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def tp_part(full: torch.Tensor, name: str, tp: int, i: int) -> torch.Tensor:
    """What tensor-parallel rank `i` holds, padding included."""
    _, dim, stride = WHOLE[name]
    if dim is None:
        return full.clone()
    size = full.shape[dim]
    padded = ceil_to(size, tp * stride)
    if padded > size:
        pad = list(full.shape)
        pad[dim] = padded - size
        full = torch.cat([full, torch.zeros(pad)], dim)
    blocks = full.chunk(tp * stride, dim)
    return torch.cat([blocks[i + k * tp] for k in range(stride)], dim).contiguous()


def annotate(parameter: Any, name: str, tp: int) -> None:
    """neuronx-distributed's attributes; the true size where the split pads."""
    shape, dim, stride = WHOLE[name]
    if dim is not None:
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, stride
        if shape[dim] % (tp * stride):
            parameter.unpadded_shape = shape


class Toy(torch.nn.Module):
    """The parameters of one rank."""

    def __init__(self, mesh: Mesh, rank: int, *, blank: bool = False, device: str = "cpu") -> None:
        super().__init__()
        at = mesh.coordinates(rank)
        self.by_name: dict[str, torch.nn.Parameter] = {}
        for name in names_of(mesh, rank):
            part = tp_part(whole(name), name, mesh.tp, at["tp"])
            part = torch.full_like(part, -7.0) if blank else part
            parameter = torch.nn.Parameter(part.to(device))
            annotate(parameter, name, mesh.tp)
            self.by_name[name] = parameter
            parent: torch.nn.Module = self
            *path, last = name.split(".")
            for step in path:
                if not hasattr(parent, step):
                    parent.add_module(step, torch.nn.Module())
                parent = getattr(parent, step)
            parent.register_parameter(last, parameter)
        self.register_buffer("seen", torch.tensor(0.0 if blank else 5.0, device=device))


def groups(by_name: dict[str, Any]) -> list[dict[str, Any]]:
    decayed = [p for n, p in by_name.items() if "norm" not in n and "scale" not in n]
    plain = [p for n, p in by_name.items() if "norm" in n or "scale" in n]
    return [{"params": decayed, **GROUPS[0]}, {"params": plain, **GROUPS[1]}]


def adamw(by_name: dict[str, Any]) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups(by_name), foreach=False)


def gradient(name: str, step: int) -> torch.Tensor:
    return whole(name, f"gradient {step}")


def give_gradients(parameters: Iterable[tuple[str, Any]], step: int, tp: int, i: int) -> None:
    for name, parameter in parameters:
        parameter.grad = tp_part(gradient(name, step), name, tp, i).to(parameter.device)


def truth(steps: int, device: str = "cpu") -> dict[str, dict[str, torch.Tensor]]:
    """Name -> weight, exp_avg, exp_avg_sq of the whole state after so many steps on a device."""
    parameters = {n: torch.nn.Parameter(whole(n).to(device)) for n in WHOLE}
    optimizer = adamw(parameters)
    for step in range(steps):
        give_gradients(parameters.items(), step, 1, 0)
        optimizer.step()
    return {
        n: {"weight": p.detach().cpu(), **{k: v.cpu() for k, v in optimizer.state[p].items() if k != "step"}}
        for n, p in parameters.items()
    }


def dp_groups(mesh: Mesh) -> list[list[int]]:
    """The ranks that differ in their data-parallel number only."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        groups.setdefault((at["pp"], at["cp"], at["tp"]), []).append(rank)
    return list(groups.values())


def zero1(by_name: dict[str, Any], mesh: Mesh, **options: Any) -> Any:
    """torch_xla's ZeRO-1 optimizer over the mesh's dp groups; needs `neuron_compat.emulate()` under torchrun."""
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        groups(by_name), torch.optim.AdamW, sharding_groups=dp_groups(mesh), grad_clipping=False, pin_layout=False,
        **{"lr": 1e-3, "foreach": False, **options},
    )  # fmt: skip


def zero1_part(full: torch.Tensor, name: str, mesh: Mesh, rank: int) -> torch.Tensor:
    """What a ZeRO-1 rank holds of a state: rows of the tensor-parallel part, padding included."""
    at = mesh.coordinates(rank)
    part = tp_part(full, name, mesh.tp, at["tp"])
    padded = ceil_to(part.shape[0], mesh.dp)
    if padded > part.shape[0]:
        part = torch.cat([part, torch.zeros(padded - part.shape[0], *part.shape[1:])])
    return part.chunk(mesh.dp)[at["dp"]]


def known(name: str, what: str) -> torch.Tensor:
    """A value of the whole state that no training made: what sharded optimizers are filled with."""
    return whole(name, what).abs() if what == "exp_avg_sq" else whole(name, what)


def shards_of(optimizer: Any, by_name: dict[str, Any]) -> dict[str, Any]:
    """The parameters that an optimizer steps, by name: the shards of a ZeRO-1 optimizer."""
    if not hasattr(optimizer, "base_optimizer"):
        return by_name
    name_of = {id(p): n for n, p in by_name.items()}
    pairs = zip(optimizer.param_groups, optimizer.base_optimizer.param_groups, strict=True)
    return {name_of[id(p)]: s for outer, inner in pairs for p, s in zip(outer["params"], inner["params"], strict=True)}


def part_of(full: torch.Tensor, name: str, mesh: Mesh, rank: int, *, zero: bool = False) -> torch.Tensor:
    """What a rank holds of a whole value."""
    return zero1_part(full, name, mesh, rank) if zero else tp_part(full, name, mesh.tp, mesh.coordinates(rank)["tp"])


def fill(optimizer: Any, by_name: dict[str, Any], mesh: Mesh, rank: int, *, masters: bool = False) -> None:
    """Give an optimizer its part of the known state; and of known master weights, where it keeps its own."""
    zero = hasattr(optimizer, "base_optimizer")
    inner = optimizer.base_optimizer if zero else optimizer
    for name, key in shards_of(optimizer, by_name).items():
        state = {w: part_of(known(name, w), name, mesh, rank, zero=zero) for w in ("exp_avg", "exp_avg_sq")}
        inner.state[key] = {"step": torch.tensor(7.0), **{w: v.to(key.device) for w, v in state.items()}}
        if masters:
            key.data = part_of(known(name, "master"), name, mesh, rank, zero=zero).to(key.device)


def differences(
    optimizer: Any, by_name: dict[str, Any], mesh: Mesh, rank: int, *, masters: bool | None = None
) -> list[str]:
    """What of a loaded state is not this rank's part of the known one. `masters`: None does not look at them."""
    zero = hasattr(optimizer, "base_optimizer")
    inner = optimizer.base_optimizer if zero else optimizer
    bad = []
    for name, parameter in by_name.items():
        weight = part_of(whole(name), name, mesh, rank)
        if not torch.equal(without_padding(parameter, weight, name, mesh, rank), weight.to(parameter.dtype)):
            bad.append(f"{name} weight")
    for name, key in shards_of(optimizer, by_name).items():
        state = inner.state[key]
        bad += [
            f"{name} {w}" for w in ("exp_avg", "exp_avg_sq")
            if not torch.equal(state[w].detach().cpu(), part_of(known(name, w), name, mesh, rank, zero=zero))
        ]  # fmt: skip
        bad += [f"{name} step"] if float(state["step"]) != 7.0 else []
        if masters is not None and zero:
            master = part_of(known(name, "master") if masters else whole(name), name, mesh, rank, zero=True)
            bad += [f"{name} master"] if not torch.equal(key.detach().cpu(), master) else []
    return bad


def without_padding(value: Any, want: torch.Tensor, name: str, mesh: Mesh, rank: int) -> torch.Tensor:
    """A local tensor with its padding set to zero: nobody promises what a load leaves there."""
    found = value.detach().cpu().clone()
    shape, dim, stride = WHOLE[name]
    if dim is not None and shape[dim] % (mesh.tp * stride):
        low = min(mesh.coordinates(rank)["tp"] * want.shape[dim], shape[dim])
        real = min(low + want.shape[dim], shape[dim]) - low
        found.narrow(dim, real, want.shape[dim] - real).zero_()
    return found
