"""What the library does over a store, over a file system and over memory alike."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.toy import registered
from tests.formats.writing import as_job, as_kwargs, save_as_job, toy
from tests.jobs import run_on_ranks
from tests.storage.failing import FailingObjects, FailingStore, Faults
from tests.topology.state import differences
from xla_ckpt import Mesh
from xla_ckpt.cli.main import main
from xla_ckpt.formats.tags import open_tag
from xla_ckpt.saving import run as saving_run
from xla_ckpt.storage import resolve
from xla_ckpt.storage.base import Store, read_file
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.storage.remote import RemoteDirectory
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.storage.schemes import SCHEMES
from xla_ckpt.tags.entry import LEASE_NAME, LEDGER_NAME
from xla_ckpt.tags.ledger_root import LedgerRoot
from xla_ckpt.tags.resolve import open_root


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "ckpt") if request.param == "local" else f"memory://{tmp_path.name}/ckpt"


@pytest.fixture(autouse=True)
def npy() -> Iterator[None]:
    with registered():
        yield


def put(root: str, tag: str, value: Any = 0, **options: Any) -> xla_ckpt.SaveHandle:
    tree = {"value": value, "w": torch.full((5000,), float(len(str(value))))}
    handle = xla_ckpt.save(root, tag, tree, **options)
    if not options.get("async_save"):
        xla_ckpt.finalize_checkpoint()  # cleaning goes on after the commit
    return handle


def value(root: str, tag: str | None = None) -> Any:
    return xla_ckpt.restore(root, tag, {"value": None}).tree["value"]


def names(root: str) -> list[str]:
    """All that is in the root when the last save has cleaned up; but for what readers may still need."""
    xla_ckpt.finalize_checkpoint()
    store = open_store(root)
    names = [name for name in store.list_names() if name not in (LEASE_NAME, LEDGER_NAME)]
    if store.object_store is None:
        return names
    ledger = LedgerRoot(store.object_store).read()
    assert not ledger.open, "nobody writes any more"
    attempts = {tag.attempt for tag in ledger.tags.values()}
    stored = {f"{name}/{attempt}" for name in names for attempt in store.list_names(name) if attempt.startswith(".")}
    assert stored == attempts | set(ledger.doomed), "what is stored is known, and what is known is stored"
    return sorted({name for name in names if name in ledger.tags or not name_is_doomed(name, ledger.doomed)})


def name_is_doomed(name: str, doomed: Iterable[str]) -> bool:
    """Whether nothing but attempts that ended make a name."""
    return any(attempt.startswith(f"{name}/") for attempt in doomed)


def flip(root: str, path: str, at: int) -> None:
    """Damage a byte of a file."""
    tag, _, name = path.partition("/")
    store = open_store(root)
    directory = store.open(open_root(store).get_directory_name(tag))
    data = bytearray(read_file(directory, name))
    data[at] ^= 1
    if isinstance(directory, RemoteDirectory):
        directory._client[directory._prefix + name] = bytes(data)
    else:
        Path(root, path).write_bytes(data)
    directory.close()


def files(root: str, tag: str) -> list[str]:
    directory = open_root(open_store(root)).open(tag)
    try:
        return directory.list_files()
    finally:
        directory.close()


def place(root: str, tag: str, leaf: str) -> tuple[str, int]:
    """Path and offset of the first stored box of an array."""
    with open_tag(open_store(root), tag) as reader:
        first = next(iter(reader.manifest.arrays[leaf]))
        return reader.get_file_name(first.file), first.offset


def remove_all(store: Store) -> None:
    changing = store.file_system or store.object_store
    assert changing is not None
    for name in store.list_names():
        if name != LEASE_NAME:
            changing.remove(name)


def state(seed: int) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 6))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return model, optimizer


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return all(
        torch.equal(p, q) and torch.equal(one[1].state[p]["exp_avg"], other[1].state[q]["exp_avg"])
        for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True)
    )


def test_a_root_without_tags(root: str) -> None:
    assert xla_ckpt.list_tags(root) == []
    assert xla_ckpt.latest_tag(root) is None
    assert not xla_ckpt.has_checkpoint(root)
    with pytest.raises(xla_ckpt.NoCheckpointError, match="Nothing lies there"):
        xla_ckpt.restore(root)
    with pytest.raises(xla_ckpt.UsageError):
        xla_ckpt.save(root, "a", {})
    assert not open_store(root).has(""), "a refused save makes nothing"
    open_store(root).prepare()
    empty = "No tag of this library is there" if open_store(root).file_system else "Nothing lies there"
    with pytest.raises(xla_ckpt.NoCheckpointError, match=empty):
        xla_ckpt.restore(root)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("layout", ["native", "xser", "pt", "toy"])
def test_a_training_state(root: str, layout: str, asynchronous: bool) -> None:
    made, again = state(0), state(1)
    report = xla_ckpt.save_checkpoint(
        root, "a", *made, None, {"step": 3}, layout=layout, async_save=asynchronous, extras={"e": {"at": 1}}
    ).result()
    assert (report.tag, report.path) == ("a", root)
    extras: dict[str, Any] = {"e": {}}
    assert xla_ckpt.load_checkpoint(root, None, *again, extras=extras).user_content == {"step": 3}
    assert same(made, again)
    assert (xla_ckpt.list_tags(root), xla_ckpt.latest_tag(root), xla_ckpt.has_checkpoint(root)) == (["a"], "a", True)
    with pytest.raises(xla_ckpt.NoCheckpointError, match="Tags there, oldest first: a"):
        xla_ckpt.restore(root, "b")
    checked = xla_ckpt.verify(root)
    assert (checked.problems, checked.strangers) == ([], [])
    assert names(root) == ["a"]


def test_saves_in_the_background(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), saving_run.write_files

    def held(*args: Any, **kwargs: Any) -> Any:
        assert gate.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr(saving_run, "write_files", held)
    tensor = torch.zeros(1000)
    handle = xla_ckpt.save(root, "a", {"w": tensor}, async_save=True)
    tensor.fill_(7)
    assert (handle.done(), xla_ckpt.list_tags(root)) == (False, [])
    gate.set()
    assert handle.result().sequence == 1
    for n in range(4):
        put(root, f"s{n}", n, async_save=n % 2 == 0)
    assert not xla_ckpt.restore(root, "a").tree["w"].any(), "what the state was when it was saved"
    assert [value(root, f"s{n}") for n in range(4)] == list(range(4))
    assert names(root) == ["a", "s0", "s1", "s2", "s3"]
    assert xla_ckpt.list_tags(root) == ["a", "s0", "s1", "s2", "s3"]


def test_tags_are_replaced(root: str) -> None:
    put(root, "a", 1), put(root, "b", 2)
    reader = open_root(open_store(root)).open("a")
    before = read_file(reader, "manifest.json")
    for n in (3, 4):
        put(root, "a", n)
        assert (xla_ckpt.list_tags(root), value(root, "a"), value(root)) == (["b", "a"], n, n)
    assert read_file(reader, "manifest.json") == before, "the old version, as long as it is read"
    reader.close()
    put(root, "a", 5)
    assert names(root) == ["a", "b"]


def test_retention(root: str) -> None:
    put(root, "first", pinned=True)
    for n in range(4):
        put(root, f"s{n}", n, num_kept_ckpts=2)
    assert xla_ckpt.list_tags(root) == ["first", "s2", "s3"]
    with closing(open_root(open_store(root)).open("s2")) as directory:
        put(root, "s4", 4, num_kept_ckpts=1)
        if open_store(root).file_system:
            assert "s2" in xla_ckpt.list_tags(root), "a tag that is read stays"
            assert value(root, "s2") == 2
        else:
            assert read_file(directory, "manifest.json"), "nobody can tell who reads; its files stay for a while"
    put(root, "s5", 5, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(root) == ["first", "s5"]
    put(root, "first", "still pinned")
    put(root, "s6", 6, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(root) == ["first", "s6"]
    put(root, "first", "no longer pinned", pinned=False, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(root) == ["first"]
    assert names(root) == ["first"]


def test_what_a_killed_save_left_goes_with_the_next_one(tmp_path: Path) -> None:
    root = str(tmp_path)
    put(root, "a", 1)
    store = LocalStore(root)
    store.make_directory(".new-b").close()
    store.rename("a", ".old-a")  # a replacement that was killed half-way
    held = store.make_directory(".new-c")
    assert (xla_ckpt.list_tags(root), value(root, "a")) == (["a"], 1)
    put(root, "d", 2)
    assert names(root) == [".new-c", "a", "d"], "somebody is writing .new-c"
    put(root, "c", 3)  # its draft has another name
    assert (names(root), value(root, "c")) == ([".new-c", "a", "c", "d"], 3)
    held.close()
    put(root, "e")
    assert names(root) == ["a", "c", "d", "e"]


def test_damage_is_found_and_passed_over(root: str) -> None:
    put(root, "good", 1), put(root, "bad", 2)
    (path,) = [name for name in files(root, "bad") if name.endswith(".safetensors")]
    flip(root, f"bad/{path}", 5000)
    report = xla_ckpt.verify(root)
    assert [p.file for p in report.problems] == [path]
    assert xla_ckpt.verify(root, "good").ok
    found = xla_ckpt.restore(root)
    assert (found.report.tag, found.report.corrupt_tags) == ("good", ("bad",))
    with pytest.raises(xla_ckpt.CorruptCheckpointError):
        xla_ckpt.restore(root, "bad")
    flip(root, "good/manifest.json", 5)
    assert not xla_ckpt.verify(root, "good").ok
    assert sorted(xla_ckpt.list_tags(root)) == ["bad", "good"]


@pytest.mark.parametrize("to", ["native", "xser", "pt", "toy"])
def test_conversions(root: str, to: str) -> None:
    made = state(0)
    rules = [("weight", ("tp", None))]
    xla_ckpt.save_checkpoint(f"{root}/a", "a", *made, user_content=[1], shardings=rules)
    xla_ckpt.convert(
        f"{root}/a",
        f"{root}/b",
        to=to,
        mesh="dp=2,tp=2",
        options=xla_ckpt.ConvertOptions(max_memory=64),
        shardings=rules,
    )
    xla_ckpt.convert(f"{root}/b", f"{root}/c")
    for name in ("a", "b", "c"):
        assert xla_ckpt.verify(f"{root}/{name}", "a").ok
        again = state(1)
        assert xla_ckpt.load_checkpoint(f"{root}/{name}", "a", *again).user_content == [1]
        assert same(made, again)
        assert names(f"{root}/{name}") == ["a"]
    with pytest.raises(xla_ckpt.UsageError, match="would replace the old one"):
        xla_ckpt.convert(f"{root}/a", f"{root}/a")
    path, offset = place(f"{root}/b", "a", "model/0.weight")
    flip(f"{root}/b", f"a/{path}", offset + 5)
    with pytest.raises(xla_ckpt.CorruptCheckpointError):
        xla_ckpt.convert(f"{root}/b", f"{root}/d")
    assert names(f"{root}/d") == []


def test_exports(root: str) -> None:
    model, optimizer = state(0)
    xla_ckpt.save_checkpoint(root, "a", model, optimizer)
    report = xla_ckpt.export_hf(root, f"{root}/../hf" if "://" not in root else "memory://hf-test", max_shard_bytes=200)
    store, name = resolve.open_parent(report.path)
    assert len(report.files) > 1
    assert store.list_names(name) == sorted([*report.files, "model.safetensors.index.json"])
    assert not [other for other in store.list_names() if other.endswith(".partial")]
    with pytest.raises(xla_ckpt.UsageError, match="must not exist"):
        xla_ckpt.export_hf(root, report.path)
    changing = store.file_system or store.object_store
    assert changing is not None
    changing.remove(name)


def test_the_commands(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*words: str) -> tuple[int, Any]:
        code = main([*words, "--json"])
        return code, json.loads(capsys.readouterr().out or "null")

    assert ask("ls", root) == (1, None)
    put(root, "a", 1), put(root, "b", 2, layout="toy")
    code, listed = ask("ls", root)
    assert (code, [(t["tag"], t["layout"]) for t in listed["tags"]]) == (0, [("a", "native"), ("b", "toy")])
    code, shown = ask("show", f"{root}/a")
    assert (code, shown["tag"], shown["path"]) == (0, "a", root)
    code, checked = ask("verify", root, "--all")
    assert (code, [c["ok"] for c in checked]) == (0, [True, True])
    assert ask("explain", root, "--mesh", "dp=2")[0] == 0
    assert xla_ckpt.restore(f"{root}/a").report.tag == "a"
    with pytest.raises(xla_ckpt.NoCheckpointError, match=f"without a tag, or pass {root} and the tag a"):
        xla_ckpt.restore(f"{root}/a", "a")


KINDS = [
    ("dp=1", False), ("tp=2", False), ("tp=3", False), ("dp=2", True), ("dp=3", True), ("dp=2,tp=2", False),
    ("dp=2,tp=2", True), ("pp=2", False), ("pp=2,dp=2", True), ("dp=2,cp=2", False),
]  # fmt: skip


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.rest)])
def test_every_topology_resumes_as_every_other(root: str, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a third of the pairs: each topology is among those that saved, and among those that load."""
    for n, (text, zero) in enumerate(KINDS):
        mesh = Mesh.parse(text)
        made = partial(toy, mesh, zero=zero)
        save_as_job(
            monkeypatch, mesh, root, str(n), lambda rank, made=made: as_kwargs(made(rank)),
            layout=("native", "toy")[n % 2], async_save=n % 3 == 0,
        )  # fmt: skip
    for number, (text, zero) in enumerate(KINDS):
        mesh = Mesh.parse(text)
        ranks = [toy(mesh, rank, zero=zero, blank=True) for rank in range(mesh.size)]
        for n in range(number % every, len(KINDS), every):
            load: Callable[[int], Any] = lambda rank, n=n: xla_ckpt.load_checkpoint(root, str(n), *ranks[rank])  # noqa: B023, E731
            as_job(monkeypatch, mesh, "load", load)
            for rank, (model, optimizer) in enumerate(ranks):
                assert differences(optimizer, model.by_name, mesh, rank) == [], (KINDS[n], text, rank)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(-7)
                optimizer.state.clear()
    assert xla_ckpt.list_tags(root) == list(map(str, range(len(KINDS))))


