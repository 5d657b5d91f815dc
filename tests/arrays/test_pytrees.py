"""Classes that are registered with jax, and typed keys: stored as their parts, and made again by a pattern."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import xla_ckpt
from tests.formats.orbax_saves import eight_devices
from tests.runs import ROOT
from xla_ckpt import FormatError, IncompatibleCheckpointError, UntrustedObjectError
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.manifest.arrays import ArrayTable
from xla_ckpt.core.tree.values import Composite
from xla_ckpt.state.values import CODEC, create_class_resolver


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Train:
    """As flax' TrainState: arrays, and a function that no file can hold."""

    step: Any
    params: Any
    apply: Callable[..., Any] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    """A dataclass whose static part is plain."""

    weight: Any
    units: int = dataclasses.field(default=3, metadata={"static": True})


@jax.tree_util.register_pytree_with_keys_class
class Frozen:
    """As flax' FrozenDict: a class that says what it is made of, and is no dict."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def tree_flatten_with_keys(self) -> Any:
        keys = tuple(sorted(self.held))
        return [(jax.tree_util.DictKey(k), self.held[k]) for k in keys], keys

    @classmethod
    def tree_unflatten(cls, keys: Any, parts: Any) -> Frozen:
        return cls(dict(zip(keys, parts, strict=True)))


@jax.tree_util.register_pytree_node_class
class Nameless:
    """A class that gives its parts no names."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def tree_flatten(self) -> Any:
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _: Any, parts: Any) -> Nameless:
        return cls(*parts)


class Keyed(dict[str, Any]):
    """A dict that gives its keys to jax beside its parts, in their order."""


class KeyedAndActive(Keyed):
    """Another one, which gives a function, too."""


class Flattened:
    """As haiku's FlatMap: it keeps the leaves, and jax's structure of the rest."""

    def __init__(self, held: Any) -> None:
        self.leaves, self.structure = jax.tree.flatten(held)

    @classmethod
    def of(cls, structure: Any, leaves: Any) -> Flattened:
        return cls(jax.tree.unflatten(structure, leaves))


class Listed(list[Any]):
    """A list of a program's own, whose key paths are positions."""


class Twice:
    """A class with two parts of one name."""

    def __init__(self, held: dict[Any, Any]) -> None:
        self.held = held


def _register(kind: Any, known: Callable[[Any], Any], keys: Callable[[Any], Any]) -> None:
    jax.tree_util.register_pytree_node(
        kind, lambda d: (tuple(d.values()), known(d)), lambda known, parts: kind(zip(keys(known), parts, strict=True))
    )


