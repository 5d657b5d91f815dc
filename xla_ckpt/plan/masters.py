"""Master weights in the place of a model's weights, for a program whose model is of their type. Pure."""

from __future__ import annotations

from dataclasses import replace

from xla_ckpt.manifest.arrays import Arrays
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.hints import Hints
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.skeleton import part_at


def stores_masters(manifest: Manifest) -> bool:
    """Whether a tag has the master weights of its optimizer, by the names of the parameters."""
    try:
        part_at(manifest.skeleton, paths.join(schema.OPTIMIZER, schema.MASTER))
    except KeyError:
        return False
    return True


def with_masters(manifest: Manifest, hints: Hints) -> Manifest:
    """The manifest in which a weight is its master weight, where exactly that type is wanted, and not the weight's own.

    An optimizer has to be wanted, too: whoever reads a model alone gets the weights that it had.
    """
    if not hints.optimizer:
        return manifest
    arrays, masters = manifest.arrays, {}
    for name, hint in hints.arrays.items():
        leaf = manifest.aliases.get(schema.weight(name), schema.weight(name))
        stored, master = arrays.get(leaf), arrays.get(schema.master(name))
        if stored is None or master is None or stored.shape != master.shape:
            continue
        if hint.dtype == master.dtype.name and hint.dtype != stored.dtype.name:
            masters[leaf] = master.changed(spec=stored.spec)  # master weights may have been dealt out over dp besides
    if not masters:
        return manifest
    return replace(manifest, arrays=Arrays.of({leaf: masters.get(leaf, record) for leaf, record in arrays.items()}))
