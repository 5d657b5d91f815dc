"""SMP's configuration dict: entries, defaults, and validation.

Entries, defaults and bounds are those of SMP 1.12. Several have no effect here, because every pipeline rank runs the
whole model: they are validated, and stored with checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_compat.smp.errors import SMPConfigError, SMPUnsupportedError
from xla_ckpt.keywords import suggest

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """Valid values of one entry of the configuration."""

    value_type: type
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    """True if None is a valid value, too."""


ENTRIES: dict[str, ConfigEntry] = {
    "pipeline_parallel_degree": ConfigEntry(int, 1, minimum=1),
    "tensor_parallel_degree": ConfigEntry(int, 1, minimum=1),
    "microbatches": ConfigEntry(int, 1, minimum=1),
    "pipeline": ConfigEntry(str, "interleaved", choices=("simple", "interleaved", "_only_forward")),
    "horovod": ConfigEntry(bool, False),
    "ddp": ConfigEntry(bool, False),
    "sharded_data_parallel_degree": ConfigEntry(int, 1, minimum=1),
    "sdp_reduce_bucket_size": ConfigEntry(int, 500_000_000),
    "sdp_param_persistence_threshold": ConfigEntry(int, 1_000_000),
    "sdp_max_live_parameters": ConfigEntry(int, 1_000_000_000),
    "sdp_hierarchical_allgather": ConfigEntry(bool, True),
    "sdp_gradient_clipping": ConfigEntry(float, 1.0),
    "_sharded_data_parallelism_config": ConfigEntry(str, optional=True),
    "ddp_port": ConfigEntry(int, minimum=0, optional=True),
    "ddp_dist_backend": ConfigEntry(str, "nccl", choices=("nccl", "gloo", "xla", "smddp", "auto")),
    "contiguous": ConfigEntry(bool, True),
    "placement_strategy": ConfigEntry(
        str, "cluster", choices=("cluster", "spread", "PDT", "PTD", "DPT", "DTP", "TPD", "TDP")
    ),
    "optimize": ConfigEntry(str, "speed", choices=("speed", "memory")),
    "auto_partition": ConfigEntry(bool, True),
    "default_partition": ConfigEntry(int, minimum=0, optional=True),
    "prescaled_batch": ConfigEntry(bool, False),
    "memory_weight": ConfigEntry(float, 0.8, minimum=0, maximum=1),
    "active_microbatches": ConfigEntry(int, minimum=1, optional=True),
    "fast_mode": ConfigEntry(bool, False),
    "static_mode": ConfigEntry(bool, False),
    "fp16": ConfigEntry(bool, False),
    "bf16": ConfigEntry(bool, False),
    "fp16_params": ConfigEntry(bool, False),
    "tensor_parallel_seed": ConfigEntry(int, 0, minimum=0),
    "offload_activations": ConfigEntry(bool, False),
    "_shard_offloaded_activations": ConfigEntry(bool, True),
    "shard_optimizer_state": ConfigEntry(bool, False),
    "delayed_parameter_initialization": ConfigEntry(bool, False),
    "skip_tracing": ConfigEntry(bool, False),
    "activation_loading_horizon": ConfigEntry(int, 4, minimum=0),
    "task_level_activation_loading_horizon": ConfigEntry(int, 4, minimum=1),
    "herring": ConfigEntry(bool, False),
    "_match_weights": ConfigEntry(bool, False),
    "_fp32_grad_accumulation": ConfigEntry(bool, False),
    "checkpoint_attentions": ConfigEntry(bool, False),
    "load_partition": ConfigEntry(bool, False),
    "partition_file": ConfigEntry(str, optional=True),
}

CONFIG_VARIABLE = "SM_HP_MP_PARAMETERS"
"""Environment variable with the configuration as JSON, set by SageMaker's estimator."""

ALIASES = {"partitions": "pipeline_parallel_degree"}

_UNSUPPORTED = {
    "horovod": "Set ddp to True: gradients are then averaged over torch.distributed.",
    "herring": "Set ddp to True: gradients are then averaged over torch.distributed.",
    "load_partition": "It is for TensorFlow.",
    "partition_file": "It is for TensorFlow.",
    "_sharded_data_parallelism_config": "Use ddp with shard_optimizer_state, or FSDP2.",
}
"""Entry -> hint, for values other than the default."""


class ModelParallelConfig:
    """Complete configuration: each entry is an attribute, and `get_config_dict` returns all of them.

    Args:
        given: The configuration given to `smp.init`.

    Raises:
        SMPConfigError: An entry is unknown, of another type, out of bounds, or contradicts another one.
        SMPUnsupportedError: It requests an unsupported feature.
    """

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        self._config = complete_config(given or {})

    def __getattr__(self, name: str) -> Any:
        config = self.__dict__.get("_config", {})
        if name not in config:
            raise AttributeError(f"the configuration has no {name!r}")
        return config[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelParallelConfig) and self._config == other._config

    def __hash__(self) -> int:
        return hash(tuple(self._config.items()))

    def __repr__(self) -> str:
        return f"ModelParallelConfig({self._config})"

    def get_config_dict(self) -> Config:
        """Return all entries with their values, as a new dict."""
        return dict(self._config)

    def zero2d_enabled(self) -> bool:
        """Return False, because parameters are never sharded over data parallelism here."""
        return False


