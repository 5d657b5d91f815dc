"""neuronx-distributed's attributes are read by one rule, for a job's own arrays and for those of the job that saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.gold import as_rank
from tests.formats.test_nxd_layouts import rank_file
from xla_ckpt import Mesh
from xla_ckpt.core.sharding.sharding import Sharding
from xla_ckpt.state.shardings import get_declared_sharding, get_unpadded_shape

TP = {"tensor_model_parallel": True, "partition_dim": 0}


def parameter(shape: tuple[int, ...], attributes: dict[str, Any]) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(shape))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def spec(mesh: Mesh | None, shape: tuple[int, ...] = (4, 6), **attributes: Any) -> Any:
    found = get_declared_sharding(parameter(shape, attributes), "model/w", mesh)
    return None if found is None else found.spec


@pytest.mark.parametrize(
    ("attributes", "in_job", "anywhere"),
    [
        ({}, None, None),
        (TP, ("tp", None), ("tp", None)),
        ({**TP, "partition_dim": -1}, (None, "tp"), (None, "tp")),
        ({**TP, "partition_stride": 2}, (("tp", 2), None), (("tp", 2), None)),
        ({**TP, "partition_stride": None}, ("tp", None), ("tp", None)),
        ({**TP, "num_partitions": 2}, ("tp", None), ("tp", None)),
        # whole on each rank of this job; of the job that saved it says nothing
        ({**TP, "num_partitions": 1}, None, ("tp", None)),
        ({"tensor_model_parallel": False, "partition_dim": -1}, None, None),
        ({"tensor_model_parallel": None, "partition_dim": None}, None, None),
        ({"expert_model_parallel": True}, ("ep", None), ("ep", None)),
        ({**TP, "partition_dim": 1, "expert_model_parallel": True}, ("ep", "tp"), ("ep", "tp")),
    ],
)
def test_what_they_say(attributes: dict[str, Any], in_job: Any, anywhere: Any) -> None:
    assert spec(Mesh(dp=2, ep=2, tp=2), **attributes) == in_job
    assert spec(None, **attributes) == anywhere
    assert spec(Mesh(), **{**attributes, "num_partitions": 1}) is None  # a job of one rank splits nothing


@pytest.mark.parametrize("mesh", [None, Mesh(dp=2, ep=2, tp=2)], ids=str)
@pytest.mark.parametrize(
    ("shape", "attributes", "words"),
    [
        ((4, 6), {"tensor_model_parallel": True}, "partition_dim None"),
        ((4, 6), {**TP, "partition_dim": None}, "partition_dim None"),
        ((4, 6), {**TP, "partition_dim": 2}, "partition_dim 2"),
        ((4, 6), {**TP, "partition_dim": "0"}, "partition_dim 0"),
        ((4, 6), {**TP, "partition_stride": -2}, "partition_stride -2"),
        ((), TP, "do not fit"),
        ((4, 6), {**TP, "expert_model_parallel": True}, "split the same dim"),
        ((), {"expert_model_parallel": True}, "cannot hold experts"),
    ],
)
def test_contradictions_are_errors(
    shape: tuple[int, ...], attributes: dict[str, Any], words: str, mesh: Mesh | None
) -> None:
    with pytest.raises(xla_ckpt.UnsupportedStateError, match=words) as caught:
        spec(mesh, shape, **attributes)
    assert caught.value.leaf == "model/w"


def test_sizes_of_this_job_are_compared_with_this_job_only() -> None:
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="num_partitions 8"):
        spec(Mesh(tp=2), **TP, num_partitions=8)
    assert spec(None, **TP, num_partitions=8) == ("tp", None)
    assert spec(Mesh(tp=2), **TP, expert_model_parallel=True) == ("tp", None)  # there is one expert-parallel rank


def test_integers_in_a_row_for_each_rank_of_the_world() -> None:
    """neuronx-distributed's `SPMDRank`: without this no job with experts could be saved."""
    mesh = Mesh(pp=2, dp=2, ep=2, tp=2)
    for shape in ((1,), (1, 3)):
        number = torch.nn.Parameter(torch.zeros(shape, dtype=torch.int32), requires_grad=False)
        for name, value in {**TP, "num_partitions": 8}.items():
            setattr(number, name, value)
        found, anywhere = get_declared_sharding(number, "model/w", mesh), get_declared_sharding(number, "model/w")
        assert found == anywhere == Sharding.parse((("dp", "cp", "tp"), *(None,) * (len(shape) - 1)))
        number.num_partitions = 2
        assert get_declared_sharding(number, "model/w", mesh) == Sharding.parse(("tp", *(None,) * (len(shape) - 1)))
        number.num_partitions = 4
        with pytest.raises(xla_ckpt.UnsupportedStateError, match="num_partitions 4"):
            get_declared_sharding(number, "model/w", mesh)
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="num_partitions 8"):
        spec(mesh, (1, 6), **TP, num_partitions=8)  # of a weight it makes no sense


