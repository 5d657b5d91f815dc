"""The part of a tag on a disk that rank 0 does not see: begun, sealed and committed by the first rank there.

All disks have the same manifest. Rank 0 has all of them commit when each of them has it, and commits its own part last:
so a tag that it lists is on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from xla_ckpt.engine.disks import Disks
from xla_ckpt.engine.order import Order
from xla_ckpt.engine.save_messages import Begun, hear_verdict
from xla_ckpt.errors import CheckpointError, RankFailedError, UsageError
from xla_ckpt.job.round import LEAD, Round
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Directory, LocalFiles
from xla_ckpt.storage.small_files import read_whole, write_small
from xla_ckpt.tags.entry import MANIFEST
from xla_ckpt.tags.transaction import Transaction

logger = get_logger(__name__)

OTHERS_WAIT_FOR = ("manifest", "commit")
"""What rank 0 says to other disks, or an error in its place."""


def check_parity(disks: Disks, order: Order) -> None:
    """Refuse parity where no disk has all files: whoever mends a tag needs them.

    Raises:
        UsageError: It is wanted.
    """
    if disks.several and order.options.parity is not None:
        raise UsageError(
            "a tag has no parity where each host has a disk of its own for local=",
            found=f"parity={order.options.parity!r} on {len(disks.names)} disks",
            hint="Leave parity= out: the object store keeps its files itself.",
        )


def say_sealed(exchange: Round, disks: Disks, directory: Directory) -> None:
    """Give the manifest to the other disks, as rank 0, and wait until each of them has it, durably.

    Raises:
        CheckpointError: What one of them met.
    """
    if disks.several:
        exchange.say("manifest", read_whole(directory, MANIFEST).decode())
        list(exchange.hear_each("sealed", disks.leaders[1:]))


def commit_on_others(exchange: Round, disks: Disks) -> None:
    """Have the other disks commit, as rank 0, which has decided that the save does.

    Raises:
        CheckpointError: One of them did not. Others take their parts back when they hear of it.
    """
    if disks.several:
        exchange.say("commit")
        list(exchange.hear_each("committed", disks.leaders[1:]))


class OtherDisk:
    """The disk that a rank sees which is not rank 0. If it is rank 0's, there is nothing to do here.

    Args:
        order: The save.
        exchange: Where this rank talks with the others.
        leader: The first rank of the disk.
    """

    def __init__(self, order: Order, exchange: Round, leader: int) -> None:
        self._order, self._exchange, self._leader = order, exchange, leader
        self._transaction = Transaction(order.root, order.tag) if leader == exchange.rank else None
        self._has_committed = False
        self._replaced: LocalFiles | None = None
        """The version of the tag that the commit replaces: open, so that no cleaning removes it."""

    def begun(self, begun: Begun, check: Callable[[], object]) -> Begun:
        """What rank 0 has begun, as it is on this disk.

        Raises:
            CheckpointError: It could not be begun there.
            OSError: Likewise.
        """
        exchange, key = self._exchange, f"begin/{self._leader}"
        if self._transaction is not None and self._order.uploader is not None:
            root = self._order.uploader.root
            root.expect()
            root.hold(exchange.timeout * LEAD, check)
            root.number_above(begun.sequence - 1)
            self._transaction.begin()
            exchange.say(key, replace(begun, draft=self._transaction.directory.name).to_json())
        return Begun.from_json(exchange.hear(key, self._leader)) if self._leader else begun

    def give_up(self, problem: CheckpointError) -> None:
        """Tell those of this disk that wait for its beginning that there is none."""
        if self._transaction is not None and not self._exchange.has_said(key := f"begin/{self._leader}"):
            self._exchange.say(key, error=problem)

    def end(self, *, failed: bool) -> None:
        """Seal and commit the part of this disk, as rank 0 says; or remove it. What it meets is told to rank 0.

        Raises:
            RankFailedError: Rank 0 was lost.
        """
        if self._transaction is None:
            return
        exchange, rank = self._exchange, self._exchange.rank
        try:
            for key, act in (("sealed", self._seal), ("committed", self._commit)) if not failed else ():
                act(self._transaction)
                exchange.say(f"{key}/{rank}")
        except RankFailedError:
            raise
        except Exception as error:
            # Rank 0 raises it, and tells all; if it is what rank 0 has said, it hears nothing new.
            for key in ("sealed", "committed"):
                if not exchange.has_said(f"{key}/{rank}"):
                    exchange.say(f"{key}/{rank}", error=as_checkpoint_error(error, "saving", rank))
        finally:
            self._transaction.abandon()

    def outcome(self) -> int:
        """The number of the tag, when rank 0 has said that the save is committed.

        Raises:
            CheckpointError: It is not. Then the part of this disk is removed, whose upload would wait for the others,
                and what it has replaced has its name again.
        """
        try:
            return hear_verdict(self._exchange)
        except RankFailedError:
            raise  # rank 0 may have committed
        except CheckpointError:
            if self._has_committed:
                self._take_back()
            raise
        finally:
            if self._replaced is not None:
                self._replaced.close()

    def _take_back(self) -> None:
        root, tag = self._order.root, self._order.tag
        try:
            if self._replaced is None:
                root.retire(tag)
            elif self._order.uploader is not None:
                self._order.uploader.root.bring_back(tag, self._replaced)
            root.clean()
        except (OSError, CheckpointError) as error:
            logger.warning("%s: a part of tag %s stays, which counts for nobody: %s", root.path, tag, error)

    def _seal(self, transaction: Transaction) -> None:
        manifest = self._exchange.hear("manifest", 0)
        write_small(transaction.directory, MANIFEST, manifest.encode())
        transaction.seal({})

    def _commit(self, transaction: Transaction) -> None:
        within = self._exchange.timeout * LEAD
        self._order.root.await_ready(within)
        self._exchange.hear("commit", 0)
        if self._order.uploader is not None:
            self._replaced = self._order.uploader.root.opened(self._order.tag)
        transaction.commit(retention=self._order.retention, within=within)
        self._has_committed = True
