"""The layouts that there are, and the tags of all of them in a root directory.

A tag with a manifest of ours is opened by it, in whatever layout its files are. Any other tag is one that a layout's
own tools wrote, and that layout opens it.
"""

from __future__ import annotations

import datetime
import logging
import reprlib
from collections.abc import Sequence
from typing import TypeVar

from xla_ckpt.engine.repair import repair_tag
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.verify import VerifyReport, verify_tag
from xla_ckpt.errors import (
    ChangedTagError,
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    UsageError,
    naming,
    storage_errors,
)
from xla_ckpt.extras import naming_extras
from xla_ckpt.keywords import meant
from xla_ckpt.layouts.base import HuggingFaceModel, Layout
from xla_ckpt.layouts.dcp.layout import TORCHTITAN, Dcp
from xla_ckpt.layouts.hugging_face import HuggingFace
from xla_ckpt.layouts.native import Native
from xla_ckpt.layouts.nxd.layout import NeuronxDistributed
from xla_ckpt.layouts.one_file.layout import OneFile
from xla_ckpt.layouts.optimum.layout import OptimumNeuron
from xla_ckpt.layouts.orbax.layout import Orbax, OrbaxModel
from xla_ckpt.layouts.peft import Peft
from xla_ckpt.layouts.smp.layout import SageMaker
from xla_ckpt.layouts.torch_checkpointing.layout import TorchCheckpointing
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage import door
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tags.entry import MANIFEST, TagEntry
from xla_ckpt.tags.listing import names_in
from xla_ckpt.tags.missing import MAX_LOOKED_INTO, no_such_tag
from xla_ckpt.tags.names import is_tag_name
from xla_ckpt.tags.root import Root
from xla_ckpt.tags.roots import root_of

logger = logging.getLogger(__name__)

L = TypeVar("L", bound=Layout)

NATIVE = Native()

_layouts: list[Layout] = [
    NATIVE,
    Dcp("dcp", finds=True),
    Dcp(TORCHTITAN, finds=False),
    OptimumNeuron(),  # before neuronx-distributed's, which would find the rank files in its tags, too
    NeuronxDistributed("xser", finds=True),
    NeuronxDistributed("pt", finds=False, other_names=("nxd",)),
    SageMaker(),  # before single files: one of its directories, or sets, may have the name of one
    OrbaxModel(),  # before orbax's: what it writes are orbax's files, too
    Orbax("orbax"),
    Orbax("orbax-manager", item="default"),  # the items that orbax's own managers look for, unless a program names one
    Orbax("orbax-v1", item="state"),
    TorchCheckpointing(),
    HuggingFace(),
    Peft(),
    OneFile(),
]
"""One object for each layout. To add one is a line here, or a call of `register`."""


def register_layout(layout: L) -> L:
    """Add a layout; from now on it is found, opened, written and converted like the others.

    Raises:
        UsageError: There is a layout of that name, or this is no layout.
    """
    if not isinstance(getattr(layout, "name", None), str):
        hint = "Derive a class from xla_ckpt.Layout, and pass an object of it (docs/adding-a-layout.md)."
        raise UsageError("layout is none", expected="an object with a name", found=reprlib.repr(layout), hint=hint)
    taken = {name for known in _layouts for name in (known.name, *known.other_names)}
    if not layout.name or taken & {layout.name, *layout.other_names}:
        raise UsageError(
            "a layout needs a name of its own", expected=f"none of {', '.join(sorted(taken))}", found=layout.name
        )
    _layouts.append(layout)
    return layout


def remove_layout(layout: Layout) -> None:
    """Undo `register`."""
    _layouts.remove(layout)


def saved() -> tuple[str, ...]:
    """Names of the layouts that a job can save in."""
    return tuple(layout.name for layout in _layouts if layout.saves)


def converted() -> tuple[str, ...]:
    """Names of the layouts that a conversion makes, other names included."""
    return tuple(name for layout in _layouts if layout.converts for name in (layout.name, *layout.other_names))


