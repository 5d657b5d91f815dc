"""Declare tensor-parallel state in plain tensors to DCP, which would treat the shards as replicas of one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.registry import require_adapter
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray, create_unsharded
from xla_ckpt.core.sharding.mesh import Mesh, RankInfo, parse_mesh
from xla_ckpt.core.sharding.sharding import ShardingRules, find_sharding, find_unused_rules, parse_rules
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.flatten import format_key
from xla_ckpt.core.tree.nested import KeyPath, map_leaves
from xla_ckpt.dcp.tensor import GlobalTensor, create_global_tensor, wrap_declared_chunks
from xla_ckpt.distributed.mesh_source import get_current_mesh
from xla_ckpt.errors import UsageError
from xla_ckpt.logs import get_logger
from xla_ckpt.state import optimizer as optimizers
from xla_ckpt.state.model_state import get_parameter_names
from xla_ckpt.state.shardings import OptimizerParameter, StateShardings
from xla_ckpt.state.wrappers import is_model_view, unwrap_model, unwrap_optimizer

logger = get_logger(__name__)


def sharded(
    state_dict: Mapping[str, Any],
    model: Any = None,
    mesh: Mesh | str | None = None,
    shardings: ShardingRules | None = None,
    *,
    optimizer: Any = None,
) -> dict[str, Any]:
    """Return a state dict whose tensor shards declare their global tensors, for any DCP function, including stock DCP.

    Plain tensors of tensor-parallel ranks have the same keys and different values. DCP treats them as replicas, and
    stores one of them. This function wraps each in a `GlobalTensor`: a tensor of the global shape with this rank's
    shard. A load overwrites the shard in place, so the tensors of the program are filled; other values are replaced in
    the returned dict. Replicated tensors, DTensors and all other values stay unchanged.

    Args:
        state_dict: The state of a model or an optimizer, or a dict of several, as for DCP. Optimizer states are sharded
            like their parameters.
        model: The module whose parameters declare their sharding: with neuronx-distributed's and Megatron's attributes,
            or through its layers.
        mesh: The mesh of the ranks; by default the mesh of neuronx-distributed.
        shardings: Rules as in `xla_ckpt.save_checkpoint`, which take precedence: (regular expression, spec), for DCP
            keys such as ``model.layers.0.up.weight``.
        optimizer: Required if its states have numbers as keys, as in ``optimizer.state_dict()``; and for ZeRO-1.

    Raises:
        UsageError: If the mesh is unknown, or a rule does not fit.
        UnsupportedStateError: If the attributes of a parameter contradict each other.
    """
    if not isinstance(state_dict, Mapping):
        raise UsageError(
            "this is no state dict",
            expected="a dict",
            found=type(state_dict).__name__,
            hint="It comes before the model.",
        )
    return _GlobalTensorBuilder(model, mesh, shardings, optimizer).build(state_dict)


_NUMBERED_STATE_KEYS: Mapping[str | int, bool] = {
    schema.STATE: False,
    "base_state": False,
    "sharded_master_weights": True,
}
"""Optimizer keys whose members are keyed by parameter number -> True if the members are tensors: master weights."""


class _GlobalTensorBuilder:
    def __init__(self, model: Any, mesh: Mesh | str | None, shardings: ShardingRules | None, optimizer: Any) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        job_mesh = parse_mesh(mesh) or get_current_mesh(rank, world)
        if job_mesh is None and shardings and world > 1:
            raise UsageError("rules of shardings need a mesh", hint="Give mesh=, for instance Mesh(dp=2, tp=4).")
        job_mesh = job_mesh or Mesh(dp=world)
        if job_mesh.size != world:
            raise UsageError(
                "the mesh does not fit the job",
                expected=f"{world} rank{'s' * (world > 1)}",
                found=f"{job_mesh.size} ({job_mesh})",
                hint="Start the job with torchrun, and call torch.distributed.init_process_group first."
                if world == 1
                else "Start the job with as many ranks, or correct mesh=.",
            )
        placement = RankInfo(rank, world, job_mesh)
        model, self.optimizer = unwrap_model(model), unwrap_optimizer(optimizer)
        if not hasattr(model, "named_parameters") and (model is not None or optimizer is not None):
            raise UsageError(
                "this is no model",
                expected="a torch.nn.Module as model=",
                found=type(model).__name__,
                hint="The state dict comes first, and then the model itself, which knows how its parameters are split.",
            )
        self.rules = parse_rules(shardings)
        self.placement = placement
        self.parameters: dict[str, OptimizerParameter] = {
            name: OptimizerParameter(name=name, value=value)
            for name, value in (model.named_parameters() if model is not None else ())
        }
        self.numbered_names: list[str] = []
        """Names of the optimizer's parameters, in the order of the torch numbers."""
        if self.optimizer is not None:
            names = get_parameter_names(model)
            self.numbered_names = optimizers.list_parameter_names(self.optimizer, names)
            optimized = optimizers.get_saved_parameters(self.optimizer, model, names, placement)
            self.parameters |= {parameter.name: parameter for parameter in optimized.values()}
        self.state_shardings = StateShardings(
            placement, self.rules, {format_key(name): p for name, p in self.parameters.items()}
        ).with_model(model)
        # The state dict of a wrapped model may contain wrapper prefixes in its names.
        others = model.get_legacy_names() if is_model_view(model) else {}
        self.parameters |= {name: self.parameters[plain] for name, plain in others.items() if plain in self.parameters}
        self.seen_keys: list[str] = []

    def build(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        views: dict[str, Any] = map_leaves(state_dict, self._convert_leaf)
        for warning in find_unused_rules(self.rules, self.seen_keys):
            logger.warning("%s", warning)
        return views

    def _convert_leaf(self, keys: KeyPath, value: Any) -> Any:
        """Wrap a tensor shard in a view of its global tensor; return any other value unchanged."""
        if not isinstance(value, torch.Tensor):
            return value
        name = ".".join(map(str, keys))
        self.seen_keys.append(name)
        value = wrap_declared_chunks(value, name)
        adapter = require_adapter(value, name)
        if isinstance(value, GlobalTensor) or adapter.locate(value, name) is not None:
            return value
        local = self._locate(name, keys, value, adapter)
        shape = tuple(value.shape)
        if local.shape == shape and [piece.global_box for piece in local.pieces] == [Box.from_shape(shape)]:
            return value
        return create_global_tensor(value, local)

    def _locate(self, name: str, keys: KeyPath, value: torch.Tensor, adapter: ArrayAdapter) -> LocalArray:
        """Return the region of a plain tensor."""
        shape = tuple(value.shape)
        ruled = find_sharding(self.rules, name)
        owner, path = self._find_parameter(keys)
        is_state = schema.get_owner(path) is not None
        if ruled is not None and (owner is None or not is_state or shape == tuple(owner.value.shape)):
            # A rule for a parameter also matches the keys of its states. Their step count is not a shard.
            return (
                create_unsharded(shape)
                if len(ruled.dims) > len(shape)
                else self.state_shardings.place(name, ruled, shape)
            )
        if owner is None:
            return create_unsharded(shape)
        return self.state_shardings.locate(
            path, value if is_state else _check_parameter_shape(owner.value, shape, name), adapter
        )

    def _find_parameter(self, keys: KeyPath) -> tuple[OptimizerParameter | None, str]:
        """Return the parameter that a tensor is, or is a state of, and the leaf path that it would have in a tag.

        Raises:
            UsageError: If states are keyed by number and the optimizer is not passed.
        """
        for i, key in enumerate(keys):
            if (
                type(key) is not int
                or not i
                or keys[i - 1] not in _NUMBERED_STATE_KEYS
                or (i + 1 == len(keys)) != _NUMBERED_STATE_KEYS[keys[i - 1]]
            ):
                continue
            if not self.numbered_names:
                raise UsageError(
                    "states of an optimizer stand under numbers, and nobody says whose they are",
                    leaf=".".join(map(str, keys)),
                    hint="Give optimizer=, or the state dict of "
                    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict.",
                )
            if key < len(self.numbered_names):
                called = self.numbered_names[key]
                below = keys[i + 1 :]
                return self.parameters[called], schema.get_state_path(
                    called, *below
                ) if below else schema.get_master_path(called)
        parts = ".".join(map(str, keys)).split(".")
        for length in range(len(parts), 0, -1):
            for first in range(len(parts) - length, -1, -1):
                parameter = self.parameters.get(".".join(parts[first : first + length]))
                if parameter is not None:
                    suffix = parts[first + length :]
                    return parameter, schema.get_state_path(
                        parameter.name, *suffix
                    ) if suffix else schema.get_weight_path(parameter.name)
        return None, ""


def _check_parameter_shape(parameter: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """Return the parameter whose attributes declare the sharding of a tensor with its name.

    Raises:
        UsageError: If the shapes differ.
    """
    if tuple(parameter.shape) != shape:
        raise UsageError(
            "a tensor has another shape than the parameter of its name",
            leaf=name, expected=list(parameter.shape), found=list(shape),
            hint="Give the state dict of this model.",
        )  # fmt: skip
    return parameter
