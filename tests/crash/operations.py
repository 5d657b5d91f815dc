"""What is interrupted: every call of the library that writes, with what there was before it and what it is to make.

All numbers in a checkpoint are one number, by which a mixture of two is seen.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import xla_ckpt
import xla_ckpt.dcp
from tests.runs import names_in

Found = dict[str, int]
"""What is there: name -> the number that all of it has, oldest first."""


class Lost(AssertionError):
    """Something is listed, and is not whole."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A call, and how its outcome is looked at. All functions get the directory in which everything happens."""

    name: str
    prepare: Callable[[Path], None]
    """Makes what is there before."""

    run: Callable[[Path], object]
    """The call itself. With several ranks, on every one of them."""

    read: Callable[[Path], Found]
    """Verifies and loads everything that is listed; raises `Lost`."""

    again: Callable[[Path], None]
    """The next call of the same kind, with the number 99."""

    before: Found
    after: Found
    names: Callable[[Path], set[str]]
    """What lies in the directory that the call writes to."""

    ranks: int = 1
    of_peer: bool = False
    """Whether another library does it: nothing is asked of the class of its errors, and of what it leaves."""


LIVE: list[torch.Tensor] = []
"""The program's tensors that the call was given. A program that goes on after it changes them."""


ONE_THREAD = xla_ckpt.ConvertOptions(num_workers=1)


def module(number: float) -> torch.nn.Module:
    """A model all of whose parameters have one value."""
    made = torch.nn.Linear(3, 4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(number)
    return made


def momentum_of(made: torch.nn.Module, number: float) -> torch.optim.Optimizer:
    """An optimizer whose state has that value, too."""
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5, momentum=0.5)
    for parameter in made.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter.data, number)
    return optimizer


def saves(root: Path, tag: str, number: int, **options: Any) -> None:
    """Save a training state."""
    handle_of_save(root, tag, number, **options).result()


def handle_of_save(root: Path, tag: str, number: int, *, device: str = "cpu", **options: Any) -> xla_ckpt.SaveHandle:
    """The same, and what the call returned."""
    made = module(number).to(device)
    optimizer = momentum_of(made, number)
    LIVE.extend(arrays_of([dict(made.named_parameters()), *map(dict, optimizer.state.values())]))
    return xla_ckpt.save_checkpoint(root, tag, made, optimizer, user_content=number, num_workers=1, **options)


def tags_in(root: Path) -> Found:
    """Every listed tag: verified, and loaded."""
    found: Found = {}
    for tag in xla_ckpt.list_tags(root):
        report = xla_ckpt.verify(root, tag)
        if not report.ok:
            raise Lost(f"tag {tag}: {report.problems}")
        try:
            tree = xla_ckpt.restore(root, tag).tree
        except Exception as error:
            raise Lost(f"tag {tag} is listed, and does not load: {error}") from error
        found[tag] = the_number(f"tag {tag}", tree, tree["user_content"])
    newest = xla_ckpt.latest_tag(root)
    if newest != (list(found)[-1] if found else None):
        raise Lost(f"the newest tag is {newest} of {found}")
    return found


def the_number(what: str, tree: object, number: object) -> int:
    """The number that a checkpoint was saved with; all of it must have it."""
    arrays = list(arrays_of(tree))
    if not isinstance(number, int) or not arrays or not all(bool((array == number).all()) for array in arrays):
        raise Lost(f"{what} is a mixture: {number} beside {arrays}")
    if {tuple(array.shape) for array in arrays} != {(4, 3), (4,)}:
        raise Lost(f"{what} lacks arrays: {[array.shape for array in arrays]}")
    return number


