"""Read and write NxD rank files.

``<tag>/model/dp_rank_00_tp_rank_01_pp_rank_00.pt`` contains the state of one rank as a dict. Ranks that differ only
along dp and cp share one file. In the layout ``pt`` the first of them writes it. In the layout ``xser`` the file
contains references, each tensor has a file of its own, ``<rank file>.tensors/tensor_3.pt``, ``<rank file>.info.pt`` has
dtypes and shapes, and the ranks share the writing. optimum-neuron uses the same files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from xla_ckpt.core import dtypes
from xla_ckpt.core.files.torch_file import TorchFile
from xla_ckpt.core.manifest.manifest import Manifest, UnreadableArray
from xla_ckpt.core.plan.hints import ArrayHint, LoadHints
from xla_ckpt.core.plan.save_plan import FilePlan
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import compute_part_index
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.nested import map_leaves, to_dicts_and_lists
from xla_ckpt.core.tree.schema import LORA_CONFIG, sort_lora_config
from xla_ckpt.core.tree.skeleton import get_children
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError, UsageError, annotate_errors
from xla_ckpt.formats.base import TargetTopology
from xla_ckpt.formats.hugging_face.peft import (
    ADAPTER_CONFIG_FILE,
    MAX_ADAPTER_CONFIG_BYTES,
    parse_adapter_config,
)
from xla_ckpt.formats.nxd.layout import EXPERT_RANK_FILE_NAME, FOLDER_FILE_NAMES, RANK_FILE_NAME, RANK_FOLDERS
from xla_ckpt.formats.nxd.optimizer import encode_optimizer, parse_optimizer
from xla_ckpt.formats.rank_files.arrays import TensorCopies
from xla_ckpt.formats.rank_files.conversion import has_zero1_rows
from xla_ckpt.formats.rank_files.file_names import (
    RankCoords,
    RankFileName,
    RankGrid,
    get_largest_sizes,
    index_by_rank,
)
from xla_ckpt.formats.rank_files.files import RankFiles, to_stored_tensor
from xla_ckpt.formats.rank_files.layout import RankOptimizer, StoredTensor
from xla_ckpt.formats.rank_files.model import StageModel, group_by_stage, read_trees
from xla_ckpt.formats.rank_files.reading import (
    TAG_KIND,
    OneFilePerRank,
    TagContent,
    build_content,
    infer_mesh,
    read_plain_file,
)
from xla_ckpt.formats.rank_files.writing import RankFilePlanner, RankTensor, get_stem
from xla_ckpt.formats.scan import get_tensor_file, get_tensors_folder
from xla_ckpt.formats.torch_save.pickle_stubs import TensorReferenceStub
from xla_ckpt.formats.torch_save.pickler import FileTensor, dump_tree, dump_tree_with_references
from xla_ckpt.formats.torch_save.zip_reader import TensorLocation
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.threads import READ_THREADS, run_tasks

_EXPERT_KEY = "expert_model_parallel"
"""Key of the flag that a tensor differs between expert-parallel ranks."""


def _get_info_path(path: str) -> str:
    """Return the path of the file that describes the tensors of a rank file."""
    return f"{path}.info.pt"


class TensorFiles(RankFiles):
    """Rank files of an NxD checkpoint, which may contain references to separate tensor files."""

    incomplete_message = "{tag} has no done marker: its save may not have ended"
    missing_rows_hint = (
        "If files of more dp ranks were there once, restore them from a copy. Else the job had context parallelism: "
        "neuronx-distributed shards over dp and cp, and names the files by dp only: context-parallel ranks wrote over "
        "each other, and the data is lost. The model itself is whole: load it without the optimizer."
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.folders = frozenset(name.rpartition("/")[0] for name in self.file_names)
        self._locations: dict[str, Any] = {}

    def locate(self, tensor: StoredTensor) -> TensorLocation:
        if tensor.location is not None:
            return tensor.location
        if tensor.file not in self._locations:
            self._locations[tensor.file] = self.read(tensor.file)
        at = self._locations[tensor.file]
        if not isinstance(at, TensorLocation) or (at.dtype, at.shape) != (tensor.dtype, tensor.shape):
            raise CorruptCheckpointError(
                "the file of a tensor does not hold it",
                file=tensor.file,
                expected=f"{tensor.dtype.name} {tensor.shape}",
                found=f"{at.dtype.name} {at.shape}" if isinstance(at, TensorLocation) else type(at).__name__,
            )
        return at

    def has_tensor_file(self, tensor: StoredTensor) -> bool:
        return tensor.location is not None or tensor.file in self.file_names

    def is_left_out(self, tensor: StoredTensor) -> bool:
        # With avoid_saving_lower_precision_weights the folder of its tensors does not exist either.
        return tensor.location is None and tensor.file.rpartition("/")[0] not in self.folders

    def has_separate_tensors(self, path: str) -> bool:
        """Return True if the tensors of a rank file are stored in separate files."""
        return _get_info_path(path) in self.file_names or get_tensors_folder(path) in self.folders

    def read_tree(self, path: str, at: RankCoords) -> Any:
        info = self.read(_get_info_path(path)) if _get_info_path(path) in self.file_names else {}
        described = info if isinstance(info, Mapping) else {}
        tensors: dict[int, StoredTensor] = {}

        def reference(tid: int) -> StoredTensor:
            if tid not in tensors:
                tensors[tid] = self._resolve_reference(path, at, tid, described.get(tid))
            return tensors[tid]

        return map_leaves(self.read(path, reference), to_stored_tensor)

    def prefetch_tensors(self, tensors: Iterable[StoredTensor]) -> None:
        # Reads are concurrent, because `locate` would wait for slow storage one file at a time.
        def look(file: str, _: memoryview) -> None:
            with contextlib.suppress(CheckpointError):  # `locate` raises it again and names the array
                self._locations[file] = self.read(file)

        files = {tensor.file for tensor in tensors if tensor.location is None and tensor.file in self.file_names}
        todo = sorted(files - self._locations.keys())
        run_tasks(todo, look, workers=min(READ_THREADS, len(todo)), buffer_bytes=0, name="xla_ckpt-look")

    def _resolve_reference(self, path: str, at: RankCoords, tid: int, info: Any) -> StoredTensor:
        """Return the tensor with a number in a rank file. `info` is its entry in the ``.info.pt`` file.

        Raises:
            CorruptCheckpointError: The entry is damaged, or the file does not contain a tensor.
        """
        own = get_tensor_file(path, tid)
        # A tensor that is replicated on all expert-parallel ranks is stored with the first of them.
        shared = own.replace(f"_ep_rank_{at.ep:02d}_", "_ep_rank_00_", 1) if at.ep else own
        if info is None:
            file = own if own in self.file_names else shared
            content = self.read(file)
            if not isinstance(content, TensorLocation):
                raise CorruptCheckpointError("the file of a tensor does not hold one", file=file)
            return StoredTensor.from_location(content)
        try:
            expert = bool(info[_EXPERT_KEY])
            dtype = dtypes.get_dtype(str(info["dtype"]).removeprefix("torch."))
            return StoredTensor(
                dtype=dtype, shape=tuple(map(int, info["shape"])), is_expert=expert, file=own if expert else shared
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(
                "the description of a tensor is damaged",
                file=_get_info_path(path),
                found=f"tensor {tid}: {info}"[:200],
            ) from error


def plan_separate_files(
    planner: RankFilePlanner, names: Sequence[RankFileName], tree: Any, part: str, *, per_dp: bool = False
) -> list[FilePlan]:
    """Plan this rank's part of a rank file with separate tensor files (see `RankFilePlanner.name_file`).

    The ranks that share the file divide the tensor files among themselves.

    Raises:
        UnsupportedStateError: No file name distinguishes the ranks, or the tree cannot be pickled.
    """
    path, sharing = planner.name_file(names, per_dp=per_dp)
    writer_number = compute_part_index(sharing, planner.mesh, planner.rank)
    tensors: list[tuple[str, RankTensor]] = []

    def reference(leaf: str) -> TensorReferenceStub:
        stand_in = TensorReferenceStub()
        stand_in.tid = len(tensors)
        tensors.append((leaf, planner.state.tensors[leaf]))
        return stand_in

    pickled = dump_tree_with_references(tree, part, reference)
    files = []
    ranks = 1 if planner.first_rank_writes else prod(planner.mesh.sizes[axis] for axis in sharing)
    for tid, writer in enumerate(_assign_writers([t.nbytes for _, t in tensors], ranks)):
        leaf, tensor = tensors[tid]
        # State that does not belong to experts is stored only with expert-parallel rank 0, where readers expect it.
        if writer == writer_number and (planner.coordinates["ep"] == 0 or tensor.is_expert or per_dp):
            lengths, sources, entries = planner.plan_regions([(leaf, tensor)], sharing)
            own = dump_tree(FileTensor(0, tensor.dtype, tensor.shape), leaf)
            codec = TorchFile(archive_name=f"tensor_{tid}", pickled=own, storages=lengths)
            file = get_tensor_file(path, tid)
            files.append(FilePlan(path=file, layout=codec, sources=sources, entries=entries))
    if writer_number == 0:
        info = dump_tree({tid: _describe_tensor(tensor) for tid, (_, tensor) in enumerate(tensors)}, part)
        # neuronx-distributed creates this directory for every rank file, even without tensors, and programs look for
        # it.
        main = TorchFile(archive_name=get_stem(path), pickled=pickled)
        files.append(FilePlan(path=path, layout=main, directory=get_tensors_folder(path)))
        files.append(
            FilePlan(
                path=_get_info_path(path), layout=TorchFile(archive_name=get_stem(_get_info_path(path)), pickled=info)
            )
        )
    return files


def _assign_writers(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assign each file to a rank: in order of decreasing size, each to the rank with the least bytes so far."""
    load = [0] * ranks
    writer = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        writer[i] = load.index(min(load))
        load[writer[i]] += max(sizes[i], 1)  # an empty tensor is also a file to write
    return writer


