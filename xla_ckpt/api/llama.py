"""What a caller says about a Llama-like model, and its arrays under the names that are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xla_ckpt.engine.compare import same_bytes
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import IncompatibleCheckpointError, UsageError, storage_errors
from xla_ckpt.layouts.base import ModelNames
from xla_ckpt.layouts.llama_config import CONFIG, MAX_CONFIG, LlamaConfig, parse_config
from xla_ckpt.layouts.llama_manifest import Copies, to_hugging_face, unsaid_order
from xla_ckpt.layouts.llama_names import Form, Projection
from xla_ckpt.layouts.registry import as_hugging_face, find_foreign
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import PathLike, above, full_path

Config = PathLike | Mapping[str, Any]
"""The path of a config.json of Hugging Face's, or of the directory that it lies in, or what it holds."""

HARDWARE = {"trn1": False, "trn2": True}
"""Name of a device -> whether neighbouring ranks hold the same keys there."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """What a configuration, and the caller, say about a model."""

    config: LlamaConfig
    copies: Copies


def read_config(config: Config) -> LlamaConfig:
    """The sizes that a configuration names.

    Raises:
        UsageError: There is none, or it is not that of a Llama-like model.
        StorageError: It cannot be read.
    """
    if isinstance(config, Mapping):
        return parse_config(config)
    path = full_path(config)
    store, name = above(path)
    if store.is_directory(name):
        name, path = f"{name}/{CONFIG}", f"{path}/{CONFIG}"
    if not store.has(name):
        raise UsageError("there is no config.json", path=path)
    with storage_errors("reading a config.json", path=path):
        data = store.start_of(name, MAX_CONFIG + 1)
    if len(data) > MAX_CONFIG:
        raise UsageError("a config.json is too large", path=path, expected=f"at most {MAX_CONFIG} bytes")
    return parse_config(data, path)


def copies_said(kv_size_multiplier: int | None, hardware: str | None) -> Copies:
    """What a caller says about keys and values that several ranks hold.

    Raises:
        UsageError: It makes no sense.
    """
    if hardware is not None and hardware not in HARDWARE:
        raise UsageError("no such hardware is known", expected=" or ".join(HARDWARE), found=hardware)
    if kv_size_multiplier is not None and (type(kv_size_multiplier) is not int or kv_size_multiplier < 1):
        raise UsageError("kv_size_multiplier is a number of at least 1", found=kv_size_multiplier)
    return Copies(count=kv_size_multiplier, adjacent=None if hardware is None else HARDWARE[hardware])


def known_model(config: Config | None, kv_size_multiplier: int | None, hardware: str | None) -> KnownModel | None:
    """What a caller says about a model; None without a configuration.

    Raises:
        UsageError: It makes no sense.
        StorageError: The configuration cannot be read.
    """
    copies = copies_said(kv_size_multiplier, hardware)
    if config is None:
        if copies != Copies():
            raise UsageError(
                "kv_size_multiplier and hardware are about the heads of a model, which its config.json names",
                hint="Give config= (--config) as well.",
            )
        return None
    return KnownModel(read_config(config), copies)


def form_of_job(config: LlamaConfig, fuse_qkv: bool | None, qkv_linear: bool, copies: Copies) -> Form:
    """How a neuronx-distributed job has a model.

    Args:
        config: The sizes.
        fuse_qkv: Whether it has them in one array; None where only one form is usual.
        qkv_linear: Whether it has its own layer for grouped-query attention.
        copies: What the caller says about keys and values that several ranks hold.

    Raises:
        UsageError: It is not said, and several forms are usual; or it contradicts itself.
    """
    count = copies.count or 1
    if not qkv_linear:
        if fuse_qkv or count > 1:
            raise UsageError("without qkv_linear the projections are separate, and keys are held once")
        return Form(projection=Projection.SEPARATE)
    if config.group == 1 and count == 1:
        return Form(projection=Projection.SEPARATE if fuse_qkv is False else Projection.STRIDED)
    if fuse_qkv is None:
        raise UsageError(
            "a job has grouped-query attention in one of three forms",
            expected="fuse_qkv=True (--fuse-qkv) for qkv_proj.weight_qkv, fuse_qkv=False (--no-fuse-qkv) for "
            "weight_q, weight_k and weight_v, or qkv_linear=False (--no-qkv-linear) for q_proj, k_proj and v_proj",
            hint="The job's own script has the flags fuse_qkv and qkv_linear.",
        )
    if count > 1 and copies.adjacent is None:
        raise unsaid_order(count)
    projection = Projection.FUSED if fuse_qkv else Projection.LINEAR
    return Form(projection=projection, copies=count, adjacent=count > 1 and bool(copies.adjacent))


def own_config(store: Store, tag: str) -> str | None:
    """The directory of a config.json that lies in one of Hugging Face's; None for any other tag, and without one."""
    found = find_foreign(store, tag)
    if found is None or found[0].model_names is not ModelNames.HUGGING_FACE or not store.has(f"{tag}/{CONFIG}"):
        return None
    return f"{store.path.rstrip('/')}/{tag}"


def name_as_told(store: Store, reader: TagReader) -> Mapping[str, bytes]:
    """Let a reader find its model under Hugging Face's names, if the tag itself says how; files that belong to it.

    Raises:
        CheckpointError: It says it, and it does not fit.
    """
    told = as_hugging_face(store, reader)
    if told is None:
        return {}
    reader.manifest = told.manifest
    return told.files


def name_as_hugging_face(reader: TagReader, part: str, known: KnownModel, *, max_memory: int, workers: int) -> None:
    """Let a reader find its model under Hugging Face's names, and nothing else.

    Raises:
        IncompatibleCheckpointError: Names or shapes are not those of the configuration, or nothing says in which order
            the heads are, or the output layer is not the embedding although the configuration says so.
        UsageError: What the caller says contradicts the checkpoint.
        CorruptCheckpointError: The tag is damaged.
    """
    renamed = to_hugging_face(reader.manifest, part, known.config, known.copies)
    if renamed.equal is not None and not same_bytes(reader, *renamed.equal, max_memory=max_memory, workers=workers):
        raise IncompatibleCheckpointError(
            "the output layer is not the embedding, and config.json says that it is",
            leaf=renamed.equal[1],
            expected=f"the bytes of {renamed.equal[0]}",
            found="others",
            hint="Give a config.json with tie_word_embeddings false.",
        )
    reader.manifest = renamed.manifest
