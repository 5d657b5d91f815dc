"""A training script as neuronx-distributed's tp_zero1_llama_hf_pretrain.py is written: its calls, in its order.

Only the imports are others, and the model is smaller.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch_xla.core.xla_model as xm

import neuron_compat.nxd as nxd  # was: import neuronx_distributed as nxd
from neuron_compat.nxd.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, parallel_state
from neuron_compat.nxd.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams


class Config:
    """As of a model of Hugging Face's."""

    hidden_size, intermediate_size, vocab_size, model_type = 8, 16, 12, "toy"


class Model(torch.nn.Module):
    """Guesses the next word; embedding and head are one weight."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.embed_tokens = ParallelEmbedding(config.vocab_size, hidden)
        self.up_proj = ColumnParallelLinear(hidden, config.intermediate_size, gather_output=False)
        self.down_proj = RowParallelLinear(config.intermediate_size, hidden, input_is_parallel=True)
        self.norm = torch.nn.LayerNorm(hidden)
        self.lm_head = ColumnParallelLinear(hidden, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("inv_freq", torch.arange(3.0))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        x = x + self.down_proj(torch.nn.functional.silu(self.up_proj(self.norm(x))))
        return torch.nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), labels.flatten())


def init_weights(module: torch.nn.Module, device: torch.device) -> None:
    """What fills a model from the meta device, as in modeling_llama_nxd.py."""
    if isinstance(module, ParallelEmbedding | RowParallelLinear | ColumnParallelLinear):
        module.init_weight_cpu()
        if getattr(module, "bias", None) is not None:
            module.bias.data.zero_()
    elif isinstance(module, torch.nn.LayerNorm):
        module.reset_parameters()


def get_mixed_precision_config(use_gpu_compatible_precision: bool) -> dict[str, bool]:
    return {
        "use_master_weights": use_gpu_compatible_precision,
        "use_fp32_grad_acc": use_gpu_compatible_precision,
        "use_master_weights_in_ckpt": False,
    }


def get_model(flags: argparse.Namespace) -> torch.nn.Module:
    return Model(Config()).to(flags.dtype)


def batch_of(step: int, micro: int, flags: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """This data-parallel rank's part of a batch."""
    numbers = torch.Generator().manual_seed(10 * step + micro)
    words = torch.randint(0, 12, (flags.batch_size, 6), generator=numbers)
    words = words.chunk(parallel_state.get_data_parallel_size())[parallel_state.get_data_parallel_rank()].to("xla")
    return words[:, :-1], words[:, 1:]


def train_llama(flags: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Train up to ``flags.max_steps``; the losses and norms of this run's steps."""
    torch.manual_seed(flags.seed)
    model_init_config = {"meta_device_init": True, "param_init_fn": init_weights} if flags.meta_device else None
    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=flags.tensor_parallel_size,
        optimizer_config={
            "zero_one_enabled": flags.use_zero_1, "grad_clipping": True, "max_grad_norm": flags.max_grad_norm,
        },
        sequence_parallel=False,
        activation_checkpoint_config=RowParallelLinear,
        model_init_config=model_init_config,
        mixed_precision_config=get_mixed_precision_config(flags.use_zero_1),
    )  # fmt: skip
    include_buffers = False
    model = nxd.initialize_parallel_model(nxd_config, get_model, include_buffers, flags)

    world_size = parallel_state.get_data_parallel_size()
    param_optimizer = list(model.named_parameters())
    no_decay = ["bias", "LayerNorm"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)],
            "weight_decay": flags.weight_decay,
        },
        {"params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = nxd.initialize_parallel_optimizer(
        nxd_config,
        AdamW_FP32OptimParams,
        optimizer_grouped_parameters,
        lr=flags.lr,
        betas=(0.9, 0.95),
        weight_decay=flags.weight_decay,
    )
    optimizer.zero_grad()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    tag = None if nxd.has_checkpoint(flags.checkpoint_dir) else "-1"
    global_step = 0
    if tag != "-1":
        user_content = nxd.load_checkpoint(
            flags.checkpoint_dir,
            tag=tag,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
        )
        if user_content is not None:
            global_step = user_content["global_step"]
        if flags.use_zero_1 and flags.init_zero:
            optimizer.optimizer.init_zero()

    losses: list[float] = []
    norms: list[float] = []
    running_loss = torch.zeros(1, dtype=torch.double).to("xla")
    while global_step < flags.max_steps:
        for micro in range(flags.grad_accum_usteps):
            input_ids, labels = batch_of(global_step, micro, flags)
            loss = model(input_ids, labels) / flags.grad_accum_usteps
            loss.backward()
            running_loss += loss.detach()
        xm.mark_step()
        running_loss_reduced = xm.all_reduce(
            xm.REDUCE_SUM, running_loss / world_size, groups=parallel_state.get_data_parallel_replica_groups()
        )
        running_loss.zero_()
        optimizer.step()
        total_norm = optimizer.grad_norm  # Global norm before clipping
        optimizer.zero_grad()
        scheduler.step()
        global_step += 1
        losses.append(running_loss_reduced.item())
        norms.append(total_norm.cpu().item())
        if global_step % flags.checkpoint_freq == 0:
            xm.add_step_closure(
                nxd.save_checkpoint,
                (
                    flags.checkpoint_dir,  # checkpoint directory
                    f"step_{global_step}",  # tag
                    model,  # model
                    optimizer,  # optimizer
                    scheduler,  # scheduler
                    {"epoch": 0, "global_step": global_step, "cli_args": {"lr": flags.lr}},  # user content
                    8,  # num_workers
                    True,  # use_xser
                    flags.num_kept_checkpoint,  # num_kept_ckpts
                ),
            )
        xm.mark_step()
    return losses, norms