_register(Keyed, tuple, lambda known: known)
_register(KeyedAndActive, lambda d: (jnp.sin, tuple(d)), lambda known: known[1])
jax.tree_util.register_pytree_node(Flattened, lambda f: (f.leaves, f.structure), Flattened.of)
jax.tree_util.register_pytree_with_keys(
    Listed,
    lambda d: ([(jax.tree_util.SequenceKey(n), part) for n, part in enumerate(d)], None),
    lambda _, parts: Listed(parts),
)
jax.tree_util.register_pytree_with_keys(
    Twice,
    lambda d: ([(jax.tree_util.DictKey(k), v) for k, v in d.held.items()], tuple(d.held)),
    lambda keys, parts: Twice(dict(zip(keys, parts, strict=True))),
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Setting:
    """A static value, which jax knows as a structure alone."""

    width: int


@jax.tree_util.register_static
class Mode(enum.Enum):
    """A static value of an enum."""

    A = 1
    B = 2


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Active:
    """A static value that no file can hold."""

    function: Callable[..., Any]


def saved(root: Path, tree: Any) -> None:
    xla_ckpt.save(root, "a", tree)
    assert not manifest_json.parse_manifest((root / "a" / "manifest.json").read_bytes()).object_files, (
        "nothing is pickled"
    )
    assert xla_ckpt.verify(root, "a").ok


def same(found: Any, expected: Any) -> bool:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    return bool(
        jax.tree.all(jax.tree.map(lambda a, b: bool((jnp.asarray(a) == jnp.asarray(b)).all()), found, expected))
    )


def grown(seed: int) -> Frozen:
    return Frozen(
        {
            "dense": {"kernel": jnp.full((2, 3), float(seed))},
            "inner": Frozen({"bias": jnp.full(3, float(seed))}),
            "n": None,
        }
    )


@pytest.mark.parametrize("by_pattern", [False, True])
def test_a_registered_class_comes_back(tmp_path: Path, *, by_pattern: bool) -> None:
    tree = [grown(1), Plain(jnp.ones(2), 7), Nameless(jnp.ones(1), {"a": jnp.zeros(2)})]
    saved(tmp_path, tree)
    like = [grown(0), Plain(jnp.zeros(2), 7), Nameless(jnp.zeros(1), {"a": jnp.ones(2)})] if by_pattern else None
    found = xla_ckpt.restore(tmp_path, "a", like).tree
    assert same(found, tree)
    assert isinstance(found[0].held["dense"]["kernel"], jax.Array)


def test_what_no_file_can_hold_comes_from_the_pattern(tmp_path: Path) -> None:
    saved(tmp_path, Train(5, grown(1), jnp.sin))
    for like in (Train(0, grown(0), jnp.cos), jax.eval_shape(lambda: Train(jnp.int32(0), grown(0), jnp.cos))):
        found = xla_ckpt.restore(tmp_path, "a", like).tree
        assert same(found, Train(5, grown(1), jnp.cos))
    bare = xla_ckpt.restore(tmp_path, "a").tree
    assert sorted(bare) == ["params", "step"], "without a pattern a dict of the parts"
    assert same(bare["params"], grown(1))


def test_a_part_of_it_is_restored_and_a_missing_one_is_named(tmp_path: Path) -> None:
    saved(tmp_path, {"state": grown(1)})
    part = xla_ckpt.restore(tmp_path, "a", {"state": Frozen({"inner": Frozen({"bias": jnp.zeros(3)})})}).tree
    assert part["state"].held["inner"].held["bias"].tolist() == [1, 1, 1]
    with pytest.raises(IncompatibleCheckpointError) as caught:
        xla_ckpt.restore(tmp_path, "a", {"state": Frozen({"outer": jnp.zeros(3)})})
    assert caught.value.leaf == "state/outer"


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_typed_keys(tmp_path: Path, implementation: str) -> None:
    one = jax.random.key(3, impl=implementation)
    tree = {"one": one, "many": jax.random.split(one, 4)}
    saved(tmp_path, tree)
    patterns = [None, {k: jax.random.key(0, impl=implementation) for k in tree}, jax.eval_shape(lambda: tree)]
    for like in patterns:
        found = xla_ckpt.restore(tmp_path, "a", like).tree
        for name, key in tree.items():
            assert found[name].dtype == key.dtype
            assert jax.random.key_data(found[name]).tolist() == jax.random.key_data(key).tolist()
    assert jax.random.uniform(found["one"]) == jax.random.uniform(one)


def test_a_number_fills_an_array_without_dims(tmp_path: Path) -> None:
    """A step is a number until the first one has been compiled, and an array from then on."""
    saved(tmp_path, {"step": 5})
    patterns = [
        jnp.zeros((), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.dtype("int32")),
        np.zeros((), np.int64),
        torch.zeros((), dtype=torch.int16),
        xla_ckpt.ArraySpec((), "int8"),
        xla_ckpt.ArraySpec((), np.dtype("uint8")),
    ]
    for pattern in patterns:
        found = xla_ckpt.restore(tmp_path, "a", {"step": pattern}).tree["step"]
        assert (found.item(), tuple(found.shape)) == (5, ())
        assert str(found.dtype).removeprefix("torch.") == str(pattern.dtype).removeprefix("torch.")
    with pytest.raises(IncompatibleCheckpointError, match="5 stored, an array wanted"):
        xla_ckpt.restore(tmp_path, "a", {"step": jnp.zeros(2)})


def test_a_class_of_a_file_is_neither_imported_nor_called_unless_jax_knows_it() -> None:
    __import__("subprocess")
    for name, error, text in (
        ("somebody.elses:Class", UntrustedObjectError, "not imported"),
        ("os:system", IncompatibleCheckpointError, "has changed or is gone"),
        ("subprocess:Popen", FormatError, "put together again"),
    ):
        parts = Composite(f"jax:tree:{name}", {}, {"structure": None})
        with pytest.raises(error, match=text):
            CODEC.compose(parts, create_class_resolver(trust=False))


def test_a_class_that_contains_itself_is_refused(tmp_path: Path) -> None:
    cycle = Nameless()
    cycle.parts = ([cycle],)
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="contains itself"):
        xla_ckpt.save(tmp_path, "a", {"c": cycle})


