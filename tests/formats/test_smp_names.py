"""Names of SageMaker model parallel's files: which are parts of sets, which directories, and in which order."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.formats.smp_files import GENERATIONS, toy_content, write_set, write_tag
from tests.formats.writing import toy
from tests.topology.state import differences
from xla_ckpt import Mesh
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError, NoCheckpointError, UsageError
from xla_ckpt.formats.rank_files.file_names import RankFileName
from xla_ckpt.formats.smp.tags import find_complete_sets, find_smp_tag, parse_part_name
from xla_ckpt.storage.base import write_file
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.storage.resolve import open_store


def loads(path: Path | str, tag: str | None = None) -> xla_ckpt.Loaded:
    """Load everything into one process, and compare it with what was saved."""
    model, optimizer = toy(Mesh(), 0, blank=True)
    found = xla_ckpt.load_checkpoint(path, tag, model, optimizer)
    assert differences(optimizer, model.by_name, Mesh(), 0) == []
    assert model.seen == 5
    return found


MESHES = {"1.6": Mesh(pp=2), "v3": Mesh(pp=2, dp=2, tp=2)}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_generation_loads_by_its_prefix(generation: str, tmp_path: Path) -> None:
    """SMP 1.12 itself needs `back_compat` for two of them, and stops with an UnboundLocalError without it."""
    write_set(tmp_path / "checkpoint.pt", MESHES.get(generation, Mesh(pp=2, tp=2)), generation)
    found = loads(tmp_path / "checkpoint.pt")
    assert found.user_content == {"epoch": 3}
    assert (found.report.tag, found.report.path) == ("checkpoint.pt", str(tmp_path))
    assert loads(tmp_path, "checkpoint.pt").user_content == {"epoch": 3}
    assert loads(tmp_path / "checkpoint.pt_*").user_content == {"epoch": 3}
    assert xla_ckpt.has_checkpoint(tmp_path / "checkpoint.pt")
    assert xla_ckpt.verify(tmp_path / "checkpoint.pt").ok
    assert not xla_ckpt.has_checkpoint(tmp_path / "other.pt")
    with pytest.raises(NoCheckpointError):
        xla_ckpt.load_checkpoint(tmp_path / "other.pt", model={})


def test_numbers_that_count_all_ranks(tmp_path: Path) -> None:
    """``{f}_{mp_rank}`` of a job with tp, as a program may name its files itself: mp counts tp innermost."""
    for pp in range(2):
        for tp in range(2):
            torch.save(toy_content(Mesh(pp=2, tp=2), pp, tp), tmp_path / f"c.pt_{2 * pp + tp}")
    loads(tmp_path / "c.pt")
    (tmp_path / "c.pt_3").unlink()
    with pytest.raises(CorruptCheckpointError, match="parts are missing: 1 of 4") as refused:
        xla_ckpt.load_checkpoint(tmp_path / "c.pt", model={})
    assert refused.value.file == "c.pt_3"


def test_a_store_in_memory(tmp_path: Path) -> None:
    store = open_store(f"memory://{tmp_path.name}")
    store.prepare()
    assert store.object_store is not None
    with closing(store.object_store.get_directory("")) as directory:
        for file in write_set(tmp_path / "c.pt", Mesh(pp=2, tp=2), "documents"):
            write_file(directory, file.name, file.read_bytes())
    loads(f"memory://{tmp_path.name}/c.pt")
    assert xla_ckpt.verify(f"memory://{tmp_path.name}/c.pt").ok


def test_the_part_of_one_rank_by_its_own_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is a file like any other. What it holds is not the whole: the log says so, and the error."""
    write_set(tmp_path / "c.pt", Mesh(pp=2, tp=2), "documents")
    tree = xla_ckpt.restore(tmp_path / "c.pt_1_0").tree
    assert "layers.1.norm.weight" in tree["model"]
    assert not [name for name in tree["model"] if name.startswith("_smp")]
    assert "c.pt_1_0: The file is the part of one rank of a job" in caplog.text
    with pytest.raises(IncompatibleCheckpointError, match="load the name without the numbers") as refused:
        loads(tmp_path / "c.pt_1_0")
    assert "Make the model" not in str(refused.value)


def test_the_part_of_one_rank_is_no_whole_state_for_others(tmp_path: Path) -> None:
    """A tag that is made of it would have half of each array, and nobody would see it in there."""
    write_set(tmp_path / "c.pt", Mesh(pp=2, tp=2), "documents")
    for made in (xla_ckpt.convert, xla_ckpt.export_hf):
        with pytest.raises(UsageError, match="what one rank had") as refused:
            made(tmp_path / "c.pt_1_0", tmp_path / "new")
        assert "of pp 2 and tp 2: load the name without the numbers at its end" in str(refused.value.hint)
    assert not (tmp_path / "new").exists()
    write_set(tmp_path / "alone.pt", Mesh(), "documents")  # the part of the only rank is all of it
    xla_ckpt.convert(tmp_path / "alone.pt_0_0", tmp_path / "new")
    loads(tmp_path / "new")


