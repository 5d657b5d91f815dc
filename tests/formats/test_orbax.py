"""Checkpoints that real orbax wrote, read without jax and on any topology."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch

import xla_ckpt
from tests.formats import orbax_saves
from tests.formats.writing import as_job
from tests.runs import ROOT
from xla_ckpt import Mesh
from xla_ckpt.cli.main import main
from xla_ckpt.core.plan.restore_plan import ReadRequest, plan_restore
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.formats.tags import open_tag
from xla_ckpt.storage.resolve import open_store


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all checkpoints of `orbax_saves`."""
    folder = tmp_path_factory.mktemp("orbax")
    orbax_saves.save_all(folder)
    return folder


def assert_equal(actual: Any, expected: Any) -> None:
    """The same containers, types of elements, and bits."""
    actual, expected = (jax.tree_util.tree_flatten_with_path(tree) for tree in (actual, expected))
    assert actual[1] == expected[1]
    for (path, one), (_, other) in zip(actual[0], expected[0], strict=True):
        assert np.asarray(one).dtype == np.asarray(other).dtype, path
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), path


@pytest.mark.parametrize("name", orbax_saves.ITEMS)
def test_every_form(saved: Path, name: str) -> None:
    state = xla_ckpt.restore(saved / name).tree
    if name == "composite/3":
        assert state["about"] == {"seen": [1, 2]}
        state = state["state"]
    if name == "v1-named":
        assert state["right"] == {"step": 3}
        state = state["left"]
    assert (type(state["step"]), type(state["rate"])) == (int, float)
    assert_equal(state, orbax_saves.tree())


@pytest.mark.parametrize("name", [name for name, item in orbax_saves.ITEMS.items() if item])
def test_the_item_itself(saved: Path, name: str) -> None:
    assert_equal(xla_ckpt.restore(saved / name / orbax_saves.ITEMS[name]).tree, orbax_saves.tree())


class Moments(NamedTuple):
    mu: Any
    nu: Any


class Nothing(NamedTuple):
    pass


def test_a_pattern_has_classes_that_orbax_does_not_know(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    def state(number: float) -> Any:
        moments = Moments({"w": jax.numpy.full(3, number)}, {"w": jax.numpy.zeros(3)})
        return {"opt": (Nothing(), moments), "layers": {0: {"w": jax.numpy.full(2, number)}, 10: {}}}

    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave(state(3)))
    assert_equal(xla_ckpt.restore(tmp_path / "run", like=state(0)).tree, state(3))


