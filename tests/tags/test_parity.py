"""A tag with parity gets back what it has lost, and a repair changes nothing that it cannot mend."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.runs import names_in
from xla_ckpt.cli.main import main
from xla_ckpt.core.checksum import compute_digest, seal_json, to_hex
from xla_ckpt.core.files.parity import PARITY_BLOCK_BYTES
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.features.parity.parity import ParityInput, write_parity_share, write_whole_parity
from xla_ckpt.progress import IoContext
from xla_ckpt.reports import PhaseRecorder
from xla_ckpt.storage.base import write_file
from xla_ckpt.storage.local import LocalDirectory, LocalStore
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags.resolve import open_root

SEED = np.random.default_rng(7)
TREE = {
    "a": SEED.standard_normal(700_000).astype(np.float32),
    "b": SEED.standard_normal(9).astype(np.float32),
    "n": 7,
}


def tag_with(root: Path, parity: str | None = "file", **options: object) -> Path:
    """A tag of several files, whose directory is returned."""
    import torch

    model = {name: torch.from_numpy(value.copy()) for name, value in TREE.items() if name != "n"}  # type: ignore[attr-defined]
    xla_ckpt.save_checkpoint(
        root,
        "t",
        model,
        {"momentum": torch.ones(300_000)},
        user_content={"n": 7},
        extras={"c": {"c": torch.arange(400_000)}},
        options=xla_ckpt.SaveOptions(parity=parity),
        num_workers=2,
        **options,  # type: ignore[arg-type]
    ).result()
    return root / "t"


def bytes_of(tag: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tag)): path.read_bytes() for path in sorted(tag.rglob("*")) if path.is_file()}


def payload(tag: Path) -> list[Path]:
    """The files that the manifest lists."""
    listed = json.loads((tag / "parity/index.json").read_text())["files"]
    return [tag / path for path, _, _ in listed]


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 64]))


def flip_one_block_of_each(tag: Path) -> None:
    for number, path in enumerate(payload(tag)):
        size = path.stat().st_size
        flip(path, min(number * PARITY_BLOCK_BYTES + 5, size - 1))


def lose(tag: Path, number: int = 0) -> None:
    sorted(payload(tag), key=lambda path: -path.stat().st_size)[number].unlink()


def lose_and_flip(tag: Path) -> None:
    flip_one_block_of_each(tag)
    lose(tag)


def cut(tag: Path) -> None:
    path = payload(tag)[0]
    path.write_bytes(path.read_bytes()[: PARITY_BLOCK_BYTES + 17])


def grow(tag: Path) -> None:
    with payload(tag)[0].open("ab") as file:
        file.write(b"more")


def spoil_manifest(tag: Path) -> None:
    flip(tag / "manifest.json", 400)


def lose_manifest_and_file(tag: Path) -> None:
    (tag / "manifest.json").unlink()
    lose(tag)


def spoil_parity(tag: Path) -> None:
    flip(next((tag / "parity").glob("stripes-*")), 3)
    next((tag / "parity").glob("blocks-*")).unlink()
    (tag / "parity/manifest.json").write_text("{}")


def spoil_index(tag: Path) -> None:
    flip(tag / "parity/index.json", 100)


def lose_index(tag: Path) -> None:
    (tag / "parity/index.json").unlink()


DAMAGES = [
    flip_one_block_of_each, lose, lose_and_flip, cut, grow, spoil_manifest, lose_manifest_and_file, spoil_parity,
    spoil_index, lose_index,
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    tag_with(root)
    return root


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_byte_comes_back(damage: Callable[[Path], None], sound: Path, tmp_path: Path) -> None:
    root = shutil.copytree(sound, tmp_path / "root")
    before = bytes_of(root / "t")
    damage(root / "t")
    assert not xla_ckpt.verify(root, "t").ok
    assert xla_ckpt.repair(root, "t")
    assert bytes_of(root / "t") == before
    report = xla_ckpt.verify(root, "t")
    assert report.ok
    assert not report.strangers
    assert xla_ckpt.repair(root, "t") == ()
    assert names_in(root) == ["t"]


@pytest.mark.parametrize("layout", ["native", "xser", "pt", "dcp", "smp"])
def test_every_layout(layout: str, tmp_path: Path) -> None:
    tag = tag_with(tmp_path, layout=layout)
    before = bytes_of(tag)
    assert xla_ckpt.verify(tmp_path, "t").ok
    assert not xla_ckpt.verify(tmp_path, "t").strangers
    lose_and_flip(tag)
    xla_ckpt.repair(tmp_path)
    assert bytes_of(tag) == before


@pytest.mark.parametrize("layout", ["native", "xser", "pt", "smp", "dcp"])
def test_a_converted_tag(layout: str, tmp_path: Path) -> None:
    tag_with(tmp_path, None)
    xla_ckpt.convert(tmp_path, tmp_path / "out", to=layout, mesh="dp=1,tp=1", parity="file")
    tag = tmp_path / "out" / "t"
    before = bytes_of(tag)
    assert xla_ckpt.verify(tmp_path / "out", "t").ok
    lose_and_flip(tag)
    assert xla_ckpt.repair(tmp_path / "out")
    assert bytes_of(tag) == before


def test_a_conversion_without_a_tag_has_no_parity(tmp_path: Path) -> None:
    tag_with(tmp_path, None)
    for to, parity in (("torch", "file"), ("safetensors", "block"), ("native", "both")):
        with pytest.raises(xla_ckpt.UsageError, match="is for a layout with tags"):
            xla_ckpt.convert(tmp_path, tmp_path / "out", to=to, parity=parity)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_damaged_block_of_each_file_needs_no_stripes(tmp_path: Path) -> None:
    tag = tag_with(tmp_path, "block")
    before = bytes_of(tag)
    assert not list((tag / "parity").glob("stripes-*"))
    flip_one_block_of_each(tag)
    assert set(xla_ckpt.repair(tmp_path)) == {str(path.relative_to(tag)) for path in payload(tag)}
    assert bytes_of(tag) == before


@pytest.mark.parametrize("parity", ["block", "file"])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_pin_that_comes_or_goes_leaves_a_tag_sound_and_repairable(pinned: bool, parity: str, tmp_path: Path) -> None:
    tag = tag_with(tmp_path, parity, pinned=pinned)
    root = xla_ckpt.Checkpoints(tmp_path)
    for now in (not pinned, pinned, not pinned):
        (root.pin if now else root.unpin)("t")
        assert root.verify("t").ok
    before = bytes_of(tag)
    one = payload(tag)[0]
    one.write_bytes(one.read_bytes()[:-1] + b"?")
    assert root.repair("t") == (str(one.relative_to(tag)),)
    (tag / "manifest.json").unlink()
    assert xla_ckpt.repair(tmp_path, "t") == ("manifest.json",)
    assert bytes_of(tag) == before
    assert root.show("t").pinned is not pinned


def test_what_cannot_be_repaired_is_named_and_left_alone(tmp_path: Path) -> None:
    tag = tag_with(tmp_path)
    lost = sorted(payload(tag))[:2]
    for path in lost:
        path.unlink()
    spoil_manifest(tag)
    before = bytes_of(tag)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="nothing was changed") as raised:
        xla_ckpt.repair(tmp_path)
    assert all(str(path.relative_to(tag)) in str(raised.value.details) for path in lost)
    assert bytes_of(tag) == before
    assert names_in(tmp_path) == ["t"]


@pytest.mark.parametrize("parity", ["block", "file"])
@pytest.mark.parametrize("how", ["saved", "converted", "in memory"])
def test_parity_that_is_gone_is_told_and_made_anew(
    parity: Literal["block", "file"], how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = f"memory://{tmp_path}" if how == "in memory" else str(tmp_path / "run")
    if how == "converted":
        tag_with(tmp_path / "other", None)
        xla_ckpt.convert(tmp_path / "other", root, to="native", parity=parity)
    else:
        xla_ckpt.save(root, "t", {"x": np.arange(300_000)}, options=xla_ckpt.SaveOptions(parity=parity))
    xla_ckpt.Checkpoints(root).pin("t")  # which writes the manifest anew
    store = open_store(root)
    with contextlib.closing(open_root(store).open("t")) as directory:
        before = sorted(name for name in directory.list_files() if name.startswith("parity/"))
        for name in before:
            if store.object_store is not None:
                store.object_store.remove(f"{directory.name}/{name}")
            else:
                os.unlink(f"{root}/t/{name}")
    report = xla_ckpt.verify(root, "t")
    assert [(problem.problem, problem.expected) for problem in report.problems] == [
        ("the tag was saved with parity, and that is gone", f"parity={parity!r}")
    ]
    assert main(["show", root]) == 0
    assert "parity: lost" in capsys.readouterr().out
    assert xla_ckpt.restore(root, "t").report.tag == "t"
    assert sorted(xla_ckpt.repair(root, "t")) == before
    assert xla_ckpt.verify(root, "t").ok
    assert xla_ckpt.Checkpoints(root).show("t").parity == parity


def test_a_tag_that_an_older_version_saved_may_lose_its_parity(tmp_path: Path) -> None:
    """Its manifest does not say that there was one."""
    tag = tag_with(tmp_path, "block")
    text = (tag / "manifest.json").read_bytes().rpartition(b",\n")[0].replace(b',\n"parity":"block"', b"")
    (tag / "manifest.json").write_bytes(seal_json(text))
    shutil.rmtree(tag / "parity")
    assert xla_ckpt.verify(tmp_path, "t").ok
    with pytest.raises(xla_ckpt.UsageError, match="no parity"):
        xla_ckpt.repair(tmp_path)


def test_a_tag_without_parity_says_so(tmp_path: Path) -> None:
    tag = tag_with(tmp_path, None)
    assert not (tag / "parity").exists()
    with pytest.raises(xla_ckpt.UsageError, match="no parity"):
        xla_ckpt.repair(tmp_path)
    with pytest.raises(xla_ckpt.UsageError, match="no such choice for parity"):
        tag_with(tmp_path, "raid")


def test_parity_of_another_save_is_never_used(tmp_path: Path) -> None:
    tag = tag_with(tmp_path / "one")
    other = tag_with(tmp_path / "two")
    shutil.rmtree(tag / "parity")
    shutil.copytree(other / "parity", tag / "parity")
    before = bytes_of(tag)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="not that of this manifest"):
        xla_ckpt.repair(tmp_path / "one")
    assert bytes_of(tag) == before
    assert not xla_ckpt.verify(tmp_path / "one").ok


HOSTILE = [
    {"version": 2}, {"block": 0}, {"block": 4096}, {"writers": 0}, {"writers": 10**12}, {"survives": "all"},
    {"files": 3}, {"files": [["../../x", 10**15, ""]]}, {"files": [["a", -1, ""]]}, {"sums": [10**15, ""]},
    {"sums": [True, "AAAAAAAAAAA="]}, {"manifest": 7},
]  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE, ids=str)
def test_an_index_that_nobody_wrote_is_a_typed_error(change: dict[str, object], sound: Path, tmp_path: Path) -> None:
    root = shutil.copytree(sound, tmp_path / "root")
    path = root / "t/parity/index.json"
    text = json.dumps({**json.loads(path.read_text()), **change, "digest": None}).rpartition(", ")[0].encode()
    path.write_bytes(text + b',\n"digest":"' + to_hex(compute_digest(text)).encode() + b'"}\n')
    lose(root / "t") if "files" not in change else next((root / "t/model").iterdir()).unlink()
    before = bytes_of(root / "t")
    with pytest.raises((xla_ckpt.CorruptCheckpointError, xla_ckpt.UnsupportedVersionError)):
        xla_ckpt.repair(root)
    assert not xla_ckpt.verify(root).ok
    assert bytes_of(root / "t") == before


def test_a_load_that_meets_damage_names_the_way_out(tmp_path: Path) -> None:
    tag = tag_with(tmp_path)
    flip(max(payload(tag), key=lambda path: path.stat().st_size), 2 * PARITY_BLOCK_BYTES)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="verify --repair"):
        xla_ckpt.restore(tmp_path, "t")
    spoil_manifest(tag)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="verify --repair"):
        xla_ckpt.restore(tmp_path, "t")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tag = tag_with(tmp_path)
    assert main(["show", str(tmp_path)]) == 0
    assert "parity: file" in capsys.readouterr().out
    lose(tag)
    assert main(["verify", str(tmp_path)]) == 1
    assert "--repair`, or xla_ckpt.repair, may mend it" in capsys.readouterr().out
    assert main(["verify", "--repair", str(tmp_path)]) == 0
    assert "repaired: " in capsys.readouterr().out


def test_the_command_for_all_tags_repairs_those_that_have_parity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, parity in (("plain", None), ("mended", "block"), ("lost", "block"), ("whole", "block")):
        tag_with(tmp_path, parity).rename(tmp_path / name)
    before = bytes_of(tmp_path / "mended")
    for name, blocks in (("mended", 1), ("lost", 2)):
        largest = max(payload(tmp_path / name), key=lambda path: path.stat().st_size)
        for block in range(blocks):
            flip(largest, block * PARITY_BLOCK_BYTES)
    assert main(["verify", str(tmp_path), "--all", "--repair", "--json"]) == 1
    answers = {answer["tag"]: answer for answer in json.loads(capsys.readouterr().out)}
    assert {name: answer["ok"] for name, answer in answers.items()} == {
        "plain": True, "mended": True, "lost": False, "whole": True
    }  # fmt: skip
    assert [name for name, answer in answers.items() if answer["repaired"]] == ["mended"]
    (problem,) = answers["lost"]["problems"]
    assert "more is damaged than the parity gives back" in problem["message"]
    assert bytes_of(tmp_path / "mended") == before


def test_a_save_that_replaces_the_tag_meanwhile_gets_none_of_the_old_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = tag_with(tmp_path)
    lose(tag)
    adopt = LocalDirectory.move_in

    def late(directory: LocalDirectory, other: LocalDirectory, path: str) -> None:
        monkeypatch.setattr(LocalDirectory, "move_in", adopt)
        xla_ckpt.save(tmp_path, "t", {"x": np.ones(3)})
        xla_ckpt.finalize_checkpoint()
        adopt(directory, other, path)

    monkeypatch.setattr(LocalDirectory, "move_in", late)
    xla_ckpt.repair(tmp_path, "t")
    assert xla_ckpt.verify(tmp_path, "t").ok
    assert not xla_ckpt.verify(tmp_path, "t").strangers
    assert np.array_equal(xla_ckpt.restore(tmp_path, "t").tree["x"], np.ones(3))


def test_in_memory() -> None:
    xla_ckpt.save("memory://parity", "t", {"x": np.arange(300_000)}, options=xla_ckpt.SaveOptions(parity="file"))
    assert xla_ckpt.verify("memory://parity").ok
    assert xla_ckpt.repair("memory://parity") == ()


def saves(rank: int, root: Path) -> dict[str, int]:
    import torch

    half = {"w": torch.arange(600_000, dtype=torch.float32)[300_000 * rank : 300_000 * (rank + 1)].clone()}
    report = xla_ckpt.save_checkpoint(
        root,
        "t",
        half,
        mesh=xla_ckpt.Mesh(tp=2),
        shardings=[("", ("tp",))],
        options=xla_ckpt.SaveOptions(parity="file", timeout=60),
    ).result()
    return {"files": report.phases["parity"].files}


def test_two_ranks_share_the_work(tmp_path: Path) -> None:
    assert run_on_ranks(saves, 2, tmp_path) == [{"files": 2}, {"files": 2}]
    before = bytes_of(tmp_path / "t")
    assert names_in(tmp_path / "t/parity") == [
        "blocks-00001-of-00002", "blocks-00002-of-00002", "index.json", "manifest.json",
        "stripes-00001-of-00002", "stripes-00002-of-00002",
    ]  # fmt: skip
    for damage in (lose_and_flip, spoil_parity, spoil_index):
        damage(tmp_path / "t")
        xla_ckpt.repair(tmp_path)
        assert bytes_of(tmp_path / "t") == before


def differs(rank: int, root: Path, parity: list[str | None]) -> str:
    try:
        xla_ckpt.save(
            root, "t", {"x": 1}, mesh=xla_ckpt.Mesh(dp=2), options=xla_ckpt.SaveOptions(parity=parity[rank], timeout=60)
        )  # type: ignore[arg-type]
    except xla_ckpt.UsageError as error:
        return f"rank {error.rank}: {error.problem}"
    return "saved"


@pytest.mark.parametrize("parity", [[None, "file"], ["file", None], ["file", "block"]], ids=str)
def test_ranks_that_want_different_parity_are_told(parity: list[str | None], tmp_path: Path) -> None:
    assert run_on_ranks(differs, 2, tmp_path, parity) == ["rank 1: the ranks make different calls"] * 2


def fails_on_one(rank: int, root: Path) -> str:
    if rank == 1:
        from xla_ckpt.features.parity import parity

        def refuse(*_: object, **__: object) -> object:
            raise OSError(28, "No space left on device")

        parity.write_parity_share = refuse  # type: ignore[assignment]
    try:
        saves(rank, root)
    except xla_ckpt.StorageError as error:
        return f"rank {error.rank}: {error.strerror}"
    return "saved"


def test_a_rank_that_cannot_write_its_parity_fails_the_save_on_all(tmp_path: Path) -> None:
    assert run_on_ranks(fails_on_one, 2, tmp_path) == ["rank 1: No space left on device"] * 2
    assert xla_ckpt.list_tags(tmp_path) == []


def test_a_file_of_parity_that_cannot_be_made_leaves_no_other_one_open(tmp_path: Path) -> None:
    """What is open keeps its room on a disk that is full (found by `make soak`)."""
    store = LocalStore(str(tmp_path))
    directory = store.make_directory("a")
    for path in ("x", "y"):
        write_file(directory, path, b"bytes" * 1000)
    files, phases = (("x", 5000), ("y", 5000)), PhaseRecorder()
    covered, crew = ParityInput(directory, files), IoContext(workers=1, phases=phases)
    write_parity_share(covered, "file", 0, 1, crew, directory)
    first, second = sorted((tmp_path / "a/parity").iterdir())
    for taken, free in ((first, second), (second, first)):
        free.unlink()
        before = os.listdir("/proc/self/fd")
        with pytest.raises(FileExistsError):
            write_parity_share(covered, "file", 0, 1, crew, directory)
        assert len(os.listdir("/proc/self/fd")) == len(before)
        assert taken.exists()
        free.touch()
    directory.close()


def made_of_damage(root: Path, parity: Literal["block", "file"]) -> Path:
    """A tag whose parity was made when a byte of its largest file was wrong already."""
    tag = tag_with(root, parity)
    largest = max(payload(tag), key=lambda path: path.stat().st_size)
    flip(largest, 2_000_000)
    text = (tag / "manifest.json").read_bytes()
    files = [(str(path.relative_to(tag)), path.stat().st_size) for path in payload(tag)]
    shutil.rmtree(tag / "parity")
    directory = LocalDirectory(tag)
    write_whole_parity(ParityInput(directory, files), parity, text, 1, IoContext(workers=2), directory)
    return tag


def lose_another(tag: Path) -> None:
    min(payload(tag), key=lambda path: path.stat().st_size).unlink()


def flip_the_same(tag: Path) -> None:
    flip(max(payload(tag), key=lambda path: path.stat().st_size), 100_000)


def spoil_sums(tag: Path) -> None:
    flip(next(path for path in (tag / "parity").iterdir() if path.name[-1].isdigit()), 3)


@pytest.mark.parametrize("parity", ["block", "file"])
@pytest.mark.parametrize("then", [lambda tag: None, flip_the_same, lose_another, spoil_manifest, spoil_sums])
def test_parity_of_bytes_that_were_damaged_already_is_no_repair(
    then: Callable[[Path], None], parity: Literal["block", "file"], tmp_path: Path
) -> None:
    """It said that there was nothing to do, or took what it gave back for sound."""
    tag = made_of_damage(tmp_path, parity)
    then(tag)
    before = bytes_of(tag)
    with pytest.raises(CorruptCheckpointError, match="damaged already|more is damaged than the parity gives back"):
        xla_ckpt.repair(tmp_path, "t")
    assert bytes_of(tag) == before
    assert names_in(tmp_path) == ["t"]
    assert not xla_ckpt.verify(tmp_path, "t").ok