def layout_named(name: str, *, among: Sequence[str] | None = None) -> Layout:
    """The layout that callers call so; `among` are those that will do.

    Raises:
        UsageError: There is none.
    """
    known = converted() if among is None else among
    if name in known:
        return next(layout for layout in _layouts if name in (layout.name, *layout.other_names))
    if any(name == layout.name and not layout.saves for layout in _layouts):
        raise UsageError(
            "no save writes this layout",
            expected=f"one of {', '.join(known)}",
            found=repr(name),
            hint=f"Save in one of these, and convert the tag: xla_ckpt.convert(..., to={name!r}).",
        )
    raise UsageError(
        f"there is no such layout{meant(name, known)}", expected=f"one of {', '.join(known)}", found=repr(name)
    )


def layout_of(manifest: Manifest) -> Layout:
    """The layout in which a tag of ours was written."""
    return next((layout for layout in _layouts if layout is not NATIVE and layout.wrote(manifest)), NATIVE)


def all_tags(store: Store) -> list[tuple[Layout | None, TagEntry]]:
    """All complete tags, oldest first, with the layout that opens each: None for tags of ours, which have a manifest.

    Those without a commit number come first: ours continue them.

    Raises:
        StorageError: The directory cannot be read.
    """
    root = root_of(store)
    ours = root.entries()
    known = {e.tag for e in ours}
    names = [name for name in names_in(store) if name not in known and _may_be_foreign(root, name)]
    foreign: list[tuple[float, Layout, TagEntry]] = []
    for layout in _layouts if names else ():
        latest = 0.0
        for entry in layout.tags(store, names):
            # A tag of ours that was just being replaced, in this layout, has its manifest again.
            if entry.tag not in known and not root.is_ours(entry.tag):
                known.add(entry.tag)
                # Those of one layout keep its own order, which need not be that of the time stamps.
                latest = max(latest, _time(entry) if entry.created else 0.0)
                foreign.append((latest, layout, entry))
    foreign.sort(key=lambda of_tag: of_tag[0])
    return [*((layout, entry) for _, layout, entry in foreign), *((None, entry) for entry in ours)]


def tag_names(store: Store) -> list[str]:
    """Names of all complete tags, oldest first.

    Raises:
        StorageError: The directory cannot be read.
    """
    return [entry.tag for _, entry in all_tags(store)]


def passed_over(tags: Sequence[tuple[Layout | None, TagEntry]]) -> tuple[str, str] | None:
    """(who wrote it, tag) of a foreign tag that seems to be newer than our newest one, before which it is listed."""
    ours = [entry for layout, entry in tags if layout is None]
    foreign = [(layout.origin, entry) for layout, entry in tags if layout is not None and entry.created]
    if not ours or not foreign or not ours[-1].created:
        return None
    origin, newest = max(foreign, key=lambda pair: _time(pair[1]))
    return (origin, newest.tag) if _time(newest) > _time(ours[-1]) else None


def _time(entry: TagEntry) -> float:
    return datetime.datetime.fromisoformat(entry.created).timestamp()


def find_foreign(store: Store, tag: str) -> tuple[Layout, TagEntry] | None:
    """A tag that another library wrote, or that is its own, complete or not, and its layout; None if there is none."""
    root = root_of(store)
    if _may_be_foreign(root, tag):
        for layout in _layouts:
            with storage_errors("looking for a tag", path=store.path, tag=tag):
                entry = layout.find(store, tag)
            if entry is not None:
                # A tag of ours that was just being replaced, in this layout, has its manifest again.
                return None if root.is_ours(tag) else (layout, entry)
    return None


def _has_manifest(store: Store, entry: TagEntry) -> bool:
    """Whether what lies there as another library's tag has a manifest of ours: a conversion has put it into an object
    store in that library's place, or somebody has copied it there. It is opened by it, and is that library's all the
    same: no retention counts it.
    """
    return entry.complete and store.has(f"{entry.directory}/{MANIFEST}")


