"""What calls of other libraries are answered with, besides the names of `xla_ckpt`: facades are made of both.

- How arrays are placed over ranks: `Sharding`, `Section`, `LocalArray`, rules, what a parameter says of itself, the
  mesh that was set up (`current_mesh`), and what stands for a model in a save (`ModelView`, `NamesOnly`).
- The values in nested containers: `leaves`, `replaced_leaves`, `changed_tensors`.
- Files of torch.save: `load_whole_file`, `read_whole_file`, `write_whole_file`, `renew_file`;
  parts of a set of SMP's (`write_part`, `parts_at`); ZeRO-1 files (`convert_zero_checkpoints`).
- What SMP's files are called, and what their entries are: the names in capital letters.
- Whose checkpoints lie at a path: `writers_at`; which path was probably meant: `path_meant`.
- How ranks meet without a collective: `Round`.

It is public, and changes as `xla_ckpt` does: a release note says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xla_ckpt.errors import add_kinds, storage_errors
from xla_ckpt.job.job import launcher_has_store
from xla_ckpt.job.mesh_source import current_mesh
from xla_ckpt.job.peers import check_can_meet
from xla_ckpt.job.process_group import StoreCommunicator, communicator
from xla_ckpt.job.round import LEAD, Deadline, Round
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.layouts.no_tag import path_meant, writers_at
from xla_ckpt.layouts.nxd.convert_zero import convert_zero_checkpoints
from xla_ckpt.layouts.smp.file_contents import SMP_VERSION
from xla_ckpt.layouts.smp.marks import IS_PARTIAL, LOAD_INFO, PP, TP
from xla_ckpt.layouts.smp.one_save import SetPart, is_whole, parts_at, write_part
from xla_ckpt.layouts.smp.parts import SCALERS
from xla_ckpt.layouts.smp.roots import oldest_beyond, root_at
from xla_ckpt.layouts.smp.sidecar import RANK_AXES
from xla_ckpt.layouts.smp.tags import (
    ALL_PARTS,
    FP16_SET,
    JOB_CONFIG,
    MODEL_SET,
    NEWEST,
    OPTIMIZER_SETS,
    PARTIAL,
    USER_CONTENT_FILE,
    user_content_name,
)
from xla_ckpt.layouts.torch_save.whole import load_whole_file, read_whole_file
from xla_ckpt.layouts.torch_save.whole_writing import changed_tensors, renew_file, write_whole_file, xla_tensors
from xla_ckpt.sharding.local_array import LocalArray, whole
from xla_ckpt.sharding.rules import Parsed, Rules, decided, parse_rules
from xla_ckpt.sharding.sections import Section, parse_section
from xla_ckpt.sharding.sharding import Sharding
from xla_ckpt.state.attributes import declared_sharding
from xla_ckpt.state.model_view import ModelView, NamesOnly
from xla_ckpt.storage.door import store_at
from xla_ckpt.tags.cleaning import retire_each
from xla_ckpt.tags.roots import root_of
from xla_ckpt.tree.nested import leaves, replaced_leaves

__all__ = [
    "ALL_PARTS",
    "FP16_SET",
    "IS_PARTIAL",
    "JOB_CONFIG",
    "LEAD",
    "LOAD_INFO",
    "MODEL_SET",
    "NEWEST",
    "OPTIMIZER_SETS",
    "PARTIAL",
    "PP",
    "RANK_AXES",
    "SCALERS",
    "SMP_VERSION",
    "TP",
    "USER_CONTENT_FILE",
    "Deadline",
    "LocalArray",
    "ModelView",
    "NamesOnly",
    "Parsed",
    "Round",
    "Rules",
    "Section",
    "SetPart",
    "Sharding",
    "StoreCommunicator",
    "add_kinds",
    "as_checkpoint_error",
    "changed_tensors",
    "check_can_meet",
    "communicator",
    "compute",
    "convert_zero_checkpoints",
    "current_mesh",
    "decided",
    "declared_sharding",
    "hosted",
    "is_whole",
    "launcher_has_store",
    "leaves",
    "load_whole_file",
    "oldest_beyond",
    "parse_rules",
    "parse_section",
    "part_of_whole",
    "parts_at",
    "path_meant",
    "read_whole_file",
    "remove_directories",
    "renew_file",
    "replaced_leaves",
    "root_at",
    "storage_errors",
    "user_content_name",
    "whole",
    "whole_of_parts",
    "write_part",
    "write_whole_file",
    "writers_at",
    "xla_tensors",
]


def hosted(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values on the CPU. Those of XLA are computed in one graph, and brought there in one batch."""
    of_xla = [v for v in values if v.device.type == "xla"]
    if of_xla:
        from xla_ckpt.arrays.xla import to_host

        moved = iter(to_host(of_xla))
    return [next(moved) if v.device.type == "xla" else v.detach().cpu() for v in values]


def compute(values: Sequence[torch.Tensor]) -> None:
    """Have XLA tensors computed. All ranks make the same call, because what is pending may hold collectives."""
    if values:
        from xla_ckpt.arrays.xla import materialize

        materialize(values)


def remove_directories(root: str, names: Sequence[str]) -> None:
    """Have directories of a root disappear, each in one step, durably; their files are deleted then, unless somebody
    reads them. One that cannot be moved is told of once, and stays.

    Raises:
        OSError: The storage refused to clean up.
    """
    tags = root_of(store_at(root))
    retire_each(tags.store, names, tags.retire)
    tags.clean()


def whole_of_parts(parts: Sequence[tuple[torch.Tensor, LocalArray]]) -> torch.Tensor:
    """A global array of the parts of all ranks that it is split over, on the CPU. Padding is left out."""
    first, place = parts[0]
    if len(parts) == 1 and place.shape == tuple(first.shape) and len(place.pieces) == 1:
        return first
    whole = torch.empty(place.shape, dtype=first.dtype, device="cpu")
    for part, lies in parts:
        for piece in lies.pieces:
            whole[piece.box.slices] = part[piece.local.slices]
    return whole


def part_of_whole(whole: torch.Tensor, place: LocalArray, shape: Sequence[int]) -> torch.Tensor:
    """A rank's part, of this local shape, of a global array; its padding is zero."""
    if place.shape == tuple(shape) and len(place.pieces) == 1:
        return whole
    part = whole.new_zeros(tuple(shape))
    for piece in place.pieces:
        part[piece.local.slices] = whole[piece.box.slices]
    return part