def test_neither_jax_nor_orbax_is_loaded(saved: Path) -> None:
    code = (
        "import sys, xla_ckpt; state = xla_ckpt.restore(sys.argv[1]).tree; assert state['params'];"
        "assert not {'jax', 'orbax', 'torch_xla'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(saved / "standard")], cwd=ROOT, check=True)


def test_steps_are_listed_by_number(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved / "manager", root)
    shutil.copytree(root / "12", root / "13.orbax-checkpoint-tmp-7")
    os.utime(root / "2" / "_CHECKPOINT_METADATA")
    assert xla_ckpt.list_tags(root) == ["1", "2", "12"]
    assert xla_ckpt.restore(root).tree["step"] == 12
    assert xla_ckpt.restore(root, tag="2").tree == {"step": 2}


def test_a_step_that_has_lost_its_arrays_is_named(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A copy was cut off: orbax takes such a step for its newest, and this library did not mention it."""
    import orbax.checkpoint as ocp

    root = tmp_path / "run"
    shutil.copytree(saved / "manager", root)
    shutil.rmtree(root / "12" / "default")
    with ocp.CheckpointManager(root) as manager:
        assert manager.latest_step() == 12
    assert xla_ckpt.list_tags(root) == ["1", "2"]
    assert xla_ckpt.restore(root).tree == {"step": 2}
    assert "orbax's 12 is not complete, and passed over: tag 2 is taken" in caplog.text
    assert main(["ls", str(root)]) == 0
    assert "12\torbax\tnot complete" in capsys.readouterr().out
    assert main(["verify", str(root), "--all"]) == 0
    assert "not verified, since they are no tags, or not complete: 12." in caplog.text
    for read in (lambda: xla_ckpt.restore(root, "12"), lambda: xla_ckpt.restore(root / "12")):
        with pytest.raises(xla_ckpt.CorruptCheckpointError, match=r"default/_METADATA.*expected the item default"):
            read()
    assert "default/_METADATA" in str(xla_ckpt.verify(root, "12").problems[0])
    with pytest.raises(xla_ckpt.UsageError, match="another library has the name of the new tag"):
        xla_ckpt.save(root, "12", {"step": 12})  # other items of it may be left
    for step in "12":
        shutil.rmtree(root / step)
    with pytest.raises(xla_ckpt.NoCheckpointError, match="Files are missing in 12"):
        xla_ckpt.restore(root)


def test_a_step_that_has_lost_one_of_its_items_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A load would give a part of the state back, and say nothing."""
    import orbax.checkpoint as ocp

    root = tmp_path / "run"
    with ocp.CheckpointManager(root) as manager:
        for step in (1, 2):
            items = {name: ocp.args.StandardSave({"w": np.arange(4.0) + step}) for name in ("params", "moments")}
            manager.save(step, args=ocp.args.Composite(**items, note=ocp.args.JsonSave({"step": step})))
    shutil.rmtree(root / "2" / "moments")
    assert xla_ckpt.list_tags(root) == ["1"]
    assert main(["ls", str(root)]) == 0
    listed = capsys.readouterr().out
    assert "2\torbax\tnot complete" in listed
    assert f"{root}/2" not in listed  # what is left of it is no root of tags
    with pytest.raises(
        xla_ckpt.CorruptCheckpointError, match=r"not all items.*moments/_METADATA.*items moments, params"
    ):
        xla_ckpt.restore(root, "2")
    assert main(["clean", str(root)]) == 0
    assert "nothing to remove" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["standard", "pytree-files"])
def test_a_list_and_a_verification_count_the_same_files(saved: Path, name: str) -> None:
    (summary,) = xla_ckpt.Checkpoints(saved / name).summaries()
    assert xla_ckpt.verify(saved / name).files == summary.files == sum(p.is_file() for p in (saved / name).rglob("*"))


def test_a_step_without_arrays_lacks_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(about=ocp.args.JsonSave({"seen": 1})))
    assert main(["ls", str(tmp_path)]) == 0
    assert "not complete" not in capsys.readouterr().out


def test_a_save_of_ours_goes_on_beside_them(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "manager", tmp_path / "run")
    xla_ckpt.save(tmp_path / "run", "step_20", {"step": 20})
    assert xla_ckpt.list_tags(tmp_path / "run") == ["1", "2", "12", "step_20"]


def test_texts_and_random_keys(saved: Path) -> None:
    state = xla_ckpt.restore(saved / "texts").tree
    assert state["name"] == "run"
    assert jax.random.bits(state["key"]) == jax.random.bits(jax.random.key(3))
    assert (jax.random.key_data(state["keys"]) == jax.random.key_data(jax.random.split(jax.random.key(4), 2))).all()


def test_two_leaves_of_one_name_are_refused(saved: Path) -> None:
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=r"orbax has given two leaves one name, 'a\.b'"):
        xla_ckpt.restore(saved / "clash")


def test_a_model_of_torch(saved: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    xla_ckpt.load_checkpoint(saved / "torch", model=model)
    assert model[0].weight.tolist() == np.arange(12.0).reshape(3, 4).tolist()
    assert model[0].bias.tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["pytree", "pytree-files", "v1"])
def test_parts_over_the_borders_of_chunks(saved: Path, name: str) -> None:
    whole = orbax_saves.arrays()["whole"]
    store = open_store(saved)
    with open_tag(store, name) as reader:
        leaf = next(leaf for leaf in reader.manifest.arrays if "a.b" in leaf)
        chunk = len(whole) // 4 * whole.shape[1] // 2 * 4
        inside = plan_restore(reader.manifest, [ReadRequest(leaf, Box((3, 2), (5, 9)), 0)])
        across = plan_restore(reader.manifest, [ReadRequest(leaf, Box((15, 14), (17, 16)), 0)])
    assert (inside.read_bytes <= chunk, across.read_bytes <= 4 * chunk) == (True, True)


