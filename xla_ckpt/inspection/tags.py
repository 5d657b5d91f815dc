"""List, find, verify, repair and summarize the tags of a root directory.

Tags of this library need neither torch nor orbax.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import CheckpointError, UsageError, annotate_errors, wrap_os_errors
from xla_ckpt.features.local_first.root import read_journals
from xla_ckpt.features.local_first.upload_rules import list_locations
from xla_ckpt.formats.base import Layout
from xla_ckpt.formats.registry import find_layout
from xla_ckpt.formats.tags import (
    find_foreign_tag,
    find_roots,
    find_tag_at_root,
    find_unlisted_checkpoints,
    list_all_tags,
    list_roots_below,
    list_tag_names,
    list_tags_newest_last,
    make_not_found_error,
    open_tag,
    repair_stored_tag,
    verify_stored_tag,
)
from xla_ckpt.keywords import check_arguments
from xla_ckpt.loading.verify import VerifyReport
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import FileSystem, ObjectStore, Store
from xla_ckpt.storage.resolve import PathLike, open_store
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.tags.entry import TagEntry, check_tag_is_string
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.retention import explain_kept, parse_policy
from xla_ckpt.tags.retention_inputs import load_tag_infos
from xla_ckpt.tags.root import resolve_tag_link

logger = get_logger(__name__)


@check_arguments
def list_tags(path: PathLike, *, local: PathLike | None = None) -> list[str]:
    """Names of the committed tags in `path`, oldest commit first (by commit sequence, never by time stamps).

    With `local`, those of that directory, too (see `SaveOptions.local`).

    Complete tags that another library wrote there come before them, in its own order (neuronx-distributed's: by time
    stamps; optimum-neuron's: by the numbers in their names; SageMaker model parallel's: as its file `newest` says).

    A file of torch.save, which is one checkpoint itself, has no tags.

    Raises:
        StorageError: The directory cannot be read. (One that does not exist has no tags.)
    """
    if local is not None:
        return [entry.tag for entry, _, _ in list_local_and_remote(*resolve_local_and_remote(path, local))]
    store = open_store(path).snapshot_view()
    return [] if _is_single_file(store) else list_tag_names(store)


def _is_single_file(store: Store) -> bool:
    """Whether a path is a single file that is a checkpoint."""
    return _is_file(store) and find_tag_at_root(store) is not None


def _is_file(store: Store) -> bool:
    return store.file_system is not None and store.has("") and not store.is_directory("")


def resolve_local_and_remote(path: PathLike, local: PathLike) -> tuple[FileSystem, ObjectStore]:
    """The directory that a caller names with ``local=``, and the object store that the path names.

    Raises:
        UsageError: They are none.
    """
    far, near = open_store(path), open_store(local)
    if far.object_store is None or near.file_system is None:
        raise UsageError(
            "tags go from a directory (local) to an object store (path)",
            expected="for example /nvme/run and s3://bucket/run",
            found=f"{near.path} and {far.path}",
        )
    return near.file_system, far.object_store


def list_local_and_remote(directory: FileSystem, object_store: ObjectStore) -> list[tuple[TagEntry, bool, str]]:
    """All tags of a directory and the object store where they go: see
    `xla_ckpt.features.local_first.upload_rules.list_locations`.
    """
    local, remote = open_root(directory).list_entries(), [entry for _, entry in list_all_tags(object_store)]
    return list_locations(local, remote, read_journals(directory, local, object_store.path))


@check_arguments
def latest_tag(path: PathLike, *, local: PathLike | None = None) -> str | None:
    """The newest committed tag in `path`, or in `local` (see `list_tags`); None when there is none.

    Where there is none, a program that trains saves next, so what commits is started (see `start_commit_helper`).
    """
    if local is None:
        store = open_store(path).snapshot_view()
        tags = [] if _is_single_file(store) else [entry.tag for entry in list_tags_newest_last(store)]
    else:
        tags = list_tags(path, local=local)
    if not tags:
        start_commit_helper(open_store(path if local is None else local))
    return tags[-1] if tags else None


def start_commit_helper(store: Store) -> None:
    """Have the process started in which orbax commits, if this one is going to save, it seems: it trains, as rank 0.

    It is not, as long as there is something to load: the start would take processor time from the load. A program that
    has imported neither torch nor jax trains nothing, and is left as light as it is.
    """
    if "torch" in sys.modules or "jax" in sys.modules:
        from xla_ckpt.distributed import current_job

        if current_job.is_leader():
            open_root(store).prepare_commit()


def locate_checkpoint(path: PathLike, tag: str | None) -> tuple[Store, str | None]:
    """The root directory and the tag that a caller means, who may name a tag by its own path, a directory of Hugging
    Face's, a file of torch.save, or a set of SageMaker model parallel's files.

    The tag stays None where the newest is meant. A link in the root, such as ``latest``, stands for its tag.

    Raises:
        InvalidTagError: The tag is no string.
        UsageError: A tag of a single file is named, or a link out of the root.
    """
    store = open_store(path).snapshot_view()
    if tag is not None:
        check_tag_is_string(tag, store.path)
        if _is_file(store):
            raise UsageError(
                "a file has no tags: it is one checkpoint, or none",
                path=store.path,
                tag=tag,
                hint="Pass the path of the file without a tag, or the root directory of the tags.",
            )
        return store, resolve_tag_link(store, tag)
    if (inside := find_tag_at_root(store)) is not None:
        return inside
    return store, None


def choose_tag(store: Store, tag: str | None) -> str:
    """The tag that a caller names, or the newest.

    Raises:
        NoCheckpointError: None is named, and there is none.
    """
    if tag is not None:
        return tag
    entries = list_tags_newest_last(store)
    if not entries:
        raise make_not_found_error(store, None)
    return entries[-1].tag


@check_arguments
def has_checkpoint(path: PathLike, *, local: PathLike | None = None) -> bool:
    """Whether `path` holds a committed tag, or is what a load takes itself: a tag, or a file (``.pt``).

    With `local`, whether that directory holds a tag will do (see `list_tags`).

    Of a set of SageMaker model parallel's files it is enough that there is one part: a load tells what is missing, and
    nobody begins anew over the others.

    Where there is none, a program that trains saves next, so what commits is started (see `start_commit_helper`).
    """
    store, tag = locate_checkpoint(path, None)
    exists = tag is not None or bool(list_tag_names(store) if local is None else list_tags(path, local=local))
    if not exists and (below := list_roots_below(store)):
        logger.warning("there is no checkpoint in %s, but in %s below it", store.path, below)
    if not exists:
        start_commit_helper(store if local is None else open_store(local))
    return exists


@check_arguments
def verify(path: PathLike, tag: str | None = None, *, num_workers: int = READ_THREADS) -> VerifyReport:
    """Read a whole tag, the newest by default, and compare every byte with its digest.

    Tags that another library wrote have no digests: their zips are compared with their own CRC-32, and the files and
    tensors of all ranks are looked for.

    Returns:
        A report; `report.ok` is True if nothing is wrong, else `report.problems` says what, file by file.

    Raises:
        NoCheckpointError: There is no such tag.
        UnsupportedVersionError: A newer version of this library wrote it.
    """
    store, tag = locate_checkpoint(path, tag)
    return verify_stored_tag(store, choose_tag(store, tag), num_workers)


@check_arguments
def repair(path: PathLike, tag: str | None = None, *, num_workers: int = READ_THREADS) -> tuple[str, ...]:
    """Give a tag that was saved with ``parity=`` back the bytes that it has lost; the newest tag by default.

    What is damaged is found by digests, worked out from the rest of the tag and its parity, compared with its digests,
    and only then put in the place of the damaged file. It takes the free space of the damaged files. Readers of the tag
    may go on, and a repair that is killed has made nothing worse (docs/repair.md).

    Returns:
        The paths of the files that were replaced, relative to the tag; none if nothing was damaged.

    Raises:
        NoCheckpointError: There is no such tag.
        UsageError: The tag was saved without parity.
        CorruptCheckpointError: More is lost than the parity gives back; `details` names it. Nothing was changed.
        NotDurableError: The tag is repaired, and a loss of power may undo that.
        StorageError: The storage refused.
    """
    store, tag = locate_checkpoint(path, tag)
    name = choose_tag(store, tag)
    with wrap_os_errors("repairing a tag", path=store.path, tag=name), annotate_errors(path=store.path, tag=name):
        return tuple(repair_stored_tag(open_store(store.path), name, num_workers))  # a look does not see new files


MAX_DEPTH = 3
"""Levels below a directory at which roots are looked for."""

MAX_INSPECTED = 1000
"""Directories that are looked at for that, and names beside the tags of a root."""


ListedTags = Sequence[tuple[Layout | None, TagEntry]]
"""The tags of a root directory, as `xla_ckpt.formats.tags.list_all_tags` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagSummary:
    """A tag in a list of tags."""

    tag: str
    sequence: int
    """Number of its commit; 0 if another library wrote it."""

    created: str | None
    """When it was committed, as ISO 8601 has it."""

    pinned: bool
    """Whether retention leaves it alone."""

    arrays: int | None = None
    """Number of arrays; None where no index says it."""

    nbytes: int | None = None
    """Bytes of the arrays, each counted once; of a tag without an index, of its files."""

    files: int | None = None
    ranks: int | None = None
    """How many ranks saved it; None where no index says it."""

    problem: str | None = None
    """Why nothing of this is known: the manifest is damaged."""

    layout: str | None = None
    """Name of the layout, or of the library that wrote it."""

    note: str = ""
    """What else is to be known about it."""

    where: str = ""
    """Of a directory and the bucket where its tags go, where it is: ``local``, ``uploading 40 %``, ``remote`` or
    ``both``. Empty if nobody has asked for both."""

    kept: tuple[str, ...] = ()
    """Why the policy keeps it under which the newest tag was saved; empty if that is not known, or does not keep it."""


