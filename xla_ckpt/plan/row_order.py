"""The order of rows: whether a stored array's is the one that a program expects. Pure.

Which rows a rank gets follows from the sections of its own split. A program with other sections than the job that saved
the array would get other rows, and no shape would show it.
"""

from __future__ import annotations

from collections.abc import Sequence

from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sections import Section
from xla_ckpt.sharding.sharding import Sharding, number_of_parts


def other_sections(stored: Sharding, wanted: Sharding, shape: Sequence[int]) -> str | None:
    """How two splits of an array contradict each other; None if they do not.

    Only a stored split whose sections have sizes or copies is compared: those are queries, keys and values. A stride
    may be that of a DTensor, and says nothing about the order of the rows.
    """
    for n, one, other in zip(shape, stored.over(len(shape)), wanted.over(len(shape)), strict=True):
        if one is None or other is None or not set(one.axes) & set(other.axes) or not one.named:
            continue
        sizes = [_sizes(split.sections, n) for split in (one, other)]
        if sizes[0] != sizes[1]:
            return f"its rows are {_text(sizes[0])}, and here they would be {_text(sizes[1])}"
    return None


def other_heads(stored: Sharding, wanted: Sharding) -> str | None:
    """How the order of the heads differs between the job that saved an array and the one that wants it; or None.

    Where keys and values are repeated as a whole, the heads of the queries are in an order that depends on the number
    of copies. Where neighbouring ranks hold the same, they are in the order that they have without copies.
    """
    texts, orders = [], []
    for sharding in (stored, wanted):
        sections = [s for split in sharding.dims if split is not None for s in split.sections]
        most = max(sections, key=lambda s: s.copies, default=Section())
        orders.append(1 if most.adjacent else most.copies)
        texts.append(f"{most.copies}{' on neighbouring ranks' if most.adjacent else ''}")
    if orders[0] == orders[1]:
        return None
    return f"was saved by a job with kv_size_multiplier={texts[0]}, and this one has {texts[1]}"


def is_grouped(sharding: Sharding) -> bool:
    """Whether an array consists of queries, keys and values: sections with sizes, or with copies."""
    return any(split is not None and split.named for split in sharding.dims)


def other_copies(sharding: Sharding, mesh: Mesh) -> tuple[int, int] | None:
    """How many copies of a section were held, and how many the ranks of a mesh would hold; None if they are as many.

    Copies on neighbouring ranks do not count: they do not change the order of the heads.

    Raises:
        ValueError: The ranks cannot hold equally many copies.
    """
    for split in sharding.dims:
        for section in () if split is None else split.sections:
            copies = section.held(number_of_parts(split.axes, mesh.sizes)) if split is not None else 1
            if copies != section.copies and not section.adjacent:
                return section.copies, copies
    return None


def _sizes(sections: Sequence[Section], n: int) -> list[int]:
    """The sizes of the sections of a dim of `n` elements."""
    return [n // len(sections) if s.size is None else s.size for s in sections]


def _text(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes))
