"""neuron_compat.smp's DistributedModel: partitions, local and full state dicts, and loading them."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from typing import Any

import pytest
import torch

import neuron_compat.smp as smp
from neuron_compat.emulated.layers import cut_own_part
from neuron_compat.emulated.smp.model import divide_into_partitions, split_into_runs
from neuron_compat.nxd.parallel_layers import parallel_state
from neuron_compat.smp import rank_sync
from neuron_compat.smp.model_state import parse_partition_info
from neuron_compat.smp.stored import StoredState
from tests.jobs import finish, run_on_ranks, start_on_ranks
from tests.smp.models import Plain, Split, batches, losses_of, make, plain_losses

TP_RDP = {"tensor_parallel_degree": 2, "ddp": True, "microbatches": 2}
PP_TP = {
    "partitions": 2, "tensor_parallel_degree": 2, "ddp": True, "microbatches": 2,
    "auto_partition": False, "default_partition": 1,
}  # fmt: skip
PP_RDP = {"partitions": 2, "ddp": True, "microbatches": 2, "auto_partition": False, "default_partition": 0}
OWN = ("_smp_is_partial", "_smp_load_info")


def whole(kind: type[torch.nn.Module], microbatches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a run of one process, without anything of SMP but its contexts."""
    smp.shutdown()
    parallel_state.initialize_model_parallel()
    model = make(kind)
    losses = plain_losses(model, torch.optim.AdamW(model.parameters(), lr=0.05), batches(3, 16), microbatches)
    smp.shutdown()
    return losses, {n: v for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}


# -- jobs


def trains(rank: int, config: dict[str, Any], kind: type[torch.nn.Module]) -> dict[str, Any]:
    """Train, and look at all state dicts; every rank checks its own part of the full one."""
    smp.init(config)
    model = smp.DistributedModel(make(kind, seed=3 if smp.rdp_rank() == 0 else 99))
    hooked: list[Any] = []
    handle = model.register_post_partition_hook(lambda m, o: hooked.append((m is model, o)))
    handle.remove()
    model.register_post_step_hook(lambda m, o: hooked.append("stepped"))
    assert hooked == [(True, None)]
    assert model.partitioned
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    part = slice(smp.rdp_rank(), None, smp.rdp_size())
    losses = losses_of(model, optimizer, [(ids[part], labels[part]) for ids, labels in batches(3, 16)])
    assert hooked == [(True, None), "stepped"]
    model.register_post_step_hook(lambda m, o: hooked.append("at once"))
    assert hooked[-1] == "at once"

    full = model.state_dict(gather_to_rank0=False)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        expected = full[name]
        if getattr(parameter, "tensor_model_parallel", False):
            missing = parameter.shape[parameter.partition_dim] * 2 - expected.shape[parameter.partition_dim]
            expected = cut_own_part(expected, parameter.partition_dim, parameter.partition_stride, missing)
        assert torch.equal(parameter, expected), name
    at_rank_0 = model.state_dict()
    assert (at_rank_0.keys() == full.keys()) is (rank == 0), "the other ranks get an empty dict"
    assert all(torch.equal(v, full[n]) for n, v in at_rank_0.items() if isinstance(v, torch.Tensor))
    local = model.local_state_dict()
    smp.barrier()  # the store of the job ends with rank 0
    mine = {n for n, _ in model.local_named_parameters()} | {n for n, _ in model.local_named_buffers()}
    return {
        "losses": losses, "full": full, "local": local, "named": mine,
        "params": len(list(model.local_parameters())), "buffers": len(list(model.local_buffers())),
        "modules": {n for n, _ in model.local_named_modules()},
        "places": (smp.pp_rank(), smp.tp_rank(), smp.rdp_rank()),
    }  # fmt: skip


JOBS = {"tp2-rdp2": (TP_RDP, Split), "pp2-tp2": (PP_TP, Split), "pp2-rdp2": (PP_RDP, Plain)}


@functools.cache
def trained(name: str) -> list[dict[str, Any]]:
    """What the ranks of one of these jobs found; it runs once for all tests."""
    return run_on_ranks(trains, 4, *JOBS[name])


