"""Stand-ins for neuronx-distributed's wrappers, which behave as those of NxD 0.18.0 do where a checkpoint meets them.

Each docstring names the file of NxD, and which of its behaviour is taken over. Nothing is copied from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from xla_ckpt import Mesh


class NxDModel(torch.nn.Module):
    """trainer/model.py: hands every question on to what it wraps, to the local part of it if that is a pipeline.

    It knows a pipeline from its configuration, passes on the arguments that it gets, and forwards attributes that it
    does not have. What it wraps is none of its `named_children`, which are those of the wrapped module.
    """

    def __init__(self, module: torch.nn.Module, stages: int = 1) -> None:
        super().__init__()
        self.module = module
        self.nxd_config = {"pipeline_parallel_size": stages}
        self.pp_enabled = stages > 1

    def local_modules(self) -> list[torch.nn.Module]:
        return self.module.local_stage_modules if self.pp_enabled else [self.module]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        ask = self.module.local_named_parameters if self.pp_enabled else self.module.named_parameters
        yield from ask(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        ask = self.module.local_named_buffers if self.pp_enabled else self.module.named_buffers
        yield from ask(*args, **kwargs)

    def named_children(self) -> Iterator[Any]:
        yield from self.module.local_named_children() if self.pp_enabled else self.module.named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        ask = self.module.local_named_modules if self.pp_enabled else self.module.named_modules
        yield from ask(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        ask = self.module.local_state_dict if self.pp_enabled else self.module.state_dict
        return ask(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class NxDPPModel(torch.nn.Module):
    """pipeline/model.py: of the modules of a whole model it holds those of one stage, under names of its own.

    `state_dict` is refused. `named_parameters` and `named_buffers` are those of the whole model. What begins with
    `local_` asks the stage, and gives the original names back, but does not take `remove_duplicate`; buffers that are
    not saved have no original name, and end in a KeyError. `load_state_dict` takes what belongs to the stage.
    """

    def __init__(self, whole: torch.nn.Sequential, mine: list[int]) -> None:
        super().__init__()
        self.original_torch_module = whole
        stage = torch.nn.Module()
        for i in mine:
            stage.add_module(f"submod_{i}", whole[i])
        self.local_stage_modules = [stage]
        pairs = [(f"submod_{i}.{n}", f"{i}.{n}") for i in mine for n in whole[i].state_dict()]
        self.local_name_to_original_name = dict(pairs)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("model.state_dict() is not supported in pipeline mode")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self.original_torch_module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self.original_torch_module.named_buffers(*args, **kwargs)

    def local_modules(self) -> Iterator[torch.nn.Module]:
        for _, module in self.local_named_modules():
            yield module

    def local_named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        for stage in self.local_stage_modules:
            yield from stage.named_modules(memo=memo, prefix=prefix, remove_duplicate=remove_duplicate)

    def local_named_children(self) -> Iterator[Any]:
        for stage in self.local_stage_modules:
            yield from stage.named_children()

    def local_named_parameters(self, recurse: bool = True) -> Iterator[Any]:
        for stage in self.local_stage_modules:
            for name, value in stage.named_parameters(recurse=recurse):
                yield self.local_name_to_original_name[name], value

    def local_named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[Any]:
        for stage in self.local_stage_modules:
            for name, value in stage.named_buffers(prefix=prefix, recurse=recurse):
                yield self.local_name_to_original_name[name], value

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        held: dict[str, Any] = {}
        for stage in self.local_stage_modules:
            own = stage.state_dict(*args, **kwargs)
            held.update({self.local_name_to_original_name[n]: v for n, v in own.items()})
        return held

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:  # type: ignore[override]
        local = {original: name for name, original in self.local_name_to_original_name.items()}
        mine = {local[n]: v for n, v in state_dict.items() if n in local}
        return self.local_stage_modules[0].load_state_dict(mine, strict=strict)


class NxDOptimizer(torch.optim.Optimizer):
    """trainer/optimizer.py: an `Optimizer` whose `__init__` is never run; groups and states are the wrapped one's.

    Its `state_dict` marks the states of experts, and adds nothing else.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def grad_norm(self) -> Any:
        return self.optimizer.grad_norm

    def state_dict(self) -> Any:
        held = self.optimizer.state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, states in held["state"].items():
            if getattr(parameters[number], "expert_model_parallel", False):
                for value in states.values():
                    value.expert_model_parallel = True
        return held

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure=closure)

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def __getstate__(self) -> Any:
        return self.optimizer.__getstate__()


