"""The file `newest` of a root directory, and SMP's own directories that retention gives up."""

from __future__ import annotations

import threading

import xla_ckpt
from xla_ckpt.facade import NEWEST, oldest_beyond, remove_directories, renew_file, root_at, storage_errors
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

_waiting: list[threading.Thread] = []
"""Those that wait for a save in the background, to list it."""


def list_newest(root: str, kept: int | None = None) -> None:
    """Have `newest` agree with the directories, less those of SMP's own that are too many. Rank 0 does it.

    Raises:
        xla_ckpt.StorageError: The operating system refused.
    """
    listing = root_at(root)
    gone = [] if kept is None else oldest_beyond(listing.order, listing.theirs, kept)
    lines = [name for name in listing.order if name not in gone]
    # First the list, then the directories: it never names one that is half deleted.
    if list(listing.lines or ()) != lines:
        renew_file("".join(f"{name}\n" for name in lines).encode(), f"{root}/{NEWEST}")
    if gone:
        with storage_errors("deleting old checkpoints", path=root):
            remove_directories(root, gone)


def list_when_done(handle: xla_ckpt.SaveHandle, root: str, kept: int | None) -> None:
    """Have a save that runs in the background be listed as soon as it is committed. The program's end waits for it."""

    def work() -> None:
        try:
            handle.tidied()
        except xla_ckpt.CheckpointError:
            return  # the next save of this path raises it
        try:
            list_newest(root, kept)
        except (xla_ckpt.CheckpointError, OSError) as error:
            # The directories count: the next save or resume finds what is not listed, and tries it again.
            logger.error("%s is not up to date: %s", NEWEST, error)  # noqa: TRY400

    thread = threading.Thread(target=work, name="neuron_compat.smp-newest", daemon=False)
    _waiting.append(thread)
    thread.start()


def wait_listed() -> None:
    """Wait until all saves in the background are listed, or have failed."""
    while _waiting:
        _waiting.pop(0).join()
