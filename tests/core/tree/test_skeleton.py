"""A pattern takes what it names, in its own containers, and says clearly what is missing."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import pytest

from tests.strategies import FakeArray
from xla_ckpt.core.tree.flatten import Unflattener, flatten
from xla_ckpt.core.tree.skeleton import BuildValue, TemplateMatcher
from xla_ckpt.core.tree.values import Json, ValueCodec

CODEC = ValueCodec()


class Pair(NamedTuple):
    a: Any
    b: Any


def weave(pattern: Any, stored_tree: Any) -> tuple[Any, list[str]]:
    flat = flatten(stored_tree, lambda v: "fake" if isinstance(v, FakeArray) else None, CODEC)

    def whole(skeleton: Json, path: str) -> BuildValue:
        return lambda arrays: Unflattener(get_array=lambda p, k: arrays[p], codec=CODEC).build(skeleton, path)

    w = TemplateMatcher(lambda v: isinstance(v, FakeArray), CODEC, whole)
    make = w.match(pattern, flat.skeleton)
    if w.unmatched:
        raise LookupError(w.unmatched)
    return make({path: value.number for path, value in flat.arrays.items()}), list(w.matched)


STORED = {
    "model": {"w": FakeArray(1), "b": FakeArray(2)},
    "opt": [{"m": FakeArray(3)}, {"m": FakeArray(4)}],
    "pair": Pair(FakeArray(5), "text"),
    5: FakeArray(6),
    "lr": 0.5,
}
ANY = FakeArray(0)


def test_a_subtree_names_only_what_it_wants() -> None:
    assert weave({"model": {"w": ANY}}, STORED) == ({"model": {"w": 1}}, ["model/w"])


def test_containers_are_those_of_the_pattern() -> None:
    pattern = collections.OrderedDict(pair=Pair(ANY, None), model=collections.defaultdict(int, b=ANY))
    made, _ = weave(pattern, STORED)
    assert type(made) is collections.OrderedDict
    assert made["pair"] == Pair(5, "text")
    assert (type(made["model"]), dict(made["model"])) == (collections.defaultdict, {"b": 2})


def test_placeholders_take_the_stored_value_whole() -> None:
    assert weave({"opt": None, "lr": 0.0, 5: ANY}, STORED)[0] == {"opt": [{"m": 3}, {"m": 4}], "lr": 0.5, 5: 6}


@pytest.mark.parametrize(
    ("pattern", "leaf", "words"),
    [
        ({"model": {"v": ANY}}, "model/v", "wanted, but not stored; stored beside it: w, b"),
        ({"model": ANY}, "model", "2 parts stored, an array wanted"),
        ({"lr": {"x": 1}}, "lr", "0.5 stored, a container wanted"),
        ({"opt": [None]}, "opt", "2 parts stored, 1 items wanted"),
        ({"lr": ANY}, "lr", "0.5 stored, an array wanted"),
    ],
)
def test_what_does_not_fit_is_named(pattern: Any, leaf: str, words: str) -> None:
    with pytest.raises(LookupError) as caught:
        weave(pattern, STORED)
    assert caught.value.args == ({leaf: words},)


def test_all_that_does_not_fit_is_named() -> None:
    pattern = {"model": {"v": ANY, "w": ANY, "u": {"x": ANY}}, "lr": {"x": 1, "y": 2}, "opt": [None], "new": 1}
    with pytest.raises(LookupError) as caught:
        weave(pattern, STORED)
    assert list(caught.value.args[0]) == ["model/v", "model/u", "lr", "opt", "new"]
