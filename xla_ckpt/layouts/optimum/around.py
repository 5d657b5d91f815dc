"""What lies around the rank files of a checkpoint of optimum-neuron's, for their scan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CorruptCheckpointError, naming
from xla_ckpt.layouts.array_links import arrays_of_links
from xla_ckpt.layouts.base import HuggingFaceModel
from xla_ckpt.layouts.by_rank.arrays import Copies
from xla_ckpt.layouts.by_rank.content import plain_file
from xla_ckpt.layouts.by_rank.files import RankFiles
from xla_ckpt.layouts.by_rank.state import Stage
from xla_ckpt.layouts.llama_manifest import model_alone, names_in_part
from xla_ckpt.layouts.nxd.folders import FolderFiles
from xla_ckpt.layouts.optimum.metadata import METADATA_FILE, WITHOUT, Attention, StageMetadata
from xla_ckpt.layouts.optimum.metadata_json import parse_stage_metadata
from xla_ckpt.layouts.optimum.names import links_of
from xla_ckpt.layouts.scanned import MAX_JSON
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import ArrayHint, Hints
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sharding import Sharding
from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.tree import schema
from xla_ckpt.tree.json_object import json_value

logger = get_logger(__name__)

TRAINER_STATE = "trainer_state.json"
"""What the trainer knows of its progress: epoch, step, history of the log."""


class OptimumFiles(FolderFiles):
    """The rank files, and what optimum-neuron writes beside them: metadata, the scheduler, the trainer's state.

    Args:
        below: Where in it the rank files lie.
        adapter: Whether they hold an adapter alone. Its metadata are about the model around it, too.
    """

    def __init__(self, directory: Directory, below: str, *, adapter: bool) -> None:
        super().__init__(directory, below)
        self.adapter = adapter

    def hints(self, model: Mapping[int, Stage], mesh: Mesh, hints: Hints) -> Hints:
        stages = metadata_of(self, mesh)
        if not stages:
            return hints
        if not self.adapter:
            for pp, stage in model.items():
                _check_stored(stages[pp], stage)
        described = _Description(self, stages, model, mesh, hints).hints()
        # What a rule says of the other arrays is kept. Of those that are described it has been compared, and it need
        # not be how the stored arrays were split.
        others = {name: hints.hint(name) for name in hints.arrays}
        sequence = [name for pp in sorted(model) for name in stages[pp].parameters]
        return replace(hints, arrays={**others, **described}, rules=(), sequence=list(dict.fromkeys(sequence)))

    def parts(self) -> dict[str, Any]:
        parts = super().parts()
        if schema.SCHEDULER not in parts and self.below and f"{schema.SCHEDULER}.pt" in self.names:
            parts[schema.SCHEDULER] = plain_file(self, f"{schema.SCHEDULER}.pt")
        if schema.USER_CONTENT not in parts and self.below and TRAINER_STATE in self.names:
            with naming(file=TRAINER_STATE):
                data = read_whole(self.directory, TRAINER_STATE, limit=MAX_JSON)
                parts[schema.USER_CONTENT] = {"trainer_state": json_value(data, "what the trainer knows")}
        return parts


def hugging_face_model(reader: TagReader, below: str) -> HuggingFaceModel | None:
    """The model of an open tag as Hugging Face has it; None if the tag has no metadata.

    Raises:
        CheckpointError: The metadata do not fit to what is stored, or nothing says how an array was split.
    """
    files, manifest = RankFiles(reader.directory, below), reader.manifest
    stages = metadata_of(files, Mesh.parse(manifest.mesh or ""))
    if not stages:
        return None
    leaves = names_in_part(manifest, schema.MODEL)
    shapes = {name: record.shape for name, leaf in leaves.items() if (record := manifest.array(leaf)) is not None}
    arrays = arrays_of_links(links_of(shapes, list(stages.values())), leaves, manifest, to_hf=True)
    beside = {
        name: read_whole(reader.directory, name, limit=MAX_JSON)
        for name in CONFIGS
        if below == "shards/" and name in files.names
    }
    return HuggingFaceModel(model_alone(manifest, arrays, {}), beside)


CONFIGS = ("config.json", "generation_config.json")
"""What the trainer writes beside the rank files of a model, and transformers looks for beside the model's files."""


