"""What several ranks hold under one key of a state dict: DCP stores it once, and only if it is the same everywhere.

DCP's planners take plain tensors of one key on several ranks for copies, and keep one of them. If they are parts of one
tensor, as in tensor parallelism, the others are lost. So each rank takes samples of what it planned to write, and the
coordinator compares them before it commits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xla_ckpt.display import join_lines
from xla_ckpt.errors import DivergentReplicasError, UsageError
from xla_ckpt.logs import get_logger
from xla_ckpt.options import SaveOptions, chosen
from xla_ckpt.plan.agreement import MAX_NAMED_RANKS
from xla_ckpt.plan.replicas import Replicas, first_stored

logger = get_logger(__name__)

Place = tuple[str, tuple[int, ...]]
"""(key, offset in the global tensor) of what a rank planned to write."""

_HINT = (
    "Tensor parallelism that nobody declared is the likely cause, or pipeline stages that use the same keys: give "
    "DTensors, or xla_ckpt.dcp.sharded(state_dict, model, mesh), with shardings= where the model does not say it. "
    "If the ranks have really drifted apart, options=SaveOptions(replicas='first') of xla_ckpt.dcp.save or "
    "of StorageWriter stores the first one, and says of which tensors."
)

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of keys that data-parallel ranks may hold different values of: what a BatchNorm has counted on its own."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank has of something."""

    described: str
    """Element type and shape."""

    sample: int
    """Digest of some of its bytes."""

    written: bool
    loose: bool = False
    """Whether a difference is worth a warning only."""


def may_differ(key: str, of_bytes: bool, shape: Sequence[int]) -> bool:
    """Whether data-parallel ranks may have different values under a key.

    These are the statistics of a BatchNorm, and rows of bytes, which are states of random generators.
    """
    return key.rpartition(".")[2] in _STATISTICS or (of_bytes and len(shape) == 1)


def replicas_of(options: SaveOptions | None) -> Replicas:
    """What is done with replicas that differ: the one option of a save that DCP's calls have a use for.

    Raises:
        UsageError: The caller says another one, which would have no effect.
    """
    if isinstance(options, SaveOptions) and options != SaveOptions(replicas=options.replicas):
        raise UsageError("of the options of a save, xla_ckpt.dcp heeds replicas alone", found=repr(options))
    return chosen(SaveOptions, options).replicas


def compare(of_ranks: Sequence[Mapping[Place, Held]], replicas: Replicas) -> None:
    """Compare what all ranks have.

    Raises:
        DivergentReplicasError: Two ranks hold different things under one key, and they have to be equal.
    """
    stored: dict[Place, tuple[int, Held]] = {}
    for rank, samples in enumerate(of_ranks):
        stored.update({place: (rank, one) for place, one in samples.items() if one.written})
    different: dict[str, tuple[int, Held, int, Held]] = {}
    for rank, samples in enumerate(of_ranks):
        for place, one in samples.items():
            owner, kept = stored.get(place, (rank, one))
            if (one.described, one.sample) != (kept.described, kept.sample):
                different.setdefault(place[0], (owner, kept, rank, one))
    strict = {key: difference for key, difference in different.items() if not difference[1].loose}
    if strict and replicas == "equal":
        key, (owner, kept, rank, one) = next(iter(strict.items()))
        others = f" ({len(strict) - 1} more keys differ, too)" if len(strict) > 1 else ""
        raise DivergentReplicasError(
            f"two ranks hold different tensors under one key, of which DCP keeps one{others}",
            leaf=key,
            rank=rank,
            expected=f"{kept.described} with the bytes of rank {owner}, which would be stored",
            found=f"{'other bytes' if kept.described == one.described else one.described} on rank {rank}",
            hint=_HINT,
        )
    if different:
        lines = [f"  {key}: rank {rank} against rank {owner}" for key, (owner, _, rank, _) in different.items()]
        more = [f"  and {len(lines) - MAX_NAMED_RANKS} more"] if len(lines) > MAX_NAMED_RANKS else []
        logger.warning("%s", join_lines([first_stored(len(lines)), *lines[:MAX_NAMED_RANKS], *more]))
