"""Exceptions with the names of SageMaker model parallel (SMP).

Each is also an `xla_ckpt.CheckpointError`, so that all ranks of a job raise the same one, and the builtin exception
that SMP's own class derives from. Messages are those of SMP 1.12, followed by further details of this library.
"""

from __future__ import annotations

from collections.abc import Sequence

from xla_ckpt import CheckpointError
from xla_ckpt.facade import register_error_types

# Arguments, configuration and use.


class SMPValidationError(CheckpointError, ValueError):
    """Invalid argument, configuration or program state."""


class SMPConfigError(SMPValidationError):
    """Contradictory configuration, or unknown entry."""


class SMPInvalidArgumentError(SMPValidationError):
    """Invalid argument of a call."""


class NotInitializedError(SMPValidationError, RuntimeError):
    """Call before `smp.init`. Also a RuntimeError, as in older versions of SMP."""


class WorkerSizeError(SMPValidationError):
    """Number of processes that does not match the degrees of parallelism."""


class CommGroupConfigError(SMPValidationError):
    """Group of ranks that does not exist in this configuration."""


class InvalidCommGroupError(SMPValidationError):
    """Argument that is not a `CommGroup`."""


class DDPNotEnabledError(SMPValidationError, RuntimeError):
    """Request for a process group while ``ddp`` is False. Also a RuntimeError, as in older versions of SMP."""


class DDPConfigError(SMPValidationError):
    """Feature that needs ``ddp: True``."""


class InvalidPartitionIDError(SMPValidationError):
    """Partition that does not exist."""


class ModelTooSmallError(SMPValidationError):
    """Model with fewer modules than partitions."""


class InvalidStepOutputError(SMPValidationError):
    """`StepOutput` of a value that is not a list or a tuple."""


class MultipleDistributedModelError(SMPValidationError, RuntimeError):
    """Second wrapped model in a process. Also a RuntimeError, as in older versions of SMP."""


class DistributedModelNotWrappedError(SMPValidationError, RuntimeError):
    """Missing `DistributedModel`. Also a RuntimeError, as in older versions of SMP."""


class StepFunctionCalledError(SMPValidationError):
    """Call after the first step that must come before it."""


class BwdExecutionNotInStepFnError(SMPValidationError):
    """`DistributedModel.backward` outside of a function with ``@smp.step``."""


class ModelNotPartitionedError(SMPValidationError):
    """Model without partitions. Never raised, because models are partitioned immediately."""


# Checkpoints.


class SMPCheckpointError(SMPValidationError):
    """Checkpoint that does not fit, or is incomplete."""


class MissingCheckpointFilesError(SMPCheckpointError):
    """No partial files with this prefix."""

    @classmethod
    def of(cls, prefix: str) -> MissingCheckpointFilesError:
        """Return the error for the prefix of a set of partial files."""
        return cls(f"Could not find partial checkpoint files with prefix {prefix}")


class IncompatibleCheckpointRankFoundError(SMPCheckpointError):
    """File of a rank beyond the number of files, so that another one is missing."""

    @classmethod
    def of(cls, rank_type: str, rank: int, num_parts: int, prefix: str) -> IncompatibleCheckpointRankFoundError:
        """Return the error for a file of `rank`; `rank_type` is rank, pp_rank, tp_rank or rdp_rank."""
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
        """Return the error for this many files; `sizes` are this job's pipeline, tensor and reduced-data degrees."""
        pp, tp, rdp = sizes
        return cls(
            f"Can not load a {num_parts} parts checkpoint to a model with {pp} (pipeline) partitions, {tp} (tensor "
            f"parallel) partitions, and {rdp} reduced-data-parallel ranks. Please save the full model and load that "
            "instead when changing the number of partitions across runs. "
            f"Matching files: {list(matching_files)}"
        )


class MissingKeysInCheckpointError(SMPCheckpointError):
    """State dict that lacks entries of the model."""

    @classmethod
    def of(cls, missing_keys: Sequence[str], tp_rank: int) -> MissingKeysInCheckpointError:
        """Return the error for these names, raised on a tensor-parallel rank."""
        return cls(
            f"len of missing keys greater than 0, {list(missing_keys)} when loading state_dict on {tp_rank}, please "
            "check if keys are missing from the state_dict. If this is intended, set strict to False when calling "
            "load_state_dict on the DistributedModel"
        )


class RdpSizeError(SMPCheckpointError, AssertionError):
    """Optimizer state that is sharded over another number of ranks. An AssertionError, as in SMP."""

    @classmethod
    def of(cls, saved: int, here: int) -> RdpSizeError:
        """Return the error for state of `saved` ranks."""
        return cls(
            "Loading with shard_optimizer_state=True must use the checkpoint that was trained with the same rdp size! "
            f"The training rdp size {saved}, the loading rdp size {here}"
        )


UNCHANGED_HINT = "Pass what smp.load() returned, unchanged: it knows all files of the set, and loads them on any ranks."
"""Hint for a part of a set that does not fit."""

# Unsupported features and runtime errors.


class SMPUnsupportedError(CheckpointError, RuntimeError):
    """Unsupported feature; the message names the replacement."""


class SMPRuntimeError(CheckpointError, RuntimeError):
    """Error while the program runs."""


class TensorSplitError(SMPRuntimeError, ValueError):
    """Batch that is not divisible into microbatches. Also a ValueError, as in older versions of SMP."""


class SMPAMPError(SMPRuntimeError):
    """Gradient scaler calls in the wrong order."""


class TooFewRanksError(SMPRuntimeError):
    """Collective call that only some ranks of a group made; SMP hangs instead."""


register_error_types(
    *(
        kind
        for kind in list(globals().values())
        if isinstance(kind, type) and issubclass(kind, CheckpointError) and kind.__module__ == __name__
    )
)
