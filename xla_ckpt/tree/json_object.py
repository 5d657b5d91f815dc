"""JSON of files: most of them hold one object, and whatever else it may be is damage. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from xla_ckpt.errors import CheckpointError, FormatError


def json_value(
    text: bytes, what: str, kind: type[CheckpointError] = FormatError, pairs: Callable[[Any], Any] | None = None
) -> Any:
    """What a text of JSON says; `pairs` makes each object in it of its (key, value) pairs.

    Raises:
        CheckpointError: It is none: an error of this kind.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise kind(f"{what} is no JSON: {error}"[:300]) from error


def json_object(
    text: bytes, what: str, kind: type[CheckpointError] = FormatError, pairs: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """The object that a text is (see `json_value`).

    Raises:
        CheckpointError: It is none: an error of this kind.

    >>> json_object(b'{"a": 1}', "the text")
    {'a': 1}
    """
    content = json_value(text, what, kind, pairs)
    if not isinstance(content, dict):
        raise kind(f"{what} is not a JSON object", found=type(content).__name__)
    return content
