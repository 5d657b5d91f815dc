"""Pipeline parallelism: each name is an error that says what to use instead."""

from __future__ import annotations

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import KEEP_NXD

__getattr__, __dir__ = lazily(__name__, {}, missing=dict.fromkeys(("NxDPPModel",), KEEP_NXD))
