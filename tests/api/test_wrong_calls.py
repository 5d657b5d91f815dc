"""Calls with a mistake in them: what is meant is said, and nothing is done."""

from __future__ import annotations

import inspect
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import neuron_compat.nxd as nxd
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
    with pytest.raises(xla_ckpt.UsageError, match="num_kept_ckpts='3' is no number of tags"):
        xla_ckpt.save(tmp_path, "a", {"w": torch.ones(1)}, num_kept_ckpts="3")  # type: ignore[arg-type]


def test_a_class_in_the_place_of_an_object_is_named(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(2, 2)
    extras: Any = {"rng": xla_ckpt.RNGState}
    with pytest.raises(xla_ckpt.UsageError, match=r"a class was given.*extras/rng.*RNGState\(\.\.\.\)"):
        xla_ckpt.save_checkpoint(tmp_path, "a", model, extras=extras)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, extras={"rng": xla_ckpt.RNGState()})
    with pytest.raises(xla_ckpt.UsageError, match="a class was given"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model, extras=extras)


@pytest.mark.parametrize("place", ["model", "optimizer", "scheduler"])
def test_a_class_is_no_member(tmp_path: pathlib.Path, place: str) -> None:
    """Of a model it was pickled; the methods of an optimizer failed in Python's words, in a load after its begin."""
    model = torch.nn.Linear(2, 2)
    given: Any = {"model": model, place: {"model": torch.nn.Linear, "optimizer": torch.optim.SGD}.get(place, type)}
    with pytest.raises(xla_ckpt.UsageError, match=f"a class was given.*{place}"):
        xla_ckpt.save_checkpoint(tmp_path, "a", **given)
    xla_ckpt.save_checkpoint(
        tmp_path, "a", model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {"last_epoch": 1}
    )
    with pytest.raises(xla_ckpt.UsageError, match=f"a class was given.*{place}"):
        xla_ckpt.load_checkpoint(tmp_path, "a", **given)


def test_the_state_of_an_optimizer_is_no_scheduler(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(2, 2)
    state: Any = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    with pytest.raises(xla_ckpt.UsageError, match="the state of an optimizer was given in the place of a scheduler"):
        xla_ckpt.save_checkpoint(tmp_path, "a", model, None, state)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, None, {"warmup": 3})  # the program's own schedule


CALLS_WITHOUT_A_TAG: list[Callable[[Any, Any], Any]] = [
    lambda root, model: xla_ckpt.save_checkpoint(root, model),
    lambda root, model: xla_ckpt.load_checkpoint(root, model),
    lambda root, model: xla_ckpt.save(root, {"w": model.weight}, {}),
    lambda root, model: xla_ckpt.restore(root, {"w": model.weight}),
    xla_ckpt.verify,
]


@pytest.mark.parametrize("call", CALLS_WITHOUT_A_TAG)
def test_a_forgotten_tag_does_not_print_the_model(tmp_path: pathlib.Path, call: Callable[[Any, Any], Any]) -> None:
    message = "a tag is a string.* found (Linear|dict).*after the path"
    with pytest.raises(xla_ckpt.InvalidTagError, match=message) as told:
        call(tmp_path, torch.nn.Linear(2, 2))
    assert "in_features" not in str(told.value)
    assert "tensor" not in str(told.value)


@pytest.mark.parametrize("name", ["strict", "cast", "trust_pickle"])
def test_a_flag_is_true_or_false(tmp_path: pathlib.Path, name: str) -> None:
    """Each text is true in Python: ``strict="no"`` was strict, and ``trust_pickle="no"`` trusted."""
    model = torch.nn.Linear(2, 2)
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    with pytest.raises(xla_ckpt.UsageError, match=f"choice for {name}: expected True or False, found 'no'"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model, **{name: "no"})  # type: ignore[arg-type]
    wrong: Any = "no"
    with pytest.raises(xla_ckpt.UsageError, match="choice for strict"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model, None, None, 8, wrong)
    xla_ckpt.load_checkpoint(tmp_path, "a", model, **{name: 1})  # type: ignore[arg-type]


