"""Parse the DCP `.metadata` without unpickling torch classes, and find DCP directories in a root.

The file is a pickle of torch classes, and torch reads it with `pickle.load`, which runs any code in it. Here each known
class is replaced by a stub without behavior, and any other name is refused. ``<root>/<tag>/.metadata`` is written last,
and marks a directory as complete. torchtitan names directories ``step-100``, the torch_xla CheckpointManager ``100``.
torch is imported on first use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.core import dtypes
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.manifest.manifest import FileRecord, UnreadableArray
from xla_ckpt.core.sharding.box import MAX_DIMS, Box
from xla_ckpt.errors import CorruptCheckpointError, FormatError, UnsupportedStateError, annotate_errors
from xla_ckpt.formats.base import format_timestamp
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.entry import TagEntry

METADATA_FILE = ".metadata"
"""Metadata file that identifies a DCP directory. It is written last."""


MAX_METADATA_BYTES = 1 << 30
"""Maximum size of a metadata file (bytes)."""

MAX_PATH_DEPTH = 100
"""Maximum number of containers around a value."""

MAX_SIZE = 1 << 60
"""Upper bound of sizes, offsets and numbers of bytes."""

KeyPath = tuple[str | int, ...]
"""Path of a value: string keys of dicts, and integer indices of lists."""

_PACKAGE = "torch.distributed.checkpoint"

_SKIP_TENSOR_HINT = "Everything else in the checkpoint can be loaded: ask for it without this tensor."


@dataclass(frozen=True, slots=True)
class StorageSpan:
    """Location of stored data: a torch.save zip inside a larger file."""

    file: str
    """Path relative to the directory."""

    offset: int
    """Offset of the first byte of the zip in the file."""

    nbytes: int
    """Size of the zip (bytes)."""

    transforms: tuple[str, ...] = ()
    """Names of transforms (such as compression) that DCP extensions applied to the bytes."""


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """Region of a tensor, stored as one zip."""

    box: Box
    span: StorageSpan | None
    """None for a region without elements that is not stored."""


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """Tensor: its dtype, global shape, and chunks."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]


@dataclass(frozen=True, slots=True)
class DcpContents:
    """Contents of a DCP directory."""

    tensors: Mapping[str, DcpTensor]
    """Tensors by key."""

    objects: Mapping[str, StorageSpan]
    """Bytes items by key, also stored as torch.save zips."""

    paths: Mapping[str, KeyPath]
    """Key -> path in the nested state dict. Without planner data, the key is the only component."""

    unsupported: Mapping[str, UnreadableArray] = field(default_factory=dict)
    """Tensors by key that are not dense, or whose dtype this library does not support. All others can be read."""

    save_id: str | None = None
    """Identifier that the writer gave to the save."""


class _Stub:
    """Stub for an object of a torch class: its attributes, without behavior.

    Two stubs are never equal, so that duplicate keys in a dict are detected.
    """

    state: Any = ()

    def __init__(self, *args: Any) -> None:
        self.state = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Return an attribute; None if it is missing."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _MetadataStub(_Stub):
    pass


class _TensorStub(_Stub):
    pass


class _BytesStub(_Stub):
    pass


class _ChunkStub(_Stub):
    pass


class _PropertiesStub(_Stub):
    """Stub whose state is dtype, layout, and properties that do not affect the bytes."""


class _IndexStub(_Stub):
    pass


class _StorageStub(_Stub):
    pass


def _ignore(*_: Any) -> None:
    """Ignore the arguments of a callable that is irrelevant to tensors."""


_ALLOWED_NAMES: Mapping[str, Any] = {
    f"{_PACKAGE}.metadata.Metadata": _MetadataStub,
    f"{_PACKAGE}.metadata.TensorStorageMetadata": _TensorStub,
    f"{_PACKAGE}.metadata.BytesStorageMetadata": _BytesStub,
    f"{_PACKAGE}.metadata.ChunkStorageMetadata": _ChunkStub,
    f"{_PACKAGE}.metadata.TensorProperties": _PropertiesStub,
    f"{_PACKAGE}.metadata.MetadataIndex": _IndexStub,
    f"{_PACKAGE}.metadata.StorageMeta": _Stub,
    f"{_PACKAGE}.metadata._MEM_FORMAT_ENCODING": _Stub,
    f"{_PACKAGE}.filesystem._StorageInfo": _StorageStub,
    # torch before 2.3
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": _PropertiesStub,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": _Stub,
    # Some Python versions pickle a member of an enum as an attribute of its class.
    "builtins.getattr": _ignore,
    "torch.serialization._get_layout": lambda name: str(name).removeprefix("torch."),
    # Path of the directory at the time of the save.
    **{
        f"{module}.{kind}Path": _ignore
        for module in ("pathlib", "pathlib._local")
        for kind in ("Posix", "PurePosix", "Windows", "PureWindows")
    },
}
"""Name in the file -> its stub."""


