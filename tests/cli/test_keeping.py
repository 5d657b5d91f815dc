"""``run_rm``, ``pin``, ``unpin``, ``clean`` and ``adopt``, with a person at a terminal and without one."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import xla_ckpt
import xla_ckpt.__main__
from tests.cli.test_cli import call
from tests.runs import environment, names_in
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.inspection import checkpoints
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags import deletion, listing
from xla_ckpt.tags.directory_root import DirectoryRoot
from xla_ckpt.tags.entry import LEDGER_NAME
from xla_ckpt.tags.ledger_root import LedgerRoot


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for tag in ("a", "b", "c"):
        xla_ckpt.save(tmp_path, tag, {"w": torch.ones(2)})
    return tmp_path


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, *words: object) -> None:
        self.fd, end = pty.openpty()
        command = [sys.executable, "-m", "xla_ckpt", *map(str, words)]
        # A shell that runs the tests in the background has them ignore Ctrl-C, and so would what they start.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            command, stdin=end, stdout=end, stderr=end, env=environment(), start_new_session=True
        )
        signal.signal(signal.SIGINT, handler)
        os.close(end)
        self.shown = ""

    def until(self, text: str) -> None:
        while text not in self.shown:
            self.shown += os.read(self.fd, 4096).decode()

    def interrupt(self) -> None:
        """Press Ctrl-C when it waits for an answer: Python heeds one between the question and that at the next key."""
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            os.sched_yield()
        self.process.send_signal(signal.SIGINT)

    def ends(self) -> int:
        """The exit code, after all that was shown has been read."""
        try:
            while data := os.read(self.fd, 4096):
                self.shown += data.decode()
        except OSError:
            pass  # so ends a terminal whose other end is closed
        os.close(self.fd)
        return self.process.wait(60)


def test_a_person_is_asked(root: Path) -> None:
    for answer, code, left in (("n", 1, ["a", "b", "c"]), ("yes", 0, ["c"])):
        terminal = Terminal("rm", root, "a", "b")
        terminal.until("[y/N]")
        os.write(terminal.fd, f"{answer}\n".encode())
        assert terminal.ends() == code
        assert f"Delete a, b in {root}?" in terminal.shown
        assert xla_ckpt.list_tags(root) == left


def test_ctrl_c_while_the_command_is_imported_is_one_line_and_130(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    restored = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell may have it ignored
    program = f"{restored}; import runpy; runpy.run_module('xla_ckpt', run_name='__main__', alter_sys=True)"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ".")])
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment({"PYTHONPATH": path}), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "xla-ckpt: interrupted\n")


def test_ctrl_c_while_the_arguments_are_parsed_is_one_line_and_130(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: argparse.ArgumentParser) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "format_usage", interrupted)
    monkeypatch.setattr(sys, "argv", ["xla-ckpt", "verify", str(root)])
    assert xla_ckpt.__main__.main() == 130
    assert capsys.readouterr().err == "xla-ckpt: interrupted\n"


def test_ctrl_c_is_one_line_and_130(root: Path) -> None:
    terminal = Terminal("rm", root, "a")
    terminal.until("[y/N]")
    terminal.interrupt()
    assert terminal.ends() == 130
    assert terminal.shown.splitlines()[-1].endswith("xla-ckpt: interrupted")
    assert "Traceback" not in terminal.shown
    assert xla_ckpt.list_tags(root) == ["a", "b", "c"]


def test_without_a_terminal_yes_is_needed(root: Path) -> None:
    command = [sys.executable, "-m", "xla_ckpt", "rm", str(root), "a"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment())
    assert (done.returncode, "a terminal, or --yes" in done.stderr) == (2, True)
    assert xla_ckpt.list_tags(root) == ["a", "b", "c"]


def test_if_one_tag_is_refused_none_is_changed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "pin", root, "b")[:2] == (0, "b: pinned\n")
    for words, code, says in (
        (["rm", root, "a", "b", "--yes"], 2, "this tag is pinned"),
        (["rm", root, "a", "b"], 2, "this tag is pinned"),  # before anybody is asked
        (["rm", root, "c", "x", "--yes"], 1, "there is no such checkpoint"),
        (["pin", root, "a", "x"], 1, "there is no such checkpoint"),
    ):
        answer = call(capsys, *words)
        assert (answer[0], answer[1], says in answer[2]) == (code, "", True)
        assert xla_ckpt.list_tags(root) == ["a", "b", "c"]
    assert call(capsys, "unpin", root, "a", "b", "c")[1] == "a: was not pinned\nb: unpinned\nc: was not pinned\n"
    code, _, err = call(capsys, "rm", root, "a", "b", "c", "--yes")
    assert (code, "the last tag" in err) == (2, True)
    assert call(capsys, "rm", root, "a", "b", "--yes")[:2] == (0, "a: deleted\nb: deleted\n")
    assert xla_ckpt.list_tags(root) == ["c"]


def test_what_is_no_root_of_tags_is_told_so(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    for command, more in (("clean", []), ("adopt", []), ("retain", ["--newest", "1"]), ("upload", ["s3://b/run"])):
        code, out, err = call(capsys, command, root / "a", *more)
        assert (code, out, f"this is a tag, and no root of tags [in {root / 'a'}]. Pass {root}." in err) == (
            2,
            "",
            True,
        )
        code, out, err = call(capsys, command, tmp_path / "x.pt", *more)
        assert (code, out, "torch wrote this file, which is no root of this library's tags" in err) == (2, "", True)
    for words in (["rm", tmp_path / "x.pt", "--yes"], ["pin", tmp_path / "x.pt"]):
        code, _, err = call(capsys, *words)
        assert (code, "torch wrote this file, which this library neither pins nor deletes" in err) == (2, True)
    assert (tmp_path / "x.pt").exists()
    xla_ckpt.save(root / "above" / "lm", "a", {"w": torch.ones(2)})
    code, out, err = call(capsys, "clean", root / "above")
    assert (code, out, "There are checkpoints below it, in lm" in err) == (1, "", True)


def test_clean_says_what_it_removed_and_what_it_left(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "clean", root)[:2] == (0, "nothing to remove\n")
    with open_locked(root, ".new-saving"), open_locked(root, "b"):
        xla_ckpt.Checkpoints(root).delete("b", force=True)
        (root / ".new-killed").mkdir()
        code, out, _ = call(capsys, "clean", root)
        assert (code, out.splitlines()[0]) == (0, ".new-killed: removed")
        assert [line.split(": stays (")[0] for line in out.splitlines()[1:]] == [".new-saving", ".trash/b-0"]
    assert call(capsys, "clean", root)[:2] == (0, ".new-saving: removed\n.trash/b-0: removed\n")
    assert xla_ckpt.list_tags(root) == ["a", "c"]


@contextlib.contextmanager
def open_locked(root: Path, name: str) -> Iterator[None]:
    """A directory that somebody reads, or writes if it was not there."""
    store = LocalStore(str(root))
    directory = store.open(name) if store.has(name) else store.make_directory(name)
    with contextlib.closing(directory):
        yield


def test_only_a_record_of_tags_adopts_any(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "adopt", root)
    assert (code, out) == (2, "")
    assert "the tags of a directory are in no record" in err
    for command in ("clean", "adopt"):
        code, out, err = call(capsys, command, root / "nowhere")
        assert (code, out) == (1, "")
        assert "Nothing lies there" in err
    assert not (root / "nowhere").exists()


def test_a_record_in_memory_adopts_what_it_has_lost(capsys: pytest.CaptureFixture[str]) -> None:
    path = "memory://adopts/lm"
    for tag in "ab":
        xla_ckpt.save(path, tag, {"w": torch.ones(2)})
    store = open_store(path).object_store
    assert store is not None
    store.remove(LEDGER_NAME)
    with pytest.raises(CorruptCheckpointError, match="xla-ckpt adopt"):
        xla_ckpt.list_tags(path)
    assert call(capsys, "adopt", path, "b")[:2] == (0, "b: adopted\n")
    assert call(capsys, "adopt", path)[:2] == (0, "a: adopted\n")
    assert call(capsys, "adopt", path)[:2] == (0, "a: was known already\nb: was known already\n")
    assert xla_ckpt.verify(path, "a").ok


def test_an_incomplete_tag_is_not_adopted_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    path = "memory://adopts/incomplete"
    for tag in "ab":
        xla_ckpt.save(path, tag, {"w": torch.ones(2)})
    store = open_store(path).object_store
    assert store is not None
    (attempt,) = store.list_names("b")
    (payload,) = (name for name in store.get_directory(f"b/{attempt}").list_files() if name.endswith(".safetensors"))
    store.remove(f"b/{attempt}/{payload}")
    store.remove(LEDGER_NAME)
    code, out, _ = call(capsys, "adopt", path)
    assert (code, out.splitlines()) == (
        1,
        ["a: adopted", f"b: not adopted (files of its manifest are missing: {payload})"],
    )
    code, out, _ = call(capsys, "adopt", path, "b")
    assert (code, "b: not adopted" in out) == (1, True)
    assert xla_ckpt.list_tags(path) == ["a"]


def test_an_upload_does_not_mix_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bucket = "memory://uploads/lm"
    for run, tag in (("one", "a"), ("two", "b")):
        xla_ckpt.save(tmp_path / run, tag, {"w": torch.ones(2)})
    assert call(capsys, "upload", tmp_path / "one", bucket)[:2] == (0, "a: uploaded\n")
    code, out, err = call(capsys, "upload", tmp_path / "two", bucket)
    assert (code, out, "tags of another run" in err, "Name an address where nothing lies" in err) == (2, "", True, True)
    assert xla_ckpt.list_tags(bucket) == ["a"]


def test_these_commands_import_no_torch(root: Path) -> None:
    code = "import sys\nfrom xla_ckpt.cli.main import main\n"
    code += "assert main(sys.argv[1:]) == 0\nassert not {'torch', 'jax', 'orbax'} & set(sys.modules)"
    for words in (["pin", root, "a"], ["unpin", root, "a"], ["rm", root, "a", "--yes"], ["clean", root]):
        subprocess.run([sys.executable, "-c", code, *map(str, words)], env=environment(), check=True)


def runs_with_losses(root: Path) -> None:
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4), (4, 0.2)):
        content = {"loss": loss, "eval": {"accuracy": 1 - loss}}
        xla_ckpt.save_checkpoint(
            root, f"step_{step}", {"w": torch.full((2,), step)}, user_content=content, pinned=step == 3
        )


def test_retain_says_first_what_would_go_and_why_the_others_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs_with_losses(tmp_path)
    words = ["retain", tmp_path, "--newest", "1", "--best", "eval.accuracy:1:max"]
    told = {
        "step_1": "would be deleted",
        "step_2": "stays (of the 1 with the largest eval.accuracy)",
        "step_3": "stays (pinned)",
        "step_4": "stays (the newest; of the newest 1)",
    }
    assert call(capsys, *words, "--dry-run")[:2] == (0, "".join(f"{tag}: {done}\n" for tag, done in told.items()))
    assert xla_ckpt.list_tags(tmp_path) == [*told]
    code, out, _ = call(capsys, *words, "--yes", "--json")
    assert (code, {its["tag"]: its["done"] for its in json.loads(out)["tags"]}) == (0, told | {"step_1": "deleted"})
    assert xla_ckpt.list_tags(tmp_path) == ["step_2", "step_3", "step_4"]


@pytest.mark.filterwarnings("ignore")
def test_retain_says_whose_tags_it_does_not_touch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tag in ("step_1", "step_2"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / tag, no_dist=True)
    code, _, err = call(capsys, "retain", tmp_path, "--newest", "1", "--dry-run")
    assert code == 2
    assert "torch.distributed.checkpoint wrote this tag, which this library neither pins nor deletes" in err


def test_retain_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs_with_losses(tmp_path)
    words = ["retain", tmp_path, "--newest", "1", "--per-day", "--every", "3"]
    terminal = Terminal(*words)
    terminal.until("[y/N]")
    os.write(terminal.fd, b"n\n")
    assert terminal.ends() == 1
    assert f"Delete step_2 in {tmp_path}?" in terminal.shown
    code, _, err = call(capsys, *words)
    assert (code, "a terminal, or --yes" in err) == (2, True)
    assert len(xla_ckpt.list_tags(tmp_path)) == 4
    assert call(capsys, *words[:2], "--last", "4w")[0] == 0  # nothing is to be deleted: nobody has to be asked


def test_retain_leaves_a_tag_that_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs_with_losses(tmp_path)
    with contextlib.closing(LocalStore(str(tmp_path)).open("step_1")):
        code, out, _ = call(capsys, "retain", tmp_path, "--newest", "1", "--yes")
    assert (code, out.splitlines()[:2]) == (
        0,
        ["step_1: stays (somebody reads this tag, or may do so)", "step_2: deleted"],
    )


@pytest.mark.parametrize("where", ["directory", "memory"])
def test_retain_looks_once_however_many_tags_go(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each deletion listed the root anew, and read the newest manifest."""
    looks: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def counts(*args: Any, **more: Any) -> Any:
            looks[name] += 1
            return inner(*args, **more)

        monkeypatch.setattr(owner, name, counts)

    counted(listing, "check_entry")
    monkeypatch.setattr(deletion, "check_entry", listing.check_entry)
    monkeypatch.setattr(checkpoints, "check_entry", listing.check_entry)
    counted(DirectoryRoot, "list_entries")
    counted(LedgerRoot, "list_entries")
    lists = []
    for count in (3, 6):
        root = f"memory://{tmp_path}/{count}" if where == "memory" else str(tmp_path / str(count))
        for step in range(count):
            xla_ckpt.save(root, f"step_{step}", {"w": torch.full((2,), step)})
        looks.clear()
        told = "".join(f"step_{step}: deleted\n" for step in range(count - 1))
        assert call(capsys, "retain", root, "--newest", "1", "--yes")[1].startswith(told)
        assert looks.pop("check_entry") == count + 1, "each manifest once, and that of a tag that stays"
        lists.append(dict(looks))
        assert xla_ckpt.list_tags(root) == [f"step_{count - 1}"]
    assert lists[0] == lists[1]
    if where == "directory":
        assert names_in(tmp_path / "6") == ["step_5"], "their files are gone, too"


