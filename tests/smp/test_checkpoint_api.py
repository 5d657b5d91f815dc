"""What SMP's own test of its checkpoint calls asks for: ten saves of which five are kept, names, list, and resumes.

Its text is not here, but each of its steps is: partial saves with retention, a full save that leaves the list alone,
resumes of both kinds before and after model and optimizer are there, wrong tags, and another configuration.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import neuron_compat.smp as smp
import xla_ckpt
from tests.jobs import run_on_ranks
from tests.runs import names_in
from tests.smp.test_files_load import caught
from tests.smp.training import begin, trained, wrapped

CONTENT = {"test": "smp_checkpoint_api"}
KEPT = [f"test{i}_partial" for i in range(5, 10)]
FILES = {
    *(f"{kind}_{pp}_{tp}.pt" for kind in ("model", "optimizer_states") for pp in range(2) for tp in range(2)),
    "smp_config.pt", "user_content.pt",
}  # fmt: skip
OURS = {"manifest.json", "_CHECKPOINT_METADATA", "commit_success.txt"}


def weights(model: Any) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in model.parameters()]


def listed(folder: str) -> tuple[list[str], list[str]]:
    """(directories, other names) in a directory."""
    names = names_in(folder)
    inside = [name for name in names if os.path.isdir(f"{folder}/{name}")]
    return inside, [name for name in names if name not in inside]


def saves(folder: str, model: Any, optimizer: Any) -> tuple[dict[str, Any], Any]:
    """Ten partial saves, and a full one: what is there after each kind, and the weights of the last."""
    found: dict[str, Any] = {}
    for i in range(10):
        trained(model, optimizer, i, i + 1)
        smp.save_checkpoint(
            folder, f"test{i}", model=model, optimizer=optimizer, num_kept_partial_checkpoints=5, user_content=CONTENT
        )
    torch.distributed.barrier()
    found["partial"] = listed(folder), Path(f"{folder}/newest").read_text()
    torch.distributed.barrier()
    smp.save_checkpoint(folder, "test.pt", partial=False, model=model, user_content=CONTENT)
    found["full"] = listed(folder), Path(f"{folder}/newest").read_text()
    found["files"] = sorted(set(os.listdir(f"{folder}/test9_partial")) - {"extras"})
    return found, weights(model)


def follows(rank: int, folder: str) -> dict[str, Any]:
    begin(2, 2)
    model, optimizer = wrapped()
    found, last = saves(folder, model, optimizer)
    smp.reset()

    found["no tag"] = caught(lambda: smp.resume_from_checkpoint(folder, partial=False))
    found["content of full"] = smp.resume_from_checkpoint(folder, tag="test.pt", partial=False)
    model, optimizer = wrapped(seed=11)
    found["full before"] = weights(model) == last
    smp.reset()

    found["content"] = smp.resume_from_checkpoint(folder)
    model, optimizer = wrapped(seed=11)
    found["newest before"] = weights(model) == last and len(optimizer.state) == len(list(model.parameters()))
    assert smp.resume_from_checkpoint(folder, tag="test5") == CONTENT
    found["a tag after"] = weights(model) != last
    smp.reset()

    found["wrong"] = caught(lambda: smp.resume_from_checkpoint(folder, tag="test1"))
    found["wrong full"] = caught(lambda: smp.resume_from_checkpoint(folder, tag="test_no_exist", partial=False))
    smp.shutdown()

    begin(2, 2, shard_optimizer_state=True, fast_mode=True)
    found["config"] = caught(lambda: smp.resume_from_checkpoint(folder, strict_partitions=True))
    smp.reset()
    assert smp.resume_from_checkpoint(folder) == CONTENT
    model, optimizer = wrapped(seed=11)
    found["another config"] = weights(model) == last
    return found


def test_ten_saves_five_kept(tmp_path: Path) -> None:
    folder = str(tmp_path / "api")
    ranks = run_on_ranks(follows, 4, folder)
    for found in ranks:
        assert found["partial"] == ((KEPT, ["newest"]), "".join(f"{name}\n" for name in KEPT))
        assert found["full"] == ((KEPT, ["newest", "test.pt", "user_content_test.pt"]), found["partial"][1])
        assert set(found["files"]) - OURS == FILES
        assert found["no tag"] == ("SMPValidationError", "tag is required to load a full checkpoint!")
        assert found["content of full"] == found["content"] == CONTENT
        assert found["full before"] is True
        assert found["newest before"] is True
        assert found["a tag after"] is True
        there = "Tags of partial checkpoints there, oldest first: test5, test6, test7, test8, test9."
        for name, wrong in (("wrong", "test1_partial"), ("wrong full", "test_no_exist")):
            text = f"Checkpoint {folder}/{wrong} does not exist!\n{there}"
            assert found[name] == ("SMPValidationError", text)
        assert found["config"][0] == "SMPValidationError"
        assert "feature shard_optimizer_state, loaded False, current True" in found["config"][1]
        assert found["another config"] is True
    for tag in KEPT:
        assert xla_ckpt.verify(folder, tag).ok


def test_the_files_are_what_torch_and_smp_expect(tmp_path: Path) -> None:
    run_on_ranks(follows, 4, str(tmp_path))
    held = torch.load(tmp_path / "test9_partial/model_1_0.pt")
    assert held["_smp_is_partial"] is True
    info = held["_smp_load_info"]
    assert (info["tensor_parallel_degree"], info["pipeline_parallel_degree"]) == (2, 2)
    states = torch.load(tmp_path / "test9_partial/optimizer_states_1_0.pt")
    numbers = [number for group in states["param_groups"] for number in group["params"]]
    assert numbers == list(range(len(numbers)))  # those of the whole model
    assert set(states["state"]) < set(numbers)  # the states of a stage
    config = torch.load(tmp_path / "test9_partial/smp_config.pt")
    assert config["smp_version"] == "1.12.1"
    assert config["microbatches"] == 2
    whole = torch.load(tmp_path / "test.pt")
    assert whole["embed.weight"].shape == (12, 8)
    assert whole["up.weight"].shape == (16, 8)
