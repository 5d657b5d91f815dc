"""Checkpoints as optimum-neuron's trainer writes them, made by the arithmetic of its spec classes.

No real one was at hand. A `Job` has a small Llama with known values, under the names of Hugging Face; what each rank
holds of it is worked out head by head, by code of the tests' own.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.formats.references import save, tensor_reference

HEAD, HIDDEN, INNER, VOCABULARY = 2, 16, 24, 32
LORA_RANK = 3


@dataclass(frozen=True, kw_only=True)
class Job:
    """How a model was trained: the arguments of the trainer that decide what a checkpoint is like."""

    tp: int = 2
    pp: int = 1
    dp: int = 1
    heads: int = 8
    kv_heads: int = 2
    copies: int = 1
    """`kv_size_multiplier`."""

    attention: str = "fused"
    """How queries, keys and values lie: "fused" or "apart" in the layer for grouped-query attention; "linear" in three
    linear layers; "strided" in one linear layer of three equal parts."""

    bias: bool = False
    tied: bool = False
    zero1: bool = False
    xser: bool = True
    layers: int = 2

    @property
    def grouped(self) -> bool:
        """Whether there is a layer for grouped-query attention."""
        return self.attention in ("fused", "apart")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of the Hugging Face model, in its order."""
        q, kv = self.heads * HEAD, self.kv_heads * HEAD
        made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
        for n in range(self.layers):
            at = f"model.layers.{n}"
            for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                made[f"{at}.self_attn.{name}.weight"] = (rows, HIDDEN)
                if self.bias:
                    made[f"{at}.self_attn.{name}.bias"] = (rows,)
            made[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, q)
            for name in ("gate_proj", "up_proj"):
                made[f"{at}.mlp.{name}.weight"] = (INNER, HIDDEN)
            made[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INNER)
            for name in ("input_layernorm", "post_attention_layernorm"):
                made[f"{at}.{name}.weight"] = (HIDDEN,)
        return made | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}

    def hugging_face(self, what: str = "weight") -> dict[str, torch.Tensor]:
        """The whole values, under Hugging Face's names: weights, or a state of the optimizer."""
        made = {name: value_of(name, shape, what) for name, shape in self.shapes().items()}
        if self.tied:
            made["lm_head.weight"] = made["model.embed_tokens.weight"]
        return made

    def slots(self, rank: int) -> list[tuple[int, int]]:
        """(copy, key-value head) of each head of keys that a rank holds: all heads, then all of them again, ..."""
        slots = [(copy, head) for copy in range(self.copies) for head in range(self.kv_heads)]
        count = len(slots) // self.tp
        return slots[rank * count : (rank + 1) * count]

    def query_heads(self, rank: int) -> list[int]:
        """The heads of queries that a rank holds: for each of its heads of keys the part that belongs to that copy."""
        group = self.heads // self.kv_heads
        part = group // self.copies
        return [head * group + copy * part + i for copy, head in self.slots(rank) for i in range(part)]

    def local(self, rank: int, what: str = "weight") -> dict[str, torch.Tensor]:
        """What a tp rank holds, in the order of optimum-neuron's model."""
        full = self.hugging_face(what)
        return {
            name: torch.cat([part_of(self, part, full[part], rank) for part in parts]).contiguous()
            for name, parts in fused_names(self).items()
        }

    def whole(self, what: str = "weight") -> dict[str, torch.Tensor]:
        """The global arrays under the names of the checkpoint: keys and values once, queries in the order of ranks."""
        order = [head for rank in range(self.tp) for head in self.query_heads(rank)]
        full = self.hugging_face(what)
        made = {}
        for name, parts in fused_names(self).items():
            values = [reordered(self, part, full[part], order) for part in parts]
            made[name] = torch.cat(values, 0)
        return made

    def stage_of(self, name: str) -> int:
        """The pipeline stage that has a parameter."""
        if name.startswith("model.layers."):
            return int(name.split(".")[2]) * self.pp // self.layers
        return 0 if name.startswith("model.embed") else self.pp - 1

    def parameters(self, stage: int) -> list[str]:
        """The parameters that the metadata of a stage name: a shared one once."""
        names = [n for n in fused_names(self) if self.stage_of(n) == stage]
        return [n for n in names if not (self.tied and n == "lm_head.weight")]

    def groups(self, stage: int) -> list[list[str]]:
        """The trainer's groups of parameters: with weight decay, and without."""
        names = self.parameters(stage)
        bare = [n for n in names if "norm" in n or "bias" in n]
        return [[n for n in names if n not in bare], bare]


