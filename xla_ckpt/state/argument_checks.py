"""Validate the objects that a caller passes, before anything is written or changed.

Only arguments that cannot be right raise an error. Optimizers and models of other libraries are recognized by their
methods, not by their class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from xla_ckpt.arrays.pytree import has_methods, is_registered_pytree
from xla_ckpt.arrays.torch_objects import (
    has_inherited_method,
    is_instance_of,
    is_lazy,
    is_module,
    is_parameter,
    is_torch_tensor_class,
)
from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.logs import get_logger
from xla_ckpt.state import model_state
from xla_ckpt.state.optimizer import is_optimizer_like
from xla_ckpt.state.optimizer_dict import list_optimizers

if TYPE_CHECKING:
    import torch


logger = get_logger(__name__)

_COUNTER_KEYS = frozenset({"step", "steps", "global_step", "epoch", "iteration"})
"""Keys that programs use for counters stored next to their objects."""

_SCHEDULER_KEYS = frozenset({"last_epoch", "base_lrs", "_step_count"})
"""Keys in the state of torch learning rate schedulers."""

_ARGUMENT_ORDER = "The order of the arguments is model, optimizer, scheduler, user_content."


def check_not_empty(objects: Iterable[Any], placement: RankInfo) -> None:
    """Raise an error if there is nothing to save. An empty tag would let retention delete good ones.

    Rank 0 decides for the job, because state that only rank 0 saves, such as the user content, may be missing on other
    ranks.

    Raises:
        UsageError: If every argument is None or an empty container.
    """
    members = [m for m in objects if m is not None]
    # The containers of a pipeline stage may be empty. None means that the argument was not passed.
    empty = placement.mesh.pp == 1 and all(isinstance(m, Mapping | list | tuple) and not m for m in members)
    if placement.rank == 0 and (empty or not members):
        raise UsageError(
            "there is nothing to save",
            expected="a model, an optimizer, or other state",
            found="empty containers" if members else "None",
            hint="A variable that should hold the state may be None or empty.",
        )


def check_extras(extras: Any) -> None:
    """Raise an error for extras without names.

    Raises:
        UsageError: If extras is not a mapping.
    """
    if not isinstance(extras, Mapping):
        raise UsageError(
            "extras have names",
            leaf=schema.EXTRAS,
            expected="a dict of objects, such as {'rng': xla_ckpt.RNGState()}",
            found=_get_type_name(extras),
            hint=_ARGUMENT_ORDER,
        )


def check_members(model: Any, optimizer: Any, *, loading: bool = False) -> None:
    """Check the types of a model and an optimizer, and that the optimizer steps the model's parameters.

    Raises:
        UsageError: If the type of an argument is wrong, or the optimizer steps other parameters.
        UnsupportedStateError: If the model is wrapped in FSDP1.
    """
    check_not_class(model, schema.MODEL)
    if model is not None:
        _check_model(model, loading=loading)
    if optimizer is not None:
        _check_not_fsdp1(model)
    for each in list_optimizers(optimizer) if optimizer is not None else ():
        _check_optimizer(each)
        _check_consolidated(each, loading=loading)
        if is_module(model):
            _check_optimizer_of_model(each, model)


def _check_not_fsdp1(model: Any) -> None:
    """Reject an optimizer whose model uses FSDP1, because its state consists of parts of flattened parameters.

    Raises:
        UnsupportedStateError: If the model is wrapped in FSDP1.
    """
    parts = model.modules() if is_module(model) else ()
    if any(is_instance_of(part, "torch.distributed.fsdp", "FullyShardedDataParallel") for part in parts):
        raise UnsupportedStateError(
            "the optimizer of a model in FullyShardedDataParallel (FSDP1) holds parts of flattened parameters",
            leaf=schema.OPTIMIZER,
            expected="a model sharded with torch.distributed.fsdp.fully_shard",
            found="FullyShardedDataParallel",
            hint="Shard it with fully_shard, which torch recommends in its place. Or save what get_state_dict of "
            "torch.distributed.checkpoint.state_dict returns, with xla_ckpt.save, and hand what xla_ckpt.restore "
            "(like=) returns to set_state_dict. The model alone is saved and loaded as it is.",
        )


def _check_model(model: Any, *, loading: bool) -> None:
    """Reject models that cannot be loaded: a load changes the model in place and looks its members up by name.

    Raises:
        UsageError: If the model is something else.
    """
    is_mapping = isinstance(model, MutableMapping) or (
        not loading and isinstance(model, Mapping) and not is_registered_pytree(model)
    )
    if is_module(model) or is_mapping:
        return
    if is_optimizer_like(model):
        raise _create_wrong_argument_error("a model", "an optimizer", model)
    if is_scheduler(model):
        raise _create_wrong_argument_error("a model", "a scheduler", model)
    if isinstance(model, list | tuple) and any(map(is_module, model)):
        raise UsageError(
            f"a {_get_type_name(model)} of modules is no model",
            leaf=schema.MODEL,
            expected="a torch.nn.Module, or a dict of them",
            found=f"{len(model)} values",
            hint="Give each a name, in the save and in each load: model={'first': ..., 'second': ...}.",
        )
    raise UsageError(
        "this is no model",
        leaf=schema.MODEL,
        expected="a torch.nn.Module or a dict of arrays",
        found=_get_type_name(model),
        hint="xla_ckpt.save and xla_ckpt.restore take any tree of arrays, such as a TrainState or nnx.state(model). Of "
        "a mapping that cannot be changed, give a dict.",
    )


def check_not_class(value: Any, leaf: str) -> None:
    """Reject a class passed instead of an instance. It would be pickled, or its methods would raise a TypeError.

    Raises:
        UsageError: If the value is a class.
    """
    if isinstance(value, type):
        raise UsageError(
            "a class was given in the place of an object",
            leaf=leaf,
            expected=f"{value.__name__}(...)",
            found=_get_type_name(value),
        )


def check_scheduler(scheduler: Any) -> None:
    """Reject an optimizer state passed as the scheduler. Any other dict may be the program's own scheduler state.

    Log a warning for a dict that contains a step counter and no scheduler keys, because it looks like user content.

    Raises:
        UsageError: If the value is the state of an optimizer.
    """
    if not isinstance(scheduler, Mapping):
        return
    if schema.PARAM_GROUPS in scheduler:
        raise _create_wrong_argument_error("a scheduler", "the state of an optimizer", scheduler)
    if not scheduler.keys().isdisjoint(_COUNTER_KEYS) and scheduler.keys().isdisjoint(_SCHEDULER_KEYS):
        logger.warning(
            "the dict with %s is saved as the scheduler. If it is the user content, which a load gives back, "
            "say user_content=: %s",
            ", ".join(map(str, list(scheduler)[:5])),
            _ARGUMENT_ORDER,
        )


def _check_optimizer(optimizer: Any) -> None:
    check_not_class(optimizer, schema.OPTIMIZER)
    if isinstance(optimizer, Mapping):
        check_no_stateful(optimizer, schema.OPTIMIZER)
        return
    if is_module(optimizer) and not is_optimizer_like(optimizer):
        raise _create_wrong_argument_error("an optimizer", "a module", optimizer)
    if is_scheduler(optimizer):
        raise _create_wrong_argument_error("an optimizer", "a scheduler", optimizer)
    if isinstance(optimizer, list | tuple):
        raise UsageError(
            f"a {_get_type_name(optimizer)} is no optimizer",
            leaf=schema.OPTIMIZER,
            expected="one optimizer, or a dict",
            found=f"{len(optimizer)} values",
            hint="Give several as a dict, each by a name. The state of one of optax goes to extras, in a dict: "
            "extras={'optax': {'state': ...}}.",
        )
    if not has_methods(optimizer, "state_dict", "load_state_dict"):
        raise UsageError(
            "this is no optimizer",
            leaf=schema.OPTIMIZER,
            expected="state_dict() and load_state_dict(), or a dict",
            found=_get_type_name(optimizer),
            hint=_ARGUMENT_ORDER,
        )


def _check_consolidated(optimizer: Any, *, loading: bool) -> None:
    """Reject torch's `ZeroRedundancyOptimizer` and similar optimizers.

    Each rank holds the state of some parameters. `state_dict` returns the state of all parameters as of the last
    consolidation, which is a separate collective call: a save would store outdated state, or fail on some ranks.

    Raises:
        UsageError: If the optimizer has to be consolidated.
    """
    if not callable(getattr(optimizer, "consolidate_state_dict", None)):
        return
    save = (
        "On all ranks, call optimizer.consolidate_state_dict(to) for each rank `to`; take optimizer.state_dict() on "
        "that rank before the next call, and give it to the save in the place of the optimizer."
    )
    load = "Load into an empty dict, and give that to optimizer.load_state_dict()."
    raise UsageError(
        f"a {type(optimizer).__name__} has the state of each parameter on one rank alone, and puts it together only "
        "when it is told to",
        leaf=schema.OPTIMIZER,
        expected="an optimizer, or a dict",
        found=type(optimizer).__name__,
        hint=load if loading else save,
    )


def check_like(like: Any) -> None:
    """Reject a module or an optimizer in a template, where it would match anything as a placeholder.

    Raises:
        UsageError: If the template is one, or a dict that contains one.
    """
    for leaf, value in [("like", like), *(like.items() if isinstance(like, Mapping) else ())]:
        if is_module(value) or is_optimizer_like(value):
            raise UsageError(
                "like= is a tree of arrays, and makes a new one",
                leaf=str(leaf),
                expected="arrays, or ArraySpec",
                found=_get_type_name(value),
                hint="load_checkpoint loads into a model and its optimizer. Or give the model's state_dict().",
            )


def check_no_stateful(members: Mapping[Any, Any], leaf: str) -> None:
    """Reject a dict of objects with state: they would be pickled, and a load would not update them.

    Raises:
        UsageError: If the dict contains such an object.
    """
    for key, member in members.items():
        if has_methods(member, "state_dict", "load_state_dict"):
            names = ", ".join(f'"{name}": ...' for name in list(members)[:3])
            raise UsageError(
                f"a dict holds an object that has a state of its own: {key!r}",
                leaf=leaf,
                expected="one object, or a dict of arrays and plain values",
                found=f"{type(member).__name__} in a {type(members).__name__}",
                hint=f"Give each of them to extras, by a name of its own: extras={{{names}}}.",
            )


def check_can_pickle(value: Any, leaf: str) -> None:
    """Reject a model or an optimizer nested in other state, where it would be pickled instead of stored as arrays.

    User content is not checked; neuronx-distributed does not check it either.

    Raises:
        UnsupportedStateError: If the value is a model or an optimizer.
    """
    if leaf.startswith(f"{schema.USER_CONTENT}/"):
        return
    if is_module(value) or is_optimizer_like(value):
        raise UnsupportedStateError(
            "a model or optimizer inside of other state would be pickled whole, without its arrays being stored",
            leaf=leaf,
            found=_get_type_name(value),
            hint="Give it to save_checkpoint as model=, optimizer= or a member of extras=, or store its state_dict().",
        )


def _create_wrong_argument_error(expected: str, given: str, value: Any) -> UsageError:
    return UsageError(
        f"{given} was given in the place of {expected}",
        leaf=expected.split()[1],
        expected=expected,
        found=_get_type_name(value),
        hint=_ARGUMENT_ORDER,
    )


def _get_type_name(value: Any) -> str:
    return f"the class {value.__qualname__}" if isinstance(value, type) else type(value).__name__


def is_scheduler(value: Any) -> bool:
    """Return True for a learning rate scheduler. A scheduler that also steps the parameters counts as an optimizer."""
    if is_optimizer_like(value) or hasattr(value, "zero_grad"):
        return False
    return is_instance_of(value, "torch.optim.lr_scheduler", "LRScheduler") or has_methods(value, "get_last_lr")


def _reshard_fsdp2(model: torch.nn.Module) -> None:
    """Reshard parameters that FSDP2 keeps gathered after a forward pass, since no optimizer has the gathered ones.

    The module's `state_dict` reshards them too, but is called later.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for part in model.modules() if fsdp is not None else ():
        if isinstance(part, fsdp.FSDPModule):  # type: ignore[union-attr]
            part.reshard()


