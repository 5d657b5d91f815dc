"""PEFT's layout: adapters alone, as one safetensors file and their configuration, for PEFT and transformers to load.

neuronx-distributed's `LoraModel` gives its arrays PEFT's names, but for PEFT's prefix, and its configuration PEFT's
words, but for a few. Adapters that it cannot have are refused. What else PEFT's own file says is kept, and written out
again. The state of PEFT's own model has PEFT's names, with that of the adapter in them (`xla_ckpt.layouts.peft_names`).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import FormatError, UnsupportedStateError, UsageError, naming
from xla_ckpt.files.safetensors import Safetensors
from xla_ckpt.layouts.base import ModelNames, Rewriting, StoredState, Topology
from xla_ckpt.layouts.hugging_face import ADAPTER_ARRAYS, HuggingFace, scanned_model
from xla_ckpt.layouts.peft_names import PREFIX, config_to_run, has_adapters_of_peft, is_of_peft, names_in_files
from xla_ckpt.layouts.scanned import MAX_JSON, flattened_model, scanned_manifest
from xla_ckpt.manifest.arrays import Arrays
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.export_plan import plan_export
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tree import lora, schema
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.json_object import json_object

ADAPTER_CONFIG = "adapter_config.json"
"""neuronx-distributed has a file of this name, too, with its own words in it."""

MAX_ADAPTER_CONFIG = 1_000_000
"""A larger configuration is not read (bytes)."""

_SHARED = ("lora_alpha", "lora_dropout", "bias", "use_rslora", "target_modules", "modules_to_save")
"""What both call the same, and mean by it."""

_BEYOND = ("use_dora", "rank_pattern", "alpha_pattern", "layer_replication")
"""What neuronx-distributed's adapters cannot be."""

_OF_OTHERS = {
    "peft_type": "LORA",
    "task_type": None,
    "base_model_name_or_path": None,
    "inference_mode": True,
    "init_lora_weights": True,
}
"""What PEFT has to be told of adapters that are not from a file of its own."""

_OWN = "peft"
"""In the stored configuration: what PEFT's own file says besides. It is written out again as it was."""

_ADAPTER = re.compile(r".+\.lora_(?:[AB]|embedding_[AB])(?:\..+)?")
"""What PEFT, and neuronx-distributed, call an array of an adapter: the layer that it is for stands before it."""

_FUSED = re.compile(r"\.lora_B\.(weight|bias)_(q|k|v|qkv)$")


class Peft(HuggingFace):
    """Adapters as PEFT has them. It is no tag: it has no manifest, no optimizer, and no base model."""

    name = "peft"
    model_names = ModelNames.PROGRAM
    asks = True  # a program knows whether its model is PEFT's own, which loads such a directory itself

    def find(self, store: Store, tag: str) -> TagEntry | None:
        if store.has(f"{tag}/{ADAPTER_ARRAYS}"):
            return TagEntry(tag=tag, directory=tag)
        return None

    def open(self, store: Store, entry: TagEntry, hints: Hints) -> TagReader:
        reader = super().open(store, entry, hints)
        if has_adapters_of_peft(hints.arrays):
            path = f"{store.path}/{entry.directory}"
            reader.misfit = (
                "The model's adapters are PEFT's own, which loads this directory itself: "
                f"PeftModel.from_pretrained(base, {path!r}), or load_adapter({path!r}) of a model of transformers'. "
                "This library loads it into a model without PEFT's names, such as neuronx-distributed's LoraModel, and "
                "a tag of PEFT's model (only='adapters') into PEFT's model."
            )
        return reader

    def scanned(self, directory: Directory, tag: str) -> Manifest:
        with naming(file=ADAPTER_CONFIG):
            config = (
                parsed_config(read_whole(directory, ADAPTER_CONFIG, limit=MAX_JSON))
                if ADAPTER_CONFIG in directory.files()
                else None
            )
        arrays, files = scanned_model(directory, ADAPTER_ARRAYS)
        # Under the names of the model that the adapters are for, and the configuration beside them.
        model: dict[str, Any] = {name.removeprefix(PREFIX): array for name, array in arrays.items()}
        model |= {} if config is None else {lora.LORA_CONFIG: config}
        return scanned_manifest(tag, flattened_model(model), files)[0]

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        names = _names_of(stored.manifest)
        if is_of_peft(names.values()):
            text = config_to_run(stored.beside(ADAPTER_CONFIG, MAX_ADAPTER_CONFIG), ADAPTER_CONFIG)
            called = names_in_files(names.values())
            chosen = [leaf for leaf, name in names.items() if name in called]
        else:
            model = stored.tree(schema.MODEL, lambda leaf, kind: None)
            config = adapter_config(model)
            text = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
            # All arrays of PEFT's own file are the adapter's: embeddings that PEFT saved are under no name of one.
            chosen = [*names] if _OWN in model[lora.LORA_CONFIG] else _adapters_of(names, config)
            called = {names[leaf]: PREFIX + names[leaf] for leaf in chosen}
        arrays = Arrays.of({leaf: stored.manifest.arrays[leaf] for leaf in chosen})
        (file,) = plan_export(replace(stored.manifest, arrays=arrays), schema.MODEL, sys.maxsize)
        return Rewriting([(_renamed(file, called),)], marks={ADAPTER_CONFIG: text})


