"""The PEFT layout: adapters alone, as one safetensors file and ``adapter_config.json``, for PEFT and transformers to
load.

neuronx-distributed's `LoraModel` names its arrays like PEFT, without PEFT's prefix, and its configuration has nearly
the same fields. Adapters that neuronx-distributed cannot represent raise an error. Other fields of PEFT's file are kept
and written again. The state of a `PeftModel` has the adapter's name in the names of its arrays, which PEFT's files
leave out; modules that are fully trained take their original names in files (peft/utils/save_and_load.py,
`get_peft_model_state_dict`, 0.21.2).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from xla_ckpt.core.files.safetensors import SafetensorsFile
from xla_ckpt.core.json_data import parse_json_object
from xla_ckpt.core.manifest.arrays import ArrayTable
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.export_plan import plan_export
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.plan.save_plan import FilePlan
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import FormatError, UnsupportedStateError, UsageError, annotate_errors
from xla_ckpt.formats.base import ConversionPlan, ModelNames, StoredState, TargetTopology
from xla_ckpt.formats.hugging_face.layout import ADAPTER_WEIGHTS_FILE, HuggingFaceLayout, scan_model
from xla_ckpt.formats.scan import MAX_JSON_BYTES, build_scanned_manifest, flatten_model
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.storage.base import Directory, Store, read_file
from xla_ckpt.tags.entry import TagEntry

PEFT_PREFIX = "base_model.model."
"""What PEFT's model has before the names of the model that the adapters are for."""

_LORA_NAME = re.compile(rf"({re.escape(PEFT_PREFIX)}.+\.lora_(?:[AB]|embedding_[AB]))\.([^.]+)((?:\.weight|\.bias)?)")
"""A name of an array of an adapter: its layer and kind, the adapter, and what array of that it is."""

_INJECTED_NAME = re.compile(r".+\.lora_[AB]\.[^.]+\.(?:weight|bias)")
"""Such a name where PEFT has put an adapter into a model that stays what it was: it has no prefix."""

_FULL_MODULE_NAME = re.compile(rf"({re.escape(PEFT_PREFIX)}.+)\.modules_to_save\.([^.]+)\.(.+)")
"""A name of an array of a module that is trained whole."""

_UNSUPPORTED_OPTIONS = ("use_dora", "trainable_token_indices", "target_parameters")
"""What a configuration may have whose arrays have names that are not known here."""


def is_peft_state(names: Iterable[str]) -> bool:
    """Whether a state is that of a `PeftModel`.

    >>> is_peft_state(["base_model.model.q.lora_A.default.weight"]), is_peft_state(["q.lora_A.weight"])
    (True, False)
    """
    return any(map(_LORA_NAME.fullmatch, names))


def has_peft_adapters(names: Iterable[str]) -> bool:
    """Whether PEFT has put adapters into a model, which is a `PeftModel` or has no prefix before its names.

    >>> has_peft_adapters(["q.lora_A.default.weight"]), has_peft_adapters(["q.lora_A.weight"])
    (True, False)
    """
    return any(_INJECTED_NAME.fullmatch(name) or _LORA_NAME.fullmatch(name) for name in names)


def map_to_file_names(names: Iterable[str]) -> dict[str, str]:
    """Name in the state -> name in PEFT's file, of all arrays that are in it.

    >>> map_to_file_names(["base_model.model.q.lora_A.default.weight", "base_model.model.q.base_layer.weight"])
    {'base_model.model.q.lora_A.default.weight': 'base_model.model.q.lora_A.weight'}

    Raises:
        UsageError: The state has several adapters, and such a file has one.
    """
    called: dict[str, str] = {}
    adapters: set[str] = set()
    for name in names:
        if (match := _LORA_NAME.fullmatch(name)) is not None:
            called[name] = match[1] + match[3]
        elif (match := _FULL_MODULE_NAME.fullmatch(name)) is not None:
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


def make_inference_config(text: bytes | None, file: str) -> bytes:
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
    config: Mapping[str, Any] = parse_json_object(text, "the configuration of the adapters")
    kind, bias = config.get("peft_type"), config.get("bias", "none")
    other = next((key for key in _UNSUPPORTED_OPTIONS if config.get(key)), None)
    if kind != "LORA" or bias != "none" or other is not None:
        raise UnsupportedStateError(
            "no conversion knows what PEFT calls these adapters in its files",
            expected="LORA, with bias 'none'",
            found=other or f"{kind}, with bias {bias!r}",
            hint="The model's own save_pretrained writes them.",
        )
    return (json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True) + "\n").encode()


ADAPTER_CONFIG_FILE = "adapter_config.json"
"""neuronx-distributed has a file of this name, too, with its own words in it."""

MAX_ADAPTER_CONFIG_BYTES = 1_000_000
"""A larger configuration is not read (bytes)."""