@pytest.mark.parametrize("folder", ["run+1", "run(1)", "a[0]", "run.*", "back\\slash", "ünï"])
def test_a_directory_of_any_name(folder: str, tmp_path: Path) -> None:
    """SMP searches by a regular expression that it makes of the path."""
    (tmp_path / folder).mkdir()
    write_set(tmp_path / folder / "c+[1].pt", Mesh(pp=2, tp=2), "1.12")
    loads(tmp_path / folder / "c+[1].pt")


@pytest.mark.parametrize(
    "stray",
    ["c.pt_0_0.pt.tmp", ".c.pt_0_0.pt.swp", "c.pt_0_0.pt.sagemaker-uploading", "c.pt_best", "c.pt_0_0.txt", "c.pt_",
     "c.pt_0_0.pt~", "c.pt__0.pt", "c.pt_0_x.pt", "c.pt.sagemaker-uploading_0_0.pt"],
)  # fmt: skip
def test_other_files_beside_a_set(stray: str, tmp_path: Path) -> None:
    """With SMP any file more changes the number of parts, and none of them loads."""
    write_set(tmp_path / "c.pt", Mesh(pp=2, tp=2), "1.12")
    (tmp_path / stray).write_bytes(b"PK\3\4 half of a file")
    loads(tmp_path / "c.pt")
    assert xla_ckpt.list_tags(tmp_path) == ["c.pt"]


def test_a_directory_of_the_name_of_a_part_is_none(tmp_path: Path) -> None:
    write_set(tmp_path / "c.pt", Mesh(tp=2), "documents")
    (tmp_path / "c.pt_0_2").mkdir()
    loads(tmp_path / "c.pt")


def test_a_full_file_counts_as_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = toy(Mesh(), 0)
    torch.save({**model.state_dict(), "_smp_is_partial": False}, tmp_path / "c.pt")
    write_set(tmp_path / "c.pt", Mesh(pp=2, tp=2), "1.12")
    other, _ = toy(Mesh(), 0, blank=True)
    assert xla_ckpt.load_checkpoint(tmp_path / "c.pt", model=other).user_content is None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert "Beside it lie 4 parts of SageMaker model parallel's" in caplog.text
    assert f"{tmp_path}/c.pt_* names them" in caplog.text
    assert loads(tmp_path / "c.pt_*").user_content == {"epoch": 3}
    assert xla_ckpt.list_tags(tmp_path) == ["c.pt_*"]


def test_sets_are_listed_once_and_by_time(tmp_path: Path) -> None:
    for number, name in enumerate(["b.pt", "a.pt", "step_20", "step_9"]):
        for file in write_set(tmp_path / name, Mesh(pp=2, tp=2), "1.12"):
            os.utime(file, ns=(10**18, 10**18 + number * 10**9))
    assert xla_ckpt.list_tags(tmp_path) == ["b.pt", "a.pt", "step_20", "step_9"]
    assert loads(tmp_path).report.tag == "step_9"


