"""DCP's calls in one process: what they save and load, what they return, and what they refuse."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import xla_ckpt
import xla_ckpt.dcp as dcp
from tests.same import same
from xla_ckpt.dcp import reader
from xla_ckpt.errors import ERROR_TYPES, CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {
            "w": torch.randn(300, 70), "b": torch.randn(5).bfloat16(), "empty": torch.empty(0, 3),
            "scalar": torch.tensor(3), "transposed": torch.randn(7, 5).t(), "bool": torch.tensor([True, False]),
        },
        "step": 7,
        "list": [1, {"a": torch.arange(4)}],
        "text": "x" * 5000,
        "random": {"state": torch.get_rng_state(), "seed": 3},
    }  # fmt: skip


def blank(like: Any) -> Any:
    if isinstance(like, torch.Tensor):
        return torch.zeros(like.shape, dtype=like.dtype)
    if isinstance(like, dict):
        return {k: blank(v) for k, v in like.items()}
    return [blank(v) for v in like] if isinstance(like, list) else None


@pytest.mark.parametrize("saver", [stock, dcp])
@pytest.mark.parametrize("loader", [stock, dcp])
def test_what_either_saves_either_loads(tmp_path: Path, saver: Any, loader: Any) -> None:
    held = state()
    told = saver.save(held, checkpoint_id=tmp_path / "a")
    assert type(told) is dcp.Metadata
    assert set(told.state_dict_metadata) >= {"model.w", "list.1.a", "step"}
    target = blank(held)
    weight = target["model"]["w"]
    assert loader.load(target, checkpoint_id=tmp_path / "a") is None
    assert same(target, held)
    assert target["model"]["w"] is weight, "tensors are filled in place"


@pytest.mark.parametrize("loader", [stock, dcp])
def test_what_is_raised_while_metadata_is_read_is_raised_by_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: Any
) -> None:
    def refuses(*_: object) -> None:
        raise TypeError("no metadata")

    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    target = {"w": torch.zeros(2)}
    monkeypatch.setattr(reader, "build_stock_metadata", refuses)
    with pytest.raises((TypeError, stock.CheckpointException), match="no metadata"):
        loader.load(target, storage_reader=dcp.StorageReader(tmp_path / "a"))
    assert not target["w"].any()


def test_stock_calls_with_our_storage(tmp_path: Path) -> None:
    held = state()
    stock.save(held, storage_writer=dcp.StorageWriter(tmp_path / "a"))
    stock.save(held, checkpoint_id=tmp_path / "b", storage_writer=dcp.StorageWriter())
    for name in "ab":
        target = blank(held)
        stock.load(target, storage_reader=dcp.StorageReader(tmp_path / name))
        assert same(target, held)
    keys = dcp.StorageReader(tmp_path / "a").read_metadata().state_dict_metadata
    assert keys.keys() == stock.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata.keys()


def test_what_stock_programs_make_themselves(tmp_path: Path) -> None:
    held = state()
    dcp.save(held, storage_writer=dcp.FileSystemWriter(tmp_path / "a", thread_count=2, overwrite=True))
    target = blank(held)
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "a"))
    assert same(target, held)
    with pytest.raises(xla_ckpt.UsageError, match="overwrite=False"):
        dcp.save(held, storage_writer=dcp.FileSystemWriter(tmp_path / "a", overwrite=False))
    with pytest.raises(xla_ckpt.UsageError, match="extensions"):
        dcp.FileSystemWriter(tmp_path / "a", _extensions=[object()])
    with pytest.raises(xla_ckpt.UsageError, match="serialization format"):
        dcp.FileSystemWriter(tmp_path / "a", serialization_format="safetensors")
    options = xla_ckpt.SaveOptions(replicas="first")
    with pytest.raises(xla_ckpt.UsageError, match="options= has no effect beside storage_writer="):
        dcp.save(held, storage_writer=dcp.StorageWriter(tmp_path / "a"), options=options)


def test_signatures_are_those_of_stock() -> None:
    more = {"save": {"options"}, "async_save": {"options"}, "load": {"trust_pickle"}}
    for name, own in more.items():
        theirs = inspect.signature(getattr(stock, name)).parameters
        ours = inspect.signature(getattr(dcp, name)).parameters
        assert set(ours) - set(theirs) == own, name
        assert set(theirs) <= set(ours), name
        for parameter in theirs:
            assert ours[parameter].kind == theirs[parameter].kind
            assert ours[parameter].default == theirs[parameter].default


def test_names_that_are_not_there_say_what_to_use() -> None:
    for name, instead in (
        ("HuggingFaceStorageWriter", "export"), ("format_utils", "xla-ckpt convert"), ("save_state_dict", "save"),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=instead):
            getattr(dcp, name)
    with pytest.raises(AttributeError, match="no attribute"):
        _ = dcp.nonsense
    for name in dcp.__all__:
        assert getattr(dcp, name) is not None
    assert dcp.state_dict is stock.state_dict


class Counter:
    """A `Stateful`."""

    def __init__(self, n: int = 0) -> None:
        self.n, self.w = n, torch.full((3,), float(n))

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "w": self.w}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        if held["n"] == 13:
            raise ValueError("unlucky")
        self.n = held["n"]


def test_stateful_objects(tmp_path: Path) -> None:
    dcp.save({"counter": Counter(5), "x": 1}, checkpoint_id=tmp_path / "a")
    target = {"counter": Counter(), "x": 0}
    counter = target["counter"]
    dcp.load(target, checkpoint_id=tmp_path / "a")
    assert target == {"counter": counter, "x": 1}
    assert (counter.n, counter.w.tolist()) == (5, [5.0, 5.0, 5.0])
    dcp.save({"counter": Counter(13)}, checkpoint_id=tmp_path / "a")
    with pytest.raises(xla_ckpt.LoadError, match="unlucky") as caught:
        dcp.load({"counter": Counter()}, checkpoint_id=tmp_path / "a")
    assert caught.value.leaf == "counter"


def test_an_optimizer_without_state_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its state dict asks for no moments before the first step, and stock's load says nothing of it."""
    model = torch.nn.Linear(3, 2)
    stepped, fresh = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    stepped.step()
    dcp.save({"model": model.state_dict(), "optimizer": stepped}, checkpoint_id=tmp_path)
    dcp.load({"model": model.state_dict(), "optimizer": stepped}, checkpoint_id=tmp_path)
    assert "was not loaded" not in caplog.text
    dcp.load({"model": model.state_dict(), "optimizer": fresh}, checkpoint_id=tmp_path)
    assert "stored of the state of optimizer was not loaded" in caplog.text
    assert not fresh.state
    xla_ckpt.load_checkpoint(tmp_path, model=model, optimizer=fresh)  # what the warning names
    assert same(fresh.state_dict()["state"], stepped.state_dict()["state"])


