"""How neuronx-distributed's scripts set up a job: a configuration, then the model, then the optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from neuron_compat.emulated import parallel_state
from neuron_compat.emulated.moving import get_model_sequential, init_on_device, is_hf_pretrained_model
from neuron_compat.emulated.nxd import config as configuration
from neuron_compat.emulated.nxd.model import NxDModel
from neuron_compat.emulated.nxd.optimizer import NxDOptimizer
from neuron_compat.lazy import imported
from xla_ckpt import UsageError
from xla_ckpt.keywords import known_names
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)


@known_names()
def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    context_parallel_size: int = 1,
    pipeline_config: Mapping[str, Any] | None = None,
    optimizer_config: Mapping[str, Any] | None = None,
    activation_checkpoint_config: Any = None,
    pad_model: bool = False,
    sequence_parallel: bool = False,
    model_init_config: Mapping[str, Any] | None = None,
    lora_config: Any = None,
    mixed_precision_config: Mapping[str, Any] | None = None,
    sequential_move_factor: int = 11,
    lnc_size: int = 1,
) -> dict[str, Any]:
    """Check and complete what a job asks for; with torch.distributed, arrange its ranks, too.

    Args:
        tensor_parallel_size: Ranks that share out each layer.
        pipeline_parallel_size: 1.
        expert_parallel_size: Ranks that share out the experts.
        context_parallel_size: Ranks that share out each sequence.
        pipeline_config: Kept; without pipeline stages nothing looks at it.
        optimizer_config: ``zero_one_enabled`` (False), ``grad_clipping`` (True) and ``max_grad_norm`` (1.0).
        activation_checkpoint_config: Checked and kept, and not applied: activations are kept in memory. Results are
            the same.
        pad_model: False.
        sequence_parallel: False.
        model_init_config: ``meta_device_init`` (False) with ``param_init_fn``, a function of a module and a device
            that fills the module's own parameters; ``sequential_move_factor``.
        lora_config: None.
        mixed_precision_config: ``use_master_weights`` and ``use_fp32_grad_acc`` (True with ZeRO-1) and
            ``use_master_weights_in_ckpt`` (False).
        sequential_move_factor: Kept; ranks move their models all at once. Results are the same.
        lnc_size: Kept.

    Returns:
        The arguments as a dict, with a value for everything. The dicts that were given stay as they are.

    Raises:
        xla_ckpt.UsageError: Something is unknown, or cannot be done here, or the ranks are arranged otherwise already.
        RuntimeError: The sizes do not divide the number of ranks.
    """
    config = configuration.complete(dict(locals()))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _arrange(config)
    return config


def _arrange(config: Mapping[str, Any]) -> None:
    """Initialise the parallel state as the configuration has it, or compare it."""
    sizes = {
        "tensor_model_parallel_size": config["tensor_parallel_size"],
        "pipeline_model_parallel_size": config["pipeline_parallel_size"],
        "context_parallel_size": config.get("context_parallel_size", 1),
        "expert_model_parallel_size": config["expert_parallel_size"],
    }
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**sizes, lnc_size=config.get("lnc_size", 1))
        return
    current = dict(zip(sizes, map(parallel_state.size, ("tp", "pp", "cp", "ep")), strict=True))
    if current != sizes:
        raise UsageError(
            "the ranks are arranged in another way already",
            expected=sizes,
            found=current,
            hint="Leave initialize_model_parallel() to neuronx_distributed_config().",
        )


def initialize_parallel_model(
    nxd_config: dict[str, Any],
    model_fn: Callable[..., torch.nn.Module],
    include_buffers: bool = False,
    *model_args: Any,
    **model_kwargs: Any,
) -> NxDModel:
    """Make a model, and move it to the XLA device.

    Args:
        nxd_config: What `neuronx_distributed_config` returned.
        model_fn: Makes this rank's part of the model.
        include_buffers: With ``meta_device_init``: the buffers are made on the meta device, too.
        model_args: For `model_fn`.
        model_kwargs: For `model_fn`.

    Returns:
        The model in training mode. Ties between parameters, and their attributes, are as `model_fn` left them.

    Raises:
        xla_ckpt.UsageError: The configuration asks for what cannot be done here; `include_buffers` is no bool; or
            ``param_init_fn`` left parameters without values.
    """
    configuration.check(nxd_config)
    if isinstance(model_fn, torch.nn.Module):
        raise UsageError("model_fn makes the model, and is none itself", hint="Pass lambda: model.")
    if not isinstance(include_buffers, bool):
        raise UsageError(
            "the argument after model_fn is include_buffers, a bool",
            found=type(include_buffers).__name__,
            hint="Arguments for model_fn come after it: initialize_parallel_model(nxd_config, model_fn, False, ...).",
        )
    _arrange(nxd_config)
    model_init = nxd_config["model_init_config"]
    if model_init["meta_device_init"]:
        with init_on_device("meta", include_buffers):
            model = model_fn(*model_args, **model_kwargs)
    else:
        model = model_fn(*model_args, **model_kwargs)
    _check_activation_checkpoints(nxd_config.get("activation_checkpoint_config"), model)
    device = imported("torch_xla").device()
    moved = get_model_sequential(model, device, param_init_fn=model_init.get("param_init_fn"))
    return NxDModel(moved, nxd_config)


def _check_activation_checkpoints(asked: Any, model: torch.nn.Module) -> None:
    """Refuse what neuronx-distributed refuses; what it would do changes no result, and is left out."""
    if asked is None:
        return
    if asked == "full":
        if not is_hf_pretrained_model(model):
            raise UsageError(
                'activation_checkpoint_config="full" is for models of Hugging Face\'s transformers',
                found=type(model).__name__,
                hint="Give the class of the layers, or None.",
            )
    else:
        classes = asked if isinstance(asked, list | tuple) else [asked]
        if not classes or not all(isinstance(c, type) and issubclass(c, torch.nn.Module) for c in classes):
            raise UsageError('activation_checkpoint_config is "full", or classes of modules', found=repr(asked)[:80])
    logger.info("activations are kept, and not computed again: activation_checkpoint_config changes no result")


def initialize_parallel_optimizer(
    nxd_config: dict[str, Any], optimizer_class: Callable[..., Any], parameters: Any, **defaults: Any
) -> NxDOptimizer:
    """Make an optimizer whose steps reduce the gradients over the replicas and clip them.

    Args:
        nxd_config: What `neuronx_distributed_config` returned.
        optimizer_class: Such as `torch.optim.AdamW`.
        parameters: Those of the model that `initialize_parallel_model` returned, or groups of them.
        defaults: For `optimizer_class`, and for the ZeRO-1 optimizer (`optimizer_dtype`, ...).

    Returns:
        The optimizer; its ``optimizer`` is a `NeuronZero1Optimizer` with ``zero_one_enabled``, and else one of
        `optimizer_class`.

    Raises:
        xla_ckpt.UsageError: Master weights are asked for without ZeRO-1, or experts with it.
    """
    return NxDOptimizer(
        initialize_optimizer_from_class(nxd_config, optimizer_class, parameters, **defaults), nxd_config
    )


def initialize_optimizer_from_class(
    nxd_config: dict[str, Any],
    optimizer_class: Callable[..., Any],
    parameters: Any,
    model: Any = None,  # noqa: ARG001  # neuronx-distributed's signature
    **defaults: Any,
) -> Any:
    """The inner optimizer of `initialize_parallel_optimizer`."""
    configuration.check_precision(nxd_config)
    if not nxd_config["optimizer_config"]["zero_one_enabled"]:
        return optimizer_class(parameters, **defaults)
    from neuron_compat.nxd.optimizer import NeuronZero1Optimizer

    return NeuronZero1Optimizer(parameters, optimizer_class, **{**_zero1_options(nxd_config), **defaults})


def _zero1_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `NeuronZero1Optimizer` that a configuration asks for."""
    asked, precision = config["optimizer_config"], config["mixed_precision_config"]
    options: dict[str, Any] = {
        "grad_clipping": asked["grad_clipping"],
        "max_norm": asked["max_grad_norm"],
        "pin_layout": False,
        "save_master_weights": bool(precision["use_master_weights_in_ckpt"]),
    }
    if asked["grad_clipping"] and asked["max_grad_norm"] != 1.0:
        logger.warning(
            "gradients are clipped to max_grad_norm=%s; neuronx-distributed clips those of ZeRO-1 to 1.0 whatever "
            "it says",
            asked["max_grad_norm"],
        )
    if precision["use_master_weights"] and os.environ.get("XLA_DOWNCAST_BF16") == "1":
        options["optimizer_dtype"] = torch.double
    if precision["use_fp32_grad_acc"]:
        options |= {"use_grad_acc_hook": True, "higher_cc_precision": True}
    return options
