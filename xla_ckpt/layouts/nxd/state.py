"""Models and optimizers of neuronx-distributed's rank files, as one tree each with records in place of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError, naming
from xla_ckpt.layouts.nxd.arrays import Copies, check_rows, declared, record, resolve
from xla_ckpt.layouts.nxd.copies import chosen, in_common
from xla_ckpt.layouts.nxd.names import names_of_stage
from xla_ckpt.layouts.nxd.rank_files import At, RankFiles, Scan, StoredTensor
from xla_ckpt.manifest.records import ArrayRecord, UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sharding import Sharding, parts
from xla_ckpt.tree import schema

Trees = Mapping[At, Mapping[Any, Any]]
"""What each rank file holds."""


@dataclass(slots=True)
class Stage:
    """The model of one pipeline stage."""

    copies: dict[str, Copies] = field(default_factory=dict)
    """By name: the tensors of all ranks."""

    plain: dict[At, dict[str, Any]] = field(default_factory=dict)
    """What is no tensor on each rank: a module's extra state."""


def trees(scan: Scan, files: RankFiles, *, dp: int | None = None) -> dict[At, Any]:
    """What the files hold; only those of one dp rank, if one is named."""
    found = {}
    for at, path in sorted(files.paths.items()):
        if dp is None or at.dp == dp:
            found[at] = scan.tree(path, at)
            if not isinstance(found[at], Mapping):
                raise CorruptCheckpointError("a rank file holds no dict", file=path, found=type(found[at]).__name__)
    return found


def stages(models: Trees) -> dict[int, Stage]:
    """The models by pipeline stage.

    Raises:
        CorruptCheckpointError: The ranks of a stage hold different names.
    """
    found: dict[int, Stage] = {}
    for at, tree in models.items():
        stage = found.setdefault(at.pp, Stage())
        fresh = not stage.plain  # the first rank of the stage says which names there are
        plain = stage.plain.setdefault(at, {})
        for name, value in tree.items():
            if not isinstance(value, StoredTensor):
                plain[str(name)] = value
            elif fresh or name in stage.copies:
                copies: dict[tuple[int, int, int], StoredTensor] = stage.copies.setdefault(str(name), {})  # type: ignore[assignment]
                copies[at.dp, at.ep, at.tp] = value
        if [n for n, v in tree.items() if isinstance(v, StoredTensor)] != list(stage.copies):
            raise CorruptCheckpointError(
                "the ranks of a pipeline stage hold different names",
                leaf=schema.MODEL,
                found=f"(ep {at.ep}, tp {at.tp}, pp {at.pp}) against the first rank of the stage",
            )
    return found


class ScannedState:
    """Builds the parts of one tag."""

    def __init__(self, scan: Scan, wanted: Hints, model: Mapping[int, Stage], mesh: Mesh) -> None:
        self.scan = scan
        self.wanted = wanted
        self.stages = model
        self.mesh = mesh
        """How the ranks of one pipeline stage were arranged that have different parts of the model.

        It has no pp, and as many dp ranks as ep ranks: further dp ranks have copies, which nobody stored.
        """

    def model(self) -> dict[str, Any]:
        """The model by name, with a record or an `UnknownArray` for each tensor."""
        made: dict[str, Any] = {}
        for _, stage in sorted(self.stages.items()):
            for name, copies in stage.copies.items():
                if name not in made:
                    made[name] = self._parameter(schema.weight(name), name, copies)
            names = dict.fromkeys(name for plain in stage.plain.values() for name in plain)
            made = {**{name: in_common(self.scan, stage.plain, name) for name in names}, **made}
        return made

    def _parameter(self, leaf: str, name: str, copies: Copies) -> ArrayRecord | UnknownArray | Missing:
        """What stands for a parameter of the model.

        Raises:
            CorruptCheckpointError: The file of one of its tensors is missing, and others of that rank are there.
        """
        held = next(iter(copies.values()))
        lost = [h.file for h in copies.values() if h.at is None and h.file not in self.scan.names]
        if lost:
            # A job may leave out all files of its tensors on purpose (avoid_saving_lower_precision_weights): then not
            # even their folder is there.
            if all(h.at is None and h.file.rpartition("/")[0] not in self.scan.folders for h in copies.values()):
                return Missing(held)
            raise CorruptCheckpointError("a file is missing", leaf=leaf, file=lost[0])
        sharding = resolve(name, held.shape, self.mesh, held.expert, self.wanted.hint(name))
        if isinstance(sharding, UnknownArray):
            return sharding
        return self.record(leaf, name, copies, self.mesh, sharding=sharding, local=held.shape)

    def record(
        self,
        leaf: str,
        name: str,
        copies: Copies,
        mesh: Mesh,
        *,
        sharding: Sharding,
        local: tuple[int, ...],
        state: Sharding | None = None,
        rows: tuple[str, ...] = (),
        dealt: bool = False,
    ) -> ArrayRecord | UnknownArray:
        """The record of a parameter, or of a state of it; unknown if ranks differ and nothing says why.

        Args:
            leaf: Leaf path of the array.
            name: Name of the parameter.
            copies: The tensors of all ranks.
            mesh: How the ranks were arranged that stored them.
            sharding: How the parameter was split.
            local: Shape of the parameter on each rank.
            state: How the state was split, if its shape is not the parameter's.
            rows: Mesh axes over which ZeRO-1 dealt out the rows of the state.
            dealt: Whether each dp rank has a file of its own, as ZeRO-1 writes them.
        """
        wish = self.wanted.hint(name)
        own = False
        split = sharding if state is None else state
        # Copies are compared unless the program has said how the array was split. What it says of a parameter does not
        # count for a state of another shape, which may not be split like the parameter.
        if not declared(local, wish) or len(split.axes) < len(sharding.axes):
            fits = wish.alone and _whole(sharding, local, mesh) == wish.shape
            found = chosen(
                self.scan,
                copies,
                mesh,
                split=(*split.axes, *rows),
                dealt=dealt,
                wanted=self.wanted,
                alone=fits,
            )
            if isinstance(found, UnknownArray):
                return found
            copies, own = found
        made = record(self.scan, leaf, copies, mesh, split, rows=rows, local=local if rows else ())
        return replace(made, own=True) if own else made

    def optimizer(self, files: Trees, dp: int) -> dict[str, Any]:
        """The optimizer by name: states, groups and, if there are any, master weights.

        Raises:
            CorruptCheckpointError: Rank files do not add up to whole arrays.
            IncompatibleCheckpointError: The parameters of the stored groups are not those that are wanted.
        """
        tree: dict[str, Any] = {schema.STATE: {}, schema.GROUPS: []}
        master: dict[str, Any] = {}
        for pp in sorted({at.pp for at in files}):
            stage = {at: held for at, held in files.items() if at.pp == pp}
            _OfStage(self, pp, stage, dp).into(tree, master)
        return {**tree, schema.MASTER: master} if master else tree


