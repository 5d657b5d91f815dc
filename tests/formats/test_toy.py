"""What a layout gets for nothing: everything that the library does, for one that it has never heard of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import xla_ckpt
from tests.covering import some_of
from tests.formats.toy import Npy, registered
from tests.formats.writing import as_job, as_kwargs, save_as_job, toy
from tests.jobs import run_on_ranks
from tests.topology.state import WHOLE, differences, known, whole
from xla_ckpt import Mesh
from xla_ckpt.cli.main import main
from xla_ckpt.formats.registry import list_convertible_layouts, list_saveable_layouts, register_layout

CUTS = ["layers.0"]


@pytest.fixture(autouse=True)
def layout() -> Iterator[Npy]:
    with registered() as known_now:
        yield known_now
    assert "toy" not in list_convertible_layouts()


def arrays_in(tag: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What numpy loads from each file of a tag."""
    return {str(f.relative_to(tag)): np.load(f, allow_pickle=False) for f in sorted(tag.rglob("*.npy"))}


def trained() -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return model, optimizer


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    """Exit code and answer of a command."""
    code = main([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_it_is_a_layout_like_the_others(layout: Npy, tmp_path: Path) -> None:
    assert "toy" in list_saveable_layouts()
    with pytest.raises(xla_ckpt.UsageError, match="a name of its own"):
        register_layout(layout)
    with pytest.raises(xla_ckpt.UsageError, match="pass an object of it"):
        register_layout(type(layout))
    with pytest.raises(xla_ckpt.UsageError, match="no such layout"):
        xla_ckpt.save(tmp_path, "a", {"w": torch.ones(2)}, layout="toys")


def test_any_tree_of_arrays_and_values(tmp_path: Path) -> None:
    tree = {
        "w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16), "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(5), "np": {"a/b": np.arange(4, dtype=np.int16)}, "values": [1, "x", (None, 2.5)],
        "large": torch.randn(3_000_000),
    }  # fmt: skip
    tree["again"] = tree["w"]
    for asynchronous in (False, True):
        tag = str(asynchronous)
        xla_ckpt.save(tmp_path, tag, tree, layout="toy", async_save=asynchronous).result()
        files = arrays_in(tmp_path / tag)
        assert files["tree/w.0.npy"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert files["tree/np%2Fa~1b.0.npy"].dtype == np.int16
        assert files["tree/half.0.npy"].view(np.uint16).tolist() == [0x3F80] * 3
        assert len(files) == 5, "an array without elements has no file, and a shared one has one"
        found = xla_ckpt.restore(tmp_path, tag).tree
        assert torch.equal(found["again"], tree["w"])
        assert torch.equal(found["large"], tree["large"])
        assert found["half"].dtype == torch.bfloat16
        assert found["empty"].shape == (0, 4)
        assert (found["np"]["a/b"] == tree["np"]["a/b"]).all()
        assert found["values"] == tree["values"]
        assert xla_ckpt.verify(tmp_path, tag).ok
    assert xla_ckpt.list_tags(tmp_path) == ["False", "True"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_training_state(tmp_path: Path, asynchronous: bool) -> None:
    model, optimizer = trained()
    xla_ckpt.save_checkpoint(
        tmp_path, "a", model, optimizer, user_content={"step": 3}, layout="toy", async_save=asynchronous,
        extras={"rng": xla_ckpt.RNGState()},
    )  # fmt: skip
    again = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    fresh = torch.optim.AdamW(again.parameters())
    extras = {"rng": xla_ckpt.RNGState()}
    assert xla_ckpt.load_checkpoint(tmp_path, None, again, fresh, extras=extras).user_content == {"step": 3}
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(fresh.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    assert (np.load(tmp_path / "a/model/0.weight.0.npy") == model[0].weight.detach().numpy()).all()
    like = {"model": {"0.weight": torch.zeros(3, 4)}}
    assert torch.equal(xla_ckpt.restore(tmp_path, "a", like).tree["model"]["0.weight"], model[0].weight)


MESHES = [("tp=4", False), ("dp=2,tp=2", False), ("dp=4", True), ("pp=2,dp=2", True), ("pp=2,tp=2", False)]


@pytest.mark.parametrize(("mesh", "zero"), MESHES)
def test_what_four_ranks_write_others_read(
    mesh: str, zero: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote = Mesh.parse(mesh)
    save_as_job(
        monkeypatch, wrote, tmp_path, "a", lambda rank: as_kwargs(toy(wrote, rank, zero=zero)), layout="toy"
    )  # fmt: skip
    for text, dealt in (*MESHES, ("dp=3", True), ("tp=2", False), ("dp=1", False)):
        to = Mesh.parse(text)
        made = [toy(to, rank, zero=dealt, blank=True) for rank in range(to.size)]
        as_job(monkeypatch, to, "load", lambda rank: xla_ckpt.load_checkpoint(tmp_path, "a", *made[rank]))  # noqa: B023
        for rank, (model, optimizer) in enumerate(made):
            assert differences(optimizer, model.by_name, to, rank) == [], (text, rank)
    tree = xla_ckpt.restore(tmp_path, "a").tree
    for name in WHOLE:
        assert torch.equal(tree["model"][name], whole(name))
        assert torch.equal(tree["optimizer"]["state"][name]["exp_avg"], known(name, "exp_avg"))
    assert xla_ckpt.verify(tmp_path, "a").ok
    assert sum(a.nbytes for a in arrays_in(tmp_path / "a").values()) == xla_ckpt.verify(tmp_path, "a").nbytes


def saves_and_loads(rank: int, root: Path) -> list[str]:
    with registered():
        mesh = Mesh(tp=2)
        model, optimizer = toy(mesh, rank)
        xla_ckpt.save_checkpoint(
            root,
            "a",
            model,
            optimizer,
            mesh=mesh,
            layout="toy",
            async_save=True,
            options=xla_ckpt.SaveOptions(timeout=60),
        )
        other = Mesh(dp=2)
        model, optimizer = toy(other, rank, blank=True)
        xla_ckpt.load_checkpoint(
            root, "a", model, optimizer, mesh=other, options=xla_ckpt.LoadOptions(replica_read="share", timeout=60)
        )
        return differences(optimizer, model.by_name, other, rank)


def test_real_processes(tmp_path: Path) -> None:
    assert run_on_ranks(saves_and_loads, 2, tmp_path / "ckpt") == [[], []]
    assert xla_ckpt.verify(tmp_path / "ckpt", "a").ok


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer, layout="toy")
    code, listed = ask(capsys, "ls", tmp_path)
    assert (code, [(t["tag"], t["layout"], t["sequence"]) for t in listed["tags"]]) == (0, [("a", "toy", 1)])
    code, shown = ask(capsys, "show", tmp_path, "--leaf", "model")
    assert (code, shown["layout"], [a["leaf"] for a in shown["arrays"]][:2]) == (
        0, "toy", ["model/0.weight", "model/0.bias"],
    )  # fmt: skip
    assert ask(capsys, "verify", tmp_path)[0] == 0
    code, explained = ask(capsys, "explain", tmp_path, "--mesh", "dp=2")
    assert (code, len(explained["ranks"])) == (0, 2)
    assert any(name.endswith(".npy") for name in explained["ranks"][0]["files"])
    code, made = ask(capsys, "convert", tmp_path, tmp_path / "b", "--to", "toy", "--mesh", "dp=2")
    assert (code, made["layout"]) == (0, "toy")
    assert xla_ckpt.verify(tmp_path / "b", "a").ok
    assert main(["show", str(tmp_path)]) == 0
    assert "toy layout" in capsys.readouterr().out


def test_damage_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer, layout="toy")
    file = tmp_path / "a/model/0.weight.0.npy"
    sound = file.read_bytes()
    for at, said in ((-3, "stored bytes are damaged"), (20, "the header of a file is damaged")):
        data = bytearray(sound)
        data[at] ^= 1
        file.write_bytes(data)
        code, answer = ask(capsys, "verify", tmp_path)
        (problem,) = answer["problems"]
        assert (code, problem["file"]) == (1, "model/0.weight.0.npy")
        assert said in problem["message"]
    file.write_bytes(sound[:-1] + b"?")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=r"0\.weight\.0\.npy"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


# A conversion reads all that the one layout has, and then writes the other one.
@pytest.mark.parametrize(
    ("other", "mesh"),
    some_of([*product(["native", "xser", "pt"], ["dp=1", "dp=2,tp=2", "pp=2,tp=2"])], lambda case: case),
)
def test_from_and_to_other_layouts(other: str, mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tp = Mesh(tp=2)
    save_as_job(monkeypatch, tp, tmp_path, "a", lambda rank: as_kwargs(toy(tp, rank)), layout=other)
    cuts = CUTS if "pp" in mesh else []
    xla_ckpt.convert(tmp_path, tmp_path / "toy", to="toy", mesh=mesh, options=xla_ckpt.ConvertOptions(max_memory=200))
    assert list((tmp_path / "toy/a/model").glob("layers.0.out.weight.*.npy"))
    xla_ckpt.convert(tmp_path / "toy", tmp_path / "back", to=other, mesh=mesh, pipeline_cuts=cuts)
    for root in (tmp_path / "toy", tmp_path / "back"):
        assert xla_ckpt.verify(root, "a").ok
        tree = xla_ckpt.restore(root, "a").tree
        for name in WHOLE:
            assert torch.equal(tree["model"][name], whole(name))
            assert torch.equal(tree["optimizer"]["state"][name]["exp_avg_sq"], known(name, "exp_avg_sq"))


def test_the_model_for_other_programs(tmp_path: Path) -> None:
    model, optimizer = trained()
    xla_ckpt.save_checkpoint(tmp_path / "ckpt", "a", model, optimizer, layout="toy")
    xla_ckpt.export_hf(tmp_path / "ckpt", tmp_path / "hf")
    held = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    assert all(torch.equal(held[k], v) for k, v in model.state_dict().items())


def numpy_wrote(root: Path, tag: str, value: float = 0.0) -> dict[str, np.ndarray[Any, Any]]:
    """A tag that this library has not touched."""
    arrays = {"0.weight": np.arange(12, dtype=np.float32).reshape(3, 4) + value, "0.bias": np.ones(3, np.float32)}
    (root / tag / "model").mkdir(parents=True)
    for name, array in arrays.items():
        np.save(root / tag / "model" / f"{name}.0.npy", array)
    return arrays


def test_a_tag_that_numpy_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = numpy_wrote(tmp_path, "a")
    assert xla_ckpt.list_tags(tmp_path) == ["a"]
    tree = xla_ckpt.restore(tmp_path).tree
    assert {k: v.tolist() for k, v in tree["model"].items()} == {k: v.tolist() for k, v in arrays.items()}
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    assert xla_ckpt.load_checkpoint(tmp_path, "a", model).report.arrays == 2
    assert (model[0].weight.detach().numpy() == arrays["0.weight"]).all()
    code, listed = ask(capsys, "ls", tmp_path)
    assert (code, [(t["tag"], t["layout"], t["files"]) for t in listed["tags"]]) == (0, [("a", "numpy", 2)])
    code, shown = ask(capsys, "show", tmp_path)
    assert (code, shown["layout"], len(shown["arrays"])) == (0, "numpy", 2)
    assert main(["show", str(tmp_path)]) == 0
    assert "written by numpy" in capsys.readouterr().out
    code, checked = ask(capsys, "verify", tmp_path)
    assert (code, checked["ok"], checked["digests"], checked["files"], checked["strangers"]) == (0, True, False, 2, [])
    code, explained = ask(capsys, "explain", tmp_path, "--mesh", "dp=2")
    assert (code, explained["ok"]) == (0, True)
    for to in ("native", "toy", "pt"):
        xla_ckpt.convert(tmp_path, tmp_path / to, to=to)
        found = xla_ckpt.restore(tmp_path / to).tree["model"]["0.weight"]
        assert np.asarray(found).tolist() == arrays["0.weight"].tolist()
    xla_ckpt.export_hf(tmp_path, tmp_path / "hf")
    assert safetensors.torch.load_file(tmp_path / "hf/model.safetensors")["0.bias"].tolist() == [1, 1, 1]
    xla_ckpt.save_checkpoint(tmp_path, "b", model, layout="toy")
    assert xla_ckpt.list_tags(tmp_path) == ["a", "b"], "ours continue those of others"


def test_a_damaged_tag_that_numpy_wrote(tmp_path: Path) -> None:
    numpy_wrote(tmp_path, "a")
    file = tmp_path / "a/model/0.bias.0.npy"
    sound = file.read_bytes()
    for bad in (sound[:-1], b"not an array", b""):
        file.write_bytes(bad)
        report = xla_ckpt.verify(tmp_path, "a")
        assert [p.file for p in report.problems] == ["model/0.bias.0.npy"]
        with pytest.raises(xla_ckpt.CorruptCheckpointError):
            xla_ckpt.restore(tmp_path, "a")
    np.save(file, np.zeros(3, ">f4"))
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="stored in another way"):
        xla_ckpt.restore(tmp_path, "a")
    np.save(file, np.zeros(3, "f4"))
    np.save(tmp_path / "a/model/0.bias.1.npy", np.zeros(3, "f4"))
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="only whole arrays"):
        xla_ckpt.restore(tmp_path, "a")


def test_tags_of_several_libraries_are_listed_by_time(tmp_path: Path) -> None:
    """The newest is the newest, whichever layout is asked first."""
    import os

    for n, tag in enumerate(("old", "middle", "new")):
        if tag == "middle":
            (tmp_path / tag / "model").mkdir(parents=True)
            torch.save({"w": torch.zeros(2)}, tmp_path / tag / "model/dp_rank_00_tp_rank_00_pp_rank_00.pt")
            (tmp_path / tag / "done").write_text("1")
            os.utime(tmp_path / tag / "done", (1000 + n, 1000 + n))
        else:
            numpy_wrote(tmp_path, tag)
            os.utime(tmp_path / tag, (1000 + n, 1000 + n))
    assert xla_ckpt.list_tags(tmp_path) == ["old", "middle", "new"]
