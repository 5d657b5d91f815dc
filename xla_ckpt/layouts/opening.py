"""Tags of any layout, opened, verified and repaired.

A tag with a manifest of ours is opened by it, in whatever layout its files are. Any other tag is one that a layout's
own tools wrote, and that layout opens it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

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
)
from xla_ckpt.extras import naming_extras
from xla_ckpt.layouts.base import HuggingFaceModel, Layout
from xla_ckpt.layouts.listing import find_foreign, has_manifest
from xla_ckpt.layouts.no_tag import with_hint
from xla_ckpt.layouts.registry import all_layouts, layout_of
from xla_ckpt.logs import get_logger
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tags.entry import COMMITTED, MANIFEST
from xla_ckpt.tags.roots import root_of

logger = get_logger(__name__)


def open_tag(store: Store, tag: str, hints: Hints | None = None, *, as_stored: bool = False) -> TagReader:
    """A reader of a tag of any layout.

    Args:
        hints: What the files of some layouts do not say.
        as_stored: Whether a tag of ours is read in the form that its files have, and not in that of what was saved.

    Raises:
        NoCheckpointError: There is no such tag; the hint names those that are there, whoever wrote them.
        CheckpointError: It is damaged, or the hints contradict it.
    """
    foreign = find_foreign(store, tag)
    has_ours = foreign is not None and has_manifest(store, foreign[1])
    if foreign is not None and not has_ours:
        layout, entry = foreign
        _tell_beside(store, tag, [other for other in all_layouts() if other is not layout])
        with naming(path=store.path, tag=tag), naming_extras(f"a tag of {layout.origin or layout.name}'s"):
            return layout.open(store, entry, Hints() if hints is None else hints)
    try:
        directory = store.open(tag) if has_ours else root_of(store).open(tag)
    except NoCheckpointError as error:
        raise with_hint(error, store) from None
    try:
        reader = TagReader(directory, store.path, tag)
    except CorruptCheckpointError as error:
        if error.file == MANIFEST and store.file_system is not None and (other := _readable_as(store, tag)):
            error.hint = (
                f"{error.hint} Or remove {MANIFEST} and {COMMITTED} from the tag: then it is read as {other}'s, "
                "without our digests."
            )
        raise
    except ChangedTagError:
        if store.object_store is None:
            raise
        # A newer version may have replaced it since the look.
        if root_of(now := store.look()).place_of(tag) == directory.name:
            raise CorruptCheckpointError("the tag has no files", path=store.path, tag=tag) from None
        return open_tag(now, tag, hints, as_stored=as_stored)
    layout = layout_of(reader.manifest)
    try:
        if store.file_system is not None or has_ours:  # else nobody else's files get into its directory
            reader.advice = " ".join(filter(None, (reader.advice, layout.saved_over(store, tag))))
            _tell_beside(store, tag, [other for other in all_layouts() if other.marks.keys() - layout.marks.keys()])
        layout.check(reader)
        with naming(path=store.path, tag=tag):
            return reader if as_stored else layout.as_saved(reader)
    except BaseException:
        reader.close()  # nobody else will
        raise


def _readable_as(store: Store, tag: str) -> str:
    """The library as whose tag one of ours can be read without its manifest; empty if there is none."""
    with contextlib.suppress(CheckpointError, OSError):  # it is only for a hint
        return next((layout.origin for layout in all_layouts() if layout.find(store, tag) is not None), "")
    return ""


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
    if foreign is not None and not has_manifest(store, foreign[1]):
        layout, entry = foreign
        with naming(path=store.path, tag=tag), naming_extras(f"a tag of {layout.origin or layout.name}'s"):
            return layout.verify(store, entry, workers)
    try:
        with open_tag(store, tag, as_stored=True) as reader:
            return verify_tag(reader, marks=frozenset(layout_of(reader.manifest).marks), workers=workers)
    except CorruptCheckpointError as error:
        return VerifyReport(path=store.path, tag=tag, problems=[error])


def repair_stored(store: Store, tag: str, workers: int = READERS) -> list[str]:
    """Give a tag with parity back what it has lost (see `xla_ckpt.repair`)."""
    if find_foreign(store, tag) is not None:
        raise UsageError(
            "the tag has no parity, so it cannot be repaired: another library wrote it",
            tag=tag,
            hint="Load another tag, or restore its files from a copy.",
        )
    try:
        directory = root_of(store).open(tag)
    except NoCheckpointError as error:
        raise with_hint(error, store) from None
    try:
        return repair_tag(root_of(store), tag, directory, workers=workers)
    finally:
        directory.close()
