"""Links to directories in a root: nothing that they lead to is read, counted, moved or deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
import xla_ckpt.dcp
from xla_ckpt import CheckpointError, Checkpoints, NoCheckpointError, SaveOptions, StorageError, UsageError
from xla_ckpt.cli.main import main


def save(root: Path, tag: str, number: int = 0, **more: Any) -> None:
    xla_ckpt.save(root, tag, {"model": {"w": torch.full((3,), float(number))}}, **more)


def number_in(root: Path, tag: str | None = None) -> float:
    return float(xla_ckpt.restore(root, tag).tree["model"]["w"][0])


def all_in(path: Path) -> dict[str, bytes | str]:
    """Every file and link below a directory."""
    found: dict[str, bytes | str] = {}
    for place in sorted(path.rglob("*")):
        name = str(place.relative_to(path))
        found[name] = os.readlink(place) if place.is_symlink() else place.read_bytes() if place.is_file() else ""
    return found


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory outside of the root. It stays as it is."""
    home = tmp_path / "home"
    (home / "documents" / "deep").mkdir(parents=True)
    (home / "documents" / "thesis").write_text("x")
    (home / "empty").mkdir()
    (home / "file").write_text("y")
    save(home / "tags", "theirs", 7)
    shutil.rmtree(home / "tags" / ".lease")
    before = all_in(home)
    yield home
    xla_ckpt.finalize_checkpoint()
    assert all_in(home) == before


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_links_of_the_program_count_nowhere_and_stay(tmp_path: Path, home: Path, kept: int) -> None:
    root = tmp_path / "run"
    root.mkdir()
    links = {
        "init": home / "tags/theirs",
        "logs": home,
        "nowhere": "absent",
        "loop": "loop",
        ".old-x": home / "documents",
    }
    for name, to in links.items():
        (root / name).symlink_to(to)
    for step in range(5):
        save(root, f"step_{step}", step, num_kept_ckpts=kept)
        (root / "new").symlink_to(f"step_{step}")
        (root / "new").rename(root / "latest")
    tags = [f"step_{step}" for step in range(5 - kept, 5)]
    assert xla_ckpt.list_tags(root) == tags == list(Checkpoints(root).why_kept(xla_ckpt.LatestN(1)))
    assert {n: os.readlink(root / n) for n in links} == {n: str(to) for n, to in links.items()}
    assert (xla_ckpt.latest_tag(root), number_in(root)) == ("step_4", 4)
    assert main(["retain", str(root), "--newest", "1", "--yes"]) == main(["clean", str(root)]) == 0
    assert xla_ckpt.list_tags(root) == ["step_4"]
    assert {*links, "latest", "step_4"} <= {path.name for path in root.iterdir()}


def test_a_read_that_names_a_link_follows_it_within_the_root(tmp_path: Path, home: Path) -> None:
    root = tmp_path / "run"
    for step in (1, 2):
        save(root, f"step_{step}", step)
    for name, to in {"best": "step_1", "same": root / "step_1", "twice": "best"}.items():
        (root / name).symlink_to(to)
        assert number_in(root, name) == number_in(root / name) == 1
        assert xla_ckpt.restore(root, name).report.tag == xla_ckpt.verify(root, name).tag == "step_1"
        assert xla_ckpt.has_checkpoint(root / name)
    (tmp_path / "linked").symlink_to(root)
    assert number_in(tmp_path / "linked") == 2
    assert number_in(tmp_path / "linked", "best") == 1
    (root / "init").symlink_to(home / "tags/theirs")
    assert number_in(root / "init") == 7, "a path of its own leads anywhere"
    with pytest.raises(UsageError, match=r"link out of the root.*found .*home/tags/theirs"):
        xla_ckpt.restore(root, "init")
    (root / "gone").symlink_to("step_9")
    (root / "loop").symlink_to("loop")
    for name in ("gone", "loop"):
        with pytest.raises(NoCheckpointError):
            xla_ckpt.restore(root, name)


def test_what_writes_or_deletes_takes_no_link_for_a_tag(tmp_path: Path, home: Path) -> None:
    root = tmp_path / "run"
    for step in (1, 2):
        save(root, f"step_{step}", step)
    for name, to in {"best": "step_1", "init": home / "tags/theirs", "gone": "absent"}.items():
        (root / name).symlink_to(to)
        for refused in (lambda tag: Checkpoints(root).delete(tag, force=True), Checkpoints(root).pin):
            with pytest.raises(NoCheckpointError, match=rf"tag {name}"):
                refused(name)
        with pytest.raises(UsageError, match="what has the name of the new tag is no tag"):
            save(root, name, 3)
    assert xla_ckpt.list_tags(root) == ["step_1", "step_2"]
    assert number_in(root, "best") == 1


