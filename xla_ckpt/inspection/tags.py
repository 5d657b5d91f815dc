"""List, find, verify, repair and summarize the tags of a root directory.

Reading tags of this library needs neither torch nor orbax.
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
    """Return the names of the committed tags in `path`, oldest commit first (by commit sequence, never by timestamps).

    With `local`, include the tags of that directory (see `SaveOptions.local`).

    Complete tags of other libraries come first, in the order of their library (neuronx-distributed: timestamps;
    optimum-neuron: the numbers in the names; SageMaker model parallel: the file `newest`).

    A torch.save file, which is itself one checkpoint, has no tags.

    Raises:
        StorageError: The directory cannot be read. (A directory that does not exist has no tags.)
    """
    if local is not None:
        return [entry.tag for entry, _, _ in list_local_and_remote(*resolve_local_and_remote(path, local))]
    store = open_store(path).snapshot_view()
    return [] if _is_single_file(store) else list_tag_names(store)


def _is_single_file(store: Store) -> bool:
    """Return True if a path is a single file that is a checkpoint."""
    return _is_file(store) and find_tag_at_root(store) is not None


def _is_file(store: Store) -> bool:
    return store.file_system is not None and store.has("") and not store.is_directory("")


def resolve_local_and_remote(path: PathLike, local: PathLike) -> tuple[FileSystem, ObjectStore]:
    """Return the directory of ``local=``, and the object store of the path.

    Raises:
        UsageError: They are not a directory and an object store.
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
    """Return all tags of a directory and of the object store to which they are uploaded.

    See `xla_ckpt.features.local_first.upload_rules.list_locations`.
    """
    local, remote = open_root(directory).list_entries(), [entry for _, entry in list_all_tags(object_store)]
    return list_locations(local, remote, read_journals(directory, local, object_store.path))


@check_arguments
def latest_tag(path: PathLike, *, local: PathLike | None = None) -> str | None:
    """Return the newest committed tag in `path`, or in `local` (see `list_tags`); None if there are no tags.

    In that case the commit helper is started, because a training program saves next (see `start_commit_helper`).
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
    """Start the helper process in which orbax commits, if this process is a training program's rank 0.

    Callers do not start it before a load, because the start would take processor time from the load. A program that has
    imported neither torch nor jax does not train, and starts no helper.
    """
    if "torch" in sys.modules or "jax" in sys.modules:
        from xla_ckpt.distributed import current_job

        if current_job.is_leader():
            open_root(store).prepare_commit()


def locate_checkpoint(path: PathLike, tag: str | None) -> tuple[Store, str | None]:
    """Return the root directory and the tag of a path, which may also be the path of a tag or of a file.

    Such a path is a tag, a Hugging Face folder, a torch.save file, or a set of SageMaker model parallel files. The tag
    is None for the newest one. A link in the root, such as ``latest``, is resolved to its tag.

    Raises:
        InvalidTagError: The tag is not a string.
        UsageError: A tag of a single file is given, or a link that leaves the root.
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
    """Return the given tag, or the newest one.

    Raises:
        NoCheckpointError: No tag is given, and there are no tags.
    """
    if tag is not None:
        return tag
    entries = list_tags_newest_last(store)
    if not entries:
        raise make_not_found_error(store, None)
    return entries[-1].tag


@check_arguments
def has_checkpoint(path: PathLike, *, local: PathLike | None = None) -> bool:
    """Return True if `path` contains a committed tag, or can itself be loaded: a tag, or a file (``.pt``).

    With `local`, also return True if that directory contains a tag (see `list_tags`).

    For a set of SageMaker model parallel files one part is sufficient: a load raises an error about missing parts, so
    that no job starts from scratch and overwrites the others.

    If there is no checkpoint, the commit helper is started, because a training program saves next (see
    `start_commit_helper`).
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

    Tags of other libraries have no digests: their zip files are compared with their own CRC-32, and the files and
    tensors of all ranks are checked for existence.

    Returns:
        A report; `report.ok` is True if there are no problems, otherwise `report.problems` lists them, file by file.

    Raises:
        NoCheckpointError: The tag does not exist.
        UnsupportedVersionError: The tag was written by a newer version of this library.
    """
    store, tag = locate_checkpoint(path, tag)
    return verify_stored_tag(store, choose_tag(store, tag), num_workers)


