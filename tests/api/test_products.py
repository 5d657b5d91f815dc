"""Products of tags: what is made of them after their commit, in the background, and what its failure does."""

from __future__ import annotations

import os
import shutil
import signal
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.nursery import Call, Program, bear
from tests.runs import environment
from xla_ckpt import BestN, EveryNSteps, LatestN, Product, SaveOptions, StorageError, UsageError
from xla_ckpt.conversion import export
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags.directory_root import DirectoryDraft


@pytest.fixture(autouse=True)
def own_products() -> Iterator[None]:
    """No test is told of the errors of another one."""
    yield
    xla_ckpt.finalize_checkpoint()


def save(root: object, step: int, *products: Product, **more: Any) -> xla_ckpt.SaveHandle:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, step)
    options = SaveOptions(products=products, retention=more.pop("retention", None))
    return xla_ckpt.save_checkpoint(root, f"step_{step}", model, user_content={"step": step}, options=options, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["directory", "memory"])
@pytest.mark.parametrize("async_save", [False, True])
def test_every_second_tag_becomes_a_directory_of_hugging_faces(tmp_path: Path, kind: str, async_save: bool) -> None:
    root = tmp_path / "run" if kind == "directory" else f"memory://{tmp_path}"
    product = Product(to=tmp_path / "hf/{tag}", every_n_steps=2, dtype="bfloat16")
    for step in (1, 2, 3, 4):
        save(root, step, product, async_save=async_save)
    xla_ckpt.finalize_checkpoint()
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["step_2", "step_4"]
    weight = load_file(tmp_path / "hf/step_2/model.safetensors")["weight"]
    assert (weight.dtype, weight[0, 0].item()) == (torch.bfloat16, 2)


@pytest.mark.parametrize("layout", ["dcp", "xser", "native", "smp", "orbax"])
def test_a_tag_of_another_layout_with_a_retention_of_its_own(tmp_path: Path, layout: str) -> None:
    for step in (1, 2, 3):
        save(tmp_path / "run", step, Product(to=tmp_path / "theirs", layout=layout, keep=LatestN(1)))
        xla_ckpt.finalize_checkpoint()
    assert xla_ckpt.list_tags(tmp_path / "theirs") == ["step_3"]
    assert xla_ckpt.list_tags(tmp_path / "run") == ["step_1", "step_2", "step_3"]
    assert xla_ckpt.restore(tmp_path / "theirs").tree["model"]["weight"][0, 0] == 3


@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_directories_have_a_retention_too_which_takes_nothing_else(tmp_path: Path, kind: str) -> None:
    hf = tmp_path / "hf" if kind == "directory" else f"memory://{tmp_path}/hf"
    best = Product(to=f"{hf}/{{tag}}-model", keep=LatestN(1) | BestN("step", 1))
    for step in (1, 2, 3):
        save(tmp_path / "run", step, best, retention=LatestN(1))
        xla_ckpt.finalize_checkpoint()
        if step == 1:
            xla_ckpt.export_hf(tmp_path / "run", f"{hf}/step_0-model")  # by hand: it has no mark
            if kind == "directory":
                shutil.copytree(tmp_path / "hf/step_1-model", tmp_path / "hf/copied")
    left = set(open_store(hf).list_names())
    assert left - {"copied"} == {"step_0-model", "step_1-model", "step_3-model"}
    assert ("copied" in left) == (kind == "directory")
    xla_ckpt.convert(f"{hf}/step_3-model", tmp_path / "back")
    assert xla_ckpt.restore(tmp_path / "back").tree["model"]["weight"][0, 0] == 3


def test_a_mesh_and_a_single_file(tmp_path: Path) -> None:
    of_ranks = Product(to=tmp_path / "nxd", layout="nxd", mesh="dp=1,tp=1")
    save(tmp_path / "run", 7, of_ranks, Product(to=tmp_path / "files/{tag}.pt", layout="torch"))
    xla_ckpt.finalize_checkpoint()
    assert xla_ckpt.list_tags(tmp_path / "nxd") == ["step_7"]
    assert torch.load(tmp_path / "files/step_7.pt")["user_content"] == {"step": 7}


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    products = [Product(to=tmp_path / "hf/{tag}"), Product(to=tmp_path / "dcp", layout="dcp")]
    for _ in range(2):
        save(tmp_path / "run", 1, *products)
        xla_ckpt.finalize_checkpoint()
        made = {path: path.stat().st_ino for path in tmp_path.rglob("*") if "run" not in str(path)}
    save(tmp_path / "run", 1, *products)
    xla_ckpt.finalize_checkpoint()
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*") if "run" not in str(path)} == made


