"""Real processes, real tensors: what four ranks save in one way, any number of ranks resume in another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import xla_ckpt
from tests.jobs import job, torchrun
from tests.runs import run
from tests.topology.state import WHOLE, known, whole

FLOAT = ("tp=4", "tp=2,dp=2 zero1", "dp=4 zero1", "pp=2,tp=2", "pp=2,dp=2 zero1", "fsdp2", "hsdp", "tp_fsdp")
HALF = ("tp=2,dp=2 zero1 bf16", "pp=2,dp=2 zero1 bf16")

SAVE = """
import json, os
os.environ["PJRT_DEVICE"] = "CPU"
import neuron_compat
from tests.topology.kinds import build
neuron_compat.emulate()
root, kinds = sys.argv[1], json.loads(sys.argv[2])
for n, kind in enumerate(kinds):
    held = build(kind, blank=False)
    handle = xla_ckpt.save_checkpoint(root, str(n), held.model, held.optimizer, user_content=kind, timeout=60,
                                      async_save=n % 2 == 0, extras={"rng": xla_ckpt.RNGState()}, **held.options)
    say(n, handle.result().nbytes)
"""

LOAD = """
import json, os
os.environ["PJRT_DEVICE"] = "CPU"
import neuron_compat
from tests.topology.kinds import build
neuron_compat.emulate()
root, tags, kinds, mode = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
for tag in tags:
    for kind in kinds:
        held = build(kind, blank=True)
        report = xla_ckpt.LoadReport()
        content = xla_ckpt.load_checkpoint(root, tag, held.model, held.optimizer, timeout=60, report=report,
                                           replica_read=mode, **held.options).user_content
        bad = held.differences()
        if bad or float(held.model.seen) != 5.0:
            sys.exit(f"rank {rank}: tag {tag} ({content}) as {kind}: {bad}, buffer {held.model.seen}")
        say(content, "as", kind)