def metadata_of(files: RankFiles, mesh: Mesh) -> Mapping[int, StageMetadata]:
    """The metadata of each pipeline stage; none if the tag has none.

    Raises:
        CorruptCheckpointError: They are damaged, or not those of this tag.
        UnsupportedStateError: They describe layers in a way that this library does not know.
    """
    names = {}
    for name in files.names:
        match = METADATA_FILE.fullmatch(name.removeprefix(files.below)) if name.startswith(files.below) else None
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
            hint=f"Restore them from a copy. {WITHOUT}",
        )
    stages = {
        pp: parse_stage_metadata(read_whole(files.directory, name, limit=MAX_JSON), name)
        for pp, name in sorted(names.items())
    }
    for stage in stages.values():
        _check_ranks(stage, mesh)
    return stages


def _check_ranks(stage: StageMetadata, mesh: Mesh) -> None:
    """Check that metadata are about as many tp ranks as there are files."""
    said = [(layer.tp, f"{layer.module}.{layer.name}") for layer in stage.layers]
    said += [(p.ranks, name) for name, p in stage.parameters.items() if p.dim is not None and p.ranks is not None]
    for ranks, name in said:
        if ranks != mesh.tp:
            raise CorruptCheckpointError(
                "the metadata are about another number of tp ranks than have files",
                leaf=schema.weight(name),
                file=stage.file,
                expected=f"{mesh.tp} ranks",
                found=ranks,
                hint=f"They may belong to another checkpoint. {WITHOUT}",
            )


def _check_stored(metadata: StageMetadata, stage: Stage) -> None:
    """Check that the parameters of the metadata are stored."""
    missing = [name for name in metadata.parameters if name not in stage.copies]
    if missing:
        raise CorruptCheckpointError(
            f"the metadata name {len(missing)} parameters that are not stored: they are those of another model",
            leaf=schema.weight(missing[0]),
            file=metadata.file,
            hint=f"Restore the file from a copy. {WITHOUT}",
        )


@dataclass(frozen=True, slots=True)
class _Description:
    """What is known of the arrays of a tag, from its metadata and the program."""

    files: RankFiles
    stages: Mapping[int, StageMetadata]
    model: Mapping[int, Stage]
    mesh: Mesh
    wanted: Hints

    def hints(self) -> dict[str, ArrayHint]:
        """By name. Where several pipeline stages have an array, the first of them says it."""
        by_name: dict[str, ArrayHint] = {}
        for pp, stage in sorted(self.model.items()):
            for name, copies in stage.copies.items():
                if name not in by_name:
                    by_name[name] = self._hint(pp, name, copies)
        return by_name

    def _hint(self, pp: int, name: str, copies: Copies) -> ArrayHint:
        known, local = self.wanted.hint(name), next(iter(copies.values())).shape
        parameter = self.stages[pp].parameter(name)
        at = (pp, parameter) if parameter is not None else self._twin(copies)
        if at is not None:
            return self._of_parameter(self.stages[at[0]], at[1], known, local)
        if known.shape is None and known.sharding is None:
            return replace(known, shape=local)  # it is a buffer, of which all ranks have the same
        return known

    def _of_parameter(
        self, metadata: StageMetadata, parameter: str, hint: ArrayHint, local: tuple[int, ...]
    ) -> ArrayHint:
        sharding = metadata.sharding(parameter)
        shape = _global_shape(metadata, parameter, local, self.mesh)
        problem = _contradiction(hint, sharding, shape) or self._other_order(metadata, parameter)
        if problem is not None:
            return replace(hint, problem=problem)
        if not sharding.axes:
            # The rule None takes the first of copies that have drifted apart. Otherwise they are compared.
            taken = hint.sharding if hint.ruled and hint.sharding is not None and not hint.sharding.axes else None
            return replace(hint, shape=shape, sharding=taken, rule=None if taken is None else hint.rule)
        return replace(hint, shape=hint.shape if hint.padded else shape, sharding=sharding, rule=None, told=True)

    def _twin(self, copies: Copies) -> tuple[int, str] | None:
        """(pipeline stage, parameter) that a name is a second one of, which the metadata leave out.

        Only what differs between the ranks is looked for: a buffer is the same on all of them.
        """
        first = next(iter(copies.values()))
        if all(self.files.same(first, tensor) for tensor in copies.values()):
            return None
        for pp, stage in sorted(self.model.items()):
            for name, candidates in stage.copies.items():
                parameter = self.stages[pp].parameter(name)
                if (
                    parameter is not None
                    and candidates.keys() == copies.keys()
                    and all(self.files.same(tensor, candidates[key]) for key, tensor in copies.items())
                ):
                    return pp, parameter
        return None

    def _other_order(self, metadata: StageMetadata, parameter: str) -> UnknownArray | None:
        """Why heads are not in the order that the program wants; None if they are, or nothing says that they are not.

        Each copy of the keys has its part of their queries. So with another number of copies the queries lie in another
        order, and a model that took them as they lie would have other keys with them.
        """
        layer = metadata.attention(parameter)
        wanted = None if layer is None else self._wanted_copies(layer)
        if layer is None or wanted in (None, layer.copies):
            return None
        return UnknownArray(
            problem="the heads of the queries lie in another order than the model wants them in, which has another "
            "number of copies of the keys",
            expected=f"kv_size_multiplier {layer.copies}, as stored",
            found=str(wanted),
            hint=f"Give the model kv_size_multiplier={layer.copies}, or go over Hugging Face's names and order.",
        )

    def _wanted_copies(self, layer: Attention) -> int | None:
        """How many copies of the keys the program has that order its queries; None if it does not say so.

        Copies on neighbouring ranks leave the queries in their order.
        """
        for name in ("weight_qkv", "weight_k"):
            known = self.wanted.hint(f"{layer.module}.{layer.name}.{name}".lstrip("."))
            split = known.sharding.dims[0] if known.sharding is not None and known.sharding.dims else None
            if split is not None and known.of_program:
                return 1 if split.sections[-1].adjacent else split.sections[-1].copies
        return None


