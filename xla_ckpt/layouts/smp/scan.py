"""What a set of SMP's files holds, or a directory of them. No tensor is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError
from xla_ckpt.layouts.by_rank.content import Content, content_of
from xla_ckpt.layouts.by_rank.copies import in_common
from xla_ckpt.layouts.by_rank.files import RankFiles
from xla_ckpt.layouts.by_rank.grid import RankAt
from xla_ckpt.layouts.places import without_paths
from xla_ckpt.layouts.smp import members
from xla_ckpt.layouts.smp.marks import IS_PARTIAL, LOAD_INFO, PP, TP, ZERO_2D
from xla_ckpt.layouts.smp.members import INNER, MASTERS
from xla_ckpt.layouts.smp.model import ADDED_KEY, known_hints, merged_model
from xla_ckpt.layouts.smp.one_save import less_others, two_saves
from xla_ckpt.layouts.smp.optimizer import Optimizers, optimizers
from xla_ckpt.layouts.smp.parts import Degrees, PartFiles, degrees_in, placed
from xla_ckpt.layouts.smp.tags import (
    FP16_SET,
    JOB_CONFIG,
    MODEL_SET,
    OPTIMIZER_SETS,
    SCHEDULER_FILE,
    USER_CONTENT_FILE,
    SmpTag,
)
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.storage.base import Directory
from xla_ckpt.tree import schema
from xla_ckpt.tree.nested import Keys, leaves

logger = get_logger(__name__)

_COUNTER = re.compile(r"(?:^|_)(?:steps?|epochs?|iters?|iterations?)(?:$|_)", re.IGNORECASE)
"""Names of numbers that all ranks count alike."""


class SmpFiles(PartFiles):
    """The files of a set, or of a directory of sets."""

    def __init__(self, directory: Directory, tag: SmpTag) -> None:
        super().__init__(directory, tag)
        # A part of a set that is not there is missed when the parts are placed.
        self.unfinished = (
            "{tag}: its save may not have ended, neither newest nor a file says so" if tag.directory else ""
        )

    def checks(self) -> list[Callable[[], object]]:
        return [self.leave_out_others]

    def leave_out_others(self) -> None:
        """Leave out the files of other saves that lie under the name of the set.

        Raises:
            CorruptCheckpointError: It is of two saves.
        """
        self.tag = less_others(self.directory_of_all, self.tag)

    def content(self, hints: Hints) -> Content:
        self.leave_out_others()
        tag = self.tag
        stored = _of_set(self, tag, hints) if "" in tag.sets else _of_directory(self, tag)
        self.check_saves()
        content = _content(self, stored, hints, noted=self.one_save)
        # All files, whatever this rank wants of them: by their digests ranks know that they have opened the same ones.
        for file in tag.files:
            number = self.number(file)
            self.records[number] = replace(self.records[number], digest=int(self.noted[file].digest, 16))
        return content


class StoredParts:
    """What the parts of a tag hold."""

    def __init__(self, degrees: Degrees | None) -> None:
        self.degrees = degrees
        self.models: Mapping[RankAt, Mapping[Any, Any]] = {}
        self.optimizers: Mapping[RankAt, Mapping[Any, Any]] = {}
        self.rest: Mapping[RankAt, Mapping[Any, Any]] = {}
        """What the ranks stored besides, under names of the program's own."""

        self.scheduler: Mapping[RankAt, Mapping[Any, Any]] = {}
        self.parts: dict[str, Any] = {}
        """Members of the state that have a file of their own."""

    @property
    def infos(self) -> list[Mapping[Any, Any]]:
        """SMP's description of the job, from each part that has one."""
        return [tree[LOAD_INFO] for tree in self.models.values() if isinstance(tree.get(LOAD_INFO), Mapping)]


