"""What ranks may and may not do: rules, experts, members per rank, replicas that differ, I/O that is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

import xla_ckpt
from tests.jobs import job
from xla_ckpt import Mesh
from xla_ckpt.sharding.sharding import Sharding, Split, axes_of

RULES = """
root = sys.argv[1]
M = xla_ckpt.Mesh
full = torch.arange(48.0).reshape(8, 6)
column = full.chunk(4, 0)[rank].clone()
save, restore = xla_ckpt.save, xla_ckpt.restore

# tensor-parallel column -> row, by rules alone, with the functional calls
save(root, "column", {"up": {"w": column}, "n": torch.ones(3)}, mesh=M(tp=4), shardings=[(r"up\\.?/w$", ("tp", None))])
row = restore(root, "column", {"up": {"w": torch.empty(8, 3)}}, mesh=M(dp=2, tp=2), shardings=[("w", (None, "tp"))]).tree
assert torch.equal(row["up"]["w"], full.chunk(2, 1)[rank % 2]), row
spec = xla_ckpt.ArraySpec((8, 6), torch.float32, (("dp", "tp"), None))
part = restore(root, "column", {"up": {"w": spec}}, mesh=M(dp=2, tp=2)).tree["up"]["w"]
assert torch.equal(part, full.chunk(4, 0)[rank])
uneven = restore(root, "column", {"up": {"w": xla_ckpt.ArraySpec((8, 6), "float32", (None, "tp"))}}, mesh=M(tp=4)).tree
assert torch.equal(uneven["up"]["w"], full.split(2, 1)[rank] if rank < 3 else torch.empty(8, 0))
assert torch.equal(restore(root, "column").tree["up"]["w"], full)

# experts: dim 0 over ep inside dp, tensor parallel along another dim
mesh = M(dp=2, ep=2, tp=2)
at = mesh.coordinates(rank)
experts = torch.arange(4 * 3 * 4.0).reshape(4, 3, 4)
model = torch.nn.Module()
model.w = torch.nn.Parameter(experts.chunk(2, 0)[at["ep"]].chunk(2, 2)[at["tp"]].contiguous())
model.w.expert_model_parallel = True
model.w.tensor_model_parallel, model.w.partition_dim, model.w.partition_stride = True, 2, 1
xla_ckpt.save_checkpoint(root, "experts", model, mesh=mesh)
assert torch.equal(restore(root, "experts").tree["model"]["w"], experts)

# Adafactor's row statistics follow the dim that they keep
factored = torch.nn.Module()
factored.w = torch.nn.Parameter(column.clone())
factored.w.tensor_model_parallel, factored.w.partition_dim, factored.w.partition_stride = True, 0, 1
optimizer = torch.optim.Adafactor(factored.parameters())
state = {"step": torch.tensor(1.0), "row_var": full[:, :1].chunk(4, 0)[rank].clone(), "col_var": full[:1].clone()}
optimizer.state[factored.w] = state
xla_ckpt.save_checkpoint(root, "factored", factored, optimizer, mesh=M(tp=4))
stored = restore(root, "factored").tree["optimizer"]["state"]["w"]
assert torch.equal(stored["row_var"], full[:, :1]) and torch.equal(stored["col_var"], full[:1])

# the mesh of an initialised parallel state is found, and one that does not fit is refused
import types
name = "neuronx_distributed.parallel_layers.parallel_state"
sys.modules[name] = state = types.ModuleType(name)
state.model_parallel_is_initialized = lambda: True
state.get_tensor_model_parallel_size = lambda: 4
state.get_pipeline_model_parallel_size = lambda: 1
state.get_tensor_model_parallel_rank = lambda: rank
state.get_pipeline_model_parallel_rank = lambda: 0
named = torch.nn.Module()
named.w = torch.nn.Parameter(column.clone())
named.w.tensor_model_parallel, named.w.partition_dim, named.w.partition_stride = True, 0, 1
xla_ckpt.save_checkpoint(root, "found", named)
assert torch.equal(restore(root, "found").tree["model"]["w"], full)
state.get_tensor_model_parallel_rank = lambda: (rank + 1) % 4
calls = (lambda: xla_ckpt.save_checkpoint(root, "x", named), lambda: xla_ckpt.load_checkpoint(root, "found", named).user_content)
for call in calls:
    try:
        call()
    except xla_ckpt.UsageError as error:
        say("order:", error)
del sys.modules[name]
for mesh in (M(tp=8), M(dp=3)):
    try:
        xla_ckpt.save_checkpoint(root, "x", named, mesh=mesh)
    except xla_ckpt.UsageError as error:
        say("mesh:", error)