dist.barrier()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by four ranks: one tag for each of the kinds."""
    folder = tmp_path_factory.mktemp("jobs")
    said = job(SAVE, 4, folder, folder / "ckpt", json.dumps(FLOAT + HALF))
    assert len(said) == 4 * len(FLOAT + HALF)
    return folder / "ckpt"


def tags_of(kinds: tuple[str, ...]) -> str:
    return json.dumps([str((FLOAT + HALF).index(k)) for k in kinds])


@pytest.mark.parametrize(("mode", "sources"), [("each", FLOAT), ("share", FLOAT[1::3])])
def test_four_ranks_resume_as_four_others(root: Path, tmp_path: Path, mode: str, sources: tuple[str, ...]) -> None:
    kinds = (*FLOAT, "dp=2,cp=2 cpu") if mode == "each" else ("tp=4", "dp=4", "fsdp2")
    said = job(LOAD, 4, tmp_path, root, tags_of(sources), json.dumps(kinds), mode)
    assert len(said) == 4 * len(sources) * len(kinds)


def test_master_weights_go_along(root: Path, tmp_path: Path) -> None:
    kinds = (*HALF, "tp=4 zero1 bf16", "dp=4 zero1 bf16", "dp=4 bf16")
    said = job(LOAD, 4, tmp_path, root, tags_of(HALF), json.dumps(kinds), "each")
    assert len(said) == 4 * len(HALF) * len(kinds)


def test_three_ranks_resume_what_four_saved(root: Path, tmp_path: Path) -> None:
    kinds = ("dp=3 zero1", "tp=3", "dp=3", "fsdp2")
    said = job(LOAD, 3, tmp_path, root, tags_of(FLOAT), json.dumps(kinds), "each", launch=torchrun)
    assert len(said) == 3 * len(FLOAT) * len(kinds)


def test_a_plain_process_resumes_what_four_ranks_saved(root: Path) -> None:
    run(
        """
        import sys, json
        import xla_ckpt
        from tests.topology.kinds import build
        for tag in json.loads(sys.argv[2]):
            held = build("dp=1 cpu", blank=True)
            xla_ckpt.load_checkpoint(sys.argv[1], tag, held.model, held.optimizer)
            assert held.differences() == [], (tag, held.differences())
        assert "torch_xla" not in sys.modules
        """,
        root, tags_of(FLOAT),
    )  # fmt: skip


def test_what_is_stored_is_stored_once(root: Path) -> None:
    for n, kind in enumerate(FLOAT):
        report = xla_ckpt.verify(root, str(n))
        assert report.ok, kind
        steps, rng_and_buffer = 4 * len(WHOLE), 4
        arrays = sum(4 * whole(name).numel() * 3 for name in WHOLE) + steps + rng_and_buffer
        tree = xla_ckpt.restore(root, str(n)).tree
        assert sorted(tree["extras"]["rng"]["ranks"]) == ["0", "1", "2", "3"]
        rng = sum(t["torch"].numel() for t in tree["extras"]["rng"]["ranks"].values())
        rng += sum(t["numpy"][1].nbytes for t in tree["extras"]["rng"]["ranks"].values())
        assert report.nbytes == arrays + rng, kind
        for name in WHOLE:
            assert tree["model"][name].equal(whole(name))
            assert tree["optimizer"]["state"][name]["exp_avg"].equal(known(name, "exp_avg"))


def test_spmd_devices_resume_what_four_ranks_saved_and_a_plain_process_what_they_save(
    root: Path, tmp_path: Path
) -> None:
    run(
        """
        import sys, json, numpy as np, torch, torch_xla, torch_xla.runtime as xr, torch_xla.distributed.spmd as xs
        xr.use_spmd()
        import xla_ckpt
        from tests.topology.kinds import build
        from tests.topology.state import WHOLE
        mesh = xs.Mesh(np.arange(8), (4, 2), ("a", "b"))
        def spread(held):
            for i, (name, p) in enumerate(held.model.named_parameters()):
                if p.dim() == 2:
                    xs.mark_sharding(p, mesh, (("a", None), ("a", "b"), (None, "b"), (("a", "b"), None))[i % 4])
                elif p.dim() == 1 and i % 2:
                    xs.mark_sharding(p, mesh, ("b",))
            return held
        held = None
        for tag in json.loads(sys.argv[2]):
            held = spread(build("dp=1", blank=True))
            xla_ckpt.load_checkpoint(sys.argv[1], tag, held.model, held.optimizer)
            assert held.differences() == [], (tag, held.differences())
            specs = [torch_xla._XLAC._get_xla_sharding_spec(p) for p in held.model.parameters()]
            assert sum(bool(s) for s in specs) >= 6, specs
            # new optimizer state lies as its parameter does
            for p in held.model.parameters():
                mine = torch_xla._XLAC._get_xla_sharding_spec(held.optimizer.state[p]["exp_avg"])
                assert mine == torch_xla._XLAC._get_xla_sharding_spec(p), (mine, p.shape)
        handle = xla_ckpt.save_checkpoint(sys.argv[3], "spmd", held.model, held.optimizer, async_save=True)
        print(handle.result().files)
        tree = xla_ckpt.restore(sys.argv[3], "spmd", {"model": dict(held.model.named_parameters())}).tree
        for name, p in held.model.named_parameters():
            again = tree["model"][name]
            assert torch.equal(again.cpu(), p.cpu())
            assert torch_xla._XLAC._get_xla_sharding_spec(again) == torch_xla._XLAC._get_xla_sharding_spec(p)
        """,
        root, tags_of(FLOAT[:3]), tmp_path, env={"CPU_NUM_DEVICES": "8"},
    )  # fmt: skip
    tree = xla_ckpt.restore(tmp_path, "spmd").tree
    for name in WHOLE:
        assert tree["model"][name].equal(whole(name))
        assert tree["optimizer"]["state"][name]["exp_avg_sq"].equal(known(name, "exp_avg_sq"))
    files = [path.name for path in (tmp_path / "spmd" / "model").iterdir()]
    assert len(files) >= 6  # one for each device that holds a first copy of anything
    assert all(name.endswith("-of-00008.safetensors") for name in files)


IMPORTS = """
mesh, rules = xla_ckpt.Mesh(tp=2), [("w", ("tp",))]
xla_ckpt.save(sys.argv[1], "a", {"w": torch.full((3,), float(rank))}, mesh=mesh, shardings=rules)
say(*(name for name in ("orbax", "jax", "torch_xla") if name in sys.modules))
"""


def test_only_the_first_rank_needs_orbax_for_a_save(tmp_path: Path) -> None:
    assert job(IMPORTS, 2, tmp_path, tmp_path / "a", launch=torchrun) == ["orbax jax", ""]
