"""How many requests each call takes, and how many bytes a load reads, as the server counts them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

import xla_ckpt
from tests.buckets.s3_server import Request, S3Server
from tests.buckets.test_saves_and_loads import model_and_optimizer
from tests.jobs import run_on_ranks
from xla_ckpt.cli.main import main
from xla_ckpt.core.plan.restore_plan import ReadRequest, plan_restore
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.formats.tags import open_tag
from xla_ckpt.loading.read import read_into
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags import lease
from xla_ckpt.tags.resolve import open_root

MIB = 1024 * 1024


def kind_of(request: Request) -> str:
    """What a request is for."""
    path, _, query = request.path.partition("?")
    name = path.rpartition("/")[2]
    if "list-type" in query:
        return "LIST"
    if name in (".ledger", ".lease", "manifest.json", "report.json"):
        return f"{request.method} {name}"
    return f"{request.method} file"


def kinds(s3: S3Server) -> dict[str, int]:
    """The requests since the last call, by what they are for."""
    found = sorted(kind_of(request) for request in s3.requests)
    s3.requests.clear()
    return {kind: len(list(some)) for kind, some in itertools.groupby(found)}


def ranges(s3: S3Server) -> Iterator[tuple[str, int, int]]:
    """(file, first byte, last byte) of all that was read of payload files."""
    for request in s3.requests:
        if kind_of(request) == "GET file":
            first, last = request.headers["range"].removeprefix("bytes=").split("-")
            yield request.path, int(first), int(last)


def bytes_read(s3: S3Server) -> int:
    return sum(last + 1 - first for _, first, last in ranges(s3))


@pytest.fixture
def saved(root: str, s3: S3Server) -> str:
    """A root with four tags, the first of which is none any more. Nothing of it is asked any more."""
    model, optimizer = model_and_optimizer()
    for step in range(5):
        with torch.no_grad():
            model[0].bias += 1  # type: ignore[operator, union-attr]
        xla_ckpt.save_checkpoint(root, f"step_{step}", model, optimizer, num_kept_ckpts=4)
    settle(s3)
    return root


def settle(s3: S3Server) -> None:
    """Have what saves do after their commits be over, and forget all requests."""
    xla_ckpt.finalize_checkpoint()
    s3.requests.clear()


@pytest.fixture(autouse=True)
def without_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease says that this process runs while requests are counted."""
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 1000.0)
    lease.LEASES.release_all()


def test_a_load_asks_for_the_ledger_the_manifest_and_its_ranges(saved: str, s3: S3Server) -> None:
    model, optimizer = model_and_optimizer()
    xla_ckpt.load_checkpoint(saved, model=model, optimizer=optimizer)
    assert kinds(s3) == {"GET .ledger": 1, "GET manifest.json": 1, "LIST": 1, "GET file": 2}
    xla_ckpt.load_checkpoint(saved, "step_2", model=model, optimizer=optimizer)
    assert kinds(s3) == {"GET .ledger": 1, "GET manifest.json": 1, "GET file": 2}
    xla_ckpt.restore(f"{saved}/step_2")
    assert kinds(s3) == {"GET .ledger": 3, "GET manifest.json": 1, "GET file": 2}, "the tag's, the root's, and again"


def loads(rank: int, root: str, tag: str | None, environ: dict[str, str]) -> float:
    import os

    os.environ.update(environ)
    return float(xla_ckpt.restore(root, tag, mesh=xla_ckpt.Mesh(dp=2)).tree["w"].sum())


@pytest.mark.parametrize(
    ("tag", "others"), [(None, {"GET .ledger": 4, "LIST": 1}), ("a", {"GET .ledger": 2})], ids=["newest", "named"]
)
def test_each_rank_of_a_job_asks_for_the_ledger_and_the_manifest(
    tag: str | None, others: dict[str, int], root: str, s3: S3Server
) -> None:
    """For the newest tag twice for the ledger: whether this is a root at all, and what is there when all have met."""
    xla_ckpt.save(root, "a", {"w": torch.ones(4)})
    settle(s3)
    assert run_on_ranks(loads, 2, root, tag, s3.environment) == [4.0, 4.0]
    assert kinds(s3) == {"GET manifest.json": 2, "GET file": 2, **others}


