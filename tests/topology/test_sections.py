"""Sections of unequal sizes, some of them held by several ranks: any job's tensors become any other's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory import MemoryDirectory
from tests.topology.test_all_pairs import restored
from xla_ckpt import Mesh
from xla_ckpt.arrays.torch_elements import get_tensor_bytes, narrow_to_box
from xla_ckpt.core import dtypes
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.manifest.manifest import ManifestHeader
from xla_ckpt.core.plan.leaf import create_leaf
from xla_ckpt.core.plan.merge import merge_records
from xla_ckpt.core.plan.rank_record import RankRecord
from xla_ckpt.core.plan.save_plan import plan_save
from xla_ckpt.core.plan.stored_sharding import resolve_sharding
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.core.sharding.sharding import DimSharding, Section, Sharding, parse_section
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.progress import IoContext
from xla_ckpt.saving.write import write_files

FLOAT = dtypes.get_dtype("float32")


@dataclass(frozen=True)
class Job:
    """Ranks that hold an array in sections along one of its dims."""

    mesh: Mesh
    sections: tuple[Section, ...]
    dim: int
    zero: bool

    @property
    def sharding(self) -> Sharding:
        return Sharding((*(None,) * self.dim, DimSharding(("tp",), self.sections)))

    def tensor(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank has in memory, by repeating and cutting whole tensors as neuronx-distributed does."""
        at = self.mesh.coordinates(rank)
        held = []
        for section, s in zip(full.split([s.size or 0 for s in self.sections], self.dim), self.sections, strict=True):
            copies = 1 if self.mesh.tp == 1 else s.copies
            parts = section.chunk(self.mesh.tp // copies, self.dim)
            of_ranks = [p for p in parts for _ in range(copies)] if s.adjacent else list(parts) * copies
            held.append(of_ranks[at["tp"]])
        local = torch.cat(held, self.dim)
        if not self.zero:
            return local.contiguous()
        missing = -local.shape[0] % self.mesh.dp
        padded = torch.cat([local, torch.zeros(missing, *local.shape[1:])])
        return padded.chunk(self.mesh.dp)[at["dp"]].contiguous()

    def place(self, full: torch.Tensor, rank: int) -> LocalArray:
        """Where the library says that it lies."""
        if not self.zero:
            return self.sharding.map_local_shape(tuple(self.tensor(full, rank).shape), self.mesh, rank)
        whole = Job(self.mesh, self.sections, self.dim, zero=False).tensor(full, rank)
        return self.sharding.map_zero1_shape(tuple(whole.shape), self.mesh, rank, ("dp",))


@st.composite
def sections(draw: st.DrawFn, sizes: list[int], tp: int) -> tuple[Section, ...]:
    made = []
    for size in sizes:
        copies = draw(st.sampled_from([c for c in (1, 2, 4) if tp % c == 0]))
        made.append(Section(size, copies, copies > 1 and draw(st.booleans())))
    return tuple(made)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[torch.Tensor, Job, Job]:
    """An array, the job that saves it, and one that loads it."""
    sizes = [4 * n for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))]
    dim = draw(st.integers(0, 1))
    shape = [draw(st.integers(1, 5))]
    shape.insert(dim, sum(sizes))
    full = torch.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
    made = []
    for _ in range(2):
        mesh = Mesh(dp=draw(st.integers(1, 3)), tp=draw(st.sampled_from([1, 2, 4])))
        made.append(Job(mesh, draw(sections(sizes, mesh.tp)), dim, draw(st.booleans())))
    return full, made[0], made[1]


def stored(job: Job, full: torch.Tensor) -> TagReader:
    directory, records = MemoryDirectory(), []
    for rank in range(job.mesh.size):
        local, tensor = job.place(full, rank), job.tensor(full, rank)
        assert local.shape == full.shape
        leaf = create_leaf("optimizer/state/w/exp_avg", FLOAT, local)
        plan = plan_save([leaf], rank, job.mesh.size)
        pieces = [narrow_to_box(tensor, piece.local_box).contiguous() for piece in local.pieces]
        memory = {(leaf.path, i): get_tensor_bytes(piece) for i, piece in enumerate(pieces)}
        written = write_files(directory, plan, memory, IoContext(workers=1))
        fact = {leaf.path: (leaf.dtype.name, leaf.shape, leaf.spec, None)}
        records.append(
            RankRecord.from_shards(
                written.shards, rank=rank, files=written.files, arrays=fact, aliases={}, skeleton=None
            )
        )
    merged = merge_records(records, job.mesh)
    assert not merged.duplicates
    manifest = merged.build_manifest(ManifestHeader(tag="t", sequence=1, pinned=False, created=""), job.mesh)
    assert sum(f.size - f.framing_bytes for f in manifest.files) == full.numel() * 4  # keys and values once, too
    directory.objects["manifest.json"] = manifest_json.dump_manifest(manifest)
    return TagReader(directory, "memory", "t")


