"""Checkpoints of optimum-neuron: found by their numbers, and read without a model by what their metadata say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import xla_ckpt
from tests.formats.optimum import (
    MOMENTS,
    Job,
    adapter_local,
    adapter_of,
    changed,
    fused_names,
    metadata,
    write_adapter,
    write_checkpoint,
    write_shards,
)  # fmt: skip
from xla_ckpt.cli.main import main

JOBS = {
    "fused": Job(),
    "apart": Job(attention="apart"),
    "fused_twice": Job(tp=4, copies=2, bias=True),
    "apart_twice": Job(tp=4, copies=2, attention="apart", bias=True),
    "one_head": Job(tp=4, kv_heads=1, copies=4, attention="apart", xser=False),
    "three_heads": Job(tp=4, heads=12, kv_heads=3, copies=4),
    "wide": Job(tp=4, heads=12, kv_heads=6, copies=2),
    "linear": Job(attention="linear", tied=True),
    "strided": Job(attention="strided", kv_heads=8),
    "zero1": Job(tp=2, dp=3, kv_heads=1, copies=2, zero1=True, bias=True),
    "stages": Job(tp=2, pp=2, copies=2),
    "alone": Job(tp=1, attention="linear"),
}


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest) -> Job:
    return JOBS[request.param]


def equal(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_it_is_read_without_a_model(job: Job, tmp_path: Path) -> None:
    write_checkpoint(job, tmp_path, 10)
    found = xla_ckpt.restore(tmp_path).tree
    assert sorted(found) == ["model", "optimizer", "scheduler", "user_content"]
    assert set(found["model"]) == set(fused_names(job))
    equal({n: found["model"][n] for n in fused_names(job)}, job.whole())
    states = found["optimizer"]["state"]
    assert set(states) == {n for pp in range(job.pp) for n in job.parameters(pp)}
    for what in MOMENTS:
        equal({n: states[n][what] for n in states}, {n: job.whole(what)[n] for n in states})
    assert [g["params"] for g in found["optimizer"]["param_groups"]] == [
        [n for pp in range(job.pp) for n in job.groups(pp)[i]] for i in range(2)
    ]
    if job.zero1:
        equal(found["optimizer"]["master"], {n: job.whole("master")[n] for n in found["optimizer"]["master"]})
    assert found["scheduler"]["last_epoch"] == 10
    assert found["user_content"]["trainer_state"]["global_step"] == 10


def test_a_conversion_tells_of_heads_in_another_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without copies a job has the heads of the queries in another order, and the conversion does not move them."""
    write_checkpoint(Job(tp=4, copies=2, layers=1), tmp_path / "out", 10, optimizer=False)
    for tp in (4, 2):  # two ranks have as many copies, and so the heads keep their order
        xla_ckpt.convert(tmp_path / "out", tmp_path / f"nxd{tp}", to="xser", mesh=f"tp={tp}")
    assert "kv_size_multiplier" not in caplog.text
    xla_ckpt.convert(tmp_path / "out", tmp_path / "one", to="xser", mesh="tp=1")
    assert "weight_qkv was saved with kv_size_multiplier=2" in caplog.text
    assert "tp=1 it has 1: the heads of the queries" in caplog.text


def files_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in the safetensors of a directory."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def test_it_is_converted_without_a_model(job: Job, tmp_path: Path) -> None:
    write_checkpoint(job, tmp_path / "out", 10)
    xla_ckpt.convert(tmp_path / "out", tmp_path / "native", to="native", mesh="tp=1")
    assert xla_ckpt.list_tags(tmp_path / "native") == ["checkpoint-10"]
    converted = xla_ckpt.restore(tmp_path / "native").tree
    equal({n: converted["model"][n] for n in fused_names(job)}, job.whole())
    assert xla_ckpt.explain(tmp_path / "out", mesh="tp=1").ok


