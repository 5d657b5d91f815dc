"""A file of torch.save as a value, read by this library and not by torch."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from xla_ckpt.formats.torch_save.serialization import read_whole_file

BASE = torch.arange(24.0).reshape(4, 6)
VALUES: dict[str, Any] = {
    "contiguous": BASE,
    "view": BASE[1:3, 2:5],
    "transposed": BASE.t(),
    "number": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "complex": torch.ones(2, dtype=torch.complex64) * 1j,
    "bool": torch.tensor([True, False]),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "nested": OrderedDict(a=[BASE[0], (1, "x", None)], b={"c": 2.5}),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_all_of_it_comes_back(tmp_path: Path, protocol: int) -> None:
    torch.save(VALUES, tmp_path / "a.pt", pickle_protocol=protocol)
    found = read_whole_file(str(tmp_path / "a.pt"))
    for name, value in VALUES.items():
        if isinstance(value, torch.Tensor):
            mine = found[name]
            assert (mine.dtype, mine.shape, mine.stride()) == (value.dtype, value.shape, value.stride()), name
            assert torch.equal(
                mine.contiguous().view(-1).view(torch.uint8), value.detach().contiguous().view(-1).view(torch.uint8)
            )
    assert isinstance(found["nested"], OrderedDict)
    assert found["nested"]["a"][1] == (1, "x", None)
    found["contiguous"][1, 2] = -1
    assert (found["view"][0, 0], found["transposed"][2, 1]) == (-1, -1)  # they share a storage, as they did


def test_tensors_go_where_they_are_wanted(tmp_path: Path) -> None:
    torch.save(VALUES, tmp_path / "a.pt")
    found = read_whole_file(str(tmp_path / "a.pt"), lambda storage: storage.to("meta"))
    assert all(found[name].is_meta for name, value in VALUES.items() if isinstance(value, torch.Tensor))


def test_what_is_missing_or_damaged_is_said(tmp_path: Path) -> None:
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"there is no such file .*b\.pt"):
        read_whole_file(str(tmp_path / "b.pt"))
    with pytest.raises(xla_ckpt.NoCheckpointError):
        read_whole_file(str(tmp_path / "none/b.pt"))
    torch.save(VALUES, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(xla_ckpt.CorruptCheckpointError):
        read_whole_file(str(tmp_path / "a.pt"))
