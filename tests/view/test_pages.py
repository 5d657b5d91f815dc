"""The pages of a root directory: what they show, that nothing in a tag can run in them, and that they stay small."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.pages import HOSTILE, Parsed
from tests.view import demo
from xla_ckpt.cli.view import pages, server
from xla_ckpt.cli.view.pages import PageRenderer, render_document, render_single_document
from xla_ckpt.cli.view.server import CheckpointSite, build_url_query
from xla_ckpt.errors import NoCheckpointError
from xla_ckpt.inspection import contents


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shown")
    demo.make(path)
    return path


def page(path: Path | str, address: Mapping[str, str], **about: object) -> Parsed:
    """A page as the server sends it, checked for what every page has to be."""
    made = CheckpointSite(str(path), **about).render_page_or_problem(address, PageRenderer(href=build_url_query))  # type: ignore[arg-type]
    parsed = Parsed(render_document(made.title, made.body, home="?").decode())
    check(parsed)
    return parsed


def check(parsed: Parsed) -> None:
    parsed.check_harmless()
    levels = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False)), levels
    assert len(parsed.all("main")) == 1
    assert all(th.get("scope") in ("col", "row") for th in parsed.all("th"))
    assert all(svg.get("role") == "img" for svg in parsed.all("svg"))
    assert all("aria-label" in svg or svg["class"] == "drawing" for svg in parsed.all("svg"))  # which has a title
    fields = [f for f in parsed.all("input") if f.get("type") != "hidden"] + parsed.all("select")
    assert len(parsed.all("label")) == len(fields)
    assert not [a for _, a in parsed.elements if "style" in a]
    identifiers = [a["id"] for _, a in parsed.elements if "id" in a]
    assert len(set(identifiers)) == len(identifiers)
    assert set(identifiers) >= {a["href"][1:] for a in parsed.all("a") if (a["href"] or "").startswith("#")}  # type: ignore[index]


def drawings(parsed: Parsed) -> int:
    return sum(svg.get("class") == "drawing" for svg in parsed.all("svg"))


def test_the_first_page_lists_tags_with_their_times_and_what_keeps_them(root: Path) -> None:
    parsed = page(root, {})
    assert {"step_100", "step_400", "pinned", "the newest, of the newest 9"} <= set(parsed.texts)
    assert drawings(parsed) == 1
    targets = [a["href"] for a in parsed.all("a")]
    assert {"?page=tag&tag=step_400", "?page=save&tag=step_400"} <= set(targets)


def test_a_tag_is_a_tree_of_its_arrays(root: Path) -> None:
    parsed = page(root, {"page": "tag", "tag": "step_400"})
    assert {"model/layers.0.up.weight", "512 x 128", "tp,_", "_,tp", "not split", "user_content/loss"} <= set(
        parsed.texts
    )
    assert "?page=array&tag=step_400&leaf=model%2Flayers.0.up.weight" in [a["href"] for a in parsed.all("a")]
    assert len(parsed.all("details")) == len(parsed.all("summary")) > 10
    only = page(root, {"page": "tag", "tag": "step_400", "leaf": "model/layers.1"})
    assert "model/layers.1.norm.bias" in only.texts
    assert "model/layers.0.norm.bias" not in only.texts


def test_an_array_is_drawn_over_the_ranks_with_its_values(root: Path) -> None:
    parsed = page(root, {"page": "array", "tag": "step_400", "leaf": "model/layers.0.down.weight"})
    assert {"rank 0", "rank 1", "0:128, 0:256", "0:128, 256:512", "All 65536 values were read."} <= set(parsed.texts)
    assert drawings(parsed) == 2
    (label,) = (t for t in parsed.texts if t.startswith("histogram from"))
    assert "highest of 40 bars" in label


def test_a_plan_a_comparison_and_a_save(root: Path) -> None:
    assert {"7", "can be restored"} <= set(page(root, {"page": "plan", "tag": "step_400", "mesh": "dp=2,tp=4"}).texts)
    compared = page(root, {"page": "compare", "a": "step_300", "b": "step_400", "leaf": "model"})
    assert {"model/layers.0", "model/layers.2", "model/layers.1.up.weight"} <= set(compared.texts)
    assert {"fsync", "rank 1"} <= {text.split(":")[0].split(" (")[0] for text in page(root, {"page": "save"}).texts}


def test_what_makes_no_sense_is_told(root: Path) -> None:
    told = {
        "there is no such page": {"page": "<b>"},
        "there is no such checkpoint": {"page": "tag", "tag": "step_900"},
        "a mesh makes no sense": {"page": "plan", "mesh": "<script>"},
        "a restore is planned for fewer ranks": {"page": "plan", "mesh": "tp=99999999"},
        "no such array": {"page": "array", "leaf": "nothing"},
        "no leaf is like this": {"page": "tag", "leaf": "nothing"},
    }
    for text, address in told.items():
        parsed = page(root, address)
        assert text in parsed.text, (text, parsed.text[-300:])
        assert "alert" in [p.get("role") for p in parsed.all("p")]
    with pytest.raises(NoCheckpointError, match="Nothing lies there"):
        page(root / "nothing", {})


def test_pages_read_and_show_a_bounded_part(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_COMPARED_BYTES", 1000)
    assert "a page compares fewer bytes" in page(root, {"page": "compare", "a": "step_300", "b": "step_400"}).text
    assert "From step_300" in page(root, {"page": "compare", "a": "step_300", "leaf": "model/norm.bias"}).text
    monkeypatch.setattr(pages, "MAX_ARRAYS", 5)
    assert "The first 5 are shown." in page(root, {"page": "tag", "tag": "step_400"}).texts


def test_samples_are_small_and_say_so(tmp_path: Path) -> None:
    values = torch.arange(1 << 18, dtype=torch.float32)
    xla_ckpt.save(tmp_path, "a", {"w": values, "x": torch.tensor([float("nan"), float("inf"), 0.0, 2.0])})
    checkpoints = xla_ckpt.Checkpoints(tmp_path)
    whole, some = checkpoints.sample("w"), checkpoints.sample("w", max_bytes=1 << 16)
    assert whole.values is not None
    assert some.values is not None
    assert (whole.whole, some.whole, whole.values.elements) == (True, False, 1 << 18)
    assert some.values.elements * 4 <= 1 << 16
    assert (whole.values.mean, whole.values.norm) == (
        pytest.approx(float(values.double().mean())), pytest.approx(float(values.double().norm())),
    )  # fmt: skip
    assert some.values.mean == pytest.approx(whole.values.mean, rel=0.1)
    assert sum(whole.values.counts) == 1 << 18
    odd = checkpoints.sample("x").values
    assert odd is not None
    assert (odd.nans, odd.infinities, odd.zeros, odd.low, odd.high, sum(odd.counts)) == (1, 1, 1, 0.0, 2.0, 2)
    json.dumps(some.to_json())
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError):
        checkpoints.sample("y")


@pytest.mark.parametrize(
    "values",
    [np.zeros((0, 3)), np.float32(3), np.ones(3, np.bool_), np.ones(2, np.complex64), np.full(2, 1e308),
     np.array([0, 5e-324])],
    ids=["none", "scalar", "bool", "complex", "huge", "tiny"],
)  # fmt: skip
def test_values_of_all_kinds_have_numbers(values: np.ndarray, tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "a", {"w": np.asarray(values)})
    parsed = page(tmp_path, {"page": "array", "leaf": "w"})
    assert f"All {values.size} values were read." in parsed.texts
    assert contents.HISTOGRAM_BINS == 40


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root in which all names that a program gives are hostile, and the report of a save is, too."""
    path = tmp_path_factory.mktemp("hostile")
    names = [name for name in HOSTILE if name.isprintable() and "/" not in name and len(name) < 200]
    for tag, add in ((names[0], 0.0), ("b<i>'\"&", 1.0)):
        tree = {name: torch.ones(4) + add for name in HOSTILE} | {f"{name}.{i}": name for i, name in enumerate(HOSTILE)}
        tree |= {".".join(["d"] * 5000): torch.ones(2) + add, "half \ud800 of a pair": torch.ones(1)}
        xla_ckpt.save(path, tag, tree, pinned=True)
    file = path / "b<i>'\"&" / "_CHECKPOINT_METADATA"
    told = json.loads(file.read_text())
    measured = told["custom_metadata"]["report"]["measured"][0]
    measured[4] = [[name, 0.0, 1e300, 1.0, 5, 1] for name in HOSTILE]
    file.write_text(json.dumps(told))
    return path


