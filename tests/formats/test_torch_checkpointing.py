"""Directories of Meta's torch_checkpointing, as the real package wrote them (tests/fixtures/torch_checkpointing)."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.fixtures.dcp import make
from tests.fixtures.torch_checkpointing import package
from tests.formats.tckpt_package import FIXTURES, needs_package, run_package
from tests.jobs import run_on_ranks
from tests.same import differences
from xla_ckpt.cli.main import main
from xla_ckpt.core import dtypes
from xla_ckpt.core.manifest.manifest import UnreadableArray
from xla_ckpt.core.sharding.dtensor import DTensorLayout
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError, UntrustedObjectError
from xla_ckpt.formats.digests import DIGESTS, dump_digests
from xla_ckpt.formats.torch_checkpointing import reading
from xla_ckpt.formats.torch_checkpointing.reading import merge_ranks
from xla_ckpt.formats.torch_checkpointing.verified_directory import StreamDigester
from xla_ckpt.formats.torch_save.pickle_stubs import AttributesStub
from xla_ckpt.formats.torch_save.zip_reader import TensorLocation


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("fsdp2_tp", "items"):
        shutil.copytree(FIXTURES / name, tmp_path / name)
    return tmp_path


def stepped() -> tuple[dict[str, Any], dict[str, Any]]:
    """The model, and the states of its optimizer, as one process has them."""
    trained = package.model()
    optimizer = package.stepped(trained)
    return trained.state_dict(), package.optimizer_state(trained, optimizer)["state"]


def test_they_are_listed_and_say_who_wrote_them(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "tmp_items").mkdir()
    shutil.copy(root / "items/model_0.pt", root / "tmp_items/model_0.pt")  # a save that has not ended
    (root / "files").mkdir()
    torch.save({}, root / "files/epoch_0.pt")  # no directory of theirs: torch.save was given a path
    assert sorted(xla_ckpt.list_tags(root)) == ["fsdp2_tp", "items"]
    assert main(["ls", str(root)]) == 0
    assert "torch_checkpointing" in capsys.readouterr().out
    assert main(["show", str(root / "items")]) == 0
    assert "0.weight" in capsys.readouterr().out


def test_a_directory_without_metadata_is_theirs_by_all_of_its_items(tmp_path: Path) -> None:
    """Programs call their own files like this, too."""

    def listed(**files: bool) -> bool:
        folder = tmp_path / "step_1"
        folder.mkdir()
        for name, into_stream in files.items():
            if into_stream:
                streamed(folder / f"{name}.pt", {})
            else:
                torch.save({}, folder / f"{name}.pt")
        tags = xla_ckpt.list_tags(tmp_path)
        shutil.rmtree(folder)
        return bool(tags)

    assert listed(model_0=True, model_1=True, step_0=True)
    assert listed(model_1=True, step_0=True)  # rank 0 has nothing of the model
    assert not listed(model_0=True, best_0=False)
    assert not listed(epoch_10=True, epoch_20=True)
    assert not listed(epoch_00=True)
    assert not listed(model=True)


def test_parts_of_dtensors_become_whole_arrays(root: Path) -> None:
    """Strided shards of FSDP2 over tensor parallelism, in rows that the ranks do not divide."""
    tree = xla_ckpt.restore(root, "fsdp2_tp").tree
    assert differences(tree["model"], package.model().state_dict(), order=False) == []
    assert tree["extras"] == {"step": 7}


def test_every_kind_of_item_is_read(root: Path) -> None:
    tree = xla_ckpt.restore(root / "items").tree
    model, states = stepped()
    assert differences(tree["model"], model, order=False) == []
    for name, state in states.items():
        assert differences(tree["optimizer"]["state"][name], state, order=False) == []
    extras = tree["extras"]
    assert (extras["config"], extras["tokenizer"], extras["step"]) == ({"lr": 0.5}, b"\x00\x01", 7)
    assert (
        differences(extras["averages"]["mean"], {name: value * 2 for name, value in model.items()}, order=False) == []
    )


def test_what_ranks_have_of_their_own_is_kept_for_each(root: Path) -> None:
    loader = xla_ckpt.restore(root / "items").tree["extras"]["loader"]
    assert loader["per_rank"] == 2
    for rank in range(2):
        assert loader["ranks"][str(rank)]["seen"] == rank
        assert loader["ranks"][str(rank)]["order"].tolist() == [rank, rank + 1, rank + 2]


def test_a_model_and_its_optimizer_are_loaded(root: Path) -> None:
    trained = package.model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.125)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    xla_ckpt.load_checkpoint(root, "items", model=trained, optimizer=optimizer)
    model, states = stepped()
    assert differences(trained.state_dict(), model, order=False) == []
    assert optimizer.param_groups[0]["lr"] == 0.5
    for name, parameter in trained.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], states[name]["exp_avg"])


def loads_over_two(rank: int, root: str) -> list[str]:
    trained = make.by_fsdp2(package.model())
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    xla_ckpt.load_checkpoint(root, "fsdp2_tp", model=trained)
    whole: dict[str, Any] = {name: value.full_tensor() for name, value in trained.state_dict().items()}
    return differences(whole, package.model().state_dict(), order=False)


def test_four_ranks_saved_and_two_load(root: Path) -> None:
    assert run_on_ranks(loads_over_two, 2, str(root)) == [[], []]


def test_they_are_verified_and_converted(root: Path, tmp_path: Path) -> None:
    report = xla_ckpt.verify(root, "items")
    assert report.problems == []
    assert not report.digests
    assert report.files == 14
    xla_ckpt.convert(root / "items", tmp_path / "native", to="native")
    assert xla_ckpt.verify(tmp_path / "native", "items").digests
    assert differences(xla_ckpt.restore(tmp_path / "native").tree["model"], stepped()[0], order=False) == []


def changed(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def test_a_changed_byte_is_found_by_a_load_and_by_verify(root: Path) -> None:
    weight = package.model().state_dict()["0.weight"][:1].numpy().tobytes()
    changed(root / "fsdp2_tp/model_0.pt", weight, weight[:-1] + bytes([weight[-1] ^ 1]))
    with pytest.raises(CorruptCheckpointError, match="CRC-32"):
        xla_ckpt.restore(root, "fsdp2_tp")
    (problem,) = xla_ckpt.verify(root, "fsdp2_tp").problems
    assert problem.file == "model_0.pt"


@pytest.mark.parametrize(("tag", "file"), [("fsdp2_tp", "model_2.pt"), ("items", "optimizer_1.pt")])
def test_a_lost_file_of_a_rank_is_told(root: Path, tag: str, file: str) -> None:
    (root / tag / file).unlink()
    with pytest.raises(CorruptCheckpointError):
        xla_ckpt.restore(root, tag)
    assert xla_ckpt.verify(root, tag).problems


def test_damaged_metadata_are_told(root: Path) -> None:
    changed(root / "items/metadata.pkl", b"placements", b"placemints")
    with pytest.raises(CorruptCheckpointError, match="metadata are damaged"):
        xla_ckpt.restore(root, "items")


def streamed(path: Path, value: Any) -> None:
    """As the package writes a file: into a stream."""
    with path.open("wb") as file:
        torch.save(value, file)


class Whatever:
    """A class of a program."""

    counts: Any = None


def test_an_object_of_a_program_is_read_on_trust_only(root: Path) -> None:
    for rank in range(4):
        streamed(root / f"fsdp2_tp/state_{rank}.pt", {"object": Whatever(), "n": 1})
    with pytest.raises(UntrustedObjectError, match="Whatever"):
        xla_ckpt.restore(root, "fsdp2_tp")
    trained = package.model()
    xla_ckpt.load_checkpoint(root, "fsdp2_tp", model=trained)  # which does not want it
    tree = xla_ckpt.restore(root, "fsdp2_tp", trust_pickle=True).tree
    assert isinstance(tree["extras"]["state"]["object"], Whatever)


def test_an_object_with_tensors_is_read_on_trust_where_there_are_digests(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    file, counter = tmp_path / "step_1/state_0.pt", Whatever()
    counter.counts = torch.arange(3)
    streamed(file, {"object": counter, "w": torch.ones(4)})
    digester = StreamDigester()
    digester.update(memoryview(file.read_bytes()))
    (tmp_path / "step_1" / DIGESTS).write_bytes(dump_digests([digester.record(file.name)]))
    tree = xla_ckpt.restore(tmp_path, "step_1", trust_pickle=True).tree
    assert tree["state"]["object"].counts.tolist() == [0, 1, 2]


def repickled(path: Path, old: bytes, new: bytes) -> None:
    """Change the pickle of a file of torch.save, with a CRC-32 that fits."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert old in members["archive/data.pkl"]
    members["archive/data.pkl"] = members["archive/data.pkl"].replace(old, new)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def test_a_placement_that_is_not_known_costs_its_array_alone(root: Path) -> None:
    for rank in range(4):
        repickled(root / f"fsdp2_tp/model_{rank}.pt", b"_StridedShard", b"_MaskPartial")
    with pytest.raises(IncompatibleCheckpointError, match="_MaskPartial has no values"):
        xla_ckpt.restore(root, "fsdp2_tp")
    trained = torch.nn.ModuleDict({"1": torch.nn.Linear(6, 3)})
    xla_ckpt.load_checkpoint(root, "fsdp2_tp", model=trained, strict=False)
    assert torch.equal(trained["1"].weight, package.model()[1].weight)


