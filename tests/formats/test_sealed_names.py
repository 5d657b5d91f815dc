"""What stands for a name in a pickle cannot be changed by a pickle: the next file would find it changed."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import pytest
import torch

from xla_ckpt.errors import CheckpointError
from xla_ckpt.formats.dcp import metadata
from xla_ckpt.formats.smp.scan import SCALERS
from xla_ckpt.formats.torch_save.pickle_stubs import TensorView
from xla_ckpt.formats.torch_save.unpickler import ALLOWED_NAMES, load_pickle

STATES: tuple[Any, ...] = (
    {"dtype": "int8", "made": None, "tid": 7},
    (None, {"__defaults__": ("int8",), "__init__": None, "tid": 7, "made": None}),
    ["int8"],
    "int8",
)


def tensors() -> bytes:
    """A pickle as torch.save writes it."""
    file = io.BytesIO()
    weight = torch.nn.Parameter(torch.ones(1))
    torch.save({"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.int64), "weight": weight}, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


def with_state(called: str, state: Any) -> bytes:
    """A pickle that gives a state to what a name stands for."""
    module, _, name = called.rpartition(".")
    pickled = pickle.dumps(state, protocol=2)[2:-1]  # without its head and its end
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + pickled + b"b."


MORE: dict[str, Any] = {**metadata._ALLOWED_NAMES, **SCALERS}
NAMES = [*ALLOWED_NAMES, *MORE]


@pytest.mark.parametrize("tolerant", [False, True])
@pytest.mark.parametrize("called", NAMES)
def test_a_name_takes_no_state(called: str, tolerant: bool) -> None:
    data = tensors()
    before = repr(load_pickle(data, "good.pt"))
    for state in STATES:
        with pytest.raises(CheckpointError):
            load_pickle(with_state(called, state), "crafted.pt", MORE, tolerant=tolerant)
        assert repr(load_pickle(data, "good.pt")) == before
    known = ALLOWED_NAMES.get(called, MORE.get(called))
    assert getattr(known, "tid", None) is None


def test_a_tensor_takes_no_state_of_another_type() -> None:
    """A `TensorView` is checked when it is made, and not again."""
    data = tensors()
    assert isinstance(load_pickle(data, "good.pt")["a"], TensorView)
    end = data.rindex(b"u.")  # after the last tensor, before the dict takes it
    crafted = data[:end] + pickle.dumps([None, "int8", 0, (9,), (1,)], protocol=2)[2:-1] + b"b" + data[end:]
    with pytest.raises(CheckpointError, match="which has none"):
        load_pickle(crafted, "crafted.pt")
