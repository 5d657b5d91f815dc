"""Read optimum-neuron checkpoints, and convert models to Hugging Face names.

Rank files are read with hints from their metadata, and with the state of the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from xla_ckpt.conversion.llama.manifest import collect_leaves_by_name, make_model_manifest
from xla_ckpt.conversion.llama.names import SegmentMapping, build_mapped_arrays, group_query_rows
from xla_ckpt.core.json_data import parse_json
from xla_ckpt.core.manifest.manifest import UnreadableArray
from xla_ckpt.core.plan.hints import ArrayHint, LoadHints
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import Sharding
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError, annotate_errors
from xla_ckpt.formats.base import HuggingFaceModel
from xla_ckpt.formats.nxd.files import FolderFiles
from xla_ckpt.formats.optimum.metadata import (
    METADATA_FILE_NAME,
    NO_METADATA_HINT,
    FusedLinear,
    GroupedQueryAttention,
    StageMetadata,
    parse_stage_metadata,
)
from xla_ckpt.formats.rank_files.arrays import TensorCopies
from xla_ckpt.formats.rank_files.files import RankFiles
from xla_ckpt.formats.rank_files.model import StageModel
from xla_ckpt.formats.rank_files.reading import read_plain_file
from xla_ckpt.formats.scan import MAX_JSON_BYTES
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Directory, read_file


def map_to_hugging_face(
    shapes: Mapping[str, tuple[int, ...]], metadata: Sequence[StageMetadata]
) -> Iterator[SegmentMapping]:
    """Map stored arrays to arrays with Hugging Face names and head order.

    Args:
        shapes: Global shape of each stored array, by its name.
        metadata: Metadata of each pipeline stage.

    Raises:
        UnsupportedStateError: There is a bias or an adapter of a layer fused along its inputs, whose structure is not
        recorded.
    """
    for name, shape in shapes.items():
        yield from _map_array(name, shape, metadata)


def _map_array(name: str, shape: tuple[int, ...], metadata: Sequence[StageMetadata]) -> Iterator[SegmentMapping]:
    """Map the parts of a stored array to Hugging Face arrays."""
    for stage in metadata:
        if (place := stage.find_layer(name)) is not None:
            layer, below = place
            at = f"{layer.module}." if layer.module else ""
            of_layer = _map_fused_linear if isinstance(layer, FusedLinear) else _map_attention
            return (yield from of_layer(layer, name, at, below))  # type: ignore[arg-type]
        attention = stage.find_attention(name)
        if attention is not None and len(shape) == 2 and "lora_B" not in name.split("."):
            return (yield from _map_heads(name, name, attention, dim=1))
    yield SegmentMapping(job_name=name, hf_name=name)


def _map_fused_linear(layer: FusedLinear, name: str, at: str, below: str) -> Iterator[SegmentMapping]:
    cut = layer.get_sections(below)
    if cut is None and layer.axis:
        raise UnsupportedStateError(
            "optimum-neuron does not say how biases and adapters lie of a layer that is fused along its inputs",
            leaf=schema.get_weight_path(f"{at}{layer.name}.{below}"),
        )
    firsts = [0, *accumulate(layer.sizes)]
    for part, first, size in zip(layer.parts, firsts, layer.sizes, strict=False):
        hf = f"{at}{part}.{below}"
        if cut is None:  # lora_A of an adapter is shared by all of them
            yield SegmentMapping(job_name=name, hf_name=hf)
        else:
            yield SegmentMapping(job_name=name, hf_name=hf, dim=cut[0], job_offset=first, size=size)


def _map_attention(layer: GroupedQueryAttention, name: str, at: str, below: str) -> Iterator[SegmentMapping]:
    """Map queries, keys and values; ``weight_qkv``, ``weight_q`` etc. become ``weight`` in each of them."""
    if layer.get_sections(below) is None:  # lora_A of an adapter is shared by all of them
        for part in (layer.query, layer.key, layer.value):
            yield SegmentMapping(job_name=name, hf_name=f"{at}{part}.{below}")
        return
    what, _, kind = below.rpartition("_")
    queries, keys, _ = layer.sizes
    if "q" in kind:
        yield from _map_heads(name, f"{at}{layer.query}.{what}", layer)
    for part, letter, first in ((layer.key, "k", queries), (layer.value, "v", queries + keys)):
        if letter in kind:
            yield SegmentMapping(
                job_name=name, hf_name=f"{at}{part}.{what}", job_offset=first if kind == "qkv" else 0, size=keys
            )


def _map_heads(name: str, hf: str, layer: GroupedQueryAttention, dim: int = 0) -> Iterator[SegmentMapping]:
    """Map the heads of the queries, with adjacent heads as one segment."""
    for there, here, size in group_query_rows(layer.heads, layer.kv_heads, layer.copies, layer.head_size):
        yield SegmentMapping(job_name=name, hf_name=hf, dim=dim, job_offset=there, hf_offset=here, size=size)


logger = get_logger(__name__)

TRAINER_STATE_FILE = "trainer_state.json"
"""File with the progress of the trainer: epoch, step, log history."""


class OptimumFiles(FolderFiles):
    """Rank files, and further files of optimum-neuron: metadata, the scheduler, the trainer's state.

    Args:
        directory: The open checkpoint directory.
        subfolder: Folder of the rank files in it.
        adapter: True if they contain only an adapter. Its metadata also describe the base model.
    """

    def __init__(self, directory: Directory, subfolder: str, *, adapter: bool) -> None:
        super().__init__(directory, subfolder)
        self.adapter = adapter

    def build_hints(self, model: Mapping[int, StageModel], mesh: Mesh, hints: LoadHints) -> LoadHints:
        stages = read_metadata(self, mesh)
        if not stages:
            return hints
        if not self.adapter:
            for pp, stage in model.items():
                _check_stored_parameters(stages[pp], stage)
        described = _HintBuilder(self, stages, model, mesh, hints).build()
        # A rule for other arrays is kept. A rule for a described array was compared with the metadata, and may differ
        # from the stored sharding.
        others = {name: hints.get_hint(name) for name in hints.arrays}
        sequence = [name for pp in sorted(model) for name in stages[pp].parameters]
        return replace(hints, arrays={**others, **described}, rules=(), saved_parameters=list(dict.fromkeys(sequence)))

    def read_parts(self) -> dict[str, Any]:
        parts = super().read_parts()
        if schema.SCHEDULER not in parts and self.subfolder and f"{schema.SCHEDULER}.pt" in self.file_names:
            parts[schema.SCHEDULER] = read_plain_file(self, f"{schema.SCHEDULER}.pt")
        if schema.USER_CONTENT not in parts and self.subfolder and TRAINER_STATE_FILE in self.file_names:
            with annotate_errors(file=TRAINER_STATE_FILE):
                data = read_file(self.directory, TRAINER_STATE_FILE, limit=MAX_JSON_BYTES)
                parts[schema.USER_CONTENT] = {"trainer_state": parse_json(data, "what the trainer knows")}
        return parts


def build_hugging_face_model(reader: TagReader, subfolder: str) -> HuggingFaceModel | None:
    """Return the model of an open checkpoint in Hugging Face form; None if the checkpoint has no metadata.

    Raises:
        CheckpointError: The metadata do not match the stored arrays, or the sharding of an array is unknown.
    """
    files, manifest = RankFiles(reader.directory, subfolder), reader.manifest
    stages = read_metadata(files, Mesh.parse(manifest.mesh or ""))
    if not stages:
        return None
    leaves = collect_leaves_by_name(manifest, schema.MODEL)
    shapes = {name: record.shape for name, leaf in leaves.items() if (record := manifest.find_array(leaf)) is not None}
    arrays = build_mapped_arrays(map_to_hugging_face(shapes, list(stages.values())), leaves, manifest, to_hf=True)
    beside = {
        name: read_file(reader.directory, name, limit=MAX_JSON_BYTES)
        for name in CONFIG_FILES
        if subfolder == "shards/" and name in files.file_names
    }
    return HuggingFaceModel(make_model_manifest(manifest, arrays, {}), beside)


CONFIG_FILES = ("config.json", "generation_config.json")
"""Files that the trainer writes next to the rank files of a model, and that transformers expects next to model files.
"""


def read_metadata(files: RankFiles, mesh: Mesh) -> Mapping[int, StageMetadata]:
    """Read the metadata of each pipeline stage; empty if the checkpoint has none.

    Raises:
        CorruptCheckpointError: They are damaged, or belong to another checkpoint.
        UnsupportedStateError: They describe layers in an unsupported form.
    """
    names = {}
    for name in files.file_names:
        match = (
            METADATA_FILE_NAME.fullmatch(name.removeprefix(files.subfolder))
            if name.startswith(files.subfolder)
            else None
        )
        if match is not None:
            names[int(match.group(1))] = name
    if not names:
        logger.info("the tag has no metadata of optimum-neuron's: a model or rules say how its arrays are split")
        return {}
    if set(names) != set(range(mesh.pp)):
        raise CorruptCheckpointError(
            "the metadata files are not those of the pipeline stages",
            file=next(iter(names.values())),
            expected=f"one for each of {mesh.pp} stages",
            found=f"those of the stages {', '.join(map(str, sorted(names)))}",
            hint=f"Restore them from a copy. {NO_METADATA_HINT}",
        )
    stages = {
        pp: parse_stage_metadata(read_file(files.directory, name, limit=MAX_JSON_BYTES), name)
        for pp, name in sorted(names.items())
    }
    for stage in stages.values():
        _check_tp_ranks(stage, mesh)
    return stages


def _check_tp_ranks(stage: StageMetadata, mesh: Mesh) -> None:
    """Check that the number of tp ranks in the metadata is the number of files.

    Raises:
        CorruptCheckpointError: It is not.
    """
    said = [(layer.tp, f"{layer.module}.{layer.name}") for layer in stage.layers]
    said += [(p.ranks, name) for name, p in stage.parameters.items() if p.dim is not None and p.ranks is not None]
    for ranks, name in said:
        if ranks != mesh.tp:
            raise CorruptCheckpointError(
                "the metadata are about another number of tp ranks than have files",
                leaf=schema.get_weight_path(name),
                file=stage.file,
                expected=f"{mesh.tp} ranks",
                found=ranks,
                hint=f"They may belong to another checkpoint. {NO_METADATA_HINT}",
            )


def _check_stored_parameters(metadata: StageMetadata, stage: StageModel) -> None:
    """Check that the parameters in the metadata are stored.

    Raises:
        CorruptCheckpointError: A parameter is missing.
    """
    missing = [name for name in metadata.parameters if name not in stage.copies]
    if missing:
        raise CorruptCheckpointError(
            f"the metadata name {len(missing)} parameters that are not stored: they are those of another model",
            leaf=schema.get_weight_path(missing[0]),
            file=metadata.file,
            hint=f"Restore the file from a copy. {NO_METADATA_HINT}",
        )


@dataclass(frozen=True, slots=True)
class _HintBuilder:
    """Builder of the hints for the arrays of a checkpoint, from its metadata and the program."""

    files: RankFiles
    stages: Mapping[int, StageMetadata]
    model: Mapping[int, StageModel]
    mesh: Mesh
    wanted: LoadHints

    def build(self) -> dict[str, ArrayHint]:
        """Build the hints by name. If several pipeline stages have an array, the first stage's metadata are used."""
        by_name: dict[str, ArrayHint] = {}
        for pp, stage in sorted(self.model.items()):
            for name, copies in stage.copies.items():
                if name not in by_name:
                    by_name[name] = self._build_hint(pp, name, copies)
        return by_name

    def _build_hint(self, pp: int, name: str, copies: TensorCopies) -> ArrayHint:
        known, local = self.wanted.get_hint(name), next(iter(copies.values())).shape
        parameter = self.stages[pp].find_parameter(name)
        at = (pp, parameter) if parameter is not None else self._find_tied_parameter(copies)
        if at is not None:
            return self._describe_parameter(self.stages[at[0]], at[1], known, local)
        if known.shape is None and known.sharding is None:
            return replace(known, shape=local)  # it is a buffer, which is replicated on all ranks
        return known

    def _describe_parameter(
        self, metadata: StageMetadata, parameter: str, hint: ArrayHint, local: tuple[int, ...]
    ) -> ArrayHint:
        sharding = metadata.get_sharding(parameter)
        shape = _compute_global_shape(metadata, parameter, local, self.mesh)
        problem = _find_contradiction(hint, sharding, shape) or self._find_head_order_mismatch(metadata, parameter)
        if problem is not None:
            return replace(hint, problem=problem)
        if not sharding.axes:
            # The rule None uses the first of copies that have diverged. Otherwise they are compared.
            taken = hint.sharding if hint.has_rule and hint.sharding is not None and not hint.sharding.axes else None
            return replace(hint, shape=shape, sharding=taken, rule_text=None if taken is None else hint.rule_text)
        return replace(
            hint,
            shape=hint.shape if hint.shape_excludes_padding else shape,
            sharding=sharding,
            rule_text=None,
            is_declared_in_tag=True,
        )

    def _find_tied_parameter(self, copies: TensorCopies) -> tuple[int, str] | None:
        """Find the parameter that is tied to a name, because the metadata omit second names.

        Only arrays that differ between ranks are searched for: buffers are equal on all ranks.

        Returns:
            (pipeline stage, parameter); None if the array is not tied.
        """
        first = next(iter(copies.values()))
        if all(self.files.is_same(first, tensor) for tensor in copies.values()):
            return None
        for pp, stage in sorted(self.model.items()):
            for name, candidates in stage.copies.items():
                parameter = self.stages[pp].find_parameter(name)
                if (
                    parameter is not None
                    and candidates.keys() == copies.keys()
                    and all(self.files.is_same(tensor, candidates[key]) for key, tensor in copies.items())
                ):
                    return pp, parameter
        return None

    def _find_head_order_mismatch(self, metadata: StageMetadata, parameter: str) -> UnreadableArray | None:
        """Return an `UnreadableArray` if heads are not in the order that the program requires; otherwise None.

        Each replica of the keys is stored with a part of their queries. Therefore the order of the queries depends on
        the number of replicas, and in the stored order a model with another number would combine queries with wrong
        keys.
        """
        layer = metadata.find_attention(parameter)
        wanted = None if layer is None else self._get_wanted_copies(layer)
        if layer is None or wanted in (None, layer.copies):
            return None
        return UnreadableArray(
            problem="the heads of the queries lie in another order than the model wants them in, which has another "
            "number of copies of the keys",
            expected=f"kv_size_multiplier {layer.copies}, as stored",
            found=str(wanted),
            hint=f"Give the model kv_size_multiplier={layer.copies}, or go over Hugging Face's names and order.",
        )

    def _get_wanted_copies(self, layer: GroupedQueryAttention) -> int | None:
        """Return the number of KV replicas that determines the program's query order; None if it is unknown.

        Replicas on neighbouring ranks do not change the order of the queries.
        """
        for name in ("weight_qkv", "weight_k"):
            known = self.wanted.get_hint(f"{layer.module}.{layer.name}.{name}".lstrip("."))
            split = known.sharding.dims[0] if known.sharding is not None and known.sharding.dims else None
            if split is not None and known.is_in_program:
                return 1 if split.sections[-1].adjacent else split.sections[-1].copies
        return None


