"""Adapters alone: the base of a model, which a tag leaves out and names by digests, and whether a program has it.

The base is what a save leaves out of a model: what is not trained, or not named. Each rank says of its own parts what
they are, without a word to the others: a digest of some rows of an array is a sum over them, so that those of all rows
add up, however they are split.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.torch_objects import is_module, is_parameter, is_torch_tensor
from xla_ckpt.errors import FormatError, UsageError
from xla_ckpt.keywords import nearest
from xla_ckpt.manifest.digest import rows_digest, rows_together, to_hex
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.snapshot.shards import HostShard, windows
from xla_ckpt.state.loading import Stored, arrays_of
from xla_ckpt.state.module import tree_of
from xla_ckpt.state.problems import OTHER_BASE, Problem
from xla_ckpt.state.shardings import StateShardings
from xla_ckpt.state.wrappers import is_names_only, modules_in
from xla_ckpt.tree import lora, schema
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.module_metadata import with_metadata_of
from xla_ckpt.tree.skeleton import children, part_at

if TYPE_CHECKING:
    import torch

    from xla_ckpt.state.model_view import ModelView

ADAPTERS = "adapters"
"""Stands for a pattern in ``only=``: what is trained, and what is called an adapter."""

Said = dict[str, str]
"""What one rank says of the base: name of an array -> ``float32 64x16 0-32-9114de54bcb7862e``, its element type, shape,
and rows: the first, one past the last, and their digest."""

BaseArrays = dict[str, list[Any]]
"""The arrays of a base, as JSON: name -> [element type, shape, digest of all rows; None if parts of it have none]."""


DIFFERS = "that differs between ranks"
"""In the place of the digest of an array of which ranks have different rows."""


@functools.cache
def _digests() -> Any:
    """What was digested before, by array, with what tells that nothing was written to it since."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()  # type: ignore[no-untyped-call]


def forget_digests() -> None:
    """Digest all arrays anew. A load writes to memory that is in use, and torch counts no write."""
    _digests.cache_clear()


