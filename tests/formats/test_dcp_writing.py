"""The layout ``dcp``: what any job saves in it, stock torch.distributed.checkpoint loads bit for bit."""

from __future__ import annotations

import itertools
import os
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import xla_ckpt
import xla_ckpt.dcp as our_dcp
from tests.jobs import run_alone, run_on_ranks
from tests.topology.kinds import build, emulate, pairs, possible
from tests.topology.state import GROUPS, WHOLE, known, whole
from tests.xla import HAS_XLA
from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError

KINDS = possible("tp=4", "tp=2,dp=2 zero1", "dp=4 zero1", "pp=2,tp=2", "pp=2,dp=2 zero1", "fsdp2", "hsdp", "tp_fsdp")
OF_TORCH = ("fsdp2", "hsdp", "tp_fsdp")
STATES = ("exp_avg", "exp_avg_sq")


def saves(rank: int, root: Path, kinds: Sequence[str], layout: str) -> None:
    emulate()
    for n, kind in enumerate(kinds):
        held = build(kind, blank=False)
        xla_ckpt.save_checkpoint(
            root,
            tag_of(kind),
            held.model,
            held.optimizer,
            user_content={"kind": kind, "n": (n, None)},
            options=xla_ckpt.SaveOptions(timeout=60),
            async_save=n % 2 == 0,
            layout=layout,
            **held.options,
        ).result()


def tag_of(kind: str) -> str:
    return kind.replace(" ", "_")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by four ranks: one tag for each of the kinds."""
    root = tmp_path_factory.mktemp("jobs") / "ckpt"
    run_on_ranks(saves, 4, root, KINDS, "dcp", xla=HAS_XLA)
    return root


def stock(load: Any) -> Any:
    """Call something of stock DCP, which warns that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load()


def blank() -> dict[str, Any]:
    """The whole toy state, with nothing of it in it, as `get_state_dict` names it."""
    return {
        "model": {**{n: torch.full_like(whole(n), -7.0) for n in WHOLE}, "seen": torch.tensor(0.0)},
        "optimizer": {
            "state": {
                n: {"step": torch.tensor(0.0), **{what: torch.full_like(whole(n), -7.0) for what in STATES}}
                for n in WHOLE
            },
            "param_groups": [{"lr": 0.0, "weight_decay": -1.0, "params": []} for _ in GROUPS],
        },
        "user_content": {"kind": "", "n": ()},
    }


def differences(found: dict[str, Any], kind: str) -> list[str]:
    """What of a loaded state is not the known one."""
    bad = [n for n in WHOLE if not torch.equal(found["model"][n], whole(n))]
    state = found["optimizer"]["state"]
    bad += [f"{n} {w}" for n in WHOLE for w in STATES if not torch.equal(state[n][w], known(n, w))]
    bad += [f"{n} step" for n in WHOLE if float(state[n]["step"]) != 7.0]
    for group, saved in zip(found["optimizer"]["param_groups"], GROUPS, strict=True):
        bad += [key for key, value in saved.items() if group[key] != value]
    bad += [] if {n for g in found["optimizer"]["param_groups"] for n in g["params"]} == set(WHOLE) else ["params"]
    bad += [] if found["user_content"] == {"kind": kind, "n": (KINDS.index(kind), None)} else ["user_content"]
    return bad + ([] if float(found["model"]["seen"]) == 5.0 else ["buffer"])


@pytest.mark.parametrize("kind", KINDS)
def test_stock_dcp_loads_it_in_one_process(root: Path, kind: str) -> None:
    found = blank()
    stock(lambda: dcp.load(found, checkpoint_id=root / tag_of(kind), no_dist=True))
    assert differences(found, kind) == []
    assert xla_ckpt.verify(root, tag_of(kind)).ok


