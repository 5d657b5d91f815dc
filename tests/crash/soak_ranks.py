"""What the processes of the soak do: ranks that save, a reader that loads, and the look at what is there.

Every checkpoint has a number of its own. All elements of all its arrays are that number, and it is stored with its tag,
so that a mixture of two checkpoints is seen, and a checkpoint under a wrong name, too.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

import xla_ckpt
from tests.crash.operations import Lost, arrays_of, momentum_of
from tests.crash.soak_judge import Ask, Event, Sample, write_line
from xla_ckpt.saving.background import SaveHandle
from xla_ckpt.tags.orbax_commit import ORBAX_COMMITTER

COLUMNS = 200
ROWS = (8, 160, 1600)
"""Heights of the weight: 6 kB, 128 kB or 1.3 MB, as parameters and once more as momentum."""

LAYOUTS = ("native", "native", "xser", "pt", "dcp", "smp")
PARITIES: Sequence[Literal["block", "file"] | None] = (None, None, "block", "file")
STEPS_TO_A_LIFE = (6, 40)
ERRORS_KEPT = 4000


def script(seed: str, first: int) -> list[Ask]:
    """The saves of one life of a job, decided by its seed. `first` is the number of the first one."""
    dice = random.Random(seed)
    return [ask(dice, number) for number in range(first, first + dice.randint(*STEPS_TO_A_LIFE))]


def ask(dice: random.Random, number: int) -> Ask:
    """One save."""
    layout = dice.choice(LAYOUTS)
    tag = dice.choice((f"step_{number}", f"step_{number}", "last", "best"))
    return Ask(
        number=number,
        tag=f"{tag}_partial" if layout == "smp" else tag,  # SMP's names of tags end so
        layout=layout,
        rows=dice.choice(ROWS),
        kept=dice.choice((1, 2, 3)),
        pinned=tag == "best",
        parity=dice.choice(PARITIES) if layout == "native" else None,
        mode=dice.choice(("sync", "sync", "async", "async, waited for", "async, overlapping")),
    )


def save_as_rank(root: Path, wanted: Ask, timeout: float) -> SaveHandle:
    """Save a state of four ranks: arrays split over two of them, and each half held by two."""
    import torch.distributed as dist

    height = wanted.rows // 2 if dist.is_initialized() else wanted.rows
    model = torch.nn.Linear(COLUMNS, height)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(wanted.number)
    split: dict[str, Any] = (
        {"mesh": xla_ckpt.Mesh(tp=2, dp=dist.get_world_size() // 2)} if dist.is_initialized() else {}
    )
    return xla_ckpt.save_checkpoint(
        root,
        wanted.tag,
        model,
        momentum_of(model, wanted.number),
        user_content=[wanted.number, wanted.tag],
        num_kept_ckpts=wanted.kept,
        pinned=wanted.pinned,
        layout=wanted.layout,
        options=xla_ckpt.SaveOptions(
            parity=wanted.parity,
            on_error="warn" if wanted.mode == "async, overlapping" else "raise",
            snapshot="overlap" if wanted.mode == "async, overlapping" else "host",
            timeout=timeout,
        ),
        async_save=wanted.mode != "sync",
        shardings=[("", ("tp",))],
        num_workers=2,
        **split,
    )


class Journal:
    """What a rank says of its saves, a line each, in a file that outlives it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def say(self, wanted: Ask, word: str, error: BaseException | None = None) -> None:
        """Write what became of a save: it has begun, is done, or has failed with an error."""
        write_line(
            self._file,
            Event(
                number=wanted.number,
                word=word,
                error=type(error).__name__ if error else "",
                committed=bool(getattr(error, "committed", False)),
                typed=error is None or isinstance(error, xla_ckpt.CheckpointError),
                text=str(error)[:600] if error else "",
            ),
        )


def lives(rank: int, folder: Path, root: Path, seed: str, first: int, timeout: float) -> None:
    """One life of a job: the saves of its script, until one of the ranks is missed."""
    journal = Journal(folder / f"journal.{rank}")
    saver = Saver(root, journal, timeout)
    for wanted in script(seed, first):
        if not saver.save(wanted):
            return
    saver.settle()
    xla_ckpt.finalize_checkpoint()


def lasts(rank: int, folder: Path, root: Path, seed: str, timeout: float) -> None:
    """A job that lives as long as the soak: it saves until the file `stop` is there, and measures itself."""
    import torch.distributed as dist

    dice = random.Random(seed)
    journal = Journal(folder / f"journal.{rank}")
    saver, meter = Saver(root, journal, timeout), Meter(folder / f"samples.{rank}")
    number = 0
    while True:
        stop = torch.tensor([float((folder / "stop").exists() or not folder.exists())])
        dist.broadcast(stop, 0)
        if stop.item():
            break
        number += 1
        wanted = ask(dice, number)
        if rank == 0:
            write_line(folder / "asked", wanted)
        if not saver.save(wanted):
            raise RuntimeError(f"save {number} misses a rank, and none was killed")
        if number % 5 == 0:
            saver.settle()
            xla_ckpt.finalize_checkpoint()
            meter.measure(number)
    saver.settle()
    xla_ckpt.finalize_checkpoint()


