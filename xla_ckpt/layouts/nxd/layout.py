"""neuronx-distributed's layouts as values: ``xser`` and ``pt``, which it writes with and without ``use_xser``.

Tags that it wrote itself are found, scanned and verified; saves and conversions write its files with our manifest
beside them. The work is done by the modules beside this one, and loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xla_ckpt.engine.read import READERS
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.verify import VerifyReport
from xla_ckpt.layouts.base import Layout, ModelNames, Rewriting, StoredState, Topology
from xla_ckpt.layouts.nxd import tags
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.directory import COMMITTED, MANIFEST, TagEntry

if TYPE_CHECKING:
    from xla_ckpt.engine.save import Writing
    from xla_ckpt.state.describe import Description

MARKS = {"checkpoint": b"1", "done": b"1"}
"""Files by which neuronx-distributed finds a tag, and a complete one. In tags of ours the manifest says that, too."""


class NeuronxDistributed(Layout):
    """One of neuronx-distributed's layouts.

    Args:
        name: ``xser`` has each tensor in a file of its own, ``pt`` all tensors of a rank in one.
        finds: Whether this object answers for the tags that neuronx-distributed wrote itself, in either layout. Only
            one object does, so that no tag is listed twice.
    """

    saves = True
    pickles = True
    asks = True
    model_names = ModelNames.FUSED
    marks = frozenset(MARKS)
    saved_over = (
        f"If neuronx-distributed has saved a tag of this name since, remove {MANIFEST} and {COMMITTED} from the tag: "
        "then it is read as neuronx-distributed's."
    )

    def __init__(self, name: str, *, finds: bool, other_names: tuple[str, ...] = ()) -> None:
        self.name = name
        self.other_names = other_names
        self.origin = "neuronx-distributed" if finds else ""

    @property
    def xser(self) -> bool:
        """Whether each tensor has a file of its own."""
        return self.name == "xser"

    def wrote(self, manifest: Manifest) -> bool:
        names = [f.path for f in manifest.files]
        files = [n for n in names if n.startswith(("model/", "optim/")) and n.endswith(".pt")]
        return bool(files) and self.xser == any(".tensors/" in name for name in files)

    def tags(self, store: Store) -> list[TagEntry]:
        return [found.entry() for found in tags.complete_tags(store)] if self.origin else []

    def find(self, store: Store, tag: str) -> TagEntry | None:
        found = tags.find_tag(store, tag) if self.origin else None
        return None if found is None else found.entry()

    def open(self, store: Store, found: TagEntry, hints: Hints) -> TagReader:
        from xla_ckpt.layouts.nxd.adapters import BesideRoot
        from xla_ckpt.layouts.nxd.scan import open_scanned
        from xla_ckpt.state.values import CODEC

        return open_scanned(store, tags.existing(store, found.tag), hints, CODEC, BesideRoot(store))

    def verify(self, store: Store, found: TagEntry, workers: int = READERS) -> VerifyReport:
        from xla_ckpt.layouts.nxd.verify import verify_nxd
        from xla_ckpt.state.values import CODEC

        return verify_nxd(store, tags.existing(store, found.tag), CODEC, workers)

    def writing(self, description: Description) -> Writing:
        from xla_ckpt.layouts.nxd.writing import writing_of

        return writing_of(description, xser=self.xser, marks=MARKS)

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        from xla_ckpt.layouts.nxd.writing import rewriting_of

        return rewriting_of(stored, to, self.name, xser=self.xser, marks=MARKS)
