"""Flattening keeps everything: values, types, order, and where the arrays were."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import types
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import FakeArray, keys, same, trees
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree.flatten import Unflattener, flatten, format_key
from xla_ckpt.core.tree.skeleton import find_arrays, get_children, get_part
from xla_ckpt.core.tree.values import ValueCodec
from xla_ckpt.errors import FormatError, UnsupportedStateError

CODEC = ValueCodec()


def kind(value: Any) -> str | None:
    return "fake" if isinstance(value, FakeArray) else None


class Point(NamedTuple):
    x: Any
    y: Any


class Color(enum.Enum):
    RED = 1


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    extra: Any = None


CLASSES = {f"{c.__module__}:{c.__qualname__}": c for c in (Point, Color, Config, Bits)} | {
    "types:SimpleNamespace": types.SimpleNamespace
}


def round_trip(tree: Any) -> Any:
    flat = flatten(tree, kind, CODEC)
    stored = json.loads(json.dumps(flat.skeleton, allow_nan=False))
    objects = [value for _, value in flat.objects]
    build = Unflattener(
        get_array=lambda path, _: flat.arrays[path],
        codec=CODEC,
        get_object=lambda i, _: objects[i],
        resolve_class=lambda name, _: CLASSES[name],
    )
    return build.build(stored)


@given(trees)
def test_round_trip(tree: Any) -> None:
    assert same(round_trip(tree), tree)


@given(trees)
def test_every_array_has_its_own_path_and_can_be_found(tree: Any) -> None:
    flat = flatten(tree, kind, CODEC)
    assert find_arrays(flat.skeleton, "") == dict.fromkeys(flat.arrays, "fake")
    for path in flat.arrays:
        assert get_part(flat.skeleton, path) == {"$array": "fake"}


@pytest.mark.parametrize(
    "tree",
    [
        Point(1, FakeArray(2)),
        Config(3, {"a": FakeArray(1)}),
        Color.RED,
        {Color.RED: 1, ("a", Color.RED): 2},
        Bits.A | Bits.B,
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.defaultdict(list, {"a": [1]}),
        collections.Counter("abca"),
        collections.deque([1, FakeArray(2)], maxlen=5),
        types.SimpleNamespace(a=1, b=[FakeArray(0)]),
        slice(1, None, 2),
        {"$array": "not an array"},
        {"": {"~": {"/": FakeArray(1)}}},
        {1: "int", "1": "str", True is None: "bool"},
        float("nan"),
        [float("inf"), -0.0, 5e-324, 1e400],
    ],
    ids=repr,
)
def test_kinds_of_containers(tree: Any) -> None:
    again = round_trip(tree)
    assert type(again) is type(tree)
    assert repr(again) == repr(tree)


def test_what_is_not_plain_becomes_an_object() -> None:
    strange = object()
    tree = {"a": [strange], "late": collections.defaultdict(lambda: 0, {1: 2})}
    flat = flatten(tree, kind, CODEC)
    assert [path for path, _ in flat.objects] == ["a/0", "late"]
    assert round_trip(tree)["a"][0] is strange


def test_a_dataclass_with_more_attributes_than_fields_is_an_object() -> None:
    @dataclasses.dataclass
    class Loose:
        a: int

    value = Loose(1)
    value.b = 2  # type: ignore[attr-defined]
    assert len(flatten(value, kind, CODEC).objects) == 1


def test_rebuilding_a_dataclass_calls_none_of_its_code() -> None:
    calls = []

    @dataclasses.dataclass
    class Loud:
        a: int

        def __post_init__(self) -> None:
            calls.append(self.a)

    flat = flatten(Loud(1), kind, CODEC)
    calls.clear()
    made = Unflattener(get_array=lambda p, k: None, codec=CODEC, resolve_class=lambda n, b: Loud).build(flat.skeleton)
    assert (made.a, calls) == (1, [])


def test_cycles_and_absurd_depth_are_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        flatten(loop, kind, CODEC)
    deep: Any = 0
    for _ in range(500):
        deep = [deep]
    with pytest.raises(UnsupportedStateError, match="nested deeper"):
        flatten(deep, kind, CODEC)


def test_shared_containers_are_no_cycle() -> None:
    part = [1, 2]
    assert round_trip({"a": part, "b": part}) == {"a": [1, 2], "b": [1, 2]}


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                st.text(max_size=4),
                st.sampled_from(
                    "$array $object $dict $tuple $set $namedtuple $dataclass $enum $float $bytes $complex $range "
                    "$deque $defaultdict $Counter $OrderedDict $datetime $uuid $decimal $slice $frozenset "
                    "$namespace".split()
                ),
            ),
            inner,
            max_size=2,
        ),
    ),
    max_leaves=8,
)


@given(json_values)
def test_hostile_skeletons_raise_typed_errors(skeleton: Any) -> None:
    def refuse(name: str, base: type) -> Any:
        raise FormatError("unknown class")

    try:
        Unflattener(get_array=lambda p, k: None, codec=CODEC, get_object=lambda i, p: None, resolve_class=refuse).build(
            skeleton
        )
    except FormatError:
        pass


@given(st.lists(st.one_of(st.text(max_size=5), keys.filter(lambda k: isinstance(k, str))), max_size=4))
def test_paths_split_into_what_was_joined(parts: list[str]) -> None:
    path = ""
    for part in parts:
        path = paths.join(path, paths.escape(part))
    assert [paths.unescape(p) for p in paths.split(path)] == parts


@given(st.sets(keys, max_size=6))
def test_keys_of_one_dict_never_share_a_component(some_keys: set[Any]) -> None:
    tree = {k: FakeArray(i) for i, k in enumerate(some_keys)}
    assert len(flatten(tree, kind, CODEC).arrays) == len(tree)
    below = get_children(flatten(tree, kind, CODEC).skeleton)
    assert below is not None
    assert len(below) == len(tree)


def test_component_of_other_keys_is_no_string_key() -> None:
    assert format_key(3) == "~(3)"
    assert format_key("~(3)") == "~0(3)"
