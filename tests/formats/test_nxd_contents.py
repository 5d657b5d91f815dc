"""Tags in neuronx-distributed's layouts: objects in them, changes after the call, damage, and retention."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.formats.references import opened, whole
from tests.formats.same import as_theirs
from tests.formats.writing import LAYOUTS, names, unlike
from tests.runs import names_in
from xla_ckpt.core.manifest import manifest_json

FIRST = "dp_rank_00_tp_rank_00_pp_rank_00.pt"


class Own:
    """An object of the program's own class, which nothing but pickle knows."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and repr(self.value) == repr(other.value)


CONTENT = {
    "step": 7, "tuple": (1, [2.5, None]), "ema": [torch.arange(3.0), (torch.ones(2, dtype=torch.bfloat16), "x")],
    "numpy": np.arange(6, dtype=np.int16).reshape(2, 3), "scalar": torch.tensor(0.5),
    "empty": torch.zeros(0, 3), 5: "int",
}  # fmt: skip


@LAYOUTS
def test_tensors_anywhere_in_scheduler_and_user_content(layout: str, tmp_path: Path) -> None:
    scheduler = {"best": torch.tensor(3.0), "last": [1, (torch.zeros(2, 2), 2)]}
    xla_ckpt.save_checkpoint(tmp_path, "t", {"w": torch.ones(1)}, None, scheduler, CONTENT, layout=layout)
    assert names(tmp_path / "t") >= {"scheduler.pt", "user_content.pt", "done", "checkpoint", "manifest.json"}
    # numpy arrays are tensors to neuronx-distributed, which has no other arrays.
    theirs = {**CONTENT, "numpy": torch.from_numpy(CONTENT["numpy"])}
    for trust in (True, False):
        assert unlike(torch.load(tmp_path / "t/user_content.pt", weights_only=not trust), theirs) == []
        assert unlike(torch.load(tmp_path / "t/scheduler.pt", weights_only=not trust), scheduler) == []
    target: dict[str, Any] = {}
    found = xla_ckpt.load_checkpoint(tmp_path, scheduler=target).user_content
    assert isinstance(found["numpy"], np.ndarray)
    assert (found["numpy"] == CONTENT["numpy"]).all()
    assert (
        unlike({k: v for k, v in found.items() if k != "numpy"}, {k: v for k, v in CONTENT.items() if k != "numpy"})
        == []
    )
    assert unlike(target, scheduler) == []
    as_theirs(tmp_path / "t")
    assert unlike(xla_ckpt.load_checkpoint(tmp_path, scheduler={}).user_content, theirs) == []


@LAYOUTS
def test_objects_of_own_classes(layout: str, tmp_path: Path) -> None:
    content = {"config": Own({"a": (1, 2)}), "list": [torch.ones(2), Own(torch.arange(2.0))], "again": Own("s")}
    with pytest.warns(UserWarning, match="will be pickled"):
        xla_ckpt.save_checkpoint(
            tmp_path, "t", model={"w": torch.ones(2)}, scheduler={"own": Own(1)}, user_content=content, layout=layout
        )
    found = torch.load(tmp_path / "t/user_content.pt", weights_only=False)
    assert (found["config"], found["again"]) == (content["config"], content["again"])
    assert unlike(found["list"][0], torch.ones(2)) == unlike(found["list"][1].value, torch.arange(2.0)) == []
    assert torch.load(tmp_path / "t/scheduler.pt", weights_only=False) == {"own": Own(1)}
    model, scheduler = {"w": torch.zeros(2)}, {"own": None}
    for manifest in (True, False):
        if not manifest:
            as_theirs(tmp_path / "t")
        with pytest.raises(xla_ckpt.UntrustedObjectError, match="trust_pickle=True"):
            xla_ckpt.load_checkpoint(tmp_path, model=model, scheduler=scheduler)
        assert model["w"].tolist() == [0, 0]
        got = xla_ckpt.load_checkpoint(tmp_path, model=model, scheduler=scheduler, trust_pickle=True).user_content
        assert (got["config"], got["again"]) == (content["config"], content["again"])
        assert scheduler["own"] == Own(1)
        assert model.pop("w").tolist() == [1, 1]
        model["w"] = torch.zeros(2)