def _describe_tensor(tensor: RankTensor) -> dict[str, Any]:
    """Return the description of a tensor that readers use before they open its file."""
    return {
        "dtype": getattr(torch, tensor.dtype.name),
        "shape": torch.Size(tensor.shape),
        _EXPERT_KEY: tensor.is_expert,
    }


def order_adapter_configs(models: Mapping[RankCoords, Any]) -> dict[RankCoords, Any]:
    """Return the models of all ranks with sorted adapter configurations, whose order may differ between ranks."""
    return {
        at: {**model, LORA_CONFIG: sort_lora_config(config)}
        if isinstance(config := model.get(LORA_CONFIG), Mapping)
        else model
        for at, model in models.items()
    }


def find_mixed_adapters(files: RankFiles, copies: TensorCopies, mesh: Mesh, hint: ArrayHint) -> UnreadableArray | None:
    """Return the reason why QKV adapters that `LoraModel` merged cannot be read; None if they can.

    `LoraModel` concatenates the rows of all ranks in each file. If keys have several replicas, it keeps only as many
    rows as one replica has, of the queries as well (`merge_sharded_lora`, which is its default).

    Raises:
        CorruptCheckpointError: A file is missing, or contains another tensor.
    """
    split = next(
        (s for s in (hint.sharding.dims if hint.sharding else ()) if s is not None and s.has_custom_sections), None
    )
    if split is None or hint.has_rule or mesh.tp == 1:
        return None
    first, *others = copies.values()
    if first.shape == hint.shape:
        spoilt = len(split.sections) > 1 or any(s.adjacent and s.copies < mesh.tp for s in split.sections)
        what_is_stored = "the rows of each rank one behind the other, and not all queries first"
    else:
        parted = any(s.copies < mesh.tp for s in split.sections)
        spoilt = parted and not files.is_zero(first) and all(files.is_same(first, other) for other in others)
        what_is_stored = "the same rows in the files of all ranks, which are those of the first ones"
    if not spoilt:
        return None
    return UnreadableArray(
        problem="neuronx-distributed has joined the adapters of all ranks, and has not put them into their order",
        expected=f"parts as in {hint.sharding.spec if hint.sharding else None}",
        found=what_is_stored,
        hint="Save them apart, with merge_sharded_lora=False in LoraConfig, or with this library.",
    )


