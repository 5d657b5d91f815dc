"""`LlamaJob`: a Llama-like model and its form in a job, and the renaming of its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from xla_ckpt.conversion.llama.config import CONFIG_FILE, MAX_CONFIG_BYTES, LlamaConfig, parse_config
from xla_ckpt.conversion.llama.manifest import (
    KVReplication,
    convert_head_order,
    make_unknown_order_error,
    to_fused,
    to_hugging_face,
)
from xla_ckpt.conversion.llama.names import FusionScheme, Projection, build_sharding_rules
from xla_ckpt.core.json_data import parse_json_object
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.stored_sharding import get_stored_sharding
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import IncompatibleCheckpointError, UsageError, annotate_errors, wrap_os_errors
from xla_ckpt.formats.base import Layout, ModelNames, TargetTopology
from xla_ckpt.formats.tags import find_foreign_tag, get_hugging_face_model
from xla_ckpt.keywords import check_fields
from xla_ckpt.loading.compare import has_same_bytes
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.options import ConvertOptions
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.resolve import PathLike, normalize_path, open_parent

ConfigSource = PathLike | Mapping[str, Any]
"""Path of a Hugging Face config.json or of its directory, or the content of the file."""

LLAMA_MODEL_TYPES = ("llama", "mistral", "qwen2")
"""Values of ``model_type`` in transformers for models whose arrays have the Llama names."""

HARDWARE_ADJACENCY = {"trn1": False, "trn2": True}
"""Device name -> True if adjacent ranks hold replicas of the same keys on this device."""


@check_fields
@dataclass(frozen=True, slots=True)
class LlamaJob:
    """Llama-like model, and its form in a neuronx-distributed job: information that the files of a tag may not contain.

    Args:
        config: config.json of the model: its path, the path of its directory, or its content. None if a Hugging Face
            directory contains its own.
        kv_size_multiplier: Number of tensor-parallel ranks that hold each key-value head of the neuronx-distributed
            `GQAQKVColumnParallelLinear`. It determines the order of the heads, and is required if a checkpoint does not
            record it.
        hardware: ``"trn1"`` or ``"trn2"``: with several replicas, the order of the heads also depends on it.
        fuse_qkv: For `convert` of a Hugging Face directory: True if the job stores queries, keys and values in one
            array; None if only one form is in use for the model.
        qkv_linear: For `convert` of a Hugging Face directory: True if the job uses the neuronx-distributed layer for
            grouped-query attention; otherwise queries, keys and values are separate layers.

    Raises (on construction):
        UsageError: An argument is invalid, or the arguments contradict each other.

    Example:
        ``xla_ckpt.export_hf("nxd_run", "hf", llama=xla_ckpt.LlamaJob("config.json", kv_size_multiplier=4))``
    """

    config: ConfigSource | None = None
    _: KW_ONLY
    kv_size_multiplier: int | None = None
    hardware: str | None = None
    fuse_qkv: bool | None = None
    qkv_linear: bool = True

    def __post_init__(self) -> None:
        if self.hardware not in (None, *HARDWARE_ADJACENCY):
            raise UsageError("no such hardware is known", expected=" or ".join(HARDWARE_ADJACENCY), found=self.hardware)
        count = self.kv_size_multiplier
        if count is not None and (type(count) is not int or count < 1):
            raise UsageError("kv_size_multiplier is a number of at least 1", found=count)
        if not self.qkv_linear and (self.fuse_qkv or (count or 1) > 1):
            raise UsageError(
                "without qkv_linear the projections are separate, and keys are held once",
                hint="Leave out qkv_linear=False (--no-qkv-linear); or fuse_qkv= (--fuse-qkv) and kv_size_multiplier= "
                "(--kv-size-multiplier).",
            )

    @property
    def says_form(self) -> bool:
        """True if the form of queries, keys and values in the job is set."""
        return self.fuse_qkv is not None or not self.qkv_linear

    @property
    def is_silent(self) -> bool:
        """True if all arguments are defaults."""
        return self == LlamaJob()

    @property
    def copies(self) -> KVReplication:
        """Replication of keys and values over ranks."""
        adjacent = None if self.hardware is None else HARDWARE_ADJACENCY[self.hardware]
        return KVReplication(count=self.kv_size_multiplier, adjacent=adjacent)

    def model(self, own: ConfigSource | None = None) -> LlamaModelInfo | None:
        """Return the known information about the model; None without a configuration.

        Args:
            own: Configuration in the checkpoint itself, or None.

        Raises:
            UsageError: An argument needs a configuration, which is missing; or the configuration is of another kind of
                model.
            StorageError: The configuration cannot be read.
        """
        config = own if self.config is None else self.config
        if config is not None:
            return LlamaModelInfo(read_config(config), self.copies)
        if self.copies != KVReplication():
            raise UsageError(
                "kv_size_multiplier and hardware are about the heads of a model, which its config.json names",
                hint="Give its config as well: llama=LlamaJob(config, ...) (--config).",
            )
        return None


@dataclass(frozen=True, slots=True)
class LlamaModelInfo:
    """Configuration of a model, and the replication given by the caller."""

    config: LlamaConfig
    copies: KVReplication


def resolve_llama_job(llama: LlamaJob | None) -> LlamaJob:
    """Return the value of a ``llama=`` argument, or its default.

    Raises:
        UsageError: The argument has another type, such as the path of a config.json.
    """
    if llama is not None and not isinstance(llama, LlamaJob):
        raise UsageError("llama= is of another class", expected="xla_ckpt.LlamaJob", found=type(llama).__name__)
    return llama or LlamaJob()


def resolve_job_without_form(llama: LlamaJob | None) -> LlamaJob:
    """Return the value of a ``llama=`` argument for a model whose tag determines its form.

    Raises:
        UsageError: The argument is invalid, or specifies the form of the model.
    """
    job = resolve_llama_job(llama)
    if job.says_form:
        raise _make_unwanted_form_error()
    return job


def read_model_info(llama: LlamaJob | None) -> LlamaModelInfo | None:
    """Return the information of the caller about a Llama-like model; None without a configuration.

    Raises:
        UsageError: The argument is invalid, or specifies the form of the model.
        StorageError: The configuration cannot be read.
    """
    return resolve_job_without_form(llama).model()


def find_model_info(
    store: Store, tag: str, job: LlamaJob, *, needed: bool = False
) -> tuple[LlamaModelInfo | None, Mapping[str, Any] | None]:
    """Return the information about the model of a tag, and its config.json: from the caller, or stored with the model.

    Args:
        store: Root directory.
        tag: Tag that contains the model.
        job: Information of the caller.
        needed: True if the model has to be Llama-like, even if the caller gives no information.

    Raises:
        UsageError: The configuration is invalid, is of another kind of model, or is missing although an argument needs
            it.
        StorageError: The configuration cannot be read.
    """
    own = _read_own_config(store, tag) if job.config is None else None
    with annotate_errors(path=store.path, tag=tag):
        known = job.model(own if needed or not job.is_silent else _keep_llama_config(own))
    return known, own if known is None else known.config.content


def _make_unwanted_form_error() -> UsageError:
    """Return the error for a form that is specified although the arrays of the tag already have one."""
    return UsageError(
        "fuse_qkv and qkv_linear say how a job has the arrays of a model of Hugging Face's",
        expected="a conversion of a directory with model.safetensors, or model.safetensors.index.json",
        hint="Of other checkpoints they keep their form: leave out fuse_qkv= (--fuse-qkv) and qkv_linear= "
        "(--no-qkv-linear).",
    )


def read_config(config: ConfigSource) -> LlamaConfig:
    """Read the sizes of a model from its configuration.

    Raises:
        UsageError: The file does not exist, or does not describe a Llama-like model.
        StorageError: The file cannot be read.
    """
    if isinstance(config, Mapping):
        return parse_config(config)
    data, path = read_config_text(config)
    return parse_config(data, path)


def read_config_text(config: PathLike) -> tuple[bytes, str]:
    """Read a config.json. Return its bytes and its path.

    Raises:
        UsageError: The file does not exist, or is too large.
        StorageError: The file cannot be read.
    """
    path = normalize_path(config)
    store, name = open_parent(path)
    if store.is_directory(name):
        name, path = f"{name}/{CONFIG_FILE}", f"{path}/{CONFIG_FILE}"
    if not store.has(name):
        # The path is in the message, because the error names the tag that is read and its root.
        raise UsageError(f"the config.json that is given does not exist: {path}")
    with wrap_os_errors("reading a config.json", path=path):
        data = store.read_start(name, MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise UsageError("a config.json is too large", path=path, expected=f"at most {MAX_CONFIG_BYTES} bytes")
    return data, path


def _get_job_form(config: LlamaConfig, job: LlamaJob) -> FusionScheme:
    """Return the form of a model in a neuronx-distributed job.

    Raises:
        UsageError: The form is not specified, and several are in use.
    """
    copies = job.copies
    count = copies.count or 1
    if not job.qkv_linear:
        return FusionScheme(projection=Projection.SEPARATE)
    if config.queries_per_kv_head == 1 and count == 1:
        return FusionScheme(projection=Projection.SEPARATE if job.fuse_qkv is False else Projection.STRIDED)
    if job.fuse_qkv is None:
        raise UsageError(
            "a job has grouped-query attention in one of three forms",
            expected="LlamaJob(fuse_qkv=True) (--fuse-qkv) for qkv_proj.weight_qkv, LlamaJob(fuse_qkv=False) "
            "(--no-fuse-qkv) for weight_q, weight_k and weight_v, or LlamaJob(qkv_linear=False) (--no-qkv-linear) for "
            "q_proj, k_proj and v_proj",
            hint="The job's own script has the flags fuse_qkv and qkv_linear: say what they are there.",
        )
    if count > 1 and copies.adjacent is None:
        raise make_unknown_order_error(count)
    projection = Projection.FUSED if job.fuse_qkv else Projection.LINEAR
    return FusionScheme(projection=projection, copies=count, adjacent=count > 1 and bool(copies.adjacent))


def _read_own_config(store: Store, tag: str) -> Mapping[str, Any] | None:
    """Return the content of the config.json in a Hugging Face directory; None for any other tag, or if it is missing.

    Raises:
        UsageError: The file is too large, or not a JSON object.
        StorageError: The file cannot be read.
    """
    foreign = find_foreign_tag(store, tag)
    if (
        foreign is None
        or foreign[0].model_names is not ModelNames.HUGGING_FACE
        or not store.has(f"{tag}/{CONFIG_FILE}")
    ):
        return None
    data, path = read_config_text(f"{store.path.rstrip('/')}/{tag}")
    with annotate_errors(path=path):
        return parse_json_object(data, "a config.json", UsageError)


def _keep_llama_config(own: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the configuration of a Llama-like model; None for other models, whose names are kept."""
    kind = None if own is None else own.get("model_type")
    return own if kind is None or kind in LLAMA_MODEL_TYPES else None


