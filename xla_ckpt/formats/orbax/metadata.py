"""Parse the JSON of an orbax item: the leaves of its tree, and the storage of its arrays. Pure.

(orbax/checkpoint/_src/metadata/tree.py and array_metadata_store.py, 0.11 to 0.12.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.core.json_data import parse_json_object
from xla_ckpt.core.tree.nested import KeyPath
from xla_ckpt.errors import CorruptCheckpointError, FormatError, annotate_errors
from xla_ckpt.tags.entry import ORBAX_TREE_METADATA_FILE

_SEQUENCE_KEY, _DICT_KEY = 1, 2

EMPTY_TYPES: Mapping[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": {}}
"""Types of leaves that are stored only by the name of their type, and their values."""

STRINGS_FILE = "_strings.json"
"""File of all string leaves."""

STRING, SCALAR, ARRAY, NUMPY = "string", "scalar", "jax.Array", "np.ndarray"
"""Other leaf types: a string in the file of strings, a number stored as an array without dims, and arrays."""


@dataclass(frozen=True, slots=True)
class OrbaxLeaf:
    """Leaf of the tree of an item."""

    keys: KeyPath
    """Path of the leaf: strings are keys of dicts, integers are indices of sequences."""

    value_type: str
    """Type of the leaf: one of `EMPTY_TYPES`, `STRING`, `SCALAR`, `ARRAY` or `NUMPY`."""

    @property
    def name(self) -> str:
        """Name in orbax: the keys, joined by dots. Dots in a key are not escaped."""
        return ".".join(map(str, self.keys))

    @property
    def path(self) -> str:
        """Name in name rules: the keys, joined by slashes."""
        return "/".join(map(str, self.keys))


@dataclass(frozen=True, slots=True)
class OrbaxItemMetadata:
    """Metadata of an item."""

    leaves: Sequence[OrbaxLeaf] | None = None
    """Leaves of the tree; None if only the names of the arrays are known."""

    zarr3: bool = False
    """True if its arrays are zarr version 3; otherwise version 2."""

    strings: Mapping[str, str] = field(default_factory=dict)
    """Name of a leaf -> its string."""

    random_keys: Mapping[str, str] = field(default_factory=dict)
    """Name of an array with the data of a JAX PRNG key -> implementation of the key."""


def parse_tree_metadata(metadata: bytes) -> tuple[list[OrbaxLeaf], bool, bool]:
    """Parse ``_METADATA``. Return its leaves, True if arrays are zarr version 3, and True if they are in one database.

    Raises:
        FormatError: The content is invalid.
        CorruptCheckpointError: Two arrays have one name: orbax has overwritten one of them.
    """
    with annotate_errors(file=ORBAX_TREE_METADATA_FILE):
        content = parse_json_object(metadata, "the metadata of orbax's item")
        tree = content.get("tree_metadata")
        if not isinstance(tree, dict):
            raise FormatError("the metadata of orbax's item have no tree", expected="tree_metadata")
        leaves = [_parse_leaf(text, entry) for text, entry in tree.items()]
        names: dict[str, OrbaxLeaf] = {}
        for leaf in leaves:
            if leaf.value_type not in EMPTY_TYPES and (other := names.setdefault(leaf.name, leaf)) is not leaf:
                raise CorruptCheckpointError(
                    f"orbax has given two leaves one name, {leaf.name!r}, and stored one array for both",
                    leaf=leaf.name,
                    found=f"the keys {list(other.keys)} and {list(leaf.keys)}",
                )
        return leaves, content.get("use_zarr3") is True, content.get("use_ocdbt") is True


def _parse_leaf(text: str, entry: Any) -> OrbaxLeaf:
    try:
        keys = tuple(_parse_key(key["key"], key["key_type"]) for key in entry["key_metadata"])
        kind = entry["value_metadata"]["value_type"]
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError("a leaf of orbax's metadata is broken", leaf=text[:200], found=repr(error)[:80]) from error
    if type(kind) is not str or kind not in (*EMPTY_TYPES, STRING, SCALAR, ARRAY, NUMPY):
        raise FormatError("a leaf is of a type that is not known", leaf=text[:200], found=str(kind)[:80])
    if kind not in EMPTY_TYPES and not is_inside(".".join(map(str, keys))):
        raise FormatError("an array of orbax's would lie outside of its checkpoint", leaf=text[:200])
    return OrbaxLeaf(keys, kind)


def is_inside(name: str) -> bool:
    """Return True if a name stays inside the directory of its item.

    >>> is_inside("a.b/c"), is_inside("../c")
    (True, False)
    """
    return not any(part in ("", ".", "..") for part in name.split("/"))


def get_key_type(key: str | int) -> int:
    """Return the orbax key type: sequence index or dict key."""
    return _SEQUENCE_KEY if isinstance(key, int) else _DICT_KEY


def _parse_key(key: Any, kind: Any) -> str | int:
    if type(key) is not str or kind not in (_SEQUENCE_KEY, _DICT_KEY):
        raise ValueError(f"a key that is {str(key)[:40]!r} of the type {str(kind)[:40]!r}")
    if kind == _DICT_KEY:
        return key
    if not key.isdecimal() or not key.isascii():
        raise ValueError(f"a place in a sequence that is {key[:40]!r}")
    return int(key)


def parse_strings(data: bytes) -> dict[str, str]:
    """Parse `STRINGS_FILE`. Return name of a leaf -> its string.

    Raises:
        FormatError: The content is invalid.
    """
    content = parse_json_object(data, "orbax's file of texts")
    wrong = next((name for name, text in content.items() if type(text) is not str), None)
    if wrong is not None:
        raise FormatError("a text of orbax's is none", leaf=wrong[:200])
    return content


def parse_random_keys(data: bytes) -> dict[str, str]:
    """Parse the PRNG keys in a file in ``array_metadatas``. Return name of the array -> implementation of the key.

    Raises:
        FormatError: The content is invalid.
    """
    content = parse_json_object(data, "orbax's metadata of arrays")
    try:
        entries = [entry["array_metadata"] for entry in content["array_metadatas"]]
        named = [(entry["param_name"], (entry.get("ext_metadata") or {}).get("random_key_impl")) for entry in entries]
    except (TypeError, KeyError, AttributeError) as error:
        raise FormatError("orbax's metadata of arrays are broken", found=repr(error)[:80]) from error
    return {name: impl for name, impl in named if type(name) is str and type(impl) is str}


_ARRAY_METADATA_FILES = (".zarray", ".zattrs", "zarr.json")
"""Metadata files of an array, stored with its chunks."""


def list_array_names(keys: Sequence[str]) -> list[str]:
    """Return the names of the arrays in a store, for older versions of orbax that do not record them.

    >>> list_array_names(["a.b/.zarray", "a.b/0", "c/.zarray"])
    ['a.b', 'c']
    """
    return sorted(key.removesuffix("/.zarray") for key in keys if key.endswith("/.zarray"))


def count_chunks(keys: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Return the number of chunks of each array in a store, by name. A name may be a prefix of another.

    >>> count_chunks(["a/.zarray", "a/0.0", "a/0.1", "a/b/c/0/0", "d"], ["a", "a/b"])
    {'a': 2, 'a/b': 1}
    """
    counts = dict.fromkeys(names, 0)
    for key in keys:
        above, _, name = key.rpartition("/")
        while above and above not in counts:
            above = above.rpartition("/")[0]
        if above and name not in _ARRAY_METADATA_FILES:
            counts[above] += 1
    return counts