def parse_metadata(data: bytes, file: str = METADATA_FILE) -> DcpContents:
    """Parse a `.metadata` file.

    Each chunk is inside its tensor, and all data with elements have a location. The caller has to check that the chunks
    of a tensor contain each element once (as `xla_ckpt.core.manifest.arrays.create_array_record` does).

    Raises:
        UntrustedObjectError: The file names an unknown class. No code was run.
        CorruptCheckpointError: The file is corrupt, or contradicts itself.
    """
    from xla_ckpt.formats.torch_save.unpickler import load_pickle  # imports torch, which listings do not need

    with annotate_errors(file=file):
        return _Parser(load_pickle(data, file, _ALLOWED_NAMES), len(data)).parse()


class _Parser:
    def __init__(self, metadata: Any, budget: int) -> None:
        self.metadata = metadata
        # Each object of a pickle takes at least a byte, unless it is referenced many times: a file could reference one
        # list of a million chunks for each of a million tensors.
        self.budget = budget

    def parse(self) -> DcpContents:
        if not isinstance(self.metadata, _MetadataStub) or not isinstance(
            self.metadata.get("state_dict_metadata"), dict
        ):
            raise FormatError("this is no metadata of torch.distributed.checkpoint")
        places = self._parse_places()
        tensors: dict[str, DcpTensor] = {}
        objects: dict[str, StorageSpan] = {}
        undescribed: dict[str, UnreadableArray] = {}
        for key, entry in self.metadata.get("state_dict_metadata").items():
            if type(key) is not str:
                raise FormatError("a key is no string", found=repr(key)[:80])
            with annotate_errors(leaf=key):
                if isinstance(entry, _TensorStub):
                    try:
                        tensors[key] = self._parse_tensor(key, entry, places)
                    except UnsupportedStateError as error:
                        undescribed[key] = UnreadableArray(
                            problem=error.problem,
                            found=None if error.found is None else str(error.found),
                            hint=_SKIP_TENSOR_HINT,
                        )
                elif isinstance(entry, _BytesStub):
                    if (key, None) not in places:
                        raise CorruptCheckpointError("nothing says where this value is stored")
                    objects[key] = places[key, None]
                else:
                    raise FormatError("an entry is neither a tensor nor bytes", found=type(entry).__name__)
        paths = self._parse_paths([*tensors, *objects, *undescribed])
        return DcpContents(tensors, objects, paths, undescribed, self._get_save_id())

    def _get_save_id(self) -> str | None:
        storage = self.metadata.get("storage_meta")
        called = storage.get("save_id") if isinstance(storage, _Stub) else None
        return called if isinstance(called, str) else None

    def _consume_budget(self, amount: int) -> None:
        self.budget -= amount
        if self.budget < 0:
            raise FormatError("it stands for more than its bytes can hold")

    def _parse_places(self) -> dict[tuple[str, tuple[int, ...] | None], StorageSpan]:
        """Map (key, offset of the chunk) to the location. The offset is None for bytes items."""
        stored = self.metadata.get("storage_data")
        if not isinstance(stored, dict):
            raise FormatError("nothing says where the tensors are stored")
        places: dict[tuple[str, tuple[int, ...] | None], StorageSpan] = {}
        for index, storage in stored.items():
            if not (
                isinstance(index, _IndexStub) and isinstance(storage, _StorageStub) and type(index.get("fqn")) is str
            ):
                raise FormatError("a place is none", found=type(storage).__name__)
            key, offset = index.get("fqn"), index.get("offset")
            with annotate_errors(leaf=key):
                at = (key, None if offset is None else self._parse_sizes(offset))
                span = self._parse_span(storage)
                if (other := places.setdefault(at, span)) is not span:
                    what = "this value" if at[1] is None else f"the chunk at {list(at[1])}"
                    raise CorruptCheckpointError(
                        f"two places are said to hold {what}",
                        found=f"{other.file} at {other.offset}, {span.file} at {span.offset}",
                    )
        return places

    def _parse_span(self, storage: _StorageStub) -> StorageSpan:
        file, transforms = storage.get("relative_path"), storage.get("transform_descriptors") or ()
        offset, nbytes = self._parse_sizes((storage.get("offset"), storage.get("length")))
        if type(file) is not str:
            raise FormatError("a place names no file", found=repr(file)[:80])
        FileRecord(path=file, size=0)  # raises if the path is outside the directory
        if not (isinstance(transforms, list | tuple) and all(type(t) is str for t in transforms)):
            raise FormatError("broken list of extensions", found=repr(transforms)[:80])
        return StorageSpan(file, offset, nbytes, tuple(transforms))

    def _parse_tensor(
        self, key: str, entry: _TensorStub, places: Mapping[tuple[str, tuple[int, ...] | None], StorageSpan]
    ) -> DcpTensor:
        shape, properties, chunks = self._parse_sizes(entry.get("size")), entry.get("properties"), entry.get("chunks")
        if not isinstance(chunks, list | tuple):
            raise FormatError("a tensor has no list of chunks")
        self._consume_budget(len(chunks))
        boxes = [self._parse_chunk(key, chunk, shape, places) for chunk in chunks]
        return DcpTensor(self._parse_dtype(properties), shape, tuple(boxes))

    def _parse_dtype(self, properties: Any) -> DType:
        import torch

        state = properties.state if isinstance(properties, _PropertiesStub) else None
        match state:
            case (torch.dtype() as kind, "strided", *_):
                return dtypes.get_dtype(str(kind).removeprefix("torch."))
            case (_, str(layout), *_):
                raise UnsupportedStateError("a tensor is not dense", found=layout)
        raise FormatError("a tensor has no element type")

    def _parse_chunk(
        self,
        key: str,
        chunk: Any,
        shape: tuple[int, ...],
        places: Mapping[tuple[str, tuple[int, ...] | None], StorageSpan],
    ) -> TensorChunk:
        if not isinstance(chunk, _ChunkStub):
            raise FormatError("a chunk is none", found=type(chunk).__name__)
        start, sizes = self._parse_sizes(chunk.get("offsets")), self._parse_sizes(chunk.get("sizes"))
        if not len(start) == len(sizes) == len(shape):
            raise FormatError("a chunk has another number of dims than its tensor", expected=len(shape))
        box = Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
        if not Box.from_shape(shape).contains(box):
            raise CorruptCheckpointError(
                "a chunk lies outside of its tensor", expected=f"inside of {list(shape)}", found=str(box)
            )
        at = places.get((key, start))
        if at is None and box.size:
            raise CorruptCheckpointError("nothing says where a chunk of this tensor is stored", found=str(box))
        return TensorChunk(box, at)

    def _parse_sizes(self, values: Any) -> tuple[int, ...]:
        if not isinstance(values, tuple | list) or len(values) > MAX_DIMS:
            raise FormatError("sizes that are none", found=repr(values)[:80])
        if any(type(v) is not int or not 0 <= v < MAX_SIZE for v in values):
            raise FormatError("impossible sizes", found=repr(tuple(values))[:80])
        return tuple(values)

    def _parse_paths(self, keys: list[str]) -> dict[str, KeyPath]:
        planned = self.metadata.get("planner_data")
        paths = planned if isinstance(planned, dict) else {}
        checked: dict[str, KeyPath] = {}
        taken: dict[tuple[Any, ...], str] = {}
        for key in keys:
            path = paths.get(key, (key,))
            if not isinstance(path, tuple | list) or not path or not all(self._is_step(step) for step in path):
                raise FormatError("the path of a key is none", leaf=key, found=repr(path)[:80])
            if len(path) > MAX_PATH_DEPTH:
                raise FormatError(f"a path has more than {MAX_PATH_DEPTH} steps", leaf=key[:80])
            self._consume_budget(len(path))
            checked[key] = tuple(path)
            # 1 and "1" are different steps. A step is a string or an integer, so 1 and True cannot collide.
            if (other := taken.setdefault(checked[key], key)) != key:
                raise CorruptCheckpointError("two keys have one place in the state", leaf=key, found=other)
        return checked

    @staticmethod
    def _is_step(step: Any) -> bool:
        return type(step) is str or (type(step) is int and 0 <= step < MAX_SIZE)


