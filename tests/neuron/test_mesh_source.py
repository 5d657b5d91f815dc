"""The facade announces its mesh to xla_ckpt, which does not know the facade."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import xla_ckpt
from neuron_compat.nxd.parallel_layers import parallel_state
from tests.jobs import job
from tests.runs import ROOT
from xla_ckpt.distributed.mesh_source import get_current_mesh


def test_no_string_and_no_name_of_xla_ckpt_is_the_facade() -> None:
    named = [
        f"{path}:{getattr(node, 'lineno', '?')}"
        for path in (ROOT / "xla_ckpt").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for value in vars(node).values()
        if isinstance(value, str) and "neuron_compat" in value
    ]
    assert named == []


def test_what_is_initialised_is_found_and_what_is_destroyed_is_not(clean: None) -> None:
    assert get_current_mesh(0, 1) is None
    parallel_state.initialize_model_parallel()
    assert get_current_mesh(0, 1) == xla_ckpt.Mesh()
    parallel_state.destroy_model_parallel()
    assert get_current_mesh(0, 1) is None


def test_any_library_can_announce_its_mesh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources: list[object] = []
    monkeypatch.setattr("xla_ckpt.distributed.mesh_source._sources", sources)
    meshes: list[xla_ckpt.Mesh | None] = [None, xla_ckpt.Mesh(tp=2)]
    for source in (lambda: meshes[0], lambda: meshes[1]):
        xla_ckpt.add_mesh_source(source)
        xla_ckpt.add_mesh_source(source)  # as a module that is imported anew does
    assert len(sources) == 2
    assert get_current_mesh(0, 2) == xla_ckpt.Mesh(tp=2)
    with pytest.raises(xla_ckpt.UsageError, match="the mesh does not fit the job"):
        xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(2)})
    meshes[1] = None
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(2)})


def save_directly(root: str) -> None:
    """On each of two ranks: the core's own save, with nothing but the facade's parallel state."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    weight = torch.nn.Parameter(torch.full((2, 3), float(parallel_state.get_tensor_model_parallel_rank())))
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
    xla_ckpt.save_checkpoint(root, "a", {"w": weight})


JOB = """
from tests.neuron.test_mesh_source import save_directly
save_directly(sys.argv[1])
"""


def test_a_direct_save_finds_the_mesh(tmp_path: Path) -> None:
    job(JOB, 2, tmp_path, tmp_path / "ckpt")
    assert xla_ckpt.restore(tmp_path / "ckpt").tree["model"]["w"][:, 0].tolist() == [0, 0, 1, 1]
