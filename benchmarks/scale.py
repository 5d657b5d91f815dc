"""Plans and manifests of a 70B-like model on 8 to 16,384 ranks, simulated in one process without torch.

    python benchmarks/scale.py [--ranks 8,64,512] [--write]

For every simulated rank the leaves, the save plan and the record are made as that rank would make them. Rank 0's part
follows: records from JSON, merge, manifest, its bytes, and back. Then one rank plans its restore, on the same topology
and on others. No payload is written; digests are zero. ``--write`` makes docs/measured/scaling.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import textwrap
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xla_ckpt.core import dtypes
from xla_ckpt.core.checksum import compute_digest, to_hex
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.manifest.arrays import ArrayTable
from xla_ckpt.core.manifest.manifest import FileRecord, Manifest, ManifestHeader
from xla_ckpt.core.plan.leaf import ArrayLeaf, create_leaf
from xla_ckpt.core.plan.merge import merge_records
from xla_ckpt.core.plan.rank_record import RankRecord, ReplicaSample
from xla_ckpt.core.plan.restore_plan import ReadRequest, RestorePlan, plan_restore
from xla_ckpt.core.plan.save_plan import SavePlan, collect_shards, plan_save
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import Sharding

ROOT = Path(__file__).parent.parent
WORLDS = (8, 64, 512, 1024, 4096, 16384)
WHOLE_AT = 512
"""The number of ranks whose checkpoint one process restores whole, too: the first with more than 100,000 shards."""
BF16, F32 = dtypes.get_dtype("bfloat16"), dtypes.get_dtype("float32")
ROWS, COLUMNS, WHOLE = Sharding.parse(("tp", None)), Sharding.parse((None, "tp")), Sharding()
ZERO1 = ("dp",)


@dataclass(frozen=True)
class Model:
    """A Llama-like model of 70 billion parameters."""

    layers: int = 80
    hidden: int = 8192
    ffn: int = 28672
    kv: int = 1024
    """Rows of the key and value projections: 8 heads of 128."""
    vocab: int = 32000

    def stage(self, pp: int, index: int) -> Iterator[tuple[str, tuple[int, ...], Sharding]]:
        """(name, global shape, sharding) of the parameters of a pipeline stage."""
        h, f = self.hidden, self.ffn
        if index == 0:
            yield "model.embed_tokens.weight", (self.vocab, h), ROWS
        for i in range(self.layers * index // pp, self.layers * (index + 1) // pp):
            layer = f"model.layers.{i}."
            yield layer + "self_attn.q_proj.weight", (h, h), ROWS
            yield layer + "self_attn.k_proj.weight", (self.kv, h), ROWS
            yield layer + "self_attn.v_proj.weight", (self.kv, h), ROWS
            yield layer + "self_attn.o_proj.weight", (h, h), COLUMNS
            yield layer + "mlp.gate_proj.weight", (f, h), ROWS
            yield layer + "mlp.up_proj.weight", (f, h), ROWS
            yield layer + "mlp.down_proj.weight", (h, f), COLUMNS
            yield layer + "input_layernorm.weight", (h,), WHOLE
            yield layer + "post_attention_layernorm.weight", (h,), WHOLE
        if index == pp - 1:
            yield "model.norm.weight", (h,), WHOLE
            yield "lm_head.weight", (self.vocab, h), ROWS

    def parameters(self) -> int:
        """Number of elements of all parameters."""
        total = 0
        for _, shape, _ in self.stage(1, 0):
            size = 1
            for n in shape:
                size *= n
            total += size
        return total


LLAMA = Model()


def mesh_of(world: int, tp: int = 8, pp: int = 8) -> Mesh:
    """TP 8, PP 8 and the rest data parallelism; fewer stages where there are not enough ranks."""
    pp = min(pp, max(1, world // tp))
    return Mesh(pp=pp, dp=world // (tp * pp), tp=tp)


def leaves_of(model: Model, mesh: Mesh, rank: int) -> list[ArrayLeaf]:
    """What a rank holds, in the order of the state tree: bf16 weights; fp32 moments and master weights by ZeRO-1."""
    parameters = list(model.stage(mesh.pp, mesh.coordinates(rank)["pp"]))
    places: dict[tuple[tuple[int, ...], Sharding], tuple[LocalArray, LocalArray]] = {}
    for _, shape, sharding in parameters:
        if (shape, sharding) not in places:
            local = tuple(
                n if split is None else n // mesh.tp
                for n, split in zip(shape, (*sharding.dims, *(None,) * len(shape)), strict=False)
            )
            places[shape, sharding] = (
                sharding.map_local_shape(local, mesh, rank),
                sharding.map_zero1_shape(local, mesh, rank, ZERO1)
                if mesh.dp > 1
                else sharding.map_local_shape(local, mesh, rank),
            )
    step = WHOLE.map_local_shape((), mesh, rank)
    leaves = [create_leaf(f"model/{name}", BF16, places[shape, how][0]) for name, shape, how in parameters]
    for name, shape, how in parameters:
        state = f"optimizer/state/{name}/"
        leaves += [
            create_leaf(state + "step", F32, step),
            create_leaf(state + "exp_avg", F32, places[shape, how][1]),
            create_leaf(state + "exp_avg_sq", F32, places[shape, how][1]),
        ]
    return leaves + [
        create_leaf(f"optimizer/master/{name}", F32, places[shape, how][1]) for name, shape, how in parameters
    ]


def skeleton_of(model: Model, mesh: Mesh, stage: int) -> Any:
    """The structure of the state that the first rank of a stage reports."""
    array = {"$array": "torch"}
    names = [name for name, _, _ in model.stage(mesh.pp, stage)]
    group = {"lr": 3e-4, "betas": {"$tuple": [0.9, 0.95]}, "eps": 1e-8, "weight_decay": 0.1, "params": names}
    state = {name: {"step": array, "exp_avg": array, "exp_avg_sq": array} for name in names}
    return {
        "model": dict.fromkeys(names, array),
        "optimizer": {"state": state, "param_groups": [group], "master": dict.fromkeys(names, array)},
    }


def record_of(model: Model, mesh: Mesh, rank: int, leaves: Sequence[ArrayLeaf], plan: SavePlan) -> RankRecord:
    """What the rank would report had it written its files: as `engine.save` makes it."""
    files = []
    for file in plan.files:
        size = file.layout.size
        files.append(
            FileRecord(
                path=file.path,
                size=size,
                framing_bytes=size - file.data_bytes,
                framing_digest=compute_digest(file.path.encode()),
            )
        )
    stage = mesh.coordinates(rank)["pp"]
    speaks = rank == mesh.first_of_stage(rank)
    samples = {}
    for leaf in leaves if mesh.size > 1 else ():
        if any(s.replicas > 1 for s in leaf.shards):
            place = f"{leaf.dtype.name} {leaf.shape} {' '.join(str(s.box) for s in leaf.shards)}"
            samples[leaf.path] = (ReplicaSample(compute_digest(place.encode()), compute_digest(leaf.path.encode())),)
    return RankRecord.from_shards(
        collect_shards(plan.files), samples, common_leaves=[leaf.path for leaf in leaves], reports_common=speaks,
        rank=rank, files=tuple(files),
        arrays={leaf.path: (leaf.dtype.name, leaf.shape, leaf.spec, None) for leaf in leaves} if speaks else {},
        aliases={},
        skeleton=skeleton_of(model, mesh, stage) if speaks else None, objects=(),
        parts={part: to_hex(stage) for part in ("model", "optimizer")},
    )  # fmt: skip


@dataclass
class Result:
    """What the simulation of one world found."""

    world: int
    mesh: Mesh
    manifest: Manifest
    leaves: list[int] = field(default_factory=list)
    """Per rank."""
    regions: list[int] = field(default_factory=list)
    """Per rank: shards that it writes."""
    written: list[int] = field(default_factory=list)
    """Per rank: array bytes that it writes."""
    facts: dict[str, float] = field(default_factory=dict)
    """Seconds, bytes and counts by name."""

    @property
    def shards(self) -> int:
        """Stored shards."""
        return sum(self.regions)

    @property
    def commit(self) -> float:
        """Seconds of rank 0's work: records from JSON, merge, manifest, its bytes."""
        return sum(self.facts[f] for f in ("hear", "merge", "prove", "dump"))

    @property
    def per_shard(self) -> float:
        """Microseconds of rank 0's work for each shard."""
        return 1e6 * self.commit / self.shards

    @property
    def balance(self) -> float:
        """The most bytes that a rank writes to the fewest."""
        return max(self.written) / min(self.written)

    @property
    def stage_balance(self) -> float:
        """The same among the ranks of one pipeline stage, for the worst stage."""
        per = self.world // self.mesh.pp
        stages = [self.written[i : i + per] for i in range(0, self.world, per)]
        return max(max(s) / min(s) for s in stages)


