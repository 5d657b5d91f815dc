"""What a `.metadata` of torch.distributed.checkpoint says, as values of this library's.

The file is a pickle of torch's own classes, and `pickle.load`, by which torch reads it, runs whatever it says. Here
each class that torch puts there has a value without any behaviour in its place, and any other name is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt import dtypes
from xla_ckpt.dtypes import DType
from xla_ckpt.errors import CorruptCheckpointError, FormatError, UnsupportedStateError, naming
from xla_ckpt.manifest.records import FileRecord, UnknownArray
from xla_ckpt.sharding.box import MAX_DIMS, Box

METADATA = ".metadata"
"""The file that makes a directory one of DCP's. It is written last."""


MAX_METADATA = 1 << 30
"""A larger one is not read (bytes)."""

MAX_STEPS = 100
"""Containers around a value."""

MAX_SIZE = 1 << 60
"""Sizes, offsets and numbers of bytes are smaller than this."""

KeyPath = tuple[str | int, ...]
"""The way to a value: keys of dicts as text, and places in lists."""

_PACKAGE = "torch.distributed.checkpoint"

_OTHERS = "Everything else in the checkpoint can be loaded: ask for it without this tensor."


@dataclass(frozen=True, slots=True)
class Span:
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
class DcpChunk:
    """A region of a tensor, as one zip."""

    box: Box
    at: Span | None
    """None for a region without elements that is stored nowhere."""


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor: its type, its global shape, and its chunks."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a directory of DCP's holds."""

    tensors: Mapping[str, DcpTensor]
    """By key."""

    objects: Mapping[str, Span]
    """The bytes items by key: zips of torch.save, too."""

    paths: Mapping[str, KeyPath]
    """Key -> where it stood in the nested state dict. Where the planner did not say, the key is the only member."""

    undescribed: Mapping[str, UnknownArray] = field(default_factory=dict)
    """Tensors by key that this library has no element type for, or that are not dense: the others can be read."""

    save_id: str | None = None
    """What the writer called the save."""


class _Value:
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


class _Metadata(_Value):
    pass


class _Tensor(_Value):
    pass


class _Bytes(_Value):
    pass


class _Chunk(_Value):
    pass


class _Properties(_Value):
    """State: element type, layout, and more that says nothing of the bytes."""


class _Index(_Value):
    pass


class _Storage(_Value):
    pass


def _ignored(*_: Any) -> None:
    """Something that says nothing about tensors."""


_NAMES: Mapping[str, Any] = {
    f"{_PACKAGE}.metadata.Metadata": _Metadata,
    f"{_PACKAGE}.metadata.TensorStorageMetadata": _Tensor,
    f"{_PACKAGE}.metadata.BytesStorageMetadata": _Bytes,
    f"{_PACKAGE}.metadata.ChunkStorageMetadata": _Chunk,
    f"{_PACKAGE}.metadata.TensorProperties": _Properties,
    f"{_PACKAGE}.metadata.MetadataIndex": _Index,
    f"{_PACKAGE}.metadata.StorageMeta": _Value,
    f"{_PACKAGE}.metadata._MEM_FORMAT_ENCODING": _Value,
    f"{_PACKAGE}.filesystem._StorageInfo": _Storage,
    # Of torch before 2.3.
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": _Properties,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": _Value,
    # Some versions of python name a member of an enum by an attribute of its class.
    "builtins.getattr": _ignored,
    "torch.serialization._get_layout": lambda name: str(name).removeprefix("torch."),
    # The path that the directory had when it was saved.
    **{
        f"{module}.{kind}Path": _ignored
        for module in ("pathlib", "pathlib._local")
        for kind in ("Posix", "PurePosix", "Windows", "PureWindows")
    },
}
"""Name in the file -> what stands for it here."""


def parse_metadata(data: bytes, file: str = METADATA) -> Contents:
    """What a `.metadata` says.

    Each chunk lies in its tensor, and all that has elements has a place. Whether the chunks of a tensor hold each
    element once is for the caller to prove (`xla_ckpt.manifest.records.array_record` does).

    Raises:
        UntrustedObjectError: It names a class that is not known here. Nothing has run.
        CorruptCheckpointError: It is damaged, or contradicts itself.
    """
    from xla_ckpt.layouts.torch_save.restricted_pickle import loads  # this loads torch, which listings do without

    with naming(file=file):
        return _Parser(loads(data, file, _NAMES), len(data)).contents()