def test_it_is_exported_as_hugging_face_has_it(job: Job, tmp_path: Path) -> None:
    folder = write_checkpoint(job, tmp_path / "out", 10)
    xla_ckpt.export_hf(tmp_path / "out", tmp_path / "export")
    wanted = job.hugging_face()
    exported = files_in(tmp_path / "export")
    assert set(exported) == set(wanted)
    equal({n: exported[n] for n in wanted}, wanted)
    assert (tmp_path / "export/config.json").read_text() == (folder / "config.json").read_text()
    xla_ckpt.convert(tmp_path / "out", tmp_path / "converted", to="safetensors")
    equal({n: files_in(tmp_path / "converted")[n] for n in wanted}, wanted)
    if job.bias:
        return  # transformers' Llama has a bias in the output layer, too, if it has any
    # A configuration that is given is compared, and takes the place of the checkpoint's own.
    xla_ckpt.export_hf(tmp_path / "out", tmp_path / "again", llama=xla_ckpt.LlamaJob(folder / "config.json"))
    equal({n: t for n, t in files_in(tmp_path / "again").items() if n != "lm_head.weight"},
          {n: t for n, t in exported.items() if n != "lm_head.weight"})  # fmt: skip


def test_transformers_reads_the_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    job = Job(tp=4, copies=2)
    write_checkpoint(job, tmp_path / "out", 10)
    xla_ckpt.export_hf(tmp_path / "out", tmp_path / "export")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    made = transformers.AutoModelForCausalLM.from_config(loaded.config)
    made.load_state_dict(job.hugging_face())
    tokens = torch.arange(6)[None]
    assert torch.equal(loaded.eval()(tokens).logits, made.eval()(tokens).logits)


@pytest.mark.parametrize("name", ["fused_twice", "apart_twice", "linear", "strided"])
def test_an_adapter_is_exported_as_hugging_face_has_it(name: str, tmp_path: Path) -> None:
    adapter = write_adapter(JOBS[name], tmp_path / "checkpoint-10")
    xla_ckpt.export_hf(adapter, tmp_path / "export")
    exported, wanted = files_in(tmp_path / "export"), adapter_of(JOBS[name])
    assert set(exported) == set(wanted)
    equal({n: exported[n] for n in wanted}, wanted)


def test_it_is_converted_back_as_it_was(job: Job, tmp_path: Path) -> None:
    tag = write_checkpoint(job, tmp_path / "out", 10) / "shards"
    mesh = f"tp={job.tp},dp={job.dp}"
    if job.pp > 1:
        return  # stages need their cuts, which tests/formats/test_convert_gold.py has
    xla_ckpt.convert(tmp_path / "out", tmp_path / "nxd", to="xser" if job.xser else "nxd", mesh=mesh)
    from tests.formats.references import whole

    for rank in range(job.tp):
        name = f"model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
        equal({n: whole(tmp_path / "nxd/checkpoint-10" / name)[n] for n in fused_names(job)}, whole(tag / name))


def test_tags_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    job = Job(layers=1)
    for step, time in ((10, 4000), (100, 1000), (20, 3000)):
        write_checkpoint(job, tmp_path, step, time=time, optimizer=False)
    (tmp_path / "checkpoint-200/shards").mkdir(parents=True)
    (tmp_path / "checkpoint-300").mkdir()
    (tmp_path / "runs").mkdir()
    assert xla_ckpt.list_tags(tmp_path) == ["checkpoint-10", "checkpoint-20", "checkpoint-100"]
    assert xla_ckpt.latest_tag(tmp_path) == "checkpoint-100"
    assert xla_ckpt.has_checkpoint(tmp_path)
    assert xla_ckpt.restore(tmp_path).report.tag == "checkpoint-100"
    (tmp_path / "checkpoint-20/shards/done").unlink()
    assert xla_ckpt.list_tags(tmp_path) == ["checkpoint-10", "checkpoint-100"]
    with pytest.raises(xla_ckpt.NoCheckpointError, match="optimum-neuron wrote the tags there"):
        xla_ckpt.restore(tmp_path, "checkpoint-30")


def test_the_older_path_goes_on_working(tmp_path: Path) -> None:
    job = Job(tp=4, copies=2)
    folder = write_checkpoint(job, tmp_path, 10)
    for tag, name in (("shards", "shards"), (None, "checkpoint-10")):  # the path alone is that of the checkpoint
        loaded: dict[str, Any] = {}
        assert xla_ckpt.load_checkpoint(folder, tag, model=loaded).report.tag == name
        equal({n: loaded[n] for n in fused_names(job)}, job.whole())
    assert xla_ckpt.list_tags(folder) == ["shards"]


