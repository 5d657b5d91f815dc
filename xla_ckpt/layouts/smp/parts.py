"""The parts of a set, read: what each holds, and whether all of them are there and of one save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, naming
from xla_ckpt.layouts.by_rank.arrays import RankArray
from xla_ckpt.layouts.by_rank.files import RankFiles
from xla_ckpt.layouts.by_rank.form import StoredTensor
from xla_ckpt.layouts.by_rank.grid import RankAt, RankGrid, listed_names
from xla_ckpt.layouts.one_file.objects import stored_tree
from xla_ckpt.layouts.saved_files import SavedFiles
from xla_ckpt.layouts.smp.model import joined_parts
from xla_ckpt.layouts.smp.one_save import SetPart, identified, saves_beside, two_saves
from xla_ckpt.layouts.smp.tags import FileSet, SmpTag
from xla_ckpt.layouts.torch_save.ahead import FEW_AHEAD, Ahead
from xla_ckpt.layouts.torch_save.stand_ins import Attributes
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.storage.base import Directory

logger = get_logger(__name__)

_MODULE = "smdistributed.modelparallel.torch.fp16.loss_scaler"
SCALERS = {name: Attributes.of(name) for name in (f"{_MODULE}.LossScaler", f"{_MODULE}.DynamicLossScaler")}
"""What SMP's fp16 optimizer scales losses by: objects of its own classes, of plain numbers."""

FIRST = RankAt()


class PartFiles(RankFiles):
    """The files of a tag. The bytes of each storage are compared with its CRC-32 before anybody has them."""

    def __init__(self, directory: Directory, tag: SmpTag) -> None:
        self.saved = SavedFiles(directory, tag.files)
        super().__init__(self.saved)
        self.tag = tag
        self.directory_of_all = directory
        self._trees: dict[str, Any] = {}
        self.noted: dict[str, SetPart] = {}
        """What is noted of each file that was read."""

    def rank_files(self) -> Mapping[str, RankAt]:
        return dict.fromkeys(self.tag.files, RankAt())

    def joined(self, array: RankArray) -> ArrayRecord | None:
        return joined_parts(self, array)

    def zips(self) -> list[str]:
        return list(self.tag.files)

    def tree(self, path: str, at: RankAt = FIRST) -> Any:
        """What a file holds: a `StoredTensor` for each tensor, and an `UntrustedObject` for what is read on trust only.

        Raises:
            CorruptCheckpointError: It is missing, cut off, damaged, or torch.save did not write it.
            UnsupportedStateError: It is of another byte order, or compressed.
        """
        if path not in self._trees:
            with naming(file=path), closing(self._opened(path)) as source:
                ahead = Ahead(source, path, FEW_AHEAD)
                tree = stored_tree(self.saved, ahead, _stored, SCALERS)
                self.noted[path] = identified(ahead, saves_beside(self.directory_of_all, path))
                self._trees[path] = tree
        return self._trees[path]

    def _opened(self, file: str) -> Any:
        try:
            return self.directory.open(file)
        except FileNotFoundError:
            raise CorruptCheckpointError("a part is missing", file=file) from None

    @property
    def one_save(self) -> bool:
        """Whether the notes beside all files that were read say that they are of one save."""
        saves = {part.saved and part.saved.save for part in self.noted.values()}
        return None not in saves and len(saves) == 1

    def check_saves(self) -> None:
        """Check that all parts that were read are of one save, where notes beside them say so.

        Raises:
            CorruptCheckpointError: They are not.
        """
        file_of: dict[str, str] = {}
        for file, part in sorted(self.noted.items()):
            if part.save is not None:
                file_of.setdefault(part.save, file)
        if len(file_of) > 1:
            raise two_saves(
                "; ".join(f"{file} of {save}" for save, file in file_of.items()), next(iter(file_of.values()))
            )