def complete_config(given: Mapping[str, Any]) -> Config:
    """Return a configuration with a value for every entry; `given` is unchanged.

    Raises:
        SMPConfigError: See `ModelParallelConfig`.
        SMPUnsupportedError: See `ModelParallelConfig`.

    >>> config = complete_config({"partitions": 2, "ddp": True})
    >>> config["pipeline_parallel_degree"], config["microbatches"], config["active_microbatches"]
    (2, 1, 1)
    """
    named = _resolve_aliases(given)
    unknown = sorted(str(name) for name in named if name not in ENTRIES)
    if unknown:
        known = [name for name in ENTRIES if not name.startswith("_")]
        raise SMPConfigError(
            f"the configuration has an entry that SMP does not know{suggest(unknown[0], known)}",
            expected=", ".join(known),
            found=", ".join(unknown),
        )
    config = {name: _validate_value(name, named.get(name, entry.default)) for name, entry in ENTRIES.items()}
    if config["active_microbatches"] is None:
        config["active_microbatches"] = min(config["pipeline_parallel_degree"] + 2, config["microbatches"])
    _check_consistency(config)
    return config


def read_environment() -> Mapping[str, Any]:
    """Return the configuration in SageMaker's environment; an empty one if it is not set.

    Raises:
        SMPConfigError: It is not valid JSON.
    """
    text = os.environ.get(CONFIG_VARIABLE)
    if text is None:
        return {}
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise SMPConfigError(f"{CONFIG_VARIABLE} in the environment is no JSON", found=text[:80]) from error
    return parsed if isinstance(parsed, Mapping) else {"": parsed}


def _resolve_aliases(given: Mapping[str, Any]) -> Config:
    """Return the entries with aliases replaced by their names."""
    if not isinstance(given, Mapping):
        raise SMPConfigError("the configuration is a dict", found=type(given).__name__)
    named: Config = {}
    for name, value in given.items():
        true = ALIASES.get(name, name)
        if true in named and named[true] != value:
            raise SMPConfigError(f"{true} is given twice, by its alias, too", found=f"{named[true]} and {value}")
        named[true] = value
    return named


def _validate_value(name: str, value: Any) -> Any:
    """Return a validated value of an entry, converted to its type.

    Raises:
        SMPConfigError: It is of another type, or out of bounds.
        SMPUnsupportedError: It requests an unsupported feature.
    """
    entry = ENTRIES[name]
    if value is None and entry.optional:
        return None
    if entry.value_type is float and type(value) is int:
        value = float(value)
    if entry.value_type is int and type(value) is float and value.is_integer():
        value = int(value)  # such as 5e8, as in YAML
    kind = type(value)  # mypy would narrow `value` to object after a comparison of its type
    if kind is not entry.value_type:
        raise SMPConfigError(
            f"{name} is of another type", expected=entry.value_type.__name__, found=f"{value!r} ({kind.__name__})"
        )
    if entry.choices and value not in entry.choices:
        raise SMPConfigError(f"{name} is none of its options", expected=", ".join(entry.choices), found=value)
    if entry.minimum is not None and value < entry.minimum:
        raise SMPConfigError(f"{name} is too small", expected=f"at least {entry.minimum}", found=value)
    if entry.maximum is not None and value > entry.maximum:
        raise SMPConfigError(f"{name} is too large", expected=f"at most {entry.maximum}", found=value)
    if name in _UNSUPPORTED and value != entry.default:
        raise SMPUnsupportedError(f"{name} is not there", found=value, hint=_UNSUPPORTED[name])
    return value


def _check_consistency(config: Config) -> None:
    """Raise an error for entries that contradict each other."""
    if config["sharded_data_parallel_degree"] > 1:
        raise SMPUnsupportedError(
            "sharded data parallelism is not there",
            found=f"sharded_data_parallel_degree={config['sharded_data_parallel_degree']}",
            hint="Use ddp with shard_optimizer_state; or FSDP2, whose checkpoints xla_ckpt takes.",
        )
    if config["tensor_parallel_degree"] > 1 and not config["ddp"]:
        raise SMPConfigError("tensor_parallel_degree above 1 needs ddp", expected="ddp: True", found="ddp: False")
    if config["shard_optimizer_state"] and not config["ddp"]:
        raise SMPConfigError("shard_optimizer_state needs ddp", expected="ddp: True", found="ddp: False")
    if config["bf16"] and (config["fp16"] or config["fp16_params"]):
        raise SMPConfigError("bf16 and fp16 exclude each other", expected="one of them", found="both")
    if config["prescaled_batch"] and config["optimize"] != "speed":
        raise SMPConfigError("prescaled_batch needs optimize: speed", expected="speed", found=config["optimize"])
    pp, default = config["pipeline_parallel_degree"], config["default_partition"]
    if default is not None and default >= pp:
        raise SMPConfigError("default_partition is too large", expected=f"at most {pp - 1}", found=default)
    if not config["auto_partition"] and default is None:
        raise SMPConfigError("auto_partition: False needs a default_partition", expected=f"0 to {pp - 1}", found="None")
    if config["active_microbatches"] > config["microbatches"]:
        raise SMPConfigError(
            "active_microbatches is too large",
            expected=f"at most {config['microbatches']} (microbatches)",
            found=config["active_microbatches"],
        )