def test_trained_on_in_the_root(tmp_path: Path) -> None:
    """`save_model` at the end of a training writes ``shards`` beside the checkpoints, and a job may save with us."""
    job = Job(layers=1)
    write_checkpoint(job, tmp_path, 10, time=1000, optimizer=False)
    write_checkpoint(job, tmp_path, 20, time=900, optimizer=False)
    write_shards(job, tmp_path / "shards", optimizer=False)
    assert xla_ckpt.list_tags(tmp_path) == ["checkpoint-10", "checkpoint-20", "shards"]
    xla_ckpt.save_checkpoint(tmp_path, "step_30", model={"w": torch.ones(2)})
    assert xla_ckpt.list_tags(tmp_path) == ["checkpoint-10", "checkpoint-20", "shards", "step_30"]


@pytest.mark.parametrize("name", ["fused_twice", "linear", "strided", "zero1", "stages"])
def test_verify_and_show(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(JOBS[name], tmp_path, 10)
    assert xla_ckpt.verify(tmp_path).ok
    assert main(["ls", str(tmp_path)]) == 0
    assert "optimum-neuron" in capsys.readouterr().out
    assert main(["show", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["tag"], facts["layout"], facts["unknown"]) == ("checkpoint-10", "optimum-neuron", [])
    assert all((folder / file["path"]).is_file() for file in facts["files"])
    victim = max((folder / "shards/model").rglob("*.pt"))
    data = bytearray(victim.read_bytes())
    elements = torch.load(victim, weights_only=True).numpy().tobytes()
    data[data.index(elements)] ^= 1
    victim.write_bytes(data)
    report = xla_ckpt.verify(tmp_path)
    assert not report.ok
    assert {p.file for p in report.problems} == {str(victim.relative_to(folder))}


def damage(what: str, folder: Path) -> None:
    file = folder / "shards/mp_metadata_pp_rank_0.json"

    def spec(held: Any, kind: str) -> Any:
        modules = held["model_weight_transformation_specs"]
        return next(s for m in modules for s in m["specs"] if s[0] == kind)

    match what:
        case "cut off":
            file.write_text(file.read_text()[:-20])
        case "no parameters":
            changed(file, lambda held: held.pop("parameters"))
        case "a stage is missing":
            file.unlink()
        case "stages of another job":
            (folder / "shards/mp_metadata_pp_rank_2.json").write_text(file.read_text())
        case "another class":
            changed(file, lambda held: spec(held, "FusedLinearsSpec").__setitem__(0, "ExpertFusionSpec"))
        case "another member":
            changed(file, lambda held: spec(held, "FusedLinearsSpec")[1].update(interleaved=True))
        case "another axis":
            changed(file, lambda held: spec(held, "FusedLinearsSpec")[1].update(fuse_axis="diagonal"))
        case "another number of ranks":
            changed(file, lambda held: spec(held, "FusedLinearsSpec")[1].update(tp_size=4))
        case "heads that do not divide":
            changed(file, lambda held: spec(held, "GQAQKVColumnParallelLinearSpec")[1].update(num_attention_heads=7))
        case "another model's heads":

            def halve(held: Any) -> None:
                of = spec(held, "GQAQKVColumnParallelLinearSpec")[1]
                of["q_output_size_per_partition"] //= 2
                of["kv_output_size_per_partition"] //= 2

            changed(file, halve)
        case "another model's size":
            changed(file, lambda held: spec(held, "FusedLinearsSpec")[1].update(original_dims=[16, 16]))
        case "another model's names":
            changed(
                file, lambda held: held["parameters"].update({"model.extra.weight": {"tensor_model_parallel": False}})
            )
        case "a stride that contradicts":
            changed(file, lambda held: held["parameters"]["model.layers.0.mlp.gate_up_proj.weight"].update(
                partition_stride=3))  # fmt: skip
        case "a dim that is not there":
            changed(file, lambda held: held["parameters"]["model.embed_tokens.weight"].update(partition_dim=2))
        case _:
            raise ValueError(what)


GATE_UP = "model/model.layers.0.mlp.gate_up_proj.weight"


@pytest.mark.parametrize(
    ("what", "error", "leaf", "text"),
    [
        ("cut off", xla_ckpt.CorruptCheckpointError, None, "no JSON"),
        ("no parameters", xla_ckpt.CorruptCheckpointError, None, "parameters of the type dict"),
        ("a stage is missing", xla_ckpt.CorruptCheckpointError, None, "expected one for each of 2 stages"),
        ("stages of another job", xla_ckpt.CorruptCheckpointError, None, "found those of the stages 0, 1, 2"),
        ("another class", xla_ckpt.UnsupportedStateError, None, "ExpertFusionSpec in model.layers.0.mlp"),
        ("another member", xla_ckpt.UnsupportedStateError, None, "interleaved"),
        ("another axis", xla_ckpt.CorruptCheckpointError, None, "fuse_axis.*diagonal"),
        ("another number of ranks", xla_ckpt.CorruptCheckpointError, "model/model.layers.0.mlp.gate_up_proj",
         "found 4"),
        ("heads that do not divide", xla_ckpt.CorruptCheckpointError, None, "found 7 by 2 times 2"),
        ("another model's heads", xla_ckpt.CorruptCheckpointError,
         "model/model.layers.0.self_attn.qkv_proj.weight_qkv", r"found \[16, 16\] on each of 2"),
        ("another model's size", xla_ckpt.CorruptCheckpointError, GATE_UP, "48 elements on all ranks.*, and not 32"),
        ("another model's names", xla_ckpt.CorruptCheckpointError, "model/model.extra.weight", "another model"),
        ("a stride that contradicts", xla_ckpt.CorruptCheckpointError, GATE_UP, "stride 3"),
        ("a dim that is not there", xla_ckpt.CorruptCheckpointError, "model/model.embed_tokens.weight", "3 dims"),
    ],
)  # fmt: skip
def test_metadata_that_are_damaged_or_of_another_model(
    what: str, error: type[Exception], leaf: str | None, text: str, tmp_path: Path
) -> None:
    damage(what, write_checkpoint(JOBS["stages"], tmp_path, 10, optimizer=False))
    model: dict[str, Any] = {}
    with pytest.raises(error, match=text) as caught:
        xla_ckpt.load_checkpoint(tmp_path, "checkpoint-10", model=model)
    assert caught.value.leaf == leaf
    assert caught.value.file.startswith("shards/mp_metadata_pp_rank_")
    assert model == {}
    problems = xla_ckpt.verify(tmp_path, "checkpoint-10").problems
    assert [str(p) for p in problems] == ([str(caught.value)] if error is xla_ckpt.CorruptCheckpointError else [])


def parameter(shape: tuple[int, ...], dim: int | None = None, stride: int = 1) -> torch.nn.Parameter:
    made: Any = torch.nn.Parameter(torch.zeros(shape))
    if dim is not None:
        made.tensor_model_parallel, made.partition_dim, made.partition_stride = True, dim, stride
    return made


def test_a_model_that_contradicts_the_metadata(tmp_path: Path) -> None:
    job = Job(layers=1, attention="linear")
    write_checkpoint(job, tmp_path, 10)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    for wrong, text in [
        (parameter((48, 8)), r"expected \[48, 16\], found \[48, 8\]"),
        (parameter((48, 16), 0), "expected dim 0 in parts of 24, 24, found dim 0 in parts of 48"),
        (parameter((48, 16), 1), "found dim 1 in parts of 16"),
    ]:
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=text) as caught:
            xla_ckpt.load_checkpoint(tmp_path, model={name: wrong}, strict=True)
        assert GATE_UP in str(caught.value)
        assert not wrong.detach().any()
    assert "parts of 24, 24" in " ".join(
        xla_ckpt.explain(tmp_path, mesh="tp=2", model={name: parameter((48, 16), 0)}).problems
    )
    right = parameter((48, 16), 0, 2)
    xla_ckpt.load_checkpoint(tmp_path, model={name: right}, strict=False)
    assert torch.equal(right.detach(), job.whole()[name])
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="parts of 48"):
        xla_ckpt.restore(tmp_path, shardings=[("gate_up", ("tp", None))])
    assert xla_ckpt.restore(tmp_path, shardings=[("gate_up", (None, "dp"))])