def _stored(at: TensorAt) -> StoredTensor | UnknownArray:
    if at.strides is not None:
        # The rest of the file is good: only who wants this array hears of it.
        return UnknownArray(
            problem="a tensor is not contiguous",
            found=f"shape {list(at.shape)}, strides {list(at.strides)}",
            hint="Load it with torch, make it contiguous, and save it anew.",
            dtype=at.dtype,
            shape=at.shape,
            tensors=1,
        )
    return StoredTensor.lying_at(at)


Degrees = tuple[int, int]
"""(pipeline-parallel, tensor-parallel) ranks of a job."""


def placed(files: FileSet, degrees: Degrees | None) -> dict[RankAt, str]:
    """The parts, by the rank that wrote each.

    Args:
        degrees: Ranks of the job, if anything says how many there were.

    Raises:
        CorruptCheckpointError: Parts are missing, or the files say that there were fewer ranks than have parts.
    """
    pp, tp = degrees or (1, 1)
    parts = files.parts()
    count = len(next(iter(parts)))
    # Names with one number count all model-parallel ranks. In the versions that wrote them there was no tp.
    by_mp = count == 1 and tp > 1 and len(parts) > pp
    by_rank: dict[RankAt, str] = {}
    for numbers, file in sorted(parts.items()):
        stage, *others = divmod(numbers[0], tp) if by_mp else numbers
        by_rank[RankAt(pp=stage, tp=others[0] if others else 0, dp=others[1] if len(others) > 1 else 0)] = file

    def name(at: RankAt) -> str:
        """The name of the part of a rank: of a job with tp it has two numbers at least."""
        return files.part((at.pp * tp + at.tp,) if by_mp else (at.pp, at.tp, at.dp)[: max(count, 2 if at.tp else 1)])

    _check_grid(files, by_rank, degrees, name)
    return by_rank


def degrees_in(sets: Iterable[FileSet]) -> Degrees | None:
    """The degrees of the job as far as names of parts tell, of several sets that one job wrote; None if none does."""
    numbers = [n for files in sets for form in files.forms.values() for n in form if len(n) > 1]
    return (1 + max(n[0] for n in numbers), 1 + max(n[1] for n in numbers)) if numbers else None


def _check_grid(
    files: FileSet, by_rank: Mapping[RankAt, str], degrees: Degrees | None, name: Callable[[RankAt], str]
) -> None:
    named = RankGrid.of(by_rank).sizes
    pp, tp = (max(named.pp, degrees[0]), max(named.tp, degrees[1])) if degrees else (named.pp, named.tp)
    for axis, known, there in zip(("pp", "tp"), degrees or (pp, tp), (named.pp, named.tp), strict=True):
        if there > known:
            raise CorruptCheckpointError(
                f"there are parts of more {axis} ranks than the job had that wrote them",
                file=files.name,
                expected="parts of pp {}, tp {}, as they say themselves".format(*degrees or ()),
                found=f"{len(by_rank)} parts, of {axis} ranks up to {there - 1}",
                hint="Parts of another save lie under the same name: move them away. Or the name of the set is "
                "another one, which has a number at its end.",
            )
    grid = RankGrid(by_rank, replace(named, pp=pp, tp=tp))
    if not (missing := grid.missing(files.name)):
        return
    total = grid.count
    # The classic mistake: SMP counts tp within dp, so that `if smp.dp_rank() == 0` is true on tp rank 0 only.
    never = tp > 1 and not any(at.tp for at in by_rank) and all(at.tp for at in missing)
    raise CorruptCheckpointError(
        "the parts of all ranks tp > 0 are missing" if never else f"parts are missing: {len(missing)} of {total}",
        file=name(missing[0]),
        expected=f"{total} parts: pp {pp}, tp {tp}" + (f", rdp {named.dp}" * (named.dp > 1)),
        found=f"{len(by_rank)}; missing: {listed_names([name(at) for at in missing])}",
        hint="If they were there once, restore them from a copy. Else the job saved under `if smp.dp_rank() == 0`, "
        "which is true on tp rank 0 only, and what the other tp ranks held was never written: save under "
        "`if smp.rdp_rank() == 0`."
        if never
        else "They were lost, or never written: restore them from a copy, or take another checkpoint.",
    )
