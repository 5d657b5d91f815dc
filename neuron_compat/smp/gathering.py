"""The whole of a model, gathered from the ranks that own its parts: tensor by tensor, over gloo.

Nothing is gathered before all ranks of a model have met, and each of them has found that it can do its part. So a call
on too few ranks is an error on those that made it.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from neuron_compat.smp import job, wire
from neuron_compat.smp.entries import Entry
from neuron_compat.smp.errors import SMPRuntimeError
from neuron_compat.smp.meeting import together
from xla_ckpt.facade import LocalArray, hosted, whole_of_parts

Key = TypeVar("Key", bound=Hashable)


def guard() -> str:
    """What to tell a program that makes a call on some ranks of a model only."""
    name = "rdp_rank()" if job.tp_size() > 1 else "dp_rank()"
    wrong = " (not dp_rank() == 0: with tensor parallelism that is tensor-parallel rank 0 only)"
    return f"Call it on all ranks with smp.{name} == 0{wrong if job.tp_size() > 1 else ''}, or on all ranks."


def holder(partition: int, tp_rank: int) -> int:
    """The rank in the world that owns a partition, and holds this tensor-parallel part, in this process' model."""
    here = job.ranks()
    return here.mesh.rank({"pp": partition, "dp": here.of("rdp"), "tp": tp_rank})


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the whole model, and the ranks that its parts come from."""

    shape: tuple[int, ...]
    """Of each part."""
    dtype: torch.dtype
    sources: tuple[int, ...]
    """The ranks, in the order of the parts."""
    places: tuple[LocalArray, ...]
    """Where their parts lie in the whole."""


def part_of_entry(entry: Entry) -> Part:
    """A parameter or buffer, as its first owner has it."""
    value = entry.value
    sources = tuple(holder(entry.owners[0], tp) for tp in range(job.tp_size() if entry.is_split else 1))
    places = tuple(entry.place(rank) for rank in sources)
    return Part(tuple(value.shape), value.dtype, sources, places)


def collected(
    parts: Mapping[Key, Part], to_send: dict[Key, torch.Tensor], kind: str, to_first: bool
) -> dict[Key, torch.Tensor]:
    """The whole tensors, by key, on all ranks of a group or on its first one; the others get nothing.

    All of them make the same call, with the same parts. At any time a rank holds, beside what it returns, the parts of
    one tensor.

    Args:
        to_send: What this rank has to send, by key, on the CPU; it is emptied.
        kind: The group, as `job.KINDS` names it.
        to_first: Only the first rank of the group gets them.
    """
    gets = not to_first or job.ranks().groups[kind][0] == job.rank()
    tensors: dict[Key, torch.Tensor] = {}
    for key, part in parts.items():
        pieces = _pieces(part, to_send.pop(key, None), kind, to_first)
        if gets:
            tensors[key] = whole_of_parts(pieces)
    return tensors


def _pieces(part: Part, own: torch.Tensor | None, kind: str, to_first: bool) -> list[tuple[torch.Tensor, LocalArray]]:
    """The parts of a tensor that reach this rank."""
    ranks = job.ranks().groups[kind]
    me, first = job.rank(), ranks[0]
    pieces = []
    for source, place in zip(part.sources, part.places, strict=True):
        piece: torch.Tensor | None = None
        if len(ranks) == 1 or (to_first and source == me == first):
            piece = own
        elif not to_first:
            piece = wire.broadcast(own, part.shape, part.dtype, source, kind)
        elif source == me:
            assert own is not None
            wire.send(own, first, kind)
        elif me == first:
            piece = wire.receive(part.shape, part.dtype, source, kind)
        if piece is not None:
            pieces.append((piece, place))
    return pieces


def full_state(entries: Sequence[Entry], call: str, to_rank0: bool) -> OrderedDict[str, Any]:
    """All entries, each tensor whole and on the CPU. All ranks of a model make the same call.

    Args:
        entries: Those of the whole model, the same on all ranks.
        call: What the program called, for messages.
        to_rank0: Only the first rank of the model gets them; the others get an empty dict.

    Raises:
        TooFewRanksError: Some ranks of the model did not make the call in time.
        SMPRuntimeError: The ranks have different models.
        CheckpointError: What went wrong on a rank before anything was gathered; the same on all of them.
    """
    tensors = {id(entry.value): entry for entry in entries if entry.is_tensor}  # a tied one is gathered once
    parts: dict[int, Part] = {}
    to_send: dict[int, torch.Tensor] = {}

    def prepare() -> str:
        parts.update((key, part_of_entry(entry)) for key, entry in tensors.items())
        own = {key: entry.value for key, entry in tensors.items() if job.rank() in parts[key].sources}
        to_send.update(zip(own, hosted(list(own.values())), strict=True))
        return _digest(entries)

    check_alike(together("mp", call, prepare, guard=guard()), call)
    whole = collected(parts, to_send, "mp", to_rank0)
    if to_rank0 and job.ranks().groups["mp"][0] != job.rank():
        return OrderedDict()
    return OrderedDict((e.name, whole[id(e.value)] if e.is_tensor else e.value) for e in entries)


def _digest(entries: Sequence[Entry]) -> str:
    """What has to be the same on all ranks, in short."""
    said = [[e.name, *([list(e.value.shape), str(e.value.dtype)] if e.is_tensor else [])] for e in entries]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def check_alike(digests: Sequence[str], call: str) -> None:
    """Refuse ranks that have different models.

    Raises:
        SMPRuntimeError: They do.
    """
    differing = [rank for rank, digest in zip(job.get_mp_group(), digests, strict=True) if digest != digests[0]]
    if differing:
        raise SMPRuntimeError(
            f"{call}: the ranks of a model have different names, shapes or types in it",
            expected=f"those of rank {job.get_mp_group()[0]}",
            found=f"others on rank {differing[0]}",
            hint="Every rank makes the whole model; smp.partition() says which part of it a rank owns.",
        )
