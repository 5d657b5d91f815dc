"""The model of a job that was set up by `initialize_parallel_model`."""

from __future__ import annotations

from typing import Any

import torch

from neuron_compat.emulated.transparent import Transparent
from xla_ckpt import UsageError


class NxDModel(Transparent):
    """A module, with neuronx-distributed's way to train it. Its names, parameters and attributes are the module's own.

    Attributes:
        nxd_config: What `neuronx_distributed_config` returned.
    """

    def __init__(self, module: torch.nn.Module, nxd_config: dict[str, Any]) -> None:
        super().__init__(module)
        self.nxd_config = nxd_config
        self.pp_enabled = False
        self.train()

    def __repr__(self) -> str:
        return f"NxDModel({self.module!r})"

    def local_modules(self) -> list[torch.nn.Module]:
        """The modules of this rank's pipeline stage: all in one."""
        return [self.module]

    def original_module(self) -> torch.nn.Module:
        """The module that was given."""
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def run_train(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, which has to return its loss, and compute the gradients; the loss.

        Raises:
            xla_ckpt.UsageError: The module returned something else.
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
        """neuronx-distributed has it for pipelines only.

        Raises:
            xla_ckpt.UsageError: Always.
        """
        raise UsageError("run_eval is for pipelines", hint="Call the model in a block of torch.no_grad().")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