def timed(action: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """CPU seconds and result."""
    began = time.process_time()
    result = action(*args)
    return time.process_time() - began, result


def topologies(world: int) -> list[Mesh]:
    """What the checkpoint is restored on: its own topology, then others."""
    return [mesh_of(world), mesh_of(world, 4, 16), mesh_of(world, 4, 4)]


def restore(model: Model, manifest: Manifest, mesh: Mesh) -> tuple[float, RestorePlan]:
    """Time (median of three) and plan of one rank's restore, for a rank in the middle of the mesh."""
    rank = mesh.rank({"pp": mesh.pp // 2, "dp": mesh.dp // 2, "tp": mesh.tp - 1})
    leaves = leaves_of(model, mesh, rank)
    boxes = [(leaf.path, shard.box) for leaf in leaves for shard in leaf.shards]
    wants = [ReadRequest(path, box, slot) for slot, (path, box) in enumerate(boxes)]
    runs = [timed(plan_restore, manifest, wants) for _ in range(3)]
    plan: RestorePlan = runs[0][1]
    assert plan.needed_bytes == sum(
        leaf.dtype.itemsize * shard.box.size for leaf in leaves for shard in leaf.shards
    )  # every wanted element once
    return statistics.median(seconds for seconds, _ in runs), plan


def hear(text: bytes) -> RankRecord:
    """The record of a rank, as rank 0 receives it."""
    return RankRecord.from_json(json.loads(text))


def simulate(world: int, model: Model = LLAMA, say: Callable[[str], None] = lambda _: None) -> Result:
    """Everything that `world` ranks and rank 0 decide in a save, and one rank in a restore."""
    mesh = mesh_of(world)
    result = Result(
        world,
        mesh,
        Manifest(
            header=ManifestHeader(tag="", sequence=1, pinned=False, created=""),
            skeleton=None,
            arrays=ArrayTable.from_records({}),
            files=(),
        ),
    )
    facts = result.facts
    wire, plan_seconds, facts["json"] = [], [], 0
    for rank in range(world):
        leaves = leaves_of(model, mesh, rank)
        seconds, plan = timed(plan_save, leaves, rank, world)
        plan_seconds.append(seconds)
        result.leaves.append(len(leaves))
        result.regions.append(sum(len(f.entries) for f in plan.files))
        result.written.append(plan.nbytes)
        text = json.dumps(record_of(model, mesh, rank, leaves, plan).to_json()).encode()
        facts["json"] += len(text)
        wire.append(zlib.compress(text, 1))  # as `job/verdict.py` sends it
        if rank % 1024 == 1023:
            say(f"  {rank + 1} of {world} ranks planned")
    facts["plan"] = statistics.median(plan_seconds)
    facts["zlib"] = sum(map(len, wire))
    facts["hear"], records = 0.0, []
    for data in wire:
        seconds, record = timed(hear, zlib.decompress(data))
        facts["hear"] += seconds
        records.append(record)
        records[-1] = record.resolve_names(records[mesh.first_of_stage(record.rank)])
    facts["merge"], merged = timed(merge_records, records, mesh)
    assert (merged.duplicates, merged.warnings) == ((), ())
    facts["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    del records, wire
    head = ManifestHeader(tag="step_1000", sequence=1, pinned=False, created="2025-01-01T00:00:00.000+00:00")
    facts["prove"], manifest = timed(merged.build_manifest, head, mesh)
    facts["dump"], text = timed(manifest_json.dump_manifest, manifest)
    facts["bytes"] = len(text)
    facts["parse"], again = timed(manifest_json.parse_manifest, text)
    assert manifest_json.dump_manifest(again) == text
    result.manifest = again
    for number, topology in enumerate(topologies(world)):
        facts[f"restore{number}"], plan = restore(model, again, topology)
        facts[f"reads{number}"] = len(plan)
        facts[f"ratio{number}"] = plan.read_bytes / plan.needed_bytes
    if world == WHOLE_AT:
        facts["whole"], _ = restore(model, again, Mesh(pp=1, dp=1, tp=1))
    return result


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Markdown; all columns to the right."""
    columns = head.split("|")
    return "\n".join(
        ["| " + " | ".join(c.strip() for c in columns) + " |", "|" + "---:|" * len(columns)]
        + ["| " + " | ".join(row) + " |" for row in rows]
    )


def sections(results: Sequence[Result]) -> str:
    """The three tables."""
    saves = table(
        "ranks | PP x DP x TP | leaves, most | shards written, most | plan, ms | GB written, least to most | "
        "most / least in a stage | most / least of all",
        ([
            f"{r.world:,}", f"{r.mesh.pp} x {r.mesh.dp} x {r.mesh.tp}", str(max(r.leaves)), str(max(r.regions)),
            f"{1e3 * r.facts['plan']:.1f}", f"{min(r.written) / 1e9:.3f} to {max(r.written) / 1e9:.3f}",
            f"{r.stage_balance:.3f}", f"{r.balance:.3f}",
        ] for r in results),
    )  # fmt: skip
    commits = table(
        "ranks | shards | files | records, MB | as they are sent, MB | from JSON, s | merge, s | merge, µs a shard | "
        "all of rank 0's work, µs a shard | manifest, MB | prove and dump, s | parse, s | peak memory, GB",
        ([
            f"{r.world:,}", f"{r.shards:,}", f"{len(r.manifest.files):,}", f"{r.facts['json'] / 1e6:.1f}",
            f"{r.facts['zlib'] / 1e6:.1f}",
            f"{r.facts['hear']:.2f}", f"{r.facts['merge']:.2f}", f"{1e6 * r.facts['merge'] / r.shards:.1f}",
            f"{r.per_shard:.1f}", f"{r.facts['bytes'] / 1e6:.2f}", f"{r.facts['prove'] + r.facts['dump']:.2f}",
            f"{r.facts['parse']:.2f}", f"{r.facts['peak'] / 1e9:.2f}",
        ] for r in results),
    )  # fmt: skip
    restores = table(
        "ranks | " + " | ".join(f"{name}: plan, s | reads | read / needed" for name in
                                ("same topology", "TP 4, PP 16", "TP 4, PP 4")),
        ([f"{r.world:,}", *(
            cell for i in range(3) for cell in (
                f"{r.facts[f'restore{i}']:.3f}", f"{r.facts[f'reads{i}']:.0f}", f"{r.facts[f'ratio{i}']:.5f}")
        )] for r in results),
    )  # fmt: skip
    return (
        f"## Save plans\n\nOf each rank, alone.\n\n{saves}\n\n## The commit\n\nRank 0's work.\n\n{commits}\n\n"
        f"## Restore plans\n\nOf one rank, with the manifest in memory.\n\n{restores}"
    )


def targets(results: Sequence[Result]) -> list[tuple[str, str, bool]]:
    """(target, measured, whether it is met) of the targets that these worlds can tell."""
    found = []
    first, last = results[0], results[-1]
    for r in results:
        if r.world == 4096:
            size, slowest = r.facts["bytes"] / 1e6, max(r.facts[f"restore{i}"] for i in range(3))
            with_parse = f"{slowest + r.facts['parse']:.2f} s with the parse of the manifest"
            found += [
                ("manifest <= 16 MB at 4,096 ranks", f"{size:.2f} MB", size <= 16),
                ("one rank's restore plan <= 1 s at 4,096 ranks",
                 f"{slowest:.2f} s on the slowest topology, {with_parse}", slowest <= 1),
            ]  # fmt: skip
        if r.world == WHOLE_AT:
            seconds = (r.facts["parse"] + r.facts["whole"]) * 100_000 / r.shards
            how = f"{seconds:.2f} s, from {r.shards:,} shards that one process restores whole"
            found.append(("100,000 shards opened and planned in 0.5 s", how, seconds <= 0.5))
        if r.world == 16384:
            sent, peak = r.facts["zlib"] / 1e6, r.facts["peak"] / 1e9
            found += [
                ("rank 0's work <= 8 s at 16,384 ranks", f"{r.commit:.1f} s", r.commit <= 8),
                ("records <= 100 MB at 16,384 ranks, as they are sent", f"{sent:.0f} MB", sent <= 100),
                ("memory <= 1.5 GB at 16,384 ranks", f"{peak:.2f} GB", peak <= 1.5),
            ]  # fmt: skip
    if len(results) > 1:
        growth = f"{last.shards / first.shards:.0f} times the shards, {last.commit / first.commit:.0f} times the work"
        found.append((
            "rank 0's work grows no faster than the number of shards (per shard, at most 1.25 times as much)",
            f"{growth} from {first.world:,} to {last.world:,} ranks", last.per_shard <= 1.25 * first.per_shard,
        ))  # fmt: skip
    alike = [r for r in results if (r.mesh.pp, r.mesh.tp) == (8, 8)]
    if len(alike) > 1:
        leaves, regions = {max(r.leaves) for r in alike}, [max(r.regions) for r in alike]
        counts = f"{min(leaves)} leaves and at most {max(regions)} shards a rank"
        found.append((
            "a rank's save plan does not grow with the world: the same leaves, and never more shards than leaves",
            f"{counts}, from {alike[0].world:,} to {alike[-1].world:,} ranks",
            len(leaves) == 1 and max(regions) <= min(leaves),
        ))  # fmt: skip
    return found


def document(results: Sequence[Result], command: str, seconds: float) -> str:
    """docs/measured/scaling.md."""
    stored, model = results[-1].manifest, LLAMA
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"
    about = f"""What plans and manifests cost when a job grows, simulated in one process. Nothing here ran on a cluster:
        this is about the library's own decisions, and says nothing about disks, networks or the store between ranks.

        Made by `{command}` in {seconds / 60:.0f} minutes, with Python {platform.python_version()} on {machine}, on
        {datetime.datetime.now(datetime.UTC):%Y-%m-%d}. Times are CPU seconds of one thread. The machine is small and
        shared: trust growth rather than single numbers."""
    simulated = f"""A Llama-like model of {model.parameters() / 1e9:.1f} billion parameters: {model.layers} layers,
        hidden size {model.hidden}, FFN {model.ffn}, 64 heads, 8 key-value heads, vocabulary {model.vocab}. Weights are
        bfloat16. ZeRO-1 deals out `exp_avg`, `exp_avg_sq` and master weights, all float32, over dp; each parameter has
        a scalar `step`. Together {stored.nbytes / 1e12:.3f} TB in {len(stored.arrays):,} arrays. The mesh is PP 8, TP 8
        and the rest dp; 8 ranks are TP 8 alone.

        For every rank, one by one, the script makes the leaves, the save plan, and the record that the rank sends after
        it wrote its files. Header sizes, offsets and the list of sampled replicas are real, digests are not: payload is
        neither written nor read. Then it does rank 0's work: records from JSON, the merge with all its checks, the
        manifest, its bytes. It parses the manifest, and plans the restore of one rank in the middle of the mesh.

        Rows need not divide. With dp 256 a key projection has 128 rows on a rank of tp, fewer than there are dp ranks:
        half of them hold none of its ZeRO-1 rows, and half write none of its weights. That is why the ratio in a stage
        rises at the end. The first pipeline stage also has the embedding, the last one the head: *most / least of all*
        includes what the model itself makes unequal, *in a stage* does not.

        *Peak memory* is that of the process once the records are merged: rank 0's, but for the compressed records that
        the simulation keeps beside the parsed ones."""
    goals = "\n".join(f"| {t} | {m} | {'met' if ok else '**not met**'} |" for t, m, ok in targets(results))
    return (
        f"# Scaling\n\n{prose(about)}\n\n## What is simulated\n\n{prose(simulated)}\n\n"
        f"## Targets\n\n| target | measured | |\n|---|---|---|\n{goals}\n\n{sections(results)}\n"
    )


def prose(text: str) -> str:
    """Paragraphs, wrapped."""
    return "\n\n".join(
        textwrap.fill(" ".join(p.split()), 120, break_long_words=False, break_on_hyphens=False)
        for p in text.split("\n\n")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default=",".join(map(str, WORLDS)), help="worlds to simulate, as in 8,64,512")
    parser.add_argument("--write", action="store_true", help="write docs/measured/scaling.md")
    args = parser.parse_args()
    began = time.monotonic()
    results = []
    for world in sorted(map(int, args.ranks.split(","))):
        print(f"{world} ranks: {mesh_of(world)}", flush=True)
        results.append(simulate(world, say=lambda line: print(line, flush=True)))
        print("  " + ", ".join(f"{k} {v:.6g}" for k, v in results[-1].facts.items()), flush=True)
    chosen = "" if args.ranks == parser.get_default("ranks") else f" --ranks {args.ranks}"
    command = f"python benchmarks/scale.py{chosen} --write"
    text = document(results, command, time.monotonic() - began)
    print(text)
    if args.write:
        (ROOT / "docs/measured/scaling.md").write_text(text)


if __name__ == "__main__":
    main()
