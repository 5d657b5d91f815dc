"""Keywords for the saves and loads of a trainer, which its adapter checks once in the constructor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from xla_ckpt.keywords import check_deferred_arguments
from xla_ckpt.options import LoadOptions, SaveOptions, resolve_options

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Call = Callable[..., Any]

_OF_THE_ADAPTER = ("path", "tag", "model", "optimizer", "scheduler", "user_content", "zero1_optimizer", "tree", "like")
"""Arguments of saves and loads that an adapter passes itself, or that have no effect."""


def check_call_keywords(
    save: Call, load: Call, *, without: tuple[str, ...] = ()
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator that checks save and load keywords when the adapter is created, before training starts.

    Args:
        save: The function that the adapter saves with.
        load: The function that the adapter loads with.
        without: Names of further arguments of both that the adapter does not accept.
    """
    # An option that exists in both classes, such as timeout=, is looked up in the save options.
    values: dict[str, type[Any]] = {"load_options": LoadOptions, "options": SaveOptions}
    return check_deferred_arguments(save, load, without=(*_OF_THE_ADAPTER, *without), **values)


@dataclass(frozen=True, slots=True)
class CallKeywords:
    """Keywords of an adapter, each passed to the calls that accept it."""

    save: dict[str, Any]
    """Keywords of each save."""

    _shared: dict[str, Any]
    """All keywords except the options of saves."""

    _load_options: LoadOptions | None

    @classmethod
    def create(cls, keywords: Mapping[str, Any], load_options: LoadOptions | None, *, save: Call) -> CallKeywords:
        """Return the keywords for calls of `save` and for loads.

        Args:
            keywords: The adapter's keywords. ``num_workers``, ``mesh`` and ``shardings`` go to saves and loads, and
                ``options`` only to saves.
            load_options: The ``options`` of loads.
            save: The function that the adapter saves with.

        Raises:
            UsageError: ``options`` or ``load_options`` has the wrong class.
        """
        resolve_options(SaveOptions, keywords.get("options"))
        resolve_options(LoadOptions, load_options)
        shared = {name: value for name, value in keywords.items() if name != "options"}
        return cls(_select(keywords, save), shared, load_options)

    @property
    def load_options(self) -> LoadOptions:
        """Options of the next load, which also reads the ``local`` directory of the saves.

        The newest tag may exist only there; a load that reads only the bucket would return an older one.
        """
        options = resolve_options(LoadOptions, self._load_options)
        saves: SaveOptions | None = self.save.get("options")
        return options if saves is None or options.local is not None else replace(options, local=saves.local)

    def select_for_load(self, load: Call) -> dict[str, Any]:
        """Return the keywords of the next call of a function that loads."""
        return {**_select(self._shared, load), "options": self.load_options}


def _select(keywords: Mapping[str, Any], call: Call) -> dict[str, Any]:
    """Return the keywords that a function accepts."""
    names = inspect.signature(call).parameters
    return {name: value for name, value in keywords.items() if name in names}
