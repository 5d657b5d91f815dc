"""Names of SMP's ``amp``."""

from neuron_compat.lazy_imports import attach_lazy_names

__getattr__, __dir__ = attach_lazy_names(__name__, {"neuron_compat.emulated.smp.mixed_precision": "GradScaler"})
