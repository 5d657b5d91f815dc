"""The interface for the compatibility packages (facades), in addition to the names of `xla_ckpt`.

- Placement of arrays on ranks: `Sharding`, `Section`, `LocalArray`, rules, the sharding that a parameter declares, the
  current mesh, and views of a model in a save.
- Leaves of nested containers.
- torch.save files, parts of SMP file sets, and ZeRO-1 files.
- File names and entries of SMP: the constants in capital letters.
- Detection of the library that wrote the checkpoints at a path, and suggestions for a wrong path.
- Exchanges between ranks without a collective.

The interface is public, and changes together with `xla_ckpt`; release notes list changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xla_ckpt.core.sharding.local_array import LocalArray, create_unsharded
from xla_ckpt.core.sharding.sharding import (
    ParsedRules,
    Section,
    Sharding,
    ShardingRules,
    find_sharding,
    parse_rules,
    parse_section,
)
from xla_ckpt.core.tree.nested import iterate_leaves, map_leaves
from xla_ckpt.distributed.consensus import as_checkpoint_error
from xla_ckpt.distributed.current_job import check_peers_reachable
from xla_ckpt.distributed.exchange import LEADER_TIMEOUT_FRACTION, Deadline, Exchange
from xla_ckpt.distributed.job import has_launcher_store
from xla_ckpt.distributed.mesh_source import get_current_mesh
from xla_ckpt.distributed.torch_store import TorchCommunicator, get_torch_communicator
from xla_ckpt.errors import register_error_types, wrap_os_errors
from xla_ckpt.formats.nxd.zero1_conversion import convert_zero_checkpoints
from xla_ckpt.formats.smp.newest_file import find_excess_directories, read_partial_root
from xla_ckpt.formats.smp.save_notes import RANK_AXES, SetPart, find_set_parts, is_whole, write_part
from xla_ckpt.formats.smp.scan import SCALERS
from xla_ckpt.formats.smp.tags import (
    ALL_PARTS,
    FP16_SET,
    IS_PARTIAL,
    JOB_CONFIG,
    LOAD_INFO,
    MODEL_SET,
    NEWEST,
    OPTIMIZER_SETS,
    PARTIAL,
    PP,
    TP,
    USER_CONTENT_FILE,
    get_user_content_name,
)
from xla_ckpt.formats.smp.writing import SMP_VERSION
from xla_ckpt.formats.tags import find_writers, suggest_path
from xla_ckpt.formats.torch_save.serialization import (
    collect_xla_tensors,
    load_whole_file,
    map_tensors,
    read_whole_file,
    replace_file,
    write_whole_file,
)
from xla_ckpt.state.model_view import ModelView, NamesOnly
from xla_ckpt.state.shardings import get_declared_sharding
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags.directory_operations import retire_each
from xla_ckpt.tags.resolve import open_root

__all__ = [
    "ALL_PARTS",
    "FP16_SET",
    "IS_PARTIAL",
    "JOB_CONFIG",
    "LEADER_TIMEOUT_FRACTION",
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
    "Exchange",
    "LocalArray",
    "ModelView",
    "NamesOnly",
    "ParsedRules",
    "Section",
    "SetPart",
    "Sharding",
    "ShardingRules",
    "TorchCommunicator",
    "as_checkpoint_error",
    "assemble_array",
    "check_peers_reachable",
    "collect_xla_tensors",
    "compute",
    "convert_zero_checkpoints",
    "create_unsharded",
    "find_excess_directories",
    "find_set_parts",
    "find_sharding",
    "find_writers",
    "get_current_mesh",
    "get_declared_sharding",
    "get_torch_communicator",
    "get_user_content_name",
    "has_launcher_store",
    "is_whole",
    "iterate_leaves",
    "load_whole_file",
    "map_leaves",
    "map_tensors",
    "move_to_host",
    "parse_rules",
    "parse_section",
    "read_partial_root",
    "read_whole_file",
    "register_error_types",
    "remove_directories",
    "replace_file",
    "slice_rank_part",
    "suggest_path",
    "wrap_os_errors",
    "write_part",
    "write_whole_file",
]


def move_to_host(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the values on the CPU. XLA tensors are computed in one graph, and transferred in one batch."""
    of_xla = [v for v in values if v.device.type == "xla"]
    if of_xla:
        from xla_ckpt.arrays.xla_tensor import to_host

        moved = iter(to_host(of_xla))
    return [next(moved) if v.device.type == "xla" else v.detach().cpu() for v in values]


def compute(values: Sequence[torch.Tensor]) -> None:
    """Compute XLA tensors. All ranks must make the same call, because pending graphs may contain collectives."""
    if values:
        from xla_ckpt.arrays.xla_tensor import materialize

        materialize(values)


def remove_directories(root: str, names: Sequence[str]) -> None:
    """Remove directories of a root, each atomically and durably; files that are not in use are deleted afterwards.

    A warning is logged once for each directory that cannot be moved, and the directory is left in place.

    Raises:
        OSError: The storage failed to clean up.
    """
    tags = open_root(open_store(root))
    retire_each(tags.store, names, tags.retire)
    tags.clean()


def assemble_array(parts: Sequence[tuple[torch.Tensor, LocalArray]]) -> torch.Tensor:
    """Assemble a global array on the CPU from the parts of all ranks over which it is sharded, without padding."""
    first, place = parts[0]
    if len(parts) == 1 and place.shape == tuple(first.shape) and len(place.pieces) == 1:
        return first
    whole = torch.empty(place.shape, dtype=first.dtype, device="cpu")
    for part, lies in parts:
        for piece in lies.pieces:
            whole[piece.global_box.slices] = part[piece.local_box.slices]
    return whole


def slice_rank_part(whole: torch.Tensor, place: LocalArray, shape: Sequence[int]) -> torch.Tensor:
    """Return a rank's part of a global array, with the given local shape; padding is zero."""
    if place.shape == tuple(shape) and len(place.pieces) == 1:
        return whole
    part = whole.new_zeros(tuple(shape))
    for piece in place.pieces:
        part[piece.local_box.slices] = whole[piece.global_box.slices]
    return part