_SHARED_FIELDS = ("lora_alpha", "lora_dropout", "bias", "use_rslora", "target_modules", "modules_to_save")
"""What both call the same, and mean by it."""

_UNSUPPORTED_FIELDS = ("use_dora", "rank_pattern", "alpha_pattern", "layer_replication")
"""What neuronx-distributed's adapters cannot be."""

_DEFAULT_FIELDS = {
    "peft_type": "LORA",
    "task_type": None,
    "base_model_name_or_path": None,
    "inference_mode": True,
    "init_lora_weights": True,
}
"""What PEFT has to be told of adapters that are not from a file of its own."""

_PEFT_FIELDS_KEY = "peft"
"""In the stored configuration: what PEFT's own file says besides. It is written out again as it was."""

_ADAPTER_NAME = re.compile(r".+\.lora_(?:[AB]|embedding_[AB])(?:\..+)?")
"""What PEFT, and neuronx-distributed, call an array of an adapter: the layer that it is for stands before it."""

_FUSED_ADAPTER_NAME = re.compile(r"\.lora_B\.(weight|bias)_(q|k|v|qkv)$")


class PeftLayout(HuggingFaceLayout):
    """Adapters as PEFT has them. It is no tag: it has no manifest, no optimizer, and no base model."""

    name = "peft"
    model_names = ModelNames.PROGRAM
    asks = True  # a program knows whether its model is PEFT's own, which loads such a directory itself

    def find(self, store: Store, tag: str) -> TagEntry | None:
        if store.has(f"{tag}/{ADAPTER_WEIGHTS_FILE}"):
            return TagEntry(tag=tag, directory=tag)
        return None

    def open(self, store: Store, entry: TagEntry, hints: LoadHints) -> TagReader:
        reader = super().open(store, entry, hints)
        if has_peft_adapters(hints.arrays):
            path = f"{store.path}/{entry.directory}"
            reader.mismatch_hint = (
                "The model's adapters are PEFT's own, which loads this directory itself: "
                f"PeftModel.from_pretrained(base, {path!r}), or load_adapter({path!r}) of a model of transformers'. "
                "This library loads it into a model without PEFT's names, such as neuronx-distributed's LoraModel, and "
                "a tag of PEFT's model (only='adapters') into PEFT's model."
            )
        return reader

    def scan_manifest(self, directory: Directory, tag: str) -> Manifest:
        with annotate_errors(file=ADAPTER_CONFIG_FILE):
            config = (
                parse_adapter_config(read_file(directory, ADAPTER_CONFIG_FILE, limit=MAX_JSON_BYTES))
                if ADAPTER_CONFIG_FILE in directory.list_files()
                else None
            )
        arrays, files = scan_model(directory, ADAPTER_WEIGHTS_FILE)
        # Under the names of the model that the adapters are for, and the configuration beside them.
        model: dict[str, Any] = {name.removeprefix(PEFT_PREFIX): array for name, array in arrays.items()}
        model |= {} if config is None else {schema.LORA_CONFIG: config}
        return build_scanned_manifest(tag, flatten_model(model), files)[0]

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        names = _get_model_names(stored.manifest)
        if is_peft_state(names.values()):
            text = make_inference_config(
                stored.beside(ADAPTER_CONFIG_FILE, MAX_ADAPTER_CONFIG_BYTES), ADAPTER_CONFIG_FILE
            )
            called = map_to_file_names(names.values())
            chosen = [leaf for leaf, name in names.items() if name in called]
        else:
            model = stored.tree(schema.MODEL, lambda leaf, kind: None)
            config = build_adapter_config(model)
            text = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
            # All arrays of PEFT's own file are the adapter's: embeddings that PEFT saved are under no name of one.
            chosen = (
                [*names] if _PEFT_FIELDS_KEY in model[schema.LORA_CONFIG] else _select_adapter_leaves(names, config)
            )
            called = {names[leaf]: PEFT_PREFIX + names[leaf] for leaf in chosen}
        arrays = ArrayTable.from_records({leaf: stored.manifest.arrays[leaf] for leaf in chosen})
        (file,) = plan_export(replace(stored.manifest, arrays=arrays), schema.MODEL, sys.maxsize)
        return ConversionPlan([(_rename_arrays(file, called),)], marks={ADAPTER_CONFIG_FILE: text})


