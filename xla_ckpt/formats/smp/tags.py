"""SMP file names and marker keys: find sets of files and checkpoint directories in a root. Needs no framework.

``smp.save(state, f)`` leaves one file for each model-parallel rank, a *set*: ``{f}_{mp}`` (versions 1.6 and 1.7),
``{f}_{pp}_{tp}`` (documents of 1.9), ``{f}_{pp}_{tp}.pt`` and ``{f}_{pp}_{tp}_{rdp}.pt`` (1.12).
``smp.save_checkpoint(path, tag)`` leaves a directory ``{tag}_partial`` of such sets, and appends its name to the file
``newest`` in the root, oldest first. With ``partial=False`` it leaves two files, ``{tag}`` and ``user_content_{tag}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.formats.base import merge_by_time
from xla_ckpt.formats.rank_files.file_names import RankFileName
from xla_ckpt.formats.rank_files.layout import RankTag
from xla_ckpt.storage.base import Directory, Store, open_without_links
from xla_ckpt.tags.entry import TagEntry

IS_PARTIAL = "_smp_is_partial"
"""Whether a state dict is a part of the whole."""

LOAD_INFO = "_smp_load_info"
"""How the job is described that a part of a model is of."""

ZERO_2D = "_smp_zero2d"
"""Whether sharded data parallelism wrote it."""

PP, TP = "pipeline_parallel_degree", "tensor_parallel_degree"
"""Keys of such a description, and of SMP's configuration: how many ranks the job had."""

_MAX_DEPTH = 3
"""How deep in a dict such marks are looked for."""

STATE_DICT_MARKER_KEYS = frozenset({IS_PARTIAL, LOAD_INFO, ZERO_2D})


def find_job_degrees(tree: Any, depth: int = 0) -> tuple[int, int] | None:
    """(pipeline-parallel, tensor-parallel) ranks of the job of which a file holds the part of one; None if it does not.

    >>> find_job_degrees({"model": {IS_PARTIAL: True, LOAD_INFO: {PP: 2, TP: 1}}})
    (2, 1)
    >>> find_job_degrees({IS_PARTIAL: False}) is None
    True
    """
    if not isinstance(tree, Mapping):
        return None
    info = tree.get(LOAD_INFO)
    if tree.get(IS_PARTIAL) is True and isinstance(info, Mapping):
        pp, tp = info.get(PP, 1), info.get(TP, 1)
        return (pp, tp) if type(pp) is int and type(tp) is int and pp * tp > 1 else None
    below = tree.values() if depth < _MAX_DEPTH else ()
    return next((job for value in below if (job := find_job_degrees(value, depth + 1)) is not None), None)


NEWEST = "newest"
"""The file in the root that lists the directories, oldest first."""

PARTIAL = "_partial"
"""What SMP appends to a tag to get the name of its directory."""

ALL_PARTS = "_*"
"""Behind the name of a set: its parts, even if there is a full file of the same name. SMP itself searches so."""

JOB_CONFIG = "smp_config.pt"
"""Written when all parts are there: the configuration of the job."""

USER_CONTENT_FILE = "user_content.pt"
SCHEDULER_FILE = "scheduler.pt"
"""What this library writes beside them; SMP has no place for it."""

MAX_PICKLE_BYTES = 1 << 20
"""What is looked through of a file of torch.save, whose tensors lie behind its pickle, for a mark in that (bytes)."""

MAX_NEWEST_BYTES = 1 << 20
"""A longer list is not read to its end (bytes)."""

_THREE_PT, _TWO_PT, _THREE, _TWO, _ONE = _FORMS = tuple(
    RankFileName(f"{{set}}_{numbers}")
    for numbers in ("{pp}_{tp}_{dp}.pt", "{pp}_{tp}.pt", "{pp}_{tp}_{dp}", "{pp}_{tp}", "{mp}")
)
"""The names of parts that versions of SMP have written. No version wrote one number with ``.pt``, which is how other
programs number their files."""

_SHARDED_DATA_NAME = RankFileName("{set}_{mp}.pt")
"""But for files of sharded data parallelism in a directory of `save_checkpoint`."""

MODEL_SET = "model"
OPTIMIZER_SETS = ("optimizer", "optimizer_states")
FP16_SET = "fp16_states"
"""What the sets in such a directory are called: the model; the optimizer, the second as SMP writes it now; and what an
optimizer of half precision keeps besides."""

