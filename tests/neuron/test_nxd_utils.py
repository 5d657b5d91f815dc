"""neuronx-distributed's small functions, and its random numbers over tensor-parallel ranks."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import neuron_compat
from neuron_compat.nxd.parallel_layers import parallel_state as ps
from neuron_compat.nxd.parallel_layers import random, utils
from neuron_compat.nxd.utils import logger, model_utils
from tests import xla
from tests.jobs import run_on_ranks
from xla_ckpt import UsageError

xla.begin()


@pytest.fixture
def alone() -> Iterator[None]:
    ps.initialize_model_parallel()
    yield
    ps.destroy_model_parallel()


def test_numbers() -> None:
    assert utils.divide(12, 3) == 4
    with pytest.raises(ValueError, match="13 is not divisible by 3"):
        utils.divide(13, 3)
    assert utils.get_padding_length(13, 4) == 3
    assert utils.is_torch_version_greater_than_2()
    assert not utils.requires_init_pg_override()


@pytest.mark.xla
def test_there_is_one_rank_on_this_host() -> None:
    assert utils.get_local_world_size() == 1


def test_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not utils.is_pjrt_device()
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    assert utils.is_pjrt_device()


def test_tensors_are_split_and_cast() -> None:
    value = torch.arange(12.0).reshape(2, 6)
    assert [p.shape for p in utils.split_tensor_along_last_dim(value, 3)] == [(2, 2)] * 3
    assert torch.equal(torch.cat(list(utils.split_tensor_along_second_dim(value, 2, True)), 1), value)
    assert utils.split_tensor_along_dim(value, 1, 2, True)[1].is_contiguous()
    with pytest.raises(ValueError, match="6 is not divisible by 4"):
        utils.split_tensor_along_dim(value, 1, 4)
    tree = {"a": [value, (value.long(),)], "b": "text"}
    cast = utils.cast_all(tree)
    assert cast["a"][0].dtype == torch.bfloat16
    assert cast["a"][1][0].dtype == torch.int64
    assert cast["b"] == "text"


@pytest.mark.xla
def test_xla_tensors_go_to_the_cpu() -> None:
    held = torch.ones(3, device="xla") * 2
    own = torch.zeros(1)
    tree = OrderedDict(a=[held, (held, own)], b=3)
    moved = utils.move_all_tensor_to_cpu(tree)
    assert type(moved) is OrderedDict
    assert moved["a"][0].device.type == "cpu"
    assert moved["a"][0].tolist() == [2, 2, 2]
    assert moved["a"][1][1] is own
    assert utils.move_all_tensor_to_cpu(tree, convert=False)["a"][0] is held


def test_attributes_of_parameters(alone: None) -> None:
    one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    assert utils.param_is_not_tensor_parallel_duplicate(one)
    utils.set_tensor_model_parallel_attributes(one, True, 1, 2)
    utils.copy_tensor_model_parallel_attributes(other, one)
    said: Any = other
    assert (said.tensor_model_parallel, said.partition_dim, said.partition_stride) == (True, 1, 2)
    plain: Any = torch.nn.Parameter(torch.zeros(2))
    utils.set_defaults_if_not_set_tensor_model_parallel_attributes(plain)
    assert (plain.tensor_model_parallel, plain.partition_dim, plain.partition_stride) == (False, -1, 1)


@pytest.mark.parametrize("device", xla.DEVICES)
def test_a_model_that_is_moved_keeps_ties_and_attributes(device: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False)))
    model[1][0].weight = model[0].weight
    model[0].weight.shared = True
    model[0].bias.sequence_parallel_enabled = True
    assert model_utils.analyze_shared_parameters(model) == [["0.weight", "1.0.weight"]]
    utils.move_model_to_device(model, device)
    assert model[1][0].weight is model[0].weight
    assert model[0].weight.device.type == device
    assert model[0].weight.shared
    assert model[0].bias.sequence_parallel_enabled
    assert not model_utils.is_hf_pretrained_model(model)


def test_modules_are_made_on_the_meta_device() -> None:
    with model_utils.init_on_device("meta", include_buffers=True):
        norm = torch.nn.BatchNorm1d(3)
        tied = torch.nn.Linear(3, 3)
        tied.other = tied.weight
    assert norm.weight.is_meta
    assert norm.running_mean is not None
    assert norm.running_mean.is_meta
    assert tied.other is tied.weight
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_the_logger_speaks_on_the_first_rank(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_LOG_LEVEL", "warning")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        logger.get_logger("ours").warning("from %s", rank)
        logger.get_logger("ours", rank0_only=False).warning("of all, from %s", rank)
        logger.get_logger("ours").info("nobody hears this")
    assert caplog.messages == ["from 0", "of all, from 0", "of all, from 1"]
    assert logger.get_logger("ours").level == logging.WARNING
    monkeypatch.setenv("NXD_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="NXD_LOG_LEVEL=loud"):
        logger.get_log_level()


# -- random numbers


def numbers() -> list[float]:
    """The next ones: two of the CPU's, and of dropout on all devices."""
    dropped = [torch.nn.functional.dropout(torch.ones(32, device=device), 0.5) for device in xla.present()]
    return [*torch.rand(2).tolist(), *torch.cat([d.cpu() for d in dropped]).tolist()]


def of_a_rank(rank: int) -> tuple[list[float], list[float], list[float]]:
    neuron_compat.emulate()
    ps.initialize_model_parallel(tensor_model_parallel_size=2)
    random.model_parallel_xla_manual_seed(7)
    common = numbers()
    with random.get_xla_rng_tracker().fork():
        first = numbers()
    return common, first, numbers()


@pytest.mark.xla
def test_ranks_differ_inside_of_a_fork_only() -> None:
    ranks = run_on_ranks(of_a_rank, 2, xla=True)
    (common, own, after), (its_common, its_own, its_after) = ranks
    assert common == its_common
    assert after == its_after
    assert after != common
    for part in (slice(0, 34), slice(34, None)):  # on the CPU, and on the device
        assert own[part] != its_own[part]


def test_states_are_kept_by_name(alone: None) -> None:
    tracker = random.get_xla_rng_tracker()
    random.model_parallel_xla_manual_seed(3)
    held = tracker.get_states()
    with tracker.fork():
        first = numbers()
    with tracker.fork():
        second = numbers()
    assert first != second
    tracker.set_states(held)  # as after a load
    with tracker.fork():
        assert numbers() == first
    random.model_parallel_xla_manual_seed(3)
    plain = numbers()
    random.model_parallel_xla_manual_seed(3)
    tracker.add("other", 99)
    with tracker.fork("other"):
        numbers()
    assert numbers() == plain  # nobody outside has noticed
    for seed, name, says in ((99, "third", "seed was added before"), (100, "other", "there is a state of this name")):
        with pytest.raises(UsageError, match=says):
            tracker.add(name, seed)
    with pytest.raises(UsageError, match="no state of this name.*found fourth"), tracker.fork("fourth"):
        pass
    torch.manual_seed(5)
    tracker.set_states({"theirs": torch.get_rng_state()})  # a state of neuronx-distributed's
    want = torch.rand(3)
    with tracker.fork("theirs"):
        assert torch.equal(torch.rand(3), want)
    tracker.reset()
    assert tracker.get_states() == {}
