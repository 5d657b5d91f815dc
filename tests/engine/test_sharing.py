"""Saves that share files with an earlier tag: what is written, what is not, and that each tag is whole by itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.runs import environment
from xla_ckpt.features.reuse import reuse
from xla_ckpt.storage.local import LocalDirectory

WIDTH = 600
"""A matrix of so many rows and columns is larger than what is worth a file apart."""

SHARE = xla_ckpt.SaveOptions(share=True, stale="ignore")


def a_state(seed: int, still: int = 3) -> dict[str, torch.Tensor]:
    """Arrays of which all but one are the same whatever the seed is, if it is not 0."""
    arrays = {f"still.{i}": torch.full((WIDTH, WIDTH), float(i)) for i in range(still)}
    return {**arrays, "trained": torch.randn(50, 50, generator=torch.Generator().manual_seed(seed))}


STILL_BYTES, TRAINED_BYTES = 3 * WIDTH * WIDTH * 4, 50 * 50 * 4


def saves(
    root: object, tag: str, state: Any, options: xla_ckpt.SaveOptions = SHARE, **more: Any
) -> xla_ckpt.SaveReport:
    return xla_ckpt.save_checkpoint(root, tag, state, options=options, **more).result()  # type: ignore[arg-type]


def three_saves(root: object, **more: Any) -> list[xla_ckpt.SaveReport]:
    """The third one shares: after the first, nobody knew yet what stays."""
    return [saves(root, f"step_{n}", a_state(n), **more) for n in range(3)]


def is_there(root: object, tag: str, seed: int) -> bool:
    """Whether a tag is whole, and has the state of a seed."""
    assert xla_ckpt.verify(root, tag).problems == []  # type: ignore[arg-type]
    model = xla_ckpt.restore(root, tag).tree["model"]  # type: ignore[arg-type]
    return model.keys() == a_state(seed).keys() and all(torch.equal(model[k], v) for k, v in a_state(seed).items())


def inodes(tag: Path) -> dict[int, str]:
    return {path.stat().st_ino: path.name for path in (tag / "model").iterdir()}


def in_common(one: Path, other: Path) -> list[str]:
    """The names in `other` of the files that are files of `one`, too."""
    return [name for number, name in inodes(other).items() if number in inodes(one)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_stays_is_not_written_again(tmp_path: Path, asynchronous: bool) -> None:
    reports = [saves(tmp_path, f"step_{n}", a_state(n), num_kept_ckpts=2, async_save=asynchronous) for n in range(5)]
    whole = STILL_BYTES + TRAINED_BYTES
    assert [report.nbytes for report in reports] == [whole, whole, *[TRAINED_BYTES] * 3]
    assert [report.shared for report in reports] == [0, 0, *[STILL_BYTES] * 3]
    assert xla_ckpt.list_tags(tmp_path) == ["step_3", "step_4"]  # those that wrote it are gone
    assert in_common(tmp_path / "step_3", tmp_path / "step_4") == ["00001-of-00001-shared-1.safetensors"]
    assert is_there(tmp_path, "step_3", 3)
    assert is_there(tmp_path, "step_4", 4)


def test_without_the_option_nothing_is_shared(tmp_path: Path) -> None:
    reports = three_saves(tmp_path, options=xla_ckpt.SaveOptions(stale="ignore"))
    assert [report.shared for report in reports] == [0, 0, 0]
    assert "share" not in reports[2].phases
    assert in_common(tmp_path / "step_1", tmp_path / "step_2") == []


def test_what_the_program_does_not_train_has_a_file_of_its_own_from_the_first_save_on(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3))
    model[0].requires_grad_(False)
    frozen = sum(p.nbytes for p in model[0].parameters())
    optimizer = torch.optim.AdamW(model[1].parameters())
    reports = []
    for step in range(2):
        model(torch.randn(2, WIDTH)).sum().backward()
        optimizer.step()
        reports.append(xla_ckpt.save_checkpoint(tmp_path, f"{step}", model, optimizer, options=SHARE).result())
    assert [report.shared for report in reports] == [0, frozen]
    assert in_common(tmp_path / "0", tmp_path / "1") == ["00001-of-00001-shared-1.safetensors"]
    assert xla_ckpt.verify(tmp_path, "1").ok


def test_readers_without_the_manifest_find_each_array_once(tmp_path: Path) -> None:
    for n in range(5):
        state = a_state(n)
        state["still.1"] += n // 3  # it stays until it does not
        saves(tmp_path, f"step_{n}", state)
        found: dict[str, torch.Tensor] = {}
        for file in (tmp_path / f"step_{n}" / "model").iterdir():
            arrays = load_file(file)
            assert not found.keys() & arrays.keys(), f"save {n}: old bytes stand beside new ones of the same name"
            found |= arrays
        assert all(torch.equal(found[name], value) for name, value in state.items())
        assert len(found) == len(state)


def test_what_has_changed_after_all_costs_one_save(tmp_path: Path) -> None:
    written = []
    for n in range(7):
        state = a_state(n)
        state["still.1"] += 1 if n == 3 else 0
        written.append(saves(tmp_path, f"step_{n}", state).nbytes - TRAINED_BYTES)
    one = STILL_BYTES // 3
    assert written == [3 * one, 3 * one, 0, 3 * one, one, one, 0]  # the other two have a file apart from the fourth on


def test_a_byte_at_any_place_is_a_change(tmp_path: Path) -> None:
    state = {"w": torch.zeros(WIDTH, WIDTH)}
    saves(tmp_path, "0", state)
    for n, at in enumerate((0, WIDTH * WIDTH // 2, WIDTH * WIDTH - 1), 1):
        state["w"].view(-1)[at] = n
        assert saves(tmp_path, str(n), state).shared == 0
        assert torch.equal(xla_ckpt.restore(tmp_path, str(n)).tree["model"]["w"], state["w"])
    assert saves(tmp_path, "again", state).shared == state["w"].nbytes


def test_the_same_bytes_of_another_type_or_box_are_others(tmp_path: Path) -> None:
    saves(tmp_path, "0", {"w": torch.zeros(WIDTH, WIDTH)})
    for n, other in enumerate((torch.zeros(WIDTH, WIDTH, dtype=torch.int32), torch.zeros(WIDTH // 2, 2 * WIDTH)), 1):
        assert saves(tmp_path, str(n), {"w": other}).shared == 0
        loaded = xla_ckpt.restore(tmp_path, str(n)).tree["model"]["w"]
        assert (loaded.dtype, loaded.shape) == (other.dtype, other.shape)


def test_another_tag_is_the_base_by_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves(tmp_path, "first", {"w": torch.zeros(WIDTH, WIDTH)})
    saves(tmp_path, "second", {"w": torch.ones(WIDTH, WIDTH)})
    options = xla_ckpt.SaveOptions(share="first", stale="ignore")
    assert saves(tmp_path, "third", {"w": torch.zeros(WIDTH, WIDTH)}, options).nbytes == 0
    assert in_common(tmp_path / "first", tmp_path / "third")
    assert "there is no earlier tag" not in caplog.text
    options = xla_ckpt.SaveOptions(share="none", stale="ignore")
    assert saves(tmp_path, "fourth", {"w": torch.zeros(WIDTH, WIDTH)}, options).shared == 0
    assert "there is no tag none" in caplog.text


def test_a_tag_that_is_replaced_can_be_the_base(tmp_path: Path) -> None:
    reports = [saves(tmp_path, "latest", a_state(n)) for n in range(4)]
    assert [report.shared for report in reports] == [0, 0, STILL_BYTES, STILL_BYTES]
    assert is_there(tmp_path, "latest", 3)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [("../a", xla_ckpt.InvalidTagError), ("", xla_ckpt.InvalidTagError), (1, xla_ckpt.CheckpointError)],
)
def test_what_is_no_tag_cannot_be_the_base(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        xla_ckpt.SaveOptions(share=wrong)


@pytest.mark.parametrize("layout", ["xser", "dcp", ("native", "pt")])
def test_other_layouts_refuse_it(tmp_path: Path, layout: Any) -> None:
    with pytest.raises(xla_ckpt.UsageError, match="native layout alone"):
        saves(tmp_path, "a", a_state(0), layout=layout)
    assert xla_ckpt.list_tags(tmp_path) == []


def test_damage_is_found_in_every_tag_that_has_the_file(tmp_path: Path) -> None:
    for n in range(4):
        saves(tmp_path, f"step_{n}", a_state(n))
    with (tmp_path / "step_3/model/00001-of-00001-shared-1.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert [xla_ckpt.verify(tmp_path, f"step_{n}").ok for n in range(4)] == [True, False, False, False]


def test_a_repair_of_one_tag_leaves_the_other_one_as_it_is(tmp_path: Path) -> None:
    options = xla_ckpt.SaveOptions(share=True, stale="ignore", parity="file")
    for n in range(4):
        saves(tmp_path, f"step_{n}", a_state(n), options)
    one, other = (tmp_path / f"step_{n}/model/00001-of-00001-shared-1.safetensors" for n in (2, 3))
    with one.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    damaged = one.read_bytes()
    assert xla_ckpt.repair(tmp_path, "step_2") == ("model/00001-of-00001-shared-1.safetensors",)
    assert is_there(tmp_path, "step_2", 2)
    assert other.read_bytes() == damaged  # a repair makes new files
    assert xla_ckpt.repair(tmp_path, "step_3") == ("model/00001-of-00001-shared-1.safetensors",)
    assert is_there(tmp_path, "step_3", 3)


def test_pins_conversions_and_deletions_leave_the_other_tag_as_it_is(tmp_path: Path) -> None:
    three_saves(tmp_path)
    checkpoints = xla_ckpt.Checkpoints(tmp_path)
    checkpoints.pin("step_1")
    xla_ckpt.convert(tmp_path, tmp_path / "out", "step_2", to="native")
    checkpoints.delete("step_2")
    assert is_there(tmp_path, "step_1", 1)
    assert is_there(tmp_path / "out", "step_2", 2)


def test_a_copy_of_a_tag_is_whole(tmp_path: Path) -> None:
    three_saves(tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "step_2", tmp_path / "copy" / "step_2")
    shutil.rmtree(tmp_path / "run")
    assert is_there(tmp_path / "copy", "step_2", 2)


def test_where_the_storage_refuses_a_second_name_the_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(LocalDirectory, "link", refuses)
    reports = three_saves(tmp_path)
    assert [report.shared for report in reports] == [0, 0, 0]
    assert is_there(tmp_path, "step_2", 2)
    assert "written again, and not shared" in caplog.text


PROGRAM = """
import sys, torch, xla_ckpt
state = {"w": torch.zeros(600, 600)}
for tag in ("a", "b"):
    report = xla_ckpt.save_checkpoint(sys.argv[1], tag, state, options=xla_ckpt.SaveOptions(share=True)).result()
