"""Tags of neuronx-distributed in a root directory. Looks at names and time stamps only, and needs no framework.

Those of the older layout have no marks: ``<root>/<tag>/tp_rank_00_pp_rank_00`` and its peers.
"""

from __future__ import annotations

from xla_ckpt.layouts.by_rank.grid import RankName, placed_by
from xla_ckpt.layouts.by_rank.tags import RankTag, marked_tag, modified
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.roots import may_be_foreign

OLDER = (
    RankName("tp_rank_{tp:02}_pp_rank_{pp:02}"),
    RankName("tp_rank_{tp:02}_pp_rank_{pp:02}_dp_rank_{dp:02}"),
)
"""Names of a rank's file or directory in the older layout."""

OLDER_FOLDERS = tuple(RankName(f"{name.template}/checkpoint.pt") for name in OLDER)
"""Names of the file in such a directory."""


def find_nxd_tag(store: Store, tag: str) -> RankTag | None:
    """The tag of this name; None if it is no tag of neuronx-distributed's, or one of ours."""
    if not may_be_foreign(store, tag):
        return None
    if (marked := marked_tag(store, tag)) is not None:
        return marked
    try:
        ranks = placed_by(store.names(tag), OLDER).values()
    except OSError:
        return None
    times = [modified(store, f"{tag}/{name}") or 0 for name in ranks]
    return RankTag(tag=tag, complete=True, older=True, time=max(times)) if times else None
