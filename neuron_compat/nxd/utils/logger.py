"""Logger for neuronx-distributed scripts."""

from __future__ import annotations

import logging
import os

import torch

from neuron_compat.nxd.exports import attach_exports

__getattr__, __dir__ = attach_exports(__name__)


class _FirstRankFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank() == 0
        return os.environ.get("RANK", "0") == "0"


_FIRST_RANK_FILTER = _FirstRankFilter()


def get_log_level() -> int:
    """Return the level set by NXD_LOG_LEVEL; INFO by default, and above all others for ``off``.

    Raises:
        ValueError: It is not a valid level.
    """
    name = os.environ.get("NXD_LOG_LEVEL", "info").lower()
    levels = {
        "off": logging.CRITICAL + 1,
        "fatal": logging.CRITICAL,
        "error": logging.ERROR,
        "warning": logging.WARNING,
        "info": logging.INFO,
        "debug": logging.DEBUG,
        "trace": logging.DEBUG,
    }
    if name not in levels:
        raise ValueError(f"NXD_LOG_LEVEL={name} is none of {', '.join(levels)}")
    return levels[name]


def get_logger(name: str = "neuronx_distributed", rank0_only: bool = True) -> logging.Logger:
    """Return the logger with this name, followed by ``[0]`` if it logs only on the first rank, otherwise by ``[]``.

    Its level is set by NXD_LOG_LEVEL. The program's logging configuration determines its output.
    """
    logger = logging.getLogger(name + ("[0]" if rank0_only else "[]"))
    logger.setLevel(get_log_level())
    if rank0_only:
        logger.addFilter(_FIRST_RANK_FILTER)  # adding it again has no effect
    return logger
