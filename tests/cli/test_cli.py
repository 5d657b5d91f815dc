"""The command line: what a person sees, what a script gets, and the exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

import xla_ckpt
from tests.runs import environment
from xla_ckpt.cli import results
from xla_ckpt.cli.main import COMMANDS, main, parse_arguments
from xla_ckpt.rendering import reports
from xla_ckpt.rendering.table import MAX_RICH_ROWS, PlainTable


@pytest.fixture
def root(tmp_path: Path) -> Path:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    xla_ckpt.save_checkpoint(tmp_path, "best", model=model, pinned=True)
    xla_ckpt.save_checkpoint(tmp_path, "step_2", model=model, user_content={"epoch": 3, "note": "x" * 100, "t": (1,)})
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    code = main([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


def test_ls(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "ls", root)
    assert code == 0
    rows = [line.split("\t") for line in out.splitlines()]
    assert [r[0] for r in rows] == ["tag", "best", "step_2"]
    assert [len(r) for r in rows] == [8, 8, 8]
    assert [r[-1] for r in rows] == ["notes", "pinned", "newest"]
    code, out, _ = call(capsys, "ls", root, "--json")
    found = json.loads(out)
    assert [(t["tag"], t["sequence"], t["pinned"], t["arrays"], t["nbytes"]) for t in found["tags"]] == [
        ("best", 1, True, 1, 80), ("step_2", 2, False, 1, 80),
    ]  # fmt: skip


def test_ls_of_an_older_tag_does_not_call_it_the_newest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tag, notes in (("best", "pinned"), ("step_2", "newest")):
        _, row = call(capsys, "ls", root / tag)[1].splitlines()
        assert (row.split("\t")[0], row.split("\t")[-1]) == (tag, notes)
        answer = json.loads(call(capsys, "ls", root / tag, "--json")[1])
        assert (answer["newest"], [t["tag"] for t in answer["tags"]]) == ("step_2", [tag])


def test_ls_says_why_tags_are_kept(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    xla_ckpt.save(root, "step_3", {"w": torch.ones(1)}, num_kept_ckpts=1)
    code, out, _ = call(capsys, "ls", root)
    assert code == 0
    assert [line.split("\t")[-2:] for line in out.splitlines()] == [
        ["kept because", "notes"], ["pinned", "pinned"], ["the newest, of the newest 1", "newest"],
    ]  # fmt: skip
    xla_ckpt.save(root, "step_4", {"w": torch.ones(1)}, options=xla_ckpt.SaveOptions(stale="ignore"))
    assert "kept because" not in call(capsys, "ls", root)[1]
    assert [t["kept"] for t in json.loads(call(capsys, "ls", root, "--json")[1])["tags"]] == [[], [], []]


def test_show(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "show", root)
    assert code == 0
    assert out.startswith("step_2 in ")
    assert re.search(r"model/0.weight\tfloat32\t5 x 4\t80 B\t1", out)
    assert re.search(r"model/1.weight\tmodel/0.weight", out)
    assert re.search(r"user_content/epoch\t3", out)
    assert "x" * 59 + "..." in out
    code, out, _ = call(capsys, "show", root / "best", "--json", "--leaf", "model/0*")
    found = json.loads(out)
    assert found["tag"] == "best"
    assert found["arrays"] == [
        {"leaf": "model/0.weight", "dtype": "float32", "shape": [5, 4], "nbytes": 80, "shards": 1}
    ]
    assert found["aliases"] == {}
    assert call(capsys, "show", root, "--leaf", "user_content")[1].count("user_content/") == 3


def on_terminal(what: Any, width: int) -> str:
    """What a terminal of this width shows."""
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, color_system=None).print(what)
    return "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()).splitlines())


def test_show_of_many_arrays(tmp_path: Path) -> None:
    """Tables that are too long for rich have the same columns and cells, in plain lines."""
    arrays = {f"[b]{i}": torch.ones(i % 7) for i in range(MAX_RICH_ROWS + 1)}
    xla_ckpt.save(tmp_path, "a", {"s": arrays})
    lines = on_terminal(
        reports.render_tag(dataclasses.asdict(xla_ckpt.Checkpoints(tmp_path).show("a"))), 200
    ).splitlines()
    assert len(lines) == 6 + MAX_RICH_ROWS
    assert lines[3] == f"{MAX_RICH_ROWS + 1} arrays"
    assert lines[4].split() == ["leaf", "dtype", "shape", "size", "shards"]
    assert lines[5 + 8].split() == ["s/[b]8", "float32", "1", "4", "B", "1"]
    assert len({line.index("float32") for line in lines[5:]}) == 1


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["ls"], ["show"], ["verify"], ["verify", "--all"]])
def test_commands_import_no_torch(root: Path, words: list[str]) -> None:
    """A person who looks at a tag does not wait for torch. The program is the same by its name and by ``-m``."""
    words = words if words[0].startswith("-") else [words[0], str(root), *words[1:]]
    code = "import runpy, sys\ntry:\n    runpy.run_module('xla_ckpt', run_name='__main__')\nfinally:\n"
    code += "    print('loaded:', *(m for m in ('torch', 'jax', 'orbax') if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("loaded:\n"), done.stdout[-200:]
    if words[0] == "--version":
        assert done.stdout.startswith(f"xla-ckpt {xla_ckpt.__version__}\n")


def test_verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "verify", root, "--all")
    assert (code, out.count("sound")) == (0, 2)
    assert ("newest" in out, "/s)" in out) == (False, False)  # none is left out; a rate of some bytes says nothing
    assert "newest tag. 1 other one of this directory is not verified" in call(capsys, "verify", root)[1]
    assert "newest" not in call(capsys, "verify", root, "--tag", "best")[1]
    (root / "best/stranger").write_text("x")
    payload = root / "step_2/model/00001-of-00001.safetensors"
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    code, out, _ = call(capsys, "verify", root)
    assert code == 1
    assert "DAMAGED" in out
    assert "leaf model/0.weight, file model/00001-of-00001.safetensors" in out
    code, out, _ = call(capsys, "verify", root, "--all", "--json")
    assert code == 1
    best, step = json.loads(out)
    assert (best["ok"], best["strangers"], step["ok"]) == (True, ["stranger"], False)
    assert step["problems"][0]["leaf"] == "model/0.weight"
    code, out, _ = call(capsys, "ls", root)
    assert code == 0  # a listing reads manifests, not payloads
    (root / "step_2/manifest.json").write_text("broken")
    code, out, _ = call(capsys, "ls", root)
    assert code == 1
    assert "no manifest of xla_ckpt" in out


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["ls", "/nowhere"], 1, "Nothing lies there"),
        (["show", "ROOT", "--tag", "x"], 1, "Tags there, oldest first: best, step_2"),
        (["show", "ROOT", "--leaf", "modle"], 2, "Leaves begin with: model, user_content."),
        (["show", "ROOT", "--like", "gc:collect_"], 2, "gc has no function collect_: did you mean 'collect'?"),
        (["show", "ROOT", "--like", "gc:set_threshold"], 2, "could not be made"),
        (["show", "ROOT", "--like", "no_such_job.py:build"], 2, "in those of PYTHONPATH, by its name without .py"),
        (["view", "ROOT", "--leaf", "model"], 2, "expected --html FILE with it, found --leaf"),
        (["view", "ROOT", "--html", "/nowhere/x.html"], 1, "Name a file in a directory that is there"),
        (["show", "ROOT", "--like", "gc:enable"], 2, "the function returns nothing"),
        (["show", "ROOT", "--like", "builtins:dict"], 2, "the function returns a dict"),
        (["verify", "ROOT", "--tag", "../x"], 2, "cannot be a tag"),
        (["verify", "/nowhere", "--all"], 1, "Nothing lies there"),
    ],
)
def test_problems(root: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, words: str) -> None:
    found, out, err = call(capsys, *[str(root) if a == "ROOT" else a for a in args])
    assert found == code
    assert words in err
    assert out == ""
    assert "Traceback" not in err


def test_a_tag_is_named_by_its_path_or_after_the_root(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("show", "verify", "explain"):
        more = ["--mesh", "dp=1"] if command == "explain" else []
        told = [
            re.sub(r" \(.*/s\)", "", call(capsys, command, *words, *more)[1])  # the speed
            for words in ([f"{root}/best"], [root, "best"], [root, "--tag", "best"])
        ]
        assert "best" in told[0]
        assert "step_2" not in told[0]
        assert told[0] == told[1] == told[2]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["shwo", "ROOT"], "argument COMMAND: there is no 'shwo': did you mean 'show'?"),
        (["show", "ROOT", "--lef", "model"], "unrecognized arguments: --lef model: did you mean '--leaf'?"),
        (["show", "ROOT", "--jsn=1"], "did you mean '--json'?"),
        (["show", "ROOT", "stpe_2"], "there is no such checkpoint: did you mean 'step_2'?"),
        (["rm", "ROOT", "stpe_2", "--yes"], "there is no such checkpoint: did you mean 'step_2'?"),
        (["pin", "ROOT", "stpe_2"], "there is no such checkpoint: did you mean 'step_2'?"),
        (["show", "ROOT", "--leaf", "modle/0.weight"], "no leaf is like this: did you mean 'model/0.weight'?"),
        (["diff", "ROOT/best", "step_2", "--leaf", "modle"], "like this: did you mean 'model'?"),
        (["repair", "ROOT"], "there is no 'repair': verify --repair does that"),
        (["list", "ROOT"], "there is no 'list': ls does that"),
        (["diff", "ROOT", "ROOT", "--max-memory", "0"], "'0' is no size; write 5GB or 500MB"),
        (["view", "ROOT/", "bset", "--html", "v.html"], "there is no such checkpoint: did you mean 'best'?"),
        (["view", "ROOT", "--hmtl", "v.html"], "--hmtl v.html: did you mean '--html'?"),
    ],
)
def test_what_was_meant_is_said(root: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str) -> None:
    with contextlib.suppress(SystemExit):  # that of wrong usage
        main([word.replace("ROOT", str(root)) for word in args])
    assert words.replace("ROOT", str(root)) in capsys.readouterr().err


def test_errors_speak_of_options(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, option, argument, wanted in (
        (["rm", root, "best", "--yes"], "or say --force.", "force=", 2),
        (["convert", root, root, "--to", "native"], "Pass --as.", "as_tag=", 2),
        (["show", root, "--hardware", "trn2"], "--config", "llama=", 2),
        (["show", root, "x"], "Tags there", "load", 1),
    ):
        code, _, err = call(capsys, *words)
        assert code == wanted
        assert option in err
        assert argument not in err


def test_explain_says_which_rule_finds_nothing_and_what_the_mesh_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xla_ckpt.save(tmp_path, "a", {"up": torch.ones(4, 2), "down": torch.ones(2, 4)})
    words = ["explain", tmp_path, "--sharding", "upp", "tp,_", "--sharding", "up", "tp,_"]
    code, out, _ = call(capsys, *words, "--mesh", "tp=2")
    assert (code, "1 array is split" in out) == (0, True)
    assert "no leaf path has a part that the sharding rule ('upp', ('tp', None)) fits" in out
    assert "('up'," not in out
    assert "0 arrays are split" in call(capsys, *words, "--mesh", "dp=2")[1]


def test_the_state_of_a_generator_that_one_tag_has_is_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(1)}, extras={"rng": xla_ckpt.RNGState()})
    xla_ckpt.save_checkpoint(tmp_path, "b", {"w": torch.ones(1)})
    code, out, _ = call(capsys, "diff", tmp_path / "a", "b")
    assert code == 1
    assert "extras/rng/ranks/0/python/1/...: 625 leaves\n" in out
    assert len(out.splitlines()) < 30


def test_two_tags_of_a_root_are_compared_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n, tag in enumerate(("a", "b", "c")):
        xla_ckpt.save(tmp_path, tag, {"w": torch.ones(1) * min(n, 1)})
    assert call(capsys, "diff", tmp_path, "a", "b")[0] == 1
    assert call(capsys, "diff", tmp_path, "b", "c")[0] == 0
    with pytest.raises(SystemExit) as refused:
        call(capsys, "diff", tmp_path, "b", "c", "--tag-a", "a")
    assert refused.value.code == 2
    assert "leave --tag-a and --tag-b out" in capsys.readouterr().err


def test_the_second_tag_of_a_comparison_is_misspelt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for tag in ("step_1", "step_2"):
        xla_ckpt.save(tmp_path / "run", tag, {"w": torch.ones(1)})
    code, _, err = call(capsys, "diff", "run/step_1", "stp_2")
    assert code == 1
    assert "did you mean 'step_2'? [tag stp_2" in err
    assert f"Tags there, oldest first: step_1, step_2. Nothing lies at {tmp_path}/stp_2, either." in err


def test_the_state_of_a_generator_is_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tag in "ab":
        random.random()
        xla_ckpt.save_checkpoint(tmp_path, tag, {"w": torch.ones(1)}, extras={"rng": xla_ckpt.RNGState()})
        random.seed(2)
    code, out, _ = call(capsys, "diff", tmp_path / "a", "b")
    assert code == 1
    row = next(line for line in out.splitlines() if line.endswith(" numbers"))
    assert re.fullmatch(r"extras/rng/ranks/0/python/1/\.\.\.\t\d+ numbers\t\d+ numbers", row)
    assert len(out.splitlines()) < 10
    runs = xla_ckpt.Checkpoints(tmp_path)
    assert len(runs.show("a").values) > 600
    assert len(runs.diff("a", "b").values) > 600
    assert len(repr(runs.show("a"))) + len(repr(runs.diff("a", "b"))) < 3000


def test_usage_errors_exit_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    for args in ([], ["nonsense"], ["ls"]):
        with pytest.raises(SystemExit) as caught:
            main(args)
        assert caught.value.code == 2


def test_the_installed_command(root: Path) -> None:
    command = Path(sys.executable).with_name("xla-ckpt")
    if not command.exists():
        pytest.skip("xla-ckpt is not installed in this environment")
    done = subprocess.run([command, "ls", root], capture_output=True, text=True, env=environment(), check=True)
    assert "step_2" in done.stdout
    piped = subprocess.run(f"{command} show {root} | head -1", shell=True, capture_output=True, text=True, check=True)
    assert (piped.stdout.startswith("step_2"), piped.stderr) == (True, "")


def test_explain(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "explain", root, "--mesh", "dp=2,tp=2", "--sharding", "weight", "_,tp")
    assert code == 0
    assert "can be restored on pp=1,dp=2,ep=1,cp=1,tp=2" in out
    assert re.search(r"\n0\t40 B\t80 B\t2.000\t1\tmodel/00001-of-00001.safetensors", out)
    code, out, _ = call(capsys, "explain", root, "--mesh", "tp=2", "--sharding", "weight", "_,_,tp", "--json")
    assert code == 1
    found = json.loads(out)
    assert found["problems"] == ["model/0.weight: a rule splits 3 dims, the array has 2"]
    code, _, err = call(capsys, "explain", root, "--mesh", "many")
    assert code == 2
    assert "a mesh is written like pp=1,dp=2" in err


def test_ls_of_a_directory_above_the_roots(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    above = tmp_path_factory.mktemp("above")
    for place in ("lm", "sweep/one", "sweep/two/deep", "a/b/c/too_deep"):
        (above / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(root, above / place)
    found = results.list_root(str(above))
    assert [(r["path"], r["tags"], r["newest"]) for r in found["roots"]] == [
        (f"{above}/{place}", 2, "step_2") for place in ("lm", "sweep/one", "sweep/two/deep")
    ]
    assert f"{above}/lm" in on_terminal(reports.render_tag_list(found), 200)


def test_ls_of_a_root_with_roots_beside_its_tags(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The roots were dropped."""
    shutil.copytree(root, root.parent / "copy")
    shutil.move(root.parent / "copy", root / "other")
    found = results.list_root(str(root))
    assert [t["tag"] for t in found["tags"]] == ["best", "step_2"]
    assert [r["path"] for r in found["roots"]] == [f"{root}/other"]
    shown = on_terminal(reports.render_tag_list(found), 200)
    assert "step_2" in shown.partition("Below it:")[0]
    assert f"{root}/other" in shown.partition("Below it:")[2]
    assert f"{root}/other" in call(capsys, "ls", root)[1]


