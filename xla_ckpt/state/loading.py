"""One part of a stored state, on its way back into a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.registry import (
    array_instead,
    array_kind,
    check_memory,
    is_spec,
    making_new,
    new_array,
    target_of_spec,
)
from xla_ckpt.arrays.torch_objects import is_torch_tensor
from xla_ckpt.engine.cast import can_cast, cast
from xla_ckpt.engine.target import Target
from xla_ckpt.errors import CheckpointError, naming
from xla_ckpt.lightweight import lightweight
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.forms import ArrayForm
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.sharding.local_array import LocalArray, whole
from xla_ckpt.sharding.sections import has_sections
from xla_ckpt.state.attributes import is_declared
from xla_ckpt.state.handover import Handover
from xla_ckpt.state.problems import Problem
from xla_ckpt.state.shardings import StateShardings
from xla_ckpt.state.values import CODEC, checked_members, parts_of_pattern
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.flatten import flatten
from xla_ckpt.tree.skeleton import Make, Weave, array_paths, children, is_array, is_object, part_at
from xla_ckpt.tree.unflatten import Resolve, Unflattener


@lightweight()
class ArrayAt:
    """Stands for an array that has not been read yet."""

    path: str
    kind: str


@dataclass(frozen=True, slots=True)
class Stored:
    """What a tag holds under one path."""

    manifest: Manifest
    prefix: str
    """Leaf path of the part: ``model``, ``optimizer``, ``extras/rng``."""

    skeleton: Any
    read_object: Callable[[int, str], Any]
    resolve: Resolve
    shardings: StateShardings = field(default_factory=StateShardings)
    """Where the arrays of the program lie."""

    cast: bool = False
    """Whether floating-point values become those of the type that the program has."""

    strict: bool = True
    """Whether the load fails where anything does not fit."""

    def is_same(self, path: str, other: str) -> bool:
        """Whether two leaf paths are names of one stored array."""
        aliases = self.manifest.aliases
        return aliases.get(path, path) == aliases.get(other, other)

    def has_shape(self, key: str, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape is stored under a key of the part."""
        path = paths.join(self.prefix, paths.escape(key))
        form = self.manifest.arrays.form_at(self.manifest.aliases.get(path, path))
        return form is not None and form.shape == shape

    def form(self, path: str) -> ArrayForm:
        """The form of an array leaf that the skeleton names.

        Raises:
            IncompatibleCheckpointError: There is none.
        """
        form = self.manifest.arrays.form_at(self.manifest.aliases.get(path, path))
        return self.manifest.required(path).form if form is None else form

    def build(self, array: Callable[[str, str], Any] = ArrayAt) -> Any:
        """The part as a tree; arrays are made by `array` from (leaf path, kind).

        As long as they have not been read, values that consist of several are their parts.

        Raises:
            IncompatibleCheckpointError: A class that it takes is gone, or has changed.
            UntrustedObjectError: It takes what is not loaded without trust.
        """
        return self._unflattener(array).build(self.skeleton, self.prefix)

    def metadata_at(self, path: str) -> Mapping[str, Mapping[str, Any]] | None:
        """Return the metadata of the modules whose state dict is stored at a leaf path; None if nothing says them."""
        return self._unflattener(ArrayAt).metadata_at(path) if path in self.manifest.module_metadata else None

    def _unflattener(self, array: Callable[[str, str], Any]) -> Unflattener:
        return Unflattener(
            array=array,
            codec=CODEC,
            object=self.read_object,
            resolve=self.resolve,
            compose=(lambda parts: checked_members(parts, self.resolve)) if array is ArrayAt else None,
            module_metadata=self.manifest.module_metadata,
        )

    def part(self, skeleton: Any, path: str) -> Stored:
        """A part of this part, given its skeleton and full leaf path."""
        return replace(self, prefix=path, skeleton=skeleton)

    def into(self, path: str, value: Any, *, owned: bool) -> Target:
        """A target that overwrites an array of the program.

        Raises:
            UsageError: It is on the meta device, or has elements that share memory, or is read-only.
        """
        check_memory(value, path)
        adapter = self.shardings.adapters.require(value, path)
        try:  # `naming` would take a quarter of the time of many small arrays
            return adapter.into(value, self._local(path, value, adapter), owned=owned)
        except CheckpointError as error:
            error.at(leaf=path)
            raise

    def over_whole(self, values: Mapping[str, Any], *, owned: bool) -> dict[str, Target]:
        """The targets, by leaf path, that overwrite those of some arrays that need no closer look.

        They are dense tensors of the stored type and shape, whole on this rank, each of them under one name: most
        arrays of most loads.
        """
        arrays, aliases, adapters = self.manifest.arrays, self.manifest.aliases, self.shardings.adapters
        if not self.shardings.unsplit:
            return {}
        sectioned = [any(map(has_sections, form.spec or ())) for form in arrays.forms]
        form_of = arrays.form.tolist()
        several = {number for number, count in Counter(map(id, values.values())).items() if count > 1}
        targets: dict[str, Target] = {}
        for path, value in values.items():
            row = arrays.row.get(aliases.get(path, path))
            if row is None or sectioned[number := form_of[row]] or id(value) in several or is_declared(value):
                continue
            target = adapters.whole_target(value, arrays.forms[number], owned=owned)
            if target is not None:
                targets[path] = target
        return targets

    def new_whole(self, kinds: Mapping[str, str]) -> dict[str, Target]:
        """The targets, by leaf path, that make some arrays anew, whole and in host memory; `kinds` says which kind.

        Raises:
            IncompatibleCheckpointError: One of them is not stored.
        """
        alike: dict[tuple[int, str], Callable[[], Target]] = {}
        targets: dict[str, Target] = {}
        for path, kind in kinds.items():
            form = self.form(path)
            make = alike.get((id(form), kind))
            if make is None:
                weak_type = bool(form.weak_type)
                make = alike[id(form), kind] = making_new(form.dtype, whole(form.shape), kind, weak_type=weak_type)
            targets[path] = make()
        return targets

    def like(self, path: str, value: Any) -> Target:
        """A target that makes a new array like one of the program.

        Raises:
            UsageError: It is on the meta device.
        """
        check_memory(value, path)
        adapter = self.shardings.adapters.require(value, path)
        return adapter.like(value, self._local(path, value, adapter))

    def handed(self, path: str, value: Any) -> Target:
        """A target that makes a new array, which code of the program will write over one of its own.

        Raises:
            UsageError: As `into`.
        """
        if is_torch_tensor(value):
            from xla_ckpt.arrays.torch_elements import DENSE, check_writable

            if type(value) in DENSE:
                with naming(leaf=path):
                    check_writable(value)
        return self.like(path, value)

    def _local(self, path: str, value: Any, adapter: ArrayAdapter) -> LocalArray:
        """Where an array of the program lies, compared with how the stored one was split.

        Raises:
            IncompatibleCheckpointError: The ranks would get other rows than those that they mean.
        """
        local = self.shardings.local(path, value, adapter)
        form = self.manifest.arrays.form_at(self.manifest.aliases.get(path, path))
        if form is not None and form.spec is not None and form.shape == local.shape:
            own = adapter.place(value, path) is not None
            self.shardings.compare(path, self.manifest.required(path), local, self.manifest, own=own)
        return local

    def at(self, path: str) -> Stored | None:
        """The part at a path below this one; None if it is not stored."""
        try:
            return self.part(part_at(self.skeleton, path), paths.join(self.prefix, path))
        except KeyError:
            return None


