"""The programs of SMP's two documents, with the import line changed, and with what they leave open filled in.

The API page's general sample for saving and loading, with each of its four branches; and the two options of the page on
tensor parallelism. The text between the marks is the documents' own, but for the path of the checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import TORCHRUN, Commands

IMPORT = "import neuron_compat.smp as smp  # was: import smdistributed.modelparallel.torch as smp\n"

FILLED_IN = """
import json, os, sys
import torch
from tests.smp.models import Plain, batches, losses_of
from tests.smp.training import Net

MyModel = {"Plain": Plain, "Net": Net}[sys.argv[2]]
MyOpt = torch.optim.AdamW
branches = sys.argv[3].split(",")
partial, save_partial_model, save_full_model, partial_checkpoint, full_checkpoint = (
    name in branches
    for name in ("partial", "save_partial_model", "save_full_model", "partial_checkpoint", "full_checkpoint")
)
torch.manual_seed(3)
size, rank = (smp.rdp_size(), smp.rdp_rank()) if MyModel is Net else (smp.dp_size(), smp.dp_rank())
data = [(ids.chunk(size)[rank], labels.chunk(size)[rank]) for ids, labels in batches(4)]


def train(steps):
    losses = losses_of(model, optimizer, data[steps])
    if steps.start == 2:
        with open(f"{sys.argv[1]}/losses.{smp.rank()}.{sys.argv[4]}", "w") as file:
            json.dump(losses, file)
    torch.distributed.barrier()
"""

GENERAL_WRAP = """
# Original model and optimizer
model = MyModel()
optimizer = MyOpt(model.parameters())

# model parallel wrapper
model = smp.DistributedModel(model)
optimizer = smp.DistributedOptimizer(optimizer)
"""

GENERAL_SAVE = """
# To save, always save on dp_rank 0 to avoid data racing
if partial:
    # To save the partial model on each mp rank
    # the library will create `checkpoint.pt_{mprank}` for each mp rank
    if save_partial_model:
        if smp.dp_rank() == 0:
            model_dict = model.local_state_dict() # save the partial model
            opt_dict = optimizer.local_state_dict() # save the partial optimizer state
            smp.save(
                {"model_state_dict": model_dict, "optimizer_state_dict": opt_dict},
                f"/checkpoint.pt",
                partial=True,
            )

    # To save the full model
    if save_full_model:
        if smp.dp_rank() == 0:
            model_dict = model.state_dict() # save the full model
            opt_dict = optimizer.state_dict() # save the full optimizer state
            smp.save(
                {"model_state_dict": model_dict, "optimizer_state_dict": opt_dict},
                "/checkpoint.pt",
                partial=False,
            )
"""

GENERAL_LOAD = """
# To load, load on all ranks.
# The only difference for partial/full loading is the partial flag in smp.load
# Load partial checkpoint
if partial_checkpoint:
    checkpoint = smp.load("/checkpoint.pt", partial=True)
    model.load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
# Load full checkpoint
if full_checkpoint:
    checkpoint = smp.load("/checkpoint.pt", partial=False)
    model.load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
"""

TP_WRAP = """
model = MyModel()
model = smp.DistributedModel(model)

unique_params = []
unique_params_set = set()
for p in model.parameters():
  if p not in unique_params_set:
    unique_params.append(p)
    unique_params_set.add(p)
del unique_params_set
optimizer = MyOpt(unique_params)

optimizer = smp.DistributedOptimizer(optimizer)
"""

TP_SAVE = {
    1: """
model_dict = model.local_state_dict() # save a partial model
opt_dict = optimizer.local_state_dict() # save a partial optimizer state
# Save the dictionaries at rdp_rank 0 as a checkpoint
if smp.rdp_rank() == 0:
    smp.save(
        {"model_state_dict": model_dict, "optimizer_state_dict": opt_dict},
        f"/checkpoint.pt",
        partial=True,
    )
""",
    2: """
if smp.rdp_rank() == 0:
    model_dict = model.state_dict(gather_to_rank0=True) # save the full model
    if smp.rank() == 0:
        smp.save(
            {"model_state_dict": model_dict},
            "/checkpoint.pt",
            partial=False,
        )
