"""Tag directories through orbax: the only file that knows it, loaded by rank 0 alone.

`ocp.CheckpointManager` names, commits and retires the directories; what is inside of them is ours. It wants integer
steps, so a tag travels as an `int` that carries its name, the integer being the commit sequence. One manager lives for
one commit: it holds no list that could grow stale, and no error of an earlier one. The tag's files are written, and
durable, before orbax hears of them: what it commits is moved into the directory that it makes. What orbax does not do
is done here: the old version of a tag stays until the new one is committed, and all is durable before it is visible.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import orbax.checkpoint as ocp
from etils import epath

from xla_ckpt.errors import CheckpointError, SaveError
from xla_ckpt.storage.base import not_durable
from xla_ckpt.storage.local import LocalDirectory, LocalStore, is_at
from xla_ckpt.tags.cleaning import move_to_trash, remove, remove_unused
from xla_ckpt.tags.directory import TagEntry, entries, entry_of
from xla_ckpt.tags.names import OLD_PREFIX, TMP_SUFFIX, TRASH
from xla_ckpt.tags.orbax_import import spare_forked_children
from xla_ckpt.tags.overtaken import check_not_overtaken, set_aside
from xla_ckpt.tags.retention import TagFact, superfluous

if TYPE_CHECKING:
    from xla_ckpt.tags.commit import Draft

logger = logging.getLogger(__name__)

_ITEM = "payload"
"""orbax saves items into directories of their own; ours writes beside it, and the empty directory goes again."""


FEW = 16
"""orbax retires as many tags at once. For each it looks through the whole directory: 2,000 of them took minutes."""


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

    def __init__(self, looked_up: Callable[[], None]) -> None:
        self.looked_up = looked_up
        """Called whenever orbax is about to do something with a tag that is there."""

    def build_name(self, step: Any) -> str:
        return str(step.tag)

    def find_all(self, base_path: Any) -> Iterable[ocp.path.step.Metadata]:
        return (_metadata(base_path, e) for e in entries(_store(base_path)) if e.directory == e.tag)

    def find_step(self, base_path: Any, step: Any) -> ocp.path.step.Metadata:
        self.looked_up()
        found = entry_of(_store(base_path), step.tag)  # not among all: retention asks for each tag that it retires
        if found is None or found.sequence != int(step):
            raise ValueError(f"{step.tag} (commit {int(step)}) is not there")
        return _metadata(base_path, found)


def _store(base_path: Any) -> LocalStore:
    return LocalStore(os.fspath(base_path))


def _metadata(base_path: Any, entry: TagEntry) -> ocp.path.step.Metadata:
    return ocp.path.step.Metadata(step=_Step(entry.sequence, entry.tag), path=epath.Path(base_path) / entry.directory)


class _Retention:
    """orbax's preservation policy, from ours."""

    def __init__(self, store: LocalStore, tag: str, pinned: bool, num_kept: int | None) -> None:
        self.store, self.tag, self.pinned, self.num_kept = store, tag, pinned, num_kept
        self.renaming = False
        """Whether orbax has come to the rename that makes the new tag appear: all that follows is retention."""
        self.began: float | None = None
        """When the first tag was about to be retired (s of the performance counter); None if none was."""
        self.refused: OSError | None = None
        """Why the new tag could not be made durable."""
        self.many: list[str] = []
        """Tags to retire without orbax."""

    def begin(self) -> None:
        """A tag is looked up; after the rename that means that it is about to be retired."""
        if self.renaming and self.began is None:
            self.make_durable()  # the new tag must outlast a loss of power before an older one goes
            self.began = time.perf_counter()

    def make_durable(self) -> None:
        """Make the name of the new tag durable. What was refused once is not asked for again: a second fsync of what
        the first one could not write may succeed, and has written nothing.

        Raises:
            OSError: The storage refused.
        """
        if self.refused is None:
            try:
                self.store.sync()
            except OSError as error:
                self.refused = error
        if self.refused is not None:
            raise self.refused

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        if self.num_kept is None:
            return [True] * len(checkpoints)  # a root of 10,000 tags takes a third of a second to look through
        pinned = {e.tag for e in entries(self.store) if e.pinned}
        newest = {c.step.tag: int(c.step) for c in checkpoints}  # of a tag being replaced, the new one counts
        facts = [
            TagFact(tag, sequence, self.pinned if tag == self.tag else tag in pinned)
            for tag, sequence in newest.items()
        ]
        drop = [t for t in superfluous(facts, self.num_kept) if not self.store.in_use(t)]
        if len(drop) > FEW:
            self.many, drop = drop, []
        return [c.step.tag not in drop for c in checkpoints]

    def retire_many(self) -> OSError | None:
        """Retire the tags that are too many for orbax, as it would; the error of the first that could not be moved."""
        problem: OSError | None = None
        for tag in self.many:
            try:
                move_to_trash(self.store, tag)
            except FileNotFoundError:
                continue  # another job has retired it
            except OSError as error:
                problem = problem or error
        return problem


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
        args.move_into(os.fspath(directory.parent))

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise SaveError("orbax does not read this payload: use xla_ckpt.restore", path=os.fspath(directory))

    def finalize(self, directory: Any) -> None:
        """Nothing: all is done when `save` returns."""


