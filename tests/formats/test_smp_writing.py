"""SMP's files as this library writes them: opened with torch.load, and compared with what SMP would have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests import xla
from tests.formats.writing import as_job, as_kwargs, names, save_as_job, toy, unlike
from tests.topology.state import GROUPS, differences, known, names_of, tp_part, whole, zero1_part
from xla_ckpt import Mesh
from xla_ckpt.state.model_view import ModelView

OURS = {"manifest.json", "_CHECKPOINT_METADATA", "commit_success.txt"}
NUMBERS = {  # of the whole model, group by group: those that decay come first
    "embed.weight": 0, "layers.0.qkv.weight": 1, "layers.0.out.weight": 2, "layers.0.experts": 3,
    "layers.1.qkv.weight": 4, "layers.1.out.weight": 5,
    "layers.0.norm.weight": 6, "layers.1.norm.weight": 7, "layers.1.scale": 8,
}  # fmt: skip
SPECS = {
    "embed.weight": ("tp", None), "layers.0.qkv.weight": (("tp", 3), None), "layers.0.out.weight": (None, "tp"),
    "layers.0.experts": (None, "tp", None), "layers.1.qkv.weight": (("tp", 3), None),
    "layers.1.out.weight": (None, "tp"),
}  # fmt: skip
ADAMW = {
    "betas": (0.9, 0.999), "eps": 1e-08, "amsgrad": False, "maximize": False, "foreach": False, "capturable": False,
    "differentiable": False, "fused": None, "decoupled_weight_decay": True,
}  # fmt: skip
MESHES = [Mesh(), Mesh(dp=2), Mesh(tp=2), Mesh(dp=2, tp=2), Mesh(pp=2), Mesh(pp=2, dp=2, tp=2), Mesh(pp=2, tp=4)]


def partitions(pp: int) -> dict[str, int]:
    """SMP's names of the modules, and their stages."""
    held = {"main": 0, "main/module": 0, "main/module/module": 0}
    for stage, below in ((0, ["embed", "layers", "layers/0"]), (pp - 1, ["layers/1"])):
        held |= {f"main/module/module/{name}": stage for name in below}
    for layer, stage in ((0, 0), (1, pp - 1)):
        held |= {f"main/module/module/layers/{layer}/{name}": stage for name in ("qkv", "out", "norm")}
    return held


def model_of(mesh: Mesh, pp: int, tp: int) -> dict[str, Any]:
    """The weights of one file, by name."""
    rank = mesh.rank({"pp": pp, "tp": tp})
    weights = {name: tp_part(whole(name), name, mesh.tp, tp) for name in names_of(mesh, rank)}
    return {"seen": torch.tensor(5.0), **weights}


def load_info(mesh: Mesh, held: Mapping[str, Any]) -> dict[str, Any]:
    shapes = {name: tuple(whole(name).shape) if name != "seen" else () for name in held}
    return {
        "tensor_parallel_degree": mesh.tp,
        "pipeline_parallel_degree": mesh.pp,
        "partition_info": partitions(mesh.pp),
        "xla_ckpt": {"specs": {name: SPECS.get(name, ()) if mesh.tp > 1 else () for name in held}, "shapes": shapes},
    }


def state_of(name: str, part: Any) -> dict[str, Any]:
    return {"step": torch.tensor(7.0), **{what: part(known(name, what)) for what in ("exp_avg", "exp_avg_sq")}}


def optimizer_of(mesh: Mesh, pp: int, tp: int) -> dict[str, Any]:
    mine = names_of(mesh, mesh.rank({"pp": pp, "tp": tp}))
    return {
        "state": {
            number: state_of(name, lambda full, name=name: tp_part(full, name, mesh.tp, tp))
            for name, number in NUMBERS.items()
            if name in mine
        },
        "param_groups": groups(),
        "_smp_is_partial": True,
    }


def groups() -> list[dict[str, Any]]:
    named = list(NUMBERS)
    return [
        {**GROUPS[0], **ADAMW, "params": [0, 1, 2, 3, 4, 5], "param_names": named[:6]},
        {**GROUPS[1], **ADAMW, "params": [6, 7, 8], "param_names": named[6:]},
    ]


def read(folder: Path, name: str) -> Any:
    """What a file holds. With weights_only, torch makes nothing but tensors and plain values."""
    return torch.load(folder / name, weights_only=True)