def test_another_element_type_is_converted_as_stock_does(tmp_path: Path) -> None:
    dcp.save({"w": torch.tensor([1.5, 2.5])}, checkpoint_id=tmp_path / "a")
    found = []
    for library in (stock, dcp):
        target = {"w": torch.zeros(2, dtype=torch.int64), "x": 1}
        del target["x"]
        library.load(target, checkpoint_id=tmp_path / "a")
        found.append(target["w"].tolist())
    assert found == [[1, 2], [1, 2]]


def test_memory_that_is_not_contiguous_is_filled(tmp_path: Path) -> None:
    held = {"w": torch.randn(6, 4)}
    dcp.save(held, checkpoint_id=tmp_path / "a")
    base = torch.zeros(4, 6)
    dcp.load({"w": base.t()}, checkpoint_id=tmp_path / "a")
    assert torch.equal(base.t(), held["w"])


def test_keys_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4), "n": 1}, checkpoint_id=tmp_path / "a")
    target = {"w": torch.zeros(4), "more": torch.zeros(2)}
    with pytest.raises(
        xla_ckpt.IncompatibleCheckpointError, match="Missing key in checkpoint state_dict: more"
    ) as caught:
        dcp.load(target, checkpoint_id=tmp_path / "a")
    assert isinstance(caught.value.__cause__, dcp.CheckpointException)
    assert str(caught.value.hint).startswith("Stored there: w, n. ")
    dcp.save({"model": target}, checkpoint_id=tmp_path / "below")
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"more: did you mean 'model\.more'\?"):
        dcp.load({"more": torch.zeros(2)}, checkpoint_id=tmp_path / "below")
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="a tensor is stored under this key") as caught:
        dcp.load({"w": 0}, checkpoint_id=tmp_path / "a")
    assert caught.value.leaf == "w"
    with (
        warnings.catch_warnings(action="ignore"),  # stock's own, of a function that it calls
        pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="meta device has no memory.*to_empty"),
    ):
        dcp.load({"w": torch.empty(4, device="meta")}, checkpoint_id=tmp_path / "a")
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="a Tensor is no plain array"):
        dcp.save({"w": torch.eye(3).to_sparse()}, checkpoint_id=tmp_path / "sparse")
    assert not target["w"].any()
    dcp.load(target, checkpoint_id=tmp_path / "a", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert target["w"].all()
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"Size mismatch.*expected \[4\], found \[3\]"):
        dcp.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "a")


