"""--user-dir: tasks, models and criterions of a user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fairseq_program as program
import pytest
from places import ROOT

from ctrainer.fairseq.utils import import_user_module

# As a user of fairseq has it: a task and a model of the old kind, which declare their
# options with argparse, and a criterion with a dataclass. PACKAGE is the one import.
TASK = """
import os
from PACKAGE.data import Dictionary, MonolingualDataset, TokenBlockDataset, data_utils
from PACKAGE.tasks import LegacyFairseqTask, register_task


@register_task("lines")
class LinesTask(LegacyFairseqTask):
    @staticmethod
    def add_args(parser):
        parser.add_argument("data", help="path to data directory")
        parser.add_argument("--most-words", default=32, type=int)

    def __init__(self, args, dictionary):
        super().__init__(args)
        self.dictionary = dictionary

    @classmethod
    def setup_task(cls, args, **kwargs):
        return cls(args, Dictionary.load(os.path.join(args.data, "dict.txt")))

    def load_dataset(self, split, combine=False, **kwargs):
        lines = data_utils.load_indexed_dataset(
            os.path.join(self.args.data, split), self.dictionary, self.args.dataset_impl
        )
        blocks = TokenBlockDataset(
            lines, lines.sizes, self.args.most_words, self.dictionary.pad(),
            self.dictionary.eos(), break_mode="eos", include_targets=True,
        )
        self.datasets[split] = MonolingualDataset(
            blocks, blocks.sizes, self.dictionary, self.dictionary,
            add_eos_for_other_targets=False, shuffle=True, targets=["future"],
        )

    @property
    def source_dictionary(self):
        return self.dictionary

    @property
    def target_dictionary(self):
        return self.dictionary

    def max_positions(self):
        return self.args.most_words
"""
MODEL = """
import torch
from torch import nn
from PACKAGE.models import (
    FairseqDecoder, FairseqLanguageModel, register_model, register_model_architecture,
)


class Decoder(FairseqDecoder):
    def __init__(self, dictionary, width):
        super().__init__(dictionary)
        self.embed = nn.Embedding(len(dictionary), width, dictionary.pad())
        self.out = nn.Linear(width, len(dictionary))

    def forward(self, prev_output_tokens, encoder_out=None, **unused):
        return self.out(torch.tanh(self.embed(prev_output_tokens))), {}

    def max_positions(self):
        return 64


@register_model("bigrams")
class Bigrams(FairseqLanguageModel):
    @staticmethod
    def add_args(parser):
        parser.add_argument("--width", type=int, metavar="N")

    @classmethod
    def build_model(cls, args, task):
        print("width", args.width)
        return cls(Decoder(task.target_dictionary, args.width))

    def forward(self, src_tokens, src_lengths):
        return self.decoder(src_tokens)


@register_model_architecture("bigrams", "bigrams")
def base(args):
    args.width = getattr(args, "width", 8)


@register_model_architecture("bigrams", "bigrams_wide")
def wide(args):
    args.width = getattr(args, "width", 24)
    base(args)
"""
CRITERION = """
import math
from dataclasses import dataclass, field
import torch.nn.functional as F
from PACKAGE.criterions import FairseqCriterion, register_criterion
from PACKAGE.dataclass import FairseqDataclass
from PACKAGE.logging import metrics


@dataclass
class ScaledConfig(FairseqDataclass):
    scale: float = field(default=1.0, metadata={"help": "factor of the loss"})


@register_criterion("scaled", dataclass=ScaledConfig)
class Scaled(FairseqCriterion):
    def __init__(self, task, scale):
        super().__init__(task)
        self.scale = scale

    def forward(self, model, sample, reduce=True):
        output = model(**sample["net_input"])
        lprobs = model.get_normalized_probs(output, log_probs=True)
        target = model.get_targets(sample, output)
        loss = self.scale * F.nll_loss(
            lprobs.flatten(0, 1), target.flatten(), ignore_index=self.padding_idx,
            reduction="sum",
        )
        size = sample["ntokens"]
        return loss, size, {"loss": loss.data, "ntokens": size,
                            "nsentences": sample["nsentences"], "sample_size": size}

    @classmethod
    def reduce_metrics(cls, outputs):
        size = sum(log["sample_size"] for log in outputs)
        loss = sum(log["loss"] for log in outputs)
        metrics.log_scalar("loss", loss / size / math.log(2), size, round=3)
        metrics.log_scalar("scaled", 1, 1)

    @staticmethod
    def logging_outputs_can_be_summed():
        return True
"""


def plugin(folder: Path, package: str) -> Path:
    """A folder of that code: its __init__.py imports nothing but what registers."""
    for name, text in (("tasks", TASK), ("models", MODEL)):
        (folder / name).mkdir(parents=True)
        (folder / name / "mine.py").write_text(text.replace("PACKAGE", package))
    (folder / "losses.py").write_text(CRITERION.replace("PACKAGE", package))
    (folder / "__init__.py").write_text("from . import losses\n")
    return folder


@pytest.mark.parametrize("package", ["fairseq", "ctrainer.fairseq"])
def test_a_folder_of_a_users_own_is_trained(tmp_path: Path, package: str) -> None:
    data = program.preprocess(tmp_path)
    folder = plugin(tmp_path / "my_plugin", package)
    options = f"""fairseq-train {data} --user-dir {folder} --task lines
        --most-words 12 --arch bigrams_wide --criterion scaled --scale 0.5
        --batch-size 16 --optimizer adam --lr 0.05 --max-epoch 3 --cpu --num-workers 0
        --log-format json --save-dir {tmp_path / "out"}"""
    done = subprocess.run(
        [sys.executable, "-m", "ctrainer", *options.split()], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "width 24" in done.stdout
    lines = program.numbers_of_output(done.stdout)
    losses = [float(s["valid_loss"]) for name, s in lines if name == "valid"]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0] < 0.5 * 4.4  # bits of 21 words, halved
    assert {s["valid_scaled"] for name, s in lines if name == "valid"} == {"1"}


def test_a_folder_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    class Options:
        user_dir = str(tmp_path / "nowhere")

    with pytest.raises(FileNotFoundError, match="nowhere: there is no such folder"):
        import_user_module(Options)
    Options.user_dir = str(tmp_path / "json")  # a module of the standard library
    (tmp_path / "json").mkdir()
    with pytest.raises(ImportError, match="rename the folder"):
        import_user_module(Options)
