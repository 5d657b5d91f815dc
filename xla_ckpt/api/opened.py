"""A tag, opened without a job: for looking at it, and for writing it anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from xla_ckpt.api.llama import KnownModel
from xla_ckpt.api.tags import chosen_tag, located
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UsageError, naming
from xla_ckpt.keywords import nearest
from xla_ckpt.layouts.listing import find_foreign, tag_names
from xla_ckpt.layouts.llama_manifest import check_shapes
from xla_ckpt.layouts.llama_names import llama_hints
from xla_ckpt.layouts.opening import open_tag
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.hints import Hints
from xla_ckpt.plan.masters import stores_masters, with_masters
from xla_ckpt.plan.modules import copies_of_model, module_alone, top_modules
from xla_ckpt.plan.rank_numbers import without_numbers
from xla_ckpt.sharding.rules import Parsed
from xla_ckpt.state.loading import pickled_model
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import PathLike, store_at
from xla_ckpt.tree import lora, schema
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.skeleton import array_paths, objects_in, part_at

logger = get_logger(__name__)


def source_of(path: PathLike, tag: str | None) -> tuple[Store, str]:
    """Where a tag lies and its name; or a directory that a path names itself (see `located`).

    Raises:
        NoCheckpointError: `tag` is None, and there is none.
    """
    store, tag = located(path, tag)
    return store, chosen_tag(store, tag)


@contextmanager
def naming_other_tags(store: Store, tag: str, named: str | None) -> Iterator[None]:
    """Say in an error about a damaged tag that there are others, if the newest was taken and nobody named it."""
    try:
        yield
    except CorruptCheckpointError as error:
        with suppress(CheckpointError):  # it is only for a hint
            if named is None and error.tag == tag and len(tag_names(store)) > 1:
                other = "It is the newest tag; another one may be whole: name it with tag= (--tag)."
                error.hint = f"{error.hint or ''} {other}".lstrip()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What a caller knows of a tag, where another library wrote it and its files do not say everything."""

    rules: Parsed = ()
    model: Any = None
    optimizer: Any = None
    known: KnownModel | None = None
    """What a config.json says of a Llama-like model. It is compared with the shapes of what is stored."""

    def hints(self, part: str) -> Hints:
        """What readers of such tags take. `part` is the leaf path of what is wanted."""
        from xla_ckpt.state.program_hints import hints_of
        from xla_ckpt.state.shardings import StateShardings
        from xla_ckpt.state.wrappers import unwrapped_model, unwrapped_optimizer

        model, optimizer = unwrapped_model(self.model, loading=True), unwrapped_optimizer(self.optimizer)
        if optimizer is None and schema.member_of(part) in (paths.ROOT, schema.OPTIMIZER):
            optimizer = {}  # all of it, whoever it is for
        hints = hints_of(model, optimizer, StateShardings(rules=self.rules))
        if self.known is None:
            return hints
        # What a program says of an array itself counts more.
        return replace(hints, arrays={**llama_hints(self.known.config), **hints.arrays})


def opened(
    store: Store, tag: str, about: Knowledge, *, part: str = paths.ROOT, as_stored: bool = False, masters: bool = False
) -> TagReader:
    """A reader of a tag of any layout.

    Args:
        store: The root directory.
        tag: Which tag.
        about: What the caller knows of it.
        part: The leaf path of what is wanted of it: without its optimizer a tag may be sound.
        as_stored: See `open_tag`.
        masters: Whether master weights stand for weights, as in a load, where the model is of their type.

    Raises:
        NoCheckpointError: There is no such tag.
        CheckpointError: It is damaged, or model, optimizer, rules or configuration contradict it.
    """
    foreign = find_foreign(store, tag)
    hints = about.hints(part) if foreign is not None and foreign[0].asks else None
    reader = open_tag(store, tag, hints, as_stored=as_stored)
    try:
        with naming(path=reader.root, tag=reader.tag):
            if hints is not None and not as_stored:
                hints.check_attributes(reader.manifest)
            if about.known is not None:
                check_shapes(reader.manifest, about.known.config)
        if masters and about.model is not None and stores_masters(reader.manifest):
            reader = reader.with_manifest(with_masters(reader.manifest, hints or about.hints(part)))
        return reader
    except BaseException:
        reader.close()  # nobody else will
        raise


def tell_divergent(reader: TagReader) -> None:
    """Log which arrays of a tag were stored from replicas that differed."""
    divergence = reader.divergence()
    if divergence is not None:
        logger.warning("tag %s: %s", reader.tag, divergence)


def without_rank_numbers(reader: TagReader) -> TagReader:
    """The reader less what says something of each rank that saved: the new tag is for other ranks, or for none."""
    manifest, numbers = without_numbers(reader.manifest)
    if numbers:
        logger.warning(
            "tag %s: left out, because they say something of each rank of the job that saved: %s. A load of ours does "
            "not ask for them; that of another library may, unless it can be told to load only what fits",
            reader.tag,
            paths.listed(numbers),
        )
    return reader.with_manifest(manifest)


