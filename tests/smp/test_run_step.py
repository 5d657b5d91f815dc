"""neuron_compat.smp.step: microbatches, outputs, gradients, and what ranks do together around a step."""

from __future__ import annotations

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch

import neuron_compat.smp as smp
from neuron_compat.emulated.smp.step import build_step_output, split_microbatches
from tests.jobs import run_on_ranks
from tests.smp.models import Plain, Split, batches, losses_of, make, train_step
from tests.smp.test_run_model import PP_RDP, TP_RDP

Pair = namedtuple("Pair", "a b")


@pytest.fixture
def model(clean: None) -> Any:
    smp.init({"microbatches": 4})
    return smp.DistributedModel(torch.nn.Linear(2, 1))


# -- arguments and results


def test_arguments_are_split(model: Any) -> None:
    class Own:
        def smp_slice(self, num_mb: int, mb: int, axis: int) -> tuple[int, int, int]:
            return num_mb, mb, axis

    seen: list[Any] = []

    @smp.step(non_split_inputs=["whole"], input_split_axes={"columns": 1, "more": 1})
    def function(rows: Any, columns: Any, whole: Any, *rest: Any, more: Any = None, flag: bool = True) -> Any:
        seen.append((rows, columns, whole, rest, more, flag))
        return rows["x"].sum()

    values = torch.arange(8.0)
    outer = function(
        {"x": values, "list": [values, Pair(values, "text")]}, values.reshape(2, 4), values, Own(), values,
        more=values.reshape(2, 4), flag=False,
    )  # fmt: skip
    assert len(seen) == 4
    rows, columns, whole, rest, more, flag = seen[1]
    assert rows["x"].tolist() == [2, 3] == rows["list"][0].tolist() == rows["list"][1].a.tolist()
    assert rows["list"][1].b == "text"
    assert columns.tolist() == [[1], [5]] == more.tolist()
    assert whole is values
    assert rest[0] == (4, 1, 0)
    assert rest[1].tolist() == [2, 3]
    assert flag is False
    assert [o.item() for o in outer] == [1, 5, 9, 13]
    seen.clear()

    @smp.step
    def again(output: Any) -> Any:
        seen.append(output.item())
        return output

    again(outer)
    assert seen == [1, 5, 9, 13], "a StepOutput gives each microbatch its own"


def test_outputs(model: Any) -> None:
    @smp.step
    def function(values: torch.Tensor) -> Any:
        weighed = model(values)
        return {
            "sum": values.sum(),
            "pair": (values, [values * 2]),
            "text": "a",
            "named": Pair(values, 1),
            "w": weighed,
        }

    found = function(torch.arange(16.0).reshape(8, 2))
    assert found["sum"].reduce_sum().item() == 120
    assert found["sum"].reduce_mean().item() == 30
    assert found["sum"].stack().tolist() == [6, 22, 38, 54]
    assert len(found["sum"]) == 4
    assert found["sum"][-1].item() == 54 == found["sum"].outputs[3].item()
    assert torch.equal(found["pair"][0].concat(), torch.arange(16.0).reshape(8, 2))
    assert found["pair"][1][0].concat().shape == (8, 2)
    assert found["text"] == ["a"] * 4
    assert found["named"].b == [1] * 4
    assert not found["w"][0].requires_grad
    assert found["sum"].map(float).outputs == [6, 22, 38, 54]
    kept = smp.step(lambda values: model(values), detach_outputs=False)(torch.ones(4, 2))
    assert kept[0].requires_grad
    made = smp.StepOutput([1])
    made.add_output(3)
    assert made.reduce_mean() == 2
    assert made.process_outputs(max) == 3
    made.clear()
    assert made.outputs is None
    with pytest.raises(ValueError, match="StepOutput only accepts list or tuple, but get <class 'str'>"):
        smp.StepOutput("ab")
    assert build_step_output([None, None]) == [None, None]


