"""A message arrives, through JSON, as the one that was sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from xla_ckpt.core.plan.shared_reads import ReadGroups
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.distributed.exchange import Message
from xla_ckpt.errors import CheckpointError, SaveError


@dataclass(frozen=True, slots=True)
class Name(Message):
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting(Message):
    to: Name
    others: tuple[Name, ...] = ()
    pair: tuple[int, Name] | None = None
    number: int | str | None = None
    common: ReadGroups = ReadGroups((), ())  # noqa: RUF009  # frozen
    facts: Mapping[str, Any] | None = None
    problem: CheckpointError | None = None


def sent(message: Message) -> Any:
    return type(message).from_json(json.loads(json.dumps(message.to_json())))


@pytest.mark.parametrize(
    "message",
    [
        Greeting(to=Name("a")),
        Greeting(to=Name("a"), others=(Name("b"), Name("c")), pair=(3, Name("d")), number="4", facts={"x": [1, None]}),
        Greeting(to=Name("a"), common=ReadGroups((("w", Box((0,), (2,)), (0, 1)),), ())),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    assert sent(message) == message


def test_an_error_arrives_as_one_of_its_kind() -> None:
    problem = sent(Greeting(to=Name("a"), problem=SaveError("no", rank=3))).problem
    assert type(problem) is SaveError
    assert problem.rank == 3


def test_fields_of_another_message_are_refused() -> None:
    with pytest.raises(TypeError, match="argument 'to'"):
        Name.from_json(Greeting(to=Name("a")).to_json())
