"""Saves of jobs in orbax's layout: what stock orbax restores of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import xla_ckpt
from tests.formats import orbax_restores
from tests.formats.orbax_saves import eight_devices
from tests.formats.test_orbax import as_numpy, assert_equal
from tests.formats.writing import as_job
from tests.jobs import run_on_ranks
from tests.runs import ROOT
from tests.strategies import cuts_of, full_shapes
from xla_ckpt import Mesh
from xla_ckpt.core.plan.save_plan import RegionSource
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.formats.orbax import chunk_grid
from xla_ckpt.formats.orbax.chunk_grid import JobChunkGrid, compute_chunk_shape, plan_chunk_files

SHARDINGS = [(r"rows", ("tp", None)), (r"columns", (None, "tp")), (r"both", ("dp", "tp"))]


def whole(name: str) -> torch.Tensor:
    """The arrays of a job, which are cut in different ways. Some of the cuts leave short parts."""
    shapes = {"rows": (10, 6), "columns": (4, 10), "both": (6, 8), "all": (5, 3), "long": (9,), "none": ()}
    count = int(np.prod(shapes[name]))
    return (torch.arange(count, dtype=torch.float32) + len(name)).reshape(shapes[name])


def state_of(mesh: Mesh, rank: int) -> dict[str, Any]:
    """What one rank has."""
    at = mesh.coordinates(rank)

    def part(tensor: torch.Tensor, dim: int, axis: str) -> torch.Tensor:
        return tensor.chunk(mesh.sizes[axis], dim)[at[axis]].contiguous()

    both = part(part(whole("both"), 0, "dp"), 1, "tp")
    return {
        "rows": part(whole("rows"), 0, "tp"),
        "columns": part(whole("columns"), 1, "tp").to(torch.bfloat16),
        "deep": [{"both": both}, whole("all"), whole("long").to(torch.int32), whole("none")],
        "step": 7,
        "nothing": None,
    }


def expected() -> dict[str, Any]:
    """What stock orbax gives back."""
    deep = [{"both": whole("both")}, whole("all"), whole("long").to(torch.int32), whole("none")]
    state = {"rows": whole("rows"), "columns": whole("columns").to(torch.bfloat16), "deep": deep, "step": 7}
    return as_numpy({**state, "nothing": None})  # type: ignore[no-any-return]


def saved(monkeypatch: pytest.MonkeyPatch, root: Path, mesh: Mesh, **options: Any) -> Path:
    """The tag of such a job."""

    def save(rank: int) -> None:
        state = state_of(mesh, rank)
        handle = xla_ckpt.save(root, "7", state, mesh=mesh, shardings=SHARDINGS, layout="orbax", **options)
        handle.result()

    as_job(monkeypatch, mesh, "save", save)
    return root / "7"


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), Mesh(dp=3, tp=2), Mesh(dp=2)], ids=str)
def test_orbax_restores_what_a_job_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: Mesh) -> None:
    from orbax.checkpoint import v1

    path = saved(monkeypatch, tmp_path / "run", mesh, async_save=True)
    assert_equal(v1.load(path), expected())
    assert xla_ckpt.verify(tmp_path / "run").ok
    assert_equal(as_numpy(xla_ckpt.restore(tmp_path / "run").tree), expected())


def test_onto_eight_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(monkeypatch, tmp_path / "run", Mesh(dp=2, tp=2))
    for tree in orbax_restores.restored(path, tmp_path / "result").values():
        assert_equal(tree, expected())


def sharded(rank: int, root: Path) -> list[str]:
    """DTensors whose dims do not divide, and one that lies over two of the four ranks: its copies do not know it."""
    four, two = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor, options = torch.arange(100.0).reshape(10, 10), xla_ckpt.SaveOptions(timeout=60)
    state = {
        "rows": distribute_tensor(tensor, four, [Shard(0)]),
        "columns": distribute_tensor(tensor, four, [Shard(1)]),
        "both": distribute_tensor(tensor, two, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(tensor, two["tp"], [Shard(0)]),
        "here": np.arange(5),
    }
    xla_ckpt.save(root, "a", state, layout="orbax", options=options)
    assert xla_ckpt.verify(root).ok
    again = {name: torch.zeros_like(value) for name, value in state.items() if name != "here"}
    for name, value in xla_ckpt.restore(root, like={"rows": again["rows"], "both": again["both"]}).tree.items():
        assert torch.equal(value.full_tensor(), tensor), name
    if rank >= 2:
        state["twice"].to_local().add_(1)
    with pytest.raises(xla_ckpt.DivergentReplicasError):
        xla_ckpt.save(root, "b", state, layout="orbax", options=options)
    return xla_ckpt.list_tags(root)


def overlapping(rank: int, root: Path) -> tuple[str, list[str]]:
    """Each pair of ranks has all of an array, and does not know of the other pair, which cuts it otherwise."""
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor = distribute_tensor(torch.arange(96.0).reshape(12, 8), two["tp"], [Shard(0 if rank < 2 else 1)])
    options = xla_ckpt.SaveOptions(timeout=60)
    with pytest.raises(xla_ckpt.UnsupportedStateError) as refused:
        xla_ckpt.save(root, "a", {"deep": {"w": tensor}}, layout="orbax", options=options)
    assert refused.value.leaf == "deep/w"
    return str(refused.value), [path.name for path in root.iterdir() if path.name != ".lease"]


def test_parts_that_overlap_are_refused_by_all_ranks_alike(tmp_path: Path) -> None:
    (text, left), *others = run_on_ranks(overlapping, 4, tmp_path / "run")
    assert others == [(text, left)] * 3
    assert "[0:6, 0:8] on rank 0 and [0:12, 0:4] on rank 2" in text
    assert left == []


@pytest.mark.parametrize(
    ("parts", "apart"),
    [
        ([[[0], [4]], [[4], [8]]], True),
        ([[[0], [4]], [[0], [4]]], True),
        ([[[0], [8]], [[0], [4]]], False),
        ([[[0], [6]], [[4], [8]]], False),
        ([[[2], [6]], [[4], [10]]], False),
        ([[[0], [4]], [[6], [10]]], True),
    ],
)
def test_overlaps(parts: list[Any], apart: bool) -> None:
    words = [{"w": [[10], [part]]} for part in parts]
    if apart:
        JobChunkGrid.from_rank_parts(words)
        return
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="overlap"):
        JobChunkGrid.from_rank_parts(words)


def test_parts_that_are_short_and_copies_that_nobody_knows(tmp_path: Path) -> None:
    from orbax.checkpoint import v1

    assert run_on_ranks(sharded, 4, tmp_path / "run") == [["a"]] * 4
    tensor = np.arange(100.0, dtype=np.float32).reshape(10, 10)
    restored = v1.load(tmp_path / "run" / "a")
    assert_equal(restored.pop("here"), np.arange(5))
    assert_equal(restored, dict.fromkeys(("rows", "columns", "both", "twice"), tensor))


def test_stages_of_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orbax.checkpoint import v1

    tied, mesh = torch.arange(12.0).reshape(4, 3), Mesh(pp=2, tp=2)

    def save(rank: int) -> None:
        at = mesh.coordinates(rank)
        part = tied.chunk(2)[at["tp"]].clone()
        stages = [{"embedding": part}, {"embedding": part, "head": torch.full((2,), 3.0)}]
        rules = [("embedding", ("tp", None))]
        xla_ckpt.save(tmp_path / "run", "a", stages[at["pp"]], mesh=mesh, shardings=rules, layout="orbax").result()

    as_job(monkeypatch, mesh, "save", save)
    assert_equal(v1.load(tmp_path / "run" / "a"), {"embedding": tied.numpy(), "head": np.full(2, 3, np.float32)})


def test_jax_arrays_over_eight_devices(tmp_path: Path) -> None:
    """A state of a program of jax: what it saves, stock orbax restores."""
    code = """
