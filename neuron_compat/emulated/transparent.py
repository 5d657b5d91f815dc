"""A module around another one that looks like it: names, parameters and attributes are the inner module's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

Self = TypeVar("Self", bound="Transparent")


class Transparent(torch.nn.Module):
    """A module whose only child is `module`, and whose names do not begin with that.

    torch.nn.Module goes through children, and these are the inner module's own: without the methods here, the inner
    module itself would be left out of train(), to() and apply(), and names would begin with "module".
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not made yet: asking it for itself would never end
                raise
            return getattr(self.module, name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.module.named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        modules: Iterator[tuple[str, torch.nn.Module]] = self.module.named_modules(*args, **kwargs)
        return modules

    def train(self: Self, mode: bool = True) -> Self:
        self.training = mode
        self.module.train(mode)
        return self

    def apply(self: Self, fn: Callable[[torch.nn.Module], Any]) -> Self:
        self.module.apply(fn)
        return self

    def _apply(self: Self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self
