"""What tests do in a round of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from xla_ckpt.job.round import Round
from xla_ckpt.job.verdict import agreed

Value = TypeVar("Value")


def agree(exchange: Round, what: str, action: Callable[[], Value]) -> Value:
    """What `action` returns, run on every rank as `agreed` says."""
    with agreed(exchange, what):
        return action()