def _of_set(parts: PartFiles, tag: SmpTag, hints: Hints) -> StoredParts:
    """A set that a program named: each part is a dict with the program's own keys."""
    files = tag.sets[""]
    trees = {file: _dict(parts, file) for _, file in sorted(files.parts().items())}
    where = members.where_is(next(iter(trees.values())), hints)
    stored = StoredParts(
        degrees_of([members.at(tree, where.model or (), file).get(LOAD_INFO) for file, tree in trees.items()])
    )
    ranks = placed(files, stored.degrees)

    def member(path: Keys | None) -> dict[RankAt, Mapping[Any, Any]]:
        return {} if path is None else {at: members.at(trees[file], path, file) for at, file in ranks.items()}

    stored.models = {at: tree for at, tree in member(where.model).items() if not at.dp}
    stored.optimizers = member(where.optimizer)
    stored.scheduler = member(where.scheduler)
    if () not in where.paths:
        stored.rest = {at: without_paths(trees[file], where.paths) for at, file in ranks.items()}
    return stored


def _of_directory(parts: PartFiles, tag: SmpTag) -> StoredParts:
    """A directory of `save_checkpoint`: a set for each part of the state."""
    trees = {kind: {file: _dict(parts, file) for file in stored.parts().values()} for kind, stored in tag.sets.items()}
    config = parts.tree(JOB_CONFIG) if JOB_CONFIG in tag.others else None
    infos = [config, *(tree.get(LOAD_INFO) for tree in trees.get(MODEL_SET, {}).values())]
    stored = StoredParts(degrees_of(infos) or degrees_in(tag.sets.values()))
    grids = {
        kind: {at: trees[kind][file] for at, file in placed(of_kind, stored.degrees).items()}
        for kind, of_kind in tag.sets.items()
    }
    stored.models = {at: tree for at, tree in grids.get(MODEL_SET, {}).items() if not at.dp}
    states = {at: tree for kind in OPTIMIZER_SETS for at, tree in grids.get(kind, {}).items()}
    fp16 = grids.get(FP16_SET, {})
    stored.optimizers = {at: {INNER: tree, **fp16[at]} if at in fp16 else tree for at, tree in states.items()}
    if config is not None:
        stored.parts[schema.EXTRAS] = {JOB_CONFIG.removesuffix(".pt"): config}
    for part, file in ((schema.USER_CONTENT, USER_CONTENT_FILE), (schema.SCHEDULER, SCHEDULER_FILE)):
        if file in tag.others:
            stored.parts[part] = parts.tree(file)
    return stored


def _dict(parts: PartFiles, file: str) -> Mapping[Any, Any]:
    tree = parts.tree(file)
    if not isinstance(tree, Mapping):
        raise CorruptCheckpointError("a part holds no dict", file=file, found=type(tree).__name__)
    if tree.get(ZERO_2D):
        raise UnsupportedStateError(
            "sharded data parallelism (sharded_data_parallel_degree) wrote this: its files hold flat pieces of all "
            "parameters, and no names",
            file=file,
            hint="Load it with SMP, and save the full model: smp.save_checkpoint(..., partial=False).",
        )
    return tree


def degrees_of(infos: list[Any]) -> Degrees | None:
    """The degrees of the job, as its files say; None if none does.

    Raises:
        CorruptCheckpointError: They contradict each other, or are no numbers of ranks.
    """
    pairs = [(i.get(PP, 1), i.get(TP, 1)) for i in infos if isinstance(i, Mapping) and {PP, TP} & i.keys()]
    wrong = next((pair for pair in pairs if any(type(n) is not int or n < 1 for n in pair)), None)
    if wrong is not None:
        raise CorruptCheckpointError(
            "the files describe a job that there cannot be", found=f"pp {wrong[0]}, tp {wrong[1]}"
        )
    distinct = set(pairs)
    if len(distinct) > 1:
        raise two_saves("; ".join(f"a job of pp {pp}, tp {tp}" for pp, tp in sorted(distinct)))
    return next(iter(distinct), None)