def test_refused_batches_and_names(model: Any) -> None:
    @smp.step
    def function(values: torch.Tensor) -> torch.Tensor:
        return values.sum()

    with pytest.raises(smp.TensorSplitError, match=r"values has 6 along dim 0: expected a multiple of 4.*drop_last"):
        function(torch.ones(6))
    with pytest.raises(ValueError, match=r'a tensor in values has no dim 0.*non_split_inputs=\["values"\]'):
        function(torch.tensor(1.0))
    assert function(torch.ones(8))[0] == 2
    for options, text in [
        ({"non_split_inputs": "values"}, "Non-split inputs must be a list"),
        ({"input_split_axes": ["values"]}, "input_split_axes must be a dict"),
        ({"non_split_inputs": ["other"]}, r"\['other'\] contains a non-argument of .*expected values, found other"),
        ({"input_split_axes": {"other": 1}}, "contains a non-argument"),
    ]:
        with pytest.raises(smp.SMPInvalidArgumentError, match=text):
            smp.step(lambda values: values, **options)
    smp.step(lambda **anything: 1, non_split_inputs=["other"])
    smp.reset()
    with pytest.raises(smp.DistributedModelNotWrappedError, match=r"needs to be wrapped with smp\.DistributedModel"):
        function(torch.ones(8))


def test_before_init(clean: None) -> None:
    with pytest.raises(smp.NotInitializedError):
        train_step(None, torch.ones(2), torch.ones(2))


def test_one_microbatch_is_passed_as_it_is() -> None:
    scalar = torch.tensor(1.0)
    assert split_microbatches(lambda x, y=1: x, (scalar,), {"y": [scalar]}, [], {}, 1) == [((scalar,), {"y": [scalar]})]