@LAYOUTS
def test_nothing_is_written_of_what_cannot_be_pickled(layout: str, tmp_path: Path) -> None:
    class Local:
        pass

    with pytest.warns(UserWarning, match="will be pickled"), pytest.raises(xla_ckpt.UnsupportedStateError) as caught:
        xla_ckpt.save_checkpoint(tmp_path, "t", model={"w": torch.ones(2)}, user_content=[Local()], layout=layout)
    assert caught.value.leaf.startswith("user_content")
    assert names_in(tmp_path) == []


@LAYOUTS
def test_what_changes_after_an_asynchronous_call_is_not_saved(layout: str, tmp_path: Path) -> None:
    """N6."""
    model = torch.nn.Linear(300, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        optimizer.state[p] = {"step": torch.tensor(9.0), "exp_avg": p.data + 1, "exp_avg_sq": p.data + 2}
    content = {"list": [1, {"deep": torch.ones(3)}], "own": Own([1]), "array": np.ones(2)}
    scheduler = {"last_lr": [0.5], "t": torch.tensor(1.0)}
    want = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict(), content, scheduler))
    with pytest.warns(UserWarning, match="will be pickled"):
        handle = xla_ckpt.save_checkpoint(
            tmp_path, "t", model, optimizer, scheduler, content, layout=layout, async_save=True
        )
    for p in model.parameters():
        p.data.fill_(-1)
        for value in optimizer.state[p].values():
            value.fill_(-1)
    optimizer.param_groups[0]["lr"] = -1
    optimizer.param_groups.append({"params": []})
    content["list"][1]["deep"].fill_(-1)
    content["list"].append("late")
    content["own"].value.append("late")
    content["array"][:] = -1
    scheduler["last_lr"][0], _ = -1, scheduler["t"].fill_(-1)
    handle.result()
    assert unlike(whole(tmp_path / "t/model" / FIRST), want[0]) == []
    found = whole(tmp_path / "t/optim" / FIRST)
    assert unlike(found["state"], want[1]["state"]) == []
    assert [g["lr"] for g in found["param_groups"]] == [0.001]
    user = torch.load(tmp_path / "t/user_content.pt", weights_only=False)
    assert user["own"] == want[2]["own"]
    assert unlike([user["list"], user["array"]], [want[2]["list"], torch.from_numpy(want[2]["array"])]) == []
    assert unlike(opened(tmp_path / "t/scheduler.pt"), want[3]) == []
    assert xla_ckpt.verify(tmp_path, "t").ok


def save(root: Path, tag: str, value: float, layout: str | tuple[str, ...], **options: Any) -> None:
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.data.fill_(value)
        optimizer.state[p] = {"step": torch.tensor(value), "exp_avg": p.data + 1, "exp_avg_sq": p.data + 2}
    xla_ckpt.save_checkpoint(
        root,
        tag,
        model,
        optimizer,
        {"last": value},
        {"at": value, "t": torch.full((3,), value)},
        layout=layout,
        **options,
    )


def load(root: Path, tag: str | None) -> tuple[Any, ...]:
    """Every value that a load returns."""
    model, scheduler = torch.nn.Linear(3, 5), dict[str, Any]()
    optimizer = torch.optim.AdamW(model.parameters())
    content = xla_ckpt.load_checkpoint(root, tag, model, optimizer, scheduler).user_content
    values = {float(v) for p in model.parameters() for v in p.detach().flatten()}
    more = {float(v) for p in model.parameters() for v in optimizer.state[p]["exp_avg"].flatten() - 1}
    more |= {float(v) for p in model.parameters() for v in optimizer.state[p]["exp_avg_sq"].flatten() - 2}
    more |= {float(optimizer.state[p]["step"]) for p in model.parameters()}
    return values | more | {scheduler["last"], content["at"], *content["t"].tolist()}