def test_hostile_names_are_texts_on_every_page(hostile: Path) -> None:
    tags = xla_ckpt.list_tags(hostile)
    assert len(tags) == 2
    assert tags[1] in page(hostile, {}).texts
    shown = page(hostile, {"page": "tag", "tag": tags[1]})
    assert HOSTILE[0].replace("/", "~1") in shown.texts
    assert "half \\ud800 of a pair" in shown.texts
    assert "right\\u202eto\\u2066left" in shown.texts
    page(hostile, {"page": "save", "tag": tags[1]})
    assert "different" in page(hostile, {"page": "compare", "a": tags[0], "b": tags[1]}).text
    page(hostile, {"page": "plan", "tag": tags[1], "mesh": "tp=2"})
    for array in xla_ckpt.Checkpoints(hostile).show(tags[1]).arrays:
        assert "values were read" in page(hostile, {"page": "array", "tag": tags[1], "leaf": array.leaf}).text
    for name in HOSTILE:
        for field in ("page", "tag", "leaf", "mesh", "a", "b"):
            page(hostile, {"page": "compare" if field in "ab" else "plan", field: name})
    document_ = Parsed(
        CheckpointSite(str(hostile)).render_single_document({"leaf": "*", "a": tags[0], "mesh": "tp=2"}).decode()
    )
    check(document_)


