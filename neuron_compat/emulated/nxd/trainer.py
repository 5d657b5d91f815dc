"""neuronx-distributed's job setup: the configuration, then the model, then the optimizer.

Contains the wrappers that `initialize_parallel_model` and `initialize_parallel_optimizer` return, and the utilities
that split batches over context-parallel ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from neuron_compat.emulated import grads, parallel_state
from neuron_compat.emulated.model_utils import (
    TransparentModule,
    get_model_sequential,
    init_on_device,
    is_hf_pretrained_model,
)
from neuron_compat.emulated.nxd import config as configuration
from neuron_compat.lazy_imports import import_module
from xla_ckpt import UsageError
from xla_ckpt.keywords import check_argument_names
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)


@check_argument_names()
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
    """Validate and complete the configuration of a job; with torch.distributed, also arrange its ranks.

    Args:
        tensor_parallel_size: Number of ranks over which each layer is sharded.
        pipeline_parallel_size: Must be 1.
        expert_parallel_size: Number of ranks over which experts are sharded.
        context_parallel_size: Number of ranks over which each sequence is sharded.
        pipeline_config: Stored; not used without pipeline stages.
        optimizer_config: ``zero_one_enabled`` (False), ``grad_clipping`` (True) and ``max_grad_norm`` (1.0).
        activation_checkpoint_config: Validated and stored, but not applied: activations are kept in memory. The results
            are the same.
        pad_model: Must be False.
        sequence_parallel: Must be False.
        model_init_config: ``meta_device_init`` (False) with ``param_init_fn``, a function of a module and a device
            that fills the module's own parameters; ``sequential_move_factor``.
        lora_config: Must be None.
        mixed_precision_config: ``use_master_weights`` and ``use_fp32_grad_acc`` (True with ZeRO-1) and
            ``use_master_weights_in_ckpt`` (False).
        sequential_move_factor: Stored; all ranks move their models at once. The results are the same.
        lnc_size: Stored.

    Returns:
        The arguments as a dict, with defaults filled in. The given dicts are unchanged.

    Raises:
        xla_ckpt.UsageError: An entry is unknown or unsupported, or the ranks are already arranged differently.
        RuntimeError: The sizes do not divide the number of ranks.
    """
    config = configuration.complete_config(dict(locals()))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _initialize_parallel_state(config)
    return config


def _initialize_parallel_state(config: Mapping[str, Any]) -> None:
    """Initialize the parallel state as configured, or compare it with the configuration."""
    sizes = {
        "tensor_model_parallel_size": config["tensor_parallel_size"],
        "pipeline_model_parallel_size": config["pipeline_parallel_size"],
        "context_parallel_size": config.get("context_parallel_size", 1),
        "expert_model_parallel_size": config["expert_parallel_size"],
    }
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**sizes, lnc_size=config.get("lnc_size", 1))
        return
    current = dict(zip(sizes, map(parallel_state.get_size, ("tp", "pp", "cp", "ep")), strict=True))
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
    """Create a model, and move it to the XLA device.

    Args:
        nxd_config: The result of `neuronx_distributed_config`.
        model_fn: Creates this rank's part of the model.
        include_buffers: With ``meta_device_init``: create the buffers on the meta device, too.
        model_args: Arguments of `model_fn`.
        model_kwargs: Keyword arguments of `model_fn`.

    Returns:
        The model in training mode. Ties between parameters, and their attributes, are as `model_fn` left them.

    Raises:
        xla_ckpt.UsageError: The configuration requests an unsupported feature; `include_buffers` is not a bool; or
            ``param_init_fn`` left parameters unfilled.
    """
    configuration.check_config(nxd_config)
    if isinstance(model_fn, torch.nn.Module):
        raise UsageError("model_fn makes the model, and is none itself", hint="Pass lambda: model.")
    if not isinstance(include_buffers, bool):
        raise UsageError(
            "the argument after model_fn is include_buffers, a bool",
            found=type(include_buffers).__name__,
            hint="Arguments for model_fn come after it: initialize_parallel_model(nxd_config, model_fn, False, ...).",
        )
    _initialize_parallel_state(nxd_config)
    model_init = nxd_config["model_init_config"]
    if model_init["meta_device_init"]:
        with init_on_device("meta", include_buffers):
            model = model_fn(*model_args, **model_kwargs)
    else:
        model = model_fn(*model_args, **model_kwargs)
    _check_activation_checkpoints(nxd_config.get("activation_checkpoint_config"), model)
    device = import_module("torch_xla").device()
    moved = get_model_sequential(model, device, param_init_fn=model_init.get("param_init_fn"))
    return NxDModel(moved, nxd_config)


def _check_activation_checkpoints(activation_checkpoint_config: Any, model: torch.nn.Module) -> None:
    """Raise the errors of neuronx-distributed. Checkpointing itself does not affect results, and is skipped."""
    if activation_checkpoint_config is None:
        return
    if activation_checkpoint_config == "full":
        if not is_hf_pretrained_model(model):
            raise UsageError(
                'activation_checkpoint_config="full" is for models of Hugging Face\'s transformers',
                found=type(model).__name__,
                hint="Give the class of the layers, or None.",
            )
    else:
        classes = (
            activation_checkpoint_config
            if isinstance(activation_checkpoint_config, list | tuple)
            else [activation_checkpoint_config]
        )
        if not classes or not all(isinstance(c, type) and issubclass(c, torch.nn.Module) for c in classes):
            raise UsageError(
                'activation_checkpoint_config is "full", or classes of modules',
                found=repr(activation_checkpoint_config)[:80],
            )
    logger.info("activations are kept, and not computed again: activation_checkpoint_config changes no result")


def initialize_parallel_optimizer(
    nxd_config: dict[str, Any], optimizer_class: Callable[..., Any], parameters: Any, **defaults: Any
) -> NxDOptimizer:
    """Create an optimizer whose steps reduce the gradients over the replicas and clip them.

    Args:
        nxd_config: The result of `neuronx_distributed_config`.
        optimizer_class: Optimizer class, such as `torch.optim.AdamW`.
        parameters: Parameters, or groups of them, of the model that `initialize_parallel_model` returned.
        defaults: Arguments of `optimizer_class`, and of the ZeRO-1 optimizer (`optimizer_dtype`, ...).

    Returns:
        The optimizer; its ``optimizer`` is a `NeuronZero1Optimizer` with ``zero_one_enabled``, otherwise an instance of
        `optimizer_class`.

    Raises:
        xla_ckpt.UsageError: Master weights are requested without ZeRO-1, or experts with it.
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
    """Create the inner optimizer of `initialize_parallel_optimizer`."""
    configuration.check_precision(nxd_config)
    if not nxd_config["optimizer_config"]["zero_one_enabled"]:
        return optimizer_class(parameters, **defaults)
    from neuron_compat.nxd.optimizer import NeuronZero1Optimizer

    return NeuronZero1Optimizer(parameters, optimizer_class, **{**_build_zero1_options(nxd_config), **defaults})