class _Parser:
    def __init__(self, metadata: Any, budget: int) -> None:
        self.metadata = metadata
        # No object of a pickle takes less than a byte, unless it stands there many times: a file could name one list
        # of a million chunks for each of a million tensors.
        self.budget = budget

    def contents(self) -> Contents:
        if not isinstance(self.metadata, _Metadata) or not isinstance(self.metadata.get("state_dict_metadata"), dict):
            raise FormatError("this is no metadata of torch.distributed.checkpoint")
        places = self._places()
        tensors: dict[str, DcpTensor] = {}
        objects: dict[str, Span] = {}
        undescribed: dict[str, UnknownArray] = {}
        for key, entry in self.metadata.get("state_dict_metadata").items():
            if type(key) is not str:
                raise FormatError("a key is no string", found=repr(key)[:80])
            with naming(leaf=key):
                if isinstance(entry, _Tensor):
                    try:
                        tensors[key] = self._tensor(key, entry, places)
                    except UnsupportedStateError as error:
                        undescribed[key] = UnknownArray(
                            problem=error.problem, found=None if error.found is None else str(error.found), hint=_OTHERS
                        )
                elif isinstance(entry, _Bytes):
                    if (key, None) not in places:
                        raise CorruptCheckpointError("nothing says where this value is stored")
                    objects[key] = places[key, None]
                else:
                    raise FormatError("an entry is neither a tensor nor bytes", found=type(entry).__name__)
        paths = self._paths([*tensors, *objects, *undescribed])
        return Contents(tensors, objects, paths, undescribed, self._save_id())

    def _save_id(self) -> str | None:
        storage = self.metadata.get("storage_meta")
        called = storage.get("save_id") if isinstance(storage, _Value) else None
        return called if isinstance(called, str) else None

    def _spend(self, amount: int) -> None:
        self.budget -= amount
        if self.budget < 0:
            raise FormatError("it stands for more than its bytes can hold")

    def _places(self) -> dict[tuple[str, tuple[int, ...] | None], Span]:
        """(key, offset of the chunk) -> where it is stored; without an offset: bytes."""
        stored = self.metadata.get("storage_data")
        if not isinstance(stored, dict):
            raise FormatError("nothing says where the tensors are stored")
        places: dict[tuple[str, tuple[int, ...] | None], Span] = {}
        for index, storage in stored.items():
            if not (isinstance(index, _Index) and isinstance(storage, _Storage) and type(index.get("fqn")) is str):
                raise FormatError("a place is none", found=type(storage).__name__)
            key, offset = index.get("fqn"), index.get("offset")
            with naming(leaf=key):
                at = (key, None if offset is None else self._numbers(offset))
                span = self._span(storage)
                if (other := places.setdefault(at, span)) is not span:
                    what = "this value" if at[1] is None else f"the chunk at {list(at[1])}"
                    raise CorruptCheckpointError(
                        f"two places are said to hold {what}",
                        found=f"{other.file} at {other.offset}, {span.file} at {span.offset}",
                    )
        return places

    def _span(self, storage: _Storage) -> Span:
        file, transforms = storage.get("relative_path"), storage.get("transform_descriptors") or ()
        offset, nbytes = self._numbers((storage.get("offset"), storage.get("length")))
        if type(file) is not str:
            raise FormatError("a place names no file", found=repr(file)[:80])
        FileRecord(path=file, size=0)  # raises if it lies outside of the directory
        if not (isinstance(transforms, list | tuple) and all(type(t) is str for t in transforms)):
            raise FormatError("broken list of extensions", found=repr(transforms)[:80])
        return Span(file, offset, nbytes, tuple(transforms))

    def _tensor(self, key: str, entry: _Tensor, places: Mapping[tuple[str, tuple[int, ...] | None], Span]) -> DcpTensor:
        shape, properties, chunks = self._numbers(entry.get("size")), entry.get("properties"), entry.get("chunks")
        if not isinstance(chunks, list | tuple):
            raise FormatError("a tensor has no list of chunks")
        self._spend(len(chunks))
        boxes = [self._chunk(key, chunk, shape, places) for chunk in chunks]
        return DcpTensor(self._dtype(properties), shape, tuple(boxes))

    def _dtype(self, properties: Any) -> DType:
        import torch

        state = properties.state if isinstance(properties, _Properties) else None
        match state:
            case (torch.dtype() as kind, "strided", *_):
                return dtypes.dtype(str(kind).removeprefix("torch."))
            case (_, str(layout), *_):
                raise UnsupportedStateError("a tensor is not dense", found=layout)
        raise FormatError("a tensor has no element type")

    def _chunk(
        self,
        key: str,
        chunk: Any,
        shape: tuple[int, ...],
        places: Mapping[tuple[str, tuple[int, ...] | None], Span],
    ) -> DcpChunk:
        if not isinstance(chunk, _Chunk):
            raise FormatError("a chunk is none", found=type(chunk).__name__)
        start, sizes = self._numbers(chunk.get("offsets")), self._numbers(chunk.get("sizes"))
        if not len(start) == len(sizes) == len(shape):
            raise FormatError("a chunk has another number of dims than its tensor", expected=len(shape))
        box = Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
        if not Box.whole(shape).contains(box):
            raise CorruptCheckpointError(
                "a chunk lies outside of its tensor", expected=f"inside of {list(shape)}", found=str(box)
            )
        at = places.get((key, start))
        if at is None and box.size:
            raise CorruptCheckpointError("nothing says where a chunk of this tensor is stored", found=str(box))
        return DcpChunk(box, at)

    def _numbers(self, values: Any) -> tuple[int, ...]:
        if not isinstance(values, tuple | list) or len(values) > MAX_DIMS:
            raise FormatError("sizes that are none", found=repr(values)[:80])
        if any(type(v) is not int or not 0 <= v < MAX_SIZE for v in values):
            raise FormatError("impossible sizes", found=repr(tuple(values))[:80])
        return tuple(values)

    def _paths(self, keys: list[str]) -> dict[str, KeyPath]:
        planned = self.metadata.get("planner_data")
        paths = planned if isinstance(planned, dict) else {}
        checked: dict[str, KeyPath] = {}
        taken: dict[tuple[Any, ...], str] = {}
        for key in keys:
            path = paths.get(key, (key,))
            if not isinstance(path, tuple | list) or not path or not all(self._is_step(step) for step in path):
                raise FormatError("the path of a key is none", leaf=key, found=repr(path)[:80])
            if len(path) > MAX_STEPS:
                raise FormatError(f"a path has more than {MAX_STEPS} steps", leaf=key[:80])
            self._spend(len(path))
            checked[key] = tuple(path)
            # 1 and "1" are two places, and 1 and True never meet: a step is a string or an integer.
            if (other := taken.setdefault(checked[key], key)) != key:
                raise CorruptCheckpointError("two keys have one place in the state", leaf=key, found=other)
        return checked

    @staticmethod
    def _is_step(step: Any) -> bool:
        return type(step) is str or (type(step) is int and 0 <= step < MAX_SIZE)
