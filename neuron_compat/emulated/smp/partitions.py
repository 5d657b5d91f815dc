"""Which partition of the pipeline owns which module.

Contexts note, in the module itself, where it was made. `assigned` and `divided` compute the partition of every module
of a model; both are pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from neuron_compat.smp import job
from neuron_compat.smp.entries import Partitions
from neuron_compat.smp.errors import InvalidPartitionIDError, ModelTooSmallError, StepFunctionCalledError

_PARTITION = "_smp_partition"
"""Entry of a module's ``__dict__``, so that a copy of a module keeps it."""

_entered: list[int] = []
"""The partitions of the contexts around this point of the program; the last one counts."""

_originals: list[Any] = []
"""What `torch.nn.Module.__init__` is outside of the contexts; empty outside of them."""


@contextlib.contextmanager
def _noting(index: int) -> Iterator[None]:
    """Note a partition in each module that is made in this block."""
    if not _entered:
        _originals.append(torch.nn.Module.__init__)
        torch.nn.Module.__init__ = _noting_init  # type: ignore[assignment]
    _entered.append(index)
    try:
        yield
    finally:
        _entered.pop()
        if not _entered:
            torch.nn.Module.__init__ = _originals.pop()  # type: ignore[method-assign]


def _noting_init(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """`torch.nn.Module.__init__` inside of a context: it notes the partition."""
    module.__dict__[_PARTITION] = _entered[-1]
    _originals[0](module, *args, **kwargs)


def _known_count() -> int | None:
    """How many partitions there are: that is known after `smp.init`, and counts without ``auto_partition``."""
    counts = job.state.initialized and not job.state.cfg.auto_partition
    return job.state.cfg.pipeline_parallel_degree if counts else None


def _check(index: Any, count: int | None, name: str = "") -> None:
    """Refuse what is no number of a partition."""
    if type(index) is not int or index < 0 or (count is not None and index >= count):
        raise InvalidPartitionIDError(
            "Partition ID must be non-negative, and less than the pipeline parallel degree.",
            leaf=name or None,
            expected="0 or more" if count is None else f"0 to {count - 1}",
            found=repr(index),
        )


def partition(index: int) -> contextlib.AbstractContextManager[None]:
    """A context: modules that are made in it belong to this partition. Of nested ones the innermost counts.

    With ``auto_partition: True`` it has no effect.

    Raises:
        InvalidPartitionIDError: There is no such partition.
    """
    _check(index, _known_count())
    return _noting(index)


def set_partition(module: torch.nn.Module, partition: int, recurse: bool = True) -> None:
    """Have a module belong to a partition, with all modules in it unless `recurse` is False.

    With ``auto_partition: True`` it has no effect.

    Raises:
        InvalidPartitionIDError: There is no such partition.
        StepFunctionCalledError: The model has made a step already.
    """
    _check(partition, _known_count())
    model = job.state.model
    if model is not None and model._smp.has_stepped and any(module is m for m in model.module.modules()):
        raise StepFunctionCalledError(
            "The smp.step-decorated function needs to be called after using smp.set_partition API"
        )
    for part in module.modules() if recurse else [module]:
        part.__dict__[_PARTITION] = partition
    if model is not None:
        model.forget_partitions()


# -- the partition of every module


def assigned(model: torch.nn.Module, default: int, count: int) -> Partitions:
    """The partitions that the contexts said; `default` for modules that were made in none.

    Raises:
        InvalidPartitionIDError: A context was entered before `smp.init`, and there is no such partition.
    """
    partitions = {name: int(module.__dict__.get(_PARTITION, default)) for name, module in model.named_modules()}
    for name, index in partitions.items():
        _check(index, count, name)
    return partitions


def divided(model: torch.nn.Module, count: int) -> Partitions:
    """Partitions of about the same number of bytes, each a run of modules in the order of their names.

    A module with parameters or buffers of its own counts with their bytes; one that is tied counts once. Each partition
    gets at least one of these. A module without any goes where the next one inside of it goes, or else the last one
    before it. The same model gives the same partitions on all ranks, and in every run.

    Raises:
        ModelTooSmallError: There are fewer such modules than partitions.
    """
    seen: set[int] = set()
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own:
            sizes[name] = sum(t.numel() * t.element_size() for t in own if id(t) not in seen)
            seen.update(map(id, own))
    if count > 1 and len(sizes) < count:
        raise ModelTooSmallError(
            f"Model is too small to split into {count} partitions!", found=f"{len(sizes)} modules with parameters"
        )
    of_units = dict(zip(sizes, runs(list(sizes.values()), count), strict=True))
    partitions: Partitions = {}
    last = 0
    for name, _ in model.named_modules():
        inside = next((unit for unit in sizes if unit == name or unit.startswith(f"{name}.") or not name), None)
        last = of_units[inside] if inside is not None else last
        partitions[name] = last
    return partitions


def runs(sizes: Sequence[int], count: int) -> list[int]:
    """The run, of `count`, that each of these belongs to; the runs have about the same sum, and none is empty.

    >>> runs([4, 4, 4, 4], 2), runs([9, 1, 1], 2), runs([1, 1, 9], 3)
    ([0, 0, 1, 1], [0, 1, 1], [0, 1, 2])
    """
    run_of: list[int] = []
    left = sum(sizes)
    for run in range(count):
        aim, total, first = left / (count - run), 0, len(run_of)
        while len(run_of) < len(sizes):
            size = sizes[len(run_of)]
            others_need_the_rest = len(sizes) - len(run_of) <= count - run - 1
            enough = total + size - aim > aim - total  # without this one it is nearer to what it should be
            if len(run_of) > first and run < count - 1 and (others_need_the_rest or enough):
                break
            total += size
            run_of.append(run)
        left -= total
    return run_of
