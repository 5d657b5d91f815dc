"""A layout that reads tags of rank files. It loads torch when it opens one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.verify import VerifyReport
from xla_ckpt.layouts.base import Layout, Rewriting, StoredState, Topology
from xla_ckpt.layouts.by_rank.form import RankForm
from xla_ckpt.layouts.by_rank.grid import RankAt, RankName
from xla_ckpt.layouts.by_rank.tags import RankTag, named_tag
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.missing import no_such_tag
from xla_ckpt.tags.roots import root_of
from xla_ckpt.tree import path as paths

if TYPE_CHECKING:
    from xla_ckpt.engine.writing import Writing
    from xla_ckpt.layouts.by_rank.files import RankFiles
    from xla_ckpt.layouts.by_rank.plan import Laying
    from xla_ckpt.state.describe import Description


class RankLayout(Layout):
    """A layout says in a `form` how the files of its ranks are called, and what they hold.

    One whose tags have marks, or several files for each rank, says itself which tags there are (`tag_at`), which
    class reads their files (`files`), and which of them a rank writes (`files_of`).
    """

    asks = True
    pickles = True  # each rank stores its own containers

    form: RankForm
    """What tags are in which each rank has one file."""

    @property
    def names(self) -> Sequence[RankName]:
        """What a file is called that a rank writes: the first one counts that tells the ranks of the job apart."""
        return self.form.names

    def files_of(self, laying: Laying) -> list[FilePlan]:
        """The files that a rank writes of what it has (`laying.state`).

        Raises:
            UnsupportedStateError: There is no place for something in it.
        """
        assert self.form.tree is not None, f"{self.name} is only read"
        tree = self.form.tree(laying.state, RankAt.of(laying.at))
        return laying.shared(self.names, tree, paths.ROOT, dealt=laying.state.zero1)

    def wrote(self, manifest: Manifest) -> bool:
        names = self.names if self.converts else ()
        return any(name.at(file.path) is not None for file in manifest.files for name in names)

    def tag_at(self, store: Store, name: str) -> RankTag | None:
        """The tag of this name; None if it is none of this layout's. Looks at names only."""
        return named_tag(store, name, self.form.names)

    def files(self, store: Store, tag: RankTag, directory: Directory) -> RankFiles:
        """The files of a tag, whose directory is open."""
        from xla_ckpt.layouts.by_rank.one_file_each import OneFileEach

        return OneFileEach(directory, self.form, tag.below)

    def opened_tag(self, store: Store, name: str) -> RankTag:
        """The tag of this name, which was there a moment ago.

        Raises:
            NoCheckpointError: It is gone.
        """
        if (tag := self.tag_at(store, name)) is None:
            raise no_such_tag(root_of(store), name)
        return tag

    def find(self, store: Store, tag: str) -> TagEntry | None:
        of_ranks = self.tag_at(store, tag) if self.origin else None
        return None if of_ranks is None else of_ranks.entry()

    def open(self, store: Store, entry: TagEntry, hints: Hints) -> TagReader:
        from xla_ckpt.layouts.by_rank.reading import open_ranks

        return open_ranks(self, store, self.opened_tag(store, entry.tag), hints)

    def verify(self, store: Store, entry: TagEntry, workers: int = READERS) -> VerifyReport:
        from xla_ckpt.layouts.by_rank.reading import verify_ranks

        return verify_ranks(self, store, self.opened_tag(store, entry.tag), workers)

    def writing(self, description: Description) -> Writing:
        from xla_ckpt.layouts.by_rank.writing import RankWriting

        return RankWriting.of(self, description)

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        from xla_ckpt.layouts.by_rank.rewriting import new_job, rewritten

        return rewritten(self, new_job(self, stored, to), to)
