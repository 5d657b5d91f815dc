"""The examples run, and show what they promise. What they start is born in the nursery, torchrun's ranks among it.

tests/topology/test_torchrun.py is a job under the real torchrun, started with the options that they give it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import xla_ckpt
from tests.commands import TORCHRUN, Commands
from tests.runs import ROOT


def command(name: str | Path, *args: object, ranks: int | None = None) -> list[str]:
    """The command that runs an example."""
    torchrun = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks else []
    return [sys.executable, *torchrun, str(ROOT / "examples" / name), *map(str, args)]


def example(monkeypatch: pytest.MonkeyPatch, name: str, *args: object) -> ModuleType:
    """An example that starts others, as a module; its arguments are these."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "subprocess", Commands)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, args)])
    return module


@pytest.fixture
def as_users_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether losses are the same to the last bit is asked of the compiler's own choices."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def losses_in(log: Path) -> list[str]:
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


@pytest.mark.xla
@pytest.mark.usefixtures("as_users_compile")
def test_killed_in_mid_save_and_resumed_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that saves nothing has the same losses, too. (Most of the time of these four runs goes into compiling.)"""
    program, layers = tmp_path / "train_lm.py", "layers: int = "
    text = (ROOT / "examples" / program.name).read_text()
    assert f"{layers}4" in text
    program.write_text(text.replace(f"{layers}4", f"{layers}1"))
    demo, steps = tmp_path / "demo", ("--steps", 16)
    module = example(monkeypatch, "kill_and_resume", "--root", demo, *steps, "--save-every", 3)
    monkeypatch.setattr(module, "HERE", tmp_path)
    assert module.main() == 0
    shown = capsys.readouterr().out
    assert "all 16 losses bit-identical: yes; every tag sound: yes" in shown
    assert "half written" in shown
    log = tmp_path / "log"
    Commands.run(command(program, "--root", tmp_path / "none", *steps, "--save-every", 1000, "--log", log), check=True)
    assert losses_in(log) == losses_in(demo / "unbroken.jsonl")
    assert not (tmp_path / "none").exists()


def test_jax_killed_in_mid_save_and_resumed_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    args = ("--root", tmp_path / "demo", "--program", "jax_train.py", "--steps", 16, "--save-every", 3)
    assert example(monkeypatch, "kill_and_resume", *args).main() == 0
    shown = capsys.readouterr().out
    assert "all 16 losses bit-identical: yes; every tag sound: yes" in shown
    assert "half written" in shown


def test_fsdp2_on_four_ranks_resumed_on_two_and_on_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example(monkeypatch, "fsdp2_reshard").all_three()
    shown = capsys.readouterr().out
    assert "save on 4 rank(s)" in shown
    assert "load on 2 rank(s)" in shown
    assert "load on 1 rank(s)" in shown
    assert "model/net1.weight" in shown  # the command's


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", pytest.param("xla", marks=pytest.mark.xla)])
def test_the_dcp_tutorial_with_another_import(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tutorial = example(monkeypatch, "dcp_tutorial")
    tutorial.main([kind])
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{kind}: ")]
    assert [line.partition(", ")[0].removeprefix(f"{kind}: ") for line in shown] == [
        "4 ranks saved 16 tensors",
        "2 ranks loaded both checkpoints: all tensors and losses bit-identical",
        "one process loaded both models without a process group: all tensors bit-identical",
    ]


@pytest.mark.xla
def test_zero1_resumes_bit_for_bit_and_in_another_shape(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        example(monkeypatch, "tp_zero1_resume").main()
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "10 losses after the resume as tp=2,dp=2: bit-identical, right" in shown
    assert "10 losses after the resume as tp=1,dp=2: largest relative difference" in shown


@pytest.mark.xla
def test_a_script_for_neuronx_distributed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    root, straight = tmp_path / "run", tmp_path / "straight"

    def trained(steps: int) -> str:
        args = ("--checkpoint_dir", root, "--steps", steps)
        return Commands.run(command("nxd_train.py", *args, ranks=4), check=True).stdout

    first = trained(4)
    assert "resumed" not in first
    assert xla_ckpt.list_tags(root) == ["step_3", "step_4"]
    (root / "step_4").rename(straight)  # as if it had been killed before
    again = trained(2)
    assert "resumed after step 3" in again
    assert xla_ckpt.list_tags(root) == ["step_4", "step_5"]
    losses = [[line for line in shown.splitlines() if line.startswith("step ")] for shown in (first, again)]
    assert list(map(len, losses)) == [4, 2]
    assert losses[0][3] == losses[1][0]

    files = {str(file.relative_to(straight)) for file in straight.rglob("*.pt")}
    assert {f for f in files if ".tensors/" not in f} == {"scheduler.pt", "user_content.pt"} | {
        f"{part}/dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_00.pt{end}"
        for part, dp in (("model", 0), ("optim", 0), ("optim", 1)) for tp in range(2) for end in ("", ".info.pt")
    }  # fmt: skip
    assert "optim/dp_rank_01_tp_rank_00_pp_rank_00.pt.tensors/tensor_0.pt" in files
    for name in ("checkpoint", "done", *files):  # weights, optimizer and scheduler are the same, byte for byte
        assert (root / "step_4" / name).read_bytes() == (straight / name).read_bytes() or name == "user_content.pt"
    for tag, step in (("step_4", 4), ("step_5", 5)):
        assert xla_ckpt.verify(root, tag).ok
        assert torch.load(root / tag / "user_content.pt", weights_only=True)["total_steps"] == step


@pytest.mark.parametrize("form", [[], ["--full"]], ids=["partial", "full"])
def test_a_script_for_smp_goes_on_whatever_its_degrees_are(
    form: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saved with tensor parallelism, resumed with a pipeline, too, and then by one process."""

    def losses(folder: str, *args: object, ranks: int | None = None) -> list[str]:
        Commands.run(
            command("smp_train.py", "--checkpoint_dir", tmp_path / folder, *args, *form, ranks=ranks), check=True
        )
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]

    unbroken = losses("unbroken", "--steps", 6)
    found = losses("run", "--tp", 2, "--steps", 2, ranks=4)
    found += losses("run", "--tp", 2, "--pp", 2, "--steps", 2, ranks=4)
    found += losses("run", "--steps", 2)
    assert found == unbroken
    assert len(found) == 6