class Ranks:
    """A process group, of which layers keep one."""

    def __init__(self, count: int) -> None:
        self.count = count

    def size(self) -> int:
        return self.count


class Partitioned(torch.nn.Module):
    """parallel_layers/layers.py: what a parallel layer keeps of how its parameters are split.

    `bias_partition_dim` is there only for a bias that `ColumnParallelLinear` splits, or would split if it did not
    gather its outputs.
    """

    def __init__(self, weight: torch.Tensor, dim: int, mesh: Mesh, rank: int, stride: int = 1) -> None:
        super().__init__()
        self.weight_partition_dim, self.stride = dim, stride
        self.tensor_parallel_group = Ranks(mesh.tp)
        blocks = weight.chunk(mesh.tp * stride, dim)
        own = torch.cat([blocks[rank % mesh.tp + mesh.tp * i] for i in range(stride)], dim)
        self.weight = torch.nn.Parameter(own.clone())

    def declare(self) -> None:
        """Give the weight its attributes, as the constructors do."""
        said: Any = self.weight
        said.tensor_model_parallel, said.partition_dim, said.partition_stride = True, self.weight_partition_dim, 1
        said.num_partitions = self.tensor_parallel_group.size()


class ColumnParallelLinear(Partitioned):
    """parallel_layers/layers.py."""

    def __init__(self, weight: torch.Tensor, mesh: Mesh, rank: int) -> None:
        super().__init__(weight, 0, mesh, rank)
        self.mesh, self.rank = mesh, rank
        (self.output_size, self.input_size), self.gather_output = weight.shape, False
        self.declare()


class RowParallelLinear(Partitioned):
    """parallel_layers/layers.py."""

    def __init__(self, weight: torch.Tensor, mesh: Mesh, rank: int) -> None:
        super().__init__(weight, 1, mesh, rank)
        self.mesh, self.rank = mesh, rank
        self.output_size, self.input_size = weight.shape
        self.declare()


class LoraConfig:
    """modules/lora/config.py: says what a checkpoint holds, and which of its fields go into it."""

    def __init__(self, rank: int = 2, *, base: bool = False, merge: bool = False, config: bool = True) -> None:
        self.lora_rank, self.save_lora_base, self.merge_lora = rank, base, merge
        self.save_lora_config_adapter = config
        self.fields = {"lora_alpha": 4, "lora_dropout": 0.0, "bias": "none", "use_rslora": False}
        # `list(set(...))` in its `__post_init__`: the order is another one in each process.
        self.target_modules = list({"0", "1", "2"})

    def selected_fields_to_save(self) -> dict[str, Any]:
        rank = {"lora_rank": self.lora_rank, "r": self.lora_rank}
        return {**rank, **self.fields, "target_modules": self.target_modules, "modules_to_save": None}