def test_pages_of_each_layout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {"model": {"layers.0.weight": torch.randn(4, 6)}}
    xla_ckpt.save(tmp_path / "native", "step_1", state)
    for layout in ("native", "dcp", "xser", "pt", "orbax", "safetensors", "smp"):
        path = tmp_path / layout
        if layout != "native":
            xla_ckpt.convert(tmp_path / "native", path, to=layout)
        tag = "" if layout == "safetensors" else "step_1"  # such a directory is what others have as a tag
        assert (tag or "model/layers.0.weight") in page(path, {}).texts, layout
        assert "model/layers.0.weight" in page(path, {"page": "tag", "tag": tag}).texts, layout
        shown = page(path, {"page": "array", "tag": tag, "leaf": "model/layers.0.weight"})
        assert "All 24 values were read." in shown.texts, (layout, shown.text)
        assert "has no report of its save" in page(path, {"page": "save"}).text or layout == "native"


def test_pages_of_an_object_store() -> None:
    xla_ckpt.save("memory://viewed", "a", {"w": torch.ones(3)})
    assert "a" in page("memory://viewed", {}).texts
    assert "digest" in page("memory://viewed", {"page": "save", "tag": "a"}).texts


def test_one_document_has_it_all_and_leads_nowhere_else(root: Path) -> None:
    told = CheckpointSite(str(root)).render_single_document({"leaf": "model/layers.0", "mesh": "tp=4", "a": "step_300"})
    parsed = Parsed(told.decode())
    check(parsed)
    assert not parsed.all("form")
    assert all(a["href"].startswith("#") for a in parsed.all("a"))  # type: ignore[union-attr]
    titles = " ".join(t for t in parsed.texts if t.strip())
    for text in (
        "Tag step_100",
        "The save of step_400",
        "model/layers.0.norm.bias",
        "From step_300 to step_400",
        "over pp=1",
    ):
        assert text in titles
    assert render_single_document("<", []).count(b"<h1>&lt;</h1>") == 1


def test_a_directory_above_roots_names_them(tmp_path: Path) -> None:
    for name in ("a b", "c/d"):
        xla_ckpt.save(tmp_path / name, "step_1", {"w": np.ones(2)})
    texts = page(tmp_path, {}).text
    assert f"xla-ckpt view '{tmp_path}/a b'" in texts
    assert f"xla-ckpt view {tmp_path}/c/d" in texts