@check_arguments
def repair(path: PathLike, tag: str | None = None, *, num_workers: int = READ_THREADS) -> tuple[str, ...]:
    """Repair a tag that was saved with ``parity=``; the newest tag by default.

    Damaged bytes are found by their digests, reconstructed from the rest of the tag and its parity, verified, and only
    then written in place of the damaged file. The repair needs free space for the damaged files. Readers of the tag are
    not disturbed, and a repair that is killed causes no further damage (docs/repair.md).

    Returns:
        The paths of the files that were replaced, relative to the tag; empty if nothing was damaged.

    Raises:
        NoCheckpointError: The tag does not exist.
        UsageError: The tag was saved without parity.
        CorruptCheckpointError: The damage exceeds the parity; `details` names it. Nothing was changed.
        NotDurableError: The tag is repaired, but a power failure may undo the repair.
        StorageError: The storage failed.
    """
    store, tag = locate_checkpoint(path, tag)
    name = choose_tag(store, tag)
    with wrap_os_errors("repairing a tag", path=store.path, tag=name), annotate_errors(path=store.path, tag=name):
        return tuple(repair_stored_tag(open_store(store.path), name, num_workers))  # a view does not contain new files


MAX_DEPTH = 3
"""Maximum depth of the search for roots below a directory."""

MAX_INSPECTED = 1000
"""Maximum number of directories that this search inspects, and of other names in a root that are inspected."""


ListedTags = Sequence[tuple[Layout | None, TagEntry]]
"""Tags of a root directory, as returned by `xla_ckpt.formats.tags.list_all_tags`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagSummary:
    """Summary of a tag for a list of tags."""

    tag: str
    sequence: int
    """Sequence number of its commit; 0 if another library wrote it."""

    created: str | None
    """Time of its commit, in ISO 8601 format."""

    pinned: bool
    """True if the tag is exempt from retention."""

    arrays: int | None = None
    """Number of arrays; None if there is no index."""

    nbytes: int | None = None
    """Bytes of the arrays, each counted once; for a tag without an index, bytes of its files."""

    files: int | None = None
    ranks: int | None = None
    """Number of ranks that saved it; None if there is no index."""

    problem: str | None = None
    """Reason why the fields are unknown: the manifest is damaged."""

    layout: str | None = None
    """Name of the layout, or of the library that wrote it."""

    note: str = ""
    """Further remarks."""

    where: str = ""
    """Location of a tag that is uploaded to a bucket: ``local``, ``uploading 40 %``, ``remote`` or ``both``. Empty
    unless both places are listed."""

    kept: tuple[str, ...] = ()
    """Reasons why the retention policy of the newest tag keeps it; empty if that is unknown, or the policy does not
    keep it.
    """


_FOREIGN_REASON = "another library's"
"""Reason why a tag of another library is kept: this library never deletes such tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """File of a tag."""

    path: str
    """Path relative to the tag."""

    size: int
    """Size in bytes."""


def to_plain_json(value: Any) -> dict[str, Any]:
    """Return the fields of an object with plain values as plain JSON."""
    return {name: getattr(value, name) for name in type(value).__slots__}