def parsed_config(text: bytes) -> dict[str, Any]:
    """PEFT's configuration, or neuronx-distributed's own, in the latter's words. What PEFT says besides is kept.

    Raises:
        UnsupportedStateError: They are no such adapters.
        FormatError: It is damaged.
    """
    content = json_object(text, "the configuration of the adapters")
    kind = content.get("peft_type", "LORA")
    other = next((k for k in _BEYOND if content.get(k)), None)
    if kind != "LORA" or other is not None:
        raise UnsupportedStateError(
            "neuronx-distributed has no such adapters",
            expected="LORA of one rank",
            found=other or kind,
            hint="Load them with PEFT: PeftModel.from_pretrained.",
        )
    rank = content.get("r", content.get("lora_rank"))
    fields = {"lora_rank": rank, "r": rank, **{k: content[k] for k in _SHARED if k in content}}
    wrong = next((k for k, v in fields.items() if not _is_plain(v)), None)
    if wrong is not None or type(rank) is not int:
        raise FormatError("the configuration of the adapters makes no sense", found=f"{wrong or 'r'} of another type")
    # neuronx-distributed's own file has words besides that mean nothing to PEFT.
    own = {} if "lora_rank" in content else {k: v for k, v in content.items() if k not in fields}
    return {**fields, _OWN: own} if own else fields


def _is_plain(value: Any) -> bool:
    """Whether a value is one that both have in their configurations."""
    parts = value if isinstance(value, list) else [value]
    return all(part is None or isinstance(part, bool | int | float | str) for part in parts)


def adapter_config(model: Any) -> dict[str, Any]:
    """PEFT's configuration of the adapters of a stored model.

    Raises:
        UsageError: The model has no adapters, or no configuration of them is stored.
    """
    members = model if isinstance(model, Mapping) else {}
    if not any(_ADAPTER.fullmatch(name) for name in members):
        raise UsageError(
            "the model has no adapters under the names by which PEFT finds them",
            leaf=schema.MODEL,
            expected="names of a layer with .lora_A or .lora_B behind them, such as q_proj.lora_A.weight",
            found=paths.listed([*members]) or "no arrays",
            hint="Give the modules of adapters of your own these names. A conversion to torch keeps names as they are.",
        )
    stored = members.get(lora.LORA_CONFIG)
    if not isinstance(stored, Mapping):
        raise UsageError(
            "nothing says by what the adapters are scaled",
            leaf=schema.weight(lora.LORA_CONFIG),
            expected=f"the configuration in the checkpoint, or in {ADAPTER_CONFIG} beside it",
            hint=f"neuronx-distributed writes {ADAPTER_CONFIG} into its lora_save_dir: copy it into the root, beside "
            "the tags. This library stores it with the adapters.",
        )
    own = stored.get(_OWN)
    return {
        **(own if isinstance(own, Mapping) else _OF_OTHERS),
        "r": stored.get("lora_rank", stored.get("r")),
        **{k: stored[k] for k in _SHARED if k in stored},
    }


def _names_of(manifest: Manifest) -> dict[str, str]:
    """Leaf path -> name of each array of the model."""
    names = {leaf: paths.unescape(schema.below_member(leaf)) for leaf in manifest.arrays}
    return {leaf: name for leaf, name in names.items() if schema.weight(name) == leaf}


def _adapters_of(names: Mapping[str, str], config: Mapping[str, Any]) -> list[str]:
    """The leaf paths of the arrays that belong to adapters.

    Raises:
        UnsupportedStateError: The adapters of fused queries, keys and values, which PEFT has no place for.
    """
    chosen = [leaf for leaf, name in names.items() if _belongs(name, config)]
    fused = next((leaf for leaf in chosen if _FUSED.search(names[leaf])), None)
    if fused is not None:
        raise UnsupportedStateError(
            "PEFT has no adapters for queries, keys and values in one layer",
            leaf=fused,
            hint="Train adapters of separate layers, or save the merged weights (save_lora_base, merge_lora).",
        )
    return chosen


def _renamed(file: FilePlan, called: Mapping[str, str]) -> FilePlan:
    """The file of PEFT's name, with its names for the same arrays."""
    assert isinstance(file.codec, Safetensors)
    regions = file.codec.regions
    named = replace(regions, names=[called[name] for name in regions.names])
    return replace(file, path=ADAPTER_ARRAYS, codec=replace(file.codec, regions=named))


def _is_adapter(name: str) -> bool:
    return lora.ADAPTER in name and name != lora.LORA_CONFIG


def _belongs(name: str, config: Mapping[str, Any]) -> bool:
    """Whether PEFT has an array of a model with its adapters: theirs, biases, and modules that are trained whole."""
    if _is_adapter(name):
        return True
    if config.get("bias") == "all" and "bias" in name:
        return True
    return any(module in name for module in config.get("modules_to_save") or ())
