"""Compare two checkpoints of any layouts: missing, retyped and changed arrays and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.conversion.llama.job import LlamaJob, read_model_info
from xla_ckpt.conversion.source import ProgramInfo, open_source, resolve_source
from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.sharding.sharding import ShardingRules, parse_rules
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.skeleton import get_plain_values, is_object, iterate_leaf_parts
from xla_ckpt.errors import UsageError, wrap_os_errors
from xla_ckpt.inspection.tags import describe_note
from xla_ckpt.keywords import check_arguments_and_fields, suggest_leaf
from xla_ckpt.loading.compare import ArrayDiff, compare_arrays
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.options import ConvertOptions, resolve_options
from xla_ckpt.storage.resolve import PathLike


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Differences between two tags, by leaf path.

    An array that has several names in both tags (tied weights) is compared and counted once, as in `show`.
    """

    a: tuple[str, str]
    """Root directory and tag of the first checkpoint."""

    b: tuple[str, str]
    """Root directory and tag of the second checkpoint."""

    only_in_a: tuple[str, ...]
    """Arrays and plain values that only the first tag contains."""

    only_in_b: tuple[str, ...]
    """Arrays and plain values that only the second tag contains."""

    retyped: Mapping[str, tuple[str, str]]
    """Arrays whose dtype or shape differs, with both: ``"float32 [4, 4]"``. Their values are not compared."""

    moved: Mapping[str, ArrayDiff]
    """Arrays whose bytes differ, with the size of the difference."""

    values: Mapping[str, tuple[Any, Any]] = field(repr=False)
    """Plain values that differ, as stored in the manifests; omitted from `repr`. Pickled objects are compared by their
    bytes, except in tags of other libraries, where they are not compared."""

    equal: int
    """Number of arrays with identical bytes."""

    parts: Mapping[str, ArrayDiff]
    """Sum over the arrays in `moved` for each part of the state: ``model``, ``optimizer``, ..."""

    base: bool | None
    """For two tags that contain only adapters: True if both are for the same base model, by their recorded digests;
    None if digests are missing, and for all other tags."""

    notes: tuple[str, str]
    """Note about each tag, for example that its base model is missing, so that the base arrays are not compared."""

    @property
    def same(self) -> bool:
        """True if the tags do not differ."""
        return not (self.only_in_a or self.only_in_b or self.retyped or self.moved or self.values or self.base is False)

    def to_json(self) -> dict[str, Any]:
        """Return the differences as plain JSON."""
        return {
            "a": {"path": self.a[0], "tag": self.a[1], "note": self.notes[0]},
            "b": {"path": self.b[0], "tag": self.b[1], "note": self.notes[1]},
            "same": self.same,
            "equal": self.equal,
            "base": self.base,
            "parts": [{"part": part, **how.to_json()} for part, how in self.parts.items()],
            "moved": [{"leaf": leaf, **how.to_json()} for leaf, how in self.moved.items()],
            "retyped": [{"leaf": leaf, "a": one, "b": other} for leaf, (one, other) in self.retyped.items()],
            "values": [{"leaf": leaf, "a": one, "b": other} for leaf, (one, other) in self.values.items()],
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
        }

    def _repr_html_(self) -> str:
        from xla_ckpt.rendering import html, reports

        return html.render_html(reports.render_diff(self.to_json()))


@check_arguments_and_fields(options=ConvertOptions, llama=LlamaJob)
def diff(
    a: PathLike,
    b: PathLike,
    tag_a: str | None = None,
    tag_b: str | None = None,
    *,
    leaf: str | None = None,
    shardings: ShardingRules | None = None,
    model: Any = None,
    optimizer: Any = None,
    llama: LlamaJob | None = None,
    options: ConvertOptions | None = None,
) -> Difference:
    """Compare two tags of any layouts: missing arrays and values, other dtypes and shapes, and changed values.

    Arrays with the same shards and equal digests are equal, and are not read. All others are read in pieces, so that
    memory does not grow with the tags, and are verified.

    Args:
        a: Root directory of the first tag, or another path that `load_checkpoint` accepts.
        b: Root directory of the second tag, or such a path; may equal `a`.
        tag_a: First tag; None selects the newest.
        tag_b: Second tag; None selects the newest.
        leaf: Compare only leaves at or below this path, or leaves that match this glob pattern.
        shardings: For tags of other libraries: information that their files do not contain, as for `convert`.
        model: As `shardings`.
        optimizer: As `shardings`.
        llama: As `shardings`, for a Llama-like model.
        options: Limits on memory and threads; by default the `default_options`.

    Returns:
        A `Difference`; its `same` is True if the tags do not differ.

    Raises:
        NoCheckpointError: A tag does not exist.
        CorruptCheckpointError: A tag is corrupt.
        IncompatibleCheckpointError: The sharding of an array in a tag of another library is unknown.
        UsageError: No leaf of either tag matches `leaf`.

    Example:
        ``xla_ckpt.diff("runs/lm", "runs/lm", "step_10", "step_20", leaf="model").moved``
    """
    options = resolve_options(ConvertOptions, options)
    about = ProgramInfo(rules=parse_rules(shardings), model=model, optimizer=optimizer, llama=read_model_info(llama))
    sources = [resolve_source(path, tag) for path, tag in ((a, tag_a), (b, tag_b))]
    with (
        wrap_os_errors("comparing two tags"),
        open_source(*sources[0], about) as one,
        open_source(*sources[1], about) as other,
    ):
        return _compare_tags(one, other, leaf, options)


