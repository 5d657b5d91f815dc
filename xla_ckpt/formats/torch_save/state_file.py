"""Scan and write single torch.save files that contain a training state. No tensor is read, and no code in the file is
run.

Model, optimizer and scheduler are found as in DCP directories (`xla_ckpt.formats.state_dict_search`). Single files may
also contain lists of optimizers, an optimizer with numbered parameters, and keys that are not strings. Objects of the
program's classes are only unpickled if the caller trusts them.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import types
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from xla_ckpt.core.files.dcp_file import ARCHIVE_NAME
from xla_ckpt.core.files.torch_file import TorchFile
from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import FileRecord, Manifest, UnreadableArray
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.plan.save_plan import FileEntry, FilePlan
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.nested import iterate_leaves
from xla_ckpt.core.tree.state_dict import attach_module_metadata, copy_module_metadata, get_module_metadata
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError, UnsupportedStateError, annotate_errors
from xla_ckpt.formats.base import StoredState
from xla_ckpt.formats.numbered_parameters import name_parameters
from xla_ckpt.formats.scan import (
    TRUST_HINT,
    CrcCheckedDirectory,
    UntrustedObject,
    build_scanned_manifest,
    flatten_state,
    get_tensor_file,
    get_tensors_folder,
    is_scanned_array,
    open_for_scan,
)
from xla_ckpt.formats.smp.tags import STATE_DICT_MARKER_KEYS, find_job_degrees
from xla_ckpt.formats.state_dict_search import build_training_state
from xla_ckpt.formats.torch_save.pickle_stubs import (
    QUANTIZED_STORAGE_DTYPES,
    STORAGE_DTYPES,
    CompositeTensor,
    OpaqueStub,
    StorageTypeStub,
)
from xla_ckpt.formats.torch_save.pickler import FileTensor, LeafPlaceholder, dump_tree
from xla_ckpt.formats.torch_save.stored_tensors import make_array_record, make_composite
from xla_ckpt.formats.torch_save.zip_reader import (
    COMPOSITE_TENSOR_LABEL,
    SMALL_READ_AHEAD_BYTES,
    ReadAheadFile,
    StorageLocation,
    TensorLocation,
    TorchZip,
)
from xla_ckpt.loading.tag_reader import DAMAGED_FILE_HINT, TagReader
from xla_ckpt.logs import get_logger
from xla_ckpt.state.values import CODEC
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.entry import TagEntry

logger = get_logger(__name__)

PathStep = Any
"""Key of a dict, index in a list, or name of an attribute."""


def read_stored_tree(
    files: CrcCheckedDirectory,
    ahead: ReadAheadFile,
    convert_tensor: Callable[[TensorLocation], Any],
    extra_names: Mapping[str, Any] = types.MappingProxyType({}),
    *,
    check_crcs: bool = True,
    convert_parts: Callable[[CompositeTensor], Any] | None = None,
    resolve_reference: Callable[[int], TensorLocation] | None = None,
) -> Any:
    """Read the content of a file, with tensors converted, and an `UntrustedObject` for each value that needs trust.

    Args:
        convert_tensor: Function that converts each tensor.
        extra_names: See `load_pickle`.
        check_crcs: True if `files` shall check its storages against their CRC-32s from now on.
        convert_parts: Function that converts a tensor that consists of several converted tensors. None makes such
            tensors untrusted objects.
        resolve_reference: Function that locates a tensor in a file of its own by its number. None refuses references.

    Raises:
        CorruptCheckpointError: The file is truncated or corrupt, or not a torch.save file.
        UnsupportedStateError: The file has another byte order, or is compressed.
    """
    archive = TorchZip(ahead, 0, ahead.size)
    storages = archive.list_storages()
    if check_crcs:
        files.storages[ahead.file] = storages
    objects = TrustedObjects(files, ahead.file, archive.pickle_bytes, storages)
    kept = None if convert_parts is None else (lambda value: value)
    value = archive.read_value(
        resolve_reference, allow_strided=True, tolerant=True, convert_parts=kept, extra_names=extra_names
    )
    return _TreeConverter(objects, convert_tensor, convert_parts).visit(value, ())


_TENSOR_FUNCTIONS = ("torch._utils._rebuild", "torch._tensor._rebuild", COMPOSITE_TENSOR_LABEL)
"""Name prefixes of functions by which pickles rebuild tensors."""

_PLAIN_TENSOR_HINT = (
    "A model takes plain tensors: load the file with torch.load, and save value.as_subclass(torch.Tensor). Or pass "
    "trust_pickle=True (--trust-pickle) to restore, which makes it as an object, if you trust whoever wrote this file."
)


class _TreeConverter:
    """Converter of the tensors in a tree. Values that are not plain become an `UntrustedObject`."""

    def __init__(
        self,
        objects: TrustedObjects,
        tensor: Callable[[TensorLocation], Any],
        parts: Callable[[CompositeTensor], Any] | None,
    ) -> None:
        self.objects = objects
        self.tensor = tensor
        self.parts = parts

    def visit(self, value: Any, path: tuple[PathStep, ...]) -> Any:
        """Convert a value of the file; `path` is its path."""
        if isinstance(value, TensorLocation):
            if value.file == self.objects.file:
                self.objects.array_offsets.add(value.offset)
            return self.tensor(value)
        if isinstance(value, CompositeTensor) and self.parts is not None:
            # Their storages are kept for the objects: torch cannot compose these kinds on the meta device.
            return self.parts(replace(value, members={k: self.tensor(at) for k, at in value.members.items()}))
        if isinstance(value, Mapping):
            return self._convert_mapping(value, path)
        kind = type(value)
        if kind in (list, tuple):
            return kind([self.visit(member, (*path, i)) for i, member in enumerate(value)])
        if kind is collections.deque:
            return kind([self.visit(member, (*path, i)) for i, member in enumerate(value)], value.maxlen)
        if kind in (argparse.Namespace, types.SimpleNamespace):
            return kind(**{name: self.visit(member, (*path, name)) for name, member in vars(value).items()})
        if kind in (set, frozenset, slice):
            members = (value.start, value.stop, value.step) if kind is slice else value
            return value if all(map(self._is_plain, members)) else self._wrap_untrusted(path, kind.__name__)
        if self._is_plain(value):
            return value
        return self._wrap_untrusted(path, value.called if isinstance(value, OpaqueStub) else kind.__name__)

    def _wrap_untrusted(self, path: tuple[PathStep, ...], called: str) -> UntrustedObject:
        is_tensor = called.startswith(_TENSOR_FUNCTIONS)
        what = (
            f"a tensor of a class or kind that is read as no array ({called})"
            if is_tensor
            else f"a {called}, which is neither a tensor nor a plain value"
        )
        problem = f"the file holds {what}; it was not loaded, and nothing ran"
        hint = _PLAIN_TENSOR_HINT if is_tensor else TRUST_HINT
        return UntrustedObject(problem, self.objects.file, lambda: self.objects.get(path), path, called, hint)

    def _is_plain(self, value: Any) -> bool:
        if type(value) in (tuple, frozenset):
            return all(map(self._is_plain, value))
        return CODEC.encode(value) is not NotImplemented

    def _convert_mapping(self, value: Mapping[Any, Any], path: tuple[PathStep, ...]) -> Any:
        if not all(map(self._is_plain, value)):
            return self._wrap_untrusted(path, type(value).__name__)
        members = {key: self.visit(member, (*path, key)) for key, member in value.items()}
        metadata = get_module_metadata(value)
        if metadata is not None:
            return attach_module_metadata(members, {name: self._filter_metadata(of) for name, of in metadata.items()})
        if type(value) is dict or any(isinstance(leaf, TensorLocation) for leaf in iterate_leaves(value)):
            return members  # a state dict is converted to dict, independent of its class (usually OrderedDict)
        if isinstance(value, collections.defaultdict):
            return collections.defaultdict(value.default_factory, members)
        return type(value)(members)  # type: ignore[call-arg]

    def _filter_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain values in the metadata of a module (usually its version); classes need trust."""
        plain = {}
        for name, value in metadata.items():
            if isinstance(value, Mapping):
                plain[name] = self._filter_metadata(value)
            elif self._is_plain(value):
                plain[name] = value
            else:
                logger.warning("%s: metadata %r of a module are left out: they are not plain", self.objects.file, name)
        return plain


