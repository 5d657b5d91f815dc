"""Tags that another library wrote: found beside our own, and opened with what the targets of a load say."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import NoCheckpointError
from xla_ckpt.layouts.nxd import tags as nxd_tags
from xla_ckpt.layouts.nxd.tags import NxdTag
from xla_ckpt.sharding.rules import Parsed, decided
from xla_ckpt.tags.directory import TagEntry, entries
from xla_ckpt.tags.directory import open_tag as open_own

if TYPE_CHECKING:
    from xla_ckpt.layouts.hints import Wanted, Wish
    from xla_ckpt.state.placing import Layouts


def tag_names(root: str) -> list[str]:
    """Names of all complete tags, oldest first: neuronx-distributed's, then ours, which continue them.

    Raises:
        StorageError: The directory cannot be read.
    """
    return [t.tag for part in all_tags(root) for t in part]


def all_tags(root: str) -> tuple[list[NxdTag], list[TagEntry]]:
    """All complete tags, oldest first: neuronx-distributed's, and ours.

    Raises:
        StorageError: The directory cannot be read.
    """
    ours = entries(root)
    names = {e.tag for e in ours}
    return [t for t in nxd_tags.complete_tags(root) if t.tag not in names], ours


def passed_over(theirs: Sequence[NxdTag], ours: Sequence[TagEntry]) -> str | None:
    """A tag of neuronx-distributed's that seems to be newer than our newest one, before which it is listed."""
    if not theirs or not ours or not ours[-1].created:
        return None
    committed = datetime.datetime.fromisoformat(ours[-1].created).timestamp()
    return theirs[-1].tag if theirs[-1].time / 1e9 > committed else None


def find(root: str, tag: str) -> NxdTag | None:
    """A tag of neuronx-distributed's; None if there is none of that name, or if it is one of ours."""
    return nxd_tags.find(root, tag)


def ours(root: str, tag: str) -> TagReader:
    """A reader of one of our own tags.

    Raises:
        NoCheckpointError: There is no such tag; the hint names those that are there, whoever wrote them.
        CorruptCheckpointError: Its manifest is damaged.
    """
    try:
        directory = open_own(root, tag)
    except NoCheckpointError as error:
        theirs = [t.tag for t in nxd_tags.complete_tags(root)]
        if theirs and not entries(root):
            error.hint = f"neuronx-distributed wrote the tags there: {', '.join(theirs[-10:])}."
        raise
    return TagReader(directory, root, tag)


def opened(
    root: str, tag: str, rules: Parsed = (), model: Any = None, optimizer: Any = None, *, part: str = ""
) -> TagReader:
    """A reader of a tag of any kind; model, optimizer and rules say what neuronx-distributed's tags do not.

    `part` is the leaf path of what is wanted of it: without its optimizer a tag may be sound.
    """
    found = find(root, tag)
    if found is None:
        return ours(root, tag)
    from xla_ckpt.state.placing import Layouts

    if optimizer is None and part.split("/", maxsplit=1)[0] in ("", "optimizer"):
        optimizer = {}  # all of it, whoever it is for
    return open_tag(root, found, wanted_by(model, optimizer, Layouts(rules=rules)))


def open_tag(root: str, found: NxdTag, wanted: Wanted) -> TagReader:
    """A reader of it (see `xla_ckpt.layouts.nxd.scan.open_tag`)."""
    from xla_ckpt.layouts.nxd import scan as nxd
    from xla_ckpt.state.values import CODEC

    return nxd.open_tag(root, found, wanted, CODEC)


def wanted_by(model: Any, optimizer: Any, layouts: Layouts) -> Wanted:
    """What a model and an optimizer say about the arrays that they want."""
    from xla_ckpt.arrays.registry import array_kind, is_spec
    from xla_ckpt.layouts.hints import Wanted
    from xla_ckpt.state import module

    held = {} if model is None else module.tree_of(model)
    wishes = {
        str(name): _wish(f"model/{name}", value, layouts)
        for name, value in (held.items() if isinstance(held, Mapping) else ())
        if array_kind(value) is not None or is_spec(value)
    }
    names = module.parameter_names(model)
    groups = _groups(optimizer, names, wishes, layouts)
    aliases = {called[0]: called for called in _shared(model) if len(called) > 1}
    order = {name: i for i, name in enumerate(wishes)}
    return Wanted(
        wishes=wishes,
        rules=layouts.rules,
        groups=groups,
        aliases=aliases,
        order=order,
        optimizer=optimizer is not None,
        mesh=layouts.placement.mesh,
        rank=layouts.placement.rank,
    )


def wanted_by_tree(like: Any, layouts: Layouts) -> Wanted:
    """What the tree of a `restore` says; None wants everything."""
    if not isinstance(like, Mapping):
        return wanted_by(None, {}, layouts)
    model, optimizer = like.get("model"), like.get("optimizer")
    made = wanted_by(model if isinstance(model, Mapping) else None, optimizer, layouts)
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    if isinstance(groups, list) and all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups):
        return replace(made, groups=[[str(n) for n in g["params"]] for g in groups])
    return made


def _wish(path: str, value: Any, layouts: Layouts) -> Wish:
    from xla_ckpt.arrays.registry import is_spec, require
    from xla_ckpt.layouts.hints import Wish
    from xla_ckpt.sharding.sharding import Sharding
    from xla_ckpt.state.attributes import declared_sharding, true_shape

    if is_spec(value):
        spec = getattr(value, "sharding", None)
        named = Sharding.parse(spec) if isinstance(spec, tuple | list | Sharding) else None
        return Wish(tuple(value.shape), str(value.dtype).removeprefix("torch."), named)
    adapter = require(value, path)
    # Where a rule decides, attributes are not looked at: they may be wrong.
    ruled = decided(layouts.rules, path, path.partition("/")[2]) is not None
    named = None if ruled else declared_sharding(value, path)
    return Wish(
        shape=layouts.local(path, value, adapter).shape,
        dtype=adapter.dtype(value, path).name,
        sharding=None if named is None or not named.axes else replace(named, shape=None),
        padded=true_shape(value) is not None,
        alone=adapter.place(value, path) is None,
    )


def _groups(
    optimizer: Any, names: Mapping[Any, str], wishes: dict[str, Wish], layouts: Layouts
) -> Sequence[Sequence[str]] | None:
    """Names of an optimizer's parameters by group; adds to `wishes` those that the model did not name."""
    from xla_ckpt.state import optimizer as optimizers

    if optimizer is None or isinstance(optimizer, Mapping) or not hasattr(optimizer, "param_groups"):
        return None
    called = iter(optimizers.names_of(optimizer, names))
    seen: dict[int, str] = {}
    groups: list[list[str]] = []
    for group in optimizer.param_groups:
        groups.append([])
        for parameter in group["params"]:
            if id(parameter) not in seen:
                name = seen[id(parameter)] = next(called)
                groups[-1].append(name)
                if name not in wishes:
                    wishes[name] = _wish(f"model/{name}", parameter, layouts)
    return groups


def _shared(model: Any) -> list[list[str]]:
    """The names of each parameter of a module, in its order."""
    import torch

    if not isinstance(model, torch.nn.Module):
        return []
    by_object: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        by_object.setdefault(id(value), []).append(name)
    return list(by_object.values())
