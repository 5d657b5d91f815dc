"""Every public function that takes a path takes the address of a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.buckets.content import names_below, read, write
from tests.buckets.test_saves_and_loads import model_and_optimizer
from tests.jobs import run_on_ranks

LAYOUTS = ("native", "xser", "pt", "smp", "dcp", "torchtitan")


def saved(root: str, *tags: str, **options: object) -> torch.nn.Module:
    """A model that is saved with its optimizer."""
    model, optimizer = model_and_optimizer()
    for number, tag in enumerate(tags):
        if number:
            model[0].weight.data.add_(1)
        xla_ckpt.save_checkpoint(root, tag, model, optimizer, user_content={"at": number}, **options)  # type: ignore[arg-type]
    return model


def damage(address: str) -> None:
    """Change one byte of a file."""
    data = bytearray(read(address))
    data[-5] ^= 1
    write(address, bytes(data))


def test_a_root_as_an_object(root: str) -> None:
    model = saved(root, "a", "b", "c")
    runs = xla_ckpt.Checkpoints(root)
    assert (runs.tags(), runs.latest()) == (["a", "b", "c"], "c")
    assert [(tag.tag, tag.arrays, tag.problem) for tag in runs.summaries()] == [(tag, 16, None) for tag in "abc"]
    assert {array.leaf for array in runs.show("b", leaf="model/0.*").arrays} == {"model/0.weight", "model/0.bias"}
    assert torch.equal(runs.read("model/0.weight"), model[0].weight.detach())
    assert (runs.pin("a"), runs.pin("a"), runs.unpin("a")) == (True, False, True)
    assert runs.verify("a").ok
    assert set(runs.diff("a", "b").moved) == {"model/0.weight"}
    runs.delete("b")
    assert runs.tags() == ["a", "c"]
    assert xla_ckpt.explain(root, mesh="dp=2").readings


def test_a_tag_and_its_address(root: str) -> None:
    model = saved(root, "a", "b")
    assert [xla_ckpt.has_checkpoint(path) for path in (root, f"{root}/a", f"{root}x")] == [True, True, False]
    assert xla_ckpt.latest_tag(f"{root}/") == "b"
    other = model_and_optimizer()[0]
    assert xla_ckpt.load_checkpoint(f"{root}/b", model=other).user_content == {"at": 1}
    assert torch.equal(other[0].weight, model[0].weight)


def test_retention_and_pins(root: str) -> None:
    for number in range(4):
        xla_ckpt.save(root, f"t{number}", {"w": torch.full((2,), number)}, num_kept_ckpts=2, pinned=number == 0)
    assert xla_ckpt.list_tags(root) == ["t0", "t2", "t3"]


@pytest.mark.parametrize("parity", ["block", "file"])
def test_parity_gives_back_what_was_damaged(root: str, parity: str) -> None:
    saved(root, "a", options=xla_ckpt.SaveOptions(parity=parity))  # type: ignore[arg-type]
    (file,) = (name for name in names_below(root) if name.endswith("model/00001-of-00001.safetensors"))
    good = read(f"{root}/{file}")
    damage(f"{root}/{file}")
    assert not xla_ckpt.verify(root).ok
    with pytest.raises(xla_ckpt.CorruptCheckpointError):
        xla_ckpt.restore(root, "a")
    assert xla_ckpt.repair(root) == ("model/00001-of-00001.safetensors",)
    assert xla_ckpt.verify(root).ok
    (file,) = (name for name in names_below(root) if name.endswith(".safetensors") and read(f"{root}/{name}") == good)
    assert xla_ckpt.repair(root) == ()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_conversions_between_stores(root: str, layout: str, tmp_path: Path) -> None:
    local = str(tmp_path / "local")
    saved(local, "a")
    xla_ckpt.convert(local, root, to=layout)
    assert xla_ckpt.list_tags(root) == ["a"]
    assert xla_ckpt.verify(root).ok
    with pytest.raises(xla_ckpt.UsageError, match="there is a tag of this name already"):
        xla_ckpt.convert(local, root, to=layout)
    for number, target in enumerate((f"{root}-again", str(tmp_path / "back"), f"memory://{tmp_path.name}-{layout}")):
        xla_ckpt.convert(root, target, as_tag=f"t{number}")
        assert xla_ckpt.diff(local, target).same
        assert xla_ckpt.verify(target).ok


def test_conversions_with_parity(root: str, tmp_path: Path) -> None:
    saved(str(tmp_path), "a")
    xla_ckpt.convert(tmp_path, root, parity="block")
    (file,) = (name for name in names_below(root) if name.endswith("model/00001-of-00001.safetensors"))
    damage(f"{root}/{file}")
    assert xla_ckpt.repair(root) == ("model/00001-of-00001.safetensors",)
    assert xla_ckpt.diff(tmp_path, root).same


def test_exports(root: str, tmp_path: Path) -> None:
    model = saved(root, "a")
    xla_ckpt.export_hf(root, f"{root}-hf", max_shard_bytes=1 << 10)
    xla_ckpt.export_hf(root, tmp_path / "hf", max_shard_bytes=1 << 10)
    exported = sorted(file.name for file in (tmp_path / "hf").iterdir())
    assert names_below(f"{root}-hf") == exported
    assert all((tmp_path / "hf" / name).read_bytes() == read(f"{root}-hf/{name}") for name in exported)
    with pytest.raises(xla_ckpt.UsageError, match="must not exist, or be empty"):
        xla_ckpt.export_hf(root, f"{root}-hf")
    for source in (f"{root}-hf", str(tmp_path / "hf")):
        other = model_and_optimizer()[0]
        xla_ckpt.load_checkpoint(source, model=other)
        assert torch.equal(other[0].weight, model[0].weight)
        assert xla_ckpt.verify(source).ok
    xla_ckpt.convert(f"{root}-hf", f"{root}-back", as_tag="a")
    assert xla_ckpt.diff(root, f"{root}-back", leaf="model").same


def test_single_files(root: str, tmp_path: Path) -> None:
    saved(root, "a")
    xla_ckpt.convert(root, f"{root}-files/all.pt", to="torch")
    xla_ckpt.convert(root, f"{root}-files/model.pt", to="torch", part="model")
    assert names_below(f"{root}-files") == ["all.pt", "model.pt"]
    with pytest.raises(xla_ckpt.UsageError, match="there is a file of this name already"):
        xla_ckpt.convert(root, f"{root}-files/all.pt", to="torch")
    assert xla_ckpt.has_checkpoint(f"{root}-files/all.pt")
    assert xla_ckpt.verify(f"{root}-files/all.pt").ok
    assert xla_ckpt.diff(root, f"{root}-files/all.pt").same
    (tmp_path / "model.pt").write_bytes(read(f"{root}-files/model.pt"))
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(state["0.weight"], xla_ckpt.Checkpoints(root).read("model/0.weight"))


def saves_its_part(rank: int, root: str) -> None:
    mesh, rules = xla_ckpt.Mesh(tp=2), [("w", ("tp", None))]
    for tag in ("a", "b"):
        tree = {"w": torch.full((300_000, 4), float(rank)), "step": 3}
        handle = xla_ckpt.save(root, tag, tree, mesh=mesh, shardings=rules, async_save=tag == "b")
        handle.result()


def loads_all_of_it(rank: int, root: str, world: int) -> tuple[float, float]:
    like = {"w": torch.zeros(600_000 // world, 4)}
    tree = xla_ckpt.restore(root, None, like, mesh=xla_ckpt.Mesh(tp=world), shardings=[("w", ("tp", None))]).tree
    return float(tree["w"][0, 0]), float(tree["w"][-1, -1])


def test_ranks_save_and_another_number_of_them_loads(root: str) -> None:
    run_on_ranks(saves_its_part, 2, root)
    assert xla_ckpt.list_tags(root) == ["a", "b"]
    assert run_on_ranks(loads_all_of_it, 3, root, 3) == [(0, 0), (0, 1), (1, 1)]
    assert run_on_ranks(loads_all_of_it, 1, root, 1) == [(0, 1)]
