"""Deleting and pinning tags by hand. Neither needs torch or orbax."""

from __future__ import annotations

from xla_ckpt.errors import UsageError
from xla_ckpt.layouts.registry import find_foreign
from xla_ckpt.options import known_options
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import PathLike, store_at
from xla_ckpt.tags import keeping


@known_options
def delete_tag(path: PathLike, tag: str, *, force: bool = False) -> None:
    """Delete a tag, as retention would: it disappears in one step, and who reads it meanwhile reads on.

    In a job of many ranks one rank calls it.

    Args:
        path: Root directory.
        tag: Which tag.
        force: Delete it although it is pinned, or being read, or the last one.

    Raises:
        NoCheckpointError: There is no such tag.
        UsageError: It is pinned, being read, or the last one, and `force` is False; or it is being saved; or another
            library wrote it.
        StorageError: The storage refused.

    Example:
        ``xla_ckpt.delete_tag("runs/lm", "step_10")``
    """
    keeping.delete(_store_of(path, tag), tag, force=force)


@known_options
def pin_tag(path: PathLike, tag: str) -> bool:
    """Exempt a tag from retention, as `save_checkpoint(..., pinned=True)` does; False if it was exempt already.

    In a job of many ranks one rank calls it. A save of another tag may run meanwhile: it keeps the tag if it has not
    come to its retention yet.

    Raises:
        NoCheckpointError: There is no such tag, or a save retired it meanwhile.
        CorruptCheckpointError: Its manifest is damaged.
        UsageError: It is being saved; or another library wrote it: no retention of ours deletes such tags.
        StorageError: The storage refused.

    Example:
        ``xla_ckpt.pin_tag("runs/lm", "step_10")``
    """
    return keeping.pin(_store_of(path, tag), tag, True)


@known_options
def unpin_tag(path: PathLike, tag: str) -> bool:
    """Undo `pin_tag`; False if the tag was not pinned. The next save that retires tags may delete it.

    Raises:
        CheckpointError: As `pin_tag`.
    """
    return keeping.pin(_store_of(path, tag), tag, False)


def _store_of(path: PathLike, tag: str) -> Store:
    store = store_at(path)
    if (found := find_foreign(store, tag)) is not None:
        raise UsageError(
            f"{found[0].origin or found[0].name} wrote this tag, which this library neither pins nor deletes",
            path=store.path,
            tag=tag,
            hint="Retention never deletes it. Remove its files yourself.",
        )
    return store
