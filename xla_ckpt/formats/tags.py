"""List, find, open, verify and repair checkpoints of any format, and explain why a checkpoint is not found.

A tag with a manifest is opened by its manifest, independent of the layout of its files. Any other tag was written by
another library, and the layout of that library opens it. A tag that does not exist raises an error whose hint lists the
existing checkpoints, nearby paths and likely typos.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Iterator, Sequence, Set

from xla_ckpt.conversion.llama.config import CONFIG_FILE
from xla_ckpt.core.plan.export_plan import SINGLE_FILE, WEIGHT_INDEX_FILE
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.errors import (
    ChangedTagError,
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    UsageError,
    annotate_errors,
    wrap_os_errors,
)
from xla_ckpt.extras import wrap_missing_packages
from xla_ckpt.features.parity.repair import repair_tag
from xla_ckpt.formats.base import HuggingFaceModel, Layout, sort_by_numbers
from xla_ckpt.formats.hugging_face.layout import ADAPTER_WEIGHTS_FILE
from xla_ckpt.formats.hugging_face.peft import ADAPTER_CONFIG_FILE
from xla_ckpt.formats.registry import find_layout, list_layouts
from xla_ckpt.keywords import find_closest, suggest
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.loading.verify import VerifyReport, verify_tag
from xla_ckpt.logs import get_logger
from xla_ckpt.storage import resolve
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.resolve import PathLike
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.tags.entry import MANIFEST_FILE, ORBAX_COMMITTED_FILE, TagEntry, is_tag_name
from xla_ckpt.tags.listing import list_names
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.root import Root, make_no_such_tag_error

logger = get_logger(__name__)

MAX_NAMES_CHECKED = 100
"""Maximum number of names in a root that are checked for an incomplete checkpoint newer than its tags."""


def list_all_tags(store: Store) -> list[tuple[Layout | None, TagEntry]]:
    """List all complete tags, oldest first, with the layout that opens each: None for tags with a manifest.

    Tags without a commit number come first, because tags of this library continue them.

    Raises:
        StorageError: The directory cannot be read.
    """
    root = open_root(store)
    ours = root.list_entries()
    known = {e.tag for e in ours}
    names = [name for name in list_names(store) if name not in known and _may_be_foreign(root, name)]
    foreign: list[tuple[float, Layout, TagEntry]] = []
    for layout in list_layouts() if names else ():
        latest = 0.0
        for entry in layout.tags(store, names):
            # A tag of this library that was just being replaced in this layout has its manifest again.
            if entry.tag not in known and not root.is_native_tag(entry.tag):
                known.add(entry.tag)
                # Tags of one layout keep its own order, which can differ from the order of timestamps.
                latest = max(latest, _parse_created(entry) if entry.created else 0.0)
                foreign.append((latest, layout, entry))
    foreign.sort(key=lambda of_tag: of_tag[0])
    return [*((layout, entry) for _, layout, entry in foreign), *((None, entry) for entry in ours)]


def list_tag_names(store: Store) -> list[str]:
    """List the names of all complete tags, oldest first.

    Raises:
        StorageError: The directory cannot be read.
    """
    return [entry.tag for _, entry in list_all_tags(store)]


def find_unlisted_checkpoints(store: Store, tags: Iterable[TagEntry], limit: int) -> list[tuple[str, Layout, TagEntry]]:
    """Find checkpoints of other libraries in a root that are not listed as tags. Return (name, layout, entry).

    These are checkpoints that are only opened by their own path, such as torch.save files, and incomplete tags.

    Args:
        store: Root directory.
        tags: All tags in it.
        limit: Maximum number of names to check.

    Raises:
        StorageError: The directory cannot be read.
    """
    listed = {name for entry in tags for name in (entry.tag, *entry.files)}
    names = [name for name in sorted(list_names(store)) if name not in listed and not name.startswith(".")]
    there = [(name, foreign) for name in names[:limit] if (foreign := find_foreign_tag(store, name)) is not None]
    parts = {file for name, (_, entry) in there for file in entry.files if file != name}
    return [(name, *foreign) for name, foreign in there if name not in parts]


def find_roots(path: str, *, levels: int, limit: int, excluded: Set[str] = frozenset()) -> list[tuple[str, list[str]]]:
    """Find the root directories below a directory. Return the path of each, and its tags, oldest first.

    Roots are not searched recursively, and names that begin with a dot are skipped. An incomplete checkpoint of another
    library is not a root of its remaining parts.

    Args:
        path: Directory to search; it may itself be a root.
        levels: Number of levels to search below it.
        limit: Maximum number of directories to check.
        excluded: Names in it to skip: its own tags.

    Raises:
        StorageError: A directory cannot be read.
    """
    roots: list[tuple[str, list[str]]] = []
    level = [path]
    for _ in range(levels):
        below: list[str] = []
        for directory in level:
            store = resolve.open_store(directory)
            names = [
                n for n in list_names(store) if not n.startswith(".") and not (directory == path and n in excluded)
            ]
            directories = [n for n in names if store.is_directory(n)][:limit]
            limit -= len(directories)
            for name in directories:
                child = f"{directory.rstrip('/')}/{name}"
                if not (tags := list_tag_names(resolve.open_store(child).snapshot_view())):
                    below.append(child)
                elif (foreign := find_foreign_tag(store.snapshot_view(), name)) is None or foreign[1].complete:
                    roots.append((child, tags))
        level = below
    return sorted(roots)


def list_tags_newest_last(store: Store) -> list[TagEntry]:
    """List all complete tags for a caller that uses the last one. Only this function decides which tag is the newest.

    Log a warning if a tag of another library has a newer timestamp than the newest tag of this library, which follows
    it in the list, and for incomplete newer checkpoints of another library.

    Raises:
        StorageError: The directory cannot be read.
    """
    tags = list_all_tags(store)
    entries = [entry for _, entry in tags]
    foreign = [(layout.origin, entry) for layout, entry in tags if layout is not None and entry.created]
    if foreign and tags[-1][0] is None and entries[-1].created:
        origin, passed_over = max(foreign, key=lambda pair: _parse_created(pair[1]))
        if _parse_created(passed_over) > _parse_created(entries[-1]):
            logger.warning(
                "%s: tag %s, in the form of %s, has a newer time stamp than %s, which is taken for the newest: name "
                "the tag if it is not",
                store.path,
                passed_over.tag,
                origin,
                entries[-1].tag,
            )
    if tags and tags[-1][0] is not None and store.file_system is not None:  # a bucket counts requests
        for name, layout, entry in find_unlisted_checkpoints(store, entries, MAX_NAMES_CHECKED):
            if not entry.complete and sort_by_numbers([entries[-1], entry])[-1] is entry:
                logger.warning(
                    "%s: %s's %s is not complete, and passed over: tag %s is taken for the newest",
                    store.path,
                    layout.origin,
                    name,
                    entries[-1].tag,
                )
    return entries


def _parse_created(entry: TagEntry) -> float:
    return datetime.datetime.fromisoformat(entry.created).timestamp()


def find_foreign_tag(store: Store, tag: str) -> tuple[Layout, TagEntry] | None:
    """Find a tag that another library wrote or can read, complete or not, and its layout; None if there is none."""
    root = open_root(store)
    if _may_be_foreign(root, tag):
        for layout in list_layouts():
            with wrap_os_errors("looking for a tag", path=store.path, tag=tag):
                entry = layout.find(store, tag)
            if entry is not None:
                # A tag of this library that was just being replaced in this layout has its manifest again.
                return None if root.is_native_tag(tag) else (layout, entry)
    return None


def has_manifest(store: Store, entry: TagEntry) -> bool:
    """Return True if a tag of another library has a manifest: a conversion wrote it for that library to an object
    store, or it was copied there. It is opened by its manifest, but still belongs to the other library, so that
    retention ignores it.
    """
    return entry.complete and store.has(f"{entry.directory}/{MANIFEST_FILE}")


def _may_be_foreign(root: Root, name: str) -> bool:
    """Return True if a name can be a tag of another library."""
    return is_tag_name(name) and not root.is_managed(name)


def _contains_tags(root: Store, layout: Layout) -> bool:
    """Return True if a directory that `layout` recognizes as one checkpoint is also a root that contains tags."""
    if layout.may_hold_tags:
        return bool(list_all_tags(root))
    # In an object store, a root of this library has already been detected before this call.
    return root.file_system is not None and root.is_directory("") and bool(open_root(root).list_entries())


def find_tag_at_root(root: Store) -> tuple[Store, str] | None:
    """Return (root directory, tag) if a root is itself a tag, or (parent, name) of a foreign checkpoint.

    A directory that contains tags is their root, independent of its other files: always for tags of this library, and
    for tags of another library if the layout may hold tags.
    """
    if open_root(root).is_authoritative():
        return None
    try:
        above, name = resolve.open_parent(root.path)
    except UsageError:
        return None
    above = above.snapshot_view()
    if open_root(above).is_native_tag(name):
        return above, name
    foreign = find_foreign_tag(above, name)
    if foreign is None:
        return None
    layout = foreign[0]
    if not _contains_tags(root, layout):
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


MAX_HINT_DIRECTORIES = 100
"""Maximum number of directories that are checked for a hint."""

MAX_HINT_NAMES = 10
"""Maximum number of directories and files that a hint lists."""


def make_not_found_error(store: Store, tag: str | None) -> NoCheckpointError:
    """Return the error for a missing tag, or for a root without any tags (`tag` None)."""
    return add_not_found_hint(make_no_such_tag_error(open_root(store), tag), store)


def check_root_exists(store: Store) -> None:
    """Check that a root exists. Otherwise its listing would look like an empty root.

    Raises:
        NoCheckpointError: It does not exist.
    """
    if not (open_root(store).is_authoritative() or store.is_directory("")):
        raise make_not_found_error(store, None)


def check_own_tag(store: Store, tag: str) -> None:
    """Check that a tag was written by this library, before it is deleted or pinned.

    Raises:
        NoCheckpointError: The tag does not exist.
        UsageError: Another library wrote it, or it is a single file.
    """
    if (foreign := find_foreign_tag(store, tag)) is not None:
        raise UsageError(
            f"{_describe_writer(foreign[0])}, which this library neither pins nor deletes",
            path=store.path,
            tag=tag,
            hint="Retention never deletes it. To delete it, remove its files.",
        )
    if open_root(store).get_entry(tag) is None:
        raise make_not_found_error(store, tag)


def _describe_writer(layout: Layout) -> str:
    kind = "tag" if layout.tagged else "file" if layout.one_file else "directory"
    return f"{layout.origin or layout.name} wrote this {kind}"


def resolve_root(path: PathLike) -> Root:
    """Open the root of tags at a path, for maintenance.

    Raises:
        NoCheckpointError: The path does not exist, or is a file.
        UsageError: The path is a checkpoint and not a root, or was written by another library.
    """
    store = resolve.open_store(path).snapshot_view()
    if (inside := find_tag_at_root(store)) is not None:
        above, name = inside
        if (foreign := find_foreign_tag(above, name)) is not None:
            raise UsageError(
                f"{_describe_writer(foreign[0])}, which is no root of this library's tags",
                path=store.path,
                hint="Pass a root of this library's tags. xla-ckpt convert makes a tag of what other libraries wrote.",
            )
        raise UsageError("this is a tag, and no root of tags", path=store.path, hint=f"Pass {above.path}.")
    if not store.is_directory(""):
        raise make_not_found_error(store, None)
    return open_root(
        resolve.open_store(store.path)
    )  # not the cached snapshot view, in which a living job would look inactive


def add_not_found_hint(error: NoCheckpointError, store: Store) -> NoCheckpointError:
    """Add a hint to the error about checkpoints of other libraries there, or about the root above. Return the error."""
    tags = list_all_tags(store)
    foreign = [(layout.origin, entry.tag) for layout, entry in tags if layout is not None]
    if foreign:
        others = ", ".join(tag for _, tag in foreign[-10:])
        if len(foreign) == len(tags):
            error.problem += suggest(error.tag, [tag for _, tag in foreign])
            error.hint = f"{foreign[-1][0]} wrote the tags there: {others}."
        else:
            error.hint = f"{error.hint or ''} {foreign[-1][0]} wrote others there: {others}.".lstrip()
    elif (inside := find_tag_at_root(store)) is not None:
        above, name = inside
        tag = error.tag if error.tag in list_tag_names(above) else name
        error.hint = f"This is a checkpoint by itself: pass it without a tag, or pass {above.path} and the tag {tag}."
    elif not tags and not store.has(""):
        near = suggest_path(store.path)
        error.problem += near
        error.hint = f"Nothing lies there. {_describe_parent_tags(store, near)}".rstrip()
    elif not tags and (below := list_roots_below(store)):
        error.hint = f"There are checkpoints below it, in {below}: pass one of these directories."
    elif not tags and (whole := _find_enclosing_checkpoint(store)):
        error.hint = f"It is a part of a checkpoint: pass {whole}."
    elif not tags and (beside := _find_foreign_checkpoints(store)):
        error.hint = " ".join(_describe_foreign_checkpoints(beside))
        error.problem += suggest(error.tag, [name for name, _, _ in beside]) if error.tag else ""
    elif not tags and error.tag is None and store.has(ADAPTER_CONFIG_FILE):
        error.hint = f"{ADAPTER_CONFIG_FILE} is there: of a directory of PEFT's, {ADAPTER_WEIGHTS_FILE} is missing."
    elif not tags and error.tag is None and store.has(CONFIG_FILE):
        error.hint = (
            f"{CONFIG_FILE} is there: of a directory of Hugging Face's, {SINGLE_FILE} or {WEIGHT_INDEX_FILE} "
            "is missing."
        )
    return error


def _find_enclosing_checkpoint(store: Store) -> str:
    """Return the path of the checkpoint that contains a directory; empty if there is none."""
    try:
        around, _ = resolve.open_parent(store.path)
        return around.path if find_tag_at_root(around) is not None else ""
    except CheckpointError:
        return ""  # this is only for a hint


def _find_foreign_checkpoints(store: Store) -> list[tuple[str, Layout, TagEntry]]:
    """Find checkpoints of other libraries in a directory without tags, as `find_unlisted_checkpoints` returns them."""
    if store.file_system is None:
        return []
    try:
        return find_unlisted_checkpoints(store, (), MAX_HINT_DIRECTORIES)
    except (CheckpointError, OSError):
        return []  # this is only for a hint


def _describe_foreign_checkpoints(others: Sequence[tuple[str, Layout, TagEntry]]) -> Iterator[str]:
    """Yield sentences about checkpoints that are only opened by their own path, such as torch.save files, and about
    tags without a commit marker. Neither is listed, but each can be opened by name.
    """
    if by_path := [name for name, _, entry in others if entry.complete]:
        yield f"Checkpoints of other libraries lie there, {_join_names(by_path)}: pass the path of one."
    if damaged := [name for name, _, entry in others if entry.damage is not None]:
        yield f"Files are missing in {_join_names(damaged)}: xla-ckpt verify says which."
    if unmarked := [(n, layout.origin) for n, layout, entry in others if not entry.complete and entry.damage is None]:
        names = _join_names([name for name, _ in unmarked])
        origin = unmarked[-1][1]
        yield f"{origin}'s mark that a save ended is missing in {names}: name a tag to see what of it can be loaded."


def find_writers(path: PathLike) -> tuple[str, list[str]] | None:
    """Return the writer of the checkpoints at a path, and their tags; no tags if the path is one checkpoint.

    For callers that expected other content there. None if there are no checkpoints, or the path cannot be read.
    """
    try:
        store = resolve.open_store(path).snapshot_view()
        if (inside := find_tag_at_root(store)) is not None:
            foreign = find_foreign_tag(*inside)
            return _get_writer_name(None if foreign is None else foreign[0]), []
        tags = list_all_tags(store)
    except (CheckpointError, OSError):
        return None  # this is only for a hint
    return (_get_writer_name(tags[-1][0]), [entry.tag for _, entry in tags]) if tags else None


def _get_writer_name(layout: Layout | None) -> str:
    return "xla_ckpt" if layout is None else layout.origin or layout.name


def list_roots_below(store: Store) -> str:
    """List the directories in a directory that contain tags, for a path that is too short. Empty if there are none, or
    if they cannot be read, because this is only for a hint.
    """
    try:
        below = find_roots(store.path, levels=1, limit=MAX_HINT_DIRECTORIES)
    except (CheckpointError, OSError):
        return ""
    return _join_names([path.rpartition("/")[2] for path, _ in below])


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_HINT_NAMES]) + (" and others" if len(names) > MAX_HINT_NAMES else "")


def suggest_path(path: str) -> str:
    """Return a ": did you mean ...?" suffix for a missing path; empty if it exists or nothing is similar.

    The first missing directory on the path is assumed to be misspelt.
    """
    wanted = path
    try:
        if resolve.open_store(path).has(""):
            return ""
        while True:
            above, name = resolve.open_parent(path)
            if above.is_directory(""):
                above = above.snapshot_view()
                near = find_closest(name, [*list_tag_names(above), *above.list_names()])
                meant_path = f"{path.removesuffix(name)}{near}{wanted.removeprefix(path)}"
                return f": did you mean {meant_path}?" if near and _has_checkpoint(meant_path) else ""
            path = above.path
    except (CheckpointError, OSError):
        return ""  # this is only for a hint


def _has_checkpoint(path: str) -> bool:
    if resolve.open_store(path).has(""):
        return True
    root, name = resolve.open_parent(path)
    return name in list_tag_names(root.snapshot_view())  # a tag of several files, none of which has its name


def _describe_parent_tags(root: Store, suggestion: str) -> str:
    """List the tags in the parent directory of a missing root, because the caller may have passed the path of a tag.

    Empty if the suggestion of `suggest_path` is not a tag.
    """
    try:
        above, _ = resolve.open_parent(root.path)
        tags = list_tag_names(above.snapshot_view())
    except CheckpointError:
        return ""  # this is only for a hint
    if not tags or (suggestion and not any(suggestion.endswith(f"/{tag}?") for tag in tags)):
        return ""
    return f"In {above.path} there are, oldest first: {', '.join(tags[-10:])}."


def open_tag(store: Store, tag: str, hints: LoadHints | None = None, *, as_stored: bool = False) -> TagReader:
    """Return a reader of a tag of any layout.

    Args:
        hints: Information that the files of some layouts do not contain.
        as_stored: True to read a tag of this library in the form of its files, instead of the form of the saved state.

    Raises:
        NoCheckpointError: The tag does not exist; the hint lists the existing tags of all libraries.
        CheckpointError: The tag is corrupt, or the hints contradict it.
    """
    foreign = find_foreign_tag(store, tag)
    has_ours = foreign is not None and has_manifest(store, foreign[1])
    if foreign is not None and not has_ours:
        layout, entry = foreign
        _warn_about_neighbors(store, tag, [other for other in list_layouts() if other is not layout])
        with (
            annotate_errors(path=store.path, tag=tag),
            wrap_missing_packages(f"a tag of {layout.origin or layout.name}'s"),
        ):
            return layout.open(store, entry, LoadHints() if hints is None else hints)
    try:
        directory = store.open(tag) if has_ours else open_root(store).open(tag)
    except NoCheckpointError as error:
        raise add_not_found_hint(error, store) from None
    try:
        reader = TagReader(directory, store.path, tag)
    except CorruptCheckpointError as error:
        if (
            error.file == MANIFEST_FILE
            and store.file_system is not None
            and (other := _find_fallback_origin(store, tag))
        ):
            error.hint = (
                f"{error.hint} Or remove {MANIFEST_FILE} and {ORBAX_COMMITTED_FILE} from the tag: then it is read as "
                f"{other}'s, without our digests."
            )
        raise
    except ChangedTagError:
        if store.object_store is None:
            raise
        # A newer version may have replaced it since it was looked up.
        if open_root(now := store.snapshot_view()).get_directory_name(tag) == directory.name:
            raise CorruptCheckpointError("the tag has no files", path=store.path, tag=tag) from None
        return open_tag(now, tag, hints, as_stored=as_stored)
    layout = find_layout(reader.manifest)
    try:
        if store.file_system is not None or has_ours:  # otherwise no other library writes files to this directory
            reader.damage_hint = " ".join(filter(None, (reader.damage_hint, layout.saved_over(store, tag))))
            _warn_about_neighbors(
                store, tag, [other for other in list_layouts() if other.marks.keys() - layout.marks.keys()]
            )
        layout.check(reader)
        with annotate_errors(path=store.path, tag=tag):
            return reader if as_stored else layout.as_saved(reader)
    except BaseException:
        reader.close()  # the caller never gets this reader
        raise


def _find_fallback_origin(store: Store, tag: str) -> str:
    """Return the library that can read a tag without its manifest; empty if there is none."""
    with contextlib.suppress(CheckpointError, OSError):  # this is only for a hint
        return next((layout.origin for layout in list_layouts() if layout.find(store, tag) is not None), "")
    return ""


def _warn_about_neighbors(store: Store, tag: str, layouts: Sequence[Layout]) -> None:
    for other in layouts:
        if beside := other.beside(store, tag):
            logger.warning("%s/%s is read. Beside it lie %s", store.path, tag, beside)


def get_hugging_face_model(store: Store, reader: TagReader) -> HuggingFaceModel | None:
    """Return the model of an open tag in the Hugging Face format; None if the tag does not contain the mapping.

    Raises:
        CheckpointError: The tag contains a mapping that does not match its arrays.
    """
    foreign = find_foreign_tag(store, reader.tag)
    return None if foreign is None else foreign[0].as_hugging_face(store, foreign[1], reader)


def verify_stored_tag(store: Store, tag: str, workers: int = READ_THREADS) -> VerifyReport:
    """Read and verify a complete tag (see `xla_ckpt.verify`)."""
    foreign = find_foreign_tag(store, tag)
    if foreign is not None and not has_manifest(store, foreign[1]):
        layout, entry = foreign
        with (
            annotate_errors(path=store.path, tag=tag),
            wrap_missing_packages(f"a tag of {layout.origin or layout.name}'s"),
        ):
            return layout.verify(store, entry, workers)
    try:
        with open_tag(store, tag, as_stored=True) as reader:
            return verify_tag(reader, marks=frozenset(find_layout(reader.manifest).marks), workers=workers)
    except CorruptCheckpointError as error:
        return VerifyReport(path=store.path, tag=tag, problems=[error])


def repair_stored_tag(store: Store, tag: str, workers: int = READ_THREADS) -> list[str]:
    """Repair a tag from its parity (see `xla_ckpt.repair`).

    Raises:
        UsageError: Another library wrote the tag.
        NoCheckpointError: The tag does not exist.
    """
    if find_foreign_tag(store, tag) is not None:
        raise UsageError(
            "the tag has no parity, so it cannot be repaired: another library wrote it",
            tag=tag,
            hint="Load another tag, or restore its files from a copy.",
        )
    try:
        directory = open_root(store).open(tag)
    except NoCheckpointError as error:
        raise add_not_found_hint(error, store) from None
    try:
        return repair_tag(open_root(store), tag, directory, workers=workers)
    finally:
        directory.close()