MODEL_FOLDER, OPTIMIZER_FOLDER = RANK_FOLDERS

FULL_FILE_NAME = RankFileName("full_tp_rank_{tp:02}_pp_rank_{pp:02}.pt")
FULL_EXPERT_FILE_NAME = RankFileName("full_ep_rank_{ep:02}_tp_rank_{tp:02}_pp_rank_{pp:02}.pt")
"""Names of the files in which the neuronx-distributed converter stores the states of all dp ranks."""


_MISSING_EXPERTS_HINT = (
    "They were lost, or never written: neuronx-distributed leaves out the optimizer of expert-parallel ranks from 1 on "
    "unless use_xser is set."
)


class FolderFiles(TensorFiles):
    """Files of a checkpoint with NxD folders. A layout derives a class from it for files outside the folders."""

    def explain_missing(self, sizes: RankCoords) -> str:
        return _MISSING_EXPERTS_HINT if sizes.ep > 1 else super().explain_missing(sizes)

    def find_grids(self) -> dict[str, RankGrid]:
        """Return the grids of model and optimizer files.

        The same ranks wrote both, so each grid shows which files are missing in the other.
        """
        of_kind = {
            kind: RankGrid.from_paths(paths)
            for kind in RANK_FOLDERS
            if (
                paths := index_by_rank(
                    self.file_names,
                    (RANK_FILE_NAME, EXPERT_RANK_FILE_NAME, FULL_FILE_NAME, FULL_EXPERT_FILE_NAME),
                    f"{self.subfolder}{kind}/",
                )
            )
        }
        largest = get_largest_sizes(of_kind.values())
        grids = {}
        for kind, grid in of_kind.items():
            sizes = replace(grid.sizes, tp=largest.tp, pp=largest.pp)
            # Only a ZeRO-1 optimizer has a file for each dp rank, so dp is not compared. Without ZeRO-1 the optimizer
            # of a job with experts has a file for each ep rank, and the model files show the number of ep ranks.
            if kind == OPTIMIZER_FOLDER and sizes.dp == 1 and any("_ep_rank_" in path for path in grid.paths.values()):
                sizes = replace(sizes, ep=largest.ep)
            grids[kind] = RankGrid(grid.paths, sizes)
        return grids

    def require_grids(self) -> dict[str, RankGrid]:
        """Return the grids of `find_grids`, which must be complete.

        Raises:
            CorruptCheckpointError: Some files are missing.
        """
        grids = self.find_grids()
        for kind, grid in grids.items():
            grid.check(kind, self.explain_missing(grid.sizes))
        return grids

    def list_checks(self) -> list[Callable[[], object]]:
        return [self.check_optimizer, *super().list_checks()]

    def check_optimizer(self) -> None:
        """Check that the optimizer is in a supported format.

        Raises:
            UnsupportedStateError: It was saved in torch's distributed format.
        """
        if (file := f"{self.subfolder}{OPTIMIZER_FOLDER}/.metadata") in self.file_names:
            raise UnsupportedStateError(
                "the optimizer was saved with use_zero1_dcp, which neuronx-distributed itself cannot load",
                file=file,
                hint="Load the model without it.",
            )

    def read_content(self, hints: LoadHints) -> TagContent:
        if hints.wants_optimizer:
            self.check_optimizer()
        grids = self.require_grids()
        model = (
            group_by_stage(order_adapter_configs(read_trees(self, grids[MODEL_FOLDER], dp=0)))
            if MODEL_FOLDER in grids
            else {}
        )
        mesh = infer_mesh(grids.values())
        hints = self.build_hints(model, mesh, hints)
        optimizers = grids[OPTIMIZER_FOLDER].sizes if OPTIMIZER_FOLDER in grids else None

        def optim() -> dict[RankCoords, RankOptimizer]:
            return {at: parse_optimizer(tree) for at, tree in read_trees(self, grids[OPTIMIZER_FOLDER]).items()}

        content = build_content(self, hints, model, optimizers, optim, mesh)
        content.parts.update(self.read_parts())
        return content

    def find_mismatch(self, name: str, copies: TensorCopies, mesh: Mesh, hint: ArrayHint) -> UnreadableArray | None:
        return find_mixed_adapters(self, copies, mesh, hint) if schema.ADAPTER_PREFIX in name else None

    # Overridable methods for files and metadata outside the folders.

    def build_hints(self, model: Mapping[int, StageModel], mesh: Mesh, hints: LoadHints) -> LoadHints:
        """Return the hints for the arrays: here only the hints of the loading program.

        Args:
            model: Stored models of the ranks, by pipeline stage.
            mesh: Mesh of the ranks that wrote it.
            hints: Hints of the loading program.

        Raises:
            CheckpointError: The checkpoint's metadata about the arrays is damaged, or belongs to another checkpoint.
        """
        return hints

    def read_parts(self) -> dict[str, Any]:
        """Read the parts of the state that have separate files.

        Raises:
            CorruptCheckpointError: One of them is damaged.
        """
        return {
            part: read_plain_file(self, file)
            for part in (schema.SCHEDULER, schema.USER_CONTENT)
            if (file := f"{self.subfolder}{part}.pt") in self.file_names
        }


