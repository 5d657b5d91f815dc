"""parallel_layers.save and load: neuronx-distributed's older calls, its files, and what goes wrong."""

from __future__ import annotations

import inspect
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla

import neuron_compat
import xla_ckpt
from neuron_compat.nxd import parallel_layers
from neuron_compat.nxd.parallel_layers import ColumnParallelLinear, checkpointing, load, parallel_state, save
from tests import xla
from tests.formats.gold import Gold, stage_of
from tests.jobs import finish, run_on_ranks, start_on_ranks
from xla_ckpt import Mesh

pytestmark = pytest.mark.xla

xla.begin()  # or a module whose backward passes run before leaves autograd without the device


@pytest.fixture(autouse=True)
def alone() -> Any:
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def as_rank(monkeypatch: pytest.MonkeyPatch, tp: tuple[int, int], pp: int = 0) -> None:
    mesh = Mesh(pp=pp + 1, tp=tp[1])
    rank = mesh.rank({"pp": pp, "tp": tp[0]})
    monkeypatch.setattr(checkpointing, "get_mesh_and_coordinates", lambda: (mesh, mesh.coordinates(rank)))
    monkeypatch.setattr(checkpointing, "_get_rank", lambda: rank)


def names(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def test_signatures_are_those_of_neuronx_distributed() -> None:
    def defaults(function: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    assert defaults(save)[2:] == [
        ("save_serially", True), ("save_xser", False), ("down_cast_bf16", False), ("master_dp_only", True),
    ]  # fmt: skip
    assert [n for n, _ in defaults(save)[:2]] == ["checkpoint", "output_dir"]
    assert defaults(load)[0][0] == "chkpt_path"
    assert defaults(load)[1:] == [
        ("model", None), ("model_or_optimizer", None), ("model_key", "model"), ("load_xser", False), ("sharded", True),
        ("strict", True), ("master_dp_only", True), ("weights_only", False),
    ]  # fmt: skip
    assert parallel_layers.checkpointing.save is save


@pytest.mark.parametrize("kind", ["pt", "xser"])
def test_what_neuronx_distributed_wrote(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gold, mesh = Gold(f"tp2_pp2_dp1_legacy__{kind}", "step_40"), Mesh(pp=2, tp=2)
    for rank in range(4):
        at = mesh.coordinates(rank)
        as_rank(monkeypatch, (at["tp"], 2), at["pp"])
        found = load(gold.root / "step_40", load_xser=kind == "xser")
        mine = {n: gold.part(n, v, mesh, rank) for n, v in gold.truth["params"].items() if stage_of(n) == at["pp"]}
        for name, wanted in mine.items():
            assert found["model"][name].device.type == ("xla" if kind == "xser" else "cpu")
            assert torch.equal(found["model"][name].cpu(), wanted), name
        assert len(found["optimizer"]["state"]) == len(mine)
        assert found["step"] == 40


@pytest.mark.parametrize("xser", [False, True])
def test_round_trip(tmp_path: Path, xser: bool) -> None:
    model = torch.nn.Linear(3, 2).to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, device="xla")).sum().backward()
    optimizer.step()
    torch_xla.sync()
    same = torch.full((2,), 0.1, dtype=torch.float64, device="xla")
    state = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(),
        "rest": [same, (same, torch.tensor(300.0)), None], "step": 3,
    }  # fmt: skip
    save(state, tmp_path / "a", save_xser=xser)
    files = ["tp_rank_00_pp_rank_00/checkpoint.pt"]
    if xser:
        tensors = [f"tp_rank_00_pp_rank_00.tensors/tensor_{i}.pt" for i in range(7)]
        files = ["tp_rank_00_pp_rank_00", *tensors]
    assert names(tmp_path / "a") == files

    other = torch.nn.Linear(3, 2).to("xla")
    rest = load(tmp_path / "a", model_or_optimizer=other, load_xser=xser)
    assert sorted(rest) == ["optimizer", "rest", "step"]
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.cpu(), b.cpu())
    again = torch.optim.AdamW(other.parameters())
    rest = load(tmp_path / "a", model_or_optimizer=again, model_key="optimizer", load_xser=xser)
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        assert again.state[a]["step"] == 1
        assert torch.equal(again.state[a]["exp_avg"].cpu(), optimizer.state[b]["exp_avg"].cpu())
    assert rest["rest"][0] is rest["rest"][1][0]
    assert rest["rest"][0].dtype == torch.float64
    assert rest["step"] == 3
    assert load(tmp_path / "a", model_or_optimizer=other, model_key=None, load_xser=xser, strict=False) is None

    save(state, tmp_path / "low", save_xser=xser, down_cast_bf16=True)
    low = load(tmp_path / "low", load_xser=xser)
    assert low["model"]["weight"].dtype == torch.bfloat16
    assert low["rest"][0].dtype == torch.float64
    assert low["rest"][1][1].dtype == torch.float32