print(report.nbytes, report.shared, xla_ckpt.verify(sys.argv[1], "b").ok)
"""


def test_a_file_system_without_hard_links(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("there is no strace")
    done = subprocess.run(
        ["strace", "-f", "-o", str(tmp_path / "trace"), "-e", "trace=linkat", "-e", "inject=linkat:error=EPERM",
         sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "ptrace" in done.stderr.lower():
        pytest.skip("strace may not trace here")
    assert "INJECTED" in (tmp_path / "trace").read_text()
    assert done.stdout.split() == [str(600 * 600 * 4), "0", "True"]


@pytest.mark.parametrize("broken", ["manifest.json", "model/00001-of-00001-apart.safetensors"])
def test_a_damaged_base_is_no_error(tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture) -> None:
    saves(tmp_path, "step_0", a_state(0))
    saves(tmp_path, "step_1", a_state(1))
    (tmp_path / "step_1" / broken).write_bytes(b"x" * 5000)
    options = xla_ckpt.SaveOptions(share="step_1", stale="ignore")
    assert saves(tmp_path, "step_2", a_state(2), options).shared == 0
    assert is_there(tmp_path, "step_2", 2)
    assert caplog.text


def test_a_base_that_is_deleted_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves(tmp_path, "step_0", a_state(0))
    saves(tmp_path, "step_1", a_state(1))
    link = LocalDirectory.link

    def late(*args: Any) -> None:
        shutil.rmtree(tmp_path / "step_1")
        link(*args)

    monkeypatch.setattr(LocalDirectory, "link", late)
    assert saves(tmp_path, "step_2", a_state(2)).shared == 0
    assert is_there(tmp_path, "step_2", 2)


def test_a_save_that_is_interrupted_while_it_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_saves(tmp_path)
    compare = reuse._has_known_digests

    def interrupted(*args: Any) -> bool:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return compare(*args)

    monkeypatch.setattr(reuse, "_has_known_digests", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saves(tmp_path, "step_3", a_state(3))
    monkeypatch.undo()
    assert xla_ckpt.list_tags(tmp_path) == ["step_0", "step_1", "step_2"]
    assert saves(tmp_path, "step_4", a_state(4)).shared == STILL_BYTES
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".new")) == []


def test_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = three_saves("memory://sharing")
    assert [report.shared for report in reports] == [0, 0, STILL_BYTES]
    assert is_there("memory://sharing", "step_2", 2)


@pytest.mark.parametrize("mode", ["host", "device", "overlap"])
def test_what_is_not_in_host_memory_yet_is_written(tmp_path: Path, mode: Any) -> None:
    options = xla_ckpt.SaveOptions(share=True, stale="ignore", snapshot=mode)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reports = []
    for n in range(2):
        handle = xla_ckpt.save_checkpoint(tmp_path, f"{n}", model, optimizer, async_save=True, options=options)
        model(torch.ones(WIDTH)).sum().backward()
        optimizer.step()
        reports.append(handle.result())
    assert (reports[1].shared == 0) == (mode == "overlap")
    assert xla_ckpt.verify(tmp_path, "1").ok
    assert torch.equal(xla_ckpt.restore(tmp_path, "1").tree["model"]["weight"], model.weight)


def test_with_a_directory_in_front_of_a_bucket(tmp_path: Path) -> None:
    options = xla_ckpt.SaveOptions(share=True, stale="ignore", local=tmp_path)
    reports = three_saves("memory://far", options=options)
    xla_ckpt.finalize_checkpoint()
    assert reports[2].shared == STILL_BYTES
    assert is_there("memory://far", "step_2", 2)  # all of it has been sent


# --- jobs ----------------------------------------------------------------------------------------------------------


def of_rank(rank: int, world: int, seed: int) -> dict[str, torch.Tensor]:
    """This rank's rows of the state."""
    rows = WIDTH // world
    state = a_state(seed)
    return {k: v[rank * rows : (rank + 1) * rows].clone() if k != "trained" else v for k, v in state.items()}