class NxdFiles(FolderFiles):
    """Rank files of a checkpoint, and the adapter configuration in its root directory.

    Unless `save_lora_config_adapter` is set, the configuration is a file in `lora_save_dir`, and neuronx-distributed
    loads adapters from the tags in that directory.
    """

    def __init__(self, directory: Directory, store: Store) -> None:
        super().__init__(directory)
        self.store = store

    def read_content(self, hints: LoadHints) -> TagContent:
        content = super().read_content(hints)
        model = content.parts.get(schema.MODEL, {})
        has_adapters = any(schema.ADAPTER_PREFIX in name for name in model)
        if has_adapters and schema.LORA_CONFIG not in model and self.store.has(ADAPTER_CONFIG_FILE):
            with annotate_errors(file=ADAPTER_CONFIG_FILE):
                config = parse_adapter_config(self.store.read_start(ADAPTER_CONFIG_FILE, MAX_ADAPTER_CONFIG_BYTES))
            model[schema.LORA_CONFIG] = config
        return content


_ZERO1_FILE_NAME = RankFileName("optim.dp_rank_{dp:02}.tp_rank_{tp:02}")
"""Name of a file that `save_sharded_state_dict` of a ZeRO-1 optimizer writes next to the rank files. It has no pipeline
stage."""


