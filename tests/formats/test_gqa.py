"""Grouped-query attention: the layer says how queries, keys and values lie, and copies of keys are compared."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.gold import Gold, Target, cases
from tests.formats.writing import as_job, save_as_job
from xla_ckpt import Mesh
from xla_ckpt.cli.main import main
from xla_ckpt.distributed import mesh_source
from xla_ckpt.state.shardings import get_layer_shardings

FUSED = pytest.mark.parametrize(("case", "tag"), cases(fused=True))
QKV = "model.layers.0.self_attn.qkv_proj.weight_qkv"
QUERIES, KEYS, HIDDEN, HEAD = 64, 32, 8, 16


class Attention(torch.nn.Module):
    """One rank's part of a layer, made from a whole one by code of the test's own."""

    def __init__(
        self, mesh: Mesh, rank: int, *, copies: int, fuse: bool = True, bias: bool = False, adjacent: bool = False,
        blank: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        tp = mesh.coordinates(rank)["tp"]
        self.fuse_qkv, self.kv_size_multiplier, self.output_sizes = fuse, copies, [QUERIES, KEYS]
        self.q_output_size_per_partition = QUERIES // mesh.tp
        self.kv_output_size_per_partition = KEYS * copies // mesh.tp
        self.gather_output = False
        if copies > 1:
            self.kv_copies_adjacent = adjacent
        for kind, columns in (("weight", (HIDDEN,)), *([("bias", ())] if bias else [])):
            shapes = {part: (rows, *columns) for part, rows in (("q", QUERIES), ("k", KEYS), ("v", KEYS))}
            held = {
                part: self.mine(whole(f"{kind}_{part}", shape), part, mesh.tp, tp) for part, shape in shapes.items()
            }
            named = {"qkv": torch.cat(list(held.values()))} if fuse else held
            for part, value in named.items():
                parameter = torch.nn.Parameter(torch.zeros_like(value) if blank else value.clone())
                self.register_parameter(f"{kind}_{part}", parameter)

    def mine(self, full: torch.Tensor, part: str, tp: int, rank: int) -> torch.Tensor:
        if part == "q":
            return full.chunk(tp)[rank]
        parts = full.chunk(tp // self.kv_size_multiplier)
        if getattr(self, "kv_copies_adjacent", False):
            return [p for p in parts for _ in range(self.kv_size_multiplier)][rank]
        return (parts * self.kv_size_multiplier)[rank]


def whole(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


def differences(found: torch.nn.Module, wanted: torch.nn.Module) -> list[str]:
    held = dict(wanted.named_parameters())
    return [name for name, p in found.named_parameters() if not torch.equal(p, held[name])]


JOBS = [
    {"mesh": Mesh(tp=4, dp=2), "copies": 2},
    {"mesh": Mesh(tp=4), "copies": 4},
    {"mesh": Mesh(tp=4), "copies": 2, "adjacent": True},
    {"mesh": Mesh(tp=2), "copies": 1},
    {"mesh": Mesh(), "copies": 1},
]


@pytest.mark.parametrize("layout", ["native", "xser", "pt", "smp"])
@pytest.mark.parametrize(("fuse", "bias"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_any_job_resumes_as_any_other(
    job: dict[str, Any], fuse: bool, bias: bool, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: dict[str, Any] = {"fuse": fuse, "bias": bias}
    source = {k: v for k, v in job.items() if k != "mesh"}
    save_as_job(
        monkeypatch, job["mesh"], tmp_path, "t", lambda r: {"model": Attention(job["mesh"], r, **source, **kinds)},
        layout=layout,
    )  # fmt: skip
    stored = xla_ckpt.restore(tmp_path, "t").tree["model"]
    assert {name: tuple(t.shape)[0] for name, t in stored.items() if name.startswith("weight")} == (
        {"weight_qkv": QUERIES + 2 * KEYS} if fuse else {"weight_q": QUERIES, "weight_k": KEYS, "weight_v": KEYS}
    )
    for target in JOBS:
        mesh, how = target["mesh"], {k: v for k, v in target.items() if k != "mesh"}
        models = [Attention(mesh, rank, blank=True, **how, **kinds) for rank in range(mesh.size)]
        as_job(monkeypatch, mesh, "load", lambda rank: xla_ckpt.load_checkpoint(tmp_path, "t", models[rank]))  # noqa: B023
        for rank, model in enumerate(models):
            assert differences(model, Attention(mesh, rank, **how, **kinds)) == [], (target, rank)


@pytest.mark.parametrize("layout", ["xser", "pt", "smp"])
@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("fuse", [True, False])
def test_their_files_say_which_ranks_held_the_same(
    layout: str, adjacent: bool, fuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without our manifest: the shapes say how many ranks held the same keys, and their bytes say which."""
    mesh = Mesh(tp=4)
    how: dict[str, Any] = {"fuse": fuse, "bias": True}
    save_as_job(
        monkeypatch, mesh, tmp_path, "t",
        lambda r: {"model": Attention(mesh, r, copies=2, adjacent=adjacent, **how)}, layout=layout,
    )  # fmt: skip
    for file in ("manifest.json", "_CHECKPOINT_METADATA", "commit_success.txt"):
        (tmp_path / "t" / file).unlink(missing_ok=True)
    for over, copies in ((Mesh(), 1), (Mesh(tp=2), 1), (mesh, 4), (mesh, 2)):
        models = [Attention(over, rank, blank=True, copies=copies, **how) for rank in range(over.size)]
        as_job(monkeypatch, over, "load", lambda rank: xla_ckpt.load_checkpoint(tmp_path, "t", models[rank]))  # noqa: B023
        for rank, model in enumerate(models):
            assert differences(model, Attention(over, rank, copies=copies, **how)) == []