def test_retain_heeds_what_happened_while_it_asked(tmp_path: Path) -> None:
    runs_with_losses(tmp_path)
    terminal = Terminal("retain", tmp_path, "--newest", "1")
    terminal.until("[y/N]")
    xla_ckpt.Checkpoints(tmp_path).pin("step_1")
    os.write(terminal.fd, b"y\n")
    assert terminal.ends() == 0
    assert "step_1: stays (this tag is pinned)" in terminal.shown
    assert xla_ckpt.list_tags(tmp_path) == ["step_1", "step_3", "step_4"]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [2, -20], ids=["in the first line", "behind it"])
def test_no_damaged_tag_takes_the_place_of_a_good_one(root: Path, at: int, capsys: pytest.CaptureFixture[str]) -> None:
    flip(root / "c" / "manifest.json", at)
    code, out, _ = call(capsys, "retain", root, "--newest", "1", "--yes")
    assert (code, out.splitlines()) == (
        0,
        ["a: deleted", "b: stays (the newest; of the newest 1)", "c: stays (its manifest cannot be read)"],
    )
    code, _, err = call(capsys, "rm", root, "b", "--yes")
    assert (code, "last tag here whose manifest can be read" in err) == (2, True)
    assert call(capsys, "rm", root, "c", "--yes")[0] == 0
    assert xla_ckpt.list_tags(root) == ["b"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nothing says which tags are kept"),
        (["--best", "loss:0"], "--best makes no sense"),
        (["--best", "loss:x"], "--best makes no sense"),
        (["--best", ":2"], "--best makes no sense"),
        (["--best", "loss:2:most"], "--best makes no sense"),
        (["--last", "7y"], "--last is no time"),
    ],
)
def test_retain_refuses_what_makes_no_sense(
    root: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "retain", root, *words, "--yes")
    assert (code, says in err) == (2, True), err
    assert xla_ckpt.list_tags(root) == ["a", "b", "c"]


def test_retain_where_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "retain", tmp_path / "none", "--newest", "1")
    assert (code, "there is no checkpoint" in err) == (1, True)


def test_a_tag_may_be_named_by_its_path(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the commands that look at tags have it."""
    assert call(capsys, "pin", root / "a")[0] == 0
    assert call(capsys, "unpin", root / "a")[0] == 0
    assert call(capsys, "rm", root / "a", "--yes")[0] == 0
    assert xla_ckpt.list_tags(root) == ["b", "c"]


@pytest.mark.parametrize("command", ["rm", "pin", "unpin"])
def test_a_root_alone_names_no_tag(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, told = call(capsys, command, root)
    assert code == 2
    assert f"expected {root} TAG ..., or {root}/TAG" in told
    assert "Tags there, oldest first: a, b, c" in told
    assert xla_ckpt.list_tags(root) == ["a", "b", "c"]
    assert "there is no checkpoint" in call(capsys, command, root / "none")[2]