_TEMPORARY_MARK = ".sagemaker-"
"""In the names of files that SageMaker is just copying."""

_TORCH_SAVE_PREFIXES = (b"PK\3\4", b"\x80\2")
"""With which a file of torch.save begins; the second is that of torch before 1.6."""


PartNumbers = tuple[int, ...]
"""The numbers in the name of a part: ``(mp,)``, ``(pp, tp)`` or ``(pp, tp, rdp)``."""

FilesByPattern = dict[RankFileName, dict[PartNumbers, str]]
"""Files by what their names are like, and by the numbers in them."""


@dataclass(frozen=True, slots=True)
class FileSet:
    """The parts of a set, by the form of their names.

    A root in which sets of several versions of SMP lie, or of other names, may have parts of several forms.
    """

    name: str
    """What the names of all parts begin with."""

    by_pattern: FilesByPattern

    @property
    def files(self) -> list[str]:
        """All files."""
        return [file for form in self.by_pattern.values() for file in form.values()]

    @property
    def complete(self) -> bool:
        """Whether there is one form, and no part of it is missing, as far as names tell."""
        return len(self.by_pattern) == 1 and all(map(is_full_grid, self.by_pattern.values()))

    def format_part_name(self, numbers: PartNumbers) -> str:
        """The name of a part, which need not be there."""
        ((form, _),) = self.by_pattern.items()
        return f"{self.name}_{'_'.join(map(str, numbers))}{'.pt' * form.template.endswith('.pt')}"

    def get_parts(self) -> Mapping[PartNumbers, str]:
        """The parts, by their numbers.

        Raises:
            CorruptCheckpointError: There are parts of several forms, so that nobody can tell which are meant.
        """
        if len(self.by_pattern) > 1:
            raise CorruptCheckpointError(
                "parts of several versions of SMP lie under one name: they are of different saves, or of other sets",
                file=self.name,
                expected="names of one form",
                found="; ".join(", ".join(sorted(form.values())[:3]) for form in self.by_pattern.values()),
                hint="Move those that are not meant to another directory.",
            )
        ((_, by_numbers),) = self.by_pattern.items()
        return by_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class SmpTag(RankTag):
    """A directory of `save_checkpoint`, or a set of files that `save` left."""

    directory: str
    """The directory in the root in which its files lie; empty for the root itself."""

    sets: Mapping[str, FileSet]
    """By the part of the state (``model``, ``optimizer_states``...); a set that is named itself has no such name."""

    others: tuple[str, ...] = ()
    """Further files that belong to it."""

    @property
    def files(self) -> tuple[str, ...]:
        """All files, relative to the directory."""
        return tuple(sorted([*(file for file_set in self.sets.values() for file in file_set.files), *self.others]))

    def open_directory(self, store: Store) -> Directory:
        # A set that lies in a root among other things is not locked: nothing of this library's removes its files.
        return open_without_links(store, self.directory) if self.directory else store.open("", lock=False, links=True)

    def to_entry(self) -> TagEntry:
        entry = RankTag.to_entry(self)
        return entry if self.directory else replace(entry, files=self.files)


def is_full_grid(numbers: Iterable[PartNumbers]) -> bool:
    """Whether these are all numbers from 0 on along each axis.

    >>> is_full_grid([(0, 0), (0, 1)]), is_full_grid([(0, 0), (1, 1)]), is_full_grid([(1, 0)])
    (True, False, False)
    """
    distinct = set(numbers)
    count = 1
    for axis in zip(*distinct, strict=True):
        count *= 1 + max(axis)
    return len(distinct) == count


def find_smp_tag(store: Store, tag: str) -> SmpTag | None:
    """The directory, or the set, of this name; None if there is none.

    A file of that name is no set: it is what ``smp.save(..., partial=False)`` wrote. With ``_*`` behind it, the name is
    that of the set beside such a file.
    """
    try:
        if store.is_directory(tag):
            return _find_directory(store, tag)
        if tag.endswith(ALL_PARTS):
            return _find_set(store, tag, tag.removesuffix(ALL_PARTS))
        return None if store.has(tag) else _find_set(store, tag, tag)
    except OSError:
        return None


