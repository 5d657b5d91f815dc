"""The arrays of a manifest as plain JSON, and back: those of one form are said together. What is broken is refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from xla_ckpt import dtypes
from xla_ckpt.errors import CheckpointError, FormatError
from xla_ckpt.manifest import intseq
from xla_ckpt.manifest.arrays import ArrayRecord, Arrays
from xla_ckpt.manifest.forms import ArrayForm, form_of
from xla_ckpt.sharding.box import MAX_DIMS, Box
from xla_ckpt.sharding.grid import Grid

MAX_CELLS = 1 << 24
"""Most shards that one manifest may list."""


def form_json(arrays: Arrays, number: int) -> dict[str, Any]:
    """All arrays of one form."""
    form, cells = arrays.forms[number], arrays.cells_of(number).reshape(-1)
    split = form.spec is not None and any(form.spec)
    frames = [arrays.frames.get(cell) for cell in cells.tolist()] if arrays.frames else []
    return {
        "dtype": form.dtype.name,
        "shape": list(form.shape),
        **({"spec": form.spec} if split else {}),
        **({"divergent": True} if form.divergent else {}),
        **({} if form.weak_type is None else {"weak_type": form.weak_type}),
        "cuts": [[intseq.pack_ints(cuts) for cuts in grid.cuts] for grid in form.grids],
        "names": [arrays.names[row] for row in arrays.by_form[number].tolist()],
        "files": intseq.pack_ints(arrays.file[cells]),
        "offsets": intseq.pack_ints(arrays.offset[cells]),
        **({"frames": [f and [list(f.start), list(f.stop)] for f in frames]} if any(frames) else {}),
    }


def parse_arrays(groups: list[Any], budget: int) -> Arrays:
    """All arrays, of which those of one form are said together."""
    forms: list[ArrayForm] = []
    names: list[str] = []
    counts: list[int] = []
    files, offsets, frames = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], dict[int, Box]()
    cells = 0
    for group in groups:
        try:
            of_form = member(group, "names", list)
            if not all(type(name) is str for name in of_form):
                raise FormatError("broken list of names")
            form = _parse_form(group, member(group, "cuts", list), budget - cells)
            count = form.cells * len(of_form)
            if count > budget - cells:
                raise FormatError("too many shards", expected=f"at most {MAX_CELLS}")
            files.append(intseq.unpack_column(group.get("files"), count))
            offsets.append(intseq.unpack_column(group.get("offsets"), count))
            if "frames" in group:
                parsed = _parse_frames(group["frames"], count, len(form.shape))
                frames |= {cells + i: frame for i, frame in enumerate(parsed) if frame is not None}
        except (CheckpointError, ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"broken array record: {error}", leaf=_first_name(group)) from error
        forms.append(form)
        names += of_form
        counts.append(len(of_form))
        cells += count
    return Arrays(
        names=names,
        forms=tuple(forms),
        form=np.repeat(np.arange(len(forms)), counts),
        file=np.concatenate(files),
        offset=np.concatenate(offsets),
        frames=frames,
    )


def _first_name(group: Any) -> str | None:
    names = group.get("names") if isinstance(group, dict) else None
    return str(names[0])[:80] if isinstance(names, list) and names else None


def parse_arrays_1(entries: dict[str, Any], budget: int) -> Arrays:
    """The arrays of a manifest of version 1, in which each says its own form."""
    records: dict[str, ArrayRecord] = {}
    forms: dict[str, ArrayForm] = {}
    for leaf, entry in entries.items():
        try:
            grids = member(entry, "grids", list)
            if not all(isinstance(grid, list) and 3 <= len(grid) <= 4 for grid in grids):
                raise FormatError("broken grid of shards", found=str(grids)[:80])
            cuts = [grid[0] for grid in grids]
            about = str([entry.get(name) for name in ("dtype", "shape", "spec", "divergent")])
            form = forms.get(key := f"{about}{cuts}") or forms.setdefault(key, _parse_form(entry, cuts, budget))
            budget -= form.cells
            if budget < 0:
                raise FormatError("too many shards", expected=f"at most {MAX_CELLS}")
            files: list[int] = []
            offsets: list[int] = []
            frames: list[Box | None] = []
            for (_, file, offset, *frame), grid in zip(grids, form.grids, strict=True):
                files += intseq.unpack_ints(file, grid.cells)
                offsets += intseq.unpack_ints(offset, grid.cells)
                frames += _parse_frames(frame[0], grid.cells, len(form.shape)) if frame else [None] * grid.cells
            records[leaf] = ArrayRecord(
                form=form,
                files=tuple(files),
                offsets=tuple(offsets),
                frames=tuple(frames) if any(frame is not None for frame in frames) else None,
            )
        except (CheckpointError, ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"broken array record: {error}", leaf=leaf) from error
    return Arrays.of(records)


def _parse_form(entry: Any, grids: list[Any], budget: int) -> ArrayForm:
    """The form that an entry names, with the cuts of each grid, of at most `budget` cells."""
    shape = tuple(member(entry, "shape", list))
    if len(shape) > MAX_DIMS or not all(type(n) is int and 0 <= n < intseq.LIMIT for n in shape):
        raise FormatError("impossible shape", found=str(shape)[:80])
    cells = []
    for cuts in grids:
        if not isinstance(cuts, list) or len(cuts) != len(shape):
            raise FormatError("broken grid of shards", found=str(cuts)[:80])
        cells.append(Grid(tuple(intseq.unpack_any(_as_list(c), budget + 1) for c in cuts)))
        budget -= cells[-1].cells
        if budget < 0:
            raise FormatError("too many shards", expected=f"at most {MAX_CELLS}")
    return form_of(
        dtype=dtypes.dtype(member(entry, "dtype", str)),
        shape=shape,
        grids=tuple(cells),
        spec=_parse_spec(entry, len(shape)),
        divergent="divergent" in entry and member(entry, "divergent", bool),
        weak_type=member(entry, "weak_type", bool) if "weak_type" in entry else None,
    )


def _parse_frames(entries: Any, cells: int, dims: int) -> list[Box | None]:
    if not isinstance(entries, list) or len(entries) != cells:
        raise FormatError("a grid of shards needs a frame, or null, for each", expected=cells)
    frames: list[Box | None] = []
    for entry in entries:
        match entry:
            case None:
                frames.append(None)
            case [[*start], [*stop]] if len(start) == len(stop) == dims and all(
                type(n) is int and 0 <= n < intseq.LIMIT for n in (*start, *stop)
            ):
                frames.append(Box(tuple(start), tuple(stop)))
            case _:
                raise FormatError("broken frame of a shard", found=str(entry)[:80])
    return frames


def _parse_spec(entry: Any, dims: int) -> tuple[Any, ...] | None:
    """None, or for each tensor dim None, a name, or a list of names with perhaps an integer or a list at the end."""
    spec = entry.get("spec")
    if spec is None:
        return None
    if not isinstance(spec, list) or len(spec) > dims:
        raise FormatError("broken spec", found=str(spec)[:80])
    parsed: list[Any] = []
    for split in spec:
        match split:
            case None | str():
                parsed.append(split)
            case [*names] if names and all(map(_is_word, names)):
                parsed.append(tuple(names))
            case [*names, [*sections]] if all(map(_is_word, (*names, *sections))):
                parsed.append((*names, tuple(sections)))
            case _:
                raise FormatError("broken spec", found=str(spec)[:80])
    return tuple(parsed)


def _is_word(value: Any) -> bool:
    return isinstance(value, str) or type(value) is int


def _as_list(cuts: Any) -> Any:
    """The cuts along a dim. Those of a box without elements are two equal values, which `pack_ints` writes as one."""
    return [cuts, cuts] if type(cuts) is int else cuts


def member(raw: Any, name: str, kind: type) -> Any:
    """A member of an object in a manifest, of this type.

    Raises:
        FormatError: It is missing, or of another type.
    """
    value = raw.get(name) if isinstance(raw, dict) else None
    if type(value) is not kind:
        raise FormatError(
            f"the manifest's {name!r} is missing or broken", expected=kind.__name__, found=str(value)[:80]
        )
    return value
