"""Commit protocol for host-local disks: the first rank on each host commits that host's part of the checkpoint.

All disks contain the same manifest. Rank 0 lets the other disks commit when each of them has it, and commits its own
part last, so that a tag that rank 0 lists is on all disks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from xla_ckpt.distributed.consensus import as_checkpoint_error
from xla_ckpt.distributed.exchange import LEADER_TIMEOUT_FRACTION, Exchange
from xla_ckpt.errors import CheckpointError, RankFailedError, UsageError
from xla_ckpt.features.local_first.upload import HostDisks
from xla_ckpt.logs import get_logger
from xla_ckpt.saving.context import SaveContext
from xla_ckpt.saving.rank_protocol import BeginSave, wait_for_outcome
from xla_ckpt.storage.base import Directory, FileSystemDirectory, read_file, write_file
from xla_ckpt.tags.entry import MANIFEST_FILE
from xla_ckpt.tags.root import Transaction

logger = get_logger(__name__)

LEADER_MESSAGES = ("manifest", "commit")
"""Keys of the messages of rank 0 to other disks; an error may be published in their place."""


def check_parity_supported(disks: HostDisks, context: SaveContext) -> None:
    """Raise an error if parity is requested but no disk contains all files, which a repair needs.

    Raises:
        UsageError: Parity is requested.
    """
    if disks.is_multi_disk and context.options.parity is not None:
        raise UsageError(
            "a tag has no parity where each host has a disk of its own for local=",
            found=f"parity={context.options.parity!r} on {len(disks.names)} disks",
            hint="Leave parity= out: the object store keeps its files itself.",
        )


def send_manifest(exchange: Exchange, disks: HostDisks, directory: Directory) -> None:
    """On rank 0, send the manifest to the other disks, and wait until each of them has written it durably.

    Raises:
        CheckpointError: A disk failed.
        RankFailedError: A leader of a disk did not respond in time.
    """
    if disks.is_multi_disk:
        exchange.publish("manifest", read_file(directory, MANIFEST_FILE).decode())
        list(exchange.receive_each("sealed", disks.leaders[1:]))


def commit_other_disks(exchange: Exchange, disks: HostDisks) -> None:
    """On rank 0, let the other disks commit, after the decision to commit the save.

    Raises:
        CheckpointError: A disk failed. The others roll back their parts when they receive the error.
        RankFailedError: A leader of a disk did not respond in time.
    """
    if disks.is_multi_disk:
        exchange.publish("commit")
        list(exchange.receive_each("committed", disks.leaders[1:]))


class HostLocalCommit:
    """Commit of a save on the disk of a rank, if it is not the disk of rank 0. Otherwise there is nothing to do.

    Args:
        context: Context of the save.
        exchange: Exchange of the save.
        leader: First rank of the disk; 0 for the disk of rank 0.
    """

    def __init__(self, context: SaveContext, exchange: Exchange, leader: int) -> None:
        self._context, self._exchange, self._leader = context, exchange, leader
        self._transaction = Transaction(context.root, context.tag) if leader == exchange.rank else None
        self._has_committed = False
        self._replaced: FileSystemDirectory | None = None
        """The version of the tag that the commit replaces, kept open so that cleanup does not remove it."""

    def begin(self, message: BeginSave, check: Callable[[], object]) -> BeginSave:
        """Begin the save on this disk, and return the message of rank 0 adapted to it.

        Args:
            message: Message of rank 0 at the beginning of the save.
            check: Called while waiting for the lease; an exception ends the wait.

        Raises:
            CheckpointError: The save could not be started on this disk.
            OSError: The storage failed.
        """
        exchange, key = self._exchange, f"begin/{self._leader}"
        if self._transaction is not None and self._context.uploader is not None:
            root = self._context.uploader.root
            root.prepare_commit()
            root.acquire_lease(exchange.timeout * LEADER_TIMEOUT_FRACTION, check)
            root.raise_min_sequence(message.sequence - 1)
            self._transaction.begin()
            exchange.publish(key, replace(message, draft=self._transaction.directory.name).to_json())
        return BeginSave.from_json(exchange.receive(key, self._leader)) if self._leader else message

    def abort(self, problem: CheckpointError) -> None:
        """Send the error to the ranks of this disk that wait for the beginning of the save."""
        if self._transaction is not None and not self._exchange.has_published(key := f"begin/{self._leader}"):
            self._exchange.publish(key, error=problem)

    def finish(self, *, failed: bool) -> None:
        """Finalize and commit the part on this disk after the messages of rank 0, or remove it if `failed`.

        Errors are sent to rank 0.

        Raises:
            RankFailedError: Rank 0 was lost.
        """
        if self._transaction is None:
            return
        exchange, rank = self._exchange, self._exchange.rank
        try:
            for key, act in (("sealed", self._seal), ("committed", self._commit)) if not failed else ():
                act(self._transaction)
                exchange.publish(f"{key}/{rank}")
        except RankFailedError:
            raise
        except Exception as error:
            # Rank 0 raises it on all ranks; if rank 0 sent it, this has no effect.
            for key in ("sealed", "committed"):
                if not exchange.has_published(f"{key}/{rank}"):
                    exchange.publish(f"{key}/{rank}", error=as_checkpoint_error(error, "saving", rank))
        finally:
            self._transaction.abort()

    def wait_for_outcome(self) -> int:
        """Wait until rank 0 has committed the save, and return the sequence number of the tag.

        Raises:
            CheckpointError: The save was not committed. The part on this disk, whose upload would wait for the other
                disks, is removed, and the tag that it replaced is restored.
            RankFailedError: Rank 0 was lost, and may have committed the save.
        """
        try:
            return wait_for_outcome(self._exchange)
        except RankFailedError:
            raise  # rank 0 may have committed
        except CheckpointError:
            if self._has_committed:
                self._roll_back()
            raise
        finally:
            if self._replaced is not None:
                self._replaced.close()

    def _roll_back(self) -> None:
        root, tag = self._context.root, self._context.tag
        try:
            if self._replaced is None:
                root.retire(tag)
            elif self._context.uploader is not None:
                self._context.uploader.root.restore_replaced(tag, self._replaced)
            root.clean()
        except (OSError, CheckpointError) as error:
            logger.warning("%s: a part of tag %s stays, which counts for nobody: %s", root.path, tag, error)

    def _seal(self, transaction: Transaction) -> None:
        manifest = self._exchange.receive("manifest", 0)
        write_file(transaction.directory, MANIFEST_FILE, manifest.encode())
        transaction.seal({})

    def _commit(self, transaction: Transaction) -> None:
        within = self._exchange.timeout * LEADER_TIMEOUT_FRACTION
        self._context.root.wait_ready(within)
        self._exchange.receive("commit", 0)
        if self._context.uploader is not None:
            self._replaced = self._context.uploader.root.open_if_exists(self._context.tag)
        transaction.commit(retention=self._context.retention, within=within)
        self._has_committed = True
