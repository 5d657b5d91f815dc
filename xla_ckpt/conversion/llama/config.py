"""Parse Hugging Face's ``config.json`` of a Llama-like model: sizes, heads, biases. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.core.json_data import parse_json_object
from xla_ckpt.errors import UsageError, annotate_errors

CONFIG_HINT = "Give the config.json of the model in this checkpoint."
"""What to do about a configuration that does not fit what is stored."""

CONFIG_FILE = "config.json"
"""Its name in a directory of Hugging Face's."""

MAX_CONFIG_BYTES = 1 << 20
"""A larger one is not read (bytes): real ones have a few thousand."""

MAX_SIZE = 1 << 40
"""No size in it can be larger. Sizes are multiplied, and each of a model's layers is gone through."""

MAX_LAYERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The sizes of a Llama-like model (elements), and which of its arrays exist."""

    hidden: int
    heads: int
    """Heads of the queries."""

    kv_heads: int
    """Heads of the keys, and of the values."""

    head_dim: int
    intermediate: int
    vocab: int
    layers: int
    tied: bool
    """Whether the embedding is the output layer, too."""

    attention_bias: bool | None = None
    """Whether queries, keys, values and output have biases; None if the model's class decides."""

    mlp_bias: bool | None = None
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All that the file says."""

    @property
    def q_rows(self) -> int:
        """Rows of the projection of queries."""
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the projection of keys, and of that of values."""
        return self.kv_heads * self.head_dim

    @property
    def queries_per_kv_head(self) -> int:
        """Heads of queries for each head of keys."""
        return self.heads // self.kv_heads


def parse_config(content: Any, file: str | None = None) -> LlamaConfig:
    """The sizes that a configuration names.

    Args:
        content: The file's bytes, or what they hold: a mapping.
        file: Where it is from, for errors.

    Raises:
        UsageError: It is no JSON object, a size is missing or impossible, or the heads do not divide.
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
        """A size; the default where the file does not name it.

        Raises:
            UsageError: It is missing without a default, or no size.
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
        """Yes or no; None where the file does not say.

        Raises:
            UsageError: It is neither.
        """
        value = self.content.get(key)
        if value is not None and type(value) is not bool:
            raise UsageError(f"{key} of a config.json is true or false", path=self.file, found=repr(value)[:80])
        return value


def encode_config(content: Mapping[str, Any], dtype: str | None) -> bytes:
    """The file's text for a model whose arrays have this element type; None leaves what it says of that.

    transformers has two names for it. The file keeps the name that it has.
    """
    config = dict(content)
    if dtype is not None:
        named = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
        config |= dict.fromkeys(named, dtype)
    return (json.dumps(config, indent=2) + "\n").encode()
