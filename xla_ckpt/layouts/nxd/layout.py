"""neuronx-distributed's layouts as values: ``xser`` and ``pt``, which it writes with and without ``use_xser``.

Tags that it wrote itself are found, scanned and verified; saves and conversions write its files with our manifest
beside them. The work is done by the modules beside this one, and loads torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xla_ckpt.layouts.base import ModelNames, Rewriting, StoredState, Topology
from xla_ckpt.layouts.by_rank.layout import RankLayout
from xla_ckpt.layouts.by_rank.tags import RankTag
from xla_ckpt.layouts.nxd.older import OLDER_FORM
from xla_ckpt.layouts.nxd.tags import FOLDERS, RANK_FILES, TAG_MARKS, by_time, marked_tag
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tags.entry import COMMITTED, MANIFEST, TagEntry
from xla_ckpt.tags.roots import root_of

if TYPE_CHECKING:
    from xla_ckpt.layouts.by_rank.files import RankFiles
    from xla_ckpt.layouts.by_rank.plan import Laying


class NeuronxDistributed(RankLayout):
    """One of neuronx-distributed's layouts.

    Args:
        name: ``xser`` has each tensor in a file of its own, ``pt`` all tensors of a rank in one.
        finds: Whether this object answers for the tags that neuronx-distributed wrote itself, in either layout. Only
            one object does, so that no tag is listed twice.
    """

    saves = True
    keeps_masters = True
    model_names = ModelNames.FUSED
    marks = TAG_MARKS
    names = RANK_FILES[FOLDERS[0]]
    form = OLDER_FORM

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

    def saved_over(self, store: Store, tag: str) -> str:
        committed = store.modified(f"{tag}/{COMMITTED}")
        newer = [name for name in TAG_MARKS if committed and (store.modified(f"{tag}/{name}") or 0) > committed]
        # Time stamps alone prove nothing: a copy of a tag has its own. They explain why a file is not as it was saved.
        if newer:
            since = f"neuronx-distributed has saved over this tag: its mark {newer[0]!r} is newer than {COMMITTED}. R"
        else:
            since = "If neuronx-distributed has saved a tag of this name since, r"
        return f"{since}emove {MANIFEST} and {COMMITTED} from the tag: then it is read as neuronx-distributed's."

    def beside(self, store: Store, tag: str) -> str:
        if not self.origin or not root_of(store).is_ours(tag) or marked_tag(store, tag) is None:
            return ""
        return f"neuronx-distributed's files. {self.saved_over(store, tag)}"

    def tag_at(self, store: Store, name: str) -> RankTag | None:
        return marked_tag(store, name) or super().tag_at(store, name)

    def tags(self, store: Store, names: Sequence[str]) -> list[TagEntry]:
        tags = (self.tag_at(store, name) for name in names) if self.origin else ()
        return [tag.entry() for tag in sorted((t for t in tags if t is not None and t.complete), key=by_time)]

    def files(self, store: Store, tag: RankTag, directory: Directory) -> RankFiles:
        from xla_ckpt.layouts.nxd.files import LegacyFiles, NxdFiles

        return NxdFiles(directory, store) if tag.marked else LegacyFiles(directory, self.form)

    def files_of(self, laying: Laying) -> list[FilePlan]:
        from xla_ckpt.layouts.nxd.writing import files_of_rank

        return files_of_rank(laying, xser=self.xser)

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        from xla_ckpt.layouts.nxd.writing import with_zero1

        return super().rewriting(stored, with_zero1(to, stored.manifest, xser=self.xser))