def test_copies_that_differ_are_found(tmp_path: Path) -> None:
    job = Job(tp=4, copies=2, attention="apart", xser=False, layers=1)
    folder = write_checkpoint(job, tmp_path, 10)
    for leaf in ("model.layers.0.self_attn.qkv_proj.weight_k", "model.norm.weight"):
        file = folder / "shards/model/dp_rank_00_tp_rank_03_pp_rank_00.pt"
        held = torch.load(file)
        torch.save({**held, leaf: held[leaf] + 1}, file)
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="different") as caught:
            xla_ckpt.load_checkpoint(tmp_path, model={leaf: torch.zeros(job.whole()[leaf].shape)}, strict=True)
        assert caught.value.leaf == f"model/{leaf}"
        torch.save(held, file)


def test_without_metadata_a_model_is_wanted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(layers=1, attention="linear")
    folder = write_checkpoint(job, tmp_path, 10)
    (folder / "shards/mp_metadata_pp_rank_0.json").unlink()
    (folder / "shards/mp_metadata_pp_rank_0.pt").write_bytes(b"of the first versions")
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="ambiguous"):
        xla_ckpt.restore(tmp_path)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    found = xla_ckpt.restore(tmp_path, like={"model": {name: parameter((48, 16), 0, 2)}}).tree
    assert torch.equal(found["model"][name].detach(), job.whole()[name])


