"""The benchmark runs: rows at a tiny size, in processes of their own, and what becomes of one that fails."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import bucket_calls, buckets, loads, measures, saves
from benchmarks.peers.check import GUARDS
from benchmarks.peers.contenders import groups
from benchmarks.peers.results import Results
from benchmarks.peers.rows import Group, Row, Saved
from benchmarks.peers.running import Runner, run
from benchmarks.peers.states import State
from benchmarks.peers.targets import TARGETS
from tests import nursery


def measured(row: Row, scratch: Path, rounds: int = 1) -> Results:
    results = Results({})
    runner = Runner(scratch, limit=60, patience=0)
    assert run([Group("g", "A group", (row,))], rounds, runner, results, lambda _: None) == rounds
    return results


def test_every_row_names_functions_that_are_there() -> None:
    rows = [row for group in groups(1.0) for row in group.rows]
    assert len(rows) > 70
    for row in rows:
        if row.function in (measures.save, measures.stall, measures.loop):
            assert hasattr(saves, str(row.args[0])), row
        if row.saved:
            assert hasattr(loads, str(row.args[0])), row
            assert hasattr(saves, row.saved.saver), row
    for group in groups(1.0):
        assert len({row.name for row in group.rows}) == len(group.rows)


def test_a_save_and_a_load_of_cpu_tensors_are_measured_checked_and_written(tmp_path: Path) -> None:
    docs, scratch = tmp_path / "docs", tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "mine").write_text("kept")
    words = ["--gb", "0.001", "--rounds", "1", "--patience", "0", "--scratch", str(scratch)]
    assert command.main([*words, "--only", "cpu-cold", "--write", str(docs)]) == 0
    results = Results.from_json(json.loads((docs / "performance.json").read_text()))
    for name in ("xla_ckpt", "`torch.load(mmap=True)`", "safetensors", "`dcp.load`"):
        assert not results.rows["cpu-cold"][name].error, name
        assert results.runs("cpu-cold", name), name
    text = (docs / "performance.md").read_text()
    assert "\n| xla_ckpt | " in text
    assert "performance-notes.md" in text
    assert os.listdir(scratch) == ["mine"]

    assert command.main([*words, "--only", "cpu-cold", "--short", "--more", "--write", str(docs)]) == 0
    more = Results.from_json(json.loads((docs / "performance.json").read_text()))
    assert more.runs("cpu-cold", "xla_ckpt")[:-1] == results.runs("cpu-cold", "xla_ckpt")
    assert more.runs("cpu-cold", "`dcp.load`") == results.runs("cpu-cold", "`dcp.load`")  # no target is about it
    assert (more.about["rounds"], results.about["rounds"]) == (2, 1)
    assert more.about["measured"] > results.about["measured"]
    assert "(2 interleaved rounds" in (docs / "performance.md").read_text()
    with pytest.raises(SystemExit, match="another one: {'gb': 0.001}"):
        command.main(["--gb", "0.002", "--more", "--write", str(docs)])


def test_a_fallen_ratio_fails_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run_with(stall: float) -> int:
        rows = {"xla_ckpt": stall, "one memcpy of the state into warm memory": 1.0}
        found = {name: {"runs": [{"seconds": s, "processor": s}], "error": ""} for name, s in rows.items()}
        (tmp_path / "committed.json").write_text(json.dumps({"about": {"gb": 0.001}, "rows": {"cpu-stall": found}}))
        words = ["--gb", "0.001", "--patience", "0", "--scratch", str(tmp_path), "--only", "cpu-stall"]
        return command.main([*words, "--check", "--committed", str(tmp_path / "committed.json")])

    assert run_with(1e9) == 0  # the committed run was far worse
    assert run_with(1e-9) == 1
    said = capsys.readouterr().err
    assert "FALLEN Stalls: CPU tensors, against one memcpy: " in said
    assert (
        "in 5 rounds; committed 1e-09 x, of one round: 0% of that speed" in said
    )  # and 4 of them since it was in doubt


def loads_nothing(name: str, device: str, gb: float, count: int, digest: str, warm: bool, directory: str) -> object:
    loads.torch_load = lambda state, folder: None  # type: ignore[assignment]
    return measures.load(name, device, gb, count, digest, warm, directory)


def test_a_contender_that_loads_nothing_has_no_time(tmp_path: Path) -> None:
    args = ("torch_load", "cpu", 0.001, 0)
    results = measured(Row("a", loads_nothing, args, "load", Saved("torch_save", "cpu", 0.001), xla=False), tmp_path)
    outcome = results.rows["g"]["a"]
    assert outcome.runs == []
    assert outcome.error.startswith("WrongError: the digest of what was loaded is ")


def test_saves_and_loads_of_an_object_store_are_measured_and_their_requests_counted(tmp_path: Path) -> None:
    groups_ = {group.key: {row.name: row for row in group.rows} for group in buckets.on_buckets(0.001)}
    for name in ("xla_ckpt", buckets.BARE):
        for key in ("bucket-save", "bucket-load", "bucket-part"):
            outcome = measured(groups_[key][name], tmp_path).rows["g"][name]
            assert outcome.error == "", (key, name)
            (figures,) = outcome.runs
            assert figures["requests"] >= 1
        assert figures["nbytes"] < State("cpu", 0.001, buckets.TENSORS).nbytes / 3
    (figures,) = measured(groups_["bucket-save"][buckets.BARE], tmp_path).runs("g", buckets.BARE)
    assert figures["requests"] == buckets.TENSORS


def loads_zeros_from_a_bucket(name: str, gb: float, share: int, directory: str) -> object:
    class Zeros(bucket_calls.Bare):
        def load(self, wanted: bucket_calls.Shapes, address: str, tag: str) -> bucket_calls.Values:
            found = super().load(wanted, address, tag)
            return {name: value * 0 for name, value in found.items()}

    buckets.CONTENDERS[name] = Zeros
    return buckets.load(name, gb, share, directory)


def test_a_contender_that_loads_something_else_from_an_object_store_has_no_time(tmp_path: Path) -> None:
    row = Row("a", loads_zeros_from_a_bucket, ("a", 0.001, 1), xla=False)
    outcome = measured(row, tmp_path).rows["g"]["a"]
    assert outcome.runs == []
    assert outcome.error == "WrongError: what was loaded is not what was saved"


def hangs(directory: str) -> None:
    os.read(os.pipe()[0], 1)


def dies(directory: str) -> None:
    os.write(2, b"what it said last\n")
    os._exit(3)


def test_a_row_that_hangs_or_dies_says_so_and_is_not_tried_again(tmp_path: Path) -> None:
    results = Results({})
    runner = Runner(tmp_path, limit=1, patience=0)
    rows = (Row("hangs", hangs, (), xla=False), Row("dies", dies, (), xla=False))
    said: list[str] = []
    run([Group("g", "A group", rows)], 2, runner, results, said.append)
    assert len(said) == runner.measured == 2
    assert results.rows["g"]["hangs"].error == "TimeoutError: it took longer than 1 s"
    assert results.rows["g"]["dies"].error == "what it said last"


def answers(directory: str) -> dict[str, float]:
    return {"seconds": 1.0}


def test_rows_take_turns_and_no_round_begins_that_would_end_too_late(tmp_path: Path) -> None:
    rows = (
        Row("a", answers, (), xla=False),
        Row("b", answers, (), xla=False),
        Row("c", answers, (), xla=False, rounds=1),
    )
    group = Group("g", "A group", rows)
    said: list[str] = []
    assert run([group], 2, Runner(tmp_path, 60, 0), Results({}), said.append, seconds=60) == 2
    assert [line.split()[3] for line in said] == ["a", "b", "c", "b", "a"]
    results = Results({})
    assert run([group], 5, Runner(tmp_path, 60, 0), results, lambda _: None, seconds=1e-3) == 1
    assert [len(outcome.runs) for outcome in results.rows["g"].values()] == [1, 1, 1]


def test_where_time_is_short_the_rows_of_targets_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, takes = [0.0], {"of a target": 1.0, "of a peer": 20.0}

    def measure(_: Runner, row: Row) -> dict[str, float]:
        now[0] += takes[row.name]
        return {"seconds": takes[row.name]}

    monkeypatch.setattr("benchmarks.peers.running.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Runner, "measure", measure)
    rows = (Row("of a target", answers, (), xla=False, short=True), Row("of a peer", answers, (), xla=False))
    results = Results({})
    assert run([Group("g", "A group", rows)], 3, Runner(tmp_path, 60, 0), results, lambda _: None, seconds=30) == 3
    assert [len(outcome.runs) for outcome in results.rows["g"].values()] == [3, 1]


@pytest.mark.xla
def test_xla_tensors_are_saved_and_loaded_by_ours_and_by_a_peer(tmp_path: Path) -> None:
    for saver, loader in (("ours", "ours"), ("xser", "xser")):
        args = (loader, "xla", 0.001, 0)
        results = measured(Row("a", measures.load, args, "load", Saved(saver, "xla", 0.001)), tmp_path / saver)
        assert results.rows["g"]["a"].error == ""
        assert results.runs("g", "a")[0]["nbytes"] == State("cpu", 0.001).nbytes


def test_the_short_form_has_what_the_targets_and_the_check_need() -> None:
    short = {g.key: {row.name for row in g.rows} for g in command._chosen(groups(1.0), "", short=True)}
    run_ = Results({})
    for group, names in short.items():
        for name in names:
            figures = {
                "seconds": 1.0,
                "processor": 1.0,
                "after": 1.0,
                "alone": 1.0,
                "nbytes": 1.0,
                "lost": 1.0,
                "cpu": 1.0,
            }
            run_.outcome(group, name).runs.append(figures)
    assert [target.what for target in TARGETS if target.source.read(run_) is None] == []
    assert [guard.what for guard in GUARDS if guard.source.read(run_) is None] == (
        [] if "accelerator" in short else ["Stalls: a simulated accelerator, against a copy"]
    )


def test_a_row_of_another_environment_runs_with_its_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nursery, "LIGHT", ("torch", "pytest"))  # all that these rows need, which takes seconds less
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -X seconds=1 "$@"\n')
    python.chmod(0o755)
    saved = Saved("torch_save", "cpu", 0.001, python=str(python))
    row = Row("a", loads_there, ("torch_load", "cpu", 0.001, 0), "load", saved, xla=False, python=str(python))
    assert measured(row, tmp_path / "scratch").runs("g", "a") == [{"seconds": 1.0}]
    gone = Row("a", answers, (), xla=False, python=str(tmp_path / "none"))
    assert measured(gone, tmp_path / "scratch").rows["g"]["a"].error.startswith("FileNotFoundError: ")


def loads_there(name: str, device: str, gb: float, count: int, digest: str, warm: bool, directory: str) -> object:
    return {"seconds": float(sys._xoptions["seconds"])}