def saves_into_its_own_memory(rank: int) -> str:
    try:
        xla_ckpt.save("memory://ckpt", "a", {"w": torch.ones(2)}, options=xla_ckpt.SaveOptions(timeout=30))
    except xla_ckpt.StorageError as error:
        return f"{error}" if xla_ckpt.list_tags("memory://ckpt") == [] else "something is left"
    return "saved"


def test_processes_that_do_not_share_their_memory_are_told() -> None:
    told = run_on_ranks(saves_into_its_own_memory, 2)
    assert told[0] == told[1]
    assert "opening the directory that rank 0 made" in told[0]


@pytest.fixture
def failing(root: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Faults]:
    """An address of a store that can be told what to refuse."""
    faults = Faults()

    def store(path: str) -> FailingObjects | FailingStore:
        inner = open_store(root + path.removeprefix("failing://ckpt"))
        if inner.object_store is not None:
            return FailingObjects(path, inner.object_store, faults)
        assert inner.file_system is not None
        return FailingStore(inner.path, inner.file_system, faults)  # another process commits in it, by its path

    others = resolve._open_object_store
    monkeypatch.setitem(SCHEMES, "failing", SCHEMES["s3"])
    monkeypatch.setattr(resolve, "_open_object_store", lambda p: store(p) if p.startswith("failing:") else others(p))
    return "failing://ckpt", faults


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "until there is space"])
@pytest.mark.parametrize("tag", ["a", "b"], ids=["replaced", "new"])
@pytest.mark.parametrize("layout", ["native", "toy"])
def test_whatever_a_store_refuses_nothing_is_lost(
    failing: tuple[str, Faults], tag: str, lasts: bool, layout: str
) -> None:
    """A save is refused its first change, then its second, and so on, until none is left that could be refused."""
    root, faults = failing
    put(root, "a", "old")
    held, refused = {"a": "old"}, []
    for at in range(200):
        faults.at, faults.lasts, faults.done, before = at, lasts, 0, len(faults.refused)
        try:
            put(root, tag, f"new {at}", layout=layout, async_save=at % 2 == 0).result()
            held[tag] = f"new {at}"
        except xla_ckpt.StorageError as error:
            facts = error.errno, error.tag
            assert facts == (28, tag)
            refused.append(faults.refused[before])
        for _ in ("at once", "and when all is cleaned up"):
            assert {name: value(root, name) for name in xla_ckpt.list_tags(root)} == held, faults.refused
            assert all(xla_ckpt.verify(root, name).ok for name in held)
            xla_ckpt.finalize_checkpoint()
        if faults.done <= at:
            break
    # An object store makes no directories, moves nothing, and its ledger is written again until it is.
    assert len(set(refused)) >= (8 if open_store(root).file_system else 3), refused
    assert held[tag] == f"new {at}"
    faults.at = None
    put(root, "last", 1)
    assert names(root) == sorted({"a", tag, "last"})


def test_conversions_and_exports_that_are_refused_leave_nothing(failing: tuple[str, Faults], root: str) -> None:
    address, faults = failing
    made = state(0)
    xla_ckpt.save_checkpoint(f"{root}-a", "a", *made)
    for act in (
        lambda: xla_ckpt.convert(f"{root}-a", address, to="toy"),
        lambda: xla_ckpt.export_hf(f"{root}-a", f"{address}/hf"),
    ):
        for at in range(200):
            faults.at, faults.done = at, 0
            try:
                act()
            except xla_ckpt.StorageError as error:
                number, faults.at = error.errno, None
                assert number == 28
                assert names(address) == []
            else:
                refused, faults.at = faults.done > at, None
                assert len(names(address)) == 1
                remove_all(open_store(address))
                if not refused:
                    break
        assert at > (5 if open_store(address).file_system else 2)