DISTCP_SUFFIX = ".distcp"
"""Suffix of DCP tensor files."""

MANAGER_METADATA_FILE = ".manager_metadata"
"""File that the torch_xla CheckpointManager adds to a directory: step and time of the save. It is not read."""

_RANK_METADATA_NAME = re.compile(r"__(\d+)\.metadata")
"""Metadata of one rank, for ranks that saved without communication (``use_collectives=False``)."""

SHARD_NAME = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
"""safetensors file of one rank: number of the shard from 1, and number and count of the model files."""


def find_dcp_tag(store: Store, tag: str) -> TagEntry | None:
    """Return the DCP directory with this name, complete or not, dated by its metadata; None if it is not one."""
    try:
        time = store.get_modified_time(f"{tag}/{METADATA_FILE}") or store.get_modified_time(f"{tag}/__0{METADATA_FILE}")
        if time is None:
            names = store.list_names(tag)
            if shards := list_safetensors_shards(names):
                # Such a directory has no commit marker. Its scan detects missing shards.
                time = store.get_modified_time(f"{tag}/{shards[0]}")
            elif not any(name.endswith(DISTCP_SUFFIX) for name in names):
                return None
    except OSError:
        return None
    return TagEntry(tag=tag, created=format_timestamp(time or 0), directory=tag, complete=time is not None)


def list_rank_metadata(names: Iterable[str]) -> list[str]:
    """Return the names of per-rank metadata files, sorted by rank.

    >>> list_rank_metadata(["__10.metadata", "__2.metadata", "__2_0.distcp"])
    ['__2.metadata', '__10.metadata']
    """
    numbered = ((int(match[1]), name) for name in names if (match := _RANK_METADATA_NAME.fullmatch(name)))
    return [name for _, name in sorted(numbered)]


def list_safetensors_shards(names: Iterable[str]) -> list[str]:
    """Return the names that the DCP HuggingFaceStorageWriter writes with ``save_distributed=True``, sorted."""
    return sorted(name for name in names if SHARD_NAME.fullmatch(name))