def loads_stock(rank: int, root: Path, jobs: Sequence[tuple[str, str]]) -> list[str]:
    bad = []
    for kind, mine in jobs:
        held = build(mine, blank=True)
        model, optimizer = get_state_dict(held.model, held.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=root / tag_of(kind))
        set_state_dict(held.model, held.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        bad += [f"{kind} as {mine}: {found}" for found in held.differences()]
    return bad


@pytest.mark.parametrize(("world", "every"), [(2, 1), (4, 3), pytest.param(4, 1, marks=pytest.mark.rest)])
def test_stock_dcp_loads_it_into_sharded_modules(root: Path, world: int, every: int) -> None:
    jobs = pairs(KINDS, OF_TORCH if world == 4 else OF_TORCH[:1], every)
    assert run_on_ranks(loads_stock, world, root, jobs) == [[]] * world


def loads_ours(rank: int, root: Path, sources: Sequence[str], kinds: Sequence[str]) -> list[str]:
    emulate()
    bad = []
    for source, kind in itertools.product(sources, kinds):
        held = build(kind, blank=True)
        xla_ckpt.load_checkpoint(
            root, tag_of(source), held.model, held.optimizer, options=xla_ckpt.LoadOptions(timeout=60), **held.options
        )
        bad += [f"{source} as {kind}: {found}" for found in held.differences()]
    return bad


def test_other_ranks_resume_it(root: Path) -> None:
    assert run_on_ranks(loads_ours, 3, root, KINDS, possible("dp=3 zero1", "fsdp2"), xla=HAS_XLA) == [[]] * 3
    assert (
        run_on_ranks(loads_ours, 4, root, KINDS[:3], possible("tp=2,dp=2 zero1", "pp=2,tp=2"), xla=HAS_XLA) == [[]] * 4
    )


def test_it_becomes_one_file_of_torch(root: Path, tmp_path: Path) -> None:
    stock(lambda: dcp_to_torch_save(str(root / "fsdp2"), tmp_path / "one.pt"))
    assert differences(torch.load(tmp_path / "one.pt", weights_only=True), "fsdp2") == []


@pytest.mark.parametrize("kind", possible("tp=2,dp=2 zero1", "tp=4"))
def test_one_file_serves_four_readers(root: Path, kind: str) -> None:
    """PEERS section 0, finding 9: stock dcp.load is above; here are three others."""
    tag = root / tag_of(kind)
    found = {f"model.{n}": torch.full_like(whole(n), -7.0) for n in WHOLE}
    reader = dcp.HuggingFaceStorageReader(str(tag))
    stock(lambda: dcp.load(found, storage_reader=reader, no_dist=True))
    assert [n for n in WHOLE if not torch.equal(found[f"model.{n}"], whole(n))] == []
    parts = {}
    for file in sorted(tag.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            if "model.layers.0.out.weight" in opened.keys():  # noqa: SIM118  # it is no dict
                parts[file.name] = opened.get_tensor("model.layers.0.out.weight")
    assert sum(part.numel() for part in parts.values()) == whole("layers.0.out.weight").numel()
    meta = pickle.loads((tag / ".metadata").read_bytes())
    (index,) = [i for i in meta.storage_data if i.fqn == "model.layers.0.norm.weight"]
    info = meta.storage_data[index]
    text = (tag / info.relative_path).read_bytes()
    assert whole("layers.0.norm.weight").numpy().tobytes() in text[info.offset : info.offset + info.length]


def test_no_save_of_ranks_leaves_a_chunk_twice_or_out(root: Path) -> None:
    for kind in KINDS:
        meta = pickle.loads((root / tag_of(kind) / ".metadata").read_bytes())
        for name, (shape, _, _) in WHOLE.items():
            chunks = meta.state_dict_metadata[f"model.{name}"].chunks
            assert sum(torch.Size(c.sizes).numel() for c in chunks) == torch.Size(shape).numel()
            assert len({tuple(c.offsets) for c in chunks}) == len(chunks)


def saves_on_spmd_devices(root: Path) -> None:
    import numpy as np
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(8), (4, 2), ("a", "b"))
    held = build("dp=1", blank=False)
    for i, p in enumerate(p for p in held.model.parameters() if p.dim() == 2):
        xs.mark_sharding(p, mesh, (("a", None), ("a", "b"), (None, "b"), (("a", "b"), None))[i % 4])
    xla_ckpt.save_checkpoint(root, "spmd", held.model, held.optimizer, layout="dcp", async_save=True).result()


@pytest.mark.xla
def test_spmd_devices_save_what_stock_dcp_loads(tmp_path: Path) -> None:
    run_alone(saves_on_spmd_devices, tmp_path, xla=True, env={"CPU_NUM_DEVICES": "8"})
    found = blank()
    del found["user_content"]
    stock(lambda: dcp.load(found, checkpoint_id=tmp_path / "spmd", no_dist=True))
    assert differences({**found, "user_content": {"kind": "tp=4", "n": (0, None)}}, "tp=4") == []
    assert len(list((tmp_path / "spmd").glob("*-of-00008.safetensors"))) >= 6


def test_values_of_all_kinds_are_items(tmp_path: Path) -> None:
    tied = torch.randn(3)
    content = {
        "plain": [1, 2.5, "a", None, True], "empty": {}, "none": [], "nested": [[1], [2, [3]]], "set": {1, 2},
        "dicts": [{"a": 1}, {"b": torch.ones(2)}], "pair": (torch.zeros(2), "b"), "bytes": b"\0", 3: "three",
        "size": torch.Size([1, 2]), "dtype": torch.float16, "nothing": torch.empty(0, 3), "scalar": torch.tensor(4),
        "strange": torch.ones(2).to(torch.float8_e5m2fnuz),
    }  # fmt: skip
    xla_ckpt.save_checkpoint(tmp_path, "a", {"one": tied, "other": tied}, user_content=content, layout="dcp")
    stock(lambda: dcp_to_torch_save(str(tmp_path / "a"), tmp_path / "one.pt"))
    found = torch.load(tmp_path / "one.pt", weights_only=False)
    assert torch.equal(found["model"]["one"], tied)
    assert torch.equal(found["model"]["other"], tied)
    theirs = found["user_content"]
    for name in ("plain", "none", "nested", "set", "bytes", "size", "dtype"):
        assert theirs[name] == content[name], name
    assert theirs["dicts"][0] == {"a": 1}
    assert torch.equal(theirs["dicts"][1]["b"], torch.ones(2))
    assert torch.equal(theirs["pair"][0], torch.zeros(2))
    assert theirs["pair"][1] == "b"
    assert theirs["3"] == "three"
    assert theirs["nothing"].shape == (0, 3)
    assert int(theirs["scalar"]) == 4
    assert torch.equal(theirs["strange"].view(torch.uint8), content["strange"].view(torch.uint8))
    ours = xla_ckpt.restore(tmp_path, "a").tree["user_content"]
    assert type(ours["pair"]) is tuple
    assert ours["empty"] == {}
    assert ours[3] == "three"


def test_torchtitan_finds_its_keys(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    xla_ckpt.save_checkpoint(
        tmp_path, "step-1", model, optimizer, scheduler, extras={"train_state": {"step": 1}}, layout="torchtitan"
    )
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    held = get_optimizer_state_dict(model, optimizer, options=options)
    empty = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in held.items()}
    names = model.state_dict()
    found = {n: torch.zeros_like(v) for n, v in names.items()}
    found |= {"optimizer": empty, "lr_scheduler": {"last_epoch": -1}, "train_state": {"step": 0}}
    stock(lambda: dcp.load(found, checkpoint_id=tmp_path / "step-1", no_dist=True))
    assert all(torch.equal(found[n], v) for n, v in names.items())
    assert found["lr_scheduler"] == {"last_epoch": 0}
    assert found["train_state"] == {"step": 1}
    assert empty.keys() == held.keys()
    for key, value in held.items():
        assert torch.equal(empty[key], value) if isinstance(value, torch.Tensor) else empty[key] == value, key


def test_two_values_of_one_key_are_refused(tmp_path: Path) -> None:
    content = {"a.b": 1, "a": {"b": torch.ones(1)}}
    with pytest.raises(UnsupportedStateError, match=r"'user_content\.a\.b'"):
        xla_ckpt.save_checkpoint(tmp_path, "a", user_content=content, layout="dcp")
    assert xla_ckpt.list_tags(tmp_path) == []
    xla_ckpt.save_checkpoint(tmp_path, "a", user_content=content, layout=["dcp", "native"])
    assert torch.equal(xla_ckpt.restore(tmp_path, "a").tree["user_content"]["a"]["b"], torch.ones(1))


@pytest.mark.parametrize("file", [".metadata", "objects.distcp", "00001-of-00001.safetensors"])
def test_a_flipped_byte_of_any_file_is_found(tmp_path: Path, file: str) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.randn(9)}, user_content={"n": 1}, layout="dcp")
    path = tmp_path / "a" / file
    for at in range(0, path.stat().st_size, 97):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        report = xla_ckpt.verify(tmp_path, "a")
        assert [error.file for error in report.problems] == [file], at
        data[at] ^= 1
        path.write_bytes(data)
    assert xla_ckpt.verify(tmp_path, "a").ok