CALLS: dict[str, Callable[[Path], object]] = {
    "save": lambda root: save(root, "step_1", 3, num_kept_ckpts=1),
    "save, asynchronous": lambda root: save(root, "new", 3, num_kept_ckpts=1, async_save=True),
    "convert": lambda root: xla_ckpt.convert(root, root, "step_1", as_tag="converted"),
    "convert, dcp": lambda root: xla_ckpt.convert(root, root.parent / "out", "step_1", to="dcp"),
    "repair": lambda root: xla_ckpt.repair(root, "damaged"),
    "pin": lambda root: Checkpoints(root).pin("step_1"),
    "delete": lambda root: Checkpoints(root).delete("step_1"),
    "export": lambda root: xla_ckpt.export_hf(root, root / "hf", "step_1"),
    "dcp.save": lambda root: xla_ckpt.dcp.save({"w": torch.ones(3)}, checkpoint_id=root / "dcp", no_dist=True),
    "clean": lambda root: _ends(main(["clean", str(root)])),
    "rm": lambda root: _ends(main(["rm", str(root), "step_1", "--yes"])),
    "retain": lambda root: _ends(main(["retain", str(root), "--newest", "1", "--yes"])),
    "restore": lambda root: number_in(root),
    "verify": lambda root: xla_ckpt.verify(root, "step_1"),
}


def _ends(code: int) -> None:
    if code:
        raise StorageError(f"the command ended with {code}")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", [".trash", ".lease", ".disk", ".new-new", ".old-step_1", ".old-gone", "dcp", "hf"])
def test_no_call_follows_a_link_in_a_root(tmp_path: Path, home: Path, name: str, call: str) -> None:
    root = tmp_path / "root"
    save(root, "damaged", options=SaveOptions(parity="block"))
    for step in (1, 2):
        save(root, f"step_{step}", step)
    (shard,) = (root / "damaged").rglob("0*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    if (root / name).exists():
        shutil.rmtree(root / name)
    (root / name).symlink_to(home)
    errors: list[CheckpointError] = []
    try:
        CALLS[call](root)
        xla_ckpt.finalize_checkpoint()
    except CheckpointError as error:
        errors.append(error)
    if call not in ("clean", "rm", "retain"):  # these end with a code alone
        assert all(name in str(error) or isinstance(error, UsageError) for error in errors), errors
    assert call not in ("restore", "verify") or number_in(root) == 2, "a read needs none of these"


LAYOUTS = ["pt", "xser", "smp", "dcp", "torchtitan", "orbax", "orbax-manager", "torch_checkpointing"]


def trained() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("layout", "of"),
    [("native", "this library"), *((layout, of) for layout in LAYOUTS for of in ("this library", "another library"))],
)
def test_a_link_in_the_place_of_a_directory_of_a_tag_is_not_followed(tmp_path: Path, layout: str, of: str) -> None:
    root, far = tmp_path / "root", tmp_path / "far"
    xla_ckpt.save_checkpoint(tmp_path / "source", "1", **trained(), options=SaveOptions(parity="block"))
    if layout == "native":
        shutil.copytree(tmp_path / "source" / "1", root / "1")
    else:
        xla_ckpt.convert(tmp_path / "source", root, to=layout)
    if of == "another library":
        for path in (root / "1" / "manifest.json", root / "1" / "commit_success.txt"):
            path.unlink(missing_ok=True)
    assert xla_ckpt.list_tags(root) == ["1"]
    files = {path.name for path in root.rglob("*") if path.is_file()}
    directories = [Path(at) for at, _, names in os.walk(root / "1") if names or at == str(root / "1")]
    for directory in directories:
        if "parity" in str(directory) or any(f"{part}." in directory.name for part in ("param_groups", "user_content")):
            continue  # no load reads them
        shutil.move(directory, far)
        directory.symlink_to(far)
        with pytest.raises(CheckpointError):
            xla_ckpt.load_checkpoint(root, "1", **trained())
        with pytest.raises(CheckpointError):
            xla_ckpt.convert(root, tmp_path / "out", "1")
        if directory.name == "1":
            assert xla_ckpt.list_tags(root) == []
        else:
            assert not xla_ckpt.verify(root, "1").ok
        directory.unlink()
        shutil.move(far, directory)
    assert files == {path.name for path in root.rglob("*") if path.is_file()}
    xla_ckpt.load_checkpoint(root, "1", **trained()) if of == "this library" else xla_ckpt.restore(root, "1")


def test_a_repair_puts_no_file_behind_a_link(tmp_path: Path) -> None:
    root, far = tmp_path / "root", tmp_path / "far"
    save(root, "a", options=SaveOptions(parity="block"))
    (shard,) = (root / "a").rglob("0*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    shutil.move(shard.parent, far)
    shard.parent.symlink_to(far)
    before = all_in(far)
    with pytest.raises(CheckpointError, match=f"{shard.parent.name} is a link to"):
        xla_ckpt.repair(root, "a")
    assert all_in(far) == before