def choose_form(
    store: Store, tag: str, layout: Layout, known: LlamaModelInfo | None, job: LlamaJob
) -> FusionScheme | None:
    """Return the form of a Hugging Face model in the new tag; None if the names are kept.

    Raises:
        UsageError: A form is requested for another kind of tag; or the model needs a configuration or a form.
    """
    foreign = find_foreign_tag(store, tag)
    theirs = foreign is not None and foreign[0].model_names is ModelNames.HUGGING_FACE
    if not theirs and job.says_form:
        raise _make_unwanted_form_error().at(path=store.path, tag=tag)
    if not theirs or layout.model_names in (ModelNames.HUGGING_FACE, ModelNames.RULES):
        return None
    if known is None:
        if not job.says_form and layout.model_names is ModelNames.PROGRAM:
            return None
        raise UsageError(
            "there is no config.json beside the model",
            path=store.path,
            tag=tag,
            hint="Give it: llama=LlamaJob(config) (--config).",
        )
    if not job.says_form and known.copies.count is None and layout.model_names is ModelNames.PROGRAM:
        return FusionScheme(projection=Projection.SEPARATE, fuse_mlp=False)
    return _get_job_form(known.config, job)


def convert_for_job(
    reader: TagReader, topology: TargetTopology, known: LlamaModelInfo, form: FusionScheme | None
) -> tuple[TagReader, TargetTopology]:
    """Convert the names, the head order and the sharding of a Llama-like model to the form of the new job."""
    manifest, mesh = reader.manifest, topology.mesh
    if form is not None:
        return reader.with_manifest(to_fused(manifest, known.config, form, mesh)), topology
    if known.copies.count is not None:
        return reader.with_manifest(convert_head_order(manifest, known.config, known.copies, mesh)), topology
    if not _is_model_split(manifest):
        return reader, replace(topology, rules=(*topology.rules, *build_sharding_rules(known.config)))
    return reader, topology