def test_a_tag_that_stock_dcp_saved_over_is_not_loaded_as_it_was(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.zeros(3)}, layout="dcp")
    stock(lambda: dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "a", no_dist=True))
    with pytest.raises(CorruptCheckpointError, match=r"remove manifest\.json and commit_success\.txt"):
        xla_ckpt.restore(tmp_path, "a")
    with pytest.raises(CorruptCheckpointError, match=r"remove manifest\.json and commit_success\.txt"):
        stock(lambda: our_dcp.load({"model": {"w": torch.zeros(3)}}, checkpoint_id=tmp_path / "a", no_dist=True))
    os.remove(tmp_path / "a" / "manifest.json")
    os.remove(tmp_path / "a" / "commit_success.txt")
    assert torch.equal(xla_ckpt.restore(tmp_path / "a").tree["model"]["w"], torch.ones(3))


def test_a_tag_of_it_is_found_by_its_own_path(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(3)}, layout="dcp")
    xla_ckpt.save_checkpoint(tmp_path, "b", {"w": torch.zeros(3)}, layout="dcp")
    model = {"w": torch.zeros(3)}
    assert xla_ckpt.load_checkpoint(tmp_path / "a", model=model).report.tag == "a"
    assert torch.equal(model["w"], torch.ones(3))
    assert xla_ckpt.verify(tmp_path / "b").ok
    assert xla_ckpt.list_tags(tmp_path) == ["a", "b"]


