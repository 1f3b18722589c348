"""Optimizers with torch.optim's interface on ctrainer's engine, and schedules.

`step` clips, updates and zeroes the gradients in one call of C. State is kept in the
original's own layout, so state_dict() loads into the optimizer of the same name and the
other way round. Parameters live on the CPU; on a GPU use torch.optim's with fused=True.
"""

from ctrainer.arguments.optimizer_docs import describe
from ctrainer.optim._adafactor import Adafactor
from ctrainer.optim._adam import Adam, Adamax, AdamW, AdEMAMix, NAdam, RAdam
from ctrainer.optim._adaptive import Adadelta, Adagrad, RMSprop
from ctrainer.optim._composite import Composite
from ctrainer.optim._eight_bit import Adam8bit, AdamW8bit, AdEMAMix8bit, Lion8bit
from ctrainer.optim._fairseq import FairseqAdam, FairseqAdamax, FairseqNAG
from ctrainer.optim._layerwise import LAMB, LARS
from ctrainer.optim._muon import Muon
from ctrainer.optim._precision import Precision
from ctrainer.optim._schedule_free import (
    AdamWScheduleFree,
    RAdamScheduleFree,
    SGDScheduleFree,
)
from ctrainer.optim._sgd import SGD, Lion
from ctrainer.optim._wrapper import EngineOptimizer
from ctrainer.schedules import LRScheduler, get_scheduler

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "AdEMAMix",
    "AdEMAMix8bit",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "AdamWScheduleFree",
    "Adamax",
    "Composite",
    "FairseqAdam",
    "FairseqAdamax",
    "FairseqNAG",
    "LRScheduler",
    "Lion",
    "Lion8bit",
    "Muon",
    "NAdam",
    "Precision",
    "RAdam",
    "RAdamScheduleFree",
    "RMSprop",
    "SGDScheduleFree",
    "get_scheduler",
]

for _value in [globals()[name] for name in __all__]:
    if isinstance(_value, type) and issubclass(_value, EngineOptimizer):
        describe(_value)
