"""Tag directories through orbax: the only file that knows it, loaded by rank 0 on its first save.

`ocp.CheckpointManager` names, commits and retires the directories; what is inside of them is ours. It wants integer
steps, so a tag travels as an `int` that carries its name, the integer being the commit sequence. One manager lives for
one save: it holds no list that could grow stale, and no error of an earlier save. What orbax does not do is done
here: the old version of a tag stays until the new one is committed, everything is durable before it is visible, and
what a killed save left behind is cleaned up.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from xla_ckpt.errors import SaveError
from xla_ckpt.storage.local import LocalDirectory, sync_directory, sync_files
from xla_ckpt.tags.cleaning import clean, remove, remove_unused
from xla_ckpt.tags.directory import TagEntry, entries, in_use, locked, mark_in_use
from xla_ckpt.tags.names import OLD_PREFIX, TMP_SUFFIX, TRASH
from xla_ckpt.tags.retention import TagFact, superfluous

logger = logging.getLogger(__name__)

_ITEM = "payload"
"""orbax saves items into directories of their own; ours writes beside it, and the empty directory goes again."""

Write = Callable[[LocalDirectory, int], None]
"""(directory to fill, commit sequence): returns when everything in it is durable."""


class _Step(int):
    """A commit sequence that carries its tag through orbax."""

    tag: str

    def __new__(cls, sequence: int, tag: str) -> _Step:
        step = int.__new__(cls, sequence)
        step.tag = tag
        return step

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]  # orbax deep-copies steps
        return int(self), self.tag


class _TagNames(ocp.path.step.NameFormat[ocp.path.step.Metadata]):  # type: ignore[misc]
    """orbax's view of a root directory: committed tags as steps."""

    def build_name(self, step: Any) -> str:
        return str(step.tag)

    def find_all(self, base_path: Any) -> Iterable[ocp.path.step.Metadata]:
        return (_metadata(base_path, e) for e in entries(os.fspath(base_path)) if e.directory == e.tag)

    def find_step(self, base_path: Any, step: Any) -> ocp.path.step.Metadata:
        found = next((e for e in entries(os.fspath(base_path)) if e.tag == step.tag), None)
        if found is None or found.sequence != int(step):
            raise ValueError(f"{step.tag} (commit {int(step)}) is not there")
        return _metadata(base_path, found)


def _metadata(base_path: Any, entry: TagEntry) -> ocp.path.step.Metadata:
    return ocp.path.step.Metadata(step=_Step(entry.sequence, entry.tag), path=epath.Path(base_path) / entry.directory)


class _Retention:
    """orbax's preservation policy, from ours."""

    def __init__(self, root: str, tag: str, pinned: bool, num_kept: int | None) -> None:
        self.root, self.tag, self.pinned, self.num_kept = root, tag, pinned, num_kept

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        pinned = {e.tag for e in entries(self.root) if e.pinned}
        newest = {c.step.tag: int(c.step) for c in checkpoints}  # of a tag being replaced, the new one counts
        facts = [
            TagFact(tag, sequence, self.pinned if tag == self.tag else tag in pinned)
            for tag, sequence in newest.items()
        ]
        drop = {t for t in superfluous(facts, self.num_kept) if not in_use(os.path.join(self.root, t))}
        return [c.step.tag not in drop for c in checkpoints]


class _Payload(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """orbax's handler for our bytes."""

    @classmethod
    def typestr(cls) -> str:
        return "xla_ckpt.payload"

    async def async_save(self, directory: Any, args: _Save) -> list[Any]:
        # Nothing is left for orbax's own threads: this already runs in ours, and an error surfaces right here.
        self.save(directory, args)
        return []

    def save(self, directory: Any, args: _Save) -> None:
        args.fill(os.fspath(directory.parent))

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise SaveError("orbax does not read this payload: use xla_ckpt.restore", path=os.fspath(directory))

    def finalize(self, directory: Any) -> None:
        """Nothing: all is done when `save` returns."""


class _Save(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What orbax hands to the handler."""

    def __init__(self, fill: Callable[[str], None]) -> None:
        self.fill = fill


ocp.args.register_with_handler(_Payload, for_save=True, for_restore=True)(_Save)


def save_tag(root: str, tag: str, write: Write, *, pinned: bool, num_kept: int | None) -> int:
    """Commit one tag: `write` fills a fresh directory, which then appears as `tag` by one rename.

    Returns:
        The commit sequence of the tag.

    Raises:
        SaveError: orbax did not commit.
        Exception: Whatever `write` raised. The tag is then as it was before.
    """
    os.makedirs(root, exist_ok=True)
    clean(root)
    open_directories: list[LocalDirectory] = []
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(_ITEM, _Save, _Payload())
    tmp, old = os.path.join(root, tag + TMP_SUFFIX), os.path.join(root, OLD_PREFIX + tag)
    final = os.path.join(root, tag)

    def before_rename() -> None:
        shutil.rmtree(os.path.join(tmp, _ITEM))
        sync_files(tmp, [n for n in os.listdir(tmp) if n.startswith("_")])
        sync_directory(tmp)
        if os.path.lexists(final):
            os.rename(final, old)

    manager = ocp.CheckpointManager(
        root,
        handler_registry=registry,
        options=ocp.CheckpointManagerOptions(
            step_name_format=_TagNames(),
            preservation_policy=_Retention(root, tag, pinned, num_kept),
            create=False,
            todelete_subdir=TRASH,
            file_options=ocp.options.FileOptions(skip_sync_file_validations=True),  # or it deletes the old tag first
            async_options=ocp.AsyncOptions(
                timeout_secs=10**9, create_directories_asynchronously=False, post_finalization_callback=before_rename
            ),
        ),
    )
    sequence = 1 + max((e.sequence for e in entries(root)), default=0)

    def fill(directory: str) -> None:
        mine = LocalDirectory(directory)
        open_directories.append(mine)
        mark_in_use(mine)
        write(mine, sequence)

    try:
        manager.save(
            _Step(sequence, tag),
            args=ocp.args.Composite(**{_ITEM: _Save(fill)}),
            force=True,
            custom_metadata={"tag": tag, "sequence": sequence},
        )
        _finish(manager, root, tag, sequence)
    finally:
        for directory in open_directories:
            directory.close()
        manager.close()
        if os.path.isdir(tmp):  # of a save that failed, perhaps for lack of the space that it takes
            if open_directories and not locked(tmp):
                remove(tmp)  # this save made it: where there are no locks, nobody has to wait until it is old
            else:
                remove_unused(tmp)
    sync_directory(root)
    return sequence


def _finish(manager: Any, root: str, tag: str, sequence: int) -> None:
    """Wait for the commit. The directory itself says whether it happened; a failed clean-up is only logged."""
    problem: Exception | None = None
    try:
        manager.wait_until_finished()
    except Exception as error:
        # orbax raises the errors of commit and retention alike: which one it was is decided below.
        problem = error
    if not any(e.tag == tag and e.sequence == sequence and e.directory == tag for e in entries(root)):
        raise SaveError("the tag was not committed", path=root, tag=tag, found=problem) from problem
    if problem is not None:
        logger.warning("%s: tag %s is committed, but deleting older tags failed: %s", root, tag, problem)
