"""Every module of torch, loaded as its own `load_state_dict` loads it: saved, loaded into a new one, and trained on."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization as aoq
from torch.ao.nn import intrinsic, qat, quantizable, quantized
from torch.ao.nn.intrinsic import qat as intrinsic_qat
from torch.ao.nn.intrinsic import quantized as intrinsic_quantized
from torch.ao.nn.qat import dynamic as qat_dynamic
from torch.ao.nn.quantized import dynamic, reference
from torch.nn.utils import parametrizations

import xla_ckpt

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # torch's own packed weights
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]

Make = Callable[[], nn.Module]
Inputs = Callable[[], tuple[Any, ...]]


def x(*shape: int) -> Inputs:
    return lambda: (torch.randn(shape),)


def both(first: Inputs, second: Inputs) -> Inputs:
    return lambda: (*first(), *second())


def numbers(*shape: int, below: int = 4) -> Inputs:
    return lambda: (torch.randint(0, below, shape),)


SIZES = {1: (2, 3, 6), 2: (2, 3, 6, 6), 3: (2, 3, 4, 4, 4)}

STATEFUL: dict[str, tuple[Make, Inputs]] = {
    "AdaptiveLogSoftmaxWithLoss": (lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2]), both(x(3, 4), numbers(3))),
    "Bilinear": (lambda: nn.Bilinear(2, 3, 4), both(x(5, 2), x(5, 3))),
    "Embedding": (lambda: nn.Embedding(4, 3), numbers(5)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(4, 3), numbers(2, 3)),
    # torch_xla replaces nn.GRU by one for its devices when it has been loaded.
    "GRU": (lambda: (getattr(nn.GRU, "_orig", None) or nn.GRU)(3, 4, num_layers=2), x(5, 2, 3)),
    "GRUCell": (lambda: nn.GRUCell(3, 4), x(2, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(1, 3), x(2, 3, 6)),
    "LSTM": (lambda: nn.LSTM(3, 4, proj_size=2, bidirectional=True), x(5, 2, 3)),
    "LSTMCell": (lambda: nn.LSTMCell(3, 4), x(2, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(3), x(2, 3)),
    "LazyLinear": (lambda: nn.LazyLinear(4), x(2, 3)),
    "Linear": (lambda: nn.Linear(3, 4), x(2, 3)),
    "ModuleDict": (lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ReLU()}), tuple),
    "ModuleList": (lambda: nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]), tuple),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), both(both(x(3, 2, 4), x(3, 2, 4)), x(3, 2, 4))),
    "PReLU": (lambda: nn.PReLU(3), x(2, 3)),
    "ParameterDict": (lambda: nn.ParameterDict({"a": torch.randn(2), "b": torch.randn(2)}), tuple),
    "ParameterList": (lambda: nn.ParameterList([torch.randn(2), torch.randn(2)]), tuple),
    "RMSNorm": (lambda: nn.RMSNorm(3), x(2, 3)),
    "RNN": (lambda: nn.RNN(3, 4), x(5, 2, 3)),
    "RNNBase": (lambda: nn.RNNBase("GRU", 3, 4), tuple),
    "RNNCell": (lambda: nn.RNNCell(3, 4), x(2, 3)),
    "RNNCellBase": (lambda: nn.RNNCellBase(3, 4, True, 1), tuple),
    "Sequential": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), x(4, 3)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(3).eval(), x(4, 3)),
    "Transformer": (
        lambda: nn.Transformer(4, 2, 1, 1, 8, dropout=0.0),
        both(x(3, 2, 4), x(3, 2, 4)),
    ),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, 0.0), 2),
        both(x(3, 2, 4), x(3, 2, 4)),
    ),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(4, 2, 8, 0.0), both(x(3, 2, 4), x(3, 2, 4))),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0), 2, enable_nested_tensor=False),
        x(3, 2, 4),
    ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), x(3, 2, 4)),
    "DataParallel": (lambda: nn.DataParallel(nn.Linear(3, 4)), x(2, 3)),
}
for dims, size in SIZES.items():
    STATEFUL |= {
        f"BatchNorm{dims}d": (lambda d=dims: getattr(nn, f"BatchNorm{d}d")(3), x(*size)),
        f"InstanceNorm{dims}d": (
            lambda d=dims: getattr(nn, f"InstanceNorm{d}d")(3, affine=True, track_running_stats=True),
            x(*size),
        ),
        f"Conv{dims}d": (lambda d=dims: getattr(nn, f"Conv{d}d")(3, 4, 2), x(*size)),
        f"ConvTranspose{dims}d": (lambda d=dims: getattr(nn, f"ConvTranspose{d}d")(3, 4, 2), x(*size)),
        f"LazyBatchNorm{dims}d": (lambda d=dims: getattr(nn, f"LazyBatchNorm{d}d")(), x(*size)),
        f"LazyInstanceNorm{dims}d": (
            lambda d=dims: getattr(nn, f"LazyInstanceNorm{d}d")(affine=True, track_running_stats=True),
            x(*size),
        ),
        f"LazyConv{dims}d": (lambda d=dims: getattr(nn, f"LazyConv{d}d")(4, 2), x(*size)),
        f"LazyConvTranspose{dims}d": (lambda d=dims: getattr(nn, f"LazyConvTranspose{d}d")(4, 2), x(*size)),
    }

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ChannelShuffle": (2,),
    "Fold": (4, 2),
    "FractionalMaxPool2d": (2, 2),
    "FractionalMaxPool3d": (2, 2),
    "LPPool1d": (2, 2),
    "LPPool2d": (2, 2),
    "LPPool3d": (2, 2),
    "LocalResponseNorm": (2,),
    "CrossMapLRN2d": (2,),
    "NLLLoss2d": (),
    "PixelShuffle": (2,),
    "PixelUnshuffle": (2,),
    "Threshold": (0.1, 0.0),
    "Unflatten": (1, (1, 2)),
    **{f"ConstantPad{d}d": (1, 0.0) for d in (1, 2, 3)},
    **{f"Adaptive{kind}Pool{d}d": (2,) for kind in ("Avg", "Max") for d in (1, 2, 3)},
    **{
        f"{kind}{d}d": (2,) for kind in ("AvgPool", "MaxPool", "MaxUnpool", "ZeroPad", "CircularPad") for d in (1, 2, 3)
    },
    **{f"{kind}Pad{d}d": (1,) for kind in ("Reflection", "Replication") for d in (1, 2, 3)},
    "Unfold": (2,),
}
"""Those of the modules without state that need some."""

BASES = {"Module", "Container"}


def quantized_state(module: nn.Module, *inputs: torch.Tensor) -> nn.Module:
    """A module of fake quantization, or an observer, that has seen values."""
    module(*inputs)
    return module


def default_qat() -> aoq.QConfig:
    return aoq.get_default_qat_qconfig("qnnpack")


def converted(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """A module, quantized after it was trained."""
    whole = nn.Sequential(aoq.QuantStub(), module, aoq.DeQuantStub()).eval()
    whole.qconfig = aoq.default_qconfig
    prepared = aoq.prepare(whole)
    prepared(torch.randn(shape))
    return aoq.convert(prepared)


def per_channel(observer: Any) -> Make:
    return lambda: observer(ch_axis=0)


AO: dict[str, tuple[Make, Inputs]] = {
    # Quantized as programs quantize them.
    "converted Linear": (lambda: converted(nn.Linear(3, 4), (2, 3)), x(2, 3)),
    "converted LinearReLU": (lambda: converted(intrinsic.LinearReLU(nn.Linear(3, 4), nn.ReLU()), (2, 3)), x(2, 3)),
    **{
        f"converted Conv{d}d": (lambda d=d: converted(getattr(nn, f"Conv{d}d")(3, 4, 2), SIZES[d]), x(*SIZES[d]))
        for d in (1, 2)
    },
    "converted LayerNorm": (lambda: converted(nn.LayerNorm(3), (2, 3)), x(2, 3)),
    "converted ELU": (lambda: converted(nn.ELU(), (2, 3)), x(2, 3)),
    "dynamic Linear": (lambda: dynamic.Linear(3, 4), x(2, 3)),
    "dynamic LSTM": (lambda: dynamic.LSTM(3, 4), x(5, 2, 3)),
    "dynamic GRU": (lambda: dynamic.GRU(3, 4), x(5, 2, 3)),
    "dynamic LSTMCell": (lambda: dynamic.LSTMCell(3, 4), x(2, 3)),
    "dynamic GRUCell": (lambda: dynamic.GRUCell(3, 4), x(2, 3)),
    "dynamic RNNCell": (lambda: dynamic.RNNCell(3, 4), x(2, 3)),
    "quantized Embedding": (lambda: quantized.Embedding(4, 16), numbers(5)),
    "quantized EmbeddingBag": (lambda: quantized.EmbeddingBag(4, 16), tuple),
    "quantized FloatFunctional": (quantized.FloatFunctional, tuple),
    "quantized QFunctional": (quantized.QFunctional, tuple),
    "quantized Quantize": (lambda: quantized.Quantize(0.1, 3, torch.quint8), x(2, 3)),
    **{
        f"quantized {name}": (make, tuple)
        for name, make in {
            "BatchNorm2d": lambda: quantized.BatchNorm2d(3),
            "BatchNorm3d": lambda: quantized.BatchNorm3d(3),
            "ConvTranspose1d": lambda: quantized.ConvTranspose1d(4, 4, 2),
            "ConvTranspose2d": lambda: quantized.ConvTranspose2d(4, 4, 2),
            "Conv3d": lambda: quantized.Conv3d(3, 4, 2),
            "GroupNorm": lambda: quantized.GroupNorm(
                1, 3, nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3)), 0.1, 0
            ),
            "InstanceNorm2d": lambda: quantized.InstanceNorm2d(
                3, nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3)), 0.1, 0
            ),
            "Hardswish": lambda: quantized.Hardswish(0.1, 0),
            "LeakyReLU": lambda: quantized.LeakyReLU(0.1, 0),
            "Sigmoid": lambda: quantized.Sigmoid(0.1, 0),
            "Softmax": lambda: quantized.Softmax(),
            "PReLU": lambda: quantized.PReLU(0.1, 0),
            "BNReLU2d": lambda: intrinsic_quantized.BNReLU2d(3),
            "LinearLeakyReLU": lambda: intrinsic_quantized.LinearLeakyReLU(3, 4, 0.1),
            "LinearTanh": lambda: intrinsic_quantized.LinearTanh(3, 4),
            "ConvReLU2d": lambda: intrinsic_quantized.ConvReLU2d(3, 4, 2),
        }.items()
    },
    # Trained for quantization.
    "qat Linear": (lambda: qat.Linear(3, 4, qconfig=default_qat()), x(2, 3)),
    "qat dynamic Linear": (
        lambda: qat_dynamic.Linear(3, 4, qconfig=aoq.qconfig.default_dynamic_qat_qconfig),
        x(2, 3),
    ),
    "qat Embedding": (lambda: qat.Embedding(4, 3, qconfig=aoq.default_embedding_qat_qconfig), numbers(5)),
    "qat EmbeddingBag": (lambda: qat.EmbeddingBag(4, 3, qconfig=aoq.default_embedding_qat_qconfig), numbers(2, 3)),
    **{
        f"qat Conv{d}d": (lambda d=d: getattr(qat, f"Conv{d}d")(3, 4, 2, qconfig=default_qat()), x(*SIZES[d]))
        for d in (1, 2, 3)
    },
    **{
        f"qat {name}{d}d": (
            lambda n=name, d=d: getattr(intrinsic_qat, f"{n}{d}d")(3, 4, 2, qconfig=default_qat()),
            x(*SIZES[d]),
        )
        for name in ("ConvBn", "ConvBnReLU", "ConvReLU")
        for d in (1, 2, 3)
    },
    "qat LinearBn1d": (lambda: intrinsic_qat.LinearBn1d(3, 4, qconfig=default_qat()), x(4, 3)),
    "qat LinearReLU": (lambda: intrinsic_qat.LinearReLU(3, 4, qconfig=default_qat()), x(2, 3)),
    # What is prepared for it.
    "intrinsic ConvBn2d": (lambda: intrinsic.ConvBn2d(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)), x(*SIZES[2])),
    "intrinsic BNReLU2d": (lambda: intrinsic.BNReLU2d(nn.BatchNorm2d(3), nn.ReLU()), x(*SIZES[2])),
    "quantizable LSTM": (lambda: quantizable.LSTM(3, 4), x(5, 2, 3)),
    "quantizable LSTMCell": (lambda: quantizable.LSTMCell(3, 4), x(2, 3)),
    "quantizable MultiheadAttention": (
        lambda: quantizable.MultiheadAttention(4, 2),
        both(both(x(3, 2, 4), x(3, 2, 4)), x(3, 2, 4)),
    ),
    "reference Linear": (lambda: reference.Linear(3, 4), x(2, 3)),
    "reference Linear, per channel": (
        lambda: reference.Linear(
            3,
            4,
            weight_qparams={
                "qscheme": torch.per_channel_affine,
                "dtype": torch.qint8,
                "scale": torch.rand(4) + 0.1,
                "zero_point": torch.zeros(4, dtype=torch.int64),
                "axis": 0,
            },
        ),
        x(2, 3),
    ),
    "reference Conv2d": (lambda: reference.Conv2d(3, 4, 2), x(*SIZES[2])),
    "reference LSTMCell": (lambda: reference.LSTMCell(3, 4), x(2, 3)),
    "reference LSTM": (lambda: reference.LSTM(3, 4), tuple),
    # Observers and fake quantization. Those of channels have a size that they get with the first values.
    "FakeQuantize": (aoq.FakeQuantize, x(4, 3)),
    "FakeQuantize, per channel": (
        aoq.default_per_channel_weight_fake_quant,
        x(4, 3),
    ),
    "FusedMovingAvgObsFakeQuantize": (aoq.FusedMovingAvgObsFakeQuantize, x(4, 3)),
    "FixedQParamsFakeQuantize": (aoq.default_fixed_qparams_range_0to1_fake_quant, x(4, 3)),
    "FixedQParamsObserver": (lambda: aoq.FixedQParamsObserver(0.1, 0), x(4, 3)),
    "HistogramObserver": (lambda: aoq.HistogramObserver(bins=16), x(4, 3)),
    "MinMaxObserver": (aoq.MinMaxObserver, x(4, 3)),
    "MovingAverageMinMaxObserver": (aoq.MovingAverageMinMaxObserver, x(4, 3)),
    "PerChannelMinMaxObserver": (per_channel(aoq.PerChannelMinMaxObserver), x(4, 3)),
    "MovingAveragePerChannelMinMaxObserver": (per_channel(aoq.MovingAveragePerChannelMinMaxObserver), x(4, 3)),
    "NoopObserver": (aoq.NoopObserver, x(4, 3)),
    "PlaceholderObserver": (aoq.PlaceholderObserver, x(4, 3)),
    "QuantWrapper": (lambda: aoq.QuantWrapper(nn.Linear(3, 4)), x(2, 3)),
}

PARAMETRIZED: dict[str, tuple[Make, Inputs]] = {
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Conv1d(3, 4, 2)), x(2, 3, 6)),
    "weight_norm, all dims": (lambda: parametrizations.weight_norm(nn.Linear(3, 4), dim=None), x(2, 3)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 4)), x(2, 3)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(3, 3)), x(2, 3)),
    "orthogonal, householder": (
        lambda: parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="householder"),
        x(2, 3),
    ),
    "two of one weight": (
        lambda: parametrizations.spectral_norm(parametrizations.orthogonal(nn.Linear(3, 3))),
        x(2, 3),
    ),
    "old weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(3, 4)), x(2, 3)),
    "old spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(3, 4)), x(2, 3)),
}

ALL = {**STATEFUL, **PARAMETRIZED, **AO}


def test_the_matrix_has_every_module_of_torch_nn() -> None:
    names = {n for n, kind in vars(nn).items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
    stateless = {name for name in names - STATEFUL.keys() - BASES if not made_alone(name).state_dict()}
    assert names == STATEFUL.keys() | stateless | BASES
    assert len(stateless) > 80


def made_alone(name: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of classes that torch will drop
        return getattr(nn, name)(*ARGUMENTS.get(name, ()))  # type: ignore[no-any-return]


def doubled(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before the load that changes what is loaded."""
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            state[name] = value * 2