def value_of(name: str, shape: tuple[int, ...], what: str = "weight") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {what}".encode())))


def fused_names(job: Job) -> dict[str, list[str]]:
    """Each parameter of optimum-neuron's model, and those of Hugging Face that it is made of, in its order."""
    made: dict[str, list[str]] = {}
    for name in job.shapes():
        module, _, what = name.rpartition(".")
        if (job.grouped or job.attention == "strided") and module.endswith(("q_proj", "k_proj", "v_proj")):
            part = module[-6]
            qkv = module[:-6] + "qkv_proj"
            suffix = {"fused": f"{what}_qkv", "apart": f"{what}_{part}", "strided": what}[job.attention]
            made.setdefault(f"{qkv}.{suffix}", []).append(name)
        elif module.endswith(("gate_proj", "up_proj")):
            fused = module.replace("gate_proj", "gate_up_proj").replace(".up_proj", ".gate_up_proj")
            made.setdefault(f"{fused}.{what}", []).append(name)
        else:
            made[name] = [name]
    return made


def reordered(job: Job, name: str, full: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Rows of queries, and the columns that take their outputs, in another order of the heads."""
    if job.grouped and ".q_proj." in name:
        return torch.cat([full.split(HEAD)[head] for head in order])
    if job.grouped and name.endswith("o_proj.weight"):
        return torch.cat([full.split(HEAD, 1)[head] for head in order], 1)
    return full


def part_of(job: Job, name: str, full: torch.Tensor, rank: int) -> torch.Tensor:
    """What a tp rank has of one tensor of the Hugging Face model."""
    if name.endswith("norm.weight"):
        return full
    if job.grouped and (".q_proj." in name or name.endswith("o_proj.weight")):
        return reordered(job, name, full, job.query_heads(rank))
    if job.grouped and (".k_proj." in name or ".v_proj." in name):
        return torch.cat([full.split(HEAD)[head] for _, head in job.slots(rank)])
    return full.chunk(job.tp, 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0)[rank]


def metadata(job: Job, stage: int, *, adapter: str = "") -> dict[str, Any]:
    """What ``mp_metadata_pp_rank_<stage>.json`` holds; that of a model with an adapter if it has a name."""
    parameters: dict[str, Any] = {}
    for name in job.parameters(stage):
        dim = None if name.endswith("norm.weight") else int(name.endswith(("o_proj.weight", "down_proj.weight")))
        if name.endswith("_qkv"):
            dim = None  # neuronx-distributed loses the attributes of this one
        stride = 2 if "gate_up" in name else 3 if job.attention == "strided" and "qkv_proj" in name else 1
        for called, how in _with_adapter(name, dim, stride, adapter) if adapter else [(name, (dim, stride))]:
            parameters[called] = {"tensor_model_parallel": False} if how[0] is None else {
                "tensor_model_parallel": True, "partition_dim": how[0], "partition_stride": how[1],
                "num_partitions": job.tp,
            }  # fmt: skip
    below = "base_model.model." if adapter else ""
    modules = []
    for n in range(job.layers):
        here = job.stage_of(f"model.layers.{n}.") == stage
        attention = [attention_spec(job, adapter)] if here and job.attention != "linear" else []
        modules.append({"module_fully_qualified_name": f"{below}model.layers.{n}.self_attn", "specs": attention})
        mlp = [fused_spec(job, "gate_up_proj", ["gate_proj", "up_proj"], [INNER] * 2, adapter)] if here else []
        modules.append({"module_fully_qualified_name": f"{below}model.layers.{n}.mlp", "specs": mlp})
    return {"parameters": parameters, "model_weight_transformation_specs": modules}


def fused_spec(job: Job, name: str, parts: list[str], sizes: list[int], adapter: str = "") -> list[Any]:
    return ["FusedLinearsSpec", {
        "fused_linear_name": name, "linear_names": parts, "bias": False, "fuse_axis": 0, "original_dims": sizes,
        "tp_size": job.tp, "peft_type": "lora" if adapter else None,
    }]  # fmt: skip


def attention_spec(job: Job, adapter: str = "") -> list[Any]:
    if job.attention == "strided":
        return fused_spec(job, "qkv_proj", ["q_proj", "k_proj", "v_proj"], [job.heads * HEAD] * 3, adapter)
    return ["GQAQKVColumnParallelLinearSpec", {
        "gqa_qkv_projection_name": "qkv_proj", "query_projection_name": "q_proj", "key_projection_name": "k_proj",
        "value_projection_name": "v_proj", "output_projection_name": "o_proj", "num_attention_heads": job.heads,
        "num_key_value_heads": job.kv_heads, "kv_size_multiplier": job.copies,
        "q_output_size_per_partition": job.heads * HEAD // job.tp,
        "kv_output_size_per_partition": job.kv_heads * job.copies * HEAD // job.tp,
        "fuse_qkv": job.attention == "fused", "bias": job.bias, "tp_size": job.tp,
        "peft_type": "lora" if adapter else None,
    }]  # fmt: skip


def rank_file(job: Job, folder: Path, content: Any, *, tp: int, pp: int, dp: int = 0) -> None:
    """A rank file of neuronx-distributed's, with the tensors in it or in files of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
    if not job.xser:
        torch.save(content, file)
        return
    tensors = Path(f"{file}.tensors")
    tensors.mkdir()
    info: dict[int, Any] = {}

    def outside(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = len(info)
            info[number] = {"expert_model_parallel": False, "dtype": value.dtype, "shape": list(value.shape)}
            torch.save(value, tensors / f"tensor_{number}.pt")
            return tensor_reference()(number)
        if isinstance(value, dict):
            return {k: outside(v) for k, v in value.items()}
        return [outside(v) for v in value] if isinstance(value, list | tuple) else value

    save(outside(content), file)
    torch.save(info, f"{file}.info.pt")


MOMENTS = ("exp_avg", "exp_avg_sq")


def write_shards(job: Job, tag: Path, *, optimizer: bool = True) -> None:
    """The rank files of a checkpoint, its marks, and its metadata."""
    for pp in range(job.pp):
        for tp in range(job.tp):
            local = {n: t for n, t in job.local(tp).items() if job.stage_of(n) == pp}
            rank_file(job, tag / "model", local, tp=tp, pp=pp)
            for dp in range(job.dp if job.zero1 else 1) if optimizer else ():
                rank_file(job, tag / "optim", optimizer_of(job, pp, tp, dp), tp=tp, pp=pp, dp=dp)
        (tag / f"mp_metadata_pp_rank_{pp}.json").write_text(json.dumps(metadata(job, pp), indent=4))
    for mark in ("checkpoint", "done"):
        (tag / mark).write_text("1")


def optimizer_of(job: Job, pp: int, tp: int, dp: int) -> dict[str, Any]:
    """What the optimizer's rank file holds: AdamW, with its rows dealt out over dp if that is so."""
    names = [name for group in job.groups(pp) for name in group]
    numbers = {name: i for i, name in enumerate(names)}
    values = {what: job.local(tp, what) for what in (*MOMENTS, "master")}
    cut = (lambda t: rows_of(t, job.dp, dp)) if job.zero1 else (lambda t: t)
    state = {
        i: {"step": torch.tensor(7.0), **{what: cut(values[what][n]) for what in MOMENTS}} for n, i in numbers.items()
    }
    groups = [
        {"lr": 0.5, "betas": (0.9, 0.95), "weight_decay": decay, "params": [numbers[n] for n in group]}
        for group, decay in zip(job.groups(pp), (0.25, 0.0), strict=True)
    ]
    if not job.zero1:
        return {"state": state, "param_groups": groups}
    return {
        "state": {}, "param_groups": groups, "base_state": state,
        "shape_info": {i: list(values["exp_avg"][n].shape) for n, i in numbers.items()},
        "sharded_master_weights": {i: cut(values["master"][n]) for n, i in numbers.items()},
    }  # fmt: skip


def rows_of(tensor: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """A ZeRO-1 rank's rows, with zeros behind the last one."""
    count = -(-tensor.shape[0] // ranks)
    padding = torch.zeros(count * ranks - tensor.shape[0], *tensor.shape[1:])
    return torch.cat([tensor, padding]).split(count)[rank].clone()


def write_checkpoint(job: Job, root: Path, step: int, *, time: int | None = None, optimizer: bool = True) -> Path:
    """``checkpoint-<step>`` with everything that the trainer writes there. `time` is that of its marks."""
    folder = root / f"checkpoint-{step}"
    write_shards(job, folder / "shards", optimizer=optimizer)
    write_beside(job, folder, step)
    if time is not None:
        for mark in ("checkpoint", "done"):
            os.utime(folder / "shards" / mark, (time, time))
    return folder


def write_beside(job: Job, folder: Path, step: int) -> None:
    scheduler = {"base_lrs": [0.5, 0.5], "last_epoch": step, "_step_count": step + 1, "_last_lr": [0.25, 0.25]}
    torch.save({**scheduler, "lr_lambdas": [{}, {}]}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 0.5, "log_history": []}))
    (folder / "trn_config.json").write_text(json.dumps({"tensor_parallel_size": job.tp}))
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "head_dim": HEAD,
        "intermediate_size": INNER, "num_attention_heads": job.heads, "num_key_value_heads": job.kv_heads,
        "num_hidden_layers": job.layers, "vocab_size": VOCABULARY, "tie_word_embeddings": job.tied,
        "attention_bias": job.bias,
    }))  # fmt: skip


