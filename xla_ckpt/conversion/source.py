"""Source of a conversion: a checkpoint of any layout, opened without a job.

`ProgramInfo` contains information about a checkpoint of another library that its files do not contain.
The checks refuse sources that a conversion or an export cannot use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from xla_ckpt.conversion.llama.job import LlamaModelInfo
from xla_ckpt.conversion.llama.manifest import check_shapes
from xla_ckpt.conversion.llama.names import build_llama_hints
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.plan.manifest_views import (
    exclude_rank_numbers,
    extract_module,
    find_model_copies,
    find_top_modules,
    has_master_weights,
    use_master_weights,
)
from xla_ckpt.core.sharding.sharding import ParsedRules
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.skeleton import find_arrays, find_objects, get_part
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UsageError, annotate_errors
from xla_ckpt.formats.tags import find_foreign_tag, list_tag_names, open_tag
from xla_ckpt.inspection.tags import choose_tag, locate_checkpoint
from xla_ckpt.keywords import suggest_leaf
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.logs import get_logger
from xla_ckpt.state.part_load import find_pickled_model
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.resolve import PathLike, open_store

logger = get_logger(__name__)


def resolve_source(path: PathLike, tag: str | None) -> tuple[Store, str]:
    """Return the root directory and name of a tag, or of a directory that is itself the path (see `locate_checkpoint`).

    Raises:
        NoCheckpointError: `tag` is None, and the root contains no tag.
    """
    store, tag = locate_checkpoint(path, tag)
    return store, choose_tag(store, tag)


@contextmanager
def suggest_other_tags(store: Store, tag: str, named: str | None) -> Iterator[None]:
    """Add a hint to errors about a corrupt tag that there are other tags, if the newest was selected by default."""
    try:
        yield
    except CorruptCheckpointError as error:
        with suppress(CheckpointError):  # this only adds a hint
            if named is None and error.tag == tag and len(list_tag_names(store)) > 1:
                other = "It is the newest tag; another one may be whole: name it with tag= (--tag)."
                error.hint = f"{error.hint or ''} {other}".lstrip()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramInfo:
    """Information about a tag of another library that its files do not contain."""

    rules: ParsedRules = ()
    model: Any = None
    optimizer: Any = None
    llama: LlamaModelInfo | None = None
    """Content of the config.json of a Llama-like model. It is compared with the shapes of the stored arrays."""

    def collect_hints(self, part: str) -> LoadHints:
        """Return hints for readers of tags of other libraries. `part` is the leaf path of the requested state."""
        from xla_ckpt.state.objects import get_program_hints
        from xla_ckpt.state.shardings import StateShardings
        from xla_ckpt.state.wrappers import unwrap_model, unwrap_optimizer

        model, optimizer = unwrap_model(self.model, loading=True), unwrap_optimizer(self.optimizer)
        if optimizer is None and schema.get_member(part) in (paths.ROOT, schema.OPTIMIZER):
            optimizer = {}  # all optimizer state, for any optimizer
        hints = get_program_hints(model, optimizer, StateShardings(rules=self.rules))
        if self.llama is None:
            return hints
        # Attributes of the program's own arrays override the configuration.
        return replace(hints, arrays={**build_llama_hints(self.llama.config), **hints.arrays})


def open_source(
    store: Store,
    tag: str,
    program: ProgramInfo,
    *,
    part: str = paths.ROOT,
    as_stored: bool = False,
    masters: bool = False,
) -> TagReader:
    """Return a reader of a tag of any layout.

    Args:
        store: Root directory.
        tag: Tag to open.
        program: Information of the caller about the tag.
        part: Leaf path of the requested state: a tag can be valid without its optimizer.
        as_stored: See `open_tag`.
        masters: True to replace weights with master weights, as a load does, if the model has their dtype.

    Raises:
        NoCheckpointError: The tag does not exist.
        CheckpointError: The tag is corrupt, or model, optimizer, rules or configuration contradict it.
    """
    foreign = find_foreign_tag(store, tag)
    hints = program.collect_hints(part) if foreign is not None and foreign[0].asks else None
    reader = open_tag(store, tag, hints, as_stored=as_stored)
    try:
        with annotate_errors(path=reader.root, tag=reader.tag):
            if hints is not None and not as_stored:
                hints.check_attributes(reader.manifest)
            if program.llama is not None:
                check_shapes(reader.manifest, program.llama.config)
        if masters and program.model is not None and has_master_weights(reader.manifest):
            reader = reader.with_manifest(use_master_weights(reader.manifest, hints or program.collect_hints(part)))
        return reader
    except BaseException:
        reader.close()  # the caller never gets this reader
        raise


def warn_divergent(reader: TagReader) -> None:
    """Log the arrays of a tag that were stored from replicas that differed."""
    divergence = reader.describe_divergence()
    if divergence is not None:
        logger.warning("tag %s: %s", reader.tag, divergence)


def remove_rank_numbers(reader: TagReader) -> TagReader:
    """Return the reader without values that describe single ranks of the saving job, which the new tag cannot use."""
    manifest, numbers = exclude_rank_numbers(reader.manifest)
    if numbers:
        logger.warning(
            "tag %s: left out, because they say something of each rank of the job that saved: %s. A load of ours does "
            "not ask for them; that of another library may, unless it can be told to load only what fits",
            reader.tag,
            paths.format_leaves(numbers),
        )
    return reader.with_manifest(manifest)


def narrow_to_part(reader: TagReader, part: str) -> tuple[TagReader, str]:
    """Return the reader and the leaf path of a part; for a module of the model, a reader whose model is that module.

    Raises:
        UsageError: The model does not contain the module.
        IncompatibleCheckpointError: The sharding of an array in the module is unknown.
    """
    copies = find_model_copies(reader.manifest) if part == schema.MODEL else []
    if copies:
        logger.warning(
            "tag %s: the model is several modules with the same arrays, and all of them are written: %s. "
            "Give one of them as part= (--part) for it alone",
            reader.tag,
            paths.format_leaves(copies),
        )
    if part == schema.MODEL or not paths.is_under(part, schema.MODEL):
        return reader, part
    if (module := extract_module(reader.manifest, part)) is not None:
        return reader.with_manifest(module), schema.MODEL
    try:
        get_part(reader.manifest.skeleton, part)
    except KeyError:
        problem = f"the checkpoint has no such part{suggest_leaf(part, [*find_top_modules(reader.manifest)])}"
        raise UsageError(problem, leaf=part) from None
    return reader, part


def check_whole_model(reader: TagReader) -> None:
    """Refuse a tag that contains only adapters if a full model is needed: other programs would read it as a full model.

    Raises:
        UsageError: The tag does not contain its base model.
    """
    skeleton = reader.manifest.skeleton
    if schema.is_without_base(skeleton) or schema.has_only_adapters(skeleton):
        # Without a record, adapters are detected by their names: PEFT directories, and LoraModel.
        is_part = schema.is_without_base(skeleton)
        raise UsageError(
            f"the tag has {'a part' if is_part else 'adapters'} of its model alone"
            f"{' (only=)' if is_part else ''}, which no reader would take for a model",
            leaf=schema.BASE if is_part else schema.MODEL,
            hint="convert(..., to='peft') (xla-ckpt convert --to peft) writes adapters as PEFT has them, where their "
            "configuration is stored. Else load the base and this tag into the model, and save all of it.",
        )


def check_file(reader: TagReader) -> None:
    """Refuse a file with the state of one rank, and a file whose model is a pickled module.

    Raises:
        UsageError: The file is one of these.
    """
    if reader.is_rank_part:
        raise UsageError(
            "the file has what one rank had, and without the parts of the others it is no whole state",
            hint=reader.mismatch_hint,
        )
    model = find_pickled_model(reader.manifest.skeleton)
    if reader.foreign_objects is not None and model is not None:
        raise UsageError(
            reader.foreign_objects[model["$object"]].problem,
            leaf=schema.MODEL,
            expected="the state_dict() of a module",
            hint="If it is a module, load it in a program that has its class, and save its state: "
            "torch.save(torch.load(file, weights_only=False).state_dict(), 'state.pt').",
        )


def check_split(reader: TagReader, part: str) -> None:
    """Check that the sharding of every array in a part of the state is known.

    Raises:
        IncompatibleCheckpointError: The sharding of an array is unknown.
    """
    for leaf in find_arrays(reader.manifest.skeleton, paths.ROOT):
        if paths.is_under(leaf, part):
            reader.manifest.find_array(leaf)  # raises if the sharding is unknown


@dataclass(frozen=True, slots=True)
class SourceState:
    """Open tag as the source of a conversion (`xla_ckpt.formats.base.StoredState`)."""

    reader: TagReader
    trust: bool
    """True to load pickled objects that must be written again."""

    part: str = paths.ROOT
    """Leaf path of the state to convert."""

    @property
    def manifest(self) -> Manifest:
        """Manifest of the stored state."""
        return self.reader.manifest

    def beside(self, name: str, limit: int) -> bytes | None:
        root = open_store(self.reader.root)
        return root.read_start(name, limit) if root.has(name) else None

    def tree(self, part: str, array: Callable[[str, str], Any]) -> Any:
        from xla_ckpt.core.tree.flatten import Unflattener
        from xla_ckpt.state.values import CODEC, create_class_resolver

        return Unflattener(
            get_array=array,
            codec=CODEC,
            get_object=partial(self.reader.load_object, trust=self.trust),
            resolve_class=create_class_resolver(self.trust),
            module_metadata=self.manifest.module_metadata,
        ).build(get_part(self.manifest.skeleton, part), part)

    def objects(self) -> list[bytes]:
        """Return the pickled objects, in the order of their numbers.

        Raises:
            UntrustedObjectError: Another library pickled them, and they are not trusted.
        """
        from xla_ckpt import pickled_objects

        if self.reader.foreign_objects is None:
            return [self.reader.read_pickle(i) for i in range(len(self.manifest.object_files))]
        leaves = find_objects(self.manifest.skeleton)
        return [
            pickled_objects.dump(self.reader.load_object(i, leaves[i], trust=self.trust), leaves[i])
            for i in sorted(leaves)
        ]
