"""Local first, where each host has a disk of its own: hosts are played by directories, two processes see each."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.buckets.s3_server import S3Server
from tests.buckets.uploads import SOON, Gate, listed, puts
from tests.jobs import finish, run_on_ranks, start_on_ranks
from xla_ckpt import LoadOptions, SaveOptions
from xla_ckpt.cli.main import main
from xla_ckpt.errors import RankFailedError, StorageError, UsageError
from xla_ckpt.features.local_first import upload
from xla_ckpt.features.local_first.root import LocalFirstRoot
from xla_ckpt.features.local_first.upload import UPLOADS, Uploader
from xla_ckpt.tags.root import Transaction

pytestmark = pytest.mark.usefixtures("own_uploads")

RULES = [("w", ("tp",))]


def tree(rank: int, number: int) -> dict[str, torch.Tensor]:
    """A quarter of an array, of which each rank writes one, and a replica, which one of them writes for all."""
    return {"w": torch.full((100,), 10.0 * number + rank), "v": torch.full((5,), float(number))}


def whole(number: int, ranks: int = 4) -> list[float]:
    return [10.0 * number + rank for rank in range(ranks) for _ in range(100)]


def prepared(rank: int, hosts: list[Path], environ: dict[str, str]) -> Path:
    """The directory of this rank's host; each has two ranks."""
    os.environ.update(environ, XLA_CKPT_LEASE="take")
    return hosts[rank // 2]


def saved(rank: int, root: str, local: Path, number: int, **more: Any) -> xla_ckpt.SaveHandle:
    mesh = xla_ckpt.Mesh(tp=torch.distributed.get_world_size())
    options = SaveOptions(local=local, **more)
    return xla_ckpt.save(root, f"t{number}", tree(rank, number), mesh=mesh, shardings=RULES, options=options)


def loaded(root: str, local: Path) -> tuple[str, list[float], str]:
    """The newest tag, as every rank has it whole, and from which place it was taken."""
    mesh = xla_ckpt.Mesh(dp=torch.distributed.get_world_size())
    restored = xla_ckpt.restore(root, mesh=mesh, options=LoadOptions(local=local))
    return restored.report.tag, restored.tree["w"].tolist(), restored.report.path


def saves_and_loads(rank: int, root: str, hosts: list[Path], environ: dict[str, str]) -> Any:
    local = prepared(rank, hosts, environ)
    for number in (1, 2):
        saved(rank, root, local, number).uploaded(SOON)
    xla_ckpt.finalize_checkpoint()
    return loaded(root, local), [rank for rank in range(4) if list((local / "t2").rglob(name(rank)))]


def name(rank: int, world: int = 4) -> str:
    return f"{rank + 1:05}-of-{world:05}.safetensors"


def test_a_tag_of_two_disks_is_whole_in_the_bucket(root: str, tmp_path: Path, s3: S3Server) -> None:
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    told = run_on_ranks(saves_and_loads, 4, root, hosts, s3.environment)
    assert [of_rank[0] for of_rank in told] == [("t2", whole(2), root)] * 4
    assert [of_rank[1] for of_rank in told] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert xla_ckpt.list_tags(root) == ["t1", "t2"]
    assert xla_ckpt.verify(root).ok
    assert set(puts(s3).values()) == {1}, "nothing is sent twice"
    assert all("upload.json" not in path for path in puts(s3))
    restored = xla_ckpt.restore(root, options=LoadOptions(local=hosts[0]))
    assert restored.tree["w"].tolist() == whole(2), "one process, and a disk with half of the tag"


def loads(rank: int, root: str, hosts: list[Path], environ: dict[str, str]) -> Any:
    return loaded(root, prepared(rank, hosts, environ))


def test_a_load_asks_the_bucket_only_for_what_its_disk_lacks(root: str, tmp_path: Path, s3: S3Server) -> None:
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    run_on_ranks(saves_and_loads, 4, root, hosts, s3.environment)
    s3.requests.clear()
    assert run_on_ranks(loads, 4, root, hosts, s3.environment) == [("t2", whole(2), root)] * 4
    asked = [r.path for r in s3.requests if r.method == "GET" and ".safetensors" in r.path]
    counts = [sum(name(rank) in path for path in asked) for rank in range(4)]
    each_of_two = [count // 2 for count in counts]
    assert counts == [2 * count for count in each_of_two], "two ranks ask for it, and those of its host do not"
    (damaged,) = (hosts[0] / "t2").rglob(name(0))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert run_on_ranks(loads, 4, root, hosts, s3.environment) == [("t2", whole(2), root)] * 4


def saves_and_waits(rank: int, root: str, hosts: list[Path], environ: dict[str, str]) -> None:
    local = prepared(rank, hosts, environ)
    saved(rank, root, local, 1).uploaded(SOON)
    saved(rank, root, local, 2).uploaded(SOON)


@pytest.fixture
def killed(root: str, tmp_path: Path, s3: S3Server, gate: Callable[..., Gate]) -> list[Path]:
    """A job on two hosts was killed when t1 was in the bucket, and t2 on its way; the directories of its hosts."""
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    first = gate(name(3))
    ranks = start_on_ranks(saves_and_waits, 4, root, hosts, s3.environment)
    assert first.reached.wait(SOON)
    second = gate(name(3))
    first.go.set()
    assert second.reached.wait(SOON)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    finish(ranks)
    s3.faults.clear()
    second.go.set()
    assert xla_ckpt.list_tags(root) == ["t1"]
    assert all((host / "t2").is_dir() for host in hosts)
    return hosts


def test_hosts_that_come_back_in_another_order_go_on(root: str, s3: S3Server, killed: list[Path]) -> None:
    sent_before = puts(s3)
    told = run_on_ranks(loads, 4, root, killed[::-1], s3.environment)
    assert told == [("t2", whole(2), root)] * 4
    assert xla_ckpt.list_tags(root) == ["t1", "t2"]
    assert xla_ckpt.verify(root).ok
    assert all(count <= 2 for count in puts(s3).values())
    again = [path for path, count in puts(s3).items() if count > 1]
    assert all(name(3) in path for path in again), "what had not arrived is sent once more"
    assert sent_before.keys() < puts(s3).keys()


def saves_a_third(rank: int, root: str, hosts: list[Path], environ: dict[str, str]) -> Any:
    local = prepared(rank, hosts, environ)
    before = loaded(root, local)
    sequence = saved(rank, root, local, 3).uploaded(SOON).sequence
    return before, sequence, loaded(root, local)


@pytest.mark.parametrize("new", [[0], [1], []])
def test_a_lost_disk_takes_its_tag_and_nothing_is_mixed(
    new: list[int], root: str, tmp_path: Path, s3: S3Server, killed: list[Path]
) -> None:
    """One host has a new disk, or is not there any more: then there are half as many ranks."""
    hosts = [tmp_path / f"new{n}" if n in new else killed[n] for n in range(2 if new else 1)]
    ranks = 2 * len(hosts)
    told = run_on_ranks(saves_a_third, ranks, root, hosts, s3.environment)
    # t2 has a number of its own, of which its half is still there
    assert told == [(("t1", whole(1), root), 3, ("t3", whole(3, ranks), told[0][2][2]))] * ranks
    assert xla_ckpt.list_tags(root) == ["t1", "t3"]
    assert xla_ckpt.verify(root).ok
    assert [host for host in hosts if (host / "t2").exists()] == [host for host in hosts if host in killed]


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "refused on purpose")


def fails_and_saves(rank: int, root: str, hosts: list[Path], environ: dict[str, str]) -> Any:
    """Saves that the second disk refuses, at one step after the other, and after each the same one again."""
    local = prepared(rank, hosts, environ)
    told: list[Any] = []
    steps: tuple[tuple[Any, str], ...] = ((LocalFirstRoot, "begin"), (Transaction, "seal"), (Transaction, "commit"))
    for number, (owner, at) in enumerate(steps, 1):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 2:
                patch.setattr(owner, at, refuse)
            with pytest.raises(StorageError) as caught:
                saved(rank, root, local, number)
            told += [caught.value.rank, len(xla_ckpt.list_tags(local))]
        told.append(saved(rank, root, local, number).uploaded(SOON).sequence)
    return told


def test_what_one_disk_refuses_is_an_error_on_all_ranks(root: str, tmp_path: Path, s3: S3Server) -> None:
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    assert run_on_ranks(fails_and_saves, 4, root, hosts, s3.environment) == [[2, 0, 1, 2, 1, 2, 2, 2, 3]] * 4
    assert xla_ckpt.list_tags(root) == ["t1", "t2", "t3"]
    assert not [path for host in hosts for path in host.glob(".new-*")]


def finds_a_folder(rank: int, root: str, hosts: list[Path], environ: dict[str, str]) -> tuple[str, str | None]:
    with pytest.raises(UsageError) as caught:
        saved(rank, root, prepared(rank, hosts, environ), 1)
    return caught.value.problem, caught.value.found


def test_what_is_no_tag_is_replaced_on_no_disk(root: str, tmp_path: Path, s3: S3Server) -> None:
    """Rank 0's disk was looked at alone."""
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    (hosts[1] / "t1").mkdir(parents=True)
    (hosts[1] / "t1" / "notes").write_text("of somebody")
    told = run_on_ranks(finds_a_folder, 4, root, hosts, s3.environment)
    assert told == [("what has the name of the new tag is no tag, and would be lost", "a directory with notes")] * 4
    assert (hosts[1] / "t1" / "notes").read_text() == "of somebody"
    assert [xla_ckpt.list_tags(host) for host in hosts] == [[], []]


def waits_for_a_disk(rank: int, root: str, hosts: list[Path], environ: dict[str, str]) -> str:
    """The second disk sends nothing; the first one's process has no patience with it."""
    local = prepared(rank, hosts, environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "MAX_DISK_WAIT_SECONDS", 0.0)
        if rank == 2:
            patch.setattr(Uploader, "wake", lambda *_: None)
        handle = saved(rank, root, local, 1)
        if rank:
            return ""
        with pytest.raises(RankFailedError) as caught:
            handle.uploaded(SOON)
    return f"{caught.value.problem}: {caught.value.found}. {caught.value.hint}"


def test_a_disk_that_sends_nothing_is_not_waited_for_for_ever(root: str, tmp_path: Path, s3: S3Server) -> None:
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    told = run_on_ranks(waits_for_a_disk, 4, root, hosts, s3.environment)
    assert told[0].startswith("a part of this tag is on the disks of other hosts, which do not send it: files that are")
    assert "It goes up when a job saves or loads that has all of these disks" in told[0]
    assert xla_ckpt.list_tags(root) == []
    assert run_on_ranks(loads, 4, root, hosts, s3.environment) == [("t1", whole(1), root)] * 4
    assert xla_ckpt.verify(root).ok


def loses_a_commit(rank: int, root: str, hosts: list[Path], environ: dict[str, str]) -> Any:
    """Each rank has a disk. The second one's commits, and the third one's does not."""
    local = prepared(2 * rank, hosts, environ)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(Transaction, "commit", refuse)
        with pytest.raises(StorageError) as caught:
            saved(rank, root, local, 1)
    tags = xla_ckpt.list_tags(local)
    xla_ckpt.finalize_checkpoint()
    return caught.value.rank, tags, saved(rank, root, local, 2).uploaded(SOON).tag


def test_a_part_whose_save_fails_on_another_disk_is_not_waited_for(root: str, tmp_path: Path, s3: S3Server) -> None:
    """It stayed, and its upload waited ten minutes for the other disks, and so did the end of the program."""
    hosts = [tmp_path / f"host{number}" for number in range(3)]
    assert run_on_ranks(loses_a_commit, 3, root, hosts, s3.environment) == [(2, [], "t2")] * 3
    assert xla_ckpt.list_tags(root) == ["t2"]
    assert xla_ckpt.verify(root).ok


def content_of(tag: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tag)): path.read_bytes() for path in tag.rglob("*") if path.is_file()}


