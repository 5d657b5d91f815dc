"""What is done with a changed checkpoint, and how that ends: in a process that is only for that."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import random
import resource
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import xla_ckpt
from tests.fuzz import mutations
from tests.fuzz.specimens import TAG, Specimen, module
from xla_ckpt.cli.main import main as command

SECONDS = 2.0
"""Most processor time of one call (s)."""

RESIDENT = 128 << 20
"""Most memory of one call, beside what the size of the file allows (bytes)."""

TIMES = 100
"""Memory that a byte of the files may take (bytes)."""

RARE = 0.01
"""The share of inputs after which a conversion, or the next save, is made. Both take longer and leave threads behind:
the worker ends after them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an input."""

    specimen: str
    seed: int
    kind: str
    how: str
    verdict: str = ""
    """The worst of: refused, exact, other, missed, untyped, slow, memory, hangs."""

    call: str = ""
    """The call that ended so."""

    text: str = ""
    forged: bool = False
    """Whether the digests, where there are any, fit to what was made."""


ORDER = ("exact", "refused", "other", "missed", "untyped", "slow", "memory", "hangs")


def fingerprint(value: Any) -> str:
    """What a tree holds, bit for bit."""
    held = hashlib.sha256()

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach()
            held.update(f"{value.dtype}{tuple(value.shape)}".encode())
            held.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        elif isinstance(value, np.ndarray):
            held.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        elif isinstance(value, dict):
            held.update(f"{type(value)}{len(value)}".encode())
            for key, member in value.items():
                visit(key)
                visit(member)
        elif isinstance(value, list | tuple):
            held.update(f"{type(value)}{len(value)}".encode())
            for member in value:
                visit(member)
        elif isinstance(value, torch.Generator):  # its repr is an address
            visit(value.get_state())
        elif isinstance(value, int):
            held.update(f"{type(value)}{value:x}".encode())  # Python refuses to write long ones in decimals
        else:
            held.update(f"{type(value)}{value!r}".encode())

    visit(value)
    return held.hexdigest()


@dataclass(slots=True)
class Case:
    """A checkpoint that is looked at."""

    specimen: Specimen
    root: Path

    def files(self) -> list[Path]:
        """The files that are changed, the small ones of the root directory included."""
        top = self.specimen.path(self.root) if self.specimen.single else self.root
        found = [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
        return [p for p in found if p.relative_to(self.root).parts[0] != "old"] if not self.specimen.single else found

    @property
    def cheap(self) -> tuple[str, ...]:
        """The calls of which two are made after each change."""
        return CHEAP if self.specimen.fits else tuple(call for call in CHEAP if call != "load")

    def restore(self) -> str:
        path, tag = self.specimen.path(self.root), self.specimen.tag
        return fingerprint(xla_ckpt.restore(path, tag, num_workers=1).tree)

    def load(self, tag: str | None = None) -> str:
        """Into a model: the newest good tag, if none is named."""
        made = module(0)
        path = self.specimen.path(self.root)
        xla_ckpt.load_checkpoint(path, tag, model=made, strict=False, num_workers=1)
        return fingerprint(list(made.state_dict().items()))

    def listing(self) -> str:
        return repr((xla_ckpt.list_tags(self.root), xla_ckpt.latest_tag(self.root)))

    def verify(self) -> str:
        report = xla_ckpt.verify(self.specimen.path(self.root), self.specimen.tag, num_workers=1)
        if report.problems:
            raise report.problems[0]
        return "ok"

    def on_command(self, *words: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return str(command(list(words)))

    def show(self) -> str:
        named = [str(self.specimen.path(self.root)), *(["--tag", TAG] if self.specimen.tag else [])]
        return self.on_command("show", *named) + self.on_command("show", "--json", *named)

    def ls(self) -> str:
        return self.on_command("ls", str(self.root)) + self.on_command("ls", "--json", str(self.root))

    def explain(self) -> str:
        xla_ckpt.explain(self.specimen.path(self.root), self.specimen.tag, mesh="dp=2")
        return "ok"

    def convert(self) -> str:
        made = self.root.parent / "made"
        shutil.rmtree(made, ignore_errors=True)
        xla_ckpt.convert(
            self.specimen.path(self.root), made, self.specimen.tag, options=xla_ckpt.ConvertOptions(num_workers=1)
        )
        return "ok"

    def save(self) -> str:
        """The next save, beside a checkpoint that is broken, works; it is made in a copy."""
        copy = self.root.parent / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        special = self.root.parent / "kept"
        os.rename(self.root, copy)  # a pipe cannot be copied
        shutil.copytree(special, self.root, symlinks=True)
        made = module(5)
        try:
            xla_ckpt.save_checkpoint(copy, "next", made, num_workers=1, num_kept_ckpts=1)
            xla_ckpt.finalize_checkpoint()
        except xla_ckpt.CheckpointError as error:
            raise AssertionError(f"the next save fails: {error}") from error
        return "ok"


ROOM = 1 << 32
"""Address space that the threads of a save may take besides (bytes)."""

MARGIN = 1 << 30
"""Address space that a worker may take beside what it has when it is warm (bytes). tensorstore begins a dozen threads
when an input has it read several chunks at once, which reserve half of this."""

CHEAP = ("listing", "load", "verify", "show", "ls", "explain")


def memory_high() -> int:
    """The most memory that this process had since `memory_reset` (bytes)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) << 10


