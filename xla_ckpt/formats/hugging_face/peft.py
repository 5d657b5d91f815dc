"""The PEFT layout: only adapters, as one safetensors file and ``adapter_config.json``, for PEFT and transformers to
load.

The neuronx-distributed `LoraModel` names its arrays like PEFT, without the prefix, and its configuration has nearly
the same fields. Adapters that neuronx-distributed cannot represent raise an error. Other fields of the PEFT file are
kept and written again. The state of a `PeftModel` has the name of the adapter in its array names, which PEFT files
omit; fully trained modules have their original names in files (peft/utils/save_and_load.py,
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
"""Prefix that a PEFT model adds to the names of its base model."""

_LORA_NAME = re.compile(rf"({re.escape(PEFT_PREFIX)}.+\.lora_(?:[AB]|embedding_[AB]))\.([^.]+)((?:\.weight|\.bias)?)")
"""Array name in an adapter: layer and kind, adapter, and array suffix."""

_INJECTED_NAME = re.compile(r".+\.lora_[AB]\.[^.]+\.(?:weight|bias)")
"""Array name of an adapter that PEFT has injected into a model without wrapping it, so that it has no prefix."""

_FULL_MODULE_NAME = re.compile(rf"({re.escape(PEFT_PREFIX)}.+)\.modules_to_save\.([^.]+)\.(.+)")
"""Array name in a fully trained module."""

_UNSUPPORTED_OPTIONS = ("use_dora", "trainable_token_indices", "target_parameters")
"""Options of a configuration whose array names are unknown here."""


def is_peft_state(names: Iterable[str]) -> bool:
    """Return True if the names are from the state of a `PeftModel`.

    >>> is_peft_state(["base_model.model.q.lora_A.default.weight"]), is_peft_state(["q.lora_A.weight"])
    (True, False)
    """
    return any(map(_LORA_NAME.fullmatch, names))


def has_peft_adapters(names: Iterable[str]) -> bool:
    """Return True if a model contains PEFT adapters, as a `PeftModel` or injected without a name prefix.

    >>> has_peft_adapters(["q.lora_A.default.weight"]), has_peft_adapters(["q.lora_A.weight"])
    (True, False)
    """
    return any(_INJECTED_NAME.fullmatch(name) or _LORA_NAME.fullmatch(name) for name in names)


def map_to_file_names(names: Iterable[str]) -> dict[str, str]:
    """Return name in the state -> name in the PEFT file, for all arrays that PEFT saves.

    >>> map_to_file_names(["base_model.model.q.lora_A.default.weight", "base_model.model.q.base_layer.weight"])
    {'base_model.model.q.lora_A.default.weight': 'base_model.model.q.lora_A.weight'}

    Raises:
        UsageError: The state has several adapters, and a PEFT file contains one.
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
    """Return the PEFT configuration in the form for inference.

    Raises:
        UsageError: The configuration is missing.
        UnsupportedStateError: It describes arrays whose names are unknown here.
        FormatError: It is corrupt.
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
"""Name of the configuration. neuronx-distributed has a file of the same name with its own fields."""

MAX_ADAPTER_CONFIG_BYTES = 1_000_000
"""Maximum size of a configuration (bytes)."""

_SHARED_FIELDS = ("lora_alpha", "lora_dropout", "bias", "use_rslora", "target_modules", "modules_to_save")
"""Fields with the same name and meaning in both libraries."""

_UNSUPPORTED_FIELDS = ("use_dora", "rank_pattern", "alpha_pattern", "layer_replication")
"""Fields that adapters of neuronx-distributed do not support."""

_DEFAULT_FIELDS = {
    "peft_type": "LORA",
    "task_type": None,
    "base_model_name_or_path": None,
    "inference_mode": True,
    "init_lora_weights": True,
}
"""PEFT fields with defaults for adapters that do not come from a PEFT file."""

_PEFT_FIELDS_KEY = "peft"
"""Key in the stored configuration of other fields of the PEFT file, which are written back unchanged."""

_ADAPTER_NAME = re.compile(r".+\.lora_(?:[AB]|embedding_[AB])(?:\..+)?")
"""Array name in an adapter in PEFT and neuronx-distributed, preceded by the name of its layer."""

_FUSED_ADAPTER_NAME = re.compile(r"\.lora_B\.(weight|bias)_(q|k|v|qkv)$")


class PeftLayout(HuggingFaceLayout):
    """Adapters in the PEFT format. It is not a tag, because it has no manifest, no optimizer and no base model."""

    name = "peft"
    model_names = ModelNames.PROGRAM
    asks = True  # a program shows if its model is a PEFT model, which loads such a directory itself

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
        # The arrays have the names of the base model, and the configuration is stored with the arrays.
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
            # All arrays of a PEFT file belong to the adapter: saved embeddings do not have adapter names.
            chosen = (
                [*names] if _PEFT_FIELDS_KEY in model[schema.LORA_CONFIG] else _select_adapter_leaves(names, config)
            )
            called = {names[leaf]: PEFT_PREFIX + names[leaf] for leaf in chosen}
        arrays = ArrayTable.from_records({leaf: stored.manifest.arrays[leaf] for leaf in chosen})
        (file,) = plan_export(replace(stored.manifest, arrays=arrays), schema.MODEL, sys.maxsize)
        return ConversionPlan([(_rename_arrays(file, called),)], marks={ADAPTER_CONFIG_FILE: text})


def parse_adapter_config(text: bytes) -> dict[str, Any]:
    """Parse a PEFT or neuronx-distributed configuration into the fields of the latter, and keep other fields.

    Raises:
        UnsupportedStateError: neuronx-distributed does not support such adapters.
        FormatError: It is corrupt.
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
    # PEFT does not use the other fields in a neuronx-distributed file.
    own = {} if "lora_rank" in content else {k: v for k, v in content.items() if k not in fields}
    return {**fields, _PEFT_FIELDS_KEY: own} if own else fields


