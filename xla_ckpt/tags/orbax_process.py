"""Helper process that commits tags with orbax. ``python -m xla_ckpt.tags.orbax_process``.

The only module that imports orbax. It runs in its own process, since importing orbax and jax takes about a second and
holds the GIL; `orbax_commit` starts it. It imports no torch. orbax treats the durable draft as the temporary directory
of a checkpoint, adds its metadata and finalizes it, and then the draft is renamed to the tag (`replace_directory`).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xla_ckpt.errors import CheckpointError, SaveError
from xla_ckpt.storage.helper_process import receive_requests
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.tags.directory_operations import replace_directory
from xla_ckpt.tags.entry import ORBAX_COMMITTED_FILE, ORBAX_TREE_METADATA_FILE
from xla_ckpt.tags.listing import ORBAX_METADATA_FILE

CommitFunction = Callable[[dict[str, Any], int], str | None]
"""Function that commits a request in the directory with the descriptor, and returns the old directory's new name."""

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a scheduler sends to all processes of a job. The helper ends when its parent does."""


def main() -> None:
    """Serve requests from standard input, which must be a socket, in a dedicated process."""
    isolate_process()
    gc.disable()  # otherwise the many new objects of jax and orbax trigger repeated collections
    commit = create_committer()
    gc.freeze()  # the objects are permanent
    gc.enable()
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        # Started by a user, as an error message suggests.
        sys.stdout.write("This program starts: xla_ckpt can have it commit tags.\n")
        return
    with socket.socket(fileno=os.dup(0)) as channel:
        serve(channel, commit)


def isolate_process() -> None:
    """Ignore signals meant for the parent program, and avoid initializing its accelerator."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("absl").setLevel(logging.ERROR)
    # orbax calls jax.process_index(), which initializes all available platforms: this would take the accelerator away
    # from the training process. Flags for another version of XLA would end this process.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("XLA_FLAGS", None)


def serve(channel: socket.socket, commit: CommitFunction) -> None:
    """Serve requests from a channel until its other end is closed."""
    channel.sendall(b"{}\n", socket.MSG_NOSIGNAL)
    for job, directory in receive_requests(channel):
        try:
            answer: dict[str, Any] = {"old": commit(job, directory)}
        except CheckpointError as error:
            answer = {"error": error.to_json()}
        except OSError as error:
            answer = {"errno": error.errno, "strerror": error.strerror or str(error), "filename": error.filename}
        except Exception as error:
            answer = {"problem": f"{type(error).__name__}: {error}"}
        channel.sendall(json.dumps(answer, default=str).encode() + b"\n", socket.MSG_NOSIGNAL)


def create_committer() -> CommitFunction:
    """Import orbax, after its environment is set up, and return the commit function."""
    import jax
    import orbax.checkpoint as ocp

    metadata = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)
    jax.process_index()

    class Draft(ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
        """A draft as the temporary directory of an orbax checkpoint."""

        job: dict[str, Any]
        directory: int
        """Descriptor of the draft."""

        @classmethod
        def from_final(cls, final_path: Any, **options: Any) -> Draft:
            return cls(final_path.parent / cls.job["draft"], final_path, **options)

        async def create(self) -> Any:
            metadata.write(self.get() / ORBAX_METADATA_FILE, {"init_timestamp_nsecs": time.time_ns()})
            return self.get()

        async def finalize(self) -> None:
            about: dict[str, Any] = {"commit_timestamp_nsecs": time.time_ns()}
            if items := find_step_items(self.get()):
                # With our payload's handler name, orbax would find no items of the step.
                about["item_handlers"] = dict.fromkeys(items, ocp.StandardCheckpointHandler.typestr())
            metadata.update(self.get() / ORBAX_METADATA_FILE, **about)
            committed = b"Checkpoint commit was successful to " + os.fsencode(self.get_final())
            Path(self.get(), ORBAX_COMMITTED_FILE).write_bytes(committed)  # a path may be invalid text
            for name in (ORBAX_METADATA_FILE, ORBAX_COMMITTED_FILE, "."):
                _sync(name, self.directory)
            if not os.path.samestat(os.fstat(self.directory), os.stat(self.get())):
                raise SaveError("another process has taken away what was written", tag=self.job["tag"])
            store, replaced = LocalStore(self.job["root"]), self.job["replaced"]
            old = replace_directory(store, self.job["draft"], self.job["tag"], tuple(replaced) if replaced else None)
            self.job["old"] = old

    class Payload(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
        """Handler for the files of a tag, which are already in place."""

        @classmethod
        def typestr(cls) -> str:
            return "xla_ckpt.payload"

        async def async_save(self, directory: Any, args: Any) -> None: ...

        def save(self, directory: Any, args: Any) -> None: ...

        def restore(self, directory: Any, args: Any = None) -> Any:
            raise NotImplementedError("orbax does not read this payload: use xla_ckpt.restore")

    @ocp.args.register_with_handler(Payload, for_save=True, for_restore=True)
    class Save(ocp.args.CheckpointArgs):  # type: ignore[misc]
        """Empty arguments of `Payload`."""

    def commit(job: dict[str, Any], directory: int) -> str | None:
        checkpointer = ocp.AsyncCheckpointer(  # `Checkpointer` cannot replace a tag, or deletes the old one first
            Payload(),
            checkpoint_metadata_store=metadata,
            temporary_path_class=type("JobDraft", (Draft,), {"job": job, "directory": directory}),
            file_options=ocp.options.FileOptions(skip_sync_file_validations=True),
            async_options=ocp.AsyncOptions(timeout_secs=10**9, create_directories_asynchronously=False),
        )
        checkpointer.save(Path(job["root"], job["tag"]), Save(), custom_metadata=job["metadata"])
        checkpointer.wait_until_finished()
        old: str | None = job["old"]
        return old

    return commit


def find_step_items(draft: str | os.PathLike[str]) -> list[str]:
    """Return the items of a draft that is a `CheckpointManager` step; empty for other drafts."""
    if Path(draft, ORBAX_TREE_METADATA_FILE).is_file():
        return []
    return sorted(path.parent.name for path in Path(draft).glob(f"*/{ORBAX_TREE_METADATA_FILE}") if path.is_file())


def _sync(name: str, directory: int) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
