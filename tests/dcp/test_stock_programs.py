"""What programs written for stock DCP do with its calls, learnt from torch's own tests (`tests/dcp/torchs_own.py`)."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import xla_ckpt
import xla_ckpt.dcp as dcp
from tests.jobs import run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


def test_writers_and_readers_are_second_arguments(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="argument order of save"):
        dcp.save({"w": torch.ones(2)}, dcp.FileSystemWriter(tmp_path / "a"))
    target = {"w": torch.zeros(2)}
    with pytest.warns(UserWarning, match="argument order of load"):
        dcp.load(target, dcp.FileSystemReader(tmp_path / "a"))
    assert target["w"].tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:The argument order")
def test_a_path_is_no_second_argument(tmp_path: Path) -> None:
    calls: tuple[Any, ...] = (dcp.save, dcp.load)
    for call in calls:
        for path in (tmp_path / "a", str(tmp_path / "a")):
            with pytest.raises(xla_ckpt.UsageError, match="checkpoint_id="):
                call({"w": torch.ones(2)}, path)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:The argument order")
def test_the_state_dict_comes_first(tmp_path: Path) -> None:
    swapped = (str(tmp_path / "a"), {"w": torch.ones(2)})
    calls: tuple[Any, ...] = (dcp.save, dcp.load)
    for call in calls:
        with pytest.raises(xla_ckpt.UsageError, match="no state dict.*found str.*comes first"):
            call(*swapped)
    for call in (*calls, dcp.async_save):
        with pytest.raises(TypeError, match="did you mean 'checkpoint_id'"):
            call({"w": torch.ones(2)}, checkpoint_di=tmp_path / "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("planner", [None, stock.DefaultLoadPlanner()])
def test_a_tensor_that_cannot_be_written_to_is_named_before_others_are_loaded(
    tmp_path: Path, dtype: torch.dtype, planner: Any
) -> None:
    dcp.save({"a": torch.ones(3), "w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    target = {"a": torch.zeros(3), "w": torch.zeros(1, dtype=dtype).expand(2)}
    with pytest.raises(xla_ckpt.UsageError, match="share memory with each other") as refused:
        dcp.load(target, checkpoint_id=tmp_path / "a", planner=planner)
    assert refused.value.leaf == "w"
    assert target["a"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, stock.FileSystemWriter])
def test_saves_and_loads_have_names(tmp_path: Path, writer: Any) -> None:
    made = writer(tmp_path / "a")
    dcp.save({"w": torch.ones(2)}, storage_writer=made)
    reader = dcp.FileSystemReader(tmp_path / "a")
    meta = reader.read_metadata().storage_meta
    assert meta is not None
    assert (meta.save_id, meta.load_id) == (made.save_id, reader.load_id)
    assert meta.save_id
    assert meta.load_id
    reader.reset()
    assert reader.load_id != meta.load_id
    later = stock.FileSystemReader(tmp_path / "a").read_metadata().storage_meta
    assert later is not None
    assert later.save_id == made.save_id


@pytest.mark.parametrize("load", [dcp.load, stock.load])
@pytest.mark.parametrize("save", [dcp.save, stock.save])
def test_a_file_in_memory_is_a_plain_value(tmp_path: Path, save: Any, load: Any) -> None:
    written = io.BytesIO(b"\x80 some bytes")
    written.seek(3)
    save({"deep": {"file": written, "list": [1, io.BytesIO()]}}, checkpoint_id=tmp_path / "a")
    target: dict[str, Any] = {"deep": {"file": io.BytesIO(), "list": []}}
    load(target, checkpoint_id=tmp_path / "a")
    loaded = target["deep"]["file"]
    assert (type(loaded), loaded.getvalue(), loaded.tell()) == (io.BytesIO, b"\x80 some bytes", 3)
    assert target["deep"]["list"][1].getvalue() == b""
    assert xla_ckpt.restore(tmp_path / "a").tree["deep"]["file"].getvalue() == b"\x80 some bytes"


class Derived(dcp.StorageWriter):
    """Calls no `__init__` of its base: stock's has none."""

    def __init__(self, path: Path) -> None:
        self.reset(path)
        self.replicas, self.overwrite, self.num_workers = "equal", True, 1


class DerivedReader(dcp.StorageReader):
    """Likewise."""

    def __init__(self, path: Path) -> None:
        self.trust_pickle, self.num_workers = False, 1
        self.reset(path)


def test_classes_of_the_program_need_not_call_the_constructor(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=Derived(tmp_path / "a"))
    target = {"w": torch.zeros(2)}
    dcp.load(target, storage_reader=DerivedReader(tmp_path / "a"))
    assert target["w"].tolist() == [1, 1]


class Refuses:
    """Has no state to give on one rank."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        if self.refuses:
            raise ZeroDivisionError("no state")
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Not asked."""


def failures_of(call: Any) -> Any:
    with pytest.raises(stock.CheckpointException) as caught:
        call()
    assert isinstance(caught.value, Exception), "a program's `except Exception` catches it, too"
    return caught.value


def gets_stocks_errors(rank: int, root: Path) -> None:
    held = {"w": torch.ones(2)}
    dcp.save(held, checkpoint_id=root / "a")
    failed = failures_of(lambda: dcp.save({**held, "o": Refuses(rank == 1)}, checkpoint_id=root / "b"))
    assert isinstance(failed, xla_ckpt.SaveError)
    assert list(failed.failures) == [1]
    assert isinstance(failed.failures[1][0], xla_ckpt.CheckpointError)
    later: Any = dcp.async_save({**held, "o": Refuses(rank == 1)}, checkpoint_id=root / "b")
    assert list(failures_of(later.result).failures) == [1]

    class Broken(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            if rank == 0:
                raise KeyError("a planner's own")
            return super().create_local_plan()

    failed = failures_of(lambda: dcp.load(dict(held), checkpoint_id=root / "a", planner=Broken()))
    assert {number: type(error) for number, (error, _) in failed.failures.items()} == {0: KeyError}
    again = pickle.loads(pickle.dumps(failed))
    assert (type(again), str(again), list(again.failures)) == (type(failed), str(failed), [0])


def test_errors_are_those_of_stock_too(tmp_path: Path) -> None:
    run_on_ranks(gets_stocks_errors, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_stocks_words_are_in_the_errors(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    for text, target in (
        ("Missing key in checkpoint state_dict: other", {"other": torch.ones(2)}),
        ("Size mismatch between saved .* and current", {"w": torch.ones(3)}),
    ):
        with pytest.raises(stock.CheckpointException, match=text) as caught:
            dcp.load(target, checkpoint_id=tmp_path / "a")
        assert isinstance(caught.value, xla_ckpt.IncompatibleCheckpointError)
    with pytest.raises(stock.CheckpointException, match="Checkpoint already exists"):
        dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "a", overwrite=False))