def _content(files: RankFiles, stored: StoredParts, wanted: Hints, *, noted: bool) -> Content:
    ranks = [*stored.models, *stored.optimizers, *stored.rest]
    if not ranks:
        raise CorruptCheckpointError("there is neither a model nor an optimizer")
    pp, tp, dp = (1 + max(getattr(at, axis) for at in ranks) for axis in ("pp", "tp", "dp"))
    model = merged_model(files, stored.models, wanted)
    # Also for a model alone: the optimizer's state shows which parameters are split, and whether the parts are of one
    # save.
    united = optimizers(files, stored.optimizers, model, wanted, noted=noted) if stored.optimizers else Optimizers()
    hints = known_hints(model, stored.infos, tp, united.whole, wanted)
    stages = {0: model.stage} if stored.models else {}
    has_optimizer = bool(stored.optimizers) and united.problem is None
    shares = 1 + max((at.dp for at in united.trees), default=0)
    sizes = RankAt(pp=1, dp=shares, ep=1, tp=tp) if has_optimizer else None
    content = content_of(files, hints, stages, sizes, lambda: united.trees, Mesh(pp=pp, dp=dp, tp=tp))
    if united.problem is not None:
        content.parts[schema.OPTIMIZER] = united.problem
    content.parts.update(stored.parts)
    _add_rest(files, stored, united, content.parts, first_rank=wanted.rank == 0)
    return content


def _add_rest(
    files: RankFiles, stored: StoredParts, united: Optimizers, parts: dict[str, Any], *, first_rank: bool
) -> None:
    """Add what is neither model nor optimizer: the program's own values, and what SMP's fp16 optimizer keeps."""
    extras: dict[str, Any] = dict(parts.get(schema.EXTRAS, {}))
    if stored.scheduler:
        parts[schema.SCHEDULER] = in_common(files, {at: {0: tree} for at, tree in stored.scheduler.items()}, 0)
    content, own = _user_content(files, stored.rest)
    if own and first_rank:
        logger.warning(
            "the ranks stored different values of %s: they are in extras, each rank's own", ", ".join(sorted(own))
        )
    if content and schema.USER_CONTENT not in parts:
        parts[schema.USER_CONTENT] = content
    extras |= own
    states = {at: tree for at, tree in stored.optimizers.items() if MASTERS in tree}
    if states:
        first = states[min(states)]
        names = [
            name for name in first if name not in (INNER, MASTERS, IS_PARTIAL, ADDED_KEY, schema.STATE, schema.GROUPS)
        ]
        extras[FP16_SET] = {name: in_common(files, states, name) for name in names}
        if united.masters is not None:
            extras[FP16_SET][MASTERS] = united.masters
    if extras:
        parts[schema.EXTRAS] = extras


def _user_content(
    files: RankFiles, by_rank: Mapping[RankAt, Mapping[Any, Any]]
) -> tuple[dict[Any, Any], dict[str, Any]]:
    """What all ranks stored alike, and what each has its own of.

    Raises:
        CorruptCheckpointError: Counters differ: the parts are of two saves.
    """
    common: dict[Any, Any] = {}
    own: dict[str, Any] = {}
    ordered = [by_rank[at] for at in sorted(by_rank)]
    for name in dict.fromkeys(name for tree in ordered for name in tree):
        value = in_common(files, by_rank, name)
        if not _differs(value):
            common[name] = value
            continue
        values = [tree.get(name) for tree in ordered]
        if isinstance(name, str) and _COUNTER.search(name) and all(type(one) in (int, float) for one in values):
            raise two_saves(f"{name} is {' and '.join(map(str, sorted(set(values))))}")  # type: ignore[type-var]
        own[str(name)] = {schema.WORLD: len(values), schema.RANKS: {str(n): one for n, one in enumerate(values)}}
    return common, own


def _differs(value: Any) -> bool:
    """Whether a part of what all ranks have in common is not the same on them."""
    return any(isinstance(leaf, UnknownArray) and leaf.dtype is None for leaf in leaves(value))
