"""The disks of a job that saves with ``local=``: all of its hosts may see one, or each may have its own.

Which ranks see the same one they find out together when a save or a load begins, by a mark on each disk. The first rank
of each disk leads there: it begins and commits the disk's part of a tag, and uploads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_ckpt.job.messages import Message


@dataclass(frozen=True, slots=True)
class DiskWord(Message):
    """What a rank says of the disk that it sees."""

    disk: str
    """The mark of the disk; empty where the call is about no such disk: all ranks see one storage then."""

    token: str = ""
    """Its process, as leases name it."""

    newest: int = 0
    """The highest number of a tag on the disk."""


@dataclass(frozen=True, slots=True)
class Disks(Message):
    """The disks that the ranks of a job see."""

    names: tuple[str, ...] = ("",)
    """Their marks, that of rank 0 first."""

    leaders: tuple[int, ...] = (0,)
    """The first rank of each disk."""

    tokens: tuple[str, ...] = ()
    """The processes of these ranks."""

    of_rank: tuple[int, ...] = ()
    """For each rank which of the disks it sees; empty where all see the first one."""

    newest: int = 0
    """The highest number of a tag on any of them."""

    @property
    def several(self) -> bool:
        """Whether no disk has all files of what this job saves."""
        return len(self.names) > 1

    def leader(self, rank: int) -> int:
        """The first rank of the disk that a rank sees.

        >>> [Disks(("a", "b"), (0, 2), of_rank=(0, 0, 1, 1)).leader(rank) for rank in range(4)]
        [0, 0, 2, 2]
        """
        return self.leaders[self.of_rank[rank]] if self.of_rank else 0

    def led_by(self, rank: int) -> bool:
        """Whether a rank is the first one of its disk."""
        return self.leader(rank) == rank


def united_disks(words: Sequence[DiskWord]) -> Disks:
    """What rank 0 makes of the words of all ranks, in their order."""
    names = list(dict.fromkeys(word.disk for word in words))
    disks = [word.disk for word in words]
    leaders = [disks.index(name) for name in names]
    number = {name: place for place, name in enumerate(names)}
    return Disks(
        tuple(names),
        tuple(leaders),
        tuple(words[rank].token for rank in leaders),
        tuple(number[disk] for disk in disks) if len(names) > 1 else (),
        max(word.newest for word in words),
    )
