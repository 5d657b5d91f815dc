"""Options as one value: checked when they are made, for a call or for a block."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import neuron_compat.nxd as nxd
import xla_ckpt
from xla_ckpt import ConvertOptions, LoadOptions, SaveOptions, UsageError, default_options

TREE = {"w": torch.ones(3)}
PARITY = SaveOptions(parity="block")


def parity_of(root: Any, tag: str) -> str | None:
    return xla_ckpt.Checkpoints(root).show(tag).parity


@pytest.mark.parametrize("kind", [SaveOptions, LoadOptions])
def test_each_option_is_the_same_on_all_ranks_or_is_known_to_be_a_matter_of_each(
    kind: type[SaveOptions | LoadOptions],
) -> None:
    """Ranks that say different things of one that was forgotten would go on, and do different things."""
    of_each_rank = {"snapshot", "snapshot_budget", "progress", "trace", "timeout"}
    names = {field.name for field in dataclasses.fields(kind)}
    assert {*kind().in_common()} == names - of_each_rank


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (SaveOptions, {"replicas": "last"}),
        (SaveOptions, {"on_error": "never"}),
        (SaveOptions, {"stale": True}),
        (SaveOptions, {"parity": "disk"}),
        (SaveOptions, {"snapshot": "hots"}),
        (SaveOptions, {"snapshot_budget": 0}),
        (SaveOptions, {"snapshot_budget": 1.5}),
        (SaveOptions, {"timeout": 0}),
        (SaveOptions, {"timeout": "long"}),
        (LoadOptions, {"replica_read": "all"}),
        (LoadOptions, {"timeout": -1.0}),
        (ConvertOptions, {"max_memory": 0}),
        (ConvertOptions, {"num_workers": "8"}),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_when_it_is_made(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        kind(**wrong)


MADE_BY_USERS = [
    kind
    for kind in map(partial(getattr, xla_ckpt), xla_ckpt.__all__)
    if dataclasses.is_dataclass(kind) and inspect.unwrap(kind.__init__) is not kind.__init__
]


@pytest.mark.parametrize("kind", MADE_BY_USERS)
def test_help_says_what_each_field_means(kind: Any) -> None:
    doc = kind.__doc__ or ""
    assert [f.name for f in dataclasses.fields(kind) if f"    {f.name}: " not in doc and f"`{f.name}`" not in doc] == []


def test_options_do_not_change() -> None:
    with pytest.raises(AttributeError):
        PARITY.parity = None  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [LoadOptions(), {"parity": "block"}, "block"], ids=lambda w: type(w).__name__)
def test_a_value_of_another_class_is_refused_before_anything_is_written(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected xla_ckpt.SaveOptions"):
        xla_ckpt.save(tmp_path / "new", "a", TREE, options=wrong)
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match=r"expected xla_ckpt.LlamaJob"):
        xla_ckpt.convert(tmp_path, tmp_path / "new", llama="config.json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "keyword", "said"),
    [
        ("save", "stale", "options=SaveOptions(stale=...)"),
        ("save_checkpoint", "snapshot_budget", "options=SaveOptions(snapshot_budget=...)"),
        ("load_checkpoint", "replica_read", "options=LoadOptions(replica_read=...)"),
        ("restore", "timeout", "options=LoadOptions(timeout=...)"),
        ("convert", "max_memory", "options=ConvertOptions(max_memory=...)"),
        ("convert", "fuse_qkv", "llama=LlamaJob(fuse_qkv=...)"),
        ("export_hf", "config", "llama=LlamaJob(config=...)"),
        ("diff", "num_workers", "options=ConvertOptions(num_workers=...)"),
        ("explain", "hardware", "llama=LlamaJob(hardware=...)"),
        ("save", "pariti", "did you mean 'parity'?"),
        ("restore", "num_worker", "did you mean 'num_workers'?"),
    ],
)
def test_a_field_as_a_keyword_is_answered_with_its_place(call: str, keyword: str, said: str) -> None:
    with pytest.raises(TypeError) as refused:
        getattr(xla_ckpt, call)(**{keyword: 1})
    assert said in str(refused.value)


def test_no_public_function_takes_more_than_18_arguments() -> None:
    for name in xla_ckpt.__all__:
        value = getattr(xla_ckpt, name)
        if inspect.isfunction(value):
            assert len(inspect.signature(value).parameters) <= 18, name


def test_a_block_counts_for_calls_that_say_nothing(tmp_path: Path) -> None:
    with default_options(PARITY, LoadOptions(trace=tmp_path / "load.json")):
        xla_ckpt.save(tmp_path / "r", "block", TREE)
        xla_ckpt.save(tmp_path / "r", "explicit", TREE, options=SaveOptions(stale="ignore"))  # counts as a whole
        with default_options(SaveOptions(parity="file")):
            xla_ckpt.save(tmp_path / "r", "inner", TREE)
            xla_ckpt.restore(tmp_path / "r", "inner")  # the outer block has the options of loads
        xla_ckpt.save(tmp_path / "r", "outer again", TREE)
    xla_ckpt.save(tmp_path / "r", "after", TREE)
    assert {tag: parity_of(tmp_path / "r", tag) for tag in xla_ckpt.list_tags(tmp_path / "r")} == {
        "block": "block", "explicit": None, "inner": "file", "outer again": "block", "after": None,
    }  # fmt: skip
    assert (tmp_path / "load.json").exists()


def test_a_block_that_is_left_by_an_error_counts_no_more(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), default_options(PARITY):
        raise ZeroDivisionError
    xla_ckpt.save(tmp_path, "a", TREE)
    assert parity_of(tmp_path, "a") is None


@pytest.mark.parametrize("wrong", [({"parity": "block"},), (PARITY, SaveOptions()), (SaveOptions,)], ids=str)
def test_a_block_takes_one_value_of_each_class(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="default_options"), default_options(*wrong):
        pass


def test_an_asynchronous_save_keeps_the_options_of_its_call(tmp_path: Path) -> None:
    with default_options(PARITY):
        handle = xla_ckpt.save(tmp_path, "a", TREE, async_save=True)
    handle.result()
    assert parity_of(tmp_path, "a") == "block"


def test_other_threads_have_a_block_only_with_its_context(tmp_path: Path) -> None:
    def saves(tag: str) -> None:
        xla_ckpt.save(tmp_path / tag, tag, TREE)

    with default_options(PARITY):
        context = contextvars.copy_context()
        threads = [
            threading.Thread(target=saves, args=("bare",)),
            threading.Thread(target=context.run, args=(saves, "with its context")),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert parity_of(tmp_path / "bare", "bare") is None
    assert parity_of(tmp_path / "with its context", "with its context") == "block"


def test_tasks_do_not_disturb_each_other(tmp_path: Path) -> None:
    async def saves(tag: str, options: SaveOptions) -> None:
        with default_options(options):
            await asyncio.sleep(0)  # the other task enters its block
            xla_ckpt.save(tmp_path / tag, tag, TREE)

    async def both() -> None:
        await asyncio.gather(saves("block", PARITY), saves("file", SaveOptions(parity="file")))

    asyncio.run(both())
    assert [parity_of(tmp_path / tag, tag) for tag in ("block", "file")] == ["block", "file"]


def test_a_block_counts_for_conversions_and_facades(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    with default_options(PARITY):
        nxd.save_checkpoint(tmp_path, "a", model)
        nxd.save_checkpoint(tmp_path, "b", model, options=SaveOptions())
    assert (parity_of(tmp_path, "a"), parity_of(tmp_path, "b")) == ("block", None)
    shown: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, default_options(ConvertOptions(max_memory=40)):
        patch.setattr("xla_ckpt.conversion.convert.stream_files", lambda *_, **how: shown.append(how) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            xla_ckpt.convert(tmp_path, tmp_path / "out", "a")
    assert shown[0]["max_memory"] == 40


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_takes_the_one_option_that_it_heeds(tmp_path: Path) -> None:
    from xla_ckpt import dcp

    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", options=SaveOptions(replicas="first"))
    with pytest.raises(UsageError, match="heeds replicas alone"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "b", options=SaveOptions(parity="file"))
    assert not (tmp_path / "b").exists()
    with default_options(SaveOptions(parity="file", replicas="first")):
        assert dcp.StorageWriter(tmp_path / "c").replicas == "first"
