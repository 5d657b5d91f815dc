"""A real job of TP 2 x DP 2 with ZeRO-1 writes neuronx-distributed's files; ranks that die leave nothing behind."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch_xla.utils import serialization

import neuron_compat.nxd as nxd
import xla_ckpt
from tests.formats.references import opened, whole
from tests.formats.writing import names, unlike
from tests.jobs import finish, run_on_ranks, start_on_ranks
from tests.neuron.training import begin, build, frozen, train
from tests.runs import names_in
from xla_ckpt.distributed import torch_store as lines
from xla_ckpt.storage.local import LocalDirectory

pytestmark = pytest.mark.xla


def writes(rank: int, root: Path) -> tuple[int, int]:
    """Save in their layouts, and keep beside them what this rank held; how many files and bytes it wrote."""
    begin()
    model, optimizer, scheduler = build(0)
    for step in range(2):
        train(model, optimizer, scheduler, step)
    content = {"step": 2, "seen": torch.arange(3.0)}
    mine = frozen(model, optimizer)
    packed = copy.deepcopy({k: v for k, v in optimizer.state_dict().items() if k in ("param_groups", "shape_info")})
    handle = xla_ckpt.save_checkpoint(
        root, "xser", model, optimizer, scheduler, content, use_xser=True, async_save=True
    )
    train(model, optimizer, scheduler, 2)  # N6
    content["step"] = -1
    report = handle.result()
    torch.save({"tensors": mine, **packed}, root.parent / f"mine.{rank}")
    nxd.save_checkpoint(root, "pt", model, optimizer, scheduler, content)

    # What no rank file has a place for is refused on all ranks before anything is written.
    spread = DTensor.from_local(torch.full((2,), float(rank)), init_device_mesh("cpu", (4,)), [Shard(0)])
    for layout in ("xser", "pt"):
        with pytest.raises(xla_ckpt.UnsupportedStateError, match="DTensor") as caught:
            xla_ckpt.save_checkpoint(root, "refused", {"w": spread}, layout=layout)
        assert caught.value.leaf == "model/w"
        assert [n for n in os.listdir(root) if n.startswith("refused")] == []
    dist.barrier()
    xla_ckpt.save_checkpoint(root, "native", {"w": spread}, layout=("xser", "native"))
    return report.files, report.nbytes


def as_torch_xla_reads(root: Path, rank: int) -> None:
    """Their own loader finds what a rank held."""
    mine = torch.load(root.parent / f"mine.{rank}", weights_only=True)
    dp, tp = divmod(rank, 2)
    model = serialization.load(f"{root}/xser/model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt")
    optim = serialization.load(f"{root}/xser/optim/dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_00.pt")
    found = {f"model.{n}": v for n, v in model.items()}
    found |= {f"state.{i}.{k}": v for i, state in optim["base_state"].items() for k, v in state.items()}
    tensors = {n: v for n, v in mine["tensors"].items() if isinstance(v, torch.Tensor)}
    assert list(found) == list(tensors)
    assert all(found[n].dtype == v.dtype and torch.equal(found[n], v) for n, v in tensors.items())
    assert optim["state"] == {}
    assert optim["shape_info"] == {i: list(s) for i, s in mine["shape_info"].items()}
    for a, b in zip(optim["param_groups"], mine["param_groups"], strict=True):
        assert {**a, "betas": tuple(a["betas"])} == b


def test_a_job_with_zero1_writes_their_files(tmp_path: Path) -> None:
    root = tmp_path / "run"
    wrote = run_on_ranks(writes, 4, root, xla=True)
    folder = root / "xser"
    # All files are there: 8 tensors of the model for each tp rank, 21 of the optimizer for each tp and dp rank.
    ranks = {part: {f"{part}/dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_00.pt"
                    for dp in range(n) for tp in range(2)} for part, n in (("model", 1), ("optim", 2))}  # fmt: skip
    count = {"model": 8, "optim": 21}
    expected = {f"{f}{end}" for files in ranks.values() for f in files for end in ("", ".info.pt")}
    expected |= {
        f"{f}.tensors/tensor_{i}.pt" for part, files in ranks.items() for f in files for i in range(count[part])
    }
    own = {"manifest.json", "_CHECKPOINT_METADATA", "commit_success.txt"}
    alone = {"checkpoint", "done", "scheduler.pt", "user_content.pt"}
    assert names(folder) == expected | own | alone
    # Both dp ranks wrote tensors of the model, which they have in common, beside their own optimizer's files.
    assert sum(n for n, _ in wrote) == len(expected) + 2
    assert wrote[0][0] - wrote[1][0] == 2  # rank 0 has scheduler and user content, too
    own_files = 2 + count["optim"]
    for tp in range(2):
        first, second = wrote[tp][0] - (2 if tp == 0 else 0), wrote[2 + tp][0]
        assert first + second == 2 * own_files + 2 + count["model"]
        assert own_files < second < own_files + count["model"]  # some of the tensors, and neither index nor info
    model_bytes = [nbytes - (12 if rank == 0 else 0) for rank, (_, nbytes) in enumerate(wrote)]
    assert max(model_bytes) < 1.2 * min(model_bytes)
    assert sum(n for _, n in wrote) == xla_ckpt.verify(root, "xser").nbytes
    for rank in range(4):
        as_torch_xla_reads(root, rank)
    assert (
        unlike(torch.load(folder / "user_content.pt", weights_only=True), {"step": 2, "seen": torch.arange(3.0)}) == []
    )
    assert opened(folder / "scheduler.pt")["last_epoch"] == 2
    assert names(root / "pt") == {f for files in ranks.values() for f in files} | own | alone
    pt, xser = (whole(root / tag / min(ranks["optim"])) for tag in ("pt", "xser"))
    assert pt["base_state"][0]["step"] == xser["base_state"][0]["step"] + 1
    for tag in ("xser", "pt", "native"):
        assert xla_ckpt.verify(root, tag).problems == []
    assert "done" not in names(root / "native")
    assert xla_ckpt.restore(root, "native").tree["model"]["w"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


KILLED_AT = [(1, "tensor_3.pt"), (1, "_pp_rank_00.pt"), (0, "tensor_8.pt"), (0, "manifest.json"), (0, "done")]
Ended = list[tuple[int, str, str]]


def dies_when_it_creates(rank: int, root: Path, victim: int, file: str) -> None:
    lines.STORE_TIMEOUT_SECONDS = 3
    model = {f"w{i}": torch.full((64, 64), float(i)) for i in range(9)}
    options: dict[str, Any] = {"mesh": xla_ckpt.Mesh(tp=2), "shardings": [("w", ("tp", None))], "use_xser": True}
    xla_ckpt.save_checkpoint(root, "good", model, scheduler={"at": 1}, **options)
    create = LocalDirectory.create

    def dying(self: LocalDirectory, path: str, size: int) -> Any:
        if rank == victim and path.endswith(file):
            os.kill(os.getpid(), signal.SIGKILL)
        return create(self, path, size)

    LocalDirectory.create = dying  # type: ignore[method-assign]
    with pytest.raises(xla_ckpt.RankFailedError):
        xla_ckpt.save_checkpoint(
            root, "bad", model, scheduler={"at": 1}, options=xla_ckpt.SaveOptions(timeout=4), async_save=True, **options
        ).result()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], tuple[Path, Ended]]:
    """One job for each instant, all at the same time: they mostly wait."""
    roots = {at: tmp_path_factory.mktemp("killed") / "run" for at in KILLED_AT}
    jobs = {at: start_on_ranks(dies_when_it_creates, 2, roots[at], *at, xla=True) for at in KILLED_AT}
    return {at: (roots[at], finish(ranks)) for at, ranks in jobs.items()}


@pytest.mark.crash
@pytest.mark.parametrize(("victim", "file"), KILLED_AT)
def test_a_rank_that_is_killed_leaves_no_tag(
    victim: int, file: str, killed: dict[tuple[int, str], tuple[Path, Ended]]
) -> None:
    root, ended = killed[victim, file]
    assert ended[victim][0] == -signal.SIGKILL, ended[victim][2][-3000:]
    assert ended[1 - victim][0] == 0, ended[1 - victim][2][-3000:]
    assert xla_ckpt.list_tags(root) == ["good"]
    assert not (root / "bad").exists()
    assert {p.relative_to(root) for p in root.rglob("done")} == {Path("good/done")}
    assert xla_ckpt.verify(root, "good").ok
    xla_ckpt.save_checkpoint(root, "bad", {"w": torch.ones(2)}, use_xser=True)
    xla_ckpt.finalize_checkpoint()
    assert names_in(root) == ["bad", "good"]
    assert len([n for n in names(root / "bad") if ".tensors/" in n]) == 1
