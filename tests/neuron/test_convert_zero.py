"""``nxd_convert_zero_checkpoints``, beside what neuronx-distributed's own converter made; Z1 to Z7 are its defects."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from neuron_compat.nxd.optimizer.convert_zero_checkpoints import main
from tests.formats.gold import GOLD, LOST, cases, few_of, folder_of, needs_gold
from tests.formats.same import content, names, rank_files
from tests.runs import names_in
from tests.same import differences
from xla_ckpt.formats.nxd.zero1_conversion import convert_zero_checkpoints

ZERO = [case for case in cases() if "_z1" in case[0] and case[0] != LOST]
SOURCE = "tp2_dp2_z1__xser_sync"
CONVERTED = None if GOLD is None else GOLD.parent / "gold_converted" / SOURCE


def stored(case: str, tag: str = "step_40") -> Path:
    return folder_of(case) / "ckpt" / tag


def run(source: Path, made: Path, dp: int | None) -> int:
    form = ["--convert_to_full"] if dp is None else ["--convert_to_sharded", "--dp_size", str(dp)]
    return main(["--input_dir", str(source), "--output_dir", str(made), *form])


def unequal(a: Path, b: Path) -> list[str]:
    assert rank_files(a / "optim") == rank_files(b / "optim") != []
    return [
        text
        for name in rank_files(a / "optim")
        for text in differences(content(a / "optim" / name), content(b / "optim" / name), name, order=False)
    ]


@needs_gold
def test_as_neuronx_distributed_converts(tmp_path: Path) -> None:
    assert CONVERTED is not None
    assert run(stored(SOURCE), tmp_path / "full", None) == 0
    for made, source, dp in (
        ("full_to_dp3", "full", 3), ("full_to_dp4", "full", 4),
        ("sharded_to_dp1", None, 1), ("sharded_to_dp4", None, 4),
    ):  # fmt: skip
        assert run(stored(SOURCE) if source is None else tmp_path / source, tmp_path / made, dp) == 0
        # Z6: theirs is inline, with an empty .tensors and no .info.pt; ours has them, and the same contents.
        mine = {n for n in rank_files(tmp_path / made / "optim") if not n.endswith(".info.pt")}
        assert mine == set(rank_files(CONVERTED / made / "optim"))
        assert {f"{n}.info.pt" for n in mine} <= names(tmp_path / made / "optim")
        for name in mine:
            theirs, ours = content(CONVERTED / made / "optim" / name), content(tmp_path / made / "optim" / name)
            assert not differences(theirs, ours, name, order=False)


@pytest.mark.parametrize(("case", "tag"), few_of(ZERO))
def test_there_and_back_is_the_identity(case: str, tag: str, tmp_path: Path) -> None:
    """Z1: master weights go along, whole."""
    source = stored(case, tag)
    dp = len({n.name[:10] for n in (source / "optim").iterdir() if n.suffix == ".pt"} - {"full_tp_ra"})
    for middle in (None, 3):
        assert run(source, tmp_path / "middle", middle) == 0
        assert run(tmp_path / "middle", tmp_path / "back", dp) == 0
        assert unequal(source, tmp_path / "back") == []
        # Z7: a whole tag comes out, not only its optim.
        assert names(tmp_path / "back") == names(source)
        assert (tmp_path / "back/scheduler.pt").read_bytes() == (source / "scheduler.pt").read_bytes()
        shutil.rmtree(tmp_path / "middle"), shutil.rmtree(tmp_path / "back")


def test_master_weights_are_whole_in_the_full_file(tmp_path: Path) -> None:
    """Z1, against the truth rather than against our own way back."""
    source = stored("tp2_dp2_z1m__pt_sync")
    assert run(source, tmp_path / "full", None) == 0
    full = content(tmp_path / "full/optim/full_tp_rank_00_pp_rank_00.pt")
    parts = [content(source / f"optim/dp_rank_{dp:02d}_tp_rank_00_pp_rank_00.pt") for dp in (0, 1)]
    assert full["sharded_master_weights"].keys() == full["shape_info"].keys()
    for i, weight in full["sharded_master_weights"].items():
        whole = torch.cat([p["sharded_master_weights"][i] for p in parts])[: full["shape_info"][i][0]]
        assert weight.dtype == torch.float32
        assert torch.equal(weight, whole)


def expert_files(root: Path) -> Path:
    """What NeuronEPZero1Optimizer leaves: numbers of experts are told by offsets only."""
    tree: dict[str, Any] = {
        "state": {}, "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [0]}], "shape_info": {0: [4]},
        "base_state": {0: {"exp_avg": torch.ones(2)}}, "ep_param_id_offset": 1, "ep_base_state_offset": 1,
    }  # fmt: skip
    (root / "optim").mkdir(parents=True)
    for dp in (0, 1):
        torch.save(tree, root / f"optim/dp_rank_{dp:02d}_tp_rank_00_pp_rank_00.pt")
    return root


def test_experts_are_refused_and_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Z2."""
    assert run(expert_files(tmp_path / "in"), tmp_path / "out", None) == 1
    assert "expert-parallel job" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_optimizers_are_refused_before_anything_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Z3: ep in the file names, no ZeRO-1 at all; and N3: lost data."""
    for case, said in (
        ("tp2_ep2_dp2__xser_sync", "expert-parallel"), ("tp2_dp2__pt_sync", "was not saved with ZeRO-1"),
        (LOST, "the others are missing"), ("tp2_pp2_dp1_legacy__pt", "no optimizer files"),
    ):  # fmt: skip
        (tmp_path / case).mkdir()
        kept = tmp_path / case / "kept"
        kept.write_text("mine")
        assert run(stored(case), tmp_path / case, 2) != 0
        assert said in capsys.readouterr().err
        assert names_in(tmp_path / case) == ["kept"]


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Z4."""
    for arguments, said in (
        (["--convert_to_sharded"], "needs --dp_size"), ([], "one of the arguments"),
        (["--convert_to_full", "--convert_to_sharded"], "not allowed with"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            main(["--input_dir", str(tmp_path), "--output_dir", str(tmp_path / "o"), *arguments])
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err
    assert run(tmp_path / "nothing", tmp_path / "o", None) == 1
    assert "no such directory" in capsys.readouterr().err
    with pytest.raises(xla_ckpt.UsageError, match="number of ranks"):
        convert_zero_checkpoints(tmp_path, tmp_path / "o", 0)


def test_full_to_full_and_stale_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Z4: nothing to do is an error. Z5: files of an earlier, larger job are found out. Z7: the input stays."""
    assert run(stored(SOURCE), tmp_path / "full", None) == 0
    assert run(tmp_path / "full", tmp_path / "again", None) == 2
    assert "already" in capsys.readouterr().err
    for made in (tmp_path / "full", stored(SOURCE)):
        assert run(stored(SOURCE), made, None) == 2  # never over what is there, least of all over the input
    shutil.copytree(stored(SOURCE), tmp_path / "stale")
    for name in ("tp_rank_00_pp_rank_00.pt", "tp_rank_01_pp_rank_00.pt"):
        for end in ("", ".info.pt"):
            shutil.copy(
                stored(SOURCE) / f"optim/dp_rank_01_{name}{end}", tmp_path / f"stale/optim/dp_rank_02_{name}{end}"
            )
        folder = f"optim/dp_rank_01_{name}.tensors"
        shutil.copytree(stored(SOURCE) / folder, tmp_path / f"stale/optim/dp_rank_02_{name}.tensors")
    assert run(tmp_path / "stale", tmp_path / "out", None) == 1
    assert "an earlier save with another dp size" in capsys.readouterr().err
    shutil.copytree(stored(SOURCE), tmp_path / "torn")
    (tmp_path / "torn/optim/dp_rank_01_tp_rank_01_pp_rank_00.pt").unlink()
    assert run(tmp_path / "torn", tmp_path / "out", None) == 1
    assert "1 of 4 rank files are missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_into_a_directory_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "out/model").mkdir(parents=True)
    report = convert_zero_checkpoints(stored(SOURCE), tmp_path / "out", 4, max_memory=1 << 16)
    assert (report.dp, report.files) == (4, len(names(tmp_path / "out")))
    assert names_in(tmp_path / "out") == ["model", "optim"]
