"""What neuronx-distributed wrote, loaded bit for bit: whole, in other meshes, and by rules."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import xla_ckpt
from tests.formats.gold import LOST, Gold, Target, as_rank, cases, needs_gold
from tests.jobs import run_on_ranks
from tests.topology.kinds import emulate
from tests.topology.state import dp_groups
from tests.xla import HAS_XLA
from xla_ckpt import Mesh
from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.distributed.current_job import JOB_OVERRIDE, Job
from xla_ckpt.distributed.exchange import Exchange, InProcessCommunicator
from xla_ckpt.distributed.job import ExchangeSequence

WHOLE = [c for c in cases() if c[0] != LOST]
MESHES = (Mesh(tp=2), Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(dp=2, ep=2, tp=2))
CONTENT = {"total_steps": 40, "batch_idx": 7, "cli_args": {"lr": 0.001, "name": "gold", "betas": (0.9, 0.95)}}


@pytest.mark.parametrize(("case", "tag"), WHOLE)
def test_one_process_loads_it_whole(case: str, tag: str) -> None:
    gold = Gold(case, tag)
    target, scheduler = Target(gold), {}
    loaded = xla_ckpt.load_checkpoint(
        gold.root, tag, target.model, target.optimizer, None if "legacy" in case else scheduler
    )
    content, report = loaded.user_content, loaded.report
    assert target.differences() == []
    assert report.read_bytes >= report.needed_bytes > 0
    if "legacy" in case:
        assert content == {"step": gold.truth["step"]}
    else:
        assert content == {**CONTENT, "total_steps": gold.truth["step"]}
        assert scheduler["base_lrs"] == [0.001, 0.001]


@pytest.mark.parametrize(("case", "tag"), [c for c in WHOLE if not any(w in c[0] for w in ("fused", "gqa", "ep2"))])
def test_shapes_alone_say_how_it_was_split(case: str, tag: str) -> None:
    target = Target(Gold(case, tag), attributes=False)
    xla_ckpt.load_checkpoint(target.gold.root, tag, target.model, target.optimizer)
    assert target.differences() == []


RULES = {
    "tp2_dp2_fused3_tied__xser_sync": [(r"\.qkv_proj", (("tp", 3), None)), (r"gate_up", (("tp", 2), None))],
    "tp2_dp2_z1m_gqa__xser_sync": [(r"gate_up", (("tp", 2), None))],
    "tp2_ep2_dp2__xser_sync": [(r"gate_up", ("ep", None, ("tp", 2)))],
    "tp4_gqa_rep__pt_sync": [(r"gate_up", (("tp", 2), None)), (r"weight_[kv]", (("tp", ["x2"]), None))],
    "tp2_dp2_z1m_gqafused__pt_sync": [
        (r"gate_up", (("tp", 2), None)),
        (r"weight_qkv", (("tp", [64, 32, 32]), None)),
    ],
}


@pytest.mark.parametrize("case", RULES)
def test_what_is_fused_needs_to_be_said(case: str) -> None:
    gold = Gold(case, "step_40")
    target = Target(gold, attributes=False, layers=False)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"(ambiguous|no split).*fused") as caught:
        xla_ckpt.load_checkpoint(gold.root, "step_40", target.model, target.optimizer)
    assert caught.value.tag == "step_40"
    assert "proj.weight" in caught.value.leaf
    assert all((p == 7).all() for p in target.parameters.values())
    xla_ckpt.load_checkpoint(gold.root, "step_40", target.model, target.optimizer, shardings=RULES[case])
    assert target.differences() == []


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", sorted({c for c, _ in WHOLE}))
def test_every_rank_of_another_mesh_gets_its_part(case: str, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    gold = Gold(case, "step_40")
    for rank in range(mesh.size):
        as_rank(monkeypatch, mesh, rank)
        target = Target(gold, mesh, rank)
        xla_ckpt.load_checkpoint(gold.root, "step_40", target.model, target.optimizer)
        assert target.differences() == [], rank


@pytest.mark.parametrize(
    "case",
    [
        "tp2_pp2_dp2_z1m__xser_sync",
        "tp2_dp2_z1__xser_sync",
        "tp2_pp2_dp1__pt_sync",
        "tp2_dp2_fused3_tied__xser_sync",  # whose stages have a name each of one weight
    ],
)
def test_pipeline_stages_tell_each_other_their_names(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gold, mesh = Gold(case, "step_40"), Mesh(pp=2, tp=2)
    solo, bad = InProcessCommunicator(0, mesh.size), {}

    def load(rank: int) -> None:
        JOB_OVERRIDE.job = Job(
            Exchange(solo.create_peer(rank), "load", 60),
            RankInfo(rank, mesh.size, mesh),
            ExchangeSequence(solo.create_peer(rank)),
        )
        try:
            target = Target(gold, mesh, rank, stage=mesh.coordinates(rank)["pp"])
            xla_ckpt.load_checkpoint(gold.root, "step_40", target.model, target.optimizer)
            bad[rank] = target.differences()
        except Exception as error:
            bad[rank] = [repr(error), str(error)]

    threads = [threading.Thread(target=load, args=(rank,)) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bad == dict.fromkeys(range(mesh.size), [])


def resumes_with_zero1(rank: int, gold: Gold) -> None:
    mesh = Mesh(dp=2)
    zero = Target(gold, mesh, rank, device="xla")
    optimizer = zero_redundancy_optimizer(zero.groups, mesh)
    xla_ckpt.load_checkpoint(gold.root, "step_40", zero.model, optimizer, mesh=mesh)
    names = {id(p): n for n, p in zero.parameters.items()}
    kind = "master" if "z1m" in gold.case else "params"
    for outer, inner in zip(optimizer.param_groups, optimizer.base_optimizer.param_groups, strict=True):
        for p, s in zip(outer["params"], inner["params"], strict=True):
            name, state = names[id(p)], optimizer.base_optimizer.state[s]
            for what in ("exp_avg", "exp_avg_sq"):
                wanted = gold.shard(name, gold.truth[what][name], mesh, rank)
                assert torch.equal(state[what].cpu(), wanted), (name, what)
            assert torch.equal(s.detach().cpu(), gold.shard(name, gold.truth[kind][name], mesh, rank).to(s.dtype)), name
            assert torch.equal(p.detach().cpu(), gold.truth["params"][name]), name


def zero_redundancy_optimizer(groups: Any, mesh: Mesh) -> Any:
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        groups, torch.optim.AdamW, sharding_groups=dp_groups(mesh), lr=1e-3, grad_clipping=False, pin_layout=False,
        save_master_weights=True,
    )  # fmt: skip


def resumes_with_fsdp2(gold: Gold) -> None:
    plain = Target(gold)
    fully_shard(plain.model, mesh=init_device_mesh("cpu", (2,)))
    sharded = dict(plain.model.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [sharded[n] for n, p in plain.parameters.items() if (p.ndim > 1) == big]} for big in (True, False)]
    )
    # A sharded parameter is another object, which has not the attributes of the one that it was.
    rules = [(r"gate_up", (("tp", 2), None))] if "gqa" in gold.case else []
    xla_ckpt.load_checkpoint(gold.root, "step_40", plain.model, optimizer, shardings=rules)
    for name, p in sharded.items():
        assert torch.equal(p.full_tensor(), gold.truth["params"][name]), name
        for what in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][what].full_tensor(), gold.truth[what][name]), (name, what)


def resumes(rank: int, *names: str) -> None:
    emulate()
    for name in names:
        if HAS_XLA:
            resumes_with_zero1(rank, Gold(name, "step_40"))
        resumes_with_fsdp2(Gold(name, "step_40"))


@needs_gold
def test_real_jobs_resume_with_zero1_and_with_fsdp2() -> None:
    """Without torch_xla, which has the ZeRO-1 optimizer, with FSDP2 alone."""
    names = ["tp2_pp2_dp2_z1m__xser_sync", "tp2_dp3_z1__pt_sync", "tp2_dp2__pt_sync", "tp2_dp2_z1m_gqafused__pt_sync"]
    run_on_ranks(resumes, 2, *names, "tp4_gqa_rep__pt_sync", xla=HAS_XLA)


def test_lost_data_is_named_and_nothing_is_loaded() -> None:
    gold = Gold(LOST, "step_40")
    for tag in ("step_40", None):
        target = Target(gold)
        with pytest.raises(xla_ckpt.CorruptCheckpointError, match=r"only 24 of 48 rows.*missing.*context-parallel"):
            xla_ckpt.load_checkpoint(gold.root, tag, target.model, target.optimizer)
        assert all((p == 7).all() for p in target.parameters.values())
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="missing"):
        xla_ckpt.restore(gold.root, "step_40", shardings=[(".", None)])


def test_a_model_of_the_masters_type_takes_the_masters() -> None:
    gold = Gold("tp2_dp2_z1m__pt_sync", "step_40")
    target = Target(gold, dtype=torch.float32)
    xla_ckpt.load_checkpoint(gold.root, "step_40", target.model, target.optimizer)
    assert target.differences("master") == []


def test_weights_that_were_not_saved_come_from_the_masters(tmp_path: Path) -> None:
    gold = Gold("tp2_pp2_dp2_z1m__xser_sync", "step_40")
    shutil.copytree(gold.root, tmp_path / "ckpt")
    for file in (tmp_path / "ckpt/step_40/model").glob("*.tensors/*"):
        file.unlink()
    target = Target(gold)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"inv_freq: wanted, but not stored"):
        xla_ckpt.load_checkpoint(tmp_path / "ckpt", "step_40", target.model, target.optimizer)
    xla_ckpt.load_checkpoint(tmp_path / "ckpt", "step_40", target.model, target.optimizer, strict=False)
    assert target.differences(buffers=False) == []
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"model= and optimizer="):
        xla_ckpt.load_checkpoint(tmp_path / "ckpt", "step_40", Target(gold).model)


@pytest.mark.parametrize("case", ["tp2_dp2_z1__xser_sync", "tp2_ep2_dp2__xser_sync"])
def test_files_of_older_versions_have_no_info(case: str, tmp_path: Path) -> None:
    gold = Gold(case, "step_40")
    shutil.copytree(gold.root, tmp_path / "ckpt")
    for file in (tmp_path / "ckpt").rglob("*.info.pt"):
        file.unlink()
    target = Target(gold)
    xla_ckpt.load_checkpoint(tmp_path / "ckpt", "step_40", target.model, target.optimizer)
    assert target.differences() == []


@pytest.mark.parametrize(
    ("case", "file", "words"),
    [
        ("tp2_pp2_dp2_z1m__xser_sync", "optim/dp_rank_01_tp_rank_00_pp_rank_01.pt", r"1 of 8 rank files.*dp 1.*pp 1"),
        ("tp2_dp2__pt_sync", "model/dp_rank_00_tp_rank_01_pp_rank_00.pt", r"1 of 2 rank files are missing in model"),
        ("tp2_dp2__xser_sync", "model/dp_rank_00_tp_rank_01_pp_rank_00.pt.tensors/tensor_3.pt", r"file is missing"),
        ("tp2_pp2_dp1_legacy__pt", "tp_rank_01_pp_rank_01/checkpoint.pt", r"1 of 4 rank files"),
    ],
)
def test_a_missing_file_is_named(case: str, file: str, words: str, tmp_path: Path) -> None:
    gold = Gold(case, "step_40")
    shutil.copytree(gold.root, tmp_path / "ckpt")
    (tmp_path / "ckpt/step_40" / file).unlink()
    target = Target(gold)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=words) as caught:
        xla_ckpt.load_checkpoint(tmp_path / "ckpt", "step_40", target.model, target.optimizer)
    assert (caught.value.path, caught.value.tag) == (str(tmp_path / "ckpt"), "step_40")
    assert all((p == 7).all() for p in target.parameters.values())


def test_an_optimizer_of_other_groups_is_refused() -> None:
    gold = Gold("tp2_dp2__pt_sync", "step_40")
    target = Target(gold)
    one = torch.optim.AdamW(target.model.parameters())
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"numbers its parameters.*\[16, 5\].*\[21\]"):
        xla_ckpt.load_checkpoint(gold.root, "step_40", target.model, one)
    groups = [{**g, "params": g["params"][::-1]} for g in target.groups]
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="its shape is another"):
        xla_ckpt.load_checkpoint(gold.root, "step_40", target.model, torch.optim.AdamW(groups))


def test_restore_gives_trees() -> None:
    gold = Gold("tp2_dp2__pt_sync", "step_40")
    name = "model.layers.0.self_attn.o_proj.weight"
    spec = xla_ckpt.ArraySpec((64, 64), torch.float32)
    made = xla_ckpt.restore(gold.root, "step_40", {"model": {name: spec}}).tree
    assert torch.equal(made["model"][name], gold.truth["params"][name])
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="ambiguous"):
        xla_ckpt.restore(gold.root, "step_40")
    whole = xla_ckpt.restore(Gold("tp1__pt_sync", "step_40").root).tree
    assert len(whole["model"]) == 22
    assert whole["user_content"] == CONTENT
