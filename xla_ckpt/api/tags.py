"""Listing and verifying tags. Tags of ours need neither torch nor orbax."""

from __future__ import annotations

import sys

from xla_ckpt.engine.verify import VerifyReport
from xla_ckpt.errors import UsageError, naming, storage_errors
from xla_ckpt.keywords import known_options
from xla_ckpt.layouts.listing import all_tags, named_itself, newest_last, tag_names
from xla_ckpt.layouts.no_tag import names_of_roots_below, no_tag
from xla_ckpt.layouts.opening import repair_stored, verify_stored
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import FileSystem, ObjectStore, Store
from xla_ckpt.storage.door import PathLike, store_at
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.local_first import journals_of
from xla_ckpt.tags.missing import followed
from xla_ckpt.tags.names import check_is_text
from xla_ckpt.tags.roots import root_of
from xla_ckpt.tags.upload_rules import whereabouts

logger = get_logger(__name__)


@known_options
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
        return [entry.tag for entry, _, _ in both_places(*near_and_far(path, local))]
    store = store_at(path).look()
    return [] if _is_one_file(store) else tag_names(store)


def _is_one_file(store: Store) -> bool:
    """Whether a path is a single file that is a checkpoint."""
    return _is_file(store) and named_itself(store) is not None


def _is_file(store: Store) -> bool:
    return store.file_system is not None and store.has("") and not store.is_directory("")


def near_and_far(path: PathLike, local: PathLike) -> tuple[FileSystem, ObjectStore]:
    """The directory that a caller names with ``local=``, and the object store that the path names.

    Raises:
        UsageError: They are none.
    """
    far, near = store_at(path), store_at(local)
    if far.object_store is None or near.file_system is None:
        raise UsageError(
            "tags go from a directory (local) to an object store (path)",
            expected="for example /nvme/run and s3://bucket/run",
            found=f"{near.path} and {far.path}",
        )
    return near.file_system, far.object_store


def both_places(near: FileSystem, far: ObjectStore) -> list[tuple[TagEntry, bool, str]]:
    """All tags of a directory and the object store where they go: see `xla_ckpt.tags.upload_rules.whereabouts`."""
    local, remote = root_of(near).entries(), [entry for _, entry in all_tags(far)]
    return whereabouts(local, remote, journals_of(near, local, far.path))


@known_options
def latest_tag(path: PathLike, *, local: PathLike | None = None) -> str | None:
    """The newest committed tag in `path`, or in `local` (see `list_tags`); None when there is none.

    Where there is none, a program that trains saves next, so what commits is started (see `expect_commit`).
    """
    if local is None:
        store = store_at(path).look()
        tags = [] if _is_one_file(store) else [entry.tag for entry in newest_last(store)]
    else:
        tags = list_tags(path, local=local)
    if not tags:
        expect_commit(store_at(path if local is None else local))
    return tags[-1] if tags else None


def expect_commit(store: Store) -> None:
    """Have the process started in which orbax commits, if this one is going to save, it seems: it trains, as rank 0.

    It is not, as long as there is something to load: the start would take processor time from the load. A program that
    has imported neither torch nor jax trains nothing, and is left as light as it is.
    """
    if "torch" in sys.modules or "jax" in sys.modules:
        from xla_ckpt.job import peers

        if peers.leads():
            root_of(store).expect()


def located(path: PathLike, tag: str | None) -> tuple[Store, str | None]:
    """The root directory and the tag that a caller means, who may name a tag by its own path, a directory of Hugging
    Face's, a file of torch.save, or a set of SageMaker model parallel's files.

    The tag stays None where the newest is meant. A link in the root, such as ``latest``, stands for its tag.

    Raises:
        InvalidTagError: The tag is no string.
        UsageError: A tag of a single file is named, or a link out of the root.
    """
    store = store_at(path).look()
    if tag is not None:
        check_is_text(tag, store.path)
        if _is_file(store):
            raise UsageError(
                "a file has no tags: it is one checkpoint, or none",
                path=store.path,
                tag=tag,
                hint="Pass the path of the file without a tag, or the root directory of the tags.",
            )
        return store, followed(store, tag)
    if (inside := named_itself(store)) is not None:
        return inside
    return store, None


def chosen_tag(store: Store, tag: str | None) -> str:
    """The tag that a caller names, or the newest.

    Raises:
        NoCheckpointError: None is named, and there is none.
    """
    if tag is not None:
        return tag
    entries = newest_last(store)
    if not entries:
        raise no_tag(store, None)
    return entries[-1].tag


@known_options
def has_checkpoint(path: PathLike, *, local: PathLike | None = None) -> bool:
    """Whether `path` holds a committed tag, or is what a load takes itself: a tag, or a file (``.pt``).

    With `local`, whether that directory holds a tag will do (see `list_tags`).

    Of a set of SageMaker model parallel's files it is enough that there is one part: a load tells what is missing, and
    nobody begins anew over the others.

    Where there is none, a program that trains saves next, so what commits is started (see `expect_commit`).
    """
    store, tag = located(path, None)
    exists = tag is not None or bool(tag_names(store) if local is None else list_tags(path, local=local))
    if not exists and (below := names_of_roots_below(store)):
        logger.warning("there is no checkpoint in %s, but in %s below it", store.path, below)
    if not exists:
        expect_commit(store if local is None else store_at(local))
    return exists


@known_options
def verify(path: PathLike, tag: str | None = None, *, num_workers: int = READERS) -> VerifyReport:
    """Read a whole tag, the newest by default, and compare every byte with its digest.

    Tags that another library wrote have no digests: their zips are compared with their own CRC-32, and the files and
    tensors of all ranks are looked for.

    Returns:
        A report; `report.ok` is True if nothing is wrong, else `report.problems` says what, file by file.

    Raises:
        NoCheckpointError: There is no such tag.
        UnsupportedVersionError: A newer version of this library wrote it.
    """
    store, tag = located(path, tag)
    return verify_stored(store, chosen_tag(store, tag), num_workers)


@known_options
def repair(path: PathLike, tag: str | None = None, *, num_workers: int = READERS) -> tuple[str, ...]:
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
    store, tag = located(path, tag)
    name = chosen_tag(store, tag)
    with storage_errors("repairing a tag", path=store.path, tag=name), naming(path=store.path, tag=name):
        return tuple(repair_stored(store_at(store.path), name, num_workers))  # a look does not see new files
