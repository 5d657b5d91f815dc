"""`convert --to torch`: one file that torch alone reads, from tags of any layout, complete or absent."""

from __future__ import annotations

import argparse
import pathlib
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import xla_ckpt
from tests.api.test_convert import CONTENT, RULES, Odd, flipped, make, state
from tests.formats.gold import LOST, Gold, Target, cases, few_of
from tests.runs import names_in
from tests.same import differences
from xla_ckpt.cli.main import main
from xla_ckpt.conversion import stream
from xla_ckpt.core import dtypes
from xla_ckpt.storage.resolve import open_store

MEMBERS = ["model", "optimizer", "scheduler", "extras", "user_content"]


def loaded(file: Path, **options: Any) -> Any:
    return torch.load(file, **{"weights_only": True, **options})


def test_it_is_what_torch_save_would_leave(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path)
    report = xla_ckpt.convert(tmp_path, tmp_path / "out.pt", to="torch", options=xla_ckpt.ConvertOptions(max_memory=64))
    assert (report.path, report.tag, report.layout, report.files) == (str(tmp_path / "out.pt"), "a", "torch", 1)
    held = loaded(tmp_path / "out.pt")
    assert list(held) == MEMBERS
    assert not differences(model.state_dict(), held["model"])
    weights, states = get_state_dict(model, optimizer)
    assert not differences(states["state"], held["optimizer"]["state"], order=False)
    assert [g["params"] for g in held["optimizer"]["param_groups"]] == [g["params"] for g in states["param_groups"]]
    assert not differences(CONTENT, held["user_content"])
    assert (held["scheduler"], held["extras"]["loader"]["at"]) == ({"last": 1}, 5)
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is None
    assert names_in(tmp_path) == ["a", "out.pt"]


def test_torch_takes_it_back(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path)
    xla_ckpt.convert(tmp_path, tmp_path / "out.pt", to="torch")
    for mmap in (False, True):
        held = loaded(tmp_path / "out.pt", mmap=mmap)
        other, its = state(1)
        set_state_dict(other, its, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
        assert not differences(dict(model.state_dict()), dict(other.state_dict()))
        assert not differences(optimizer.state_dict()["state"], its.state_dict()["state"], order=False)


def test_tied_parameters_share_a_storage_and_are_two_tensors(tmp_path: Path) -> None:
    make(tmp_path)
    xla_ckpt.convert(tmp_path, tmp_path / "out.pt", to="torch", part="model")
    held = loaded(tmp_path / "out.pt")
    head, embed = held["head.weight"], held["embed.weight"]
    assert head is not embed
    assert head.untyped_storage().data_ptr() == embed.untyped_storage().data_ptr()
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert sum("/data/" in name for name in archive.namelist()) == len(held) - 1


def test_a_part_is_what_it_is(tmp_path: Path) -> None:
    model, _ = make(tmp_path)
    for part, wanted in (
        ("model", model.state_dict()), ("user_content", CONTENT), ("user_content/pair", (1, 2.5)),
        ("scheduler", {"last": 1}),
    ):  # fmt: skip
        file = tmp_path / f"{part.replace('/', '_')}.pt"
        xla_ckpt.convert(tmp_path, file, "a", to="torch", part=part)
        assert not differences(wanted, loaded(file))
    state(1)[0].load_state_dict(loaded(tmp_path / "model.pt"))


def test_an_optimizer_without_names_has_torchs_own_numbers(tmp_path: Path) -> None:
    model, optimizer = state(0)
    xla_ckpt.save_checkpoint(tmp_path, "a", optimizer=optimizer)
    for part, file in ((None, "all.pt"), ("optimizer", "optimizer.pt")):
        xla_ckpt.convert(tmp_path, tmp_path / file, to="torch", part=part)
    held = loaded(tmp_path / "optimizer.pt")
    assert not differences(loaded(tmp_path / "all.pt"), {"optimizer": held})
    assert not differences(optimizer.state_dict(), held, order=False)
    other, its = state(1)
    its.load_state_dict(held)
    assert not differences(optimizer.state_dict(), its.state_dict(), order=False)


NAMES = [name for name in dtypes._DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]


def test_every_element_type_of_torchs(tmp_path: Path) -> None:
    assert {"bfloat16", "uint64", "complex128", "float8_e8m0fnu"} < set(NAMES)
    raw = torch.arange(64, dtype=torch.uint8) % 2
    tree: dict[str, Any] = {
        name: raw.view(getattr(torch, name)) for name in NAMES if "int4" not in name and "int2" not in name
    }
    tree |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    xla_ckpt.save(tmp_path, "a", tree)
    xla_ckpt.convert(tmp_path, tmp_path / "out.pt", to="torch", options=xla_ckpt.ConvertOptions(max_memory=16))
    held = loaded(tmp_path / "out.pt")
    assert list(held) == list(tree)
    for name, value in tree.items():
        assert (held[name].dtype, held[name].shape) == (value.dtype, value.shape)
        assert held[name].reshape(-1).view(torch.uint8).tolist() == value.reshape(-1).view(torch.uint8).tolist()


def test_what_torch_has_no_type_for_is_refused(tmp_path: Path) -> None:
    import ml_dtypes
    import numpy as np

    xla_ckpt.save(tmp_path, "a", {"odd": np.ones(3, ml_dtypes.float8_e3m4), "x": np.ones(2)})
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="torch has no element type float8_e3m4") as caught:
        xla_ckpt.convert(tmp_path, tmp_path / "out.pt", to="torch")
    assert caught.value.leaf == "odd"
    xla_ckpt.convert(tmp_path, tmp_path / "out.pt", to="torch", part="x")
    assert torch.equal(loaded(tmp_path / "out.pt"), torch.ones(2, dtype=torch.float64))