def saves_as_rank(rank: int, root: Path, world: int, seeds: list[int]) -> list[tuple[int, int]]:
    reports = []
    for seed in seeds:
        handle = xla_ckpt.save_checkpoint(
            root, f"step_{seed}", of_rank(rank, world, seed), mesh=xla_ckpt.Mesh(tp=world),
            shardings=[("still", ("tp",))], options=SHARE,
        )  # fmt: skip
        reports.append(handle.result())
    return [(report.nbytes, report.shared) for report in reports]


def test_ranks_share_what_each_of_them_wrote_and_other_meshes_share_later(tmp_path: Path) -> None:
    half, no = STILL_BYTES // 2, TRAINED_BYTES
    told = run_on_ranks(saves_as_rank, 2, tmp_path, 2, [0, 1, 2, 3])
    assert [shared for _, shared in told[0]] == [0, 0, half, half]
    assert [shared for _, shared in told[1]] == [0, half, half, half]  # nothing that it has is trained
    assert sum(nbytes for of_rank in told for nbytes, _ in of_rank[2:]) == 2 * no
    for seed in range(4):
        assert is_there(tmp_path, f"step_{seed}", seed)
    # One rank has other boxes: it writes all of it, apart.
    assert saves_as_rank(0, tmp_path, 1, [4, 5, 6])[0] == (STILL_BYTES + no, 0)
    assert is_there(tmp_path, "step_6", 6)
    assert in_common(tmp_path / "step_5", tmp_path / "step_6")