def _may_be_foreign(root: Root, name: str) -> bool:
    """Whether what has this name may be a tag that another library wrote."""
    return is_tag_name(name) and not root.knows(name)


def open_tag(store: Store, tag: str, hints: Hints | None = None, *, as_stored: bool = False) -> TagReader:
    """A reader of a tag of any layout.

    Args:
        store: The root directory.
        tag: Which tag.
        hints: What the files of some layouts do not say.
        as_stored: Whether a tag of ours is read in the form that its files have, and not in that of what was saved.

    Raises:
        NoCheckpointError: There is no such tag; the hint names those that are there, whoever wrote them.
        CheckpointError: It is damaged, or the hints contradict it.
    """
    foreign = find_foreign(store, tag)
    has_manifest = foreign is not None and _has_manifest(store, foreign[1])
    if foreign is not None and not has_manifest:
        layout, entry = foreign
        _tell_beside(store, tag, [other for other in _layouts if other is not layout])
        with naming(path=store.path, tag=tag), naming_extras(f"a tag of {layout.origin or layout.name}'s"):
            return layout.open(store, entry, Hints() if hints is None else hints)
    try:
        directory = store.open(tag) if has_manifest else root_of(store).open(tag)
    except NoCheckpointError as error:
        raise _better(error, store) from None
    try:
        reader = TagReader(directory, store.path, tag)
    except ChangedTagError:
        if store.object_store is None:
            raise
        # A newer version may have replaced it since the look.
        if root_of(now := store.look()).place_of(tag) == directory.name:
            raise CorruptCheckpointError("the tag has no files", path=store.path, tag=tag) from None
        return open_tag(now, tag, hints, as_stored=as_stored)
    layout = layout_of(reader.manifest)
    try:
        if store.file_system is not None or has_manifest:  # else nobody else's files get into its directory
            reader.advice = " ".join(filter(None, (reader.advice, layout.saved_over(store, tag))))
            _tell_beside(store, tag, [other for other in _layouts if other.marks - layout.marks])
        layout.check(reader)
        with naming(path=store.path, tag=tag):
            return reader if as_stored else layout.as_saved(reader)
    except BaseException:
        reader.close()  # nobody else will
        raise


def _tell_beside(store: Store, tag: str, others: Sequence[Layout]) -> None:
    for other in others:
        if beside := other.beside(store, tag):
            logger.warning("%s/%s is read. Beside it lie %s", store.path, tag, beside)


def as_hugging_face(store: Store, reader: TagReader) -> HuggingFaceModel | None:
    """The model of an open tag as Hugging Face has it; None if the tag does not say itself how that is.

    Raises:
        CheckpointError: It says it, and it does not fit.
    """
    foreign = find_foreign(store, reader.tag)
    return None if foreign is None else foreign[0].as_hugging_face(store, foreign[1], reader)


def verify_stored(store: Store, tag: str, workers: int = READERS) -> VerifyReport:
    """Read all of a tag (see `xla_ckpt.verify`)."""
    foreign = find_foreign(store, tag)
    if foreign is not None and not _has_manifest(store, foreign[1]):
        layout, entry = foreign
        with naming(path=store.path, tag=tag), naming_extras(f"a tag of {layout.origin or layout.name}'s"):
            return layout.verify(store, entry, workers)
    try:
        with open_tag(store, tag, as_stored=True) as reader:
            return verify_tag(reader, marks=layout_of(reader.manifest).marks, workers=workers)
    except CorruptCheckpointError as error:
        return VerifyReport(path=store.path, tag=tag, problems=[error])