def _build_zero1_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `NeuronZero1Optimizer` for a configuration."""
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


class NxDModel(TransparentModule):
    """Module with neuronx-distributed's training methods, and the names and attributes of the inner module.

    Attributes:
        nxd_config: The result of `neuronx_distributed_config`.
    """

    def __init__(self, module: torch.nn.Module, nxd_config: dict[str, Any]) -> None:
        super().__init__(module)
        self.nxd_config = nxd_config
        self.pp_enabled = False
        self.train()

    def __repr__(self) -> str:
        return f"NxDModel({self.module!r})"

    def local_modules(self) -> list[torch.nn.Module]:
        """Return the modules of this rank's pipeline stage: one that contains all."""
        return [self.module]

    def original_module(self) -> torch.nn.Module:
        """Return the inner module."""
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def run_train(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, compute the gradients of the loss it returns, and return the loss.

        Raises:
            xla_ckpt.UsageError: The module did not return a loss.
        """
        loss = self(*args, **kwargs)
        if not isinstance(loss, torch.Tensor):
            raise UsageError(
                "run_train needs a module that returns its loss",
                found=type(loss).__name__,
                hint="Call the model, and backward() of the loss in what it returns.",
            )
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def run_eval(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise an error, because neuronx-distributed supports it only for pipelines.

        Raises:
            xla_ckpt.UsageError: Always.
        """
        raise UsageError("run_eval is for pipelines", hint="Call the model in a block of torch.no_grad().")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


class _InnerAttribute:
    """Descriptor for an attribute of the inner optimizer."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return getattr(owner.optimizer, self.name)

    def __set__(self, owner: Any, value: Any) -> None:
        setattr(owner.optimizer, self.name, value)


class NxDOptimizer(torch.optim.Optimizer):
    """Optimizer whose steps first average the gradients over the replicas, and clip them.

    A ZeRO-1 optimizer does both itself. State, groups and defaults belong to the inner optimizer.

    Attributes:
        optimizer: The inner optimizer.
        nxd_config: The result of `neuronx_distributed_config`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, nxd_config: dict[str, Any]) -> None:
        # The constructor of torch's class is not called, because it would create its own groups.
        self.optimizer: Any = optimizer
        self.nxd_config = nxd_config
        self._grad_norm: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"NxDOptimizer({self.optimizer!r})"

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of the gradients in the last step, before clipping; None without clipping."""
        return self._grad_norm

    @property
    def params(self) -> list[torch.Tensor]:
        """Parameters of all groups."""
        return [p for group in self.param_groups for p in group["params"]]

    state = _InnerAttribute()
    param_groups = _InnerAttribute()
    defaults = _InnerAttribute()

    def __getstate__(self) -> Any:  # torch_xla's reduce_gradients reads the groups from it
        return self.optimizer.__getstate__()

    def __setstate__(self, state: Any) -> None:
        self.optimizer.__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients over the replicas, clip them, and perform a step; return the result of `closure`.

        `closure` computes the gradients, once, before all of that.
        """
        options = self.nxd_config["optimizer_config"]
        if options["zero_one_enabled"]:
            loss = self.optimizer.step(closure=closure)
            self._grad_norm = self.optimizer.grad_norm
            return loss
        loss = None
        if closure is not None:
            with torch.enable_grad():  # type: ignore[no-untyped-call]
                loss = closure()
        self._reduce_gradients()
        if options["grad_clipping"]:
            self._grad_norm = grads.clip_grad_norm(self.params, options["max_grad_norm"])
        self.optimizer.step()
        return loss

    def _reduce_gradients(self) -> None:
        """Average the gradients over all replicas, in place."""
        grads.bucket_allreduce_gradients(p.grad for p in self.params if p.grad is not None)
        # Parameters other than experts are also replicated on the other expert-parallel ranks.
        common = [p for p in self.params if not getattr(p, "expert_model_parallel", False)]
        grads.bucket_allreduce_gradients((p.grad for p in common if p.grad is not None), reduce_over_ep_group=True)

    def save_state_dict(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        """Call `NeuronZero1Optimizer.save_sharded_state_dict` of the inner optimizer.

        Raises:
            xla_ckpt.UsageError: The inner optimizer is not a ZeRO-1 optimizer.
        """
        self._get_zero1_optimizer().save_sharded_state_dict(output_dir, num_workers_per_step)

    def load_state_dict_from(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        """Call `NeuronZero1Optimizer.load_sharded_state_dict` of the inner optimizer.

        Raises:
            xla_ckpt.UsageError: The inner optimizer is not a ZeRO-1 optimizer.
        """
        self._get_zero1_optimizer().load_sharded_state_dict(output_dir, num_workers_per_step)

    def _get_zero1_optimizer(self) -> Any:
        """Return the inner optimizer if it is a ZeRO-1 optimizer.

        Raises:
            xla_ckpt.UsageError: It is not.
        """
        if not self.nxd_config["optimizer_config"]["zero_one_enabled"]:
            raise UsageError("only the shards of ZeRO-1 are in files of this kind", hint="Use nxd.save_checkpoint.")
        return self.optimizer


IGNORED_LABEL = -100
"""Label that losses ignore."""

Batch = dict[str, Any]


def shift_labels(batch: Batch) -> Batch:
    """Return a batch whose ``labels`` [batch, length] are shifted to the next token."""
    shifted = dict(batch)
    if "labels" in batch:
        shifted["labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
    return shifted


def get_batch_on_this_context_parallel_rank(batch: Batch) -> Batch:
    """Return this rank's part of the sequences in a batch, with shifted labels; with one rank, the batch itself.

    Raises:
        ValueError: A length is not divisible by the number of context-parallel ranks.
    """
    size, rank = parallel_state.get_size("cp"), parallel_state.get_rank("cp")
    if size == 1:
        return batch
    return {name: _get_own_sequences(name, value, size, rank) for name, value in shift_labels(batch).items()}


def _get_own_sequences(name: str, value: Any, size: int, rank: int) -> Any:
    """Return a context-parallel rank's part of a value [batch, sequence, ...]; all of it if sequences have length 1."""
    if value is None or value.shape[1] == 1:
        return value
    if value.shape[1] % size:
        raise ValueError(f"{name} has sequences of {value.shape[1]}, which {size} context-parallel ranks do not divide")
    return value.chunk(size, 1)[rank]
