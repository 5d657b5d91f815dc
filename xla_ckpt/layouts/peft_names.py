"""What the state of a `PeftModel` is called in PEFT's own files: as PEFT's `save_pretrained` writes them. Pure.

In the state each adapter has a name of its own in its arrays' names, which files leave out. Modules that are trained
whole lie beside the original ones there, and take their names in files.
(peft/utils/save_and_load.py, `get_peft_model_state_dict`, of 0.21.2.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.tree import schema
from xla_ckpt.tree.json_object import json_object

PREFIX = "base_model.model."
"""What PEFT's model has before the names of the model that the adapters are for."""

_LORA = re.compile(rf"({re.escape(PREFIX)}.+\.lora_(?:[AB]|embedding_[AB]))\.([^.]+)((?:\.weight|\.bias)?)")
"""A name of an array of an adapter: its layer and kind, the adapter, and what array of that it is."""

_PUT_IN = re.compile(r".+\.lora_[AB]\.[^.]+\.(?:weight|bias)")
"""Such a name where PEFT has put an adapter into a model that stays what it was: it has no prefix."""

_WHOLE = re.compile(rf"({re.escape(PREFIX)}.+)\.modules_to_save\.([^.]+)\.(.+)")
"""A name of an array of a module that is trained whole."""

_UNKNOWN = ("use_dora", "trainable_token_indices", "target_parameters")
"""What a configuration may have whose arrays have names that are not known here."""


def is_of_peft(names: Iterable[str]) -> bool:
    """Whether a state is that of a `PeftModel`.

    >>> is_of_peft(["base_model.model.q.lora_A.default.weight"]), is_of_peft(["q.lora_A.weight"])
    (True, False)
    """
    return any(map(_LORA.fullmatch, names))


def has_adapters_of_peft(names: Iterable[str]) -> bool:
    """Whether PEFT has put adapters into a model, which is a `PeftModel` or has no prefix before its names.

    >>> has_adapters_of_peft(["q.lora_A.default.weight"]), has_adapters_of_peft(["q.lora_A.weight"])
    (True, False)
    """
    return any(_PUT_IN.fullmatch(name) or _LORA.fullmatch(name) for name in names)


def names_in_files(names: Iterable[str]) -> dict[str, str]:
    """Name in the state -> name in PEFT's file, of all arrays that are in it.

    >>> names_in_files(["base_model.model.q.lora_A.default.weight", "base_model.model.q.base_layer.weight"])
    {'base_model.model.q.lora_A.default.weight': 'base_model.model.q.lora_A.weight'}

    Raises:
        UsageError: The state has several adapters, and such a file has one.
    """
    called: dict[str, str] = {}
    adapters: set[str] = set()
    for name in names:
        if (match := _LORA.fullmatch(name)) is not None:
            called[name] = match[1] + match[3]
        elif (match := _WHOLE.fullmatch(name)) is not None:
            called[name] = f"{match[1]}.{match[3]}"
        else:
            continue
        adapters.add(match[2])
    if len(adapters) > 1:
        raise UsageError(
            "PEFT has one adapter in a directory",
            leaf=schema.MODEL,
            expected="one adapter",
            found=", ".join(sorted(adapters)),
            hint="Save a model with one of them: model.delete_adapter(name) takes another one away.",
        )
    return called


def config_to_run(text: bytes | None, file: str) -> bytes:
    """PEFT's own configuration, as it is for a model that is only run.

    Raises:
        UsageError: There is none.
        UnsupportedStateError: It asks for arrays whose names are not known here.
        FormatError: It is damaged.
    """
    if text is None:
        raise UsageError(
            "nothing says by what the adapters are scaled",
            leaf=schema.MODEL,
            expected=f"the file {file} in the root, beside the tags",
            hint='PEFT writes it: model.peft_config["default"].save_pretrained(root), once.',
        )
    config: Mapping[str, Any] = json_object(text, "the configuration of the adapters")
    kind, bias = config.get("peft_type"), config.get("bias", "none")
    other = next((key for key in _UNKNOWN if config.get(key)), None)
    if kind != "LORA" or bias != "none" or other is not None:
        raise UnsupportedStateError(
            "no conversion knows what PEFT calls these adapters in its files",
            expected="LORA, with bias 'none'",
            found=other or f"{kind}, with bias {bias!r}",
            hint="The model's own save_pretrained writes them.",
        )
    return (json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True) + "\n").encode()
