"""Plain Python objects in the state of an optimizer, such as GaLore's projectors: stored as their attributes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.tree.values import Composite
from xla_ckpt.errors import IncompatibleCheckpointError, UntrustedObjectError
from xla_ckpt.state.values import CODEC, create_class_resolver


class Basis:
    """What a projector is made of."""

    def __init__(self, rows: int) -> None:
        self.sides = (torch.eye(rows), None)


class Projector:
    """Plain values, arrays, and an object of the same kind, as attributes."""

    def __init__(self, rows: int) -> None:
        self.rank, self.seen, self.kind = rows, 0, "std"
        self.basis = Basis(rows)
        self.matrix: torch.Tensor | None = None

    def project(self, gradient: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.matrix = gradient.clone() if self.matrix is None else self.matrix + gradient
        side = self.basis.sides[0]
        side.mul_(0.5)
        return side @ self.matrix


class Closing(Projector):
    """Runs code when it is collected."""

    def __del__(self) -> None:
        pass


class Pickling(Projector):
    """Says itself how it is pickled."""

    def __reduce__(self) -> Any:
        return (Pickling, (self.rank,))


class Around(Projector):
    """Contains itself."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.me = self


class Holding(Projector):
    """Holds something that is neither array nor plain."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.function = warnings.warn


class Projected(torch.optim.Optimizer):
    """Keeps an object for each parameter."""

    def __init__(self, parameters: Any, make: Callable[[int], Projector] = Projector) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.make = make

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            projector = self.state[p].setdefault("projector", self.make(len(p)))
            p.sub_(0.1 * projector.project(p.clone()))


def trained(steps: int, make: Callable[[int], Projector] = Projector) -> tuple[torch.nn.Module, Projected]:
    torch.manual_seed(steps)
    model = torch.nn.Linear(3, 2)
    optimizer = Projected(model.parameters(), make)
    for _ in range(steps):
        optimizer.step()
    return model, optimizer


def pickled(root: Path) -> int:
    return len(manifest_json.parse_manifest((root / "a" / "manifest.json").read_bytes()).object_files)


@pytest.mark.parametrize("steps", [0, 1], ids=["a fresh optimizer", "one with old state"])
def test_a_plain_object_comes_back_without_pickle(tmp_path: Path, steps: int) -> None:
    model, optimizer = trained(2)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    assert pickled(tmp_path) == 0
    other, target = trained(steps)
    xla_ckpt.load_checkpoint(tmp_path, "a", other, target)
    found = target.state[other.weight]["projector"]
    assert (type(found), type(found.basis), found.seen, found.kind) == (Projector, Basis, 2, "std")
    assert found.basis.sides[1] is None
    optimizer.step()
    target.step()
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_its_arrays_have_digests(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", *trained(1))
    arrays = manifest_json.parse_manifest((tmp_path / "a" / "manifest.json").read_bytes()).arrays
    assert "optimizer/state/weight/projector/basis/sides/0" in arrays


@pytest.mark.filterwarnings("ignore:.*will be pickled")
@pytest.mark.parametrize("make", [Closing, Pickling, Around, Holding])
def test_what_pickle_or_a_class_does_itself_is_left_to_pickle(tmp_path: Path, make: Callable[[int], Projector]) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", *trained(1, make))
    assert pickled(tmp_path) == 2
    with pytest.raises(UntrustedObjectError):
        xla_ckpt.load_checkpoint(tmp_path, "a", *trained(0, make))
    model, optimizer = trained(0, make)
    xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer, trust_pickle=True)
    assert type(optimizer.state[model.weight]["projector"]) is make


@pytest.mark.filterwarnings("ignore:.*will be pickled")
@pytest.mark.parametrize("layout", ["dcp", "pt"])
def test_other_layouts_pickle_it_and_conversions_make_it(tmp_path: Path, layout: str) -> None:
    model, optimizer = trained(2)
    xla_ckpt.save_checkpoint(tmp_path / "theirs", "a", model, optimizer, layout=layout)
    xla_ckpt.save_checkpoint(tmp_path / "native", "a", model, optimizer)
    xla_ckpt.convert(tmp_path / "native", tmp_path / "converted", "a", to=layout)
    for root in ("theirs", "converted"):
        other, target = trained(0)
        xla_ckpt.load_checkpoint(tmp_path / root, "a", other, target, trust_pickle=True)
        found = target.state[other.weight]["projector"]
        assert torch.equal(found.matrix, optimizer.state[model.weight]["projector"].matrix)


@pytest.mark.filterwarnings("ignore:.*will be pickled")
def test_an_object_in_user_content_is_the_programs_own(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", user_content=Basis(1))
    assert pickled(tmp_path) == 1


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("somebody.elses:Class", UntrustedObjectError, "not imported"),
        ("os:system", IncompatibleCheckpointError, "has changed or is gone"),
        ("subprocess:Popen", IncompatibleCheckpointError, "no plain class"),  # it has a __del__
        ("builtins:dict", IncompatibleCheckpointError, "no plain class"),
        (f"{__name__}:Pickling", IncompatibleCheckpointError, "no plain class"),
    ],
)
def test_no_code_runs_for_a_class_that_a_file_names(name: str, error: type[Exception], text: str) -> None:
    __import__("subprocess")
    with pytest.raises(error, match=text):
        CODEC.compose(Composite(f"object:{name}", {"pid": 1}, None), create_class_resolver(trust=False))


def test_a_class_that_is_gone_or_has_code_for_pickle_now_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", *trained(1))
    for now, text in ((None, "has changed or is gone"), (Closing, "which is no plain class now")):
        monkeypatch.setattr(sys.modules[__name__], "Projector", now)
        model, optimizer = trained(0)
        before = model.weight.tolist()
        with pytest.raises(IncompatibleCheckpointError, match=text):
            xla_ckpt.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        assert model.weight.tolist() == before
