"""What the coordinator of a save tells the ranks in DCP's plans, and what they report to it in DCP's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from xla_ckpt.dcp.replicas import Held, Place
from xla_ckpt.errors import SaveError
from xla_ckpt.manifest.records import FileRecord

OF_REPORT = MetadataIndex("~xla_ckpt report")
"""Index of the result that is a rank's report, and no item of the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOrder:
    """What the coordinator tells a rank."""

    draft: str
    """Name of the directory that is filled."""

    fate: str
    """What the round is called in which the ranks agree how the save ended, if one of them is lost."""

    rank: int
    world: int
    answers: str | None
    """The save of that rank that it is for. Planners that keep plans may give an old one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """What a rank tells the coordinator."""

    rank: int
    files: tuple[FileRecord, ...] = ()
    samples: Mapping[Place, Held] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None


def result_of(report: WriteReport) -> WriteResult:
    """A report as a result of DCP's, which travels to the coordinator."""
    return WriteResult(index=OF_REPORT, size_in_bytes=0, storage_data=report)


def report_of(rank: int, results: Sequence[WriteResult]) -> WriteReport:
    """The report among the results of a rank.

    Raises:
        SaveError: There is none.
    """
    for result in results:
        if isinstance(result.storage_data, WriteReport):
            return result.storage_data
    raise SaveError("a rank wrote with another StorageWriter", rank=rank)
