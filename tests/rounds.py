"""What tests do in a round of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from xla_ckpt.distributed.consensus import raise_on_all_ranks
from xla_ckpt.distributed.exchange import Exchange

Value = TypeVar("Value")


def agree(exchange: Exchange, what: str, action: Callable[[], Value]) -> Value:
    """What `action` returns, run on every rank as `raise_on_all_ranks` says."""
    with raise_on_all_ranks(exchange, what):
        return action()
