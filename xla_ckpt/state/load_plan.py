"""Plan of a whole load: its parts, and how they are installed together or rolled back."""

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
    """All parts of a load, checked but not yet begun."""

    parts: list[PartLoadPlan]
    build_result: BuildValue
    """The value that the load returns, from the restored arrays by leaf path."""

    @cached_property
    def targets(self) -> dict[str, Target]:
        """Leaf path -> where the array goes."""
        return {path: target for part in self.parts for path, target in part.targets.items()}

    base: StoredBase | None = None
    """What the tag leaves out of the model, and names; None if it leaves out nothing."""

    installed: dict[str, Any] = field(default_factory=dict, init=False)
    """The arrays that are in place, by leaf path: first those that code of the program takes."""

    @property
    def state_dict_paths(self) -> frozenset[str]:
        """Leaf paths of arrays that code of the program takes before anything else is changed."""
        return frozenset(path for part in self.parts for path in part.state_dict_paths)

    @contextlib.contextmanager
    def load_state_dicts(self, exchange: Exchange) -> Iterator[Callable[[], None]]:
        """Around the reading and the installation. Gives what hands over to code of the program what that takes.

        It is called when the arrays `state_dict_paths` are filled, and the memory that the program uses is not yet
        overwritten. If that or anything after it fails, the members get back what they had. From its end on all is
        overwritten and installed before a signal handler of the program runs, which may raise: a half-loaded model
        looks like a good one.
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
                    clear_digests()  # what adapters are loaded into is no base
                calm.begin()

            yield hand_over

    def install(self) -> Any:
        """Put everything in place, now that the memory of all targets is filled; returns the load's value.

        Raises:
            LoadError: That fails, which leaves a part of the objects changed.
        """
        with wrap_install_errors():
            self.installed.update(install_all({p: t for p, t in self.targets.items() if p not in self.installed}))
            for part in self.parts:
                part.finish(self.installed)
            return self.build_result(self.installed)