@pytest.mark.parametrize("layout", ["native", "xser", "pt", "smp"])
@pytest.mark.parametrize("fuse", [True, False])
def test_keys_that_drifted_apart_are_not_saved(
    fuse: bool, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(tp=4)

    def drifted(rank: int) -> dict[str, Any]:
        model = Attention(mesh, rank, copies=2, fuse=fuse)
        with torch.no_grad():
            (model.weight_qkv[16:32] if fuse else model.weight_k).add_(rank // 2)
        return {"model": model}

    with pytest.raises(xla_ckpt.DivergentReplicasError) as caught:
        save_as_job(monkeypatch, mesh, tmp_path, "t", drifted, layout=layout)
    assert caught.value.leaf == f"model/weight_{'qkv' if fuse else 'k'}"
    assert "ranks 2, 3" in str(caught.value.found) or "rank 2" in str(caught.value.found)
    assert not xla_ckpt.has_checkpoint(tmp_path)


@pytest.mark.parametrize("fuse", [True, False])
def test_keys_that_drifted_apart_in_their_files_are_named(
    fuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(tp=4)
    save_as_job(
        monkeypatch, mesh, tmp_path, "t", lambda r: {"model": Attention(mesh, r, copies=2, fuse=fuse)}, layout="pt"
    )
    for file in ("manifest.json", "_CHECKPOINT_METADATA", "commit_success.txt"):
        (tmp_path / "t" / file).unlink(missing_ok=True)
    file = tmp_path / "t/model/dp_rank_00_tp_rank_03_pp_rank_00.pt"
    held = torch.load(file, weights_only=True)
    held["weight_qkv" if fuse else "weight_k"][-1] += 1
    torch.save(held, file)
    model = Attention(Mesh(), 0, copies=1, fuse=fuse, blank=True)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="hold different ones") as caught:
        xla_ckpt.load_checkpoint(tmp_path, "t", model)
    assert caught.value.leaf == f"model/weight_{'qkv' if fuse else 'k'}"
    assert "tp_rank_03" in str(caught.value.found)
    assert all((p == 0).all() for p in model.parameters())
    rule: Any = ["64", "32x2", "32x2"] if fuse else ["x2"]
    rules = [("weight_qkv" if fuse else "weight_k", (("tp", [int(s) if s.isdigit() else s for s in rule]), None))]
    xla_ckpt.load_checkpoint(tmp_path, "t", model, shardings=rules)
    assert differences(model, Attention(Mesh(), 0, copies=1, fuse=fuse)) == []  # the first copies are whole


def test_another_multiplier_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    mesh = Mesh(tp=4)
    save_as_job(monkeypatch, mesh, tmp_path, "t", lambda r: {"model": Attention(mesh, r, copies=2)})
    with caplog.at_level(logging.WARNING):
        xla_ckpt.load_checkpoint(tmp_path, "t", Attention(Mesh(), 0, copies=1, blank=True))
    (told,) = [r.getMessage() for r in caplog.records if "kv_size_multiplier" in r.getMessage()]
    assert "kv_size_multiplier=2, and this one has 1" in told
    caplog.clear()
    models = [Attention(mesh, rank, copies=2, blank=True) for rank in range(mesh.size)]
    as_job(monkeypatch, mesh, "load", lambda rank: xla_ckpt.load_checkpoint(tmp_path, "t", models[rank]))
    assert not caplog.records


def test_sections_of_another_kind_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain split of what was saved as queries, keys and values would give every rank other rows."""
    mesh = Mesh(tp=2)
    save_as_job(monkeypatch, mesh, tmp_path, "t", lambda r: {"model": Attention(mesh, r, copies=1)})
    for spec in (("tp", None), (("tp", [KEYS, KEYS, QUERIES]), None), (("tp", 4), None)):
        held = [dict(Attention(mesh, r, copies=1, blank=True).named_parameters()) for r in range(2)]
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="other sections than it is wanted") as caught:
            as_job(
                monkeypatch,
                mesh,
                "load",
                lambda r: xla_ckpt.load_checkpoint(tmp_path, "t", held[r], shardings=[("qkv", spec)]),  # noqa: B023
            )
        assert caught.value.leaf == "model/weight_qkv"
        assert all((p == 0).all() for model in held for p in model.values())
    alone = {"weight_qkv": torch.zeros(QUERIES + 2 * KEYS, HIDDEN)}
    xla_ckpt.load_checkpoint(tmp_path, "t", alone)  # of a single rank no rows can be exchanged
    assert differences(Attention(Mesh(), 0, copies=1), Attention(Mesh(), 0, copies=1)) == []
    assert torch.equal(alone["weight_qkv"], Attention(Mesh(), 0, copies=1).weight_qkv)


def test_two_orders_that_both_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that are equal in pairs on 8 ranks: as trn1 has A, A, B, B, or as trn2 has A, B, A, B."""
    mesh = Mesh(tp=8)
    parts = [torch.full((2, 3), float(v)) for v in (1, 1, 2, 2, 1, 1, 2, 2)]

    def state(rank: int) -> dict[str, Any]:
        value = torch.nn.Parameter(parts[rank].clone())
        value.tensor_model_parallel, value.partition_dim, value.partition_stride = True, 0, 1
        value.partition_sections = ["8x2"]
        return {"model": {"weight_k": value}}

    save_as_job(monkeypatch, mesh, tmp_path, "t", state, layout="pt")
    for file in ("manifest.json", "_CHECKPOINT_METADATA", "commit_success.txt"):
        (tmp_path / "t" / file).unlink(missing_ok=True)
    target = torch.nn.Parameter(torch.zeros(8, 3))
    target.tensor_model_parallel, target.partition_dim, target.partition_stride = True, 0, 1
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="two ways"):
        xla_ckpt.load_checkpoint(tmp_path, "t", {"weight_k": target})
    for text, expected in (("8x2", [1, 1, 2, 2]), ("8x2 adjacent", [1, 2, 1, 2])):
        xla_ckpt.load_checkpoint(tmp_path, "t", {"weight_k": target}, shardings=[("weight_k", (("tp", [text]), None))])
        assert target[::2, 0].tolist() == expected


def test_only_keys_are_taken_for_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal parts of any other array are no copies: the model is another one."""
    mesh = Mesh(tp=4)

    def part(rows: int) -> dict[str, Any]:
        value = torch.nn.Parameter(torch.zeros(rows, 3))
        value.tensor_model_parallel, value.partition_dim, value.partition_stride = True, 0, 1
        return {"up_proj.weight": value}

    save_as_job(monkeypatch, mesh, tmp_path, "t", lambda r: {"model": part(16)}, layout="pt")
    for file in ("manifest.json", "_CHECKPOINT_METADATA", "commit_success.txt"):
        (tmp_path / "t" / file).unlink(missing_ok=True)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"\[64, 3\] is stored, \[32, 3\] wanted"):
        xla_ckpt.load_checkpoint(tmp_path, "t", part(32))


@pytest.mark.parametrize("layout", ["native", "pt"])
def test_drifted_columns_are_not_saved(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections of the second dim are scattered in memory: more than their first row is compared."""
    mesh, rules = Mesh(tp=4), [("w", (None, ("tp", [64, "32x2"])))]

    def state(rank: int) -> dict[str, Any]:
        queries, keys = torch.zeros(300, 16), torch.zeros(300, 16)
        keys[1:] += rank // 2
        return {"model": {"w": torch.cat([queries, keys], 1)}}

    with pytest.raises(xla_ckpt.DivergentReplicasError, match="kv_size_multiplier"):
        save_as_job(monkeypatch, mesh, tmp_path, "t", state, layout=layout, shardings=rules)


def test_a_rule_says_it_without_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain dicts have no layers: a rule with sections is all that is needed."""
    mesh, rules = Mesh(tp=4), [("qkv", (("tp", [QUERIES, f"{KEYS}x2", f"{KEYS}x2"]), None))]
    save_as_job(
        monkeypatch, mesh, tmp_path, "t", lambda r: {"model": dict(Attention(mesh, r, copies=2).named_parameters())},
        shardings=rules,
    )  # fmt: skip
    alone = Attention(Mesh(), 0, copies=1, blank=True)
    xla_ckpt.load_checkpoint(tmp_path, "t", alone)
    assert differences(alone, Attention(Mesh(), 0, copies=1)) == []
    found = xla_ckpt.explain(tmp_path, "t", mesh="tp=2")
    assert found.ok, found.problems
    assert found.split["model/weight_qkv"] == (("tp", (64, "32x2/2", "32x2/2")), None)
    assert {r.needed_bytes for r in found.readings} == {4 * HIDDEN * (QUERIES // 2 + 2 * KEYS)}
    assert main(["explain", str(tmp_path), "--mesh", "tp=8"]) == 0
    assert "dim 0 over tp in sections of 64 + 32x2/2 + 32x2/2: model/weight_qkv" in capsys.readouterr().out
    wrong = ["--sharding", "qkv", "tp:64+16+16,_"]
    assert main(["explain", str(tmp_path), "--mesh", "tp=2", *wrong]) == 1
    assert "sections of 64 + 16 + 16 elements are 96, and the dim has 128" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_size_multiplier": 3}, r"divides tp=4"),
        ({"output_sizes": [64, 16]}, r"output_sizes \[64, 16\].*\[64, 32\]"),
        ({"q_output_size_per_partition": 20}, r"output_sizes|rows"),
        ({"output_sizes": None, "kv_output_size_per_partition": 8}, r"32 rows, 16 of queries and 8 of keys"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, "4 heads of queries and 4 of keys"),
    ],
)
def test_a_layer_that_contradicts_itself(change: dict[str, Any], words: str) -> None:
    model = Attention(Mesh(tp=4), 0, copies=2)
    for name, value in change.items():
        setattr(model, name, value)
    with pytest.raises(xla_ckpt.UnsupportedStateError, match=words) as caught:
        get_layer_shardings(model, Mesh(tp=4))
    assert caught.value.leaf == "model/weight_qkv"
    assert "shardings" in str(caught.value.hint)


def test_a_parameter_of_two_layers_that_contradict() -> None:
    one, other = Attention(Mesh(tp=4), 0, copies=2), Attention(Mesh(tp=4), 0, copies=2)
    other.weight_qkv, other.kv_size_multiplier, other.output_sizes = one.weight_qkv, 1, [QUERIES, 2 * KEYS]
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="as another layer says"):
        get_layer_shardings(torch.nn.ModuleList([one, other]), Mesh(tp=4))


class Moody(torch.nn.Module):
    """Answers what it does not have with an exception of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.endswith("per_partition"):
            raise KeyError(name)
        return super().__getattr__(name)


def test_modules_that_answer_oddly_are_no_layers(tmp_path: Path) -> None:
    model = Moody()
    model.weight = torch.nn.Parameter(torch.ones(2))
    xla_ckpt.save_checkpoint(tmp_path, "t", model)
    assert get_layer_shardings(model, Mesh()) == {}


def test_attributes_that_contradict_the_layer() -> None:
    model = Attention(Mesh(tp=4), 0, copies=2)
    model.weight_qkv.tensor_model_parallel, model.weight_qkv.partition_dim = True, 1
    model.weight_qkv.partition_stride = 1
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="partition_dim 1"):
        get_layer_shardings(model, Mesh(tp=4))


