"""Plan of a whole load: its parts, their joint installation, and rollback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.tree.skeleton import BuildValue
from xla_ckpt.distributed.exchange import Exchange
from xla_ckpt.loading.target import Target, install_all
from xla_ckpt.state.base_model import StoredBase, clear_digests
from xla_ckpt.state.part_load import PartLoadPlan
from xla_ckpt.state.state_dict_load import StateDictLoader, wrap_install_errors
from xla_ckpt.storage.signals import DeferSignals


@dataclass(frozen=True)
class LoadPlan:
    """The parts of a load, checked before anything is read or changed."""

    parts: list[PartLoadPlan]
    build_result: BuildValue
    """Function that builds the value returned by the load from the restored arrays by leaf path."""

    @cached_property
    def targets(self) -> dict[str, Target]:
        """Leaf path -> target of the array."""
        return {path: target for part in self.parts for path, target in part.targets.items()}

    base: StoredBase | None = None
    """The base that the tag records but does not contain; None if nothing was excluded."""

    installed: dict[str, Any] = field(default_factory=dict, init=False)
    """Installed arrays by leaf path. Arrays for `load_state_dict` methods of the program are added first."""

    @property
    def state_dict_paths(self) -> frozenset[str]:
        """Leaf paths of arrays that are passed to `load_state_dict` methods before anything else is changed."""
        return frozenset(path for part in self.parts for path in part.state_dict_paths)

    @contextlib.contextmanager
    def load_state_dicts(self, exchange: Exchange) -> Iterator[Callable[[], None]]:
        """Context manager for reading and installation. Yields a function that calls the members' `load_state_dict`.

        Call the function when the arrays of `state_dict_paths` are filled, and before memory that the program uses is
        overwritten. If it or any later step fails, the members are rolled back. Once it returns, signal handlers of the
        program are deferred until everything is overwritten and installed: they may raise, and a partially loaded model
        looks like a valid one.
        """
        handing = StateDictLoader([part.state_dict_load for part in self.parts if part.state_dict_load is not None])

        def install() -> Mapping[str, Any]:
            alone = self.state_dict_paths
            self.installed.update(install_all({p: t for p, t in self.targets.items() if p in alone}))
            return self.installed

        with DeferSignals() as calm, handing.restore_on_failure():

            def hand_over() -> None:
                handing.run(install, exchange)
                if self.base is None and any(target.live for target in self.targets.values()):
                    clear_digests()  # a model loaded from adapters is not a known base any more
                calm.begin()

            yield hand_over

    def install(self) -> Any:
        """Install everything, after the memory of all targets is filled. Return the value of the load.

        Raises:
            LoadError: If installation fails, which leaves some objects changed.
        """
        with wrap_install_errors():
            self.installed.update(install_all({p: t for p, t in self.targets.items() if p not in self.installed}))
            for part in self.parts:
                part.finish(self.installed)
            return self.build_result(self.installed)
