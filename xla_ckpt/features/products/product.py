"""Products: exports and conversions made from committed checkpoints in the background."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from xla_ckpt.core.sharding.mesh import parse_mesh
from xla_ckpt.errors import CheckpointError, UsageError, wrap_os_errors
from xla_ckpt.features.products.markers import retire_marked, write_marker
from xla_ckpt.formats.base import Layout, ModelNames
from xla_ckpt.formats.registry import get_layout
from xla_ckpt.formats.tags import list_tag_names
from xla_ckpt.keywords import check_fields
from xla_ckpt.logs import get_logger
from xla_ckpt.options import ConvertOptions, check_positive_int
from xla_ckpt.saving.background import BACKGROUND_TASKS
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.resolve import PathLike, normalize_path, open_parent, open_store
from xla_ckpt.tags.deletion import apply_retention
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.retention import Retention, check_policy
from xla_ckpt.tags.retention_inputs import load_tag_infos
from xla_ckpt.tags.root import Root

logger = get_logger(__name__)

SAFETENSORS = "safetensors"


TAG_PLACEHOLDER = "{tag}"
"""Placeholder for the name of the tag in the path of a product."""


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """An export or conversion of tags that rank 0 makes in the background after their commit (docs/products.md).

    Args:
        to: Target. For layouts with tags, the root directory of the new tag, which has the name of the original; for
            other layouts, a path that contains ``{tag}``, such as ``"hf/{tag}"``.
        layout: Layout of the product, the `to` of `convert`. ``"safetensors"`` is the model only, as `export_hf` writes
            it.
        every_n_steps: Make a product of tags whose step is a multiple of this. It counts steps and not saves: if a run
            saves every 100 steps, 200 selects every second tag. The step is determined as in `EveryNSteps`. A tag
            without a step gets a product, which is logged.
        dtype: For ``"safetensors"``: the element type of floating-point arrays, as in `export_hf`.
        mesh: For other layouts: the topology that the files are for, as in `convert`.
        llama: A `LlamaJob`, as in `convert` and `export_hf`.
        keep: Retention policy for the products; None keeps all. Not supported for single files. A directory is marked
            with a file ``xla_ckpt.json``; directories without it are not deleted.

    Raises (on construction):
        UsageError: A field is invalid, or does not match the layout. A product that does not match a save is rejected
            by the save.

    Example:
        ``SaveOptions(products=(Product(to="hf/{tag}", every_n_steps=1000, dtype="bfloat16"),))``
    """

    to: PathLike
    layout: str = "safetensors"
    every_n_steps: int = 1
    dtype: str | None = None
    mesh: str | None = None
    llama: Any = None
    keep: Retention | None = None

    def __post_init__(self) -> None:
        check_positive_int("every_n_steps", self.every_n_steps, "steps")
        if self.keep is not None:
            check_policy("keep", self.keep)
        self._check_place(get_layout(self.layout), normalize_path(self.to))
        self._check_conversion_arguments()

    def _check_place(self, layout: Layout, to: str) -> None:
        """Raise a UsageError if `to` does not give each tag its own product, or if `keep` is unsupported for the
        layout.
        """
        if layout.tagged and TAG_PLACEHOLDER in to:
            raise UsageError(
                f"a product in the layout {layout.name} is a tag: to= is its root directory, without {TAG_PLACEHOLDER}",
                found=to,
            )
        if not layout.tagged and TAG_PLACEHOLDER not in to:
            raise UsageError(
                f"each product in the layout {layout.name} needs a place of its own",
                expected=f"to= with {TAG_PLACEHOLDER} in it, such as 'hf/{TAG_PLACEHOLDER}'",
                found=to,
            )
        if layout.one_file and self.keep is not None:
            raise UsageError(
                "keep= is for tags and directories: nothing marks a single file as a product", found=repr(self.keep)
            )
        if not layout.tagged and self.keep is not None and TAG_PLACEHOLDER in to.rpartition("/")[0]:
            raise UsageError(
                f"with keep=, products lie beside each other: {TAG_PLACEHOLDER} is in the last part of to=", found=to
            )

    def _check_conversion_arguments(self) -> None:
        """Raise a UsageError for arguments that `export_hf` or `convert` would reject."""
        from xla_ckpt.conversion.export import parse_floating_dtype
        from xla_ckpt.conversion.llama.job import resolve_llama_job

        if self.layout != SAFETENSORS and self.dtype is not None:
            raise UsageError(f"dtype= is for the layout {SAFETENSORS}", found=f"layout={self.layout!r}")
        if self.layout == SAFETENSORS and self.mesh is not None:
            raise UsageError(f"mesh= is for other layouts than {SAFETENSORS}", found=repr(self.mesh))
        parse_floating_dtype(self.dtype)
        resolve_llama_job(self.llama)
        parse_mesh(self.mesh)


def check_products(products: Sequence[Product], tag: str, roots: Sequence[Store], only: Sequence[str] = ()) -> None:
    """Raise an error for products that cannot be made of a tag, or whose target is inside a root of the tag.

    Inside a root, retention would mix products with tags.

    Args:
        products: The products.
        tag: Name of the tag.
        roots: Roots of the tag: the root, and the directory given as ``local=``.
        only: Parts of the model that are saved; empty for the entire model.

    Raises:
        UsageError: A product is invalid for the tag.
    """
    for product in products:
        layout, to = get_layout(product.layout), normalize_path(product.to).replace(TAG_PLACEHOLDER, tag)
        if only and layout.model_names is ModelNames.HUGGING_FACE:
            raise UsageError(
                f"a product in the layout {layout.name} is a whole model, and the save has a part of its model alone",
                found=f"only={', '.join(only)}",
                hint="Leave only= out; or take layout='peft' for the product, which is for adapters.",
            )
        for root in roots:
            if _get_address_prefix(open_store(to)).startswith(_get_address_prefix(root)):
                raise UsageError(
                    "a product lies outside of the root directory of its tag", expected=f"not in {root.path}", found=to
                )


def _get_address_prefix(store: Store) -> str:
    """Return the prefix of the addresses of all files in a root, with links resolved."""
    return f"{store.resolve_address('').rstrip('/')}/"


def make_product_callback(root: Root, tag: str, products: Sequence[Product]) -> Callable[[int], None]:
    """Return a callback that makes the products of a tag after its commit, given its sequence number.

    The callback raises no errors: see `BackgroundTasks`.
    """
    # The program may change its working directory before the commit.
    products = [replace(product, to=normalize_path(product.to)) for product in products]

    def follow(sequence: int) -> None:
        step = _find_step(root, tag, sequence) if any(product.every_n_steps > 1 for product in products) else 0
        for product in products:
            if step % product.every_n_steps == 0:
                directory: Directory | None = None
                # making the product raises the error
                with contextlib.suppress(CheckpointError, OSError):
                    # Retention keeps an open tag; in an object store, its files stay for some commits.
                    directory = root.open(tag)
                doing = f"making a product of tag {tag} in {product.to}"
                BACKGROUND_TASKS.add(doing, partial(_make_product, root, tag, product, directory))

    return follow


def _find_step(root: Root, tag: str, sequence: int) -> int:
    """Return the step of a committed tag, or 0, which is a multiple of every number, if it is unknown."""
    try:
        facts = load_tag_infos(root.store, filter(None, [root.get_entry(tag)]))
        step = next((fact.step for fact in facts if fact.sequence == sequence), None)
    except (CheckpointError, OSError) as error:
        logger.warning("%s: the step of tag %s is not known: %s", root.path, tag, error)
        return 0
    if step is None:
        logger.warning(
            "%s: tag %s has no step in its name or in user_content, so products are made of it whatever their "
            "every_n_steps= is",
            root.path,
            tag,
        )
    return step or 0


def _make_product(root: Root, tag: str, product: Product, directory: Directory | None) -> None:
    """Make a product unless it exists, and retire older ones.

    Raises:
        CheckpointError: The product could not be made, and nothing of it remains; or older ones could not be deleted.
    """
    layout, pattern = get_layout(product.layout), str(product.to)
    to = pattern.replace(TAG_PLACEHOLDER, tag)
    try:
        if _exists(to, tag, tagged=layout.tagged):
            logger.info("%s of tag %s is there already", to, tag)
            return
        _convert(root.path, tag, product, to)
        if product.keep is None:
            return
        with wrap_os_errors("deleting older products", path=to):
            if layout.tagged:
                apply_retention(open_root(open_store(to)), product.keep)
                return
            (store, name), name_of = open_parent(to), partial(open_parent(pattern)[1].replace, TAG_PLACEHOLDER)
            for fact in load_tag_infos(root.store, filter(None, [root.get_entry(tag)])):
                write_marker(store, name, fact, product.keep, name_of)
            retire_marked(store, name_of, product.keep)
    finally:
        if directory is not None:
            directory.close()


def _convert(path: str, tag: str, product: Product, to: str) -> None:
    # Imported here, so that saves without products do not import these modules.
    from xla_ckpt.conversion.convert import convert
    from xla_ckpt.conversion.export import export_hf

    options = ConvertOptions(progress=False)
    if get_layout(product.layout).name == SAFETENSORS:
        export_hf(path, to, tag, dtype=product.dtype, llama=product.llama, options=options)
    else:
        convert(path, to, tag, to=product.layout, mesh=product.mesh, llama=product.llama, options=options)


def _exists(to: str, tag: str, *, tagged: bool) -> bool:
    if tagged:
        return tag in list_tag_names(open_store(to))
    store, name = open_parent(to)
    return store.has(name) and not (store.is_directory(name) and not store.list_names(name))
