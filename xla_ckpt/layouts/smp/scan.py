"""Opening a set of SMP's files, or a directory of them: scanned into a `Manifest`, without a tensor being read."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xla_ckpt.engine.tag_reader import ForeignObject, TagReader
from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError, naming, storage_errors
from xla_ckpt.layouts.nxd.copies import in_common
from xla_ckpt.layouts.nxd.rank_files import At, Scan
from xla_ckpt.layouts.nxd.scan import Content, content_of, manifest_of
from xla_ckpt.layouts.smp import contents
from xla_ckpt.layouts.smp.contents import INNER, MASTERS
from xla_ckpt.layouts.smp.marks import IS_PARTIAL, LOAD_INFO, PP, TP, ZERO_2D
from xla_ckpt.layouts.smp.one_save import less_others
from xla_ckpt.layouts.smp.optimizer import Optimizers, optimizers
from xla_ckpt.layouts.smp.parts import Degrees, Parts, degrees_in, placed, two_saves
from xla_ckpt.layouts.smp.stage import OURS, SmpState, known, merged
from xla_ckpt.layouts.smp.tags import CONFIG, FP16, MODEL, OPTIMIZERS, SCHEDULER, USER_CONTENT, SmpTag
from xla_ckpt.manifest.records import Manifest, UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tree import schema
from xla_ckpt.tree.codec import ValueCodec

logger = logging.getLogger(__name__)

_COUNTER = re.compile(r"(?:^|_)(?:steps?|epochs?|iters?|iterations?)(?:$|_)", re.IGNORECASE)
"""Names of numbers that all ranks count alike."""


def open_scanned(store: Store, found: SmpTag, hints: Hints, codec: ValueCodec) -> TagReader:
    """A reader of a set, or of a directory of sets, for the restore engine.

    Raises:
        CorruptCheckpointError: Parts are missing, damaged, of two saves, or do not add up.
        UnsupportedStateError: Sharded data parallelism wrote them.
        IncompatibleCheckpointError: The stored optimizer is not the one that is wanted.
    """
    if not found.complete:
        logger.warning("%s: its save may not have ended", found.tag)
    with storage_errors("opening a checkpoint", path=store.path, tag=found.tag):
        directory = open_directory(store, found)
    try:
        with naming(path=store.path, tag=found.tag), storage_errors("reading a checkpoint"):
            found = less_others(directory, found)
            parts = Parts(directory, found.files, codec)
            manifest, objects = scan(parts, found, hints)
            return TagReader(parts.directory, store.path, found.tag, manifest, objects)
    except BaseException:
        directory.close()  # nobody else will
        raise


def open_directory(store: Store, found: SmpTag) -> Directory:
    """The directory in which the files lie."""
    # A set that lies in a root among other things is not locked: nothing of this library's removes its files.
    return store.open(found.directory) if found.directory else store.open("", lock=False, links=True)


def scan(parts: Parts, found: SmpTag, wanted: Hints) -> tuple[Manifest, list[ForeignObject]]:
    """The manifest of a tag, and the objects that its skeleton numbers. For errors see `open_scanned`."""
    files = Scan(parts.directory)
    held = _of_set(parts, found, wanted) if "" in found.sets else _of_directory(parts, found)
    parts.check_saves()
    content = _content(files, held, wanted, noted=parts.one_save)
    # All files, whatever this rank wants of them: by their digests ranks know that they have opened the same ones.
    for file in found.files:
        number = files.number(file)
        files.files[number] = replace(files.files[number], digest=int(parts.digests[file], 16))
    return manifest_of(files, found.tag, content, wanted, parts.codec)


class _Held:
    """What the parts of a tag hold."""

    def __init__(self, degrees: Degrees | None) -> None:
        self.degrees = degrees
        self.models: Mapping[At, Mapping[Any, Any]] = {}
        self.optimizers: Mapping[At, Mapping[Any, Any]] = {}
        self.rest: Mapping[At, Mapping[Any, Any]] = {}
        """What the ranks stored besides, under names of the program's own."""

        self.scheduler: Mapping[At, Mapping[Any, Any]] = {}
        self.parts: dict[str, Any] = {}
        """Members of the state that have a file of their own."""

    @property
    def infos(self) -> list[Mapping[Any, Any]]:
        """SMP's description of the job, from each part that has one."""
        return [tree[LOAD_INFO] for tree in self.models.values() if isinstance(tree.get(LOAD_INFO), Mapping)]


def _of_set(parts: Parts, found: SmpTag, wanted: Hints) -> _Held:
    """A set that a program named: each part is a dict with the program's own keys."""
    files = found.sets[""]
    trees = {file: _dict(parts, file) for _, file in sorted(files.parts().items())}
    where = contents.where_is(next(iter(trees.values())), wanted)
    held = _Held(
        degrees_of([contents.at(tree, where.model or (), file).get(LOAD_INFO) for file, tree in trees.items()])
    )
    ranks = placed(files, held.degrees)

    def member(path: contents.Path | None) -> dict[At, Mapping[Any, Any]]:
        return {} if path is None else {at: contents.at(trees[file], path, file) for at, file in ranks.items()}

    held.models = {at: tree for at, tree in member(where.model).items() if not at.dp}
    held.optimizers = member(where.optimizer)
    held.scheduler = member(where.scheduler)
    if () not in where.paths:
        held.rest = {at: contents.without(trees[file], where.paths) for at, file in ranks.items()}
    return held