def _is_plain(value: Any) -> bool:
    """Return True if a value has a type that occurs in both configurations."""
    parts = value if isinstance(value, list) else [value]
    return all(part is None or isinstance(part, bool | int | float | str) for part in parts)


def build_adapter_config(model: Any) -> dict[str, Any]:
    """Build the PEFT configuration of the adapters in a stored model.

    Raises:
        UsageError: The model has no adapters, or their configuration is not stored.
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
    """Map the leaf path of each array of the model to its name."""
    names = {leaf: paths.unescape(schema.strip_member(leaf)) for leaf in manifest.arrays}
    return {leaf: name for leaf, name in names.items() if schema.get_weight_path(name) == leaf}


def _select_adapter_leaves(names: Mapping[str, str], config: Mapping[str, Any]) -> list[str]:
    """Return the leaf paths of the arrays that belong to adapters.

    Raises:
        UnsupportedStateError: An adapter is for fused queries, keys and values, which PEFT does not support.
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
    """Return the file with its PEFT name and with PEFT array names."""
    assert isinstance(file.layout, SafetensorsFile)
    regions = file.layout.regions
    named = replace(regions, keys=[file_names[name] for name in regions.keys])
    return replace(file, path=ADAPTER_WEIGHTS_FILE, layout=replace(file.layout, regions=named))


def _is_adapter(name: str) -> bool:
    return schema.ADAPTER_PREFIX in name and name != schema.LORA_CONFIG


def _is_saved_by_peft(name: str, config: Mapping[str, Any]) -> bool:
    """Return True if PEFT saves an array of a model with its adapters: adapters, biases, and fully trained modules."""
    if _is_adapter(name):
        return True
    if config.get("bias") == "all" and "bias" in name:
        return True
    return any(module in name for module in config.get("modules_to_save") or ())
