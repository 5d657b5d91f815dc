"""smp.save_checkpoint: what it refuses, on all ranks; full checkpoints; and kills between commit and `newest`."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import neuron_compat.smp as smp
import xla_ckpt
from neuron_compat.emulated.smp.model import DistributedModel
from tests.jobs import run_alone, run_on_ranks
from tests.runs import names_in
from tests.smp.test_checkpoint_resume import fresh, model, resumed, theirs  # noqa: F401  # a fixture
from tests.smp.test_files_load import begin, caught


def names(folder: Path) -> list[str]:
    return names_in(folder)


def test_nothing_to_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(1, 1)
    with caplog.at_level(logging.WARNING):
        smp.save_checkpoint(tmp_path / "a", "t")
    assert "Both model and optimizer are None, skipping saving checkpoint..." in caplog.text
    assert not (tmp_path / "a").exists()


def test_a_number_of_checkpoints_that_makes_no_sense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(1, 1)
    held = model()
    with caplog.at_level(logging.WARNING):
        for tag in ("a", "b"):
            smp.save_checkpoint(tmp_path, tag, model=held, num_kept_partial_checkpoints=0)
    assert "Invalid num_kept_partial_checkpoints number 0, ignoring..." in caplog.text
    assert names(tmp_path) == ["a_partial", "b_partial", "newest"]


def test_what_is_no_model_of_smps(tmp_path: Path) -> None:
    begin(1, 1)
    bare = torch.nn.Linear(2, 2)
    cases = {
        "smp.save_checkpoint can only take smp.DistributedModel as input model": {"model": bare},
        "smp.save_checkpoint can only take smp.DistributeOptimizer as input optimizer": {
            "optimizer": torch.optim.SGD(bare.parameters())
        },
        "checkpoint tag can only be str, getting <class 'int'>": {"tag": 3, "model": bare},
    }
    for text, options in cases.items():
        assert caught(lambda options=options: smp.save_checkpoint(tmp_path, **{"tag": "t", **options}))[1] == text
    assert names(tmp_path) == []


def test_a_full_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(1, 1)
    held = model(3.0)
    with caplog.at_level(logging.WARNING):
        smp.save_checkpoint(tmp_path, "test.pt", partial=False, model=held, user_content={"a": 1})
        smp.save_checkpoint(tmp_path, "marked.pt", partial=False, model=held, translate_if_full=False)
    assert names(tmp_path) == ["marked.pt", "test.pt", "user_content_test.pt"]
    found = torch.load(tmp_path / "test.pt")
    assert list(found) == ["weight"]
    assert found["weight"].eq(3).all()
    assert torch.load(tmp_path / "user_content_test.pt") == {"a": 1}
    assert torch.load(tmp_path / "marked.pt")["_smp_is_partial"] is False


def test_in_the_background(tmp_path: Path) -> None:
    begin(1, 1)
    held = model(1.0)
    for value in (1.0, 2.0, 3.0):
        torch.nn.init.constant_(held.weight, value)
        handle = smp.save_checkpoint(
            tmp_path, f"t{value:g}", model=held, num_kept_partial_checkpoints=2, async_save=True
        )
        torch.nn.init.constant_(held.weight, 9)  # does not reach the checkpoint
    assert handle is not None
    resumed(tmp_path)
    assert held.weight.eq(3).all()
    assert (tmp_path / "newest").read_text() == "t2_partial\nt3_partial\n"
    assert names(tmp_path) == ["newest", "t2_partial", "t3_partial"]


def ends_in_mid_save(root: str) -> None:
    begin(1, 1)
    smp.save_checkpoint(root, "t", model=model(4.0), async_save=True)


def test_the_end_of_the_program_waits_for_the_list(tmp_path: Path) -> None:
    run_alone(ends_in_mid_save, str(tmp_path))
    assert (tmp_path / "newest").read_text() == "t_partial\n"


def test_a_tag_that_smp_has_written_is_not_replaced(tmp_path: Path) -> None:
    theirs(tmp_path, "a", 1.0)
    theirs(tmp_path, "b", 1.0)
    begin(1, 1)
    held = model(5.0)
    with pytest.raises(xla_ckpt.UsageError, match="SageMaker model parallel wrote.*another name"):
        smp.save_checkpoint(tmp_path, "a", model=held)
    assert (tmp_path / "newest").read_text() == "a_partial\nb_partial\n"
    smp.save_checkpoint(tmp_path, "c", model=held)
    assert (tmp_path / "newest").read_text() == "a_partial\nb_partial\nc_partial\n"
    resumed(tmp_path)
    assert held.weight.eq(5).all()


def saves_by_rule(rank: int, root: str) -> None:
    begin(1, 2)
    made = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(made.weight, rank + 1)
    smp.save_checkpoint(root, "a", model=DistributedModel(made, shardings=[("weight", ("tp", None))]))


def test_a_split_that_a_rule_names(tmp_path: Path) -> None:
    run_on_ranks(saves_by_rule, 2, str(tmp_path))
    begin(1, 1)
    held = model(0.0)
    resumed(tmp_path)
    assert held.weight[:, 0].tolist() == [1, 2]


@pytest.mark.xla
def test_on_an_xla_device(tmp_path: Path) -> None:
    """In a process of its own: XLA's device has to be open before the first backward pass of a process."""
    run_alone(saves_and_resumes_on_xla, tmp_path, xla=True)