class TrustedObjects:
    """Content of a file, unpickled with all names in it, for trusted objects."""

    def __init__(
        self, directory: CrcCheckedDirectory, file: str, pickled: bytes, storages: Sequence[StorageLocation]
    ) -> None:
        self.directory = directory
        self.file = file
        self.pickled = pickled
        self._storage_locations = {storage.key: storage for storage in storages}
        self.array_offsets: set[int] = set()
        """Offsets of tensors that are read as arrays. Their storages have no bytes in the unpickled objects."""
        self._tree: Any = None

    @cached_property
    def _sorted_array_offsets(self) -> list[int]:
        return sorted(self.array_offsets)

    def get(self, path: Sequence[PathStep]) -> Any:
        """Return the object at a path. The first call runs the pickle."""
        if self._tree is None:
            self._tree = _TrustedUnpickler(self).load()
        place = self._tree
        for step in path:
            place = vars(place)[step] if isinstance(place, argparse.Namespace | types.SimpleNamespace) else place[step]
        return place

    def load_storage(self, key: str, nbytes: int) -> torch.UntypedStorage:
        """Return a storage of the pickle, on the meta device if all of it is read as arrays."""
        place = self._storage_locations.get(key)
        if place is None or place.nbytes < nbytes:
            raise UnsupportedStateError(f"the record data/{key} is missing, or too short", file=self.file)
        at = bisect_left(self._sorted_array_offsets, place.offset)
        if at < len(self._sorted_array_offsets) and self._sorted_array_offsets[at] < place.offset + place.nbytes:
            return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
        return self._read_storage(place, nbytes)

    def _read_storage(self, place: StorageLocation, nbytes: int) -> torch.UntypedStorage:
        data = bytearray(nbytes)
        with closing(self.directory.open(self.file)) as source:
            source.read_into(memoryview(data), place.offset)
        bits = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, device="cpu")
        return bits.untyped_storage()