_ZERO1_FILES_PATTERN = "optim.dp_rank_*"
"""Name of these files in errors."""


class LegacyFiles(TensorFiles, OneFilePerRank):
    """Files of a checkpoint in the legacy NxD format, including separate ZeRO-1 optimizer files."""

    def find_grids(self) -> dict[str, RankGrid]:
        grids = super().find_grids()
        if beside := index_by_rank(self.file_names, [_ZERO1_FILE_NAME]):
            own, tp = RankGrid.from_paths(beside), grids[TAG_KIND].sizes.tp
            grids[_ZERO1_FILES_PATTERN] = replace(own, sizes=replace(own.sizes, tp=max(tp, own.sizes.tp)))
        return grids

    def select_optimizers(
        self, stored: Mapping[RankCoords, Mapping[Any, Any]], grid: RankGrid, hints: LoadHints
    ) -> tuple[Mapping[RankCoords, Mapping[Any, Any]], RankGrid]:
        beside = self.find_grids().get(_ZERO1_FILES_PATTERN)
        if stored or beside is None or not hints.wants_optimizer:
            return stored, grid
        if grid.sizes.pp > 1:
            raise CorruptCheckpointError(
                "the names of these optimizer files do not say the pipeline stage, so that the stages wrote over each "
                "other's: the states of all stages but one are lost",
                file=min(beside.paths.values()),
                found=f"{grid.sizes.pp} pipeline stages",
                hint="Load the model without the optimizer. nxd.save_checkpoint saves all of it.",
            )
        beside.check(_ZERO1_FILES_PATTERN, self.explain_missing(beside.sizes))
        return read_trees(self, beside), beside


logger = get_logger(__name__)


def resolve_zero1(to: TargetTopology, manifest: Manifest, *, xser: bool) -> TargetTopology:
    """Return the target of a conversion with `zero1` resolved to True or False.

    Raises:
        UsageError: Master weights would be lost.
    """
    if manifest.unwritten and not xser:  # it loads no model from xser files with master weights
        logger.warning("neuronx-distributed, too, refuses a pt tag that lacks names of its model, unless strict=False")
    # With one dp rank a ZeRO-1 optimizer is not sharded, but only ZeRO-1 files can store its master weights.
    has_masters = schema.MASTER in (get_children((get_children(manifest.skeleton) or {}).get(schema.OPTIMIZER)) or {})
    if has_masters and to.zero1 is False:
        raise UsageError(
            "master weights have a place in ZeRO-1 files only",
            leaf=paths.join(schema.OPTIMIZER, schema.MASTER),
            found="zero1=False",
            hint="Leave zero1=False (--no-zero1) away, or convert to the native layout.",
        )
    return replace(to, zero1=has_zero1_rows(manifest) or has_masters if to.zero1 is None else to.zero1)


def plan_rank_files(planner: RankFilePlanner, *, xser: bool) -> list[FilePlan]:
    """Plan the files that one rank writes.

    Args:
        xser: Store each tensor in a separate file.

    Raises:
        UnsupportedStateError: Something in its state cannot be pickled.
    """
    state, lay = planner.state, partial(plan_separate_files, planner) if xser else planner.plan_shared_file
    plans: list[FilePlan] = []
    if schema.MODEL in state.parts:
        tree = to_dicts_and_lists(state.parts[schema.MODEL])
        plans += lay(FOLDER_FILE_NAMES[MODEL_FOLDER], tree, schema.MODEL)
    if schema.OPTIMIZER in state.parts:
        tree = to_dicts_and_lists(encode_optimizer(state) if state.keyed_by_name else state.parts[schema.OPTIMIZER])
        plans += lay(FOLDER_FILE_NAMES[OPTIMIZER_FOLDER], tree, schema.OPTIMIZER, per_dp=state.zero1)
    for part in (schema.SCHEDULER, schema.USER_CONTENT):
        if part in state.parts:
            plans += planner.plan_common_file(f"{part}.pt", state.parts[part], part)
    return plans
