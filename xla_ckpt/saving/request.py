"""Save and load requests: the validated arguments of a call, and the check of a save's destination.

A `SaveRequest` becomes a `SaveContext`. A destination is rejected if something other than a tag of this library has
the tag's name, or if the root directory is itself a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import ParsedRules, ShardingRules
from xla_ckpt.distributed.handshake import CallSignature
from xla_ckpt.distributed.job import Job
from xla_ckpt.errors import StorageError, UsageError, wrap_os_errors
from xla_ckpt.features.local_first.upload import Uploader
from xla_ckpt.features.products.product import make_product_callback
from xla_ckpt.formats.base import Layout
from xla_ckpt.formats.registry import get_layout, list_saveable_layouts
from xla_ckpt.formats.tags import find_foreign_tag, find_tag_at_root
from xla_ckpt.keywords import parse_texts
from xla_ckpt.logs import get_logger
from xla_ckpt.options import LoadOptions, SaveOptions
from xla_ckpt.saving.context import SaveContext
from xla_ckpt.state.objects import PyTree, Template, TrainingObjects
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.resolve import PathLike, normalize_path, open_working_directory
from xla_ckpt.tags.entry import LEDGER_NAME, TagEntry, is_tag_name
from xla_ckpt.tags.listing import list_names
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.root import Root, check_not_a_tag


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Validated arguments of a save."""

    layouts: Sequence[Layout]
    workers: int
    num_kept: int | None
    blocking: bool
    """True if the caller waits until everything is written."""

    mesh: Mesh | str | None
    sharding_rules: ShardingRules | None
    pinned: bool | None
    options: SaveOptions

    def build_context(
        self,
        path: PathLike,
        tag: str,
        content: TrainingObjects | PyTree,
        job: Job,
        *,
        root: Root,
        uploader: Uploader | None,
    ) -> SaveContext:
        """Build the save context for the ranks of a job, which commit a tag in `root` and upload it from there."""
        options = self.options
        call = CallSignature.create(
            "save_checkpoint" if isinstance(content, TrainingObjects) else "save",
            path=normalize_path(path),
            tag=tag,
            mesh=str(job.placement.mesh),
            objects=content.object_names,
            layout=", ".join(layout.name for layout in self.layouts),
            num_kept_ckpts=self.num_kept,
            pinned=self.pinned,
            async_save=not self.blocking,
            **options.in_common(),
        )
        return SaveContext(
            root=root,
            tag=tag,
            call=call,
            options=options,
            pinned=self.pinned,
            num_kept=self.num_kept,
            uploader=uploader,
            # Checking a bucket takes requests, so the thread of the save does it.
            check_destination=None if root.store.object_store is None else partial(check_destination, root.store, tag),
            on_commit=make_product_callback(root, tag, options.products),
            workers=max(1, self.workers),
            show_progress=False
            if not self.blocking and options.progress is None
            else job.resolve_progress(options.progress),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Validated arguments of a load."""

    mesh: Mesh | str | None
    sharding_rules: ParsedRules
    strict: bool
    cast: bool
    workers: int
    trust_pickle: bool
    options: LoadOptions
    single_process: bool = False
    """True if this process reads independently of the other ranks of its job."""

    def build_call_signature(
        self, path: str, tag: str | None, content: TrainingObjects | Template, job: Job
    ) -> CallSignature:
        """Return the call signature: the arguments that must be the same on all ranks."""
        return CallSignature.create(
            "load_checkpoint" if isinstance(content, TrainingObjects) else "restore",
            path=path,
            tag=tag,
            mesh=str(job.placement.mesh),
            objects=content.object_names,
            strict=self.strict,
            cast=self.cast,
            trust_pickle=self.trust_pickle,
            **self.options.in_common(),
        )


def parse_layouts(layout: str | Sequence[str] | None, *, use_xser: bool) -> tuple[Layout, ...]:
    """Return the requested layouts, in order of preference.

    Raises:
        UsageError: A layout does not exist, or `use_xser` contradicts it.
    """
    wanted = ("xser" if use_xser else "native",) if layout is None else layout
    names = parse_texts("layout", wanted, f"one of {', '.join(list_saveable_layouts())}")
    if use_xser and names[0] != "xser":
        raise UsageError("use_xser=True asks for another layout than layout=", expected="xser", found=str(layout))
    return tuple(get_layout(name, allowed=list_saveable_layouts()) for name in names)


logger = get_logger(__name__)

MAX_SHOWN_NAMES = 5
"""Maximum number of existing names that an error lists."""


def check_destination(store: Store, tag: str) -> None:
    """Raise an error if saving would replace something other than a tag, or the root is itself a checkpoint.

    Raises:
        UsageError: The name is in use; or the root is itself a tag; or the root does not exist, and the tag's name is
            an existing root.
        StorageError: The destination cannot be read.
    """
    if store.object_store is not None:
        _check_in_object_store(store.snapshot_view(), tag)
        return
    _check_is_root(store)
    if not store.has(tag):
        here = open_working_directory()
        if here is not None and not store.has("") and here.is_directory(tag) and open_root(here).is_root(tag):
            raise UsageError(
                "the path and the tag seem to be swapped",
                path=store.path,
                tag=tag,
                found=f"{tag} is a directory with tags, and {store.path} is not there",
                hint="The path of the root comes first, and then the tag.",
            )
        return
    root = open_root(store)
    if root.is_native_tag(tag):
        return
    if (foreign := _find_foreign_tag(store, tag)) is not None:
        _check_unfinished(store, tag, *foreign)
        logger.warning("%s: what another library began to save as tag %s will be replaced", store.path, tag)
        return
    with wrap_os_errors("looking at what has the tag's name", path=store.path, tag=tag):
        names = store.list_names(tag) if store.is_directory(tag) else None
    if names == []:
        return
    is_root = names is not None and root.is_root(tag)
    kind = "a root with" if is_root else "a directory with"
    raise UsageError(
        "what has the name of the new tag is no tag, and would be lost",
        path=store.path,
        tag=tag,
        found="a file or a link" if names is None else f"{kind} {_format_names(names)}",
        hint=f"To save in that root, pass {store.path}/{tag} as the path." if is_root else "Give the tag another name.",
    )


def _check_in_object_store(store: Store, tag: str) -> None:
    """Check a destination in an object store, where a checkpoint of another library is not overwritten but hidden.

    One listing is enough for most saves. `LedgerRoot.acquire_lease` checks if the root is itself a tag of this library.
    """
    try:
        names = list_names(store)
        if LEDGER_NAME not in names and names:
            _check_is_no_other_checkpoint(store)
        if (
            tag in names
            and not open_root(store).is_native_tag(tag)
            and (foreign := _find_foreign_tag(store, tag)) is not None
        ):
            _check_unfinished(store, tag, *foreign)
    except StorageError as error:
        # A user with write permission only can still save; the save itself will raise other storage errors.
        logger.debug("%s: what lies there cannot be listed: %s", store.path, error)


def _find_foreign_tag(store: Store, name: str) -> tuple[Layout, TagEntry] | None:
    """Return the layout and entry of another library's checkpoint of this name, even if unfinished; otherwise None."""
    foreign = find_foreign_tag(store, name)
    return foreign if foreign is not None and foreign[0].tagged else None


def _check_unfinished(store: Store, tag: str, layout: Layout, entry: TagEntry) -> None:
    """Raise an error instead of replacing another library's checkpoint that is complete or damaged.

    A damaged checkpoint was complete once, and part of it may be left.
    """
    if entry.complete or entry.damage is not None:
        raise UsageError(
            "a checkpoint of another library has the name of the new tag",
            path=store.path,
            tag=tag,
            found=f"one that {layout.origin or layout.name} wrote",
            hint=f"Give the new tag another name, or first move {store.path}/{tag} away.",
        )


def _check_is_root(store: Store) -> None:
    """Raise an error if the root is itself a tag, because retention would remove the tags in it with it."""
    check_not_a_tag(store.path, open_root)
    if not store.is_directory("") or not open_root(store).is_root(""):  # most saves go to an existing root
        _check_is_no_other_checkpoint(store)


def _check_is_no_other_checkpoint(store: Store) -> None:
    """Raise an error if the root is another library's checkpoint, which the tags in it would hide."""
    if (itself := find_tag_at_root(store)) is None:
        return
    above, name = itself
    if (foreign := find_foreign_tag(above, name)) is not None:
        layout, _ = foreign
        raise UsageError(
            f"this is a checkpoint that {layout.origin} wrote, and no root of tags"
            if layout.tagged
            else f"this is a checkpoint itself (layout {layout.name!r}), and no root of tags",
            path=store.path,
            hint=f"Pass {above.path}, and the name of the new tag (convert: as_tag= (--as)); or a new directory.",
        )


def _format_names(names: Sequence[str]) -> str:
    shown = sorted(names, key=lambda name: (not is_tag_name(name), name))[:MAX_SHOWN_NAMES]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
