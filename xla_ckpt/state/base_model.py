"""Adapter-only checkpoints: exclude the base model, record its checksums, and verify them on load.

The base consists of the parameters that a save with only= excludes: parameters that are frozen, or not selected. Each
rank computes checksums of its local shards without communication. The checksum of some rows of an array is a sum over
the rows, so the checksum of all rows does not depend on the sharding.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.torch_objects import is_module, is_parameter, is_torch_tensor
from xla_ckpt.core.checksum import compute_rows_digest, count_rows_per_digest, to_hex
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.skeleton import get_children, get_part
from xla_ckpt.core.tree.state_dict import copy_module_metadata
from xla_ckpt.errors import FormatError, UsageError
from xla_ckpt.keywords import suggest_leaf
from xla_ckpt.snapshot.shards import HostShard, choose_sample_windows
from xla_ckpt.state.model_state import get_model_tree
from xla_ckpt.state.part_load import StoredPart, collect_arrays
from xla_ckpt.state.problems import OTHER_BASE_PREFIX, LoadProblem
from xla_ckpt.state.shardings import StateShardings
from xla_ckpt.state.wrappers import get_modules, is_names_only

if TYPE_CHECKING:
    import torch

    from xla_ckpt.state.model_view import ModelView


ADAPTERS_PATTERN = "adapters"
"""Name in ``only=`` for a pattern that selects trained parameters and parameters named as adapters."""

RankDigests = dict[str, str]
"""Base arrays of one rank: name -> ``float32 64x16 0-32-9114de54bcb7862e``, i.e. dtype, shape, and row ranges with
their digests: first row, end row (exclusive) and digest."""

BaseArrays = dict[str, list[Any]]
"""Base arrays as JSON: name -> [dtype, shape, digest of all rows, or None if some rows have no digest]."""


DIFFERS_BETWEEN_RANKS = "that differs between ranks"
"""Placeholder for the digest of an array whose rows differ between ranks."""


@functools.cache
def _get_digest_cache() -> Any:
    """Return the cached digests by array, each with a key that changes when the array is written to."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()  # type: ignore[no-untyped-call]


def clear_digests() -> None:
    """Clear the digest cache. A load writes to memory in use, and torch does not count those writes."""
    _get_digest_cache.cache_clear()


def get_stored_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a module by their names in its state, and nothing for other objects."""
    values = get_model_tree(model).items() if is_module(model) else ()
    return {name: value for name, value in values if is_parameter(value)}


def exclude_base(model: Any, only: Sequence[str], placement: RankInfo) -> tuple[ModelView, dict[str, Any]]:
    """Split a model into a view without its base, and the base: the excluded parameters.

    Args:
        model: The module.
        only: Parameters to save: patterns of leaf paths (`paths.is_match`); `ADAPTERS_PATTERN` selects trained
            parameters and parameters named as adapters.
        placement: Placement of this rank.

    Returns:
        The view of the model, and the excluded parameters by name.

    Raises:
        UsageError: If nothing is excluded, nothing is saved, or a trained parameter is excluded, which no other tag
            would contain.
    """
    parameters = get_stored_parameters(model)
    chosen = {pattern: [n for n, p in parameters.items() if _is_selected(n, p, pattern)] for pattern in only}
    saved = {name for names in chosen.values() for name in names}
    base = {name: value for name, value in parameters.items() if name not in saved}
    whole = placement.mesh.pp == 1  # one pipeline stage may contain no adapters, or only adapters
    leaves = [schema.get_weight_path(name) for name in parameters]
    for pattern, names in chosen.items():
        if whole and parameters and not names:
            is_word = pattern == ADAPTERS_PATTERN
            raise UsageError(
                "the model is all base: no parameter is trained, and none has lora_ in its name"
                if is_word
                else f"no parameter of the model is like {pattern!r} of only="
                f"{suggest_leaf(pattern, [ADAPTERS_PATTERN, *leaves])}",
                leaf=schema.MODEL,
                expected="adapters" if is_word else f"leaf paths such as {leaves[0]!r}, or patterns: 'model/*.lora_*'",
                found=f"only={list(only)}",
                hint="Save it without only=, or name in only= what is to be saved.",
            )
    if not is_module(model) or (whole and not base):
        raise UsageError(
            "only= leaves out parameters that the base has, and the model has no such parameter",
            leaf=schema.MODEL,
            expected="a module, some of whose parameters are not trained, or not like the patterns",
            found=type(model).__name__,
            hint="Freeze the base with requires_grad_(False), or save all of the model.",
        )
    lost = next((name for name, value in base.items() if value.requires_grad), None)
    if lost is not None:
        raise UsageError(
            "only= leaves out what is trained: no other tag would have it",
            leaf=schema.get_weight_path(lost),
            expected="parameters with requires_grad=False, beside those that only= names",
            found=f"only={list(only)}",
            hint="Name it in only=, or freeze it with requires_grad_(False).",
        )
    return exclude_parameters(model, base), base


def _is_selected(name: str, parameter: torch.nn.Parameter, pattern: str) -> bool:
    if pattern == ADAPTERS_PATTERN:
        return parameter.requires_grad or schema.ADAPTER_PREFIX in name
    return paths.is_match(schema.get_weight_path(name), pattern)


def exclude_parameters(model: torch.nn.Module, excluded: Mapping[str, Any]) -> ModelView:
    """Return a view of a model whose state excludes some parameters."""
    from xla_ckpt.state.model_view import ModelView

    entries = get_model_tree(model)
    return ModelView(
        copy_module_metadata(entries, {name: value for name, value in entries.items() if name not in excluded}),
        parameters=list(model.named_parameters(remove_duplicate=False)),
        wrapped_modules=get_modules(model),
        load_entries=lambda state: model.load_state_dict(state, strict=False),
    )


def digest_base(base: Mapping[str, Any], shardings: StateShardings, *, loading: bool) -> RankDigests:
    """Compute this rank's digests of a base. A load computes all of them: it ignores the cache and replicas."""
    if loading:
        clear_digests()
    said: RankDigests = {}
    for path, value in collect_arrays(base, schema.MODEL).items():
        adapter = shardings.adapters.require(value, path)
        local = shardings.locate(path, value, adapter)
        if loading or local.replica == 0:
            shape = "x".join(map(str, local.shape))
            rows = _digest_rows(value, local, adapter)
            said[schema.strip_member(path)] = " ".join([adapter.get_dtype(value, path).name, shape, *rows])
    return said