def memory_reset() -> int:
    """Count `memory_high` from now on; what there is now (bytes)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return memory_high()


SPECIAL = ("pipe", "directory", "link out", "link in a circle", "device", "missing", "unreadable")


def put(path: Path, data: bytes) -> None:
    """Put a file in place of whatever is there."""
    clear(path)
    path.write_bytes(data)


def clear(path: Path) -> None:
    """Remove what is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or path.exists():
        path.unlink()


def make_special(path: Path, how: str) -> None:
    """Put something that is no regular file in place of a file."""
    clear(path)
    if how == "pipe":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    elif how == "link out":
        path.symlink_to("/etc/passwd")
    elif how == "link in a circle":
        path.symlink_to(path.name)
    elif how == "device":
        path.symlink_to("/dev/zero")
    elif how == "unreadable":
        path.mkdir()
        (path / "x").write_bytes(b"x")


class Bench:
    """All specimens, in a directory of this process, and what they hold."""

    def __init__(self, specimens: list[Specimen], made: Path, work: Path) -> None:
        logging.disable(logging.CRITICAL)
        torch.set_num_threads(1)
        self.limit = 0
        """Address space that this process may take (bytes)."""
        self.spent = False
        """Whether there are threads that further inputs would find."""
        self.old: dict[str, list[bytes]] = {}
        """The files of the tag before the one that is changed."""
        self.older: dict[str, str] = {}
        """What a load makes of the tag before the one that is changed."""
        self.expected: dict[str, dict[str, str]] = {}
        self.originals: dict[str, dict[Path, bytes]] = {}
        self.cases: dict[str, Case] = {}
        for specimen in specimens:
            home = work / specimen.name.replace(" ", "_").replace(",", "")
            shutil.copytree(made / specimen.name, home / "root")
            shutil.copytree(made / specimen.name, home / "kept")
            case = self.cases[specimen.name] = Case(specimen, home / "root")
            self.originals[specimen.name] = {path: path.read_bytes() for path in case.files()}
            self.expected[specimen.name] = {call: getattr(case, call)() for call in ("restore", *case.cheap)}
            self.old[specimen.name] = [p.read_bytes() for p in (case.root / "old").rglob("*") if p.is_file()]
            if not specimen.single:
                self.older[specimen.name] = case.load("old")
        with open("/proc/self/statm") as file:
            self.limit = int(file.read().split()[0]) * resource.getpagesize() + MARGIN
        resource.setrlimit(resource.RLIMIT_AS, (self.limit, resource.RLIM_INFINITY))

    def change(self, name: str, seed: int) -> tuple[str, str, bool]:
        """Change one specimen; (kind of file, how, whether digests were made right again)."""
        random_ = random.Random(f"{name} {seed}")
        held = self.originals[name]
        case = self.cases[name]
        weights = [1 if p.name.startswith(("commit_success", "_CHECK")) or p.parent == case.root else 6 for p in held]
        path = random_.choices(list(held), weights)[0]
        data = held[path]
        relative = str(path.relative_to(case.root))
        kind = mutations.kind_of(relative, data)
        if random_.random() < 0.04:
            how = random_.choice(SPECIAL)
            make_special(path, how)
            return kind, f"{relative}: {how}", False
        craft = mutations.crafted(kind)
        if craft is None or random_.random() < 0.35:
            others = [d for p, d in held.items() if p != path]
            how, changed = mutations.rotten(data, random_, [*others, *self.old[name]])
            put(path, changed)
            return kind, f"{relative}: {how}", False
        how, changed = craft(data, random_)
        put(path, changed)
        manifest = path.parent / "manifest.json"
        while manifest not in held and manifest.parent.parent != manifest.parent:
            manifest = manifest.parent.parent / "manifest.json"
        if manifest in held and manifest != path:
            if kind == "safetensors":
                inside = str(path.relative_to(manifest.parent))
                put(manifest, mutations.resealed(held[manifest], inside, changed))
                return kind, f"{relative}: {how}", True
            return kind, f"{relative}: {how}", False
        return kind, f"{relative}: {how}", True

    def repair(self, name: str) -> None:
        """Undo it."""
        for path, data in self.originals[name].items():
            if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
                put(path, data)

    def run(self, name: str, seed: int, begun: Callable[[Outcome], None]) -> Outcome:
        """Change a specimen, make some calls, and undo the change."""
        case, specimen = self.cases[name], self.cases[name].specimen
        kind, how, forged = self.change(name, seed)
        random_ = random.Random(f"calls {name} {seed}")
        calls = ["restore", "verify", random_.choice(case.cheap), random_.choice(case.cheap)]
        rare = random_.random()
        if rare < RARE or (rare < 2 * RARE and not specimen.single):
            resource.setrlimit(resource.RLIMIT_AS, (self.limit + ROOM, resource.RLIM_INFINITY))
            self.spent = True
            calls.append("convert" if rare < RARE else "save")
        worst = Outcome(specimen.name, seed, kind, how, "exact", forged=forged)
        seen: dict[str, str] = {}
        nbytes = sum(p.stat().st_size for p in self.originals[name] if p.is_file() and not p.is_symlink())
        try:
            for call in dict.fromkeys(calls):
                begun(Outcome(specimen.name, seed, kind, how, "hangs", call))
                found = Outcome(specimen.name, seed, kind, how, *self.call(case, call, nbytes), forged)
                seen[call] = found.verdict
                if ORDER.index(found.verdict) > ORDER.index(worst.verdict):
                    worst = found
        finally:
            self.repair(name)
        touched = "refused" in (seen.get("restore"), seen.get("load"))
        if specimen.digests and not forged and touched and seen["verify"] == "exact" and worst.verdict == "refused":
            return Outcome(specimen.name, seed, kind, how, "missed", "verify", "verify finds nothing, and a load does")
        return worst

    def call(self, case: Case, call: str, nbytes: int) -> tuple[str, str, str]:
        """Make one call; (verdict, call, what is to be said of it)."""
        before, began = memory_reset(), time.process_time()
        try:
            value = getattr(case, call)()
        except xla_ckpt.CheckpointError as error:
            try:
                text = str(error)
                json.dumps(error.to_json())
                verdict = "refused"
            except Exception:
                verdict, text = "untyped", "its own text fails: " + traceback.format_exc()[-1500:]
        except MemoryError:
            verdict, text = "memory", traceback.format_exc()[-1500:]
        except BaseException:
            verdict, text = "untyped", traceback.format_exc()[-2500:]
        else:
            text = ""
            expected = self.expected[case.specimen.name].get(call, "ok")
            verdict = "exact" if value == expected or call not in ("restore", "load") else "other"
            if verdict == "other" and value == self.older.get(case.specimen.name):
                verdict = "refused"  # the newest tag was passed over, and the one before it is exact
            if call == "verify" and value != "ok":
                verdict = "refused"
        seconds, memory = time.process_time() - began, memory_high() - before
        if verdict != "untyped" and memory > RESIDENT + TIMES * nbytes:
            verdict, text = "memory", f"{memory >> 20} MiB; {text}"
        elif verdict != "untyped" and seconds > SECONDS:
            verdict, text = "slow", f"{seconds:.1f} s; {text}"
        return verdict, call, text


def lines(outcome: Outcome) -> bytes:
    """An outcome as a line."""
    return json.dumps(asdict(outcome)).encode() + b"\n"


def read_lines(data: bytes) -> Iterator[Outcome]:
    """The outcomes in some lines."""
    for line in data.splitlines():
        yield Outcome(**json.loads(line))
