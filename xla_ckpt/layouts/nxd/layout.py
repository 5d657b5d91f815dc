"""neuronx-distributed's layouts as values: ``xser`` and ``pt``, which it writes with and without ``use_xser``.

Tags that it wrote itself are found, scanned and verified; saves and conversions write its files with our manifest
beside them. The work is done by the modules beside this one, and loads torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from xla_ckpt.engine.index import Index, no_index
from xla_ckpt.engine.read import READERS
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.verify import VerifyReport
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.layouts.base import Layout, ModelNames, Rewriting, StoredState, Topology
from xla_ckpt.layouts.native import NativeWriting, native_files
from xla_ckpt.layouts.nxd import tags
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.hints import Hints
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.mesh import AXES
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.directory import COMMITTED, MANIFEST, TagEntry
from xla_ckpt.tree import schema

if TYPE_CHECKING:
    from xla_ckpt.layouts.nxd.plan import RankState, RankTensor
    from xla_ckpt.state.describe import Description

MARKS = {"checkpoint": b"1", "done": b"1"}
"""Files by which neuronx-distributed finds a tag, and a complete one. In tags of ours the manifest says that, too."""


class NeuronxDistributed(Layout):
    """One of neuronx-distributed's layouts.

    Args:
        name: ``xser`` has each tensor in a file of its own, ``pt`` all tensors of a rank in one.
        finds: Whether this object answers for the tags that neuronx-distributed wrote itself, in either layout. Only
            one object does, so that no tag is listed twice.
    """

    saves = True
    pickles = True
    asks = True
    model_names = ModelNames.FUSED
    marks = frozenset(MARKS)
    saved_over = (
        f"If neuronx-distributed has saved a tag of this name since, remove {MANIFEST} and {COMMITTED} from the tag: "
        "then it is read as neuronx-distributed's."
    )

    def __init__(self, name: str, *, finds: bool, other_names: tuple[str, ...] = ()) -> None:
        self.name = name
        self.other_names = other_names
        self.origin = "neuronx-distributed" if finds else ""

    @property
    def xser(self) -> bool:
        """Whether each tensor has a file of its own."""
        return self.name == "xser"

    def wrote(self, manifest: Manifest) -> bool:
        names = [f.path for f in manifest.files]
        files = [n for n in names if n.startswith(("model/", "optim/")) and n.endswith(".pt")]
        return bool(files) and self.xser == any(".tensors/" in name for name in files)

    def tags(self, store: Store) -> list[TagEntry]:
        return [found.entry() for found in tags.complete_tags(store)] if self.origin else []

    def find(self, store: Store, tag: str) -> TagEntry | None:
        found = tags.find_tag(store, tag) if self.origin else None
        return None if found is None else found.entry()

    def open(self, store: Store, found: TagEntry, hints: Hints) -> TagReader:
        from xla_ckpt.layouts.nxd.scan import open_scanned
        from xla_ckpt.state.values import CODEC

        return open_scanned(store, tags.existing(store, found.tag), hints, CODEC)

    def verify(self, store: Store, found: TagEntry, workers: int = READERS) -> VerifyReport:
        from xla_ckpt.layouts.nxd.verify import verify_nxd
        from xla_ckpt.state.values import CODEC

        return verify_nxd(store, tags.existing(store, found.tag), CODEC, workers)

    def writing(self, description: Description) -> NxdWriting:
        return _writing(description, xser=self.xser)

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        return _rewriting(stored, to, self)


@dataclass(frozen=True, kw_only=True)
class NxdWriting:
    """What one rank writes: files of neuronx-distributed's for what it has a place for, native ones for the rest."""

    description: Description
    state: RankState
    """This rank's state, without its trees."""

    rest: NativeWriting
    xser: bool
    marks: Mapping[str, bytes] = field(default_factory=lambda: MARKS)

    @property
    def index(self) -> Index:
        return no_index

    @property
    def whole(self) -> frozenset[str]:
        return frozenset(self.state.tensors)

    @cached_property
    def plan(self) -> SavePlan:
        from xla_ckpt.layouts.nxd.plan import PARTS, RankPlan
        from xla_ckpt.layouts.torch_save.pickle_writer import LeafAt

        about = self.description
        trees = {
            part: about.tree(part, lambda path, _: LeafAt(path)) for part in PARTS if part in (about.structure or {})
        }
        theirs = RankPlan(about.placement.mesh, about.placement.rank, self.xser, first=about.replicas == "first")
        return SavePlan((*self.rest.plan.files, *theirs.files(replace(self.state, parts=trees))))


