"""How the work of a save, a load and a listing grows with the number of arrays and of tags.

It is counted in calls of functions, which do not depend on the machine. What the standard library calls in turn is not
counted: a method of pathlib is one function in one version of Python and ten in another."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.tags.entry import MANIFEST_FILE

FEW, MANY = 30, 120


STANDARD_LIBRARY = os.path.dirname(os.__file__)


@functools.cache
def is_pythons_own(file: str) -> bool:
    """Whether a file of code is in the standard library."""
    return file.startswith("<frozen ") or (file.startswith(STANDARD_LIBRARY) and "site-packages" not in file)


def calls(work: Callable[[], Any], *, here: bool = False) -> int:
    """How many functions are called meanwhile, on all threads that begin meanwhile and on this one; or `here` alone."""
    counted: dict[int, int] = {}

    def count(frame: Any, event: str, arg: Any) -> None:
        caller = {"call": frame.f_back, "c_call": frame}.get(event)
        if caller is not None and not is_pythons_own(caller.f_code.co_filename):
            thread = threading.get_ident()
            counted[thread] = counted.get(thread, 0) + 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return counted[threading.get_ident()] if here else sum(counted.values())


def check_linear(count: Callable[[int], int], *, most: float) -> None:
    """Check that each further item costs as many calls as each of the first ones, and `max_values` at most.

    A step that is done for each pair of items would make the further ones several times as expensive.
    """
    few, twice, many = count(FEW), count(2 * FEW), count(MANY)
    first, later = (twice - few) / FEW, (many - twice) / (MANY - 2 * FEW)
    assert later <= 1.25 * first + 1, f"{first:.1f} calls for each further item, then {later:.1f}"
    assert later <= most, f"{later:.1f} calls for each item"


def model_of(arrays: int) -> torch.nn.Module:
    return torch.nn.ParameterList(torch.full((4,), float(i)) for i in range(arrays))


def stepped(arrays: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = model_of(arrays)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones(4)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("layout", ["native", "xser", "dcp"])
def test_a_save_grows_with_the_number_of_arrays(tmp_path: Path, layout: str) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "warm", *stepped(10), layout=layout)

    def count(arrays: int) -> int:
        state = stepped(arrays)
        return calls(lambda: xla_ckpt.save_checkpoint(tmp_path, "tag", *state, layout=layout, num_kept_ckpts=1))

    check_linear(count, most={"native": 1000, "xser": 9000, "dcp": 2400}[layout])


@pytest.mark.xla
def test_the_stall_grows_with_the_number_of_arrays(tmp_path: Path) -> None:
    """Each buffer is held, and each array described: what else is done for each array is not done by the caller."""
    import torch_xla

    def count(arrays: int) -> int:
        model = model_of(arrays).to("xla")
        torch_xla.sync(wait=True)
        saves = []
        counted = calls(
            lambda: saves.append(xla_ckpt.save_checkpoint(tmp_path, "tag", model, async_save=True)), here=True
        )
        saves[0].result()
        return counted

    count(10)
    check_linear(count, most=50)


@pytest.mark.parametrize("fresh", [False, True], ids=["into a state that is there", "into a new optimizer"])
def test_a_load_grows_with_the_number_of_arrays(tmp_path: Path, fresh: bool) -> None:
    def count(arrays: int) -> int:
        model, optimizer = stepped(arrays)
        xla_ckpt.save_checkpoint(tmp_path, f"{arrays}", model, optimizer)
        into = torch.optim.Adam(model.parameters()) if fresh else optimizer
        return calls(lambda: xla_ckpt.load_checkpoint(tmp_path, f"{arrays}", model, into))

    count(10)
    check_linear(count, most=2600)


def tags_in(root: Path, count: int) -> None:
    """Make a root directory of so many tags: each a copy of one, with a head of its own."""
    xla_ckpt.save(root, "1", {"w": torch.ones(1)})
    manifest = manifest_json.parse_manifest((root / "1" / MANIFEST_FILE).read_bytes())
    for number in range(2, count + 1):
        copy = shutil.copytree(root / "1", root / str(number))
        head = replace(manifest.header, tag=copy.name, sequence=number)
        (copy / MANIFEST_FILE).write_bytes(manifest_json.dump_manifest(replace(manifest, header=head)))


def adds(root: str, tags: int) -> None:
    xla_ckpt.save(root, "new", {"w": torch.ones(1)}).tidied()


def retires_five(root: str, tags: int) -> None:
    xla_ckpt.save(
        root, "new", {"w": torch.ones(1)}, num_kept_ckpts=tags - 4
    ).tidied()  # orbax looks at all tags for each


def retires_nearly_all(root: str, tags: int) -> None:
    xla_ckpt.save(root, "new", {"w": torch.ones(1)}, num_kept_ckpts=5).tidied()
    assert len(xla_ckpt.list_tags(root)) == 5


@pytest.mark.parametrize(
    ("work", "most"),
    [
        pytest.param(lambda root, tags: xla_ckpt.list_tags(root), 250, id="list"),
        pytest.param(lambda root, tags: xla_ckpt.restore(root), 350, id="the newest is loaded"),
        pytest.param(adds, 400, id="one more is saved"),
        pytest.param(retires_five, 3000, id="five are retired"),
        pytest.param(retires_nearly_all, 600, id="all but four are retired"),
    ],
)
def test_work_grows_with_the_number_of_tags(tmp_path: Path, work: Callable[[str, int], Any], most: int) -> None:
    def count(tags: int) -> int:
        root = tmp_path / str(tags)
        tags_in(root, tags)
        return calls(lambda: work(os.fspath(root), tags))

    count(10)  # the first save of a process loads orbax
    check_linear(count, most=most)
