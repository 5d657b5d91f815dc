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
    """What a conversion wrote."""

    path: str
    """Root directory; for ``safetensors`` the directory of the files, for ``torch`` the file."""

    tag: str
    layout: str
    mesh: str
    files: int
    nbytes: int
    """Bytes of arrays, replicas and padding included."""

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
    """Write a tag anew, in another layout or for another topology. The source stays as it is.

    Every byte is verified on the way. The new tag appears complete or not at all.

    A directory of Hugging Face's is a source, too. In neuronx-distributed's layouts, and in others if `llama` says the
    form of the job, a Llama-like model gets the names and fused projections of neuronx-distributed's examples, split
    over tp as they are.

    Args:
        source: Root directory of the tag: one of ours, neuronx-distributed's, SageMaker's or
            torch.distributed.checkpoint's. Or a directory of Hugging Face's, or a file that torch.save wrote.
        destination: Root directory of the new tag; for ``safetensors`` and ``peft`` a directory that does not exist
            yet, for ``torch`` a file that does not exist yet (``"out.pt"``).
        tag: Which checkpoint; None takes the newest.
        to: ``"native"``; ``"xser"`` or ``"pt"`` (``"nxd"`` is the same), neuronx-distributed's layouts, which lie in an
            object store where its own reader looks, so that such a tag is neuronx-distributed's there; ``"smp"``,
            which SageMaker model parallel reads; ``"dcp"``, which torch.distributed.checkpoint reads;
            ``"torchtitan"``, the same under torchtitan's keys; ``"orbax"``, which orbax reads; ``"orbax-manager"`` and
            ``"orbax-v1"``, steps of orbax's own managers of checkpoints; ``"orbax-model"``, the model alone for orbax,
            under the names of a program of jax (`register_names`); ``"safetensors"``, the model alone, as `export_hf`
            writes it; ``"peft"``, its adapters alone, as PEFT has them;
            ``"torch_checkpointing"``, which torch_checkpointing reads; ``"torch"``, one file for torch.load.
        part: For ``"torch"``: the leaf path of what is written, such as ``"model"``, or a module of the model
            (``"model/master"``); by default all of the state, as ``{"model": ..., "optimizer": ..., ...}``.
        mesh: The topology that the files are for (``"dp=2,tp=4"``); by default one rank, whatever the old one was. The
            native layout loads on any; there it only says into how many files the bytes are dealt out.
        as_tag: Name of the new tag; by default that of the old one, or of the file without its ending.
        model: What neuronx-distributed's own tags do not say is taken from here: names, shapes and splits of the
            parameters. On the device ``meta`` it takes no memory. Our own tags do not need it.
        optimizer: An optimizer over its parameters: their order, which is all that names them there.
        llama: A Llama-like model, and how a job has it. For neuronx-distributed's own tags its config.json says what
            `model` would; of a tag whose job had no tensor parallelism, how the new job splits the model. To
            ``"safetensors"`` it gives Hugging Face's names (see `export_hf`), and a directory of Hugging Face's has its
            own. With a `kv_size_multiplier` of the new job, the heads of a job with another one are put into its order,
            in the optimizer's states, too.
        shardings: Rules as in `save_checkpoint`, found in leaf paths: how the new job splits arrays, where it is not
            as the old one did; for neuronx-distributed's own tags also how the old one did.
        pipeline_cuts: For several pipeline stages in the layouts of neuronx-distributed and SageMaker: the modules
            after which a stage ends, in order (``["model.layers.15"]``).
        zero1: Whether the optimizer's states are dealt out over dp in those layouts; None does as the old job did, and
            in ``"smp"`` puts them together: SageMaker's library reads no others.
        parity: What the new tag is to survive, as in `save_checkpoint`. The old one's parity is not carried over.
        trust_pickle: Load pickled objects where they have to be written anew, which can run any code.
        options: How the conversion goes about its work; by default those of `default_options`.

    Raises:
        NoCheckpointError: There is no such tag.
        CorruptCheckpointError: It is damaged. Nothing was written.
        IncompatibleCheckpointError: It cannot be told how an array was or will be split.
        UntrustedObjectError: It holds pickled objects, and `trust_pickle` is False.
        UsageError: An argument makes no sense, or the new tag would replace the old one.
        StorageError: The destination cannot be written.
        NotDurableError: The new tag is there, and a loss of power may undo that.

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
        # An error names the tag that is read. Only an error of the storage names the tag that is written.
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
    """Refuse arguments that the layout has no use for."""
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
    """The name of a tag that is made of another one, or of a file."""
    foreign = find_foreign_tag(store, tag)
    return tag if foreign is None else foreign[0].tag_of(foreign[1])


def _check_arrays(reader: TagReader, to: TargetTopology, part: str) -> None:
    """Check that everything that will be written is stored, and that it is known how it was split.

    Raises:
        UsageError: There is no such part.
        CheckpointError: Something is not stored, or not known.
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
    """Log what the new tag will lack, because the old one names it and does not hold it."""
    leaves = reader.manifest.unwritten
    if leaves:
        logger.warning(
            "tag %s has no bytes of %s: whoever saved it left them out (avoid_saving_lower_precision_weights). The new "
            "tag lacks them, and a strict load refuses it",
            reader.tag,
            paths.format_leaves(leaves),
        )


def _warn_numbered_parameters(reader: TagReader, part: str) -> None:
    """Log that the optimizer's parameters stay numbers, where the model is there that they belong to."""
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
    """Refuse optimizer states whose parameter is not known, if arrays are split over tp or ep.

    A rule of the caller's could fit such a state by mistake, and its shape does not tell how it was split.
    """
    old = Mesh.parse(manifest.mesh or "")
    owners = {leaf: schema.get_parameter_path(leaf) for leaf in leaves} if old.tp * old.ep > 1 else {}
    named = find_optimizer_parameters(manifest)
    if named is not None:  # state that belongs to no parameter is the same on all ranks
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
    """The tag that is to be."""

    store: Store
    tag: str
    mesh: Mesh
    parity: ParityLevel | None
    first_marker: str
    """That of its layout (see `xla_ckpt.formats.base.Layout`)."""

    @property
    def _in_place(self) -> bool:
        """Whether the files go where the layout's own readers look, which is not where this library's tags lie."""
        return bool(self.first_marker) and self.store.object_store is not None

    def check_free(self, source: Store, tag: str) -> None:
        """Refuse to replace a tag: the one that is read, or another.

        Raises:
            UsageError: It would; or the tag would have parity where no repair finds it.
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
        """Write it: all files, then the manifest, then the marks, then the commit.

        Raises:
            CorruptCheckpointError: The old tag is damaged. Nothing was written.
            UsageError: Something has its name, and the storage cannot replace it.
            OSError: The storage refused.
        """
        objects = stored.objects()  # one that is not trusted is found out before anything is written
        files = [file for of_rank in conversion.files for file in of_rank]
        old, marks = stored.manifest, dict(conversion.marks)
        root = open_root(self.store)
        with Transaction(
            root, self.tag, TransactionKind.CHECKPOINT if self._in_place else TransactionKind.TAG
        ) as transaction:
            if self._in_place:
                # If this process is killed, the layout's own library sees that the tag was never complete.
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
            # One that lies in place is no commit of its root, and has no number there.
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