import sys, jax, numpy as np, jax.numpy as jnp, xla_ckpt
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
put = lambda array, *axes: jax.device_put(array, NamedSharding(mesh, P(*axes)))
kernel = jnp.arange(96, dtype=jnp.bfloat16).reshape(8, 12)
state = {"both": put(kernel, "x", "y"), "one": put(kernel, None, "y"), "copies": put(kernel), "step": jnp.int32(3)}
xla_ckpt.save(sys.argv[1], "3", state, layout="orbax")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], cwd=ROOT, env=eight_devices(), check=True)
    kernel = np.arange(96).astype(ml_dtypes.bfloat16).reshape(8, 12)
    expected = {"both": kernel, "one": kernel, "copies": kernel, "step": np.array(3, np.int32)}
    path = tmp_path / "run" / "3"
    assert len([*(path / "both").glob("*.*")]) == 8 + 1  # a chunk for each device, as orbax has it, and .zarray
    for tree in orbax_restores.restored(path, tmp_path / "result").values():
        assert_equal(tree, expected)


def test_states_of_jax_are_taken_apart(tmp_path: Path) -> None:
    from orbax.checkpoint import v1

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Train:
        params: dict[str, Any]
        step: int

    state = Train({"w": jax.numpy.ones((2, 3))}, 4)
    xla_ckpt.save(tmp_path, "a", {"state": state}, layout="orbax")
    assert_equal(v1.load(tmp_path / "a"), {"state": {"params": {"w": np.ones((2, 3), np.float32)}, "step": 4}})
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="jax:key") as refused:
        xla_ckpt.save(tmp_path, "b", {"key": jax.random.key(0)}, layout="orbax")
    assert "key_data" in (refused.value.hint or "")