@pytest.mark.parametrize("name", ["standard", "v1", "pytree-files"])
@pytest.mark.parametrize("spec", [("tp", None), (None, "tp")], ids=["rows", "columns"])
def test_another_topology(saved: Path, name: str, spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = orbax_saves.arrays()["whole"]
    like = {"params": {"a.b/c": xla_ckpt.ArraySpec(whole.shape, torch.float32, sharding=spec)}}
    mesh = Mesh(tp=3) if spec[0] is None else Mesh(tp=4)
    parts = as_job(monkeypatch, mesh, "load", lambda rank: xla_ckpt.restore(saved / name, like=like).tree)
    joined = np.concatenate([part["params"]["a.b/c"].numpy() for part in parts], axis=spec.index("tp"))
    assert joined.tobytes() == whole.tobytes()


def test_what_is_made_of_one_has_digests(saved: Path, tmp_path: Path) -> None:
    assert main(["convert", str(saved / "standard"), str(tmp_path / "run"), "--to", "native", "--as", "first"]) == 0
    assert xla_ckpt.verify(tmp_path / "run").ok
    assert_equal(xla_ckpt.restore(tmp_path / "run").tree, orbax_saves.tree())
    assert main(["diff", str(saved / "standard"), str(tmp_path / "run")]) == 0


def test_commands(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(saved / "manager")
    assert main(["ls", root]) == main(["show", root]) == main(["verify", root]) == 0
    assert main(["explain", root, "--mesh", "tp=2"]) == 0
    output = capsys.readouterr().out
    assert "orbax" in output
    assert "float8_e4m3fn" in output


def damaged(saved: Path, folder: Path, name: str) -> Path:
    """A copy, to be damaged."""
    shutil.copytree(saved / name, folder / "copy")
    return folder / "copy"


def test_what_is_cut_off_is_an_error(saved: Path, tmp_path: Path) -> None:
    copy = damaged(saved, tmp_path, "pytree-files")
    chunk = max((p for p in copy.rglob("0.0") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(chunk, chunk.stat().st_size // 2)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="an array of orbax's cannot be read"):
        xla_ckpt.restore(copy)
    assert not xla_ckpt.verify(copy).ok
    chunk.unlink()
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="missing"):
        xla_ckpt.restore(copy)


def test_a_database_that_is_cut_off_is_an_error(saved: Path, tmp_path: Path) -> None:
    copy = damaged(saved, tmp_path, "pytree")
    for path in (copy / "d").iterdir():
        os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="an array of orbax's cannot be read") as error:
        xla_ckpt.restore(copy)
    assert "/proc/" not in str(error.value)  # by which tensorstore knows the directory
    assert error.value.file is not None
    assert (copy / error.value.file).is_file()
    (copy / "manifest.ocdbt").unlink()
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="a file is missing") as error:
        xla_ckpt.restore(copy)
    assert error.value.file == "manifest.ocdbt"


def one_leaf(key: Any, key_type: int, value_type: Any) -> str:
    """The metadata of a tree of one leaf."""
    keys, value = [{"key": key, "key_type": key_type}], {"value_type": value_type}
    return json.dumps({"tree_metadata": {"leaf": {"key_metadata": keys, "value_metadata": value}}})


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"tree_metadata": 3}', '{"tree_metadata": {"a": {}}}', "[" * 100_000, one_leaf(1, 2, "None"),
        one_leaf("9999999999", 1, "None"), one_leaf("x", 2, "os.system"), one_leaf("no such", 2, "jax.Array"),
        one_leaf("../elsewhere", 2, "jax.Array"), one_leaf("", 2, "scalar"), one_leaf("x", 2, ["None"]),
    ],
    ids=range(13),
)  # fmt: skip
@pytest.mark.parametrize("name", ["pytree", "pytree-files"])
def test_hostile_metadata(saved: Path, tmp_path: Path, name: str, text: str) -> None:
    copy = damaged(saved, tmp_path, name)
    shutil.copytree(saved / "pytree-files" / "step", tmp_path / "elsewhere")
    (copy / "_METADATA").write_text(text)
    with pytest.raises(xla_ckpt.CorruptCheckpointError):
        xla_ckpt.restore(copy)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [1 << 62, 1 << 62]}, {"shape": [1 << 40, 30], "chunks": [1, 1]}, {"chunks": [0, 0]}, {"dtype": "<U4"},
        {"dtype": "no type"}, {"zarr_format": 9}, {"compressor": {"id": "no such"}},
    ],
)  # fmt: skip
def test_hostile_arrays(saved: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    copy = damaged(saved, tmp_path, "pytree-files")
    header = next(path for path in copy.rglob(".zarray") if json.loads(path.read_text())["shape"] == [64, 30])
    header.write_text(json.dumps(json.loads(header.read_text()) | change))
    with pytest.raises(xla_ckpt.CheckpointError):
        xla_ckpt.restore(copy)


def test_a_bucket_is_refused(saved: Path) -> None:
    store = open_store("memory://orbax")
    files = store.object_store
    assert files is not None
    directory = files.get_directory("12")
    for name in ("_METADATA",):
        data = memoryview((saved / "manager/12/default" / name).read_bytes())
        sink = directory.create(name, len(data))
        sink.write(data, len(data), 0)
        sink.commit()
    with pytest.raises(xla_ckpt.UsageError, match="Copy it to a disk"):
        xla_ckpt.restore("memory://orbax", tag="12")


def test_a_pipe_and_a_link_are_no_chunks(saved: Path, tmp_path: Path) -> None:
    copy = damaged(saved, tmp_path, "host-files")
    chunk = next(path for path in copy.rglob("0.0") if path.is_file())
    data = chunk.read_bytes()
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="not a regular file"):
        xla_ckpt.restore(copy)
    chunk.unlink()
    (tmp_path / "elsewhere").write_bytes(data)
    chunk.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="not a regular file"):
        xla_ckpt.restore(copy)


