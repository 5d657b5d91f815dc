"""The files of a tag that is read: what is wrong with one is said to each who asks for it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

import xla_ckpt
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.storage.resolve import open_store


def test_a_file_of_another_size_is_refused_each_time(tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "a", {"w": torch.ones(8)})
    (payload,) = (tmp_path / "a").glob("*/*.safetensors")
    payload.write_bytes(payload.read_bytes()[:-1])
    with closing(TagReader(open_store(tmp_path).open("a"), str(tmp_path), "a")) as reader:
        for _ in range(2):
            with pytest.raises(xla_ckpt.CorruptCheckpointError, match="does not have its size") as error:
                reader.open_file(0)
            assert error.value.file == payload.relative_to(tmp_path / "a").as_posix()
