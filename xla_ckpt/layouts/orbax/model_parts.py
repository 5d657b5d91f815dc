"""The arrays of a model that rules find in the arrays of a tree of jax's: places in the same files. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import FormatError, IncompatibleCheckpointError, naming
from xla_ckpt.layouts.orbax.name_rules import NameRule
from xla_ckpt.layouts.orbax.names import Renaming
from xla_ckpt.manifest.arrays import ArrayRecord, array_record
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.sharding.box import Box

MAX_MODEL_PARTS = 1 << 22
"""Parts of arrays of a model that an array may have: a hostile file may describe any number."""


class ModelParts:
    """The arrays of a model, while those that they are parts of are gone through."""

    def __init__(self, rules: Sequence[NameRule], *, several: bool = False) -> None:
        self.rules = rules
        self.several = several
        """Whether the checkpoint has several items. Then a path may begin with the name of one."""
        self.others: list[str] = []
        """Paths of arrays that no rule is for, in the form that rules have."""
        self._parts: dict[str, tuple[DType, tuple[int, ...], list[Shard]]] = {}
        self._same: dict[str, str] = {}
        """Further names of arrays -> the names that they have in `_parts`."""
        self._items: dict[str, str] = {}
        """Name of an array -> the item that it was found in."""

    def add(self, renaming: Renaming, item: str, dtype: DType, chunks: Sequence[Box], file: int) -> None:
        """Take an array for one of the model's, or for several.

        Args:
            renaming: What it is to the model.
            item: The item that it lies in.
            chunks: Its chunks, in the order in which its file has them.
            file: The number of the file, which has the elements of each chunk in the order of the renaming.

        Raises:
            IncompatibleCheckpointError: The rules do not fit it.
            FormatError: It has too many parts.
        """
        renaming.check_type(dtype, renaming.leaf)
        if (count := renaming.most_parts * len(chunks)) > MAX_MODEL_PARTS:
            raise FormatError(
                "an array has too many parts", leaf=renaming.leaf, expected=f"at most {MAX_MODEL_PARTS}", found=count
            )
        offset = 0
        for chunk in chunks:
            for name, box in renaming.parts(chunk):
                if (other := self._items.setdefault(name, item)) != item:
                    raise IncompatibleCheckpointError(
                        "a rule of register_names is for arrays of several items",
                        leaf=renaming.leaf,
                        found=f"{name} in the items {other} and {item}",
                        hint=f"Begin the path of the rule with the item that is meant: {other}/{renaming.leaf}.",
                    )
                known, shape, shards = self._parts.setdefault(name, (dtype, renaming.shape, []))
                if (known, shape) != (dtype, renaming.shape):
                    raise IncompatibleCheckpointError(
                        "two rules give other arrays one name", leaf=renaming.leaf, found=name
                    )
                shards.append(Shard(box, file, offset))
                offset += box.size * dtype.itemsize
        self._same |= renaming.other_names(self.rules)

    def records(self) -> dict[str, ArrayRecord]:
        """Name in the model -> its record. Several names of one array have the same one."""
        records = {}
        for name, (dtype, shape, shards) in self._parts.items():
            with naming(leaf=name):
                records[name] = array_record(dtype, shape, shards)
        return records | {other: records[name] for other, name in self._same.items()}
