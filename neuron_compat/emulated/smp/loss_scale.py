"""Loss scales of float16 training: a constant one, and one that follows the overflows. Pure.

They are stored as plain dicts, so that a file that holds one has no class of ours in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from neuron_compat.smp.errors import SMPCheckpointError, SMPInvalidArgumentError


@dataclass(slots=True)
class LossScaler:
    """A constant scale."""

    cur_scale: float = 1.0

    @property
    def loss_scale(self) -> float:
        """By what a loss is multiplied."""
        return self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Say whether the gradients of a step had an overflow: a constant scale stays."""


@dataclass(slots=True)
class DynamicLossScaler:
    """A scale that is lowered after an overflow, and raised after `scale_window` steps without one.

    The first ``delayed_shift - 1`` overflows leave it (`cur_hysteresis` counts them). They are counted anew when it is
    raised, or, with `consecutive_hysteresis`, after each step without one.
    """

    cur_scale: float = 2.0**32
    cur_iter: int = 0
    last_overflow_iter: int = -1
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 1
    cur_hysteresis: int = 1
    consecutive_hysteresis: bool = False

    @property
    def loss_scale(self) -> float:
        """By what a loss is multiplied."""
        return self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Say whether the gradients of a step had an overflow.

        >>> scaler = DynamicLossScaler(cur_scale=8.0, scale_window=2)
        >>> for overflow in (True, False, False):
        ...     scaler.update_scale(overflow)
        >>> scaler.cur_scale, scaler.cur_iter
        (8.0, 3)
        """
        if overflow:
            if self.cur_hysteresis <= 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            raises = (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0
            if self.consecutive_hysteresis or raises:
                self.cur_hysteresis = self.delayed_shift
            if raises:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1


Scaler = LossScaler | DynamicLossScaler


def scaler_of(static: float, dynamic: bool, arguments: Mapping[str, Any] | None) -> Scaler:
    """The scaler that the arguments of `DistributedOptimizer` ask for.

    Raises:
        SMPInvalidArgumentError: There is an argument that it does not know.
    """
    if not dynamic:
        return LossScaler(float(static))
    given = dict(arguments or {})
    known = ("init_scale", "scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")
    unknown = [name for name in given if name not in known]
    if unknown:
        raise SMPInvalidArgumentError(
            "dynamic_loss_args has an unknown entry", expected=", ".join(known), found=", ".join(map(str, unknown))
        )
    return DynamicLossScaler(
        cur_scale=float(given.pop("init_scale", 2.0**32)), **given, cur_hysteresis=given.get("delayed_shift", 1)
    )


def stored(scaler: Scaler) -> dict[str, Any]:
    """A scaler as a plain dict."""
    return {"kind": type(scaler).__name__, **asdict(scaler)}


def restored(value: Any) -> Scaler:
    """The scaler that `stored` described; or one of another program's classes, by its attributes.

    Raises:
        SMPCheckpointError: It is none.
    """
    attributes = dict(value) if isinstance(value, Mapping) else dict(vars(value)) if hasattr(value, "__dict__") else {}
    kind = DynamicLossScaler if "scale_window" in attributes else LossScaler
    known = {f.name for f in fields(kind)}
    if "cur_scale" not in attributes:
        raise SMPCheckpointError(
            "a loss scaler has no scale", expected="cur_scale", found=", ".join(attributes) or "nothing"
        )
    return kind(**{name: inner for name, inner in attributes.items() if name in known})
