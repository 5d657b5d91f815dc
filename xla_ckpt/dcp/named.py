"""What a reader and a writer of DCP's have in common: a directory that programs name by ``checkpoint_id``."""

from __future__ import annotations

from collections.abc import Callable

from xla_ckpt.errors import UsageError
from xla_ckpt.storage.door import PathLike, above, full_path


class Named:
    """Has the path of a directory, which `reset` changes."""

    _path: str | None = None

    planned: Callable[[], object] = staticmethod(lambda: None)
    """Called when all is planned, and before this rank reads or writes."""

    @property
    def checkpoint_id(self) -> str | None:
        """The directory of the checkpoint."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Whether this library can keep a checkpoint there, as DCP asks it."""
        try:
            above(checkpoint_id)
        except UsageError:
            return False
        return True

    def _name(self, checkpoint_id: PathLike | None) -> None:
        """Take another directory; None keeps the one that there is."""
        if checkpoint_id is not None:
            self._path = full_path(checkpoint_id)
