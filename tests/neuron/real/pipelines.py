"""What tests/neuron/test_real_pipelines.py has the real neuronx-distributed do: train a language model in stages.

Its first and last layer are one weight, which both stages have. It has neuronx-distributed's layers, so that it can be
split over tensor-parallel ranks as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WORDS, HIDDEN = 32, 16


def trains(rank: int, root: str) -> list[Any]:
    """PP 2 x DP 2: two steps, a tag of each kind by each library, and the losses of the steps after it."""
    import xla_ckpt

    model, optimizer, scheduler, step = job(seed=1, tp=1, pp=2)
    for number in (1, 2):
        step(number)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "user_content": {"step": 2}}
    xla_ckpt.save_checkpoint(root, "native", **state)
    save_everywhere(root, state)
    return [step(3), step(4)]


def resumes(rank: int, seed: int, tp: int, pp: int, tags: list[list[str]], back: str) -> dict[str, list[Any]]:
    """The losses after a load of each tag, by its path: a library, a root directory, a tag.

    What was loaded from the last one is saved again by both libraries, in both layouts, below `touch_pages`, and
    neuronx-distributed loads that.
    """
    model, optimizer, scheduler, step = job(seed, tp, pp)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    losses = {}
    for library, root, tag in tags:
        loaded(library, root, tag, state)
        if [library, root, tag] == tags[-1]:
            save_everywhere(back, {**state, "user_content": {"step": 2}})
        losses[f"{library} {root} {tag}"] = [step(3), step(4)]
    for tag in ("pt", "xser"):
        loaded("theirs", f"{back}/ours", tag, state)
        losses[f"again {tag}"] = [step(3), step(4)]
    return losses


def save_everywhere(root: str, state: dict[str, Any]) -> None:
    """A tag of each library in each of neuronx-distributed's layouts."""
    import neuronx_distributed

    import neuron_compat.nxd

    for library, name in ((neuron_compat.nxd, "ours"), (neuronx_distributed, "theirs")):
        library.save_checkpoint(f"{root}/{name}", "pt", **state)
        library.save_checkpoint(f"{root}/{name}", "xser", **state, use_xser=True)


def loaded(library: str, root: str, tag: str, state: dict[str, Any]) -> Any:
    """The user content of a tag, of which all else is in `state` then."""
    import neuronx_distributed

    import neuron_compat.nxd

    if library == "ours":
        return neuron_compat.nxd.load_checkpoint(root, tag, **state)
    # Without master weights in the tag, the next step of neuronx-distributed's takes the weights from before the load
    # back, if it loads all in one call.
    parts = dict(state)
    neuronx_distributed.load_checkpoint(root, tag, model=parts.pop("model"))
    return neuronx_distributed.load_checkpoint(root, tag, **parts)


def job(seed: int, tp: int, pp: int) -> tuple[Any, Any, Any, Callable[[int], float | None]]:
    """A model, its ZeRO-1 optimizer, its scheduler, and a step, which gives the loss where this rank has it."""
    import neuronx_distributed as nxd
    import torch_xla
    from neuronx_distributed.parallel_layers import parallel_state as ps

    _emulate_stages()
    stages = {
        "transformer_layer_cls": _blocks()[0], "pipeline_cuts": ["body.blocks.0"], "num_microbatches": 2,
        "output_loss_value_spec": (True, False), "input_names": ["words"], "tracer_cls": "torch",
        "use_zero1_optimizer": True,
    }  # fmt: skip
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        pipeline_config=stages if pp > 1 else None,
        optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
    )
    torch.manual_seed(seed)
    model = nxd.initialize_parallel_model(config, _blocks()[1])
    if pp == 1:  # neuronx-distributed ties only those weights again that belong to models of transformers
        model.module.head.weight = model.module.body.embed.weight
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10))

    def step(number: int) -> float | None:
        first = torch.randint(WORDS, (8, 1), generator=torch.Generator().manual_seed(number))
        words = (first + 3 * torch.arange(6)) % WORDS
        words = words.chunk(ps.get_data_parallel_size())[ps.get_data_parallel_rank()]
        optimizer.zero_grad()
        if pp > 1:
            loss = model.run_train(words=words)
        else:
            loss = model(words.to("xla"))[0]
            loss.backward()
        optimizer.step()
        scheduler.step()
        torch_xla.sync()
        return None if loss is None else loss.item()

    return model, optimizer, scheduler, step


def _blocks() -> tuple[type, Callable[[], torch.nn.Module]]:
    """The class of which a model has several, and what makes a model."""
    from neuronx_distributed.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(HIDDEN)
            self.up = ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False)
            self.down = RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True)
            self.register_buffer("scale", torch.ones(1))
            self.register_buffer("unsaved", torch.ones(1), persistent=False)

        def forward(self, x: Any) -> Any:
            return x + self.scale * self.unsaved * self.down(torch.tanh(self.up(self.norm(x))))

    class Body(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = ParallelEmbedding(WORDS, HIDDEN)
            self.blocks = torch.nn.ModuleList([Block(), Block()])

        def forward(self, words: Any) -> Any:
            x = self.embed(words)
            for block in self.blocks:
                x = block(x)
            return x

    class Language(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Body()
            self.head = ColumnParallelLinear(HIDDEN, WORDS, bias=False, gather_output=True)
            self.head.weight = self.body.embed.weight

        def forward(self, words: Any) -> Any:
            logits = self.head(self.body(words))
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), words[:, 1:].reshape(-1))
            return loss, logits

    return Block, Language


class _Done:
    """A collective that is over."""

    def wait(self) -> bool:
        return True


def _emulate_stages() -> None:
    """What only pipelines need of Neuron's collectives: peers, and a sum of XLA tensors that is waited for."""
    import torch.distributed as dist
    from neuronx_distributed.parallel_layers import parallel_state as ps

    peers = dict.fromkeys(range(dist.get_world_size()))
    ps.CollectivesConfig = lambda replica_groups: type("Config", (), {"rank_src_tgt_pairs": peers})()
    plain = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        plain(tensor, *args, **kwargs)
        return _Done() if async_op else None

    dist.all_reduce = all_reduce