def test_a_tag_of_any_layout_is_converted_to_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    xla_ckpt.save_checkpoint(tmp_path / "from", "a", model, optimizer, user_content={"n": 1})
    xla_ckpt.convert(tmp_path / "from", tmp_path / "to", to="dcp", mesh="dp=2")
    assert xla_ckpt.verify(tmp_path / "to", "a").ok
    state = {"model": {k: torch.zeros_like(v) for k, v in model.state_dict().items()}, "user_content": {"n": 0}}
    stock(lambda: dcp.load(state, checkpoint_id=tmp_path / "to" / "a", no_dist=True))
    assert state["user_content"] == {"n": 1}
    assert all(torch.equal(state["model"][k], v) for k, v in model.state_dict().items())
    xla_ckpt.convert(tmp_path / "to", tmp_path / "back", to="native")
    assert torch.equal(xla_ckpt.restore(tmp_path / "back").tree["model"]["weight"], model.weight)


def test_numbers_of_a_stored_optimizer_get_the_names_of_the_program(tmp_path: Path) -> None:
    """What stock DCP stored of `optimizer.state_dict()` becomes what FSDP2's `get_state_dict` asks for."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
    matrices, vectors = ([p for p in model.parameters() if p.dim() == n] for n in (2, 1))
    optimizer = torch.optim.AdamW([{"params": matrices, "lr": 0.5}, {"params": vectors}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    stock(lambda: dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True))
    xla_ckpt.convert(tmp_path / "theirs", tmp_path, to="dcp", as_tag="named", model=model, optimizer=optimizer)
    _, wanted = get_state_dict(model, optimizer)
    names = [name for group in wanted["param_groups"] for name in group["params"]]
    assert names == ["0.weight", "1.weight", "0.bias", "1.bias"]
    found = {
        "state": {n: {k: torch.full_like(v, -7.0) for k, v in s.items()} for n, s in wanted["state"].items()},
        "param_groups": [{"lr": 0.0, "params": []} for _ in wanted["param_groups"]],
    }
    stock(lambda: dcp.load({"optimizer": found}, checkpoint_id=tmp_path / "named", no_dist=True))
    assert all(torch.equal(found["state"][n][k], v) for n, s in wanted["state"].items() for k, v in s.items())
    assert [group["lr"] for group in found["param_groups"]] == [0.5, 0.001]
    assert [group["params"] for group in found["param_groups"]] == [g["params"] for g in wanted["param_groups"]]
    # An order that the shapes contradict is none: the numbers stay.
    other = torch.optim.AdamW([{"params": vectors}, {"params": matrices}])
    xla_ckpt.convert(tmp_path / "theirs", tmp_path, to="dcp", as_tag="numbered", model=model, optimizer=other)
    assert list(xla_ckpt.restore(tmp_path, "numbered").tree["optimizer"]["state"]) == [0, 1, 2, 3]
