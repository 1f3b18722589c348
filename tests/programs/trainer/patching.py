"""transformers' Trainer becomes ours, and transformers' again."""

import gc

import transformers

from ctrainer import hf
from ctrainer.seq2seq import Seq2SeqTrainer
from ctrainer.trainer import Trainer

original = transformers.Trainer
hf.patch_transformers()
hf.patch_transformers()


class Third(transformers.Trainer):
    pass


assert issubclass(Third, Trainer)
assert transformers.trainer.Trainer is Trainer
assert transformers.Seq2SeqTrainer is Seq2SeqTrainer
hf.unpatch_transformers()
assert transformers.Trainer is original
assert transformers.trainer.Trainer is original
assert issubclass(transformers.Seq2SeqTrainer, original)

# As a process does that forks others, after the imports.
gc.freeze()
hf.patch_transformers()
assert transformers.Trainer is Trainer
