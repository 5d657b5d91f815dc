"""Safetensors files: payload files with digests in the header, and files of other programs.

``DCP_SHARDING_INFO`` in ``__metadata__`` tells `torch.distributed.checkpoint.HuggingFaceStorageReader` the offset of
each tensor in its global array. ``xla_ckpt_digests`` contains the digests of all blocks, region after region. The
length of the header depends on names and sizes only, so data can be written before the digests are known. The header
is padded with spaces until the data begins at a multiple of 4096.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from xla_ckpt.core import checksum
from xla_ckpt.core.checksum import BlockTable
from xla_ckpt.core.dtypes import DType, from_safetensors_code
from xla_ckpt.core.files.file_layout import Framing, Region, RegionTable, create_record_with_regions
from xla_ckpt.core.json_data import parse_json_object
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.core.sharding.box import MAX_DIMS, Box
from xla_ckpt.errors import FormatError

REGION_ALIGNMENT = 4096
"""Data of a payload file begins at a multiple of this (bytes): what direct I/O and memory maps want."""

MAX_HEADER_BYTES = 100_000_000
"""What the safetensors package refuses to read."""

DIGESTS_KEY = "xla_ckpt_digests"

NEWER_CODES = frozenset({"F4", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
"""Codes that older versions of safetensors do not know. They refuse a whole file for one of them, so payload files have
``U8`` in their place."""

VALUES_PER_BYTE = 2
"""Of packed element types."""

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of the elements that are smaller than a byte, and follow one another without gaps."""

_JSON = json.JSONEncoder(separators=(",", ":"))


def sort_regions(regions: Sequence[Region]) -> list[int]:
    """The order of regions in a file: wide element types first, so that all are aligned; else as given."""
    return sorted(range(len(regions)), key=lambda i: -(regions[i].dtype.itemsize))


def build_header(regions: Sequence[Region], digests: Sequence[int] | None = None) -> bytes:
    """The first bytes of a payload file, up to where its data begins.

    Without `digests` (one per block, region after region) their place is filled with zeros: same length.

    >>> from xla_ckpt.core.dtypes import get_dtype
    >>> len(build_header([Region("w", get_dtype("float32"), Box((0,), (8,)))]))
    4096
    """
    template = build_header_template(regions)
    return template.fill([0] * template.digest_count if digests is None else digests)


@dataclass(frozen=True, slots=True)
class HeaderTemplate:
    """A header without its digests. What else stands in it is known before any byte is written."""

    before: bytes
    after: bytes
    digest_count: int
    """How many digests stand between the two."""

    @property
    def size(self) -> int:
        """Bytes of the header."""
        return len(self.before) + checksum.compute_packed_length(self.digest_count) + len(self.after)

    def fill(self, digests: Sequence[int]) -> bytes:
        """The header with its digests."""
        return self.before + checksum.pack_digests(digests).encode() + self.after


def build_header_template(regions: Sequence[Region], *, with_digests: bool = True) -> HeaderTemplate:
    """What `build_header` writes of some regions but for the digests; without `with_digests`, there is no place for
    them.
    """
    regions = RegionTable.from_regions(regions)
    counts = [checksum.count_blocks(box.size * dtype.itemsize) for dtype, box in regions.kinds]
    count = int(np.array(counts, np.int64)[regions.kind].sum())
    names = list(map(_JSON.encode, regions.keys))
    starts = [_JSON.encode(build_saved_offset(Region("", *form))) for form in regions.kinds]
    offsets = ",".join([f"{name}:{starts[form]}" for name, form in zip(names, regions.kind.tolist(), strict=True)])
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": "{" + offsets + "}"}
    if not with_digests:
        return HeaderTemplate(pad_header(about, _build_entries(regions, names)), b"", 0)
    text = pad_header({**about, DIGESTS_KEY: ""}, _build_entries(regions, names), checksum.compute_packed_length(count))
    # The first such place is that of the digests: inside of a string of JSON its quotes would be escaped.
    before, key, after = text.partition(f'"{DIGESTS_KEY}":"'.encode())
    return HeaderTemplate(before + key, after, count)


def build_saved_offset(region: Region) -> dict[str, object]:
    """Where a region begins in its global array, under the key of torch's `HuggingFaceStorageReader`."""
    return {"saved_offsets": [*region.box.start, *(0 for _ in _get_byte_dims(region))]}


def build_entry(region: Region, offset: int) -> dict[str, object]:
    """What the header says of a region that begins at `offset`, counted from the end of the header (bytes)."""
    return {
        "dtype": "U8" if _is_raw(region.dtype) else region.dtype.safetensors,
        "shape": [*region.box.shape, *_get_byte_dims(region)],
        "data_offsets": [offset, offset + region.nbytes],
    }


def build_plain_entry(region: Region, offset: int) -> dict[str, object]:
    """The same in a file that leaves the library, whose element types all have codes of their own.

    A byte with two values in it counts as two elements of the last dim there.
    """
    shape = region.box.shape
    return {
        "dtype": region.dtype.safetensors,
        "shape": [*shape[:-1], shape[-1] * VALUES_PER_BYTE] if region.dtype.packed else [*shape],
        "data_offsets": [offset, offset + region.nbytes],
    }