def _global_shape(metadata: StageMetadata, parameter: str, local: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """The shape of a whole parameter, of which each rank has a tensor of the shape `local`.

    Raises:
        CorruptCheckpointError: Such tensors cannot be what the metadata are about.
    """
    sharding, size = metadata.sharding(parameter), metadata.size(parameter)
    try:
        shape = sharding.place(local, mesh, 0).shape
        if size is not None and shape[size[0]] != size[1]:
            raise ValueError(f"dim {size[0]} has {shape[size[0]]} elements on all ranks together, and not {size[1]}")
    except ValueError as error:
        raise CorruptCheckpointError(
            f"the metadata do not fit to what is stored: {error}",
            leaf=schema.weight(parameter),
            file=metadata.file,
            expected=f"parts of an array that is split as {sharding.spec}",
            found=f"{list(local)} on each of {mesh.tp} tp ranks",
            hint=f"They may belong to another checkpoint. {WITHOUT}",
        ) from error
    return shape


def _contradiction(hint: ArrayHint, sharding: Sharding, shape: tuple[int, ...]) -> UnknownArray | None:
    """Why what a program says of an array cannot be true, if it is what the metadata say; None if it can."""
    if hint.shape is not None and not hint.padded and hint.shape != shape:
        return _other("the model has another shape than the metadata of the tag say is stored", shape, hint.shape)
    asked = hint.sharding
    if asked is None or "tp" not in asked.axes or "tp" not in sharding.axes:
        return None  # each of them may be split or not: that is another job, and no contradiction
    stored, structure = _structure(sharding, shape), _structure(asked, shape)
    if stored == structure:
        return None
    return _other("the model splits this array in another way than the metadata of the tag say", stored, structure)


def _other(problem: str, expected: object, wanted: object) -> UnknownArray:
    return UnknownArray(
        problem=problem,
        expected=str(list(expected) if isinstance(expected, tuple) else expected),
        found=str(list(wanted) if isinstance(wanted, tuple) else wanted),
        hint="Take the model that was saved, or the metadata of this tag. If they are the ones: move the files "
        f"mp_metadata_pp_rank_*.json away. {WITHOUT}",
    )


def _structure(sharding: Sharding, shape: tuple[int, ...]) -> str:
    """Which dim is split over tp, and what parts it consists of."""
    for dim, split in enumerate(sharding.dims):
        if split is not None and "tp" in split.axes and dim < len(shape):
            count = len(split.sections)
            sizes = [shape[dim] // count if s.size is None else s.size for s in split.sections]
            return f"dim {dim} in parts of {', '.join(map(str, sizes))}"
    return "no dim"