def saved(monkeypatch: pytest.MonkeyPatch, mesh: Mesh, root: Path, tag: str = "a_partial", **options: Any) -> Path:
    states = [toy(mesh, rank) for rank in range(mesh.size)]
    more = {"user_content": {"step": 7}, "scheduler": {"last_epoch": 3}}
    save_as_job(monkeypatch, mesh, root, tag, lambda rank: {**as_kwargs(states[rank]), **more}, layout="smp", **options)
    return root / tag


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_files_are_those_of_smp(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and by what they hold: types, order of keys, the numbers of all stages, and every value."""
    folder = saved(monkeypatch, mesh, tmp_path)
    ranks = [(pp, tp) for pp in range(mesh.pp) for tp in range(mesh.tp)]
    files = {f"{kind}_{pp}_{tp}.pt" for kind in ("model", "optimizer_states") for pp, tp in ranks}
    assert names(folder) - OURS == files | {"scheduler.pt", "user_content.pt", "smp_config.pt"}
    for pp, tp in ranks:
        held = read(folder, f"model_{pp}_{tp}.pt")
        assert held.pop("_smp_is_partial") is True
        assert list(held)[-1] == "_smp_load_info"
        wanted = model_of(mesh, pp, tp)
        assert held.pop("_smp_load_info") == load_info(mesh, held)
        assert unlike({name: held[name] for name in wanted}, wanted) == []
        assert held.keys() == wanted.keys()
        assert unlike(read(folder, f"optimizer_states_{pp}_{tp}.pt"), optimizer_of(mesh, pp, tp)) == []
    assert read(folder, "user_content.pt") == {"step": 7}
    assert read(folder, "scheduler.pt") == {"last_epoch": 3}
    assert read(folder, "smp_config.pt") == {
        "ddp": True, "sharded_data_parallel_degree": 1, "smp_version": "1.12.1", "pipeline_parallel_degree": mesh.pp,
        "tensor_parallel_degree": mesh.tp, "shard_optimizer_state": False,
    }  # fmt: skip
    report = xla_ckpt.verify(tmp_path, "a_partial")
    assert (report.problems, report.strangers) == ([], [])


LOADS = [Mesh(), Mesh(tp=4), Mesh(pp=2, dp=2), Mesh(pp=2, tp=2)]


@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(pp=2, tp=2)], ids=str)
def test_the_manifest_loads_them_on_any_topology(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(monkeypatch, mesh, tmp_path)
    for other in LOADS:
        for zero in (False, True) if other.pp == other.tp == 1 else (False,):
            made = [toy(other, rank, zero=zero, blank=True) for rank in range(other.size)]

            def load(rank: int, made: Any = made, other: Mesh = other) -> list[str]:
                content = xla_ckpt.load_checkpoint(tmp_path, None, *made[rank], {})
                assert content.user_content == {"step": 7}
                return differences(made[rank][1], made[rank][0].by_name, other, rank)

            assert as_job(monkeypatch, other, "load", load) == [[]] * other.size, (other, zero)


def test_the_parts_put_together_by_hand_are_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SMP does it: along the axis over the tensor-parallel ranks, then stage after stage."""
    mesh = Mesh(pp=2, dp=2, tp=2)
    folder = saved(monkeypatch, mesh, tmp_path)
    axes = {"embed.weight": 0, "layers.0.out.weight": 1, "layers.0.experts": 1, "layers.1.out.weight": 1}
    merged: dict[str, torch.Tensor] = {}
    moments: dict[int, torch.Tensor] = {}
    for pp in range(2):
        parts = [read(folder, f"model_{pp}_{tp}.pt") for tp in range(2)]
        states = [read(folder, f"optimizer_states_{pp}_{tp}.pt")["state"] for tp in range(2)]
        for name in (name for name in parts[0] if name in axes or "norm" in name or "scale" in name):
            number = NUMBERS[name]
            pieces, average = [p[name] for p in parts], [s[number]["exp_avg"] for s in states]
            merged[name] = torch.cat(pieces, axes[name]) if name in axes else pieces[0]
            moments[number] = torch.cat(average, axes[name]) if name in axes else average[0]
    assert len(merged) == 7
    for name, value in merged.items():
        assert torch.equal(value, whole(name)), name
        assert torch.equal(moments[NUMBERS[name]], known(name, "exp_avg")), name


def test_torch_resumes_an_optimizer_from_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SMP does it: the file of this rank goes into an optimizer of all parameters, and no other rank is asked."""
    mesh = Mesh(pp=2, tp=2)
    folder = saved(monkeypatch, mesh, tmp_path)
    parameters = {n: torch.nn.Parameter(tp_part(whole(n), n, 2, 1)) for n in NUMBERS}
    named = list(parameters.values())
    optimizer = torch.optim.AdamW([{"params": named[:6], "lr": 1.0}, {"params": named[6:]}])
    held = read(folder, "optimizer_states_1_1.pt")
    held.pop("_smp_is_partial")
    optimizer.load_state_dict(held)
    for name in ("layers.1.qkv.weight", "layers.1.norm.weight"):
        found = optimizer.state[parameters[name]]
        assert torch.equal(found["exp_avg"], tp_part(known(name, "exp_avg"), name, 2, 1)), name
        assert float(found["step"]) == 7
    assert not optimizer.state[parameters["embed.weight"]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.03]


@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(pp=2, dp=2), Mesh(dp=3)], ids=str)
def test_rows_that_zero1_dealt_out_have_a_file_for_each_rank(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [toy(mesh, rank, zero=True) for rank in range(mesh.size)]
    save_as_job(monkeypatch, mesh, tmp_path, "a", lambda rank: as_kwargs(states[rank]), layout="smp")
    kinds = ("optimizer_states", "fp16_states")
    files = {f"model_{pp}_{tp}.pt" for pp in range(mesh.pp) for tp in range(mesh.tp)}
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        numbers = f"{at['pp']}_{at['tp']}_{at['dp']}"
        files |= {f"{kind}_{numbers}.pt" for kind in kinds}
        mine = [name for name in NUMBERS if name in names_of(mesh, rank)]
        held = read(tmp_path / "a", f"optimizer_states_{numbers}.pt")

        def part(full: torch.Tensor, name: str, rank: int = rank) -> torch.Tensor:
            return zero1_part(full, name, mesh, rank).contiguous()

        wanted = {NUMBERS[name]: state_of(name, lambda full, name=name: part(full, name)) for name in mine}
        assert unlike(held["state"], wanted) == []
        shapes = {NUMBERS[n]: list(tp_part(whole(n), n, mesh.tp, at["tp"]).shape) for n in mine}
        assert held["xla_ckpt"] == {"shapes": shapes}
        assert [group["params"] for group in held["param_groups"]] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
        masters = read(tmp_path / "a", f"fp16_states_{numbers}.pt")
        groups = [[n for n in mine if NUMBERS[n] < 6], [n for n in mine if NUMBERS[n] >= 6]]
        assert masters.pop("xla_ckpt") == {"numbers": [[NUMBERS[n] for n in group] for group in groups]}
        assert unlike(masters.pop("fp32_from_fp16"), [[part(known(n, "master"), n) for n in g] for g in groups]) == []
        assert masters == {
            "loss_scaler": None, "dynamic_loss_scale": False, "overflow": False, "first_closure_call_this_step": True,
        }  # fmt: skip
    assert names(tmp_path / "a") - OURS == files | {"smp_config.pt"}
    assert read(tmp_path / "a", "smp_config.pt")["shard_optimizer_state"] is True
    assert xla_ckpt.verify(tmp_path, "a").ok
    for other in (Mesh(), Mesh(dp=2), Mesh(pp=2, tp=2)):
        made = [toy(other, rank, zero=other.tp == 1, blank=True) for rank in range(other.size)]

        def load(rank: int, made: Any = made, other: Mesh = other) -> list[str]:
            xla_ckpt.load_checkpoint(tmp_path, "a", *made[rank])
            return differences(made[rank][1], made[rank][0].by_name, other, rank, masters=True)

        assert as_job(monkeypatch, other, "load", load) == [[]] * other.size, other


def test_a_tag_takes_the_place_of_one_of_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(monkeypatch, Mesh(pp=2, dp=2), tmp_path)
    folder = saved(monkeypatch, Mesh(tp=2), tmp_path)
    assert {n for n in names(folder) if n.startswith("model")} == {"model_0_0.pt", "model_0_1.pt"}
    assert xla_ckpt.list_tags(tmp_path) == ["a_partial"]
    assert xla_ckpt.load_checkpoint(tmp_path, model=toy(Mesh(), 0, blank=True)[0]).user_content == {"step": 7}


@pytest.mark.parametrize("device", xla.DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_a_device_are_stored_as_those_of_the_host(device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """SMP saves them with `.cpu()`: who loads the files needs no such device. The save does not wait for training."""
    model = torch.nn.Linear(6, 4, dtype=dtype)
    value = model.weight.detach().clone()
    model.to(xla.device() if device == "xla" else device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    handle = xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer, layout="smp", async_save=True)
    optimizer.step()
    handle.result()
    held = read(tmp_path / "a", "model_0_0.pt")
    assert (held["weight"].device.type, held["weight"].dtype) == ("cpu", dtype)
    assert torch.equal(held["weight"], value - 1)
    states = read(tmp_path / "a", "optimizer_states_0_0.pt")["state"]
    assert torch.equal(states[1]["momentum_buffer"], torch.ones(4, dtype=dtype))


@pytest.mark.parametrize("file", ["model_0_1.pt", "optimizer_states_1_0.pt", "user_content.pt", "smp_config.pt"])
def test_a_flipped_byte_of_any_file_is_found(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(monkeypatch, Mesh(pp=2, tp=2), tmp_path) / file
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), len(data) // 12):
        data[at] ^= 1
        path.write_bytes(data)
        assert [error.file for error in xla_ckpt.verify(tmp_path, "a_partial").problems] == [file], at
        data[at] ^= 1
    path.write_bytes(data)
    assert xla_ckpt.verify(tmp_path, "a_partial").ok


def test_a_parameter_of_several_stages_is_stored_by_each_and_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(pp=2)

    def state(rank: int) -> dict[str, Any]:
        model = torch.nn.ModuleDict({"embed": torch.nn.Linear(3, 2, bias=False), f"own{rank}": torch.nn.Linear(2, 2)})
        torch.nn.init.constant_(model["embed"].weight, 5.0)
        torch.nn.init.constant_(model[f"own{rank}"].weight, float(rank))
        model[f"own{rank}"].add_module("drop", torch.nn.Dropout())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    save_as_job(monkeypatch, mesh, tmp_path, "a", state, layout="smp")
    numbers = [read(tmp_path / "a", f"optimizer_states_{pp}_0.pt") for pp in range(2)]
    assert [list(held["state"]) for held in numbers] == [[0, 1, 2], [0, 3, 4]]
    order = ["embed.weight", "own0.weight", "own0.bias", "own1.weight", "own1.bias"]
    assert [held["param_groups"][0]["param_names"] for held in numbers] == [order, order]
    info = read(tmp_path / "a", "model_1_0.pt")["_smp_load_info"]["partition_info"]
    below = {name.removeprefix("main/module/module/"): at for name, at in info.items() if name.count("/") > 2}
    assert below == {"embed": 0, "own0": 0, "own1": 1, "own0/drop": 0, "own1/drop": 1}
    tree = xla_ckpt.restore(tmp_path, "a").tree
    assert sorted(tree["model"]) == sorted(order)
    assert float(tree["optimizer"]["state"]["embed.weight"]["momentum_buffer"].sum()) == 6


def test_what_the_program_says_of_its_job_is_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(pp=2, dp=2)
    config = {"microbatches": 4, "pipeline_parallel_degree": 9, "smp_version": "1.11.0", "ddp": False}
    partition_info = {"main": 0, "main/layers": 1}
    scaler = {"dynamic_loss_scale": True, "overflow": True, "loss_scaler": {"cur_scale": 8.0}}
    extras = {"smp_config": config, "partition_info": partition_info, "fp16_states": scaler}
    states = [{**as_kwargs(toy(mesh, rank, zero=True)), "extras": extras} for rank in range(mesh.size)]
    save_as_job(monkeypatch, mesh, tmp_path, "a", lambda rank: states[rank], layout="smp")
    assert read(tmp_path / "a", "smp_config.pt") == {
        **config, "pipeline_parallel_degree": 2, "tensor_parallel_degree": 1, "shard_optimizer_state": True,
        "sharded_data_parallel_degree": 1,
    }  # fmt: skip
    info = read(tmp_path / "a", "model_0_0.pt")["_smp_load_info"]
    assert info["partition_info"] == partition_info
    masters = read(tmp_path / "a", "fp16_states_1_0_1.pt")
    assert {name: masters[name] for name in scaler} == scaler
    assert masters["first_closure_call_this_step"] is True
    assert xla_ckpt.restore(tmp_path, "a").tree["extras"] == extras


def test_the_modules_of_a_wrapped_model_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the whole model, and saves what it owns of it, as `neuron_compat.smp` does."""
    last = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.ReLU())
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), last)
    entries = dict(model.named_parameters())

    def owned(rank: int) -> dict[str, Any]:
        mine = {name: value for name, value in entries.items() if name.startswith("0") == (rank == 0)}
        return {
            "model": ModelView(
                mine, parameters=list(mine.items()), wrapped_modules=[model], load_entries=lambda _: None
            )
        }

    save_as_job(monkeypatch, Mesh(pp=2), tmp_path, "a", owned, layout="smp")
    info = read(tmp_path / "a", "model_1_0.pt")["_smp_load_info"]["partition_info"]
    assert {name.removeprefix("main/module/module/"): at for name, at in info.items() if name.count("/") > 2} == {
        "0": 0, "1": 0, "2": 1, "2/0": 1, "2/1": 1,
    }  # fmt: skip
    xla_ckpt.save_checkpoint(tmp_path, "b", {"other.w": torch.ones(1)}, layout="smp")
    info = read(tmp_path / "b", "model_0_0.pt")["_smp_load_info"]["partition_info"]
    assert list(info) == ["main", "main/module", "main/module/module", "main/module/module/other"]


