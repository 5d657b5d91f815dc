"""Safetensors files: payload files with digests in the header, and files of other programs.

``DCP_SHARDING_INFO`` in ``__metadata__`` contains the offset of each tensor in its global array, for
`torch.distributed.checkpoint.HuggingFaceStorageReader`. ``xla_ckpt_digests`` contains the digests of all blocks, region
after region. The length of the header depends only on names and sizes, so the data can be written before the digests
are known. The header is padded with spaces so that the data starts at a multiple of 4096.
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
"""Alignment of the data in a payload file (bytes), for direct I/O and memory maps."""

MAX_HEADER_BYTES = 100_000_000
"""Maximum header size that the safetensors package can read."""

DIGESTS_KEY = "xla_ckpt_digests"

NEWER_CODES = frozenset({"F4", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
"""Codes that older versions of safetensors do not support. They reject the whole file, so payload files contain ``U8``
instead."""

VALUES_PER_BYTE = 2
"""Number of values per byte of packed dtypes."""

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Number of bits of sub-byte elements, which are stored without gaps."""

_JSON = json.JSONEncoder(separators=(",", ":"))


def sort_regions(regions: Sequence[Region]) -> list[int]:
    """Return the order of regions in a file: large dtypes first, so that all are aligned, otherwise as given."""
    return sorted(range(len(regions)), key=lambda i: -(regions[i].dtype.itemsize))


def build_header(regions: Sequence[Region], digests: Sequence[int] | None = None) -> bytes:
    """Build the header of a payload file, up to the start of the data.

    Args:
        regions: Regions in file order.
        digests: One digest per block, region after region. None reserves the same space, filled with zeros.

    >>> from xla_ckpt.core.dtypes import get_dtype
    >>> len(build_header([Region("w", get_dtype("float32"), Box((0,), (8,)))]))
    4096
    """
    template = build_header_template(regions)
    return template.fill([0] * template.digest_count if digests is None else digests)


@dataclass(frozen=True, slots=True)
class HeaderTemplate:
    """A header without its digests. The rest is known before any byte is written."""

    before: bytes
    after: bytes
    digest_count: int
    """Number of digests between `before` and `after`."""

    @property
    def size(self) -> int:
        """Number of bytes of the header."""
        return len(self.before) + checksum.compute_packed_length(self.digest_count) + len(self.after)

    def fill(self, digests: Sequence[int]) -> bytes:
        """Return the header with these digests."""
        return self.before + checksum.pack_digests(digests).encode() + self.after


def build_header_template(regions: Sequence[Region], *, with_digests: bool = True) -> HeaderTemplate:
    """Build the header of a payload file without the digests.

    Args:
        regions: Regions in file order.
        with_digests: True to reserve space for the digests.
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
    # The first match is the member itself, because the quotes in any JSON string are escaped.
    before, key, after = text.partition(f'"{DIGESTS_KEY}":"'.encode())
    return HeaderTemplate(before + key, after, count)


def build_saved_offset(region: Region) -> dict[str, object]:
    """Return the offset of a region in its global array, for torch's `HuggingFaceStorageReader`."""
    return {"saved_offsets": [*region.box.start, *(0 for _ in _get_byte_dims(region))]}


def build_entry(region: Region, offset: int) -> dict[str, object]:
    """Build the header entry of a region.

    Args:
        region: The region.
        offset: Offset of the region from the end of the header (bytes).
    """
    return {
        "dtype": "U8" if _is_raw(region.dtype) else region.dtype.safetensors,
        "shape": [*region.box.shape, *_get_byte_dims(region)],
        "data_offsets": [offset, offset + region.nbytes],
    }