def _is_model_split(manifest: Manifest) -> bool:
    """True if the saving job sharded an array of its model over tp. The stored sharding is used in that case."""
    weights = (r for leaf, r in manifest.arrays.items() if schema.get_member(leaf) == schema.MODEL)
    return any("tp" in get_stored_sharding(record).axes for record in weights)


def rename_from_metadata(store: Store, reader: TagReader) -> tuple[TagReader, Mapping[str, bytes]]:
    """Rename the model to its Hugging Face names if the tag contains them. Return the reader, and files of the model.

    Raises:
        CheckpointError: The tag contains names that do not match its arrays.
    """
    model = get_hugging_face_model(store, reader)
    return (reader, {}) if model is None else (reader.with_manifest(model.manifest), model.files)


def rename_to_hugging_face(reader: TagReader, part: str, known: LlamaModelInfo, options: ConvertOptions) -> TagReader:
    """Return a reader that contains only the model, under its Hugging Face names.

    Raises:
        IncompatibleCheckpointError: Names or shapes do not match the configuration, or the order of the heads is
            unknown, or the output layer is not the embedding although the configuration ties them.
        UsageError: The arguments of the caller contradict the checkpoint.
        CorruptCheckpointError: The tag is corrupt.
    """
    renamed = to_hugging_face(reader.manifest, part, known.config, known.copies)
    if renamed.tied_pair is not None and not has_same_bytes(
        reader, *renamed.tied_pair, max_memory=options.max_memory, workers=options.num_workers
    ):
        raise IncompatibleCheckpointError(
            "the output layer is not the embedding, and config.json says that it is",
            leaf=renamed.tied_pair[1],
            expected=f"the bytes of {renamed.tied_pair[0]}",
            found="others",
            hint="Give a config.json with tie_word_embeddings false.",
        )
    return reader.with_manifest(renamed.manifest)
