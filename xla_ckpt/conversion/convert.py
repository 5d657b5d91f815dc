"""Convert a checkpoint to another layout or topology, without a job and within bounded memory.

The source is opened and verified as it is read; a `ConversionTarget` writes the new tag, which appears complete or not
at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from xla_ckpt.conversion.export import (
    add_config,
    add_files,
    check_new_directory,
    check_new_file,
    write_directory,
    write_single_file,
)
from xla_ckpt.conversion.llama.job import (
    LlamaJob,
    choose_form,
    convert_for_job,
    find_model_info,
    rename_from_metadata,
    rename_to_hugging_face,
    resolve_llama_job,
)
from xla_ckpt.conversion.source import (
    ProgramInfo,
    SourceState,
    check_file,
    check_split,
    check_whole_model,
    narrow_to_part,
    open_source,
    remove_rank_numbers,
    suggest_other_tags,
    warn_divergent,
)
from xla_ckpt.conversion.stream import stream_files
from xla_ckpt.core.files.parity import ParityLevel
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.merge import merge_records
from xla_ckpt.core.plan.rank_record import RankRecord
from xla_ckpt.core.plan.stored_sharding import find_optimizer_parameters
from xla_ckpt.core.sharding.mesh import Mesh, parse_mesh
from xla_ckpt.core.sharding.sharding import ShardingRules, find_unused_rules, parse_rules
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.skeleton import find_arrays, get_children, get_part
from xla_ckpt.errors import CheckpointError, IncompatibleCheckpointError, UsageError, annotate_errors, wrap_os_errors
from xla_ckpt.extras import wrap_missing_packages
from xla_ckpt.features.parity.parity import ParityInput, list_covered_files, write_whole_parity
from xla_ckpt.formats.base import ConversionPlan, Layout, ModelNames, TargetTopology
from xla_ckpt.formats.registry import get_layout
from xla_ckpt.formats.tags import find_foreign_tag, list_tag_names
from xla_ckpt.inspection.tags import choose_tag, locate_checkpoint
from xla_ckpt.keywords import check_arguments_and_fields
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.logs import get_logger
from xla_ckpt.options import ConvertOptions, resolve_options
from xla_ckpt.progress import IoContext, ProgressBar
from xla_ckpt.saving.finalize import FinalFiles, finalize
from xla_ckpt.saving.merge import build_head
from xla_ckpt.saving.request import check_destination
from xla_ckpt.saving.write import write_objects
from xla_ckpt.storage.base import Store, write_file
from xla_ckpt.storage.resolve import PathLike, is_same_directory, normalize_path, open_store
from xla_ckpt.tags.entry import check_tag
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.root import Transaction, TransactionKind

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """Result of a conversion."""

    path: str
    """Root directory; for ``safetensors`` the directory of the files, for ``torch`` the file."""

    tag: str
    layout: str
    mesh: str
    files: int
    nbytes: int
    """Bytes of arrays, including replicas and padding."""

    seconds: float


@check_arguments_and_fields(options=ConvertOptions, llama=LlamaJob)
def convert(
    source: PathLike,
    destination: PathLike,
    tag: str | None = None,
    *,
    to: str = "native",
    part: str | None = None,
    mesh: Mesh | str | None = None,
    as_tag: str | None = None,
    model: Any = None,
    optimizer: Any = None,
    llama: LlamaJob | None = None,
    shardings: ShardingRules | None = None,
    pipeline_cuts: Sequence[str] = (),
    zero1: bool | None = None,
    parity: ParityLevel | None = None,
    trust_pickle: bool = False,
    options: ConvertOptions | None = None,
) -> ConvertReport:
    """Convert a tag to another layout or topology. The source is not changed.

    All bytes are verified while they are read. The new tag is atomic: it appears complete or not at all.

    A Hugging Face directory can be the source. For the neuronx-distributed layouts, and for other layouts if `llama`
    specifies the form of the job, a Llama-like model gets the parameter names and fused projections of the
    neuronx-distributed examples, sharded over tp as in these examples.

    Args:
        source: Root directory of the tag, written by this library, neuronx-distributed, SageMaker or
            torch.distributed.checkpoint; or a Hugging Face directory, or a file written by torch.save.
        destination: Root directory of the new tag; for ``safetensors`` and ``peft`` a directory that does not exist
            yet, for ``torch`` a file that does not exist yet (``"out.pt"``).
        tag: Tag to convert; None selects the newest.
        to: ``"native"``; ``"xser"`` or ``"pt"`` (alias ``"nxd"``), the layouts of neuronx-distributed (in an object
            store, these files are written where its own reader expects them, so that neuronx-distributed can load the
            tag); ``"smp"``, for SageMaker model parallel; ``"dcp"``, for torch.distributed.checkpoint;
            ``"torchtitan"``, the same with the keys of torchtitan; ``"orbax"``, for orbax; ``"orbax-manager"`` and
            ``"orbax-v1"``, steps of the orbax checkpoint managers; ``"orbax-model"``, only the model for orbax, under
            the names of a JAX program (`register_names`); ``"safetensors"``, only the model, as written by
            `export_hf`; ``"peft"``, only its adapters, in the PEFT format;
            ``"torch_checkpointing"``, for torch_checkpointing; ``"torch"``, one file for torch.load.
        part: For ``"torch"``: leaf path of the state to write, such as ``"model"``, or a module of the model
            (``"model/master"``); by default the full state, as ``{"model": ..., "optimizer": ..., ...}``.
        mesh: Topology that the files are written for (``"dp=2,tp=4"``); by default one rank, independent of the source.
            The native layout loads on any topology; there the mesh only sets the number of files.
        as_tag: Name of the new tag; by default the old name, or the file name without its extension.
        model: Model that supplies the names, shapes and sharding of parameters that neuronx-distributed tags do not
            record. On the ``meta`` device it takes no memory. Tags of this library do not need it.
        optimizer: Optimizer over the parameters of `model`. Its parameter order is the only identification of
            parameters in such tags.
        llama: Llama-like model and its form in the job. For neuronx-distributed tags its config.json replaces `model`.
            For a tag of a job without tensor parallelism, it describes how the new job shards the model. For
            ``"safetensors"`` it selects the Hugging Face names (see `export_hf`); a Hugging Face directory contains
            its own configuration. If `kv_size_multiplier` of the new job is set, the heads of a job with another value
            are reordered, also in the optimizer states.
        shardings: Rules as in `save_checkpoint`, matched against leaf paths: the sharding of arrays in the new job
            where it differs from the old job; for neuronx-distributed tags also the sharding in the old job.
        pipeline_cuts: For several pipeline stages in the neuronx-distributed and SageMaker layouts: the modules after
            which a stage ends, in order (``["model.layers.15"]``).
        zero1: True to shard the optimizer states over dp in those layouts; None keeps the choice of the old job, except
            for ``"smp"``, where the states are unsharded because the SageMaker library reads no others.
        parity: Parity level of the new tag, as in `save_checkpoint`. The parity of the old tag is not carried over.
        trust_pickle: Load pickled objects that must be written again. Loading them can run arbitrary code.
        options: Options of the conversion; by default the `default_options`.

    Raises:
        NoCheckpointError: The tag does not exist.
        CorruptCheckpointError: The tag is corrupt. Nothing was written.
        IncompatibleCheckpointError: The old or the new sharding of an array is unknown.
        UntrustedObjectError: The tag contains pickled objects, and `trust_pickle` is False.
        UsageError: An argument is invalid, or the new tag would replace the old one.
        StorageError: The destination cannot be written.
        NotDurableError: The new tag exists, but may be lost in a power failure.

    Example:
        ``convert("nxd_run", "run", to="native", model=model, optimizer=optimizer)``
    """
    began, options, job = time.monotonic(), resolve_options(ConvertOptions, options), resolve_llama_job(llama)
    layout = get_layout(to)
    _check_fit_layout(layout, part, parity)
    store, named = locate_checkpoint(source, tag)
    tag = choose_tag(store, named)
    known, config = find_model_info(store, tag, job, needed=layout.model_names is ModelNames.FUSED)
    topology = TargetTopology(
        mesh=parse_mesh(mesh) or Mesh(),
        rules=parse_rules(shardings),
        pipeline_cuts=pipeline_cuts,
        zero1=zero1,
        config=config or {},
    )
    form = choose_form(store, tag, layout, known, job)
    called = _get_tag_name(store, tag) if as_tag is None else as_tag
    wanted = layout.holds if part is None else part
    if layout.one_file:
        check_new_file(destination)
    elif not layout.tagged:
        check_new_directory(destination)
    about = ProgramInfo(rules=topology.rules, model=model, optimizer=optimizer, llama=known)
    with (
        suggest_other_tags(store, tag, named),
        open_source(store, tag, about, part=wanted, masters=not layout.keeps_masters) as old_tag,
    ):
        if layout.tagged:
            target = ConversionTarget(
                open_store(destination), called, topology.mesh, parity, next(iter(layout.marks), "")
            )
            target.check_free(store, tag)
            layout.check_findable(target.store, called)
        # Errors name the tag that is read. Only storage errors name the tag that is written.
        with (
            annotate_errors(path=store.path, tag=tag),
            wrap_os_errors("converting", path=normalize_path(destination), tag=called),
            wrap_missing_packages(f"a conversion to the layout {layout.name}"),
        ):
            check_file(old_tag)
            reader, wanted = narrow_to_part(remove_rank_numbers(old_tag), wanted)
            to_hf = layout.model_names in (ModelNames.HUGGING_FACE, ModelNames.RULES)
            if to_hf:
                check_split(reader, schema.MODEL)
                check_whole_model(reader)
            else:
                _check_arrays(reader, topology, wanted)
                _warn_numbered_parameters(reader, wanted)
            warn_divergent(reader)
            _warn_left_out(reader)
            beside: Mapping[str, bytes] = {}
            if to_hf:
                reader, beside = rename_from_metadata(store, reader)
                if known is not None:
                    reader = rename_to_hugging_face(reader, schema.MODEL, known, options)
            elif known is not None:
                reader, topology = convert_for_job(reader, topology, known, form)
            reader, wanted = layout.source(reader, wanted, topology)
            stored = SourceState(reader, trust=trust_pickle, part=wanted)
            rewriting = add_files(layout.rewriting(stored, topology), beside)
            if layout.model_names is ModelNames.HUGGING_FACE:
                rewriting = add_config(rewriting, reader, config)
            with ProgressBar(f"convert {tag}", rewriting.nbytes, options.progress) as bar:
                crew = IoContext(workers=options.num_workers, progress=bar)
                if layout.tagged:
                    target.write(stored, rewriting, crew, max_memory=options.max_memory)
                else:
                    write = write_single_file if layout.one_file else write_directory
                    write(reader, destination, rewriting, crew, max_memory=options.max_memory)
    return ConvertReport(
        path=normalize_path(destination),
        tag=called,
        layout=layout.name,
        mesh=str(topology.mesh),
        files=sum(map(len, rewriting.files)),
        nbytes=rewriting.nbytes,
        seconds=time.monotonic() - began,
    )


def _check_fit_layout(layout: Layout, part: str | None, parity: ParityLevel | None) -> None:
    """Raise UsageError for arguments that the layout does not support."""
    if part is not None and not layout.one_file:
        raise UsageError(
            f"part= (--part) is for a single file, and the layout {layout.name} is none",
            found=repr(part),
            hint="xla_ckpt.export_hf(part=...) (xla-ckpt export --part) writes a part as safetensors.",
        )
    if parity is not None and (parity not in get_args(ParityLevel) or not layout.tagged):
        raise UsageError(
            "parity= (--parity) is for a layout with tags",
            expected=" or ".join(map(repr, get_args(ParityLevel))),
            found=f"{parity!r} for {layout.name}",
        )


def _get_tag_name(store: Store, tag: str) -> str:
    """Return the default name of a tag that is converted from another tag or from a file."""
    foreign = find_foreign_tag(store, tag)
    return tag if foreign is None else foreign[0].tag_of(foreign[1])


def _check_arrays(reader: TagReader, to: TargetTopology, part: str) -> None:
    """Check that all arrays to be written are stored, and that their sharding is known.

    Raises:
        UsageError: The part does not exist.
        CheckpointError: An array is not stored, or its sharding is unknown.
    """
    try:
        content = get_part(reader.manifest.skeleton, part)
    except KeyError:
        parts = ", ".join(list(get_children(reader.manifest.skeleton) or ())[:8]) or "nothing"
        raise UsageError("the checkpoint has no such part", expected=f"one of {parts}", found=part) from None
    leaves = find_arrays(content, part)
    if reader.foreign_objects is not None:
        _check_names(reader.manifest, find_arrays(reader.manifest.skeleton, paths.ROOT))
    for path in leaves:
        if reader.manifest.find_array(path) is None:
            raise CheckpointError("the skeleton names an array that is not stored", leaf=path)
    for message in find_unused_rules(to.rules, leaves):
        logger.warning("%s", message)


def _warn_left_out(reader: TagReader) -> None:
    """Log the leaves that the old tag lists but does not contain. The new tag lacks them."""
    leaves = reader.manifest.unwritten
    if leaves:
        logger.warning(
            "tag %s has no bytes of %s: whoever saved it left them out (avoid_saving_lower_precision_weights). The new "
            "tag lacks them, and a strict load refuses it",
            reader.tag,
            paths.format_leaves(leaves),
        )


def _warn_numbered_parameters(reader: TagReader, part: str) -> None:
    """Log that optimizer parameters keep their numbers although the model with their names is stored."""
    members = get_children(reader.manifest.skeleton) or {}
    names = find_optimizer_parameters(reader.manifest) or frozenset()
    if schema.MODEL in members and paths.is_under(schema.OPTIMIZER, part) and any(map(paths.is_json_key, names)):
        logger.warning(
            "tag %s: the stored optimizer numbers its parameters, and so does the new tag: it loads into an optimizer "
            "with the same groups and order. For names, give the model and its optimizer, as they were at the save: "
            "model= and optimizer= (--like)",
            reader.tag,
        )


def _check_names(manifest: Manifest, leaves: Iterable[str]) -> None:
    """Refuse optimizer states of unknown parameters if arrays are sharded over tp or ep.

    A rule of the caller could match such a state by mistake, and its shape does not show how it was sharded.

    Raises:
        IncompatibleCheckpointError: The parameter of a state is unknown.
    """
    old = Mesh.parse(manifest.mesh or "")
    owners = {leaf: schema.get_parameter_path(leaf) for leaf in leaves} if old.tp * old.ep > 1 else {}
    named = find_optimizer_parameters(manifest)
    if named is not None:  # state that belongs to no parameter is replicated on all ranks
        shared = {leaf for leaf in owners if (owner := schema.get_owner(leaf)) is not None and owner not in named}
        owners = {leaf: owner for leaf, owner in owners.items() if leaf not in shared}
    leaf = next((leaf for leaf, owner in owners.items() if owner is not None and owner not in owners), None)
    if leaf is not None:
        raise IncompatibleCheckpointError(
            "the stored optimizer numbers its parameters: it cannot be told how its states were split over the ranks",
            leaf=leaf,
            hint="Give the model and its optimizer: model= and optimizer= (--like). For the weights alone, convert the "
            "directory that xla_ckpt.export_hf (xla-ckpt export) writes of this tag.",
        )


@dataclass(frozen=True, slots=True)
class ConversionTarget:
    """Tag that a conversion writes."""

    store: Store
    tag: str
    mesh: Mesh
    parity: ParityLevel | None
    first_marker: str
    """First marker file of the layout (see `xla_ckpt.formats.base.Layout`); empty if the layout has no markers."""

    @property
    def _in_place(self) -> bool:
        """True if the files are written where the readers of the layout expect them, not in our tag directory."""
        return bool(self.first_marker) and self.store.object_store is not None

    def check_free(self, source: Store, tag: str) -> None:
        """Check that the new tag would not replace the source or another tag.

        Raises:
            UsageError: It would; or parity is requested where repairs could not use it.
        """
        check_tag(self.tag, self.store.path)
        if is_same_directory(source, tag, self.store, self.tag):
            raise UsageError(
                "the new tag would replace the old one",
                path=self.store.path,
                tag=self.tag,
                hint="Pass as_tag= (--as).",
            )
        if self.tag in list_tag_names(self.store):
            raise UsageError(
                "there is a tag of this name already",
                path=self.store.path,
                tag=self.tag,
                hint="Give the new one another name by as_tag= (--as), or remove this one first.",
            )
        check_destination(self.store, self.tag)
        if self.parity is not None and self._in_place:
            raise UsageError(
                "a tag in another library's place in an object store has no parity, which repairs could not use there",
                path=self.store.path,
                tag=self.tag,
                found=f"parity={self.parity!r}",
            )

    def write(self, stored: SourceState, conversion: ConversionPlan, io: IoContext, *, max_memory: int) -> None:
        """Write all files, then the manifest, then the marker files, and commit.

        Raises:
            CorruptCheckpointError: The old tag is corrupt. Nothing was written.
            UsageError: The name is in use, and the storage cannot replace it.
            OSError: A storage operation failed.
        """
        objects = stored.objects()  # raises for untrusted objects before anything is written
        files = [file for of_rank in conversion.files for file in of_rank]
        old, marks = stored.manifest, dict(conversion.marks)
        root = open_root(self.store)
        with Transaction(
            root, self.tag, TransactionKind.CHECKPOINT if self._in_place else TransactionKind.TAG
        ) as transaction:
            if self._in_place:
                # If this process is killed, the library of the layout detects that the tag is incomplete.
                write_file(transaction.directory, self.first_marker, marks.pop(self.first_marker))
            written = stream_files(stored.reader, transaction.directory, files, io, max_memory=max_memory)
            records = [*written.files, *write_objects(transaction.directory, objects, 0, self.mesh.size)]
            record = RankRecord.from_shards(
                written.shards,
                rank=0,
                files=tuple(records),
                arrays={
                    leaf: (r.dtype.name, r.shape, conversion.specs.get(leaf), r.metadata.weak_type)
                    for leaf, r in old.arrays.items()
                },
                aliases=old.aliases,
                skeleton=old.skeleton,
                module_metadata=old.module_metadata,
                objects=tuple(range(len(written.files), len(records))),
            )
            # A tag in the place of another library is not a commit of its root, so it has no sequence number there.
            head = build_head(root, self.tag, max(transaction.sequence, 1))
            manifest = merge_records([record], self.mesh).build_manifest(head, self.mesh)
            manifest = replace(
                manifest, arrays=manifest.arrays.mark_divergent(old.divergent_leaves), parity=self.parity
            )
            write_parity = None
            if (parity := self.parity) is not None:

                def write_parity(sealed: Manifest, text: bytes) -> None:
                    covered = ParityInput(transaction.directory, list_covered_files(sealed))
                    write_whole_parity(covered, parity, text, 1, io, transaction.directory)

            ending = FinalFiles(index=conversion.index, marks=marks, write_parity=write_parity)
            finalize(transaction, self.store.path, manifest, ending)
            transaction.commit()
