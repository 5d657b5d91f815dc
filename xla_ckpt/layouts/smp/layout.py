"""SageMaker model parallel (SMP) as a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xla_ckpt.layouts.base import Layout, Rewriting, StoredState, Topology
from xla_ckpt.manifest.records import Manifest

if TYPE_CHECKING:
    from xla_ckpt.engine.save import Writing
    from xla_ckpt.state.describe import Description

CONFIG = "smp_config.pt"


class SageMaker(Layout):
    """SMP's files."""

    name = "smp"
    saves = True
    pickles = True

    def wrote(self, manifest: Manifest) -> bool:
        return any(file.path == CONFIG for file in manifest.files)

    def writing(self, description: Description) -> Writing:
        from xla_ckpt.layouts.smp.writing import writing_of

        return writing_of(description, self.name)

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        from xla_ckpt.layouts.smp.writing import rewriting_of

        return rewriting_of(stored, to, self.name)
