"""Plan the load of one part of a stored state: match stored arrays with targets, and collect problems.

`StoredPart` is the content of a checkpoint under one path. `PartLoadPlan` records the arrays to read, their targets,
problems, and the installation after all arrays are read. Making a plan changes nothing in the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.registry import (
    check_has_memory,
    convert_stored_number,
    create_array_target,
    create_spec_target,
    create_target_factory,
    get_array_kind,
    is_array_spec,
)
from xla_ckpt.arrays.torch_objects import is_torch_tensor
from xla_ckpt.core.lightweight import slots_dataclass
from xla_ckpt.core.manifest.arrays import ArrayMetadata, ArrayRecord
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.sharding.local_array import LocalArray, create_unsharded
from xla_ckpt.core.sharding.sharding import has_sections
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.flatten import ResolveClass, Unflattener, flatten
from xla_ckpt.core.tree.skeleton import (
    BuildValue,
    TemplateMatcher,
    find_arrays,
    get_children,
    get_part,
    is_array,
    is_object,
)
from xla_ckpt.errors import CheckpointError, annotate_errors
from xla_ckpt.loading.target import Target, can_cast, cast_target
from xla_ckpt.state.problems import LoadProblem
from xla_ckpt.state.shardings import StateShardings, has_sharding_attributes
from xla_ckpt.state.state_dict_load import StateDictLoad
from xla_ckpt.state.values import CODEC, get_checked_members, split_pattern


@slots_dataclass()
class ArrayPlaceholder:
    """A placeholder for an array that has not been read yet."""

    path: str
    kind: str


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The content of a tag under one path."""

    manifest: Manifest
    prefix: str
    """Leaf path of the part: ``model``, ``optimizer``, ``extras/rng``."""

    skeleton: Any
    read_object: Callable[[int, str], Any]
    resolve: ResolveClass
    shardings: StateShardings = field(default_factory=StateShardings)
    """Shardings of the program's arrays."""

    cast: bool = False
    """True if floating-point values are cast to the program's dtype."""

    strict: bool = True
    """True if the load fails for any mismatch."""

    def is_same_array(self, path: str, other: str) -> bool:
        """Return True if two leaf paths are names of one stored array."""
        aliases = self.manifest.aliases
        return aliases.get(path, path) == aliases.get(other, other)

    def has_shape(self, key: str, shape: tuple[int, ...]) -> bool:
        """Return True if an array of this shape is stored under a key of the part."""
        path = paths.join(self.prefix, paths.escape(key))
        form = self.manifest.arrays.get_metadata(self.manifest.aliases.get(path, path))
        return form is not None and form.shape == shape

    def get_form(self, path: str) -> ArrayMetadata:
        """Return the metadata of an array leaf of the skeleton.

        Raises:
            IncompatibleCheckpointError: If the array is not stored.
        """
        form = self.manifest.arrays.get_metadata(self.manifest.aliases.get(path, path))
        return self.manifest.get_array(path).metadata if form is None else form

    def build(self, create_array: Callable[[str, str], Any] = ArrayPlaceholder) -> Any:
        """Build the part as a tree; `create_array(leaf path, kind)` creates each array.

        Composite values stay split into their members until they have been read.

        Raises:
            IncompatibleCheckpointError: If a required class is missing or has changed.
            UntrustedObjectError: If the part contains objects that are only loaded with trust.
        """
        return self._create_unflattener(create_array).build(self.skeleton, self.prefix)

    def get_module_metadata(self, path: str) -> Mapping[str, Mapping[str, Any]] | None:
        """Return the metadata of the modules whose state dict is stored at a leaf path; None if it is not recorded."""
        return (
            self._create_unflattener(ArrayPlaceholder).build_metadata(path)
            if path in self.manifest.module_metadata
            else None
        )

    def _create_unflattener(self, create_array: Callable[[str, str], Any]) -> Unflattener:
        return Unflattener(
            get_array=create_array,
            codec=CODEC,
            get_object=self.read_object,
            resolve_class=self.resolve,
            compose=(lambda parts: get_checked_members(parts, self.resolve))
            if create_array is ArrayPlaceholder
            else None,
            module_metadata=self.manifest.module_metadata,
        )

    def get_subpart(self, skeleton: Any, path: str) -> StoredPart:
        """Return a part of this part, given its skeleton and full leaf path."""
        return replace(self, prefix=path, skeleton=skeleton)

    def create_in_place_target(self, path: str, value: Any, *, owned: bool) -> Target:
        """Create a target that overwrites an array of the program.

        Raises:
            UsageError: If the array is on the meta device, is read-only, or has elements that share memory.
        """
        check_has_memory(value, path)
        adapter = self.shardings.adapters.require(value, path)
        try:  # `annotate_errors` would use a quarter of the time of many small arrays
            return adapter.create_in_place_target(value, self._locate(path, value, adapter), owned=owned)
        except CheckpointError as error:
            error.at(leaf=path)
            raise

    def create_whole_targets(self, values: Mapping[str, Any], *, owned: bool) -> dict[str, Target]:
        """Create targets, by leaf path, that overwrite arrays which need no further checks.

        These are most arrays of most loads: dense tensors of the stored dtype and shape, unsharded on this rank, with
        one name each.
        """
        arrays, aliases, adapters = self.manifest.arrays, self.manifest.aliases, self.shardings.adapters
        if not self.shardings.unsplit:
            return {}
        sectioned = [any(map(has_sections, form.spec or ())) for form in arrays.metadata]
        form_of = arrays.metadata_index.tolist()
        several = {number for number, count in Counter(map(id, values.values())).items() if count > 1}
        targets: dict[str, Target] = {}
        for path, value in values.items():
            row = arrays.row_by_leaf.get(aliases.get(path, path))
            if (
                row is None
                or sectioned[number := form_of[row]]
                or id(value) in several
                or has_sharding_attributes(value)
            ):
                continue
            target = adapters.create_whole_target(value, arrays.metadata[number], owned=owned)
            if target is not None:
                targets[path] = target
        return targets

    def create_new_targets(self, kinds: Mapping[str, str]) -> dict[str, Target]:
        """Create targets, by leaf path, for new, unsharded arrays in host memory; `kinds` maps leaf paths to kinds.

        Raises:
            IncompatibleCheckpointError: If an array is not stored.
        """
        alike: dict[tuple[int, str], Callable[[], Target]] = {}
        targets: dict[str, Target] = {}
        for path, kind in kinds.items():
            form = self.get_form(path)
            make = alike.get((id(form), kind))
            if make is None:
                weak_type = bool(form.weak_type)
                make = alike[id(form), kind] = create_target_factory(
                    form.dtype, create_unsharded(form.shape), kind, weak_type=weak_type
                )
            targets[path] = make()
        return targets

    def create_target_like(self, path: str, value: Any) -> Target:
        """Create a target for a new array like one of the program.

        Raises:
            UsageError: If the array is on the meta device.
        """
        check_has_memory(value, path)
        adapter = self.shardings.adapters.require(value, path)
        return adapter.create_target_like(value, self._locate(path, value, adapter))

    def create_copied_target(self, path: str, value: Any) -> Target:
        """Create a target for a new array, which code of the program will copy into one of its arrays.

        Raises:
            UsageError: As `create_in_place_target`.
        """
        if is_torch_tensor(value):
            from xla_ckpt.arrays.torch_elements import DENSE_CLASSES, check_writable_tensor

            if type(value) in DENSE_CLASSES:
                with annotate_errors(leaf=path):
                    check_writable_tensor(value)
        return self.create_target_like(path, value)

    def _locate(self, path: str, value: Any, adapter: ArrayAdapter) -> LocalArray:
        """Return the region of an array of the program, and compare its row order with the stored array.

        Raises:
            IncompatibleCheckpointError: If the ranks would read other rows than they expect.
        """
        local = self.shardings.locate(path, value, adapter)
        form = self.manifest.arrays.get_metadata(self.manifest.aliases.get(path, path))
        if form is not None and form.spec is not None and form.shape == local.shape:
            own = adapter.locate(value, path) is not None
            self.shardings.check_row_order(path, self.manifest.get_array(path), local, self.manifest, knows_place=own)
        return local

    def find_part(self, path: str) -> StoredPart | None:
        """Return the part at a path below this one; None if it is not stored."""
        try:
            return self.get_subpart(get_part(self.skeleton, path), paths.join(self.prefix, path))
        except KeyError:
            return None