def _with_adapter(name: str, dim: int | None, stride: int, adapter: str) -> list[tuple[str, tuple[int | None, int]]]:
    """The parameters that a parameter becomes in a model with LoRA on all its linear layers, and how they are split."""
    name = f"base_model.model.{name}"
    module, _, what = name.rpartition(".")
    if "_proj" not in module:
        return [(name, (dim, stride))]
    base = [(f"{module}.base_layer.{what}", (dim, stride))]
    if what not in ("weight", "weight_qkv", "weight_q", "weight_k", "weight_v"):
        return base
    a = f"{module}.lora_A.{adapter}.weight"
    b = f"{module}.lora_B.{adapter}.{what}"
    if dim == 1:  # its input is split, and so is that of lora_A
        return [*base, (a, (1, 1)), (b, (None, 1))]
    first = what in ("weight", "weight_qkv", "weight_q")
    return [*base, *([(a, (None, 1))] if first else []), (b, (dim, 1))]


def adapter_of(job: Job, name: str = "default") -> dict[str, torch.Tensor]:
    """The adapter's whole values under the names of PEFT on the Hugging Face model.

    Layers that are fused share their lora_A.
    """
    made = {}
    for hf, shape in job.shapes().items():
        if "_proj.weight" in hf:
            module = f"base_model.model.{hf.removesuffix('.weight')}"
            fused = next(n for n, parts in fused_names(job).items() if hf in parts)
            fused = fused.rpartition(".")[0]
            made[f"{module}.lora_A.weight"] = value_of(f"{fused} A {name}", (LORA_RANK, shape[1]))
            made[f"{module}.lora_B.weight"] = value_of(f"{hf} B {name}", (shape[0], LORA_RANK))
    return made