def list_complete_tags(store: Store, names: Sequence[str]) -> list[SmpTag]:
    """The complete ones among some names, oldest first: directories in the order of `newest`, others by time stamps.

    Raises:
        StorageError: The root cannot be read.
    """
    by_name = {name: tag for name in names if (tag := find_smp_tag(store, name)) is not None and tag.directory}
    # The two files of a full checkpoint whose tag ends with _0 would be a set of one part each.
    there = set(names)
    full = {file for name in names if (beside := get_user_content_name(name)) in there for file in (name, beside)}
    # What a directory of `save_checkpoint` consists of is no set of its own: the directory would be a root of tags.
    prefixes = find_complete_sets(
        n for n in names if n not in full and not group_sets([n]) and not store.is_directory(n)
    )
    by_name |= {tag.tag: tag for prefix in prefixes if (tag := _find_listed_set(store, prefix)) is not None}
    complete = {name: tag for name, tag in by_name.items() if tag.complete}
    ordered = [complete.pop(name) for name in sort_newest_lines(read_newest_lines(store)) if name in complete]
    others = sorted(complete.values(), key=lambda t: (t.time, t.tag))
    return merge_by_time(ordered, others, lambda t: t.time)


def get_written_names(kind: str) -> Sequence[RankFileName]:
    """What the parts of a set are called that are written here: each dp rank has one where its rows are its own."""
    return [RankFileName(f"{kind}_{{pp}}_{{tp}}.pt"), RankFileName(f"{kind}_{{pp}}_{{tp}}_{{dp}}.pt")]


def get_user_content_name(tag: str) -> str:
    """The name of the file in the root that has the user content of a full checkpoint."""
    return f"user_content_{tag}"


def find_user_content(store: Store, tag: str) -> str | None:
    """The file that has the user content of a full checkpoint; None if there is none.

    A file of this name that torch.save did not write is somebody else's; one that is empty, or begins with zeros, was
    cut off.
    """
    name = get_user_content_name(tag)
    if not store.has(name) or store.is_directory(name):
        return None
    return name if _may_be_torch_save(store, name) or not any(store.read_start(name, 4)) else None