def _digest_rows(value: Any, local: LocalArray, adapter: ArrayAdapter) -> list[str]:
    """Return the row ranges of an array's pieces, with their digests.

    Pieces without whole rows, or whose boundaries split a group of rows with a common digest, have none. Digests are
    cached until the array's buffer is replaced or a write to it is detected (`_get_version_key`).
    """
    state = _get_version_key(value, local, adapter)
    if state is not None and (earlier := _get_digest_cache().get(value)) is not None and earlier[0] == state:
        digested: list[str] = earlier[1]
        return digested
    row = Box.from_shape(local.shape[1:])
    row_bytes = row.size * adapter.get_dtype(value).itemsize
    together, count = count_rows_per_digest(row_bytes), local.shape[0] if local.shape else 1
    digested = []
    for piece, shard in zip(local.pieces, adapter.get_host_shards([(value, local)])[0], strict=True):
        first, last = (piece.global_box.start[0], piece.global_box.stop[0]) if local.shape else (0, 1)
        whole = piece.global_box.shape[1:] == local.shape[1:] and first % together == 0
        if first < last and whole and (last % together == 0 or last == count):
            digested.append(f"{first}-{last}-{to_hex(compute_rows_digest(shard.data, row_bytes, first))}")
    if state is not None:
        _get_digest_cache()[value] = state, digested
    return digested


def _get_version_key(value: Any, local: LocalArray, adapter: ArrayAdapter) -> Hashable:
    """Return a key that changes when the program writes to a tensor; None if writes cannot be detected.

    torch does not count writes through ``.data``, which merge adapters into their base; a sample of the bytes detects
    those. XLA devices provide no sample, because reading it would transfer the whole tensor.
    """
    if not is_torch_tensor(value) or value.is_inference():
        return None
    shards = [] if value.device.type == "xla" else adapter.get_shards([(value, local)])[0]
    looks = [(shard, choose_sample_windows(shard.nbytes)) for shard in shards]
    samples = [look.read(s.data) if isinstance(s, HostShard) else s.read_sample(look) for s, look in looks]
    return adapter.get_identity(value), value._version, local, *samples


def build_base_tree(base: Mapping[str, Any], shardings: StateShardings) -> Any:
    """Return the stored form of a base: the digests of each rank."""
    placement = shardings.placement
    return {
        schema.RANK_COUNT: placement.world_size,
        schema.RANKS: {str(placement.rank): digest_base(base, shardings, loading=False)},
    }


