"""Products: what is made of committed tags, in the background, for other readers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial

from xla_ckpt.engine.errands import ERRANDS
from xla_ckpt.errors import CheckpointError, UsageError
from xla_ckpt.layouts.registry import layout_named, tag_names
from xla_ckpt.options import PLACE, ConvertOptions, Product
from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.door import above, full_path, store_at
from xla_ckpt.tags.deleting import retire_superfluous
from xla_ckpt.tags.retention import TagFact
from xla_ckpt.tags.root import Root
from xla_ckpt.tags.roots import root_of

logger = logging.getLogger(__name__)

SAFETENSORS = "safetensors"


def check_products(products: Sequence[Product], path: str) -> None:
    """Refuse products that could not be made of the tags of a root directory.

    Raises:
        UsageError: A field makes no sense.
    """
    for product in products:
        layout, to = layout_named(product.layout), full_path(product.to)
        if layout.tagged and PLACE in to:
            raise UsageError(
                f"a product in the layout {layout.name} is a tag: to= is its root directory, without {PLACE}", found=to
            )
        if not layout.tagged and PLACE not in to:
            raise UsageError(
                f"each product in the layout {layout.name} needs a place of its own",
                expected=f"to= with {PLACE} in it, such as 'hf/{PLACE}'",
                found=to,
            )
        if not layout.tagged and product.keep is not None:
            raise UsageError(
                f"keep= is for layouts with tags: what lies beside a product in the layout {layout.name} may be "
                "anybody's",
                found=repr(product.keep),
                hint="Delete such products yourself.",
            )
        if layout.name != SAFETENSORS and product.dtype is not None:
            raise UsageError(f"dtype= is for the layout {SAFETENSORS}", found=f"layout={product.layout!r}")
        if layout.name == SAFETENSORS and product.mesh is not None:
            raise UsageError(f"mesh= is for other layouts than {SAFETENSORS}", found=repr(product.mesh))
        if to == path:
            raise UsageError("a product lies in another root directory than its tag", found=to)


def follower(root: Root, tag: str, products: Sequence[Product]) -> Callable[[int], None]:
    """A function that has the products made of a tag when it is committed, given its number. It never fails: see
    `Errands`.
    """
    # The program may change its working directory before the commit.
    orders = [(product, full_path(product.to).replace(PLACE, tag)) for product in products]

    def follow(sequence: int) -> None:
        step = TagFact(tag, sequence).step
        for product, to in orders:
            if step % product.every == 0:
                directory: Directory | None = None
                # Whoever makes the product meets the error, and tells it.
                with contextlib.suppress(CheckpointError, OSError):
                    # Retention leaves the tag alone as long as it is open; in an object store, for some commits.
                    directory = root.open(tag)
                ERRANDS.add(f"making {to} of tag {tag}", partial(_make, root.path, tag, product, to, directory))

    return follow


def _make(path: str, tag: str, product: Product, to: str, directory: Directory | None) -> None:
    """Make a product, unless it is there, and retire older ones.

    Raises:
        CheckpointError: It could not be made. Nothing of it is there.
    """
    # Only now: who asks for no product waits for none of these modules.
    from xla_ckpt.api.convert import convert
    from xla_ckpt.api.export import export_hf

    layout, options = layout_named(product.layout), ConvertOptions(progress=False)
    try:
        if _is_there(to, tag, tagged=layout.tagged):
            logger.info("%s of tag %s is there already", to, tag)
        elif layout.name == SAFETENSORS:
            export_hf(path, to, tag, dtype=product.dtype, llama=product.llama, options=options)
        else:
            convert(path, to, tag, to=product.layout, mesh=product.mesh, llama=product.llama, options=options)
    finally:
        if directory is not None:
            directory.close()
    if product.keep is not None:
        retire_superfluous(root_of(store_at(to)), product.keep)


def _is_there(to: str, tag: str, *, tagged: bool) -> bool:
    if tagged:
        return tag in tag_names(store_at(to))
    store, name = above(to)
    return store.has(name) and not (store.is_directory(name) and not store.names(name))
