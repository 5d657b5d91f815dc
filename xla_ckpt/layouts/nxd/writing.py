"""Saves and conversions to neuronx-distributed's layouts: which files one rank writes, and what is in them.

A rank file ``dp_rank_00_tp_rank_01_pp_rank_00.pt`` holds the state of one rank as a dict, with its own part of each
tensor. Ranks that differ along dp and cp only have one rank file in common. In the layout ``pt`` the first of these
ranks writes the file. In the layout ``xser`` each tensor lies in a file of its own, and the ranks share the writing.
Every rank decides alone what it writes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from xla_ckpt.errors import UsageError
from xla_ckpt.layouts.base import Topology
from xla_ckpt.layouts.by_rank.new_job import deals_rows
from xla_ckpt.layouts.by_rank.plan import Laying
from xla_ckpt.layouts.nxd.folders import MODEL, OPTIM
from xla_ckpt.layouts.nxd.optimizer import numbered
from xla_ckpt.layouts.nxd.tags import RANK_FILES
from xla_ckpt.layouts.nxd.tensor_files import lay_apart
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.nested import in_dicts_and_lists
from xla_ckpt.tree.skeleton import children

logger = get_logger(__name__)


def with_zero1(to: Topology, manifest: Manifest, *, xser: bool) -> Topology:
    """The job that a tag is converted for, and whether its optimizer is one of ZeRO-1.

    Raises:
        UsageError: Master weights would be lost.
    """
    if manifest.left_out and not xser:  # from xser files with master weights it reads no model at all
        logger.warning("neuronx-distributed, too, refuses a pt tag that lacks names of its model, unless strict=False")
    # A ZeRO-1 optimizer of one dp rank deals out nothing, but its master weights have a place in ZeRO-1 files only.
    has_masters = schema.MASTER in (children((children(manifest.skeleton) or {}).get(schema.OPTIMIZER)) or {})
    if has_masters and to.zero1 is False:
        raise UsageError(
            "master weights have a place in ZeRO-1 files only",
            leaf=paths.join(schema.OPTIMIZER, schema.MASTER),
            found="zero1=False",
            hint="Leave zero1=False (--no-zero1) away, or convert to the native layout.",
        )
    return replace(to, zero1=deals_rows(manifest) or has_masters if to.zero1 is None else to.zero1)


def files_of_rank(laying: Laying, *, xser: bool) -> list[FilePlan]:
    """The files that one rank writes.

    Args:
        xser: Whether each tensor lies in a file of its own.

    Raises:
        UnsupportedStateError: Something in its state cannot be pickled.
    """
    state, lay = laying.state, partial(lay_apart, laying) if xser else laying.shared
    plans: list[FilePlan] = []
    if schema.MODEL in state.parts:
        tree = in_dicts_and_lists(state.parts[schema.MODEL])
        plans += lay(RANK_FILES[MODEL], tree, schema.MODEL)
    if schema.OPTIMIZER in state.parts:
        tree = in_dicts_and_lists(numbered(state) if state.by_name else state.parts[schema.OPTIMIZER])
        plans += lay(RANK_FILES[OPTIM], tree, schema.OPTIMIZER, dealt=state.zero1)
    for part in (schema.SCHEDULER, schema.USER_CONTENT):
        if part in state.parts:
            plans += laying.common(f"{part}.pt", state.parts[part], part)
    return plans