_FOREIGN_REASON = "another library's"
"""Why a tag is kept that this library has not written: it deletes none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a tag."""

    path: str
    """Relative to the tag."""

    size: int
    """Bytes."""


def to_plain_json(value: Any) -> dict[str, Any]:
    """The fields of a value that has plain ones only, as plain JSON."""
    return {name: getattr(value, name) for name in type(value).__slots__}


def build_listing(
    path: str,
    tags: Sequence[TagSummary],
    roots: Sequence[Mapping[str, Any]] = (),
    beside: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The tags of a root directory, oldest first, as plain JSON; the newest of them; the roots below it; and what lies
    beside them.
    """
    return {
        "path": path,
        "tags": [to_plain_json(summary) for summary in tags],
        "newest": tags[-1].tag if tags else None,
        "roots": list(roots),
        "beside": list(beside),
    }


def summarize_tags(store: Store, tags: ListedTags | None = None) -> tuple[TagSummary, ...]:
    """All tags of a root directory, oldest commit first; `tags` are those of `list_all_tags`, where somebody has
    them.
    """
    tags = list_all_tags(store) if tags is None else tags
    own = [entry for layout, entry in tags if layout is None]
    others = {entry.tag: (_FOREIGN_REASON,) for layout, entry in tags if layout is not None}
    looks = {entry.tag: _inspect_tag(store, layout, entry) for layout, entry in tags}
    # What the next save is to keep is, as far as anybody knows, what the last one was told to.
    policy = parse_policy(looks[own[-1].tag][1]) if own else None
    reasons = {} if policy is None else {**others, **explain_kept(load_tag_infos(store, own), policy)}
    return tuple(replace(summary, kept=reasons.get(tag, ())) for tag, (summary, _) in looks.items())


def summarize_path(path: PathLike) -> tuple[TagSummary, ...]:
    """The tags that a path names: all of a root directory, or the one that the path is itself."""
    store, tag = locate_checkpoint(path, None)
    if tag is None:
        return summarize_tags(store)
    if (unlisted := summarize_unlisted(store, tag)) is not None:
        return (unlisted,)
    return tuple(summary for summary in summarize_tags(store) if summary.tag == tag)


def summarize_unlisted(store: Store, tag: str) -> TagSummary | None:
    """What is no tag, and no root lists, such as a single file; None for a tag."""
    foreign = find_foreign_tag(store, tag)
    return None if foreign is None or foreign[0].tagged else summarize_tag(store, *foreign)


def list_stray_checkpoints(store: Store, tags: ListedTags) -> list[dict[str, Any]]:
    """What else lies in a root directory, as `xla_ckpt.formats.tags.find_unlisted_checkpoints` has it; nothing of a
    bucket.
    """
    if store.file_system is None:
        return []
    return [
        {"name": name, "layout": layout.origin or layout.name, "complete": entry.complete}
        for name, layout, entry in find_unlisted_checkpoints(store, (entry for _, entry in tags), MAX_INSPECTED)
    ]


def summarize_roots_below(path: str, tags: Set[str] = frozenset()) -> list[dict[str, Any]]:
    """The root directories of tags below a directory, by path, with their newest tags. Its own tags are no roots.

    Those `MAX_DEPTH` levels below are found, and `MAX_INSPECTED` directories are looked at. An object store with tags
    has what they consist of beside them, under names of its own: there nothing is looked at.
    """
    if tags and open_store(path).file_system is None:
        return []
    roots = find_roots(path, levels=MAX_DEPTH, limit=MAX_INSPECTED, excluded=tags)
    return [{"path": below, "tags": len(its), "newest": its[-1]} for below, its in roots]


def summarize_local_and_remote(directory: FileSystem, object_store: ObjectStore) -> tuple[TagSummary, ...]:
    """All tags of a directory and of the object store where they go, each once, oldest commit first."""
    layouts = {entry.tag: layout for layout, entry in list_all_tags(object_store)}
    return tuple(
        replace(
            summarize_tag(directory if is_near else object_store, None if is_near else layouts.get(entry.tag), entry),
            where=where,
        )
        for entry, is_near, where in list_local_and_remote(directory, object_store)
    )


def summarize_tag(store: Store, layout: Layout | None, entry: TagEntry) -> TagSummary:
    """A tag of a root directory; `layout` is that of a tag of another library, or None. Does not raise for damage."""
    return _inspect_tag(store, layout, entry)[0]


def _inspect_tag(store: Store, layout: Layout | None, entry: TagEntry) -> tuple[TagSummary, Any]:
    """The same, and the policy of retention that the tag says."""
    summary = TagSummary(
        tag=entry.tag, sequence=entry.sequence, created=entry.created, pinned=entry.pinned, note=entry.note
    )
    try:
        if layout is not None:  # it has no index: its directory says what there is
            files = list_stored_files(store, entry)
            nbytes = sum(file.size for file in files)
            return replace(summary, nbytes=nbytes, files=len(files), layout=layout.origin or layout.name), None
        with open_tag(store, entry.tag) as reader:
            manifest = reader.manifest
    except CheckpointError as error:
        return replace(summary, problem=str(error)), None
    known = replace(
        summary,
        arrays=len(manifest.arrays),
        nbytes=manifest.nbytes,
        files=len(manifest.files),
        ranks=manifest.world_size,
        layout=find_layout(manifest).name,
        note=", ".join(filter(None, (entry.note, describe_note(manifest)))),
    )
    return known, manifest.retention


def describe_note(manifest: Manifest) -> str:
    """What is to be known of a tag, as its manifest says it."""
    return "without its base model" if schema.is_without_base(manifest.skeleton) else ""


def list_stored_files(store: Store, entry: TagEntry) -> tuple[StoredFile, ...]:
    """The files of a tag; those that lie in the root itself are named in it."""
    apart = entry.files or (() if store.is_directory(entry.directory) else (entry.directory,))
    # Files that a path names may be links.
    directory = store.open("", lock=False, links=True) if apart else store.open(entry.directory)
    with closing(directory):
        files = []
        for path in apart or directory.list_files():
            with closing(directory.open(path)) as source:
                files.append(StoredFile(path=path, size=source.size))
        return tuple(files)
