"""orbax writes its metadata on one thread and reads it on another: a slow file system shows what it reads meanwhile."""

from __future__ import annotations

from pathlib import Path

from tests.runs import run


def test_metadata_is_not_read_while_it_is_written(tmp_path: Path) -> None:
    done = run(
        """
        import pathlib, sys, threading
        import torch
        import xla_ckpt

        xla_ckpt.save(sys.argv[1], "first", {"w": torch.ones(2)})  # has orbax imported
        from orbax.checkpoint._src.metadata import checkpoint

        was_read = threading.Event()

        class Slow(checkpoint._MetadataStoreImpl):
            def write(self, file_path, metadata):
                pathlib.Path(file_path).touch()
                was_read.clear()
                was_read.wait(0.2)  # a reader that does not wait for this comes now
                super().write(file_path, metadata)

            def read(self, file_path):
                try:
                    return super().read(file_path)
                finally:
                    was_read.set()

        checkpoint._MetadataStoreImpl = Slow
        xla_ckpt.save(sys.argv[1], "a", {"w": torch.ones(2)})
        """,
        tmp_path,
    )
    assert "Metadata" not in done.stderr
