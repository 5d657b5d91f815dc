"""The DCP layouts ``dcp`` and ``torchtitan``: directories with `.metadata`, or safetensors files of each rank.

Directories of stock DCP are detected, scanned and verified. Saves and conversions write directories that stock DCP
reads, with a manifest next to `.metadata`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.errors import annotate_errors
from xla_ckpt.formats.base import ConversionPlan, Layout, StoredState, TargetTopology
from xla_ckpt.formats.dcp import metadata
from xla_ckpt.formats.dcp.metadata import METADATA_FILE
from xla_ckpt.formats.native import NativeWritePlanner, plan_native_files
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.loading.verify import VerifyReport
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.tags.entry import MANIFEST_FILE, ORBAX_COMMITTED_FILE, TagEntry

if TYPE_CHECKING:
    from xla_ckpt.state.describe import StateDescription


TORCHTITAN = "torchtitan"
"""Name of the layout with the keys of torchtitan."""


class DcpLayout(Layout):
    """Directories that stock ``dcp.load`` reads. Tags of this library also have a manifest with digests.

    Args:
        name: ``dcp`` uses the keys of ``get_state_dict`` below ``model`` and ``optimizer``; ``torchtitan`` uses the
            keys that torchtitan saves and loads (see `xla_ckpt.formats.dcp.writing.list_items`).
        finds_foreign: True for the one instance that detects directories of stock DCP, with any keys. Only one instance
            does, so that tags are not listed twice.
    """

    saves = True
    asks = True

    def __init__(self, name: str, *, finds_foreign: bool) -> None:
        self.name = name
        self.flat = name == TORCHTITAN
        self.finds_foreign = self.may_hold_tags = finds_foreign
        self.origin = "torch.distributed.checkpoint" if finds_foreign else ""

    def wrote(self, manifest: Manifest) -> bool:
        return any(file.path == METADATA_FILE for file in manifest.files)

    def saved_over(self, store: Store, tag: str) -> str:
        return (
            f"If torch.distributed.checkpoint has saved into this directory since, remove {MANIFEST_FILE} and "
            f"{ORBAX_COMMITTED_FILE} from it: then it is read as DCP's."
        )

    def check(self, reader: TagReader) -> None:
        # Stock DCP can save into an existing directory: its tensors get other files, and a load by the manifest would
        # silently read the old ones.
        number = next(i for i, file in enumerate(reader.manifest.files) if file.path == METADATA_FILE)
        reader.read_head(number)

    def find(self, store: Store, tag: str) -> TagEntry | None:
        return metadata.find_dcp_tag(store, tag) if self.finds_foreign else None

    def open(self, store: Store, entry: TagEntry, hints: LoadHints) -> TagReader:
        from xla_ckpt.formats.dcp.scan import open_dcp

        return open_dcp(store, entry, hints)

    def verify(self, store: Store, entry: TagEntry, workers: int = READ_THREADS) -> VerifyReport:
        from xla_ckpt.formats.dcp.scan import verify_dcp

        return verify_dcp(store, entry, workers)

    def writing(self, description: StateDescription) -> NativeWritePlanner:
        from xla_ckpt.formats.dcp.writing import make_file_naming, make_tensor_pickle

        for leaf in description.leaves:
            with annotate_errors(leaf=leaf.path):
                make_tensor_pickle(leaf.dtype, ())
        filing = make_file_naming(description.structure, flat=self.flat)
        # The pickles are trusted because this job saved the state.
        return NativeWritePlanner(description, description.leaves, filing, partial(self._build_index_files, trust=True))

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        from xla_ckpt.formats.dcp.writing import make_file_naming

        filing = make_file_naming(stored.manifest.skeleton, flat=self.flat)
        files, specs = plan_native_files(stored.manifest, stored.manifest.arrays, to, filing)
        return ConversionPlan(files, specs, index=partial(self._build_index_files, trust=stored.trust))

    def _build_index_files(self, reader: TagReader, *, trust: bool) -> Mapping[str, bytes]:
        from xla_ckpt.formats.dcp.metadata_writer import build_index_files

        return build_index_files(reader, trust=trust, flat=self.flat)