def test_planners_of_the_program(tmp_path: Path) -> None:
    class Half(dcp.DefaultSavePlanner):
        """Stores everything in half precision, as the documentation of `SavePlanner` shows it."""

        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def resolve_data(self, item: Any) -> Any:
            found = super().resolve_data(item)
            return found.to(torch.float16) if isinstance(found, torch.Tensor) else found

    class Lying(dcp.DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            return super().resolve_data(item)[:1]

    class Noting(dcp.DefaultLoadPlanner):
        committed: list[str] = []

        def commit_tensor(self, item: Any, tensor: torch.Tensor) -> None:
            self.committed.append(item.dest_index.fqn)

    held = {"w": torch.tensor([1.0, 2.0, 3.0])}
    dcp.save(held, checkpoint_id=tmp_path / "a", planner=Half())
    target = {"w": torch.zeros(3)}
    dcp.load(target, checkpoint_id=tmp_path / "a", planner=Noting())
    assert target["w"].tolist() == [1.0, 2.0, 3.0]
    assert Noting.committed == ["w"]
    assert dcp.StorageReader(tmp_path / "a").read_metadata().state_dict_metadata["w"].properties.dtype == torch.float16
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="could not be loaded") as caught:
        dcp.save(held, checkpoint_id=tmp_path / "b", planner=Lying())
    assert caught.value.leaf == "w"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_planners_that_keep_plans(tmp_path: Path) -> None:
    held = state()
    for i in range(3):
        held["model"]["w"] += 1
        held["step"] = i
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(held, checkpoint_id=tmp_path / f"step-{i}", planner=planner)
        target = blank(held)
        stock.load(target, checkpoint_id=tmp_path / f"step-{i}")
        assert same(target, held)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0", "step-1", "step-2"]


def test_a_checkpoint_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    one, two = {"a": torch.ones(3), "gone": torch.ones(2)}, {"a": torch.full((3,), 2.0)}
    stock.save(one, checkpoint_id=tmp_path / "a")
    dcp.save(two, checkpoint_id=tmp_path / "a")
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == [".metadata", "00001-of-00001.safetensors", "xla_ckpt_digests.json"]
    (tmp_path / "empty").mkdir()
    dcp.save(two, checkpoint_id=tmp_path / "empty")
    for name in ("own", "root"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "notes.txt").write_text("mine")
    dcp.save(two, checkpoint_id=tmp_path / "root" / "step-1")
    (tmp_path / "file").write_text("mine")
    xla_ckpt.save(tmp_path / "tags", "tag", {"w": torch.ones(2)})
    for path in ("own", "root", "file", "tags/tag"):
        before = sorted(str(p) for p in tmp_path.rglob("*"))
        with pytest.raises(xla_ckpt.UsageError, match="there is|something else"):
            dcp.save(two, checkpoint_id=tmp_path / path)
        assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_a_link_leads_to_the_checkpoint_that_is_replaced(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "real")
    (tmp_path / "latest").symlink_to(tmp_path / "real")
    dcp.save({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    target = {"a": torch.ones(3)}
    dcp.load(target, checkpoint_id=tmp_path / "real")
    assert not target["a"].any()


def test_a_save_in_the_background(tmp_path: Path) -> None:
    held = {"w": torch.ones(100_000), "list": [1, 2], "aliases": None}
    held["aliases"] = [held["w"], held["list"]]
    future = dcp.async_save(held, checkpoint_id=tmp_path / "a")
    assert type(future) is Future
    held["w"].zero_()
    held["list"].append(3)
    assert type(future.result()) is dcp.Metadata
    target = {"w": torch.zeros(100_000), "list": [0, 0], "aliases": [torch.zeros(100_000), [0, 0]]}
    stock.load(target, checkpoint_id=tmp_path / "a")
    assert target["w"].all()
    assert target["aliases"][0].all()
    assert target["list"] == [1, 2]


def test_saves_in_the_background_wait_for_each_other(tmp_path: Path) -> None:
    futures = [dcp.async_save({"n": torch.tensor(i)}, checkpoint_id=tmp_path / "a") for i in range(4)]
    assert all(future.done() for future in futures[:3]), "an earlier save of the same directory is waited for"
    target = {"n": torch.tensor(-1)}
    dcp.load(target, checkpoint_id=tmp_path / "a")
    assert target["n"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_a_stager_that_is_not_done_at_once(tmp_path: Path) -> None:
    class Later(dcp.AsyncStager):
        def stage(self, held: Any, **_: Any) -> Any:
            done: Future[Any] = Future()
            done.set_result(super().stage(held))
            return done

    response = dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", async_stager=Later())
    assert type(response) is AsyncSaveResponse
    assert response.staging_completion.result() is None
    assert type(response.upload_completion.result()) is dcp.Metadata


def test_errors_of_saves_in_the_background(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    future = dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "file" / "a")
    assert isinstance(future.exception(), xla_ckpt.CheckpointError)
    assert "in the background failed" in caplog.text
    with (tmp_path / "file").open() as file, pytest.raises(xla_ckpt.UnsupportedStateError, match="cannot be copied"):
        dcp.async_save({"open": file}, checkpoint_id=tmp_path / "a")
    with pytest.raises(xla_ckpt.UsageError, match="thread"):
        dcp.async_save({}, checkpoint_id=tmp_path / "a", async_checkpointer_type=AsyncCheckpointerType.PROCESS)


def test_what_makes_no_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (dcp.save, dcp.load, dcp.async_save):
        with pytest.raises(xla_ckpt.UsageError, match="where the checkpoint"):
            call({"w": torch.ones(1)})
        with pytest.raises(xla_ckpt.UsageError, match="no storage of this library"):
            call({"w": torch.ones(1)}, checkpoint_id="hdfs://bucket/a")
    with pytest.raises(xla_ckpt.UsageError, match="use_collectives"):
        dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "a", use_collectives=False)
    with pytest.raises(xla_ckpt.UsageError, match="replicas"):
        dcp.StorageWriter(tmp_path, options=xla_ckpt.SaveOptions(replicas="some"))  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(xla_ckpt.UsageError, match="one of 2"):
        dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "a")
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "a", no_dist=True)


