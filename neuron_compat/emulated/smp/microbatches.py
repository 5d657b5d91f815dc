"""A batch in parts, and what a step makes of their results. Pure."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from neuron_compat.smp.errors import InvalidStepOutputError, TensorSplitError
from xla_ckpt.facade import replaced_leaves
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)


class StepOutput:
    """A tensor that a step returned, once for each microbatch.

    Raises:
        InvalidStepOutputError: It is made of something else than a list or a tuple.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        if not isinstance(outputs, list | tuple):
            raise InvalidStepOutputError(
                f"StepOutput only accepts list or tuple, but get {type(outputs)}", found=type(outputs).__name__
            )
        self._outputs: Any = outputs

    def __getitem__(self, index: int) -> Any:
        return self._outputs[index]

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self._outputs!r})"

    @property
    def outputs(self) -> Any:
        """Those of the microbatches, in their order."""
        return self._outputs

    def reduce_mean(self) -> Any:
        """Their mean."""
        return self.process_outputs(lambda values: sum(values) / len(values))

    def reduce_sum(self) -> Any:
        """Their sum."""
        return self.process_outputs(sum)

    def concat(self) -> torch.Tensor:
        """One behind the other along dim 0, as in the batch."""
        whole: torch.Tensor = self.process_outputs(lambda values: torch.cat(list(values), dim=0))
        return whole

    def stack(self) -> torch.Tensor:
        """Along a new first dim."""
        stacked: torch.Tensor = self.process_outputs(lambda values: torch.stack(list(values)))
        return stacked

    def process_outputs(self, func: Callable[[Any], Any]) -> Any:
        """What a function returns of all of them."""
        return func(self._outputs)

    def map(self, func: Callable[[Any], Any]) -> StepOutput:
        """Put what a function returns of each of them in its place; this object."""
        self._outputs = [func(output) for output in self._outputs]
        return self

    def add_output(self, out: Any) -> None:
        """Add one more."""
        self._outputs.append(out)

    def clear(self) -> None:
        """Forget them."""
        self._outputs = None


def as_step_output(outputs: list[Any]) -> Any:
    """What a step returns: the structure that the function returned for each microbatch, with all of them in it."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return StepOutput(outputs)
    if isinstance(first, dict):
        return {key: as_step_output([output[key] for output in outputs]) for key in first}
    if isinstance(first, list | tuple):
        inside = [as_step_output([output[i] for output in outputs]) for i in range(len(first))]
        if hasattr(first, "_fields"):
            return type(first)(*inside)
        return inside if isinstance(first, list) else tuple(inside)
    return outputs


def mapped(value: Any, one: Callable[[torch.Tensor], Any]) -> Any:
    """The same dicts, lists and tuples with `one` of each tensor in them."""
    return _mapped(value, lambda inner: one(inner) if isinstance(inner, torch.Tensor) else inner)


def _mapped(value: Any, one: Callable[[Any], Any]) -> Any:
    """The same dicts, lists and tuples with `one` of everything else in them."""
    return replaced_leaves(value, lambda _, leaf: one(leaf), is_leaf=_is_other_mapping, classes=True)


def _is_other_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and not isinstance(value, dict)


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors in dicts, lists and tuples, in the order of `mapped`."""
    tensors: list[torch.Tensor] = []
    mapped(value, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return tensors


def split(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    whole: Sequence[str],
    axes: Mapping[str, int],
    count: int,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of a function for each microbatch.

    Args:
        func: The function, whose arguments have names.
        whole: Names of arguments that are not split.
        axes: Name -> the dim along which an argument is split; 0 for the others.

    Raises:
        TensorSplitError: A tensor does not divide.
    """
    names = [p.name for p in inspect.signature(func).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [*zip([*names, *("an argument" for _ in args[len(names) :])], args, strict=False), *kwargs.items()]
    microbatches = []
    for number in range(count):
        parts = [
            _part(value, name, count, number, axes.get(name, 0), is_split=name not in whole) for name, value in named
        ]
        given = len(args)
        microbatches.append((tuple(parts[:given]), dict(zip(kwargs, parts[given:], strict=True))))
    return microbatches


def _part(value: Any, name: str, count: int, number: int, axis: int, *, is_split: bool) -> Any:
    """The part of an argument for one microbatch."""

    def one(inner: Any) -> Any:
        if hasattr(inner, "smp_slice"):
            return inner.smp_slice(count, number, axis)
        if isinstance(inner, StepOutput):
            return inner.outputs[number]
        if not is_split or count == 1:
            return inner
        if not isinstance(inner, torch.Tensor):
            if not isinstance(inner, _WHOLE) and not callable(inner):
                _warn_of_whole(type(inner).__name__)
            return inner
        return _cut(inner, name, count, number, axis)

    return _mapped(value, one)


_WHOLE = (str, int, float, complex, bytes, bytearray, type(None), torch.device, torch.dtype, argparse.Namespace)
"""What nobody expects to be split."""


@functools.cache
def _warn_of_whole(kind: str) -> None:
    logger.warning(
        "An object of type %s is passed to each microbatch as it is. If it holds tensors that are to be split, give it "
        "a method smp_slice(num_mb, mb, axis), or pass a dict of them.",
        kind,
    )


def _cut(tensor: torch.Tensor, name: str, count: int, number: int, axis: int) -> torch.Tensor:
    """The part of a tensor for one microbatch, a view."""
    if not -tensor.dim() <= axis < tensor.dim():
        raise TensorSplitError(
            f"a tensor in {name} has no dim {axis}, along which it would be split into microbatches",
            found=f"shape {list(tensor.shape)}",
            hint=f'Name it: @smp.step(non_split_inputs=["{name}"]), or its dim in input_split_axes.',
        )
    size = tensor.shape[axis]
    if size % count:
        raise TensorSplitError(
            f"a batch does not divide into microbatches: {name} has {size} along dim {axis}",
            expected=f"a multiple of {count} (microbatches)",
            found=size,
            hint="Choose another batch size, or leave out the last batch (drop_last=True of a DataLoader).",
        )
    part: torch.Tensor = tensor.narrow(axis, number * (size // count), size // count)
    return part
