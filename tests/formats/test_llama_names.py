"""Which rows are which: Hugging Face's order of heads and neuronx-distributed's, and their names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_ckpt.conversion.llama.config import LlamaConfig, parse_config
from xla_ckpt.conversion.llama.names import (
    FusionScheme,
    Projection,
    get_array_shape,
    get_hf_names,
    get_query_order,
    get_sharding,
    list_required_names,
    list_segments,
)
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import Sharding
from xla_ckpt.errors import UsageError


@st.composite
def models(draw: st.DrawFn) -> tuple[LlamaConfig, FusionScheme]:
    copies, together, kv = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    projection = draw(st.sampled_from(Projection))
    if projection in (Projection.SEPARATE, Projection.STRIDED):
        copies = 1
    if projection is Projection.STRIDED:
        together = 1
    config = parse_config({
        "hidden_size": 8, "num_attention_heads": kv * copies * together, "num_key_value_heads": kv,
        "head_dim": draw(st.integers(1, 3)), "intermediate_size": 6, "vocab_size": 10, "num_hidden_layers": 1,
        "attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans()),
    })  # fmt: skip
    adjacent = copies > 1 and draw(st.booleans())
    return config, FusionScheme(projection=projection, copies=copies, adjacent=adjacent, fuse_mlp=draw(st.booleans()))


@given(models())
def test_queries_stand_beside_their_keys_on_every_rank(case: tuple[LlamaConfig, FusionScheme]) -> None:
    """What the order is for: with whole repeats, rank r has the keys r modulo the heads, and queries of those alone."""
    config, form = case
    order = np.concatenate([np.arange(here, here + n) for _, here, n in get_query_order(config, form)])
    assert sorted(order) == [*range(config.q_rows)]
    ranks = config.kv_heads * form.copies
    for rank in range(ranks):
        head = rank // form.copies if form.adjacent else rank % config.kv_heads
        rows = order.reshape(ranks, -1)[rank]
        assert {row // config.head_dim // config.queries_per_kv_head for row in rows} == {head}


@given(models())
def test_the_links_of_all_arrays_are_every_element_of_both_sides_once(case: tuple[LlamaConfig, FusionScheme]) -> None:
    config, form = case
    sides: tuple[dict[str, np.ndarray], ...] = ({}, {})
    for hf in list_required_names(config):
        shape = get_array_shape(hf, config)
        assert shape is not None
        for link in list_segments(hf, config, form):
            n = shape[link.dim] if link.size is None else link.size
            for side, name, first in zip(
                sides, (link.hf_name, link.job_name), (link.hf_offset, link.job_offset), strict=True
            ):
                whole = get_array_shape(name, config)
                assert whole is not None
                counts = side.setdefault(name, np.zeros(whole, int))
                counts[(slice(None),) * link.dim + (slice(first, first + n),)] += 1
    for side in sides:
        assert all((counts == 1).all() for counts in side.values())
    assert {hf for name in sides[1] for hf in get_hf_names(name)[1]} == set(list_required_names(config))
    for name, counts in sides[1].items():  # and a job of as many ranks as there are keys can split them
        sharding = get_sharding(name, config, form)
        if "k_proj" in name or "qkv" in name:
            assert sharding == Sharding.parse(sharding.spec)
            assert sharding.map_global_shape(counts.shape, Mesh(tp=config.kv_heads * form.copies), 0).pieces


def test_names_that_have_no_counterpart() -> None:
    for name in ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.cos_cached"):
        assert get_hf_names(name) == (None, [])
    assert get_hf_names("model.layers.0.self_attn.q_norm.weight") == (None, ["model.layers.0.self_attn.q_norm.weight"])


def test_copies_that_do_not_divide_the_queries() -> None:
    config = parse_config({
        "hidden_size": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 6, "vocab_size": 10,
        "num_hidden_layers": 1,
    })  # fmt: skip
    for copies in (3, 8):
        with pytest.raises(UsageError, match="divides 4"):
            get_query_order(config, FusionScheme(projection=Projection.FUSED, copies=copies))
