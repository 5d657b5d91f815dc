"""Converting: a tag of any layout and topology into one of any other, without a job and within bounded memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.api.export import MAX_SHARD_BYTES, export
from xla_ckpt.api.paths import PathLike, directory_at
from xla_ckpt.api.progress import Progress
from xla_ckpt.api.tags import chosen_tag
from xla_ckpt.engine.read import READERS
from xla_ckpt.engine.save import new_head
from xla_ckpt.engine.stream import MAX_MEMORY, stream_files
from xla_ckpt.engine.tag_reader import MANIFEST, TagReader
from xla_ckpt.engine.write import write_objects
from xla_ckpt.errors import CheckpointError, IncompatibleCheckpointError, StorageError, UsageError
from xla_ckpt.job.current import as_mesh
from xla_ckpt.layouts.nxd.plan import PARTS, RankPlan
from xla_ckpt.layouts.nxd.target import Target, deals_rows
from xla_ckpt.layouts.registry import FORMATS, OTHER_NAMES
from xla_ckpt.layouts.tags_of_all import opened, tag_names
from xla_ckpt.layouts.writing import marked
from xla_ckpt.manifest import manifest_json
from xla_ckpt.manifest.records import ArrayRecord, Manifest
from xla_ckpt.plan.leaf import Leaf, leaf_of
from xla_ckpt.plan.merge import Record, merge
from xla_ckpt.plan.place import parameter_of, place, rule_for, sharding_of
from xla_ckpt.plan.save_plan import FilePlan, SavePlan, plan_save
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.rules import Parsed, Rules, idle, parse_rules
from xla_ckpt.sharding.sharding import Sharding
from xla_ckpt.state import pickles
from xla_ckpt.storage.local import LocalDirectory, write_small
from xla_ckpt.tags.lazy import save_tag
from xla_ckpt.tags.names import NXD_MARKS, check_tag
from xla_ckpt.tree.skeleton import array_paths, objects_in

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion wrote."""

    path: str
    """Root directory; for ``safetensors`` the directory of the files."""

    tag: str
    layout: str
    mesh: str
    files: int
    nbytes: int
    """Bytes of arrays, replicas and padding included."""

    seconds: float