def _check_optimizer_of_model(optimizer: Any, model: torch.nn.Module) -> None:
    """Reject an optimizer that was created before the model was moved, because it steps unused tensors.

    `Module.to` creates new parameters on an XLA device, `to_empty` on any device, and sharding a module replaces them.
    Some optimizers step copies on purpose (master weights of higher precision, an average of the weights that is saved
    as the model). Such copies have another dtype, other names, a separate `state_dict`, or are passed with the model.

    Raises:
        UsageError: If the optimizer steps parameters from before the move.
    """
    if not has_inherited_method(optimizer, "state_dict"):
        return
    _reshard_fsdp2(model)
    groups = [g for g in getattr(optimizer, schema.PARAM_GROUPS, ()) if g.get("params")]
    strangers, of_model = [p for g in groups for p in g["params"]], [*model.parameters()]
    names = model_state.get_parameter_names(model)
    if not strangers or not of_model or any("param_names" in g for g in groups):
        return
    if any(model_state.find_parameter_name(p, names) is not None for p in strangers) or any(map(is_lazy, of_model)):
        return
    twins = {(p.shape, p.dtype) for p in of_model}
    alike = all(is_parameter(p) and (p.shape, p.dtype) in twins for p in strangers)
    model_homes, optimizer_homes = _list_devices(of_model), _list_devices(strangers)
    if not alike or not _is_moved(optimizer_homes, model_homes):
        logger.warning(
            "no parameter of the optimizer is one of the model: its state goes by the position of its parameters (#0.0 "
            "is the first of the first group), not by their names. If it steps copies, such as master weights, give "
            'them with the model: {"model": model, "master": copies}. If the model was made anew after the optimizer, '
            "make that anew, too"
        )
        return
    raise UsageError(
        "no parameter of the optimizer is one of the model: the optimizer was made before the model was moved or "
        "sharded, and its steps do not reach the model",
        leaf=schema.OPTIMIZER,
        expected=f"parameters on {', '.join(model_homes)}",
        found=f"parameters on {', '.join(optimizer_homes)}",
        hint="Make the optimizer after model.to(...). If it steps copies on purpose, give their names: "
        "AdamW([(name, copy), ...]).",
    )


def _list_devices(parameters: Sequence[Any]) -> list[str]:
    """Return the device types of parameters, and whether they are sharded."""
    return sorted(
        {f"{p.device.type}{'' if is_torch_tensor_class(p) else f' ({type(p).__name__})'}" for p in parameters}
    )


def _is_moved(old: Sequence[str], new: Sequence[str]) -> bool:
    """Return True if parameters moved as a module does: from `meta`, from the CPU to a device, or into shards.

    An optimizer may step CPU copies of a model on another device on purpose. No optimizer steps `meta` tensors.
    """
    if set(old) & set(new) or not set(old) <= {"cpu", "meta"} or set(new) == {"meta"}:
        return False
    return set(old) == {"meta"} or "cpu" not in new