def test_what_lies_beside_tags_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints that no list of tags has were passed over in silence, as if they had been verified."""
    xla_ckpt.save(tmp_path, "step_1", {"w": torch.ones(2)})
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "last.pt")
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "hf/model.safetensors")
    (tmp_path / "step_2/model").mkdir(parents=True)  # as neuronx-distributed begins one
    (tmp_path / "step_2/checkpoint").touch()
    (tmp_path / "notes.txt").touch()
    code, out, _ = call(capsys, "ls", tmp_path, "--json")
    assert code == 0
    assert json.loads(out)["beside"] == [
        {"name": "hf", "layout": "safetensors", "complete": True},
        {"name": "last.pt", "layout": "torch", "complete": True},
        {"name": "step_2", "layout": "neuronx-distributed", "complete": False},
    ]
    shown = call(capsys, "ls", tmp_path)[1]
    assert "step_2\tneuronx-distributed\tnot complete" in shown
    code, out, _ = call(capsys, "verify", tmp_path, "--all")
    assert (code, out.count("sound")) == (0, 1)
    assert "not verified, since they are no tags, or not complete: hf, last.pt, step_2." in caplog.text
    assert [summary.tag for summary in xla_ckpt.Checkpoints(tmp_path / "last.pt").summaries()] == ["last.pt"]
    assert "last.pt" in xla_ckpt.Checkpoints(tmp_path / "last.pt")._repr_html_()
    assert [summary.tag for summary in xla_ckpt.Checkpoints(tmp_path / "hf").summaries()] == ["hf"]
    for place in ("last.pt", "hf", "step_1"):
        assert xla_ckpt.has_checkpoint(tmp_path / place)
        assert xla_ckpt.list_tags(tmp_path / place) == []
        assert xla_ckpt.latest_tag(tmp_path / place) is None


def test_a_tag_of_adapters_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(requires_grad=False)
    xla_ckpt.save_checkpoint(tmp_path, "whole", model)
    xla_ckpt.save_checkpoint(tmp_path, "part", model, only="adapters")
    assert [summary.note for summary in xla_ckpt.Checkpoints(tmp_path).summaries()] == ["", "without its base model"]
    assert call(capsys, "ls", tmp_path)[1].count("without its base model") == 1
    assert "without its base model" in call(capsys, "show", tmp_path, "part")[1]
    assert "without its base model" not in call(capsys, "show", tmp_path, "whole")[1]
    code, out, _ = call(capsys, "diff", tmp_path / "whole", "part")
    assert (code, out.splitlines()[1]) == (1, f"b: part in {tmp_path} (without its base model)")


LS = {
    60: """\