def read_newest_lines(store: Store) -> list[str]:
    """The lines of the file `newest`; none if there is no such file."""
    if store.is_directory(NEWEST):
        return []
    try:
        return store.read_start(NEWEST, MAX_NEWEST_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []


def sort_newest_lines(lines: Sequence[str]) -> list[str]:
    """The directories that `newest` lists, oldest first. SMP appends a name again if its tag is saved again.

    >>> sort_newest_lines(["a_partial", "b_partial", "a_partial", ""])
    ['b_partial', 'a_partial']
    """
    last = {line.strip(): number for number, line in enumerate(lines) if line.strip()}
    return sorted(last, key=lambda name: last[name])


def find_complete_sets(files: Iterable[str]) -> list[str]:
    """The names of the complete sets among some files. A file is in one of them only.

    ``step_0_0.pt`` may be a part of ``step`` as well as of ``step_0``. The form that SMP writes without being asked
    counts first, and a set of one number only if it has no ``.pt``: others number their files so, too.

    >>> find_complete_sets(["a.pt_0_0", "a.pt_0_1", "b_10_0_0.pt", "b_20_0_0.pt", "c_0_1.pt", "d_0.pt", "e.pt_0"])
    ['a.pt', 'b_10', 'b_20', 'e.pt']
    """
    left = list(files)
    prefixes: list[str] = []
    for form in (_TWO_PT, _TWO, _THREE_PT, _ONE):
        sets: dict[str, dict[PartNumbers, str]] = {}
        for file in left:
            if (part := parse_part_name(file, form)) is not None:
                sets.setdefault(part[0], {})[part[1]] = file
        for prefix, numbers in sets.items():
            if is_full_grid(numbers) and prefix not in prefixes:
                prefixes.append(prefix)
                left = [file for file in left if file not in numbers.values()]
    return sorted(prefixes)


def parse_part_name(file: str, pattern: RankFileName) -> tuple[str, PartNumbers] | None:
    """(name of the set, numbers) of a part with a name of this form; None if it is none.

    >>> form = RankFileName("{set}_{pp}_{tp}.pt")
    >>> [parse_part_name(name, form) for name in ("a.pt_0_12.pt", "a.pt_0_1.pt.tmp", ".a_0_0.pt")]
    [('a.pt', (0, 12)), None, None]
    """
    return None if file.startswith(".") or _TEMPORARY_MARK in file else pattern.parse_set_part(file)


def group_sets(files: Iterable[str]) -> dict[str, FileSet]:
    """The sets of a directory of `save_checkpoint`, by the part of the state."""
    sets: dict[str, FilesByPattern] = {}
    for file in files:
        for form in (_THREE_PT, _TWO_PT, _SHARDED_DATA_NAME):
            part = form.parse_set_part(file)
            if part is not None and part[0] in (MODEL_SET, *OPTIMIZER_SETS, FP16_SET):
                sets.setdefault(part[0], {}).setdefault(form, {})[part[1]] = file
    return {kind: FileSet(kind, forms) for kind, forms in sets.items()}


def _find_set(store: Store, tag: str, prefix: str) -> SmpTag | None:
    forms: FilesByPattern = {}
    for name in store.list_names():
        if not name.startswith(f"{prefix}_") or store.is_directory(name):
            continue
        for form in _FORMS:
            part = parse_part_name(name, form)
            if part is not None and part[0] == prefix:
                forms.setdefault(form, {})[part[1]] = name
                break
    if len(forms) > 1:
        # Parts of other sets, whose names begin with this one and a number: no part 0 of the first axis is among them.
        forms = {form: of_form for form, of_form in forms.items() if any(n[0] == 0 for n in of_form)} or forms
    files = FileSet(prefix, forms)
    if not any(_may_be_torch_save(store, file) for file in files.files):
        return None
    return SmpTag(
        tag=tag, directory="", sets={"": files}, complete=files.complete, time=_get_newest_time(store, "", files.files)
    )


def _may_be_torch_save(store: Store, file: str) -> bool:
    """Whether torch.save may have written a file. One that cannot be read may be, and its opening will tell."""
    try:
        return store.read_start(file, 4).startswith(_TORCH_SAVE_PREFIXES)
    except OSError:
        return True


def _find_listed_set(store: Store, prefix: str) -> SmpTag | None:
    """A set that a root lists. One that lies beside a full file of its name is called with ``_*``."""
    tag = find_smp_tag(store, f"{prefix}{ALL_PARTS}" if store.has(prefix) else prefix)
    return None if tag is None or _is_full_checkpoint_set(store, tag) else tag


def _is_full_checkpoint_set(store: Store, tag: SmpTag) -> bool:
    """Whether the files of a set are full checkpoints, whose tags end with numbers: ``step_0``, ``step_1``, ...

    Names with one number are those of SMP 1.6 and 1.7, which marked each part of a model. With the ending of a file
    before the number a name is that of a part in any case.
    """
    ((form, parts), *_) = tag.sets[""].by_pattern.items()
    if form is not _ONE or "." in tag.tag:
        return False
    try:
        return IS_PARTIAL.encode() not in store.read_start(min(parts.items())[1], MAX_PICKLE_BYTES)
    except OSError:
        return False  # its opening will tell


def _find_directory(store: Store, tag: str) -> SmpTag | None:
    names = store.list_names(tag)
    sets = group_sets(names)
    if not _is_tag_directory(tag, sets):
        return None
    others = tuple(name for name in (JOB_CONFIG, USER_CONTENT_FILE, SCHEDULER_FILE) if name in names)
    files = [*(file for file_set in sets.values() for file in file_set.files), *others]
    ended = JOB_CONFIG in others or tag in sort_newest_lines(read_newest_lines(store))
    if not ended and not tag.endswith(PARTIAL):
        ended = all(file_set.complete for file_set in sets.values())  # a program made it with calls of its own
    return SmpTag(
        tag=tag, directory=tag, sets=sets, others=others, complete=ended, time=_get_newest_time(store, f"{tag}/", files)
    )


def _is_tag_directory(tag: str, sets: Mapping[str, FileSet]) -> bool:
    if tag.endswith(PARTIAL):
        return bool(sets)
    known = [file_set for kind, file_set in sets.items() if kind in (MODEL_SET, OPTIMIZER_SETS[-1])]
    return any(form is not _SHARDED_DATA_NAME for file_set in known for form in file_set.by_pattern)


def _get_newest_time(store: Store, prefix: str, files: Sequence[str]) -> int:
    """The newest time stamp of some files."""
    return max((store.get_modified_time(f"{prefix}{file}") or 0 for file in files), default=0)
