"""torch.distributed.checkpoint (DCP) as layouts: directories with `.metadata`, or safetensors of each rank.

Directories that stock DCP wrote are found, scanned and verified. Saves and conversions write ones that it reads, with
our manifest beside `.metadata`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from xla_ckpt.engine.seal import Index
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.verify import VerifyReport
from xla_ckpt.engine.writing import Writing
from xla_ckpt.errors import naming
from xla_ckpt.layouts.base import Layout, Rewriting, StoredState, Topology
from xla_ckpt.layouts.dcp import tags
from xla_ckpt.layouts.dcp.metadata import METADATA
from xla_ckpt.layouts.new_ranks import leaves_of_ranks
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.hints import Hints
from xla_ckpt.plan.save_plan import SavePlan, plan_save
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tags.entry import COMMITTED, MANIFEST, TagEntry

if TYPE_CHECKING:
    from xla_ckpt.layouts.dcp.chunks import DcpFiling
    from xla_ckpt.state.describe import Description


TORCHTITAN = "torchtitan"
"""Name of the layout with torchtitan's keys."""


class Dcp(Layout):
    """Directories that stock ``dcp.load`` reads. Those of ours have a manifest with digests beside ``.metadata``.

    Args:
        name: ``dcp`` has the keys of ``get_state_dict`` below ``model`` and ``optimizer``; ``torchtitan`` has those
            that torchtitan saves and resumes (see `xla_ckpt.layouts.dcp.keys.items`).
        finds: Whether this object answers for directories that stock DCP wrote, under any keys. Only one does, so that
            no tag is listed twice.
    """

    saves = True
    asks = True

    def __init__(self, name: str, *, finds: bool) -> None:
        self.name = name
        self.flat = name == TORCHTITAN
        self.finds = self.may_hold_tags = finds
        self.origin = "torch.distributed.checkpoint" if finds else ""

    def wrote(self, manifest: Manifest) -> bool:
        return any(file.path == METADATA for file in manifest.files)

    def saved_over(self, store: Store, tag: str) -> str:
        return (
            f"If torch.distributed.checkpoint has saved into this directory since, remove {MANIFEST} and {COMMITTED} "
            "from it: then it is read as DCP's."
        )

    def check(self, reader: TagReader) -> None:
        # Stock DCP saves into a directory that is there: its tensors get other files, and a load by the manifest would
        # find the old ones, undamaged.
        number = next(i for i, file in enumerate(reader.manifest.files) if file.path == METADATA)
        reader.head(number)

    def find(self, store: Store, tag: str) -> TagEntry | None:
        return tags.find_dcp_tag(store, tag) if self.finds else None

    def open(self, store: Store, entry: TagEntry, hints: Hints) -> TagReader:
        from xla_ckpt.layouts.dcp.scan import open_dcp

        return open_dcp(store, entry, hints)

    def verify(self, store: Store, entry: TagEntry, workers: int = READERS) -> VerifyReport:
        from xla_ckpt.layouts.dcp.verify import verify_dcp

        return verify_dcp(store, entry, workers)

    def writing(self, description: Description) -> DcpWriting:
        return DcpWriting(description, self.flat).checked()

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        from xla_ckpt.layouts.dcp.chunks import filing_of
        from xla_ckpt.layouts.dcp.index import index_files

        filing = filing_of(stored.manifest.skeleton, flat=self.flat)
        leaves, specs = leaves_of_ranks(stored.manifest, stored.manifest.arrays, to)
        files = [plan_save(of_rank, rank, to.mesh.size, filing=filing).files for rank, of_rank in enumerate(leaves)]
        return Rewriting(files, specs, index=partial(index_files, trust=stored.trust, flat=self.flat))


@dataclass(frozen=True)
class DcpWriting(Writing):
    """What one rank writes in this layout."""

    description: Description
    flat: bool

    def checked(self) -> DcpWriting:
        """The same, if the layout has a place for all of the state.

        Raises:
            UnsupportedStateError: It has none.
        """
        from xla_ckpt.layouts.dcp.chunks import tensor_pickle

        for leaf in self.description.leaves:
            with naming(leaf=leaf.path):
                tensor_pickle(leaf.dtype, ())
        _ = self._filing
        return self

    @cached_property
    def _filing(self) -> DcpFiling:
        from xla_ckpt.layouts.dcp.chunks import filing_of

        return filing_of(self.description.structure, flat=self.flat)

    @cached_property
    def plan(self) -> SavePlan:
        from xla_ckpt.arrays.registry import local_lanes

        placement = self.description.placement
        return plan_save(self.description.leaves, placement.rank, placement.world, local_lanes(), filing=self._filing)

    @property
    def index(self) -> Index:
        from xla_ckpt.layouts.dcp.index import index_files

        return partial(index_files, trust=True, flat=self.flat)  # this job has just saved it