def _compute_global_shape(
    metadata: StageMetadata, parameter: str, local: tuple[int, ...], mesh: Mesh
) -> tuple[int, ...]:
    """Compute the global shape of a parameter with the local shape `local`.

    Raises:
        CorruptCheckpointError: The local shape does not match the metadata.
    """
    sharding, size = metadata.get_sharding(parameter), metadata.get_split_size(parameter)
    try:
        shape = sharding.map_local_shape(local, mesh, 0).shape
        if size is not None and shape[size[0]] != size[1]:
            raise ValueError(f"dim {size[0]} has {shape[size[0]]} elements on all ranks together, and not {size[1]}")
    except ValueError as error:
        raise CorruptCheckpointError(
            f"the metadata do not fit to what is stored: {error}",
            leaf=schema.get_weight_path(parameter),
            file=metadata.file,
            expected=f"parts of an array that is split as {sharding.spec}",
            found=f"{list(local)} on each of {mesh.tp} tp ranks",
            hint=f"They may belong to another checkpoint. {NO_METADATA_HINT}",
        ) from error
    return shape


def _find_contradiction(hint: ArrayHint, sharding: Sharding, shape: tuple[int, ...]) -> UnreadableArray | None:
    """Return an `UnreadableArray` if the program's hint contradicts the metadata; otherwise None."""
    if hint.shape is not None and not hint.shape_excludes_padding and hint.shape != shape:
        return _make_mismatch(
            "the model has another shape than the metadata of the tag say is stored", shape, hint.shape
        )
    asked = hint.sharding
    if asked is None or "tp" not in asked.axes or "tp" not in sharding.axes:
        return None  # a job without tensor parallelism for this array is not a contradiction
    stored, structure = _describe_split(sharding, shape), _describe_split(asked, shape)
    if stored == structure:
        return None
    return _make_mismatch(
        "the model splits this array in another way than the metadata of the tag say", stored, structure
    )


def _make_mismatch(problem: str, expected: object, wanted: object) -> UnreadableArray:
    return UnreadableArray(
        problem=problem,
        expected=str(list(expected) if isinstance(expected, tuple) else expected),
        found=str(list(wanted) if isinstance(wanted, tuple) else wanted),
        hint="Take the model that was saved, or the metadata of this tag. If they are the ones: move the files "
        f"mp_metadata_pp_rank_*.json away. {NO_METADATA_HINT}",
    )


def _describe_split(sharding: Sharding, shape: tuple[int, ...]) -> str:
    """Describe the dim that is sharded over tp, and the sizes of its parts."""
    for dim, split in enumerate(sharding.dims):
        if split is not None and "tp" in split.axes and dim < len(shape):
            count = len(split.sections)
            sizes = [shape[dim] // count if s.size is None else s.size for s in split.sections]
            return f"dim {dim} in parts of {', '.join(map(str, sizes))}"
    return "no dim"
