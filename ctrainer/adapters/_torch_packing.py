"""Sequences packed into one row without padding, for causal language models of
transformers whose attention keeps the sequences apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_TAKEN = {"input_ids", "labels", "attention_mask"}


class PackedCollator:
    """Training batches of one row: the sequences one after the other, position_ids that
    begin anew with each, and no target across two; by transformers'
    DataCollatorWithFlattening. Without labels the targets are the tokens themselves.

    Raises:
        ValueError: a row has padding or a value that cannot be joined.
    """

    def __init__(self, model: Any) -> None:
        import transformers

        config = model.config
        varlen = str(getattr(config, "_attn_implementation", "")).startswith("flash")
        flattening: Any = transformers.DataCollatorWithFlattening
        self.join = flattening(return_flash_attn_kwargs=varlen)

    def __call__(self, features: list[Mapping[str, Any]]) -> Any:
        for row in features:
            unknown = sorted(set(row) - _TAKEN)
            if unknown:
                raise ValueError(
                    f"pack_sequences joins {', '.join(sorted(_TAKEN))}, and a row has "
                    f"{', '.join(unknown)}; drop these columns"
                )
            mask = row.get("attention_mask")
            if mask is not None and not all(mask):
                raise ValueError(
                    "pack_sequences joins rows without padding, and a row's "
                    "attention_mask has zeros; tokenize with padding=False"
                )
        return self.join(features)


class PaddedCollator:
    """Evaluation batches of the same rows, padded on the right; labels with -100."""

    def __init__(self, model: Any) -> None:
        pad = getattr(model.config, "pad_token_id", None)
        self.pad = {"input_ids": pad or 0, "labels": -100, "attention_mask": 0}

    def __call__(self, features: list[Mapping[str, Any]]) -> dict[str, Any]:
        def tensors(name: str, default: str) -> list[Any]:
            values = (row.get(name, row[default]) for row in features)
            return [torch.as_tensor(value, device="cpu") for value in values]

        columns = {name: tensors(name, "input_ids") for name in ("input_ids", "labels")}
        columns["attention_mask"] = [torch.ones_like(x) for x in columns["input_ids"]]
        return {
            name: torch.nn.utils.rnn.pad_sequence(
                column, batch_first=True, padding_value=self.pad[name]
            )
            for name, column in columns.items()
        }


def collator(model: Any, training: bool) -> PackedCollator | PaddedCollator:
    """Makes the batches of a run with pack_sequences."""
    return PackedCollator(model) if training else PaddedCollator(model)


def check_packs(model: Any, given: Any) -> None:
    """Raise ValueError unless the model computes of packed sequences what it computes
    of each alone, for two short ones. The model is called four times, in eval mode."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
    )

    name = type(getattr(model, "get_base_model", lambda: model)()).__name__
    if name not in CAUSAL.values():
        raise ValueError(
            f"pack_sequences is for causal language models of transformers, and the "
            f"model is a {name}; leave it out"
        )
    if given is not None:
        raise ValueError(
            "pack_sequences makes the batches, and data_collator is a "
            f"{type(given).__name__}; leave one of them out"
        )
    weight = model.get_input_embeddings().weight
    tokens = (torch.arange(24, device=weight.device) * 5 + 1) % weight.shape[0]
    first, second, other = (part.tolist() for part in tokens.split(8))
    pack = PackedCollator(model)

    def logits(*sequences: list[int]) -> Any:
        batch = pack([{"input_ids": ids} for ids in sequences])
        batch.pop("labels")
        on_device = {
            key: value.to(weight.device) if hasattr(value, "to") else value
            for key, value in batch.items()
        }
        return model(**on_device).logits[0].float()

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            joined = logits(first, second)
            apart = torch.equal(joined[8:], logits(other, second)[8:])
            alone = torch.cat([logits(first), logits(second)])
    finally:
        for module, training in modes:
            module.training = training
    close = 1e-4 if weight.dtype == torch.float32 else 5e-2
    placed = bool((joined - alone).abs().max() <= close * alone.abs().max())
    if not (apart and placed):
        fault = "see each other" if not apart else "have other positions than alone"
        raise ValueError(
            f"pack_sequences needs a model that keeps packed sequences apart, and in "
            f"{name} with attention {model.config._attn_implementation!r} "
            f"they {fault}; leave it out (max_tokens_per_batch pads little), or load "
            "the model with another attn_implementation"
        )
