"""Which checkpoint a job resumes from, whether its configuration fits, and how it is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import xla_ckpt
from neuron_compat.smp import files
from neuron_compat.smp.elsewhere import read_otherwise
from neuron_compat.smp.errors import MissingCheckpointFilesError, SMPValidationError
from neuron_compat.smp.sources import Stored
from xla_ckpt.display import join_lines, make_lines_printable
from xla_ckpt.facade import (
    JOB_CONFIG,
    MODEL_SET,
    NEWEST,
    OPTIMIZER_SETS,
    PARTIAL,
    SMP_VERSION,
    USER_CONTENT_FILE,
    read_whole_file,
    root_at,
    user_content_name,
)
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

FIXED = (
    "pipeline_parallel_degree",
    "sharded_data_parallel_degree",
    "shard_optimizer_state",
    "tensor_parallel_degree",
)
"""What SMP wants to be as it was if it loads an optimizer."""


def chosen(root: str, tag: str | None, *, partial: bool) -> str:
    """The name of a checkpoint in its root: that of the directory, or of the file.

    Raises:
        SMPValidationError: There is none.
    """
    if tag is not None:
        name = f"{tag}{PARTIAL}" if partial else tag
    elif partial:
        name = _newest(root)
    else:
        raise SMPValidationError("tag is required to load a full checkpoint!")
    if not (os.path.isdir if partial else os.path.isfile)(f"{root}/{name}"):
        details = _in_its_place(root, name) or read_otherwise(root)
        raise SMPValidationError(f"Checkpoint {root}/{name} does not exist!", details=details)
    return name


def _in_its_place(root: str, name: str) -> str | None:
    """What is in a root in the place of a checkpoint that is not there. None: nothing."""
    bare = name.removesuffix(PARTIAL)
    if name.endswith(2 * PARTIAL):
        return f"A tag is the name of the directory without {PARTIAL}: pass {bare.removesuffix(PARTIAL)}."
    if name != bare and os.path.isfile(f"{root}/{bare}"):
        return "There is a full checkpoint of this tag: pass partial=False."
    if name == bare and os.path.isdir(f"{root}/{bare}{PARTIAL}"):
        return "There is a partial checkpoint of this tag: pass partial=True."
    tags = [there.removesuffix(PARTIAL) for there in root_at(root).order]
    return f"Tags of partial checkpoints there, oldest first: {', '.join(tags[-10:])}." if tags else None


def _full_ones(root: str) -> str | None:
    """That a root has full checkpoints, which are known by the user content beside them; None if it has none."""
    there = [file for file in os.listdir(root) if os.path.isfile(f"{root}/{file}")] if os.path.isdir(root) else []
    full = [file for file in there if user_content_name(file) in there]
    if not full:
        return None
    full.sort(key=lambda file: os.path.getmtime(f"{root}/{file}"))
    listed = ", ".join(full[-10:])
    return f"There are full checkpoints of these tags, oldest first: {listed}. Pass partial=False, and a tag."


def _newest(root: str) -> str:
    """The name of the newest checkpoint in a root; empty if there is none."""
    listing = root_at(root)
    if listing.lines is None and listing.theirs == listing.order:  # saves of this library are found without the file
        raise SMPValidationError(
            f"Unable to find newest file at {root}/{NEWEST}, if trying to load newest checkpoint please ensure this "
            "file exists or pass an explicit checkpoint tag when loading a checkpoint.",
            details=_full_ones(root) or read_otherwise(root),
        )
    last = listing.lines[-1] if listing.lines else ""
    if last and PARTIAL.removeprefix("_") not in last:
        raise SMPValidationError(
            "The newest checkpoint file is not saved with `partial` postfix, this might be a checkpoint saved with smp "
            "<= 1.10, please load with the back compatible APIs."
        )
    # The directories count: a job may have ended after a save, before it was listed.
    return listing.order[-1] if listing.order else last


# -- the configuration


def config_differences(root: str, name: str, current: Mapping[str, Any], *, refuse: bool) -> None:
    """Compare the configuration of a checkpoint with that of the job, and say what differs.

    Every difference is a warning only, unless `refuse`: what SMP cannot load then, is loaded here.

    Raises:
        SMPValidationError: SMP before 1.10 wrote it; or `refuse`, and SMP refuses the difference.
        xla_ckpt.CorruptCheckpointError: The file with the configuration is damaged.
    """
    try:
        saved = read_whole_file(f"{root}/{name}/{JOB_CONFIG}")
    except xla_ckpt.NoCheckpointError:
        logger.warning("%s has no %s: its configuration is unknown", name, JOB_CONFIG)
        return
    if not isinstance(saved, Mapping):
        raise xla_ckpt.CorruptCheckpointError("the configuration is no dict", file=f"{name}/{JOB_CONFIG}")
    version = str(saved.get("smp_version", SMP_VERSION))
    if _numbers(version) < (1, 10):
        raise SMPValidationError(
            f"Checkpoint was saved with smp version {version} < 1.10.0, which is not supported with this checkpointing "
            "API."
        )
    if version != SMP_VERSION:
        logger.warning(
            "WARNING: Checkpoint was saved with a different version of smp, this might potentially cause issues. "
            "Checkpoint version: %s, Current smp version: %s.",
            version,
            SMP_VERSION,
        )
    differing = {
        key: f"feature {key}, loaded {value}, current {current[key]}\n"
        for key, value in saved.items()
        if key in current and value != current[key]
    }
    refused = [text for key, text in sorted(differing.items()) if key in FIXED]
    if refuse and refused:
        raise SMPValidationError(
            make_lines_printable(
                f"The following features changes are not allowed for loading partial: \n{''.join(refused)}"
            )
        )
    if differing:
        logger.warning(
            "Warning: Found mismatched features between save and load: \n%s\nThe checkpoint is loaded all the same.",
            join_lines(text.rstrip("\n") for text in differing.values()),
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


# -- what was saved


def user_content_of(root: str, name: str, *, partial: bool, trust: bool) -> Any:
    """The user content of a checkpoint; None if it has none.

    Raises:
        xla_ckpt.CorruptCheckpointError: Its file is damaged.
        xla_ckpt.UntrustedObjectError: It holds pickled objects, which are not trusted.
    """
    file = f"{root}/{name}/{USER_CONTENT_FILE}" if partial else f"{root}/{user_content_name(name)}"
    return files.Reading(trust=trust).value(file) if os.path.isfile(file) else None


@dataclass(slots=True, kw_only=True)
class Resumed:
    """A checkpoint that is loaded as soon as there is something to load it into."""

    root: str
    name: str
    """That of the directory in it, or of the file."""

    partial: bool
    """Whether it is a directory."""

    strict: bool
    optimizer: bool
    translate: Callable[[dict[str, Any]], Any] | None
    """Makes names of this model of those of a full checkpoint."""

    trust: bool
    _has_model: bool = False

    def apply(self, model: Any, optimizer: Any) -> None:
        """Load it into a model, and an optimizer if there is one. A second call loads what the first one lacked.

        Raises:
            MissingCheckpointFilesError: The checkpoint has no model, or no optimizer.
            xla_ckpt.CheckpointError: It does not fit, or is damaged. Nothing was changed.
        """
        if not self.partial:
            self._apply_full(model)
            return
        optimizer = optimizer if self.optimizer else None
        self._check_files(None if self._has_model else MODEL_SET)
        self._check_files(None if optimizer is None else OPTIMIZER_SETS[1])
        wanted = None if self._has_model else model
        if wanted is not None or optimizer is not None:
            source = Stored(path=self.root, tag=self.name, trust_pickle=self.trust)
            source.load(model=wanted, optimizer=optimizer, strict=self.strict)
        self._has_model = True

    def _check_files(self, kind: str | None) -> None:
        """Refuse a checkpoint that has no files of a kind."""
        folder = f"{self.root}/{self.name}"
        if kind is not None and not any(name.startswith(f"{kind}_") for name in os.listdir(folder)):
            raise MissingCheckpointFilesError.of(f"{folder}/{kind}")

    def _apply_full(self, model: Any) -> None:
        """Load the file of a full checkpoint into a model, if none was loaded yet."""
        if self._has_model:
            return
        state = files.load(f"{self.root}/{self.name}", partial=False, trust_pickle=self.trust)
        model.load_state_dict(state, strict=self.strict, translate_function=self.translate)
        self._has_model = True