@dataclass(slots=True)
class Loading:
    """A part of a load, checked but not yet begun: what it reads, and what it does with it."""

    cast: bool = False
    """See `Stored.cast`."""

    targets: dict[str, Target] = field(default_factory=dict)
    """Leaf path -> where the array goes."""

    problems: list[Problem] = field(default_factory=list)

    unwanted: list[Problem] = field(default_factory=list)
    """Stored, and not wanted by this rank: a problem unless another pipeline stage wants it."""

    left: list[Problem] = field(default_factory=list)
    """What code of the program has not taken, where the load goes on without it."""

    handover: Handover | None = None
    """What code of the program takes, before anything else of the program is changed."""

    finish: Callable[[Mapping[str, Any]], None] = lambda arrays: None
    """Called with the restored arrays by leaf path, when all parts are read."""

    @property
    def handed_paths(self) -> Collection[str]:
        """Leaf paths of the arrays that code of the program takes."""
        if self.handover is None:
            return ()
        return self.targets if self.handover.paths is None else self.handover.paths

    def add_problem(self, leaf: str, text: str, *, says_cure: bool = False) -> None:
        """Note a difference, and whether the text says what to do."""
        self.problems.append(Problem(leaf, text, says_cure=says_cure))

    def want(self, path: str, target: Target, form: ArrayForm) -> bool:
        """Add a target if it fits to what is stored, which is of this form, else a problem."""
        if target.shape != form.shape:
            self.add_problem(path, other_shape(form.shape, target.shape))
            return False
        if target.dtype == form.dtype:
            self.targets[path] = target if form.weak_type is None else target.with_weak_type(form.weak_type)
            return True
        castable = can_cast(form.dtype, target.dtype)
        if target.dtype == form.stands_for or (self.cast and castable):
            self.targets[path] = cast(target, form.dtype)
            return True
        text = f"{form.dtype.name} is stored, {target.dtype.name} wanted"
        self.problems.append(Problem(path, text, castable=castable))
        return False


