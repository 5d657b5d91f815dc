"""What NxD's Llama example takes besides layers: the loss over split logits, positions, batches; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from neuron_compat.nxd.kernels.flash_attn import nki_flash_attn_func
from neuron_compat.nxd.kernels.ring_attention_kernel import nki_ring_attn_func
from neuron_compat.nxd.overrides.transformer_overrides import apply_rotary_pos_emb
from neuron_compat.nxd.parallel_layers import parallel_cross_entropy, parallel_state
from neuron_compat.nxd.scripts.checkpoint_converter import CheckpointConverterBase
from neuron_compat.nxd.utils.batch_utils import get_batch_on_this_context_parallel_rank
from tests.jobs import run_on_ranks
from xla_ckpt import UsageError


def over_ranks(rank: int) -> tuple[list[Any], list[Any]]:
    """The losses of this rank, and the gradients of its part of the logits."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    logits, target = logits_and_target()
    mine = logits.chunk(2, -1)[rank].clone().requires_grad_()
    loss = parallel_cross_entropy(mine, target)
    (loss * torch.arange(6.0).reshape(2, 3)).sum().backward()
    with pytest.raises(UsageError, match="label_smoothing"):
        parallel_cross_entropy(mine, target, label_smoothing=0.1)
    assert mine.grad is not None
    return loss.tolist(), mine.grad.tolist()


def logits_and_target() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return 30 * torch.randn(2, 3, 8, generator=generator), torch.randint(8, (2, 3), generator=generator)


def test_the_loss_over_split_logits_is_that_of_torch() -> None:
    logits, target = logits_and_target()
    logits.requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits.movedim(-1, 1), target, reduction="none")
    (loss * torch.arange(6.0).reshape(2, 3)).sum().backward()
    answers = run_on_ranks(over_ranks, 2)
    for told, _ in answers:
        torch.testing.assert_close(torch.tensor(told), loss.detach())
    gradients = torch.cat([torch.tensor(gradient) for _, gradient in answers], -1)
    torch.testing.assert_close(gradients, logits.grad)


def part_of_a_batch(rank: int) -> tuple[dict[str, Any], list[list[int]]]:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    batch = {"input_ids": torch.arange(8).reshape(2, 4), "labels": torch.arange(8).reshape(2, 4), "none": None}
    found = get_batch_on_this_context_parallel_rank(batch)
    with pytest.raises(ValueError, match="3, which 2"):
        get_batch_on_this_context_parallel_rank({"input_ids": torch.zeros(1, 3)})
    dist.barrier()
    pairs = parallel_state.get_context_model_parallel_src_tgt_pairs()
    return {name: None if value is None else value.tolist() for name, value in found.items()}, pairs


def test_context_parallel_ranks_get_their_part_of_a_batch() -> None:
    (first, pairs), (second, _) = run_on_ranks(part_of_a_batch, 2)
    assert first == {"input_ids": [[0, 1], [4, 5]], "labels": [[1, 2], [5, 6]], "none": None}
    assert second == {"input_ids": [[2, 3], [6, 7]], "labels": [[3, -100], [7, -100]], "none": None}
    assert pairs == [[0, 1], [1, 0]]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("all_positions", [False, True])
def test_positions_turn_pairs_of_features(transposed: bool, all_positions: bool) -> None:
    angles = torch.linspace(0, 3, 5)[:, None] * torch.tensor([1.0, 0.1])
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    q, k = torch.randn(2, 1, 3, 5, 4, generator=torch.Generator().manual_seed(0)).unbind()
    positions = torch.arange(5)[None] if all_positions else None
    given = [x.transpose(-1, -2) if transposed else x for x in (q, k)]
    tables = (cos, sin) if all_positions else (cos[None], sin[None])
    turned = apply_rotary_pos_emb(*given, *tables, positions, transposed, True)
    for x, value in zip((q, k), turned, strict=True):
        got = value.transpose(-1, -2) if transposed else value
        wanted = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.polar(torch.ones_like(angles), angles)
        torch.testing.assert_close(torch.stack(got.chunk(2, -1), -1), torch.view_as_real(wanted))


def test_kernels_can_be_imported_and_not_called() -> None:
    with pytest.raises(UsageError, match="use_flash_attention=False"):
        nki_flash_attn_func(torch.ones(1))
    with pytest.raises(UsageError, match="context_parallel_size=1"):
        nki_ring_attn_func(torch.ones(1))


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (["--convert_to_full_state"], "xla-ckpt export a b --config c.json"),
        (["--convert_from_full_state", "--tp_size=2", "--save_xser=1"], "xla-ckpt convert a b --to xser --mesh pp=1,"),
        (["--convert_to_full_state", "--input_dir=run/a b/model"], "xla-ckpt export 'run/a b' b --config c.json"),
        (
            ["--convert_to_xser", "--ep_size=2", "--kv_size_multiplier=4"],
            "xla-ckpt convert a b --to xser --mesh pp=1,dp=2,ep=2,tp=1 --config c.json --kv-size-multiplier 4",
        ),
    ],
)
def test_a_converter_of_weights_says_which_command_does_it(options: list[str], command: str) -> None:
    class CheckpointConverterLlama(CheckpointConverterBase):
        pass

    converter = CheckpointConverterLlama()
    args = converter.get_arg_parser().parse_args(["--input_dir=a", "--output_dir=b", "--config=c.json", *options])
    with pytest.raises(UsageError, match=f"CheckpointConverterLlama.*Run: {command}"):
        converter.run(args)
