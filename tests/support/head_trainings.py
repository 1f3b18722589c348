"""Models with output embeddings over 96 words, and trainings of them, ours and
transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tiny import tokens
from torch import nn

import ctrainer

WORDS = 96
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip


def model(kind: str, tied: bool = True) -> Any:
    torch.manual_seed(0)
    tie = {"tie_word_embeddings": tied, "initializer_range": 0.2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "gpt2":
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **tie, **ends,
        ))  # fmt: skip
        made.loss_type = "ForCausalLM"  # else transformers' Trainer divides by the
        return made  # labels before the shift
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(
            vocab_size=WORDS, **SIZES, **NO_DROPOUT, **tie, **ends))  # fmt: skip
    if kind == "t5":
        return transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=0, tie_word_embeddings=tied,
            initializer_factor=0.5, **ends))  # fmt: skip
    cls = {"llama": "Llama", "gemma2": "Gemma2"}[kind]
    config = getattr(transformers, f"{cls}Config")(
        vocab_size=WORDS, **SIZES, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=16, **tie, **ends,
    )  # fmt: skip
    return getattr(transformers, f"{cls}ForCausalLM")(config)


def frozen(made: Any, part: str) -> Any:
    """The model with its output embeddings frozen, or all but them, or neither."""
    head = made.get_output_embeddings()
    if part == "head":
        head.requires_grad_(False)
    elif part == "body":
        made.requires_grad_(False)
        head.requires_grad_(True)
    return made


def trained(
    folder: Path,
    made: nn.Module,
    theirs: bool = False,
    cls: Any = None,
    **options: Any,
) -> Any:
    """The trainer after 4 updates of rows with unequal counts of targets."""
    package: Any = transformers if theirs else ctrainer
    args = package.TrainingArguments(
        str(folder), **{
            "report_to": [], "disable_tqdm": True, "save_strategy": "no",
            "max_steps": 4, "logging_steps": 1, "use_cpu": True,
            "per_device_train_batch_size": 4, "learning_rate": 0.01,
            "optim": "adamw_torch", **options,
        },
    )  # fmt: skip
    data = tokens(32, 12, WORDS, padded=True)
    trainer = (cls or package.Trainer)(made, args, train_dataset=data)
    trainer.remove_callback(
        package.trainer_callback.PrinterCallback if theirs else ctrainer.PrinterCallback
    )
    trainer.train()
    return trainer


def logged(trainer: Any) -> list[tuple[float, float]]:
    return [
        (e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e
    ]
