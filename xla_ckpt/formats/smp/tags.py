"""Find SMP sets of files and checkpoint directories in a root, by file names and marker keys. Needs no framework.

``smp.save(state, f)`` writes one file for each model-parallel rank, a *set*: ``{f}_{mp}`` (versions 1.6 and 1.7),
``{f}_{pp}_{tp}`` (documented for 1.9), ``{f}_{pp}_{tp}.pt`` and ``{f}_{pp}_{tp}_{rdp}.pt`` (1.12).
``smp.save_checkpoint(path, tag)`` writes a directory ``{tag}_partial`` of such sets, and appends its name to the file
``newest`` in the root, oldest first. With ``partial=False`` it writes two files, ``{tag}`` and ``user_content_{tag}``.
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
"""Key of the flag that a state dict is a part of the whole."""

LOAD_INFO = "_smp_load_info"
"""Key of the description of the job that wrote a part of a model."""

ZERO_2D = "_smp_zero2d"
"""Key of the flag that sharded data parallelism wrote the file."""

PP, TP = "pipeline_parallel_degree", "tensor_parallel_degree"
"""Keys of the numbers of ranks in this description, and in the SMP configuration."""

_MAX_DEPTH = 3
"""Maximum depth of a dict in which marker keys are searched for."""

STATE_DICT_MARKER_KEYS = frozenset({IS_PARTIAL, LOAD_INFO, ZERO_2D})


def find_job_degrees(tree: Any, depth: int = 0) -> tuple[int, int] | None:
    """Return the numbers of (pipeline-parallel, tensor-parallel) ranks of the job whose part is in a file.

    None if the file is not a part of several.

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
"""Name of the file in the root that lists the directories, oldest first."""

PARTIAL = "_partial"
"""Suffix that SMP appends to a tag for the name of its directory."""

ALL_PARTS = "_*"
"""Suffix of a set's name that selects its parts, even if a full file has the same name. SMP uses the same glob."""

JOB_CONFIG = "smp_config.pt"
"""Name of the file with the configuration of the job, written after all parts."""

USER_CONTENT_FILE = "user_content.pt"
SCHEDULER_FILE = "scheduler.pt"
"""Names of further files that this library writes; SMP has no equivalent."""

MAX_PICKLE_BYTES = 1 << 20
"""Number of bytes of a torch.save file that are searched for a marker key. The pickle precedes the tensors."""

MAX_NEWEST_BYTES = 1 << 20
"""Maximum number of bytes that are read of the list."""

_THREE_PT, _TWO_PT, _THREE, _TWO, _ONE = _FORMS = tuple(
    RankFileName(f"{{set}}_{numbers}")
    for numbers in ("{pp}_{tp}_{dp}.pt", "{pp}_{tp}.pt", "{pp}_{tp}_{dp}", "{pp}_{tp}", "{mp}")
)
"""Names of parts written by versions of SMP. No version wrote one number with ``.pt``, which other programs use to
number their files."""

_SHARDED_DATA_NAME = RankFileName("{set}_{mp}.pt")
"""Name of a sharded data parallelism file in a directory of `save_checkpoint`, an exception from the forms above."""

MODEL_SET = "model"
OPTIMIZER_SETS = ("optimizer", "optimizer_states")
FP16_SET = "fp16_states"
"""Names of the sets in such a directory: the model; the optimizer (the second is the current SMP name); and other state
of a half-precision optimizer."""

_TEMPORARY_MARK = ".sagemaker-"
"""Part of the names of files that SageMaker is copying."""

_TORCH_SAVE_PREFIXES = (b"PK\3\4", b"\x80\2")
"""First bytes of a torch.save file; the second is the prefix of torch before 1.6."""


PartNumbers = tuple[int, ...]
"""Numbers in the name of a part: ``(mp,)``, ``(pp, tp)`` or ``(pp, tp, rdp)``."""

FilesByPattern = dict[RankFileName, dict[PartNumbers, str]]
"""Files by the pattern of their names, and by the numbers in them."""