for rules in ([("w",)], [("w", ("zz",))], [("(", None)], [("w", (None, None, "tp"))], [("w", "tp")]):
    try:
        xla_ckpt.save(root, "x", {"w": column}, mesh=M(tp=4), shardings=rules)
    except xla_ckpt.UsageError as error:
        say("rule:", error.problem)
assert xla_ckpt.list_tags(root) == ["column", "experts", "factored", "found"]
say("done")
"""


def test_rules_experts_and_meshes(tmp_path: Path) -> None:
    said = job(RULES, 4, tmp_path, tmp_path / "ckpt")
    assert said.count("done") == 4
    assert len([s for s in said if s.startswith("order:") and "another order" in s]) == 8
    assert len([s for s in said if s.startswith("mesh:") and "does not fit the job" in s]) == 8
    assert len({s for s in said if s.startswith("rule:")}) == 5
    assert len([s for s in said if s.startswith("rule:")]) == 20


DIVERGENT = """
import logging
told = os.environ["SAY"] + f".{rank}"
logging.basicConfig(filename=told, format="%(levelname)s %(message)s", level=logging.WARNING, force=True)
root = sys.argv[1]

def model(weight=0.0, buffer=0.0):
    made = torch.nn.Linear(64, 64)
    with torch.no_grad():
        made.weight.fill_(weight)
        made.bias.fill_(1.0)
    made.register_buffer("mean", torch.full((40000,), buffer))
    return made

class Loader:
    def __init__(self, at): self.at = at
    def state_dict(self): return {"at": self.at, "seen": torch.full((3,), float(self.at))}
    def load_state_dict(self, state): self.at = state["at"]; assert state["seen"][0] == self.at

def refused(word, **state):
    try:
        xla_ckpt.save_checkpoint(root, "bad", timeout=60, **state)
    except xla_ckpt.DivergentReplicasError as error:
        say(word, str(error).replace(chr(10), " "))

refused("weight:", model=model(weight=float(rank == 2)))
refused("plain:", model=model(), extras={"data": Loader(rank)})
optimizer = torch.optim.SGD(model().parameters(), lr=0.1 * (1 + (rank == 1)))
refused("lr:", optimizer=optimizer)
assert xla_ckpt.list_tags(root) == []
handle = xla_ckpt.save_checkpoint(root, "async", model=model(weight=float(rank > 1)), async_save=True, timeout=60)
try:
    handle.result()
except xla_ckpt.DivergentReplicasError as error:
    say("async:", error.leaf, error.expected, error.found)

# a buffer that differs is one rank's, whole, and a member that differs is every rank's own
xla_ckpt.save_checkpoint(root, "good", model=model(buffer=float(rank)), timeout=60,
                         extras={"data": xla_ckpt.PerRank(Loader(10 + rank)), "rng": xla_ckpt.RNGState()})
kept = xla_ckpt.restore(root, "good").tree["model"]["mean"]
assert (kept == 0).all(), kept
loader = Loader(0)
torch.manual_seed(rank)
xla_ckpt.save_checkpoint(root, "rng", timeout=60, extras={"rng": xla_ckpt.RNGState()})
want = torch.rand(3)
torch.manual_seed(99)
xla_ckpt.load_checkpoint(root, "rng", extras={"rng": xla_ckpt.RNGState()})
assert torch.equal(torch.rand(3), want)
xla_ckpt.load_checkpoint(root, "good", extras={"data": xla_ckpt.PerRank(loader)})
assert loader.at == 10 + rank
try:
    xla_ckpt.load_checkpoint(root, "good", extras={"data": loader})
except xla_ckpt.IncompatibleCheckpointError as error:
    say("unwrapped:", error.details)
