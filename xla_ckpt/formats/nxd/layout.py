"""neuronx-distributed (NxD) layouts ``xser`` and ``pt`` (with and without ``use_xser``), file names, and tags in a
root.

Checkpoints that NxD wrote itself are found, scanned and verified, including the legacy format, in which each
rank has one file. Saves and conversions write NxD files and add our manifest. `files` reads and writes them, and
imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.save_plan import FilePlan
from xla_ckpt.core.tree import schema
from xla_ckpt.formats.base import ConversionPlan, ModelNames, StoredState, TargetTopology
from xla_ckpt.formats.nxd.optimizer import parse_optimizer
from xla_ckpt.formats.rank_files.file_names import RankCoords, RankFileName
from xla_ckpt.formats.rank_files.layout import (
    RankContent,
    RankFileFormat,
    RankLayout,
    RankTag,
    StoredTensor,
    get_modified_time,
)
from xla_ckpt.formats.state_dict_search import MODEL_NAMES, OPTIMIZER_NAMES, SCHEDULER_NAMES
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tags.entry import MANIFEST_FILE, ORBAX_COMMITTED_FILE, TagEntry
from xla_ckpt.tags.resolve import open_root

if TYPE_CHECKING:
    from xla_ckpt.formats.rank_files.files import RankFiles
    from xla_ckpt.formats.rank_files.writing import RankFilePlanner


MARKER_FILES = {"checkpoint": b"1", "done": b"1"}
"""Marker files by which neuronx-distributed finds a tag, and a complete one. Tags saved here also have a manifest."""

_DIGITS = re.compile(r"(\d+)")

RANK_FOLDERS = ("model", "optim")
"""Folders of a tag that contain the rank files."""

RANK_FILE_NAME = RankFileName("dp_rank_{dp:02}_tp_rank_{tp:02}_pp_rank_{pp:02}.pt")
EXPERT_RANK_FILE_NAME = RankFileName("dp_rank_{dp:02}_ep_rank_{ep:02}_tp_rank_{tp:02}_pp_rank_{pp:02}.pt")
"""Names of a rank's file in a job without and with expert parallelism."""

FOLDER_FILE_NAMES = {
    f: tuple(RankFileName(f"{f}/{name.template}") for name in (RANK_FILE_NAME, EXPERT_RANK_FILE_NAME))
    for f in RANK_FOLDERS
}
"""Names of the rank files including the folder, by folder."""


def find_marked_tag(store: Store, tag: str, subfolder: str = "") -> RankTag | None:
    """Find an NxD tag by its marker files ``checkpoint`` and ``done`` in a directory, or in a subfolder of it.

    ``done`` marks a complete tag. The newest tag is the one with the newest ``done``.

    Returns:
        The tag; None if the directory has no rank folders or no marker files.
    """
    folder = f"{tag}/{subfolder}".rstrip("/")
    if not any(store.is_directory(f"{folder}/{part}") for part in RANK_FOLDERS):
        return None
    done, begun = (get_modified_time(store, f"{folder}/{mark}") for mark in ("done", "checkpoint"))
    if done is None and begun is None:
        return None
    return RankTag(tag=tag, complete=done is not None, time=done or begun or 0, subfolder=subfolder)