@pytest.mark.parametrize("xser", [False, True])
def test_a_save_that_fails_leaves_the_older_one(tmp_path: Path, xser: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def state(value: float) -> dict[str, Any]:
        return {"model": {f"w{i}": torch.full((2,), value + i, device="xla") for i in range(3)}}

    save(state(1), tmp_path, save_xser=xser)
    before = names(tmp_path)
    renames, real = [], os.rename

    def failing(source: str, target: str, **directories: int) -> None:
        if "lease" not in target:  # which another thread keeps for an earlier test's root
            renames.append(target)
            if len(renames) == (3 if xser else 1):
                raise OSError(28, "No space left on device")
        real(source, target, **directories)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(xla_ckpt.StorageError, match="No space"):
        save(state(2), tmp_path, save_xser=xser)
    monkeypatch.setattr(os, "rename", real)
    assert [n for n in names(tmp_path) if "tmp" in n] == []
    assert load(tmp_path, load_xser=xser)["model"]["w2"].tolist() == [3, 3]
    for value in (5, 6, 7):
        save(state(value), tmp_path, save_xser=xser)
        assert load(tmp_path, load_xser=xser)["model"]["w2"].tolist() == [value + 2] * 2
        assert len(names(tmp_path)) == len(before)


class Own:
    pass


def test_bad_input(tmp_path: Path) -> None:
    weight = {"model": {"w": torch.ones(2, device="xla")}}
    with pytest.raises(xla_ckpt.NoCheckpointError, match="load_xser"):
        load(tmp_path)
    save(weight, tmp_path / "pt")
    save(weight, tmp_path / "xser", save_xser=True)
    for path, xser in ((tmp_path / "pt", True), (tmp_path / "xser", False)):
        with pytest.raises(xla_ckpt.NoCheckpointError, match="load_xser"):
            load(path, load_xser=xser)
    with pytest.raises(xla_ckpt.NoCheckpointError, match="dp_rank_00"):
        load(tmp_path / "pt", master_dp_only=False)
    with pytest.raises(xla_ckpt.StorageError):
        save(weight, tmp_path / "pt", save_xser=True)  # the name is a directory there
    with pytest.raises(xla_ckpt.NoCheckpointError, match="sharded=True"):
        load(tmp_path / "pt", torch.nn.Linear(1, 1), sharded=False)
    optimizer = torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())
    with pytest.raises(
        xla_ckpt.IncompatibleCheckpointError, match="no state of an optimizer.*found w.*model_key=.*'model'"
    ):
        load(tmp_path / "pt", model_or_optimizer=optimizer)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"expected optim.*found model.*model_key="):
        load(tmp_path / "pt", model_or_optimizer=torch.nn.Linear(1, 1), model_key="optim")
    with pytest.raises(RuntimeError, match="Missing key"):
        load(tmp_path / "pt", torch.nn.Linear(1, 1))
    with pytest.raises(xla_ckpt.UsageError, match="sharded=False"):
        load(tmp_path / "pt", sharded=False)
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="pickle"):
        save({"f": lambda: 0}, tmp_path / "lambda")

    save({"own": Own()}, tmp_path / "own")
    with pytest.raises(xla_ckpt.UntrustedObjectError, match=r"Own.*trust_pickle=True"):
        load(tmp_path / "own")
    assert isinstance(load(tmp_path / "own", trust_pickle=True)["own"], Own)

    (tmp_path / "xser/tp_rank_00_pp_rank_00.tensors/tensor_0.pt").unlink()
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=r"missing.*tensor_0"):
        load(tmp_path / "xser", load_xser=True)
    file = tmp_path / "pt/tp_rank_00_pp_rank_00/checkpoint.pt"
    for data in (file.read_bytes()[:-30], b"", b"nothing"):
        file.write_bytes(data)
        with pytest.raises(xla_ckpt.CorruptCheckpointError, match=r"(no whole zip|cut off).*checkpoint\.pt"):
            load(tmp_path / "pt")


