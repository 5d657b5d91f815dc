"""`neuron_compat.nxd_on_cpu`: what it puts in the place of the Neuron SDK, and the real package under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import MODULE
from tests.neuron.real_nxd import at_nxd, needs_nxd
from tests.nursery import Born, Program, bear
from tests.runs import environment

pytestmark = pytest.mark.xla

IMPORTING = """
import socket
from neuronxcc import nki
from neuronxcc.nki.language import par_dim, tile_size
from torch_neuronx.utils import get_platform_target
import libneuronxla.proto.metaneff_pb2

@nki.jit
def kernel(x: nki.language.Tensor) -> "x":
    return x + 1

class Wide(par_dim):
    pass

assert kernel(1) == 2, "a decorator leaves a function as it is"
assert get_platform_target() == "trn1"
assert isinstance(Wide(), par_dim)
try:
    socket.create_connection(("169.254.169.254", 80), timeout=600)
except OSError as error:
    refused = str(error)
"""
"""Imports as neuronx-distributed's are, and the question that it asks of AWS."""


def run_it(folder: Path, script: str, *packages: str) -> Born:
    """Run a script as `python -m neuron_compat.nxd_on_cpu` does, in a process that has torch_xla already."""
    (folder / "script.py").write_text(script)
    program = Program(
        f"import sys; sys.path += {packages}\n{MODULE}", ("script.py", "--option"), "neuron_compat.nxd_on_cpu"
    )
    place = environment({"RANK": "0", "WORLD_SIZE": "1"})
    done = bear(program, env=place, cwd=folder, xla=True)
    done.communicate(200)
    return done


def test_without_the_package_it_says_so(tmp_path: Path) -> None:
    done = run_it(tmp_path, "")
    assert done.returncode == 1
    assert "there is no neuronx-distributed to run on CPUs. Install its package" in done.communicate()[1]


def test_what_is_imported_of_the_neuron_sdk_is_there_and_no_other_machine_is_asked(tmp_path: Path) -> None:
    package = tmp_path / "packages/neuronx_distributed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(IMPORTING)
    script = """
import sys, neuronx_distributed, torch_xla.runtime as xr
print(sys.argv, neuronx_distributed.refused, xr.world_size())
"""
    done = run_it(tmp_path, script, str(tmp_path / "packages"))
    out, err = done.communicate()
    assert done.returncode == 0, err
    assert "['script.py', '--option'] 169.254.169.254 is not this machine" in out


TRAINS = """
import sys
import neuronx_distributed as nxd
import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear

import xla_ckpt

dist.init_process_group("xla")
config = nxd.neuronx_distributed_config(tensor_parallel_size=2, optimizer_config={"zero_one_enabled": True})

def build():
    torch.manual_seed(0)
    wide = ColumnParallelLinear(8, 16, bias=False, gather_output=False)
    return torch.nn.Sequential(wide, RowParallelLinear(16, 8, bias=False, input_is_parallel=True))

model = nxd.initialize_parallel_model(config, build)
optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-2)
model(torch.ones(2, 8, device="xla")).sum().backward()
optimizer.step()
nxd.save_checkpoint("theirs", tag="a", model=model, optimizer=optimizer, use_xser=False)
xla_ckpt.save_checkpoint("ours", "a", model, optimizer)
"""


@needs_nxd
def test_a_script_of_neuronx_distributed_runs_as_it_is(tmp_path: Path) -> None:
    import torch

    import xla_ckpt

    (tmp_path / "train.py").write_text(TRAINS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    subprocess.run(
        [*launch, "-m", "neuron_compat.nxd_on_cpu", "train.py"], cwd=tmp_path, env=at_nxd(), check=True, timeout=250
    )
    files = [tmp_path / f"theirs/a/model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt" for tp in range(2)]
    theirs = [torch.load(file, weights_only=True) for file in files]
    ours = xla_ckpt.restore(tmp_path / "ours", "a").tree["model"]
    assert sorted(ours) == ["0.weight", "1.weight"]
    for dim, name in enumerate(sorted(ours)):
        assert torch.equal(torch.cat([part[name] for part in theirs], dim), ours[name])