def arrays_of(tree: object) -> list[torch.Tensor]:
    """The tensors in a tree."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [array for value in tree.values() for array in arrays_of(value)]
    if isinstance(tree, list | tuple):
        return [array for value in tree for array in arrays_of(value)]
    return []


def listed(root: Path) -> set[str]:
    """What lies in a directory; nothing if it is absent."""
    return set(names_in(root)) if root.is_dir() else set()


NEXT = 99


# --- saves of tags -------------------------------------------------------------------------------------------------


def saving(
    name: str, before: Found, tag: str, *, after: Found | None = None, pinned: str | None = None,
    prepare: Callable[[Path], None] = lambda root: None, **options: Any,
) -> Operation:  # fmt: skip
    """A save of a tag with the number 7."""
    of_layout = {key: value for key, value in options.items() if key == "layout"}

    def prepare_all(root: Path) -> None:
        for old, number in before.items():
            saves(root, old, number, pinned=old == pinned, **of_layout)
        xla_ckpt.finalize_checkpoint()
        prepare(root)

    return Operation(
        name=name,
        prepare=prepare_all,
        run=lambda root: saves(root, tag, 7, **options),
        read=tags_in,
        again=lambda root: saves(root, "next", NEXT, **of_layout),
        before=before,
        after={**{t: n for t, n in before.items() if t != tag}, tag: 7} if after is None else after,
        names=listed,
    )


def leave_litter(root: Path) -> None:
    """What killed saves leave: drafts, half a commit, half a replacement, half a deletion."""
    saves(root.parent / "other", "x", 5)
    other = root.parent / "other" / "x"
    shutil.copytree(other, root / ".new-c")
    (root / ".new-c" / "manifest.json").unlink()
    shutil.copytree(other, root / ".new-c-1")
    shutil.copytree(other, root / ".old-a")
    shutil.copytree(other, root / ".trash" / ".old-a-0")
    (root / "b").rename(root / ".old-b")
    shutil.rmtree(other.parent)


def saves_as_rank(root: Path, tag: str, number: int) -> None:
    """Save a training state of which each of two ranks has a half of every array."""
    import torch.distributed as dist

    half = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    model = {name: value.detach()[half].clone() for name, value in module(number).named_parameters()}
    xla_ckpt.save_checkpoint(
        root,
        tag,
        model,
        user_content=number,
        num_workers=1,
        options=xla_ckpt.SaveOptions(timeout=SECONDS_FOR_RANKS),
        mesh=xla_ckpt.Mesh(tp=2),
        shardings=[("", ("tp",))],
        num_kept_ckpts=2,
    ).result()


SECONDS_FOR_RANKS = 3.0
"""How long a rank waits for one that has been killed."""

OF_RANKS = replace(
    saving("two ranks: replace, retention", {"a": 1, "b": 2, "c": 3}, "c", after={"b": 2, "c": 7}),
    run=lambda root: saves_as_rank(root, "c", 7),
    ranks=2,
)

# --- parity --------------------------------------------------------------------------------------------------------


def repairing() -> Operation:
    """A repair of a tag that has lost a payload file, and the copy of its manifest."""

    def prepare(root: Path) -> None:
        saves(root, "a", 1)
        saves(root, "b", 7, options=xla_ckpt.SaveOptions(parity="file"))
        xla_ckpt.finalize_checkpoint()
        next((root / "b" / "model").iterdir()).unlink()
        (root / "b" / "parity" / "manifest.json").unlink()

    def read(root: Path) -> Found:
        """A tag that is still damaged is as it was before; whatever a load gives of it is right."""
        sound = {tag: xla_ckpt.verify(root, tag).ok for tag in xla_ckpt.list_tags(root)}
        if not {"a", "b"} <= set(sound):
            raise Lost(f"a tag is gone: {sound}")
        return {tag: _loaded(root, tag) for tag, whole in sound.items() if whole}

    def again(root: Path) -> None:
        xla_ckpt.repair(root, "b")
        saves(root, "next", NEXT, options=xla_ckpt.SaveOptions(parity="file"))

    return Operation(
        name="repair",
        prepare=prepare,
        run=lambda root: xla_ckpt.repair(root, "b", num_workers=1),
        read=read,
        again=again,
        before={"a": 1},
        after={"a": 1, "b": 7},
        names=listed,
    )


def _loaded(root: Path, tag: str) -> int:
    tree = xla_ckpt.restore(root, tag).tree
    return the_number(f"tag {tag}", tree, tree["user_content"])


# --- conversions ---------------------------------------------------------------------------------------------------


def prepare_source(root: Path) -> None:
    """A tag to convert."""
    saves(root / "source", "a", 7)
    xla_ckpt.finalize_checkpoint()


def converting(to: str, before: Found | None = None) -> Operation:
    """A conversion into a root of tags."""

    def prepare(root: Path) -> None:
        prepare_source(root)
        for tag, number in (before or {}).items():
            saves(root / "made", tag, number)
        xla_ckpt.finalize_checkpoint()

    def again(root: Path) -> None:
        saves(root / "more", "b", NEXT)
        xla_ckpt.convert(root / "more", root / "made", "b", to=to, as_tag="next", options=ONE_THREAD)
        xla_ckpt.finalize_checkpoint()

    return Operation(
        name=f"convert to {to}",
        prepare=prepare,
        run=lambda root: xla_ckpt.convert(root / "source", root / "made", "a", to=to, options=ONE_THREAD),
        read=lambda root: {**tags_in(root / "made"), **_untouched(root)},
        again=again,
        before={**(before or {}), "source": 7},
        after={**(before or {}), "a": 7, "source": 7},
        names=lambda root: listed(root / "made") | {"source"},
    )


def _untouched(root: Path) -> Found:
    found = tags_in(root / "source")
    if listed(root / "source") != {"a"}:
        raise Lost(f"the source of the conversion has changed: {listed(root / 'source')}")
    return {"source": found["a"]}


def exporting(name: str, made: str, run: Callable[[Path, Path, str], object], load: Callable[[Path], Any]) -> Operation:
    """An export that makes a directory or a file which is no tag."""

    def read(root: Path) -> Found:
        found = {
            name: _weights(f"the export {name}", load(root / "made" / name))
            for name in sorted(listed(root / "made"))
            if not name.startswith(".new-")
        }
        return {**found, **_untouched(root)}

    def again(root: Path) -> None:
        saves(root / "more", "a", NEXT)
        xla_ckpt.finalize_checkpoint()
        try:
            run(root / "source", root / "made" / made, "a")  # who met an error tries it again
        except xla_ckpt.UsageError as refused:
            if "already" not in str(refused) and "must not exist" not in str(refused):
                raise
        run(root / "more", root / "made" / f"next{made}", "a")

    return Operation(
        name=name,
        prepare=lambda root: (prepare_source(root), (root / "made").mkdir()) and None,
        run=lambda root: run(root / "source", root / "made" / made, "a"),
        read=read,
        again=again,
        before={"source": 7},
        after={made: 7, "source": 7},
        names=lambda root: listed(root / "made") | {"source"},
    )


def _weights(what: str, held: Any) -> int:
    arrays = arrays_of(held)
    return the_number(what, arrays, int(arrays[0].flatten()[0])) if arrays else the_number(what, {}, None)


def _load_safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    return [load_file(file) for file in sorted(path.glob("*.safetensors"))]


# --- the calls of torch.distributed.checkpoint ---------------------------------------------------------------------


def dcp_state(number: float) -> dict[str, Any]:
    return {**module(number).state_dict(), "n": int(number)}


def _dcp_save(path: Path, number: int) -> None:
    state = dcp_state(number)
    LIVE.extend(arrays_of(state))
    xla_ckpt.dcp.save(state, checkpoint_id=path)


def dcp_read(root: Path) -> Found:
    """Through this library, which verifies, wherever a reader finds the checkpoint; and through stock DCP."""
    import torch.distributed.checkpoint as stock

    found: Found = {}
    there = {name.removeprefix(".old-") for name in listed(root) if not name.startswith(".new-")}
    for name in sorted(there):
        ours, theirs = dcp_state(-1), dcp_state(-1)
        try:
            xla_ckpt.dcp.load(ours, checkpoint_id=root / name)
            if (root / name).exists():
                stock.load(theirs, checkpoint_id=root / name, no_dist=True)
                if theirs["n"] != ours["n"]:
                    raise Lost(f"{name}: stock reads {theirs['n']}, we read {ours['n']}")
                the_number(name, theirs, theirs["n"])
        except (Exception, stock.CheckpointException) as error:
            raise Lost(f"{name} does not load: {error}") from error
        found[name] = the_number(name, ours, ours["n"])
    return found


def dcp_saving(name: str, before: Found) -> Operation:
    """`xla_ckpt.dcp.save`."""

    def prepare(root: Path) -> None:
        root.mkdir(exist_ok=True)
        for old, number in before.items():
            _dcp_save(root / old, number)

    def again(root: Path) -> None:
        _dcp_save(root / "step", NEXT - 1)  # the same name: it replaces what is there, and removes what was left
        _dcp_save(root / "step", NEXT)

    return Operation(
        name=name,
        prepare=prepare,
        run=lambda root: _dcp_save(root / "step", 7),
        read=dcp_read,
        again=again,
        before=before,
        after={**before, "step": 7},
        names=listed,
    )


# --- all of them ---------------------------------------------------------------------------------------------------

OPERATIONS: Mapping[str, Operation] = {
    made.name: made
    for made in (
        saving("first save", {}, "a"),
        saving("save", {"a": 1}, "b"),
        saving("save, asynchronous", {"a": 1}, "b", async_save=True),
        saving("save, parity", {"a": 1}, "b", options=xla_ckpt.SaveOptions(parity="file")),
        saving("save, sharing all", {"a": 7}, "b", options=xla_ckpt.SaveOptions(share=True)),
        saving(
            "replace, sharing all, retention", {"a": 7, "b": 1}, "b", after={"b": 7}, num_kept_ckpts=1,
            options=xla_ckpt.SaveOptions(share="a"),
        ),
        repairing(),
        saving("replace the only tag", {"a": 1}, "a"),
        saving("replace the oldest tag", {"a": 1, "b": 2}, "a"),
        saving("replace the newest tag", {"a": 1, "b": 2}, "b"),
        saving("retention", {"a": 1, "b": 2, "c": 3}, "d", after={"a": 1, "d": 7}, pinned="a", num_kept_ckpts=1),
        saving("replace, retention", {"a": 1, "b": 2, "c": 3}, "c", after={"c": 7}, num_kept_ckpts=1),
        saving("clean up", {"a": 1, "b": 2}, "d", prepare=leave_litter),
        *(saving(f"save, {layout}", {"a": 1}, "b", layout=layout) for layout in ("xser", "pt", "dcp")),
        saving("save, smp", {"a_partial": 1}, "b_partial", layout="smp"),
        *(saving(f"replace, {layout}", {"a": 1}, "a", layout=layout) for layout in ("xser", "pt", "dcp")),
        saving("replace, smp", {"a_partial": 1}, "a_partial", layout="smp"),
        OF_RANKS,
        *(converting(to, {"z": 3}) for to in ("native", "xser", "pt", "dcp", "smp")),
        exporting(
            "convert to torch", "one.pt",
            lambda source, made, tag: xla_ckpt.convert(source, made, tag, to="torch", options=ONE_THREAD),
            lambda path: torch.load(path, weights_only=True)["model"],
        ),
        exporting(
            "convert to safetensors", "hf",
            lambda source, made, tag: xla_ckpt.convert(source, made, tag, to="safetensors", options=ONE_THREAD),
            _load_safetensors,
        ),
        exporting(
            "export_hf", "hf",
            lambda source, made, tag: xla_ckpt.export_hf(source, made, tag, options=ONE_THREAD),
            _load_safetensors,
        ),
        dcp_saving("dcp.save", {}),
        dcp_saving("dcp.save, replacing", {"step": 1}),
    )
}  # fmt: skip
"""Every operation, by its name."""
