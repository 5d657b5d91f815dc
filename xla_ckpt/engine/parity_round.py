"""The parity of a save of many ranks: every file is durable, and each rank makes a share of the sums."""

from __future__ import annotations

from dataclasses import dataclass

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.parity import Covered, Files, Share, covered_files, write_index, write_share
from xla_ckpt.engine.shared_directory import open_shared
from xla_ckpt.errors import CheckpointError
from xla_ckpt.job.round import LEAD, Deadline, Round
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.parity import Parity
from xla_ckpt.storage.base import Directory
from xla_ckpt.tags.root import Root


@dataclass(frozen=True, slots=True)
class ParityRound:
    """One rank's part of it."""

    exchange: Round
    parity: Parity
    """What the tag is to survive."""

    crew: Crew
    """Who reads and writes."""

    def lead(self, directory: Directory, manifest: Manifest, text: bytes) -> None:
        """Rank 0's part, which ends with the index. `text` is the manifest as it is stored.

        Raises:
            CheckpointError: What another rank met, or that it did not answer.
            OSError: The storage refused.
        """
        exchange, files = self.exchange, covered_files(manifest)
        if exchange.size > 1:
            exchange.say("parity", files)
        own_share = self._write(directory, files)
        deadline = Deadline(exchange.timeout * LEAD)
        with self.crew.phases.timed("meet"):
            other_shares = [exchange.hear(f"parity/{rank}", rank, deadline) for rank in range(1, exchange.size)]
        write_index(directory, files, self.parity, text, [own_share.to_json(), *other_shares])

    def give_up(self, problem: CheckpointError) -> None:
        """Tell the others, if they may wait for rank 0 to begin, that it does not."""
        if not self.exchange.has_said("parity"):
            self.exchange.say("parity", error=problem)

    def follow(self, root: Root, name: str) -> None:
        """Another rank's part, in the directory of this name. What it meets is told to rank 0, which tells all.

        Raises:
            CheckpointError: Rank 0 does not begin.
        """
        rank = self.exchange.rank
        with self.crew.phases.timed("meet"):
            files = [(path, size) for path, size in self.exchange.hear("parity", 0)]
        try:
            directory = open_shared(root, name)
            try:
                share = self._write(directory, files)
                directory.sync()
            finally:
                directory.close()
        except Exception as error:
            # Raised on all ranks, this one included, as rank 0's verdict.
            self.exchange.say(f"parity/{rank}", error=as_checkpoint_error(error, "saving", rank))
        else:
            self.exchange.say(f"parity/{rank}", share.to_json())

    def _write(self, directory: Directory, files: Files) -> Share:
        rank, world = self.exchange.rank, self.exchange.size
        return write_share(Covered(directory, files), self.parity, rank, world, self.crew, directory)