def test_memory_is_bounded_and_does_not_change_a_byte(tmp_path: Path) -> None:
    tree = {f"w{i}": torch.randn(1 << 20, 4) for i in range(6)}
    xla_ckpt.save(tmp_path, "a", tree)
    peaks = {}
    for name, limit in (("wide.pt", 1 << 30), ("narrow.pt", 1 << 20)):
        tracemalloc.start()
        try:
            xla_ckpt.convert(
                tmp_path,
                tmp_path / name,
                "a",
                to="torch",
                options=xla_ckpt.ConvertOptions(max_memory=limit, num_workers=1),
            )
            peaks[name] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peaks["wide.pt"] > 6 << 24
    assert peaks["narrow.pt"] < 1 << 24, "more than one array was in memory"
    assert (tmp_path / "wide.pt").read_bytes() == (tmp_path / "narrow.pt").read_bytes()
    assert not differences(loaded(tmp_path / "wide.pt", mmap=True)["w3"][:9], tree["w3"][:9])


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,dp=2,tp=2"])
@pytest.mark.parametrize("layout", ["xser", "pt", "native", "dcp"])
def test_from_tags_of_other_layouts_and_meshes(layout: str, mesh: str, tmp_path: Path) -> None:
    make(tmp_path)
    xla_ckpt.convert(tmp_path, tmp_path / "one.pt", to="torch")
    cuts = ["layers.0"] if "pp=2" in mesh else []
    xla_ckpt.convert(tmp_path, tmp_path / "b", to=layout, mesh=mesh, shardings=RULES, pipeline_cuts=cuts)
    xla_ckpt.convert(tmp_path / "b", tmp_path / "two.pt", to="torch", options=xla_ckpt.ConvertOptions(max_memory=100))
    one, two = loaded(tmp_path / "one.pt"), loaded(tmp_path / "two.pt")
    assert not differences(one, two, order=False)


@pytest.mark.parametrize(
    ("case", "tag"), few_of([case for case in cases() if case[0] != LOST and "legacy" not in case[0]])
)
def test_what_neuronx_distributed_wrote(case: str, tag: str, tmp_path: Path) -> None:
    gold = Gold(case, tag)
    target = Target(gold)
    xla_ckpt.convert(
        gold.root,
        tmp_path / "out.pt",
        tag,
        to="torch",
        model=target.model,
        optimizer=target.optimizer,
        options=xla_ckpt.ConvertOptions(max_memory=10_000),
    )
    held = loaded(tmp_path / "out.pt")
    truth = gold.truth
    assert not differences({**truth["params"], **truth["buffers"]}, held["model"], order=False)
    for name, states in held["optimizer"]["state"].items():
        assert torch.equal(states["exp_avg"], truth["exp_avg"][name])
        assert torch.equal(states["exp_avg_sq"], truth["exp_avg_sq"][name])
    assert {n for g in held["optimizer"]["param_groups"] for n in g["params"]} == set(held["optimizer"]["state"])
    for name, master in held["optimizer"].get("master", {}).items():
        assert torch.equal(master, truth["master"][name])