@pytest.mark.parametrize("name", ["pytree", "pytree-files"])
def test_an_older_one_has_no_tree(saved: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    copy = damaged(saved, tmp_path, name)
    (copy / "_METADATA").unlink()
    if name == "pytree-files":
        assert xla_ckpt.list_tags(tmp_path) == []  # nothing says that orbax wrote it
        return
    state = xla_ckpt.restore(copy).tree
    assert "has no _METADATA" in caplog.text
    assert_equal(state["params.a.b/c"], orbax_saves.arrays()["whole"])
    assert state["step"].tolist() == 12
    (problem,) = xla_ckpt.verify(copy).problems
    assert (problem.file, problem.tag) == ("_METADATA", copy.name)
    assert "orbax restores this checkpoint no more" in problem.problem


def written(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer, Path]:
    """A training state, and what `convert` makes of it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2).to(torch.bfloat16))
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.125)
    model[0](torch.ones(2, 3)).sum().backward()
    optimizer.step()
    content = {"step": 7, "name": "run", "flag": True, "none": None, "empty": [{}, []], "pair": (1, -0.5)}
    xla_ckpt.save_checkpoint(folder / "run", "step_7", model, optimizer, user_content=content)
    xla_ckpt.convert(folder / "run", folder / "orbax", to="orbax")
    return model, optimizer, folder / "orbax" / "step_7"


def as_numpy(value: Any) -> Any:
    """A state as orbax gives it back."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.view(torch.int16).numpy().view("bfloat16") if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, dict):
        return {key: as_numpy(member) for key, member in value.items()}
    return [as_numpy(member) for member in value] if isinstance(value, list | tuple) else value


def test_orbax_restores_what_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import orbax.checkpoint as v0
    from orbax.checkpoint import v1

    from xla_ckpt.formats.orbax import chunk_grid

    monkeypatch.setattr(chunk_grid, "MAX_CHUNK_BYTES", 40)  # several chunks, the last of which is filled up
    model, _, path = written(tmp_path)
    assert len([*(path / "model.0.weight").glob("*.0")]) == 2
    expected = as_numpy(xla_ckpt.restore(tmp_path / "run").tree)
    assert_equal(v0.StandardCheckpointer().restore(path), expected)
    assert_equal(v1.load(path), expected)
    like = {"model": jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), expected["model"])}
    part = v0.Checkpointer(v0.PyTreeCheckpointHandler()).restore(
        path, v0.args.PyTreeRestore(like, partial_restore=True)
    )
    assert_equal(part, {"model": expected["model"]})
    assert torch.equal(torch.as_tensor(np.array(part["model"]["0.bias"])), model[0].bias)


