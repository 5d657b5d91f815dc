"""Tensors that name the regions of a global array that they hold: by CheckpointableTensor's attributes, by hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import xla_ckpt
import xla_ckpt.dcp as dcp
from tests.jobs import run_on_ranks
from tests.xla import DEVICES

WHOLE = torch.arange(48.0).reshape(8, 6)
Chunk = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""(global offset, local offset, size)."""

FORMS: dict[str, tuple[tuple[int, int], list[list[Chunk]]]] = {
    # name -> (shape of the local tensors, the chunks of each rank)
    "even rows": ((4, 6), [[((0, 0), (0, 0), (4, 6))], [((4, 0), (0, 0), (4, 6))]]),
    "other order": ((4, 6), [[((4, 0), (0, 0), (4, 6))], [((0, 0), (0, 0), (4, 6))]]),
    "uneven rows": ((5, 6), [[((0, 0), (0, 0), (3, 6))], [((3, 0), (0, 0), (5, 6))]]),
    "columns": ((8, 4), [[((0, 0), (0, 0), (8, 2))], [((0, 2), (0, 0), (8, 4))]]),
    "padding in front": ((6, 7), [[((0, 0), (2, 1), (4, 6))], [((4, 0), (2, 1), (4, 6))]]),
    "several": (
        (4, 7),
        [
            [((0, 0), (0, 4), (2, 3)), ((2, 3), (2, 0), (2, 3)), ((4, 0), (0, 0), (2, 3)), ((6, 3), (2, 3), (2, 3))],
            [((0, 3), (0, 0), (2, 3)), ((2, 0), (2, 0), (2, 3)), ((4, 3), (0, 4), (2, 3)), ((6, 0), (2, 3), (2, 3)),
             ((8, 0), (0, 3), (0, 3))],  # the last one is empty, and counts for nothing
        ],
    ),
    "replicas": ((8, 6), [[((0, 0), (0, 0), (8, 6))], [((0, 0), (0, 0), (8, 6))]]),
    "nothing on a rank": ((8, 6), [[((0, 0), (0, 0), (8, 6))], []]),
}  # fmt: skip


def held(form: str, rank: int, *, filled: bool = True, device: str = "cpu") -> torch.Tensor:
    """The tensor of a rank; what no chunk covers is -1."""
    shape, chunks = FORMS[form]
    tensor = torch.full(shape, -1.0, device=device)
    if filled:
        for start, local, size in chunks[rank]:
            tensor[box(local, size)] = WHOLE[box(start, size)].to(device)
    return named(tensor, chunks[rank])


def named(tensor: torch.Tensor, chunks: list[Chunk]) -> torch.Tensor:
    said: Any = tensor
    said.global_shape = tuple(WHOLE.shape)
    said.global_offsets = tuple(start for start, _, _ in chunks)
    said.local_offsets = tuple(local for _, local, _ in chunks)
    said.local_sizes = tuple(size for _, _, size in chunks)
    return tensor


def box(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + n) for first, n in zip(start, size, strict=True))


def complete(form: str) -> bool:
    """Whether the chunks of all ranks are the whole array."""
    covered = torch.zeros(8, 6, dtype=torch.bool)
    for chunks in FORMS[form][1]:
        for start, _, size in chunks:
            covered[box(start, size)] = True
    return bool(covered.all())


