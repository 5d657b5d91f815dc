"""Checkpoints for PyTorch/XLA training that can be loaded on any topology.

>>> import torch, xla_ckpt
>>> model = torch.nn.Linear(4, 4)
>>> handle = xla_ckpt.save_checkpoint("memory://runs", "step_10", model, user_content={"step": 10}, async_save=True)
>>> xla_ckpt.load_checkpoint("memory://runs", model=model).user_content  # waits for the save, loads the newest tag
{'step': 10}

- `save_checkpoint`, `load_checkpoint`: save and load model, optimizer, scheduler and other objects of a training run.
- `save`, `restore`: save and restore any tree of arrays and plain values; `ArraySpec` describes an array to restore.
- `list_tags`, `latest_tag`, `has_checkpoint`, `verify`: list the tags of a directory, and verify their checksums.
- `repair`: restore lost bytes of a tag that was saved with parity.
- `Checkpoints`: a root directory as an object, which lists tags, inspects their contents, reads single leaves, pins and
  deletes.
- `SaveOptions`, `LoadOptions`, `ConvertOptions`: settings of such a call; `default_options` sets them for a block.
- `LlamaJob`: a Llama-like model and its parallelism in a job.
- `LatestN`, `BestN`, `EveryNSteps`, `EveryNSeconds`, `LatestDuration`, `AnyOf`: retention policies.
- `Product`: background export of a tag after its commit, such as a Hugging Face folder.
- `explain`, `convert`, `export_hf`: other meshes, other layouts, Hugging Face; `diff`: differences between two tags.
- `register_layout`, `Layout`: custom layouts (docs/adding-a-layout.md).
- `Mesh`, `add_mesh_source`, `PerRank`, `RNGState`: jobs of many ranks, and state that differs between ranks.
- `PreemptionGuard`: the step at which all ranks save when the job is preempted.
- `SaveHandle` (`handle.result()`, `handle.report`) and `finalize_checkpoint`: saves in flight.
- `on_report`: register a callback that receives the `SaveReport` or `LoadReport` of each save and load.
- Every error is a `CheckpointError`, which contains the location, the expected and found values, and a hint.

`dir(xla_ckpt)` lists all names. A name is loaded on first use, and none of them imports a framework. The first name
that accepts objects of the program also loads the modules that a save needs, for torch, too, if the program has
imported it, so that the first save is not delayed.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from xla_ckpt.storage.threads import register_shutdown

if TYPE_CHECKING:
    from xla_ckpt.arrays.registry import ArraySpec as ArraySpec
    from xla_ckpt.conversion.convert import ConvertReport as ConvertReport
    from xla_ckpt.conversion.convert import convert as convert
    from xla_ckpt.conversion.diff import Difference as Difference
    from xla_ckpt.conversion.diff import diff as diff
    from xla_ckpt.conversion.explain import explain as explain
    from xla_ckpt.conversion.export import ExportReport as ExportReport
    from xla_ckpt.conversion.export import export_hf as export_hf
    from xla_ckpt.conversion.llama.job import LlamaJob as LlamaJob
    from xla_ckpt.core.plan.explain import Explanation as Explanation
    from xla_ckpt.core.sharding.mesh import Mesh as Mesh
    from xla_ckpt.core.tree.optimizer_schema import OptimizerSchema as OptimizerSchema
    from xla_ckpt.distributed.mesh_source import add_mesh_source as add_mesh_source
    from xla_ckpt.errors import ChangedStateError as ChangedStateError
    from xla_ckpt.errors import ChangedTagError as ChangedTagError
    from xla_ckpt.errors import CheckpointError as CheckpointError
    from xla_ckpt.errors import CorruptCheckpointError as CorruptCheckpointError
    from xla_ckpt.errors import DivergentReplicasError as DivergentReplicasError
    from xla_ckpt.errors import FormatError as FormatError
    from xla_ckpt.errors import IncompatibleCheckpointError as IncompatibleCheckpointError
    from xla_ckpt.errors import InvalidTagError as InvalidTagError
    from xla_ckpt.errors import LoadError as LoadError
    from xla_ckpt.errors import MissingPackageError as MissingPackageError
    from xla_ckpt.errors import NoCheckpointError as NoCheckpointError
    from xla_ckpt.errors import NotAFileError as NotAFileError
    from xla_ckpt.errors import NotDurableError as NotDurableError
    from xla_ckpt.errors import RankFailedError as RankFailedError
    from xla_ckpt.errors import RemoteError as RemoteError
    from xla_ckpt.errors import RootInUseError as RootInUseError
    from xla_ckpt.errors import SaveError as SaveError
    from xla_ckpt.errors import StorageError as StorageError
    from xla_ckpt.errors import UnknownOutcomeError as UnknownOutcomeError
    from xla_ckpt.errors import UnprovenLoadError as UnprovenLoadError
    from xla_ckpt.errors import UnsupportedStateError as UnsupportedStateError
    from xla_ckpt.errors import UnsupportedVersionError as UnsupportedVersionError
    from xla_ckpt.errors import UntrustedObjectError as UntrustedObjectError
    from xla_ckpt.errors import UsageError as UsageError
    from xla_ckpt.features.preemption import PreemptionGuard as PreemptionGuard
    from xla_ckpt.features.products.product import Product as Product
    from xla_ckpt.formats.base import Layout as Layout
    from xla_ckpt.formats.orbax.maxtext import maxtext_names as maxtext_names
    from xla_ckpt.formats.orbax.name_rules import register_names as register_names
    from xla_ckpt.formats.registry import register_layout as register_layout
    from xla_ckpt.inspection.checkpoints import Checkpoints as Checkpoints
    from xla_ckpt.inspection.contents import ArraySample as ArraySample
    from xla_ckpt.inspection.contents import TagContents as TagContents
    from xla_ckpt.inspection.tags import TagSummary as TagSummary
    from xla_ckpt.inspection.tags import has_checkpoint as has_checkpoint
    from xla_ckpt.inspection.tags import latest_tag as latest_tag
    from xla_ckpt.inspection.tags import list_tags as list_tags
    from xla_ckpt.inspection.tags import repair as repair
    from xla_ckpt.inspection.tags import verify as verify
    from xla_ckpt.loading.load import Loaded as Loaded
    from xla_ckpt.loading.load import Restored as Restored
    from xla_ckpt.loading.load import load_checkpoint as load_checkpoint
    from xla_ckpt.loading.load import restore as restore
    from xla_ckpt.loading.verify import VerifyReport as VerifyReport
    from xla_ckpt.options import ConvertOptions as ConvertOptions
    from xla_ckpt.options import LoadOptions as LoadOptions
    from xla_ckpt.options import SaveOptions as SaveOptions
    from xla_ckpt.options import default_options as default_options
    from xla_ckpt.reports import LoadReport as LoadReport
    from xla_ckpt.reports import Phase as Phase
    from xla_ckpt.reports import SaveReport as SaveReport
    from xla_ckpt.reports import on_report as on_report
    from xla_ckpt.saving.background import SaveHandle as SaveHandle
    from xla_ckpt.saving.save import finalize_checkpoint as finalize_checkpoint
    from xla_ckpt.saving.save import save as save
    from xla_ckpt.saving.save import save_checkpoint as save_checkpoint
    from xla_ckpt.state.optimizer import register_optimizer as register_optimizer
    from xla_ckpt.state.per_rank import PerRank as PerRank
    from xla_ckpt.state.rng import RNGState as RNGState
    from xla_ckpt.tags.retention import AnyOf as AnyOf
    from xla_ckpt.tags.retention import BestN as BestN
    from xla_ckpt.tags.retention import EveryNSeconds as EveryNSeconds
    from xla_ckpt.tags.retention import EveryNSteps as EveryNSteps
    from xla_ckpt.tags.retention import LatestDuration as LatestDuration
    from xla_ckpt.tags.retention import LatestN as LatestN
    from xla_ckpt.tags.retention import Retention as Retention

__version__ = "0.1.0"

_EXPORTS = {
    "arrays.registry": ("ArraySpec",),
    "conversion.convert": (
        "ConvertReport",
        "convert",
    ),
    "conversion.diff": (
        "Difference",
        "diff",
    ),
    "conversion.explain": ("explain",),
    "conversion.export": (
        "ExportReport",
        "export_hf",
    ),
    "conversion.llama.job": ("LlamaJob",),
    "core.plan.explain": ("Explanation",),
    "core.sharding.mesh": ("Mesh",),
    "core.tree.optimizer_schema": ("OptimizerSchema",),
    "distributed.mesh_source": ("add_mesh_source",),
    "errors": (
        "ChangedStateError",
        "ChangedTagError",
        "CheckpointError",
        "CorruptCheckpointError",
        "DivergentReplicasError",
        "FormatError",
        "IncompatibleCheckpointError",
        "InvalidTagError",
        "LoadError",
        "MissingPackageError",
        "NoCheckpointError",
        "NotAFileError",
        "NotDurableError",
        "RankFailedError",
        "RemoteError",
        "RootInUseError",
        "SaveError",
        "StorageError",
        "UnknownOutcomeError",
        "UnprovenLoadError",
        "UnsupportedStateError",
        "UnsupportedVersionError",
        "UntrustedObjectError",
        "UsageError",
    ),
    "features.preemption": ("PreemptionGuard",),
    "features.products.product": ("Product",),
    "formats.base": ("Layout",),
    "formats.orbax.maxtext": ("maxtext_names",),
    "formats.orbax.name_rules": ("register_names",),
    "formats.registry": ("register_layout",),
    "inspection.checkpoints": ("Checkpoints",),
    "inspection.contents": (
        "ArraySample",
        "TagContents",
    ),
    "inspection.tags": (
        "TagSummary",
        "has_checkpoint",
        "latest_tag",
        "list_tags",
        "repair",
        "verify",
    ),
    "loading.load": (
        "Loaded",
        "Restored",
        "load_checkpoint",
        "restore",
    ),
    "loading.verify": ("VerifyReport",),
    "options": (
        "ConvertOptions",
        "LoadOptions",
        "SaveOptions",
        "default_options",
    ),
    "reports": (
        "LoadReport",
        "Phase",
        "SaveReport",
        "on_report",
    ),
    "saving.background": ("SaveHandle",),
    "saving.save": (
        "finalize_checkpoint",
        "save",
        "save_checkpoint",
    ),
    "state.optimizer": ("register_optimizer",),
    "state.per_rank": ("PerRank",),
    "state.rng": ("RNGState",),
    "tags.retention": (
        "AnyOf",
        "BestN",
        "EveryNSeconds",
        "EveryNSteps",
        "LatestDuration",
        "LatestN",
        "Retention",
    ),
}
_TORCH_MODULES = ("arrays.torch_registry", "state.torch_values", "state.torch_module", "distributed.torch_store")
_MODULE_OF = {name: home for home, names in _EXPORTS.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604  # all of them are strings


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'xla_ckpt' has no attribute {name!r}")
    home = _MODULE_OF[name]
    collector = importlib.import_module("xla_ckpt.garbage_collection")
    # Modules create no garbage, and a collection over all objects of torch takes as long as importing them.
    with collector.pause_gc():
        if home.startswith(("arrays", "state")) or home in ("loading.load", "saving.save"):
            importlib.import_module("xla_ckpt.saving.save")
            for module in _TORCH_MODULES if "torch" in sys.modules else ():
                importlib.import_module(f"xla_ckpt.{module}")
        value = getattr(importlib.import_module(f"xla_ckpt.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _shut_down_job(imported_by: int) -> None:
    """Leave the job at the exit of a program that may be a rank, even without any call: other ranks may wait for it."""
    if "torch.distributed" in sys.modules or "jax" in sys.modules:
        channel = importlib.import_module("xla_ckpt.distributed.current_job").get_communicator
        # A worker process that a rank forks is not that rank.
        importlib.import_module("xla_ckpt.distributed.job").shut_down(channel() if os.getpid() == imported_by else None)


try:
    register_shutdown(partial(_shut_down_job, os.getpid()))
except RuntimeError:
    pass  # the interpreter is exiting, and imports this to inspect a directory: no other rank waits for it
