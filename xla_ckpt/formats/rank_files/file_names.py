"""Parse and format the file names of ranks by templates, and check that a grid of rank files is complete. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.errors import CorruptCheckpointError

_AXES = ("pp", "dp", "ep", "tp")

MAX_LISTED_NAMES = 6
"""Maximum number of names in an error. The number of further names follows them."""

_PLACEHOLDER = re.compile(r"\\{(\w+)(?::0(\d))?\\}")
"""A placeholder of a template, as escaped by `re.escape`."""


@dataclass(kw_only=True, frozen=True, slots=True, order=True)
class RankCoords:
    """Coordinates of the rank that wrote a file."""

    pp: int = 0
    dp: int = 0
    ep: int = 0
    tp: int = 0

    @classmethod
    def from_mesh(cls, coordinates: Mapping[str, int], axes: Iterable[str] = _AXES) -> RankCoords:
        """Return the coordinates of a rank along some axes of a mesh; the others are 0."""
        return cls(**{axis: coordinates[axis] for axis in axes})


@dataclass(frozen=True)
class RankFileName:
    """A pattern of the file names of ranks.

    Args:
        template: A name with ``{tp}``, or ``{tp:02}`` for at least two digits and ``{tp:03}`` for three, as placeholder
            of each number, and ``{set}`` as placeholder of any text.

    >>> RankFileName("tp_rank_{tp:02}.pt").parse("tp_rank_01.pt"), RankFileName("{set}_{pp}").parse_set_part("a_1_2")
    (RankCoords(pp=0, dp=0, ep=0, tp=1), ('a_1', (2,)))
    """

    template: str

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        def place(match: re.Match[str]) -> str:
            digits = ".+" if match[1] == "set" else rf"\d{{{match[2]},}}" if match[2] else r"\d{1,9}"
            return f"(?P<{match[1]}>{digits})"

        return re.compile(_PLACEHOLDER.sub(place, re.escape(self.template)))

    def parse(self, name: str) -> RankCoords | None:
        """Return the coordinates of the rank that wrote the file; None if the name does not match."""
        match = self._pattern.fullmatch(name)
        return (
            None if match is None else RankCoords(**{axis: int(number) for axis, number in match.groupdict().items()})
        )

    def parse_set_part(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Return (name of the set, numbers in the order of the template) of a file; None if it does not match."""
        match = self._pattern.fullmatch(name)
        return None if match is None else (match["set"], tuple(map(int, match.groups()[1:])))

    @cached_property
    def axes(self) -> frozenset[str]:
        """Mesh axes whose ranks have files of different names."""
        return frozenset(self._pattern.groupindex)

    @cached_property
    def folder(self) -> RankFileName:
        """Pattern of the first folder in the path, or of the files themselves if the path has no folder."""
        return RankFileName(self.template.partition("/")[0])

    @property
    def path_suffix(self) -> str:
        """Rest of the path after `folder`: empty, or a path with a leading slash."""
        return self.template.removeprefix(self.folder.template)

    def format_name(self, at: RankCoords) -> str:
        """Return the name of a rank's file."""
        return self.template.format(pp=at.pp, dp=at.dp, ep=at.ep, tp=at.tp)


def index_by_rank(names: Iterable[str], patterns: Sequence[RankFileName], prefix: str = "") -> dict[RankCoords, str]:
    """Return the files that match one of the patterns below a path, by the rank that wrote them."""
    return {
        at: name
        for name in names
        if name.startswith(prefix)
        if (at := next(filter(None, (form.parse(name.removeprefix(prefix)) for form in patterns)), None)) is not None
    }


@dataclass(frozen=True, slots=True)
class RankGrid:
    """Files of one kind (``model``, ``optim``) by coordinates: a full grid unless files are missing."""

    paths: Mapping[RankCoords, str]
    sizes: RankCoords
    """Number of files along each axis."""

    @classmethod
    def from_paths(cls, paths: Mapping[RankCoords, str]) -> RankGrid:
        """Return a grid of the size that the numbers in the names imply."""
        return cls(paths, RankCoords(**{axis: 1 + max(getattr(at, axis) for at in paths) for axis in _AXES}))

    @property
    def count(self) -> int:
        """Number of files in a complete grid."""
        return self.sizes.pp * self.sizes.dp * self.sizes.ep * self.sizes.tp

    def find_missing(self, kind: str) -> list[RankCoords]:
        """Return the coordinates of the missing files.

        Raises:
            CorruptCheckpointError: So many are missing that the numbers in the names cannot be ranks.
        """
        count = self.count
        if len(self.paths) == count:
            return []
        # A single file with a number in the millions must not create a list of millions of missing files.
        if count > 100 * len(self.paths) + 1000:
            raise CorruptCheckpointError("the numbers of the parts make no grid", file=kind, found=len(self.paths))
        places = product(*(range(getattr(self.sizes, axis)) for axis in _AXES))
        return [at for place in places if (at := RankCoords(**dict(zip(_AXES, place, strict=True)))) not in self.paths]

    def check(self, kind: str, hint: str) -> None:
        """Check that every rank has a file.

        Args:
            kind: Name of the files in errors.
            hint: Possible reason for missing files, and remedy.

        Raises:
            CorruptCheckpointError: Files are missing.
        """
        if missing := self.find_missing(kind):
            size = self.sizes
            raise CorruptCheckpointError(
                f"{len(missing)} of {self.count} rank files are missing in {kind}",
                file=kind,
                expected=f"all of pp {size.pp}, dp {size.dp}, ep {size.ep}, tp {size.tp}",
                found="none for " + format_names([f"(dp {m.dp}, ep {m.ep}, tp {m.tp}, pp {m.pp})" for m in missing]),
                hint=hint,
            )


def get_largest_sizes(grids: Iterable[RankGrid]) -> RankCoords:
    """Return the largest number of files along each axis."""
    sizes = [grid.sizes for grid in grids] or [RankCoords(pp=1, dp=1, ep=1, tp=1)]
    return RankCoords(**{axis: max(getattr(size, axis) for size in sizes) for axis in _AXES})


def format_names(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of further names."""
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(names[:MAX_LISTED_NAMES]) + more