# what only rank 0 has
xla_ckpt.save_checkpoint(root, "content", user_content={"rank": rank, "t": torch.full((5,), float(rank))} , timeout=60)
content = xla_ckpt.load_checkpoint(root, "content").user_content
assert content["rank"] == 0 and (content["t"] == 0).all()
say("done")
"""


def test_replicas_that_differ_are_caught(tmp_path: Path) -> None:
    said = job(DIVERGENT, 4, tmp_path, tmp_path / "ckpt")
    assert said.count("done") == 4
    weight = {s for s in said if s.startswith("weight:")}
    assert len(weight) == 1  # the same words on all ranks
    (text,) = weight
    for fact in ("model/weight", "rank 0", "rank 2", "tensor parallelism", "shardings="):
        assert fact in text
    assert "rank 1" not in text
    assert [s for s in said if s.startswith("async:")] == [
        "async: model/weight the bytes of rank 0 others on ranks 2, 3"
    ] * 4
    assert len([s for s in said if s.startswith("plain:") and "PerRank" in s and "extras/data" in s]) == 4
    assert len([s for s in said if s.startswith("lr:") and "leaf optimizer" in s]) == 4
    assert len([s for s in said if s.startswith("unwrapped:") and "xla_ckpt.PerRank" in s]) == 4
    warned = [s for s in said if s.startswith("WARNING") and "buffer model/mean" in s]
    assert len(warned) == 1
    assert "ranks 1, 2, 3" in warned[0]
    # another number of ranks: random generators that nobody saved stay, other members need to be told how
    root = tmp_path / "ckpt"

    class Loader:
        at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    loader = Loader()
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="the state of 4 ranks, this job has 1"):
        xla_ckpt.load_checkpoint(root, "good", extras={"data": xla_ckpt.PerRank(loader)})
    wrapped = xla_ckpt.PerRank(loader, reshard=lambda states, rank, world: {"at": sum(s["at"] for s in states)})
    xla_ckpt.load_checkpoint(root, "good", extras={"data": wrapped, "rng": xla_ckpt.RNGState()})
    assert loader.at == 10 + 11 + 12 + 13


OUT_OF_STEP = """
root = sys.argv[1]
save = lambda tag, timeout=4: xla_ckpt.save(root, tag, {"w": torch.ones(3)}, timeout=timeout)
save("a", timeout=60)  # the first one loads orbax
if rank == 0:
    try:
        save("left out by rank 1".replace(" ", "_"))
    except xla_ckpt.RankFailedError as error:
        say(error.rank, "did not answer within 3.2 s" in str(error))
dist.barrier()
try:
    save("b")
except xla_ckpt.CheckpointError as error:
    say(type(error).__name__, "left_out_by_rank_1" in str(error), "out of step: restart it" in str(error))
"""


def test_a_rank_that_leaves_a_call_out_is_told_so(tmp_path: Path) -> None:
    said = job(OUT_OF_STEP, 2, tmp_path, tmp_path / "ckpt")
    assert said == ["1 True", "RankFailedError False False", "UsageError True True"]
    assert xla_ckpt.list_tags(tmp_path / "ckpt") == ["a"]


RUSH = """
import time
root, gate = sys.argv[1:3]
while rank == 1 and not os.path.exists(gate):
    time.sleep(0.01)
for i in range(12):
    try:
        xla_ckpt.save(root, "no/tag" if rank == 0 else f"tag_{i}", {"w": torch.ones(3)}, timeout=30)
    except xla_ckpt.CheckpointError as error:
        say(type(error).__name__, error.rank)
if rank == 0:
    open(gate, "w").close()
"""


def test_a_rank_hears_of_calls_that_rank_0_left_long_ago(tmp_path: Path) -> None:
    """Rank 0 fails, and fails again, and ends, before the other has begun with the first call."""
    said = job(RUSH, 2, tmp_path, tmp_path / "ckpt", tmp_path / "gate")
    assert said == ["InvalidTagError 0"] * 24


COUNTED = """
root = sys.argv[1]
import ctypes
def counters():
    return {k: int(v) for k, v in (l.split(": ") for l in open("/proc/self/io").read().splitlines())}
mesh = xla_ckpt.Mesh(dp=2, tp=2)
at = mesh.coordinates(rank)
g = torch.Generator().manual_seed(1)
tree, rules = {}, [("up", ("tp", None)), ("down", (None, "tp"))]
for i in range(6):
    tree[f"up{i}"] = torch.randn(2048, 512, generator=g).chunk(2, 0)[at["tp"]].contiguous()
    tree[f"down{i}"] = torch.randn(512, 2048, generator=g).chunk(2, 1)[at["tp"]].contiguous()
    tree[f"norm{i}"] = torch.randn(512, generator=g)