def repair_stored(store: Store, tag: str, workers: int = READERS) -> list[str]:
    """Give a tag with parity back what it has lost (see `xla_ckpt.repair`)."""
    if find_foreign(store, tag) is not None:
        raise UsageError("the tag has no parity, so it cannot be repaired: another library wrote it", tag=tag)
    try:
        directory = root_of(store).open(tag)
    except NoCheckpointError as error:
        raise _better(error, store) from None
    try:
        return repair_tag(root_of(store), tag, directory, workers=workers)
    finally:
        directory.close()


def no_tag(store: Store, tag: str | None) -> NoCheckpointError:
    """The error for a tag that is not there, or for a root without any (`tag` None)."""
    return _better(no_such_tag(root_of(store), tag), store)


def check_lies_there(store: Store) -> None:
    """Refuse a root where nothing lies at all: a listing of it would look like that of a root without tags.

    Raises:
        NoCheckpointError: Nothing does.
    """
    if not root_of(store).is_certain() and not store.is_directory(""):
        raise no_tag(store, None)


def _better(error: NoCheckpointError, store: Store) -> NoCheckpointError:
    """The same error, with a hint at what other libraries have there, or at the root above."""
    tags = all_tags(store)
    foreign = [(layout.origin, entry.tag) for layout, entry in tags if layout is not None]
    if foreign and len(foreign) == len(tags):
        error.problem += meant(error.tag, [tag for _, tag in foreign])
        error.hint = f"{foreign[-1][0]} wrote the tags there: {', '.join(tag for _, tag in foreign[-10:])}."
    elif (inside := named_itself(store)) is not None:
        above, name = inside
        error.hint = f"This is a checkpoint by itself: pass it without a tag, or pass {above.path} and the tag {name}."
    elif not tags and not store.has("") and (beside := _tags_above(store)):
        error.hint = f"Nothing lies there. {beside}"
    elif not tags and (below := _others_below(store)):
        error.hint = f"There are checkpoints below it, in {', '.join(below)}: pass one of these directories."
    return error


def _others_below(root: Store) -> list[str]:
    """The directories in a directory in which there are tags, a few of them: other libraries put them below a name."""
    if root.file_system is None or not root.is_directory(""):
        return []
    try:
        names = [name for name in root.names() if root.is_directory(name)][:MAX_LOOKED_INTO]
        return [name for name in names if all_tags(door.store_at(f"{root.path.rstrip('/')}/{name}"))][:3]
    except (CheckpointError, OSError):
        return []  # it is only for a hint


def _tags_above(root: Store) -> str:
    """What tags there are in the directory above: where nothing lies, somebody may have named a tag by its path."""
    try:
        above, _ = door.above(root.path)
        tags = tag_names(above.look())
    except CheckpointError:
        return ""  # it is only for a hint
    return f"In {above.path} there are, oldest first: {', '.join(tags[-10:])}." if tags else ""


def _holds_tags(root: Store, layout: Layout) -> bool:
    """Whether tags lie in what is a checkpoint of another library itself."""
    if layout.may_hold_tags:
        return bool(all_tags(root))
    # Where a root of ours in an object store is one, this is certain, and nobody asks here.
    return root.file_system is not None and root.is_directory("") and bool(root_of(root).entries())


def named_itself(root: Store) -> tuple[Store, str] | None:
    """(root directory, tag) if a root is a tag itself, or (directory above, name) of what a tag is made of.

    A directory in which there are tags is their root, whatever else lies in it: tags of ours in any case, those of
    another library if its layout may hold tags.
    """
    if root_of(root).is_certain():
        return None
    try:
        above, name = door.above(root.path)
    except UsageError:
        return None
    above = above.look()
    if root_of(above).is_ours(name):
        return above, name
    foreign = find_foreign(above, name)
    if foreign is None:
        return None
    layout = foreign[0]
    if not _holds_tags(root, layout):
        return above, name
    if layout.tagged:
        logger.warning(
            "%s is a checkpoint of %s, and a root of tags, too: its tags are taken. For the other one say %s, tag %s",
            root.path,
            layout.origin,
            above.path,
            name,
        )
    return None
