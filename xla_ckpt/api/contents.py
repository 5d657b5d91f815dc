"""What a tag holds, as its manifest or its files say it. Of tags of ours this needs neither torch nor orbax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from xla_ckpt.api.opened import Knowledge, opened
from xla_ckpt.api.summaries import StoredFile, fields_of, note_of, stored_files
from xla_ckpt.engine.parity_check import parity_of
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import UsageError
from xla_ckpt.keywords import nearest
from xla_ckpt.layouts.listing import find_foreign
from xla_ckpt.layouts.registry import layout_of
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.roots import root_of
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.skeleton import is_array, is_object, leaves_below


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """An array in a tag."""

    leaf: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole array, over all ranks."""

    nbytes: int
    shards: int
    """In how many parts it is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """A part of the state: its arrays, each byte counted once where that is known."""

    part: str
    arrays: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnplacedArray:
    """An array of another library's tag of which nothing says how the ranks had it split."""

    leaf: str
    dtype: str | None
    rank_shape: tuple[int, ...] | None
    """Shape of what each rank has stored."""

    tensors: int
    """How many such tensors are stored, copies included."""

    nbytes: int
    expected: str | None
    found: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnplacedArrays:
    """Such arrays, as far as they have the reason and the way out in common."""

    problem: str
    hint: str | None
    arrays: tuple[UnplacedArray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TagContents:
    """What a tag holds. Leaves are named by their leaf paths, such as ``"model/layers.0.weight"``."""

    path: str
    """Root directory."""

    tag: str
    sequence: int
    """Number of its commit; 0 if another library wrote it."""

    created: str | None
    """When it was committed, as ISO 8601 has it."""

    pinned: bool
    parity: str | None
    """What the tag survives: ``"block"``, ``"file"`` or nothing; or ``"damaged"`` or ``"lost"`` (docs/repair.md)."""

    note: str
    """What else is to be known about it, such as that it has adapters alone."""

    version: int
    """Of the format of its manifest."""

    mesh: str | None
    ranks: int
    """How many ranks saved it."""

    nbytes: int
    """Bytes of the arrays, each counted once; of a tag without an index, of its files."""

    arrays: tuple[StoredArray, ...]
    """Arrays, each with `leaf`, `dtype`, `shape`, `nbytes` and `shards`."""

    parts: tuple[StoredPart, ...]
    """Parts of the state, each with `part`, `arrays` and `nbytes`."""

    unknown: tuple[UnplacedArrays, ...]
    """Arrays that cannot be read, by reason (`problem`, `hint`)."""

    layout: str
    """Name of the layout, or of the library that wrote it."""

    splits: Mapping[str, tuple[object, ...]] = field(repr=False)
    """Leaf -> how the array was split over the mesh when it was saved, as rules say it; of arrays that were split."""

    divergent: tuple[str, ...]
    """Arrays that were stored from replicas that differed."""

    aliases: Mapping[str, str]
    """Leaf -> leaf of arrays that share their memory with another one, which is stored."""

    values: Mapping[str, Any] = field(repr=False)
    """Plain values, by leaf. The state of a generator alone has 625 numbers, so `repr` leaves them out."""

    files: tuple[StoredFile, ...]
    """Files, each with `path` and `size`."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON. Its arrays, files and plain values stay as they are.

        `asdict` would copy each of them, 8 us for each array and file; and plain values may be nested deeply.
        """
        answer = asdict(replace(self, arrays=(), files=(), values={}))
        arrays, files = map(fields_of, self.arrays), map(fields_of, self.files)
        return {**answer, "arrays": list(arrays), "files": list(files), "values": self.values}

    def _repr_html_(self) -> str:
        from xla_ckpt.tables import html, render

        return html.fragment(render.tag(self.to_json()))


def contents_of(store: Store, tag: str, about: Knowledge, pattern: str | None = None) -> TagContents:
    """Everything that the manifest of a tag says.

    Args:
        store: The root directory.
        tag: Which tag.
        about: What the caller knows of it.
        pattern: Which leaves: those at or below this path, or like this pattern of a shell; None for all.

    Raises:
        NoCheckpointError: There is no such tag.
        UsageError: No leaf is like the pattern.
        CheckpointError: It is damaged, or what the caller knows contradicts it.
    """
    with opened(store, tag, about, as_stored=True) as reader:
        manifest, survives = reader.manifest, parity_of(reader.directory, reader.manifest)
    foreign = find_foreign(store, tag)
    named = dict(leaves_below(manifest.skeleton))
    values = {leaf: _shown(part, reader) for leaf, part in named.items() if not is_array(part)}
    leaves = [*manifest.arrays, *manifest.unknown, *manifest.aliases, *values]
    if not any(paths.is_like(leaf, pattern) for leaf in leaves):
        hint = f"Leaves begin with: {paths.tops(leaves)}."
        problem = f"no leaf is like this{nearest(pattern or '', leaves)}"
        raise UsageError(problem, path=store.path, tag=tag, found=pattern, hint=hint)
    head, entry = manifest.head, foreign[1] if foreign is not None else root_of(store).entry(tag)
    # The manifest has arrays of one form together; here they come in the order of the state.
    in_order = [leaf for leaf in dict.fromkeys([*named, *manifest.arrays]) if leaf in manifest.arrays]
    arrays = {leaf: manifest.arrays[leaf] for leaf in in_order if paths.is_like(leaf, pattern)}
    unknown = {leaf: array for leaf, array in manifest.unknown.items() if paths.is_like(leaf, pattern)}
    if foreign is None:
        files = tuple(StoredFile(path=file.path, size=file.size) for file in manifest.files)
    else:
        files = stored_files(store, foreign[1])
    return TagContents(
        path=store.path,
        tag=tag,
        sequence=head.sequence if foreign is None else 0,
        created=head.created,
        pinned=head.pinned if entry is None else entry.pinned,
        parity=survives,
        note=note_of(manifest),
        version=head.version,
        mesh=manifest.mesh,
        ranks=manifest.world,
        # Of a tag without an index the bytes of all arrays are not known: its files say what is stored.
        nbytes=manifest.nbytes if foreign is None else sum(file.size for file in files),
        arrays=tuple(
            StoredArray(
                leaf=leaf,
                dtype=record.dtype.name,
                shape=record.shape,
                nbytes=record.nbytes,
                shards=record.form.cells,
            )
            for leaf, record in arrays.items()
        ),
        parts=_parts([*arrays.items(), *unknown.items()]),
        unknown=tuple(map(_unplaced, UnknownArray.by_reason(unknown))),
        layout=layout_of(manifest).name if foreign is None else foreign[0].origin or foreign[0].name,
        splits={leaf: record.spec for leaf, record in arrays.items() if record.spec is not None and any(record.spec)},
        divergent=tuple(leaf for leaf, record in arrays.items() if record.divergent),
        aliases={alias: leaf for alias, leaf in manifest.aliases.items() if paths.is_like(alias, pattern)},
        values={leaf: value for leaf, value in values.items() if paths.is_like(leaf, pattern)},
        files=files,
    )


def _shown(value: Any, reader: TagReader) -> Any:
    """A plain value; of an object that another library pickled, what it is."""
    if reader.foreign_objects is None or not is_object(value):
        return value
    return {"$object": f"a pickled {reader.foreign_objects[value['$object']].kind}"}


def _parts(arrays: Sequence[tuple[str, ArrayRecord | UnknownArray]]) -> tuple[StoredPart, ...]:
    """Number and bytes of the arrays of each part of the state, in the order of a training state."""
    sums: dict[str, tuple[int, int]] = {}
    for leaf, array in sorted(arrays, key=lambda pair: _place(pair[0])):
        if isinstance(array, ArrayRecord) or array.tensors:
            number, nbytes = sums.get(part := leaf.split("/")[0], (0, 0))
            sums[part] = number + 1, nbytes + array.nbytes
    return tuple(StoredPart(part=part, arrays=number, nbytes=nbytes) for part, (number, nbytes) in sums.items())


def _place(leaf: str) -> int:
    """Where the part of a leaf stands in a training state."""
    part = leaf.split("/", maxsplit=1)[0]
    return schema.MEMBERS.index(part) if part in schema.MEMBERS else len(schema.MEMBERS)


def _unplaced(group: Mapping[str, UnknownArray]) -> UnplacedArrays:
    """Arrays of which it is not known, for the same reason, how they were split.

    The advice has a rule for an array that each rank has all of: of those with the fewest dims, such as the weight of
    a norm, that is likely.
    """
    example, first = min(group.items(), key=lambda item: len(item[1].shape or ()))
    arrays = tuple(
        UnplacedArray(
            leaf=leaf,
            dtype=None if array.dtype is None else array.dtype.name,
            rank_shape=array.shape,
            tensors=array.tensors,
            nbytes=array.nbytes,
            expected=array.expected,
            found=array.found,
        )
        for leaf, array in group.items()
    )
    return UnplacedArrays(problem=first.problem, hint=first.advice(example), arrays=arrays)
