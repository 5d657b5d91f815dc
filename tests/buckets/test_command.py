"""``xla-ckpt`` with addresses of buckets."""

from __future__ import annotations

import json

import pytest

import xla_ckpt
from tests.buckets.content import names_below, read, write
from tests.buckets.test_all_calls import damage, saved
from tests.cli.test_cli import call

Capture = pytest.CaptureFixture[str]


def test_looking(root: str, capsys: Capture) -> None:
    saved(root, "a", "b")
    code, out, _ = call(capsys, "ls", root, "--json")
    assert (code, [tag["tag"] for tag in json.loads(out)["tags"]]) == (0, ["a", "b"])
    code, out, _ = call(capsys, "show", f"{root}/a", "--leaf", "model/*")
    assert code == 0
    assert "model/0.weight" in out
    assert call(capsys, "show", root, "--report")[0] == 0
    assert call(capsys, "explain", root, "--mesh", "dp=2")[0] == 0
    assert call(capsys, "verify", root, "--all")[0] == 0
    code, out, _ = call(capsys, "diff", f"{root}/a", f"{root}/b")
    assert (code, "model/0.weight" in out) == (1, True)
    assert call(capsys, "diff", f"{root}/a", "a")[0] == 0


def test_keeping(root: str, capsys: Capture) -> None:
    saved(root, "a", "b", "c")
    assert call(capsys, "pin", root, "a")[0] == 0
    code, _, err = call(capsys, "rm", root, "a", "--yes")
    assert (code, "pinned" in err) == (2, True)
    assert call(capsys, "unpin", root, "a")[0] == 0
    assert call(capsys, "rm", root, "a", "b", "--yes")[0] == 0
    assert xla_ckpt.list_tags(root) == ["c"]


def test_writing(root: str, capsys: Capture) -> None:
    saved(root, "a")
    assert call(capsys, "export", root, f"{root}-hf")[0] == 0
    assert names_below(f"{root}-hf") == ["model.safetensors"]
    assert call(capsys, "convert", root, f"{root}-x", "--to", "xser", "--mesh", "dp=2", "--as", "b")[0] == 0
    assert call(capsys, "convert", f"{root}-x", f"{root}-n", "--to", "native")[0] == 0
    assert call(capsys, "diff", root, f"{root}-n")[0] == 0
    assert call(capsys, "convert", root, f"{root}-f/m.pt", "--to", "torch", "--part", "model")[0] == 0
    assert names_below(f"{root}-f") == ["m.pt"]


def test_damage_is_found_and_mended(root: str, capsys: Capture) -> None:
    saved(root, "a", options=xla_ckpt.SaveOptions(parity="block"))
    (file,) = (name for name in names_below(root) if name.endswith("model/00001-of-00001.safetensors"))
    damage(f"{root}/{file}")
    assert call(capsys, "verify", root)[0] == 1
    assert call(capsys, "verify", root, "--repair")[0] == 0
    assert call(capsys, "verify", root)[0] == 0


def test_what_is_not_there(root: str, capsys: Capture) -> None:
    for words in (("ls", root), ("verify", root), ("show", root), ("export", root, f"{root}-hf")):
        code, _, err = call(capsys, *words)
        assert (code, f"there is no checkpoint [in {root}" in err) == (1, True)
    assert names_below(f"{root}-hf") == []
    assert "there is no such bucket" in call(capsys, "ls", "s3://no-such-bucket-here/run")[2]


def test_a_record_that_is_damaged(root: str, capsys: Capture) -> None:
    saved(root, "a")
    good = read(f"{root}/.ledger")
    write(f"{root}/.ledger", good[:20])
    code, _, err = call(capsys, "ls", root)
    assert (code, ".ledger" in err) == (1, True)
    write(f"{root}/.ledger", good)
    assert call(capsys, "ls", root)[0] == 0