def test_an_older_set_where_the_newest_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A root directory is resumed from its newest good tag."""
    for number, name in enumerate(["a.pt", "b.pt"]):
        for file in write_set(tmp_path / name, Mesh(pp=2, tp=2), "1.12"):
            os.utime(file, ns=(10**18, 10**18 + number * 10**9))
    file.write_bytes(file.read_bytes()[:-5])
    os.utime(file, ns=(10**18, 10**18 + 10**9))
    assert loads(tmp_path).report.tag == "a.pt"
    assert file.name in caplog.text


def test_incomplete_sets_are_not_listed(tmp_path: Path) -> None:
    """A name that others have, too, is no set."""
    write_set(tmp_path / "c.pt", Mesh(pp=2, tp=2), "1.12")[1].unlink()
    (tmp_path / "log_0").write_text("no zip")
    torch.save({"w": torch.ones(2)}, tmp_path / "epoch_0.pt")
    assert xla_ckpt.list_tags(tmp_path) == []
    assert not xla_ckpt.has_checkpoint(tmp_path)
    assert not xla_ckpt.has_checkpoint(tmp_path / "log")


def test_names_that_are_one_behind_another() -> None:
    """The number of a step is a part of the name."""
    assert find_complete_sets(["s_10_0_0.pt", "s_10_0_1.pt", "s_9_0_0.pt", "s_9_0_1.pt"]) == ["s_10", "s_9"]
    assert find_complete_sets([f"f_{pp}_{tp}_{rdp}.pt" for pp in (0, 1) for tp in (0, 1) for rdp in (0, 1)]) == [
        "f_0",
        "f_1",
    ]
    assert parse_part_name("f_0_1_0.pt", RankFileName("{set}_{pp}_{tp}_{dp}.pt")) == ("f", (0, 1, 0))
    assert parse_part_name("f_0_1_0.pt", RankFileName("{set}_{pp}_{tp}.pt")) == ("f_0", (1, 0))
    assert find_complete_sets(["f_0_0.pt", "f_1_1.pt"]) == []  # as many as two ranks would have


def test_sets_whose_names_begin_alike(tmp_path: Path) -> None:
    """`ckpt` and `ckpt_1`: the parts of the second look like those of a third generation of the first."""
    write_set(tmp_path / "ckpt", Mesh(pp=2, tp=2), "1.12")
    write_set(tmp_path / "ckpt_1", Mesh(pp=2, tp=2), "1.12")
    assert xla_ckpt.list_tags(tmp_path) == ["ckpt", "ckpt_1"]
    loads(tmp_path / "ckpt")
    loads(tmp_path / "ckpt_1")


def test_parts_of_two_generations_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path / "c.pt", Mesh(pp=2), "1.6")
    write_set(tmp_path / "c.pt", Mesh(pp=2), "1.12")
    with pytest.raises(CorruptCheckpointError, match="parts of several versions of SMP") as refused:
        xla_ckpt.load_checkpoint(tmp_path / "c.pt", model={})
    assert "c.pt_0, c.pt_1" in str(refused.value)
    assert "c.pt_0_0.pt, c.pt_1_0.pt" in str(refused.value)


# Directories of `save_checkpoint`.


def test_directories_are_listed_in_the_order_of_newest(tmp_path: Path) -> None:
    """Whatever their time stamps are: a copy of the root has others."""
    for tag in ("z", "a", "m"):
        write_tag(tmp_path, tag, Mesh(pp=2, tp=2), user_content={"tag": tag})
    for number, tag in enumerate(("a", "m", "z")):
        for file in (tmp_path / f"{tag}_partial").iterdir():
            os.utime(file, ns=(10**18, 10**18 + number * 10**9))
    assert xla_ckpt.list_tags(tmp_path) == ["z_partial", "a_partial", "m_partial"]
    assert loads(tmp_path).user_content == {"tag": "m"}
    assert loads(tmp_path, "a_partial").user_content == {"tag": "a"}
    assert loads(tmp_path / "z_partial").user_content == {"tag": "z"}


def test_a_tag_that_newest_names_twice(tmp_path: Path) -> None:
    for tag in ("a", "b"):
        write_tag(tmp_path, tag, Mesh())
    with (tmp_path / "newest").open("a") as newest:
        newest.write("a_partial\n\ngone_partial\n")
    assert xla_ckpt.list_tags(tmp_path) == ["b_partial", "a_partial"]


def test_a_save_that_has_not_ended_is_not_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tag(tmp_path, "a", Mesh(pp=2))
    write_tag(tmp_path, "b", Mesh(pp=2), ended=False)
    assert xla_ckpt.list_tags(tmp_path) == ["a_partial"]
    loads(tmp_path, "b_partial")
    assert "b_partial: its save may not have ended" in caplog.text
    assert not xla_ckpt.verify(tmp_path, "b_partial").ok


def test_without_newest_time_stamps_count(tmp_path: Path) -> None:
    """SMP writes its configuration when all parts are there, so such a directory is complete."""
    for number, tag in enumerate(("z", "a", "m")):
        for file in write_tag(tmp_path, tag, Mesh()).iterdir():
            os.utime(file, ns=(10**18, 10**18 + number * 10**9))
    (tmp_path / "newest").write_text("a_partial\n")
    assert xla_ckpt.list_tags(tmp_path) == ["z_partial", "a_partial", "m_partial"]
    (tmp_path / "newest").unlink()
    assert xla_ckpt.list_tags(tmp_path) == ["z_partial", "a_partial", "m_partial"]


def test_a_directory_without_the_suffix(tmp_path: Path) -> None:
    write_tag(tmp_path, "a", Mesh(pp=2, tp=2)).rename(tmp_path / "best")
    (tmp_path / "newest").unlink()
    assert xla_ckpt.list_tags(tmp_path) == ["best"]
    loads(tmp_path / "best")
    # Within it there are no tags, so that its own path names it.
    assert xla_ckpt.list_tags(tmp_path / "best") == []


def test_names_alone_are_looked_at(tmp_path: Path) -> None:
    """A file that no one may read is found all the same: its opening tells."""
    files = write_set(tmp_path / "c.pt", Mesh(tp=2), "1.12")
    store = LocalStore(str(tmp_path))
    for file in files:
        file.chmod(0)
    found = find_smp_tag(store, "c.pt")
    assert found is not None
    assert found.files == ("c.pt_0_0.pt", "c.pt_0_1.pt")