def test_classes_that_torch_does_not_make_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = {"args": argparse.Namespace(lr=0.1), "at": pathlib.PurePosixPath("/a")}
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(2)}, user_content=content)
    xla_ckpt.convert(tmp_path, tmp_path / "model.pt", to="torch", part="model")
    assert not caplog.records
    xla_ckpt.convert(tmp_path, tmp_path / "out.pt", "a", to="torch")
    assert "argparse.Namespace, pathlib.PurePosixPath" in caplog.text
    assert "--part model" in caplog.text
    with pytest.raises(Exception, match="Weights only load failed"):
        loaded(tmp_path / "out.pt")
    assert loaded(tmp_path / "out.pt", weights_only=False)["user_content"] == content


@pytest.mark.filterwarnings("ignore:.*will be pickled")
def test_objects_go_along_with_trust_only(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(2)}, user_content=Odd(4))
    with pytest.raises(xla_ckpt.UntrustedObjectError, match="Odd"):
        xla_ckpt.convert(tmp_path, tmp_path / "out.pt", to="torch")
    assert names_in(tmp_path) == ["a"]
    xla_ckpt.convert(tmp_path, tmp_path / "out.pt", to="torch", trust_pickle=True)
    assert loaded(tmp_path / "out.pt", weights_only=False)["user_content"].at == 4


def test_damage_is_found_and_nothing_is_written(tmp_path: Path) -> None:
    make(tmp_path)
    flipped(tmp_path)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="stored bytes are damaged"):
        xla_ckpt.convert(tmp_path, tmp_path / "new/out.pt", to="torch")
    assert names_in(tmp_path) == ["a"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "there.pt").write_text("mine")
    for how, said in (
        ({"destination": tmp_path / "there.pt"}, "a file of this name already"),
        ({"destination": tmp_path / "a"}, "there is a directory.*Name a file in it: .*/a/state.pt"),
        ({"part": "nothing"}, "no such part.*one of model, optimizer, scheduler, extras, user_content"),
        ({"mesh": "tp=2"}, "for any mesh"),
        ({"to": "native", "as_tag": "b", "part": "model"}, "is for a single file"),
    ):
        with pytest.raises(xla_ckpt.UsageError, match=said):
            xla_ckpt.convert(tmp_path, **{"destination": tmp_path / "out.pt", "to": "torch", **how})  # type: ignore[arg-type]
    assert (tmp_path / "there.pt").read_text() == "mine"
    assert names_in(tmp_path) == ["a", "there.pt"]


def test_a_file_that_appears_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    write = stream._FileStream.write

    def appears(self: Any, directory: Any, read: Any) -> Any:
        (tmp_path / "out.pt").write_text("another's")
        return write(self, directory, read)

    monkeypatch.setattr(stream._FileStream, "write", appears)
    with pytest.raises(xla_ckpt.UsageError, match="a file of this name already"):
        xla_ckpt.convert(tmp_path, tmp_path / "out.pt", to="torch")
    assert (tmp_path / "out.pt").read_text() == "another's"
    assert names_in(tmp_path) == ["a", "out.pt"]


def test_into_memory(tmp_path: Path) -> None:
    make(tmp_path)
    where = f"memory://{tmp_path.name}"
    xla_ckpt.convert(tmp_path, tmp_path / "out.pt", to="torch")
    xla_ckpt.convert(tmp_path, f"{where}/out.pt", to="torch")
    assert open_store(where).list_names() == ["out.pt"]
    assert open_store(where).read_start("out.pt", 1 << 20) == (tmp_path / "out.pt").read_bytes()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = make(tmp_path)
    where = [str(tmp_path), str(tmp_path / "model.pt")]
    assert main(["convert", *where, "--to", "torch", "--part", "model"]) == 0
    assert "as torch" in capsys.readouterr().out
    assert not differences(model.state_dict(), loaded(tmp_path / "model.pt"))
    assert main(["convert", *where, "--to", "torch"]) == 2
    assert "Name another one, or remove it first" in capsys.readouterr().err