@pytest.mark.parametrize("name", ["unpadded_shape", "global_shape"])
def test_the_true_shape_of_a_padded_parameter(name: str) -> None:
    for mesh in (None, Mesh(tp=2)):
        found = get_declared_sharding(parameter((4, 6), {**TP, name: (7, 6)}), "model/w", mesh)
        assert found == Sharding(found.dims, (7, 6))
        unfit = get_declared_sharding(parameter((4, 6), {**TP, name: (7,)}), "model/w", mesh)
        assert unfit == Sharding(found.dims)


def test_global_shape_is_no_padding_where_it_means_something_else() -> None:
    """It is torch's name in a CheckpointableTensor, and this library's older name of unpadded_shape."""
    both = parameter((4, 6), {**TP, "global_shape": (9, 6), "unpadded_shape": (7, 6)})
    assert get_unpadded_shape(both) == (7, 6)
    chunks = {"global_offsets": ((0, 0),), "local_offsets": ((0, 0),), "local_sizes": ((4, 6),)}
    assert get_unpadded_shape(parameter((4, 6), {"global_shape": (8, 6), **chunks})) is None
    for name in chunks:
        some = {"global_shape": (8, 6), name: chunks[name]}
        with pytest.raises(xla_ckpt.UnsupportedStateError, match="CheckpointableTensor are incomplete.*leaf model/w"):
            get_declared_sharding(parameter((4, 6), some), "model/w", Mesh(tp=2))


def test_saves_and_loads_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag of neuronx-distributed's was loaded as if a wrong attribute were none, and ours was not saved with it."""
    for tp in range(2):
        rank_file(tmp_path / "a/model", {"w": torch.full((2, 3), float(tp))}, tp=tp)
    (tmp_path / "a/done").write_text("1")
    as_rank(monkeypatch, Mesh(tp=2), 1)
    weight = parameter((2, 3), {"tensor_model_parallel": True, "partition_dim": 5})
    for load in (
        lambda: xla_ckpt.load_checkpoint(tmp_path, "a", {"w": weight}).user_content,
        lambda: xla_ckpt.save_checkpoint(tmp_path / "ours", "b", {"w": weight}),
    ):
        with pytest.raises(xla_ckpt.UnsupportedStateError, match="partition_dim 5") as caught:
            load()
        assert caught.value.leaf == "model/w"
    assert not weight.any()
    xla_ckpt.load_checkpoint(tmp_path, "a", {"w": weight}, shardings=[("w", ("tp", None))])
    assert weight[:, 0].tolist() == [1, 1]
    weight.partition_dim, weight.num_partitions = 0, 2
    with torch.no_grad():
        weight.zero_()
    xla_ckpt.load_checkpoint(tmp_path, "a", {"w": weight})
    assert weight[:, 0].tolist() == [1, 1]


def test_a_rule_leaves_padding_behind_as_an_attribute_does(tmp_path: Path) -> None:
    for tp in range(4):
        rank_file(tmp_path / "a/model", {"w": torch.arange(12.0).reshape(4, 3)[tp].clone()}, tp=tp)
    (tmp_path / "a/done").write_text("1")
    for attributes, rules in ((TP, None), ({}, [("w", ("tp",))])):
        weight = parameter((10,), {**attributes, "unpadded_shape": (10,)})
        xla_ckpt.load_checkpoint(tmp_path, "a", {"w": weight}, shardings=rules)
        assert weight.tolist() == list(range(10))