def test_a_tag_stays_until_its_product_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun, write = threading.Event(), threading.Event(), export.write_directory

    def late(*args: Any, **more: Any) -> None:
        begun.set()
        assert go.wait(60)
        write(*args, **more)

    monkeypatch.setattr(export, "write_directory", late)
    for step in (1, 2, 3):
        save(tmp_path / "run", step, Product(to=tmp_path / "hf/{tag}"), retention=LatestN(1)).result()
    assert begun.wait(60)
    assert xla_ckpt.list_tags(tmp_path / "run") == ["step_1", "step_2", "step_3"]
    go.set()
    xla_ckpt.finalize_checkpoint()
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["step_1", "step_2", "step_3"]
    save(tmp_path / "run", 4, retention=LatestN(1)).tidied()
    assert xla_ckpt.list_tags(tmp_path / "run") == ["step_4"]


def test_an_error_fails_no_save_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    product = Product(to=tmp_path / "file/{tag}")
    assert save(tmp_path / "run", 1, product).result().sequence == 1
    assert save(tmp_path / "run", 2, product, Product(to=tmp_path / "hf/{tag}")).result().sequence == 2
    with pytest.raises(StorageError, match="file"):
        xla_ckpt.finalize_checkpoint()
    xla_ckpt.finalize_checkpoint()
    assert caplog.text.count("/file/{tag} failed: making the root directory failed") >= 2
    assert (tmp_path / "hf/step_2/model.safetensors").exists(), "one that fails keeps no other from being made"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"to": "hf"}, r"needs a place of its own.*\{tag\}"),
        ({"to": "dcp/{tag}", "layout": "dcp"}, r"without \{tag\}"),
        ({"to": "hf/{tag}", "layout": "safetensor"}, "did you mean 'safetensors'"),
        ({"to": "{tag}.pt", "layout": "torch", "keep": LatestN(1)}, "keep= is for tags and directories"),
        ({"to": "hf/{tag}/bf16", "keep": LatestN(1)}, "in the last part of to="),
        ({"to": "dcp", "layout": "dcp", "dtype": "bfloat16"}, "dtype= is for the layout safetensors"),
        ({"to": "hf/{tag}", "mesh": "tp=2"}, "mesh= is for other layouts"),
        ({"to": "hf/{tag}", "dtype": "bf16"}, "dtype= is no element type"),
        ({"to": "hf/{tag}", "llama": True}, "llama= is of another class"),
        ({"to": "hf/{tag}", "every_n_steps": 0}, "every_n_steps is no number of steps"),
        ({"to": "dcp", "layout": "dcp", "mesh": "dq=2"}, "mesh"),
        ({"to": "dcp", "layout": "dcp", "keep": 3}, "keep is no policy"),
    ],
)
def test_a_product_that_makes_no_sense_cannot_be_made(wrong: dict[str, Any], says: str) -> None:
    """The first save told it."""
    with pytest.raises(UsageError, match=says):
        Product(**wrong)


@pytest.mark.parametrize("wrong", [{"to": "run", "layout": "dcp"}, {"to": "run/{tag}/hf"}])
def test_a_product_among_the_tags_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="outside of the root directory"):
        save("run", 1, Product(**wrong))
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(UsageError, match=r"products= is no tuple of products"):
        SaveOptions(products=Product(to="hf/{tag}"))  # type: ignore[arg-type]


def test_a_part_of_a_model_is_no_product_for_whole_models(tmp_path: Path) -> None:
    """It was told when the product was made, in the background, after the commit."""
    options = SaveOptions(products=(Product(to=tmp_path / "hf/{tag}"),))
    with pytest.raises(UsageError, match=r"safetensors is a whole model.*found only=model/weight.*layout='peft'"):
        xla_ckpt.save_checkpoint(
            tmp_path / "run", "a", torch.nn.Linear(2, 2), only="model/weight", options=options, async_save=True
        )
    assert [*tmp_path.iterdir()] == []