def _build_entries(
    regions: RegionTable, names: Sequence[str], build: Callable[[Region, int], dict[str, object]] = build_entry
) -> str:
    """What the header says of all regions, as JSON: `build` each, in which all but the place is that of its form."""
    facts = [_JSON.encode(build(Region("", *form), 0)).partition('"data_offsets"')[0] for form in regions.kinds]
    nbytes = regions.nbytes
    stops = np.cumsum(nbytes)
    columns = zip(names, regions.kind.tolist(), (stops - nbytes).tolist(), stops.tolist(), strict=True)
    return ",".join([f'{name}:{facts[form]}"data_offsets":[{at},{stop}]}}' for name, form, at, stop in columns])


def pad_header(metadata: dict[str, str], entries: str, reserved_bytes: int = 0) -> bytes:
    """A header of these entries (the members of an object of JSON), padded with spaces.

    `reserved_bytes` bytes are to be put into it.

    Raises:
        FormatError: It is larger than readers take.
    """
    head = _JSON.encode({"__metadata__": metadata})
    text = (f"{head[:-1]},{entries}}}" if entries else head).encode()
    size = -(-(8 + len(text) + reserved_bytes) // REGION_ALIGNMENT) * REGION_ALIGNMENT
    if size > MAX_HEADER_BYTES:
        raise FormatError(f"the arrays of one payload file make a header of {size} bytes", expected=MAX_HEADER_BYTES)
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8 - reserved_bytes)


def _get_byte_dims(region: Region) -> list[int]:
    """The last dim of an array that is stored as bytes: of its elements' size."""
    return [region.dtype.itemsize] if _is_raw(region.dtype) and region.dtype.itemsize > 1 else []


