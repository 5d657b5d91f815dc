"""The commands and programs of docs/leaving-xla.md, run in the page's order where torch_xla cannot be imported.

What they convert was made before, by those whose checkpoints they are: neuronx-distributed (tests/fixtures/nxd) and
torch_xla; that of optimum-neuron by the arithmetic of its source.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.commands import MODULE
from tests.formats.gold import Gold
from tests.formats.optimum import Job, write_checkpoint
from tests.jobs import places, run_alone
from tests.nursery import Program, bear
from tests.runs import ROOT, environment

pytestmark = pytest.mark.xla

PAGE = ROOT / "docs" / "leaving-xla.md"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\w+\.py)\n")

WITHOUT_XLA = 'import sys; sys.modules.update({"torch_xla": None, "neuronx_distributed": None})\n'
"""Put in front of every program: an import of these is a ModuleNotFoundError."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 24, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
"""The model of the fixtures that neuronx-distributed wrote."""

LOSS = re.compile(r"step (\d): loss (\S+)")


def ran(command: str, folder: Path) -> str:
    """Run a line of a bash block, or a program of the page; what it printed. It must succeed."""
    name, *args = shlex.split(command)
    if name not in ("xla-ckpt", "torchrun", "python"):
        assert name in ("mkdir", "mv"), command
        subprocess.run([name, *args], check=True, cwd=folder)
        return ""
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    ranks = [environment(own)]
    if name == "xla-ckpt":
        program = Program(WITHOUT_XLA + MODULE, tuple(args), "xla_ckpt")
    else:
        if name == "torchrun":
            assert args[0].startswith("--nproc-per-node="), command
            ranks = places(int(args.pop(0).partition("=")[2]), own)
        here = f"sys.path.insert(0, {str(folder)!r})\n"
        program = Program(WITHOUT_XLA + here + (folder / args[0]).read_text(), tuple(args[1:]), args[0])
    born = [bear(program, env=env, cwd=folder, also=("transformers.models.llama.modeling_llama",)) for env in ranks]
    told = [process.communicate(240) for process in born]
    assert [process.returncode for process in born] == [0] * len(born), f"{command}\n{told}"
    return "".join(out for out, _ in told)


@dataclass
class Ran:
    """The page, run."""

    folder: Path
    said: dict[str, str]
    """What each command printed."""

    def losses(self, command: str) -> list[str]:
        """The losses that its ranks printed, which are the same on all of them."""
        found = LOSS.findall(self.said.get(command) or ran(command, self.folder))
        assert len(found) == 2 * len(set(found)) == 6, found
        return sorted(set(found))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("leaving")
    shutil.copytree(Gold("tp2_dp2_z1m__xser_small", "step_40").root, folder / "nxd")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_checkpoint(Job(tp=2, dp=2, zero1=True), folder / "out", 20)
    blocks = BLOCK.findall(PAGE.read_text())
    (job,) = (code for _, code in blocks if code.startswith("# my_job.py\n"))
    for how, devices in (("xser", "1"), ("spmd", "8")):
        run_alone(saves_with_torch_xla, how, folder, job, xla=True, env={"CPU_NUM_DEVICES": devices})
    said = {}
    for number, (language, code) in enumerate(blocks):
        if language == "bash":
            for line in code.splitlines():
                said[line] = ran(line, folder)
            continue
        named = NAMED.match(code)
        file = named[1] if named else f"block_{number}.py"
        (folder / file).write_text(code)
        if not named:
            said[file] = ran(f"python {file}", folder)
    return Ran(folder, said)


def saves_with_torch_xla(how: str, folder: Path, job: str) -> None:
    """Train the page's model on XLA devices, and save it as torch_xla's users do, and the truth beside it."""
    import numpy as np
    import torch.distributed as dist
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.experimental.distributed_checkpoint import CheckpointManager
    from torch_xla.utils import serialization

    os.chdir(folder)
    if how == "spmd":
        xr.use_spmd()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(5)
    program: dict[str, Any] = {}
    exec(job, program)
    model, optimizer = program["build"](lambda model: model.to("xla"))
    mesh = xs.Mesh(np.arange(8), (8,), ("data",)) if how == "spmd" else None
    for parameter in model.parameters():
        if mesh is not None:
            xs.mark_sharding(parameter, mesh, ("data", *[None] * (parameter.dim() - 1)))
    ids = torch.arange(16).reshape(2, 8).to("xla")
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        torch_xla.sync()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    if how == "spmd":
        CheckpointManager("spmd", save_interval=1, chkpt_on_preemption=False).save(2, state)
    else:
        os.mkdir("xser")
        serialization.save(state, "xser/epoch_3.pt")
    names = {id(p): name for name, p in model.named_parameters()}
    truth = {name: value.cpu() for name, value in model.state_dict().items()}
    for parameter, held in optimizer.state.items():
        truth |= {f"{names[id(parameter)]} {key}": value.cpu() for key, value in held.items()}
    torch.save(truth, f"{how}.truth")


