"""What becomes of a save that failed, and of one that should not have been made."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.runs import names_in
from xla_ckpt.errors import CheckpointError
from xla_ckpt.storage.local import LocalDirectory


def model(value: float = 1.0) -> torch.nn.Linear:
    made = torch.nn.Linear(3, 3)
    with torch.no_grad():
        made.weight.fill_(value)
        made.bias.fill_(value)
    return made


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalDirectory, "get_free_bytes", lambda self: 10)


@pytest.mark.usefixtures("full")
def test_space_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(xla_ckpt.StorageError, match=r"expected \d+ free bytes, found 10") as caught:
        xla_ckpt.save_checkpoint(tmp_path, "a", model())
    assert caught.value.errno == errno.ENOSPC
    assert names_in(tmp_path) == []


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("async_save", [False, True])
def test_a_failed_save_may_be_a_warning(
    tmp_path: Path, async_save: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = xla_ckpt.save_checkpoint(
        tmp_path, "a", model(), options=xla_ckpt.SaveOptions(on_error="warn"), async_save=async_save
    )
    assert handle.wait(60)
    assert "the program goes on" in caplog.text
    monkeypatch.undo()
    xla_ckpt.save_checkpoint(tmp_path, "b", model())  # nothing is raised afterwards, either
    assert xla_ckpt.list_tags(tmp_path) == ["b"]
    assert isinstance(handle.error, xla_ckpt.StorageError)
    with pytest.raises(xla_ckpt.StorageError):
        handle.result()


@pytest.mark.usefixtures("full")
def test_a_later_call_says_of_which_save_its_error_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = []
    for tag, later in (
        ("a", lambda: xla_ckpt.save_checkpoint(tmp_path, "b", model())),
        ("c", lambda: xla_ckpt.load_checkpoint(tmp_path, model=model())),
        ("d", xla_ckpt.finalize_checkpoint),
    ):
        handles.append(xla_ckpt.save_checkpoint(tmp_path, tag, model(), async_save=True))
        consequence = ", and this call has not saved tag b" if tag == "a" else ""
        message = f"asynchronous save before this call has failed{consequence}: .*free bytes"
        with pytest.raises(xla_ckpt.StorageError, match=message) as caught:
            later()
        assert (caught.value.errno, caught.value.tag) == (errno.ENOSPC, tag)
        assert caught.value.__cause__ is handles[-1].error
        assert "before this call" not in str(handles[-1].error)
    monkeypatch.undo()
    xla_ckpt.save_checkpoint(tmp_path, "b", model())
    assert xla_ckpt.list_tags(tmp_path) == ["b"]


def test_a_root_that_cannot_be_made_is_a_warning_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    handle = xla_ckpt.save_checkpoint(
        tmp_path / "file/root", "a", model(), options=xla_ckpt.SaveOptions(on_error="warn")
    )
    assert isinstance(handle.error, xla_ckpt.StorageError)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("async_save", [False, True])
def test_a_function_hears_of_it(tmp_path: Path, async_save: bool) -> None:
    heard: list[CheckpointError] = []
    handle = xla_ckpt.save_checkpoint(
        tmp_path, "a", model(), options=xla_ckpt.SaveOptions(on_error=heard.append), async_save=async_save
    )
    handle.wait()
    assert [handle.error] == heard
    xla_ckpt.finalize_checkpoint()


@pytest.mark.usefixtures("full")
def test_a_function_that_fails_leaves_the_error_to_be_raised(tmp_path: Path) -> None:
    def fails(error: CheckpointError) -> None:
        raise KeyError("oops")

    with pytest.raises(xla_ckpt.StorageError):
        xla_ckpt.save_checkpoint(tmp_path, "a", model(), options=xla_ckpt.SaveOptions(on_error=fails))


@pytest.mark.usefixtures("full")
def test_a_save_that_fails_later_is_still_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", model(), async_save=True).wait()
    monkeypatch.undo()
    with pytest.raises(xla_ckpt.StorageError, match="tag a"):
        xla_ckpt.save_checkpoint(tmp_path, "b", model())


def test_mistakes_are_raised_in_any_case(tmp_path: Path) -> None:
    for wrong in (
        {"tag": "../a", "model": model()},
        {"tag": "a"},
        {"tag": "a", "model": {"x": torch.zeros(2, device="meta")}},
    ):
        with pytest.raises(CheckpointError):
            xla_ckpt.save_checkpoint(tmp_path, options=xla_ckpt.SaveOptions(on_error="warn"), **wrong)  # type: ignore[arg-type]


def saves_where_rank_1_has_no_room(rank: int, root: Path) -> tuple[str, int | None, list[str]]:
    if rank == 1:
        LocalDirectory.get_free_bytes = lambda self: 10  # type: ignore[method-assign]
    state = {"w": torch.full((4,), float(rank))}
    rules = [("w", (("dp",),))]
    bad = xla_ckpt.save(root, "a", state, shardings=rules, options=xla_ckpt.SaveOptions(on_error="warn"))
    del LocalDirectory.get_free_bytes
    LocalDirectory.get_free_bytes = lambda self: None  # type: ignore[method-assign]
    xla_ckpt.save(root, "b", state, shardings=rules)
    error = bad.error
    assert isinstance(error, CheckpointError)
    return type(error).__name__, error.rank, xla_ckpt.list_tags(root)


def test_all_ranks_hear_of_the_rank_without_room(tmp_path: Path) -> None:
    found = run_on_ranks(saves_where_rank_1_has_no_room, 3, tmp_path)
    assert found == [("StorageError", 1, ["b"])] * 3


class Stateful:
    """Raises from `state_dict` when it is told to."""

    fails = False

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            raise RuntimeError("no state now")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing: the tests do not load it."""


