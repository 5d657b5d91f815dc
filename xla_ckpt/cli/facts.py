"""What the commands report, as plain JSON. Of tags of ours they need neither torch nor orbax."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from xla_ckpt.api.summaries import (
    beside,
    listing_of,
    summaries,
    summaries_below,
    summaries_of_both,
    unlisted_summary,
)
from xla_ckpt.api.tags import chosen_tag, list_tags, located, near_and_far, repair, verify
from xla_ckpt.engine.verify import VerifyReport
from xla_ckpt.errors import CorruptCheckpointError, StorageError, UsageError
from xla_ckpt.keywords import nearest
from xla_ckpt.layouts.listing import all_tags
from xla_ckpt.layouts.no_tag import check_lies_there, no_tag
from xla_ckpt.storage.door import full_path, store_at


def locate(path: str, tag: str | None) -> tuple[str, str | None]:
    """Root directory and tag from what a person types: a root, or the directory of a tag itself."""
    store, tag = located(path, tag)
    return store.path, tag


def locate_beside(root: str, path: str, tag: str | None) -> tuple[str, str | None]:
    """The same of the second of two tags, which may be named as a tag in the root directory of the first.

    Raises:
        NoCheckpointError: It is a plain word, and neither a tag there nor a path.
    """
    if tag is None and "/" not in path and not store_at(full_path(path)).has(""):
        if path in list_tags(root):
            return root, path
        error = no_tag(store_at(root), path)
        error.hint = f"{error.hint} Nothing lies at {full_path(path)}, either."
        raise error
    return locate(path, tag)


def newest(root: str, tag: str | None) -> str:
    """`tag`, or the newest there is.

    Raises:
        NoCheckpointError: There is none.
    """
    return chosen_tag(store_at(root), tag)


def tags_beside(root: str, tag: str) -> int:
    """How many other tags a root directory has."""
    return sum(other != tag for other in list_tags(root))


def list_facts(root: str, local: str | None = None) -> dict[str, Any]:
    """All tags of a root directory, oldest first; with `local` those of that directory, too, and where each is."""
    if local is not None:
        return listing_of(root, summaries_of_both(*near_and_far(root, local)))
    store = store_at(root).look()
    check_lies_there(store)
    tags = all_tags(store)
    below = summaries_below(root, {entry.tag for _, entry in tags})
    return listing_of(root, summaries(store, tags), below, beside(store, tags))


def tag_list_facts(root: str, tag: str) -> dict[str, Any]:
    """The same of one tag, or of what is none, and which no root lists: a single file, say."""
    store = store_at(root).look()
    if (unlisted := unlisted_summary(store, tag)) is not None:
        return listing_of(root, [unlisted])
    facts = listing_of(root, summaries(store))
    return {**facts, "tags": [t for t in facts["tags"] if t["tag"] == tag]}


def verify_facts(root: str, tag: str, *, repairs: bool = False, of_many: bool = False) -> dict[str, Any]:
    """What reading all bytes of a tag found, which is repaired first if that is wanted.

    A tag that cannot be repaired, or read, is an error; `of_many` tags that are looked at, it is a problem of that one.
    """
    repaired: Sequence[str] = ()
    try:
        if repairs:
            with contextlib.suppress(UsageError) if of_many else contextlib.nullcontext():  # some have no parity
                repaired = repair(root, tag)
        report = verify(root, tag)
    except (CorruptCheckpointError, StorageError) as error:
        if not of_many:
            raise
        report = VerifyReport(path=root, tag=tag, problems=[error])
    return {**report.to_json(), "repaired": list(repaired)}


def spec(text: str) -> tuple[Any, ...]:
    """A sharding as a person types it.

    >>> spec("tp,_"), spec("dp+tp"), spec("tp*3")
    (('tp', None), (('dp', 'tp'),), (('tp', 3),))

    Sections stand behind a colon (`xla_ckpt.sharding.sections`):

    >>> spec("tp:4096+1024x4+1024x4,_"), spec("tp:x2")
    ((('tp', [4096, '1024x4', '1024x4']), None), (('tp', ['x2']),))

    Where no dim is split, arrays of any number of dims are meant.

    >>> spec("_")
    ()
    """
    dims = tuple(_split(word.strip()) for word in text.split(","))
    return dims if any(d is not None for d in dims) else ()


def _split(word: str) -> Any:
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


def targets(name: str | None) -> tuple[Any, Any]:
    """(model, optimizer) from what a function of the user's own returns: both, or a model alone.

    Raises:
        UsageError: There is no such function, or it fails.
    """
    if name is None:
        return None, None
    module, _, function = name.partition(":")
    if not module or not function:
        raise UsageError("--like names a function", expected="MODULE:FUNCTION, such as my_job:build", found=name)
    sys.path.insert(0, "")  # the current directory, as python -c has it: one that was removed is no error
    try:
        program = importlib.import_module(module)
        build = getattr(program, function, None)
        built = None if build is None else build()
    except Exception as error:
        # It is the user's code, and may raise anything.
        hint = None
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            hint = "It is looked for in this directory and in those of PYTHONPATH, by its name without .py."
        raise UsageError(
            f"the model could not be made: {type(error).__name__}: {error}",
            expected="MODULE:FUNCTION, a function that takes no arguments",
            found=name,
            hint=hint,
        ) from error
    finally:
        sys.path.remove("")
    if build is None:
        raise UsageError(f"{module} has no function {function}{nearest(function, dir(program))}", found=name)
    if built is None:
        raise UsageError("the function returns nothing", expected="the model, or (model, optimizer)", found=name)
    if isinstance(built, Mapping) and built.keys() <= {"model", "optimizer", "scheduler"}:
        # It would be a model whose parameters have other names, and no array of the tag would be found in it.
        raise UsageError("the function returns a dict", expected="the model, or (model, optimizer)", found=name)
    return (built[0], built[1]) if isinstance(built, tuple) else (built, None)


def nbytes(text: str) -> int:
    """A number of bytes as a person types it.

    >>> nbytes("5GB"), nbytes("1.5 mb"), nbytes("4096")
    (5000000000, 1500000, 4096)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*([kmgt]?)b?", text.strip().lower())
    size = 0 if match is None else int(float(match[1]) * 1000 ** " kmgt".index(match[2] or " "))
    if not size:
        raise ValueError(f"{text!r} is no size; write 5GB or 500MB")
    return size
