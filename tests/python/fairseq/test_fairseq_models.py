"""fairseq's transformers: names of parameters, attention, what each word may see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ctrainer.fairseq.config import as_config
from ctrainer.fairseq.data import Dictionary
from ctrainer.fairseq.models import build_model
from ctrainer.fairseq.modules import (
    MultiheadAttention,
    PositionalEmbedding,
    SinusoidalPositionalEmbedding,
)

WORDS = Dictionary(extra_special_symbols="abcdefgh")  # 12
TASK = SimpleNamespace(source_dictionary=WORDS, target_dictionary=WORDS)


def model(name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    tasks = {
        "transformer_lm": {"_name": "language_modeling", "tokens_per_sample": 16},
        "transformer": {"_name": "translation"},
    }
    small = {"decoder_embed_dim": 8, "decoder_ffn_embed_dim": 12, "decoder_layers": 1,
             "decoder_attention_heads": 2, "dropout": 0.0}  # fmt: skip
    if name == "transformer":
        small |= {"encoder_embed_dim": 8, "encoder_ffn_embed_dim": 12,
                  "encoder_layers": 1, "encoder_attention_heads": 2}  # fmt: skip
    group = {"_name": name, **small, **options}
    return build_model(as_config({"model": group, "task": tasks[name]}).model, TASK)


def attention(name: str) -> list[str]:
    parts = ("k_proj", "v_proj", "q_proj", "out_proj")
    return [f"{name}.{part}.{kind}" for part in parts for kind in ("weight", "bias")]


def norm(name: str) -> list[str]:
    return [f"{name}.weight", f"{name}.bias"]


def feed_forward(layer: str) -> list[str]:
    names = ("fc1", "fc2", "final_layer_norm")
    return [text for name in names for text in norm(f"{layer}.{name}")]


def test_a_language_models_parameters_have_fairseqs_names() -> None:
    found = model("transformer_lm")
    layer = "decoder.layers.0"
    assert list(dict(found.named_parameters())) == [
        "decoder.embed_tokens.weight",
        *attention(f"{layer}.self_attn"),
        *norm(f"{layer}.self_attn_layer_norm"),
        *feed_forward(layer),
        *norm("decoder.layer_norm"),
        "decoder.output_projection.weight",
    ]
    assert dict(found.named_buffers()).keys() == {
        "decoder.version", "decoder.embed_positions._float_tensor"
    }  # fmt: skip


def test_an_encoder_decoders_parameters_have_fairseqs_names() -> None:
    found = model("transformer", share_all_embeddings=True, decoder_learned_pos=True)
    inner, outer = "encoder.layers.0", "decoder.layers.0"
    assert list(found.state_dict()) == [
        "encoder.version",
        "encoder.embed_tokens.weight",
        "encoder.embed_positions._float_tensor",
        *attention(f"{inner}.self_attn"),
        *norm(f"{inner}.self_attn_layer_norm"),
        *feed_forward(inner),
        "decoder.version",
        "decoder.embed_tokens.weight",
        "decoder.embed_positions.weight",
        *attention(f"{outer}.self_attn"),
        *norm(f"{outer}.self_attn_layer_norm"),
        *attention(f"{outer}.encoder_attn"),
        *norm(f"{outer}.encoder_attn_layer_norm"),
        *feed_forward(outer),
        "decoder.output_projection.weight",
    ]
    shared = found.encoder.embed_tokens.weight
    assert found.decoder.output_projection.weight is shared


def test_a_word_sees_those_before_it_alone() -> None:
    found = model("transformer_lm").eval()
    row = torch.tensor([[2, 4, 5, 6, 7]])
    other = torch.tensor([[2, 4, 5, 8, 9]])
    whole, _ = found(row)
    changed, _ = found(other)
    assert torch.equal(whole[:, :3], changed[:, :3])
    assert not torch.allclose(whole[:, 3:], changed[:, 3:])


@pytest.mark.parametrize("left", [True, False])
def test_padding_changes_nothing(left: bool) -> None:
    found = model("transformer").eval()
    source, target = torch.tensor([[4, 5, 2]]), torch.tensor([[2, 6, 7]])
    pad = torch.tensor([[1, 1]])
    padded = [torch.cat([pad, t] if left else [t, pad], 1) for t in (source, target)]
    plain, _ = found(source, None, target)
    wide, _ = found(padded[0], None, padded[1])
    kept = wide[:, 2:] if left else wide[:, :-2]
    # Sums of the same numbers with zeros between them, in another order.
    torch.testing.assert_close(kept, plain, rtol=1e-5, atol=1e-6)
    assert wide.isfinite().all()


def test_attention_is_torchs() -> None:
    torch.manual_seed(2)
    ours = MultiheadAttention(8, 2)
    theirs = nn.MultiheadAttention(8, 2)
    weights = [p.weight for p in (ours.q_proj, ours.k_proj, ours.v_proj)]
    biases = [p.bias for p in (ours.q_proj, ours.k_proj, ours.v_proj)]
    theirs.in_proj_weight.data = torch.cat(weights).data
    theirs.in_proj_bias.data = torch.cat(biases).data
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    x, y = torch.randn(5, 3, 8), torch.randn(4, 3, 8)
    hidden = torch.tensor([[False] * 4, [True, False, False, True], [False] * 4])
    expected, _ = theirs(x, y, y, hidden)
    found, _ = ours(x, y, y, hidden)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_positions_begin_after_padding_and_grow_on_demand() -> None:
    waves = SinusoidalPositionalEmbedding(6, padding_idx=1, init_size=4)
    row = torch.tensor([[1, 1, 5, 6, 7, 8, 9, 2]])
    found = waves(row)
    assert (found[0, :2] == 0).all()
    table = SinusoidalPositionalEmbedding.get_embedding(10, 6, 1)
    assert torch.equal(found[0, 2:], table[2:8])
    learnt = PositionalEmbedding(16, 6, 1, learned=True)
    assert learnt.max_positions == 16
    assert torch.equal(learnt(row)[0, 2:], learnt.weight[2:8])


def test_widths_follow_the_embeddings_unless_given() -> None:
    plain = model("transformer_lm")
    assert plain.decoder.project_in_dim is None
    odd = model("transformer_lm", decoder_input_dim=4, decoder_output_dim=6)
    assert odd.decoder.project_in_dim.weight.shape == (8, 4)
    assert odd.decoder.output_projection.weight.shape == (12, 6)
    assert odd(torch.tensor([[2, 4]]))[0].shape == (1, 2, 12)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match="share_decoder_input_output_embed"):
        model("transformer_lm", share_decoder_input_output_embed=True,
              decoder_input_dim=4)  # fmt: skip
    with pytest.raises(ValueError, match="--share-all-embeddings requires"):
        model("transformer", share_all_embeddings=True, encoder_embed_dim=4)
    with pytest.raises(ValueError, match="8 is not divisible by 3 heads"):
        model("transformer_lm", decoder_attention_heads=3)
    with pytest.raises(ValueError, match="activation_fn must be one of"):
        model("transformer_lm", activation_fn="cube")
    with pytest.raises(ValueError, match="model 'mlp' is not registered"):
        build_model(SimpleNamespace(_name="mlp"), TASK)


def test_older_weights_without_an_output_layer_load() -> None:
    found = model("transformer_lm", share_decoder_input_output_embed=True)
    state = found.state_dict()
    del state["decoder.output_projection.weight"]
    found.load_state_dict(state)
    apart = model("transformer_lm")
    state = apart.state_dict()
    state["decoder.embed_out"] = state.pop("decoder.output_projection.weight")
    apart.load_state_dict(state)
    assert "decoder.embed_out" in state  # the caller's dict is left alone