class Halved(torch.nn.Module):
    """Has its part of two parameters, one of them fused of two, and one padded."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape, dim, stride in (("fused", (4, 3), 0, 2), ("row", (3, 2), 1, 1), ("padded", (3, 2), 0, 1)):
            parameter = torch.nn.Parameter(torch.zeros(shape))
            parameter.tensor_model_parallel, parameter.partition_dim = True, dim
            parameter.partition_stride = stride
            self.register_parameter(name, parameter)
        self.padded.unpadded_shape = (5, 2)
        self.norm = torch.nn.Parameter(torch.zeros(3))


def test_a_whole_checkpoint_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = {
        "fused": torch.arange(24.0).reshape(8, 3), "row": torch.arange(12.0).reshape(3, 4),
        "padded": torch.ones(5, 2), "norm": torch.arange(3.0),
    }  # fmt: skip
    file = tmp_path / "full.pt"
    torch.save({"model": full, "step": 1}, file)
    for rank in range(2):
        as_rank(monkeypatch, (rank, 2))
        module = Halved()
        assert load(file, model_or_optimizer=module, sharded=False) == {"step": 1}
        rows = [0, 1, 4, 5] if rank == 0 else [2, 3, 6, 7]
        assert torch.equal(module.fused.detach(), full["fused"][rows])
        assert torch.equal(module.row.detach(), full["row"].chunk(2, 1)[rank])
        assert module.padded[:, 0].tolist() == ([1, 1, 1] if rank == 0 else [1, 1, 0])
        assert torch.equal(module.norm.detach(), full["norm"])

    class Fused(Halved):
        def preshard_hook(self, state: dict[str, Any], prefix: str) -> None:
            assert prefix == "weight"
            state["fused"] = torch.cat([state.pop("gate"), state.pop("up")])

    gate, up = full["fused"].chunk(2)
    torch.save({**{k: v for k, v in full.items() if k != "fused"}, "gate": gate, "up": up}, file)
    module = Fused()
    load(file, model_or_optimizer=module, model_key=None, sharded=False)
    assert torch.equal(module.fused.detach(), full["fused"][[2, 3, 6, 7]])
    torch.save({**full, "row": torch.zeros(3, 5)}, file)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"row.*\[3, 4\].*\[3, 5\]"):
        load(file, model_or_optimizer=Halved(), model_key=None, sharded=False)


def older_calls(rank: int, root: str) -> list[tuple[str, str]]:
    """Save and load in all forms, and where one rank is in the way; which errors that made."""
    neuron_compat.emulate()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(0)
    model = ColumnParallelLinear(4, 6).to("xla")
    for xser, all_dp, serially in itertools.product((False, True), repeat=3):
        in_one_form(rank, f"{root}/{xser}_{all_dp}_{serially}/step_1", model, xser, all_dp, serially)
    # the same files on another topology
    fresh = ColumnParallelLinear(4, 6).to("xla")
    xla_ckpt.load_checkpoint(f"{root}/True_False_True", "step_1", model=fresh)
    assert equal(fresh, model)
    told = []
    for xser in (False, True):
        told += blocked(rank, f"{root}/blocked_{xser}", model, xser)
    for wrong in ({"expert_model_parallel_size": 2}, {"context_parallel_size": 2}):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**wrong)
        with pytest.raises(xla_ckpt.UsageError):
            save({"step": 1}, f"{root}/wrong", master_dp_only="expert_model_parallel_size" in wrong)
    return told


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def in_one_form(rank: int, path: str, model: torch.nn.Module, xser: bool, all_dp: bool, serially: bool) -> None:
    mine = torch.full((3,), float(rank), device="xla")
    state = {"model": model.state_dict(), "mine": mine, "step": rank}
    save(state, path, save_serially=serially, save_xser=xser, master_dp_only=not all_dp)
    found = sorted(n for n in os.listdir(path) if not n.endswith(".tensors"))
    wanted = [f"tp_rank_{t:02d}_pp_rank_00" for t in range(2)]
    wanted = [f"{w}_dp_rank_{d:02d}" for w in wanted for d in range(2)] if all_dp else wanted
    assert found == wanted  # all of it is there when the call returns
    fresh = ColumnParallelLinear(4, 6).to("xla")
    rest = load(path, model_or_optimizer=fresh, load_xser=xser, master_dp_only=not all_dp)
    assert equal(fresh, model)
    assert rest["step"] == (rank if all_dp else parallel_state.get_tensor_model_parallel_rank())
    assert rest["mine"].tolist() == [float(rest["step"])] * 3
    assert (rest["mine"].device.type == "xla") == xser
    dist.barrier()


def blocked(rank: int, path: str, model: torch.nn.Module, xser: bool) -> list[tuple[str, str]]:
    """What one rank meets reaches all of them."""
    if rank == 1:
        os.makedirs(path + ("/tp_rank_01_pp_rank_00" if xser else ""))
        open(path + ("/tp_rank_01_pp_rank_00.tensors" if xser else "/tp_rank_01_pp_rank_00"), "w").close()
    dist.barrier()
    with pytest.raises(xla_ckpt.CheckpointError, match="tp_rank_01") as saving:
        save({"model": model.state_dict()}, path, save_xser=xser)
    with pytest.raises(xla_ckpt.CheckpointError) as loading:
        load(path, load_xser=xser)
    return [(type(saving.value).__name__, type(loading.value).__name__)]


def test_a_job_of_four_ranks(tmp_path: Path) -> None:
    for rank, told in enumerate(run_on_ranks(older_calls, 4, str(tmp_path / "run"), xla=True)):
        saving = "StorageError" if rank == 1 else "RankFailedError"
        loading = "NoCheckpointError" if rank in (1, 3) else "RankFailedError"
        assert told == [(saving, loading)] * 2, rank


def dies_while_it_saves(rank: int, root: Path) -> str:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    if rank == 1:
        rename = os.rename

        def dies(source: str, target: str, **directories: int) -> None:
            if "lease" not in target:  # which a thread keeps
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target, **directories)

        os.rename = dies  # type: ignore[assignment]
    with pytest.raises(xla_ckpt.RankFailedError) as caught:
        save({"model": {"w": torch.ones(4)}}, root)
    return str(caught.value)


def test_a_rank_that_dies_is_noticed(tmp_path: Path) -> None:
    ranks = start_on_ranks(dies_while_it_saves, 2, tmp_path / "run", xla=True)
    finish(ranks)
    assert ranks[0].value().startswith("saving failed")
    assert names(tmp_path / "run") == [
        "tp_rank_00_pp_rank_00/checkpoint.pt", "tp_rank_01_pp_rank_00/.new-checkpoint.pt/checkpoint.pt",
    ]  # fmt: skip