@dataclass(slots=True)
class PartLoadPlan:
    """The plan of one part of a load, checked before anything is read or changed."""

    cast: bool = False
    """See `StoredPart.cast`."""

    targets: dict[str, Target] = field(default_factory=dict)
    """Leaf path -> target of the array."""

    problems: list[LoadProblem] = field(default_factory=list)

    unexpected: list[LoadProblem] = field(default_factory=list)
    """Stored leaves that this rank does not load: problems unless another pipeline stage loads them."""

    left_by_program: list[LoadProblem] = field(default_factory=list)
    """Values that code of the program has not loaded, in loads that continue without them."""

    state_dict_load: StateDictLoad | None = None
    """State for a `load_state_dict` of the program, called before anything else of the program is changed."""

    finish: Callable[[Mapping[str, Any]], None] = lambda arrays: None
    """Called with the restored arrays by leaf path, after all parts are read."""

    @property
    def state_dict_paths(self) -> Collection[str]:
        """Leaf paths of the arrays that are passed to `load_state_dict` of the program."""
        if self.state_dict_load is None:
            return ()
        return self.targets if self.state_dict_load.paths is None else self.state_dict_load.paths

    def add_problem(self, leaf: str, text: str, *, has_fix: bool = False) -> None:
        """Add a mismatch; `has_fix` if the text contains the fix."""
        self.problems.append(LoadProblem(leaf, text, has_fix=has_fix))

    def add_target(self, path: str, target: Target, form: ArrayMetadata) -> bool:
        """Add a target if it fits the stored array, otherwise a problem. Return True if it fits."""
        if target.shape != form.shape:
            self.add_problem(path, describe_shape_mismatch(form.shape, target.shape))
            return False
        if target.dtype == form.dtype:
            self.targets[path] = target if form.weak_type is None else target.with_weak_type(form.weak_type)
            return True
        castable = can_cast(form.dtype, target.dtype)
        if target.dtype == form.original_dtype or (self.cast and castable):
            self.targets[path] = cast_target(target, form.dtype)
            return True
        text = f"{form.dtype.name} is stored, {target.dtype.name} wanted"
        self.problems.append(LoadProblem(path, text, castable=castable))
        return False