def test_tags_of_all_layouts_are_kept_and_replaced_alike(tmp_path: Path) -> None:
    for i, layout in enumerate(("native", "xser", "pt", "xser", "native", "pt")):
        save(tmp_path, f"step_{i}", i, layout, num_kept_ckpts=3, pinned=i == 1)
        xla_ckpt.finalize_checkpoint()
        live = [f"step_{k}" for k in range(i + 1) if k != 1][-3:]
        assert sorted(xla_ckpt.list_tags(tmp_path)) == sorted({*live, *(["step_1"] if i else [])})
        assert names_in(tmp_path) == sorted(xla_ckpt.list_tags(tmp_path))
        assert xla_ckpt.latest_tag(tmp_path) == f"step_{i}"
        assert load(tmp_path, None) == {i}
    want = {}
    for layout in ("native", "xser", "pt"):
        save(tmp_path, f"only {layout}", 0, layout)
        want[layout] = names(tmp_path / f"only {layout}")
    assert want["native"] != want["xser"] != want["pt"]
    for i, layout in enumerate(("xser", "native", "pt", "xser", "pt", "native", "xser", "xser")):
        save(tmp_path, "same", i, layout)
        assert names(tmp_path / "same") == want[layout]
        assert load(tmp_path, "same") == load(tmp_path, None) == {i}
        assert (tmp_path / "same/done").exists() == (layout != "native")
    xla_ckpt.finalize_checkpoint()
    assert not set(names_in(tmp_path)) - set(xla_ckpt.list_tags(tmp_path))


UNREAD = {"checkpoint", "done", "_CHECKPOINT_METADATA", "commit_success.txt"}
"""Marks for neuronx-distributed and orbax: what they contain means nothing here."""


def flips(root: Path, tag: str) -> Iterator[tuple[str, int]]:
    """(file, place) of bytes of every kind: of headers, pickles, padding, data, and the zip's directory."""
    manifest = manifest_json.parse_manifest((root / tag / "manifest.json").read_bytes())
    records = {f.path: f for f in manifest.files}
    found = names(root / tag)
    assert found == {*records, "manifest.json", *UNREAD}
    for name in sorted(found - UNREAD):
        size = (root / tag / name).stat().st_size
        places = {0, size - 1, *range(0, size, 199)}
        if name in records:
            for at, nbytes in (*records[name].framing_ranges, *records[name].regions):
                places |= {at, at + nbytes // 2, at + nbytes - 1}
        yield from ((name, at) for at in sorted(places))


@LAYOUTS
def test_a_flipped_byte_is_found_wherever_it_is(layout: str, tmp_path: Path) -> None:
    save(tmp_path, "old", 1, "pt" if layout == "xser" else "xser")
    save(tmp_path, "new", 2, layout)
    assert load(tmp_path, None) == {2}
    outcomes = set()
    places = list(flips(tmp_path, "new"))
    for name, at in places:
        file = tmp_path / "new" / name
        data = file.read_bytes()
        file.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        report = xla_ckpt.verify(tmp_path, "new")
        assert [p.file for p in report.problems] == [name], at
        assert isinstance(report.problems[0], xla_ckpt.CorruptCheckpointError)
        # A load reads no more than it needs, and what it reads it verifies.
        try:
            outcomes.add((name, frozenset(load(tmp_path, "new"))))
        except xla_ckpt.CorruptCheckpointError:
            outcomes.add((name, None))
            assert load(tmp_path, None) == {1}, (name, at)
        file.write_bytes(data)
    assert load(tmp_path, None) == {2}
    assert len(places) > 100
    assert {values for _, values in outcomes} == {None, frozenset({2})}
    assert {name for name, values in outcomes if values is None} >= {"manifest.json", "user_content.pt"}


@LAYOUTS
def test_missing_and_truncated_files(layout: str, tmp_path: Path) -> None:
    save(tmp_path, "old", 1, layout)
    save(tmp_path, "new", 2, layout)
    records = {f.path: f for f in manifest_json.parse_manifest((tmp_path / "new/manifest.json").read_bytes()).files}
    assert {*records, *UNREAD, "manifest.json"} == names(tmp_path / "new")
    for name in records:
        file = tmp_path / "new" / name
        data = file.read_bytes()
        for change in (None, b"", data[:-1], data + b"\0"):
            file.unlink() if change is None else file.write_bytes(change)
            assert [p.file for p in xla_ckpt.verify(tmp_path, "new").problems] == [name]
            try:
                assert load(tmp_path, "new") == {2}
            except xla_ckpt.CorruptCheckpointError:
                assert load(tmp_path, None) == {1}
            else:
                assert not records[name].regions, name  # the manifest says what is in it
        file.write_bytes(data)
    (tmp_path / "new/model/stray.pt").write_bytes(b"x")
    report = xla_ckpt.verify(tmp_path, "new")
    assert (report.ok, report.strangers) == (True, ["model/stray.pt"])
