"""neuron_compat.nxd.parallel_layers.parallel_state: which rank is what."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import neuron_compat.nxd as nxd
from neuron_compat.emulated.parallel_state import REAL_MODULE
from neuron_compat.groups import list_rank_groups
from neuron_compat.nxd.parallel_layers import parallel_state
from tests.jobs import run_on_ranks
from tests.runs import run
from xla_ckpt import Mesh

MESHES = [
    Mesh(pp=pp, dp=dp, ep=ep, cp=cp, tp=tp)
    for pp, dp, cp, tp in itertools.product(range(1, 17), repeat=4)
    if pp * dp * cp * tp <= 16
    for ep in range(1, dp + 1)
    if dp % ep == 0
]


def by_hand(mesh: Mesh) -> dict[str, set[tuple[int, ...]]]:
    """All groups, from ranks numbered in nested loops, and nothing of the library."""
    pp, edp, ep, cp, tp = mesh.pp, mesh.dp // mesh.ep, mesh.ep, mesh.cp, mesh.tp
    number = itertools.count()
    rank = {place: next(number) for place in itertools.product(*map(range, (pp, edp, ep, cp, tp)))}
    axes = {"pp": (0,), "dp": (1, 2), "cp": (3,), "tp": (4,), "ep": (2,), "edp": (1, 3), "dp_cp": (1, 2, 3),
            "pp_tp": (0, 4), "world": (0, 1, 2, 3, 4)}  # fmt: skip
    return {
        kind: {
            tuple(sorted(r for p, r in rank.items() if all(p[i] == q[i] for i in range(5) if i not in free)))
            for q in rank
        }
        for kind, free in axes.items()
    }


@given(st.sampled_from(MESHES))
def test_groups_are_those_counted_by_hand(mesh: Mesh) -> None:
    for kind, expected in by_hand(mesh).items():
        found = list_rank_groups(mesh, kind)
        assert [tuple(g) for g in found] == sorted(expected), kind
        assert sorted(itertools.chain(*found)) == list(range(mesh.size))


def test_examples_of_neuronx_distributed() -> None:
    # the second example in the documentation of its initialize_model_parallel: 128 ranks, tp 8, pp 4, ep 2
    mesh = Mesh(pp=4, dp=4, ep=2, tp=8)
    assert list_rank_groups(mesh, "pp")[0] == [0, 32, 64, 96]
    assert list_rank_groups(mesh, "dp")[0] == [0, 8, 16, 24]
    assert list_rank_groups(mesh, "dp")[-1] == [103, 111, 119, 127]
    assert list_rank_groups(mesh, "edp")[0] == [0, 16]
    assert list_rank_groups(mesh, "edp")[-1] == [111, 127]
    assert list_rank_groups(mesh, "ep")[0] == [0, 8]
    assert list_rank_groups(mesh, "ep")[-1] == [119, 127]
    assert list_rank_groups(mesh, "tp")[1] == [8, 9, 10, 11, 12, 13, 14, 15]
    # what it made of 8 ranks, tp 2, cp 2
    assert list_rank_groups(Mesh(dp=2, cp=2, tp=2), "dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert list_rank_groups(Mesh(dp=2, cp=2, tp=2), "edp") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_one_process(clean: None) -> None:
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(AssertionError, match="initialize_model_parallel"):
        parallel_state.get_tensor_model_parallel_size()
    with pytest.raises(RuntimeError, match="cannot be divided"):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with pytest.raises(RuntimeError, match="ep=2 does not divide"):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    nxd.parallel_layers.parallel_state.initialize_model_parallel()
    assert parallel_state.model_parallel_is_initialized()
    assert parallel_state.get_data_parallel_replica_groups() == [[0]]
    assert (parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()) == (1, 0)
    assert parallel_state.is_global_rank_zero()
    with pytest.raises(AssertionError, match=r"torch\.distributed was not initialised"):
        parallel_state.get_tensor_model_parallel_group()
    with pytest.raises(RuntimeError, match="initialised already"):
        parallel_state.initialize_model_parallel()


def test_the_real_one_answers_if_it_is_imported(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = types.ModuleType(REAL_MODULE)
    real.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
    real.get_tensor_model_parallel_size = lambda: 64  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, REAL_MODULE, real)
    assert parallel_state.model_parallel_is_initialized()
    assert parallel_state.get_tensor_model_parallel_size() == 64


def groups_of_meshes(rank: int) -> None:
    ps = parallel_state
    for mesh in map(Mesh.parse, ("pp=2,dp=2", "dp=4,ep=2", "cp=2,tp=2", "dp=2,tp=2")):
        ps.initialize_model_parallel(
            mesh.tp, mesh.pp, context_parallel_size=mesh.cp, expert_model_parallel_size=mesh.ep
        )
        at = mesh.coordinates(rank)
        for axis, name in {
            "tp": "tensor_model", "pp": "pipeline_model", "cp": "context_model", "ep": "expert_model", "dp": "data",
        }.items():  # fmt: skip
            ask = {
                what: getattr(ps, f"get_{name}_parallel_{what}") for what in ("size", "rank", "group", "replica_groups")
            }
            assert ask["size"]() == mesh.sizes[axis], (axis, mesh)
            assert ask["rank"]() == at[axis], (axis, mesh)
            group, lists = ask["group"](), ask["replica_groups"]()
            assert lists == ask["group"](as_list=True) == list_rank_groups(mesh, axis)
            mine = next(g for g in lists if rank in g)
            assert dist.get_process_group_ranks(group) == mine
            assert dist.get_rank(group) == at[axis]
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(mine)
        assert ps.get_expert_data_parallel_size() == mesh.sizes["edp"] * mesh.cp
        assert ps.get_world_group(as_list=True) == [[0, 1, 2, 3]]
        assert ps.get_tensor_model_parallel_src_rank() == rank - at["tp"]
        assert ps.get_data_parallel_src_rank() == mesh.rank({**at, "dp": 0})
        assert ps.get_pipeline_model_parallel_next_rank() == mesh.rank({**at, "pp": (at["pp"] + 1) % mesh.pp})
        assert ps.get_pipeline_model_parallel_prev_rank() == mesh.rank({**at, "pp": (at["pp"] - 1) % mesh.pp})
        assert ps.is_global_rank_zero() == (rank == 0)
        ps.destroy_model_parallel()
        assert not ps.model_parallel_is_initialized()


def test_process_groups_of_a_job() -> None:
    run_on_ranks(groups_of_meshes, 4)


def test_importing_the_facade_loads_no_framework() -> None:
    run("""
        import sys
        import neuron_compat, neuron_compat.nxd as nxd, neuron_compat.nxd.optimizer, neuron_compat.nxd.parallel_layers
        assert nxd.has_checkpoint("/nowhere") is False and neuron_compat.has_checkpoint is nxd.has_checkpoint
        assert not {"torch", "torch_xla", "jax", "orbax"} & set(sys.modules)
        assert neuron_compat.parallel_layers is nxd.parallel_layers
        assert "save_checkpoint" in dir(nxd) and "ColumnParallelLinear" in dir(nxd.parallel_layers)
        assert {"emulate", "nxd", "optimizer"} <= set(dir(neuron_compat))
        assert "NeuronZero1Optimizer" in dir(nxd.optimizer)
        for module in (neuron_compat, nxd, nxd.parallel_layers, nxd.optimizer):
            try:
                module.nothing
            except AttributeError as error:
                assert "nothing" in str(error)
    """)