def saves_a_stage(rank: int, root: Path) -> list[tuple[int, int]]:
    """Each of two pipeline stages has arrays of its own, and one that both have."""
    reports = []
    for seed in range(3):
        state = {f"stage.{rank}.{name}": value for name, value in a_state(seed).items()}
        state["tied"] = torch.ones(WIDTH, WIDTH)
        handle = xla_ckpt.save_checkpoint(root, f"step_{seed}", state, mesh=xla_ckpt.Mesh(pp=2), options=SHARE)
        reports.append(handle.result())
    return [(report.nbytes, report.shared) for report in reports]


def test_what_two_stages_have_is_shared_once(tmp_path: Path) -> None:
    one = WIDTH * WIDTH * 4
    first, second = run_on_ranks(saves_a_stage, 2, tmp_path)
    assert (first[2], second[2]) == ((TRAINED_BYTES, STILL_BYTES + one), (TRAINED_BYTES, STILL_BYTES))
    assert xla_ckpt.verify(tmp_path).ok
    assert len(xla_ckpt.restore(tmp_path).tree["model"]) == 2 * 4 + 1


def _in_its_bytes(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[200_000] ^= 1
    file.write_bytes(data)


def _in_its_header(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)


def _in_its_length(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE = {"its bytes": _in_its_bytes, "its header": _in_its_header, "its length": _in_its_length, "all": Path.unlink}


@pytest.mark.parametrize(
    ("damage", "parity", "named"),
    [*((damage, parity, False) for damage in DAMAGE for parity in ("block", "file")), ("its bytes", "file", True)],
)
def test_a_file_that_was_damaged_since_is_written_anew_where_parity_is_made_of_it(
    tmp_path: Path, damage: str, parity: Any, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Parity of damaged bytes gave them back as they were, and called the tag sound."""

    def saved(number: int) -> int:
        share = f"step_{number - 1}" if named and number else True
        options = xla_ckpt.SaveOptions(share=share, parity=parity, stale="ignore")
        return saves(tmp_path, f"step_{number}", a_state(number), options).nbytes

    assert [saved(number) for number in range(3)][-1] == TRAINED_BYTES
    assert "not shared" not in caplog.text
    (file,) = (tmp_path / "step_2").rglob("*-shared-*.safetensors")
    DAMAGE[damage](file)
    assert saved(3) == STILL_BYTES + TRAINED_BYTES
    assert "of tag step_2 is written again, and not shared" in caplog.text or (
        "nothing is shared with tag step_2" in caplog.text
    )
    assert is_there(tmp_path, "step_3", 3)
    assert xla_ckpt.repair(tmp_path, "step_3") == ()
    saved(4)
    assert saved(5) == TRAINED_BYTES, "what was written anew is shared again"


def _shares_damage_on_one_rank(rank: int, root: Path) -> list[int]:
    options = xla_ckpt.SaveOptions(share=True, parity="file", stale="ignore")
    written = []
    for number in range(4):
        if number == 3 and rank == 0:
            _in_its_bytes(next(iter(sorted((root / "step_2").rglob("*-shared-*.safetensors")))))
        tree = {"still": torch.full((WIDTH, WIDTH), float(rank)), "trained": torch.full((9,), number)}
        handle = xla_ckpt.save(
            root, f"step_{number}", tree, mesh=xla_ckpt.Mesh(tp=2), options=options,
            shardings=[("still", ("tp",)), ("trained", ("tp",))],
        )  # fmt: skip
        written.append(handle.result().nbytes)
    return written


def test_damage_in_the_file_of_one_rank_has_that_rank_write_it_anew(tmp_path: Path) -> None:
    whole = 4 * WIDTH * WIDTH + 72
    damaged, sound = run_on_ranks(_shares_damage_on_one_rank, 2, tmp_path)
    assert (damaged, sound) == ([whole, whole, 72, whole], [whole, whole, 72, 72])
    assert xla_ckpt.verify(tmp_path, "step_3").ok
    assert not xla_ckpt.verify(tmp_path, "step_2").ok
    assert xla_ckpt.repair(tmp_path, "step_3") == ()
    assert len(xla_ckpt.repair(tmp_path, "step_2")) == 1
