"""What a caller asks of a save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_ckpt.errors import UsageError
from xla_ckpt.job.call import Call
from xla_ckpt.job.job import Job
from xla_ckpt.keywords import as_texts
from xla_ckpt.layouts.base import Layout
from xla_ckpt.layouts.registry import layout_named, saved
from xla_ckpt.options import SaveOptions
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.rules import Rules
from xla_ckpt.state.members import Objects, Tree


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

    def shown(self, job: Job) -> bool | None:
        """Whether this rank shows a progress bar; None decides by itself."""
        return False if not self.waits and self.options.progress is None else job.shows(self.options.progress)

    def call(self, path: str, tag: str, content: Objects | Tree, mesh: Mesh) -> Call:
        """The save as far as all ranks have to ask for the same."""
        return Call.of(
            "save_checkpoint" if isinstance(content, Objects) else "save",
            path=path,
            tag=tag,
            mesh=str(mesh),
            objects=content.given,
            layout=", ".join(layout.name for layout in self.layouts),
            num_kept_ckpts=self.num_kept,
            pinned=self.pinned,
            async_save=not self.waits,
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