@dataclass(frozen=True, slots=True)
class Missing:
    """A tensor of a model whose file was never written, because its master weights stand for it."""

    held: StoredTensor


class _OfStage:
    """The optimizer of one pipeline stage."""

    def __init__(self, state: ScannedState, pp: int, files: Trees, dp: int) -> None:
        self.of = state
        self.files = files
        self.first = files[min(files)]
        self.zero = "base_state" in self.first
        """Whether ZeRO-1 dealt out the rows of the states over dp."""
        self.state_key = "base_state" if self.zero else "state"
        self.mesh = Mesh(dp=dp, ep=state.mesh.ep, tp=state.mesh.tp) if self.zero else state.mesh
        self.model = state.stages.get(pp, Stage())
        groups = self.first.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(g, dict) and "params" in g for g in groups):
            raise CorruptCheckpointError("the optimizer of a rank file has no param_groups", leaf=schema.OPTIMIZER)
        ordinary = int(self.first.get("ep_param_group_offset", len(groups)))
        self.experts_from = sum(len(g["params"]) for g in groups[:ordinary])
        """The number that experts' parameters count from, in optimizers that keep them in groups of their own."""
        self.groups = [
            # The numbers of those groups begin at 0 again: without the shift they would be those of other parameters.
            {**g, "params": [number + (self.experts_from if n >= ordinary else 0) for number in g["params"]]}
            for n, g in enumerate(groups)
        ]
        self.names = names_of_stage(
            self.groups,
            ordinary=ordinary,
            wanted=state.wanted,
            model=self.model.copies if state.stages else None,
            shapes={number: self.local_shape(number) for g in self.groups for number in g["params"]},
            is_expert=self.is_expert,
        )

    def is_expert(self, name: str) -> bool:
        """Whether a parameter differs between expert-parallel ranks."""
        copies = self.model.copies.get(name)
        if copies is None:
            return False
        held = next(iter(copies.values()))
        if held.expert is not None:
            return held.expert
        sharding = resolve(name, held.shape, self.of.mesh, None, self.of.wanted.hint(name))
        return isinstance(sharding, Sharding) and "ep" in sharding.axes

    def local_shape(self, number: int) -> tuple[int, ...] | None:
        """The shape of a parameter on each rank; None if nothing of it is stored."""
        if self.zero:
            info = self.first.get("shape_info", {})
            return tuple(map(int, info[number])) if number in info else None
        held = self.first.get("state", {}).get(number, {})
        return next((v.shape for v in held.values() if isinstance(v, StoredTensor) and v.shape), None)

    def into(self, tree: dict[str, Any], master: dict[str, Any]) -> None:
        """Add this stage to the optimizer `tree`, and to its master weights."""
        self._add_groups(tree[schema.GROUPS])
        self._add_states(tree[schema.STATE], master)
        self._add_common_state(tree[schema.STATE])

    def _add_groups(self, found: list[dict[str, Any]]) -> None:
        """Add the groups: a group of parameters has members in several stages."""
        if found and len(found) != len(self.groups):
            raise IncompatibleCheckpointError(
                "the optimizers of the pipeline stages have different numbers of groups",
                leaf=schema.group(),
                expected=len(found),
                found=len(self.groups),
            )
        for n, group in enumerate(self.groups):
            names = [self.names[i] for i in group["params"] if i in self.names]
            if n < len(found):
                merged = found[n][schema.PARAMS]
                merged += [name for name in names if name not in merged]
            else:
                found.append({**_hyper(group), schema.PARAMS: names})

    def _add_states(self, found: dict[Any, Any], master: dict[str, Any]) -> None:
        """Add states and master weights of the parameters."""
        for number, name in self.names.items():
            if name in found or not self.of.wanted.knows(name):
                continue  # another stage has this shared parameter, too; or this rank has no parameter of that stage
            held = {at: tree.get(self.state_key, {}).get(number, {}) for at, tree in self.files.items()}
            state = self._state(number, name, held)
            if state:
                found[name] = state
            weights = {}
            for at, tree in self.files.items():
                weight = tree.get("sharded_master_weights", {}).get(number)
                if weight:
                    weights[at] = weight
            if weights:
                master[name] = self._array(schema.master(name), number, name, weights)

    def _add_common_state(self, found: dict[Any, Any]) -> None:
        """Add state that belongs to no parameter. Its keys are no numbers, and every rank has the same."""
        own = {at: tree.get(self.state_key, {}) for at, tree in self.files.items()}
        for name in dict.fromkeys(name for members in own.values() for name in members):
            if type(name) is int:
                continue
            if name in self.names.values():
                raise IncompatibleCheckpointError(
                    "the stored optimizer keeps state of its own under the name of a parameter",
                    leaf=schema.state(name),
                    hint="Load the tag without the model: then parameters are numbered.",
                )
            if name not in found:
                found[name] = in_common(self.of.scan, own, name)

    def _state(self, number: int, name: Any, held: Mapping[At, Any]) -> dict[str, Any]:
        """The state of one parameter, from that of all ranks."""
        made: dict[str, Any] = {}
        with_state = {at: members for at, members in held.items() if members}
        for what in dict.fromkeys(what for members in with_state.values() for what in members):
            copies = {at: m[what] for at, m in with_state.items() if isinstance(m.get(what), StoredTensor)}
            if copies and len(copies) == sum(what in members for members in with_state.values()):
                made[what] = self._array(schema.state(name, what), number, name, copies)
            else:
                made[what] = in_common(self.of.scan, with_state, what)
        return made

    def _array(self, leaf: str, number: int, name: Any, held: Mapping[At, StoredTensor]) -> ArrayRecord | UnknownArray:
        """A state of one parameter, or its master weights, from the tensors of all ranks."""
        copies = {(at.dp, at.ep, at.tp): h for at, h in held.items()}
        first = next(iter(copies.values()))
        local = self.local_shape(number) or first.shape
        expert = self.is_expert(str(name)) if self.of.mesh.ep > 1 else False
        dealt_over = ("edp",) if expert else ("dp",)
        has_rows = self.zero and bool(first.shape)
        if has_rows:
            check_rows(leaf, local, copies, parts(dealt_over, self.mesh.sizes))
        sharding = resolve(str(name), local, self.of.mesh, expert, self.of.wanted.hint(str(name)))
        if isinstance(sharding, UnknownArray):
            if first.shape:
                return sharding
            sharding = Sharding()  # nobody knows how the parameter was split, but a single number has no parts
        if self.zero and not has_rows:
            # A single number is the same on all ranks that share the rows of a parameter.
            copies = {at: h for at, h in copies.items() if at[0] < self.mesh.ep}
        with naming(leaf=leaf):
            return self.of.record(
                leaf,
                str(name),
                copies,
                self.mesh,
                sharding=sharding,
                local=local,
                state=None if has_rows else sharding.of_state(local, first.shape),
                rows=dealt_over if has_rows else (),
                dealt=self.zero,
            )


def _whole(sharding: Sharding, local: tuple[int, ...], mesh: Mesh) -> tuple[int, ...] | None:
    """The global shape that local tensors make; None if they cannot be parts of such an array."""
    try:
        return sharding.place(local, mesh, 0).shape
    except ValueError:
        return None


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group."""
    made = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    if isinstance(made.get("betas"), list):  # the layout xser makes lists of tuples, and torch wants a tuple
        made["betas"] = tuple(made["betas"])
    return made