def test_an_unknown_option_is_answered_with_those_that_there_are() -> None:
    unknown: Any = {"num_kept_ckpts": 2}
    with pytest.raises(TypeError, match=r"SaveOptions\(\) has no argument 'num_kept_ckpts': it has replicas, .* call"):
        xla_ckpt.SaveOptions(**unknown)
    misspelt: Any = {"snapshoot": "host"}
    with pytest.raises(TypeError, match=r"SaveOptions\(\) has no argument 'snapshoot': did you mean 'snapshot'\?"):
        xla_ckpt.SaveOptions(**misspelt)


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


def test_an_option_of_another_call_is_told_where_it_belongs() -> None:
    with pytest.raises(TypeError, match=r"SaveOptions\(\) has no argument 'prove': LoadOptions has it"):
        xla_ckpt.SaveOptions(prove=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"load_checkpoint\(\) has no argument 'share': SaveOptions has it"):
        xla_ckpt.load_checkpoint("run", share=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError) as caught:
        xla_ckpt.SaveOptions(step=3)  # type: ignore[call-arg]
    assert "did you mean" not in str(caught.value)
    assert "it has replicas, " in str(caught.value)


def test_an_element_type_is_refused_when_it_is_said() -> None:
    with pytest.raises(xla_ckpt.UnsupportedStateError, match=r"dtype 'fp32' cannot be stored.*Known dtypes: .*float32"):
        xla_ckpt.ArraySpec((2,), "fp32")
    with pytest.raises(xla_ckpt.UsageError, match="dtype of an ArraySpec is none"):
        xla_ckpt.ArraySpec((2,), 7)


def test_what_is_no_number_is_refused(tmp_path: pathlib.Path) -> None:
    handle = xla_ckpt.save_checkpoint(tmp_path, "a", torch.nn.Linear(2, 2), user_content={"step": 3})
    for wait in (handle.result, handle.uploaded):
        with pytest.raises(xla_ckpt.UsageError, match="timeout is not of the kind .* a number, found '5'"):
            wait(timeout="5")
    with pytest.raises(xla_ckpt.UsageError, match=r"num_workers is not of the kind .* found {'step': 0}"):
        xla_ckpt.load_checkpoint(tmp_path, "a", None, None, None, {"step": 0})  # type: ignore[arg-type]
    assert xla_ckpt.load_checkpoint(tmp_path).user_content == {"step": 3}, "without objects it gives this back"


