"""Models of transformers' many architectures, of a few thousand weights each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

# Each way of saving: renamed (vision), experts one by one, both at once, several models
# in one, as they are; text, images, sound; encoders, decoders and both.
CHOSEN = (
    "ViTForImageClassification", "MixtralForCausalLM", "LlavaForConditionalGeneration",
    "T5ForConditionalGeneration", "Qwen2MoeForCausalLM", "JinaEmbeddingsV3Model",
    "WhisperForConditionalGeneration", "RadioModel", "DeiTForImageClassification",
    "GraniteMoeForCausalLM", "CLIPModel", "BertForMaskedLM",
)  # fmt: skip

_SIZES = {
    16: "hidden_size d_model dim n_embd embed_dim embedding_size projection_dim "
    "proj_dim moe_intermediate_size shared_expert_intermediate_size "
    "decoder_hidden_size",
    32: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim hidden_dim "
    "n_inner decoder_intermediate_size image_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_decoder_layers num_encoder_layers decoder_num_hidden_layers num_heads "
    "num_attention_heads n_head n_heads encoder_attention_heads type_vocab_size "
    "decoder_attention_heads num_key_value_heads decoder_num_attention_heads "
    "decoder_num_heads num_experts_per_tok eos_token_id",
    8: "head_dim d_kv v_head_dim qk_nope_head_dim q_lora_rank kv_lora_rank patch_size",
    4: "qk_rope_head_dim num_experts num_local_experts n_routed_experts "
    "moe_num_experts",
    64: "vocab_size max_position_embeddings n_positions max_source_positions "
    "max_target_positions",
    1: "n_group topk_group n_shared_experts bos_token_id",
    0: "pad_token_id",
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_BY_LAYER = ("layer_types", "mlp_layer_types", "num_attention_heads_per_layer")
_LARGEST = 2_000_000  # weights


def class_names() -> list[str]:
    """A class of each type of model in transformers' auto mappings, one with a head
    where there is one; in a fixed order that is not the alphabet's."""
    found: dict[str, list[str]] = {}
    for name in sorted(vars(modeling_auto)):
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES"):
            for kind, cls in getattr(modeling_auto, name).items():
                found.setdefault(kind, []).extend(
                    [cls] if isinstance(cls, str) else cls
                )
    chosen = [
        next((name for name in names if "For" in name), names[0])
        for _, names in sorted(found.items())
    ]
    random.Random(14).shuffle(chosen)
    return list(dict.fromkeys(chosen))


def make(name: str, seed: int = 0) -> Any:
    """A tiny model of the class, every tensor of which is random.

    Raises what transformers raises for a configuration that cannot be so small.
    """
    cls = getattr(transformers, name)
    with torch.device("meta"):
        n = sum(p.numel() for p in cls(_shrunk(cls.config_class())).parameters())
    if n > _LARGEST:
        raise ValueError(f"{name} has {n} weights even so")
    model = cls(_shrunk(cls.config_class()))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def drawn(n: int) -> Iterator[tuple[str, Any]]:
    """The names of n architectures that can be made tiny, saved and read back by
    transformers alone, and a model of each."""
    made = 0
    for name in (*CHOSEN, *class_names()):
        if made == n:
            return
        try:
            model = make(name)
            if not _comes_back(model):
                continue
        except Exception:  # of any kind: about the configuration
            if name in CHOSEN:
                raise
            continue
        made += 1
        yield name, model
    assert made == n, f"only {made} of {n} architectures can be made tiny"


def _comes_back(model: Any) -> bool:
    """Do the sizes survive in a file of the configuration, which lacks some?"""
    with torch.device("meta"):
        again = type(model)(type(model.config)(**model.config.to_dict()))
    sizes = [[t.shape for t in m.state_dict().values()] for m in (model, again)]
    return sizes[0] == sizes[1]


def _shrunk(config: Any) -> Any:
    for name, size in _SMALL.items():
        old = getattr(config, name, None)
        if type(old) is int and (old > size or name.endswith("token_id")):
            setattr(config, name, size)
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _shrunk(value)
        elif name.endswith("token_id") and type(value) is int and value >= 64:
            setattr(config, name, 3)
    layers = getattr(config, "num_hidden_layers", None)
    for name in _BY_LAYER:
        if isinstance(getattr(config, name, None), list) and isinstance(layers, int):
            setattr(config, name, getattr(config, name)[:layers])
    return config