def other_shape(stored: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """The text of a problem: an array has another shape than is wanted."""
    return f"shape {list(stored)} is stored, {list(wanted)} wanted"


def arrays_of(tree: Any, prefix: str) -> dict[str, Any]:
    """The arrays of a tree by the leaf path that they would be stored under."""
    arrays = flatten(tree, array_kind, CODEC).arrays
    return {paths.join(prefix, path) if path else prefix: value for path, value in arrays.items()}


def plan_arrays(
    stored: Stored,
    loading: Loading,
    current: Mapping[str, Any],
    *,
    owned: bool = False,
    new: Callable[[str, ArrayRecord, str], Target | None] | None = None,
    without: Collection[str] = (),
) -> None:
    """Want every array of a stored part: over the program's own where `current` has one, else as a new one.

    `new` may make the target of a new one from (leaf path, record, kind); by default it is whole, in host memory. It is
    asked, too, where the program's own has another shape: state of an optimizer may have grown since.

    The leaf paths of `without` are not wanted, and need not be readable.
    """
    paths_and_kinds = {
        path: kind for path, kind in array_paths(stored.skeleton, stored.prefix).items() if path not in without
    }
    usual = stored.over_whole({path: current[path] for path in paths_and_kinds if path in current}, owned=owned)
    if new is None:
        usual |= stored.new_whole({path: kind for path, kind in paths_and_kinds.items() if path not in current})
    loading.targets.update(usual)
    for path, kind in paths_and_kinds.items():
        if path in usual:
            continue
        form = stored.form(path)
        target = stored.into(path, current[path], owned=owned) if path in current else None
        if new is not None and (target is None or target.shape != form.shape):
            target = new(path, stored.manifest.required(path), kind) or target
        loading.want(path, target or new_array(form.dtype, whole(form.shape), kind), form)


def plan_whole(stored: Stored, loading: Loading) -> Make:
    """Want a stored part as it was saved: what makes it of the restored arrays.

    Raises:
        UntrustedObjectError: It holds what is not loaded without trust.
        IncompatibleCheckpointError: A class that it takes is gone, or has changed.
    """
    plan_arrays(stored, loading, {})
    stored.build()  # an object that may not be loaded is found out before anything is read
    return lambda arrays: stored.build(lambda path, _: arrays[path])


def plan_like(stored: Stored, loading: Loading, pattern: Any) -> Make:
    """Want what a pattern has of a stored part: what makes a value like it of the restored arrays.

    Raises:
        CheckpointError: Something stored cannot be loaded at all.
    """
    kind = stored.shardings.adapters.kind
    weave = Weave(
        lambda v: kind(v) is not None or is_spec(v),
        CODEC,
        lambda skeleton, leaf: plan_whole(stored.part(skeleton, leaf), loading),
        parts=parts_of_pattern,
        instead=partial(array_instead, codec=CODEC, cast=stored.cast),
        module_metadata=stored.metadata_at,
    )
    make = weave.visit(pattern, stored.skeleton, stored.prefix)
    for leaf, why in weave.refused.items():
        loading.add_problem(leaf, why)
    placement = stored.shardings.placement
    for leaf, wanted in weave.wanted.items():
        form = stored.form(leaf)
        try:  # `naming` would take a tenth of the time of many small arrays
            target = target_of_spec(wanted, placement, form) if is_spec(wanted) else stored.like(leaf, wanted)
        except CheckpointError as error:
            error.at(leaf=leaf)
            raise
        loading.want(leaf, target, form)
    return make


def plan_freely(stored: Stored, loading: Loading, current: Any) -> None:
    """Want every array of a stored part as it was saved: like the one of the object of now where that fits.

    For state that may have grown or changed since: the object itself knows best whether it fits. A tensor of another
    shape or type is made on the device of the one that is there.
    """
    now = arrays_of(current, stored.prefix)
    for path, kind in array_paths(stored.skeleton, stored.prefix).items():
        record, value = stored.manifest.required(path), now.get(path)
        target = None if value is None else stored.like(path, value)
        if target is None or (target.shape, target.dtype) != (record.shape, record.dtype):
            device = value.device if is_torch_tensor(value) else None
            target = new_array(record.dtype, whole(record.shape), kind, device)
        loading.want(path, target, record.form)


def refused_alone(stored: Stored) -> Loading:
    """The loading of what is neither a dict nor the state of an object, into something that is one.

    Raises:
        IncompatibleCheckpointError: Nothing says what it is.
    """
    loading = Loading()
    if is_array(stored.skeleton):
        stored.manifest.required(stored.prefix)  # of several dicts that may be meant it says which they are
        kind = "an array"
    else:
        kind = f"a value of the class {type(stored.build()).__name__}"
    loading.add_problem(
        stored.prefix,
        f"stored is {kind}, which no dict or object takes; xla_ckpt.Checkpoints(path).read({stored.prefix!r}) reads it",
    )
    return loading


def pickled_model(skeleton: Any) -> Any:
    """The part of a stored state that stands for a model which was pickled whole: all of it, its model, or what a file
    of torch.save calls so beside other things; None if there is none.
    """
    members = children(skeleton) or {}
    extras = children(members.get(schema.EXTRAS)) or {}
    return next(filter(is_object, (skeleton, members.get(schema.MODEL), extras.get(schema.MODEL))), None)


def absent_part(stored: Stored, what: str) -> Loading:
    """The loading of a part that is not stored at all."""
    loading = Loading()
    below = children(stored.skeleton) or {}
    beside, _, name = what.rpartition("/")
    near = stored.at(beside) if name and beside else None
    members = (
        ", ".join(below if near is None else (f"{beside}/{n}" for n in children(near.skeleton) or ())) or "nothing"
    )
    if stored.manifest.head.sequence and set(below).isdisjoint(schema.MEMBERS):
        members += " (a tree of save's is given back by restore)"
    elif not {"params", "token_embedder", "base"}.isdisjoint(
        chain(below, *(children(b) or () for b in below.values()))
    ):
        of_jax = "are they those of a model of jax? xla_ckpt.register_names, with rules for such paths"
        members += f" ({of_jax}; of MaxText? maxtext_names(rope=...))"
    elif what in schema.MEMBERS and (extras := [*(children(below.get(schema.EXTRAS)) or ())]):
        members += f" (extras: {', '.join(extras[:5])}; extras={{{extras[0]!r}: ...}} loads one of them into an object)"
    if is_object(stored.skeleton) or (what == schema.MODEL and pickled_model(stored.skeleton) is not None):
        members = "".join(f"{name}, " for name in below if name not in (schema.MODEL, schema.EXTRAS)) + (
            "one pickled object. If that is a module that torch.save was given whole, load it with torch, and save its "
            "state_dict()"
        )
    loading.add_problem(what, f"not in the checkpoint, which holds {members}")
    return loading