def flip(file: Path, where: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[bytes(data).index(where) + 8] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("saver", [stock, dcp])
def test_a_flipped_bit_names_key_and_file_and_changes_nothing(tmp_path: Path, saver: Any) -> None:
    held = {"a": torch.randn(50), "w": torch.randn(300, 70), "n": 123456}
    saver.save(held, checkpoint_id=tmp_path / "a")
    name = "00001-of-00001.safetensors" if saver is dcp else "__0_0.distcp"
    flip(tmp_path / "a" / name, held["w"].numpy().tobytes()[:64])
    target = blank(held)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="damaged") as caught:
        dcp.load(target, checkpoint_id=tmp_path / "a")
    assert (caught.value.leaf, caught.value.file) == ("w", name)
    assert not target["a"].any()
    assert not target["w"].any()
    dcp.load({"a": target["a"]}, checkpoint_id=tmp_path / "a")  # what is not asked for is not looked at
    assert torch.equal(target["a"], held["a"])


def test_damaged_values_and_files(tmp_path: Path) -> None:
    held = {"w": torch.randn(100), "text": "something to say " * 20}
    dcp.save(held, checkpoint_id=tmp_path / "a")
    objects = "objects-00001-of-00001.distcp"
    for file, damage, match in (
        (objects, lambda f: flip(f, b"something to say"), "damaged"),
        (objects, lambda f: f.unlink(), "missing"),
        ("00001-of-00001.safetensors", lambda f: f.write_bytes(f.read_bytes()[:-100]), "is not as"),
        (".metadata", lambda f: flip(f, b"TensorStorageMetadata"), "digest"),
        ("xla_ckpt_digests.json", lambda f: flip(f, b"safetensors"), "digest"),
    ):
        before = {p: p.read_bytes() for p in (tmp_path / "a").iterdir()}
        damage(tmp_path / "a" / file)
        target = {"w": torch.zeros(100), "text": ""}
        with pytest.raises(xla_ckpt.CorruptCheckpointError, match=match) as caught:
            dcp.load(target, checkpoint_id=tmp_path / "a")
        assert caught.value.file == file
        assert not target["w"].any()
        assert target["text"] == ""
        for path, data in before.items():
            path.write_bytes(data)


def test_stock_dcp_saves_over_ours(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    stock.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "a")
    target = {"w": torch.full((3,), 5.0)}
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="remove xla_ckpt_digests.json"):
        dcp.load(target, checkpoint_id=tmp_path / "a")
    (tmp_path / "a" / "xla_ckpt_digests.json").unlink()
    dcp.load(target, checkpoint_id=tmp_path / "a")
    assert not target["w"].any()


def runs() -> None:
    Evil.ran = True


class Evil:
    ran = False

    def __reduce__(self) -> Any:
        return runs, ()


class Harmless:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Harmless)

    __hash__ = None  # type: ignore[assignment]