def _of_directory(parts: Parts, found: SmpTag) -> _Held:
    """A directory of `save_checkpoint`: a set for each part of the state."""
    trees = {kind: {file: _dict(parts, file) for file in held.parts().values()} for kind, held in found.sets.items()}
    config = parts.tree(CONFIG) if CONFIG in found.others else None
    infos = [config, *(tree.get(LOAD_INFO) for tree in trees.get(MODEL, {}).values())]
    held = _Held(degrees_of(infos) or degrees_in(found.sets.values()))
    grids = {
        kind: {at: trees[kind][file] for at, file in placed(held_, held.degrees).items()}
        for kind, held_ in found.sets.items()
    }
    held.models = {at: tree for at, tree in grids.get(MODEL, {}).items() if not at.dp}
    states = {at: tree for kind in OPTIMIZERS for at, tree in grids.get(kind, {}).items()}
    fp16 = grids.get(FP16, {})
    held.optimizers = {at: {INNER: tree, **fp16[at]} if at in fp16 else tree for at, tree in states.items()}
    if config is not None:
        held.parts[schema.EXTRAS] = {CONFIG.removesuffix(".pt"): config}
    for part, file in ((schema.USER_CONTENT, USER_CONTENT), (schema.SCHEDULER, SCHEDULER)):
        if file in found.others:
            held.parts[part] = parts.tree(file)
    return held


def _dict(parts: Parts, file: str) -> Mapping[Any, Any]:
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
    found = [(i.get(PP, 1), i.get(TP, 1)) for i in infos if isinstance(i, Mapping) and {PP, TP} & i.keys()]
    wrong = next((pair for pair in found if any(type(n) is not int or n < 1 for n in pair)), None)
    if wrong is not None:
        raise CorruptCheckpointError(
            "the files describe a job that there cannot be", found=f"pp {wrong[0]}, tp {wrong[1]}"
        )
    said = set(found)
    if len(said) > 1:
        raise two_saves("; ".join(f"a job of pp {pp}, tp {tp}" for pp, tp in sorted(said)))
    return next(iter(said), None)


def _content(files: Scan, held: _Held, wanted: Hints, *, noted: bool) -> Content:
    ranks = [*held.models, *held.optimizers, *held.rest]
    if not ranks:
        raise CorruptCheckpointError("there is neither a model nor an optimizer")
    pp, tp, dp = (1 + max(getattr(at, axis) for at in ranks) for axis in ("pp", "tp", "dp"))
    model = merged(files, held.models, wanted)
    # Also for a model alone: the optimizer's state shows which parameters are split, and whether the parts are of one
    # save.
    found = optimizers(files, held.optimizers, model, wanted, noted=noted) if held.optimizers else Optimizers()
    hints = known(model, held.infos, tp, found.whole, wanted)
    stages = {0: model.stage} if held.models else {}
    state = SmpState(files, hints, stages, Mesh(tp=tp))
    has_optimizer = bool(held.optimizers) and found.problem is None
    shares = 1 + max((at.dp for at in found.trees), default=0)
    sizes = At(pp=1, dp=shares, ep=1, tp=tp) if has_optimizer else None
    content = content_of(state, sizes, lambda: found.trees, Mesh(pp=pp, dp=dp, tp=tp))
    if found.problem is not None:
        content.parts[schema.OPTIMIZER] = found.problem
    content.parts.update(held.parts)
    _add_rest(files, held, found, content.parts, first_rank=wanted.rank == 0)
    return content


def _add_rest(files: Scan, held: _Held, found: Optimizers, parts: dict[str, Any], *, first_rank: bool) -> None:
    """Add what is neither model nor optimizer: the program's own values, and what SMP's fp16 optimizer keeps."""
    extras: dict[str, Any] = dict(parts.get(schema.EXTRAS, {}))
    if held.scheduler:
        parts[schema.SCHEDULER] = in_common(files, {at: {0: tree} for at, tree in held.scheduler.items()}, 0)
    content, own = _user_content(files, held.rest)
    if own and first_rank:
        logger.warning(
            "the ranks stored different values of %s: they are in extras, each rank's own", ", ".join(sorted(own))
        )
    if content and schema.USER_CONTENT not in parts:
        parts[schema.USER_CONTENT] = content
    extras |= own
    states = {at: tree for at, tree in held.optimizers.items() if MASTERS in tree}
    if states:
        first = states[min(states)]
        names = [name for name in first if name not in (INNER, MASTERS, IS_PARTIAL, OURS, schema.STATE, schema.GROUPS)]
        extras[FP16] = {name: in_common(files, states, name) for name in names}
        if found.masters is not None:
            extras[FP16][MASTERS] = found.masters
    if extras:
        parts[schema.EXTRAS] = extras


def _user_content(files: Scan, rest: Mapping[At, Mapping[Any, Any]]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """What all ranks stored alike, and what each has its own of.

    Raises:
        CorruptCheckpointError: Counters differ: the parts are of two saves.
    """
    common: dict[Any, Any] = {}
    own: dict[str, Any] = {}
    ordered = [rest[at] for at in sorted(rest)]
    for name in dict.fromkeys(name for tree in ordered for name in tree):
        value = in_common(files, rest, name)
        if not _differs(value):
            common[name] = value
            continue
        held = [tree.get(name) for tree in ordered]
        if isinstance(name, str) and _COUNTER.search(name) and all(type(one) in (int, float) for one in held):
            raise two_saves(f"{name} is {' and '.join(map(str, sorted(set(held))))}")  # type: ignore[type-var]
        own[str(name)] = {schema.WORLD: len(held), schema.RANKS: {str(n): one for n, one in enumerate(held)}}
    return common, own


def _differs(value: Any) -> bool:
    """Whether a part of what all ranks have in common is not the same on them."""
    if isinstance(value, UnknownArray):
        return value.dtype is None
    if isinstance(value, Mapping):
        return any(map(_differs, value.values()))
    return type(value) in (list, tuple) and any(map(_differs, value))
