"""Parse the Hugging Face ``config.json`` of a Llama-like model: sizes, heads, biases. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.core.json_data import parse_json_object
from xla_ckpt.errors import UsageError, annotate_errors

CONFIG_HINT = "Give the config.json of the model in this checkpoint."
"""Hint for a configuration that does not match the stored arrays."""

CONFIG_FILE = "config.json"
"""Name of the configuration in a Hugging Face directory."""

MAX_CONFIG_BYTES = 1 << 20
"""Maximum size of a configuration (bytes). Real ones have a few thousand."""

MAX_SIZE = 1 << 40
"""Maximum value of a size in it. Sizes are multiplied, and the layers of a model are iterated over."""

MAX_LAYERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama-like model (elements), and optional arrays that it contains."""

    hidden: int
    heads: int
    """Number of query heads."""

    kv_heads: int
    """Number of key heads, equal to the number of value heads."""

    head_dim: int
    intermediate: int
    vocab: int
    layers: int
    tied: bool
    """True if the embedding is also the output layer."""

    attention_bias: bool | None = None
    """True if queries, keys, values and output have biases; None if the class of the model decides."""

    mlp_bias: bool | None = None
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Full content of the file."""

    @property
    def q_rows(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    @property
    def queries_per_kv_head(self) -> int:
        """Number of query heads per key head."""
        return self.heads // self.kv_heads


def parse_config(content: Any, file: str | None = None) -> LlamaConfig:
    """Parse the sizes of a model from its configuration.

    Args:
        content: Bytes of the file, or its content as a mapping.
        file: Path of the file, for errors.

    Raises:
        UsageError: It is not a JSON object, a size is missing or invalid, or the heads do not divide.
    """
    if isinstance(content, bytes):
        with annotate_errors(path=file):
            content = parse_json_object(content, "a config.json", UsageError)
    if not isinstance(content, Mapping):
        raise UsageError("a config.json holds a JSON object", path=file, found=type(content).__name__)
    read = _ConfigReader(content, file)
    hidden, heads = read.read_size("hidden_size"), read.read_size("num_attention_heads")
    kv_heads = read.read_size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UsageError(
            "the key-value heads do not divide the attention heads",
            path=file,
            expected="num_attention_heads is a multiple of num_key_value_heads",
            found=f"{heads} and {kv_heads}",
        )
    if content.get("head_dim") is None and hidden % heads:
        raise UsageError(
            "the attention heads do not divide the hidden size, and no head_dim is given",
            path=file,
            found=f"num_attention_heads {heads}, hidden_size {hidden}",
        )
    layers = read.read_size("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise UsageError("impossible number of layers in a config.json", path=file, found=layers)
    return LlamaConfig(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=read.read_size("head_dim", hidden // heads),
        intermediate=read.read_size("intermediate_size"),
        vocab=read.read_size("vocab_size"),
        layers=layers,
        tied=bool(read.read_flag("tie_word_embeddings")),
        attention_bias=read.read_flag("attention_bias"),
        mlp_bias=read.read_flag("mlp_bias"),
        content=content,
    )


@dataclass(frozen=True, slots=True)
class _ConfigReader:
    content: Mapping[str, Any]
    file: str | None

    def read_size(self, key: str, default: int | None = None) -> int:
        """Return a size, or the default if the file does not contain it.

        Raises:
            UsageError: The size is missing without a default, or invalid.
        """
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise UsageError(
                f"a config.json of a Llama-like model needs {key}",
                path=self.file,
                expected="a number of at least 1",
                found=repr(value)[:80],
                hint=CONFIG_HINT,
            )
        return value

    def read_flag(self, key: str) -> bool | None:
        """Return a boolean; None if the file does not contain it.

        Raises:
            UsageError: The value is not a boolean.
        """
        value = self.content.get(key)
        if value is not None and type(value) is not bool:
            raise UsageError(f"{key} of a config.json is true or false", path=self.file, found=repr(value)[:80])
        return value


def encode_config(content: Mapping[str, Any], dtype: str | None) -> bytes:
    """Serialize the configuration of a model whose arrays have this dtype; None keeps the recorded dtype.

    transformers has two keys for the dtype. The key in the file is kept.
    """
    config = dict(content)
    if dtype is not None:
        named = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
        config |= dict.fromkeys(named, dtype)
    return (json.dumps(config, indent=2) + "\n").encode()
