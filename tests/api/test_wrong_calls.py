"""Calls with a mistake in them: what is meant is said, and nothing is done."""

from __future__ import annotations

import inspect
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import xla_ckpt

CALLS: list[Callable[..., Any]] = [
    lambda path: xla_ckpt.save(path, "a", {"w": torch.ones(1)}),
    lambda path: xla_ckpt.load_checkpoint(path),
    lambda path: xla_ckpt.list_tags(path),
    lambda path: xla_ckpt.convert(path, "elsewhere", to="pt"),
]


@pytest.mark.parametrize("call", CALLS, ids=["save", "load_checkpoint", "list_tags", "convert"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        (pathlib.Path("s3://bucket/p"), r"one slash.*s3://bucket/p.*\./s3:/bucket/p"),
        (pathlib.Path("memory://p"), "one slash.*memory://p"),
        ("", "is empty"),
    ],
    ids=str,
)
def test_a_path_that_is_none_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], path: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(xla_ckpt.UsageError, match=message):
        call(path)
    assert not list(tmp_path.iterdir())


def test_a_directory_with_a_colon_in_its_name_is_one(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    xla_ckpt.save("./s3:/bucket", "a", {"w": torch.ones(1)})
    assert xla_ckpt.list_tags(tmp_path / "s3:" / "bucket") == ["a"]


def test_an_option_that_is_misspelt_is_suggested(tmp_path: pathlib.Path) -> None:
    save: Any = xla_ckpt.save_checkpoint
    with pytest.raises(TypeError, match=r"no argument 'async_safe': did you mean 'async_save'\?"):
        save(tmp_path, "a", {"w": torch.ones(1)}, async_safe=True)
    assert "async_save" in inspect.signature(xla_ckpt.save_checkpoint).parameters
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [("on_error", "wran", "warn"), ("snapshot", "hots", "host"), ("replicas", "firts", "first"), ("stale", "x", None)],
)
def test_a_choice_that_is_misspelt_is_suggested(
    tmp_path: pathlib.Path, name: str, value: str, meant: str | None
) -> None:
    with pytest.raises(xla_ckpt.UsageError, match=f"no such choice for {name}") as refused:
        xla_ckpt.save(tmp_path, "a", {"w": torch.ones(1)}, options=xla_ckpt.SaveOptions(**{name: value}))  # type: ignore[arg-type]
    assert ("did you mean" in str(refused.value)) == (meant is not None)
    assert meant is None or repr(meant) in str(refused.value)


def test_a_layout_that_is_misspelt_is_suggested(tmp_path: pathlib.Path) -> None:
    with pytest.raises(xla_ckpt.UsageError, match="no such layout: did you mean 'native'"):
        xla_ckpt.save(tmp_path, "a", {"w": torch.ones(1)}, layout="nativ")
    with pytest.raises(xla_ckpt.UsageError, match=r"no such layout: expected one of native, dcp"):
        xla_ckpt.save(tmp_path, "a", {"w": torch.ones(1)}, layout="zip")


def test_a_number_of_tags_that_is_text_is_no_number(tmp_path: pathlib.Path) -> None:
    with pytest.raises(xla_ckpt.UsageError, match="no number of tags.*'3'"):
        xla_ckpt.save(tmp_path, "a", {"w": torch.ones(1)}, num_kept_ckpts="3")  # type: ignore[arg-type]


def test_a_class_in_the_place_of_an_object_is_named(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(2, 2)
    extras: Any = {"rng": xla_ckpt.RNGState}
    with pytest.raises(xla_ckpt.UsageError, match=r"a class was given.*extras/rng.*RNGState\(\.\.\.\)"):
        xla_ckpt.save_checkpoint(tmp_path, "a", model, extras=extras)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, extras={"rng": xla_ckpt.RNGState()})
    with pytest.raises(xla_ckpt.UsageError, match="a class was given"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model, extras=extras)


def test_a_target_that_nothing_fits_is_told_so_in_a_load_of_what_fits(tmp_path: pathlib.Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(1)})
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="no array of it fits"):
        xla_ckpt.load_checkpoint(tmp_path, "a", {"v": torch.ones(1)}, strict=False)


@pytest.mark.parametrize("warned", [True, False])
def test_adam_that_becomes_adamw_is_told(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, warned: bool
) -> None:
    model = torch.nn.Linear(2, 2)
    stored = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    stored.step()
    xla_ckpt.save_checkpoint(tmp_path, "a", model, stored)
    optimizer = (torch.optim.Adam if warned else torch.optim.AdamW)(model.parameters())
    with caplog.at_level(logging.WARNING, "xla_ckpt"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)
    assert any("AdamW" in record.getMessage() for record in caplog.records) == warned
    assert optimizer.param_groups[0]["decoupled_weight_decay"]
