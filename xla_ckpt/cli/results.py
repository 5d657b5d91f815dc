"""Results of commands as plain JSON, and their rendering for a terminal.

Also parses user input: a root and a tag, a sharding, a model or a size. For native tags, none of this needs torch or
orbax.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from xla_ckpt.errors import CorruptCheckpointError, StorageError, UsageError
from xla_ckpt.formats.tags import check_root_exists, list_all_tags, make_not_found_error
from xla_ckpt.inspection.tags import (
    build_listing,
    choose_tag,
    list_stray_checkpoints,
    list_tags,
    locate_checkpoint,
    repair,
    resolve_local_and_remote,
    summarize_local_and_remote,
    summarize_roots_below,
    summarize_tags,
    summarize_unlisted,
    verify,
)
from xla_ckpt.keywords import suggest_leaf
from xla_ckpt.loading.verify import VerifyReport
from xla_ckpt.rendering.formatting import format_bytes, format_count
from xla_ckpt.storage.resolve import normalize_path, open_store


def resolve_location(path: str, tag: str | None) -> tuple[str, str | None]:
    """Return the root directory and the tag of a path to a root, or to a tag's directory."""
    store, tag = locate_checkpoint(path, tag)
    return store.path, tag


def resolve_second_location(root: str, path: str, tag: str | None) -> tuple[str, str | None]:
    """Return the location of the second of two tags, which may also be the name of a tag in the root of the first.

    Raises:
        NoCheckpointError: It is a plain word, but neither a tag in that root nor a path.
    """
    if tag is None and "/" not in path and not open_store(normalize_path(path)).has(""):
        if path in list_tags(root):
            return root, path
        error = make_not_found_error(open_store(root), path)
        error.hint = f"{error.hint} Nothing lies at {normalize_path(path)}, either."
        raise error
    return resolve_location(path, tag)


def resolve_tag(root: str, tag: str | None) -> str:
    """Return `tag`, or the newest tag if it is None.

    Raises:
        NoCheckpointError: The root contains no tags.
    """
    return choose_tag(open_store(root), tag)


def count_other_tags(root: str, tag: str) -> int:
    """Return the number of other tags in a root directory."""
    return sum(other != tag for other in list_tags(root))


def list_root(root: str, local: str | None = None) -> dict[str, Any]:
    """Return all tags of a root directory, oldest first; with `local`, also those there, and each location."""
    if local is not None:
        return build_listing(root, summarize_local_and_remote(*resolve_local_and_remote(root, local)))
    store = open_store(root).snapshot_view()
    check_root_exists(store)
    tags = list_all_tags(store)
    below = summarize_roots_below(root, {entry.tag for _, entry in tags})
    return build_listing(root, summarize_tags(store, tags), below, list_stray_checkpoints(store, tags))


def list_single_tag(root: str, tag: str) -> dict[str, Any]:
    """Return the same fields for one tag, or for a checkpoint that no root lists, such as a single file."""
    store = open_store(root).snapshot_view()
    if (unlisted := summarize_unlisted(store, tag)) is not None:
        return build_listing(root, [unlisted])
    facts = build_listing(root, summarize_tags(store))
    return {**facts, "tags": [t for t in facts["tags"] if t["tag"] == tag]}


def verify_tag(root: str, tag: str, *, repair_first: bool = False, errors_as_problems: bool = False) -> dict[str, Any]:
    """Read all bytes of a tag, and return the problems found. With `repair_first`, repair the tag before.

    A tag that cannot be repaired or read raises an error. With `errors_as_problems`, the error becomes a problem of the
    tag instead.
    """
    repaired: Sequence[str] = ()
    try:
        if repair_first:
            with (
                contextlib.suppress(UsageError) if errors_as_problems else contextlib.nullcontext()
            ):  # some have no parity
                repaired = repair(root, tag)
        report = verify(root, tag)
    except (CorruptCheckpointError, StorageError) as error:
        if not errors_as_problems:
            raise
        report = VerifyReport(path=root, tag=tag, problems=[error])
    return {**report.to_json(), "repaired": list(repaired)}