def stored_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters of a module, by the names that they have in its state; nothing of anything else."""
    values = tree_of(model).items() if is_module(model) else ()
    return {name: value for name, value in values if is_parameter(value)}


def without_base(model: Any, only: Sequence[str], placement: Placement) -> tuple[ModelView, dict[str, Any]]:
    """A model without its base, and the base: the parameters that are left out.

    Args:
        model: The module.
        only: What is saved of its parameters: patterns of leaf paths (`paths.is_like`); `ADAPTERS` stands for those
            that are trained, and those whose names say that they are adapters.
        placement: Where this rank is.

    Raises:
        UsageError: Nothing is left out, or nothing is saved; or something is left out that no other tag would have.
    """
    parameters = stored_parameters(model)
    chosen = {pattern: [n for n, p in parameters.items() if _is_chosen(n, p, pattern)] for pattern in only}
    saved = {name for names in chosen.values() for name in names}
    base = {name: value for name, value in parameters.items() if name not in saved}
    whole = placement.mesh.pp == 1  # one pipeline stage may have no adapters, or nothing else
    leaves = [schema.weight(name) for name in parameters]
    for pattern, names in chosen.items():
        if whole and parameters and not names:
            is_word = pattern == ADAPTERS
            raise UsageError(
                "the model is all base: no parameter is trained, and none has lora_ in its name"
                if is_word
                else f"no parameter of the model is like {pattern!r} of only={nearest(pattern, [ADAPTERS, *leaves])}",
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
            leaf=schema.weight(lost),
            expected="parameters with requires_grad=False, beside those that only= names",
            found=f"only={list(only)}",
            hint="Name it in only=, or freeze it with requires_grad_(False).",
        )
    return without(model, base), base


def _is_chosen(name: str, parameter: torch.nn.Parameter, pattern: str) -> bool:
    if pattern == ADAPTERS:
        return parameter.requires_grad or lora.ADAPTER in name
    return paths.is_like(schema.weight(name), pattern)


def without(model: torch.nn.Module, base: Mapping[str, Any]) -> ModelView:
    """A model whose state has no base."""
    from xla_ckpt.state.model_view import ModelView

    entries = tree_of(model)
    return ModelView(
        with_metadata_of(entries, {name: value for name, value in entries.items() if name not in base}),
        parameters=list(model.named_parameters(remove_duplicate=False)),
        parts=modules_in(model),
        put=lambda state: model.load_state_dict(state, strict=False),
    )


def said_of(base: Mapping[str, Any], shardings: StateShardings, *, loading: bool) -> Said:
    """What this rank says of a base. In a load all of it is digested, whatever was digested before or by replicas."""
    if loading:
        forget_digests()
    said: Said = {}
    for path, value in arrays_of(base, schema.MODEL).items():
        adapter = shardings.adapters.require(value, path)
        local = shardings.local(path, value, adapter)
        if loading or local.replica == 0:
            shape = "x".join(map(str, local.shape))
            rows = _digested(value, local, adapter)
            said[schema.below_member(path)] = " ".join([adapter.dtype(value, path).name, shape, *rows])
    return said


def _digested(value: Any, local: LocalArray, adapter: ArrayAdapter) -> list[str]:
    """The rows of an array's parts, with their digests.

    Of parts that are no whole rows, or begin among rows that go together, there are none.
    They are kept as long as the same buffer is in the array, and nothing tells of a write to it (`_state`).
    """
    state = _state(value, local, adapter)
    if state is not None and (earlier := _digests().get(value)) is not None and earlier[0] == state:
        digested: list[str] = earlier[1]
        return digested
    row = Box.whole(local.shape[1:])
    row_bytes = row.size * adapter.dtype(value).itemsize
    together, count = rows_together(row_bytes), local.shape[0] if local.shape else 1
    digested = []
    for piece, shard in zip(local.pieces, adapter.host([(value, local)])[0], strict=True):
        first, last = (piece.box.start[0], piece.box.stop[0]) if local.shape else (0, 1)
        whole = piece.box.shape[1:] == local.shape[1:] and first % together == 0
        if first < last and whole and (last % together == 0 or last == count):
            digested.append(f"{first}-{last}-{to_hex(rows_digest(shard.data, row_bytes, first))}")
    if state is not None:
        _digests()[value] = state, digested
    return digested


def _state(value: Any, local: LocalArray, adapter: ArrayAdapter) -> Hashable:
    """What is another one after the program has written to a tensor; None if nothing would tell.

    torch counts no writes through ``.data``, by which adapters are merged into their base: a sample tells of those.
    On XLA's devices there is none: all of the tensor would be transferred for it.
    """
    if not is_torch_tensor(value) or value.is_inference():
        return None
    shards = [] if value.device.type == "xla" else adapter.shards([(value, local)])[0]
    looks = [(shard, windows(shard.nbytes)) for shard in shards]
    samples = [look.of(s.data) if isinstance(s, HostShard) else s.look(look) for s, look in looks]
    return adapter.identity(value), value._version, local, *samples


def tree_of_base(base: Mapping[str, Any], shardings: StateShardings) -> Any:
    """What is stored of a base: what each rank says of it."""
    placement = shardings.placement
    return {schema.WORLD: placement.world, schema.RANKS: {str(placement.rank): said_of(base, shardings, loading=False)}}


def united_base(of_ranks: Sequence[Said]) -> BaseArrays:
    """The arrays of a base, from what all ranks say. Rows that several of them have alike count once.

    Raises:
        FormatError: A tag says what no rank does.
    """
    named: BaseArrays = {}
    rows: dict[str, dict[tuple[int, int], set[int]]] = {}
    try:
        for said in of_ranks:
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
            array[2] = DIFFERS
        elif sum(last - first for first, last in of_array) == (array[1][0] if array[1] else 1):
            array[2] = to_hex(sum(digest for digests in of_array.values() for digest in digests) % (1 << 64))
    return named


def base_of(skeleton: Any) -> BaseArrays:
    """The arrays of the base that a tag of adapters alone names, by its skeleton.

    A base that adapters were put into is that which it was before.

    Raises:
        FormatError: What is stored of it makes no sense.
    """
    of_ranks = (children(part_at(skeleton, paths.join(schema.BASE, schema.RANKS))) or {}).values()
    named = united_base([children(said) or {} for said in of_ranks])
    return {name.replace(lora.BASE_LAYER, ""): array for name, array in named.items()}


def same_base(one: BaseArrays, other: BaseArrays) -> bool | None:
    """Whether two tags name the same base; None if they have no digests of all of it."""
    if one.keys() != other.keys() or any(_difference(array, other[name]) for name, array in one.items()):
        return False
    return None if any(array[2] in (None, DIFFERS) for base in (one, other) for array in base.values()) else True


def _difference(named: Sequence[Any], here: Sequence[Any] | None) -> str | None:
    """What tells an array of the program from the one that a tag names; None if nothing does."""
    if here is None:
        return "it is not in the model"
    for what, wanted, value in zip(("type", "shape", "digest"), named, here, strict=True):
        if wanted != value and None not in (wanted, value):
            return f"{what} {wanted} is named, {value} is here"
    return None


@dataclass(frozen=True, slots=True)
class Base:
    """The base that a tag names, and what this rank has of it."""

    named: BaseArrays
    own: Said

    def problems(self, here: BaseArrays) -> list[Problem]:
        """What is wrong with the base that all ranks have together: one problem, whatever it is."""
        texts = {name: text for name, array in self.named.items() if (text := _difference(array, here.get(name)))}
        if not texts:
            return []
        name, text = next(iter(texts.items()))
        more = f", and {len(texts) - 1} more arrays differ" if len(texts) > 1 else ""
        return [Problem(paths.join(schema.MODEL, name), f"{OTHER_BASE}: {text}{more}")]


def split_base(stored: Stored, model: Any) -> tuple[Any, Base | None]:
    """A model without the base that a tag names, and that base; the model itself, if the tag names none.

    Raises:
        FormatError: What is stored of it makes no sense.
    """
    part = stored.at(schema.BASE)
    if part is None or not is_module(model) or is_names_only(model):
        return model, None
    of_ranks = part.build()
    if not isinstance(of_ranks, dict) or not isinstance(of_ranks.get(schema.RANKS), dict):
        raise FormatError("what is stored of the base makes no sense", leaf=schema.BASE)
    named = united_base([*of_ranks[schema.RANKS].values()])
    names = {paths.unescape(paths.split(name)[0]) for name in named}
    here = {name: value for name, value in tree_of(model).items() if name in names}
    return without(model, here), Base(named, said_of(here, stored.shardings.of_model(model), loading=True))