@pytest.mark.parametrize("name", JOBS)
def test_four_ranks_train_as_one_process_does(name: str) -> None:
    found, (config, kind) = trained(name), JOBS[name]
    losses, weights = whole(kind, 2)
    replicas = [[f["losses"] for f in found if f["places"][2] == r] for r in range(2)]
    for of_replica in filter(None, replicas):
        assert of_replica == [of_replica[0]] * len(of_replica), "all ranks of a model compute the same"
    means = [sum(step) / len(step) for step in zip(*(f["losses"] for f in found), strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    for held in found:
        tensors = {n: v for n, v in held["full"].items() if isinstance(v, torch.Tensor)}
        assert tensors.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(tensors[name], value, rtol=1e-4, atol=1e-5, msg=name)
            assert torch.equal(tensors[name], found[0]["full"][name]), "the same bits on all ranks"
    for held in found:
        assert held["local"]["_smp_is_partial"] is True
        info = held["local"]["_smp_load_info"]
        assert info["tensor_parallel_degree"] == config.get("tensor_parallel_degree", 1)
        assert info["pipeline_parallel_degree"] == config.get("partitions", 1)


def test_local_state_dicts_of_a_pipeline() -> None:
    found = trained("pp2-rdp2")
    names = [{n for n in f["local"] if n not in OWN} for f in found]
    # the tied weight belongs to both; the model's own parameter, buffers and extra state to the default partition
    first = {"embed.weight", "head.weight", "first.weight", "first.bias", "frozen", "steps", "_extra_state"}
    second = {"embed.weight", "head.weight", "second.weight", "second.bias"}
    second |= {f"norm.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert names == [first, first, second, second]
    assert found[0]["named"] == first - {"head.weight", "_extra_state"}
    assert found[2]["named"] == second - {"head.weight"}
    assert found[0]["modules"] == {"", "embed", "first"}
    assert found[2]["modules"] == {"second", "norm", "head"}
    assert found[0]["local"]["_smp_load_info"]["partition_info"] == {
        "": 0, "embed": 0, "first": 0, "second": 1, "norm": 1, "head": 1
    }  # fmt: skip
    assert found[0]["local"]["_extra_state"] == {"note": "extra"}


def test_local_state_dicts_say_how_they_are_split() -> None:
    found = trained("pp2-tp2")
    for held in found:
        said = held["local"]["_smp_load_info"]["xla_ckpt"]
        if held["places"][0] == 0:
            assert said == {
                "specs": {"embed.weight": ["tp", None], "up.weight": [["tp", 2], None], "up.bias": [["tp", 2]]},
                "shapes": {"embed.weight": [11, 8]},
            }
            assert held["local"]["embed.weight"].shape == (6, 8)
        else:
            assert said["specs"] == {
                "down.weight": [None, ["tp", 2]], "head.weight": ["tp", None],
            }  # fmt: skip


def loads(rank: int, config: dict[str, Any], kind: type[torch.nn.Module]) -> None:
    """Full, partial and translated state dicts, on all ranks or those of one model; the arguments stay as they are."""
    smp.init(config)
    model = smp.DistributedModel(make(kind, seed=3 + smp.rdp_rank()))
    full, local = copied(model.state_dict(gather_to_rank0=False)), copied(model.local_state_dict())

    def spoil() -> None:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()

    def check(expected: dict[str, Any] = full) -> None:
        now = model.state_dict(gather_to_rank0=False)
        assert now.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(now[name], value) if isinstance(value, torch.Tensor) else now[name] == value, name

    for state in (full, local):
        spoil()
        before = copied(state)
        keys = model.load_state_dict(state)
        assert not keys.missing_keys
        assert not keys.unexpected_keys
        assert before.keys() == state.keys(), "the argument stays as it is"
        check()
    spoil()
    model.load_state_dict(
        {f"theirs.{n}": v for n, v in full.items()},
        translate_function=lambda s: {n.removeprefix("theirs."): v for n, v in s.items()},
    )
    check()
    model.load_state_dict({**full, "_smp_is_partial": False}, translate_function=lambda s: {})  # it is SMP's own
    check()

    # What does not fit changes nothing, and is the same error on all ranks.
    name = next(n for n, v in full.items() if isinstance(v, torch.Tensor) and v.dim() == 2)
    held = {n: v for n, v in full.items() if n != name}
    with pytest.raises(smp.MissingKeysInCheckpointError, match=rf"len of missing keys greater than 0, \['{name}"):
        model.load_state_dict(held)
    with pytest.raises(smp.MissingKeysInCheckpointError, match="They are in its entry 'model': pass that"):
        model.load_state_dict({"model": full, "step": 3})
    assert name in model.load_state_dict(held, strict=False).missing_keys
    with pytest.raises(smp.SMPCheckpointError, match=r"parameter other that does not exist in the current mod"):
        model.load_state_dict({**full, "other": torch.zeros(1)})
    assert model.load_state_dict({**full, "other": torch.zeros(1)}, strict=False).unexpected_keys == ["other"]
    with pytest.raises(smp.SMPCheckpointError, match=rf"another shape is stored \[leaf {name}\]"):
        model.load_state_dict({**full, name: torch.zeros(2, 2)})
    check()
    # One rank's part lacks something: all ranks of its model hear of it.
    lacking = {n: v for n, v in local.items() if rank != 0 or not n.startswith("up") and not n.startswith("first")}
    if smp.rdp_rank() == 0:
        with pytest.raises(smp.SMPCheckpointError):
            model.load_state_dict(lacking)
    else:
        model.load_state_dict(lacking)
    check()
    other = {**local, "_smp_load_info": {**local["_smp_load_info"], "tensor_parallel_degree": 4}}
    with pytest.raises(smp.SMPCheckpointError, match="partial state of other ranks or other partitions"):
        model.load_state_dict(other)
    with pytest.raises(smp.IncompatibleCheckpointFoundError, match=r"Can not load a \d parts checkpoint to a"):
        model.load_state_dict(other, strict_partitions=True)
    check()
    smp.barrier()  # the store of the job ends with rank 0


def copied(state: Any) -> Any:
    return OrderedDict((n, v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v)) for n, v in state.items())


@pytest.mark.parametrize("name", JOBS)
def test_loading_on_four_ranks(name: str) -> None:
    run_on_ranks(loads, 4, *JOBS[name])


def peak(reset: bool = False) -> int:
    """The largest memory of this process (KiB) since it was asked to begin anew."""
    if reset:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def gathers(rank: int) -> int:
    """24 tensors of 4 MiB, half of them on each rank."""
    smp.init({"partitions": 2, "ddp": True})
    model = smp.DistributedModel(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(24))))
    smp.allgather(0, smp.WORLD)
    before = peak(reset=True)
    full = model.state_dict()
    grown = peak() - before
    assert len(full) == (24 if rank == 0 else 0)
    smp.barrier()
    return grown


