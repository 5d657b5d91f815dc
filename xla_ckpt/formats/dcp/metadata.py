"""Parse DCP's `.metadata` without unpickling torch's classes, and find DCP directories in a root.

The file is a pickle of torch's own classes, and `pickle.load`, by which torch reads it, runs whatever it contains. Here
each known class is replaced by a stub without behavior, and any other name is refused. ``<root>/<tag>/.metadata`` is
written last, and marks a directory as complete. torchtitan calls directories ``step-100``, the CheckpointManager of
torch_xla ``100``. torch is imported on first use.
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
"""The file that makes a directory one of DCP's. It is written last."""


MAX_METADATA_BYTES = 1 << 30
"""A larger one is not read (bytes)."""

MAX_PATH_DEPTH = 100
"""Containers around a value."""

MAX_SIZE = 1 << 60
"""Sizes, offsets and numbers of bytes are smaller than this."""

KeyPath = tuple[str | int, ...]
"""The way to a value: keys of dicts as text, and places in lists."""

_PACKAGE = "torch.distributed.checkpoint"

_SKIP_TENSOR_HINT = "Everything else in the checkpoint can be loaded: ask for it without this tensor."


@dataclass(frozen=True, slots=True)
class StorageSpan:
    """Where something is stored: a zip of torch.save, as a part of a larger file."""

    file: str
    """Relative to the directory."""

    offset: int
    """Of the zip's first byte in the file."""

    nbytes: int
    """Bytes of the zip."""

    transforms: tuple[str, ...] = ()
    """What an extension made of these bytes (a compression), as the extension calls it."""


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A region of a tensor, as one zip."""

    box: Box
    span: StorageSpan | None
    """None for a region without elements that is stored nowhere."""


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor: its type, its global shape, and its chunks."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]


@dataclass(frozen=True, slots=True)
class DcpContents:
    """What a directory of DCP's holds."""

    tensors: Mapping[str, DcpTensor]
    """By key."""

    objects: Mapping[str, StorageSpan]
    """The bytes items by key: zips of torch.save, too."""

    paths: Mapping[str, KeyPath]
    """Key -> where it stood in the nested state dict. Where the planner did not say, the key is the only member."""

    unsupported: Mapping[str, UnreadableArray] = field(default_factory=dict)
    """Tensors by key that this library has no element type for, or that are not dense: the others can be read."""

    save_id: str | None = None
    """What the writer called the save."""


class _Stub:
    """Stands for an object of a class of torch's: its attributes, and nothing that it could do.

    Two of them are never equal, so that a key that stands in a dict twice is seen twice.
    """

    state: Any = ()

    def __init__(self, *args: Any) -> None:
        self.state = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """An attribute; None where it is missing."""
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
    """State: element type, layout, and more that says nothing of the bytes."""


class _IndexStub(_Stub):
    pass


class _StorageStub(_Stub):
    pass


def _ignore(*_: Any) -> None:
    """Something that says nothing about tensors."""


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
    # Of torch before 2.3.
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": _PropertiesStub,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": _Stub,
    # Some versions of python name a member of an enum by an attribute of its class.
    "builtins.getattr": _ignore,
    "torch.serialization._get_layout": lambda name: str(name).removeprefix("torch."),
    # The path that the directory had when it was saved.
    **{
        f"{module}.{kind}Path": _ignore
        for module in ("pathlib", "pathlib._local")
        for kind in ("Posix", "PurePosix", "Windows", "PureWindows")
    },
}
"""Name in the file -> what stands for it here."""


def parse_metadata(data: bytes, file: str = METADATA_FILE) -> DcpContents:
    """What a `.metadata` says.

    Each chunk lies in its tensor, and all that has elements has a place. Whether the chunks of a tensor hold each
    element once is for the caller to prove (`xla_ckpt.core.manifest.manifest.array_record` does).

    Raises:
        UntrustedObjectError: It names a class that is not known here. Nothing has run.
        CorruptCheckpointError: It is damaged, or contradicts itself.
    """
    from xla_ckpt.formats.torch_save.unpickler import load_pickle  # this loads torch, which listings do without

    with annotate_errors(file=file):
        return _Parser(load_pickle(data, file, _ALLOWED_NAMES), len(data)).parse()


class _Parser:
    def __init__(self, metadata: Any, budget: int) -> None:
        self.metadata = metadata
        # No object of a pickle takes less than a byte, unless it stands there many times: a file could name one list
        # of a million chunks for each of a million tensors.
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
        """(key, offset of the chunk) -> where it is stored; without an offset: bytes."""
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
        FileRecord(path=file, size=0)  # raises if it lies outside of the directory
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
            # 1 and "1" are two places, and 1 and True never meet: a step is a string or an integer.
            if (other := taken.setdefault(checked[key], key)) != key:
                raise CorruptCheckpointError("two keys have one place in the state", leaf=key, found=other)
        return checked

    @staticmethod
    def _is_step(step: Any) -> bool:
        return type(step) is str or (type(step) is int and 0 <= step < MAX_SIZE)


DISTCP_SUFFIX = ".distcp"
"""What names of DCP's files of tensors end with."""

MANAGER_METADATA_FILE = ".manager_metadata"
"""What the CheckpointManager of torch_xla adds to a directory: the step and the time of the save. It is not read."""

_RANK_METADATA_NAME = re.compile(r"__(\d+)\.metadata")
"""The metadata of one rank, where the ranks saved without telling each other what (``use_collectives=False``)."""

SHARD_NAME = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
"""A file of safetensors that one rank wrote: its number from 1, and which of how many files of the model it is."""


def find_dcp_tag(store: Store, tag: str) -> TagEntry | None:
    """The directory of DCP's that has this name, complete or not; None if it is none. It is as old as its metadata."""
    try:
        time = store.get_modified_time(f"{tag}/{METADATA_FILE}") or store.get_modified_time(f"{tag}/__0{METADATA_FILE}")
        if time is None:
            names = store.list_names(tag)
            if shards := list_safetensors_shards(names):
                # Nothing marks such a directory as complete. Its scan finds out which shards are missing.
                time = store.get_modified_time(f"{tag}/{shards[0]}")
            elif not any(name.endswith(DISTCP_SUFFIX) for name in names):
                return None
    except OSError:
        return None
    return TagEntry(tag=tag, created=format_timestamp(time or 0), directory=tag, complete=time is not None)


def list_rank_metadata(names: Iterable[str]) -> list[str]:
    """The names of the metadata of single ranks, by rank.

    >>> list_rank_metadata(["__10.metadata", "__2.metadata", "__2_0.distcp"])
    ['__2.metadata', '__10.metadata']
    """
    numbered = ((int(match[1]), name) for name in names if (match := _RANK_METADATA_NAME.fullmatch(name)))
    return [name for _, name in sorted(numbered)]


def list_safetensors_shards(names: Iterable[str]) -> list[str]:
    """The files that DCP's HuggingFaceStorageWriter makes with ``save_distributed=True``, of those names."""
    return sorted(name for name in names if SHARD_NAME.fullmatch(name))