def parse_adapter_config(text: bytes) -> dict[str, Any]:
    """PEFT's configuration, or neuronx-distributed's own, in the latter's words. What PEFT says besides is kept.

    Raises:
        UnsupportedStateError: They are no such adapters.
        FormatError: It is damaged.
    """
    content = parse_json_object(text, "the configuration of the adapters")
    kind = content.get("peft_type", "LORA")
    other = next((k for k in _UNSUPPORTED_FIELDS if content.get(k)), None)
    if kind != "LORA" or other is not None:
        raise UnsupportedStateError(
            "neuronx-distributed has no such adapters",
            expected="LORA of one rank",
            found=other or kind,
            hint="Load them with PEFT: PeftModel.from_pretrained.",
        )
    rank = content.get("r", content.get("lora_rank"))
    fields = {"lora_rank": rank, "r": rank, **{k: content[k] for k in _SHARED_FIELDS if k in content}}
    wrong = next((k for k, v in fields.items() if not _is_plain(v)), None)
    if wrong is not None or type(rank) is not int:
        raise FormatError("the configuration of the adapters makes no sense", found=f"{wrong or 'r'} of another type")
    # neuronx-distributed's own file has words besides that mean nothing to PEFT.
    own = {} if "lora_rank" in content else {k: v for k, v in content.items() if k not in fields}
    return {**fields, _PEFT_FIELDS_KEY: own} if own else fields


def _is_plain(value: Any) -> bool:
    """Whether a value is one that both have in their configurations."""
    parts = value if isinstance(value, list) else [value]
    return all(part is None or isinstance(part, bool | int | float | str) for part in parts)


def build_adapter_config(model: Any) -> dict[str, Any]:
    """PEFT's configuration of the adapters of a stored model.

    Raises:
        UsageError: The model has no adapters, or no configuration of them is stored.
    """
    members = model if isinstance(model, Mapping) else {}
    if not any(_ADAPTER_NAME.fullmatch(name) for name in members):
        raise UsageError(
            "the model has no adapters under the names by which PEFT finds them",
            leaf=schema.MODEL,
            expected="names of a layer with .lora_A or .lora_B behind them, such as q_proj.lora_A.weight",
            found=paths.format_leaves([*members]) or "no arrays",
            hint="Give the modules of adapters of your own these names. A conversion to torch keeps names as they are.",
        )
    stored = members.get(schema.LORA_CONFIG)
    if not isinstance(stored, Mapping):
        raise UsageError(
            "nothing says by what the adapters are scaled",
            leaf=schema.get_weight_path(schema.LORA_CONFIG),
            expected=f"the configuration in the checkpoint, or in {ADAPTER_CONFIG_FILE} beside it",
            hint=f"neuronx-distributed writes {ADAPTER_CONFIG_FILE} into its lora_save_dir: copy it into the root, "
            "beside the tags. This library stores it with the adapters.",
        )
    own = stored.get(_PEFT_FIELDS_KEY)
    return {
        **(own if isinstance(own, Mapping) else _DEFAULT_FIELDS),
        "r": stored.get("lora_rank", stored.get("r")),
        **{k: stored[k] for k in _SHARED_FIELDS if k in stored},
    }


def _get_model_names(manifest: Manifest) -> dict[str, str]:
    """Leaf path -> name of each array of the model."""
    names = {leaf: paths.unescape(schema.strip_member(leaf)) for leaf in manifest.arrays}
    return {leaf: name for leaf, name in names.items() if schema.get_weight_path(name) == leaf}


def _select_adapter_leaves(names: Mapping[str, str], config: Mapping[str, Any]) -> list[str]:
    """The leaf paths of the arrays that belong to adapters.

    Raises:
        UnsupportedStateError: The adapters of fused queries, keys and values, which PEFT has no place for.
    """
    chosen = [leaf for leaf, name in names.items() if _is_saved_by_peft(name, config)]
    fused = next((leaf for leaf in chosen if _FUSED_ADAPTER_NAME.search(names[leaf])), None)
    if fused is not None:
        raise UnsupportedStateError(
            "PEFT has no adapters for queries, keys and values in one layer",
            leaf=fused,
            hint="Train adapters of separate layers, or save the merged weights (save_lora_base, merge_lora).",
        )
    return chosen


def _rename_arrays(file: FilePlan, file_names: Mapping[str, str]) -> FilePlan:
    """The file of PEFT's name, with its names for the same arrays."""
    assert isinstance(file.layout, SafetensorsFile)
    regions = file.layout.regions
    named = replace(regions, keys=[file_names[name] for name in regions.keys])
    return replace(file, path=ADAPTER_WEIGHTS_FILE, layout=replace(file.layout, regions=named))


def _is_adapter(name: str) -> bool:
    return schema.ADAPTER_PREFIX in name and name != schema.LORA_CONFIG


def _is_saved_by_peft(name: str, config: Mapping[str, Any]) -> bool:
    """Whether PEFT has an array of a model with its adapters: theirs, biases, and modules that are trained whole."""
    if _is_adapter(name):
        return True
    if config.get("bias") == "all" and "bias" in name:
        return True
    return any(module in name for module in config.get("modules_to_save") or ())
