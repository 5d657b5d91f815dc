"""Classes that the program which loads does not have, or not as they were: no damage, and no older tag instead."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.nursery import Program, bear
from tests.runs import environment
from xla_ckpt.errors import IncompatibleCheckpointError, LoadError

SAVES = """
import collections, dataclasses, enum, sys
import torch, xla_ckpt

@dataclasses.dataclass
class Config:
    rate: float = 0.1

class Mode(enum.Enum):
    FAST = 1

Pair = collections.namedtuple("Pair", "a b")

class Plain:
    pass

model = torch.nn.Linear(2, 2)
for kind in (Config(), Mode.FAST, Pair(1, 2), Plain()):
    root = f"{sys.argv[1]}/{type(kind).__name__}"
    xla_ckpt.save_checkpoint(root, "old", {"w": torch.zeros(2)}, user_content=1)
    xla_ckpt.save_checkpoint(root, "new", {"w": torch.ones(2)}, user_content={"step": 2, "kind": kind})
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tags of a script whose `__main__` has classes of its own."""
    root = tmp_path_factory.mktemp("classes")
    script = bear(Program(SAVES, (str(root),), "saves.py"), env=environment())
    _, errors = script.communicate(120)
    assert script.returncode == 0, errors
    return root


@pytest.mark.parametrize("name", ["Config", "Mode", "Pair", "Plain"])
def test_a_class_of_another_script_is_no_damage(saved: Path, name: str) -> None:
    for tag in (None, "new"):
        target = {"w": torch.full((2,), 5.0)}
        with pytest.raises(IncompatibleCheckpointError, match=name) as caught:
            xla_ckpt.load_checkpoint(saved / name, tag, target, trust_pickle=True)
        assert "user_content/kind" in str(caught.value)
        assert "__main__" in str(caught.value)
        assert target["w"].tolist() == [5, 5]
        loaded = xla_ckpt.load_checkpoint(saved / name, tag, target, trust_pickle=True, strict=False)
        assert (loaded.report.tag, loaded.report.corrupt_tags, loaded.user_content) == ("new", (), None)
        assert any("user_content/kind" in skipped for skipped in loaded.report.skipped)
        assert target["w"].tolist() == [1, 1]
    with pytest.raises(IncompatibleCheckpointError, match=name):
        xla_ckpt.restore(saved / name, trust_pickle=True)
    weights: Any = xla_ckpt.restore(saved / name, None, {"model": None}).tree
    assert weights["model"]["w"].tolist() == [1, 1]


LATER = """
import collections, dataclasses, enum

class Mode(enum.Enum):
    SLOW = 2

Pair = collections.namedtuple("Pair", "a c")

@dataclasses.dataclass
class Config(dict):
    rate: float = 0.1

class Plain:
    def __setstate__(self, state):
        raise KeyError("rate")
"""


@pytest.mark.filterwarnings("ignore:.*will be pickled")
@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("Mode", IncompatibleCheckpointError, "has no member FAST any more"),
        ("Pair", IncompatibleCheckpointError, "fields of .*Pair have changed"),
        ("Config", IncompatibleCheckpointError, "has changed what it extends"),
        ("Plain", LoadError, "a pickled object refuses its stored state: KeyError: 'rate'"),
    ],
)
def test_a_class_that_has_changed_since_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[Exception], text: str
) -> None:
    def program(code: str) -> Any:
        module = types.ModuleType("somebodys")
        monkeypatch.setitem(sys.modules, "somebodys", module)
        exec(code, vars(module))
        return module

    classes = program(SAVES.partition("model =")[0])
    made = {"Mode": lambda c: c.FAST, "Pair": lambda c: c(1, 2)}.get(name, lambda c: c())(getattr(classes, name))
    if name == "Plain":
        made.rate = 0.1
    xla_ckpt.save_checkpoint(tmp_path, "old", user_content=1)
    xla_ckpt.save_checkpoint(tmp_path, "new", user_content={"kind": made})
    program(LATER)
    with pytest.raises(error, match=text) as caught:
        xla_ckpt.load_checkpoint(tmp_path, trust_pickle=True)
    assert "user_content/kind" in str(caught.value)
    assert xla_ckpt.verify(tmp_path, "new").ok