def test_metadata_that_runs_code_is_refused(tmp_path: Path) -> None:
    stock.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Evil()))
    target = {"w": torch.zeros(3)}
    with pytest.raises(xla_ckpt.UntrustedObjectError):
        dcp.load(target, checkpoint_id=tmp_path / "a", trust_pickle=True)
    assert not Evil.ran
    with pytest.raises(stock.CheckpointException) as caught:
        stock.load(target, storage_reader=dcp.StorageReader(tmp_path / "a"))
    assert [type(error) for error, _ in caught.value.failures.values()] == [xla_ckpt.UntrustedObjectError]
    assert not Evil.ran


@pytest.mark.parametrize("saver", [stock, dcp])
def test_values_of_unknown_classes_need_trust(tmp_path: Path, saver: Any) -> None:
    saver.save({"w": torch.ones(3), "own": Harmless(), "plain": {"a": [1, "b"]}}, checkpoint_id=tmp_path / "a")
    target = {"w": torch.zeros(3), "own": None, "plain": {"a": [0, ""]}}
    with pytest.raises(xla_ckpt.UntrustedObjectError, match="trust_pickle") as caught:
        dcp.load(target, checkpoint_id=tmp_path / "a")
    assert caught.value.leaf == "own"
    assert not target["w"].any()
    dcp.load(target, checkpoint_id=tmp_path / "a", trust_pickle=True)
    assert target["own"] == Harmless()
    assert target["plain"] == {"a": [1, "b"]}
    with pytest.raises(
        xla_ckpt.UsageError, match=r"trust_pickle= has no effect.*StorageReader\(path, trust_pickle=True\)"
    ):
        dcp.load(target, storage_reader=dcp.StorageReader(tmp_path / "a"), trust_pickle=True)
    target["own"] = None
    dcp.load(target, storage_reader=dcp.StorageReader(tmp_path / "a", trust_pickle=True))
    assert target["own"] == Harmless()


def test_there_is_no_checkpoint(tmp_path: Path) -> None:
    target = {"w": torch.zeros(3)}
    with pytest.raises(xla_ckpt.NoCheckpointError):
        dcp.load(target, checkpoint_id=tmp_path / "none")
    (tmp_path / "file.pt").touch()
    with pytest.raises(xla_ckpt.NoCheckpointError, match="there is a file, .*load_checkpoint"):
        dcp.load(target, checkpoint_id=tmp_path / "file.pt")
    (tmp_path / "half").mkdir()
    with pytest.raises(xla_ckpt.NoCheckpointError, match="no .metadata"):
        dcp.load(target, checkpoint_id=tmp_path / "half")
    xla_ckpt.save(tmp_path / "run", "tag", {"w": torch.ones(3)})
    with pytest.raises(xla_ckpt.NoCheckpointError, match="tag of this library"):
        dcp.load(target, checkpoint_id=tmp_path / "run" / "tag")
    for step in (1, 2):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "steps" / f"step-{step}")
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"Checkpoints beside it: step-1, step-2\."):
        dcp.load(target, checkpoint_id=tmp_path / "steps" / "step-3")
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"did you mean .*/steps/step-2\?"):
        dcp.load(target, checkpoint_id=tmp_path / "step" / "step-2")
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"Checkpoints lie in it: .* one, step-1, step-2\."):
        dcp.load(target, checkpoint_id=tmp_path / "steps")
    with pytest.raises(xla_ckpt.NoCheckpointError, match="This is a checkpoint by itself: pass it without a tag"):
        xla_ckpt.restore(tmp_path / "steps" / "step-1", "step-1")
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"steps and the tag step-2\."):
        xla_ckpt.restore(tmp_path / "steps" / "step-1", "step-2")


def test_a_tag_of_ours_in_the_layout_dcp(tmp_path: Path) -> None:
    model = {"w": torch.randn(300, 70), "b": torch.randn(3)}
    xla_ckpt.save_checkpoint(tmp_path, "tag", model=model, user_content={"n": 5}, layout="dcp")
    target = {"model": blank(model)}
    dcp.load(target, checkpoint_id=tmp_path / "tag")
    assert same(target["model"], model)
    name = next(p for p in (tmp_path / "tag").rglob("*.safetensors"))
    flip(name, model["w"].numpy().tobytes()[:64])
    target = {"model": blank(model)}
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="damaged") as caught:
        dcp.load(target, checkpoint_id=tmp_path / "tag")
    assert caught.value.leaf == "model.w"
    assert not target["model"]["b"].any()


def test_all_errors_travel_between_processes() -> None:
    for kind in ERROR_TYPES.values():
        error = kind("a problem", leaf="w", rank=3, path="/x")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.rank) == (kind, str(error), 3)
        assert isinstance(copy.copy(again), CheckpointError)