def describe_shape_mismatch(stored: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Return the text of a problem for a shape mismatch."""
    return f"shape {list(stored)} is stored, {list(wanted)} wanted"


def collect_arrays(tree: Any, prefix: str) -> dict[str, Any]:
    """Return the arrays of a tree, by the leaf path that they would be stored under."""
    arrays = flatten(tree, get_array_kind, CODEC).arrays
    return {paths.join(prefix, path) if path else prefix: value for path, value in arrays.items()}


def plan_arrays(
    stored: StoredPart,
    plan: PartLoadPlan,
    current: Mapping[str, Any],
    *,
    owned: bool = False,
    create_target: Callable[[str, ArrayRecord, str], Target | None] | None = None,
    excluded: Collection[str] = (),
) -> None:
    """Plan to read every array of a stored part: in place if `current` contains the array, otherwise as a new one.

    `create_target(leaf path, record, kind)` may create the target of a new array; by default new arrays are unsharded
    and in host memory. It is also called if the current array has another shape, because optimizer state may have grown
    since.

    The leaf paths of `excluded` are not read, and may be unreadable.
    """
    paths_and_kinds = {
        path: kind for path, kind in find_arrays(stored.skeleton, stored.prefix).items() if path not in excluded
    }
    usual = stored.create_whole_targets(
        {path: current[path] for path in paths_and_kinds if path in current}, owned=owned
    )
    if create_target is None:
        usual |= stored.create_new_targets(
            {path: kind for path, kind in paths_and_kinds.items() if path not in current}
        )
    plan.targets.update(usual)
    for path, kind in paths_and_kinds.items():
        if path in usual:
            continue
        form = stored.get_form(path)
        target = stored.create_in_place_target(path, current[path], owned=owned) if path in current else None
        if create_target is not None and (target is None or target.shape != form.shape):
            target = create_target(path, stored.manifest.get_array(path), kind) or target
        plan.add_target(path, target or create_array_target(form.dtype, create_unsharded(form.shape), kind), form)


def plan_as_saved(stored: StoredPart, plan: PartLoadPlan) -> BuildValue:
    """Plan to read a stored part as it was saved. Return the function that builds it from the restored arrays.

    Raises:
        UntrustedObjectError: If the part contains objects that are only loaded with trust.
        IncompatibleCheckpointError: If a required class is missing or has changed.
    """
    plan_arrays(stored, plan, {})
    stored.build()  # detect objects that may not be loaded before anything is read
    return lambda arrays: stored.build(lambda path, _: arrays[path])


def plan_like(stored: StoredPart, plan: PartLoadPlan, pattern: Any) -> BuildValue:
    """Plan to read the parts of a stored part that a pattern contains. Return the function that builds a value like it
    from the restored arrays.

    Raises:
        CheckpointError: If a stored value cannot be loaded at all.
    """
    kind = stored.shardings.adapters.get_kind
    weave = TemplateMatcher(
        lambda v: kind(v) is not None or is_array_spec(v),
        CODEC,
        lambda skeleton, leaf: plan_as_saved(stored.get_subpart(skeleton, leaf), plan),
        split_container=split_pattern,
        convert_value=partial(convert_stored_number, codec=CODEC, allow_rounding=stored.cast),
        get_metadata=stored.get_module_metadata,
    )
    make = weave.match(pattern, stored.skeleton, stored.prefix)
    for leaf, why in weave.unmatched.items():
        plan.add_problem(leaf, why)
    placement = stored.shardings.placement
    for leaf, wanted in weave.matched.items():
        form = stored.get_form(leaf)
        try:  # `annotate_errors` would use a tenth of the time of many small arrays
            target = (
                create_spec_target(wanted, placement, form)
                if is_array_spec(wanted)
                else stored.create_target_like(leaf, wanted)
            )
        except CheckpointError as error:
            error.at(leaf=leaf)
            raise
        plan.add_target(leaf, target, form)
    return make


def plan_flexible(stored: StoredPart, plan: PartLoadPlan, current: Any) -> None:
    """Plan to read every array of a stored part as it was saved: like the current array if that fits.

    Used for state that may have grown or changed since: the object itself decides if it fits. A tensor of another shape
    or dtype is created on the device of the current one.
    """
    now = collect_arrays(current, stored.prefix)
    for path, kind in find_arrays(stored.skeleton, stored.prefix).items():
        record, value = stored.manifest.get_array(path), now.get(path)
        target = None if value is None else stored.create_target_like(path, value)
        if target is None or (target.shape, target.dtype) != (record.shape, record.dtype):
            device = value.device if is_torch_tensor(value) else None
            target = create_array_target(record.dtype, create_unsharded(record.shape), kind, device)
        plan.add_target(path, target, record.metadata)


def reject_bare_value(stored: StoredPart) -> PartLoadPlan:
    """Return a plan with a problem, for a stored value that is neither a dict nor the state of an object.

    Raises:
        IncompatibleCheckpointError: If an array is ambiguous, because several dicts may be meant.
    """
    loading = PartLoadPlan()
    if is_array(stored.skeleton):
        stored.manifest.get_array(stored.prefix)  # raises and lists the candidates if several dicts may be meant
        kind = "an array"
    else:
        kind = f"a value of the class {type(stored.build()).__name__}"
    loading.add_problem(
        stored.prefix,
        f"stored is {kind}, which no dict or object takes; xla_ckpt.Checkpoints(path).read({stored.prefix!r}) reads it",
    )
    return loading


def find_pickled_model(skeleton: Any) -> Any:
    """Return the part of a stored state that is a model pickled as a whole: the root, its model, or the entry of that
    name in a torch.save file; otherwise None.
    """
    members = get_children(skeleton) or {}
    extras = get_children(members.get(schema.EXTRAS)) or {}
    return next(filter(is_object, (skeleton, members.get(schema.MODEL), extras.get(schema.MODEL))), None)


def report_missing_part(stored: StoredPart, path: str) -> PartLoadPlan:
    """Return a plan with a problem, for a part that is not stored."""
    loading = PartLoadPlan()
    below = get_children(stored.skeleton) or {}
    beside, _, name = path.rpartition("/")
    near = stored.find_part(beside) if name and beside else None
    members = (
        ", ".join(below if near is None else (f"{beside}/{n}" for n in get_children(near.skeleton) or ())) or "nothing"
    )
    if stored.manifest.header.sequence and set(below).isdisjoint(schema.MEMBERS):
        members += " (a tree of save's is given back by restore)"
    elif not {"params", "token_embedder", "base"}.isdisjoint(
        chain(below, *(get_children(b) or () for b in below.values()))
    ):
        of_jax = "are they those of a model of jax? xla_ckpt.register_names, with rules for such paths"
        members += f" ({of_jax}; of MaxText? maxtext_names(rope=...))"
    elif path in schema.MEMBERS and (extras := [*(get_children(below.get(schema.EXTRAS)) or ())]):
        members += f" (extras: {', '.join(extras[:5])}; extras={{{extras[0]!r}: ...}} loads one of them into an object)"
    if is_object(stored.skeleton) or (path == schema.MODEL and find_pickled_model(stored.skeleton) is not None):
        members = "".join(f"{name}, " for name in below if name not in (schema.MODEL, schema.EXTRAS)) + (
            "one pickled object. If that is a module that torch.save was given whole, load it with torch, and save its "
            "state_dict()"
        )
    loading.add_problem(path, f"not in the checkpoint, which holds {members}")
    return loading
