"""Tags of other libraries that lie in a bucket are read as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.buckets.content import client, download, names_below, read, split, upload, write
from tests.buckets.s3_server import Fault, S3Server
from tests.buckets.test_saves_and_loads import model_and_optimizer
from tests.formats.gold import FOLDERS, FUSED, SMALL, Gold, Target
from xla_ckpt.storage import remote
from xla_ckpt.storage.remote_client import ObjectStoreClient
from xla_ckpt.storage.resolve import open_store

GOLDS = sorted(folder.name for folder in SMALL.iterdir() if folder.is_dir() and not folder.name.startswith(FUSED))


def gold_of(name: str) -> Gold:
    """One of the small ones, whose layout is in the name of its case."""
    (case,) = (case for case in FOLDERS if case.startswith(f"{name}__") and case.endswith("_small"))
    return Gold(case, "step_40")


@pytest.mark.parametrize("name", GOLDS)
def test_what_neuronx_distributed_wrote(name: str, root: str) -> None:
    upload(SMALL / name / "ckpt", root)
    gold = gold_of(name)
    assert xla_ckpt.list_tags(root) == ["step_40"]
    assert xla_ckpt.verify(root).ok
    target = Target(gold)
    xla_ckpt.load_checkpoint(f"{root}/step_40", None, target.model, target.optimizer)
    assert target.differences() == []
    blank = Target(gold)
    xla_ckpt.convert(root, f"{root}-native", model=blank.model, optimizer=blank.optimizer)
    target = Target(gold)
    xla_ckpt.load_checkpoint(f"{root}-native", None, target.model, target.optimizer)
    assert target.differences() == []


def test_a_tag_of_theirs_is_not_touched(root: str) -> None:
    upload(SMALL / "tp2_pp2_dp1/ckpt", root)
    before = {name: read(f"{root}/{name}") for name in names_below(root)}
    runs = xla_ckpt.Checkpoints(root)
    for call in (lambda: runs.pin("step_40"), lambda: runs.delete("step_40", force=True), lambda: runs.repair()):
        with pytest.raises(xla_ckpt.UsageError, match=r"neuronx-distributed|another library"):
            call()
    for tag in ("step_50", "step_60", "step_70"):
        xla_ckpt.save(root, tag, {"w": torch.ones(2)}, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(root) == ["step_40", "step_70"]
    assert {name: read(f"{root}/{name}") for name in before} == before


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_is_neither_hidden_by_a_tag_of_ours_nor_the_root_of_one(root: str, asynchronous: bool) -> None:
    upload(SMALL / "tp2_pp2_dp1/ckpt", root)
    before = names_below(root)
    model = torch.nn.Linear(2, 2)
    for path, tag, message in (
        (root, "step_40", "another library has the name of the new tag.*neuronx-distributed.*step_40 away"),
        (f"{root}/step_40", "step_50", f"a checkpoint that neuronx-distributed wrote.*Pass {root}, and the name"),
    ):
        with pytest.raises(xla_ckpt.UsageError, match=message):
            xla_ckpt.save_checkpoint(path, tag, model, async_save=asynchronous).result()
        assert names_below(root) == before
    xla_ckpt.save(f"{root}-native", "step_1", {"w": torch.ones(2)})
    with pytest.raises(xla_ckpt.UsageError, match="a checkpoint that neuronx-distributed wrote"):
        xla_ckpt.convert(f"{root}-native", f"{root}/step_40", as_tag="step_50")
    assert names_below(root) == before
    xla_ckpt.save_checkpoint(root, "step_50", model)
    assert xla_ckpt.list_tags(root) == ["step_40", "step_50"]


def test_a_tag_without_done_is_none(root: str) -> None:
    upload(SMALL / "tp2_pp2_dp1/ckpt", root)
    bucket, name = split(f"{root}/step_40/done")
    client().delete_object(Bucket=bucket, Key=name)
    assert xla_ckpt.list_tags(root) == []
    assert not xla_ckpt.has_checkpoint(root)
    with pytest.raises(xla_ckpt.NoCheckpointError):
        xla_ckpt.load_checkpoint(root)
    report = xla_ckpt.verify(root, "step_40")
    assert "done" in str(report.problems)


def test_more_tags_than_one_page_of_a_listing_has(root: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from moto.s3.models import s3_backends

    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")  # of which S3 has 1,000
    (files,) = (backends["aws"] for backends in s3_backends.values())
    bucket, name = split(root)
    for number in range(25):
        for file in ("checkpoint", "model/dp_rank_00_tp_rank_00_pp_rank_00.pt", "done"):
            files.put_object(bucket, f"{name}/step_{number}/{file}", b"1")
    tags = xla_ckpt.list_tags(root)
    assert tags == [f"step_{number}" for number in range(25)]
    assert len([r for r in s3.requests if "list-type=2" in r.path and "continuation-token" in r.path]) >= 2


@pytest.fixture
def short_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are no smaller than what comes with their sizes, so that their bytes are read later."""
    monkeypatch.setattr(remote, "FIRST_READ_BYTES", 10)


