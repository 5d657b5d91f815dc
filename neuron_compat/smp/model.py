"""SMP's ``model``."""

from neuron_compat.lazy import lazily

__getattr__, __dir__ = lazily(__name__, {"neuron_compat.emulated.smp.model": "DistributedModel"})
