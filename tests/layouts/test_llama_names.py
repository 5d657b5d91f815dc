"""Which rows are which: Hugging Face's order of heads and neuronx-distributed's, and their names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_ckpt.errors import UsageError
from xla_ckpt.layouts.llama_config import LlamaConfig, parse_config
from xla_ckpt.layouts.llama_names import Form, Projection, hf_names, links, query_order, required, shape_of, split_of
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sharding import Sharding


@st.composite
def models(draw: st.DrawFn) -> tuple[LlamaConfig, Form]:
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
    return config, Form(projection=projection, copies=copies, adjacent=adjacent, fuse_mlp=draw(st.booleans()))


@given(models())
def test_queries_stand_beside_their_keys_on_every_rank(case: tuple[LlamaConfig, Form]) -> None:
    """What the order is for: with whole repeats, rank r has the keys r modulo the heads, and queries of those alone."""
    config, form = case
    order = np.concatenate([np.arange(here, here + n) for _, here, n in query_order(config, form)])
    assert sorted(order) == [*range(config.q_rows)]
    ranks = config.kv_heads * form.copies
    for rank in range(ranks):
        head = rank // form.copies if form.adjacent else rank % config.kv_heads
        rows = order.reshape(ranks, -1)[rank]
        assert {row // config.head_dim // config.group for row in rows} == {head}


@given(models())
def test_the_links_of_all_arrays_are_every_element_of_both_sides_once(case: tuple[LlamaConfig, Form]) -> None:
    config, form = case
    sides: tuple[dict[str, np.ndarray], ...] = ({}, {})
    for hf in required(config):
        shape = shape_of(hf, config)
        assert shape is not None
        for link in links(hf, config, form):
            n = shape[link.dim] if link.size is None else link.size
            for side, name, first in zip(sides, (link.hf, link.theirs), (link.here, link.there), strict=True):
                whole = shape_of(name, config)
                assert whole is not None
                counts = side.setdefault(name, np.zeros(whole, int))
                counts[(slice(None),) * link.dim + (slice(first, first + n),)] += 1
    for side in sides:
        assert all((counts == 1).all() for counts in side.values())
    assert {hf for name in sides[1] for hf in hf_names(name)[1]} == set(required(config))
    for name, counts in sides[1].items():  # and a job of as many ranks as there are keys can split them
        sharding = split_of(name, config, form)
        if "k_proj" in name or "qkv" in name:
            assert sharding == Sharding.parse(sharding.spec)
            assert sharding.part(counts.shape, Mesh(tp=config.kv_heads * form.copies), 0).pieces


def test_names_that_have_no_counterpart() -> None:
    for name in ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.cos_cached"):
        assert hf_names(name) == (None, [])
    assert hf_names("model.layers.0.self_attn.q_norm.weight") == (None, ["model.layers.0.self_attn.q_norm.weight"])


def test_copies_that_do_not_divide_the_queries() -> None:
    config = parse_config({
        "hidden_size": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 6, "vocab_size": 10,
        "num_hidden_layers": 1,
    })  # fmt: skip
    for copies in (3, 8):
        with pytest.raises(UsageError, match="divides 4"):
            query_order(config, Form(projection=Projection.FUSED, copies=copies))