@pytest.mark.usefixtures("short_starts")
def test_a_file_that_is_overwritten_while_it_is_read(root: str) -> None:
    upload(SMALL / "tp2_pp2_dp1/ckpt", root)
    path = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
    directory = open_store(root).open("step_40")
    source = directory.open(path)
    buffer = memoryview(bytearray(100))
    assert source.read_into(buffer, 0) == 100
    write(f"{root}/step_40/{path}", read(f"{root}/step_40/{path}")[::-1])
    with pytest.raises(OSError, match="412"):
        source.read_into(buffer, 100)
    with pytest.raises(OSError, match="replaced while"):
        directory.open(path)
    assert open_store(root).open("step_40").open(path).read_into(buffer, 0) == 100  # who begins now reads the new one


@pytest.mark.usefixtures("short_starts")
@pytest.mark.parametrize("folder", ["model", "optim"])
def test_a_load_that_meets_an_overwritten_file_changes_nothing(
    folder: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(SMALL / "tp2_pp2_dp1/ckpt", root)
    gold, asked = gold_of("tp2_pp2_dp1"), ObjectStoreClient.read
    met: list[str] = []

    def overwritten(self: ObjectStoreClient, key: str, offset: int, nbytes: int, version: str | None) -> Any:
        answer = asked(self, key, offset, nbytes, version)
        if not met and f"/{folder}/" in key:  # the file is looked through, and its tensors are not read yet
            met.append(key)
            address = f"s3://{split(root)[0]}/{key}"
            write(address, bytes(byte ^ 1 for byte in read(address)))
        return answer

    monkeypatch.setattr(ObjectStoreClient, "read", overwritten)
    target = Target(gold)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    with pytest.raises(xla_ckpt.CheckpointError, match=r"replaced while|412"):
        xla_ckpt.load_checkpoint(root, "step_40", target.model, target.optimizer)
    assert met
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())


