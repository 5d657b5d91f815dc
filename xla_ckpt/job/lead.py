"""What rank 0 finds out for all ranks, by itself or from what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from xla_ckpt.errors import LoadError
from xla_ckpt.job.round import LEAD, Deadline, Round
from xla_ckpt.job.verdict import as_checkpoint_error

Answer = TypeVar("Answer")


def of_lead(exchange: Round, key: str, look: Callable[[], Answer]) -> Answer:
    """What rank 0 finds; it is told to all, and so is an error that it meets."""
    if exchange.size == 1:
        return look()
    if exchange.rank == 0:
        try:
            exchange.say(key, look())
        except Exception as error:
            # The others wait for it.
            exchange.say(key, error=as_checkpoint_error(error, "looking for tags", 0, LoadError))
    answer: Answer = exchange.hear(key, 0)
    return answer


def put_together(
    exchange: Round, name: str, own_value: Any, unite: Callable[[list[Any]], Any], ranks: Sequence[int]
) -> Any:
    """What rank 0 makes, by `unite`, of what some ranks say, in their order; it is told to all."""
    if exchange.size == 1:
        return unite([own_value])
    if exchange.rank in ranks:
        exchange.say(f"{name}/{exchange.rank}", own_value)
    if exchange.rank == 0:
        deadline = Deadline(exchange.timeout * LEAD)
        exchange.say(name, unite([exchange.hear(f"{name}/{rank}", rank, deadline) for rank in ranks]))
    return exchange.hear(name, 0)