def test_biases_of_gathered_outputs_are_whole() -> None:
    model = Attention(Mesh(), 0, copies=1, bias=True)
    model.gather_output = True
    assert get_layer_shardings(model, Mesh(tp=1))[id(model.bias_qkv)].dims == ()


def test_groups_of_neighbours_are_those_of_trn2(monkeypatch: pytest.MonkeyPatch) -> None:
    """neuronx-distributed's own layer does not say which ranks hold the same: its groups do."""
    model = Attention(Mesh(tp=4), 0, copies=2)
    del model.kv_copies_adjacent
    for groups, adjacent in ((None, False), ([[0, 2], [1, 3]], False), ([[0, 1], [2, 3]], True)):
        state: Any = type("parallel_state", (), {"_KV_SHARED_GROUP_SPMD": groups})
        monkeypatch.setitem(mesh_source.sys.modules, mesh_source.NXD_PARALLEL_STATE, state)
        (split, _) = get_layer_shardings(model, Mesh(tp=4))[id(model.weight_qkv)].dims
        assert split is not None
        assert [s.adjacent for s in split.sections] == [False, adjacent, adjacent]


def test_a_parameter_may_name_its_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(tp=2)

    def part(rank: int) -> torch.nn.Parameter:
        rows = torch.arange(12.0).split((8, 4))
        value = torch.nn.Parameter(torch.cat([s.chunk(2)[rank] for s in rows]))
        value.tensor_model_parallel, value.partition_dim, value.partition_stride = True, 0, 1
        value.partition_sections = [8, 4]
        return value

    save_as_job(monkeypatch, mesh, tmp_path, "t", lambda r: {"model": {"w": part(r)}})
    assert torch.equal(xla_ckpt.restore(tmp_path, "t").tree["model"]["w"], torch.arange(12.0))
    bad = part(0)
    bad.partition_sections = [8, "x"]
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="partition_sections"):
        save_as_job(monkeypatch, mesh, tmp_path, "u", lambda r: {"model": {"w": bad}})


@FUSED
def test_theirs_without_its_layer_needs_a_rule(case: str, tag: str) -> None:
    gold = Gold(case, tag)
    queries = gold.truth["params"][QKV].shape[1]
    keys = (gold.truth["params"][QKV].shape[0] - queries) // 2
    target = Target(gold, layers=False)
    rules = [("weight_qkv", (("tp", [queries, keys, keys]), None))]
    xla_ckpt.load_checkpoint(gold.root, tag, target.model, target.optimizer, shardings=rules)
    assert target.differences() == []
    wrong = [("weight_qkv", (("tp", [queries, keys, 1]), None))]
    with pytest.raises(xla_ckpt.UsageError, match=f"{queries} \\+ {keys} \\+ 1 elements are") as caught:
        xla_ckpt.load_checkpoint(gold.root, tag, target.model, target.optimizer, shardings=wrong)
    assert "weight_qkv" in str(caught.value.leaf)
