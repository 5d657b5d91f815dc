"""The registry of layouts: register, list and look up checkpoint formats.

The format of a foreign checkpoint is detected by the layouts in the order of this list.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TypeVar

from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.errors import UsageError
from xla_ckpt.formats.base import Layout
from xla_ckpt.formats.dcp.layout import TORCHTITAN, DcpLayout
from xla_ckpt.formats.hugging_face.layout import HuggingFaceLayout
from xla_ckpt.formats.hugging_face.peft import PeftLayout
from xla_ckpt.formats.native import NativeLayout
from xla_ckpt.formats.nxd.layout import NxdLayout
from xla_ckpt.formats.optimum.layout import OptimumNeuronLayout
from xla_ckpt.formats.orbax.layout import OrbaxLayout, OrbaxModelLayout
from xla_ckpt.formats.smp.layout import SmpLayout
from xla_ckpt.formats.torch_checkpointing.layout import TorchCheckpointingLayout
from xla_ckpt.formats.torch_save.layout import TorchSaveLayout
from xla_ckpt.keywords import suggest

L = TypeVar("L", bound=Layout)

NATIVE = NativeLayout()

_layouts: list[Layout] = [
    NATIVE,
    DcpLayout("dcp", finds_foreign=True),
    DcpLayout(TORCHTITAN, finds_foreign=False),
    OptimumNeuronLayout(),  # before neuronx-distributed, which would also detect the rank files in its tags
    NxdLayout("xser", finds=True),
    NxdLayout("pt", finds=False, other_names=("nxd",)),
    SmpLayout(),  # before single files: a directory or file set of this layout may have the name of a single file
    OrbaxModelLayout(),  # before orbax, because it writes orbax files
    OrbaxLayout("orbax"),
    OrbaxLayout("orbax-manager", item="default"),  # the items that orbax managers read by default
    OrbaxLayout("orbax-v1", item="state"),
    TorchCheckpointingLayout(),
    HuggingFaceLayout(),
    PeftLayout(),
    TorchSaveLayout(),
]
"""One instance per layout. To add a layout, add a line here, or call `register_layout`."""


def register_layout(layout: L) -> L:
    """Register a layout. It is then detected, opened, written and converted like the built-in layouts.

    Raises:
        UsageError: A layout of that name exists, or the argument is not a layout instance.
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


def unregister_layout(layout: Layout) -> None:
    """Undo `register_layout`."""
    _layouts.remove(layout)


def list_layouts() -> Sequence[Layout]:
    """Return all layouts, in the order in which they detect tags."""
    return _layouts


def list_saveable_layouts() -> tuple[str, ...]:
    """Return the names of the layouts that a job can save in."""
    return tuple(layout.name for layout in _layouts if layout.saves)


def list_convertible_layouts() -> tuple[str, ...]:
    """Return the names of the layouts that conversions can write, including alternative names."""
    return tuple(name for layout in _layouts if layout.converts for name in (layout.name, *layout.other_names))


def get_layout(name: str, *, allowed: Sequence[str] | None = None) -> Layout:
    """Return the layout with this name. `allowed` restricts the names; by default to those that conversions can write.

    Raises:
        UsageError: The name is unknown or not allowed.
    """
    known = list_convertible_layouts() if allowed is None else allowed
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
        f"there is no such layout{suggest(name, known)}", expected=f"one of {', '.join(known)}", found=repr(name)
    )


def find_layout(manifest: Manifest) -> Layout:
    """Return the layout in which a tag of this library was written."""
    return next((layout for layout in _layouts if layout is not NATIVE and layout.wrote(manifest)), NATIVE)