def dies_in_mid_product(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        commit = DirectoryDraft.commit

        def dies(self: DirectoryDraft, **more: Any) -> float:
            if self.store.path.endswith("hf"):
                os.kill(os.getpid(), signal.SIGKILL)
            return commit(self, **more)

        patch.setattr(DirectoryDraft, "commit", dies)
        save(root / "run", 1, Product(to=root / "hf/{tag}"))
        xla_ckpt.finalize_checkpoint()


def test_half_a_product_is_none(tmp_path: Path) -> None:
    killed = bear(Call.of(dies_in_mid_product, tmp_path), env=environment())
    killed.communicate(60)
    assert killed.returncode == -signal.SIGKILL
    assert xla_ckpt.list_tags(tmp_path / "run") == ["step_1"]
    assert [path.name for path in (tmp_path / "hf").iterdir() if not path.name.startswith(".")] == []
    save(tmp_path / "run", 1, Product(to=tmp_path / "hf/{tag}"))
    xla_ckpt.finalize_checkpoint()
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["step_1"]


def test_a_program_that_ends_has_made_its_products(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code = """
        import torch, xla_ckpt
        products = (xla_ckpt.Product(to="hf/{tag}"), xla_ckpt.Product(to="file/{tag}"))
        options = xla_ckpt.SaveOptions(products=products)
        xla_ckpt.save_checkpoint("run", "a", torch.nn.Linear(2, 2), options=options, async_save=True)
    """
    ended = bear(Program(textwrap.dedent(code)), env=environment(), cwd=tmp_path)
    _, err = ended.communicate(120)
    assert ended.returncode == 0, err
    assert (tmp_path / "hf/a/model.safetensors").exists()
    assert "what was to follow a save was not done" in err


@pytest.mark.parametrize("to", ["file/{tag}", "file/hf/{tag}"])
def test_a_file_in_the_way_of_a_product_is_named(tmp_path: Path, to: str) -> None:
    (tmp_path / "file").write_text("in the way")
    save(tmp_path / "run", 1, Product(to=tmp_path / to))
    with pytest.raises(xla_ckpt.StorageError, match="A file has this name, or lies on the way to it") as caught:
        xla_ckpt.finalize_checkpoint()
    assert caught.value.path == str((tmp_path / to).parent)
    assert (tmp_path / "file").read_text() == "in the way"


def saves_with_products(rank: int, root: Path) -> str:
    product = Product(to=root / "hf/{tag}")
    model = {"w": torch.ones(2)}
    xla_ckpt.save_checkpoint(root / "run", "a", model, options=SaveOptions(products=(product,)))
    try:
        products = (product,) if rank else ()
        xla_ckpt.save_checkpoint(root / "run", "b", model, options=SaveOptions(products=products, stale="ignore"))
    except UsageError as error:
        return str(error)
    finally:
        xla_ckpt.finalize_checkpoint()
    return ""


def test_ranks_say_the_same_and_the_first_makes_it(tmp_path: Path) -> None:
    said = run_on_ranks(saves_with_products, 2, tmp_path)
    assert all("products=()" in text for text in said)
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["a"]


@pytest.mark.parametrize("kind", ["directory", "memory"])
@pytest.mark.parametrize("second", ["the run begins anew", "another run"])
def test_the_product_that_was_made_last_is_the_newest(tmp_path: Path, kind: str, second: str) -> None:
    """Each was deleted as soon as it was made: the first run had the larger numbers of commits."""
    hf = tmp_path / "hf" if kind == "directory" else f"memory://{tmp_path}/hf"
    product = Product(to=f"{hf}/{{tag}}", keep=LatestN(2))
    for step in range(1, 5):
        save(tmp_path / "run", step, product)
    xla_ckpt.finalize_checkpoint()
    assert open_store(hf).list_names() == ["step_3", "step_4"]
    if second == "the run begins anew":
        shutil.rmtree(tmp_path / "run")
    left = []
    for step in (101, 102, 103):
        save(tmp_path / ("run" if second == "the run begins anew" else "other"), step, product)
        xla_ckpt.finalize_checkpoint()
        left.append(open_store(hf).list_names())
    assert left == [["step_101", "step_4"], ["step_101", "step_102"], ["step_102", "step_103"]]


def test_products_of_steps_that_no_name_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = SaveOptions(products=(Product(to=tmp_path / "hf/{tag}", every_n_steps=200, keep=EveryNSteps(400)),))
    contents: dict[str, Any] = {
        "a": {"step": 100},
        "b": {"step": 200},
        "c": {"step": 400},
        "best": {},
        "d": {"step": 600},
    }
    for tag, content in contents.items():
        xla_ckpt.save_checkpoint(tmp_path / "run", tag, torch.nn.Linear(2, 2), user_content=content, options=options)
    xla_ckpt.finalize_checkpoint()
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["best", "c", "d"]
    assert "tag best has no step" in caplog.text


@pytest.mark.parametrize("keep", [None, LatestN(1)])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("to", ["bucket", "below", "near", "linked", "dotted", "named", "beside"])
def test_a_product_lies_outside_of_each_root_of_the_run(tmp_path: Path, to: str, local: bool, keep: Any) -> None:
    root, near = f"memory://{tmp_path}/run", tmp_path / "near"
    near.mkdir()
    (tmp_path / "link").symlink_to(near)
    places = {
        "bucket": root, "below": f"{root}/dcp", "near": near, "linked": tmp_path / "link", "dotted": near / "a" / "..",
        "named": f"memory://{tmp_path}/{{tag}}", "beside": f"memory://{tmp_path}/runs",
    }  # fmt: skip
    layout = "safetensors" if to == "named" else "dcp"
    product = Product(to=places[to], layout=layout, keep=keep)
    options = SaveOptions(products=(product,), local=near if local else None)

    def saves() -> None:
        xla_ckpt.save(root, "run", {"model": {"w": torch.ones(3)}}, options=options)

    if to in ("bucket", "below", "named") or (local and to != "beside"):
        with pytest.raises(UsageError, match="outside of the root directory"):
            saves()
        assert not xla_ckpt.list_tags(root)
    else:
        saves()
    xla_ckpt.finalize_checkpoint()
