"""Models of transformers into neuronx-distributed's names, through its jobs, and back: equal bytes, equal logits."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import xla_ckpt
from tests.api.fsdp2_job import Container, resumes_with_fsdp2
from tests.formats.gold import FOLDERS, LOST, Gold, cases
from tests.formats.same import as_theirs, content
from tests.jobs import run_on_ranks
from tests.same import differences
from xla_ckpt.cli.main import main
from xla_ckpt.cli.output import translate_to_options

transformers = pytest.importorskip("transformers")
HEADS, KV_HEADS, DIM, HIDDEN, INTER, VOCAB = 8, 2, 4, 32, 48, 64
SIZES = {
    "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": INTER,
    "vocab_size": VOCAB, "num_hidden_layers": 2, "head_dim": DIM,
}  # fmt: skip
LITTLE = xla_ckpt.ConvertOptions(max_memory=2_000)
"""A third of the largest weight, and in the middle of a head."""
IDS = torch.arange(12).reshape(2, 6)
State = dict[str, torch.Tensor]


def model_of(kind: str = "Llama", **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "tie_word_embeddings": False, **more})
    made = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for p in made.parameters():
            p.normal_()  # biases and norms, too, which are all alike at first
    return made


def saved(root: Path, size: str = "5GB", **more: Any) -> tuple[Path, Any]:
    model = model_of(**more)
    model.save_pretrained(root / "hf", max_shard_size=size)
    return root / "hf", model


def same_model(directory: Path, model: Any) -> None:
    """transformers loads the directory, and it says the same; with the same bytes."""
    loaded = type(model).from_pretrained(directory, dtype=model.dtype)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    stored = {}
    for file in directory.glob("*.safetensors"):
        stored |= safetensors.torch.load_file(file)
    wanted = {
        k: v for k, v in model.state_dict().items() if k != "lm_head.weight" or not model.config.tie_word_embeddings
    }
    assert not differences(wanted, stored, order=False)


def rank_of_nxd(hf: State, tp: int, rank: int, copies: int, fused: bool, adjacent: bool = False) -> State:
    """What a rank of neuronx-distributed has, by the arithmetic of its own converter, written with views."""
    made: State = {}
    group = HEADS // KV_HEADS // copies * DIM

    def order(t: torch.Tensor) -> torch.Tensor:
        if adjacent:
            return t
        return t.reshape(KV_HEADS, copies, group, -1).transpose(0, 1).reshape(t.shape)

    def keys(t: torch.Tensor) -> torch.Tensor:
        if adjacent:
            return t.chunk(tp // copies)[rank // copies]
        return t.repeat(copies, *[1] * (t.ndim - 1)).chunk(tp)[rank]

    for name, t in hf.items():
        if ".k_proj" in name or ".v_proj" in name or ".up_proj" in name:
            continue
        if "q_proj" in name:
            at, _, kind = name.rpartition(".q_proj.")
            parts = {"q": order(t).chunk(tp)[rank]}
            parts |= {what: keys(hf[name.replace("q_proj", f"{what}_proj")]) for what in "kv"}
            if fused:
                made[f"{at}.qkv_proj.{kind}_qkv"] = torch.cat(list(parts.values()))
            else:
                made |= {f"{at}.qkv_proj.{kind}_{what}": part for what, part in parts.items()}
        elif "gate_proj" in name:
            up = hf[name.replace("gate_proj", "up_proj")]
            made[name.replace("gate_proj", "gate_up_proj")] = torch.cat([t.chunk(tp)[rank], up.chunk(tp)[rank]])
        elif "o_proj.weight" in name:
            made[name] = order(t.t().contiguous()).t().chunk(tp, 1)[rank].contiguous()
        elif "down_proj.weight" in name:
            made[name] = t.chunk(tp, 1)[rank].contiguous()
        else:
            made[name] = t.chunk(tp)[rank] if "embed" in name or "lm_head" in name else t
    return made


FIELDS = {field.name for field in dataclasses.fields(xla_ckpt.LlamaJob)}
FORMS = [(1, 2, None), (2, 4, "trn1"), (4, 8, "trn1"), (2, 4, "trn2"), (2, 2, "trn1")]
APART = {(2, 4, "trn1"), (4, 8, "trn1")}
"""Of these forms layers that are not fused are tried without waiting for the slow tests; of the others fused ones."""


@pytest.mark.parametrize(
    ("copies", "tp", "hardware", "fused"),
    [
        pytest.param(*form, fused, marks=() if fused is (form not in APART) else pytest.mark.rest)
        for form in FORMS
        for fused in (True, False)
    ],
)
def test_as_its_own_converter_would_do(copies: int, tp: int, hardware: str | None, fused: bool, tmp_path: Path) -> None:
    directory, model = saved(tmp_path, size="20KB", attention_bias=True, mlp_bias=True)
    xla_ckpt.convert(
        directory,
        tmp_path / "run",
        to="pt" if fused else "xser",
        mesh=f"tp={tp}",
        llama=xla_ckpt.LlamaJob(fuse_qkv=fused, kv_size_multiplier=copies, hardware=hardware),
        as_tag="start",
        options=LITTLE,
    )
    assert xla_ckpt.verify(tmp_path / "run").ok
    for rank in range(tp):
        wanted = rank_of_nxd(model.state_dict(), tp, rank, copies, fused, hardware == "trn2")
        found = content(tmp_path / f"run/start/model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
        assert not differences(wanted, found, order=False)
    shutil.copytree(tmp_path / "run", tmp_path / "nxd")
    as_theirs(tmp_path / "nxd/start")
    # Where every rank has all keys, nothing on disk tells how they were repeated.
    how: dict[str, Any] = {"kv_size_multiplier": copies, "hardware": hardware} if tp == copies else {}
    for source in ("run", "nxd"):
        xla_ckpt.export_hf(
            tmp_path / source,
            tmp_path / f"of_{source}",
            llama=xla_ckpt.LlamaJob(directory, **how),
            options=LITTLE,
        )
        same_model(tmp_path / f"of_{source}", model)
        xla_ckpt.convert(
            tmp_path / source, tmp_path / f"to_{source}", to="safetensors", llama=xla_ckpt.LlamaJob(directory, **how)
        )
        same_model(tmp_path / f"to_{source}", model)


def test_from_transformers_to_xser_to_fsdp2_and_back(tmp_path: Path) -> None:
    directory, model = saved(tmp_path)
    how: dict[str, Any] = {"kv_size_multiplier": 2, "hardware": "trn1"}
    xla_ckpt.convert(
        directory,
        tmp_path / "run",
        to="xser",
        mesh="tp=4",
        llama=xla_ckpt.LlamaJob(fuse_qkv=True, **how),
        as_tag="start",
    )
    tree = xla_ckpt.restore(tmp_path / "run").tree["model"]
    run_on_ranks(resumes_with_fsdp2, 2, tmp_path, {name: list(t.shape) for name, t in tree.items()})
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"order the attention heads.*--kv-size-multiplier"):
        xla_ckpt.export_hf(tmp_path / "fsdp", tmp_path / "back", llama=xla_ckpt.LlamaJob(directory))
    with pytest.raises(xla_ckpt.UsageError, match="trn1 or trn2"):
        xla_ckpt.export_hf(
            tmp_path / "fsdp", tmp_path / "back", llama=xla_ckpt.LlamaJob(directory, kv_size_multiplier=2)
        )
    xla_ckpt.export_hf(tmp_path / "fsdp", tmp_path / "back", llama=xla_ckpt.LlamaJob(directory, **how))
    same_model(tmp_path / "back", model)


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.rest)])
def test_a_job_with_another_multiplier(fused: bool, tmp_path: Path) -> None:
    directory, model = saved(tmp_path, attention_bias=True)
    hf = model.state_dict()
    xla_ckpt.convert(
        directory,
        tmp_path / "a",
        mesh="tp=4",
        llama=xla_ckpt.LlamaJob(fuse_qkv=fused, kv_size_multiplier=2, hardware="trn1"),
        as_tag="a",
    )
    # One process trains it, whose optimizer has states that tell which weight they belong to.
    tree = xla_ckpt.restore(tmp_path / "a").tree["model"]
    job = Container({name: list(t.shape) for name, t in tree.items()})
    optimizer = torch.optim.AdamW(job.parameters())
    xla_ckpt.load_checkpoint(tmp_path / "a", model=job)
    for p in job.parameters():
        optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": 2 * p.detach(), "exp_avg_sq": 3 * p.detach()}
    rules = [("_qkv", (("tp", [32, "8x2", "8x2"]),)), ("_[kv]$", (("tp", ["8x2"]),)), ("o_proj.weight", (None, "tp"))]
    xla_ckpt.save_checkpoint(tmp_path / "b", "b", job, optimizer, shardings=rules, mesh="dp=1")
    for copies, tp, hardware in ((1, 2, None), (4, 8, "trn1"), (2, 4, "trn2")):
        job_of = xla_ckpt.LlamaJob(directory, kv_size_multiplier=copies, hardware=hardware)
        xla_ckpt.convert(
            tmp_path / "b", tmp_path / "c", to="pt", as_tag=f"{copies}", mesh=f"tp={tp}", llama=job_of,
            options=LITTLE,
            shardings=[("embed|lm_head", ("tp",)), ("gate_up", (("tp", 2),)), ("down_proj", (None, "tp")),
                       ("_q$", ("tp",))],
        )  # fmt: skip
        for rank in range(tp):
            wanted = rank_of_nxd(hf, tp, rank, copies, fused, hardware == "trn2")
            file = f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
            found = content(tmp_path / f"c/{copies}/model" / file)
            assert not differences(wanted, found, order=False)
            states = content(tmp_path / f"c/{copies}/optim" / file)["state"]
            for i, (name, _) in enumerate(job.named_parameters()):
                assert torch.equal(states[i]["exp_avg"], 2 * wanted[name]), name
                assert torch.equal(states[i]["exp_avg_sq"], 3 * wanted[name]), name
        xla_ckpt.export_hf(tmp_path / "c", tmp_path / f"hf{copies}", f"{copies}", llama=xla_ckpt.LlamaJob(directory))
        same_model(tmp_path / f"hf{copies}", model)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"not all there.*3, called like.*found 2"):
        xla_ckpt.convert(
            tmp_path / "b",
            tmp_path / "d",
            llama=xla_ckpt.LlamaJob({**model.config.to_dict(), "num_hidden_layers": 3}, kv_size_multiplier=1),
            mesh="tp=2",
            to="pt",
        )
    wrong = {**model.config.to_dict(), "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
    with pytest.raises(xla_ckpt.CheckpointError):
        xla_ckpt.export_hf(tmp_path / "a", tmp_path / "d", llama=xla_ckpt.LlamaJob(wrong))
    assert not (tmp_path / "d").exists()
    xla_ckpt.save_checkpoint(tmp_path / "b", "unsaid", job)
    with pytest.raises(xla_ckpt.CheckpointError, match="kv-size-multiplier"):
        xla_ckpt.convert(
            tmp_path / "b", tmp_path / "d", llama=xla_ckpt.LlamaJob(directory, kv_size_multiplier=1), mesh="tp=2"
        )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("to", ["pt", "xser", "native"])
def test_multi_head_attention_and_tied_embeddings(to: str, tied: bool, tmp_path: Path) -> None:
    directory, model = saved(tmp_path, num_key_value_heads=HEADS, tie_word_embeddings=tied)
    fuse = True if to == "native" else None
    xla_ckpt.convert(
        directory, tmp_path / "run", to=to, mesh="tp=2", llama=xla_ckpt.LlamaJob(fuse_qkv=fuse), as_tag="a"
    )
    held = xla_ckpt.restore(tmp_path / "run").tree["model"]
    parts = [model.state_dict()[f"model.layers.0.self_attn.{w}_proj.weight"] for w in "qkv"]
    assert torch.equal(held["model.layers.0.self_attn.qkv_proj.weight"], torch.cat(parts))
    assert torch.equal(held["lm_head.weight"], held["model.embed_tokens.weight"]) == tied
    xla_ckpt.export_hf(tmp_path / "run", tmp_path / "back", llama=xla_ckpt.LlamaJob(directory))
    same_model(tmp_path / "back", model)
    if to == "native":
        return
    # Its own files have a tied weight twice. They are compared.
    as_theirs(tmp_path / "run/a")
    xla_ckpt.export_hf(tmp_path / "run", tmp_path / "again", llama=xla_ckpt.LlamaJob(directory))
    same_model(tmp_path / "again", model)
    says_tied = {**json.loads((directory / "config.json").read_text()), "tie_word_embeddings": not tied}
    if tied:
        xla_ckpt.export_hf(tmp_path / "run", tmp_path / "twice", llama=xla_ckpt.LlamaJob(says_tied))
        found = safetensors.torch.load_file(tmp_path / "twice/model.safetensors")
        assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    else:
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="the output layer is not the embedding"):
            xla_ckpt.export_hf(
                tmp_path / "run",
                tmp_path / "twice",
                llama=xla_ckpt.LlamaJob(says_tied),
                options=xla_ckpt.ConvertOptions(max_memory=200),
            )
        assert not (tmp_path / "twice").exists()


def test_biases_that_the_class_decides_on(tmp_path: Path) -> None:
    directory, model = saved(tmp_path, kind="Qwen2", tie_word_embeddings=True)
    assert "attention_bias" not in json.loads((directory / "config.json").read_text())
    xla_ckpt.convert(
        directory, tmp_path / "run", to="nxd", mesh="tp=2", llama=xla_ckpt.LlamaJob(fuse_qkv=False), as_tag="a"
    )
    assert "model.layers.1.self_attn.qkv_proj.bias_k" in xla_ckpt.restore(tmp_path / "run").tree["model"]
    xla_ckpt.export_hf(tmp_path / "run", tmp_path / "back", llama=xla_ckpt.LlamaJob(directory))
    same_model(tmp_path / "back", model)


def test_names_stay_in_the_native_layout(tmp_path: Path) -> None:
    directory, model = saved(tmp_path, size="20KB", tie_word_embeddings=True)
    xla_ckpt.convert(directory, tmp_path / "run", mesh="tp=2", as_tag="a")
    assert any("down_proj" in leaf for leaf in xla_ckpt.explain(tmp_path / "run", mesh="tp=2").split)
    loaded = model_of(tie_word_embeddings=True)
    for p in loaded.parameters():
        torch.nn.init.zeros_(p)
    xla_ckpt.load_checkpoint(tmp_path / "run", model=loaded)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    xla_ckpt.export_hf(tmp_path / "run", tmp_path / "back", llama=xla_ckpt.LlamaJob(directory))
    same_model(tmp_path / "back", model)
    (directory / "config.json").unlink()
    xla_ckpt.convert(directory, tmp_path / "run", as_tag="b")  # whatever model it is
    held = xla_ckpt.restore(tmp_path / "run", "b").tree["model"]
    assert not differences({k: v for k, v in model.state_dict().items() if k in held}, held, order=False)


def test_fused_projections_and_a_model_without_them_name_what_makes_one_of_the_other(tmp_path: Path) -> None:
    directory, model = saved(tmp_path)
    fused = xla_ckpt.LlamaJob(fuse_qkv=True)
    xla_ckpt.convert(directory, tmp_path / "run", llama=fused, as_tag="a")  # what the second error names
    target = {name: torch.empty_like(t) for name, t in xla_ckpt.restore(tmp_path / "run").tree["model"].items()}
    cases = ((tmp_path / "run", model, "export_hf"), (directory, target, "xla_ckpt.convert"))
    for path, into, named in cases:
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=named) as caught:
            xla_ckpt.load_checkpoint(path, model=into)
        assert "strict=False" not in str(caught.value)
    xla_ckpt.load_checkpoint(tmp_path / "run", model=target)
    xla_ckpt.export_hf(tmp_path / "run", tmp_path / "back", llama=xla_ckpt.LlamaJob(directory, kv_size_multiplier=1))
    same_model(tmp_path / "back", model)


def test_a_configuration_that_is_given_counts_alone(tmp_path: Path) -> None:
    """An export read the one beside the model, too."""
    directory, model = saved(tmp_path)
    shutil.move(directory / "config.json", tmp_path / "config.json")
    (directory / "config.json").write_text("broken")
    for to, write in (("safetensors", xla_ckpt.export_hf), ("pt", partial(xla_ckpt.convert, to="pt"))):
        with pytest.raises(xla_ckpt.UsageError, match="config.json"):
            write(directory, tmp_path / "none")
        write(directory, tmp_path / to, llama=xla_ckpt.LlamaJob(tmp_path / "config.json", qkv_linear=to != "pt"))
    same_model(tmp_path / "safetensors", model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_another_element_type(dtype: str, tmp_path: Path) -> None:
    directory, model = saved(tmp_path)
    xla_ckpt.export_hf(directory, tmp_path / "back", dtype=dtype, options=xla_ckpt.ConvertOptions(max_memory=700))
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["dtype"] == dtype
    same_model(tmp_path / "back", type(model).from_pretrained(directory, dtype=getattr(torch, dtype)))
    found = type(model).from_pretrained(tmp_path / "back", dtype="auto")
    assert found.dtype == getattr(torch, dtype)


def gold_config(gold: Gold) -> dict[str, Any]:
    params, kind = gold.truth["params"], gold.topology["config"]["v"]
    return {
        "hidden_size": len(params["model.norm.weight"]), "num_attention_heads": 4,
        "num_key_value_heads": kind["kv_heads"], "vocab_size": len(params["model.embed_tokens.weight"]),
        "intermediate_size": params["model.layers.0.mlp.down_proj.weight"].shape[1],
        "num_hidden_layers": sum(name.endswith("input_layernorm.weight") for name in params),
        "tie_word_embeddings": kind["tied"],
    }  # fmt: skip


def as_hugging_face(gold: Gold, config: dict[str, Any]) -> State:
    """The truth of a fixture under Hugging Face's names, by code of the test's own."""
    made: State = {}
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    rows, copies = config["hidden_size"], gold.topology["config"]["v"]["kv_mult"]
    keys = rows // heads * kv

    def order(t: torch.Tensor) -> torch.Tensor:
        groups = t.reshape(copies, kv, heads // kv // copies * (rows // heads), -1)
        return groups.transpose(0, 1).reshape(t.shape)

    for name, t in gold.truth["params"].items():
        at, _, last = name.rpartition("qkv_proj.")
        if last in ("weight_qkv", "weight"):
            made |= {f"{at}{w}_proj.weight": p for w, p in zip("qkv", t.split([rows, keys, keys]), strict=True)}
        elif last in ("weight_q", "weight_k", "weight_v"):
            made[f"{at}{last[-1]}_proj.weight"] = order(t) if last == "weight_q" else t
        elif "gate_up" in name:
            made |= {name.replace("gate_up", w): p for w, p in zip(("gate", "up"), t.chunk(2), strict=True)}
        else:
            made[name] = order(t.t().contiguous()).t() if "o_proj" in name and copies > 1 else t
    if config["tie_word_embeddings"]:
        del made["lm_head.weight"]
    return made


GOLD = [(case, tag) for case, tag in [*cases(), *cases(fused=True)] if "_ep2" not in case and case != LOST]
GOLD += [("tp4_gqa_rep__pt_sync", "step_40")] if "tp4_gqa_rep__pt_sync" in FOLDERS else []


@pytest.mark.parametrize(("case", "tag"), GOLD)
def test_what_it_wrote_itself_needs_only_the_config(case: str, tag: str, tmp_path: Path) -> None:
    gold = Gold(case, tag)
    config = gold_config(gold)
    xla_ckpt.export_hf(gold.root, tmp_path / "hf", tag, llama=xla_ckpt.LlamaJob(config))
    found = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    assert not differences(as_hugging_face(gold, config), found, order=False)
    config |= {"vocab_size": config["vocab_size"] + 8}
    with pytest.raises(xla_ckpt.CheckpointError, match=r"embed_tokens"):
        xla_ckpt.export_hf(gold.root, tmp_path / "other", tag, llama=xla_ckpt.LlamaJob(config))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, model = saved(tmp_path)
    run, config = str(tmp_path / "run"), ["--config", str(directory / "config.json")]
    qkv = ["--fuse-qkv", "--kv-size-multiplier", "2", "--hardware", "trn1"]
    assert main(["show", str(directory)]) == 0
    assert main(["verify", str(directory)]) == 0
    assert main(["convert", str(directory), run, "--to", "nxd", "--mesh", "tp=4", *qkv, "--as", "start"]) == 0
    as_theirs(tmp_path / "run/start")
    capsys.readouterr()
    assert main(["show", run, "--json", *config]) == 0
    answer = json.loads(capsys.readouterr().out)
    shapes = {array["leaf"]: array["shape"] for array in answer["arrays"]}
    assert shapes["model/model.layers.0.self_attn.qkv_proj.weight_qkv"] == [48, 32]
    assert not answer["unknown"]
    assert main(["explain", run, "--mesh", "tp=8", *config]) == 0
    assert main(["export", run, str(tmp_path / "back"), "--dtype", "bfloat16", *config]) == 0
    same_model(tmp_path / "back", type(model).from_pretrained(directory, dtype=torch.bfloat16))
    assert main(["convert", run, str(tmp_path / "native"), "--to", "native", *config]) == 0
    assert main(["export", str(tmp_path / "native"), str(tmp_path / "b"), "--kv-size-multiplier", "2"]) == 2
    assert "--config" in capsys.readouterr().err


def test_what_makes_no_sense(tmp_path: Path) -> None:
    directory, model = saved(tmp_path)
    xla_ckpt.save_checkpoint(tmp_path / "own", "a", model)
    good = json.loads((directory / "config.json").read_text())
    fused = {**model_of(num_key_value_heads=HEADS).state_dict()}
    for name in [n for n in fused if "q_proj.weight" in n]:
        q, k, v = (fused.pop(name.replace("q_proj", f"{w}_proj")) for w in "qkv")
        keys = KV_HEADS * DIM
        fused[name.replace("q_proj", "qkv_proj")] = torch.cat([q, k[:keys], v[:keys]])
    xla_ckpt.save_checkpoint(tmp_path / "own", "megatron", fused)
    nxd: dict[str, Any] = {"to": "pt", "mesh": "tp=4", "as_tag": "x", "fuse_qkv": True}
    trn1 = {"hardware": "trn1"}
    for call, source, how, error, said in (
        ("convert", directory, {**nxd, "kv_size_multiplier": 3, **trn1}, xla_ckpt.UsageError, "divides tp=4"),
        ("convert", directory, {**nxd, "kv_size_multiplier": 8, **trn1, "mesh": "tp=8"}, xla_ckpt.UsageError,
         "divides 4"),
        ("convert", directory, {**nxd}, xla_ckpt.UsageError, r"--kv-size-multiplier"),
        ("convert", directory, {**nxd, "kv_size_multiplier": 2}, xla_ckpt.UsageError, "trn1 or trn2"),
        ("convert", directory, {**nxd, "hardware": "gpu"}, xla_ckpt.UsageError, "no such hardware"),
        ("convert", directory, {**nxd, "kv_size_multiplier": 0}, xla_ckpt.UsageError, "at least 1"),
        ("convert", directory, {**nxd, "fuse_qkv": None}, xla_ckpt.UsageError, "--no-qkv-linear"),
        ("convert", directory, {**nxd, "qkv_linear": False}, xla_ckpt.UsageError, "without qkv_linear.*--fuse-qkv"),
        ("convert", directory, {**nxd, "mesh": "tp=3"}, xla_ckpt.UsageError, "attention heads do not divide"),
        ("convert", tmp_path / "own", {**nxd, "tag": "a"}, xla_ckpt.UsageError,
         "fuse_qkv and qkv_linear.*leave out"),
        ("convert", directory, {**nxd, "config": tmp_path / "no.json"}, xla_ckpt.UsageError, "not exist: .*no.json"),
        ("export_hf", tmp_path / "own", {"tag": "a", "kv_size_multiplier": 2}, xla_ckpt.UsageError, "--config"),
        ("export_hf", tmp_path / "own", {"tag": "a", "config": good, "kv_size_multiplier": 2}, xla_ckpt.UsageError,
         "weight_q, weight_k"),
        ("export_hf", tmp_path / "own", {"tag": "a", "dtype": "int8"}, xla_ckpt.UsageError, "bfloat16, float16"),
        ("export_hf", tmp_path / "own", {"tag": "megatron", "config": good}, xla_ckpt.IncompatibleCheckpointError,
         "arranged in several ways"),
        ("export_hf", tmp_path / "own", {"tag": "a", "config": {**good, "num_attention_heads": 4, "head_dim": 4}},
         xla_ckpt.IncompatibleCheckpointError, r"shape that config.json gives.*expected \[16, 32\].*4 heads"),
        ("export_hf", tmp_path / "own", {"tag": "a", "config": {**good, "num_hidden_layers": 3}},
         xla_ckpt.IncompatibleCheckpointError, "layers.2.self_attn.q_proj.weight and 8 more"),
        ("export_hf", tmp_path / "own", {"tag": "a", "config": {**good, "num_hidden_layers": 1}},
         xla_ckpt.IncompatibleCheckpointError, "1 layer, counted from 0"),
        ("export_hf", tmp_path / "own", {"tag": "a", "config": {**good, "attention_bias": True}},
         xla_ckpt.IncompatibleCheckpointError, "q_proj.bias"),
        ("export_hf", tmp_path / "own", {"tag": "a", "config": {**good, "num_key_value_heads": 3}}, xla_ckpt.UsageError,
         "do not divide"),
    ):  # fmt: skip
        job = {name: how.pop(name) for name in FIELDS & how.keys()}
        with pytest.raises(error, match=said) as told:
            getattr(xla_ckpt, call)(source, tmp_path / "new", llama=xla_ckpt.LlamaJob(**job), **how)
        assert not (tmp_path / "new").exists()
        assert "--" not in said or "LlamaJob" not in translate_to_options(str(told.value)), (
            "a command line has options alone"
        )


def family(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4} if kind == "GPT2" else SIZES
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    return getattr(transformers, kind + suffix)(getattr(transformers, f"{kind}Config")(**sizes)).eval()


@pytest.mark.parametrize("kind", ["GPT2", "Gemma2"])
def test_models_that_are_not_like_llama_keep_their_names(tmp_path: Path, kind: str) -> None:
    """Their config.json says what this library does not understand, or leaves out that the output is tied."""
    model = family(kind)
    model.save_pretrained(tmp_path / "hf")
    for to in ("hf", "native", "dcp"):
        if to != "hf":
            xla_ckpt.convert(tmp_path / "hf", tmp_path / to, to=to)
        other = family(kind)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        xla_ckpt.load_checkpoint(tmp_path / to, model=other)
        assert torch.equal(other(IDS).logits, model(IDS).logits)
    xla_ckpt.convert(tmp_path / "native", tmp_path / "again", to="safetensors")
    xla_ckpt.export_hf(tmp_path / "hf", tmp_path / "exported", dtype="bfloat16")
    same = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert not differences(same, safetensors.torch.load_file(tmp_path / "again" / "model.safetensors"), order=False)
    loaded = type(model).from_pretrained(tmp_path / "exported", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert not differences({k: v.bfloat16() for k, v in model.state_dict().items()}, loaded.state_dict(), order=False)


def test_a_tag_of_one_rank_is_split_as_its_configuration_says(tmp_path: Path) -> None:
    """The configuration was read, compared, and each rank got the whole of every array."""
    directory, model = saved(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    model(IDS).logits.sum().backward()
    optimizer.step()
    xla_ckpt.save_checkpoint(tmp_path / "run", "a", model, optimizer)
    words = [tmp_path / "run", tmp_path / "nxd", "--to", "pt", "--mesh", "tp=2", "--config", directory]
    assert main(["convert", *map(str, words)]) == 0
    stored = model.state_dict()
    for rank in range(2):
        found = content(tmp_path / f"nxd/a/model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
        at = "model.layers.1."
        for name, dim in (("self_attn.k_proj", 0), ("self_attn.o_proj", 1), ("mlp.up_proj", 0), ("mlp.down_proj", 1)):
            weight = f"{at}{name}.weight"
            assert torch.equal(found[weight], stored[weight].chunk(2, dim)[rank])
        assert torch.equal(found[f"{at}input_layernorm.weight"], stored[f"{at}input_layernorm.weight"])
        assert torch.equal(found["lm_head.weight"], stored["lm_head.weight"].chunk(2)[rank])
    split = xla_ckpt.explain(tmp_path / "nxd", mesh="tp=2").split
    assert split["optimizer/state/model.layers.0.mlp.down_proj.weight/exp_avg"] == (None, "tp")
    rule = [("up_proj", None)]
    xla_ckpt.convert(
        tmp_path / "run", tmp_path / "nxd", to="pt", mesh="tp=2", llama=xla_ckpt.LlamaJob(directory), shardings=rule,
        as_tag="ruled",
    )  # fmt: skip
    found = content(tmp_path / "nxd/ruled/model/dp_rank_00_tp_rank_01_pp_rank_00.pt")
    assert torch.equal(found[f"{at}mlp.up_proj.weight"], stored[f"{at}mlp.up_proj.weight"])
    xla_ckpt.export_hf(tmp_path / "nxd", tmp_path / "back", "a", llama=xla_ckpt.LlamaJob(directory))
    same_model(tmp_path / "back", model)
