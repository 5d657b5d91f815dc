"""Programs as they are written for Trainium, unchanged, on CPUs: NEURON_COMPAT_EMULATE=1, under torchrun, too."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

import neuron_compat
import neuron_compat.nxd as nxd
import xla_ckpt
from tests.commands import Commands
from tests.jobs import finish, places, run_alone
from tests.nursery import Call, bear
from tests.runs import ROOT, environment

pytestmark = pytest.mark.xla

HEAD = """
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

import neuron_compat.nxd as nxd
from neuron_compat.nxd.parallel_layers import parallel_state
"""

COLLECTIVES = """
rank, world = dist.get_rank(), dist.get_world_size()
assert (rank, world) == (xr.global_ordinal(), xr.world_size())
assert dist.get_backend() == "xla"
value = torch.full((2,), rank + 1.0).to("xla")
dist.all_reduce(value)
assert value.tolist() == [world * (world + 1) / 2] * 2
assert xm.all_gather(torch.tensor([float(rank)]).to("xla")).tolist() == list(range(world))
found = [torch.zeros(1).to("xla") for _ in range(world)]
dist.all_gather(found, torch.tensor([float(rank)]).to("xla"))
assert [f.item() for f in found] == list(range(world))
value = torch.tensor([float(rank)]).to("xla")
dist.broadcast(value, src=1)
assert value.item() == 1
part = torch.zeros(1).to("xla")
dist.reduce_scatter_tensor(part, torch.arange(float(world)).to("xla"))
assert part.item() == world * rank
"""


def run_script(text: str, folder: Path, ranks: int) -> None:
    """Run a program under torchrun."""
    script = folder / "script.py"
    script.write_text(text)
    env = environment({"NEURON_COMPAT_EMULATE": "1", "OMP_NUM_THREADS": "1"})
    del env["PJRT_DEVICE"]  # a program for Trainium does not set it
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)],
        capture_output=True, text=True, env=env, timeout=240, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"


def test_the_program_and_the_test_of_the_document_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (ROOT / "docs" / "testing-on-cpus.md").read_text()
    for name, text in re.findall(r"^```python (\S+)\n(.*?)^```", document, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PJRT_DEVICE")  # a program for Trainium does not set it
    test: Any = runpy.run_path("test_resume.py")["test_resumes_on_other_ranks"]
    test.__globals__["subprocess"] = Commands
    test()
    assert nxd.has_checkpoint("checkpoints")


@pytest.mark.parametrize("url", ["", "xla"])
def test_groups_that_torch_xla_makes_have_all_ranks(url: str, tmp_path: Path) -> None:
    method = f', init_method="{url}://"' if url else ""
    begin = f'import torch_xla.experimental.pjrt_backend\ndist.init_process_group("xla"{method})\n'
    save = "\nparallel_state.initialize_model_parallel(2)\nnxd.save_checkpoint('run', tag='1', user_content=1)\n"
    inside = textwrap.indent(begin + COLLECTIVES + save, "    ")
    run_script(f"{HEAD}\ndef main(index):\n{inside}\ntorch_xla.launch(main)\n", tmp_path, 2)
    assert (tmp_path / "run" / "1" / "done").exists()


def too_early() -> None:
    distributed: Any = torch.distributed
    distributed.init_process_group("xla", init_method="xla://")
    with pytest.raises(RuntimeError, match="has 1 rank, and torchrun started 2"):
        neuron_compat.emulate()
    distributed.destroy_process_group()


def test_a_group_that_was_made_too_early_says_so() -> None:
    run_alone(too_early, xla=True, env=places(2)[0])


def is_not_emulated() -> None:
    distributed: Any = torch.distributed
    distributed.init_process_group("xla")
    assert (distributed.get_world_size(), xr.world_size()) == (2, 1)
    with pytest.raises(xla_ckpt.UsageError, match=r"do not reach.*2 devices, found 1.*NEURON_COMPAT_EMULATE=1"):
        nxd.parallel_layers.parallel_state.initialize_model_parallel()


def test_a_job_that_xla_does_not_reach_is_told_so_before_it_trains() -> None:
    ranks = [bear(Call.of(is_not_emulated), env=place, xla=True) for place in places(2)]
    outcomes = finish(ranks)
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes


def joins_late() -> None:
    neuron_compat.emulate(join=False)
    assert not torch.distributed.is_initialized()
    assert (xr.global_ordinal(), xr.world_size()) == (int(os.environ["RANK"]), 2)
    assert xm.mesh_reduce("sum", xr.global_ordinal() + 1, sum) == 3
    assert torch.distributed.get_world_size() == 2


def test_without_a_process_group_the_first_collective_joins() -> None:
    ranks = [bear(Call.of(joins_late), env=place, xla=True) for place in places(2)]
    assert [code for code, _, _ in finish(ranks)] == [0, 0]
