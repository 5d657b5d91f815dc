"""Deleting a tag and pinning one by hand, beside saves and readers that run meanwhile.

A tag is deleted as retention deletes it: by one rename into the trash. A pin is a word in the first line of the
manifest; the manifest is written anew beside the tag and takes the old one's place by one rename. Neither needs orbax.
"""

from __future__ import annotations

from xla_ckpt.errors import CheckpointError, StorageError, UsageError
from xla_ckpt.manifest import manifest_json
from xla_ckpt.storage.base import Store, read_whole, write_small
from xla_ckpt.tags.cleaning import move_to_trash, remove, remove_unused
from xla_ckpt.tags.commit import make_directory
from xla_ckpt.tags.directory import MANIFEST, TagEntry, entries, entry_of, no_such_tag
from xla_ckpt.tags.names import NEW_PREFIX, OLD_PREFIX, TMP_SUFFIX


def delete(store: Store, tag: str, *, force: bool) -> None:
    """Delete a tag of ours, durably. Who has it open reads on; its files go when nobody does any more.

    Args:
        store: The root directory.
        tag: Which tag.
        force: Delete it although it is pinned, being read, or the last tag.

    Raises:
        NoCheckpointError: There is no such tag.
        UsageError: It is pinned, being read, or the last one, without `force`; or a save of this tag is running.
        StorageError: The storage refused.
    """
    entry = _entry(store, tag)
    _check_no_save(store, tag)
    if not force:
        _check_dispensable(store, entry)
    try:
        moved = []
        # A killed replacement has left its old version, which a save would take for the tag that it has to bring back.
        for name in dict.fromkeys((OLD_PREFIX + tag, entry.directory)):
            if store.has(name):
                moved.append(move_to_trash(store, name))
                store.sync()
        for name in moved:
            remove_unused(store, name)  # the trash itself stays: a save may be about to move a tag there
    except FileNotFoundError:
        raise no_such_tag(store, tag) from None  # a save's retention came first
    except OSError as error:
        raise StorageError.of(error, "deleting a tag", path=store.path, tag=tag) from error


def pin(store: Store, tag: str, pinned: bool) -> bool:
    """Pin a tag of ours, or undo that, durably; whether that changed anything. Retention leaves pinned tags alone.

    Raises:
        NoCheckpointError: There is no such tag, or a save retired it meanwhile.
        CheckpointError: Its manifest is damaged.
        UsageError: A save of this tag is running, or replaced it meanwhile.
        StorageError: The storage refused. The pin is as it was, unless only making it durable was refused.
    """
    entry = _entry(store, tag)
    if entry.damage is not None:
        raise entry.damage
    if entry.pinned == pinned:
        return False
    try:
        _rewrite(store, entry, pinned)
    except FileNotFoundError:
        raise no_such_tag(store, tag) from None
    except OSError as error:
        raise StorageError.of(error, "pinning a tag", path=store.path, tag=tag) from error
    after = entry_of(store, tag)
    if after is None:
        raise no_such_tag(store, tag)
    return True


def _rewrite(store: Store, entry: TagEntry, pinned: bool) -> None:
    """Write the manifest anew with the pin that is wanted, and put it into the place of the old one."""
    directory = store.open(entry.directory)  # a save that retires tags leaves this one alone until it is closed
    try:
        data = _pinned(store, entry, read_whole(directory, MANIFEST), pinned)
        made = make_directory(store, f"{NEW_PREFIX}{entry.tag}-pin")
        try:
            write_small(made, MANIFEST, data)
            # A manifest must not come into a newer version of the tag. A save takes far longer than from here to the
            # rename, so one that begins after this look does not end before it.
            _check_no_save(store, entry.tag)
            now = entry_of(store, entry.tag)
            if now is None or (now.sequence, now.directory) != (entry.sequence, entry.directory):
                raise _busy(store, entry.tag)
            store.rename(f"{made.name}/{MANIFEST}", f"{entry.directory}/{MANIFEST}")
        finally:
            made.close()
            remove(store, made.name)
        directory.sync()
    finally:
        directory.close()


def _pinned(store: Store, entry: TagEntry, data: bytes, pinned: bool) -> bytes:
    try:
        return manifest_json.with_pin(data, pinned)
    except CheckpointError as error:
        raise error.at(path=store.path, tag=entry.tag, file=MANIFEST) from None


def _entry(store: Store, tag: str) -> TagEntry:
    entry = entry_of(store, tag)
    if entry is None:
        raise no_such_tag(store, tag)
    return entry


def _check_no_save(store: Store, tag: str) -> None:
    """Check that nobody writes this tag."""
    for name in store.names():
        draft = name == NEW_PREFIX + tag or name == tag + TMP_SUFFIX or _is_numbered(name, NEW_PREFIX + tag)
        if draft and store.in_use(name):
            raise _busy(store, tag)


def _is_numbered(name: str, begin: str) -> bool:
    rest = name.removeprefix(begin)
    return rest != name and rest[:1] == "-" and rest[1:].isdigit()


def _busy(store: Store, tag: str) -> UsageError:
    return UsageError("a save of this tag is running", path=store.path, tag=tag, hint="Try again when it has ended.")


def _check_dispensable(store: Store, entry: TagEntry) -> None:
    if entry.pinned:
        problem, hint = "this tag is pinned", "Unpin it first"
    elif [e.tag for e in entries(store)] == [entry.tag]:
        problem, hint = "this is the last tag, and without it nothing can be resumed", "Save another one first"
    elif store.in_use(entry.directory):
        problem, hint = "somebody reads this tag, or may do so", "Try again later"
    else:
        return
    raise UsageError(problem, path=store.path, tag=entry.tag, hint=f"{hint}, or delete it by force (force=, --force).")