def flat(tree: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The model and the optimizer's states of a stored state, named as in the truth of `saves_with_torch_xla`."""
    of_optimizer = tree["optimizer"]["state"].items()
    return tree["model"] | {f"{name} {key}": v for name, held in of_optimizer for key, v in held.items()}


def differ(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    return [n for n, v in wanted.items() if n not in found or found[n].dtype != v.dtype or not torch.equal(found[n], v)]


def of_neuronx_distributed() -> dict[str, torch.Tensor]:
    truth = Gold("tp2_dp2_z1m__xser_small", "step_40").truth
    moments = {f"{n} {kind}": v for kind in ("exp_avg", "exp_avg_sq") for n, v in truth[kind].items()}
    return truth["master"] | moments | {f"{n} step": torch.tensor(float(truth["step"])) for n in truth["master"]}


@pytest.mark.parametrize("form", ["dcp", "torchtitan", "torch"])
def test_what_neuronx_distributed_saved_is_all_there(page: Ran, form: str) -> None:
    if form == "torch":
        tree = torch.load(page.folder / "lm.pt", weights_only=True)
    else:
        root, tag = ("dcp", "step_40") if form == "dcp" else ("titan", "step-40")
        tree = xla_ckpt.restore(page.folder / root, tag).tree
    assert differ(flat(tree), of_neuronx_distributed()) == []
    assert tree["user_content"]["total_steps"] == 40
    assert [group["weight_decay"] for group in tree["optimizer"]["param_groups"]] == [0.01, 0.0]


@pytest.mark.parametrize(("source", "tag"), [("xser", "epoch_3"), ("spmd", "2")])
def test_what_torch_xla_saved_is_all_there(page: Ran, source: str, tag: str) -> None:
    truth = torch.load(page.folder / f"{source}.truth", weights_only=True)
    assert len(truth) == 48
    tree = xla_ckpt.restore(page.folder / "dcp", tag).tree
    assert differ(flat(tree), truth) == []
    assert tree["extras"] == {"epoch": 3}


STOCK = """of_model, of_optimizer = get_state_dict(model, optimizer)
dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=sys.argv[1])
set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
"""
OURS = """import xla_ckpt
xla_ckpt.load_checkpoint(sys.argv[1], sys.argv[2], model=model, optimizer=optimizer, strict=False)
"""
TITAN = """from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
flat = StateDictOptions(flatten_optimizer_state_dict=True)
of_model, of_optimizer = get_state_dict(model, optimizer, options=flat)
scheduler = {"last_epoch": -1}
dcp.load({**of_model, "optimizer": of_optimizer, "lr_scheduler": scheduler}, checkpoint_id=sys.argv[1])
model.load_state_dict(of_model)
set_optimizer_state_dict(model, optimizer, of_optimizer, options=flat)
assert scheduler == {"last_epoch": 1}, scheduler
"""
"""As torchtitan asks for it: the model's keys at the top, and flat ones of the optimizer."""


@pytest.fixture
def other_ways(page: Ran) -> Ran:
    """The page's job, with other loads in the place of stock DCP's."""
    program = (page.folder / "resume.py").read_text()
    assert STOCK in program
    for name, how in (("ours.py", OURS), ("titan.py", TITAN)):
        (page.folder / name).write_text(program.replace(STOCK, how))
    return page


def test_fsdp2_goes_on_with_the_losses_of_a_job_that_loads_the_files_themselves(other_ways: Ran) -> None:
    wanted = other_ways.losses("torchrun --nproc-per-node=2 ours.py nxd step_40")
    assert other_ways.losses("torchrun --nproc-per-node=2 resume.py dcp/step_40") == wanted
    assert other_ways.losses("torchrun --nproc-per-node=2 titan.py titan/step-40") == wanted
    for source, tag in (("old", "epoch_3"), ("spmd", "2")):
        wanted = other_ways.losses(f"torchrun --nproc-per-node=2 ours.py {source} {tag}")
        assert other_ways.losses(f"torchrun --nproc-per-node=2 resume.py dcp/{tag}") == wanted


def test_the_exports_are_the_models(page: Ran) -> None:
    from safetensors.torch import load_file

    truth = torch.load(page.folder / "spmd.truth", weights_only=True)
    weights = {name: value for name, value in truth.items() if " " not in name}
    assert differ(load_file(page.folder / "spmd_hf" / "model.safetensors"), weights) == []
    job = Job(tp=2, dp=2, zero1=True)
    assert differ(load_file(page.folder / "out_hf" / "model.safetensors"), job.hugging_face()) == []
    weights = job.whole() | {f"{n} {k}": v for k in ("exp_avg", "exp_avg_sq") for n, v in job.whole(k).items()}
    for tree in (
        xla_ckpt.restore(page.folder / "dcp", "checkpoint-20").tree,
        xla_ckpt.restore(page.folder / "titan", "step-20").tree,
        torch.load(page.folder / "out.pt", weights_only=True),
    ):
        assert differ(flat(tree), weights) == []


def test_no_command_could_import_torch_xla(page: Ran) -> None:
    (page.folder / "tries.py").write_text(
        "try:\n    import torch_xla\nexcept ModuleNotFoundError:\n    print('not there')\n"
    )
    assert ran("python tries.py", page.folder) == "not there\n"
