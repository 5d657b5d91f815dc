"""Changed files of every layout: a sample of what `make fuzz` does (docs/measured/reliability.md)."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.fuzz import mutations, probes, report
from tests.jobs import run_on_ranks
from tests.runs import environment

SAMPLE = ("native, a tree", "xser", "dcp", "smp of others", "stock dcp", "safetensors")


def test_a_sample_of_changed_files_is_refused_or_loads_what_was_saved(tmp_path: Path) -> None:
    file = tmp_path / "outcomes"
    chosen = [word for name in SAMPLE for word in ("--specimen", name)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", *chosen, "--inputs", "80", "--workers", "2", "--json", str(file)],
        env=environment({"TMPDIR": str(tmp_path)}), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    outcomes = [probes.Outcome(**json.loads(line)) for line in file.read_text().splitlines()]
    assert {outcome.specimen for outcome in outcomes} == set(SAMPLE)
    assert len(outcomes) == 80
    assert {"refused", "exact"} <= {outcome.verdict for outcome in outcomes}
    assert report.problems(outcomes) == []


def test_other_values_under_digests_are_a_problem() -> None:
    """The check itself can fail."""
    found = probes.Outcome("native", 1, "manifest", "flip", "other", "restore")
    assert len(report.problems([found])) == 1
    assert report.problems([probes.Outcome("native", 1, "manifest", "x", "other", "restore", forged=True)]) == []
    assert len(report.problems([probes.Outcome("torch", 1, "zip", "x", "untyped", "restore", "KeyError: 1")])) == 1


def test_an_input_can_be_made_again_from_its_number(tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "a", {"w": torch.ones(3), "x": [1, (2, 3)]})
    data = (tmp_path / "a/manifest.json").read_bytes()
    one, two = ([mutations.forged_manifest(data, random.Random(seed)) for seed in range(20)] for _ in range(2))
    assert one == two
    assert len({changed for _, changed in one} - {data}) > 10


def falls_back(rank: int, root: Path) -> tuple[str | None, float, list[str]]:
    model = {"w": torch.zeros(4)}
    loaded = xla_ckpt.load_checkpoint(root, model=model, mesh=xla_ckpt.Mesh(dp=2))
    return loaded.report.tag, float(model["w"].sum()), sorted(loaded.report.corrupt_tags)


@pytest.mark.parametrize("damage", ["a flip in the values", "a flip in the manifest", "no file", "another tag's file"])
def test_all_ranks_fall_back_to_the_same_older_tag(damage: str, tmp_path: Path) -> None:
    for number, tag in enumerate("abc", 1):
        xla_ckpt.save_checkpoint(tmp_path, tag, {"w": torch.full((4,), float(number))})
    xla_ckpt.finalize_checkpoint()
    for tag in "bc":
        payload = next((tmp_path / tag).rglob("*.safetensors"))
        path = tmp_path / tag / "manifest.json" if "manifest" in damage else payload
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        if damage == "another tag's file":
            data = bytearray(next((tmp_path / "a").rglob("*.safetensors")).read_bytes())
        path.write_bytes(data)
        if damage == "no file":
            path.unlink()
    assert run_on_ranks(falls_back, 2, tmp_path) == [("a", 4.0, ["b", "c"])] * 2
