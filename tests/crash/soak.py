"""A soak: jobs of four ranks save, are killed and start again on a small disk that fills up, while others read.

    python -m tests.crash.soak [--minutes 30] [--kills 0] [--seed 0] [--disk 64] [--json FILE] [--write]

One job lives for one round: it makes the saves of its script, is killed at some instant or comes to its end, and what
is there then is judged. Another job, with a root of its own, and a reader of both roots live as long as the soak, and
show whether anything leaks. The seed decides scripts and kills; how processes interleave is different in each run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.crash import soak_judge as judge
from tests.crash import soak_ranks, soak_report
from tests.crash.soak_report import Life, Result
from tests.jobs import run_alone, start_on_ranks
from tests.nursery import Born, Call, bear, end_all
from tests.runs import environment, names_in

RANKS = 4
TIMEOUT = 20.0
"""How long a rank waits for one that was killed (seconds)."""

PATIENCE = 100.0
"""After this time a process hangs; the timeout of the job that is never killed, too (seconds)."""

ENDINGS = ("kill all", "kill all", "kill one", "kill one", "orderly")
NUMBERS_TO_A_LIFE = 100

LEFT_FREE = (0, 100_000, 1_500_000, 4_000_000)
"""Room on the full disk (bytes): for nothing, or for some of the saves, which have 13 kB to 2.6 MB."""

ABOUT_A_SAVE = 0.15
"""How long a save takes here, and a kill lies within the first one that is begun at its time (seconds)."""


@dataclass(frozen=True)
class Places:
    """Where things lie."""

    folder: Path
    """What the processes say."""

    disk: Path
    """The small disk, if `small`."""

    small: bool
    temporary: Path
    """TMPDIR of all processes."""


class Disk:
    """The small disk, and the file that fills it."""

    def __init__(self, places: Places) -> None:
        self._places, self._filler = places, places.disk / "filler"
        self.fills = 0

    def fill(self, leave: int) -> None:
        """Leave so many bytes free, or less."""
        if not self._places.small:
            return
        self.fills += 1
        with self._filler.open("wb", buffering=0) as file:
            try:
                while (free := _free(self._places.disk)) > leave:
                    file.write(b"\0" * min(1 << 20, max(free - leave, 4096)))
            except OSError:  # the jobs have taken the rest
                return

    def empty(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)


def _kill_all(ranks: Sequence[Born]) -> None:
    for rank in ranks:
        rank.kill()


def _free(path: Path) -> int:
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


class Soak:
    """All that runs, and what was found."""

    def __init__(self, places: Places, seed: int) -> None:
        self._places, self._seed = places, seed
        self._env = {"TMPDIR": str(places.temporary)}
        self._disk = Disk(places)
        self._problems: list[str] = []
        self._lives: list[Life] = []
        self._found: judge.Found = []
        self._roots = (places.disk / "lives", places.disk / "lasts")

    def run(self, seconds: float, kills: int) -> Result:
        """Soak for so long, and until so many jobs were killed, and judge."""
        folder = self._places.folder
        lasting = start_on_ranks(
            soak_ranks.lasts, RANKS, folder, self._roots[1], f"{self._seed}/lasting", PATIENCE, env=self._env
        )
        reader = bear(
            Call.of(soak_ranks.reads, folder, self._roots, f"{self._seed}/reader"), env=environment(self._env)
        )
        if not self._reach(lasting, folder, 0):
            self._problems.append("the job that is to last has not begun to save")
        end = time.monotonic() + seconds
        while (time.monotonic() < end or self._kills() < kills) and not self._problems:
            self._live(random.Random(f"{self._seed}/{len(self._lives)}"))
            if any(process.has_ended() for process in (*lasting, reader)):
                self._problems.append("a process that is to last has ended")
        (folder / "stop").touch()
        self._wait([*lasting, reader], "at the end")
        if any(process.returncode == -signal.SIGKILL for process in (*lasting, reader)):
            self._problems.append("a process that is to last was killed, and not by the soak")
        # What somebody reads when it is retired stays for the next save to remove: so nobody reads any more.
        self._live(random.Random(f"{self._seed}/last"), last=True)
        loads = reader.value() if reader.returncode == 0 else 0
        self._judge_lasting()
        self._judge_rest()
        return Result(
            lives=tuple(self._lives), lasting=self._said(folder), asked=tuple(self._asked()), loads=loads,
            fills=self._disk.fills, small=self._places.small, trends=self._trends(), problems=tuple(self._problems),
        )  # fmt: skip

    def _kills(self) -> int:
        return sum(life.ending != "orderly" for life in self._lives)

    # --- one life --------------------------------------------------------------------------------------------------

    def _live(self, dice: random.Random, *, last: bool = False) -> None:
        """One life of a job, and what is there after it."""
        number = len(self._lives)
        folder, root = self._places.folder / f"life.{number}", self._roots[0]
        folder.mkdir()
        seed, first = f"{self._seed}/script/{number}", 1 + NUMBERS_TO_A_LIFE * number
        asked = soak_ranks.script(seed, first)
        ranks = start_on_ranks(soak_ranks.lives, RANKS, folder, root, seed, first, TIMEOUT, env=self._env)
        ending, fills = "orderly" if last else dice.choice(ENDINGS), self._disk.fills
        if not last and dice.random() < 0.5:
            self._reach(ranks, folder, dice.randrange(len(asked)))
            self._disk.fill(dice.choice(LEFT_FREE))
            self._pass(ranks, dice.uniform(0.2, 2))
            if dice.random() < 0.5:  # else they are killed, or come to their end, while it is full
                self._disk.empty()
        self._kill(ranks, ending, folder, dice, len(asked))
        self._wait(ranks, f"life {number}")
        self._disk.empty()
        killed = any(rank.returncode == -signal.SIGKILL for rank in ranks)
        events = self._said(folder)
        allowed = (*(["StorageError"] if self._disk.fills > fills else []), *(["RankFailedError"] if killed else []))
        became = judge.outcomes(asked, events)
        wrong = judge.said_wrongly(events, allowed)
        found = self._look(root)
        if found is not None:
            wrong += judge.lost(self._found, asked, became, found)
            self._found = found
        if not killed and set(became.values()) - {"done", "failed"}:
            wrong.append(f"nobody says what became of saves: {became}")
        self._problems += [f"life {number} ({ending}): {text}" for text in wrong]
        self._lives.append(Life(ending=ending if killed else "orderly", asked=tuple(asked), became=became))
        if last and found is not None and (litter := set(names_in(root)) - {tag for tag, _ in found}):
            inside = {name: sorted(os.listdir(root / name)) for name in sorted(litter) if (root / name).is_dir()}
            self._problems.append(f"left in the directory: {sorted(litter)}, and in it {inside}")
        shutil.rmtree(folder)

    def _kill(self, ranks: Sequence[Born], ending: str, folder: Path, dice: random.Random, saves: int) -> None:
        """Kill what is to be killed, at an instant of one of the saves."""
        if ending == "orderly":
            return
        self._reach(ranks, folder, dice.randrange(saves))
        self._pass(ranks, dice.uniform(0, ABOUT_A_SAVE))
        _kill_all(ranks if ending == "kill all" else [dice.choice(ranks)])
        if ending == "kill one" and dice.random() < 0.5:  # the others are killed while they wait for it
            self._pass(ranks, dice.uniform(0, 3))
            _kill_all(ranks)

    def _reach(self, ranks: Sequence[Born], folder: Path, number: int) -> bool:
        """Wait until rank 0 has begun more saves than this; False if the job has ended, or hangs."""
        end = time.monotonic() + PATIENCE
        while not all(rank.has_ended() for rank in ranks) and time.monotonic() < end:
            events = judge.read_lines(folder / "journal.0", judge.Event)
            if sum(event.word == "begun" for event in events) > number:
                return True
            self._pass(ranks, 0.02)
        return False

    def _pass(self, ranks: Sequence[Born], seconds: float) -> None:
        """Let time pass, while any rank lives."""
        left = [rank for rank in ranks if not rank.has_ended()]
        end = time.monotonic() + seconds
        while left and (rest := end - time.monotonic()) > 0:
            ready = select.select(left, [], [], rest)[0]
            left = [rank for rank in left if rank not in ready]

    def _wait(self, processes: Sequence[Born], when: str) -> None:
        """Wait for the end of processes; one that hangs, or ends badly without having been killed, is a problem."""
        end = time.monotonic() + PATIENCE
        for number, process in enumerate(processes):
            try:
                process.communicate(max(end - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # which shows where it is
                self._problems.append(f"{when}: process {number} hangs: {process.communicate()[1][-4000:]}")
                continue
            if process.returncode not in (0, -signal.SIGKILL):
                told = process.communicate()[1][-3000:]
                self._problems.append(f"{when}: process {number} ended with {process.returncode}: {told}")

    # --- what is there ---------------------------------------------------------------------------------------------

    def _look(self, root: Path) -> judge.Found | None:
        try:
            return run_alone(soak_ranks.look, root, env=self._env, timeout=PATIENCE)
        except Exception as error:
            self._problems.append(f"looking at {root.name}: {type(error).__name__}: {error}")
            return None

    def _said(self, folder: Path) -> list[judge.Event]:
        return [e for rank in range(RANKS) for e in judge.read_lines(folder / f"journal.{rank}", judge.Event)]

    def _asked(self) -> list[judge.Ask]:
        return judge.read_lines(self._places.folder / "asked", judge.Ask)

    def _judge_lasting(self) -> None:
        asked, events = self._asked(), self._said(self._places.folder)
        wrong = judge.said_wrongly(events, ["StorageError"] if self._disk.fills else [])
        found = self._look(self._roots[1])
        if found is not None:
            wrong += judge.lost([], asked, judge.outcomes(asked, events), found)
        self._problems += [f"the job that lasts: {text}" for text in wrong]
        reader = self._places.folder / "reader"
        self._problems += [f"reader: {line}" for line in (reader.read_text().splitlines() if reader.exists() else [])]

    def _judge_rest(self) -> None:
        """Temporary files and shared memory that are left. /dev/shm is the soak's own if the disk is."""
        places = [self._places.temporary, *([Path("/dev/shm")] if self._places.small else [])]
        self._problems += [f"left in {place}: {name}" for place in places for name in os.listdir(place)]

    def _trends(self) -> dict[str, judge.Trend]:
        names = [*(f"rank {rank}" for rank in range(RANKS)), "reader"]
        files = [self._places.folder / f"samples.{name.removeprefix('rank ')}" for name in names]
        found = {
            name: made
            for name, file in zip(names, files, strict=True)
            if (made := judge.trend(judge.read_lines(file, judge.Sample))) is not None
        }
        self._problems += [f"{name}: {text}" for name, made in found.items() for text in made.problems]
        return found