class Adapter(torch.nn.Module):
    """modules/lora/layer.py and tp_layer.py: the layer that it is for becomes `base_layer`; merging changes its weight.

    Of the layer that is split as the base layer is, the parameters have lost their attributes: model.py sends adapters
    to the XLA device by `to`, which makes them anew.
    """

    def __init__(self, base_layer: Any, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        inputs, outputs = (
            (base_layer.input_size, base_layer.output_size)
            if isinstance(base_layer, Partitioned)
            else (base_layer.in_features, base_layer.out_features)
        )
        first, second = torch.nn.Linear(inputs, rank, bias=False), torch.nn.Linear(rank, outputs, bias=False)
        split: dict[type, Any] = {RowParallelLinear: first, ColumnParallelLinear: second}
        for kind, whole in split.items():
            if type(base_layer) is kind:
                part = kind(whole.weight.detach(), base_layer.mesh, base_layer.rank)
                part.weight = torch.nn.Parameter(part.weight.detach().clone())
                first, second = (part, second) if whole is first else (first, part)
        self.lora_A, self.lora_B = first, second

    def merge(self) -> None:
        self.base_layer.weight.data += self.lora_B.weight.detach() @ self.lora_A.weight.detach()


class LoraModel(torch.nn.Module):
    """modules/lora/model.py: puts adapters into a model. Its `state_dict` is a choice that the configuration makes.

    It takes no `keep_vars`, so that its tensors are aliases without attributes, and adds `lora_config` if it is told
    to. To be saved with merged weights the model is merged by it. `load_state_dict` reads the names that the base model
    had without adapters, and ends in a KeyError if they are not there. Attributes that it does not have are those of
    the model.
    """

    def __init__(self, module: torch.nn.Sequential, config: LoraConfig) -> None:
        super().__init__()
        self.module = module
        self.lora_config = config
        for parameter in module.parameters():
            parameter.requires_grad = False
        for i, layer in enumerate(module):
            if isinstance(layer, torch.nn.Linear | ColumnParallelLinear | RowParallelLinear):
                module[i] = Adapter(layer, config.lora_rank)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from self.module.named_parameters(*args, **kwargs)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        held: dict[str, Any] = self.module.state_dict()
        if self.lora_config.save_lora_base and self.lora_config.merge_lora:
            for layer in self.module:
                if isinstance(layer, Adapter):
                    layer.merge()
            held = {n.replace(".base_layer", ""): v for n, v in held.items() if "lora_" not in n}
        elif not self.lora_config.save_lora_base:
            held = {n: v for n, v in held.items() if "lora_" in n}
        if self.lora_config.save_lora_config_adapter:
            held["lora_config"] = self.lora_config.selected_fields_to_save()
        return held

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        state_dict = dict(state_dict)
        for name in self.module.state_dict():
            if ".base_layer" in name:
                state_dict[name] = state_dict.pop(name.replace(".base_layer", ""))
        return self.module.load_state_dict(state_dict, strict=strict)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def experts_zero1(groups: list[dict[str, Any]], everybody: list[list[int]], alike: list[list[int]]) -> Any:
    """optimizer/zero_redundancy_optimizer.py, `NeuronEPZero1Optimizer`: a ZeRO-1 optimizer that never steps itself.

    It consists of one for experts, over the ranks that hold the same experts (`alike`), and one for all other
    parameters, over all data-parallel ranks (`everybody`). Both have as many groups as it has. Its state dict is that
    of both, one behind the other, with offsets, and without master weights. Experts are counted from 0 in the groups,
    and everywhere else from the last of the other parameters on that has an entry there.
    """
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    def of(is_expert: bool) -> list[dict[str, Any]]:
        return [
            {**g, "params": [p for p in g["params"] if getattr(p, "expert_model_parallel", False) is is_expert]}
            for g in groups
        ]

    options = {"grad_clipping": False, "pin_layout": False, "lr": 1e-2}

    class EPZero1(ZeroRedundancyOptimizer):
        def __init__(self) -> None:
            adam = torch.optim.AdamW
            self.non_ep_zero_optimizer = ZeroRedundancyOptimizer(of(False), adam, sharding_groups=everybody, **options)
            self.ep_zero_optimizer = ZeroRedundancyOptimizer(of(True), adam, sharding_groups=alike, **options)
            super().__init__(groups, adam, sharding_groups=alike, **options)

        @property
        def sharding_groups(self) -> Any:
            return self.non_ep_zero_optimizer._sharding_groups

        def _parts(self) -> list[Any]:
            return [self.non_ep_zero_optimizer, self.ep_zero_optimizer]

        def _reduce_gradients(self, **kwargs: Any) -> None:
            for part in self._parts():
                self._sync_param_groups(self.param_groups, part.param_groups)
                part._reduce_gradients(**kwargs)

        def _update_parameters(self, **kwargs: Any) -> None:
            for part in self._parts():
                part._update_parameters(**kwargs)

        def state_dict(self) -> Any:
            rest, experts = (part.state_dict() for part in self._parts())
            held: dict[str, Any] = {
                "ep_param_id_offset": 1,
                "ep_param_group_offset": len(rest["param_groups"]),
                "param_groups": rest["param_groups"] + experts["param_groups"],
                "state": {},
            }
            for key in ("base_state", "shape_info"):
                held[f"ep_{key}_offset"] = offset = max(rest[key], default=0) + 1
                held[key] = {**rest[key], **{offset + n: value for n, value in experts[key].items()}}
            return held

        def load_state_dict(self, state_dict: Any) -> None:
            if "ep_param_id_offset" not in state_dict:
                raise ValueError("state_dict is not compatible with expert parallelism and Zero-1.")
            of_group, groups = state_dict["ep_param_group_offset"], state_dict["param_groups"]
            for part, own in zip(self._parts(), (groups[:of_group], groups[of_group:]), strict=True):
                held: dict[str, Any] = {"state": {}, "param_groups": own}
                for key in ("base_state", "shape_info"):
                    of = state_dict[f"ep_{key}_offset"]
                    is_expert = part is self.ep_zero_optimizer
                    held[key] = {n - of * is_expert: v for n, v in state_dict[key].items() if (n >= of) is is_expert}
                part.load_state_dict(held)

    return EPZero1()
