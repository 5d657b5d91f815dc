"""neuron_compat.smp.job and config: which rank is what, and what `smp.init` takes."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
from typing import Any

import pytest
import torch

import neuron_compat.smp as smp
from neuron_compat.groups import find_rank_group
from neuron_compat.nxd.parallel_layers import parallel_state
from neuron_compat.smp import errors, job
from neuron_compat.smp.config import ENTRIES, ModelParallelConfig
from neuron_compat.smp.stored import StoredState
from tests.jobs import finish, run_on_ranks
from tests.jobs import places as of_launcher
from tests.nursery import Call, bear
from xla_ckpt import CheckpointError, Mesh
from xla_ckpt.errors import ERROR_TYPES, from_json

RANKS = ("rank", "local_rank", "pp_rank", "tp_rank", "rdp_rank", "dp_rank", "mp_rank")
SIZES = ("size", "local_size", "pp_size", "tp_size", "rdp_size", "dp_size", "mp_size")


def test_before_init(clean: None) -> None:
    assert not smp.is_initialized()
    assert {getattr(smp, name)() for name in SIZES} == {1}
    for name in RANKS:
        with pytest.raises(smp.NotInitializedError, match=r"smp is not initialized!"):
            getattr(smp, name)()
    for name in ("world", "dp", "mp", "pp", "tp", "rdp"):
        with pytest.raises(RuntimeError, match="not initialized"):
            getattr(smp, f"get_{name}_process_group")()
    assert not smp.is_initialized()


def test_one_process_without_torch_distributed(clean: None) -> None:
    smp.init({"microbatches": 4, "ddp": True})
    assert smp.is_initialized()
    assert smp.num_microbatches() == 4 == smp.state.num_microbatches()
    assert {getattr(smp, name)() for name in RANKS} == {0}
    assert {getattr(smp, name)() for name in SIZES} == {1}
    assert smp.get_mp_group() == [0]
    assert smp.instance_id() == 0
    assert not smp.is_multi_node()
    assert smp.state.cfg.get_config_dict()["microbatches"] == 4
    assert smp.state.cfg.microbatches == 4
    with pytest.raises(smp.SMPRuntimeError, match="torch.distributed is not initialized"):
        smp.get_world_process_group()


def test_process_groups_need_ddp(clean: None) -> None:
    smp.init({})
    with pytest.raises(smp.DDPNotEnabledError, match="Please enable DDP in config to use torch.dist"):
        smp.get_dp_process_group()


def test_a_second_init(clean: None, caplog: pytest.LogCaptureFixture) -> None:
    smp.init({"microbatches": 2})
    smp.init({"microbatches": 2})
    assert "initialized already. Ignoring" in caplog.text
    with pytest.raises(smp.SMPValidationError, match=r"another configuration: expected \{'microbatches': 2.*found"):
        smp.init({"microbatches": 3})
    assert smp.num_microbatches() == 2


def test_lazily_from_the_environment(
    clean: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"partitions": 1, "microbatches": 8, "ddp": true}')
    assert smp.pp_rank() == 0
    assert smp.is_initialized()
    assert smp.num_microbatches() == 8
    smp.init({"microbatches": 2})
    assert smp.num_microbatches() == 8
    assert "initialized already. Ignoring" in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '{"nonsense": 1}'])
def test_an_environment_of_nonsense(clean: None, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", text)
    with pytest.raises(smp.SMPConfigError):
        smp.rank()
    assert not smp.is_initialized()


def test_lazily_from_the_parallel_state(clean: None) -> None:
    parallel_state.initialize_model_parallel()
    assert not smp.is_initialized()
    assert smp.rank() == 0
    assert smp.is_initialized()
    assert smp.state.cfg.ddp
    smp.init({"microbatches": 2, "ddp": True})
    assert smp.num_microbatches() == 2


@pytest.mark.parametrize(
    ("config", "kind", "text"),
    [
        ({"microbatch": 2}, "SMPConfigError", "did you mean 'microbatches'.: expected .*found microbatch"),
        ({"microbatches": 0}, "SMPConfigError", "microbatches is too small: expected at least 1, found 0"),
        ({"microbatches": "2"}, "SMPConfigError", r"microbatches is of another type: expected int, found '2' \(str\)"),
        ({"microbatches": True}, "SMPConfigError", "another type"),
        ({"ddp": 1}, "SMPConfigError", "ddp is of another type"),
        ({"optimize": "size"}, "SMPConfigError", "expected speed, memory, found size"),
        ({"placement_strategy": "PPP"}, "SMPConfigError", "none of its options"),
        ({"memory_weight": 1.5}, "SMPConfigError", "too large"),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, "SMPConfigError", "given twice"),
        ({"tensor_parallel_degree": 2}, "SMPConfigError", "needs ddp"),
        ({"shard_optimizer_state": True}, "SMPConfigError", "needs ddp"),
        ({"fp16": True, "bf16": True}, "SMPConfigError", "exclude each other"),
        ({"partitions": 2, "default_partition": 2}, "SMPConfigError", "default_partition is too large"),
        ({"auto_partition": False}, "SMPConfigError", "needs a default_partition"),
        ({"active_microbatches": 3}, "SMPConfigError", r"at most 1 \(microbatches\)"),
        ({"prescaled_batch": True, "optimize": "memory"}, "SMPConfigError", "needs optimize: speed"),
        ({"horovod": True}, "SMPUnsupportedError", "horovod is not there.*Set ddp to True"),
        ({"sharded_data_parallel_degree": 2}, "SMPUnsupportedError", "sharded data parallelism is not there"),
        ({"partitions": 2}, "WorkerSizeError", r"must be at least the product of .* \(2\)"),
        ([("microbatches", 2)], "SMPConfigError", "is a dict: found list"),
    ],
)  # fmt: skip
def test_refused_configurations(clean: None, config: Any, kind: str, text: str) -> None:
    with pytest.raises(getattr(smp, kind), match=text) as caught:
        smp.init(config)
    assert isinstance(caught.value, CheckpointError)
    assert not smp.is_initialized()


def test_defaults_and_aliases() -> None:
    config = ModelParallelConfig(
        {"partitions": 4, "microbatches": 8, "sdp_reduce_bucket_size": 5e8, "memory_weight": 1}
    )
    held = config.get_config_dict()
    assert set(held) == set(ENTRIES)
    assert held["pipeline_parallel_degree"] == 4
    assert held["active_microbatches"] == 6
    assert held["auto_partition"] is True
    assert held["memory_weight"] == 1.0
    assert held["sdp_reduce_bucket_size"] == 5 * 10**8
    held["microbatches"] = 1
    assert config.microbatches == 8
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    with pytest.raises(AttributeError, match="the configuration has no 'nonsense'"):
        _ = config.nonsense


def places(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    smp.init(config)
    groups = {
        kind: torch.distributed.get_process_group_ranks(getattr(smp, f"get_{kind}_process_group")())
        for kind in ("world", "pp", "tp", "rdp", "dp", "mp")
    }
    smp.barrier()
    same = {kind: getattr(smp, f"get_{kind}_group")() == groups[kind] for kind in ("pp", "tp", "rdp", "dp", "mp")}
    return {
        **{name: getattr(smp, name)() for name in (*RANKS, *SIZES)},
        "groups": groups,
        "same": set(same.values()),
        "nxd": (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        ),
    }


def test_ranks_of_four_processes() -> None:
    found = run_on_ranks(places, 4, {"partitions": 2, "tensor_parallel_degree": 2, "ddp": True})
    for rank, held in enumerate(found):
        pp, tp = divmod(rank, 2)
        assert held["rank"] == held["local_rank"] == rank
        assert held["same"] == {True}
        assert (held["pp_rank"], held["tp_rank"], held["rdp_rank"]) == (pp, tp, 0)
        assert held["nxd"] == (pp, 0, tp)
        assert held["dp_rank"] == tp
        assert held["mp_rank"] == rank
        assert [held[name] for name in SIZES] == [4, 4, 2, 2, 1, 2, 4]
        assert held["groups"]["mp"] == [0, 1, 2, 3]
        assert held["groups"]["dp"] == [2 * pp, 2 * pp + 1]


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 3), repeat=3)))
def test_groups_are_those_of_the_definitions(sizes: tuple[int, int, int]) -> None:
    pp_size, rdp_size, tp_size = sizes
    mesh = Mesh(pp=pp_size, dp=rdp_size, tp=tp_size)
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        pp, rdp, tp = at["pp"], at["dp"], at["tp"]
        assert find_rank_group(mesh, job.GROUP_KINDS["dp"], rank).index(rank) == tp + tp_size * rdp
        assert find_rank_group(mesh, job.GROUP_KINDS["mp"], rank).index(rank) == tp + tp_size * pp
        assert find_rank_group(mesh, job.GROUP_KINDS["rdp"], rank).index(rank) == rdp
        assert len(find_rank_group(mesh, job.GROUP_KINDS["dp"], rank)) == mesh.size // pp_size
        assert len(find_rank_group(mesh, job.GROUP_KINDS["mp"], rank)) == pp_size * tp_size
        assert find_rank_group(mesh, job.GROUP_KINDS["world"], rank) == list(range(mesh.size))


def refused(rank: int, config: dict[str, Any]) -> str:
    with pytest.raises(smp.WorkerSizeError) as caught:
        smp.init(config)
    torch.distributed.barrier()  # others may still connect to this process
    return str(caught.value)


def test_worlds_that_do_not_fit() -> None:
    no_multiple = run_on_ranks(refused, 3, {"partitions": 2, "ddp": True})
    assert all("must be an integer multiple of the product" in text and "3 processes" in text for text in no_multiple)
    without_ddp = run_on_ranks(refused, 2, {})
    assert all("'ddp':True (for PyTorch) must be specified" in text for text in without_ddp)


def joins_by_itself() -> None:
    """In a process as torchrun starts it: `smp.init` makes the process group."""
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    assert smp.tp_rank() == int(os.environ["RANK"])
    assert torch.distributed.get_backend() == "gloo"
    print(f"rank {smp.rank()} of {smp.size()}")


def test_it_joins_the_job_of_a_launcher() -> None:
    ended = finish([bear(Call.of(joins_by_itself), env=place) for place in of_launcher(2)])
    for rank, (code, out, err) in enumerate(ended):
        assert code == 0, err
        assert f"rank {rank} of 2" in out


def test_another_placement_is_accepted(clean: None, caplog: pytest.LogCaptureFixture) -> None:
    smp.init({"placement_strategy": "spread"})
    assert "placement_strategy spread: ranks are placed with pp outermost, then dp, then tp" in caplog.text
    assert smp.state.cfg.placement_strategy == "spread"


def test_context_parallelism_is_refused(clean: None) -> None:
    run_on_ranks(with_context_parallelism, 2)


def with_context_parallelism(rank: int) -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    with pytest.raises(smp.SMPUnsupportedError, match="SMP has no context or expert parallelism"):
        smp.init({"ddp": True})
    torch.distributed.barrier()


def test_mpirun_alone_is_refused(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(smp.SMPValidationError, match="Start the program with torchrun"):
        smp.init({})


def test_an_arrangement_that_is_there_already(clean: None) -> None:
    parallel_state.initialize_model_parallel()
    with pytest.raises(smp.WorkerSizeError):
        smp.init({"partitions": 2})
    smp.init({"partitions": 1})
    assert smp.pp_size() == 1


# -- errors


KINDS_HERE = [k for k in vars(errors).values() if isinstance(k, type) and k.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", KINDS_HERE, ids=lambda k: k.__name__)
def test_errors_arrive_on_other_ranks_as_what_they_are(kind: type[CheckpointError]) -> None:
    made = kind("a problem", rank=1, hint="Do this.")
    again = from_json(made.to_json())
    assert type(again) is kind is ERROR_TYPES[kind.__name__]
    assert str(again) == str(made)
    assert again.rank == 1
    assert getattr(smp, kind.__name__, kind) is kind


def test_texts_of_smp() -> None:
    assert str(errors.MissingCheckpointFilesError.of("/run/ckpt.pt")) == (
        "Could not find partial checkpoint files with prefix /run/ckpt.pt"
    )
    assert str(errors.IncompatibleCheckpointRankFoundError.of("pp_rank", 3, 2, "/p")) == (
        "The pp_rank of a checkpoint file (3) exceeds the total number of unique pp_rank checkpoint files (2) matching "
        "given prefix (/p). Please ensure all checkpoint parts are available for loading at the given location."
    )
    assert str(errors.IncompatibleCheckpointFoundError.of(4, (1, 2, 1), ["a", "b"])) == (
        "Can not load a 4 parts checkpoint to a model with 1 (pipeline) partitions, 2 (tensor parallel) partitions, "
        "and 1 reduced-data-parallel ranks. Please save the full model and load that instead when changing the number "
        "of partitions across runs. Matching files: ['a', 'b']"
    )
    assert issubclass(errors.SMPCheckpointError, ValueError)
    assert issubclass(errors.SMPUnsupportedError, RuntimeError)


# -- what smp.load returns


class NoSource:
    def load(self, model: Any = None, optimizer: Any = None, strict: bool = True) -> None:
        raise AssertionError


def test_a_stored_state_forgets_its_source_when_it_is_changed() -> None:
    source, w = NoSource(), torch.ones(2)
    made = StoredState({"w": w, "inner": {"list": [torch.zeros(1)]}}, source)
    assert made.source is source
    assert made.copy().source is source
    assert made.fits
    assert isinstance(made, dict)
    changes = [
        lambda held: held.update(w=torch.zeros(2)),
        lambda held: held.pop("w"),
        lambda held: held.__setitem__("v", 1),
        lambda held: held["w"].add_(1),
        lambda held: held["inner"]["list"].append(torch.zeros(1)),
    ]
    for change in changes:
        held = StoredState({"w": torch.ones(2), "inner": {"list": [torch.zeros(1)]}}, source)
        change(held)
        assert held.source is None
    assert made.source is source


def test_a_stored_state_pickles_as_a_plain_dict() -> None:
    again = pickle.loads(pickle.dumps(StoredState({"a": StoredState({"b": 1})}, NoSource()), protocol=2))
    assert again == {"a": {"b": 1}}
    assert not isinstance(again, StoredState)
    assert not isinstance(again["a"], StoredState)


def test_names_of_the_package() -> None:
    assert {"init", "rank", "save", "load", "save_checkpoint", "resume_from_checkpoint"} <= set(dir(smp))
    assert smp.state is job.state
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = smp.nonsense
