"""One file of torch.save as a source: loaded, restored, converted, shown and verified; nothing in it is run."""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import xla_ckpt
from tests.api.test_convert import CONTENT, RULES, make, state
from tests.core.files.test_torch_file import zero_crc
from tests.formats import dcp_saves
from tests.formats.writing import as_job
from tests.runs import names_in
from tests.same import differences
from xla_ckpt.cli.main import main
from xla_ckpt.core import dtypes
from xla_ckpt.core.files.torch_file import TorchFile
from xla_ckpt.formats.torch_save.pickler import FileTensor, LeafPlaceholder, dump_tree
from xla_ckpt.storage.local_file import LocalFileReader

HYPER = {"lr": 0.25, "weight_decay": 0.5}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.down = torch.nn.Linear(8, 3, bias=False)


def trained(seed: int = 0, steps: int = 2, **options: Any) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), **options)
    for _ in range(steps):
        net.down(net.norm(net.up(torch.randn(5, 4)))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def comes_back(path: Path | str, net: Net, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """Load into another model and optimizer, and compare; what else the load returns."""
    other, its = trained(1, lr=0.5)
    found = xla_ckpt.load_checkpoint(path, model=other, optimizer=its, **options)
    assert not differences(dict(net.state_dict()), dict(other.state_dict()))
    assert not differences(optimizer.state_dict(), its.state_dict(), order=False)
    return found


def fqn(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, states = get_state_dict(net, optimizer)
    return {"model": weights, "optimizer": states}


def of_tutorial(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "epoch": 5, "model_state_dict": net.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "loss": 0.4,
    }  # fmt: skip


def of_lightning(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "epoch": 1, "global_step": 40, "pytorch-lightning_version": "2.4.0", "state_dict": net.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": None}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 2, "_last_lr": [0.25]}],
    }  # fmt: skip


FORMS: dict[str, Callable[[Net, torch.optim.Optimizer], dict[str, Any]]] = {
    "get_state_dict": fqn,
    "tutorial": of_tutorial,
    "lightning": of_lightning,
    "numbers": lambda net, optimizer: {"net": net.state_dict(), "optim": optimizer.state_dict()},
    "state_dict": lambda net, optimizer: {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict()},
    "wrapped": lambda net, optimizer: {
        "model": {f"module.{k}": v for k, v in net.state_dict().items()}, "optimizer": optimizer.state_dict(),
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_what_programs_give_to_torch_save(form: str, tmp_path: Path) -> None:
    net, optimizer = trained(**HYPER)
    torch.save(FORMS[form](net, optimizer), tmp_path / "c.pt")
    found = comes_back(tmp_path / "c.pt", net, optimizer)
    assert (found.report.tag, found.report.path) == ("c.pt", str(tmp_path))
    # By a root directory and a name, and converted, it is the same.
    comes_back(tmp_path, net, optimizer, tag="c.pt")
    report = xla_ckpt.convert(
        tmp_path / "c.pt",
        tmp_path / "run",
        model=net,
        optimizer=optimizer,
        options=xla_ckpt.ConvertOptions(max_memory=100),
    )
    assert (report.tag, xla_ckpt.list_tags(tmp_path / "run")) == ("c", ["c"])
    assert xla_ckpt.verify(tmp_path / "run").ok
    comes_back(tmp_path / "run", net, optimizer)


def test_a_scheduler_under_another_name_is_found_in_extras(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    torch.save(
        {"model": model.state_dict(), "lr_sched": {**scheduler.state_dict(), "last_epoch": 7}}, tmp_path / "c.pt"
    )
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as error:
        xla_ckpt.load_checkpoint(tmp_path / "c.pt", model=model, scheduler=scheduler)
    assert "(extras: lr_sched; extras={'lr_sched': ...} loads one of them into an object)" in str(error.value)
    xla_ckpt.load_checkpoint(tmp_path / "c.pt", model=model, extras={"lr_sched": scheduler})
    assert scheduler.last_epoch == 7


def test_everything_else_is_in_extras(tmp_path: Path) -> None:
    net, optimizer = trained()
    torch.save(of_tutorial(net, optimizer), tmp_path / "c.tar")
    tree = xla_ckpt.restore(tmp_path / "c.tar").tree
    assert list(tree) == ["model", "optimizer", "extras"]
    assert tree["extras"] == {"epoch": 5, "loss": 0.4}
    torch.save(of_lightning(net, optimizer), tmp_path / "l.ckpt")
    tree = xla_ckpt.restore(tmp_path / "l.ckpt").tree
    assert tree["scheduler"] == {"last_epoch": 2, "_last_lr": [0.25]}
    assert {"epoch", "global_step", "loops", "callbacks"} < set(tree["extras"])


def test_a_bare_state_dict(tmp_path: Path) -> None:
    net, _ = trained()
    torch.save(net.state_dict(), tmp_path / "net.pth")
    other, _ = trained(1)
    xla_ckpt.load_checkpoint(tmp_path / "net.pth", model=other)
    assert not differences(dict(net.state_dict()), dict(other.state_dict()))
    xla_ckpt.export_hf(tmp_path / "net.pth", tmp_path / "hf")
    held = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    assert not differences(dict(net.state_dict()), held, order=False)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="optimizer"):
        xla_ckpt.load_checkpoint(tmp_path / "net.pth", model=other, optimizer=torch.optim.AdamW(other.parameters()))


def test_of_several_models_it_is_said_which_they_are(tmp_path: Path) -> None:
    weights = torch.nn.Linear(4, 2).state_dict()
    torch.save({"G": weights, "D": {name: 3 * value for name, value in weights.items()}}, tmp_path / "gan.pt")
    model = torch.nn.Linear(4, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"several models are stored.*: G, D"):
        xla_ckpt.load_checkpoint(tmp_path / "gan.pt", model=model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_any_other_tree_is_as_it_was(tmp_path: Path) -> None:
    tree = {"w": torch.ones(2), "lr": 0.1, "by_number": {1: torch.zeros(3), (2, "b"): "x"}, "list": [torch.ones(1), 2]}
    torch.save(tree, tmp_path / "c.pt")
    assert not differences(tree, xla_ckpt.restore(tmp_path / "c.pt").tree)
    torch.save([torch.ones(2), {"a": torch.zeros(1)}], tmp_path / "list.pt")
    assert not differences([torch.ones(2), {"a": torch.zeros(1)}], xla_ckpt.restore(tmp_path / "list.pt").tree)
    torch.save(torch.arange(4), tmp_path / "tensor.pt")
    assert torch.equal(xla_ckpt.restore(tmp_path / "tensor.pt").tree, torch.arange(4))


@pytest.mark.parametrize("part", [None, "model"])
def test_what_we_wrote(part: str | None, tmp_path: Path) -> None:
    make(tmp_path)
    xla_ckpt.convert(tmp_path, tmp_path / "one.pt", "a", to="torch", part=part)
    wanted = xla_ckpt.restore(tmp_path, "a").tree
    wanted = wanted if part is None else {part: wanted[part]}
    assert not differences(wanted, xla_ckpt.restore(tmp_path / "one.pt").tree)
    xla_ckpt.convert(tmp_path / "one.pt", tmp_path / "two.pt", to="torch")
    again = xla_ckpt.restore(tmp_path / "two.pt").tree
    assert not differences(wanted, again)
    for to, mesh in (("native", "dp=2"), ("xser", "tp=2"), ("pt", "dp=2,tp=2")):
        xla_ckpt.convert(tmp_path / "one.pt", tmp_path / "b", to=to, mesh=mesh, as_tag=to, shardings=RULES)
        assert not differences(wanted, xla_ckpt.restore(tmp_path / "b", to).tree, order=False)
    if part is None:
        model, optimizer = state(1)
        content = xla_ckpt.load_checkpoint(tmp_path / "one.pt", model=model, optimizer=optimizer).user_content
        assert not differences(content, CONTENT)
        assert model.head.weight is model.embed.weight


def test_tensors_of_one_storage_are_shared_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = torch.arange(12.0).reshape(3, 4)
    torch.save({"a.w": w, "b.w": w, "row.w": w[1], "t.w": w.t(), "again.w": w.t()}, tmp_path / "c.pt")
    assert xla_ckpt.convert(tmp_path / "c.pt", tmp_path / "run").nbytes == w.nbytes * 2 + w[1].nbytes
    held = xla_ckpt.restore(tmp_path / "run").tree["model"]
    assert main(["show", str(tmp_path / "c.pt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["aliases"] == {"model/b.w": "model/a.w", "model/again.w": "model/t.w"}
    assert not differences({"a.w": w, "b.w": w, "row.w": w[1], "t.w": w.t(), "again.w": w.t()}, held)


def test_tensors_that_are_not_in_c_order(tmp_path: Path) -> None:
    conv = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    tree = {"conv.w": conv, "t.w": torch.randn(6, 7).t(), "columns.w": torch.randn(5, 9)[:, 2:6],
            "expanded.w": torch.randn(3, 1).expand(3, 4), "good.w": torch.ones(2)}  # fmt: skip
    torch.save(tree, tmp_path / "c.pt")
    held = xla_ckpt.restore(tmp_path / "c.pt").tree["model"]
    assert not differences({k: v.contiguous() for k, v in tree.items()}, held)
    torch.save({"many.w": torch.arange(140_000)[::2], "good.w": torch.ones(2)}, tmp_path / "d.pt")
    assert torch.equal(
        xla_ckpt.restore(tmp_path / "d.pt", like={"model": {"good.w": torch.empty(2)}}).tree["model"]["good.w"],
        torch.ones(2),
    )
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="many.w.*make it contiguous"):
        xla_ckpt.restore(tmp_path / "d.pt")


def test_an_optimizer_that_numbers_its_parameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names are in it, or come from the program; without both they follow from the shapes, if only one order fits."""
    net, optimizer = trained(**HYPER)
    file = tmp_path / "c.pt"
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    names = [name for name, _ in net.named_parameters()]

    def called(**how: Any) -> list[Any]:
        xla_ckpt.convert(file, tmp_path / "out" / f"{len(os.listdir(tmp_path))}.pt", to="torch", **how)
        found = torch.load(max((tmp_path / "out").iterdir(), key=os.path.getmtime), weights_only=True)["optimizer"]
        for f in (tmp_path / "out").iterdir():
            f.unlink()
        names = [name for group in found["param_groups"] for name in group["params"]]
        assert list(found["state"]) == names
        return names

    # The buffers of the norm have the shapes of its parameters, and are known by their names.
    assert called() == names
    assert "numbers its parameters" in caplog.text
    caplog.clear()
    assert called(model=net, optimizer=optimizer) == names
    other = {"norm.weight": "norm.bias", "norm.bias": "norm.weight"}
    order = [other.get(name, name) for name in names]
    swapped = torch.optim.AdamW([net.get_parameter(name) for name in order])
    assert called(model=net, optimizer=swapped) == order
    backwards = torch.optim.AdamW([net.get_parameter(name) for name in reversed(names)])
    assert called(model=net, optimizer=backwards) == names  # the shapes say that it is none of these
    assert "as they were at the save" in caplog.text
    caplog.clear()
    named = torch.optim.AdamW(net.named_parameters(), **HYPER)
    named.load_state_dict(optimizer.state_dict())
    torch.save({"model": net.state_dict(), "optimizer": named.state_dict()}, file)
    assert called() == names
    assert not caplog.records
    two = torch.optim.AdamW([{"params": [net.up.bias, net.norm.weight]}, {"params": [net.norm.bias]}])
    for p in (net.up.bias, net.norm.weight, net.norm.bias):
        two.state[p] = {"exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8), "step": torch.tensor(1.0)}
    torch.save(
        {"model": {k: v for k, v in net.state_dict().items() if v.shape == (8,)}, "optimizer": two.state_dict()}, file
    )
    assert called() == [0, 1, 2]  # several orders fit
    assert "and so does the new tag" in caplog.text


def _grouped(net: torch.nn.Module) -> torch.optim.AdamW:
    """An optimizer that has the last parameter in a group of its own, which comes first."""
    *others, last = net.parameters()
    return torch.optim.AdamW([{"params": [last]}, {"params": others}])


def _moments(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.state[p]["exp_avg"] for name, p in net.named_parameters()}


def test_an_optimizer_with_other_groups_gets_no_moments_of_others(tmp_path: Path) -> None:
    """torch numbers parameters group by group. All of these have one shape, so that each would fit to each."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(3)])
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "c.pt")
    dcp_saves.save(state, tmp_path / "dcp")
    other = _grouped(net)
    xla_ckpt.load_checkpoint(tmp_path / "c.pt", model=net, optimizer=other)  # the order of its model is the only one
    assert differences(_moments(net, other), _moments(net, optimizer)) == []
    refused = _grouped(net)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"in groups of \[3\].*has groups of \[1, 2\]"):
        xla_ckpt.load_checkpoint(tmp_path / "dcp", model=net, optimizer=refused)
    assert not refused.state
    xla_ckpt.load_checkpoint(tmp_path / "dcp", model=net, optimizer=refused, strict=False)
    assert not refused.state
    xla_ckpt.convert(tmp_path / "dcp", tmp_path / "named", model=net, optimizer=optimizer)
    xla_ckpt.load_checkpoint(tmp_path / "named", model=net, optimizer=refused)
    assert differences(_moments(net, refused), _moments(net, optimizer)) == []


class Hostile:
    ran = False

    def __reduce__(self) -> Any:
        return run_it, ()


def run_it() -> Any:
    Hostile.ran = True
    return {"it": "ran"}


class Mine:
    def __init__(self) -> None:
        self.at, self.own, self.shared = 4, torch.arange(3.0), SHARED


SHARED = torch.arange(2.0)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch's own, about quantized tensors
def test_objects_are_made_with_trust_only(tmp_path: Path) -> None:
    net, optimizer = trained(**HYPER)
    mine = Mine()
    mine.shared = net.up.weight.detach()
    tree = of_tutorial(net, optimizer) | {
        "args": argparse.Namespace(lr=0.1, deep={"mine": mine}), "hostile": [1, Hostile()], "kinds": {Mine: 1},
        "sets": {Mine}, "odd": collections.defaultdict(Mine, {1: 2}), "text": np.array(["a", "b"]),
        "q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "sparse": torch.eye(3).to_sparse(),
    }  # fmt: skip
    torch.save(tree, tmp_path / "c.pt")
    comes_back(tmp_path / "c.pt", net, optimizer)  # who wants none of them needs no trust
    assert main(["show", str(tmp_path / "c.pt")]) == 0
    assert xla_ckpt.verify(tmp_path / "c.pt").ok
    for leaf in ("args", "hostile", "kinds", "sets", "odd", "text"):
        with pytest.raises(xla_ckpt.UntrustedObjectError, match="trust_pickle=True"):
            xla_ckpt.restore(tmp_path / "c.pt", like={"extras": {leaf: None}})
    assert not Hostile.ran
    held = xla_ckpt.restore(tmp_path / "c.pt", trust_pickle=True).tree["extras"]
    assert Hostile.ran
    Hostile.ran = False
    assert held["hostile"] == [1, {"it": "ran"}]
    found = held["args"].deep["mine"]
    assert (held["args"].lr, found.at, found.own.tolist()) == (0.1, 4, [0.0, 1.0, 2.0])
    assert (held["kinds"], held["sets"], held["odd"], held["text"].tolist()) == ({Mine: 1}, {Mine}, {1: 2}, ["a", "b"])
    assert torch.equal(held["q"].dequantize(), tree["q"].dequantize())
    assert torch.equal(held["sparse"].to_dense(), torch.eye(3))


def test_generators_and_other_plain_values(tmp_path: Path) -> None:
    values = {
        "numpy": np.random.get_state(), "python": random.getstate(), "torch": torch.get_rng_state(),
        "table": np.arange(6, dtype=np.int16).reshape(2, 3).T, "path": Path("/a"), "size": torch.Size([2]),
        "ordered": collections.OrderedDict(b=1, a=2), "deque": collections.deque([torch.ones(1), 2], 5),
        "counter": collections.Counter("aab"), "set": {1, (2, 3)},
    }  # fmt: skip
    torch.save({"model": {"w": torch.ones(2)}, "more": values}, tmp_path / "c.pt")
    held = xla_ckpt.restore(tmp_path / "c.pt").tree["extras"]["more"]
    assert held["numpy"][1].tolist() == values["numpy"][1].tolist()
    assert (held["python"], held["path"], held["size"], held["counter"], held["set"]) == tuple(
        values[k] for k in ("python", "path", "size", "counter", "set")
    )
    assert torch.equal(held["torch"], values["torch"])
    assert (held["table"].dtype, held["table"].tolist()) == (np.dtype(np.int16), values["table"].tolist())
    assert list(held["ordered"].items()) == [("b", 1), ("a", 2)]
    assert (type(held["ordered"]), held["deque"].maxlen, held["deque"][1]) == (collections.OrderedDict, 5, 2)


def saved(tmp_path: Path) -> tuple[Path, bytes]:
    net, optimizer = trained(**HYPER)
    torch.save(of_tutorial(net, optimizer), tmp_path / "c.pt")
    return tmp_path / "c.pt", (tmp_path / "c.pt").read_bytes()


def place_of(file: Path, name: str) -> int:
    """Where the bytes of a record begin."""
    with zipfile.ZipFile(file) as archive:
        info = archive.getinfo(name)
        head = file.read_bytes()[info.header_offset : info.header_offset + 30]
        return info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")


def test_every_flipped_byte_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    file, data = saved(tmp_path)
    with zipfile.ZipFile(file) as archive:
        keys = [name for name in archive.namelist() if "/data/" in name and archive.getinfo(name).file_size > 30]
    for name in (*keys[:2], keys[-1], "c/data.pkl"):
        broken = bytearray(data)
        broken[place_of(file, name) + 9] ^= 4
        file.write_bytes(broken)
        net, optimizer = trained(1)
        before = {k: v.clone() for k, v in net.state_dict().items()}
        for act in (
            lambda: xla_ckpt.load_checkpoint(file, model=net, optimizer=optimizer),
            lambda: xla_ckpt.restore(file),
            lambda: xla_ckpt.convert(file, tmp_path / "run"),
            lambda: xla_ckpt.convert(file, tmp_path / "new.pt", to="torch"),
        ):
            with pytest.raises(xla_ckpt.CorruptCheckpointError, match="CRC-32") as caught:
                act()
            assert caught.value.file == "c.pt"
        assert not differences(before, dict(net.state_dict()))
        report = xla_ckpt.verify(file)
        assert not report.ok
        assert report.problems[0].file == "c.pt"
        assert main(["verify", str(file)]) == 1
        file.write_bytes(data)
    assert names_in(tmp_path) == ["c.pt"]
    assert xla_ckpt.list_tags(tmp_path / "run") == []


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_file_without_a_zip_is_not_damaged(tmp_path: Path, protocol: int, capsys: pytest.CaptureFixture[str]) -> None:
    """It was said to be damaged, and to be older than what had written it."""
    file, content = tmp_path / "c.pt", {"w": torch.ones(2)}
    torch.save(content, file, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    with pytest.raises(xla_ckpt.UnsupportedStateError, match=r"without torch's zip format.*torch\.load.*save it anew"):
        xla_ckpt.load_checkpoint(file, model=content)
    assert [type(problem) for problem in xla_ckpt.verify(file).problems] == [xla_ckpt.UnsupportedStateError]
    assert main(["verify", str(file)]) == 1
    out = capsys.readouterr().out
    assert "COULD NOT BE READ" in out
    assert "DAMAGED" not in out
    torch.save(torch.load(file, weights_only=False), file)  # as it says
    assert xla_ckpt.verify(file).ok


def test_cut_off_and_other_files(tmp_path: Path) -> None:
    file, data = saved(tmp_path)
    for size in (0, 1, 40, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(xla_ckpt.CorruptCheckpointError) as caught:
            xla_ckpt.restore(file)
        assert caught.value.file == "c.pt"
        assert not xla_ckpt.verify(file).ok
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme.txt", "no checkpoint")
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="none of torch.save's"):
        xla_ckpt.restore(file)
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(xla_ckpt.UsageError, match=r"this is a file, and no checkpoint by itself.*Pass the root"):
        xla_ckpt.restore(tmp_path / "note.txt")


def test_a_file_without_checksums(tmp_path: Path) -> None:
    net, optimizer = trained(**HYPER)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(of_tutorial(net, optimizer), tmp_path / "c.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    comes_back(tmp_path / "c.pt", net, optimizer)
    assert xla_ckpt.verify(tmp_path / "c.pt").ok


def test_any_name_and_links_and_memory(tmp_path: Path) -> None:
    net, optimizer = trained(**HYPER)
    torch.save(of_tutorial(net, optimizer), tmp_path / "blob")
    comes_back(tmp_path / "blob", net, optimizer)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/pytorch_model.bin").symlink_to(tmp_path / "blob")
    comes_back(tmp_path / "cache/pytorch_model.bin", net, optimizer)
    xla_ckpt.convert(tmp_path / "blob", f"memory://{tmp_path.name}/c.pt", to="torch")
    comes_back(f"memory://{tmp_path.name}/c.pt", net, optimizer)
    assert xla_ckpt.verify(f"memory://{tmp_path.name}/c.pt").ok


def test_no_tensor_is_read_to_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"model": {f"w{i}": torch.zeros(1 << 18) for i in range(8)}}, tmp_path / "c.pt")
    counts: list[int] = []
    read = LocalFileReader.read_into

    def counting(self: Any, buffer: memoryview, offset: int) -> int:
        counts.append(len(buffer))
        return read(self, buffer, offset)

    monkeypatch.setattr(LocalFileReader, "read_into", counting)
    assert xla_ckpt.explain(tmp_path / "c.pt", mesh="dp=2").ok
    assert main(["show", str(tmp_path / "c.pt"), "--json"]) == 0
    assert sum(counts) < 1 << 20
    counts.clear()
    xla_ckpt.restore(tmp_path / "c.pt", like={"model": {"w3": torch.empty(1 << 18)}})
    assert sum(counts) < 3 << 20  # once to compare it with its CRC-32, and once to take it


def test_a_tensor_behind_four_gib(tmp_path: Path) -> None:
    sizes = [5 << 30, 64]
    kind = dtypes.get_dtype("uint8")
    pickled = dump_tree({"model": {f"w{i}": LeafPlaceholder(str(i)) for i in range(2)}}, "",
                    lambda leaf: FileTensor(int(leaf), kind, (sizes[int(leaf)],)))  # fmt: skip
    codec = TorchFile(archive_name="archive", pickled=pickled, storages=tuple((n,) for n in sizes))
    file = tmp_path / "c.pt"
    file.touch()
    os.truncate(file, codec.size)
    with file.open("r+b") as out:
        for at, text in codec.build_framing([], [zero_crc(n) for n in sizes]):
            out.seek(at)
            out.write(text)
    got = xla_ckpt.restore(file, like={"model": {"w1": torch.ones(64, dtype=torch.uint8)}}).tree["model"]["w1"]
    assert not got.any()
    with file.open("r+b") as out:
        out.seek(codec.region_ranges[1][0] + 5)
        out.write(b"\1")
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="data/1 is not what its CRC-32 says"):
        xla_ckpt.restore(file, like={"model": {"w1": torch.ones(64, dtype=torch.uint8)}})


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, _ = saved(tmp_path)
    assert main(["ls", str(file)]) == 0
    assert "c.pt" in capsys.readouterr().out
    assert main(["show", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["layout"], facts["files"]) == ("torch", [{"path": "c.pt", "size": file.stat().st_size}])
    assert main(["show", str(file), "--leaf", "model/*"]) == 0
    assert "model/up.weight" in capsys.readouterr().out
    assert main(["verify", str(file)]) == 0
    assert "all files as they say themselves" in capsys.readouterr().out
    assert main(["explain", str(file), "--mesh", "dp=2"]) == 0
    for to in ("native", "dcp", "torchtitan", "xser", "safetensors", "torch"):
        where = str(tmp_path / (f"{to}.pt" if to == "torch" else to))
        assert main(["convert", str(file), where, "--to", to]) == 0, capsys.readouterr().err
    assert main(["export", str(file), str(tmp_path / "hf")]) == 0
    assert main(["convert", str(file), str(tmp_path / "native"), "--to", "native"]) == 2
    assert "--as" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none.pt"), str(tmp_path / "x"), "--to", "native"]) == 1
    assert "Nothing lies there" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.15
def test_reading_without_a_program_gives_what_torch_load_gives(tmp_path: Path) -> None:
    file, data = saved(tmp_path)
    theirs = torch.load(io.BytesIO(data), weights_only=True)
    tree = xla_ckpt.restore(file).tree
    assert not differences(theirs["model_state_dict"], tree["model"])
    states = dict(zip(tree["optimizer"]["state"], theirs["optimizer_state_dict"]["state"].values(), strict=True))
    assert not differences(states, tree["optimizer"]["state"])


def test_ranks_load_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = trained(**HYPER)
    torch.save(of_tutorial(net, optimizer), tmp_path / "c.pt")
    rules = [("up.weight", ("tp", None)), ("down.weight", (None, "tp"))]

    def of_rank(rank: int) -> Any:
        like = {"model": {"up.weight": torch.empty(4, 4), "down.weight": torch.empty(3, 4)}}
        return xla_ckpt.restore(tmp_path / "c.pt", like=like, shardings=rules).tree["model"]

    for rank, got in enumerate(as_job(monkeypatch, xla_ckpt.Mesh(tp=2), "load", of_rank)):
        assert torch.equal(got["up.weight"], net.up.weight.chunk(2, 0)[rank])
        assert torch.equal(got["down.weight"], net.down.weight.chunk(2, 1)[rank])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_as_torchs_own_converters_do(tmp_path: Path) -> None:
    """A directory of torch.distributed.checkpoint to a file and back, by torch and by this library."""
    net, optimizer = trained(**HYPER)
    dcp.save(fqn(net, optimizer), checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "theirs.pt")
    xla_ckpt.convert(tmp_path / "dcp", tmp_path / "ours.pt", to="torch")
    theirs, ours = (torch.load(tmp_path / f"{who}.pt", weights_only=True) for who in ("theirs", "ours"))
    assert not differences(theirs, ours, order=False)
    comes_back(tmp_path / "theirs.pt", net, optimizer)
    torch_save_to_dcp(tmp_path / "ours.pt", tmp_path / "back")
    comes_back(tmp_path / "back", net, optimizer)
