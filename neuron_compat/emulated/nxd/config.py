"""neuronx-distributed's training configuration: defaults and validation. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuron_compat.nxd.exports import KEEP_NXD_HINT
from xla_ckpt import UsageError

Config = dict[str, Any]


def complete_config(given: Config) -> Config:
    """Return a configuration with all defaults filled in.

    Raises:
        xla_ckpt.UsageError: An entry is unknown, unsupported, or contradicts another one.
    """
    optimizer = _fill_defaults(
        "optimizer_config",
        given["optimizer_config"],
        {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0},
    )
    sharded = optimizer["zero_one_enabled"]
    config = {
        **given,
        "optimizer_config": optimizer,
        "mixed_precision_config": _fill_defaults(
            "mixed_precision_config",
            given["mixed_precision_config"],
            {"use_master_weights": sharded, "use_fp32_grad_acc": sharded, "use_master_weights_in_ckpt": False},
        ),
        "model_init_config": _fill_defaults(
            "model_init_config",
            given["model_init_config"],
            {
                "sequential_move_factor": given.get("sequential_move_factor", 11),
                "meta_device_init": False,
                "param_init_fn": None,
            },
        ),
    }
    config.pop("sequential_move_factor", None)
    check_config(config)
    return config


def _fill_defaults(name: str, given: Mapping[str, Any] | None, defaults: Config) -> Config:
    """Return the given entries, and the defaults of all others."""
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(f"{name} has to be a dict", found=type(given).__name__)
    unknown = [key for key in given or {} if key not in defaults]
    if unknown:
        raise UsageError(
            f"{name} has an entry that nothing would look at", expected=", ".join(defaults), found=", ".join(unknown)
        )
    return {**defaults, **(given or {})}


def check_config(config: Mapping[str, Any]) -> None:
    """Raise an error for entries that the emulation would not follow.

    Raises:
        xla_ckpt.UsageError: The configuration requests an unsupported feature.
    """
    for name, hint in _UNSUPPORTED.items():
        if config.get(name):
            raise UsageError(f"{name} is not there", found=_shorten(config[name]), hint=hint)
    stages = config["pipeline_parallel_size"]
    if stages != 1:
        raise UsageError(
            "a model cannot be divided into pipeline stages here",
            expected="pipeline_parallel_size=1",
            found=stages,
            hint=f"{KEEP_NXD_HINT} Tags of a pipeline load into a job without one.",
        )
    model_init = config["model_init_config"]
    if model_init["meta_device_init"] and model_init.get("param_init_fn") is None:
        raise UsageError("meta_device_init needs a param_init_fn, which gives the parameters their values")


_UNSUPPORTED = {
    "sequence_parallel": "Pass False: the layers here split no sequences, and the results are the same up to rounding.",
    "pad_model": "Choose a tensor_parallel_size that divides the heads, or pad the model yourself before the move.",
    "lora_config": KEEP_NXD_HINT,
}
"""Argument -> hint, if a value other than None or False is given."""


def check_precision(config: Mapping[str, Any]) -> None:
    """Raise an error for precision options that need ZeRO-1, if the optimizer does not use it.

    Raises:
        xla_ckpt.UsageError: Master weights are requested without ZeRO-1.
    """
    asked = [name for name, value in config["mixed_precision_config"].items() if value]
    if asked and not config["optimizer_config"]["zero_one_enabled"]:
        raise UsageError(
            "mixed_precision_config asks for what only a ZeRO-1 optimizer does",
            found=", ".join(asked),
            hint='Set optimizer_config["zero_one_enabled"], or these to False.',
        )


def _shorten(value: Any) -> str:
    """Return a value as text for a message."""
    return repr(value)[:80]