def convert(
    source: PathLike,
    destination: PathLike,
    tag: str | None = None,
    *,
    to: str = "native",
    mesh: Mesh | str | None = None,
    as_tag: str | None = None,
    model: Any = None,
    optimizer: Any = None,
    shardings: Rules | None = None,
    pipeline_cuts: Sequence[str] = (),
    zero1: bool | None = None,
    max_memory: int = MAX_MEMORY,
    num_workers: int = READERS,
    trust_pickle: bool = False,
    progress: bool | None = None,
) -> ConvertReport:
    """Write a tag anew, in another layout or for another topology. The source stays as it is.

    Every byte is verified on the way. The new tag appears complete or not at all.

    Args:
        source: Root directory of the tag: one of ours, or neuronx-distributed's.
        destination: Root directory of the new tag; for ``safetensors`` a directory that does not exist yet.
        tag: Which checkpoint; None takes the newest.
        to: ``"native"``; ``"xser"`` or ``"pt"`` (``"nxd"`` is the same), neuronx-distributed's layouts;
            ``"safetensors"``, the model alone, as `export_hf` writes it.
        mesh: The topology that the files are for (``"dp=2,tp=4"``); by default one rank, whatever the old one was. The
            native layout loads on any; there it only says into how many files the bytes are dealt out.
        as_tag: Name of the new tag; by default that of the old one.
        model: What neuronx-distributed's own tags do not say is taken from here: names, shapes and splits of the
            parameters. On the device ``meta`` it takes no memory. Our own tags do not need it.
        optimizer: An optimizer over its parameters: their order, which is all that names them there.
        shardings: Rules as in `save_checkpoint`, found in leaf paths: how the new job splits arrays, where it is not
            as the old one did; for neuronx-distributed's own tags also how the old one did.
        pipeline_cuts: For several pipeline stages in neuronx-distributed's layouts: the modules after which a stage
            ends, in order (``["model.layers.15"]``).
        zero1: Whether the optimizer's states are dealt out over dp in those layouts; None does as the old job did.
        max_memory: Bytes of array data in memory at a time.
        num_workers: Threads that read, at most.
        trust_pickle: Load pickled objects where they have to be written anew, which can run any code.
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal.

    Raises:
        NoCheckpointError: There is no such tag.
        CorruptCheckpointError: It is damaged. Nothing was written.
        IncompatibleCheckpointError: It cannot be told how an array was or will be split.
        UntrustedObjectError: It holds pickled objects, and `trust_pickle` is False.
        UsageError: An argument makes no sense, or the new tag would replace the old one.
        StorageError: The destination cannot be written.

    Example:
        ``convert("nxd_run", "run", to="native", model=model, optimizer=optimizer)``
    """
    began = time.monotonic()
    root, target = directory_at(source), directory_at(destination)
    if to not in FORMATS:
        raise UsageError("there is no such layout", expected=f"one of {', '.join(FORMATS)}", found=repr(to))
    to = OTHER_NAMES.get(to, to)
    if max_memory < 1:
        raise UsageError("max_memory is a number of bytes", found=max_memory)
    over = as_mesh(mesh) or Mesh()
    rules = parse_rules(shardings)
    tag = chosen_tag(root, tag)
    with opened(root, tag, rules, model, optimizer, part="model" if to == "safetensors" else "") as reader:
        if to == "safetensors":
            made = export(reader, target, "model", MAX_SHARD_BYTES, max_memory, num_workers, progress)
            return ConvertReport(target, tag, to, str(over), len(made.files), made.nbytes, time.monotonic() - began)
        called = tag if as_tag is None else as_tag
        check_tag(called, target)
        if os.path.realpath(os.path.join(root, tag)) == os.path.realpath(os.path.join(target, called)):
            raise UsageError(
                "the new tag would replace the old one", path=target, tag=called, hint="Pass as_tag= (--as)."
            )
        if called in tag_names(target):
            raise UsageError(
                "there is a tag of this name already", path=target, tag=called,
                hint="Pass as_tag= (--as), or remove it first.",
            )  # fmt: skip
        try:
            work = _Conversion(reader, called, to, over, rules, trust_pickle)
            plans = work.plans(pipeline_cuts, zero1)
            total = sum(f.data_bytes for files in plans for f in files)
            with Progress(f"convert {tag}", total, progress) as bar:

                def write(directory: LocalDirectory, sequence: int) -> None:
                    work.write(plans, directory, sequence, max_memory, num_workers, bar)

                save_tag(target, called, write, pinned=False, num_kept=None)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise StorageError.of(error, "converting", path=target, tag=called) from error
        except CheckpointError as error:
            error.at(path=root, tag=tag)
            raise
    return ConvertReport(target, called, to, str(over), sum(map(len, plans)), total, time.monotonic() - began)


def _check_names(manifest: Manifest, leaves: Iterable[str]) -> None:
    """A rule of the caller's may say of nameless states what is not so, and shapes of theirs tell nothing."""
    old = Mesh.parse(manifest.mesh or "")
    owners = {leaf: parameter_of(leaf) for leaf in leaves} if old.tp * old.ep > 1 else {}
    leaf = next((leaf for leaf, owner in owners.items() if owner is not None and owner not in owners), None)
    if leaf is not None:
        raise IncompatibleCheckpointError(
            "the stored optimizer numbers its parameters: it cannot be told how its states were split over the ranks",
            leaf=leaf, hint="Give the model and its optimizer (model=, optimizer=; --like on the command line).",
        )  # fmt: skip