class _Save(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What orbax hands to the handler: the draft whose files the tag gets."""

    def __init__(
        self, store: LocalStore, draft: str, held: list[LocalDirectory], directory_is_whole: Callable[[], None]
    ) -> None:
        self.store, self.draft, self.held, self.directory_is_whole = store, draft, held, directory_is_whole

    def move_into(self, directory: str) -> None:
        """Move everything in the draft, which is durable, into the directory that orbax made."""
        # One thread of orbax writes its file of metadata there while another one reads it, and logs an error if it is
        # empty still.
        self.directory_is_whole()
        mine = self.store.open(os.path.basename(directory), write=True)
        self.held.append(mine)  # locked until it is committed: a job that cleans up leaves it alone
        for name in self.store.names(self.draft):
            os.rename(os.path.join(self.store.path, self.draft, name), os.path.join(directory, name))
        self.store.remove(self.draft)


ocp.args.register_with_handler(_Payload, for_save=True, for_restore=True)(_Save)


def publish(draft: Draft, store: LocalStore, *, pinned: bool, num_kept: int | None, report: Any = None) -> float:
    """Have orbax make a tag of a draft, by one rename, and retire older ones (see `xla_ckpt.tags.commit.commit`)."""
    root, tag, sequence = store.path, draft.tag, draft.sequence
    new, tmp = draft.name, tag + TMP_SUFFIX
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(_ITEM, _Save, _Payload())

    def before_rename() -> None:
        store.remove(f"{tmp}/{_ITEM}")
        _sync(os.path.join(root, tmp))
        if not is_at(held[0], os.path.join(root, tmp)):  # orbax removes what has this name when it begins a save
            raise SaveError(
                "another job saves this tag, and has taken away what this one has written",
                tag=tag,
                hint="Two jobs that save to one directory need different tags.",
            )
        set_aside(store, tag, sequence)
        retention.renaming = True

    retention = _Retention(store, tag, pinned, num_kept)
    manager = ocp.CheckpointManager(
        root,
        handler_registry=registry,
        options=ocp.CheckpointManagerOptions(
            step_name_format=_TagNames(retention.begin),
            preservation_policy=retention,
            create=False,
            lightweight_initialize=True,  # or it looks for metrics in every tag, which takes 20 ms for each
            todelete_subdir=TRASH,
            file_options=ocp.options.FileOptions(skip_sync_file_validations=True),  # or it deletes the old tag first
            async_options=ocp.AsyncOptions(
                timeout_secs=10**9, create_directories_asynchronously=False, post_finalization_callback=before_rename
            ),
        ),
    )
    spare_forked_children()
    held: list[LocalDirectory] = []
    problem: Exception | None = None
    try:
        manager.save(
            _Step(sequence, tag),
            args=ocp.args.Composite(**{_ITEM: _Save(store, new, held, manager.check_for_errors)}),
            force=True,
            custom_metadata={"tag": tag, "sequence": sequence} | ({} if report is None else {"report": report}),
        )
    except Exception as error:
        # Of commit and retention alike, and another thread of orbax may go on to the rename: the directory itself says
        # what has happened, once orbax has ended.
        problem = error
    ended = _ended(manager)
    problem = problem or ended
    try:
        # By the directory itself: another job's version of the tag may have the same commit number.
        if not (held and is_at(held[0], os.path.join(root, tag))):
            check_not_overtaken(store, tag, sequence)
            if isinstance(problem, OSError | CheckpointError):
                raise problem
            raise SaveError("the tag was not committed", path=root, tag=tag, found=problem) from problem
        if retention.began is None:
            _make_durable(retention, draft)
        if retention.many:
            retention.began = time.perf_counter()
            problem = retention.retire_many() or problem
        if problem is not None:
            logger.warning("%s: tag %s is committed, but deleting older tags failed: %s", root, tag, problem)
        return 0.0 if retention.began is None else time.perf_counter() - retention.began
    finally:
        mine = bool(held) and is_at(held[0], os.path.join(root, tmp))
        for directory in held:
            directory.close()
        if store.is_directory(tmp):  # of a commit that failed, perhaps for lack of the space that it takes
            if mine:
                remove(store, tmp)  # this save made it: where there are no locks, nobody has to wait until it is old
            else:
                remove_unused(store, tmp)


def _ended(manager: Any) -> Exception | None:
    """Wait until no thread of orbax does anything any more; the first error that one of them met.

    Each error is raised once, by the first call that comes to it, and before that call waits for other threads.
    """
    problem: Exception | None = None
    for end in (manager.wait_until_finished, *(manager.close,) * 8):
        try:
            end()
        except Exception as error:
            problem = problem or error
        else:
            if end == manager.close:
                return problem
    assert problem is not None
    return problem


def _make_durable(retention: _Retention, draft: Draft) -> None:
    """Make the name of the new tag durable; if that cannot be had, the tag is as it was before.

    Raises:
        OSError: The storage refused.
        NotDurableError: It also refused to take the new tag back.
    """
    store, tag = retention.store, draft.tag
    try:
        retention.make_durable()
    except OSError as refused:
        try:
            store.rename(tag, draft.name)
        except OSError as error:
            raise not_durable(store, tag, refused) from error
        if store.has(OLD_PREFIX + tag):
            store.rename(OLD_PREFIX + tag, tag)
        raise


def _sync(path: str) -> None:
    """Make the names in a directory durable, and what orbax itself wrote there."""
    for name in os.listdir(path):
        if name.startswith("_"):
            fd = os.open(os.path.join(path, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    directory = LocalDirectory(path)
    try:
        directory.sync()
    finally:
        directory.close()
