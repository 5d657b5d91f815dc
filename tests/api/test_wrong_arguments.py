"""Each argument of each public function with values of wrong kinds: an error of the library, or one that names it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from xla_ckpt.distributed import mesh_source

WRONG = (None, "", 5, -1, 1.5, b"x", [], {}, "nonsense", object())
ANY = {"tree", "model", "optimizer", "scheduler", "user_content", "like", "self"}
"""Arguments that take every value, or whose values have tests of their own."""

Call = tuple[Callable[..., Any], dict[str, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("roots")
    xla_ckpt.save(root / "r", "a", {"w": np.ones(3)})
    xla_ckpt.save_checkpoint(root / "m", "a", torch.nn.Linear(2, 2))
    return root


def calls(root: Path) -> dict[str, Call]:
    """Calls that are right."""
    x, number = xla_ckpt, next(NUMBERS)
    new, tag, of_tag = root / f"new-{number}", {"path": root / "new", "tag": "x"}, {"path": root / "r", "tag": "a"}
    checkpoints = x.Checkpoints(root / "r")
    return {
        "save": (x.save, {**tag, "tree": {"w": np.ones(2)}}),
        "save_checkpoint": (x.save_checkpoint, {**tag, "model": torch.nn.Linear(2, 2)}),
        "restore": (x.restore, of_tag),
        "load_checkpoint": (x.load_checkpoint, {"path": root / "m", "model": torch.nn.Linear(2, 2)}),
        "list_tags": (x.list_tags, {"path": root / "r"}),
        "latest_tag": (x.latest_tag, {"path": root / "r"}),
        "has_checkpoint": (x.has_checkpoint, {"path": root / "r"}),
        "verify": (x.verify, of_tag),
        "repair": (x.repair, of_tag),
        "explain": (x.explain, {**of_tag, "mesh": "dp=2"}),
        "convert": (x.convert, {"source": root / "r", "destination": new, "to": "native"}),
        "export_hf": (x.export_hf, {"path": root / "m", "destination": new}),
        "diff": (x.diff, {"a": root / "r", "b": root / "r"}),
        "on_report": (x.on_report, {"function": print}),
        "add_mesh_source": (x.add_mesh_source, {"source": lambda: None}),
        "register_layout": (x.register_layout, {"layout": None}),
        "Checkpoints": (x.Checkpoints, {"path": root / "r"}),
        "Checkpoints.show": (checkpoints.show, {"tag": "a"}),
        "Checkpoints.read": (checkpoints.read, {"leaf": "w", "tag": "a"}),
        "Checkpoints.pin": (checkpoints.pin, {"tag": "a"}),
        "Checkpoints.unpin": (checkpoints.unpin, {"tag": "a"}),
        "Checkpoints.delete": (checkpoints.delete, {"tag": "a"}),
        "LlamaJob": (x.LlamaJob, {}),
        "PreemptionGuard": (x.PreemptionGuard, {}),
        "SaveOptions": (x.SaveOptions, {}),
        "LoadOptions": (x.LoadOptions, {}),
        "ConvertOptions": (x.ConvertOptions, {}),
    }


NUMBERS = itertools.count()
NAMES = [(name, argument) for name, (call, _) in calls(Path("none")).items()
         for argument in inspect.signature(call).parameters if argument not in ANY]  # fmt: skip


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is registered for other tests, and a relative path is below a directory of this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mesh_source, "_sources", [])
    yield
    xla_ckpt.finalize_checkpoint()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument"), NAMES, ids=".".join)
def test_a_value_of_a_wrong_kind(root: Path, name: str, argument: str) -> None:
    for value in WRONG:
        call, right = calls(root)[name]
        try:
            result = call(**{**right, argument: value})
        except xla_ckpt.CheckpointError:
            continue
        except (TypeError, ValueError) as error:
            if argument not in str(error):
                pytest.fail(f"{name}({argument}={value!r}): {error}")
        else:
            if name == "on_report":
                result()  # removes it
            if name == "PreemptionGuard":
                result.close()


@pytest.mark.parametrize(
    ("call", "argument", "value", "expected"),
    [
        ("verify", "num_workers", "8", "a whole number, found '8'"),
        ("restore", "num_workers", 1.5, "a whole number, found 1.5"),
        ("export_hf", "max_shard_bytes", "5 GB", "a whole number, found '5 GB'"),
        ("restore", "shardings", 5, r"a list of \(regular expression, spec\), found 5"),
        ("save", "layout", 5, "a name, or a list of names, found 5"),
        ("Checkpoints.show", "leaf", 5, "a text, found 5"),
        ("convert", "pipeline_cuts", "layers.4", "a list, found 'layers.4'"),
        ("on_report", "function", 5, "a function, found 5"),
        ("PreemptionGuard", "every", "2", "a whole number, found '2'"),
    ],
)
def test_the_error_says_the_argument_and_what_it_takes(
    root: Path, call: str, argument: str, value: Any, expected: str
) -> None:
    function, right = calls(root)[call]
    message = f"{argument} is not of the kind that it takes: expected {expected}"
    with pytest.raises(xla_ckpt.UsageError, match=message):
        function(**{**right, argument: value})


def test_numbers_of_numpy_are_numbers(root: Path) -> None:
    assert xla_ckpt.verify(root / "r", "a", num_workers=np.int64(2)).ok  # type: ignore[arg-type]


def test_what_is_no_signal_and_what_is_no_layout() -> None:
    with pytest.raises(xla_ckpt.UsageError, match=r"signals has what is no signal.*-1"):
        xla_ckpt.PreemptionGuard(signals=[-1])  # type: ignore[list-item]
    with pytest.raises(xla_ckpt.UsageError, match="expected an object with a name, found 5. Derive a class"):
        xla_ckpt.register_layout(5)  # type: ignore[type-var]
