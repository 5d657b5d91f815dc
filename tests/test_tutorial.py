"""docs/tutorial.md does what it says: its commands, in its order, on the program that it has its reader write."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.jobs import finish, places
from tests.nursery import Born, Program, bear
from tests.runs import ROOT, environment
from tests.test_documents import BLOCK

TEXT = (ROOT / "docs/tutorial.md").read_text()
COMMANDS = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENDS = {"train.py --steps 20 --kill-at 15": -signal.SIGKILL, "diff": 1}
COMMAND_LINE = "import sys\nfrom xla_ckpt.cli.main import main\nsys.exit(main())"


def start(words: Sequence[str], train: str, folder: Path) -> list[Born]:
    """The processes of one command; the ranks of torchrun have the environment that it would give them."""
    if words[0] == "xla-ckpt":
        return [bear(Program(COMMAND_LINE, tuple(words[1:]), "xla-ckpt"), env=environment(), cwd=folder)]
    if words[0] == "python":
        return [bear(Program(train, tuple(words[2:]), words[1]), env=environment(), cwd=folder)]
    assert words[0] == "torchrun", words
    world = int(words[1].removeprefix("--nproc-per-node="))
    return [bear(Program(train, tuple(words[3:]), words[2]), env=place, cwd=folder) for place in places(world)]


def test_the_commands_of_the_tutorial_do_what_it_says(tmp_path: Path) -> None:
    (train,) = BLOCK.findall(TEXT)
    printed: dict[str, str] = {}
    for line in "".join(COMMANDS.findall(TEXT)).splitlines():
        words = shlex.split(line, comments=True)
        command = shlex.join(words)
        wanted = next((code for part, code in ENDS.items() if part in command), 0)
        for code, output, errors in finish(start(words, train, tmp_path)):
            assert code == wanted, f"{command}: exit code {code}\n{output}\n{errors}"
            printed[command] = output
    resumed = {command: re.findall(r"resumed from (\w+)", output) for command, output in printed.items()}
    assert resumed["python train.py --steps 20"] in (["step_10"], ["step_15"])
    assert resumed["torchrun --nproc-per-node=2 train.py --steps 25"] == ["step_20"]
    assert resumed["torchrun --nproc-per-node=3 train.py --steps 30"] == ["step_25"]
    assert resumed["python train.py --steps 35"] == ["step_30"]
    listed = re.findall(r"^(step_\d+)", printed["xla-ckpt ls runs/tutorial"], re.MULTILINE)
    assert listed == ["step_25", "step_40", "step_45", "step_50"]