def goes_through_all_calls(rank: int, root: Path, device: str) -> None:
    for form in FORMS:
        full = held(form, rank, device=device)
        expected = full.detach().cpu().clone()
        xla_ckpt.save(root / form, "t", {"w": full, "s": 1})
        whole = xla_ckpt.restore(root / form, "t", {"w": xla_ckpt.ArraySpec((8, 6), torch.float32)}).tree["w"]
        assert torch.equal(whole, WHOLE), form
        for other in FORMS:
            fresh = held(other, rank, filled=False, device=device)
            found = xla_ckpt.restore(root / form, "t", {"w": fresh}).tree["w"]
            wanted = held(other, rank).masked_fill(held(other, rank) == -1, 0)
            assert torch.equal(found.cpu(), wanted), (form, other)
            assert found.global_offsets == fresh.global_offsets
        dcp.save({"w": full}, checkpoint_id=root / f"{form} dcp")
        dcp.async_save({"w": full}, checkpoint_id=root / f"{form} async").result()
        stock.save(dcp.sharded({"w": full}), checkpoint_id=root / f"{form} stock")
        for name in ("dcp", "async", "stock"):
            into = held(form, rank, filled=False, device=device)
            state = {"w": into}
            dcp.load(state, checkpoint_id=root / f"{form} {name}")
            assert state["w"] is into
            assert torch.equal(into.cpu(), expected), (form, name)
            plain = {"w": torch.zeros(8, 6)}
            stock.load(plain, checkpoint_id=root / f"{form} {name}")
            assert torch.equal(plain["w"], WHOLE), (form, name)


@pytest.mark.parametrize("device", DEVICES)
def test_checkpointable_tensors_are_stored_where_they_say(tmp_path: Path, device: str) -> None:
    assert all(map(complete, FORMS))
    run_on_ranks(goes_through_all_calls, 2, tmp_path, device, xla=device == "xla")


def meets_stock(rank: int, root: Path) -> None:
    """Save and load what torch's own planners describe."""
    for form in FORMS:
        full, expected = held(form, rank), held(form, rank)
        stock.save({"w": full}, checkpoint_id=root / f"{form} stock")
        stock.save({"w": full}, storage_writer=dcp.StorageWriter(root / f"{form} written"))
        dcp.save({"w": full}, checkpoint_id=root / f"{form} ours")
        for name in ("stock", "written", "ours"):
            into = held(form, rank, filled=False)
            stock.load({"w": into}, checkpoint_id=root / f"{form} {name}")
            assert torch.equal(into, expected), (form, name)
            into = held(form, rank, filled=False)
            stock.load({"w": into}, storage_reader=dcp.StorageReader(root / f"{form} {name}"))
            assert torch.equal(into, expected), (form, name)
            into = held(form, rank, filled=False)
            dcp.load({"w": into}, checkpoint_id=root / f"{form} {name}")
            assert torch.equal(into, expected), (form, name)


@pytest.mark.skipif(not hasattr(stock, "CheckpointableTensor"), reason="needs torch 2.15")
def test_torchs_own_planners_agree(tmp_path: Path) -> None:
    run_on_ranks(meets_stock, 2, tmp_path)


class Half(torch.nn.Module):
    """A module of which each rank holds some rows."""

    def __init__(self, rank: int, form: str, *, filled: bool) -> None:
        super().__init__()
        tensor = held(form, rank, filled=filled)
        self.w = torch.nn.Parameter(tensor.detach().clone())
        named(self.w, FORMS[form][1][rank])
        self.b = torch.nn.Parameter(torch.ones(3))


def trains(rank: int, root: Path) -> None:
    """Save a model and its optimizer in some chunks, and load them in others."""
    model = Half(rank, "uneven rows", filled=True)
    optimizer = torch.optim.AdamW(model.parameters())
    (model.w.pow(2).sum() + model.b.sum()).backward()
    optimizer.step()
    xla_ckpt.save_checkpoint(root, "t", model, optimizer)
    whole = xla_ckpt.restore(root, "t", mesh=xla_ckpt.Mesh(dp=2)).tree["optimizer"]["state"]
    assert whole["w"]["exp_avg"].shape == (8, 6)
    assert torch.allclose(whole["w"]["exp_avg"], 0.2 * WHOLE)
    for fresh_state in (True, False):
        other = Half(rank, "several", filled=False)
        again = torch.optim.AdamW(other.parameters())
        if not fresh_state:
            (other.w.pow(2).sum() + other.b.sum()).backward()
            again.step()
        xla_ckpt.load_checkpoint(root, "t", other, again)
        moments = again.state[other.w]["exp_avg"]
        for start, local, size in FORMS["several"][1][rank]:
            assert torch.allclose(moments[box(local, size)], 0.2 * WHOLE[box(start, size)])
        assert again.state[other.w]["step"] == 1
        (other.w.pow(2).sum() + other.b.sum()).backward()
        again.step()
    state = torch.optim.Adafactor(model.parameters())
    model.w.sum().backward()
    state.step()
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="names its chunks has another shape"):
        xla_ckpt.save_checkpoint(root, "u", model, state)