class Saver:
    """Saves one after the other; one may be in the background, of which is asked before the next but one."""

    def __init__(self, root: Path, journal: Journal, timeout: float) -> None:
        self._root, self._journal, self._timeout = root, journal, timeout
        self._open: tuple[Ask, SaveHandle] | None = None

    def save(self, wanted: Ask) -> bool:
        """Make a save; False if it misses a rank."""
        if self._open is not None and self._open[0].mode != "async, overlapping" and not self.settle():
            return False
        self._journal.say(wanted, "begun")
        try:
            handle = save_as_rank(self._root, wanted, self._timeout)
        except xla_ckpt.CheckpointError as error:
            self._journal.say(wanted, "failed", error)
            return self.settle() and not isinstance(error, xla_ckpt.RankFailedError)
        earlier, self._open = self._open, (wanted, handle)
        held = earlier is None or self._ask(*earlier)
        return held and (wanted.mode in ("async", "async, overlapping") or self.settle())

    def settle(self) -> bool:
        """Wait for the save in the background; False if it misses a rank."""
        open_, self._open = self._open, None
        return open_ is None or self._ask(*open_)

    def _ask(self, wanted: Ask, handle: SaveHandle) -> bool:
        try:
            handle.result()
        except xla_ckpt.CheckpointError as error:
            self._journal.say(wanted, "failed", error)
            return not isinstance(error, xla_ckpt.RankFailedError)
        self._journal.say(wanted, "done")
        return True


class Meter:
    """What this process holds of the machine, in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def measure(self, calls: int) -> None:
        """Take a sample. `calls` says how many saves or loads lie before it."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        sample = Sample(
            seconds=time.monotonic(),
            calls=calls,
            rss=pages * os.sysconf("SC_PAGE_SIZE"),
            threads=len(os.listdir("/proc/self/task")),
            named=sorted(thread.name for thread in threading.enumerate()),
            descriptors=sorted(_descriptors()),
        )
        write_line(self._file, sample)


def _descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
        except FileNotFoundError:  # the one by which the directory is listed
            continue
    return found


# --- reading -------------------------------------------------------------------------------------------------------


def number_of(root: Path, tag: str) -> int:
    """The number that a tag was saved with, after looking at all of it.

    Raises:
        Lost: It is a mixture, or lacks something, or was saved under another name.
        CheckpointError: What the load says.
    """
    tree = xla_ckpt.restore(root, tag, num_workers=2).tree
    number, name = tree["user_content"]
    arrays = arrays_of(tree)
    if name != tag:
        raise Lost(f"tag {tag} holds what was saved as {name}")
    if len(arrays) < 4 or {array.shape[1:] for array in arrays} != {(COLUMNS,), ()}:
        raise Lost(f"tag {tag} lacks arrays: {[tuple(array.shape) for array in arrays]}")
    if len({array.shape[0] for array in arrays}) != 1 or not all(bool((array == number).all()) for array in arrays):
        raise Lost(f"tag {tag} is a mixture: {number} beside {[array.flatten()[:3].tolist() for array in arrays]}")
    return int(number)


def look(root: Path) -> list[tuple[str, int]]:
    """Verify and load every listed tag, when nobody saves: names and numbers, oldest first.

    Raises:
        Lost: A listed tag is not whole.
    """
    found = []
    for tag in xla_ckpt.list_tags(root):
        report = xla_ckpt.verify(root, tag)
        if not report.ok:
            raise Lost(f"tag {tag}: {report.problems}")
        try:
            found.append((tag, number_of(root, tag)))
        except xla_ckpt.CheckpointError as error:
            raise Lost(f"tag {tag} is listed, and does not load: {error}") from error
    if xla_ckpt.latest_tag(root) != (found[-1][0] if found else None):
        raise Lost(f"the newest tag is {xla_ckpt.latest_tag(root)} of {found}")
    return found


def reads(folder: Path, roots: Sequence[Path], seed: str) -> int:
    """Read while others save, until the file `stop` is there; how many loads there were.

    A tag that retention removes or a save replaces between two calls is absent. Everything else is a problem, and
    so is a newest tag that is older than the newest one before.
    """
    dice, meter = random.Random(seed), Meter(folder / "samples.reader")
    newest = dict.fromkeys(roots, 0)
    loads = 0
    ORBAX_COMMITTER.wait_ready(60)  # the first load would start it, after the first samples
    while folder.exists() and not (folder / "stop").exists():
        root = dice.choice(list(roots))
        try:
            newest[root] = dice.choice(READS)(root, dice, newest[root])
        except xla_ckpt.NoCheckpointError:
            continue
        except Exception as error:
            with (folder / "reader").open("a") as file:
                file.write(f"{root.name}: {type(error).__name__}: {error}\n".replace("\n", " ")[:ERRORS_KEPT] + "\n")
            traceback.print_exc()
            continue
        loads += 1
        if loads % 20 == 0:
            meter.measure(loads)
    return loads


def _any_tag(root: Path, dice: random.Random, newest: int) -> int:
    tags = xla_ckpt.list_tags(root)
    if tags:
        number_of(root, dice.choice(tags))
    return newest


def _newest_tag(root: Path, dice: random.Random, newest: int) -> int:
    restored = xla_ckpt.restore(root, num_workers=dice.choice((1, 4)))
    number, tag = restored.tree["user_content"]
    if number < newest:
        passed = f"; damaged: {restored.report.corrupt_tags}" if restored.report.corrupt_tags else ""
        raise Lost(f"the newest tag, {tag}, has the number {number}, and had {newest} before{passed}")
    return int(number)


def _verified(root: Path, dice: random.Random, newest: int) -> int:
    tags = xla_ckpt.list_tags(root)
    if tags:
        tag = dice.choice(tags)
        report = xla_ckpt.verify(root, tag)
        if not report.ok:
            raise Lost(f"verify of {tag}: {report.problems}")
    return newest


READS: Sequence[Callable[[Path, random.Random, int], int]] = (_any_tag, _newest_tag, _newest_tag, _verified)
