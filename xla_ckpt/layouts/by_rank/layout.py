"""A layout that reads tags of rank files. It loads torch when it opens one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.verify import VerifyReport
from xla_ckpt.layouts.base import Layout
from xla_ckpt.layouts.by_rank.form import RankForm
from xla_ckpt.layouts.by_rank.tags import RankTag, by_time, named_tag
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.missing import no_such_tag
from xla_ckpt.tags.roots import root_of

if TYPE_CHECKING:
    from xla_ckpt.layouts.by_rank.files import RankFiles


class RankLayout(Layout):
    """A layout says in a `form` how the files of its ranks are called, and what they hold.

    One whose tags have marks, or several files for each rank, says itself which tags there are (`tag_at`), and which
    class reads their files (`files`).
    """

    asks = True
    pickles = True  # each rank stores its own containers

    form: RankForm
    """How tags are read in which each rank has one file."""

    def tag_at(self, store: Store, name: str) -> RankTag | None:
        """The tag of this name; None if it is none of this layout's. Looks at names only."""
        return named_tag(store, name, self.form.names)

    def files(self, store: Store, tag: RankTag, directory: Directory) -> RankFiles:
        """The files of a tag, whose directory is open."""
        from xla_ckpt.layouts.by_rank.one_file_each import OneFileEach

        return OneFileEach(directory, self.form, tag.below)

    def complete_tags(self, store: Store, names: Sequence[str]) -> list[RankTag]:
        """The complete tags among some names, oldest first.

        Raises:
            StorageError: The root cannot be read.
        """
        tags = (self.tag_at(store, name) for name in names) if self.origin else ()
        return sorted((tag for tag in tags if tag is not None and tag.complete), key=by_time)

    def entry_of(self, store: Store, tag: RankTag) -> TagEntry:
        """What a listing shows of a tag."""
        return tag.entry()

    def opened_tag(self, store: Store, name: str) -> RankTag:
        """The tag of this name, which was there a moment ago.

        Raises:
            NoCheckpointError: It is gone.
        """
        if (tag := self.tag_at(store, name)) is None:
            raise no_such_tag(root_of(store), name)
        return tag

    def tags(self, store: Store, names: Sequence[str]) -> list[TagEntry]:
        return [self.entry_of(store, tag) for tag in self.complete_tags(store, names)]

    def find(self, store: Store, tag: str) -> TagEntry | None:
        of_ranks = self.tag_at(store, tag) if self.origin else None
        return None if of_ranks is None else self.entry_of(store, of_ranks)

    def open(self, store: Store, entry: TagEntry, hints: Hints) -> TagReader:
        from xla_ckpt.layouts.by_rank.reading import open_ranks

        return open_ranks(self, store, self.opened_tag(store, entry.tag), hints)

    def verify(self, store: Store, entry: TagEntry, workers: int = READERS) -> VerifyReport:
        from xla_ckpt.layouts.by_rank.reading import verify_ranks

        return verify_ranks(self, store, self.opened_tag(store, entry.tag), workers)
