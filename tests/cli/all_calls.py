"""A program that runs all commands, or the main public calls, in one process with streams of a kind.

`python -m tests.cli.all_calls KIND WHAT ROOT RESULT`: RESULT gets what each of them did, as JSON. Each command runs in
a forked child: it has the standard streams as the process got them, whatever an earlier one did to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Bare:
    """What a notebook, a test runner or a logger may set in the place of a stream: it can be written to."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


class Failing(Bare):
    """A stream that fails: a window that was closed, or an encoding that lacks characters."""

    encoding = "ascii"

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError("the window was closed")


REPLACED: dict[str, Callable[[], Any]] = {"bare": Bare, "failing": Failing, "none": lambda: None}


def commands(root: str, out: Path) -> dict[str, tuple[int, list[str]]]:
    """A command line of each command -> the exit code that it has with ordinary streams."""
    run = f"{root}/run"
    return {
        "ls": (0, ["ls", run]),
        "ls json": (0, ["ls", run, "--json"]),
        "ls below": (0, ["ls", root]),
        "show": (0, ["show", run]),
        "show json": (0, ["show", run, "--json"]),
        "show leaf": (0, ["show", run, "--leaf", "model"]),
        "show report": (0, ["show", run, "--report"]),
        "show file": (0, ["show", f"{root}/old.pt"]),
        "show dcp": (0, ["show", f"{root}/dcp"]),
        "no such tag": (1, ["show", run, "b"]),
        "no such leaf": (2, ["show", run, "--leaf", "none"]),
        "verify": (0, ["verify", run]),
        "verify all": (0, ["verify", run, "--all"]),
        "verify damaged": (1, ["verify", f"{root}/damaged"]),
        "explain": (0, ["explain", run, "--mesh", "tp=2"]),
        "diff": (1, ["diff", run, "step_1", "step_2"]),
        "view": (0, ["view", run, "--html", f"{out}/view.html", "--against", "step_1"]),
        "convert": (0, ["convert", run, f"{out}/xser", "--to", "xser"]),
        "convert refused": (2, ["convert", run, run, "--to", "xser"]),
        "export": (0, ["export", run, f"{out}/hf"]),
        "pin": (0, ["pin", run, "step_1"]),
        "unpin": (0, ["unpin", run, "step_1"]),
        "retain": (0, ["retain", run, "--newest", "1", "--dry-run"]),
        "rm unasked": (2, ["rm", run, "step_1"]),
        "rm": (0, ["rm", f"{root}/more", "step_1", "--yes"]),
        "clean": (0, ["clean", run]),
        "adopt": (2, ["adopt", run]),
        "upload": (2, ["upload", run, run]),
        "completion": (0, ["completion", "bash"]),
        "help": (0, ["--help"]),
        "no command": (2, ["shwo"]),
    }


def run_commands(root: str, out: Path, streams: dict[str, Any]) -> dict[str, Any]:
    """The exit code of each command, or its traceback; and the code that is expected."""
    # Before the forks, each of which would import them.

    import xla_ckpt.cli.results
    import xla_ckpt.cli.view.server  # noqa: F401
    from xla_ckpt.__main__ import main
    from xla_ckpt.cli.main import COMMANDS

    lines = commands(root, out)
    assert {words[0] for _, words in lines.values()} >= {*COMMANDS} - {"selftest"}
    results: dict[str, Any] = {}
    for name, (expected, words) in lines.items():
        told = out / "told.json"  # no pipe, which could get the descriptor of a closed stream
        told.unlink(missing_ok=True)
        if not (child := os.fork()):
            for stream, value in streams.items():
                setattr(sys, stream, value)
            sys.argv[1:] = words
            said = ""
            try:
                code: Any = main()
            except SystemExit as end:
                code = end.code
            except BaseException:
                code, said = "raised", traceback.format_exc()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            told.write_text(json.dumps([code, said[-2000:]]))
            os._exit(0)
        os.waitpid(child, 0)
        results[name] = [expected, *(json.loads(told.read_text()) if told.exists() else ["died", ""])]
    return results


def run_calls(root: str, out: Path) -> dict[str, Any]:
    """What each of the main public calls raised; None if nothing."""
    import numpy as np
    import torch

    import xla_ckpt
    import xla_ckpt.dcp

    tree = {"w": np.arange(8.0), "modèle": torch.ones(2), "plain": "é"}
    made, model = f"{root}/made", torch.nn.Linear(2, 2)
    shown = xla_ckpt.SaveOptions(progress=True, stale="ignore")
    tags = xla_ckpt.Checkpoints(made)
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: xla_ckpt.save(made, "step_1", tree),
        "save with a bar": lambda: xla_ckpt.save(made, "step_2", tree, options=shown),
        "async save": lambda: xla_ckpt.save(made, "step_3", tree, async_save=True).result(),
        "save_checkpoint": lambda: xla_ckpt.save_checkpoint(f"{root}/m", "step_1", model),
        "save_checkpoint again": lambda: xla_ckpt.save_checkpoint(f"{root}/m", "step_2", model),  # a warning
        "trace": lambda: xla_ckpt.save(made, "step_4", tree, options=xla_ckpt.SaveOptions(trace=f"{root}/traces/")),
        "load_checkpoint": lambda: xla_ckpt.load_checkpoint(f"{root}/m", model=model),
        "restore": lambda: xla_ckpt.restore(made, "step_1"),
        "restore with a bar": lambda: xla_ckpt.restore(made, options=xla_ckpt.LoadOptions(progress=True)),
        "verify": lambda: xla_ckpt.verify(made),
        "list_tags": lambda: xla_ckpt.list_tags(made),
        "has_checkpoint": lambda: xla_ckpt.has_checkpoint(made),
        "convert": lambda: xla_ckpt.convert(f"{root}/m", f"{root}/x", "step_1", to="xser"),
        "export_hf": lambda: xla_ckpt.export_hf(f"{root}/m", f"{root}/hf", "step_1"),
        "explain": lambda: xla_ckpt.explain(made, mesh="tp=2"),
        "diff": lambda: xla_ckpt.diff(made, made, "step_1", "step_2"),
        "show": lambda: [repr(tags.show()), tags.show()._repr_html_(), repr(tags), tags._repr_html_()],
        "dcp.save": lambda: xla_ckpt.dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{root}/stock", no_dist=True),
        "dcp.load": lambda: xla_ckpt.dcp.load({"w": torch.ones(2)}, checkpoint_id=f"{root}/stock", no_dist=True),
        "delete": lambda: tags.delete("step_1"),
        "finalize": xla_ckpt.finalize_checkpoint,
    }
    results: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            call()
        except BaseException:
            results[name] = ["raised", traceback.format_exc()[-2000:]]
        else:
            results[name] = [None, ""]
    return results


if __name__ == "__main__":
    kind, what, root_, result = sys.argv[1:]
    Path(result).parent.mkdir(exist_ok=True)
    os.chdir(work := Path(result).parent)
    if kind == "removed":
        import torch  # noqa: F401  # its libraries are found by a path only while there is a working directory

        os.chdir(gone := work / "gone") if (work / "gone").mkdir() is None else None
        gone.rmdir()
    streams_: dict[str, Any] = {}
    if kind.partition(" ")[0] in REPLACED:
        replaced, _, names = kind.partition(" ")
        streams_ = {name: REPLACED[replaced]() for name in names.split()}
    if what == "commands":
        answer = run_commands(root_, work, streams_)
    else:
        for name_, value_ in streams_.items():
            setattr(sys, name_, value_)
        answer = run_calls(root_, work)
    Path(result).write_text(json.dumps(answer))