class _TrustedUnpickler(pickle.Unpickler):
    """Unpickler that runs the code in a torch.save pickle."""

    def __init__(self, objects: TrustedObjects) -> None:
        super().__init__(io.BytesIO(objects.pickled), encoding="utf-8")
        self.objects = objects

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in (known := STORAGE_DTYPES | QUANTIZED_STORAGE_DTYPES):
            return StorageTypeStub(known[name])
        if name == "UntypedStorage":
            return StorageTypeStub(None)
        if name == "_rebuild_device_tensor_from_cpu_tensor":  # from a device that this process may not have
            return lambda data, dtype, *_: data.to(dtype)
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, _, count = pid
        dtype = torch.uint8 if kind.dtype is None else getattr(torch, kind.dtype)
        untyped = self.objects.load_storage(key, count * dtype.itemsize)
        typed: Any = torch.storage.TypedStorage
        return typed(wrap_storage=untyped, dtype=dtype, _internal=True)


_LIST_KEYS = {"optimizer_states": "optimizer_states", "lr_schedulers": "lr_scheduler"}
"""Lightning keys of the lists of optimizers and schedulers -> key for a single member of the list."""


@dataclass(frozen=True, slots=True)
class FileMembers:
    """Content of a file as a training state."""

    tree: Any
    """Tree of a training state; or the saved value, if no members of one are recognized."""

    guessed: bool = False
    """True if the numbers of the optimizer were named by the order of the model."""


