"""Saves when the main thread has ended: in functions of `atexit`, and on threads that outlive it."""

from __future__ import annotations

import os
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.no_threads import TOO_LARGE
from tests.nursery import Born, Program, bear
from xla_ckpt import Product, SaveOptions
from xla_ckpt.dcp import load

BEGUN = """
    import atexit, logging, sys, threading
    import torch, xla_ckpt, xla_ckpt.dcp
    from xla_ckpt import Product, SaveOptions

    logging.basicConfig(level=logging.WARNING)
    root, model = sys.argv[1], {"w": torch.full((1 << 16,), 7.0)}
    if sys.argv[2] == "quick":  # importing orbax anew takes two seconds
        from tests.helper import InFork
        from xla_ckpt.tags import orbax_commit

        orbax_commit.HelperProcess = InFork

    def save(tag="a", **options):
        return xla_ckpt.save_checkpoint(root + "/run", tag, model, **options)

    def later(function):  # when the main thread has ended
        def work():
            threading.main_thread().join()
            function()
        threading.Thread(target=work).start()
"""


def ended(code: str, root: Path, how: str = "quick") -> Born:
    program = textwrap.dedent(BEGUN) + textwrap.dedent(code)
    process = bear(Program(program, (str(root), how)), end="as python")
    process.communicate(120)
    return process


ENDINGS = {
    "atexit": (
        """
        save("first", async_save=True)
        for number in range(2):
            atexit.register(save, f"async {number}", async_save=True)
        atexit.register(lambda: save("result", async_save=True).result())
        atexit.register(save, "sync")
        """,
        "first", "async 0", "async 1", "result", "sync",
    ),
    "the first save of the program in atexit": ("atexit.register(save, 'a', async_save=True)", "a"),
    "a hook of threading": ("threading._register_atexit(lambda: save(async_save=True))", "a"),
    "a thread": (
        "later(lambda: [save('async', async_save=True), save('sync'), save('last', async_save=True)])",
        "async", "sync", "last",
    ),
    "a thread and atexit": (
        "later(lambda: save('t', async_save=True)); atexit.register(save, 'a', async_save=True)",
        "t", "a",
    ),
    "on_report": (
        """
        def heard(report):
            if report.tag == "a":
                save("b", async_save=True)
        xla_ckpt.on_report(heard)
        later(lambda: save(async_save=True))
        """,
        "a", "b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_saved_at_the_end_is_there_and_nothing_else(tmp_path: Path, ending: str) -> None:
    code, *tags = ENDINGS[ending]
    process = ended(code, tmp_path, "quick" if ending != "atexit" else "as ever")
    assert (process.returncode, process.communicate()[1]) == (0, "")
    assert {*os.listdir(tmp_path / "run")} - {".trash"} == {*tags}, "the lease is given back, too"
    for tag in tags:
        assert xla_ckpt.restore(tmp_path / "run", tag).tree["model"]["w"].unique().tolist() == [7.0]


def test_what_follows_a_save_at_the_end_is_done(tmp_path: Path) -> None:
    code = """
        options = SaveOptions(products=(Product(to=root + "/hf/{tag}"),))
        atexit.register(save, "a", async_save=True, options=options)
    """
    process = ended(code, tmp_path)
    assert (process.returncode, process.communicate()[1]) == (0, "")
    assert (tmp_path / "hf" / "a" / "model.safetensors").is_file()


def test_uploads_of_a_save_at_the_end_are_done(tmp_path: Path) -> None:
    code = """
        def saves():
            options = SaveOptions(local=root + "/near")
            xla_ckpt.save_checkpoint("memory://far", "a", model, async_save=True, options=options).uploaded()
            print(xla_ckpt.list_tags("memory://far"))
        later(saves)
    """
    process = ended(code, tmp_path)
    assert (process.returncode, process.communicate()[0]) == (0, "['a']\n"), process.communicate()[1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_by_dcp_at_the_end_is_there(tmp_path: Path) -> None:
    code = "atexit.register(lambda: print(xla_ckpt.dcp.async_save(model, checkpoint_id=root + '/dcp').done()))"
    process = ended(code, tmp_path)
    assert (process.returncode, process.communicate()[0]) == (0, "True\n"), process.communicate()[1]
    loaded = {"w": torch.zeros(1 << 16)}
    load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert loaded["w"].unique().tolist() == [7.0]


@pytest.mark.parametrize("how", ["atexit.register", "later"])
def test_a_save_that_fails_at_the_end_raises_its_error(tmp_path: Path, how: str) -> None:
    (tmp_path / "run").write_text("no directory")
    process = ended(f"{how}(lambda: save(async_save=True))", tmp_path)
    assert "StorageError" in process.communicate()[1] or "UsageError" in process.communicate()[1]


def test_a_save_is_made_by_its_caller_where_no_thread_is_to_be_had(tmp_path: Path) -> None:
    threading.stack_size(TOO_LARGE)
    try:
        options = SaveOptions(products=(Product(to=f"{tmp_path}/hf/{{tag}}"),))
        model = {"w": torch.full((1 << 16,), 7.0)}
        handle = xla_ckpt.save_checkpoint(tmp_path / "run", "a", model, async_save=True, options=options)
        assert handle.done()
        xla_ckpt.save_checkpoint(tmp_path / "run", "b", model).tidied()
        xla_ckpt.finalize_checkpoint()
    finally:
        threading.stack_size(0)
    assert xla_ckpt.list_tags(tmp_path / "run") == ["a", "b"]
    assert xla_ckpt.verify(tmp_path / "run").ok
    assert (tmp_path / "hf" / "a" / "model.safetensors").is_file()
