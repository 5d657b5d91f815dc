"""The layouts that there are."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TypeVar

from xla_ckpt.errors import UsageError
from xla_ckpt.keywords import meant
from xla_ckpt.layouts.base import Layout
from xla_ckpt.layouts.dcp.layout import TORCHTITAN, Dcp
from xla_ckpt.layouts.hugging_face import HuggingFace
from xla_ckpt.layouts.native import Native
from xla_ckpt.layouts.nxd.layout import NeuronxDistributed
from xla_ckpt.layouts.one_file.layout import OneFile
from xla_ckpt.layouts.optimum.layout import OptimumNeuron
from xla_ckpt.layouts.orbax.layout import Orbax, OrbaxModel
from xla_ckpt.layouts.peft import Peft
from xla_ckpt.layouts.smp.layout import SageMaker
from xla_ckpt.layouts.torch_checkpointing.layout import TorchCheckpointing
from xla_ckpt.manifest.records import Manifest

L = TypeVar("L", bound=Layout)

NATIVE = Native()

_layouts: list[Layout] = [
    NATIVE,
    Dcp("dcp", finds=True),
    Dcp(TORCHTITAN, finds=False),
    OptimumNeuron(),  # before neuronx-distributed's, which would find the rank files in its tags, too
    NeuronxDistributed("xser", finds=True),
    NeuronxDistributed("pt", finds=False, other_names=("nxd",)),
    SageMaker(),  # before single files: one of its directories, or sets, may have the name of one
    OrbaxModel(),  # before orbax's: what it writes are orbax's files, too
    Orbax("orbax"),
    Orbax("orbax-manager", item="default"),  # the items that orbax's own managers look for, unless a program names one
    Orbax("orbax-v1", item="state"),
    TorchCheckpointing(),
    HuggingFace(),
    Peft(),
    OneFile(),
]
"""One object for each layout. To add one is a line here, or a call of `register_layout`."""


def register_layout(layout: L) -> L:
    """Add a layout; from now on it is found, opened, written and converted like the others.

    Raises:
        UsageError: There is a layout of that name, or this is no layout.
    """
    if isinstance(layout, type) or not isinstance(getattr(layout, "name", None), str):
        hint = "Derive a class from xla_ckpt.Layout, and pass an object of it (docs/adding-a-layout.md)."
        raise UsageError("layout is none", expected="an object with a name", found=reprlib.repr(layout), hint=hint)
    taken = {name for known in _layouts for name in (known.name, *known.other_names)}
    if not layout.name or taken & {layout.name, *layout.other_names}:
        raise UsageError(
            "a layout needs a name of its own", expected=f"none of {', '.join(sorted(taken))}", found=layout.name
        )
    _layouts.append(layout)
    return layout


def remove_layout(layout: Layout) -> None:
    """Undo `register_layout`."""
    _layouts.remove(layout)


def all_layouts() -> Sequence[Layout]:
    """All of them, in the order in which they are asked whose a tag is."""
    return _layouts


def saved() -> tuple[str, ...]:
    """Names of the layouts that a job can save in."""
    return tuple(layout.name for layout in _layouts if layout.saves)


def converted() -> tuple[str, ...]:
    """Names of the layouts that a conversion makes, other names included."""
    return tuple(name for layout in _layouts if layout.converts for name in (layout.name, *layout.other_names))


def layout_named(name: str, *, among: Sequence[str] | None = None) -> Layout:
    """The layout that callers call so; `among` are those that will do.

    Raises:
        UsageError: There is none.
    """
    known = converted() if among is None else among
    if name in known:
        return next(layout for layout in _layouts if name in (layout.name, *layout.other_names))
    if any(name == layout.name and not layout.saves for layout in _layouts):
        raise UsageError(
            "no save writes this layout",
            expected=f"one of {', '.join(known)}",
            found=repr(name),
            hint="Save in one of these, and convert the tag: "
            f"xla_ckpt.convert(..., to={name!r}) (xla-ckpt convert --to {name}).",
        )
    raise UsageError(
        f"there is no such layout{meant(name, known)}", expected=f"one of {', '.join(known)}", found=repr(name)
    )


def layout_of(manifest: Manifest) -> Layout:
    """The layout in which a tag of ours was written."""
    return next((layout for layout in _layouts if layout is not NATIVE and layout.wrote(manifest)), NATIVE)