def test_optimizers_without_names_keep_their_numbers(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.AdamW([{"params": weights[1:]}, {"params": weights[:1]}], foreach=False)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    packed = optimizer.state_dict()
    for tag, given in (("object", optimizer), ("dict", packed)):
        xla_ckpt.save_checkpoint(tmp_path, tag, optimizer=given, layout="smp")
        held = read(tmp_path / tag, "optimizer_states_0_0.pt")
        assert held.pop("_smp_is_partial")
        assert unlike(held["state"], packed["state"]) == []
        assert unlike(held["param_groups"], packed["param_groups"]) == []
        assert list(held) == ["state", "param_groups"]
    named = {"state": {"b": {"m": torch.ones(1)}, "step": 3}, "param_groups": [{"lr": 1.0, "params": ["a", "b"]}]}
    xla_ckpt.save_checkpoint(tmp_path, "named", optimizer=named, layout="smp")
    held = read(tmp_path / "named", "optimizer_states_0_0.pt")
    assert held["param_groups"] == [{"lr": 1.0, "params": [0, 1], "param_names": ["a", "b"]}]
    assert list(held["state"]) == [1, "step"]
    assert xla_ckpt.restore(tmp_path, "named").tree["optimizer"]["state"]["step"] == 3


def test_other_members_lie_beside_as_in_the_native_layout(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(
        tmp_path, "a", {"w": torch.ones(3)}, user_content={"mean": torch.ones(2)},
        extras={"ema": {"w": torch.zeros(3)}}, layout="smp",
    )  # fmt: skip
    assert names(tmp_path / "a") - OURS == {
        "model_0_0.pt", "user_content.pt", "smp_config.pt", "extras/00001-of-00001.safetensors",
    }  # fmt: skip
    tree = xla_ckpt.restore(tmp_path, "a").tree
    assert tree["user_content"]["mean"].tolist() == [1, 1]
    assert tree["extras"]["ema"]["w"].tolist() == [0, 0, 0]


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2, 3))