def test_what_is_not_split_is_said(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Batch:
        pass

    @smp.step
    def function(values: torch.Tensor, batch: Any, name: str) -> torch.Tensor:
        return values.sum()

    function(torch.ones(4), Batch(), "name")
    function(torch.ones(4), Batch(), "name")
    assert caplog.text.count("An object of type Batch is passed to each microbatch as it is") == 1
    assert "str" not in caplog.text


def test_a_step_that_is_a_method(model: Any) -> None:
    class Trainer:
        @smp.step
        def train(self, values: torch.Tensor) -> torch.Tensor:
            """What it does."""
            return model(values).sum()

    assert len(Trainer().train(torch.ones(4, 2)).outputs) == 4
    assert Trainer.train.__doc__ == "What it does."


# -- gradients


def test_gradients_add_up_over_microbatches_and_steps(model: Any) -> None:
    @smp.step
    def train(values: torch.Tensor) -> torch.Tensor:
        loss = model(values).mean()
        model.backward(loss)
        return loss

    values = torch.arange(16.0).reshape(8, 2)
    train(values)
    expected = values.mean(0, keepdim=True)
    torch.testing.assert_close(model.weight.grad, expected)
    train(values)
    torch.testing.assert_close(model.weight.grad, 2 * expected)
    model.average_grads_across_microbatches = False
    model.zero_grad()
    train(values)
    torch.testing.assert_close(model.weight.grad, 4 * expected)

    @smp.step
    def plain(values: torch.Tensor) -> torch.Tensor:
        loss = model(values).mean()
        loss.backward()
        return loss

    model.average_grads_across_microbatches = True
    model.zero_grad()
    plain(values)
    torch.testing.assert_close(model.weight.grad, expected)


def test_backward_takes_gradients_of_its_own(model: Any) -> None:
    @smp.step
    def train(values: torch.Tensor) -> torch.Tensor:
        found = model(values)
        model.backward([found], [torch.full_like(found, 2.0)])
        return found

    train(torch.ones(4, 2))
    assert model.weight.grad.tolist() == [[2.0, 2.0]]


def test_a_step_that_fails_leaves_the_gradients_as_they_were(model: Any) -> None:
    model.weight.grad = torch.full((1, 2), 7.0)

    @smp.step
    def train(values: torch.Tensor) -> None:
        model.backward(model(values).sum())
        raise RuntimeError("the program's own")

    with pytest.raises(RuntimeError, match="the program's own"):
        train(torch.ones(4, 2))
    assert model.weight.grad.tolist() == [[7.0, 7.0]]
    with pytest.raises(smp.BwdExecutionNotInStepFnError):
        model.backward(model(torch.ones(1, 2)).sum())


def test_a_step_without_backward(model: Any) -> None:
    with torch.no_grad():
        found = smp.step(lambda values: model(values))(torch.ones(4, 2))
    assert found.concat().shape == (4, 1)
    assert model.weight.grad is None


def test_partitions_stay_after_the_first_step(model: Any) -> None:
    smp.step(lambda values: model(values))(torch.ones(4, 2))
    with pytest.raises(smp.StepFunctionCalledError, match="needs to be called after using"):
        smp.set_partition(model.module, 0)


# -- ranks


def accumulates(rank: int) -> None:
    """Gradients are averaged in every second step; parameters without gradients somewhere, and nowhere."""
    smp.init({"ddp": True})
    inner = torch.nn.ModuleDict({n: torch.nn.Linear(1, 1, bias=False) for n in ("all", "one", "none")})
    model = smp.DistributedModel(inner, backward_passes_per_step=2, bucket_cap_mb=1e-6)

    @smp.step
    def train(value: torch.Tensor) -> torch.Tensor:
        loss = inner["all"](value).sum()
        if smp.rank() == 0:
            loss = loss + inner["one"](value).sum()
        model.backward(loss)
        return loss

    value = torch.full((2, 1), float(rank + 1))
    train(value)
    assert inner["all"].weight.grad.item() == 2 * (rank + 1), "of this rank alone"
    train(value)
    assert inner["all"].weight.grad.item() == 6, "the mean of 4 and 8"
    assert inner["one"].weight.grad.item() == 2, "the mean of 4 and nothing"
    assert inner["none"].weight.grad is None
    model.zero_grad()
    train(value)
    assert inner["all"].weight.grad.item() == 2 * (rank + 1), "of this rank alone again"
    smp.barrier()


def test_gradients_over_several_steps() -> None:
    run_on_ranks(accumulates, 2)


def fails_on_one(rank: int) -> str:
    smp.init({"ddp": True, "microbatches": 2})
    model = smp.DistributedModel(torch.nn.Linear(1, 1))

    @smp.step
    def train(values: torch.Tensor) -> torch.Tensor:
        return model(values).sum()

    with pytest.raises(smp.TensorSplitError) as caught:
        train(torch.ones(3 if rank == 1 else 4, 1))
    train(torch.ones(4, 1))  # and the job goes on
    smp.barrier()
    return str(caught.value)


def test_an_uneven_batch_of_one_rank_is_an_error_on_all() -> None:
    found = run_on_ranks(fails_on_one, 2)
    assert found[0] == found[1]
    assert "does not divide into microbatches: values has 3 along dim 0 [rank 1]" in found[0]


def other_batches(rank: int, kind: type[torch.nn.Module]) -> str | list[float]:
    smp.init({**TP_RDP, "microbatches": 1})
    model = smp.DistributedModel(make(kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [
        (ids[smp.dp_rank() :: smp.dp_size()], labels[smp.dp_rank() :: smp.dp_size()]) for ids, labels in batches(2, 16)
    ]
    if kind is Split:
        with pytest.raises(smp.SMPValidationError, match="were given different batches") as caught:
            losses_of(model, optimizer, data)
        smp.barrier()
        return str(caught.value)
    found = losses_of(model, optimizer, data)
    weights = smp.allgather(model.state_dict(gather_to_rank0=False)["first.weight"], smp.WORLD)
    assert all(torch.equal(w, weights[0]) for w in weights), "all ranks hold the same"
    return found


def test_tensor_parallel_ranks_with_batches_of_their_own() -> None:
    refused = run_on_ranks(other_batches, 4, Split)
    assert "Choose the data by smp.rdp_rank() and smp.rdp_size(), not by smp.dp_rank()" in str(refused[0])
    found = run_on_ranks(other_batches, 4, Plain)  # nothing is split: they are data-parallel, as in SMP
    smp.shutdown()
    smp.init({})
    model = smp.DistributedModel(make(Plain))
    expected = losses_of(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(2, 16))
    smp.shutdown()
    assert [sum(step) / 4 for step in zip(*found, strict=True)] == pytest.approx(expected, rel=1e-5)


def random_numbers(rank: int) -> list[Any]:
    """The ranks of a pipeline draw the numbers of the first one, and get its batch."""
    smp.init({**PP_RDP, "microbatches": 1})
    model = smp.DistributedModel(make(Plain))
    torch.manual_seed(rank)
    own = torch.get_rng_state()

    @smp.step
    def draw(values: torch.Tensor) -> Any:
        return torch.rand(3), values

    drawn, seen = draw(torch.full((2,), float(rank)))
    if smp.pp_rank():
        assert torch.equal(torch.get_rng_state(), own), "its own numbers go on as if nothing had been drawn"
    wrong = [torch.ones(2)] * (1 + smp.pp_rank())
    with pytest.raises(smp.SMPInvalidArgumentError, match="different arguments .*expected 1 tensors, as on pp_rank 0"):
        draw(*wrong)
    assert model.partitioned
    smp.barrier()
    return [drawn[0].tolist(), seen[0].tolist()]


def test_ranks_of_a_pipeline_compute_the_same() -> None:
    found = run_on_ranks(random_numbers, 4)
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[0][0] != found[1][0]
    assert found[0][1] == [0.0, 0.0]


def spreads(rank: int) -> None:
    """The first step begins with rank 0's values; so does the next one after a load on some ranks."""
    smp.init({"ddp": True})
    inner = torch.nn.Linear(2, 1)
    inner.register_buffer("seen", torch.full((), float(rank)))
    inner.register_buffer("hidden", torch.full((), float(rank)), persistent=False)
    model = smp.DistributedModel(inner)
    torch.nn.init.constant_(model.weight, rank)

    @smp.step
    def look(values: torch.Tensor) -> torch.Tensor:
        return model(values)

    look(torch.ones(1, 2))
    assert model.weight.tolist() == [[0.0, 0.0]]
    assert (inner.seen.item(), inner.hidden.item()) == (0, 0)
    if rank == 0:  # as SMP's users do it: the other ranks get it in the next step
        model.load_state_dict({**model.state_dict(), "weight": torch.full((1, 2), 5.0)})
    inner.seen.fill_(rank + 7)
    look(torch.ones(1, 2))
    assert model.weight.tolist() == [[5.0, 5.0]]
    assert inner.seen.item() == 7
    inner.seen.fill_(rank)
    model.broadcast_buffers = False
    look(torch.ones(1, 2))
    assert inner.seen.item() == rank
    smp.barrier()


def test_replicas_begin_alike() -> None:
    run_on_ranks(spreads, 2)


def other_seeds(rank: int) -> None:
    """Of each partition the values of its owner count, from the first step on in all of the pipeline."""
    smp.init(PP_RDP)
    model = smp.DistributedModel(make(Plain, seed=10 * smp.pp_rank() + 100 * smp.rdp_rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    owners = [make(Plain, seed=100 * smp.rdp_rank()), make(Plain, seed=10 + 100 * smp.rdp_rank())]
    full = model.state_dict(gather_to_rank0=False)
    assert torch.equal(full["first.weight"], owners[0].first.weight)
    assert torch.equal(full["second.weight"], owners[1].second.weight)
    losses_of(model, optimizer, batches(1, 16))
    owners = [make(Plain, seed=0), make(Plain, seed=10)]
    assert torch.equal(model.first.weight, owners[0].first.weight)
    assert torch.equal(model.second.weight, owners[1].second.weight)
    assert torch.equal(model.head.weight, owners[0].head.weight), "of a tied one the first owner counts"
    smp.barrier()


def test_partitions_begin_as_their_owners_have_them() -> None:
    run_on_ranks(other_seeds, 4)


def joins(rank: int) -> list[float]:
    """Rank 0 has two batches, rank 1 five."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @smp.step
    def train(values: torch.Tensor) -> torch.Tensor:
        loss = model(values).sum()
        model.backward(loss)
        return loss

    with model.join():
        for _ in range(2 if rank == 0 else 5):
            optimizer.zero_grad()
            train(torch.ones(1, 1))
            optimizer.step()
    weight = model.weight.item()
    with model.join(enable=False):
        train(torch.ones(1, 1))
    smp.barrier()
    return [weight]


def test_uneven_numbers_of_batches() -> None:
    # two steps with gradient 1, three with the mean of 0 and 1
    assert run_on_ranks(joins, 2) == [[pytest.approx(1 - 0.2 - 0.15)]] * 2


def talks(rank: int) -> None:
    smp.init({"partitions": 2, "tensor_parallel_degree": 2, "ddp": True})
    assert smp.allgather({"rank": rank}, smp.WORLD) == [{"rank": r} for r in range(4)]
    assert smp.allgather(rank, smp.CommGroup.TP_GROUP) == smp.get_tp_group()
    assert smp.allgather(rank, smp.RDP_GROUP) == [rank]
    gathered = smp.gather(torch.full((2,), rank), smp.PP_GROUP, rank=1)
    if smp.pp_rank() == 1:
        assert gathered is not None
        assert [g.tolist() for g in gathered] == [[smp.tp_rank()] * 2, [2 + smp.tp_rank()] * 2]
    else:
        assert gathered is None
    if smp.mp_rank() == 0:
        assert smp.broadcast("hello", smp.MP_GROUP) == "hello"
        smp.send([1, 2], 3, smp.RankType.MP_RANK)
    else:
        assert smp.recv_from(0, smp.RankType.MP_RANK) == "hello"
        if smp.mp_rank() == 3:
            assert smp.recv_from(0, smp.RankType.MP_RANK) == [1, 2]
    for barrier in (smp.barrier, smp.pp_barrier, smp.tp_barrier, smp.dp_barrier, smp.rdp_barrier, smp.mp_barrier):
        barrier()
    with pytest.raises(smp.InvalidCommGroupError, match="Invalid group 7 passed"):
        smp.allgather(1, 7)
    with pytest.raises(smp.SMPInvalidArgumentError, match="TP_RANK of this number: expected 0 to 1, found 2"):
        smp.send(1, 2, smp.RankType.TP_RANK)
    with pytest.raises(smp.SMPInvalidArgumentError, match="does not send to itself"):
        smp.recv_from(smp.tp_rank(), smp.RankType.TP_RANK)
    with pytest.raises(smp.SMPInvalidArgumentError, match=r"one of smp\.RankType"):
        smp.send(1, 0, "rank")
    with pytest.raises(smp.SMPInvalidArgumentError, match="has no such rank"):
        smp.gather(1, smp.WORLD, rank=9)
    assert smp.PP_GROUP.get_rank_type() is smp.RankType.PP_RANK
    assert smp.RankType.PP_RANK.get_comm_group() is smp.PP_GROUP
    smp.barrier()


def test_objects_between_ranks() -> None:
    run_on_ranks(talks, 4)


# -- XLA


def on_xla(rank: int) -> list[float]:
    """The same on XLA devices: emulated ranks, tensors brought to the CPU for states."""
    import torch_xla

    import neuron_compat

    neuron_compat.emulate()
    smp.init(TP_RDP)
    model = smp.DistributedModel(make(Split)).to(torch_xla.device())
    assert {p.device.type for p in model.parameters()} == {"xla"}
    assert model.is_distributed_parameter(model.up.weight), "parameters keep their attributes on the way"
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    part = slice(smp.rdp_rank(), None, smp.rdp_size())
    data = [(i[part].to(torch_xla.device()), lab[part].to(torch_xla.device())) for i, lab in batches(5, 16)]
    losses = losses_of(model, optimizer, data[:3])
    full, local = model.state_dict(gather_to_rank0=False), model.local_state_dict()
    states = copy.deepcopy([optimizer.state_dict(), optimizer.local_state_dict()])  # steps are counted in place
    kept = copy.deepcopy((full, local))
    assert {v.device.type for s in (full, local) for v in s.values() if isinstance(v, torch.Tensor)} == {"cpu"}
    then = losses_of(model, optimizer, data[3:])
    for state, before in zip((full, local), kept, strict=True):
        assert all(torch.equal(v, before[n]) for n, v in state.items() if isinstance(v, torch.Tensor))
    for weights, state in zip((full, local), states, strict=True):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert losses_of(model, optimizer, data[3:]) == pytest.approx(then, rel=1e-6)
    smp.barrier()
    return losses + then


@pytest.mark.xla
def test_on_xla_devices() -> None:
    from tests.smp.test_run_model import whole

    found = run_on_ranks(on_xla, 4, xla=True, timeout=280)
    losses, _ = whole(Split, 2)
    means = [sum(step) / 4 for step in zip(*found, strict=True)]
    assert means[:3] == pytest.approx(losses, rel=1e-4)