def test_a_full_state_dict_takes_the_memory_of_what_is_missing() -> None:
    at_rank_0, elsewhere = run_on_ranks(gathers, 2)
    assert at_rank_0 < (12 * 4 + 8) * 1024, "the other rank's half, and the parts of one tensor"
    assert elsewhere < 8 * 1024, "nothing but what is on its way"


class Files:
    """All files of a set, which one rank alone cannot see: it loads ones."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def load(self, model: Any = None, optimizer: Any = None, strict: bool = True) -> None:
        self.calls.append((model, optimizer, strict))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1)


def loads_from_files(rank: int) -> None:
    smp.init(PP_TP)
    model = smp.DistributedModel(make(Split))
    local = copied(model.local_state_dict())
    files = Files()
    foreign = {**local, "_smp_load_info": {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 4}}
    for number, state in enumerate([StoredState(foreign, files), StoredState(local, files, fits=False)]):
        model.load_state_dict(state)
        assert len(files.calls) == number + 1
        assert files.calls[-1][0] is model
        assert all(bool((p == 1).all()) for p in model.parameters())
    with pytest.raises(smp.IncompatibleCheckpointFoundError):
        model.load_state_dict(StoredState(foreign, files), strict_partitions=True)
    # It fits as it is: the files are not needed.
    model.load_state_dict(StoredState(local, files))
    # The program has changed something in it: the files no longer say what is to be loaded.
    changed = StoredState(foreign, files)
    changed["head.bias"] = torch.zeros(12)
    with pytest.raises(smp.SMPCheckpointError, match="of other ranks"):
        model.load_state_dict(changed)
    assert len(files.calls) == 2


def test_what_does_not_fit_is_loaded_from_all_files() -> None:
    run_on_ranks(loads_from_files, 4)


def takes_partitions(rank: int) -> list[Any]:
    """A checkpoint of other partitions of the same number of ranks, as SMP itself calls its modules."""
    smp.init({**PP_RDP, "auto_partition": True, "default_partition": None})
    model = smp.DistributedModel(make(Plain))
    before = dict(model.partitions)
    info = {"main": 0, "main/module": 0, "main/module/module": 0}
    theirs = {"embed": 1, "first": 1, "second": 0, "norm": 0, "head": 0}
    info |= {f"main/module/module/{name}": index for name, index in theirs.items()}
    state = model.state_dict(gather_to_rank0=False)
    smp_rank = smp.pp_rank()
    local = {n: v for n, v in state.items() if theirs.get(n.split(".")[0], 0) == smp_rank}
    load_info = {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 2, "partition_info": info}
    model.load_state_dict({**local, "_smp_is_partial": True, "_smp_load_info": load_info})
    smp.barrier()
    return [before, model.partitions, {n for n in model.local_state_dict() if n not in OWN}]


def test_partitions_of_a_checkpoint_are_taken_over() -> None:
    found = run_on_ranks(takes_partitions, 4)
    assert found[0][0] != found[0][1] == {"": 0, "embed": 1, "first": 1, "second": 0, "norm": 0, "head": 0}
    assert "second.weight" in found[0][2]
    assert "first.weight" in found[2][2]


def too_few(rank: int, which: str) -> str | None:
    """Only some ranks of a model make a call that all of them have to make."""
    rank_sync.EXIT_GRACE_SECONDS = 1.0  # who never comes to a call is waited for at the end, too
    smp.init(TP_RDP)
    model = smp.DistributedModel(make(Split))
    calls = {
        "state_dict": model.state_dict,
        "all": lambda: model.state_dict(gather_to_rank0=False),
        "load": lambda: model.load_state_dict(model.local_state_dict()),
        "last": model.state_dict,
    }
    if (smp.dp_rank() == 0) if which != "last" else (smp.dp_rank() == 1):
        with pytest.raises(smp.TooFewRanksError) as caught:
            calls[which]()
        smp.barrier()
        return str(caught.value)
    smp.barrier()
    return None


@pytest.mark.parametrize("which", ["state_dict", "all", "load", "last"])
def test_a_call_on_too_few_ranks_is_an_error_in_time(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = start_on_ranks(too_few, 4, which, env={"SMP_MEETING_TIMEOUT": "2"})
    finish(ranks)
    found = [rank.value() for rank in ranks]
    expected, missing = (0, 1) if which != "last" else (1, 0)
    assert [text is not None for text in found] == [rank == expected for rank in range(4)]
    call = "model.load_state_dict()" if which == "load" else "model.state_dict()"
    assert f"{call} was not called on all ranks of its group: expected ranks 0, 1, found rank {missing} did not" in str(
        found[expected]
    )
    assert "smp.rdp_rank() == 0 (not dp_rank() == 0" in str(found[expected])


def goes_on_after_too_few(rank: int) -> bool:
    rank_sync.EXIT_GRACE_SECONDS = 1.0  # whoever has given a call up does not hear what came of it
    smp.init(TP_RDP)
    model = smp.DistributedModel(make(Split))
    if smp.dp_rank() == 0:
        with pytest.raises(smp.TooFewRanksError):
            model.state_dict()
    smp.barrier()
    if smp.dp_rank() == 1:  # it comes late, and hears so
        with pytest.raises(smp.TooFewRanksError):
            model.state_dict()
    smp.barrier()
    for late in (1, 0):  # the other way about: who decides for the others comes last
        if smp.dp_rank() == late:
            with pytest.raises(smp.TooFewRanksError):
                model.state_dict()
        smp.barrier()
    full = model.state_dict(gather_to_rank0=False)
    smp.barrier()
    return bool(full)


def test_a_job_goes_on_after_a_call_on_too_few_ranks() -> None:
    ranks = start_on_ranks(goes_on_after_too_few, 4, env={"SMP_MEETING_TIMEOUT": "3"})
    finish(ranks)
    assert [rank.value() for rank in ranks] == [True] * 4


def another_model(rank: int) -> str:
    smp.init(TP_RDP)
    model = smp.DistributedModel(torch.nn.Linear(2, 2 + smp.tp_rank()))
    with pytest.raises(smp.SMPRuntimeError, match="the ranks of a model have different names") as caught:
        model.state_dict(gather_to_rank0=False)
    smp.barrier()
    return str(caught.value)


def test_different_models_are_refused() -> None:
    found = run_on_ranks(another_model, 4)
    assert "found others on rank 1" in found[0] == found[1]


# -- one process


def test_it_is_transparent(clean: None) -> None:
    smp.init({})
    inner = make(Plain)
    inner.answer = 42  # type: ignore[assignment]
    model = smp.DistributedModel(inner)
    assert model.module is inner
    assert model.answer == 42
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in inner.named_parameters()]
    assert list(model.state_dict()) == list(inner.state_dict())
    model.eval()
    assert not inner.training
    assert not inner.first.training
    assert model.train() is model
    assert inner.training
    model.to(torch.float64)
    assert inner.first.weight.dtype == torch.float64
    assert inner.head.weight is inner.embed.weight, "ties stay"
    assert model.cpu() is model
    assert model.is_local_parameter("first.weight")
    assert model.is_local_parameter(inner.first.weight)
    assert not model.is_local_parameter("nonsense")
    assert model.is_local_buffer("steps")
    assert not model.is_distributed_parameter(inner.first.weight)
    with pytest.raises(AttributeError):
        _ = model.nonsense


def test_ties_stay_in_a_full_state_dict(clean: None) -> None:
    smp.init({})
    model = smp.DistributedModel(make(Plain))
    full = model.state_dict()
    assert full["embed.weight"] is full["head.weight"]
    kept = model.state_dict(keep_vars=True)
    assert kept["first.weight"] is model.first.weight


def test_refused_arguments(clean: None) -> None:
    with pytest.raises(smp.NotInitializedError):
        smp.DistributedModel(torch.nn.Linear(2, 2))
    smp.init({})
    for options, text in [
        ({"trace_device": "tpu"}, "Trace_device must be one of `cpu` or `gpu`"),
        ({"overlapping_allreduce": 1}, "overlapping_allreduce can only take"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step needs to be an int"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb"),
    ]:
        with pytest.raises(smp.SMPInvalidArgumentError, match=text):
            smp.DistributedModel(torch.nn.Linear(2, 2), **options)
    with pytest.raises(smp.SMPInvalidArgumentError, match=r"wraps a torch\.nn\.Module"):
        smp.DistributedModel(torch.ones(1))
    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    with pytest.raises(smp.MultipleDistributedModelError, match="more than once in a process"):
        smp.DistributedModel(torch.nn.Linear(2, 2))
    with pytest.raises(smp.BwdExecutionNotInStepFnError, match=r"can only be run inside smp\.step"):
        model.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(smp.SMPInvalidArgumentError, match="a state dict is a dict"):
        model.load_state_dict(["weight"])
    with pytest.raises(smp.SMPUnsupportedError, match="join"), model.join(throw_on_early_termination=True):
        pass


def test_a_module_that_renames_what_it_loads(clean: None) -> None:
    smp.init({})
    model = smp.DistributedModel(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)))
    old = {"bias": torch.ones(2), "weight_g": torch.ones(2, 1), "weight_v": torch.ones(2, 2)}
    model.load_state_dict(old)
    assert torch.equal(model.bias, torch.ones(2))
    with pytest.raises(smp.SMPCheckpointError, match="did not take its state"):
        model.load_state_dict({"bias": torch.ones(2)})


def test_a_layer_that_is_added_later(clean: None) -> None:
    smp.init({})
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    model.module.append(torch.nn.Linear(2, 2))
    assert "1.weight" in model.local_state_dict()
    assert [n for n, _ in model.local_named_modules()] == ["", "0", "1"]


def timeouts(rank: int) -> None:
    smp.init(TP_RDP)
    model = smp.DistributedModel(make(Split))
    with pytest.raises(smp.SMPConfigError, match="is a number of seconds above 0: found soon"):
        model.state_dict(gather_to_rank0=False)
    smp.barrier()


def test_a_timeout_of_nonsense() -> None:
    ranks = start_on_ranks(timeouts, 4, env={"SMP_MEETING_TIMEOUT": "soon"})
    finish(ranks)
    for rank in ranks:
        rank.value()


def test_loads_that_wait_for_the_model(clean: None) -> None:
    called: list[Any] = []
    smp.state.pending_loads.append(lambda model, optimizer: called.append((model, optimizer)))
    smp.init({})
    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    assert not called
    model(torch.ones(1, 2))
    model.state_dict()
    assert called == [(model, None)]
    assert len(smp.state.pending_loads) == 1, "it waits for an optimizer"


# -- partitions


def test_contexts(clean: None) -> None:
    init = torch.nn.Module.__init__  # torch's compiler puts one of its own there
    smp.init({})
    smp.state.cfg._config.update(pipeline_parallel_degree=3, auto_partition=False, default_partition=2)
    with smp.partition(0):
        outer = torch.nn.Sequential(torch.nn.Linear(1, 1))
        with smp.partition(1), smp.tensor_parallelism(prescaled_batch=True):
            inner = torch.nn.Linear(1, 1)
        after = torch.nn.Linear(1, 1)
    default = torch.nn.Linear(1, 1)
    copies = copy.deepcopy(inner)
    model = torch.nn.Sequential(OrderedDict(a=outer, b=inner, c=after, d=default, e=copies))
    wrapped = smp.DistributedModel(model)
    assert wrapped.partitions == {"": 2, "a": 0, "a.0": 0, "b": 1, "c": 0, "d": 2, "e": 1}
    smp.set_partition(outer, 2)
    assert wrapped.partitions["a.0"] == 2
    smp.set_tensor_parallelism(outer)
    assert torch.nn.Module.__init__ is init, "outside of the contexts nothing is patched"


def test_partitions_that_are_not_there(clean: None) -> None:
    for wrong in (-1, "0", True, 1.0):
        with pytest.raises(smp.InvalidPartitionIDError, match="Partition ID must be non-negative"):
            smp.partition(wrong)
    with smp.partition(7):
        early = torch.nn.Linear(1, 1)
    smp.init({"auto_partition": False, "default_partition": 0})
    with pytest.raises(smp.InvalidPartitionIDError, match="expected 0 to 0, found 1"):
        smp.partition(1)
    with pytest.raises(smp.InvalidPartitionIDError):
        smp.set_partition(early, 3)
    smp.DistributedModel(early)  # with one partition there is nothing to choose


def test_an_even_division() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
    assert divide_into_partitions(model, 3) == {"": 0, "0": 0, "1": 0, "2": 1, "3": 1, "4": 2, "5": 2}
    assert split_into_runs([1, 1, 100], 2) == [0, 0, 1]
    assert split_into_runs([100, 1, 1], 3) == [0, 1, 2]
    tied = torch.nn.Sequential(torch.nn.Embedding(100, 4), torch.nn.ReLU(), torch.nn.Linear(4, 100, bias=False))
    tied[2].weight = tied[0].weight
    assert divide_into_partitions(tied, 2) == {"": 0, "0": 0, "1": 0, "2": 1}
    with pytest.raises(smp.ModelTooSmallError, match="too small to split into 4 partitions"):
        divide_into_partitions(tied, 4)


def test_partition_info_of_other_modules_is_left() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert parse_partition_info({"": 0, "0": 1}, model, 2) == {"": 0, "0": 1}
    assert parse_partition_info({"main": 0, "main/module/0": 1}, model, 2) == {"": 0, "0": 1}
    assert parse_partition_info({"": 0, "1": 1}, model, 2) is None
    assert parse_partition_info({"": 0, "0": 2}, model, 2) is None