def test_what_is_converted_has_digests_and_is_loaded(tmp_path: Path) -> None:
    model, optimizer, path = written(tmp_path)
    assert xla_ckpt.list_tags(path.parent) == ["step_7"]
    assert xla_ckpt.verify(path.parent).digests
    again = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2).to(torch.bfloat16))
    other = torch.optim.AdamW(again[0].parameters())
    loaded = xla_ckpt.load_checkpoint(path.parent, model=again, optimizer=other)
    assert loaded.user_content["pair"] == (1, -0.5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    chunk = path / "model.0.weight" / "0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"!")
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="damaged"):
        xla_ckpt.load_checkpoint(path.parent, model=again)


def test_what_is_converted_is_orbaxs_without_our_manifest(tmp_path: Path) -> None:
    path = written(tmp_path)[2]
    for name in ("manifest.json", "report.json", "_CHECKPOINT_METADATA", "commit_success.txt"):
        (path / name).unlink(missing_ok=True)
    assert_equal(xla_ckpt.restore(path).tree, as_numpy(xla_ckpt.restore(tmp_path / "run").tree))


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"a": {1, 2}}, "no place for a set"),
        ({"a": 1 << 64}, "expected one from -2.*63 to 2.*64 - 1, got 0x1"),
        ({"a": torch.empty(0, 3)}, "an array without elements"),
        ({"a": torch.ones(1, dtype=torch.float8_e8m0fnu)}, "no element type float8_e8m0fnu"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "as it would a/b"),
        ({1: torch.ones(1), "1": torch.ones(1)}, "have one name"),
        ({"..": torch.ones(1)}, "make a directory"),
    ],
)
def test_what_orbax_has_no_place_for(tmp_path: Path, state: Any, problem: str) -> None:
    xla_ckpt.save(tmp_path / "run", "a", state)
    with pytest.raises(xla_ckpt.UnsupportedStateError, match=problem):
        xla_ckpt.convert(tmp_path / "run", tmp_path / "orbax", to="orbax")
    assert xla_ckpt.list_tags(tmp_path / "orbax") == []


def test_tied_arrays_are_written_twice(tmp_path: Path) -> None:
    import orbax.checkpoint as v0

    tied = torch.arange(3.0)
    xla_ckpt.save(tmp_path / "run", "a", {"model": {"x": tied, "y": tied}})
    xla_ckpt.convert(tmp_path / "run", tmp_path / "orbax", to="orbax")
    state = v0.StandardCheckpointer().restore(tmp_path / "orbax" / "a")
    assert_equal(state, {"model": {"x": tied.numpy(), "y": tied.numpy()}})
    assert xla_ckpt.verify(tmp_path / "orbax").ok


def test_arrays_are_those_of_who_saved_them(saved: Path) -> None:
    of_jax, of_numpy = (xla_ckpt.restore(saved / name).tree["params"]["a.b/c"] for name in ("pytree", "host"))
    assert isinstance(of_jax, jax.Array)
    assert isinstance(of_numpy, np.ndarray)


def test_a_model_is_not_filled_from_what_has_its_names(saved: Path) -> None:
    model = torch.nn.Linear(4, 8)
    before = model.weight.clone()
    with pytest.raises(xla_ckpt.CheckpointError, match="model: not in the checkpoint, which holds ema, step"):
        xla_ckpt.load_checkpoint(saved / "average", model=model)
    assert torch.equal(model.weight, before)