def loses_a_commit_over_a_tag(rank: int, root: str, hosts: list[Path], environ: dict[str, str]) -> Any:
    """Each rank has a disk, and the tag of that name on it. The second one's commits, and the third one's does not."""
    local = prepared(2 * rank, hosts, environ)
    saved(rank, root, local, 1).uploaded(SOON)
    xla_ckpt.finalize_checkpoint()
    before = content_of(local / "t1")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(Transaction, "commit", refuse)
        with pytest.raises(StorageError):
            saved(rank, root, local, 1)
    after = content_of(local / "t1")
    xla_ckpt.finalize_checkpoint()
    changed = [path for path in before | after if before.get(path) != after.get(path)]
    return changed, saved(rank, root, local, 1).uploaded(SOON).sequence


def test_what_a_part_has_replaced_is_there_again_if_another_disk_refuses(
    root: str, tmp_path: Path, s3: S3Server
) -> None:
    """The disk had neither version then, and what was not in the bucket yet was lost."""
    hosts = [tmp_path / f"host{number}" for number in range(3)]
    told = run_on_ranks(loses_a_commit_over_a_tag, 3, root, hosts, s3.environment)
    assert [changed for changed, _ in told] == [[], [], []]
    assert len({sequence for _, sequence in told}) == 1
    assert xla_ckpt.verify(root).ok
    assert not [path for host in hosts for path in (*host.glob(".new-*"), *host.glob(".trash/*"))]