@pytest.mark.parametrize("load", [xla_ckpt.load_checkpoint, nxd.load_checkpoint])
def test_a_load_into_nothing_says_what_to_give(
    tmp_path: pathlib.Path, load: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It gave None back without a word."""
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(2)})
    assert getattr(loaded := load(tmp_path), "user_content", loaded) is None
    assert "tag a: nothing was loaded" in caplog.text
    assert "Give those that get its state (model=, " in caplog.text
    caplog.clear()
    load(tmp_path, model={})
    xla_ckpt.restore(tmp_path)
    xla_ckpt.save_checkpoint(tmp_path, "b", {"w": torch.ones(2)}, user_content={"step": 3})
    load(tmp_path)
    assert "nothing was loaded" not in caplog.text


def test_a_user_content_in_the_place_of_the_scheduler_is_told(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, None, {"last_epoch": 1, "epoch": 1})
    assert "user_content" not in caplog.text
    xla_ckpt.save_checkpoint(tmp_path, "b", model, None, {"step": 3})
    assert "the dict with step is saved as the scheduler" in caplog.text
    assert "say user_content=: The order of the arguments is model, optimizer, scheduler" in caplog.text


def test_the_path_of_a_tag_that_is_not_there_names_those_beside_it(tmp_path: pathlib.Path) -> None:
    xla_ckpt.save(tmp_path, "step_4", {"w": torch.ones(3)})
    for call in (xla_ckpt.restore, xla_ckpt.verify, xla_ckpt.load_checkpoint):
        with pytest.raises(xla_ckpt.NoCheckpointError, match=r"Nothing lies there\. In .* oldest first: step_4\."):
            call(tmp_path / "step_5")
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"Nothing lies there\.$"):
        xla_ckpt.restore(tmp_path / "step_5" / "deeper")


def test_letters_in_another_order_are_a_name_that_was_meant(tmp_path: pathlib.Path) -> None:
    xla_ckpt.save(tmp_path / "tiny", "a", {"w": torch.ones(3)})
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"did you mean .*/tiny\?"):
        xla_ckpt.load_checkpoint(tmp_path / "tni")
    xla_ckpt.save(tmp_path / "unit", "a", {"w": torch.ones(3)})
    with pytest.raises(xla_ckpt.NoCheckpointError) as caught:
        xla_ckpt.load_checkpoint(tmp_path / "tni")
    assert "did you mean" not in str(caught.value), "both have the same letters but for one"


def test_one_other_letter_of_three_is_a_name_that_was_meant(tmp_path: pathlib.Path) -> None:
    """The error named the tags of the directory above instead, of which none was meant."""
    xla_ckpt.save(tmp_path / "run", "a", {"w": torch.ones(3)})
    xla_ckpt.save(tmp_path, "std", {"w": torch.ones(3)})
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"did you mean .*/run\?.* Nothing lies there\.$"):
        xla_ckpt.restore(tmp_path / "rum")
    xla_ckpt.save(tmp_path / "sum", "a", {"w": torch.ones(3)})
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"Nothing lies there\. In .* oldest first: std\.$") as caught:
        xla_ckpt.restore(tmp_path / "rum")
    assert "did you mean" not in str(caught.value), "both have one other letter"


def test_an_optimizer_without_its_model_is_told_so(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(2, 2)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, torch.optim.AdamW(model.parameters()))
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"Pass the optimizer's model, too \(model=\)"):
        xla_ckpt.load_checkpoint(tmp_path, optimizer=fresh)
    xla_ckpt.load_checkpoint(tmp_path, model=model, optimizer=fresh)


def test_all_that_a_tree_wants_in_vain_is_named(tmp_path: pathlib.Path) -> None:
    xla_ckpt.save(tmp_path, "a", {"m": {"w": torch.ones(2), "b": torch.ones(2)}, "step": 1})
    one, names = torch.ones(1), [f"x{number}" for number in range(20)]
    like = {"m": {"w": one, "v": one}, "step": {"of": 1}, "n": one}
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"4 differences.*Make like= as it was") as told:
        xla_ckpt.restore(tmp_path, like=like)
    lines = (told.value.details or "").splitlines()
    assert "  m/v: wanted, but not stored; stored beside it: w, b" in lines
    assert [line.split(":")[0].strip() for line in lines] == ["m/v", "step", "n", "m/w"]
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="20 differences") as told:
        xla_ckpt.restore(tmp_path, like=dict.fromkeys(names, one))
    assert "... and 8 more" in (told.value.details or "")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: xla_ckpt.verify("r", "a", 8), r"no more than path, tag by order: .* by name, num_workers=\.\.\."),
        (lambda _: xla_ckpt.SaveOptions("equal"), r"no more than nothing by order: .* by name, replicas=\.\.\."),
        (lambda _: xla_ckpt.load_checkpoint("r", user_content=1), "has no argument 'user_content': it has path, tag,"),
        (lambda _: xla_ckpt.Mesh(data=2), r"Mesh\(\) has no argument 'data': it has pp, dp, ep, cp, tp$"),
        (lambda _: xla_ckpt.LlamaJob(size_multiplier=2), "did you mean 'kv_size_multiplier'"),
        (lambda _: xla_ckpt.Checkpoints(paht="r"), "did you mean 'path'"),
        (lambda _: xla_ckpt.PerRank(1, positon="a"), "did you mean 'position'"),
        (lambda r: r.pin(step="a"), "has no argument 'step': it has tag"),
    ],
)
def test_python_would_say_less_of_such_arguments(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(xla_ckpt.Checkpoints("r"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: xla_ckpt.convert(5, r, to="native"), "source is not of the kind .*a path.* found 5"),
        (lambda r: xla_ckpt.convert(r, b"x", to="native"), "destination is not of the kind .*found b'x'"),
        (lambda r: xla_ckpt.diff(r, None), "b is not of the kind .*found None"),
        (lambda r: xla_ckpt.list_tags(r, local=5), "local is not of the kind .*found 5"),
        (lambda r: xla_ckpt.restore(5), "path is not of the kind .*found 5. The order of the arguments is path, tag"),
        (lambda r: xla_ckpt.diff(r, r, leaf="x"), "no leaf .* like this.*found leaf='x'. Leaves begin with: model"),
        (lambda r: xla_ckpt.export_hf(r, "new", part="x"), r"leaf x.*\(part=...\).*begin with: model"),
        (
            lambda r: xla_ckpt.export_hf(r, "new", max_shard_bytes=0),
            "max_shard_bytes= .*is no number of bytes.*found 0",
        ),
        (lambda r: xla_ckpt.save(r, "b", {"w": 1}, layout=["native", 5]), r"layout .*one of native.*\['native', 5\]"),
        (
            lambda r: xla_ckpt.restore(r, like=torch.nn.Linear(2, 2)),
            "like= is a tree .*found Linear. load_checkpoint",
        ),
        (lambda r: xla_ckpt.restore(r, like={"model": torch.nn.Linear(2, 2)}), "leaf model.*found Linear"),
        (
            lambda r: xla_ckpt.save(r, "b", {"w": torch.ones(2)}, shardings={"w": ("tp",)}),
            r"rules of shardings are a list.*found a dict.*list\(shardings\.items\(\)\)",
        ),
        (lambda r: xla_ckpt.PerRank(1, reshard=5), "reshard is not of the kind .*found 5"),
        (lambda _: xla_ckpt.ArraySpec(5, "float32"), r"shape of an ArraySpec .*\(4, 8\).*found 5"),
        (lambda _: xla_ckpt.ArraySpec((4, -1), "float32"), r"shape of an ArraySpec .*found \(4, -1\)"),
        (lambda _: xla_ckpt.PreemptionGuard(every=0), "every= is no number of calls: expected 1 or more, found 0"),
    ],
)
def test_the_argument_the_value_and_the_cure(
    call: Callable[[Any], Any], message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    xla_ckpt.save_checkpoint("r", "a", torch.nn.Linear(2, 2))
    with pytest.raises(xla_ckpt.UsageError, match=message):
        call("r")
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_a_tag_that_diff_does_not_find_is_no_failure_of_the_storage(tmp_path: pathlib.Path) -> None:
    xla_ckpt.save(tmp_path, "a", {"w": torch.ones(1)})
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"no such checkpoint.*Tags there, oldest first: a\."):
        xla_ckpt.diff(tmp_path, tmp_path, "a", "b")


def test_a_member_of_extras_that_is_not_stored_names_those_that_are(tmp_path: pathlib.Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", torch.nn.Linear(2, 2), extras={"rng": xla_ckpt.RNGState()})
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="extras/loader: not in .* which holds extras/rng"):
        xla_ckpt.load_checkpoint(tmp_path, extras={"loader": {"at": 0}})


def test_a_number_in_the_place_of_a_tag(tmp_path: pathlib.Path) -> None:
    with pytest.raises(xla_ckpt.InvalidTagError, match=r"found the number 3\. Write '3'\."):
        xla_ckpt.restore(tmp_path, 3)  # type: ignore[arg-type]


def test_a_tree_of_save_in_the_place_of_a_training_run(tmp_path: pathlib.Path) -> None:
    """Rules of names are for what orbax wrote, and were offered for a tag of this library's, too."""
    xla_ckpt.save(tmp_path, "a", {"params": {"w": torch.ones(2)}, "step": 3})
    message = r"which holds params, step \(a tree of save's is given back by restore\)"
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=message):
        xla_ckpt.load_checkpoint(tmp_path, model=torch.nn.Linear(2, 2))


def test_an_export_of_plain_values(tmp_path: pathlib.Path) -> None:
    xla_ckpt.save(tmp_path / "run", "a", {"step": 3})
    with pytest.raises(xla_ckpt.UsageError, match="It has plain values alone"):
        xla_ckpt.export_hf(tmp_path / "run", tmp_path / "hf")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_root_of_tags_in_the_place_of_a_checkpoint_of_dcp(tmp_path: pathlib.Path) -> None:
    import xla_ckpt.dcp as dcp

    xla_ckpt.save(tmp_path, "a", {"w": torch.ones(2)})
    with pytest.raises(xla_ckpt.NoCheckpointError, match="Tags of this library lie in it, a: use load_checkpoint"):
        dcp.load({"w": torch.ones(2)}, checkpoint_id=tmp_path)