def test_state_of_a_parameter_lies_in_its_chunks(tmp_path: Path) -> None:
    run_on_ranks(trains, 2, tmp_path)


def fails(rank: int, root: Path) -> None:
    """What contradicts itself is refused on all ranks, before anything is written."""
    wrong: dict[str, dict[str, Any]] = {
        "chunks inside of the global shape": {"global_offsets": ((5, 0),)},
        "chunks inside of the shape of the tensor": {"local_offsets": ((1, 0),)},
        "as many global_offsets": {"local_sizes": ()},
        "2 dims in each": {"global_shape": (8,)},
        "no negative number": {"global_offsets": ((-1, 0),)},
        "whole numbers": {"global_offsets": ((0.5, 0),)},
        "do not overlap": dict.fromkeys(("global_offsets", "local_offsets"), ((0, 0), (0, 0)))
        | {"local_sizes": ((4, 6), (4, 6))},
        "are incomplete": {"local_sizes": None},
    }
    for text, values in wrong.items():
        tensor = held("even rows", rank)
        if rank == 1:
            for name, value in values.items():
                setattr(tensor, name, value)
                if value is None:
                    delattr(tensor, name)
        for call in (
            lambda: xla_ckpt.save(root, "t", {"w": tensor}),  # noqa: B023
            lambda: dcp.save({"w": tensor}, checkpoint_id=root / "d"),  # noqa: B023
        ):
            if text == "are incomplete" and call.__code__.co_names[0] == "dcp":
                continue  # torch takes it for a whole tensor
            with pytest.raises(xla_ckpt.CheckpointError, match=text) as caught:
                call()
            assert "w" in str(caught.value)
    tensor = held("even rows", rank)
    tensor.global_shape = (8 + rank, 6)  # type: ignore[attr-defined]
    with pytest.raises(xla_ckpt.CheckpointError, match=r"8, 6|9, 6"):
        xla_ckpt.save(root, "t", {"w": tensor})
    if rank == 0:
        assert not xla_ckpt.list_tags(root)
        assert not xla_ckpt.has_checkpoint(root / "d")
    dist.barrier()
    if not hasattr(stock, "CheckpointableTensor"):  # its planners would take each rank's part for the whole
        with pytest.raises(stock.CheckpointException, match="takes a CheckpointableTensor for a whole tensor"):
            stock.save({"w": held("even rows", rank)}, storage_writer=dcp.StorageWriter(root / "s"))


def test_chunks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    run_on_ranks(fails, 2, tmp_path)


def test_views_of_one_memory_are_not_taken_for_the_same_array(tmp_path: Path) -> None:
    memory = WHOLE.clone()
    a, b = (named(memory.view(8, 6), [((0, 0), (i, 0), (4, 6)), ((4, 0), (4 - i, 0), (i, 6))]) for i in (4, 0))
    for tensor in (a, b):
        tensor.global_shape = (8 if tensor is a else 4, 6)  # type: ignore[attr-defined]
    b.global_offsets, b.local_offsets, b.local_sizes = ((0, 0),), ((0, 0),), ((4, 6),)  # type: ignore[attr-defined]
    xla_ckpt.save(tmp_path, "t", {"a": a, "b": b})
    found = xla_ckpt.restore(tmp_path, "t").tree
    assert torch.equal(found["a"], torch.cat([WHOLE[4:], WHOLE[:4]]))
    assert torch.equal(found["b"], WHOLE[:4])