""",
}

TP_LOAD = {
    1: """
checkpoint = smp.load("/checkpoint.pt", partial=True)
model.load_state_dict(checkpoint["model_state_dict"], same_partition_load=False)
optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
""",
    2: """
if smp.rdp_rank() == 0:
    checkpoint = smp.load("/checkpoint.pt", partial=False)
    model.load_state_dict(checkpoint["model_state_dict"])
""",
}


def run(folder: Path, name: str, program: str, degrees: dict[str, int], *args: str, ranks: int = 4) -> list[Any]:
    """Run a program on so many ranks; the losses that each of them wrote, if any."""
    file = folder / f"{name}.py"
    file.write_text(IMPORT + FILLED_IN + program.replace('"/checkpoint.pt"', f'"{folder}/checkpoint.pt"'))
    config = json.dumps({"ddp": True, "microbatches": 2, **degrees})
    command = [sys.executable, *TORCHRUN, f"--nproc-per-node={ranks}", str(file), str(folder), *args, name]
    Commands.run(command, env={"SM_HP_MP_PARAMETERS": config}, check=True)
    found = [folder / f"losses.{rank}.{name}" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in found if file.exists()]


@pytest.mark.parametrize(
    ("kind", "pp"),
    [
        ("partial", 2),
        ("full", 4),
        pytest.param("partial", 4, marks=pytest.mark.rest),
        pytest.param("full", 2, marks=pytest.mark.rest),
    ],
)
def test_the_general_sample(tmp_path: Path, kind: str, pp: int) -> None:
    """Each of its branches: partial and full, saved and loaded. The job that loads trains on as the one that saved.

    Files of each form with more degrees are in test_pairs.py, so each form is tried with one number of stages here.
    """
    degrees = {"pipeline_parallel_degree": pp}
    save = GENERAL_WRAP + "train(slice(0, 2))\n" + GENERAL_SAVE + "train(slice(2, 4))\n"
    load = GENERAL_WRAP + GENERAL_LOAD + "train(slice(2, 4))\n"
    saved = run(tmp_path, "save", save, degrees, "Plain", f"partial,save_{kind}_model")
    files = sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("checkpoint.pt"))
    assert files == (["checkpoint.pt"] if kind == "full" else [f"checkpoint.pt_{rank}" for rank in range(pp)])
    loaded = run(tmp_path, "load", load, degrees, "Plain", f"{kind}_checkpoint")
    assert loaded == saved
    assert len(loaded) == 4


DEGREES = {"tp2 x rdp2": {"tensor_parallel_degree": 2}, "pp2 x tp2": {"tensor_parallel_degree": 2, "partitions": 2}}


@pytest.mark.parametrize(
    ("option", "name"),
    [
        (1, "pp2 x tp2"),
        (2, "tp2 x rdp2"),
        pytest.param(1, "tp2 x rdp2", marks=pytest.mark.rest),
        pytest.param(2, "pp2 x tp2", marks=pytest.mark.rest),
    ],
)
def test_the_options_of_the_page_on_tensor_parallelism(tmp_path: Path, option: int, name: str) -> None:
    degrees = DEGREES[name]
    save = TP_WRAP + "train(slice(0, 2))\n" + TP_SAVE[option] + "train(slice(2, 4))\n"
    load = TP_WRAP + TP_LOAD[option] + "train(slice(2, 4))\n"
    saved = run(tmp_path, "save", save, degrees, "Net", "")
    parts = [f"checkpoint.pt_{pp}_{tp}" for pp in range(degrees.get("partitions", 1)) for tp in range(2)]
    files = sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("checkpoint.pt"))
    assert files == (["checkpoint.pt"] if option == 2 else parts)
    loaded = run(tmp_path, "load", load, degrees, "Net", "")
    if option == 1:
        assert loaded == saved
    else:  # it stores no optimizer: the first step is made with the stored weights
        assert [losses[0] for losses in loaded] == [losses[0] for losses in saved]
        whole = torch.load(tmp_path / "checkpoint.pt")["model_state_dict"]
        assert whole["embed.weight"].shape == (12, 8)
