"""Converting: a tag of any layout and topology into one of any other, without a job and within bounded memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from xla_ckpt.api.export import check_new_directory, check_no_file, with_config, with_files, write_directory, write_file
from xla_ckpt.api.llama import (
    LlamaJob,
    as_job_has_it,
    described_model,
    job_of,
    name_as_hugging_face,
    name_as_told,
    new_form,
)
from xla_ckpt.api.new_tag import NewTag
from xla_ckpt.api.opened import (
    Knowledge,
    OpenState,
    check_file,
    check_split,
    check_whole_model,
    naming_other_tags,
    narrowed,
    opened,
    tell_divergent,
    without_rank_numbers,
)
from xla_ckpt.api.tags import chosen_tag, located
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.progress import Progress
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError, IncompatibleCheckpointError, UsageError, naming, storage_errors
from xla_ckpt.extras import naming_extras
from xla_ckpt.keywords import taking_values
from xla_ckpt.layouts.base import Layout, ModelNames, Topology
from xla_ckpt.layouts.listing import find_foreign
from xla_ckpt.layouts.registry import layout_named
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.options import ConvertOptions, chosen
from xla_ckpt.plan.parity import Parity
from xla_ckpt.plan.stored_shardings import parameters_in
from xla_ckpt.sharding.mesh import Mesh, as_mesh
from xla_ckpt.sharding.rules import Rules, idle, parse_rules
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import PathLike, full_path, store_at
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.skeleton import array_paths, children, part_at

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


@taking_values(options=ConvertOptions, llama=LlamaJob)
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
    shardings: Rules | None = None,
    pipeline_cuts: Sequence[str] = (),
    zero1: bool | None = None,
    parity: Parity | None = None,
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
    began, options, job = time.monotonic(), chosen(ConvertOptions, options), job_of(llama)
    layout = layout_named(to)
    _check_fit_layout(layout, part, parity)
    store, named = located(source, tag)
    tag = chosen_tag(store, named)
    known, config = described_model(store, tag, job, needed=layout.model_names is ModelNames.FUSED)
    topology = Topology(
        mesh=as_mesh(mesh) or Mesh(),
        rules=parse_rules(shardings),
        pipeline_cuts=pipeline_cuts,
        zero1=zero1,
        config=config or {},
    )
    form = new_form(store, tag, layout, known, job)
    called = _tag_of(store, tag) if as_tag is None else as_tag
    wanted = layout.holds if part is None else part
    if layout.one_file:
        check_no_file(destination)
    elif not layout.tagged:
        check_new_directory(destination)
    about = Knowledge(rules=topology.rules, model=model, optimizer=optimizer, known=known)
    with (
        naming_other_tags(store, tag, named),
        opened(store, tag, about, part=wanted, masters=not layout.keeps_masters) as old_tag,
    ):
        if layout.tagged:
            target = NewTag(store_at(destination), called, topology.mesh, parity, next(iter(layout.marks), ""))
            target.check_free(store, tag)
            layout.check_findable(target.store, called)
        # An error names the tag that is read. Only an error of the storage names the tag that is written.
        with (
            naming(path=store.path, tag=tag),
            storage_errors("converting", path=full_path(destination), tag=called),
            naming_extras(f"a conversion to the layout {layout.name}"),
        ):
            check_file(old_tag)
            reader, wanted = narrowed(without_rank_numbers(old_tag), wanted)
            to_hf = layout.model_names in (ModelNames.HUGGING_FACE, ModelNames.RULES)
            if to_hf:
                check_split(reader, schema.MODEL)
                check_whole_model(reader)
            else:
                _check_arrays(reader, topology, wanted)
                _tell_numbers(reader, wanted)
            tell_divergent(reader)
            _tell_left_out(reader)
            beside: Mapping[str, bytes] = {}
            if to_hf:
                reader, beside = name_as_told(store, reader)
                if known is not None:
                    reader = name_as_hugging_face(reader, schema.MODEL, known, options)
            elif known is not None:
                reader, topology = as_job_has_it(reader, topology, known, form)
            reader, wanted = layout.source(reader, wanted, topology)
            stored = OpenState(reader, trust=trust_pickle, part=wanted)
            rewriting = with_files(layout.rewriting(stored, topology), beside)
            if layout.model_names is ModelNames.HUGGING_FACE:
                rewriting = with_config(rewriting, reader, config)
            with Progress(f"convert {tag}", rewriting.nbytes, options.progress) as bar:
                crew = Crew(workers=options.num_workers, progress=bar)
                if layout.tagged:
                    target.write(stored, rewriting, crew, max_memory=options.max_memory)
                else:
                    write = write_file if layout.one_file else write_directory
                    write(reader, destination, rewriting, crew, max_memory=options.max_memory)
    return ConvertReport(
        path=full_path(destination),
        tag=called,
        layout=layout.name,
        mesh=str(topology.mesh),
        files=sum(map(len, rewriting.files)),
        nbytes=rewriting.nbytes,
        seconds=time.monotonic() - began,
    )


def _check_fit_layout(layout: Layout, part: str | None, parity: Parity | None) -> None:
    """Refuse arguments that the layout has no use for."""
    if part is not None and not layout.one_file:
        raise UsageError(
            f"part= (--part) is for a single file, and the layout {layout.name} is none",
            found=repr(part),
            hint="xla_ckpt.export_hf(part=...) (xla-ckpt export --part) writes a part as safetensors.",
        )
    if parity is not None and (parity not in get_args(Parity) or not layout.tagged):
        raise UsageError(
            "parity= (--parity) is for a layout with tags",
            expected=" or ".join(map(repr, get_args(Parity))),
            found=f"{parity!r} for {layout.name}",
        )


def _tag_of(store: Store, tag: str) -> str:
    """The name of a tag that is made of another one, or of a file."""
    foreign = find_foreign(store, tag)
    return tag if foreign is None else foreign[0].tag_of(foreign[1])


def _check_arrays(reader: TagReader, to: Topology, part: str) -> None:
    """Check that everything that will be written is stored, and that it is known how it was split.

    Raises:
        UsageError: There is no such part.
        CheckpointError: Something is not stored, or not known.
    """
    try:
        content = part_at(reader.manifest.skeleton, part)
    except KeyError:
        parts = ", ".join(list(children(reader.manifest.skeleton) or ())[:8]) or "nothing"
        raise UsageError("the checkpoint has no such part", expected=f"one of {parts}", found=part) from None
    leaves = array_paths(content, part)
    if reader.foreign_objects is not None:
        _check_names(reader.manifest, array_paths(reader.manifest.skeleton, paths.ROOT))
    for path in leaves:
        if reader.manifest.array(path) is None:
            raise CheckpointError("the skeleton names an array that is not stored", leaf=path)
    for message in idle(to.rules, leaves):
        logger.warning("%s", message)


def _tell_left_out(reader: TagReader) -> None:
    """Log what the new tag will lack, because the old one names it and does not hold it."""
    leaves = reader.manifest.left_out
    if leaves:
        logger.warning(
            "tag %s has no bytes of %s: whoever saved it left them out (avoid_saving_lower_precision_weights). The new "
            "tag lacks them, and a strict load refuses it",
            reader.tag,
            paths.listed(leaves),
        )


def _tell_numbers(reader: TagReader, part: str) -> None:
    """Log that the optimizer's parameters stay numbers, where the model is there that they belong to."""
    members = children(reader.manifest.skeleton) or {}
    names = parameters_in(reader.manifest) or frozenset()
    if schema.MODEL in members and paths.is_under(schema.OPTIMIZER, part) and any(map(paths.is_of_other, names)):
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
    owners = {leaf: schema.parameter_of(leaf) for leaf in leaves} if old.tp * old.ep > 1 else {}
    named = parameters_in(manifest)
    if named is not None:  # state that belongs to no parameter is the same on all ranks
        shared = {leaf for leaf in owners if (owner := schema.owner_of(leaf)) is not None and owner not in named}
        owners = {leaf: owner for leaf, owner in owners.items() if leaf not in shared}
    leaf = next((leaf for leaf, owner in owners.items() if owner is not None and owner not in owners), None)
    if leaf is not None:
        raise IncompatibleCheckpointError(
            "the stored optimizer numbers its parameters: it cannot be told how its states were split over the ranks",
            leaf=leaf,
            hint="Give the model and its optimizer: model= and optimizer= (--like). For the weights alone, convert the "
            "directory that xla_ckpt.export_hf (xla-ckpt export) writes of this tag.",
        )