xla_ckpt.save(root, "warm", {"x": torch.ones(3)})  # imports are read from the disk, too
before = counters()
report = xla_ckpt.save(root, "a", {"model": tree}, mesh=mesh, shardings=rules).result()
after = counters()
say("wrote", report.nbytes, after["write_bytes"] - before["write_bytes"])
for target, cut in ((xla_ckpt.Mesh(tp=4), 4), (xla_ckpt.Mesh(dp=4), 1)):
    n = target.coordinates(rank)["tp"]
    like = {k: torch.empty(2048 // cut, 512) if "up" in k else torch.empty(512, 2048 // cut) if "down" in k
            else torch.empty(512) for k in tree}
    like = {k: v for k, v in like.items() if "down" not in k or cut == 1}
    report = xla_ckpt.LoadReport()
    before = counters()
    xla_ckpt.restore(root, "a", {"model": like}, mesh=target, shardings=rules, report=report)
    after = counters()
    say("read", cut, report.needed_bytes, report.read_bytes, after["rchar"] - before["rchar"])
like = {k: torch.zeros(2048, 512) if "up" in k else torch.zeros(512, 2048) if "down" in k else torch.zeros(512)
        for k in tree}
report = xla_ckpt.LoadReport()
xla_ckpt.load_checkpoint(root, "a", like, mesh=xla_ckpt.Mesh(dp=4), replica_read="share", report=report)
say("shared", report.needed_bytes, report.read_bytes)
assert all(torch.equal(like[k].chunk(2, 0 if "up" in k else 1)[at["tp"]] if "norm" not in k else like[k], tree[k])
           for k in tree)
# columns of what was stored whole: alone every rank would read all of it, together they read it once
whole = {k: v for k, v in like.items() if "down" in k}
xla_ckpt.save(root, "whole", whole)
columns = {k: torch.zeros(512, 512) for k in whole}
four, each, share = xla_ckpt.Mesh(tp=4), xla_ckpt.LoadReport(), xla_ckpt.LoadReport()
alone = xla_ckpt.restore(root, "whole", columns, mesh=four, shardings=rules, report=each).tree
together = xla_ckpt.restore(
    root, "whole", columns, mesh=four, shardings=rules, report=share, replica_read="share"
).tree
for k in whole:
    assert torch.equal(together[k], whole[k].chunk(4, 1)[rank]) and torch.equal(alone[k], together[k])
say("columns", share.needed_bytes, share.read_bytes, each.read_bytes)
"""


def test_bytes_are_shared_out_and_counted_by_the_system(tmp_path: Path) -> None:
    said = [s.split() for s in job(COUNTED, 4, tmp_path, tmp_path / "ckpt")]
    wrote = [(int(ours), int(system)) for word, ours, system in (s for s in said if s[0] == "wrote")]
    total = sum(ours for ours, _ in wrote)
    assert total == 6 * (2 * 2048 * 512 + 512) * 4
    assert max(ours for ours, _ in wrote) <= 1.05 * total / 4
    for ours, system in wrote:
        if system:  # zero where the file system does not count (overlay on tmpfs)
            assert ours <= system <= 1.05 * ours + 256 * 1024
    reads = [list(map(int, s[1:])) for s in said if s[0] == "read"]
    assert len(reads) == 8
    shared = [list(map(int, s[1:])) for s in said if s[0] == "shared"]
    assert [needed for needed, _ in shared] == [total] * 4
    columns = [list(map(int, s[1:])) for s in said if s[0] == "columns"]
    assert len(columns) == 4
    for needed, share, each in columns:
        assert each == 4 * needed
        assert share <= 1.05 * needed
    # The storage is read once, for all four (twice here: live memory is overwritten only after it is verified).
    assert total * 2 <= sum(read for _, read in shared) <= 1.05 * total * 2
    assert max(read for _, read in shared) <= 1.2 * total * 2 / 4
    for _, needed, planned, system in reads:
        assert needed <= planned <= 1.05 * needed
        assert planned <= system <= 1.05 * planned + 512 * 1024  # headers and the manifest


def test_shardings_by_hand() -> None:
    mesh = Mesh(pp=2, dp=4, ep=2, tp=2)
    expert = Sharding((Split(("ep",)), None, Split(("tp",)))).place((2, 3, 5), mesh, 3)
    assert expert.shape == (4, 3, 10)
    assert str(expert.pieces[0].box) == "[2:4, 0:3, 5:10]"
    assert (expert.replica, expert.replicas) == (0, 2)  # copies lie along edp
    assert Sharding.parse((("tp", 3), None)).dims[0] == Split(("tp",), 3)
    assert axes_of([0, 2, 4, 6], mesh, 0) == ("dp",)
    assert axes_of([0, 4], mesh, 0) == ("edp",)
    assert axes_of([0, 3], mesh, 0) is None
    for bad in ("tp", ("tp", "tp"), (("dp", "ep"),), ((1,),), (3,)):
        with pytest.raises(ValueError, match=r".+"):
            Sharding.parse(bad)
