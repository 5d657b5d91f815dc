"""Send, broadcast and gather tensors between ranks, over gloo.

Tensors are sent as bytes, for any dtype, in messages of bounded size. Full tensors of a model are gathered one at a
time from the ranks that own their shards, after a handshake of all ranks (`neuron_compat.smp.rank_sync`), so that a
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
"""Maximum size of a message in bytes."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of a tensor on another rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_json(cls, shape: Sequence[int], dtype: str) -> Self:
        """Return the type described by another rank: `dtype` is a name such as ``torch.float32``."""
        return cls(tuple(shape), getattr(torch, dtype.removeprefix("torch.")))


def _transfer_pieces(
    value: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, transfer: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Run `transfer` on the bytes of each piece of a value, or of new memory for one; return the tensor."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu") if value is None else value.contiguous()
    if tensor.numel():
        for piece in torch.split(tensor.reshape(-1).view(torch.uint8), MAX_MESSAGE_BYTES):  # views of its memory
            transfer(piece)
    return tensor


def broadcast_tensor(
    value: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int, kind: str
) -> torch.Tensor:
    """Broadcast a value from one rank to all ranks of a group. Call it on all ranks of the group.

    Args:
        value: A CPU tensor on the source; None on other ranks.
        source: The global rank that has it.
        kind: Kind of the group, a key of `job.GROUP_KINDS`.
    """
    group = job.get_process_group(kind)
    sent = value if job.rank() == source else None
    return _transfer_pieces(sent, shape, dtype, lambda piece: distributed.broadcast(piece, src=source, group=group))


def send_tensor(value: torch.Tensor, destination: int, kind: str) -> None:
    """Send a CPU tensor to a global rank, which calls `receive_tensor`."""
    group = job.get_process_group(kind)
    _transfer_pieces(
        value, value.shape, value.dtype, lambda piece: distributed.send(piece, dst=destination, group=group)
    )


def receive_tensor(shape: Sequence[int], dtype: torch.dtype, source: int, kind: str) -> torch.Tensor:
    """Receive a tensor from a global rank."""
    group = job.get_process_group(kind)
    return _transfer_pieces(None, shape, dtype, lambda piece: distributed.recv(piece, src=source, group=group))


Key = TypeVar("Key", bound=Hashable)


def get_required_ranks_hint() -> str:
    """Return the hint for a program that makes a call on only some ranks of a model."""
    name = "rdp_rank()" if job.tp_size() > 1 else "dp_rank()"
    wrong = " (not dp_rank() == 0: with tensor parallelism that is tensor-parallel rank 0 only)"
    return f"Call it on all ranks with smp.{name} == 0{wrong if job.tp_size() > 1 else ''}, or on all ranks."


def find_owner_rank(partition: int, tp_rank: int) -> int:
    """Return the global rank that owns a partition, and holds this tensor-parallel shard, in this process's model."""
    here = job.get_rank_info()
    return here.mesh.rank({"pp": partition, "dp": here.get_rank("rdp"), "tp": tp_rank})


@dataclass(frozen=True, slots=True)
class GatheredTensor:
    """Full tensor of the model, and the ranks that its shards come from."""

    shape: tuple[int, ...]
    """Shape of each shard."""
    dtype: torch.dtype
    sources: tuple[int, ...]
    """Ranks, in the order of the shards."""
    places: tuple[LocalArray, ...]
    """Locations of the shards in the full tensor."""


def plan_entry(entry: StateEntry) -> GatheredTensor:
    """Return the gather plan for a parameter or buffer, from its first owner."""
    value = entry.value
    sources = tuple(find_owner_rank(entry.owners[0], tp) for tp in range(job.tp_size() if entry.is_split else 1))
    places = tuple(entry.place(rank) for rank in sources)
    return GatheredTensor(tuple(value.shape), value.dtype, sources, places)


def gather_tensors(
    parts: Mapping[Key, GatheredTensor], to_send: dict[Key, torch.Tensor], kind: str, to_first: bool
) -> dict[Key, torch.Tensor]:
    """Gather full tensors, by key, on all ranks of a group or only on its first one; others get an empty dict.

    All of them make the same call, with the same parts. At any time, a rank holds the shards of only one tensor,
    besides its result.

    Args:
        to_send: This rank's shards to send, by key, on the CPU; the dict is emptied.
        kind: Kind of the group, a key of `job.GROUP_KINDS`.
        to_first: Only the first rank of the group gets the tensors.
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
    """Return the shards of a tensor that reach this rank."""
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
    """Gather all entries, with full tensors on the CPU. Call it on all ranks of a model.

    Args:
        entries: Entries of the whole model, the same on all ranks.
        call_name: Name of the program's call, for messages.
        to_rank0: Only the first rank of the model gets the entries; the others get an empty dict.

    Raises:
        TooFewRanksError: Some ranks of the model did not make the call in time.
        SMPRuntimeError: The ranks have different models.
        CheckpointError: A rank failed before the gather; the same error on all of them.
    """
    tensors = {id(entry.value): entry for entry in entries if entry.is_tensor}  # a tied tensor is gathered once
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
    """Return a digest of the properties that must be equal on all ranks."""
    said = [[e.name, *([list(e.value.shape), str(e.value.dtype)] if e.is_tensor else [])] for e in entries]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def check_same_model(digests: Sequence[str], call_name: str) -> None:
    """Raise an error if ranks have different models.

    Raises:
        SMPRuntimeError: The digests differ.
    """
    differing = [rank for rank, digest in zip(job.get_mp_group(), digests, strict=True) if digest != digests[0]]
    if differing:
        raise SMPRuntimeError(
            f"{call_name}: the ranks of a model have different names, shapes or types in it",
            expected=f"those of rank {job.get_mp_group()[0]}",
            found=f"others on rank {differing[0]}",
            hint="Every rank makes the whole model; smp.partition() says which part of it a rank owns.",
        )
