"""The fixtures that neuronx-distributed itself wrote, and models to load them into.

A few small ones are in the repository (tests/fixtures/nxd). Larger ones, of more kinds, may be at hand beside it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import some_of
from tests.topology.state import ceil_to
from xla_ckpt import Mesh
from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.distributed.current_job import JOB_OVERRIDE, Job
from xla_ckpt.distributed.exchange import Exchange, InProcessCommunicator
from xla_ckpt.distributed.job import ExchangeSequence

_ROOT = Path(__file__).resolve().parents[2]
SMALL = _ROOT / "tests/fixtures/nxd"
_THERE = Path(os.environ.get("XLA_CKPT_GOLD", _ROOT.parent / "shared" / "gold"))
"""A clone elsewhere is told where the larger ones are by the environment."""
GOLD = _THERE if _THERE.is_dir() else None
LOST = "tp2_cp2_dp2_z1m__pt_sync"
"""neuronx-distributed lost half of the optimizer in this one."""
FUSED = "tp2_dp2_z1m_gqafused"
"""The beginning of the names of those with a fused projection in unequal parts, whose attributes were lost."""

_NOT_HERE = "the larger checkpoints that neuronx-distributed wrote are not here"
needs_gold = pytest.mark.skipif(GOLD is None, reason=_NOT_HERE)
ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "expert_model_parallel")
HYPER = {"weight_decay": 0.5, "lr": 3.0}


def _folders() -> dict[str, Path]:
    """The directory of each fixture, by its name; that of a small one says its layout, as those of the others do."""
    found = {}
    for folder in sorted(SMALL.iterdir()):
        if folder.is_dir():
            xser = json.loads((folder / "topology.json").read_text())["use_xser"]
            found[f"{folder.name}__{'xser' if xser else 'pt'}_small"] = folder
    for root in (GOLD, GOLD.parent / "gold_gqa") if GOLD else ():
        found |= {folder.name: folder for folder in sorted(root.glob("*")) if folder.is_dir()}
    return found


FOLDERS = _folders()


def cases(fused: bool = False) -> list[tuple[str, str]]:
    """(name, tag) of each fixture; or only of those whose attributes were lost."""
    names = [name for name in FOLDERS if name.startswith(FUSED) or not fused]
    return sorted((name, tag.name) for name in names for tag in (FOLDERS[name] / "ckpt").iterdir())


def few_of(these: list[tuple[str, str]]) -> list[Any]:
    """Parameters: some cases in which each word of their names comes, and the others as the rest of a matrix.

    For what is made of a checkpoint that has been read: whatever wrote it, it goes on from a manifest. That each of
    them is read is shown in test_gold.py.
    """
    return some_of(these, lambda case: words_of(case[0]))


def words_of(name: str) -> list[str]:
    """What the name of a fixture says of the job that wrote it."""
    return name.removesuffix("_small").removesuffix("_sync").split("_")


def folder_of(case: str) -> Path:
    """The directory of a fixture; without it the test is skipped."""
    if case not in FOLDERS:
        pytest.skip(_NOT_HERE)
    return FOLDERS[case]


@dataclass
class Gold:
    case: str
    tag: str

    def __post_init__(self) -> None:
        folder = folder_of(self.case)
        self.root = folder / "ckpt"
        self.topology = json.loads((folder / "topology.json").read_text())
        self.truth: dict[str, Any] = torch.load(folder / f"truth_{self.tag}.pt", weights_only=True)
        ranks = self.topology["ranks"]
        self.infos: dict[str, Any] = {}
        for rank in ranks if isinstance(ranks, list) else ranks.values():
            self.infos |= rank["local_params"]
        if "lm_head.weight" not in self.infos:
            self.infos["lm_head.weight"] = self.infos["model.embed_tokens.weight"]

    @property
    def tied(self) -> bool:
        return bool(self.topology["config"]["v"]["tied"])

    def part(self, name: str, full: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """What a rank holds, by code of the test's own."""
        info, at = self.infos[name], mesh.coordinates(rank)
        if info["expert_model_parallel"]:
            full = full.chunk(mesh.ep, 0)[at["ep"]]
        if name.endswith(("weight_k", "weight_v")):
            return self.keys(full, mesh)[at["tp"]].clone()
        if name.endswith("weight_qkv"):  # each rank has its queries, then its keys, then its values
            q, k, v = full.split((full.shape[1], *[(full.shape[0] - full.shape[1]) // 2] * 2))
            of_ranks = q.chunk(mesh.tp), self.keys(k, mesh), self.keys(v, mesh)
            return torch.cat([parts[at["tp"]] for parts in of_ranks]).contiguous()
        dim, stride = info["partition_dim"], info["partition_stride"]
        if not info["tensor_model_parallel"] or mesh.tp == 1:
            return full.clone()
        blocks = full.chunk(mesh.tp * stride, dim)
        return torch.cat([blocks[at["tp"] + k * mesh.tp] for k in range(stride)], dim).contiguous()

    def copies(self, mesh: Mesh) -> int:
        """How many tensor-parallel ranks have the same keys and values: so many that each has those of one head."""
        return max(1, mesh.tp // int(self.topology["config"]["v"].get("kv_heads", 1)))

    def keys(self, full: torch.Tensor, mesh: Mesh) -> list[torch.Tensor]:
        """Keys or values of each tensor-parallel rank: repeated as a whole, and cut."""
        return list(full.repeat(self.copies(mesh), 1).chunk(mesh.tp))

    def shard(self, name: str, full: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """What a ZeRO-1 rank holds."""
        part = self.part(name, full, mesh, rank)
        rows = ceil_to(part.shape[0], mesh.dp)
        part = torch.cat([part, torch.zeros(rows - part.shape[0], *part.shape[1:], dtype=part.dtype)])
        return part.chunk(mesh.dp)[mesh.coordinates(rank)["dp"]]


class Target:
    """A model and an optimizer for one rank, without values."""

    def __init__(
        self, gold: Gold, mesh: Mesh | None = None, rank: int = 0, *, attributes: bool = True, dtype: Any = None,
        stage: int | None = None, device: str = "cpu", layers: bool = True,
    ) -> None:  # fmt: skip
        self.gold, self.mesh, self.rank = gold, mesh or Mesh(), rank
        self.model, self.parameters = torch.nn.Module(), {}
        buffers = {n: torch.zeros_like(t) for n, t in gold.truth["buffers"].items()}
        for name, full in gold.truth["params"].items():
            if stage is not None and stage_of(name) != stage:
                continue
            part = torch.full_like(gold.part(name, full, self.mesh, rank), 7.0)
            parameter = torch.nn.Parameter(part.to(device, dtype))
            if gold.tied and name == "lm_head.weight":
                parameter = self.parameters.get("model.embed_tokens.weight", parameter)  # a stage may not have it
            for attribute in ATTRIBUTES if attributes else ():
                setattr(parameter, attribute, gold.infos[name][attribute])
            if self.mesh.ep == 1:  # neuronx-distributed does not say of experts that they are any, then
                parameter.__dict__.pop("expert_model_parallel", None)
            self.parameters[name] = parameter
        for name, value in [*self.parameters.items(), *(buffers.items() if stage in (None, 1) else ())]:
            parent: Any = self.model
            *path, last = name.split(".")
            for step in path:
                if not hasattr(parent, step):
                    parent.add_module(step, torch.nn.Module())
                parent = getattr(parent, step)
            (parent.register_parameter if name in self.parameters else parent.register_buffer)(last, value)
        if layers:
            self._describe_layers()
        own = list({id(p): p for p in self.parameters.values()}.values())
        self.groups = [
            {"params": [p for p in own if p.ndim > 1], **HYPER},
            {"params": [p for p in own if p.ndim <= 1], **HYPER},
        ]
        self.optimizer = torch.optim.AdamW(self.groups)

    def _describe_layers(self) -> None:
        """Give the layers of grouped-query attention the numbers that neuronx-distributed's layer has."""
        for name, layer in self.model.named_modules():
            held = dict(layer.named_parameters(recurse=False))
            if "weight_q" in held or "weight_qkv" in held:
                rows, copies = (
                    self.gold.truth["params"][f"{name}.{next(iter(held))}"].shape,
                    self.gold.copies(self.mesh),
                )
                q = rows[1]
                keys = self.gold.truth["params"].get(f"{name}.weight_k")
                kv = (rows[0] - q) // 2 if keys is None else keys.shape[0]
                layer.q_output_size_per_partition = q // self.mesh.tp
                layer.kv_output_size_per_partition = kv * copies // self.mesh.tp
                layer.kv_size_multiplier, layer.fuse_qkv, layer.output_sizes = copies, keys is None, [q, kv]

    def differences(self, weights: str = "params", *, buffers: bool = True) -> list[str]:
        """What is not bit for bit this rank's part of the truth."""
        truth, bad = self.gold.truth, []
        held = self.model.state_dict()

        def compare(what: str, name: str, found: torch.Tensor, full: torch.Tensor) -> None:
            wanted = self.gold.part(name, full, self.mesh, self.rank) if name in self.gold.infos else full
            if found.dtype != wanted.dtype or not torch.equal(found, wanted):
                bad.append(f"{what} of {name}")

        for name, parameter in self.parameters.items():
            compare(weights, name, held[name], truth[weights][name])
            first = "model.embed_tokens.weight" if name == "lm_head.weight" and self.gold.tied else name
            for kind in ("exp_avg", "exp_avg_sq"):
                compare(kind, first, self.optimizer.state[parameter][kind], truth[kind][first])
            if float(self.optimizer.state[parameter]["step"]) != truth["step"]:
                bad.append(f"step of {name}")
        for name in truth["buffers"] if buffers else ():
            if name in held:
                compare("buffer", name, held[name], truth["buffers"][name])
        decays = [g["weight_decay"] for g in self.optimizer.param_groups]
        return bad if decays == [0.01, 0.0] else [*bad, f"groups {decays}"]


def stage_of(name: str) -> int:
    """The pipeline stage of a parameter where there are two."""
    return 0 if "embed" in name or ".0." in name else 1


def as_rank(monkeypatch: pytest.MonkeyPatch, mesh: Mesh, rank: int, solo: InProcessCommunicator | None = None) -> None:
    """Let loads of this process (or thread) be those of one rank of a job."""
    job = Job(
        Exchange(solo or InProcessCommunicator(), "load", 60),
        RankInfo(rank, mesh.size, mesh),
        ExchangeSequence(solo or InProcessCommunicator()),
    )
    monkeypatch.setattr(JOB_OVERRIDE, "job", job)