def test_what_was_put_on_no_device_is_put_on_none(tmp_path: Path) -> None:
    """jax computes with it wherever the arrays of a mesh lie, and refuses what was put on one device."""
    placed = jax.device_put(jnp.ones(2), jax.devices()[0])
    state = {"count": jnp.zeros((), jnp.int32), "key": jax.random.key(1), "placed": placed, "number": 3}
    xla_ckpt.save(tmp_path, "a", state)
    like = state | {"number": jnp.zeros((), jnp.int32)}  # as jax has it when a step was compiled
    restored = xla_ckpt.restore(tmp_path, "a", like).tree
    assert {name: leaf.committed for name, leaf in restored.items()} == {
        "count": False, "key": False, "placed": True, "number": False
    }  # fmt: skip
    model = {"count": state["count"], "placed": placed}
    xla_ckpt.save_checkpoint(tmp_path, "b", model)
    xla_ckpt.load_checkpoint(tmp_path, "b", model)
    assert {name: leaf.committed for name, leaf in model.items()} == {"count": False, "placed": True}


ONE, TWO = jnp.ones(2, jnp.float32), jnp.full(2, 2, jnp.float32)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (Keyed(scale=ONE, shift=TWO), Keyed(shift=TWO, scale=ONE)),
        (Keyed(scale=ONE, shift=TWO), Keyed(scale=ONE, offset=TWO)),
        (Keyed(scale=ONE, shift=TWO), Keyed(scale=ONE)),
        (Keyed(scale=ONE), Keyed(scale=ONE, shift=TWO)),
        (KeyedAndActive(scale=ONE, shift=TWO), KeyedAndActive(shift=TWO, scale=ONE)),
        (KeyedAndActive(scale=ONE, shift=TWO), Keyed(scale=ONE, shift=TWO)),
        (Flattened({"a": ONE, "b": TWO}), Flattened({"b": ONE, "c": TWO})),
        (Flattened({"dec": {"w": ONE}, "enc": [TWO, None]}), Flattened({"enc": {"w": ONE}, "zdec": [TWO, None]})),
        (Listed([ONE, TWO]), Listed([ONE])),
        (Twice({1: ONE, "1": TWO}), Twice({"1": ONE, 1: TWO})),
        (Nameless(ONE, TWO), Listed([ONE, TWO])),
        ({"0": ONE, "1": TWO, "2": TWO}, Nameless(ONE, TWO)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_parts_without_key_paths_are_those_of_the_same_structure(tmp_path: Path, stored: Any, wanted: Any) -> None:
    saved(tmp_path, {"p": stored})
    with pytest.raises(IncompatibleCheckpointError, match="register_pytree_with_keys") as caught:
        xla_ckpt.restore(tmp_path, "a", {"p": wanted})
    assert caught.value.leaf == "p"
    again = xla_ckpt.restore(tmp_path, "a", {"p": jax.tree.map(jnp.zeros_like, stored)}).tree
    assert same(again, {"p": stored})
    if not isinstance(stored, KeyedAndActive):
        assert same(xla_ckpt.restore(tmp_path, "a").tree, {"p": stored})


def test_parts_with_key_paths_are_matched_by_them(tmp_path: Path) -> None:
    saved(tmp_path, Twice({"scale": ONE, "shift": TWO}))
    found = xla_ckpt.restore(tmp_path, "a", Twice({"shift": ONE, "scale": ONE})).tree
    assert [(key, part.tolist()) for key, part in found.held.items()] == [("shift", [2, 2]), ("scale", [1, 1])]


def test_static_values(tmp_path: Path) -> None:
    state = {"setting": Setting(4), "mode": Mode.B, "w": ONE, "inside": Nameless(Setting(5))}
    saved(tmp_path, state)
    assert xla_ckpt.restore(tmp_path, "a").tree["setting"] == Setting(4)
    for like in (state, jax.eval_shape(lambda: state), None):
        assert same(xla_ckpt.restore(tmp_path, "a", like).tree, state)
    own = {"setting": Setting(3), "active": Active(jnp.cos)}  # a static value is the program's, as for jax
    xla_ckpt.save(tmp_path, "b", {"setting": Setting(4), "active": Active(jnp.sin), "w": ONE})
    assert xla_ckpt.restore(tmp_path, "b", own).tree == own
    assert xla_ckpt.restore(tmp_path, "b").tree["active"] == {}, "a dict of the parts, of which it has none"


NAN = float("nan")
NUMBERS = [3, 0.5, 0.1, 2**40, 16777217, -1, True, 1e300, NAN, -math.inf, 1 + 2j, 0.1j]
SCALARS = [np.float64(0.1), np.float32(0.1), np.int64(2**40), np.int8(3), np.uint64(2**63 + 5), np.bool_(True)]
TYPES = ["uint8", "int32", "bfloat16", "float32", "float64", "complex64"]


def _patterns(name: str) -> dict[str, Any]:
    """Arrays without dims of a type, of each framework; jax has none of 64 bits."""
    of_jax = {} if name.endswith("64") and name != "complex64" else {
        "array": jnp.zeros((), name), "struct": jax.ShapeDtypeStruct((), jnp.dtype(name))
    }  # fmt: skip
    return of_jax | {
        "numpy": np.zeros((), jnp.dtype(name)),
        "torch": torch.zeros((), dtype=getattr(torch, name)),
        "spec": xla_ckpt.ArraySpec((), name),
    }


def _python(value: Any) -> Any:
    """The number of an array without dims, as one of Python's."""
    return value.item() if isinstance(value, torch.Tensor) else np.asarray(value).item()


@pytest.mark.parametrize("number", NUMBERS + SCALARS, ids=lambda n: f"{type(n).__name__}({n})")
def test_a_number_comes_back_in_an_array_or_is_refused(tmp_path: Path, number: Any) -> None:
    """Exact, or rounded to the type that the framework gives the number by itself; never another number."""
    saved(tmp_path, {"v": number})
    plain = _python(number)
    natural = {"array": jnp.asarray(plain).dtype.name if plain not in (2**40, 2**63 + 5) else "int32"}
    natural |= {"struct": natural["array"], "numpy": np.asarray(plain).dtype.name}
    natural |= dict.fromkeys(("torch", "spec"), str(torch.tensor(0.1 if plain == 2**63 + 5 else plain).dtype)[6:])
    for name in TYPES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                rounded = np.asarray(plain).astype(jnp.dtype(name)).item()
            except (OverflowError, TypeError, ValueError):
                rounded = None
            if isinstance(plain, complex) and name != "complex64" and plain.imag:
                rounded = None
        exact = rounded == plain or (plain != plain and rounded is not None and rounded != rounded)
        for kind, pattern in _patterns(name).items():
            close = isinstance(plain, float | complex) and natural[kind] == name and abs(plain) < 1e30
            if exact or close:
                found = xla_ckpt.restore(tmp_path, "a", {"v": pattern}).tree["v"]
                assert tuple(found.shape) == ()
                assert str(found.dtype).removeprefix("torch.") == name
                assert _python(found) == rounded or plain != plain
            else:
                with pytest.raises(IncompatibleCheckpointError, match="changes its value") as caught:
                    xla_ckpt.restore(tmp_path, "a", {"v": pattern})
                assert caught.value.leaf == "v"


def test_cast_rounds_a_number(tmp_path: Path) -> None:
    saved(tmp_path, {"v": 0.1})
    found = xla_ckpt.restore(tmp_path, "a", {"v": jnp.zeros((), jnp.bfloat16)}, cast=True).tree["v"]
    assert (found.dtype, found) == (jnp.bfloat16, jnp.bfloat16(0.1))
    with pytest.raises(IncompatibleCheckpointError, match="changes its value"):
        xla_ckpt.restore(tmp_path, "a", {"v": jnp.zeros((), jnp.int32)}, cast=True)


def test_a_state_fits_its_own_eval_shape(tmp_path: Path) -> None:
    state = {
        "step": 3,
        "rate": 0.1,
        "on": True,
        "z": 0.1j,
        "n": np.float64(0.1),
        "i": np.int64(7),
        "w": jnp.asarray(0.1),
    }
    saved(tmp_path, state)
    found = xla_ckpt.restore(tmp_path, "a", jax.eval_shape(lambda: state)).tree
    assert same(found, jax.tree.map(jnp.asarray, state))
    assert jax.eval_shape(lambda: found) == jax.eval_shape(lambda: jax.tree.map(jnp.asarray, state))


def test_arrays_of_64_bits_are_not_truncated(tmp_path: Path) -> None:
    """jax makes arrays of 32 bits where it is asked for 64, unless jax_enable_x64 is on."""
    with jax.enable_x64(True):
        values = {
            "i": jnp.asarray([2**40 + 3, -1]), "f": jnp.asarray([1 / 3, 1e300]),
            "u": jnp.asarray([2**63 + 1], jnp.uint64), "c": jnp.asarray([1 + 1e-12j]),
        }  # fmt: skip
        assert {value.dtype.itemsize for value in values.values()} == {8, 16}
        saved(tmp_path, values)
        saved_as_numpy = jax.tree.map(np.asarray, values)
        xla_ckpt.save(tmp_path, "n", saved_as_numpy)
        everywhere = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        for tag in ("a", "n"):
            assert same(xla_ckpt.restore(tmp_path, tag, values).tree, values)
    for tag, (name, value) in itertools.product(("a", "n"), values.items()):
        as_numpy = saved_as_numpy[name]
        for like in (
            value,
            jax.ShapeDtypeStruct(value.shape, value.dtype),
            jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=everywhere),
            xla_ckpt.ArraySpec(value.shape, value.dtype.name, sharding=everywhere),
        ):
            with pytest.raises(xla_ckpt.UsageError, match="jax_enable_x64 is off") as caught:
                xla_ckpt.restore(tmp_path, tag, {name: like})
            assert caught.value.leaf == name
        for whole in (None, {name: as_numpy}):
            found = xla_ckpt.restore(tmp_path, tag, whole).tree[name]
            assert (found.dtype, found.tolist()) == (as_numpy.dtype, as_numpy.tolist())
        rounded = jax.ShapeDtypeStruct(value.shape, jnp.float32)
        if name == "f":
            assert xla_ckpt.restore(tmp_path, tag, {name: rounded}, cast=True).tree[name].dtype == jnp.float32
    xla_ckpt.save(tmp_path, "s", {"v": 3})
    with pytest.raises(xla_ckpt.UsageError, match="jax_enable_x64 is off"):
        xla_ckpt.restore(tmp_path, "s", {"v": xla_ckpt.ArraySpec((), "int64", sharding=everywhere)})