@dataclass(frozen=True, slots=True)
class FileSet:
    """Parts of a set, by the form of their names.

    A root with sets from several versions of SMP, or with similar names, may have parts of several forms.
    """

    name: str
    """Common prefix of the names of all parts."""

    by_pattern: FilesByPattern

    @property
    def files(self) -> list[str]:
        """All files."""
        return [file for form in self.by_pattern.values() for file in form.values()]

    @property
    def complete(self) -> bool:
        """True if all names have one form, and no part is missing, as far as the names show."""
        return len(self.by_pattern) == 1 and all(map(is_full_grid, self.by_pattern.values()))

    def format_part_name(self, numbers: PartNumbers) -> str:
        """Return the name of a part, which may not exist."""
        ((form, _),) = self.by_pattern.items()
        return f"{self.name}_{'_'.join(map(str, numbers))}{'.pt' * form.template.endswith('.pt')}"

    def get_parts(self) -> Mapping[PartNumbers, str]:
        """Return the parts, by their numbers.

        Raises:
            CorruptCheckpointError: There are parts of several forms, and the choice is ambiguous.
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
    """A directory written by `save_checkpoint`, or a set of files written by `save`."""

    directory: str
    """Directory of its files in the root; empty for the root itself."""

    sets: Mapping[str, FileSet]
    """Sets by part of the state (``model``, ``optimizer_states``...). The key is empty if the set itself is the tag."""

    others: tuple[str, ...] = ()
    """Further files of the tag."""

    @property
    def files(self) -> tuple[str, ...]:
        """All files, relative to the directory."""
        return tuple(sorted([*(file for file_set in self.sets.values() for file in file_set.files), *self.others]))

    def open_directory(self, store: Store) -> Directory:
        # A set in a root with other files is not locked: this library never removes its files.
        return open_without_links(store, self.directory) if self.directory else store.open("", lock=False, links=True)

    def to_entry(self) -> TagEntry:
        entry = RankTag.to_entry(self)
        return entry if self.directory else replace(entry, files=self.files)


def is_full_grid(numbers: Iterable[PartNumbers]) -> bool:
    """Return True if these are all numbers from 0 along each axis.

    >>> is_full_grid([(0, 0), (0, 1)]), is_full_grid([(0, 0), (1, 1)]), is_full_grid([(1, 0)])
    (True, False, False)
    """
    distinct = set(numbers)
    count = 1
    for axis in zip(*distinct, strict=True):
        count *= 1 + max(axis)
    return len(distinct) == count


def find_smp_tag(store: Store, tag: str) -> SmpTag | None:
    """Return the directory, or the set, of this name; None if neither exists.

    A file of that name is not a set, but the result of ``smp.save(..., partial=False)``. With the suffix ``_*`` the
    name refers to the set next to such a file.
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
    """Return the complete tags among some names, oldest first: directories in the order of `newest`, others by time.

    Raises:
        StorageError: The root cannot be read.
    """
    by_name = {name: tag for name in names if (tag := find_smp_tag(store, name)) is not None and tag.directory}
    # The two files of a full checkpoint whose tag ends with _0 would look like a set of one part each.
    there = set(names)
    full = {file for name in names if (beside := get_user_content_name(name)) in there for file in (name, beside)}
    # The files in a directory written by `save_checkpoint` are not separate sets: otherwise it would count as a
    # root of tags.
    prefixes = find_complete_sets(
        n for n in names if n not in full and not group_sets([n]) and not store.is_directory(n)
    )
    by_name |= {tag.tag: tag for prefix in prefixes if (tag := _find_listed_set(store, prefix)) is not None}
    complete = {name: tag for name, tag in by_name.items() if tag.complete}
    ordered = [complete.pop(name) for name in sort_newest_lines(read_newest_lines(store)) if name in complete]
    others = sorted(complete.values(), key=lambda t: (t.time, t.tag))
    return merge_by_time(ordered, others, lambda t: t.time)


def get_written_names(kind: str) -> Sequence[RankFileName]:
    """Return the names of the parts of a written set: with ZeRO-1 each dp rank has one."""
    return [RankFileName(f"{kind}_{{pp}}_{{tp}}.pt"), RankFileName(f"{kind}_{{pp}}_{{tp}}_{{dp}}.pt")]


def get_user_content_name(tag: str) -> str:
    """Return the name of the file in the root that contains the user content of a full checkpoint."""
    return f"user_content_{tag}"


def find_user_content(store: Store, tag: str) -> str | None:
    """Return the file that contains the user content of a full checkpoint; None if it does not exist.

    A file of this name that torch.save did not write belongs to another program. An empty file, or one that begins with
    zeros, was truncated.
    """
    name = get_user_content_name(tag)
    if not store.has(name) or store.is_directory(name):
        return None
    return name if _may_be_torch_save(store, name) or not any(store.read_start(name, 4)) else None