def saves_and_resumes_on_xla(tmp_path: Path) -> None:
    import torch_xla

    begin(1, 1)
    made = torch.nn.Linear(4, 2, bias=False).to(torch_xla.device())
    held = DistributedModel(made)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(held.parameters(), lr=0.1))

    def trained() -> list[list[float]]:
        for _ in range(2):
            optimizer.zero_grad()
            held(torch.ones(3, 4, device=torch_xla.device())).square().mean().backward()
            optimizer.step()
            torch_xla.sync()
        return [[round(x, 5) for x in row] for row in held.weight.tolist()]

    trained()
    smp.save_checkpoint(tmp_path, "a", model=held, optimizer=optimizer)
    smp.save({"m": held.local_state_dict(), "o": optimizer.local_state_dict()}, f"{tmp_path}/c.pt")
    after = trained()
    smp.resume_from_checkpoint(tmp_path)
    assert held.weight.device.type == "xla"
    assert trained() == after
    checkpoint = smp.load(f"{tmp_path}/c.pt")
    held.load_state_dict(checkpoint["m"])
    optimizer.load_state_dict(checkpoint["o"])
    assert trained() == after
    assert torch.load(tmp_path / "a_partial/model_0_0.pt")["weight"].device.type == "cpu"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
def test_a_full_checkpoint_whose_name_another_library_s_tag_has(tmp_path: Path) -> None:
    """It was "Is a directory", after the whole model had been gathered."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "root/step_40", no_dist=True)
    (tmp_path / "root/plain").mkdir()
    begin(1, 1)
    held, before = model(), names(tmp_path / "root")
    for tag, whose in (("step_40", "A checkpoint of torch.distributed.checkpoint lies there: "), ("plain", "")):
        with pytest.raises(smp.SMPCheckpointError, match="a directory has this name") as caught:
            smp.save_checkpoint(tmp_path / "root", tag, partial=False, model=held, user_content={"a": 1})
        assert str(caught.value.hint).startswith(whose)
        assert f"another tag, or first move {tmp_path}/root/{tag} away." in str(caught.value.hint)
        assert names(tmp_path / "root") == before


# -- jobs


def save_wrongly(rank: int, root: str) -> list[Any]:
    begin(2, 1)
    made = DistributedModel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    found = [
        caught(lambda: smp.save_checkpoint(f"{root}/run", f"tag{rank}", model=made)),
        caught(lambda: smp.save_checkpoint(f"{root}/run", "a" if rank else 3, model=made)),
        caught(lambda: smp.save_checkpoint(f"{root}/run", "a", model=made.module if rank else made)),
        caught(lambda: smp.save_checkpoint(f"{root}/file/run", "a", model=made)),
        caught(lambda: smp.save_checkpoint(f"{root}/file/run", "a", partial=False, model=made)),
    ]
    torch.distributed.barrier()
    found.append(os.path.exists(f"{root}/run"))
    os.makedirs(f"{root}/list/newest", exist_ok=True)  # `newest` cannot be written
    found.append(caught(lambda: smp.save_checkpoint(f"{root}/list", "a", model=made)))
    return found


def test_all_ranks_raise_the_same_error(tmp_path: Path) -> None:
    """SMP raises on rank 0 only, and the others wait for it in a barrier."""
    (tmp_path / "file").write_text("")
    one, other = run_on_ranks(save_wrongly, 2, str(tmp_path))
    assert one == other
    tags, kind, wrong, partial, full, made, newest = one
    assert tags == ("SMPCheckpointError", "checkpoint tag should be same across ranks, getting ['tag0', 'tag1']")
    assert kind == ("SMPCheckpointError", "checkpoint tag can only be str, getting <class 'int'>")
    assert wrong[1] == "smp.save_checkpoint can only take smp.DistributedModel as input model"
    assert partial[0] == full[0] == newest[0] == "StorageError"
    assert not made


# -- killed


def save_and_die(moment: str, root: str) -> None:
    begin(1, 1)
    held = model(2.0)

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if moment == "before" and str(target).endswith("newest"):
                os.kill(os.getpid(), signal.SIGKILL)
            done = original(source, target, *args, **kwargs)
            if moment == "after" and str(target).endswith("newest"):
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return call

    os.rename = dying(os.rename)  # type: ignore[assignment]
    smp.save_checkpoint(root, "b", model=held, num_kept_partial_checkpoints=1)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_between_the_commit_and_the_list(tmp_path: Path, moment: str) -> None:
    begin(1, 1)
    held = model(1.0)
    smp.save_checkpoint(tmp_path, "a", model=held)
    with pytest.raises(Exception, match=r"-9|SIGKILL|exit code"):
        run_alone(save_and_die, moment, str(tmp_path))
    resumed(tmp_path)
    assert held.weight.eq(2).all()
    smp.save_checkpoint(tmp_path, "c", model=held, num_kept_partial_checkpoints=2)
    assert (tmp_path / "newest").read_text() == "b_partial\nc_partial\n"
    assert names(tmp_path) == ["b_partial", "c_partial", "newest"]
    assert all(xla_ckpt.verify(tmp_path, tag).ok for tag in ("b_partial", "c_partial"))
