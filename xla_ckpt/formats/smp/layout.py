"""The SageMaker model parallel (SMP) layout.

A *set* of files is named by the argument of ``smp.save``: ``load_checkpoint("runs/checkpoint.pt", model=...)`` finds
``runs/checkpoint.pt_0_0.pt`` and its peers. A directory written by ``smp.save_checkpoint`` is named by its root and its
name, or by its own path. Saves and conversions write such directories, and add our manifest. `scan` and `writing`
implement reading and writing, and import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.formats.base import ConversionPlan, StoredState, TargetTopology
from xla_ckpt.formats.rank_files.layout import RankLayout, RankTag
from xla_ckpt.formats.scan import TORCH_SAVE_SUFFIXES
from xla_ckpt.formats.smp import tags
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tags.entry import MANIFEST_FILE, ORBAX_COMMITTED_FILE, TagEntry

if TYPE_CHECKING:
    from xla_ckpt.formats.rank_files.files import RankFiles
    from xla_ckpt.saving.finalize import WritePlanner
    from xla_ckpt.state.describe import StateDescription


class SmpLayout(RankLayout):
    """The SMP layout, with all file names that its versions have written."""

    name = "smp"
    origin = "SageMaker model parallel"
    may_hold_tags = True
    saves = True
    keeps_masters = True
    file_names = tags.get_written_names(tags.OPTIMIZER_SETS[-1])

    def wrote(self, manifest: Manifest) -> bool:
        return any(file.path == tags.JOB_CONFIG for file in manifest.files)

    def find_rank_tag(self, store: Store, name: str) -> RankTag | None:
        return tags.find_smp_tag(store, name)

    def tags(self, store: Store, names: Sequence[str]) -> list[TagEntry]:
        return [tag.to_entry() for tag in tags.list_complete_tags(store, names)]

    def create_files(self, store: Store, tag: RankTag, directory: Directory) -> RankFiles:
        from xla_ckpt.formats.smp.scan import SmpFiles

        return SmpFiles(directory, cast("tags.SmpTag", tag))

    def tag_of(self, entry: TagEntry) -> str:
        name = entry.tag.removesuffix(tags.ALL_PARTS)
        stem, dot, suffix = name.rpartition(".")
        name = stem if dot and f".{suffix}" in TORCH_SAVE_SUFFIXES else name
        return name.removesuffix(tags.PARTIAL) or entry.tag

    def saved_over(self, store: Store, tag: str) -> str:
        return (
            f"If SMP has saved a tag of this name since, remove {MANIFEST_FILE} and {ORBAX_COMMITTED_FILE} from the "
            "tag: then it is read as SMP's."
        )

    def beside(self, store: Store, tag: str) -> str:
        if tag.endswith(tags.ALL_PARTS) or not store.has(tag) or store.is_directory(tag):
            return ""
        parts = tags.find_smp_tag(store, f"{tag}{tags.ALL_PARTS}")
        if parts is None:
            return ""
        return f"{len(parts.files)} parts of SageMaker model parallel's; {store.path}/{parts.tag} names them"

    def writing(self, description: StateDescription) -> WritePlanner:
        from xla_ckpt.formats.smp.writing import make_write_planner

        return make_write_planner(self, description)

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        from xla_ckpt.formats.smp.writing import plan_smp_conversion

        return plan_smp_conversion(self, stored, to)
