"""A module of a stored model as if it were the model: one of a dict of them, for instance. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xla_ckpt.manifest.arrays import ArrayRecord, Arrays
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.skeleton import children


def module_alone(manifest: Manifest, part: str) -> Manifest | None:
    """The manifest of a tag whose model is one module of the stored one; None if it has no such module.

    What a model has is stored flat: the array ``w`` of the module ``master`` is ``model/master.w``.

    Args:
        manifest: What is stored.
        part: The leaf path of the module, such as ``model/master``.

    Raises:
        IncompatibleCheckpointError: Nothing says how one of its arrays was split.
    """
    top = children(manifest.skeleton) or {}
    model = children(top.get(schema.MODEL)) or {}
    prefix = part.removeprefix(f"{schema.MODEL}/") + "."
    names = {name: paths.unescape(name.removeprefix(prefix)) for name in model if name.startswith(prefix)}
    if not names:
        return None
    new = {paths.join(schema.MODEL, old): schema.weight(name) for old, name in names.items()}
    arrays: dict[str, ArrayRecord] = {}
    aliases: dict[str, str] = {}
    first: dict[str, str] = {}
    for old, leaf in new.items():
        record, stored = manifest.array(old), manifest.aliases.get(old, old)
        if record is not None and first.setdefault(stored, leaf) == leaf:
            arrays[leaf] = record
        elif record is not None:
            aliases[leaf] = first[stored]
    # Of a tag of adapters alone it stays true that it is one.
    base = {schema.BASE: top[schema.BASE]} if schema.BASE in top else {}
    return replace(
        manifest,
        skeleton={schema.MODEL: {name: model[old] for old, name in names.items()}, **base},
        arrays=Arrays.of(arrays),
        aliases=aliases,
        unknown={},
        module_metadata=_metadata_alone(manifest, prefix),
        left_out=tuple(new[leaf] for leaf in manifest.left_out if leaf in new),
    )


def _metadata_alone(manifest: Manifest, prefix: str) -> dict[str, dict[str, Any]]:
    """The metadata of a module, and of those in it, under the names that they have without what is around it."""
    of_model = manifest.module_metadata.get(schema.MODEL, {})
    alone = {f"{name}."[len(prefix) : -1]: of for name, of in of_model.items() if f"{name}.".startswith(prefix)}
    return {schema.MODEL: alone} if alone else {}


def top_modules(manifest: Manifest) -> dict[str, dict[str, tuple[int, ...] | None]]:
    """Leaf path of each module at the top of a stored model -> the names of its arrays, and their shapes if known."""
    modules: dict[str, dict[str, tuple[int, ...] | None]] = {}
    for leaf in (*manifest.arrays, *manifest.aliases, *manifest.unknown):
        if schema.member_of(leaf) == schema.MODEL:
            record = None if leaf in manifest.unknown else manifest.array(leaf)
            module, _, name = leaf.partition(".")
            modules.setdefault(module, {})[name] = None if record is None else record.shape
    return modules


def copies_of_model(manifest: Manifest) -> list[str]:
    """Leaf paths of the modules of which a stored model consists, if they have arrays of the same names and shapes.

    A model and its master weights, or their average, are so. Layers of one size are not: they have numbers for names,
    or no modules in them.
    """
    modules = top_modules(manifest)
    names = next(iter(modules.values()), {})
    alike = len(modules) > 1 and all(other == names for other in modules.values())
    are_layers = all(path.rpartition("/")[2].isdecimal() for path in modules) or not any("." in name for name in names)
    return [] if are_layers or not alike else [*modules]