def get_time_key(tag: RankTag) -> tuple[int, list[tuple[int, str]]]:
    """Return a sort key: older tags first, and tags of the same time by the numbers in their names."""
    parts = _DIGITS.split(tag.tag)
    return tag.time, [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


_LEGACY_FILE_NAMES = tuple(
    RankFileName(f"{folder}{file}")
    for folder in ("tp_rank_{tp:02}_pp_rank_{pp:02}", "tp_rank_{tp:02}_pp_rank_{pp:02}_dp_rank_{dp:02}")
    for file in ("", "/checkpoint.pt")
)
"""Names of a rank's file in the legacy format, in which some versions created a directory for each rank."""


def _parse_content(tree: Mapping[Any, Any], _: RankCoords) -> RankContent:
    if "model" not in tree and all(isinstance(value, StoredTensor) for value in tree.values()):
        return RankContent(model=tree)  # the program saved only the state dict of its model
    others = dict(tree)
    model, optimizer, scheduler = (_pop_state_dict(others, n) for n in (MODEL_NAMES, OPTIMIZER_NAMES, SCHEDULER_NAMES))
    parts = {} if scheduler is None else {schema.SCHEDULER: scheduler}
    return RankContent(
        model=model, optimizer=optimizer, parts={**parts, **({schema.USER_CONTENT: others} if others else {})}
    )


def _pop_state_dict(tree: dict[Any, Any], names: Sequence[str]) -> Mapping[Any, Any] | None:
    """Remove and return the state dict with the first of these names; None if none exists."""
    name = next((name for name in names if isinstance(tree.get(name), Mapping)), None)
    return None if name is None else tree.pop(name)


LEGACY_FORMAT = RankFileFormat(
    file_names=_LEGACY_FILE_NAMES, parse_content=_parse_content, parse_optimizer=parse_optimizer
)
"""Format of legacy checkpoints."""


class NxdLayout(RankLayout):
    """A neuronx-distributed layout.

    Args:
        name: ``xser`` stores each tensor in a separate file, ``pt`` all tensors of a rank in one.
        finds: True if this object finds the tags that neuronx-distributed wrote itself, in either layout. Only one
            object
        does, so that no tag is listed twice.
        other_names: Further names of the layout.
    """

    saves = True
    keeps_masters = True
    model_names = ModelNames.FUSED
    marks = MARKER_FILES
    file_names = FOLDER_FILE_NAMES[RANK_FOLDERS[0]]
    file_format = LEGACY_FORMAT

    def __init__(self, name: str, *, finds: bool, other_names: tuple[str, ...] = ()) -> None:
        self.name = name
        self.other_names = other_names
        self.origin = "neuronx-distributed" if finds else ""

    @property
    def xser(self) -> bool:
        """True if each tensor is stored in a separate file."""
        return self.name == "xser"

    def wrote(self, manifest: Manifest) -> bool:
        names = [f.path for f in manifest.files]
        files = [n for n in names if n.startswith(("model/", "optim/")) and n.endswith(".pt")]
        return bool(files) and self.xser == any(".tensors/" in name for name in files)

    def saved_over(self, store: Store, tag: str) -> str:
        committed = store.get_modified_time(f"{tag}/{ORBAX_COMMITTED_FILE}")
        newer = [
            name for name in MARKER_FILES if committed and (store.get_modified_time(f"{tag}/{name}") or 0) > committed
        ]
        # Modification times are not proof, because copies of a tag have new ones. They only explain why a file changed.
        if newer:
            since = (
                f"neuronx-distributed has saved over this tag: its mark {newer[0]!r} is newer than "
                f"{ORBAX_COMMITTED_FILE}. Remove"
            )
        else:
            since = "If neuronx-distributed has saved a tag of this name since, remove"
        files = f"{MANIFEST_FILE} and {ORBAX_COMMITTED_FILE}"
        return f"{since} {files} from the tag: then it is read as neuronx-distributed's."

    def beside(self, store: Store, tag: str) -> str:
        if not self.origin or not open_root(store).is_native_tag(tag) or find_marked_tag(store, tag) is None:
            return ""
        return f"neuronx-distributed's files. {self.saved_over(store, tag)}"

    def find_rank_tag(self, store: Store, name: str) -> RankTag | None:
        return find_marked_tag(store, name) or super().find_rank_tag(store, name)

    def tags(self, store: Store, names: Sequence[str]) -> list[TagEntry]:
        tags = (self.find_rank_tag(store, name) for name in names) if self.origin else ()
        return [tag.to_entry() for tag in sorted((t for t in tags if t is not None and t.complete), key=get_time_key)]

    def create_files(self, store: Store, tag: RankTag, directory: Directory) -> RankFiles:
        from xla_ckpt.formats.nxd.files import LegacyFiles, NxdFiles

        return NxdFiles(directory, store) if tag.marked else LegacyFiles(directory, self.file_format)

    def plan_files(self, planner: RankFilePlanner) -> list[FilePlan]:
        from xla_ckpt.formats.nxd.files import plan_rank_files

        return plan_rank_files(planner, xser=self.xser)

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        from xla_ckpt.formats.nxd.files import resolve_zero1

        return super().rewriting(stored, resolve_zero1(to, stored.manifest, xser=self.xser))