WEAK = {"temperature": jnp.asarray(0.1), "count": jnp.asarray(3), "several": jnp.full((2, 3), 0.5)}
STRONG = {name: value.astype(value.dtype) for name, value in WEAK.items()}
PLACED = {name: jax.device_put(value, jax.devices()[0]) for name, value in WEAK.items()}


def _weak_types(tree: Any) -> Any:
    return jax.tree.map(lambda value: value.weak_type, tree)


@pytest.mark.parametrize("state", [WEAK, STRONG, PLACED], ids=["weak", "strong", "placed"])
def test_the_weak_type_of_the_save_comes_back(tmp_path: Path, state: Any) -> None:
    """Weakly typed values take the element type of what they meet, so that a program would compute something else."""
    saved(tmp_path, state)
    xla_ckpt.convert(tmp_path, tmp_path / "converted", "a")
    shapes = jax.eval_shape(lambda: WEAK)
    for root, like in itertools.product((tmp_path, tmp_path / "converted"), (None, WEAK, STRONG, PLACED, shapes)):
        found = xla_ckpt.restore(root, "a", like).tree
        assert _weak_types(found) == _weak_types(state)
        assert same(found, state)
        if like is WEAK or like is PLACED:
            assert [v.committed for v in found.values()] == [like is PLACED] * 3
    model = dict(STRONG)
    xla_ckpt.save_checkpoint(tmp_path, "model", state)
    xla_ckpt.load_checkpoint(tmp_path, "model", model)
    assert _weak_types(model) == _weak_types(state)
    halves = jnp.ones((2, 3), jnp.bfloat16)
    assert (halves * found["several"]).dtype == (halves * state["several"]).dtype
    assert jax.jit(lambda v: v * 2)(found["several"]).weak_type == state["several"].weak_type