def merge_digests(rank_digests: Sequence[RankDigests]) -> BaseArrays:
    """Merge the digests of all ranks. Rows that several ranks hold with equal digests count once.

    Raises:
        FormatError: If a tag contains an invalid entry.
    """
    named: BaseArrays = {}
    rows: dict[str, dict[tuple[int, int], set[int]]] = {}
    try:
        for said in rank_digests:
            for name, text in said.items():
                dtype, shape, *parts = text.split(" ")
                named[name] = [dtype, [int(n) for n in shape.split("x") if n], None]
                for first, last, digest in (part.split("-") for part in parts):
                    rows.setdefault(name, {}).setdefault((int(first), int(last)), set()).add(int(digest, 16))
    except (ValueError, AttributeError) as error:
        raise FormatError("what is stored of the base makes no sense", leaf=schema.BASE) from error
    for name, array in named.items():
        of_array = rows.get(name, {})
        if any(len(digests) > 1 for digests in of_array.values()):
            array[2] = DIFFERS_BETWEEN_RANKS
        elif sum(last - first for first, last in of_array) == (array[1][0] if array[1] else 1):
            array[2] = to_hex(sum(digest for digests in of_array.values() for digest in digests) % (1 << 64))
    return named


def parse_base(skeleton: Any) -> BaseArrays:
    """Parse the base arrays from the skeleton of an adapter-only tag.

    A base into which adapters were injected has the same names as before.

    Raises:
        FormatError: If the stored entry is invalid.
    """
    of_ranks = (get_children(get_part(skeleton, paths.join(schema.BASE, schema.RANKS))) or {}).values()
    named = merge_digests([get_children(said) or {} for said in of_ranks])
    return {name.replace(schema.BASE_LAYER_SUFFIX, ""): array for name, array in named.items()}


def is_same_base(one: BaseArrays, other: BaseArrays) -> bool | None:
    """Return True if two tags record the same base; None if a digest is missing."""
    if one.keys() != other.keys() or any(_describe_difference(array, other[name]) for name, array in one.items()):
        return False
    return (
        None
        if any(array[2] in (None, DIFFERS_BETWEEN_RANKS) for base in (one, other) for array in base.values())
        else True
    )


def _describe_difference(expected: Sequence[Any], actual: Sequence[Any] | None) -> str | None:
    """Describe how an array of the program differs from the one recorded in a tag; None if they are equal."""
    if actual is None:
        return "it is not in the model"
    for what, wanted, value in zip(("type", "shape", "digest"), expected, actual, strict=True):
        if wanted != value and None not in (wanted, value):
            return f"{what} {wanted} is named, {value} is here"
    return None


@dataclass(frozen=True, slots=True)
class StoredBase:
    """The base recorded in a tag, and this rank's digests of it."""

    arrays: BaseArrays
    local_digests: RankDigests

    def find_problems(self, present: BaseArrays) -> list[LoadProblem]:
        """Compare the base of all ranks with the recorded one. Return at most one problem."""
        texts = {
            name: text
            for name, array in self.arrays.items()
            if (text := _describe_difference(array, present.get(name)))
        }
        if not texts:
            return []
        name, text = next(iter(texts.items()))
        more = f", and {len(texts) - 1} more arrays differ" if len(texts) > 1 else ""
        return [LoadProblem(paths.join(schema.MODEL, name), f"{OTHER_BASE_PREFIX}: {text}{more}")]


def exclude_stored_base(stored: StoredPart, model: Any) -> tuple[Any, StoredBase | None]:
    """Split a model into a view without the base that a tag records, and that base; (model, None) without one.

    Raises:
        FormatError: If the stored base is invalid.
    """
    part = stored.find_part(schema.BASE)
    if part is None or not is_module(model) or is_names_only(model):
        return model, None
    of_ranks = part.build()
    if not isinstance(of_ranks, dict) or not isinstance(of_ranks.get(schema.RANKS), dict):
        raise FormatError("what is stored of the base makes no sense", leaf=schema.BASE)
    named = merge_digests([*of_ranks[schema.RANKS].values()])
    names = {paths.unescape(paths.split(name)[0]) for name in named}
    here = {name: value for name, value in get_model_tree(model).items() if name in names}
    return exclude_parameters(model, here), StoredBase(
        named, digest_base(here, stored.shardings.with_model(model), loading=True)
    )
