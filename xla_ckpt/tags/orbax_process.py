"""Helper process that commits tags with orbax. ``python -m xla_ckpt.tags.orbax_process``.

The only module that imports orbax. It runs in its own process, since importing orbax and jax takes about a second
and holds the GIL; `orbax_commit` starts it. It imports no torch. orbax treats the durable draft as the temporary
directory of a checkpoint, adds its own records and finalizes it, and then the draft gets the tag's name
(`replace_directory`).
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
"""Commits a job, in whose directory the descriptor is; the name under which the old one stands now."""

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What a scheduler sends to all processes of a job. This one ends when the process does for which it works."""


def main() -> None:
    """Do the jobs that come through the standard input, which is a socket, in a process that is only for that."""
    isolate_process()
    gc.disable()  # it would look through all objects of jax and orbax again and again while they are made
    commit = create_committer()
    gc.freeze()  # they stay
    gc.enable()
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        # For a person, whom an error has told to try it.
        sys.stdout.write("This program starts: xla_ckpt can have it commit tags.\n")
        return
    with socket.socket(fileno=os.dup(0)) as channel:
        serve(channel, commit)


def isolate_process() -> None:
    """Leave what the program that is served has for itself: its signals, its accelerator."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("absl").setLevel(logging.ERROR)
    # orbax asks jax which process this is, and to answer, jax opens all platforms that it may: an accelerator would be
    # taken from the process that trains on it. Flags that are meant for another version of XLA would end this process.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("XLA_FLAGS", None)


def serve(channel: socket.socket, commit: CommitFunction) -> None:
    """Do the jobs that come through a channel, until its other end is closed."""
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
    """The function that commits; orbax is imported here, when all that it depends on is set."""
    import jax
    import orbax.checkpoint as ocp

    metadata = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)
    jax.process_index()

    class Draft(ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
        """A draft, as the temporary directory of a checkpoint."""

        job: dict[str, Any]
        directory: int
        """Its descriptor."""

        @classmethod
        def from_final(cls, final_path: Any, **options: Any) -> Draft:
            return cls(final_path.parent / cls.job["draft"], final_path, **options)

        async def create(self) -> Any:
            metadata.write(self.get() / ORBAX_METADATA_FILE, {"init_timestamp_nsecs": time.time_ns()})
            return self.get()

        async def finalize(self) -> None:
            about: dict[str, Any] = {"commit_timestamp_nsecs": time.time_ns()}
            if items := find_step_items(self.get()):
                # By the name of a handler, as orbax has it for a payload of ours, no item of a step is found.
                about["item_handlers"] = dict.fromkeys(items, ocp.StandardCheckpointHandler.typestr())
            metadata.update(self.get() / ORBAX_METADATA_FILE, **about)
            committed = b"Checkpoint commit was successful to " + os.fsencode(self.get_final())
            Path(self.get(), ORBAX_COMMITTED_FILE).write_bytes(committed)  # a path may be no text in any locale
            for name in (ORBAX_METADATA_FILE, ORBAX_COMMITTED_FILE, "."):
                _sync(name, self.directory)
            if not os.path.samestat(os.fstat(self.directory), os.stat(self.get())):
                raise SaveError("another process has taken away what was written", tag=self.job["tag"])
            store, replaced = LocalStore(self.job["root"]), self.job["replaced"]
            old = replace_directory(store, self.job["draft"], self.job["tag"], tuple(replaced) if replaced else None)
            self.job["old"] = old

    class Payload(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
        """Our files, which are there already."""

        @classmethod
        def typestr(cls) -> str:
            return "xla_ckpt.payload"

        async def async_save(self, directory: Any, args: Any) -> None: ...

        def save(self, directory: Any, args: Any) -> None: ...

        def restore(self, directory: Any, args: Any = None) -> Any:
            raise NotImplementedError("orbax does not read this payload: use xla_ckpt.restore")

    @ocp.args.register_with_handler(Payload, for_save=True, for_restore=True)
    class Save(ocp.args.CheckpointArgs):  # type: ignore[misc]
        """Nothing is left to be said."""

    def commit(job: dict[str, Any], directory: int) -> str | None:
        checkpointer = ocp.AsyncCheckpointer(  # `Checkpointer` refuses to replace a tag, or deletes the old one first
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
    """The items of a draft that is a step of a `CheckpointManager`: none, if it is anything else."""
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