# --- the command ---------------------------------------------------------------------------------------------------


def _with_small_disk(arguments: Sequence[str], folder: Path, size: int) -> list[str] | None:
    """The command that soaks on a disk of its own, which is gone with the last process; None where that may not be."""
    mount = f"mount -t tmpfs -o size={size}m tmpfs {folder}/disk && mount -t tmpfs tmpfs /dev/shm"
    inside = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*inside, mount], capture_output=True, check=False).returncode:
        return None
    return [*inside, f'{mount} && exec "$@"', "sh", sys.executable, "-m", "tests.crash.soak", *arguments, "--small"]


def main(arguments: Sequence[str]) -> int:
    """Soak; 1 if there were problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kills", type=int, default=0, help="go on until so many jobs were killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disk", type=int, default=64, help="size of the small disk (MiB)")
    parser.add_argument("--json", type=Path, help="a file for the result")
    parser.add_argument("--write", action="store_true", help="write docs/measured/reliability.md")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.folder is None:
        with tempfile.TemporaryDirectory(prefix="soak-") as name:
            folder = Path(name)
            for part in ("disk", "said", "temporary"):
                (folder / part).mkdir()
            arguments = [*arguments, "--folder", name]
            command = _with_small_disk(arguments, folder, given.disk)
            if command is None:
                print("no disk can be mounted here (that needs root): none fills up")
            plain = [sys.executable, "-m", "tests.crash.soak", *arguments]
            return subprocess.run(command or plain, env=environment(), check=False).returncode
    places = Places(given.folder / "said", given.folder / "disk", given.small, given.folder / "temporary")
    began = time.monotonic()
    try:
        result = Soak(places, given.seed).run(given.minutes * 60, given.kills)
    finally:
        end_all()
    seconds = time.monotonic() - began
    if given.json:
        given.json.write_text(json.dumps(asdict(result)))
    print("\n".join([*result.problems, *soak_report.lines(result, seconds, given.seed)]))
    if given.write:
        soak_report.write(result, seconds, given.seed)
    return int(bool(result.problems))


if __name__ == "__main__":
    # The module of this name, and not this one, is what is imported elsewhere.
    import importlib

    sys.exit(importlib.import_module("tests.crash.soak").main(sys.argv[1:]))
