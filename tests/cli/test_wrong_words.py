"""What the command line answers to words that make no sense: it says which word, and what to say in its place."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import xla_ckpt
import xla_ckpt.dcp
from tests.runs import environment
from xla_ckpt.cli.main import main
from xla_ckpt.cli.output import translate_to_options


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command says that refuses."""
    assert main([str(word) for word in words]) == 2
    return capsys.readouterr().err


def test_a_misspelt_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["convert", str(tmp_path), "out", "--to", "saftensors"])
    assert caught.value.code == 2
    assert "argument --to: there is no 'saftensors': did you mean 'safetensors'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_tag_of_a_file(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt")
    said = refused(capsys, command, tmp_path / "old.pt", "--tag", "x")
    assert "a file has no tags" in said
    assert "Pass the path of the file without a tag" in said
    with pytest.raises(xla_ckpt.UsageError, match="a file has no tags"):
        xla_ckpt.load_checkpoint(tmp_path / "old.pt", "x")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_file_of_a_checkpoint_of_dcp(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its data files begin as those of torch.save do, and were called damaged."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert (tmp_path / file).exists()
    for command in ("ls", "show", "verify"):
        said = refused(capsys, command, tmp_path / file)
        assert "the directory of the checkpoint to which it belongs" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("verify ROOT a --all", "'a' names one of them"),
        ("verify ROOT --tag a --all", "'a' names one of them"),
        ("verify ROOT/a --all", "'a' names one of them"),
        ("show ROOT a --tag b", "two tags are named"),
        ("explain ROOT --mesh dp=1 --tag a b", "two tags are named"),
    ],
)
def test_words_of_which_one_would_be_ignored(
    tmp_path: Path, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for tag in "ab":
        xla_ckpt.save(tmp_path, tag, {"w": torch.ones(2)})
    with pytest.raises(SystemExit) as caught:
        main([word.replace("ROOT", str(tmp_path)) for word in words.split()])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True)


def test_a_mesh_of_too_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    xla_ckpt.save(tmp_path, "a", {"w": torch.ones(2)})
    said = refused(capsys, "explain", tmp_path, "--mesh", "pp=2,dp=100000")
    assert "expected a pipeline stage of at most 4,096 ranks, found 100,000 in pp=2,dp=100000" in said
    assert main(["explain", str(tmp_path), "--mesh", "pp=8,dp=1024"]) == 0


@pytest.mark.parametrize("port", ["99999", "-1", "9" * 5000, "http"])
def test_a_port_that_is_none(tmp_path: Path, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["view", str(tmp_path), f"--port={port}"])
    assert caught.value.code == 2
    assert "is no port: they are numbers from 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("time", ["99999999999d", "9" * 5000 + "m"])
def test_a_time_that_is_too_long(tmp_path: Path, time: str, capsys: pytest.CaptureFixture[str]) -> None:
    xla_ckpt.save(tmp_path, "a", {"w": torch.ones(2)})
    said = refused(capsys, "retain", tmp_path, "--last", time, "--dry-run")
    assert "expected at most 999999999d" in said


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ('exec "$@" >&-', 2, "the standard output is closed"),
        ('rmdir "$PWD"; exec "$@"', 1, "asking which directory the program works in"),
    ],
)
def test_a_shell_that_took_something_away(tmp_path: Path, script: str, code: int, words: str) -> None:
    command = [sys.executable, "-m", "xla_ckpt", "ls", "."]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert done.stderr.startswith("xla-ckpt: ")