def test_a_listing_asks_for_the_ledger_and_the_names(
    saved: str, s3: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert xla_ckpt.list_tags(saved) == ["step_1", "step_2", "step_3", "step_4"]
    assert kinds(s3) == {"GET .ledger": 1, "LIST": 1}
    assert xla_ckpt.has_checkpoint(saved)
    assert kinds(s3) == {"GET .ledger": 1, "LIST": 1}
    assert main(["ls", saved]) == 0
    assert "step_4" in capsys.readouterr().out
    assert kinds(s3) == {"GET .ledger": 2, "LIST": 1, "GET manifest.json": 4}, "sizes and ranks are in the manifests"


def test_a_stranger_among_the_tags_is_all_that_is_asked_about(saved: str, s3: S3Server) -> None:
    xla_ckpt.list_tags(saved)
    ours = len(s3.requests)
    xla_ckpt.save(f"{saved}/below", "a", {"w": torch.ones(3)})
    settle(s3)
    assert xla_ckpt.list_tags(saved) == ["step_1", "step_2", "step_3", "step_4"]
    of_tags = [request.path for request in s3.requests[ours:] if "step_" in request.path]
    assert of_tags == []


def put_dcp_tags(root: str, tags: int, files: int) -> list[str]:
    """Put directories of stock DCP into the server's memory, each with metadata and files of ranks; their names."""
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    bucket, _, run = root.removeprefix("s3://").partition("/")
    names = [f"step-{10 * number}" for number in range(1, tags + 1)]
    for name in names:
        for file in (".metadata", *(f"__{rank}_0.distcp" for rank in range(files - 1))):
            backend.put_object(bucket, f"{run}/{name}/{file}", b"stock")
    return names


@pytest.mark.parametrize(("tags", "files"), [(160, 2), (160, 9), (3, 1100)])
def test_the_newest_tag_of_stock_dcp_takes_a_few_requests(tags: int, files: int, root: str, s3: S3Server) -> None:
    names = put_dcp_tags(root, tags, files)
    for read, expected in (
        (xla_ckpt.list_tags, names),
        (xla_ckpt.has_checkpoint, True),
        (xla_ckpt.latest_tag, names[-1]),
    ):
        s3.forget()
        assert read(root) == expected
        assert len(s3.requests) <= (min(20, 4 + 2 * tags) if read is xla_ckpt.list_tags else 20)


def test_a_listing_in_pages_answers_as_requests_for_each_file_do(root: str, s3: S3Server) -> None:
    (small, *_), (large, *_) = put_dcp_tags(root, 1, 3), put_dcp_tags(f"{root}/in", 1, 1100)
    for name, data in {f"{small}/empty": b"", f"{small}-b/file": b"1", f"{small}/nested/file": b"2", "z": b"3"}.items():
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(*f"{root}/{name}".removeprefix("s3://").split("/", 1), data)
    store, look = open_store(root), open_store(root).snapshot_view()
    below = [".metadata", "__1_0.distcp", "empty", "nested", "nested/file", "none", "__1_0.distcp/none", "n", ""]
    paths = [
        f"{name}/{path}".rstrip("/") for name in (small, f"{small}-b", "in", f"in/{large}", "z", "no") for path in below
    ]
    for path in paths:
        for question in ("has", "is_directory", "list_names"):
            assert getattr(look, question)(path) == getattr(store, question)(path), (question, path)
        assert (look.get_modified_time(path) is None) == (store.get_modified_time(path) is None), path


def test_a_save_asks_for_nothing_twice(saved: str, s3: S3Server) -> None:
    model, optimizer = model_and_optimizer()
    xla_ckpt.save_checkpoint(saved, "new", model, optimizer)
    xla_ckpt.finalize_checkpoint()
    found = kinds(s3)
    own = {"PUT file": 2, "PUT manifest.json": 1, "PUT report.json": 1, "PUT .ledger": 2}
    # The start of the manifest says to the ledger what the tag is; the pin of a tag that is replaced is looked up late.
    # The list is for checkpoints of other libraries, which a tag of the same name would hide.
    assert found == {**own, "GET .lease": 1, "GET .ledger": 2, "GET manifest.json": 1, "LIST": 1}


def test_a_file_in_parts_takes_two_requests_more_than_it_has_parts(saved: str, s3: S3Server) -> None:
    xla_ckpt.save(saved, "large", {"w": torch.zeros(10_000_000), "v": torch.ones(3)})
    xla_ckpt.finalize_checkpoint()
    parts = [request for request in s3.requests if "partNumber" in request.path]
    assert len(parts) == 3
    assert kinds(s3)["PUT file"] == 3
    assert len([request for request in s3.requests if request.method == "HEAD"]) == 0


def test_verify_reads_each_byte_once_and_looks_for_nothing(saved: str, s3: S3Server) -> None:
    report = xla_ckpt.verify(saved, "step_3")
    assert report.ok
    read = sorted(ranges(s3))
    assert all(one[0] != two[0] or one[2] < two[1] for one, two in itertools.pairwise(read)), "a byte is read twice"
    assert kinds(s3) == {"GET .ledger": 1, "GET manifest.json": 1, "LIST": 1, "GET file": 4}, "headers, and the rest"


def test_a_load_of_the_model_alone_reads_little_else(root: str, s3: S3Server) -> None:
    model, optimizer = model_and_optimizer(1000)
    xla_ckpt.save_checkpoint(root, "a", model, optimizer)
    settle(s3)
    report = xla_ckpt.load_checkpoint(root, model=model).report
    assert report.needed_bytes == sum(value.nbytes for value in model.state_dict().values())
    assert bytes_read(s3) <= 1.1 * report.needed_bytes
    assert not [request for request in s3.requests if request.method == "HEAD"]


def test_many_small_arrays_come_in_a_few_requests(root: str, s3: S3Server) -> None:
    state = {f"w{n}": torch.full((256,), float(n)) for n in range(20_000)}
    xla_ckpt.save(root, "a", state)
    settle(s3)
    tree = xla_ckpt.restore(root, "a").tree
    assert torch.equal(tree["w19999"], state["w19999"])
    assert kinds(s3)["GET file"] <= 4


def test_a_block_of_rows_of_each_array_reads_little_else(root: str, s3: S3Server) -> None:
    """What a rank of a larger job reads."""
    state = {f"w{n}": torch.full((2048, 1024), float(n)) for n in range(4)}
    xla_ckpt.save(root, "a", state)
    settle(s3)
    rows = Box((512, 0), (1024, 1024))
    with open_tag(open_store(root), "a") as reader:
        slots = [memoryview(bytearray(rows.size * 4)) for _ in state]
        wants = [ReadRequest(leaf, rows, slot) for slot, leaf in enumerate(reader.manifest.arrays)]
        read_into(reader, plan_restore(reader.manifest, wants), slots)
    assert [bytes(slot[:4]) for slot in slots] == [state[leaf].numpy().tobytes()[:4] for leaf in reader.manifest.arrays]
    assert bytes_read(s3) <= 1.1 * sum(map(len, slots))


def test_what_is_overwritten_in_place_comes_once(root: str, s3: S3Server) -> None:
    state = {"large": torch.arange(1_500_000, dtype=torch.float32), "small": torch.ones(3)}
    xla_ckpt.save(root, "a", state)
    settle(s3)
    model = {name: torch.zeros_like(value) for name, value in state.items()}
    loaded = xla_ckpt.restore(root, "a", like=model).tree
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert bytes_read(s3) <= 1.1 * sum(value.nbytes for value in state.values())


def test_a_look_that_is_older_than_the_tag_finds_the_newer_version(root: str) -> None:
    xla_ckpt.save(root, "a", {"w": torch.zeros(3)})
    look = open_store(root).snapshot_view()
    assert list_of(look) == ["a"]
    for number in range(1, 5):
        xla_ckpt.save(root, "a", {"w": torch.full((3,), float(number))})
    xla_ckpt.finalize_checkpoint()
    with pytest.raises(FileNotFoundError):
        look.read_start(
            f"{open_root(look).get_directory_name('a')}/manifest.json", 1
        )  # what the look has seen is swept
    assert list_of(look) == ["a"]
    with open_tag(look, "a") as reader:
        assert reader.manifest.header.sequence == 5
    xla_ckpt.save(root, "b", {"w": torch.zeros(3)})
    assert list_of(look) == ["a"], "a look sees one state"
    assert list_of(look.snapshot_view()) == ["a", "b"]


def list_of(store: Store) -> list[str]:
    return [entry.tag for entry in open_root(store).list_entries()]


def test_a_tag_whose_files_somebody_has_deleted_is_damaged(root: str) -> None:
    for tag in "ab":
        xla_ckpt.save(root, tag, {"w": torch.full((3,), float(ord(tag)))})
    store = open_store(root)
    assert store.object_store is not None
    store.object_store.remove(open_root(store).get_directory_name("b"))
    with pytest.raises(CorruptCheckpointError, match="the tag has no files"):
        xla_ckpt.restore(root, "b")
    restored = xla_ckpt.restore(root)
    assert restored.report.tag == "a"
    assert restored.report.corrupt_tags == ("b",)