# -- DTensors whose local tensors have hooks


def hooked(rank: int, form: str, *, filled: bool = True, both: bool = True) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    (start, _, size), *_ = FORMS[form][1][rank]
    local: Any = WHOLE[box(start, size)].clone() if filled else torch.zeros(size)
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=WHOLE.shape, stride=(6, 1))
    chunk = ChunkStorageMetadata(offsets=torch.Size(start), sizes=torch.Size(size))

    def write_items(fqn: str, value: Any) -> list[WriteItem]:
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=local.dtype), size=value.size())
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    held: Any = tensor._local_tensor
    held.__create_chunk_list__ = lambda: [chunk]
    if both:
        held.__create_write_items__ = write_items
    return tensor


def follows_hooks(rank: int, root: Path) -> None:
    for form in ("even rows", "other order", "uneven rows", "columns"):
        for both in (True, False):
            folder, tensor = root / f"{form} {both}", hooked(rank, form, both=both)
            xla_ckpt.save(folder, "t", {"w": tensor})
            assert torch.equal(xla_ckpt.restore(folder, "t").tree["w"], WHOLE), form
            found = xla_ckpt.restore(folder, "t", {"w": hooked(rank, "other order", filled=False)}).tree["w"]
            assert torch.equal(found._local_tensor, hooked(rank, "other order")._local_tensor)
            xla_ckpt.save(folder, "again", {"w": found})
            assert torch.equal(xla_ckpt.restore(folder, "again").tree["w"], WHOLE), form
            dcp.save({"w": tensor}, checkpoint_id=folder / "dcp")
            plain = {"w": torch.zeros(8, 6)}
            stock.load(plain, checkpoint_id=folder / "dcp")
            assert torch.equal(plain["w"], WHOLE), (form, both)
            into = {"w": hooked(rank, form, filled=False, both=both)}
            dcp.load(into, checkpoint_id=folder / "dcp")
            assert torch.equal(into["w"]._local_tensor, tensor._local_tensor)
    wrong = hooked(rank, "uneven rows")
    if rank == 1:
        wrong._local_tensor.__create_chunk_list__ = list
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="the hooks of a DTensor do not name one chunk"):
        xla_ckpt.save(root, "t", {"w": wrong})
    bare = hooked(rank, "uneven rows")
    for name in ("__create_chunk_list__", "__create_write_items__"):
        delattr(bare._local_tensor, name)
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="__create_chunk_list__"):
        xla_ckpt.save(root, "t", {"w": bare})


def trains_hooked(rank: int, root: Path) -> None:
    """State of a parameter with hooks lies as it does, whether it has hooks itself or not."""
    models = []
    for filled in (True, False):
        model = torch.nn.Module()
        tensor = hooked(rank, "other order", filled=filled)
        model.w = torch.nn.Parameter(tensor)
        for name in ("__create_chunk_list__", "__create_write_items__"):
            setattr(model.w._local_tensor, name, getattr(tensor._local_tensor, name))
        models.append((model, torch.optim.AdamW(model.parameters())))
    (model, optimizer), (fresh, again) = models
    model.w.grad = torch.zeros_like(model.w)
    model.w.grad._local_tensor.copy_(model.w._local_tensor.detach())
    optimizer.step()
    xla_ckpt.save_checkpoint(root, "t", model, optimizer)
    state = xla_ckpt.restore(root, "t").tree["optimizer"]["state"]["w"]
    assert torch.allclose(state["exp_avg"], 0.1 * WHOLE)
    xla_ckpt.load_checkpoint(root, "t", fresh, again)
    expected, found = optimizer.state[model.w]["exp_avg"], again.state[fresh.w]["exp_avg"]
    assert torch.equal(found._local_tensor, expected._local_tensor)


def test_hooks_of_a_dtensor_are_followed(tmp_path: Path) -> None:
    run_on_ranks(follows_hooks, 2, tmp_path / "a")
    run_on_ranks(trains_hooked, 2, tmp_path / "b")