def test_an_optimizer_that_nobody_can_name(tmp_path: Path) -> None:
    """Two groups of tensors that have the same shapes: which is which, only the program knows."""
    job = Job(layers=2, attention="linear", xser=False)
    folder = write_checkpoint(job, tmp_path, 10)
    second = [i for i, name in enumerate(job.groups(0)[0]) if name.startswith("model.layers.1.")]
    for rank in range(2):
        file = folder / f"shards/optim/dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
        held = torch.load(file)
        decayed, bare = held["param_groups"]
        first = [i for i in decayed["params"] if i not in second]
        held["param_groups"] = [{**decayed, "params": first}, {**decayed, "params": second}, bare]
        torch.save(held, file)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"says for certain.*load_checkpoint\(model="):
        xla_ckpt.restore(tmp_path)
    model: dict[str, Any] = {}
    xla_ckpt.load_checkpoint(tmp_path, model=model)
    equal({n: model[n] for n in fused_names(job)}, job.whole())


@pytest.mark.parametrize("name", ["fused_twice", "apart_twice", "linear", "strided", "one_head"])
def test_adapters(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    folder = tmp_path / "checkpoint-10"
    adapter = write_adapter(job, folder)
    (folder / "trainer_state.json").write_text('{"global_step": 10}')
    whole = adapter_local(job, None)
    for path, tag in ((adapter, "adapter_shards"), (adapter, None), (tmp_path, "checkpoint-10"), (tmp_path, None)):
        found: dict[str, Any] = {}
        xla_ckpt.load_checkpoint(path, tag, model=found)
        equal({n: found[n] for n in whole}, whole)
    assert xla_ckpt.list_tags(tmp_path) == ["checkpoint-10"]
    assert xla_ckpt.verify(tmp_path).ok
    assert xla_ckpt.restore(tmp_path).tree["user_content"] == {"trainer_state": {"global_step": 10}}
    write_adapter(job, folder, "other")
    with pytest.raises(xla_ckpt.UsageError, match="adapter_default, adapter_other.*tag adapter_shards"):
        xla_ckpt.restore(tmp_path)
    equal(xla_ckpt.restore(folder / "adapter_other").tree["model"], adapter_local(job, None, "other"))


def test_adapters_beside_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(layers=1)
    folder = write_checkpoint(job, tmp_path, 10, optimizer=False)
    write_adapter(job, folder)
    equal(xla_ckpt.restore(tmp_path).tree["model"], job.whole())
    equal(xla_ckpt.restore(folder / "adapter_default").tree["model"], adapter_local(job, None))
    assert xla_ckpt.list_tags(folder) == ["shards"]
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert [t["note"] for t in json.loads(capsys.readouterr().out)["tags"]] == ["with adapter_default"]
    assert main(["ls", str(tmp_path)]) == 0
    assert "adapter_default" in capsys.readouterr().out


def test_metadata_with_several_adapters_are_about_each(tmp_path: Path) -> None:
    job = Job(layers=1)
    adapter = write_adapter(job, tmp_path / "checkpoint-10", "first")
    changed(adapter / "adapter_shards/mp_metadata_pp_rank_0.json", lambda held: held["parameters"].update(
        metadata(job, 0, adapter="second")["parameters"]))  # fmt: skip
    equal(xla_ckpt.restore(tmp_path).tree["model"], adapter_local(job, None, "first"))