/runs/lm
tag      commit  saved      size  notes
best          1  ?        1.2 MB  pinned
step_20      14  ?      123.5 GB  newest, pinned, dcp
""",
    100: """\
/runs/lm
tag      commit  saved  arrays      size  files  ranks  notes
best          1  ?          12    1.2 MB      2      1  pinned
step_20      14  ?        1200  123.5 GB     64     32  newest, pinned, dcp
""",
}


@pytest.mark.parametrize("width", [60, 100])
def test_a_listing_at_two_widths(width: int) -> None:
    """Columns are left out where there is no room for them; no number is broken."""
    one = {"sequence": 1, "created": "", "pinned": True, "problem": None, "note": ""}
    tags = [
        {**one, "tag": "best", "arrays": 12, "nbytes": 1_200_000, "files": 2, "ranks": 1, "layout": "native"},
        {**one, "tag": "step_20", "sequence": 14, "arrays": 1200, "nbytes": 123_456_789_012, "files": 64, "ranks": 32,
         "layout": "dcp"},
    ]  # fmt: skip
    listing = {"path": "/runs/lm", "tags": tags, "newest": "step_20", "roots": [], "beside": []}
    shown = on_terminal(reports.render_tag_list(listing), width)
    assert shown.splitlines() == LS[width].splitlines()


def test_long_names_are_folded_and_numbers_are_not() -> None:
    leaf = "optimizer/state/layers.0.attention.qkv_proj.weight/exp_avg_sq"
    rows = PlainTable("", ("leaf", "dtype", ">shape", "?>shards"), [(leaf, "float32", "4096 x 16", "8")])
    lines = on_terminal(rows, 60)
    assert max(map(len, lines.splitlines())) <= 60
    assert "4096 x 16" in lines
    assert "shards" not in lines
    assert "".join(line.split()[0] for line in lines.splitlines()[1:]) == leaf


@pytest.mark.parametrize(
    "words", ["show --leaf model ROOT best", "show ROOT --leaf model best", "show ROOT best --leaf model"]
)
def test_options_stand_anywhere(root: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, *words.replace("ROOT", str(root)).split())
    assert (code, out.split()[0]) == (0, "best")


def test_leaves_below_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(11))})
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    _, out, _ = call(capsys, "show", tmp_path, "--leaf", "model/layers.1", "--json")
    assert [a["leaf"] for a in json.loads(out)["arrays"]] == ["model/layers.1.weight", "model/layers.1.bias"]


def test_bash_completes_commands_options_and_choices() -> None:
    command = [sys.executable, "-m", "xla_ckpt", "completion", "bash"]
    script = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
    asked = {("sh",): "show", ("show", "--le"): "--leaf", ("convert", "a", "b", "--to", "torcht"): "torchtitan"}
    for words, expected in asked.items():
        line = f"COMP_WORDS=(xla-ckpt {' '.join(words)}); COMP_CWORD={len(words)}; _xla_ckpt; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [expected]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_help_has_examples_that_the_parser_takes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    examples = capsys.readouterr().out.partition("examples:\n")[2]
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    assert lines
    for line in lines:
        called = re.search(rf"xla-ckpt ({command}\b.*?)(?: {{2,}}|\)| [|>] |$)", line)
        assert called, line
        assert parse_arguments(shlex.split(called[1])).parser, line


def test_a_diff_in_a_pipe_says_in_which_tag_a_leaf_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tag in "ab":
        xla_ckpt.save(tmp_path, tag, {"w": torch.ones(1), tag: torch.ones(1)})
    _, out, _ = call(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert "leaf only in a\na\nleaf only in b\nb\n" in out


def test_an_export_says_that_it_has_no_config(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "export", root, root / "hf")
    assert (code, "There is no config.json" in out) == (0, True)


def test_a_tag_has_one_size_and_verify_says_what_it_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(8), "b": torch.ones(8)})
    xla_ckpt.convert(
        tmp_path, tmp_path / "pt", to="pt", mesh="tp=2", shardings=[("w", ("tp",))]
    )  # each rank has all of b
    header, row = call(capsys, "ls", tmp_path / "pt")[1].splitlines()
    assert dict(zip(header.split("\t"), row.split("\t"), strict=True))["size"] == "64 B"
    assert ", 64 B of arrays in 2 files by 2 ranks" in call(capsys, "show", tmp_path / "pt")[1]
    assert ": 2 arrays in 2 files, 96 B read, every byte as it was saved" in call(capsys, "verify", tmp_path / "pt")[1]
    for command, says in (("ls", "The size of a tag is that of its arrays"), ("verify", "how many bytes it read")):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert says in " ".join(capsys.readouterr().out.split())


def test_a_damaged_newest_tag_that_nobody_named_is_said_to_be_one_of_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, other = tmp_path / "root", "It is the newest tag; another one may be whole: name it with --tag."
    for tag in ("a", "b"):
        xla_ckpt.save(root, tag, {"model": {"w": torch.ones(2)}})
    xla_ckpt.finalize_checkpoint()
    for file in (root / "b").rglob("*.safetensors"):
        file.unlink()
    for args in (
        ["convert", root, tmp_path / "to", "--to", "native"],
        ["export", root, tmp_path / "to"],
    ):
        code, _, err = call(capsys, *args)
        assert (code, err.count(other)) == (1, 1)
        code, _, err = call(capsys, *args, "--tag", "b")
        assert (code, "another one" in err) == (1, False)
    assert call(capsys, "convert", root, tmp_path / "to", "--to", "native", "--tag", "a")[0] == 0
    shutil.rmtree(root / "a")
    code, _, err = call(capsys, "convert", root, tmp_path / "to_b", "--to", "native")
    assert (code, "another one" in err) == (1, False)
