"""How a job saves in orbax's layout, and what a conversion writes of it.

Each rank writes whole chunks of the arrays that it holds, without compression, each in a file of its own. Of the copies
of a part, one is written, and none is cut: the copies of different parts are dealt out to the ranks. All ranks tell how
they cut the arrays before anything is written, and from that each of them knows the same grid of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xla_ckpt.engine.seal import Index
from xla_ckpt.engine.writing import Writing
from xla_ckpt.layouts.base import Rewriting, StoredState
from xla_ckpt.layouts.orbax.grid import JobCuts, OwnParts, chunk_files, chunk_shape
from xla_ckpt.layouts.orbax.item import OrbaxTree, check_array, item_of
from xla_ckpt.lightweight import cached_property
from xla_ckpt.plan.save_plan import OwnBox, SavePlan, own_boxes
from xla_ckpt.sharding.box import Box
from xla_ckpt.tree import path as paths

if TYPE_CHECKING:
    from xla_ckpt.plan.file_plan import FilePlan
    from xla_ckpt.state.describe import Description


def rewriting_of(stored: StoredState, below: str = "", *, as_stored: bool = False) -> Rewriting:
    """The files of a stored state, or of the part of it that is wanted.

    Args:
        below: What the paths of the files begin with: the item in which the tree lies.
        as_stored: Whether the chunks are those that it is stored in, which are of one shape.

    Raises:
        UnsupportedStateError: orbax has no place for something in it.
    """
    manifest = stored.manifest
    item = item_of(manifest.skeleton, stored.part, trust=stored.trust)
    files: list[FilePlan] = []
    written: set[str] = set()
    for name, leaf in item.arrays.items():
        record = manifest.array(leaf)
        assert record is not None, leaf  # the skeleton names what is stored
        check_array(leaf, record.dtype, record.shape)
        if as_stored:
            chunk = min(record, key=lambda shard: shard.box.start).box.shape
        else:
            chunk = chunk_shape(record.shape, record.dtype.itemsize, (0,) * len(record.shape))
        target, whole = manifest.aliases.get(leaf, leaf), Box.whole(record.shape)
        copy = target in written
        written.add(target)
        files += chunk_files(below + name, target, whole, record.dtype.itemsize, chunk=chunk, source=None, copy=copy)
    return Rewriting([tuple(files)], index=lambda reader: item.small_files(reader.manifest, below))


@dataclass(frozen=True)
class OrbaxWriting(Writing):
    """What one rank writes in this layout."""

    description: Description
    below: str
    """What the paths of the files begin with: the item in which the tree lies."""

    def checked(self) -> OrbaxWriting:
        """The same, if the layout has a place for all of the state.

        Raises:
            UnsupportedStateError: It has none.
        """
        _ = self._item
        for leaf in self.description.leaves:
            check_array(leaf.path, leaf.dtype, leaf.shape)
        return self

    @cached_property
    def _item(self) -> OrbaxTree:
        return item_of(self.description.structure, paths.ROOT, trust=True)  # this process has just described it

    @cached_property
    def _own(self) -> Sequence[OwnBox]:
        return list(own_boxes(self.description.leaves, cut=False))

    @property
    def told(self) -> OwnParts:
        parts: dict[str, list[list[Any]]] = {}  # lists, as it comes to other ranks
        for own in self._own:
            parts.setdefault(own.leaf.path, [list(own.leaf.shape), []])[1].append([own.box.start, own.box.stop])
        return parts

    def unite(self, words: Sequence[Any]) -> Any:
        return JobCuts.of(words).to_json()

    @cached_property
    def plan(self) -> SavePlan:
        """See `Writing`. Only its sources are final: all ranks have to tell how they cut the arrays."""
        return self._cut(JobCuts.of([self.told]))

    def plan_among(self, united: Any) -> SavePlan:
        return self._cut(JobCuts.from_json(united))

    def _cut(self, cuts: JobCuts) -> SavePlan:
        """What this rank writes if all ranks cut the arrays so."""
        rank = self.description.placement.rank
        names: dict[str, list[str]] = {}
        for name, leaf in self._item.arrays.items():
            names.setdefault(self.description.aliases.get(leaf, leaf), []).append(name)
        files: list[FilePlan] = []
        for own in self._own:
            leaf, shape, itemsize = own.leaf.path, own.leaf.shape, own.leaf.dtype.itemsize
            chunk = chunk_shape(shape, itemsize, cuts.steps.get(leaf, (0,) * len(shape)))
            # What another rank writes, too, orbax does not see. It is compared, and the manifest finds one of them.
            suffix = "" if cuts.first.get((leaf, own.box), rank) == rank else f".of-rank-{rank}"
            for number, name in enumerate(names[leaf]):
                files += chunk_files(
                    self.below + name,
                    leaf,
                    own.box,
                    itemsize,
                    chunk=chunk,
                    source=own.source,
                    copy=number > 0,
                    suffix=suffix,
                )
        return SavePlan(tuple(files))

    @property
    def index(self) -> Index:
        return lambda reader: item_of(reader.manifest.skeleton, paths.ROOT, trust=True).small_files(
            reader.manifest, self.below
        )
