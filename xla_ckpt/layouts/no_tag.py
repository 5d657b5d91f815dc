"""What is said where a tag, or a root of tags, is asked for that is not there: where the tags are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xla_ckpt.errors import CheckpointError, NoCheckpointError, UsageError
from xla_ckpt.keywords import closest, meant
from xla_ckpt.layouts.base import Layout
from xla_ckpt.layouts.hugging_face import ADAPTER_ARRAYS
from xla_ckpt.layouts.listing import all_tags, beside_tags, find_foreign, named_itself, roots_below, tag_names
from xla_ckpt.layouts.llama_config import CONFIG
from xla_ckpt.layouts.peft import ADAPTER_CONFIG
from xla_ckpt.plan.export_plan import SINGLE, WEIGHT_INDEX
from xla_ckpt.storage import door
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import PathLike
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.missing import no_such_tag
from xla_ckpt.tags.root import Root
from xla_ckpt.tags.roots import root_of

MAX_LOOKED_INTO = 100
"""Directories that are looked into for the sake of a hint, at most."""

MAX_IN_HINT = 10
"""Directories and files that a hint names, at most."""


def no_tag(store: Store, tag: str | None) -> NoCheckpointError:
    """The error for a tag that is not there, or for a root without any (`tag` None)."""
    return with_hint(no_such_tag(root_of(store), tag), store)


def check_lies_there(store: Store) -> None:
    """Refuse a root where nothing lies at all: its list would look like that of an empty one.

    Raises:
        NoCheckpointError: Nothing lies there.
    """
    if not (root_of(store).is_certain() or store.is_directory("")):
        raise no_tag(store, None)


def check_is_own(store: Store, tag: str) -> None:
    """Refuse what is no tag of this library, for those who delete or pin.

    Raises:
        NoCheckpointError: There is no such tag.
        UsageError: Another library wrote it, or it is a single file.
    """
    if (foreign := find_foreign(store, tag)) is not None:
        raise UsageError(
            f"{_writing(foreign[0])}, which this library neither pins nor deletes",
            path=store.path,
            tag=tag,
            hint="Retention never deletes it. To delete it, remove its files.",
        )
    if root_of(store).entry(tag) is None:
        raise no_tag(store, tag)


def _writing(layout: Layout) -> str:
    kind = "tag" if layout.tagged else "file" if layout.one_file else "directory"
    return f"{layout.origin or layout.name} wrote this {kind}"


def root_named(path: PathLike) -> Root:
    """The root of tags that a path names, for those who put it in order.

    Raises:
        NoCheckpointError: Nothing lies there, or a file.
        UsageError: It is a checkpoint itself, and no root, or what another library wrote.
    """
    store = door.store_at(path).look()
    if (inside := named_itself(store)) is not None:
        above, name = inside
        if (foreign := find_foreign(above, name)) is not None:
            raise UsageError(
                f"{_writing(foreign[0])}, which is no root of this library's tags",
                path=store.path,
                hint="Pass a root of this library's tags. xla-ckpt convert makes a tag of what other libraries wrote.",
            )
        raise UsageError("this is a tag, and no root of tags", path=store.path, hint=f"Pass {above.path}.")
    if not store.is_directory(""):
        raise no_tag(store, None)
    return root_of(door.store_at(store.path))  # what `look` has remembered would show a living job as a silent one


def with_hint(error: NoCheckpointError, store: Store) -> NoCheckpointError:
    """The same error, with a hint at what other libraries have there, or at the root above."""
    tags = all_tags(store)
    foreign = [(layout.origin, entry.tag) for layout, entry in tags if layout is not None]
    if foreign:
        others = ", ".join(tag for _, tag in foreign[-10:])
        if len(foreign) == len(tags):
            error.problem += meant(error.tag, [tag for _, tag in foreign])
            error.hint = f"{foreign[-1][0]} wrote the tags there: {others}."
        else:
            error.hint = f"{error.hint or ''} {foreign[-1][0]} wrote others there: {others}.".lstrip()
    elif (inside := named_itself(store)) is not None:
        above, name = inside
        tag = error.tag if error.tag in tag_names(above) else name
        error.hint = f"This is a checkpoint by itself: pass it without a tag, or pass {above.path} and the tag {tag}."
    elif not tags and not store.has(""):
        near = path_meant(store.path)
        error.problem += near
        error.hint = f"Nothing lies there. {_tags_above(store, near)}".rstrip()
    elif not tags and (below := names_of_roots_below(store)):
        error.hint = f"There are checkpoints below it, in {below}: pass one of these directories."
    elif not tags and (whole := _checkpoint_around(store)):
        error.hint = f"It is a part of a checkpoint: pass {whole}."
    elif not tags and (beside := _others(store)):
        error.hint = " ".join(_what_others_are(beside))
        error.problem += meant(error.tag, [name for name, _, _ in beside]) if error.tag else ""
    elif not tags and error.tag is None and store.has(ADAPTER_CONFIG):
        error.hint = f"{ADAPTER_CONFIG} is there: of a directory of PEFT's, {ADAPTER_ARRAYS} is missing."
    elif not tags and error.tag is None and store.has(CONFIG):
        error.hint = f"{CONFIG} is there: of a directory of Hugging Face's, {SINGLE} or {WEIGHT_INDEX} is missing."
    return error


def _checkpoint_around(store: Store) -> str:
    """The path of the checkpoint that a directory is a part of; empty if there is none."""
    try:
        around, _ = door.above(store.path)
        return around.path if named_itself(around) is not None else ""
    except CheckpointError:
        return ""  # it is only for a hint


def _others(store: Store) -> list[tuple[str, Layout, TagEntry]]:
    """What other libraries have in a directory without tags, as `beside_tags` gives it."""
    if store.file_system is None:
        return []
    try:
        return beside_tags(store, (), MAX_LOOKED_INTO)
    except (CheckpointError, OSError):
        return []  # it is only for a hint


def _what_others_are(others: Sequence[tuple[str, Layout, TagEntry]]) -> Iterator[str]:
    """Sentences of what is opened by its own path alone, such as files of torch.save, and of tags that lack the mark
    of a save that ended: no list has these, and who names one gets it.
    """
    if by_path := [name for name, _, entry in others if entry.complete]:
        yield f"Checkpoints of other libraries lie there, {_some(by_path)}: pass the path of one."
    if damaged := [name for name, _, entry in others if entry.damage is not None]:
        yield f"Files are missing in {_some(damaged)}: xla-ckpt verify says which."
    if unmarked := [(n, layout.origin) for n, layout, entry in others if not entry.complete and entry.damage is None]:
        names = _some([name for name, _ in unmarked])
        origin = unmarked[-1][1]
        yield f"{origin}'s mark that a save ended is missing in {names}: name a tag to see what of it can be loaded."


def writers_at(path: PathLike) -> tuple[str, list[str]] | None:
    """Who wrote the checkpoints that lie at a path, and the names of the tags; none, if the path is one checkpoint.

    It is for those who looked there for something else. None: there is nothing, or it cannot be found out.
    """
    try:
        store = door.store_at(path).look()
        if (inside := named_itself(store)) is not None:
            foreign = find_foreign(*inside)
            return _writer(None if foreign is None else foreign[0]), []
        tags = all_tags(store)
    except (CheckpointError, OSError):
        return None  # it is only for a hint
    return (_writer(tags[-1][0]), [entry.tag for _, entry in tags]) if tags else None


def _writer(layout: Layout | None) -> str:
    return "xla_ckpt" if layout is None else layout.origin or layout.name


def names_of_roots_below(store: Store) -> str:
    """The directories in a directory in which there are tags: a path was named that is not long enough. Empty if there
    are none, or it cannot be found out: it is only for a hint.
    """
    try:
        below = roots_below(store.path, levels=1, most=MAX_LOOKED_INTO)
    except (CheckpointError, OSError):
        return ""
    return _some([path.rpartition("/")[2] for path, _ in below])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_IN_HINT]) + (" and others" if len(names) > MAX_IN_HINT else "")


def path_meant(path: str) -> str:
    """The end of a sentence that says which path was probably meant where nothing lies; nothing if none is like it, or
    something lies there.

    The first directory on the way that is not there is taken to be misspelt.
    """
    wanted = path
    try:
        if door.store_at(path).has(""):
            return ""
        while True:
            above, name = door.above(path)
            if above.is_directory(""):
                above = above.look()
                near = closest(name, [*tag_names(above), *above.names()])
                meant_path = f"{path.removesuffix(name)}{near}{wanted.removeprefix(path)}"
                return f": did you mean {meant_path}?" if near and _lies_there(meant_path) else ""
            path = above.path
    except (CheckpointError, OSError):
        return ""  # it is only for a hint


def _lies_there(path: str) -> bool:
    if door.store_at(path).has(""):
        return True
    root, name = door.above(path)
    return name in tag_names(root.look())  # a tag of several files, of which none has its name


def _tags_above(root: Store, near: str) -> str:
    """What tags there are in the directory above: where nothing lies, somebody may have named a tag by its path.

    Nothing, if what was probably meant, as `path_meant` says it, is another thing than a tag.
    """
    try:
        above, _ = door.above(root.path)
        tags = tag_names(above.look())
    except CheckpointError:
        return ""  # it is only for a hint
    if not tags or (near and not any(near.endswith(f"/{tag}?") for tag in tags)):
        return ""
    return f"In {above.path} there are, oldest first: {', '.join(tags[-10:])}."