@pytest.mark.parametrize("name", ["x", "a=", "a=b,", "a(b ", "(a=, ", "a.b", "a (--"])
def test_a_long_name_in_an_error_is_gone_over_once(name: str) -> None:
    """If each of its characters were tried as the first of an argument, this would take hours."""
    text = name * (2_000_000 // len(name))
    assert translate_to_options(text) == text
    assert translate_to_options(f"{text} Pass as_tag= (--as).").endswith(" Pass --as.")


def test_a_part_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    xla_ckpt.save(tmp_path / "run", "a", {"params": {"w": torch.ones(2)}})
    said = refused(capsys, "convert", tmp_path / "run", tmp_path / "out", "--to", "safetensors")
    assert "xla-ckpt export --part" in said
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--part", "params"]) == 0  # as it says


def test_a_module_that_was_saved_whole(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    torch.save(model, tmp_path / "whole.pt")
    for trust in (False, True):
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"one pickled object.*save its state_dict\(\)"):
            xla_ckpt.load_checkpoint(tmp_path / "whole.pt", model=model, trust_pickle=trust)
    with pytest.raises(xla_ckpt.UntrustedObjectError) as caught:
        xla_ckpt.restore(tmp_path / "whole.pt")
    assert "leaf ," not in str(caught.value)


@pytest.mark.parametrize("inside", [False, True])
def test_a_module_that_was_saved_whole_is_no_state_to_convert(
    inside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said that the checkpoint holds no arrays, or wanted the file to be trusted."""
    model = torch.nn.Linear(2, 2)
    file = tmp_path / "whole.pt"
    torch.save({"model": model, "epoch": 1} if inside else model, file)
    for words in (
        ("export", file, tmp_path / "out"),
        ("convert", file, tmp_path / "out", "--to", "safetensors"),
        ("convert", file, tmp_path / "out", "--to", "native", "--trust-pickle"),
    ):
        said = refused(capsys, *words)
        assert "the file holds a torch.nn.modules.linear.Linear, which is neither a tensor nor a plain value" in said
        assert "expected the state_dict() of a module" in said
        assert "torch.load(file, weights_only=False).state_dict()" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [{}, {"epoch": 3}])
def test_a_module_that_was_saved_whole_beside_other_things(
    more: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said to give the model to extras, which a load refuses; and a conversion took the optimizer alone."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    file = tmp_path / "mixed.pt"
    torch.save({"model": model, "optimizer": optimizer.state_dict(), **more}, file)
    for trust in (False, True):
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
            xla_ckpt.load_checkpoint(file, model=model, trust_pickle=trust)
        assert "which holds optimizer, one pickled object. If that is a module" in str(caught.value)
        assert "extras=" not in str(caught.value)
    for trusted in ([], ["--trust-pickle"]):
        said = refused(capsys, "convert", file, tmp_path / "out", "--to", "native", *trusted)
        assert "torch.load(file, weights_only=False).state_dict()" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("inside", [False, True])
def test_show_says_what_a_module_is(inside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It showed the number that the skeleton has for it, and no name of the whole."""
    model = torch.nn.Linear(2, 2)
    torch.save({"net": model, "epoch": 1} if inside else model, tmp_path / "whole.pt")
    assert main(["show", str(tmp_path / "whole.pt")]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "$object" in line)
    assert row.split()[0] == ("net" if inside else "(root)")
    assert "a pickled torch.nn.modules.linear.Linear" in row


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ls TMP/runz", "there is no checkpoint: did you mean TMP/run?"),
        ("show TMP/runz/step_1", "did you mean TMP/run/step_1?"),
        ("verify TMP/run/step_7", "did you mean TMP/run/step_1?"),
        ("retain TMP/runz --newest 1", "did you mean TMP/run?"),
        ("export TMP/run out --dtype bfloat61", "there is no 'bfloat61': did you mean 'bfloat16'? (choose from "),
        ("show TMP/run --hardware trn3", "there is no 'trn3': did you mean 'trn"),
        ("show TMP/run --leaf misspelt", "no leaf is like this ["),
        ("show TMP/run --leaf model/layres.0.weight", "did you mean 'model/layers.0.weight'?"),
        ("show TMP/run --leaf weihgt", "did you mean 'model/layers.0.weight'?"),
        ("show TMP/run --leaf layers", "did you mean 'model/layers'?"),
        ("show TMP/run --leaf layers.0", "did you mean 'model/layers.0'?"),
        ("diff TMP/run TMP/run --leaf weihgt", "did you mean 'model/layers.0.weight'?"),
        ("completion fisch", "there is no 'fisch': did you mean 'fish'?"),
        ("retain TMP/run --newest 0", "argument --newest: '0' is no whole number from 1"),
    ],
)
def test_what_was_meant(tmp_path: Path, words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    xla_ckpt.save(tmp_path / "run", "step_1", {"model": {"layers.0.weight": torch.ones(2)}})
    with contextlib.suppress(SystemExit):
        main(words.replace("TMP", str(tmp_path)).split())
    assert says.replace("TMP", str(tmp_path)) in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_what_was_given_is_not_suggested(tmp_path: Path) -> None:
    """A name that is spelt correctly is refused for another reason: it is no array, or not complete."""
    xla_ckpt.save(tmp_path / "run", "step_1", {"k": {"a": torch.ones(2)}, "n": 1})
    for leaf in ("k", "n"):
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="no such array") as refused:
            xla_ckpt.Checkpoints(tmp_path / "run").sample(leaf, "step_1")
        assert "did you mean" not in str(refused.value)
    xla_ckpt.dcp.save({"k": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="Missing key") as missing:
        xla_ckpt.dcp.load({"k": torch.zeros(2)}, checkpoint_id=tmp_path / "dcp")
    assert "did you mean" not in str(missing.value)


def test_warnings_speak_of_options(tmp_path: Path) -> None:
    """Errors did, and what was logged on the way spoke of Python's arguments."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "old.pt")
    command = [sys.executable, "-m", "xla_ckpt", "show", str(tmp_path / "old.pt")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert "the stored optimizer numbers its parameters" in done.stderr
    assert "give the model and its optimizer, as they were at the save: --like\n" in done.stderr
    assert "optimizer=" not in done.stderr


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["view", str(tmp_path), "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert f"opening the port {port} failed" in said
    assert "leave --port out" in said