def test_tags_of_older_versions_take_the_weak_type_of_the_pattern(tmp_path: Path) -> None:
    saved(tmp_path, WEAK)
    path = tmp_path / "a" / "manifest.json"
    manifest = manifest_json.parse_manifest(path.read_bytes())
    unknown = {leaf: record.replace_metadata(weak_type=None) for leaf, record in manifest.arrays.items()}
    path.write_bytes(
        manifest_json.dump_manifest(dataclasses.replace(manifest, arrays=ArrayTable.from_records(unknown)))
    )
    assert b"weak_type" not in path.read_bytes()
    for like in (WEAK, STRONG, jax.eval_shape(lambda: WEAK)):
        assert _weak_types(xla_ckpt.restore(tmp_path, "a", like).tree) == _weak_types(like)
    assert not any(_weak_types(xla_ckpt.restore(tmp_path, "a").tree).values())


def test_a_weakly_typed_array_over_several_devices(tmp_path: Path) -> None:
    code = """
import sys, jax, jax.numpy as jnp, numpy as np, xla_ckpt
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
state = {"s": jax.device_put(jnp.full((8, 2), 0.5), split), "r": jax.device_put(jnp.full((2,), 0.5), whole)}
xla_ckpt.save(sys.argv[1], "a", state)
like = {"s": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=NamedSharding(mesh, P("x", "y"))), "r": state["r"]}
found = xla_ckpt.restore(sys.argv[1], "a", like).tree
for name, value in found.items():
    assert value.weak_type and state[name].weak_type and value.sharding == like[name].sharding and value.committed
    assert (value == state[name]).all() and (value * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16, name
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=eight_devices(), check=True)


class Streams(Nameless):
    """As nnx.Rngs: each attribute that it is asked for is a stream, which draws when it is called."""

    drawn = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def draw(*_: Any) -> Any:
            self.drawn += 1
            return {"key": jax.random.key(self.drawn)}

        return draw


class Loader(Nameless):
    """A class that is registered with jax, and has a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"parts": list(self.parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts = tuple(state["parts"])


for kind in (Streams, Loader):
    jax.tree_util.register_pytree_node_class(kind)


def test_methods_that_a_pytree_makes_up_are_not_called(tmp_path: Path) -> None:
    streams, other = Streams(ONE), Streams(TWO)
    for objects in (
        {"extras": {"rngs": streams}},
        {"extras": {"rngs": xla_ckpt.PerRank(streams)}},
        {"optimizer": streams},
        {"scheduler": streams},
    ):
        with pytest.raises((xla_ckpt.UnsupportedStateError, xla_ckpt.UsageError), match="state_dict"):
            xla_ckpt.save_checkpoint(tmp_path, "a", {"w": ONE}, **objects)
        assert xla_ckpt.list_tags(tmp_path) == []
    saved(tmp_path, {"rngs": streams, "nested": [streams]})
    found = xla_ckpt.restore(tmp_path, "a", {"rngs": other, "nested": [other]}).tree
    assert found["rngs"].parts[0].tolist() == found["nested"][0].parts[0].tolist() == [1, 1]
    xla_ckpt.save_checkpoint(tmp_path, "b", {"w": ONE}, extras={"rngs": {"state": ONE}, "loader": Loader(ONE)})
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="state_dict"):
        xla_ckpt.load_checkpoint(tmp_path, "b", extras={"rngs": other})
    loader = Loader(TWO)
    xla_ckpt.load_checkpoint(tmp_path, "b", extras={"loader": loader})
    assert loader.parts[0].tolist() == [1, 1]
    assert streams.drawn == other.drawn == 0