def test_hugging_face_folders(root: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = {"a.weight": torch.rand(40, 30), "b.bias": torch.rand(7)}
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf/model.safetensors", {"format": "pt"})
    upload(tmp_path / "hf", f"{root}/hf")
    tree = xla_ckpt.restore(f"{root}/hf").tree
    assert all(torch.equal(tree["model"][name], value) for name, value in state.items())
    assert xla_ckpt.verify(f"{root}/hf").ok
    xla_ckpt.convert(f"{root}/hf", f"{root}-native", as_tag="a")
    xla_ckpt.convert(f"{root}-native", f"{root}-hf", to="safetensors")
    download(f"{root}-hf", tmp_path / "back")
    assert xla_ckpt.diff(tmp_path / "hf", tmp_path / "back").same


@pytest.mark.parametrize("layout", ["xser", "pt"])
def test_what_was_converted_and_copied_is_a_tag_of_neuronx_distributeds(layout: str, root: str, tmp_path: Path) -> None:
    """The way that the documents name to give neuronx-distributed a tag in a bucket."""
    model, optimizer = model_and_optimizer()
    xla_ckpt.save_checkpoint(root, "a", model, optimizer)
    xla_ckpt.convert(root, tmp_path, to=layout)
    upload(tmp_path, f"{root}-nxd")
    assert {"a/checkpoint", "a/done", "a/model/dp_rank_00_tp_rank_00_pp_rank_00.pt"} <= {*names_below(f"{root}-nxd")}
    assert xla_ckpt.list_tags(f"{root}-nxd") == ["a"]
    other, its_optimizer = model_and_optimizer()
    torch.nn.init.zeros_(other[0].weight)
    xla_ckpt.load_checkpoint(f"{root}-nxd", "a", other, its_optimizer)
    assert torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize("layout", ["xser", "nxd"])
def test_a_conversion_puts_a_tag_where_neuronx_distributed_looks(layout: str, root: str, s3: S3Server) -> None:
    model, optimizer = model_and_optimizer()
    xla_ckpt.save_checkpoint(root, "a", model, optimizer)
    xla_ckpt.finalize_checkpoint()
    s3.requests.clear()
    xla_ckpt.convert(root, f"{root}-nxd", to=layout, mesh="dp=2")
    sent = [r.path.partition("-nxd/")[2].partition("?")[0] for r in s3.requests if r.method == "PUT"]
    assert sent[:2] == [".new-a", "a/checkpoint"]
    assert sent[-1] == "a/done"
    assert "a/model/dp_rank_00_tp_rank_00_pp_rank_00.pt" in names_below(f"{root}-nxd")
    assert not [name for name in names_below(f"{root}-nxd") if name.startswith(".")]
    before = {name: read(f"{root}-nxd/{name}") for name in names_below(f"{root}-nxd")}
    with pytest.raises(xla_ckpt.UsageError, match="there is a tag of this name already"):
        xla_ckpt.convert(root, f"{root}-nxd", to=layout)
    with pytest.raises(xla_ckpt.UsageError, match="neuronx-distributed wrote this tag"):
        xla_ckpt.Checkpoints(f"{root}-nxd").delete("a", force=True)
    with pytest.raises(xla_ckpt.UsageError, match="has no parity"):
        xla_ckpt.convert(root, f"{root}-nxd", to=layout, as_tag="b", parity="block")
    assert {name: read(f"{root}-nxd/{name}") for name in names_below(f"{root}-nxd")} == before
    xla_ckpt.convert(root, f"{root}-nxd", to=layout, as_tag="b")
    assert xla_ckpt.list_tags(f"{root}-nxd") == ["a", "b"]
    assert xla_ckpt.Checkpoints(f"{root}-nxd").show("a").sequence == 0, "it is no commit"
    other, its_optimizer = model_and_optimizer()
    torch.nn.init.zeros_(other[0].weight)
    xla_ckpt.load_checkpoint(f"{root}-nxd", "a", other, its_optimizer)
    assert torch.equal(other[0].weight, model[0].weight)


def test_what_neuronx_distributed_has_saved_over_a_converted_tag_is_told(root: str) -> None:
    """It leaves our manifest there, which is not that of its files."""
    model, optimizer = model_and_optimizer()
    xla_ckpt.save_checkpoint(root, "a", model, optimizer)
    xla_ckpt.convert(root, f"{root}-nxd", to="nxd")
    (file,) = (name for name in names_below(f"{root}-nxd") if name.startswith("a/model/"))
    write(f"{root}-nxd/{file}", bytes(byte ^ 1 for byte in read(f"{root}-nxd/{file}")))
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=r"neuronx-distributed.*[Rr]emove manifest\.json"):
        xla_ckpt.load_checkpoint(f"{root}-nxd", "a", model, optimizer)
    assert not xla_ckpt.verify(f"{root}-nxd").ok


def test_a_conversion_that_was_killed_is_no_tag(root: str, s3: S3Server) -> None:
    xla_ckpt.save(root, "a", {"model": {"w": torch.ones(3)}})
    xla_ckpt.finalize_checkpoint()
    s3.faults.append(Fault("PUT", "/a/model", "refuse403", count=10))
    with pytest.raises(xla_ckpt.StorageError):
        xla_ckpt.convert(root, f"{root}-nxd", to="nxd")
    assert names_below(f"{root}-nxd") == []
    write(f"{root}-nxd/a/checkpoint", b"1")  # as a kill leaves it
    assert xla_ckpt.list_tags(f"{root}-nxd") == []
    with pytest.raises(xla_ckpt.UsageError, match="something has this name"):
        xla_ckpt.convert(root, f"{root}-nxd", to="nxd")
    assert names_below(f"{root}-nxd") == ["a/checkpoint"]