def build_plain_entry(region: Region, offset: int) -> dict[str, object]:
    """Build the header entry of a region in an exported file, in which all dtypes have codes.

    A byte with two packed values counts as two elements of the last dim.
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
    """Build the header entries of all regions, as JSON. Entries of the same kind differ only in name and offset."""
    facts = [_JSON.encode(build(Region("", *form), 0)).partition('"data_offsets"')[0] for form in regions.kinds]
    nbytes = regions.nbytes
    stops = np.cumsum(nbytes)
    columns = zip(names, regions.kind.tolist(), (stops - nbytes).tolist(), stops.tolist(), strict=True)
    return ",".join([f'{name}:{facts[form]}"data_offsets":[{at},{stop}]}}' for name, form, at, stop in columns])


def pad_header(metadata: dict[str, str], entries: str, reserved_bytes: int = 0) -> bytes:
    """Build a header from JSON members, padded with spaces.

    Args:
        metadata: Content of ``__metadata__``.
        entries: Members of a JSON object, without braces.
        reserved_bytes: Number of bytes that will be inserted later.

    Raises:
        FormatError: The header is larger than readers support.
    """
    head = _JSON.encode({"__metadata__": metadata})
    text = (f"{head[:-1]},{entries}}}" if entries else head).encode()
    size = -(-(8 + len(text) + reserved_bytes) // REGION_ALIGNMENT) * REGION_ALIGNMENT
    if size > MAX_HEADER_BYTES:
        raise FormatError(f"the arrays of one payload file make a header of {size} bytes", expected=MAX_HEADER_BYTES)
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8 - reserved_bytes)


def _get_byte_dims(region: Region) -> list[int]:
    """Return the additional last dim of an array that is stored as raw bytes: the itemsize."""
    return [region.dtype.itemsize] if _is_raw(region.dtype) and region.dtype.itemsize > 1 else []


def _is_raw(dtype: DType) -> bool:
    """Return True if payload files store this dtype as raw bytes."""
    return dtype.safetensors is None or dtype.safetensors in NEWER_CODES


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """Native layout (see `xla_ckpt.core.files.file_layout.FileLayout`): a header, followed by the regions."""

    regions: RegionTable

    is_plain: bool = False
    """True if the header contains only the regions, for exports."""

    has_digests: bool = True
    """True if the header contains the digests of all blocks. Otherwise the manifest does, and the header is known
    first."""

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
    """A whole array in a safetensors file of any program."""

    name: str
    dtype: DType | None
    """None for unknown dtypes."""
    shape: tuple[int, ...]
    """Shape in elements of `dtype`, or as in the header if `dtype` is None."""
    offset: int
    """Byte offset in the file."""
    dtype_code: str
    """Dtype as in the header."""


def get_header_size(start: bytes, file_size: int) -> int:
    """Return the size of a safetensors header, including the eight bytes of its length.

    Args:
        start: First bytes of the file.
        file_size: Number of bytes of the file.

    Raises:
        FormatError: The data is not the start of a safetensors file.
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
    """Parse the header of a safetensors file of any program, and return the arrays ordered by offset.

    Every byte after the header belongs to exactly one array.

    Args:
        header: The whole header.
        file_size: Number of bytes of the file.

    Raises:
        FormatError: The header is malformed or does not match the file size.
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
    """Return the offset of each array in its global array, from DCP metadata. Empty without such metadata.

    Raises:
        FormatError: The metadata is malformed.
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
    """Parse an entry of a header. Returns the array and its byte range in the file (first, one past the last).

    Raises:
        FormatError: The entry is malformed.
    """
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
            dtype = None  # its rows start inside bytes, which no framework supports
        else:
            shape = [*shape[:-1], shape[-1] // VALUES_PER_BYTE]
    return SafetensorsArray(name, dtype, tuple(shape), head + first, code[:80]), (head + first, head + last)


_RANGE_PATTERN = re.compile(rb'"data_offsets":\[(\d+),(\d+)\]')
_DIGESTS_PATTERN = re.compile(rb'"' + DIGESTS_KEY.encode() + rb'":"([^"]*)"')


def parse_block_table(header: bytes) -> BlockTable:
    """Parse the digests in a payload header (all bytes before the data) that `build_header` wrote.

    The header is searched instead of parsed as JSON. Quotes in JSON strings are escaped, so there are no false matches.

    Raises:
        FormatError: The header is malformed, or has no digests.
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