def adapter_local(job: Job, rank: int | None, name: str = "default") -> dict[str, torch.Tensor]:
    """What a tp rank has of an adapter; None for the global arrays."""
    full = adapter_of(job, name)
    order = [head for r in range(job.tp) for head in job.query_heads(r)]
    made: dict[str, torch.Tensor] = {}
    for fused, parts in fused_names(job).items():
        if "_proj.weight" not in fused:
            continue
        module, _, what = f"base_model.model.{fused}".rpartition(".")
        of = [f"base_model.model.{part.removesuffix('.weight')}" for part in parts]
        a = full[f"{of[0]}.lora_A.weight"]
        rows = [full[f"{m}.lora_B.weight"] for m in of]
        if parts[0].endswith(("o_proj.weight", "down_proj.weight")):
            cut = reordered(job, parts[0], a, order) if rank is None else part_of(job, parts[0], a, rank)
            made[f"{module}.lora_A.weight"], made[f"{module}.lora_B.{what}"] = cut, rows[0]
            continue
        made[f"{module}.lora_A.weight"] = a
        made[f"{module}.lora_B.{what}"] = torch.cat([
            reordered(job, p, t, order) if rank is None else part_of(job, p, t, rank)
            for p, t in zip(parts, rows, strict=True)
        ])  # fmt: skip
    return {k: v.contiguous() for k, v in made.items()}


def write_adapter(job: Job, checkpoint: Path, name: str = "default") -> Path:
    """``adapter_<name>/adapter_shards`` in a checkpoint."""
    folder = checkpoint / f"adapter_{name}"
    tag = folder / "adapter_shards"
    for tp in range(job.tp):
        rank_file(job, tag / "model", adapter_local(job, tp, name), tp=tp, pp=0)
    (tag / "mp_metadata_pp_rank_0.json").write_text(json.dumps(metadata(job, 0, adapter=name)))
    for mark in ("checkpoint", "done"):
        (tag / mark).write_text("1")
    (folder / "adapter_config.json").write_text(json.dumps({"r": LORA_RANK, "peft_type": "LORA"}))
    return folder


def changed(file: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON file."""
    held = json.loads(file.read_text())
    change(held)
    file.write_text(json.dumps(held))
