"""Training and checkpoint utilities of ``neuronx_distributed.utils``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_compat.nxd.exports import attach_exports

if TYPE_CHECKING:
    from neuron_compat.nxd.utils import adamw_fp32_optim_params as adamw_fp32_optim_params
    from neuron_compat.nxd.utils import logger as logger
    from neuron_compat.nxd.utils import model_utils as model_utils

__all__: list[str] = []

__getattr__, __dir__ = attach_exports(__name__)
