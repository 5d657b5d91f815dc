"""Send, broadcast and gather tensors between ranks, over gloo.

Tensors travel as bytes, whatever their dtype, in messages of bounded size. Whole tensors of a model are gathered one
at a time from the ranks that own their parts, after all ranks have met (`neuron_compat.smp.rank_sync`), so that a
call on too few ranks raises an error instead of hanging.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from neuron_compat.smp import job
from neuron_compat.smp.errors import SMPRuntimeError
from neuron_compat.smp.rank_sync import run_on_all_ranks
from neuron_compat.smp.state_entries import StateEntry
from xla_ckpt.facade import LocalArray, assemble_array, move_to_host

distributed: Any = torch.distributed

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Bytes of the largest message."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """What a rank knows of a tensor that comes from another one."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_json(cls, shape: Sequence[int], dtype: str) -> Self:
        """As the other rank said it: `dtype` is a name such as ``torch.float32``."""
        return cls(tuple(shape), getattr(torch, dtype.removeprefix("torch.")))


def _transfer_pieces(
    value: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, transfer: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Run `transfer` on the bytes of each piece of a value, or of memory for one; the tensor whose pieces they were."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu") if value is None else value.contiguous()
    if tensor.numel():
        for piece in torch.split(tensor.reshape(-1).view(torch.uint8), MAX_MESSAGE_BYTES):  # they share its memory
            transfer(piece)
    return tensor


def broadcast_tensor(
    value: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int, kind: str
) -> torch.Tensor:
    """The value of one rank on all ranks of a group; all of them make the same call.

    Args:
        value: On the source a CPU tensor; None elsewhere.
        source: The rank in the world that has it.
        kind: The group, as `job.KINDS` names it.
    """
    group = job.get_process_group(kind)
    sent = value if job.rank() == source else None
    return _transfer_pieces(sent, shape, dtype, lambda piece: distributed.broadcast(piece, src=source, group=group))


def send_tensor(value: torch.Tensor, destination: int, kind: str) -> None:
    """Send a CPU tensor to a rank of the world, which calls `receive_tensor`."""
    group = job.get_process_group(kind)
    _transfer_pieces(
        value, value.shape, value.dtype, lambda piece: distributed.send(piece, dst=destination, group=group)
    )


def receive_tensor(shape: Sequence[int], dtype: torch.dtype, source: int, kind: str) -> torch.Tensor:
    """The tensor that a rank of the world sends."""
    group = job.get_process_group(kind)
    return _transfer_pieces(None, shape, dtype, lambda piece: distributed.recv(piece, src=source, group=group))


Key = TypeVar("Key", bound=Hashable)


def get_required_ranks_hint() -> str:
    """What to tell a program that makes a call on some ranks of a model only."""
    name = "rdp_rank()" if job.tp_size() > 1 else "dp_rank()"
    wrong = " (not dp_rank() == 0: with tensor parallelism that is tensor-parallel rank 0 only)"
    return f"Call it on all ranks with smp.{name} == 0{wrong if job.tp_size() > 1 else ''}, or on all ranks."


def find_owner_rank(partition: int, tp_rank: int) -> int:
    """The rank in the world that owns a partition, and holds this tensor-parallel part, in this process' model."""
    here = job.get_rank_info()
    return here.mesh.rank({"pp": partition, "dp": here.get_rank("rdp"), "tp": tp_rank})


@dataclass(frozen=True, slots=True)
class GatheredTensor:
    """A tensor of the whole model, and the ranks that its parts come from."""

    shape: tuple[int, ...]
    """Of each part."""
    dtype: torch.dtype
    sources: tuple[int, ...]
    """The ranks, in the order of the parts."""
    places: tuple[LocalArray, ...]
    """Where their parts lie in the whole."""


def plan_entry(entry: StateEntry) -> GatheredTensor:
    """A parameter or buffer, as its first owner has it."""
    value = entry.value
    sources = tuple(find_owner_rank(entry.owners[0], tp) for tp in range(job.tp_size() if entry.is_split else 1))
    places = tuple(entry.place(rank) for rank in sources)
    return GatheredTensor(tuple(value.shape), value.dtype, sources, places)