def test_integers_of_64_bits(tmp_path: Path) -> None:
    import orbax.checkpoint as v0
    from orbax.checkpoint import v1

    state = {"signed": -(2**63), "seed": 2**63 + 5, "largest": 2**64 - 1, "array": np.ones(())}
    xla_ckpt.save(tmp_path, "a", state, layout="orbax")
    for tree in (
        xla_ckpt.restore(tmp_path, "a").tree,
        v0.PyTreeCheckpointer().restore(tmp_path / "a"),
        v1.load(tmp_path / "a"),
    ):
        assert {name: int(value) for name, value in tree.items()} == {**state, "array": 1}
    for number in (2**64, -(2**63) - 1, 1 << 20_000):  # str() of the last one raises
        with pytest.raises(
            xla_ckpt.UnsupportedStateError, match=r"expected one from -2\*\*63 to 2\*\*64 - 1"
        ) as refused:
            xla_ckpt.save(tmp_path, "b", {"deep": [number]}, layout="orbax")
        assert refused.value.leaf == "deep/0"
    assert xla_ckpt.list_tags(tmp_path) == ["a"]


def test_a_model_and_its_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    xla_ckpt.save_checkpoint(tmp_path, "1", model, optimizer, user_content={"pair": (1, 2)}, layout="orbax")
    again = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))
    other = torch.optim.AdamW(again.parameters())
    assert xla_ckpt.load_checkpoint(tmp_path, model=again, optimizer=other).user_content == {"pair": (1, 2)}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    chunk = tmp_path / "1" / "model.0.weight" / "0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"!")
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="damaged"):
        xla_ckpt.load_checkpoint(tmp_path, model=again)


def test_what_has_no_place_is_saved_in_the_next_layout(tmp_path: Path) -> None:
    state = {"a": {1, 2}, "b": torch.ones(2)}
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="no place for a set"):
        xla_ckpt.save(tmp_path, "a", state, layout="orbax")
    assert not (tmp_path / "a").exists()
    xla_ckpt.save(tmp_path, "a", state, layout=["orbax", "native"])
    assert not (tmp_path / "a" / "_METADATA").exists()


def test_a_bucket(tmp_path: Path) -> None:
    """The files of a save in an object store are those of one on a disk."""
    state = state_of(Mesh(), 0)
    for root in ("memory://orbax-save", str(tmp_path)):
        xla_ckpt.save(root, "a", state, layout="orbax")
    assert_equal(as_numpy(xla_ckpt.restore("memory://orbax-save").tree), expected())


def test_copies_are_dealt_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank writes all, although none has what another one has not."""
    mesh = Mesh(dp=2)
    state = {f"{i}": torch.full((64, 1024), float(i)) for i in range(6)}
    reports = as_job(
        monkeypatch,
        mesh,
        "save",
        lambda _: xla_ckpt.save(tmp_path / "run", "a", state, mesh=mesh, layout="orbax").result(),
    )
    assert [report.nbytes for report in reports] == [3 << 18] * 2


@given(st.data())
def test_chunks_are_the_parts(data: st.DataObject) -> None:
    """Whatever the parts are, their chunks are the array: each is written once, where zarr looks for it."""
    shape = data.draw(full_shapes)
    cuts = data.draw(cuts_of(shape))
    boxes = [Box(tuple(a for a, _ in of), tuple(b for _, b in of)) for of in itertools.product(*map(pairwise, cuts))]
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    told = [{"w": [shape, [[box.start, box.stop]]]} for box in boxes]
    job_cuts = JobChunkGrid.from_json(json.loads(json.dumps(JobChunkGrid.from_rank_parts(told).to_json())))
    assert not job_cuts.first_writers
    chunk = compute_chunk_shape(shape, 4, job_cuts.steps.get("w", (0,) * len(shape)))
    files: dict[str, bytearray] = {}
    for box in boxes:
        index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        memory, source = whole[index].tobytes(), RegionSource(leaf="w", shard_index=0, offset=0, nbytes=box.size * 4)
        for file in plan_chunk_files("w", "w", box, 4, chunk=chunk, source=source):
            assert file.path not in files
            text = files[file.path] = bytearray(file.layout.size)
            for (at, nbytes), of, entry in zip(file.layout.region_ranges, file.sources, file.entries, strict=True):
                assert of.nbytes == nbytes == entry.box.size * 4
                text[at : at + nbytes] = memory[of.offset : of.offset + nbytes]
            glue = file.layout.build_framing((), ())
            assert sum(len(t) for _, t in glue) + file.data_bytes == file.layout.size
    again = np.zeros_like(whole)
    for path, text in files.items():
        cell = [int(n) for n in path.removeprefix("w/").split(".")][: len(shape)]
        part = np.frombuffer(text, np.int32).reshape(chunk)
        index = tuple(slice(c * n, min(c * n + n, size)) for c, n, size in zip(cell, chunk, shape, strict=True))
        again[index] = part[tuple(slice(0, s.stop - s.start) for s in index)]
    assert np.array_equal(again, whole)


def test_parts_without_a_reasonable_grid_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_grid, "MAX_RUNS", 50)
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="fit no grid"):
        list(plan_chunk_files("w", "w", Box((0,), (99,)), 4, chunk=(1,), source=None))


def test_chunks_are_of_a_bounded_size() -> None:
    assert compute_chunk_shape((1 << 20, 1024), 2, (0, 0)) == (1 << 15, 1024)
    assert compute_chunk_shape((1 << 20, 1024), 2, (1 << 18, 0)) == (
        1 << 18,
        1024,
    )  # as the rank has it: one run of bytes