CAUSES = {"disk": "free bytes", "state_dict": "no state now", "replicas": "differ between ranks"}
"""What fails one asynchronous save of a job -> what its error says."""

TOLD = {"nobody": (), "rank 0": (0,), "the last rank": (-1,), "all": (0, 1, 2)}
"""Ranks that ask the handle of the failed save for its error."""

LONG = 60.0
"""A timeout that no test comes near to."""


def fails_once(rank: int, world: int, root: Path, cause: str, **options: Any) -> list[list[str]]:
    """For each way to be told of a failed asynchronous save, what its handle and the two saves after it raise here."""
    extras, lines = Stateful(), list[str]()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("xla_ckpt").addHandler(handler)
    told = []
    kept = xla_ckpt.SaveOptions(timeout=LONG, stale="ignore", **options)

    def save(tag: str, *, fails: bool = False, async_save: bool = True) -> str:
        odd = fails and rank == world - 1
        extras.fails = odd and cause == "state_dict"
        if odd and cause == "disk":
            LocalDirectory.get_free_bytes = lambda self: 10  # type: ignore[method-assign]
        else:
            LocalDirectory.get_free_bytes = lambda self: None  # type: ignore[method-assign]
        value = float(odd and cause == "replicas")
        try:
            handles.append(
                xla_ckpt.save_checkpoint(
                    root, tag, model(value), extras={"x": extras}, async_save=async_save, options=kept
                )
            )
            handles[-1].wait()
        except CheckpointError as error:
            return str(error)
        return ""

    for name, ranks in TOLD.items():
        for async_save in (True, False):
            handles = list[xla_ckpt.SaveHandle]()
            lines.clear()
            tag = f"{name}-{async_save}".replace(" ", "-")
            assert not save(f"bad-{tag}", fails=True)
            logged = list(lines)
            if rank in [n % world for n in ranks]:
                with pytest.raises(CheckpointError, match=CAUSES[cause]):
                    handles[-1].result()
            second = save(f"left-out-{tag}", async_save=async_save)
            third = save(f"good-{tag}", async_save=async_save)
            told.append([second, third, *logged])
    xla_ckpt.finalize_checkpoint()
    return told


def warns_once(rank: int, world: int, root: Path, cause: str) -> list[list[str]]:
    return fails_once(rank, world, root, cause, on_error="warn")


@pytest.mark.parametrize(("world", "cause"), [(1, "disk"), (2, "replicas"), (3, "state_dict")])
def test_a_warning_is_all_that_becomes_of_a_failed_asynchronous_save(tmp_path: Path, world: int, cause: str) -> None:
    assert run_on_ranks(warns_once, world, world, tmp_path, cause) == [[["", ""]] * 2 * len(TOLD)] * world
    assert len(xla_ckpt.list_tags(tmp_path)) == 4 * len(TOLD)


