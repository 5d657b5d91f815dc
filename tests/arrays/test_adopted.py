"""Memory that XLA adopts: it is given back without Python, which may be ending, and it is given back at all."""

from __future__ import annotations

import gc
import resource
import weakref
from pathlib import Path

import pytest
import torch

from tests.jobs import finish, run_program
from tests.nursery import Program, bear
from tests.xla import HAS_XLA
from xla_ckpt.arrays.dlpack_buffer import DLPackBuffer, is_dlpack_compatible
from xla_ckpt.snapshot.memory import SlabAllocator

pytestmark = pytest.mark.xla

if HAS_XLA:
    import torch_xla

    from xla_ckpt.arrays.xla_tensor import move_to_device

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip

RESUMES = """
import sys, torch, torch_xla, xla_ckpt
device = torch_xla.device()
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(20))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
def step():
    optimizer.zero_grad()
    model(torch.ones(8, 256, device=device)).sum().backward()
    optimizer.step()
    torch_xla.sync()
step()
if sys.argv[2] == "save":
    xla_ckpt.save_checkpoint(sys.argv[1], "a", model, optimizer)
else:
    xla_ckpt.load_checkpoint(sys.argv[1], "a", model, optimizer)
    step()
"""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 5), (700_001,)], ids=str)
def test_values(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    memory = DLPackBuffer(dtype, shape, SlabAllocator())
    made = memory.as_tensor()
    wanted = torch.randint(0, 2, shape).to(dtype)
    made.copy_(wanted)
    adopted = move_to_device(made, memory, torch_xla.device())
    assert (adopted.dtype, tuple(adopted.shape)) == (dtype, shape)
    assert torch.equal(adopted.cpu(), wanted)


def test_what_has_no_name_in_dlpack() -> None:
    assert not is_dlpack_compatible(torch.float8_e4m3fn, (2,))
    assert not is_dlpack_compatible(torch.float32, (2, 0))
    assert not is_dlpack_compatible(torch.float32, (1,) * 65)


def test_no_object_of_python_belongs_to_what_is_adopted() -> None:
    """XLA gives memory back on a thread that cannot wait for Python."""
    memory = DLPackBuffer(torch.float32, (1 << 20,), SlabAllocator())
    made = memory.as_tensor().fill_(3)
    adopted = move_to_device(made, memory, torch_xla.device())
    gone = weakref.ref(memory)
    del memory, made
    gc.collect()
    assert gone() is None
    assert float(adopted.sum()) == 3 << 20


def test_memory_is_given_back() -> None:
    nbytes = 64 << 20

    def adopt() -> None:
        memory = DLPackBuffer(torch.uint8, (nbytes,), SlabAllocator())
        made = memory.as_tensor().fill_(1)
        move_to_device(made, memory, torch_xla.device())

    def leave() -> None:
        DLPackBuffer(torch.uint8, (nbytes,), SlabAllocator()).as_tensor().fill_(1)

    adopt()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for _ in range(10):
        adopt()
        leave()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < 4 * nbytes


def test_a_program_that_resumes_ends_well(tmp_path: Path) -> None:
    """Its last step still runs, and gives loaded memory back, while the interpreter ends."""
    run_program(RESUMES, tmp_path, "save", xla=True)
    resumes = Program(RESUMES, (str(tmp_path), "load"))
    # More than one: it was so in three of five runs.
    for code, out, err in finish([bear(resumes, xla=True, end="as python") for _ in range(3)]):
        assert code == 0, out + err
