"""The exceptions of SageMaker model parallel (SMP), with its names.

Each is also an `xla_ckpt.CheckpointError`, so that all ranks of a job raise the same one, and the builtin exception
that SMP's own class derives from. Messages are those of SMP 1.12, followed by further details that this library
knows.
"""

from __future__ import annotations

from collections.abc import Sequence

from xla_ckpt import CheckpointError
from xla_ckpt.facade import register_error_types

# Arguments, configuration and use.


class SMPValidationError(CheckpointError, ValueError):
    """An argument, a configuration or a state of the program that makes no sense."""


class SMPConfigError(SMPValidationError):
    """A configuration that contradicts itself, or has an entry that nothing looks at."""


class SMPInvalidArgumentError(SMPValidationError):
    """An argument that a call does not take."""


class NotInitializedError(SMPValidationError, RuntimeError):
    """`smp.init` was not called. A RuntimeError, too, as in older versions of SMP."""


class WorkerSizeError(SMPValidationError):
    """The number of processes does not fit the degrees of parallelism."""


class CommGroupConfigError(SMPValidationError):
    """A group of ranks that is not there in this configuration."""


class InvalidCommGroupError(SMPValidationError):
    """What was given is no `CommGroup`."""


class DDPNotEnabledError(SMPValidationError, RuntimeError):
    """A process group was asked for, and ``ddp`` is False. A RuntimeError, too, as in older versions of SMP."""


class DDPConfigError(SMPValidationError):
    """Something that needs ``ddp: True``."""


class InvalidPartitionIDError(SMPValidationError):
    """There is no partition of this number."""


class ModelTooSmallError(SMPValidationError):
    """The model has fewer parts than partitions are asked for."""


class InvalidStepOutputError(SMPValidationError):
    """A `StepOutput` is made of a list or a tuple."""


class MultipleDistributedModelError(SMPValidationError, RuntimeError):
    """A process wraps one model only. A RuntimeError, too, as in older versions of SMP."""


class DistributedModelNotWrappedError(SMPValidationError, RuntimeError):
    """There is no `DistributedModel` yet. A RuntimeError, too, as in older versions of SMP."""


class StepFunctionCalledError(SMPValidationError):
    """A call that has to come before the first step."""


class BwdExecutionNotInStepFnError(SMPValidationError):
    """`DistributedModel.backward` outside of a function with ``@smp.step``."""


class ModelNotPartitionedError(SMPValidationError):
    """The model has no partitions yet; here it has them at once, so nothing raises this."""


# Checkpoints.


class SMPCheckpointError(SMPValidationError):
    """A checkpoint that does not fit, or is not whole."""


class MissingCheckpointFilesError(SMPCheckpointError):
    """There are no partial files of this prefix."""

    @classmethod
    def of(cls, prefix: str) -> MissingCheckpointFilesError:
        """The error for the prefix of a set of partial files."""
        return cls(f"Could not find partial checkpoint files with prefix {prefix}")


class IncompatibleCheckpointRankFoundError(SMPCheckpointError):
    """A file of a rank that the number of files leaves no place for: another one is missing."""

    @classmethod
    def of(cls, rank_type: str, rank: int, num_parts: int, prefix: str) -> IncompatibleCheckpointRankFoundError:
        """The error for a file of `rank`; `rank_type` is rank, pp_rank, tp_rank or rdp_rank."""
        return cls(
            f"The {rank_type} of a checkpoint file ({rank}) exceeds the total number of unique {rank_type} checkpoint "
            f"files ({num_parts}) matching given prefix ({prefix}). Please ensure all checkpoint parts are available "
            "for loading at the given location."
        )


class IncompatibleCheckpointFoundError(SMPCheckpointError):
    """Partial files of another number of ranks."""

    @classmethod
    def of(
        cls, num_parts: int, sizes: tuple[int, int, int], matching_files: Sequence[str]
    ) -> IncompatibleCheckpointFoundError:
        """The error for so many files; `sizes` are the pipeline, tensor and reduced-data parallel degrees here."""
        pp, tp, rdp = sizes
        return cls(
            f"Can not load a {num_parts} parts checkpoint to a model with {pp} (pipeline) partitions, {tp} (tensor "
            f"parallel) partitions, and {rdp} reduced-data-parallel ranks. Please save the full model and load that "
            "instead when changing the number of partitions across runs. "
            f"Matching files: {list(matching_files)}"
        )


class MissingKeysInCheckpointError(SMPCheckpointError):
    """A state dict that lacks something of the model."""

    @classmethod
    def of(cls, missing_keys: Sequence[str], tp_rank: int) -> MissingKeysInCheckpointError:
        """The error for these names, met on a tensor-parallel rank."""
        return cls(
            f"len of missing keys greater than 0, {list(missing_keys)} when loading state_dict on {tp_rank}, please "
            "check if keys are missing from the state_dict. If this is intended, set strict to False when calling "
            "load_state_dict on the DistributedModel"
        )


class RdpSizeError(SMPCheckpointError, AssertionError):
    """Optimizer state that is sharded over another number of ranks. An AssertionError, as in SMP."""

    @classmethod
    def of(cls, saved: int, here: int) -> RdpSizeError:
        """The error for state of `saved` ranks."""
        return cls(
            "Loading with shard_optimizer_state=True must use the checkpoint that was trained with the same rdp size! "
            f"The training rdp size {saved}, the loading rdp size {here}"
        )


UNCHANGED_HINT = "Pass what smp.load() returned, unchanged: it knows all files of the set, and loads them on any ranks."
"""What to do with a part of a set that does not fit."""

# What cannot be done.


class SMPUnsupportedError(CheckpointError, RuntimeError):
    """Something that is not there; the message says what to use instead."""


class SMPRuntimeError(CheckpointError, RuntimeError):
    """Something went wrong while the program ran."""


class TensorSplitError(SMPRuntimeError, ValueError):
    """A batch that does not divide into microbatches. A ValueError, too, as in older versions of SMP."""


class SMPAMPError(SMPRuntimeError):
    """A gradient scaler was used out of order."""


class TooFewRanksError(SMPRuntimeError):
    """A call that all ranks of a group make was made by some of them only; SMP hangs instead."""


register_error_types(
    *(
        kind
        for kind in list(globals().values())
        if isinstance(kind, type) and issubclass(kind, CheckpointError) and kind.__module__ == __name__
    )
)