def gather_tensors(
    parts: Mapping[Key, GatheredTensor], to_send: dict[Key, torch.Tensor], kind: str, to_first: bool
) -> dict[Key, torch.Tensor]:
    """The whole tensors, by key, on all ranks of a group or on its first one; the others get nothing.

    All of them make the same call, with the same parts. At any time a rank holds, beside what it returns, the parts of
    one tensor.

    Args:
        to_send: What this rank has to send, by key, on the CPU; it is emptied.
        kind: The group, as `job.KINDS` names it.
        to_first: Only the first rank of the group gets them.
    """
    gets = not to_first or job.get_rank_info().groups[kind][0] == job.rank()
    tensors: dict[Key, torch.Tensor] = {}
    for key, part in parts.items():
        pieces = _gather_pieces(part, to_send.pop(key, None), kind, to_first)
        if gets:
            tensors[key] = assemble_array(pieces)
    return tensors


def _gather_pieces(
    part: GatheredTensor, own: torch.Tensor | None, kind: str, to_first: bool
) -> list[tuple[torch.Tensor, LocalArray]]:
    """The parts of a tensor that reach this rank."""
    ranks = job.get_rank_info().groups[kind]
    me, first = job.rank(), ranks[0]
    pieces = []
    for source, place in zip(part.sources, part.places, strict=True):
        piece: torch.Tensor | None = None
        if len(ranks) == 1 or (to_first and source == me == first):
            piece = own
        elif not to_first:
            piece = broadcast_tensor(own, part.shape, part.dtype, source, kind)
        elif source == me:
            assert own is not None
            send_tensor(own, first, kind)
        elif me == first:
            piece = receive_tensor(part.shape, part.dtype, source, kind)
        if piece is not None:
            pieces.append((piece, place))
    return pieces


def gather_full_state(entries: Sequence[StateEntry], call_name: str, to_rank0: bool) -> OrderedDict[str, Any]:
    """All entries, each tensor whole and on the CPU. All ranks of a model make the same call.

    Args:
        entries: Those of the whole model, the same on all ranks.
        call_name: What the program called, for messages.
        to_rank0: Only the first rank of the model gets them; the others get an empty dict.

    Raises:
        TooFewRanksError: Some ranks of the model did not make the call in time.
        SMPRuntimeError: The ranks have different models.
        CheckpointError: What went wrong on a rank before anything was gathered; the same on all of them.
    """
    tensors = {id(entry.value): entry for entry in entries if entry.is_tensor}  # a tied one is gathered once
    parts: dict[int, GatheredTensor] = {}
    to_send: dict[int, torch.Tensor] = {}

    def prepare() -> str:
        parts.update((key, plan_entry(entry)) for key, entry in tensors.items())
        own = {key: entry.value for key, entry in tensors.items() if job.rank() in parts[key].sources}
        to_send.update(zip(own, move_to_host(list(own.values())), strict=True))
        return _digest(entries)

    check_same_model(run_on_all_ranks("mp", call_name, prepare, hint=get_required_ranks_hint()), call_name)
    whole = gather_tensors(parts, to_send, "mp", to_rank0)
    if to_rank0 and job.get_rank_info().groups["mp"][0] != job.rank():
        return OrderedDict()
    return OrderedDict((e.name, whole[id(e.value)] if e.is_tensor else e.value) for e in entries)


def _digest(entries: Sequence[StateEntry]) -> str:
    """What has to be the same on all ranks, in short."""
    said = [[e.name, *([list(e.value.shape), str(e.value.dtype)] if e.is_tensor else [])] for e in entries]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def check_same_model(digests: Sequence[str], call_name: str) -> None:
    """Refuse ranks that have different models.

    Raises:
        SMPRuntimeError: They do.
    """
    differing = [rank for rank, digest in zip(job.get_mp_group(), digests, strict=True) if digest != digests[0]]
    if differing:
        raise SMPRuntimeError(
            f"{call_name}: the ranks of a model have different names, shapes or types in it",
            expected=f"those of rank {job.get_mp_group()[0]}",
            found=f"others on rank {differing[0]}",
            hint="Every rank makes the whole model; smp.partition() says which part of it a rank owns.",
        )
