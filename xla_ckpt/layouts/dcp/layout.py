"""torch.distributed.checkpoint (DCP) as layouts: directories with `.metadata`, or safetensors of each rank.

Directories that stock DCP wrote are found, scanned and verified. Saves and conversions write ones that it reads, with
our manifest beside `.metadata`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.verify import VerifyReport
from xla_ckpt.errors import naming
from xla_ckpt.layouts.base import Layout, Rewriting, StoredState, Topology
from xla_ckpt.layouts.dcp import tags
from xla_ckpt.layouts.dcp.metadata import METADATA
from xla_ckpt.layouts.native import NativeWriting, native_files
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tags.entry import COMMITTED, MANIFEST, TagEntry

if TYPE_CHECKING:
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

    def writing(self, description: Description) -> NativeWriting:
        from xla_ckpt.layouts.dcp.chunks import filing_of, tensor_pickle

        for leaf in description.leaves:
            with naming(leaf=leaf.path):
                tensor_pickle(leaf.dtype, ())
        filing = filing_of(description.structure, flat=self.flat)
        # This job has just saved it.
        return NativeWriting(description, description.leaves, filing, partial(self._index_files, trust=True))

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        from xla_ckpt.layouts.dcp.chunks import filing_of

        filing = filing_of(stored.manifest.skeleton, flat=self.flat)
        files, specs = native_files(stored.manifest, stored.manifest.arrays, to, filing)
        return Rewriting(files, specs, index=partial(self._index_files, trust=stored.trust))

    def _index_files(self, reader: TagReader, *, trust: bool) -> Mapping[str, bytes]:
        from xla_ckpt.layouts.dcp.index import index_files

        return index_files(reader, trust=trust, flat=self.flat)