def _compare_tags(one: TagReader, other: TagReader, pattern: str | None, options: ConvertOptions) -> Difference:
    memory, workers = options.max_memory, options.num_workers
    arrays_a, arrays_b = _list_arrays(one.manifest, pattern), _list_arrays(other.manifest, pattern)
    values_a, values_b = _list_values(one, pattern), _list_values(other, pattern)
    if not (arrays_a or arrays_b or values_a or values_b):
        names = [leaf for reader in (one, other) for leaf, _ in iterate_leaf_parts(reader.manifest.skeleton)]
        raise UsageError(
            f"no leaf of the two tags is like this{suggest_leaf(pattern or '', names)}",
            found=f"leaf={pattern!r}",
            hint=f"Leaves begin with: {paths.format_top_parts(names)}.",
        )
    retyped: dict[str, tuple[str, str]] = {}
    moved: dict[str, ArrayDiff] = {}
    parts: dict[str, ArrayDiff] = {}
    compared: set[tuple[str, str]] = set()
    equal = 0
    for leaf, record in arrays_a.items():
        its = arrays_b.get(leaf)
        pair = one.manifest.aliases.get(leaf, leaf), other.manifest.aliases.get(leaf, leaf)
        if its is None or pair in compared:
            continue
        compared.add(pair)
        if (record.dtype, record.shape) != (its.dtype, its.shape):
            retyped[leaf] = _format_type(record), _format_type(its)
            continue
        part = paths.split(leaf)[0] if leaf else leaf
        moved_by = compare_arrays(one, leaf, other, leaf, max_memory=memory, workers=workers)
        if moved_by is None:
            equal += 1
        else:
            moved[leaf] = moved_by
            parts[part] = parts.get(part, ArrayDiff()) + moved_by
    names_a, names_b = {**arrays_a, **values_a}, {**arrays_b, **values_b}
    return Difference(
        a=(one.root, one.tag),
        b=(other.root, other.tag),
        only_in_a=tuple(n for n in names_a if n not in names_b),
        only_in_b=tuple(n for n in names_b if n not in names_a),
        retyped=retyped,
        moved=moved,
        values={n: (v, values_b[n]) for n, v in values_a.items() if n in values_b and not _is_equal(v, values_b[n])},
        equal=equal,
        parts=parts,
        base=_has_same_base(one.manifest, other.manifest) if paths.is_match(schema.BASE, pattern) else None,
        notes=(describe_note(one.manifest), describe_note(other.manifest)),
    )


def _list_arrays(manifest: Manifest, pattern: str | None) -> dict[str, ArrayRecord]:
    """Return the records of all arrays that match `pattern`, including tied arrays, by leaf path.

    Raises:
        IncompatibleCheckpointError: The sharding of an array is unknown.
    """
    records = {}
    for leaf in (*manifest.arrays, *manifest.unreadable, *manifest.aliases):
        if paths.is_match(leaf, pattern) and (record := manifest.find_array(leaf)) is not None:
            records[leaf] = record
    return records


def _list_values(reader: TagReader, pattern: str | None) -> dict[str, Any]:
    """Return the plain values that match `pattern`, with size and digest in place of a pickled object."""
    manifest = reader.manifest
    values = {
        leaf: value
        for leaf, value in get_plain_values(manifest.skeleton).items()
        # The text that each rank stores about the base differs between meshes for the same base:
        # `_has_same_base` compares it.
        if paths.is_match(leaf, pattern) and not (pattern is None and schema.is_base_info(leaf))
    }
    for leaf, value in values.items():
        if is_object(value) and value["$object"] < len(manifest.object_files):
            record = manifest.files[manifest.object_files[value["$object"]]]
            values[leaf] = {"$object": f"{record.size} bytes, digest {record.framing_digest:016x}"}
    return values


def _has_same_base(one: Manifest, other: Manifest) -> bool | None:
    """Return True if two tags omit the same base model; None if a tag contains its base, or digests are missing."""
    if not (schema.is_without_base(one.skeleton) and schema.is_without_base(other.skeleton)):
        return None
    from xla_ckpt.state.base_model import is_same_base, parse_base

    return is_same_base(parse_base(one.skeleton), parse_base(other.skeleton))


def _is_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def _format_type(record: ArrayRecord) -> str:
    return f"{record.dtype.name} {list(record.shape)}"
