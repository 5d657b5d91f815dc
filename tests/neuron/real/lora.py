"""What tests/neuron/test_real_lora.py has the real neuronx-distributed do: `LoraModel` in `NxDModel`, over tp 2."""

from __future__ import annotations

from typing import Any

import torch

TARGETS = ["down", "up", "norm"]


def build(seed: int, where: str, **options: Any) -> tuple[Any, Any]:
    """Model and optimizer with state, whose adapters are not zero; those that are split differ between ranks."""
    import neuronx_distributed as nxd
    from neuronx_distributed.modules.lora import LoraConfig
    from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear

    config = LoraConfig(lora_rank=4, lora_alpha=8, target_modules=TARGETS, lora_save_dir=where, **options)
    setup = nxd.neuronx_distributed_config(
        tensor_parallel_size=2, optimizer_config={"zero_one_enabled": False, "grad_clipping": False}, lora_config=config
    )

    def module() -> torch.nn.Module:
        torch.manual_seed(seed)
        made = torch.nn.Module()
        made.up, made.down = ColumnParallelLinear(8, 12), RowParallelLinear(12, 8)
        made.norm = torch.nn.Linear(8, 8)
        return made

    model = nxd.initialize_parallel_model(setup, module)
    draw(model, seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = nxd.initialize_parallel_optimizer(setup, torch.optim.AdamW, trained, lr=1e-3)
    for p in trained:
        p.grad = p.detach() * 3
    optimizer.step()
    return model, optimizer


def draw(model: Any, seed: int) -> None:
    """Give adapters the values that they have over any number of ranks: this rank's part of them."""
    from neuronx_distributed.parallel_layers import parallel_state as ps

    rank, generator = ps.get_tensor_model_parallel_rank(), torch.Generator().manual_seed(seed)
    wholes = {"up.lora_B": (0, (12, 4)), "down.lora_A": (1, (4, 12))}
    for name, p in sorted(model.named_parameters()):
        if "lora_" in name:
            dim, shape = wholes.get(name.removesuffix(".weight"), (0, tuple(p.shape)))
            value = torch.randn(shape, generator=generator)
            p.data = (value.chunk(2, dim)[rank] if shape != tuple(p.shape) else value).to(p.device)


def state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """All parameters, and states by number."""
    found = {n: p.detach().cpu().clone() for n, p in model.module.module.named_parameters()}
    parameters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(parameters):
        found |= {f"{i}.{k}": v.detach().cpu().clone() for k, v in optimizer.optimizer.state[p].items()}
    return found


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return sorted(k for k in {*one, *other} if k not in one or k not in other or not torch.equal(one[k], other[k]))


def saves_and_loads(rank: int, root: str, base: bool, joined: bool) -> dict[str, list[str]]:
    """What differs of model and optimizer after a load, by who saved the tag."""
    import neuronx_distributed as nxd

    import neuron_compat.nxd as lib
    import xla_ckpt

    options = {"save_lora_base": base, "merge_sharded_lora": joined}
    model, optimizer = build(0, f"{root}/theirs", **options)
    wanted = state(model, optimizer)
    nxd.save_checkpoint(f"{root}/theirs", tag="a", model=model, optimizer=optimizer)
    lib.save_checkpoint(f"{root}/pt", tag="a", model=model, optimizer=optimizer)
    lib.save_checkpoint(f"{root}/xser", tag="a", model=model, optimizer=optimizer, use_xser=True)
    xla_ckpt.save_checkpoint(f"{root}/native", "a", model, optimizer)
    told = {}
    for name in ("theirs", "pt", "xser", "native"):
        fresh = build(7, f"{root}/mine", **options)
        lib.load_checkpoint(f"{root}/{name}", "a", *fresh)
        told[name] = differing(state(*fresh), wanted)
    return told


def joins_queries(rank: int, root: str, fused: bool, copies: int, joined: bool) -> dict[str, str]:
    """What a load says of adapters of queries, keys and values in one layer, by who saved them; "" if all are right."""
    import neuronx_distributed as nxd
    from neuronx_distributed.modules.lora import LoraConfig
    from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear

    import neuron_compat.nxd as lib
    import xla_ckpt

    def build(seed: int) -> Any:
        config = LoraConfig(lora_rank=4, target_modules=["qkv"], lora_save_dir=root, merge_sharded_lora=joined)
        setup = nxd.neuronx_distributed_config(tensor_parallel_size=2, lora_config=config)

        def module() -> torch.nn.Module:
            made = torch.nn.Module()
            made.qkv = GQAQKVColumnParallelLinear(
                8, [16, 8], bias=False, gather_output=False, kv_size_multiplier=copies, fuse_qkv=fused
            )
            return made

        model = nxd.initialize_parallel_model(setup, module)
        generator = torch.Generator().manual_seed(seed)
        whole = {"q": torch.randn(16, 4, generator=generator)}
        whole |= {part: torch.randn(8, 4, generator=generator).repeat(copies, 1) for part in "kv"}
        own = {part: value.chunk(2)[rank] for part, value in whole.items()}
        own["qkv"] = torch.cat([own[part] for part in "qkv"])
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data = own[name.rpartition("_")[2]].to(p.device)
        return model

    model = build(0)
    nxd.save_checkpoint(f"{root}/theirs", tag="a", model=model)
    lib.save_checkpoint(f"{root}/ours", tag="a", model=model)
    wanted = {n: p.detach().cpu() for n, p in model.named_parameters() if "lora_" in n}
    told = {}
    for name in ("theirs", "ours"):
        fresh = build(7)
        try:
            lib.load_checkpoint(f"{root}/{name}", "a", model=fresh)
            got = {n: p.detach().cpu() for n, p in fresh.named_parameters() if "lora_" in n}
            told[name] = " ".join(differing(got, wanted))
        except xla_ckpt.IncompatibleCheckpointError as error:
            told[name] = str(error)
    return told


def reads_ours(rank: int, root: str) -> list[str]:
    """What differs after neuronx-distributed itself has loaded adapters from files of this library."""
    import neuronx_distributed as nxd

    import neuron_compat.nxd as lib

    model, optimizer = build(0, f"{root}/cfg")
    wanted = state(model, optimizer)
    lib.save_checkpoint(root, tag="a", model=model, optimizer=optimizer)
    fresh, other = build(7, root)
    held = torch.load(f"{root}/a/model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt", weights_only=False)
    held.pop("lora_config")
    fresh.module.module.load_state_dict(held, strict=False)
    nxd.load_checkpoint(root, tag="a", optimizer=other)
    return [name for name in differing(state(fresh, other), wanted) if "lora_" in name or name[0].isdigit()]
