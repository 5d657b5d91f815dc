"""All parts of a load, and how they are put in place together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.engine.target import Target, install_all
from xla_ckpt.job.round import Round
from xla_ckpt.lightweight import cached_property
from xla_ckpt.state.frozen_base import Base, forget_digests
from xla_ckpt.state.handover import Handing, changing
from xla_ckpt.state.loading import Loading
from xla_ckpt.storage.undisturbed import Undisturbed
from xla_ckpt.tree.skeleton import Make


@dataclass(frozen=True)
class Loadings:
    """All parts of a load, checked but not yet begun."""

    parts: list[Loading]
    result: Make
    """The value that the load returns, from the restored arrays by leaf path."""

    @cached_property
    def targets(self) -> dict[str, Target]:
        """Leaf path -> where the array goes."""
        return {path: target for part in self.parts for path, target in part.targets.items()}

    base: Base | None = None
    """What the tag leaves out of the model, and names; None if it leaves out nothing."""

    installed: dict[str, Any] = field(default_factory=dict, init=False)
    """The arrays that are in place, by leaf path: first those that code of the program takes."""

    @property
    def alone(self) -> frozenset[str]:
        """Leaf paths of arrays that code of the program takes before anything else is changed."""
        return frozenset(path for part in self.parts for path in part.handed_paths)

    @contextlib.contextmanager
    def handing_over(self, exchange: Round) -> Iterator[Callable[[], None]]:
        """Around the reading and the installation. Gives what hands over to code of the program what that takes.

        It is called when the arrays `alone` are filled, and the memory that the program uses is not yet overwritten. If
        that or anything after it fails, the members get back what they had. From its end on all is overwritten and
        installed before a signal handler of the program runs, which may raise: a half-loaded model looks like a good
        one.
        """
        handing = Handing([part.handover for part in self.parts if part.handover is not None])

        def install() -> Mapping[str, Any]:
            alone = self.alone
            self.installed.update(install_all({p: t for p, t in self.targets.items() if p in alone}))
            return self.installed

        with Undisturbed() as calm, handing.put_back_on_failure():

            def hand_over() -> None:
                handing.run(install, exchange)
                if self.base is None and any(target.live for target in self.targets.values()):
                    forget_digests()  # what adapters are loaded into is no base
                calm.begin()

            yield hand_over

    def install(self) -> Any:
        """Put everything in place, now that the memory of all targets is filled; returns the load's value.

        Raises:
            LoadError: That fails, which leaves a part of the objects changed.
        """
        with changing():
            self.installed.update(install_all({p: t for p, t in self.targets.items() if p not in self.installed}))
            for part in self.parts:
                part.finish(self.installed)
            return self.result(self.installed)