def _is_raw(dtype: DType) -> bool:
    """Whether payload files have bytes in the place of such elements."""
    return dtype.safetensors is None or dtype.safetensors in NEWER_CODES


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The codec of the native format (see `xla_ckpt.core.files.file_layout.FileLayout`): a header, then the regions."""

    regions: RegionTable

    is_plain: bool = False
    """Whether the header says only what the regions are: for files that leave the library."""

    has_digests: bool = True
    """Whether the header has the digests of all blocks. Else the manifest has them: the header is known first, then."""

    region_ranges: list[tuple[int, int]] = field(init=False, repr=False, compare=False)

    _template: HeaderTemplate = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.is_plain:
            names = list(map(_JSON.encode, self.regions.keys))
            template = HeaderTemplate(
                pad_header({"format": "pt"}, _build_entries(self.regions, names, build_plain_entry)), b"", 0
            )
        else:
            template = build_header_template(self.regions, with_digests=self.has_digests)
        nbytes = self.regions.nbytes
        starts = template.size + np.cumsum(nbytes) - nbytes
        object.__setattr__(self, "_template", template)
        object.__setattr__(self, "region_ranges", list(zip(starts.tolist(), nbytes.tolist(), strict=True)))

    @property
    def size(self) -> int:
        return sum(self.region_ranges[-1]) if self.region_ranges else self._template.size

    @property
    def needs_digests(self) -> bool:
        return self.has_digests and not self.is_plain

    @property
    def needs_crc32(self) -> bool:
        return False

    def to_streaming(self) -> SafetensorsFile:
        return replace(self, has_digests=False) if self.needs_digests else self

    def exclude_regions(self, regions: frozenset[int]) -> SafetensorsFile:
        kept = np.array([i for i in range(len(self.regions)) if i not in regions], np.int64)
        return replace(self, regions=self.regions.select(kept))

    def build_framing(self, digests: Sequence[int], crcs: Sequence[int]) -> Framing:
        return [(0, self._template.fill(digests if self.needs_digests else ()))]

    def create_record(self, path: str, framing: Framing, digests: Sequence[int]) -> FileRecord:
        ((_, head),) = framing
        if not (self.has_digests or self.is_plain):
            return create_record_with_regions(path, self, framing, digests)
        return FileRecord(
            path=path, size=self.size, framing_bytes=len(head), framing_digest=checksum.compute_digest(head)
        )


@dataclass(frozen=True, slots=True)
class SafetensorsArray:
    """A whole array in a file that any program wrote."""

    name: str
    dtype: DType | None
    """None for a type that is not known here."""
    shape: tuple[int, ...]
    """In elements of `dtype`; as the header has it where that is None."""
    offset: int
    """Of its first byte in the file."""
    dtype_code: str
    """The element type as the header has it."""


def get_header_size(start: bytes, file_size: int) -> int:
    """Bytes of the header of a file of `file_size` bytes that begins so, with the eight that say its length.

    Raises:
        FormatError: No safetensors file begins so.
    """
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length < 2 or 8 + length > min(file_size, MAX_HEADER_BYTES):
        raise FormatError(
            "the header of a safetensors file does not fit into it",
            expected=f"at most {max(min(file_size, MAX_HEADER_BYTES) - 8, 0)} bytes",
            found=length,
        )
    return 8 + length


def parse_arrays(header: bytes, file_size: int) -> list[SafetensorsArray]:
    """The arrays of a file of `file_size` bytes that any program wrote, in the order of their bytes.

    Every byte behind the header belongs to exactly one of them.

    Raises:
        FormatError: The header is broken, or does not fit to the file.
    """
    entries = parse_json_object(header[8:], "the header of a safetensors file", pairs_hook=_build_distinct)
    tensors = []
    for name, entry in entries.items():
        if name != "__metadata__":
            tensors.append(_parse_array(name, entry, len(header)))
    tensors.sort(key=lambda pair: pair[1])
    at = len(header)
    for tensor, (first, last) in tensors:
        if first != at:
            raise FormatError(
                "the arrays of a safetensors file overlap, or leave bytes between them",
                leaf=tensor.name,
                expected=f"the first byte at {at}",
                found=first,
            )
        at = last
    if at != file_size:
        raise FormatError(
            "the arrays of a safetensors file do not add up to it", expected=f"{at} bytes", found=file_size
        )
    return [tensor for tensor, _ in tensors]


def parse_saved_offsets(header: bytes) -> dict[str, tuple[int, ...]]:
    """Where each array of a file begins in its global array, as DCP says it; empty where nobody says it.

    Raises:
        FormatError: What it says is broken.
    """
    try:
        about = json.loads(header[8:]).get("__metadata__") or {}
        sharding = json.loads(about.get("DCP_SHARDING_INFO", "{}"))
        starts = {name: tuple(entry["saved_offsets"]) for name, entry in sharding.items()}
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError) as error:
        raise FormatError("DCP_SHARDING_INFO in the header of a safetensors file is broken") from error
    for name, start in starts.items():
        if not all(type(n) is int and 0 <= n < 1 << 60 for n in start):
            raise FormatError("impossible offsets in DCP_SHARDING_INFO", leaf=name, found=str(start)[:80])
    return starts


def _build_distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name stands in it twice")
    return members


def _parse_array(name: str, entry: object, head: int) -> tuple[SafetensorsArray, tuple[int, int]]:
    """An entry of a header, and the bytes of the file that it speaks of (first, one past the last)."""
    try:
        code, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]  # type: ignore[index]
        if type(code) is not str or type(shape) is not list or len(shape) > MAX_DIMS:
            raise ValueError(f"{code!r} of shape {str(shape)[:80]}")
        nbytes = _parse_range(first, last)
        if not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
            raise ValueError(f"impossible shape {str(shape)[:80]}")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"a broken entry in the header of a safetensors file: {error}", leaf=name) from error
    dtype = from_safetensors_code(code)
    bits = _BITS.get(code, 0 if dtype is None else 8 * dtype.itemsize)
    expected, rest = divmod(Box.from_shape(shape).size * bits, 8)
    if bits and (expected != nbytes or rest):
        raise FormatError(
            "an array of a safetensors file does not have the bytes of its shape",
            leaf=name,
            expected=expected,
            found=nbytes,
        )
    if dtype is not None and dtype.packed:
        if not shape or shape[-1] % VALUES_PER_BYTE:
            dtype = None  # its rows begin inside of bytes: no library has such arrays
        else:
            shape = [*shape[:-1], shape[-1] // VALUES_PER_BYTE]
    return SafetensorsArray(name, dtype, tuple(shape), head + first, code[:80]), (head + first, head + last)


_RANGE_PATTERN = re.compile(rb'"data_offsets":\[(\d+),(\d+)\]')
_DIGESTS_PATTERN = re.compile(rb'"' + DIGESTS_KEY.encode() + rb'":"([^"]*)"')


def parse_block_table(header: bytes) -> BlockTable:
    """The digests in a payload header (all bytes before the data), which `build_header` has written.

    It is not parsed as JSON: inside of a string of JSON quotes are escaped, so what is looked for is nowhere else.

    Raises:
        FormatError: There are none.
    """
    packed = _DIGESTS_PATTERN.search(header)
    if packed is None or int.from_bytes(header[:8], "little") != len(header) - 8:
        raise FormatError("broken payload header")
    try:
        places = np.array([int(n) for pair in _RANGE_PATTERN.findall(header) for n in pair], np.int64).reshape(-1, 2)
    except OverflowError as error:
        raise FormatError("broken payload header") from error
    first, last = places[np.lexsort(places.T[::-1])].T
    if (last < first).any():
        raise FormatError("impossible offsets in a payload header")
    sizes = last - first
    digests = checksum.unpack_digest_array(
        packed.group(1), int((-(-sizes // checksum.compute_block_sizes(sizes))).sum())
    )
    return BlockTable.from_regions(len(header) + first, sizes, digests)


def _parse_range(first: object, last: object) -> int:
    if not (type(first) is int and type(last) is int and 0 <= first <= last):
        raise ValueError(f"impossible offsets {first}, {last}")
    return last - first
