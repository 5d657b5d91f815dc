"""Every element type of safetensors 0.8: read bit for bit, written under its own code, harmless to its neighbours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch

import xla_ckpt

CODES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "F4": "float4_e2m1fn_x2",
}
"""Code in a header -> the element type in torch."""

SHAPE = (3, 4)
_BITS = {"BOOL": 8, "BF16": 16, "F4": 4, "C64": 64, "F6_E2M3": 6, "F6_E3M2": 6}

UNREADABLE = {
    "six bits": ("F6_E2M3", (2, 4), 6),
    "six bits, the other one": ("F6_E3M2", (4,), 3),
    "rows of half a byte": ("F4", (2, 3), 3),
    "a code of the future": ("F5_E9M9", (4,), 7),
}
"""Entries of a header of which no array can be made: code, shape, bytes."""


def size_of(code: str) -> int:
    digits = _BITS.get(code) or int("".join(c for c in code.partition("_")[0] if c.isdigit()))
    return SHAPE[0] * SHAPE[1] * digits // 8


def data_of(code: str) -> bytes:
    data = np.random.default_rng(size_of(code)).integers(0, 256, size_of(code), np.uint8)
    return bytes((data & 1 if code == "BOOL" else data).tobytes())


def write(path: Path, entries: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (code, shape, data) in entries.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in entries.values()))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def in_file(path: Path) -> Iterator[tuple[str, str, list[int], bytes]]:
    """What safetensors says of a file: name, code, shape, bytes."""
    for name, facts in safetensors.deserialize(path.read_bytes()):
        yield name, facts["dtype"], facts["shape"], bytes(facts["data"])


WHERE = {
    "file": "weights.safetensors",
    "folder": "hf/model.safetensors",
    "index": "hf/model-00001-of-00002.safetensors",
    "ranks": "dcp/shard-00001-model-00001-of-00001.safetensors",
}

PREFIX = {"file": "model/", "folder": "model/", "index": "model/", "ranks": ""}
"""What the leaf paths of the arrays begin with."""


def stored(root: Path, where: str, entries: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """A model that has these arrays and ``plain``: a file, a folder, a folder of two shards, or DCP's of one rank."""
    path = root / WHERE[where]
    plain = {"plain": ("F32", (2,), np.float32([1, 2]).tobytes())}
    if where != "index":
        write(path, {**entries, **plain})
        return path if where == "file" else path.parent
    other = path.with_name("model-00002-of-00002.safetensors")
    write(path, entries)
    write(other, plain)
    names = {**dict.fromkeys(entries, path.name), **dict.fromkeys(plain, other.name)}
    (path.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path.parent


@pytest.mark.parametrize("where", WHERE)
def test_all_types_are_read_bit_for_bit(where: str, tmp_path: Path) -> None:
    path = stored(tmp_path, where, {code: (code, SHAPE, data_of(code)) for code in CODES})
    first = tmp_path / WHERE[where]
    with safetensors.safe_open(str(first), framework="pt") as file:
        theirs = {name: file.get_tensor(name) for name in CODES}
    tree = xla_ckpt.restore(path).tree
    read = tree if where == "ranks" else tree["model"]
    into = {name: torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype) for name, tensor in theirs.items()}
    xla_ckpt.load_checkpoint(path, model={**into, "plain": torch.zeros(2)})
    for code, name in CODES.items():
        for ours in (read[code], into[code]):
            assert ours.dtype is theirs[code].dtype is getattr(torch, name), code
            assert ours.shape == theirs[code].shape, code
            assert bytes_of(ours) == bytes_of(theirs[code]) == data_of(code), code
    assert xla_ckpt.verify(path).ok
    shown = {a.leaf: a.dtype for a in xla_ckpt.Checkpoints(path).show().arrays}
    assert shown == {PREFIX[where] + code: name for code, name in {**CODES, "plain": "float32"}.items()}


def test_the_types_of_numpy_are_those_of_ml_dtypes(tmp_path: Path) -> None:
    codes = {code: name for code, name in CODES.items() if code != "F4"}
    path = stored(tmp_path, "file", {code: (code, SHAPE, data_of(code)) for code in codes})
    into = {code: np.zeros(SHAPE, getattr(ml_dtypes, name, None) or name) for code, name in codes.items()}
    xla_ckpt.load_checkpoint(path, model={**into, "plain": np.zeros(2, np.float32)})
    for code, array in into.items():
        assert array.tobytes() == data_of(code), code


def test_a_tag_exports_them_under_their_codes(tmp_path: Path) -> None:
    """Whoever wrote the folder gets the same codes, shapes and bytes back."""
    path = stored(tmp_path, "folder", {code: (code, SHAPE, data_of(code)) for code in CODES})
    before = sorted(in_file(path / "model.safetensors"))
    xla_ckpt.convert(path, tmp_path / "run", to="native")
    xla_ckpt.export_hf(tmp_path / "run", tmp_path / "out")
    assert sorted(in_file(tmp_path / "out/model.safetensors")) == before
    # Payload files of tags stay readable to versions of safetensors that refuse a file for a code they do not know.
    codes = {code for payload in (tmp_path / "run").rglob("*.safetensors") for _, code, _, _ in in_file(payload)}
    assert codes == CODES.keys() - {"F4", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("why", UNREADABLE)
def test_one_array_that_cannot_be_read_is_an_error_of_its_own(why: str, where: str, tmp_path: Path) -> None:
    code, shape, nbytes = UNREADABLE[why]
    path = stored(tmp_path, where, {"odd": (code, shape, bytes(nbytes))})
    target = {"plain": torch.zeros(2)}
    xla_ckpt.load_checkpoint(path, model=target, strict=False)
    assert target["plain"].tolist() == [1, 2]
    prefix = PREFIX[where]
    plain = {"plain": xla_ckpt.ArraySpec((2,), "float32")}
    tree = xla_ckpt.restore(path, like={"model": plain} if prefix else plain).tree
    assert (tree["model"] if prefix else tree)["plain"].tolist() == [1, 2]
    assert xla_ckpt.diff(path, path, leaf=f"{prefix}plain").same
    shown = xla_ckpt.Checkpoints(path).show()
    assert [a.leaf for group in shown.unknown for a in group.arrays] == [f"{prefix}odd"]
    assert [a.leaf for a in shown.arrays] == [f"{prefix}plain"]
    assert xla_ckpt.verify(path).ok
    for call in (lambda: xla_ckpt.restore(path), lambda: xla_ckpt.convert(path, tmp_path / "run", to="native")):
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=rf"leaf {prefix}odd.*{code} of shape") as caught:
            call()
        assert "Load the others without it" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_scalars_of_half_a_byte_cannot_be_exported(tmp_path: Path) -> None:
    scalar = torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    xla_ckpt.save_checkpoint(tmp_path / "run", "t", {"scalar": scalar})
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="leaf model/scalar"):
        xla_ckpt.export_hf(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("code", "shape", "nbytes"), [("F6_E2M3", (4,), 4), ("F4", (3,), 2), ("F8_E8M0", (4,), 5)])
def test_bytes_that_no_shape_has_are_damage(code: str, shape: tuple[int, ...], nbytes: int, tmp_path: Path) -> None:
    path = stored(tmp_path, "file", {"odd": (code, shape, bytes(nbytes))})
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="bytes of its shape"):
        xla_ckpt.restore(path)
