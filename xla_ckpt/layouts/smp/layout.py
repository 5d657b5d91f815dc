"""SageMaker model parallel's (SMP) files as a layout.

A *set* of files is named by what ``smp.save`` was given: ``load_checkpoint("runs/checkpoint.pt", model=...)`` finds
``runs/checkpoint.pt_0_0.pt`` and its peers. A directory that ``smp.save_checkpoint`` made is named by its root and its
name, or by its own path. Such directories are written, too, with our manifest in them. The work is done by the modules
beside this one, and loads torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from xla_ckpt.layouts.base import Rewriting, StoredState, Topology
from xla_ckpt.layouts.by_rank.layout import RankLayout
from xla_ckpt.layouts.by_rank.tags import RankTag
from xla_ckpt.layouts.saved_files import SUFFIXES
from xla_ckpt.layouts.smp import tags
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tags.entry import COMMITTED, MANIFEST, TagEntry

if TYPE_CHECKING:
    from xla_ckpt.engine.writing import Writing
    from xla_ckpt.layouts.by_rank.files import RankFiles
    from xla_ckpt.state.describe import Description


class SageMaker(RankLayout):
    """SMP's layout, in all forms of names that its versions have written."""

    name = "smp"
    origin = "SageMaker model parallel"
    may_hold_tags = True
    saves = True
    keeps_masters = True
    names = tags.written_names(tags.OPTIMIZER_SETS[-1])

    def wrote(self, manifest: Manifest) -> bool:
        return any(file.path == tags.JOB_CONFIG for file in manifest.files)

    def tag_at(self, store: Store, name: str) -> RankTag | None:
        return tags.find_smp_tag(store, name)

    def tags(self, store: Store, names: Sequence[str]) -> list[TagEntry]:
        return [tag.entry() for tag in tags.complete_smp_tags(store, names)]

    def files(self, store: Store, tag: RankTag, directory: Directory) -> RankFiles:
        from xla_ckpt.layouts.smp.scan import SmpFiles

        return SmpFiles(directory, cast("tags.SmpTag", tag))

    def tag_of(self, entry: TagEntry) -> str:
        name = entry.tag.removesuffix(tags.ALL_PARTS)
        stem, dot, suffix = name.rpartition(".")
        name = stem if dot and f".{suffix}" in SUFFIXES else name
        return name.removesuffix(tags.PARTIAL) or entry.tag

    def saved_over(self, store: Store, tag: str) -> str:
        return (
            f"If SMP has saved a tag of this name since, remove {MANIFEST} and {COMMITTED} from the tag: then it is "
            "read as SMP's."
        )

    def beside(self, store: Store, tag: str) -> str:
        if tag.endswith(tags.ALL_PARTS) or not store.has(tag) or store.is_directory(tag):
            return ""
        parts = tags.find_smp_tag(store, f"{tag}{tags.ALL_PARTS}")
        if parts is None:
            return ""
        return f"{len(parts.files)} parts of SageMaker model parallel's; {store.path}/{parts.tag} names them"

    def writing(self, description: Description) -> Writing:
        from xla_ckpt.layouts.smp.writing import smp_writing

        return smp_writing(self, description)

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        from xla_ckpt.layouts.smp.writing import smp_rewriting

        return smp_rewriting(self, stored, to)