def test_what_has_no_place_is_refused_and_another_layout_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(dp=2, ep=2)
    rules = [("w", ("ep", None))]
    for layout, written in (("smp", None), (["smp", "native"], {"model"})):
        options: dict[str, Any] = {"layout": layout, "shardings": rules}
        if written is None:
            with pytest.raises(xla_ckpt.UnsupportedStateError, match=r"no place for what ranks along ep.*dp=2,ep=2"):
                save_as_job(monkeypatch, mesh, tmp_path, "a", lambda _: {"model": Experts()}, **options)
            assert xla_ckpt.list_tags(tmp_path) == []
        else:
            save_as_job(monkeypatch, mesh, tmp_path, "a", lambda _: {"model": Experts()}, **options)
            assert {name.split("/")[0] for name in names(tmp_path / "a") - OURS} == written
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="nothing of it is here"):
        xla_ckpt.save_checkpoint(tmp_path, "b", extras={"n": {"k": 1}}, layout="smp")
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="a place for model as a dict"):
        xla_ckpt.save(tmp_path, "b", {"model": [torch.ones(1)]}, layout="smp")
    zero = Mesh(cp=2)
    states = [toy(zero, rank, zero=True, axes="cp") for rank in range(2)]
    with pytest.raises(xla_ckpt.UnsupportedStateError, match=r"the layout smp cannot.*dealt out over cp"):
        save_as_job(monkeypatch, zero, tmp_path, "b", lambda rank: as_kwargs(states[rank]), layout="smp")
    assert xla_ckpt.list_tags(tmp_path) == ["a"]