def find_file_members(tree: Any, hints: LoadHints) -> FileMembers:
    """Find the members of the training state in a file.

    Args:
        tree: Saved value, with a record or an `UnreadableArray` for each array.
    """
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        return FileMembers(tree)
    tree = _remove_smp_marks(tree)
    parts = build_training_state(_unwrap_lists(tree), hints, is_scanned_array)
    if tree.keys() <= set(schema.MEMBERS):
        parts = _keep_member_order(tree, parts)
    return FileMembers(*name_parameters(parts, hints, guess=True))


def is_bare_model(tree: Any) -> bool:
    """Return True if a file contains only the state dict of a model: arrays, none of them nested.

    Args:
        tree: As in `find_file_members`.
    """
    return (
        isinstance(tree, dict)
        and any(map(is_scanned_array, tree.values()))
        and not any(
            is_scanned_array(leaf) for v in tree.values() if not is_scanned_array(v) for leaf in iterate_leaves(v)
        )
    )


def _remove_smp_marks(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Return a tree without the SageMaker model parallel markers in state dicts, which are not names of the model."""
    plain = (dict, collections.OrderedDict)
    members = {key: _remove_smp_marks(v) if type(v) in plain else v for key, v in tree.items()}
    if not STATE_DICT_MARKER_KEYS.isdisjoint(members) and any(map(is_scanned_array, members.values())):
        members = {key: value for key, value in members.items() if key not in STATE_DICT_MARKER_KEYS}
    if get_module_metadata(tree) is None and type(tree) is collections.OrderedDict:
        return collections.OrderedDict(members)
    return copy_module_metadata(tree, members)


def _keep_member_order(tree: Mapping[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """Keep the members of a state that have the names of our members, in the order of the file.

    A member may have an unrecognized structure, such as the state of an optimizer that is not a torch optimizer.
    """
    extras = dict(parts.get(schema.EXTRAS, {}))
    own = {name: extras.pop(name) for name in tree if name in extras and name not in parts}
    members = {**parts, **own, schema.EXTRAS: extras}
    if not extras and schema.EXTRAS not in tree:
        del members[schema.EXTRAS]
    return {name: members[name] for name in (*tree, *members) if name in members}


def _unwrap_lists(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the state with lists of a single optimizer or a single scheduler replaced by their member."""
    state = copy_module_metadata(tree, dict(tree))
    for name, called in _LIST_KEYS.items():
        listed = tree.get(name)
        if (
            isinstance(listed, list)
            and len(listed) == 1
            and isinstance(listed[0], dict)
            and called not in state.keys() - {name}
        ):
            del state[name]
            state[called] = listed[0]
    return state


def open_torch_file(store: Store, entry: TagEntry, hints: LoadHints) -> TagReader:
    """Return a reader of a file, for the restore engine.

    Raises:
        CorruptCheckpointError: The file is truncated or corrupt, or not a torch.save file.
        UnsupportedStateError: The file has another byte order, or is compressed.
    """
    file = entry.tag
    # Caches of other programs contain links in place of files.
    with (
        open_for_scan(store, file, lambda: store.open("", lock=False, links=True)) as directory,
        annotate_errors(file=file),
    ):
        files = CrcCheckedDirectory(directory, entry.files or (file,))
        records: list[FileRecord] = []
        tree = _read_tree(files, file, records)
        reader = TagReader(files, store.path, file, *_scan_state(files, file, tree, records, hints))
        if (job := find_job_degrees(tree)) is not None:
            reader.mismatch_hint = (
                "The file is the part of one rank of a job of SageMaker model parallel, of pp {} and tp {}: load the "
                "name without the numbers at its end, which is that of all parts together."
            ).format(*job)
            reader.is_rank_part = True
            logger.warning("%s: %s", file, reader.mismatch_hint)
        return reader


def _scan_state(
    directory: CrcCheckedDirectory, file: str, tree: Any, records: list[FileRecord], hints: LoadHints
) -> tuple[Manifest, list[UntrustedObject]]:
    tensors = f"{get_tensors_folder(file)}/"
    beside = next((other for other in directory.list_files() if other != file and not other.startswith(tensors)), None)
    is_full = beside is not None and is_bare_model(tree)
    members = find_file_members({schema.MODEL: tree} if is_full else tree, hints)
    state = members.tree
    if beside is not None and is_full:
        state = {**state, schema.USER_CONTENT: _read_tree(directory, beside, records)}
    elif beside is not None:
        logger.warning(
            "%s: %s lies beside it, and is left out. It has the name of the user content of SageMaker model parallel's "
            "full checkpoints, and %s holds more than a model",
            file,
            beside,
            file,
        )
    if members.guessed:
        logger.warning(
            "%s: the stored optimizer numbers its parameters. They are taken to be those of the stored model, in each "
            "group in its order, and their shapes fit so in one way only. One that was given parameters of equal "
            "shapes in another order has other ones: to be certain, give the model and its optimizer, as they were at "
            "the save: model= and optimizer= (--like)",
            file,
        )
    return build_scanned_manifest(file, flatten_state(state), records)


def _read_tree(directory: CrcCheckedDirectory, file: str, records: list[FileRecord]) -> Any:
    """Read the content of a file, with a record for each tensor, and add the records of all files."""
    of_files = _TensorRecords(records)
    tensors: dict[int, TensorLocation] = {}

    def reference(tid: int) -> TensorLocation:
        if tid not in tensors:
            tensors[tid] = _read_tensor_file(directory, get_tensor_file(file, tid), of_files)
        return tensors[tid]

    with closing(directory.open(file)) as source, annotate_errors(file=file):
        of_files.add(file, source.size)
        is_apart = any(name.startswith(f"{get_tensors_folder(file)}/") for name in directory.list_files())
        ahead = ReadAheadFile(source, file, SMALL_READ_AHEAD_BYTES)
        return read_stored_tree(
            directory,
            ahead,
            of_files.get_record,
            convert_parts=make_composite,
            resolve_reference=reference if is_apart else None,
        )


def _read_tensor_file(directory: CrcCheckedDirectory, file: str, of_files: _TensorRecords) -> TensorLocation:
    """Locate the tensor in a file of its own."""
    try:
        source = directory.open(file)
    except FileNotFoundError:
        raise CorruptCheckpointError("the file of a tensor is missing", file=file, hint=DAMAGED_FILE_HINT) from None
    with closing(source), annotate_errors(file=file):
        archive = TorchZip(ReadAheadFile(source, file, SMALL_READ_AHEAD_BYTES), 0, source.size)
        at = archive.read_value(allow_strided=True)
        if not isinstance(at, TensorLocation):
            raise CorruptCheckpointError("the file of a tensor does not hold one", file=file, found=type(at).__name__)
        directory.storages[file] = archive.list_storages()
        of_files.add(file, source.size)
        return at


class _TensorRecords:
    """Records of the tensors in files. Tensors with the same elements share one record.

    Args:
        files: Records of the files; records of further files are appended.
    """

    def __init__(self, files: list[FileRecord]) -> None:
        self._files = files
        self._numbers: dict[str, int] = {}
        self._records: dict[tuple[Any, ...], ArrayRecord | UnreadableArray] = {}

    def add(self, file: str, size: int) -> None:
        """Add the record of a file."""
        self._numbers[file] = len(self._files)
        self._files.append(FileRecord(path=file, size=size))

    def get_record(self, at: TensorLocation) -> ArrayRecord | UnreadableArray:
        """Return the record of a tensor. Tensors with the same elements share one record."""
        elements = Box.from_shape(at.shape)
        key = (at.file, at.offset, at.dtype, at.shape, at.strides) if elements.size else (at, len(self._records))
        if key not in self._records:
            self._records[key] = _make_record(at, self._numbers[at.file])
        return self._records[key]


def _make_record(at: TensorLocation, file: int) -> ArrayRecord | UnreadableArray:
    try:
        return make_array_record(at, file)
    except UnsupportedStateError as error:
        return UnreadableArray.from_error(error, at.dtype, at.shape)  # the rest of the file can be read


def plan_state_file(stored: StoredState, path: str) -> FilePlan:
    """Plan the file of a stored state, or of the selected part of it: its tree, with unsharded tensors.

    Several names of one array are tensors that share a storage, as in the saved state.

    Raises:
        UntrustedObjectError: It contains pickled objects that are not trusted.
        UnsupportedStateError: A value cannot be pickled, or torch does not support a dtype.
        IncompatibleCheckpointError: The sharding of an array is unknown, or its bytes are not stored.
    """
    storages = _StorageTable(stored)
    tree = stored.tree(stored.part, lambda leaf, _: LeafPlaceholder(leaf))
    if stored.part == schema.OPTIMIZER:
        tree = _restore_parameter_numbers(tree)
    elif stored.part == paths.ROOT and isinstance(tree, dict) and schema.OPTIMIZER in tree:
        tree = {**tree, schema.OPTIMIZER: _restore_parameter_numbers(tree[schema.OPTIMIZER])}
    pickled = dump_tree(tree, stored.part or "(root)", storages.add_tensor)
    _warn_unsafe_classes(pickled)
    return FilePlan(
        path=path,
        layout=TorchFile(archive_name=ARCHIVE_NAME, pickled=pickled, storages=tuple(storages.lengths)),
        entries=tuple(storages.entries),
    )


class _StorageTable:
    """Storages of the file, one per array, in the order of the tree."""

    def __init__(self, stored: StoredState) -> None:
        self.manifest = stored.manifest
        self.lengths: list[tuple[int, ...]] = []
        """Bytes of the regions of each storage."""
        self.entries: list[FileEntry] = []
        self._numbers: dict[str, int] = {}

    def add_tensor(self, leaf: str) -> FileTensor:
        """Add an array, and return its placeholder in the pickle.

        Raises:
            IncompatibleCheckpointError: The array is not stored.
            UnsupportedStateError: torch does not support the dtype.
        """
        record = self.manifest.find_array(leaf)
        if record is None:
            raise IncompatibleCheckpointError("the checkpoint names this array, and does not hold it", leaf=leaf)
        if not isinstance(getattr(torch, record.dtype.name, None), torch.dtype):
            raise UnsupportedStateError(
                f"torch has no element type {record.dtype.name}",
                leaf=leaf,
                hint="Convert to the native layout, which holds it, or convert another part.",
            )
        first = self.manifest.aliases.get(leaf, leaf)
        if first not in self._numbers:
            self._numbers[first] = len(self.lengths)
            # A storage without bytes has no region. Manifests also list only regions with bytes.
            self.lengths.append((record.nbytes,) if record.nbytes else ())
            if record.nbytes:
                self.entries.append(FileEntry(leaf=first, box=Box.from_shape(record.shape), region=len(self.entries)))
        # A new object for each name: tied tensors share their bytes but are separate objects, as in torch.save.
        return FileTensor(self._numbers[first], record.dtype, record.shape)


def _restore_parameter_numbers(optimizer: Any) -> Any:
    """Convert an optimizer state to the form of `Optimizer.state_dict`, if its parameters have no names.

    Without a model the names are positions (``#0.3``), which torch cannot interpret.
    """
    groups = schema.get_groups(optimizer)
    if groups is None or not isinstance(optimizer.get(schema.STATE), Mapping):
        return optimizer
    names = list(dict.fromkeys(name for group in groups for name in group[schema.PARAMS]))
    if not names or not all(isinstance(name, str) and name.startswith("#") for name in names):
        return optimizer
    return schema.rename_parameters(optimizer, {name: i for i, name in enumerate(names)})


def _warn_unsafe_classes(pickled: bytes) -> None:
    """Log the classes in a file that torch.load refuses with weights_only=True."""
    codec = TorchFile(archive_name=ARCHIVE_NAME, pickled=pickled)
    ((_, content),) = codec.build_framing((), ())
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
    if unsafe:
        logger.warning(
            "the file holds values of %s: torch.load needs weights_only=False for it, or those classes in "
            "torch.serialization.add_safe_globals. With part='model' (--part model) it has the weights alone",
            ", ".join(sorted(unsafe)),
        )