def test_what_differs_beside_dtensors_belongs_to_nobody() -> None:
    """An item with DTensors is one state of all ranks."""
    cutting = DTensorLayout(global_shape=(2,), local_shape=(1,))
    at = TensorLocation(file="model_0.pt", offset=0, dtype=dtypes.get_dtype("float32"), shape=(1,), part=cutting)
    of_rank = {rank: {"w": at, "seed": rank, "lr": 0.5} for rank in range(2)}
    merged = merge_ranks(of_rank, 2, lambda tensors: len(tensors), lambda a, b: a == b)
    assert (merged["w"], merged["lr"]) == (2, 0.5)
    assert isinstance(merged["seed"], UnreadableArray)
    assert "different values" in merged["seed"].problem


def test_numbers_of_a_mesh_are_checked() -> None:
    def attributes(called: str, **facts: Any) -> AttributesStub:
        stand_in = AttributesStub.for_name(called)()
        stand_in.__setstate__(facts)
        return stand_in

    def spec(*, sizes: Any = (2,), coordinate: Any = (1,), placement: AttributesStub) -> AttributesStub:
        mesh = attributes("DeviceMesh", _layout=attributes("_MeshLayout", shape=sizes), _coordinate_on_dim=coordinate)
        meta = reading.DTENSOR_STUBS["torch.distributed.tensor._dtensor_spec.TensorMeta"]((6, 4), (4, 1), None)
        return attributes("DTensorSpec", mesh=mesh, placements=(placement,), tensor_meta=meta)

    rows = attributes("placement_types.Shard", dim=0)
    cutting = reading._parse_dtensor_spec(spec(placement=rows))
    assert (cutting.local_shape, str(cutting.pieces[0].global_box), cutting.problem) == ((3, 4), "[3:6, 0:4]", "")
    assert reading._parse_dtensor_spec(spec(placement=rows, coordinate=None)).pieces == ()
    for damaged in (
        spec(placement=attributes("placement_types.Shard", dim=2)),
        spec(placement=attributes("placement_types.Shard", dim="0")),
        spec(placement=attributes("placement_types._StridedShard", dim=0, split_factor=1 << 60)),
        spec(placement=attributes("placement_types._StridedShard", dim=0, split_factor=1 << 13)),
        spec(placement=attributes("placement_types.Partial")),
        spec(placement=rows, coordinate=(2,)),
        spec(placement=rows, sizes=(2, 2)),
        spec(placement=rows, sizes="22"),
        None,
    ):
        assert reading._parse_dtensor_spec(damaged).problem


@needs_package
@pytest.mark.parametrize("kind", ["fsdp2_tp", "items"])
def test_the_package_writes_today_what_the_fixtures_have(tmp_path: Path, kind: str) -> None:
    run_package("save", kind, tmp_path / kind)
    assert {p.name for p in (tmp_path / kind).iterdir()} == {p.name for p in (FIXTURES / kind).iterdir()}
    new, old = (xla_ckpt.restore(folder).tree["model"] for folder in (tmp_path / kind, FIXTURES / kind))
    assert differences(new, old, order=False) == []