def _writing(description: Description, *, xser: bool) -> NxdWriting:
    from xla_ckpt.layouts.nxd.plan import PARTS, RankState, check_common, check_fits, with_experts

    mesh, state = description.placement.mesh, description.state
    theirs = [leaf.path for leaf in description.leaves if schema.member_of(leaf.path) in PARTS]
    tensors = with_experts({path: _tensor(path, description) for path in theirs}, mesh)
    arrays = tensors | {alias: tensors[path] for alias, path in description.aliases.items() if path in tensors}
    here = description.structure if isinstance(description.structure, dict) else {}
    if not any(part in here for part in PARTS):
        raise UnsupportedStateError(f"neuronx-distributed's layout holds {', '.join(PARTS)}, and nothing of it is here")
    check_common(here)
    shapes = {p.name: tuple(p.value.shape) for p in state.parameters.values()}
    rank_state = RankState(
        parts={}, tensors=arrays, zero1=state.zero1 is not None, by_name=state.by_name, shapes=shapes
    )
    check_fits(rank_state, mesh, state.zero1 or ())
    rest = tuple(leaf for leaf in description.leaves if leaf.path not in tensors)
    return NxdWriting(description=description, state=rank_state, rest=NativeWriting(description, rest), xser=xser)


def _tensor(path: str, description: Description) -> RankTensor:
    from xla_ckpt.layouts.nxd.plan import RankTensor

    held = description.arrays[path]
    local, placement = held.local, description.placement
    # A rank file is shared by ranks that hold the same, so it has to be known along which axes they do.
    alike: tuple[str, ...] | None = None
    if isinstance(local.group, tuple) and local.group[0] == "mesh":
        alike = local.group[1]
    complete = [p.box for p in local.pieces] == [Box.whole(local.shape)] or not Box.whole(local.shape).size
    held_by_one = placement.world == 1 or path.startswith(description.state.alone)
    if alike is None and complete and held_by_one:
        alike = AXES
    if alike is None:
        raise UnsupportedStateError(
            "neuronx-distributed's layout holds what each rank has as one tensor, and this array is spread by its own "
            "rules (DTensor, SPMD, jax)",
            leaf=path,
            hint="Save in the native format, and convert it: xla-ckpt convert SRC DST --to xser --mesh ...",
        )
    return RankTensor(
        leaf=path, dtype=held.adapter.dtype(held.value, path), shape=held.shape, pieces=local.pieces, alike=alike
    )


def _rewriting(stored: StoredState, to: Topology, layout: NeuronxDistributed) -> Rewriting:
    import logging

    from xla_ckpt.layouts.nxd.new_job import NewJob, deals_rows
    from xla_ckpt.layouts.nxd.plan import PARTS, RankPlan, check_common
    from xla_ckpt.layouts.torch_save.pickle_writer import LeafAt

    manifest = stored.manifest
    held = manifest.skeleton if isinstance(manifest.skeleton, dict) else {}
    theirs = [part for part in PARTS if part in held]
    native, specs = native_files(manifest, [p for p in manifest.arrays if schema.member_of(p) not in theirs], to)
    if not theirs:
        raise UsageError(f"the tag holds nothing that {layout.name} has a place for", expected=", ".join(PARTS))
    check_common(held)
    trees = {part: stored.tree(part, lambda path, _: LeafAt(path)) for part in theirs}
    # A ZeRO-1 optimizer of one dp rank deals out nothing, but its master weights have a place in ZeRO-1 files only.
    has_masters = schema.MASTER in (trees.get(schema.OPTIMIZER) or {})
    dealt = deals_rows(manifest) or has_masters if to.zero1 is None else to.zero1
    target = NewJob(manifest=manifest, trees=trees, mesh=to.mesh, rules=to.rules, cuts=to.pipeline_cuts, zero1=dealt)
    doubts = target.doubts()
    if manifest.left_out and not layout.xser:  # from xser files with master weights it reads no model at all
        doubts.append("neuronx-distributed, too, refuses a pt tag that lacks names of its model, unless strict=False")
    for message in doubts:
        logging.getLogger(__name__).warning("%s", message)
    files = []
    for rank in range(to.mesh.size):
        mine = SavePlan(RankPlan(to.mesh, rank, layout.xser).files(target.state(rank)))
        files.append((*native[rank], *mine.minus(target.of_earlier_stages(rank)).files))
    specs |= {path: target.spec(path) for path in manifest.arrays if path not in specs}
    return Rewriting(files, specs, MARKS)
