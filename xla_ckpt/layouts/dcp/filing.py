"""The files of a save in the layout for DCP: in one directory, under the keys of DCP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xla_ckpt.files.distcp import Distcp
from xla_ckpt.files.regions import Region
from xla_ckpt.layouts.dcp.chunks import chunk_of
from xla_ckpt.layouts.dcp.keys import items
from xla_ckpt.tree.codec import Json
from xla_ckpt.tree.skeleton import is_array


@dataclass(frozen=True, slots=True)
class DcpFiling:
    """What the files are called, and how each is laid out (see `xla_ckpt.plan.save_plan.Filing`)."""

    keys: Mapping[str, str]
    """Leaf path of each array -> its key."""

    def place(self, leaf: str) -> tuple[str, str]:
        """See `xla_ckpt.plan.save_plan.Filing`."""
        return "", self.keys[leaf]

    def codec(self, path: str, regions: Sequence[Region]) -> Distcp:
        """See `xla_ckpt.plan.save_plan.Filing`."""
        return Distcp(path, tuple(chunk_of(region.name, region.dtype, region.box) for region in regions))


def filing_of(skeleton: Json, *, flat: bool) -> DcpFiling:
    """The filing of a state with this skeleton. `flat`: under torchtitan's keys.

    Raises:
        UnsupportedStateError: DCP would call two values of it the same.
    """
    return DcpFiling({item.leaf: item.key for item in items(skeleton, flat=flat) if is_array(item.part)})