def narrowed(reader: TagReader, part: str) -> tuple[TagReader, str]:
    """The reader, and the leaf path of a part in it; of a module of the model, a reader whose model is that module.

    Raises:
        UsageError: The model has no such module.
        IncompatibleCheckpointError: Nothing says how an array of the module was split.
    """
    copies = copies_of_model(reader.manifest) if part == schema.MODEL else []
    if copies:
        logger.warning(
            "tag %s: the model is several modules with the same arrays, and all of them are written: %s. "
            "Give one of them as part= (--part) for it alone",
            reader.tag,
            paths.listed(copies),
        )
    if part == schema.MODEL or not paths.is_under(part, schema.MODEL):
        return reader, part
    if (module := module_alone(reader.manifest, part)) is not None:
        return reader.with_manifest(module), schema.MODEL
    try:
        part_at(reader.manifest.skeleton, part)
    except KeyError:
        problem = f"the checkpoint has no such part{nearest(part, [*top_modules(reader.manifest)])}"
        raise UsageError(problem, leaf=part) from None
    return reader, part


def check_whole_model(reader: TagReader) -> None:
    """Refuse a tag of adapters alone where a whole model is wanted: other programs would read it as one.

    Raises:
        UsageError: The tag has no base.
    """
    skeleton = reader.manifest.skeleton
    if schema.is_without_base(skeleton) or lora.has_adapters_alone(skeleton):
        said = schema.is_without_base(skeleton)  # else it is seen in the names: of PEFT's directories, and of LoraModel
        raise UsageError(
            f"the tag has {'a part' if said else 'adapters'} of its model alone{' (only=)' if said else ''}, which no "
            "reader would take for a model",
            leaf=schema.BASE if said else schema.MODEL,
            hint="convert(..., to='peft') (xla-ckpt convert --to peft) writes adapters as PEFT has them, where their "
            "configuration is stored. Else load the base and this tag into the model, and save all of it.",
        )


def check_file(reader: TagReader) -> None:
    """Refuse a file with the part of one rank, and one whose model is an object: a module that torch.save was given.

    Raises:
        UsageError: It is.
    """
    if reader.is_part:
        raise UsageError(
            "the file has what one rank had, and without the parts of the others it is no whole state",
            hint=reader.misfit,
        )
    model = pickled_model(reader.manifest.skeleton)
    if reader.foreign_objects is not None and model is not None:
        raise UsageError(
            reader.foreign_objects[model["$object"]].problem,
            leaf=schema.MODEL,
            expected="the state_dict() of a module",
            hint="If it is a module, load it in a program that has its class, and save its state: "
            "torch.save(torch.load(file, weights_only=False).state_dict(), 'state.pt').",
        )


def check_split(reader: TagReader, part: str) -> None:
    """Check that of every array in a part of the state it is known how it was split.

    Raises:
        IncompatibleCheckpointError: Nothing says so of one of them.
    """
    for leaf in array_paths(reader.manifest.skeleton, paths.ROOT):
        if paths.is_under(leaf, part):
            reader.manifest.array(leaf)  # this raises


@dataclass(frozen=True, slots=True)
class OpenState:
    """An open tag, as a conversion reads it (`xla_ckpt.layouts.base.StoredState`)."""

    reader: TagReader
    trust: bool
    """Whether pickled objects are loaded where they have to be written anew."""

    part: str = paths.ROOT
    """Leaf path of what is wanted of it."""

    @property
    def manifest(self) -> Manifest:
        """What is stored."""
        return self.reader.manifest

    def beside(self, name: str, limit: int) -> bytes | None:
        root = store_at(self.reader.root)
        return root.start_of(name, limit) if root.has(name) else None

    def tree(self, part: str, array: Callable[[str, str], Any]) -> Any:
        from xla_ckpt.state.values import CODEC, resolver
        from xla_ckpt.tree.unflatten import Unflattener

        return Unflattener(
            array=array,
            codec=CODEC,
            object=partial(self.reader.object, trust=self.trust),
            resolve=resolver(self.trust),
            module_metadata=self.manifest.module_metadata,
        ).build(part_at(self.manifest.skeleton, part), part)

    def objects(self) -> list[bytes]:
        """The pickled objects, in the order of their numbers.

        Raises:
            UntrustedObjectError: Another library pickled them, and they are not trusted.
        """
        from xla_ckpt.engine import pickles

        if self.reader.foreign_objects is None:
            return [self.reader.pickled(i) for i in range(len(self.manifest.objects))]
        leaves = objects_in(self.manifest.skeleton)
        return [pickles.dump(self.reader.object(i, leaves[i], trust=self.trust), leaves[i]) for i in sorted(leaves)]
