"""How a job is set up with neuronx-distributed's calls: the configuration, the model and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla  # noqa: F401

import neuron_compat
import neuron_compat.nxd as nxd
from neuron_compat.nxd.optimizer import NeuronZero1Optimizer
from neuron_compat.nxd.parallel_layers import RowParallelLinear
from neuron_compat.nxd.parallel_layers import parallel_state as ps
from neuron_compat.nxd.trainer.model import NxDModel
from neuron_compat.nxd.trainer.optimizer import NxDOptimizer
from tests.jobs import run_on_ranks
from tests.neuron.recipe import Config, Model, init_weights
from xla_ckpt import UsageError

pytestmark = pytest.mark.xla


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    yield
    ps.destroy_model_parallel()


def test_the_configuration_is_completed_and_what_was_given_stays() -> None:
    assert nxd.neuronx_distributed_config() == {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "expert_parallel_size": 1, "context_parallel_size": 1,
        "pipeline_config": None, "activation_checkpoint_config": None, "pad_model": False, "sequence_parallel": False,
        "lora_config": None, "lnc_size": 1,
        "optimizer_config": {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0},
        "mixed_precision_config": {
            "use_master_weights": False, "use_fp32_grad_acc": False, "use_master_weights_in_ckpt": False,
        },
        "model_init_config": {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None},
    }  # fmt: skip
    given: dict[str, Any] = {"zero_one_enabled": True}
    config = nxd.trainer.neuronx_distributed_config(optimizer_config=given, mixed_precision_config={}, lnc_size=2)
    assert given == {"zero_one_enabled": True}
    assert config["optimizer_config"] == {"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0}
    assert config["mixed_precision_config"]["use_master_weights"] is True
    assert config["mixed_precision_config"]["use_fp32_grad_acc"] is True
    assert config["lnc_size"] == 2
    assert not ps.model_parallel_is_initialized()  # there is no torch.distributed


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=1, found 2. Keep neuronx_distributed"),
        ({"sequence_parallel": True}, "sequence_parallel is not there.*Pass False"),
        ({"pad_model": True}, "pad_model is not there.*tensor_parallel_size"),
        ({"lora_config": object()}, "lora_config is not there.*Keep neuronx_distributed"),
        ({"optimizer_config": {"max_norm": 1.0}}, "nothing would look at.*max_grad_norm, found max_norm"),
        ({"optimizer_config": True}, "has to be a dict: found bool"),
        ({"model_init_config": {"meta_device_init": True}}, "needs a param_init_fn"),
    ],
)
def test_what_cannot_be_done_is_an_error_that_says_what_to_do(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        nxd.neuronx_distributed_config(**asked)
    config = {**nxd.neuronx_distributed_config(), **asked}
    if "optimizer_config" not in asked:
        with pytest.raises(UsageError, match=says):  # one that was changed by hand
            nxd.initialize_parallel_model(config, torch.nn.Linear, False, 2, 2)


def test_likely_mistakes_of_the_setup_are_told_from_each_other() -> None:
    with pytest.raises(TypeError, match="did you mean 'tensor_parallel_size'"):
        nxd.neuronx_distributed_config(tensor_model_parallel_size=2)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="lambda: model"):
        nxd.initialize_parallel_model(nxd.neuronx_distributed_config(), torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"start a multiple of 2 \(torchrun"):
        ps.initialize_model_parallel(tensor_model_parallel_size=2)


def test_a_model_goes_to_the_device_with_its_ties_and_attributes() -> None:
    config = nxd.neuronx_distributed_config(activation_checkpoint_config=[RowParallelLinear])
    model = nxd.initialize_parallel_model(config, Model, False, config=Config())
    assert isinstance(model, NxDModel)
    assert {p.device.type for p in model.parameters()} == {"xla"}
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.embed_tokens.weight.tensor_model_parallel
    assert model.up_proj.weight.partition_dim == 0
    assert model.training
    assert model.config.model_type == "toy"
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018
    for wrong in (Config(), None):
        with pytest.raises(UsageError, match="include_buffers, a bool"):  # scripts of older versions have none
            nxd.initialize_parallel_model(config, Model, wrong)  # type: ignore[arg-type]
    for wrong, says in (("full", "Hugging Face"), ([], "classes of modules"), (3, "classes of modules")):
        with pytest.raises(UsageError, match=says):
            nxd.initialize_parallel_model({**config, "activation_checkpoint_config": wrong}, Model, False, Config())


def test_a_model_is_filled_on_its_way_from_the_meta_device() -> None:
    def config(init: Any) -> dict[str, Any]:
        return nxd.neuronx_distributed_config(model_init_config={"meta_device_init": True, "param_init_fn": init})

    seen = []

    def make() -> torch.nn.Module:
        model = Model(Config())
        seen.extend([model.norm.weight.is_meta, model.inv_freq.is_meta])
        model.norm.weight.kept = "this"  # type: ignore[attr-defined]
        model.norm.bias.requires_grad_(False)
        torch.manual_seed(3)
        return model

    model = nxd.initialize_parallel_model(config(init_weights), make)
    assert seen == [True, False]
    torch.manual_seed(3)
    want = Model(Config())
    torch.nn.init.zeros_(want.up_proj.bias)
    torch.nn.init.zeros_(want.down_proj.bias)
    for name, value in model.state_dict().items():
        assert value.device.type == "xla"
        if name != "inv_freq" and not name.startswith("lm_head"):
            expected = want.state_dict()[name]
            assert value.shape == expected.shape
            assert value.isfinite().all(), name
            assert name.endswith("bias") == bool((value == 0).all()), name
    assert torch.equal(model.embed_tokens.weight.detach().cpu(), want.embed_tokens.weight)
    assert model.inv_freq.tolist() == [0, 1, 2]
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.norm.weight.kept == "this"
    assert not model.norm.bias.requires_grad
    assert model.up_proj.weight.partition_dim == 0

    def forgets(module: torch.nn.Module, device: torch.device) -> None:
        if not isinstance(module, torch.nn.LayerNorm):
            init_weights(module, device)

    with pytest.raises(UsageError, match=r"gave 2 parameters no values \[leaf norm.weight\]"):
        nxd.initialize_parallel_model(config(forgets), make)
    with pytest.raises(UsageError, match=r"1 buffers are on the meta device.*\[leaf inv_freq\].*include_buffers=False"):
        nxd.initialize_parallel_model(config(init_weights), make, True)
    torch.nn.Linear(2, 2).weight.sum().item()  # a module made after that is no meta module


def parts_of_one_draw(_rank: int) -> list[list[list[float]]]:
    init = {"meta_device_init": True, "param_init_fn": init_weights}
    config = nxd.neuronx_distributed_config(tensor_parallel_size=2, model_init_config=init)

    def make() -> torch.nn.Module:
        model = Model(Config())
        torch.manual_seed(0)
        return model

    model = nxd.initialize_parallel_model(config, make)
    return [model.embed_tokens.weight.tolist(), model.up_proj.weight.tolist()]


def test_ranks_get_parts_of_the_same_draw() -> None:
    first, second = run_on_ranks(parts_of_one_draw, 2, xla=True)
    torch.manual_seed(0)
    embed, up = torch.empty(12, 8), torch.empty(16, 8)
    torch.nn.init.normal_(embed)
    torch.nn.init.kaiming_uniform_(up, a=math.sqrt(5))
    assert [a + b for a, b in zip(first, second, strict=True)] == [embed.tolist(), up.tolist()]


def test_a_wrapped_model_is_its_module() -> None:
    config = nxd.neuronx_distributed_config()
    inner = torch.nn.Linear(3, 2)
    inner.register_buffer("seen", torch.zeros(1))
    model = NxDModel(inner, config)
    assert model.original_module() is inner
    assert model.local_modules() == [inner]
    assert [n for n, _ in model.named_parameters()] == ["weight", "bias"]
    assert [n for n, _ in model.named_buffers()] == ["seen"]
    assert list(model.state_dict()) == ["weight", "bias", "seen"]
    assert list(model.parameters()) == list(inner.parameters())
    assert "Linear" in repr(model)
    model.eval()
    assert not inner.training
    model.apply(lambda m: setattr(m, "visited", True))
    assert inner.visited
    model.to(torch.float64)
    assert inner.weight.dtype == torch.float64
    state = {"weight": torch.zeros(2, 3), "bias": torch.ones(2), "seen": torch.ones(1)}
    model.load_state_dict(state)
    assert inner.bias.tolist() == [1, 1]
    assert model(torch.ones(1, 3, dtype=torch.float64)).tolist() == [[1, 1]]
    with pytest.raises(UsageError, match="no_grad"):
        model.run_eval()
    with pytest.raises(UsageError, match="found tuple"):
        NxDModel(Returns((1, 2)), config).run_train()
    weight = torch.nn.Parameter(torch.ones(2))
    assert NxDModel(Returns(weight.sum()), config).run_train().item() == 2
    assert weight.grad is not None


class Returns(torch.nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> Any:
        return self.value


def test_a_wrapped_optimizer_clips_and_is_the_inner_one() -> None:
    config = nxd.neuronx_distributed_config(optimizer_config={"max_grad_norm": 0.5})
    nxd.initialize_parallel_model(config, torch.nn.Linear, False, 1, 1)  # which initialises the parallel state
    mine, torchs = (torch.nn.Parameter(torch.tensor([3.0, 4.0])) for _ in range(2))
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.SGD, [mine], lr=1.0, momentum=0.9)
    assert isinstance(optimizer, NxDOptimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert type(optimizer.optimizer) is torch.optim.SGD
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    plain = torch.optim.SGD([torchs], lr=1.0, momentum=0.9)
    falling = torch.optim.lr_scheduler.LambdaLR(plain, lambda n: 1 / (n + 1))
    assert optimizer.grad_norm is None

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mine.pow(2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        loss = optimizer.step(closure)
        plain.zero_grad()
        torchs.pow(2).sum().backward()
        assert loss.item() == torchs.pow(2).sum().item()
        norm = torch.nn.utils.clip_grad_norm_([torchs], 0.5)
        plain.step()
        scheduler.step()
        falling.step()
        assert optimizer.grad_norm is not None
        assert optimizer.grad_norm.item() == pytest.approx(norm.item())
        assert torch.allclose(mine, torchs)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.defaults["momentum"] == 0.9
    held = optimizer.state_dict()
    assert torch.equal(held["state"][0]["momentum_buffer"], plain.state_dict()["state"][0]["momentum_buffer"])
    other = nxd.initialize_parallel_optimizer(config, torch.optim.SGD, [torch.nn.Parameter(torch.ones(2))], lr=9.0)
    other.load_state_dict(held)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    other.add_param_group({"params": [late := torch.nn.Parameter(torch.ones(1))]})
    late.grad = torch.full((1,), 8.0)
    other.step()
    assert other.grad_norm is not None
    assert other.grad_norm.item() == pytest.approx(8.0)  # of a parameter that was added later, too
    with pytest.raises(UsageError, match="only the shards of ZeRO-1"):
        other.save_state_dict("nowhere")


def test_precision_without_zero1_is_refused_as_it_is_there() -> None:
    config = nxd.neuronx_distributed_config(mixed_precision_config={"use_master_weights": True})
    with pytest.raises(UsageError, match="what only a ZeRO-1 optimizer does: found use_master_weights"):
        nxd.initialize_parallel_optimizer(config, torch.optim.SGD, [torch.nn.Parameter(torch.ones(2))], lr=0.1)


def test_options_of_zero1(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    ps.initialize_model_parallel()
    model = torch.nn.Linear(4, 4).to("xla")

    def made(optimizer_config: dict[str, Any], precision: dict[str, Any], **more: Any) -> NeuronZero1Optimizer:
        config = nxd.neuronx_distributed_config(
            optimizer_config={"zero_one_enabled": True, **optimizer_config}, mixed_precision_config=precision
        )
        wrapped = nxd.initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=0.1, **more)
        assert isinstance(wrapped.optimizer, NeuronZero1Optimizer)
        return wrapped.optimizer

    usual = made({}, {})
    assert (usual.grad_clipping, usual.max_norm, usual.save_master_weights) == (True, 1.0, False)
    assert (usual.use_grad_acc_hook, usual.higher_cc_precision) == (True, True)
    assert "neuronx-distributed clips those of ZeRO-1 to 1.0" not in caplog.text
    other = made({"max_grad_norm": 0.25}, {"use_fp32_grad_acc": False, "use_master_weights_in_ckpt": True})
    assert (other.max_norm, other.use_grad_acc_hook, other.save_master_weights) == (0.25, False, True)
    assert "neuronx-distributed clips those of ZeRO-1 to 1.0" in caplog.text
    assert made({"grad_clipping": False}, {}).grad_clipping is False
    assert made({}, {}, max_norm=3.0).max_norm == 3.0
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "1")
    assert made({}, {}).optimizer_dtype == torch.double
    assert made({}, {"use_master_weights": False}).optimizer_dtype == torch.float32


def arranges_the_ranks(rank: int) -> None:
    config = nxd.neuronx_distributed_config(tensor_parallel_size=2)
    assert ps.get_tensor_model_parallel_size() == 2
    nxd.neuronx_distributed_config(tensor_parallel_size=2)
    with pytest.raises(UsageError, match="arranged in another way already"):
        nxd.neuronx_distributed_config(tensor_parallel_size=1)
    ps.destroy_model_parallel()
    ps.initialize_model_parallel()
    with pytest.raises(UsageError, match="arranged in another way already"):
        nxd.initialize_parallel_model(config, torch.nn.Linear, False, 2, 2)
    ps.destroy_model_parallel()
    with pytest.raises(RuntimeError, match="2 ranks cannot be divided"):
        nxd.neuronx_distributed_config(tensor_parallel_size=4)


def test_ranks_are_arranged_as_the_configuration_says() -> None:
    run_on_ranks(arranges_the_ranks, 2, xla=True)


def test_the_programs_of_the_guide_to_checkpoints_run(tmp_path: Path) -> None:
    """The calls of neuronx-distributed's "Developer guide for save/load checkpoint", as they are printed there."""

    class args:
        checkpoint_dir, loading_step = str(tmp_path), 7

    def build(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        config = nxd.neuronx_distributed_config()
        model = nxd.initialize_parallel_model(config, Model, False, Config())
        optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))

    model, optimizer, lr_scheduler = build(0)
    words = torch.arange(10).reshape(2, 5).to("xla")
    model.run_train(words, words)
    optimizer.step()
    lr_scheduler.step()
    want = {n: v.cpu() for n, v in model.state_dict().items()}
    total_steps, batch_idx = 7, 3
    nxd.save_checkpoint(
        args.checkpoint_dir,  # checkpoint path
        tag=f"step_{total_steps}",  # tag, sub-directory under checkpoint path
        model=model,
        optimizer=optimizer,
        scheduler=lr_scheduler,
        user_content={"total_steps": total_steps, "batch_idx": batch_idx, "cli_args": {"loading_step": 7}},
        use_xser=True,
        async_save=True,
    )
    model, optimizer, lr_scheduler = build(1)
    user_content = nxd.load_checkpoint(
        args.checkpoint_dir,  # checkpoint path
        tag=f"step_{args.loading_step}",  # tag
        model=model,
        optimizer=optimizer,
        scheduler=lr_scheduler,
    )
    assert user_content == {"total_steps": 7, "batch_idx": 3, "cli_args": {"loading_step": 7}}
    assert all(torch.equal(v.cpu(), want[n]) for n, v in model.state_dict().items())
    assert lr_scheduler.last_epoch == 1
    states = optimizer.state_dict()["state"].values()
    assert [s["step"].item() for s in states] == [1] * len(list(model.parameters()))
    nxd.save_checkpoint(
        args.checkpoint_dir,  # checkpoint path
        tag=f"step_{total_steps + 1}",  # tag, sub-directory under checkpoint path
        model=model,
        use_xser=True,
        async_save=True,
    )
    nxd.finalize_checkpoint()
    fresh = build(2)[0]
    assert nxd.load_checkpoint(args.checkpoint_dir, model=fresh) is None  # leave tag not provided: the latest
    assert all(torch.equal(v.cpu(), want[n]) for n, v in fresh.state_dict().items())


def test_imports_as_scripts_write_them() -> None:
    from neuron_compat.nxd.parallel_layers import clip_grad_norm, grads, move_model_to_device, utils
    from neuron_compat.nxd.trainer import initialize_parallel_optimizer
    from neuron_compat.nxd.trainer.trainer import neuronx_distributed_config

    assert neuron_compat.neuronx_distributed_config is neuronx_distributed_config
    assert clip_grad_norm is grads.clip_grad_norm
    assert move_model_to_device is utils.move_model_to_device
    assert initialize_parallel_optimizer is nxd.initialize_parallel_optimizer
    assert neuronx_distributed_config is nxd.neuronx_distributed_config
    with pytest.raises(UsageError, match=r"nxd.lightning is not there\. Keep neuronx_distributed"):
        from neuron_compat.nxd.lightning import NeuronXLAStrategy  # noqa: F401
    with pytest.raises(UsageError, match="CheckpointIOState is not there.*finalize_checkpoint"):
        nxd.CheckpointIOState  # noqa: B018
    with pytest.raises(UsageError, match="no storage of this library.*found hdfs://host/run"):
        nxd.save_checkpoint("hdfs://host/run", "a", {"w": torch.ones(1)})