def stepped(module: nn.Module, keys: Any) -> None:
    """A hook after the load that changes what was loaded, and counts its calls."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    module.calls = getattr(module, "calls", 0) + 1  # type: ignore[assignment]
    assert not keys.missing_keys
    assert not keys.unexpected_keys


def new(make: Make, seed: int, *, hooked: bool) -> nn.Module:
    torch.manual_seed(seed)
    module = make()
    if hooked:
        module.register_load_state_dict_pre_hook(doubled)
        module.register_load_state_dict_post_hook(stepped)
    return module


def floats(value: Any) -> Any:
    """The floating-point tensors in what a module returns."""
    if isinstance(value, torch.Tensor):
        return [value.dequantize() if value.is_quantized else value]
    if isinstance(value, Mapping):
        return [tensor for member in value.values() for tensor in floats(member)]
    return [tensor for member in value for tensor in floats(member)] if isinstance(value, tuple | list) else []


def step(module: nn.Module, inputs: Inputs, seed: int) -> list[torch.Tensor]:
    """A step of training; what the module returned. One without a forward pass has its parameters moved."""
    torch.manual_seed(seed)
    given = inputs()
    outputs = floats(module(*given)) if given else []
    trained = [p for p in module.parameters() if p.requires_grad]
    if given and trained and any(o.requires_grad for o in outputs):
        loss = torch.stack([output.float().pow(2).sum() for output in outputs if output.requires_grad]).sum()
        optimizer = torch.optim.SGD(trained, lr=0.01)
        loss.backward()
        optimizer.step()
    elif not given:
        with torch.no_grad():
            for parameter in trained:
                parameter.add_(torch.randn_like(parameter))
    return [output.detach() for output in outputs]


def facts(value: Any) -> Any:
    """What has to be the same, of a state dict with its metadata."""
    if isinstance(value, torch.Tensor):
        about: tuple[Any, ...] = (str(value.dtype), tuple(value.shape))
        if value.is_quantized:
            about += (str(value.qscheme()), value.int_repr().tolist(), value.dequantize().tolist())
            return about
        return (*about, value.detach().double().tolist())
    if isinstance(value, dict):
        metadata = getattr(value, "_metadata", None)
        return {name: facts(member) for name, member in value.items()}, metadata and {**metadata}
    if isinstance(value, tuple | list):
        return [facts(member) for member in value]
    if isinstance(value, torch.ScriptObject):
        return facts(value.__getstate__()[0])
    return value


def compare(mine: nn.Module, theirs: nn.Module, inputs: Inputs) -> None:
    """Compare two modules, and two more steps of both."""
    assert facts(mine.state_dict()) == facts(theirs.state_dict())
    assert getattr(mine, "calls", 0) == getattr(theirs, "calls", 0)
    for seed in (7, 8):
        try:
            expected = step(theirs, inputs, seed)
        except ValueError:  # what torch has loaded into a lazy instance norm does not run
            assert "InstanceNorm" in type(theirs).__name__
            return
        torch.testing.assert_close(step(mine, inputs, seed), expected, equal_nan=True)
        torch.testing.assert_close(tensors_of(mine), tensors_of(theirs), equal_nan=True)


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return floats(module.state_dict())  # type: ignore[no-any-return]


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("name", ALL)
def test_a_module_is_loaded_as_torch_loads_it(name: str, hooked: bool, tmp_path: Path) -> None:
    make, inputs = ALL[name]
    saved = new(make, 1, hooked=False)
    step(saved, inputs, 5)
    pickled = any(isinstance(value, torch.ScriptObject) for value in saved.state_dict().values())
    with pytest.warns(UserWarning, match="will be pickled") if pickled else contextlib.nullcontext():
        xla_ckpt.save_checkpoint(tmp_path, "t", saved)
    mine, theirs = new(make, 2, hooked=hooked), new(make, 2, hooked=hooked)
    theirs.load_state_dict(saved.state_dict())
    xla_ckpt.load_checkpoint(tmp_path, "t", mine, trust_pickle=pickled)
    compare(mine, theirs, inputs)


def test_modules_without_state_are_loaded(tmp_path: Path) -> None:
    def make() -> nn.Module:
        names = {n for n, kind in vars(nn).items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
        alone = {name: made_alone(name) for name in sorted(names - STATEFUL.keys() - BASES)}
        return nn.ModuleDict({**alone, "linear": nn.Linear(2, 2)})

    saved, mine, theirs = new(make, 1, hooked=False), new(make, 2, hooked=True), new(make, 2, hooked=True)
    xla_ckpt.save_checkpoint(tmp_path, "t", saved)
    theirs.load_state_dict(saved.state_dict())
    xla_ckpt.load_checkpoint(tmp_path, "t", mine)
    compare(mine, theirs, tuple)


MODELS = ("resnet18", "mnasnet0_5", "mobilenet_v3_small", "densenet121", "googlenet", "squeezenet1_0", "vit_b_16")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_torchvision_is_loaded_as_torch_loads_it(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision")
    models = importlib.import_module("torchvision.models")

    def make() -> nn.Module:
        return getattr(models, name)(weights=None).eval()  # type: ignore[no-any-return]

    saved, mine, theirs = (new(make, seed, hooked=False) for seed in (1, 2, 2))
    xla_ckpt.save_checkpoint(tmp_path, "t", saved)
    theirs.load_state_dict(saved.state_dict())
    xla_ckpt.load_checkpoint(tmp_path, "t", mine)
    compare(mine, theirs, x(2, 3, 224, 224))