@settings(deadline=None, max_examples=150)
@given(jobs())
def test_any_job_resumes_as_any_other(case: tuple[torch.Tensor, Job, Job]) -> None:
    full, source, target = case
    reader = stored(source, full)
    for rank in range(target.mesh.size):
        wanted = {"optimizer/state/w/exp_avg": (target.place(full, rank), target.tensor(full, rank))}
        assert torch.equal(restored(reader, wanted)["optimizer/state/w/exp_avg"], target.tensor(full, rank))


@settings(deadline=None)
@given(jobs())
def test_the_manifest_says_how_it_was_split(case: tuple[torch.Tensor, Job, Job]) -> None:
    full, source, _ = case
    manifest = stored(source, full).manifest
    leaf = "optimizer/state/w/exp_avg"
    split = resolve_sharding(leaf, manifest, ()).dims[source.dim]
    assert split is not None
    for found, section in zip(split.sections, source.sections, strict=True):
        assert (found.size, found.copies, found.adjacent) == (section.size, section.copies, section.adjacent)
        assert found.count_copies(source.mesh.tp) == section.count_copies(source.mesh.tp)


@given(jobs())
def test_a_spec_is_read_as_it_is_written(case: tuple[torch.Tensor, Job, Job]) -> None:
    _, source, _ = case
    assert Sharding.parse(source.sharding.spec) == source.sharding


@pytest.mark.parametrize(
    ("spec", "parsed"),
    [
        (["tp", [4096, "1024x4", "1024 x4"]], (Section(4096), Section(1024, 4), Section(1024, 4))),
        (["tp", ["x4"]], (Section(None, 4),)),
        (["tp", ["8x2 adjacent"]], (Section(8, 2, True),)),
        (["tp", 3], (Section(), Section(), Section())),
    ],
)
def test_spellings(spec: Any, parsed: tuple[Section, ...]) -> None:
    assert Sharding.parse([spec]).dims == (DimSharding(("tp",), parsed),)


@pytest.mark.parametrize(
    "spec",
    [["tp", []], ["tp", [4, "x2"]], ["tp", [0]], ["tp", ["4y2"]], ["tp", ["4x0"]], ["tp", ["4 adjacent"]],
     ["tp", [4.0]], ["tp", [True]], ["tp", ["x1 adjacent"]], ["tp", ["4x2/0"]], ["tp", 0], ["xx", [4]]],
)  # fmt: skip
def test_nonsense_is_refused(spec: Any) -> None:
    with pytest.raises(ValueError, match=r"section|stride|axes|split"):
        Sharding.parse([spec])


@pytest.mark.parametrize(
    ("spec", "rows", "tp", "words"),
    [
        (["tp", [8, 4, 4]], 9, 2, r"8 \+ 4 \+ 4 elements are 16.*2 times 9 are 18"),
        (["tp", [8, "4x2"]], 7, 2, "16 with all copies, and 2 times 7 are 14"),
        (["tp", ["x3"]], 6, 4, "3 copies of a section do not divide 4 ranks"),
        (["tp", [8, "7x2"]], 5, 4, r"8 \+ 7x2 elements are 22"),
        (["tp", [6, 6, 4]], 4, 4, "6 elements of a section do not divide by 4"),
        (["tp", [6, 6]], 3, 4, "6 elements of a section do not divide by 4"),
        (["tp", [8, 8]], 7, 1, "1 times 7 are 7"),
    ],
)
def test_what_does_not_add_up(spec: Any, rows: int, tp: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sharding.parse([spec]).map_local_shape((rows,), Mesh(tp=tp), 0)


def test_sections_cannot_be_padded() -> None:
    sharding = Sharding((DimSharding(("tp",), (Section(None, 2),)),), (5,))
    with pytest.raises(ValueError, match="padding"):
        sharding.map_local_shape((3,), Mesh(tp=2), 0)


def test_over_other_ranks_no_head_is_cut() -> None:
    stored = Section(1024, 4).to_stored(32)
    assert stored.spec == "1024x4/8"
    # As many copies as before where that is possible: so the heads of the queries stay in their order.
    assert [stored.count_copies(ranks) for ranks in (1, 2, 4, 8, 16, 64)] == [1, 1, 4, 4, 4, 8]
    with pytest.raises(ValueError, match="5 copies of a section do not divide 44 ranks"):
        stored.count_copies(44)


def test_a_section_is_written_as_it_is_read() -> None:
    for text in (4096, "1024x4", "x2", "8x2 adjacent", "8x2/4 adjacent"):
        assert parse_section(text).spec == text