def wants_parity(rank: int, root: str, hosts: list[Path], environ: dict[str, str]) -> str:
    with pytest.raises(UsageError) as caught:
        saved(rank, root, prepared(rank, hosts, environ), 1, parity="file")
    return caught.value.problem


def test_parity_is_refused_on_all_ranks(root: str, tmp_path: Path, s3: S3Server) -> None:
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    told = run_on_ranks(wants_parity, 4, root, hosts, s3.environment)
    assert told == ["a tag has no parity where each host has a disk of its own for local="] * 4
    assert [xla_ckpt.list_tags(host) for host in hosts] == [[], []]


def test_the_command_uploads_the_part_of_each_host(
    root: str, killed: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_CKPT_LEASE", "take")
    exits = []
    for host in (killed[1], killed[0], killed[1]):
        UPLOADS.__init__()  # type: ignore[misc]  # as in a new process
        exits.append(main(["upload", str(host), root]))
    told = capsys.readouterr()
    assert exits == [1, 0, 0]
    assert "a part of this tag is on the disks of other hosts, which do not send it" in told.err
    assert xla_ckpt.list_tags(root) == ["t1", "t2"]
    assert xla_ckpt.verify(root).ok
    assert listed(root, killed[0], capsys) == {"t1": "both", "t2": "both"}