@pytest.mark.parametrize(("world", "cause"), [(1, "disk"), *((world, cause) for world in (2, 3) for cause in CAUSES)])
def test_a_failed_asynchronous_save_is_raised_once_by_the_next_save(tmp_path: Path, world: int, cause: str) -> None:
    jobs = run_on_ranks(fails_once, world, world, tmp_path, cause)
    names = [(name, async_save) for name in TOLD for async_save in (True, False)]
    good = []
    for ranks, (name, async_save) in zip(zip(*jobs, strict=True), names, strict=True):
        tag = f"{name}-{async_save}".replace(" ", "-")
        told_all = name == "all" or (world == 1 and name != "nobody")
        assert [third for _, third, *_ in ranks] == [""] * world, name
        assert len({second for second, *_ in ranks}) == 1, name
        good += [f"left-out-{tag}"] * told_all + [f"good-{tag}"]
        second = ranks[0][0]
        if told_all:
            assert not second
        else:
            assert f"save before this call has failed, and this call has not saved tag left-out-{tag}: " in second
            assert CAUSES[cause] in second
            assert f"[tag bad-{tag}, " in second
        for _, _, *logged in ranks:
            (line,) = logged
            assert line.startswith(f"the asynchronous save of tag bad-{tag} in {tmp_path} failed: ")
            assert CAUSES[cause] in line
            assert cause == "replicas" or f"rank {world - 1}" in line
    assert xla_ckpt.list_tags(tmp_path) == good


def warned(caplog: pytest.LogCaptureFixture) -> bool:
    return "although training seems to have gone on" in caplog.text


STEP = {"step": 1}


@pytest.mark.parametrize(
    ("before", "after", "stale"),
    [
        (("step_1", 1.0, STEP), ("step_2", 1.0, STEP), True),  # another number in its name
        (("best", 1.0, STEP), ("best", 1.0, {"step": 2}), True),  # another step in its content
        (("a", 1.0, {"e": torch.zeros(2)}), ("b", 1.0, {"e": torch.ones(2)}), True),  # other arrays moved
        (("step_1", 1.0, STEP), ("step_2", 2.0, STEP), False),  # trained
        (("step_1", 1.0, STEP), ("best", 1.0, STEP), False),  # the same state under two names
        (("best", 1.0, STEP), ("best", 1.0, STEP), False),
        (("best", 1.0, STEP), ("best", 1.0, {"metric": 0.5}), False),  # a content that only one of them has
        (("best", 1.0, {"note": "a", "left": 9}), ("best", 1.0, {"note": "b", "left": 8}), False),
    ],
)
def test_a_model_that_did_not_move(
    tmp_path: Path, before: tuple[str, float, object], after: tuple[str, float, object], stale: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.WARNING)
    for tag, value, content in (before, after):
        assert not warned(caplog)
        xla_ckpt.save_checkpoint(tmp_path, tag, model(value), user_content=content)
    assert warned(caplog) == stale
    xla_ckpt.save_checkpoint(tmp_path, after[0], model(after[1]), extras={"rng": xla_ckpt.RNGState()})
    assert warned(caplog) == stale, "a member that was not there before, and random numbers, say nothing"
    xla_ckpt.save_checkpoint(tmp_path, after[0], model(after[1]), user_content=after[2])
    caplog.clear()
    tag, value, content = after
    again = tag.replace("2", "3")
    if stale and again != tag:
        with pytest.raises(xla_ckpt.SaveError, match=f"tag {tag}, although"):
            xla_ckpt.save_checkpoint(
                tmp_path, again, model(value), user_content=content, options=xla_ckpt.SaveOptions(stale="raise")
            )
        assert again not in xla_ckpt.list_tags(tmp_path)
        xla_ckpt.save_checkpoint(
            tmp_path, again, model(value), user_content=content, options=xla_ckpt.SaveOptions(stale="ignore")
        )
        assert not warned(caplog)


@pytest.mark.parametrize("layout", ["native", "xser", "pt", "dcp", "smp"])
def test_it_is_seen_in_every_layout(tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        xla_ckpt.save_checkpoint(tmp_path, f"step_{step}", model(), layout=layout)
    assert warned(caplog)


def test_one_element_is_enough_to_have_moved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    large = {"a": torch.zeros(1 << 20), "b": torch.zeros(7)}
    xla_ckpt.save(tmp_path, "step_1", large)
    large["a"][1_000_000] = 1
    xla_ckpt.save(tmp_path, "step_2", large)
    assert not warned(caplog)


def test_a_damaged_tag_before_it_does_not_matter(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "step_1", model())
    next((tmp_path / "step_1").rglob("*.safetensors")).write_bytes(b"")
    xla_ckpt.save_checkpoint(tmp_path, "step_2", model(), options=xla_ckpt.SaveOptions(stale="raise"))
    assert xla_ckpt.verify(tmp_path, "step_2").ok


def test_a_thread_may_wait_for_the_handle(tmp_path: Path) -> None:
    handle = xla_ckpt.save_checkpoint(tmp_path, "a", model(), async_save=True)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(handle.wait(60)))
    thread.start()
    thread.join()
    assert found == [True]
    assert handle.error is None
