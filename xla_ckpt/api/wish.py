"""What a caller asks of a save or of a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from xla_ckpt.api.products import follower
from xla_ckpt.api.replacing import check_place
from xla_ckpt.engine.order import Order
from xla_ckpt.engine.upload import Uploader
from xla_ckpt.errors import UsageError
from xla_ckpt.job.call import Call
from xla_ckpt.job.job import Job
from xla_ckpt.keywords import as_texts
from xla_ckpt.layouts.base import Layout
from xla_ckpt.layouts.registry import layout_named, saved
from xla_ckpt.options import LoadOptions, SaveOptions
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.rules import Parsed, Rules
from xla_ckpt.state.members import Like, Objects, Tree
from xla_ckpt.storage.door import PathLike, full_path
from xla_ckpt.tags.root import Root


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a caller asks of a save."""

    layouts: Sequence[Layout]
    workers: int
    num_kept: int | None
    waits: bool
    """Whether the caller waits until all is written."""

    mesh: Mesh | str | None
    shardings: Rules | None
    pinned: bool | None
    options: SaveOptions

    def order(
        self, path: PathLike, tag: str, content: Objects | Tree, job: Job, *, root: Root, uploader: Uploader | None
    ) -> Order:
        """What is asked of the ranks of a job: to commit a tag in `root`, and to upload it from there."""
        options = self.options
        call = Call.of(
            "save_checkpoint" if isinstance(content, Objects) else "save",
            path=full_path(path),
            tag=tag,
            mesh=str(job.placement.mesh),
            objects=content.given,
            layout=", ".join(layout.name for layout in self.layouts),
            num_kept_ckpts=self.num_kept,
            pinned=self.pinned,
            async_save=not self.waits,
            **options.in_common(),
        )
        return Order(
            root=root,
            tag=tag,
            call=call,
            options=options,
            pinned=self.pinned,
            num_kept=self.num_kept,
            uploader=uploader,
            # A look at a bucket takes requests: the thread of the save makes them.
            check=None if root.store.object_store is None else partial(check_place, root.store, tag),
            committed=follower(root, tag, options.products),
            workers=max(1, self.workers),
            shown=False if not self.waits and options.progress is None else job.shows(options.progress),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWish:
    """What a caller asks of a load."""

    mesh: Mesh | str | None
    rules: Parsed
    strict: bool
    cast: bool
    workers: int
    trust: bool
    options: LoadOptions
    alone: bool = False
    """Whether this process reads by itself, whatever other ranks of its job do."""

    def call(self, path: str, tag: str | None, content: Objects | Like, job: Job) -> Call:
        """The load as far as all ranks have to ask for the same."""
        return Call.of(
            "load_checkpoint" if isinstance(content, Objects) else "restore",
            path=path,
            tag=tag,
            mesh=str(job.placement.mesh),
            objects=content.given,
            strict=self.strict,
            cast=self.cast,
            trust_pickle=self.trust,
            **self.options.in_common(),
        )


def chosen_layouts(layout: str | Sequence[str] | None, *, use_xser: bool) -> tuple[Layout, ...]:
    """The layouts that a caller wants, in order of preference.

    Raises:
        UsageError: There is no such layout, or `use_xser` contradicts it.
    """
    wanted = ("xser" if use_xser else "native",) if layout is None else layout
    names = as_texts("layout", wanted, f"one of {', '.join(saved())}")
    if use_xser and names[0] != "xser":
        raise UsageError("use_xser=True asks for another layout than layout=", expected="xser", found=str(layout))
    return tuple(layout_named(name, among=saved()) for name in names)
