"""What optimum-neuron says of its checkpoints: the files ``mp_metadata_pp_rank_<n>.json``, one a pipeline stage. Pure.

Each says of every parameter whether and how it is split over tp, and which modules have several layers of the
Hugging Face model in one: linear layers that are fused (`FusedLinearsSpec`), and queries, keys and values of
grouped-query attention (`GQAQKVColumnParallelLinearSpec`), of which several ranks may hold the same keys and values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.lightweight import cached_property
from xla_ckpt.sharding.sections import Section
from xla_ckpt.sharding.sharding import Sharding, Split
from xla_ckpt.tree import schema

METADATA_FILE = re.compile(r"mp_metadata_pp_rank_(\d+)\.json")
"""Name of a metadata file; the number is that of the pipeline stage."""

_ADAPTER = re.compile(r"(?<=\.lora_[AB])\.[^.]+(?=\.)|(?<=\.lora_embedding_[AB])\.[^.]+$")
"""The name of an adapter within the name of a parameter. Tags of adapters leave it out."""

WITHOUT = (
    "Without the files mp_metadata_pp_rank_*.json the directory is one of neuronx-distributed's: then a model or rules "
    "have to say how its arrays are split."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSplit:
    """How one parameter is split."""

    dim: int | None
    """The dim that is split over tp; None if each rank has all of the parameter."""

    stride: int = 1
    """`partition_stride`: blocks that each rank holds."""

    ranks: int | None = None
    """`num_partitions`: over how many ranks; None if it does not say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Several linear layers in one (`FusedLinearsSpec`): each rank has its part of the first, then of the second..."""

    module: str
    """Path of the module that has the layer."""

    name: str
    """The layer's name in it."""

    parts: tuple[str, ...]
    """Names of the layers that it stands for."""

    axis: int
    """The dim along which they are fused."""

    sizes: tuple[int, ...]
    """Elements of that dim in each of them, all ranks together."""

    tp: int

    def sections(self, below: str) -> tuple[int, tuple[Section, ...]] | None:
        """(dim, what it consists of) of a tensor of the layer, by its name below it; None if it is like any other."""
        role, what = _role(below)
        if what not in ("weight", "bias") or role == "lora_A" or (self.axis and (role == "lora_B" or what == "bias")):
            return None
        return self.axis, tuple(Section(size) for size in self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Queries, keys and values of grouped-query attention in one layer (`GQAQKVColumnParallelLinearSpec`)."""

    module: str
    name: str
    query: str
    key: str
    value: str
    output: str
    """Names of the layers that it stands for, and of the one that takes the heads' outputs."""

    heads: int
    kv_heads: int
    copies: int
    """`kv_size_multiplier`: how many ranks hold the same keys and values."""

    query_rows: int
    """Rows of queries on each rank."""

    kv_rows: int
    """Rows of keys, and of values, on each rank."""

    tp: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values, each of them counted once."""
        kv = self.kv_rows * self.tp // self.copies
        return self.query_rows * self.tp, kv, kv

    @property
    def head_size(self) -> int:
        """Rows of one head."""
        return self.sizes[0] // self.heads

    def sections(self, below: str) -> tuple[int, tuple[Section, ...]] | None:
        """As `Fused.sections`."""
        role, what = _role(below)
        if role == "lora_A":
            return None
        queries, keys, values = self.sizes
        sections = {
            "qkv": (Section(queries), Section(keys, self.copies), Section(values, self.copies)),
            "q": (Section(queries),),
            "k": (Section(keys, self.copies),),
            "v": (Section(values, self.copies),),
        }
        kind, _, part = what.rpartition("_")
        if kind not in ("weight", "bias") or part not in sections:
            return None
        return 0, sections[part]


def _role(below: str) -> tuple[str, str]:
    """(layer of an adapter or empty, name of the tensor) from a name below a layer."""
    role, _, what = below.rpartition(".")
    return ("" if role == "base_layer" else role), what


@dataclass(frozen=True)
class StageMetadata:
    """What a metadata file says."""

    file: str
    parameters: Mapping[str, ParameterSplit]
    """In the order of the model."""

    layers: tuple[Fused | Attention, ...]

    @cached_property
    def _without_adapters(self) -> dict[str, str]:
        return {_ADAPTER.sub("", name): name for name in reversed(list(self.parameters))}

    def parameter(self, name: str) -> str | None:
        """The parameter that is stored under a name; None if there is none: it is a buffer, or another name of one."""
        return name if name in self.parameters else self._without_adapters.get(name)

    @cached_property
    def _layers(self) -> dict[str, Fused | Attention]:
        return {f"{layer.module}.{layer.name}".lstrip("."): layer for layer in self.layers}

    def layer(self, name: str) -> tuple[Fused | Attention, str] | None:
        """The layer that a parameter is of, and its name below that; None if it is of no such layer."""
        text = _ADAPTER.sub("", name)
        for at in (m.start() for m in re.finditer(r"\.", text)):
            if (layer := self._layers.get(text[:at])) is not None:
                return layer, text[at + 1 :]
        return None

    def sharding(self, name: str) -> Sharding:
        """How a parameter is split over the ranks.

        Raises:
            CorruptCheckpointError: Two places contradict each other.
        """
        split, special = self.parameters[name], self._sections(name)
        if special is None:
            return Sharding() if split.dim is None else _along(split.dim, Split.strided(("tp",), split.stride))
        dim, sections = special
        # neuronx-distributed loses the attributes of a fused weight_qkv, so that it counts as not split.
        if split.dim not in (None, dim) or split.stride not in (1, len(sections)):
            raise CorruptCheckpointError(
                "the metadata of a fused layer contradict those of its parameter",
                leaf=schema.weight(name),
                file=self.file,
                expected=f"dim {dim} in {len(sections)} parts",
                found=f"dim {split.dim}, stride {split.stride}",
                hint=WITHOUT,
            )
        if len(set(sections)) == 1:
            sections = tuple(replace(s, size=None) for s in sections)  # a stride says it, too
        return _along(dim, Split(("tp",), sections))

    def size(self, name: str) -> tuple[int, int] | None:
        """(dim, elements of it in the global array) of a parameter of such a layer; None for any other."""
        special = self._sections(name)
        return None if special is None else (special[0], sum(s.size or 0 for s in special[1]))

    def attention(self, name: str) -> Attention | None:
        """The grouped-query attention whose heads a parameter has: its queries, or what takes their outputs."""
        of_layer = self.layer(name)
        if of_layer is not None and isinstance(of_layer[0], Attention):
            return of_layer[0] if of_layer[0].sections(of_layer[1]) is not None else None
        return next((layer for path, layer in self._outputs.items() if name.startswith(path)), None)

    @cached_property
    def _outputs(self) -> dict[str, Attention]:
        attentions = [layer for layer in self.layers if isinstance(layer, Attention)]
        return {f"{layer.module}.{layer.output}.".lstrip("."): layer for layer in attentions}

    def _sections(self, name: str) -> tuple[int, tuple[Section, ...]] | None:
        of_layer = self.layer(name)
        return None if of_layer is None else of_layer[0].sections(of_layer[1])


def _along(dim: int, split: Split) -> Sharding:
    return Sharding((*(None,) * dim, split))