@pytest.mark.parametrize(
    "model", [Train(5, {}, jnp.sin), grown(1), Nameless(ONE), Plain(ONE), [ONE], (ONE,)], ids=lambda m: type(m).__name__
)
def test_what_no_load_takes_as_a_model_is_not_saved_as_one(tmp_path: Path, model: Any) -> None:
    with pytest.raises(xla_ckpt.UsageError, match=r"no model.*xla_ckpt.restore") as caught:
        xla_ckpt.save_checkpoint(tmp_path, "a", model)
    assert (caught.value.leaf, xla_ckpt.list_tags(tmp_path)) == ("model", [])
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": ONE})
    with pytest.raises(xla_ckpt.UsageError, match="no model"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model)


def test_registered_classes_in_a_dict_are_loaded_like_its_own(tmp_path: Path) -> None:
    state = {
        "train": [Train(5, grown(1), jnp.sin)],
        "keyed": Keyed(scale=ONE, shift=TWO),
        "w": TWO,
        "n": 7,
        "m": {1: 2, "a": 3},
    }
    xla_ckpt.save_checkpoint(tmp_path, "a", dict(state), extras={"state": dict(state)})
    for place in ("model", "extras"):
        own = {
            "train": [Train(0, grown(0), jnp.cos)],
            "keyed": Keyed(scale=TWO, shift=ONE),
            "w": ONE,
            "n": 0,
            "m": {1: 0, "a": 0},
        }
        xla_ckpt.load_checkpoint(tmp_path, "a", **{place: own if place == "model" else {"state": own}})
        assert own.pop("m") == state["m"]  # jax takes no dict apart whose keys have no order
        assert same(own, {k: v for k, v in state.items() if k != "m"} | {"train": [Train(5, grown(1), jnp.cos)]})
        for wrong, error in (
            ({"keyed": Keyed(shift=TWO, scale=ONE)}, "register_pytree_with_keys"),
            ({"train": [Train(0, Frozen({"inner": grown(0).held["inner"]}), jnp.cos)]}, "stored, but not wanted"),
            ({"train": [Train(0, Frozen({**grown(0).held, "more": ONE}), jnp.cos)]}, "wanted, but not stored"),
        ):
            other = {**own, "m": {}, **wrong}
            before = dict(other)
            with pytest.raises(IncompatibleCheckpointError, match=error):
                xla_ckpt.load_checkpoint(tmp_path, "a", **{place: other if place == "model" else {"state": other}})
            assert all(other[key] is before[key] for key in before)
