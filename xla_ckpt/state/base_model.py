"""Adapter-only checkpoints: leave out the base model, record its digests, and verify them on load.

The base is what a save with only= leaves out: parameters that are not trained, or not named. Each rank digests its own
shards without communication. A digest of some rows of an array is a sum over them, so digests of all rows add up,
however they are sharded.
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
"""Stands for a pattern in ``only=``: what is trained, and what is called an adapter."""

RankDigests = dict[str, str]
"""What one rank says of the base: name of an array -> ``float32 64x16 0-32-9114de54bcb7862e``, its element type, shape,
and rows: the first, one past the last, and their digest."""

BaseArrays = dict[str, list[Any]]
"""The arrays of a base, as JSON: name -> [element type, shape, digest of all rows; None if parts of it have none]."""


DIFFERS_BETWEEN_RANKS = "that differs between ranks"
"""In the place of the digest of an array of which ranks have different rows."""


@functools.cache
def _get_digest_cache() -> Any:
    """What was digested before, by array, with what tells that nothing was written to it since."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()  # type: ignore[no-untyped-call]


def clear_digests() -> None:
    """Digest all arrays anew. A load writes to memory that is in use, and torch counts no write."""
    _get_digest_cache.cache_clear()


def get_stored_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters of a module, by the names that they have in its state; nothing of anything else."""
    values = get_model_tree(model).items() if is_module(model) else ()
    return {name: value for name, value in values if is_parameter(value)}


def exclude_base(model: Any, only: Sequence[str], placement: RankInfo) -> tuple[ModelView, dict[str, Any]]:
    """A model without its base, and the base: the parameters that are left out.

    Args:
        model: The module.
        only: What is saved of its parameters: patterns of leaf paths (`paths.is_match`); `ADAPTERS_PATTERN` stands for
            those that are trained, and those whose names say that they are adapters.
        placement: Where this rank is.

    Raises:
        UsageError: Nothing is left out, or nothing is saved; or something is left out that no other tag would have.
    """
    parameters = get_stored_parameters(model)
    chosen = {pattern: [n for n, p in parameters.items() if _is_selected(n, p, pattern)] for pattern in only}
    saved = {name for names in chosen.values() for name in names}
    base = {name: value for name, value in parameters.items() if name not in saved}
    whole = placement.mesh.pp == 1  # one pipeline stage may have no adapters, or nothing else
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
    """A model whose state has no base."""
    from xla_ckpt.state.model_view import ModelView

    entries = get_model_tree(model)
    return ModelView(
        copy_module_metadata(entries, {name: value for name, value in entries.items() if name not in excluded}),
        parameters=list(model.named_parameters(remove_duplicate=False)),
        wrapped_modules=get_modules(model),
        load_entries=lambda state: model.load_state_dict(state, strict=False),
    )


def digest_base(base: Mapping[str, Any], shardings: StateShardings, *, loading: bool) -> RankDigests:
    """What this rank says of a base. In a load all of it is digested, whatever was digested before or by replicas."""
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
    """The rows of an array's parts, with their digests.

    Of parts that are no whole rows, or begin among rows that go together, there are none.
    They are kept as long as the same buffer is in the array, and nothing tells of a write to it (`_get_version_key`).
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
    """What is another one after the program has written to a tensor; None if nothing would tell.

    torch counts no writes through ``.data``, by which adapters are merged into their base: a sample tells of those.
    On XLA's devices there is none: all of the tensor would be transferred for it.
    """
    if not is_torch_tensor(value) or value.is_inference():
        return None
    shards = [] if value.device.type == "xla" else adapter.get_shards([(value, local)])[0]
    looks = [(shard, choose_sample_windows(shard.nbytes)) for shard in shards]
    samples = [look.read(s.data) if isinstance(s, HostShard) else s.read_sample(look) for s, look in looks]
    return adapter.get_identity(value), value._version, local, *samples


def build_base_tree(base: Mapping[str, Any], shardings: StateShardings) -> Any:
    """What is stored of a base: what each rank says of it."""
    placement = shardings.placement
    return {
        schema.RANK_COUNT: placement.world_size,
        schema.RANKS: {str(placement.rank): digest_base(base, shardings, loading=False)},
    }


def merge_digests(rank_digests: Sequence[RankDigests]) -> BaseArrays:
    """The arrays of a base, from what all ranks say. Rows that several of them have alike count once.

    Raises:
        FormatError: A tag says what no rank does.
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
    """The arrays of the base that a tag of adapters alone names, by its skeleton.

    A base that adapters were put into is that which it was before.

    Raises:
        FormatError: What is stored of it makes no sense.
    """
    of_ranks = (get_children(get_part(skeleton, paths.join(schema.BASE, schema.RANKS))) or {}).values()
    named = merge_digests([get_children(said) or {} for said in of_ranks])
    return {name.replace(schema.BASE_LAYER_SUFFIX, ""): array for name, array in named.items()}


def is_same_base(one: BaseArrays, other: BaseArrays) -> bool | None:
    """Whether two tags name the same base; None if they have no digests of all of it."""
    if one.keys() != other.keys() or any(_describe_difference(array, other[name]) for name, array in one.items()):
        return False
    return (
        None
        if any(array[2] in (None, DIFFERS_BETWEEN_RANKS) for base in (one, other) for array in base.values())
        else True
    )


def _describe_difference(expected: Sequence[Any], actual: Sequence[Any] | None) -> str | None:
    """What tells an array of the program from the one that a tag names; None if nothing does."""
    if actual is None:
        return "it is not in the model"
    for what, wanted, value in zip(("type", "shape", "digest"), expected, actual, strict=True):
        if wanted != value and None not in (wanted, value):
            return f"{what} {wanted} is named, {value} is here"
    return None


@dataclass(frozen=True, slots=True)
class StoredBase:
    """The base that a tag names, and what this rank has of it."""

    arrays: BaseArrays
    local_digests: RankDigests

    def find_problems(self, present: BaseArrays) -> list[LoadProblem]:
        """What is wrong with the base that all ranks have together: one problem, whatever it is."""
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
    """A model without the base that a tag names, and that base; the model itself, if the tag names none.

    Raises:
        FormatError: What is stored of it makes no sense.
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