def read_newest_lines(store: Store) -> list[str]:
    """Return the lines of the file `newest`; empty if it does not exist."""
    if store.is_directory(NEWEST):
        return []
    try:
        return store.read_start(NEWEST, MAX_NEWEST_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []


def sort_newest_lines(lines: Sequence[str]) -> list[str]:
    """Return the directories listed in `newest`, oldest first. SMP appends a name again if its tag is saved again.

    >>> sort_newest_lines(["a_partial", "b_partial", "a_partial", ""])
    ['b_partial', 'a_partial']
    """
    last = {line.strip(): number for number, line in enumerate(lines) if line.strip()}
    return sorted(last, key=lambda name: last[name])


def find_complete_sets(files: Iterable[str]) -> list[str]:
    """Return the names of the complete sets among some files. A file belongs to only one of them.

    ``step_0_0.pt`` may be a part of ``step`` or of ``step_0``. SMP's default form takes precedence. A set with one
    number is accepted only without ``.pt``, because other programs number their files that way.

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
    """Return (name of the set, numbers) of a part with a name of this form; None if it does not match.

    >>> form = RankFileName("{set}_{pp}_{tp}.pt")
    >>> [parse_part_name(name, form) for name in ("a.pt_0_12.pt", "a.pt_0_1.pt.tmp", ".a_0_0.pt")]
    [('a.pt', (0, 12)), None, None]
    """
    return None if file.startswith(".") or _TEMPORARY_MARK in file else pattern.parse_set_part(file)


def group_sets(files: Iterable[str]) -> dict[str, FileSet]:
    """Group the files of a directory written by `save_checkpoint` into sets, by the part of the state."""
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
        # Exclude parts of other sets, whose names begin with this name and a number: they have no part 0 on the first
        # axis.
        forms = {form: of_form for form, of_form in forms.items() if any(n[0] == 0 for n in of_form)} or forms
    files = FileSet(prefix, forms)
    if not any(_may_be_torch_save(store, file) for file in files.files):
        return None
    return SmpTag(
        tag=tag, directory="", sets={"": files}, complete=files.complete, time=_get_newest_time(store, "", files.files)
    )


def _may_be_torch_save(store: Store, file: str) -> bool:
    """Return True if torch.save may have written a file, or if it cannot be read: opening it raises the error."""
    try:
        return store.read_start(file, 4).startswith(_TORCH_SAVE_PREFIXES)
    except OSError:
        return True


def _find_listed_set(store: Store, prefix: str) -> SmpTag | None:
    """Return a set for the listing of a root. If a full file has its name, it is listed with the suffix ``_*``."""
    tag = find_smp_tag(store, f"{prefix}{ALL_PARTS}" if store.has(prefix) else prefix)
    return None if tag is None or _is_full_checkpoint_set(store, tag) else tag


def _is_full_checkpoint_set(store: Store, tag: SmpTag) -> bool:
    """Return True if the files of a set are full checkpoints, whose tags end with numbers: ``step_0``, ``step_1``, ...

    SMP 1.6 and 1.7 wrote names with one number, and marked each part of a model. A name with a file extension before
    the number is always a part.
    """
    ((form, parts), *_) = tag.sets[""].by_pattern.items()
    if form is not _ONE or "." in tag.tag:
        return False
    try:
        return IS_PARTIAL.encode() not in store.read_start(min(parts.items())[1], MAX_PICKLE_BYTES)
    except OSError:
        return False  # opening it raises the error


def _find_directory(store: Store, tag: str) -> SmpTag | None:
    names = store.list_names(tag)
    sets = group_sets(names)
    if not _is_tag_directory(tag, sets):
        return None
    others = tuple(name for name in (JOB_CONFIG, USER_CONTENT_FILE, SCHEDULER_FILE) if name in names)
    files = [*(file for file_set in sets.values() for file in file_set.files), *others]
    ended = JOB_CONFIG in others or tag in sort_newest_lines(read_newest_lines(store))
    if not ended and not tag.endswith(PARTIAL):
        ended = all(file_set.complete for file_set in sets.values())  # a program wrote it with its own calls
    return SmpTag(
        tag=tag, directory=tag, sets=sets, others=others, complete=ended, time=_get_newest_time(store, f"{tag}/", files)
    )


def _is_tag_directory(tag: str, sets: Mapping[str, FileSet]) -> bool:
    if tag.endswith(PARTIAL):
        return bool(sets)
    known = [file_set for kind, file_set in sets.items() if kind in (MODEL_SET, OPTIMIZER_SETS[-1])]
    return any(form is not _SHARDED_DATA_NAME for file_set in known for form in file_set.by_pattern)


def _get_newest_time(store: Store, prefix: str, files: Sequence[str]) -> int:
    """Return the newest modification time of some files in ns."""
    return max((store.get_modified_time(f"{prefix}{file}") or 0 for file in files), default=0)