def build_listing(
    path: str,
    tags: Sequence[TagSummary],
    roots: Sequence[Mapping[str, Any]] = (),
    beside: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the tags of a root directory as plain JSON.

    The result contains the tags, oldest first, the newest one, the roots below the directory, and other checkpoints in
    it.
    """
    return {
        "path": path,
        "tags": [to_plain_json(summary) for summary in tags],
        "newest": tags[-1].tag if tags else None,
        "roots": list(roots),
        "beside": list(beside),
    }


def summarize_tags(store: Store, tags: ListedTags | None = None) -> tuple[TagSummary, ...]:
    """Return summaries of all tags of a root directory, oldest commit first.

    `tags` is the result of `list_all_tags`, if the caller has it already.
    """
    tags = list_all_tags(store) if tags is None else tags
    own = [entry for layout, entry in tags if layout is None]
    others = {entry.tag: (_FOREIGN_REASON,) for layout, entry in tags if layout is not None}
    looks = {entry.tag: _inspect_tag(store, layout, entry) for layout, entry in tags}
    # The next save most likely has the same retention policy as the last one.
    policy = parse_policy(looks[own[-1].tag][1]) if own else None
    reasons = {} if policy is None else {**others, **explain_kept(load_tag_infos(store, own), policy)}
    return tuple(replace(summary, kept=reasons.get(tag, ())) for tag, (summary, _) in looks.items())


def summarize_path(path: PathLike) -> tuple[TagSummary, ...]:
    """Return summaries of the tags at a path: all tags of a root directory, or the one that the path is itself."""
    store, tag = locate_checkpoint(path, None)
    if tag is None:
        return summarize_tags(store)
    if (unlisted := summarize_unlisted(store, tag)) is not None:
        return (unlisted,)
    return tuple(summary for summary in summarize_tags(store) if summary.tag == tag)


def summarize_unlisted(store: Store, tag: str) -> TagSummary | None:
    """Return the summary of a checkpoint that is not listed as a tag, such as a single file; None for a tag."""
    foreign = find_foreign_tag(store, tag)
    return None if foreign is None or foreign[0].tagged else summarize_tag(store, *foreign)


def list_stray_checkpoints(store: Store, tags: ListedTags) -> list[dict[str, Any]]:
    """Return other checkpoints in a root directory; empty for a bucket.

    See `xla_ckpt.formats.tags.find_unlisted_checkpoints`.
    """
    if store.file_system is None:
        return []
    return [
        {"name": name, "layout": layout.origin or layout.name, "complete": entry.complete}
        for name, layout, entry in find_unlisted_checkpoints(store, (entry for _, entry in tags), MAX_INSPECTED)
    ]


def summarize_roots_below(path: str, tags: Set[str] = frozenset()) -> list[dict[str, Any]]:
    """Return the root directories below a directory, by path, with their newest tags. Its own tags are not roots.

    At most `MAX_DEPTH` levels and `MAX_INSPECTED` directories are searched. An object store with tags is not searched,
    because it contains the files of the tags under separate names.
    """
    if tags and open_store(path).file_system is None:
        return []
    roots = find_roots(path, levels=MAX_DEPTH, limit=MAX_INSPECTED, excluded=tags)
    return [{"path": below, "tags": len(its), "newest": its[-1]} for below, its in roots]


def summarize_local_and_remote(directory: FileSystem, object_store: ObjectStore) -> tuple[TagSummary, ...]:
    """Return summaries of all tags of a directory and its object store, each once, oldest commit first."""
    layouts = {entry.tag: layout for layout, entry in list_all_tags(object_store)}
    return tuple(
        replace(
            summarize_tag(directory if is_near else object_store, None if is_near else layouts.get(entry.tag), entry),
            where=where,
        )
        for entry, is_near, where in list_local_and_remote(directory, object_store)
    )


def summarize_tag(store: Store, layout: Layout | None, entry: TagEntry) -> TagSummary:
    """Return the summary of a tag; `layout` is None for a tag of this library. Does not raise for damage."""
    return _inspect_tag(store, layout, entry)[0]


def _inspect_tag(store: Store, layout: Layout | None, entry: TagEntry) -> tuple[TagSummary, Any]:
    """Return the summary of a tag, and the retention policy that it records."""
    summary = TagSummary(
        tag=entry.tag, sequence=entry.sequence, created=entry.created, pinned=entry.pinned, note=entry.note
    )
    try:
        if layout is not None:  # there is no index: the directory is listed
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
    """Return a remark about a tag from its manifest."""
    return "without its base model" if schema.is_without_base(manifest.skeleton) else ""


def list_stored_files(store: Store, entry: TagEntry) -> tuple[StoredFile, ...]:
    """Return the files of a tag; files in the root itself are listed in its entry."""
    apart = entry.files or (() if store.is_directory(entry.directory) else (entry.directory,))
    # Files at a path that the caller gives may be links.
    directory = store.open("", lock=False, links=True) if apart else store.open(entry.directory)
    with closing(directory):
        files = []
        for path in apart or directory.list_files():
            with closing(directory.open(path)) as source:
                files.append(StoredFile(path=path, size=source.size))
        return tuple(files)
