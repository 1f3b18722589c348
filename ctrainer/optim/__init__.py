"""Optimizers with torch.optim's interface on ctrainer's engine, and schedules.

`step` clips, updates and zeroes the gradients in one call of C. State is kept in the
original's own layout, so state_dict() loads into the optimizer of the same name and the
other way round. Parameters live in the host's memory or, with the plugin ctrainer._cuda
and torch 2.10 or newer, on a GPU.
"""

from ctrainer.arguments import optimizer_docs as _docs
from ctrainer.optim._adafactor import *
from ctrainer.optim._adam import *
from ctrainer.optim._adaptive import *
from ctrainer.optim._compact import *
from ctrainer.optim._composite import *
from ctrainer.optim._eight_bit import *
from ctrainer.optim._fairseq import *
from ctrainer.optim._layerwise import *
from ctrainer.optim._muon import *
from ctrainer.optim._precision import *
from ctrainer.optim._schedule_free import *
from ctrainer.optim._sgd import *
from ctrainer.optim._wrapper import EngineOptimizer as _EngineOptimizer
from ctrainer.schedules import LRScheduler, get_scheduler

# A module of this package says in its own __all__ which of its names are public.
__all__ = sorted(name for name in globals() if not name.startswith("_"))

for _value in [globals()[name] for name in __all__]:
    if isinstance(_value, type) and issubclass(_value, _EngineOptimizer):
        _docs.describe(_value)
