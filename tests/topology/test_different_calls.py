"""Ranks that make different calls, or hold different arrays under one name: all say so, and nothing is changed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xla_ckpt
from tests.jobs import run_on_ranks
from xla_ckpt.distributed.handshake import CallSignature, find_call_mismatch

RANKS = 4
ODD = 2
"""The rank that differs from the others."""

LONG = 120.0
"""A timeout that no test may come near to: what differs is told at once."""

DIFFERENT = "the ranks make different calls"


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, the same on all ranks, after a step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def same(rank: int, root: Path, call: Callable[[], object]) -> str:
    """The error of a call that all ranks make, if it is the same on all of them and the tags are as before."""
    tags = xla_ckpt.list_tags(root)
    dist.barrier()
    with pytest.raises(xla_ckpt.CheckpointError) as caught:
        call()
    facts = caught.value.to_json()
    everywhere: list[Any] = [None] * RANKS
    dist.all_gather_object(everywhere, facts)
    assert everywhere == [facts] * RANKS
    assert xla_ckpt.list_tags(root) == tags
    return str(caught.value)


def saving(**options: Any) -> xla_ckpt.SaveOptions:
    return xla_ckpt.SaveOptions(timeout=LONG, **options)


def calls_differ(rank: int, root: Path) -> dict[str, str]:
    odd, told = rank == ODD, dict[str, str]()
    model, optimizer = trained()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    rng = {"rng": xla_ckpt.RNGState()}

    def save(tag: str = "t", **options: Any) -> object:
        given = {"model": model, "optimizer": optimizer, "options": saving()} | options
        return xla_ckpt.save_checkpoint(root, tag, **given).result()

    def load(tag: str | None = "base", **options: Any) -> object:
        given = {"model": model, "options": xla_ckpt.LoadOptions(timeout=LONG)} | options
        return xla_ckpt.load_checkpoint(root, tag, **given)

    save("base")
    save("other", options=saving(stale="ignore"))
    for name, usual, own in (
        ("tag", {"tag": "x"}, {"tag": "y"}),
        ("num_kept_ckpts", {}, {"num_kept_ckpts": 1}),
        ("pinned", {}, {"pinned": True}),
        ("async_save", {}, {"async_save": True}),
        ("layout", {}, {"layout": "xser"}),
        ("replicas", {}, {"options": saving(replicas="first")}),
        ("parity", {}, {"options": saving(parity="block")}),
        ("stale", {}, {"options": saving(stale="ignore")}),
        ("on_error", {}, {"options": saving(on_error="warn")}),
        ("retention", {}, {"options": saving(retention=xla_ckpt.LatestN(3))}),
        ("optimizer", {}, {"optimizer": None}),
        ("scheduler", {}, {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}),
        ("extras", {"extras": rng}, {}),
        ("mesh", {}, {"mesh": xla_ckpt.Mesh(dp=2, tp=2)}),
    ):
        told[f"save: {name}"] = same(rank, root, lambda own=own, usual=usual: save(**(own if odd else usual)))
    for name, usual, own in (
        ("tag", {}, {"tag": "other"}),
        ("newest", {}, {"tag": None}),
        ("strict", {}, {"strict": False}),
        ("cast", {}, {"cast": True}),
        ("trust_pickle", {}, {"trust_pickle": True}),
        ("replica_read", {}, {"options": xla_ckpt.LoadOptions(timeout=LONG, replica_read="share")}),
        ("optimizer", {"optimizer": optimizer}, {}),
    ):
        told[f"load: {name}"] = same(rank, root, lambda own=own, usual=usual: load(**(own if odd else usual)))
    elsewhere = f"{root}.elsewhere"
    tree = {"w": torch.ones(3)}
    for name, usually, oddly in (
        (
            "path",
            lambda: save("p"),
            lambda: xla_ckpt.save(elsewhere, "t", tree, options=xla_ckpt.SaveOptions(timeout=LONG)),
        ),
        ("save and load", lambda: load(), lambda: save()),
        ("load and save", lambda: save(), lambda: load()),
        (
            "restore and load",
            lambda: load(),
            lambda: xla_ckpt.restore(root, "base", options=xla_ckpt.LoadOptions(timeout=LONG)),
        ),
        ("save and ask", lambda: xla_ckpt.PreemptionGuard(signals=(), timeout=LONG).should_save(), lambda: save()),
    ):
        told[name] = same(rank, root, oddly if odd else usually)
    told["rank 0"] = same(rank, root, lambda: save(pinned=rank == 0))
    assert not Path(elsewhere).exists()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    save("good", options=saving(stale="ignore"))
    load("good")
    return told


def test_whatever_differs_all_ranks_say_so(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    told = run_on_ranks(calls_differ, RANKS, root)
    assert told == [told[0]] * RANKS
    for name, text in told[0].items():
        assert DIFFERENT in text, name
        assert ("on ranks 0, 1, 3, found" in text) == (name != "rank 0"), text
        assert ("on rank 2" in text) == (name != "rank 0"), text
    said = told[0]
    assert "expected pinned=False on ranks 1, 2, 3, found pinned=True on rank 0" in said["rank 0"]
    assert (
        "expected num_kept_ckpts=None on ranks 0, 1, 3, found num_kept_ckpts=1 on rank 2"
        in said["save: num_kept_ckpts"]
    )
    assert "objects='model, optimizer, extras/rng' on ranks 0, 1, 3" in said["save: extras"]
    assert "found load_checkpoint(" in said["load and save"]
    assert "expected should_save()" in said["save and ask"]
    assert xla_ckpt.list_tags(root) == ["base", "other", "good"]


def arrays_differ(rank: int, root: Path) -> dict[str, str]:
    odd, told = rank == ODD, dict[str, str]()

    def save(tree: Mapping[str, Any], **options: Any) -> object:
        return xla_ckpt.save(
            root, "t", {"v": torch.ones(3), **tree}, options=xla_ckpt.SaveOptions(timeout=LONG), **options
        )

    torch.manual_seed(0)
    for size in (64, 300_000):
        usual = torch.randn(size).bfloat16()
        for kind in (torch.float16, torch.float32, torch.int16):
            tree = {"w": usual.to(kind) if odd else usual}
            told[f"{kind} {size}"] = same(rank, root, lambda tree=tree: save(tree))
    told["shape"] = same(rank, root, lambda: save({"w": torch.zeros(2, 3) if odd else torch.zeros(3, 2)}))
    told["missing"] = same(rank, root, lambda: save({} if odd else {"w": torch.zeros(9)}))
    told["more"] = same(rank, root, lambda: save({"w": torch.zeros(9)} if odd else {}))
    split: dict[str, Any] = {"mesh": xla_ckpt.Mesh(tp=RANKS), "shardings": [("w", ("tp",))]}
    told["split"] = same(rank, root, lambda: save({"w": torch.zeros(9, dtype=torch.int32 if odd else None)}, **split))
    stages: dict[str, Any] = {"mesh": xla_ckpt.Mesh(pp=2, dp=2)}
    deep = {f"w{rank // 2}": torch.zeros(9, dtype=torch.float64 if rank == 3 else torch.float32)}
    told["stages"] = same(rank, root, lambda: save(deep, **stages))
    half = {"half": Fraction(1, 2) if odd else 0.5}  # orbax has no place for an object
    told["layout"] = same(rank, root, lambda: save(half, layout=("orbax", "native")))
    save({"w": torch.zeros(9)})
    return told


def test_an_array_that_differs_is_never_a_mixture(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    (told, *others) = run_on_ranks(arrays_differ, RANKS, root)
    assert others == [told] * (RANKS - 1)
    for kind in ("float16", "float32", "int16"):
        for size in (64, 300_000):
            text = told[f"torch.{kind} {size}"]
            assert f"expected bfloat16 [{size}] on ranks 0, 1, 3, found {kind} [{size}] on rank 2" in text
            assert "leaf w" in text
    assert "expected float32 [3, 2] on ranks 0, 1, 3, found float32 [2, 3] on rank 2" in told["shape"]
    assert "expected float32 [9] on ranks 0, 1, 3, found nothing on rank 2" in told["missing"]
    assert "expected nothing on ranks 0, 1, 3, found float32 [9] on rank 2" in told["more"]
    assert "found int32 [36] split as" in told["split"]
    assert "expected float32 [9] on rank 2, found float64 [9] on rank 3" in told["stages"]
    assert "expected orbax on ranks 0, 1, 3, found native on rank 2" in told["layout"]
    assert torch.equal(xla_ckpt.restore(root, "t").tree["w"], torch.zeros(9))


LEFT_OUT = {ODD: 1, 0: 2}
"""Who leaves out how many calls in a row: for each of them the others wait two seconds."""


def leaves_out(rank: int, root: Path) -> dict[int, list[str]]:
    """Rank 2 leaves out a call that the others make, and rank 0 two in a row."""
    told = dict[int, list[str]]()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("xla_ckpt").addHandler(handler)

    def save(tag: str, timeout: float = LONG) -> None:
        xla_ckpt.save(root, tag, {"w": torch.ones(3)}, options=xla_ckpt.SaveOptions(timeout=timeout, stale="ignore"))

    save("a")
    for lazy, count in LEFT_OUT.items():
        for n in range(count):
            if rank != lazy:
                with pytest.raises(xla_ckpt.RankFailedError, match=f"rank {lazy} did not answer"):
                    save(f"left_out_{n}", timeout=2)
            dist.barrier()
        lines.clear()
        save(f"after_{lazy}")
        assert xla_ckpt.restore(root, options=xla_ckpt.LoadOptions(timeout=LONG)).report.tag == f"after_{lazy}"
        told[lazy] = [line for line in lines if "left out" in line]
    return told


def test_a_rank_that_left_out_a_call_goes_on_with_the_others(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    told = run_on_ranks(leaves_out, RANKS, root)
    for lazy, count in LEFT_OUT.items():
        lines = [of_rank[lazy] for of_rank in told]
        assert [len(of_rank) for of_rank in lines] == [count if rank == lazy else 0 for rank in range(RANKS)]
        for n, line in enumerate(lines[lazy]):
            assert f"left_out_{n}" in line
    assert xla_ckpt.list_tags(root) == ["a", *(f"after_{lazy}" for lazy in LEFT_OUT)]


def leaves_out_in_flight(rank: int, root: Path) -> list[str]:
    """Rank 2 leaves an asynchronous save out, and its next one meets that save of the others."""
    told = []

    def save(tag: str, **options: Any) -> xla_ckpt.SaveHandle:
        return xla_ckpt.save(
            root,
            tag,
            {"w": torch.ones(3)},
            async_save=True,
            options=xla_ckpt.SaveOptions(stale="ignore", timeout=LONG),
            **options,
        )

    if rank != ODD:
        told.append(save("left_out"))
    else:
        told.append(save("next"))
    with pytest.raises(xla_ckpt.UsageError) as caught:
        xla_ckpt.finalize_checkpoint()
    dist.barrier()
    save("together").result()
    return [str(caught.value)]


def test_saves_in_flight_are_compared_too(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    told = run_on_ranks(leaves_out_in_flight, RANKS, root)
    assert told == [told[0]] * RANKS
    assert "'left_out') on ranks 0, 1, 3, found save(" in told[0][0]
    assert "the next call that all of them make works" in told[0][0]
    assert xla_ckpt.list_tags(root) == ["together"]


STEPS = 12
"""Of a loop that saves in each of them."""


def raises_between(rank: int, root: Path, world: int, odd: int, skipped: int, async_save: bool, meets: bool) -> Any:
    """A loop of which one rank leaves saves out: the tags that were raised for here, the tags, and the first error."""
    raised, errors = list[int](), list[str]()

    def save(step: int) -> None:
        tree = {"w": torch.full((3,), float(step))}
        options = xla_ckpt.SaveOptions(timeout=LONG, stale="ignore")
        try:
            xla_ckpt.save(root, f"step_{step}", tree, async_save=async_save, options=options)
        except xla_ckpt.UsageError as error:
            raised.append(step)
            errors.append(str(error))

    for step in range(STEPS):
        if meets:
            dist.barrier()
        if rank != odd or not 2 <= step < 2 + skipped:
            save(step)
    with contextlib.suppress(xla_ckpt.UsageError):
        xla_ckpt.finalize_checkpoint()
    return raised, xla_ckpt.list_tags(root), errors[0].partition(": ")[2]


@pytest.mark.parametrize(
    ("world", "odd", "skipped", "async_save", "meets"),
    [
        (2, 1, 1, True, True),  # a collective in each step
        (3, 0, 1, True, True),
        (2, 0, 1, True, False),
        (3, 2, 2, True, False),
        (2, 1, 1, False, False),
        (3, 1, 2, False, False),
        (4, 0, 3, False, False),
    ],
)
def test_a_job_goes_on_after_a_rank_has_left_saves_out(
    tmp_path: Path, world: int, odd: int, skipped: int, async_save: bool, meets: bool
) -> None:
    found = run_on_ranks(raises_between, world, tmp_path, world, odd, skipped, async_save, meets)
    lost = 2 + 2 * skipped + async_save  # those that were left out, as many beside them, and one that tells of it
    for rank, (raised, tags, error) in enumerate(found):
        assert tags == ["step_0", "step_1", *(f"step_{step}" for step in range(lost, STEPS))]
        assert raised, rank
        assert set(raised) <= set(range(2, lost))
        assert error == found[0][2], "the same on all ranks"
        assert "works" in error


def leaves_a_root_out(rank: int, root: Path) -> list[list[str]]:
    """Saves to two roots take turns, and both are in flight when rank 1 leaves one out."""
    options = xla_ckpt.SaveOptions(timeout=LONG, stale="ignore")
    for step in range(8):
        for name in "ab":
            dist.barrier()
            if (rank, step, name) != (1, 3, "a"):
                with contextlib.suppress(xla_ckpt.UsageError):
                    tree = {"w": torch.full((3,), float(step))}
                    xla_ckpt.save(root / name, f"step_{step}", tree, async_save=True, options=options)
    xla_ckpt.finalize_checkpoint()
    return [xla_ckpt.list_tags(root / name) for name in "ab"]


def test_ranks_are_in_step_again_where_saves_to_two_roots_take_turns(tmp_path: Path) -> None:
    for tags in run_on_ranks(leaves_a_root_out, 2, tmp_path)[0]:
        assert tags[:3] == ["step_0", "step_1", "step_2"]
        assert tags[-2:] == ["step_6", "step_7"]


def claims_what_another_rank_did_not_improve(rank: int, root: Path) -> tuple[list[str], list[str]]:
    """Rank 1 alone saves the tag `select_best` at first; later all ranks do."""
    raised = []

    def save(tag: str, step: int) -> None:
        dist.barrier()
        options = xla_ckpt.SaveOptions(timeout=LONG, stale="ignore")
        if tag == "best" and step == 0 and rank == 0:
            return
        try:
            xla_ckpt.save(root, tag, {"w": torch.full((3,), float(step))}, async_save=True, options=options)
        except xla_ckpt.UsageError:
            raised.append(f"{tag} {step}")

    for step in range(3):
        save("best", step)
        save("last", step)
    xla_ckpt.finalize_checkpoint()
    return raised, xla_ckpt.list_tags(root)


def test_only_one_of_two_ranks_is_behind(tmp_path: Path) -> None:
    found = run_on_ranks(claims_what_another_rank_did_not_improve, 2, tmp_path)
    assert [sorted(tags) for _, tags in found] == [["best", "last"]] * 2
    assert all("last 2" not in raised and "best 2" not in raised for raised, _ in found)


def test_all_that_differs_is_named() -> None:
    calls = [CallSignature.create("save", "/p", "a", pinned=n == 1, layout="pt" if n else "native") for n in range(3)]
    found = find_call_mismatch(calls)
    assert found is not None
    assert (found.rank, found.expected, found.found) == (1, "pinned=False on ranks 0, 2", "pinned=True on rank 1")
    assert found.details == "  expected layout='pt' on ranks 1, 2, found layout='native' on rank 0"
    assert find_call_mismatch([]) is None