def parse_spec(text: str) -> tuple[Any, ...]:
    """Parse a sharding spec of the command line.

    >>> parse_spec("tp,_"), parse_spec("dp+tp"), parse_spec("tp*3")
    (('tp', None), (('dp', 'tp'),), (('tp', 3),))

    Sections follow a colon (`xla_ckpt.core.sharding.sharding`):

    >>> parse_spec("tp:4096+1024x4+1024x4,_"), parse_spec("tp:x2")
    ((('tp', [4096, '1024x4', '1024x4']), None), (('tp', ['x2']),))

    A spec without any sharded dim applies to arrays of any number of dims.

    >>> parse_spec("_")
    ()
    """
    dims = tuple(_parse_dim(word.strip()) for word in text.split(","))
    return dims if any(d is not None for d in dims) else ()


def _parse_dim(word: str) -> Any:
    if word.lower() in ("_", "-", "none", ""):
        return None
    word, colon, sections = word.partition(":")
    names, _, stride = word.partition("*")
    axes: tuple[Any, ...] = tuple(names.split("+"))
    if colon:
        return (*axes, [int(s) if s.isdigit() else s for s in map(str.strip, sections.split("+"))])
    if stride.isdigit():
        return (*axes, int(stride))
    return axes if len(axes) > 1 else word


def build_targets(function_path: str | None) -> tuple[Any, Any]:
    """Call a function of the user that returns a model and an optimizer, or only a model; return (model, optimizer).

    Raises:
        UsageError: The function does not exist, or raises an error.
    """
    if function_path is None:
        return None, None
    module, _, function = function_path.partition(":")
    if not module or not function:
        raise UsageError(
            "--like names a function", expected="MODULE:FUNCTION, such as my_job:build", found=function_path
        )
    sys.path.insert(0, "")  # the current directory, as with python -c; a directory that was removed raises no error
    try:
        program = importlib.import_module(module)
        build = getattr(program, function, None)
        built = None if build is None else build()
    except Exception as error:
        # User code may raise any exception.
        hint = None
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            hint = "It is looked for in this directory and in those of PYTHONPATH, by its name without .py."
        raise UsageError(
            f"the model could not be made: {type(error).__name__}: {error}",
            expected="MODULE:FUNCTION, a function that takes no arguments",
            found=function_path,
            hint=hint,
        ) from error
    finally:
        sys.path.remove("")
    if build is None:
        raise UsageError(
            f"{module} has no function {function}{suggest_leaf(function, dir(program))}", found=function_path
        )
    if built is None:
        raise UsageError(
            "the function returns nothing", expected="the model, or (model, optimizer)", found=function_path
        )
    if isinstance(built, Mapping) and built.keys() <= {"model", "optimizer", "scheduler"}:
        # The parameter names of such a model would differ, so that no array of the tag would match.
        raise UsageError(
            "the function returns a dict", expected="the model, or (model, optimizer)", found=function_path
        )
    return (built[0], built[1]) if isinstance(built, tuple) else (built, None)


def parse_size(text: str) -> int:
    """Parse a number of bytes.

    >>> parse_size("5GB"), parse_size("1.5 mb"), parse_size("4096")
    (5000000000, 1500000, 4096)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*([kmgt]?)b?", text.strip().lower())
    size = 0 if match is None else int(float(match[1]) * 1000 ** " kmgt".index(match[2] or " "))
    if not size:
        raise ValueError(f"{text!r} is no size; write 5GB or 500MB")
    return size


def format_conversion(result: dict[str, Any]) -> RenderableType:
    """Render the result of ``convert``."""
    return Text(
        f"{result['tag']}: {format_bytes(result['nbytes'])} as {result['layout']} over {result['mesh']}, "
        f"{format_count(result['files'], 'file')}, in {result['path']}, in {result['seconds']:.1f} s"
    )


def format_export(result: dict[str, Any]) -> RenderableType:
    """Render the result of ``export``."""
    files = f"{len(result['files'])} files" if len(result["files"]) > 1 else result["files"][0]
    size = f"{format_count(result['arrays'], 'array')}, {format_bytes(result['nbytes'])}"
    text = f"{result['tag']}: {size}, as {files} in {result['path']}"
    if not result["config"]:
        text += "\nThere is no config.json, which transformers needs: copy the model's, or give it with --config."
    return Text(text)


def format_tag_actions(result: dict[str, Any]) -> RenderableType:
    """Render the result of commands that change several tags."""
    return Text("\n".join(f"{t['tag']}: {t['done']}" for t in result["tags"]))


def format_cleanup(result: dict[str, Any]) -> RenderableType:
    """Render the result of ``clean``."""
    lines = [f"{name}: removed" for name in result["removed"]]
    lines += [f"{its['name']}: stays ({its['why']})" for its in result["kept"]]
    return Text("\n".join(lines) or "nothing to remove")