class _Conversion:
    """From one open tag to the files of another."""

    def __init__(self, reader: TagReader, tag: str, to: str, mesh: Mesh, rules: Parsed, trust: bool) -> None:
        self.reader = reader
        self.manifest = reader.manifest
        self.tag, self.to, self.mesh, self.rules, self.trust = tag, to, mesh, rules, trust
        held = self.manifest.skeleton if isinstance(self.manifest.skeleton, dict) else {}
        self.target: Target | None = None
        self.theirs = {part: held[part] for part in PARTS if part in held} if to != "native" else {}
        """Members of the state that go into neuronx-distributed's files."""
        leaves = array_paths(self.manifest.skeleton, "")
        if reader.foreign_object is not None:
            _check_names(self.manifest, leaves)
        for path in leaves:
            if self.manifest.array(path) is None:
                raise CheckpointError("the skeleton names an array that is not stored", leaf=path)
        for message in idle(rules, leaves):
            logger.warning("%s", message)
        self.native = {
            path: self._split(path) for path in self.manifest.arrays if path.split("/")[0] not in self.theirs
        }
        """How arrays are split that go into files of the native layout."""

    def _split(self, path: str) -> Sharding:
        try:
            return sharding_of(path, self.manifest, self.rules)
        except ValueError as error:
            raise self._unfit(path, error) from error

    def _unfit(self, path: str, error: ValueError) -> IncompatibleCheckpointError:
        shape = self.manifest.arrays[path].shape
        return IncompatibleCheckpointError(
            f"it cannot be split over {self.mesh}: {error}", leaf=path, found=list(shape)
        )

    def plans(self, cuts: Sequence[str], zero1: bool | None) -> list[tuple[FilePlan, ...]]:
        """The files of each rank."""
        ranks = range(self.mesh.size)
        native = [plan_save(self._leaves(rank), rank, self.mesh.size).files for rank in ranks]
        if self.to == "native":
            return native
        if not self.theirs:
            raise UsageError(f"the tag holds nothing that {self.to} has a place for", expected=", ".join(PARTS))
        trees = {part: self._tree(skeleton, part) for part, skeleton in self.theirs.items()}
        dealt = deals_rows(self.manifest) if zero1 is None else zero1
        target = self.target = Target(self.manifest, trees, self.mesh, self.rules, cuts, dealt)
        for message in target.doubts():
            logger.warning("%s", message)
        xser = self.to == "xser"
        whole = [SavePlan(RankPlan(self.mesh, r, xser).files(target.state(r))) for r in ranks]
        return [(*native[r], *whole[r].minus(target.of_earlier_stages(r)).files) for r in ranks]

    def _leaves(self, rank: int) -> list[Leaf]:
        """What a rank writes in the native layout, which knows no stages: the ranks of the first one write all."""
        leaves = []
        for path, sharding in self.native.items() if self.mesh.coordinates(rank)["pp"] == 0 else ():
            record = self.manifest.arrays[path]
            try:
                local = place(path, sharding, record.shape, self.mesh, rank)
            except ValueError as error:
                raise self._unfit(path, error) from error
            leaves.append(leaf_of(path, record.dtype, local))
        return leaves

    def _spec(self, leaf: str, record: ArrayRecord) -> tuple[object, ...] | None:
        """How an array of the new tag is split."""
        if self.target is not None and leaf not in self.native:
            return self.target.spec(leaf)
        return record.spec if rule_for(leaf, self.rules) is None else self.native[leaf].spec

    def _tree(self, skeleton: Any, part: str) -> Any:
        def unpickled(index: int, leaf: str) -> Any:
            if self.reader.foreign_object is not None:
                return self.reader.foreign_object(index, leaf, self.trust)
            return pickles.load(self.reader.pickled(index), leaf, trust=self.trust)

        return marked(skeleton, part, unpickled, trust=self.trust)

    def objects(self) -> list[bytes]:
        """The pickled objects, in the order of their numbers."""
        if self.reader.foreign_object is None:
            return [self.reader.pickled(i) for i in range(len(self.manifest.objects))]
        foreign, found = self.reader.foreign_object, objects_in(self.manifest.skeleton)
        return [pickles.dump(foreign(i, found[i], self.trust), found[i]) for i in sorted(found)]

    def write(
        self, plans: Sequence[tuple[FilePlan, ...]], directory: LocalDirectory, sequence: int, max_memory: int,
        workers: int, progress: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Fill a directory: all files, then the manifest, then the marks."""
        objects = self.objects()
        files = [file for of_rank in plans for file in of_rank]
        written = stream_files(self.reader, directory, files, max_memory=max_memory, workers=workers, progress=progress)
        records = [*written.files, *write_objects(directory, objects, 0, self.mesh.size)]
        numbers = range(len(written.files), len(records))
        arrays = {leaf: (r.dtype.name, r.shape, self._spec(leaf, r)) for leaf, r in self.manifest.arrays.items()}
        record = Record(
            0, tuple(records), written.shards, arrays, self.manifest.aliases, self.manifest.skeleton, tuple(numbers)
        )
        head = new_head(self.tag, sequence, pinned=False)
        manifest = merge([record], self.mesh).manifest(head, self.mesh, self.mesh.size)
        write_small(directory, MANIFEST, manifest_json.dump(manifest))
        directory.sync()
        for name, data in NXD_MARKS.items() if self.to != "native" else ():
            write_small(directory, name, data)
        directory.sync()
