"""A trainer whose insides are C.

Names are imported on first use, so that `import ctrainer` needs neither torch nor
transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ctrainer._C import Communicator, LossScaler
    from ctrainer.average import EMA, SWA
    from ctrainer.bmuf import BMUF
    from ctrainer.callbacks import (
        DefaultFlowCallback,
        EarlyStoppingCallback,
        PrinterCallback,
        TrainerCallback,
    )
    from ctrainer.comm.data_parallel import DataParallel
    from ctrainer.display.plotting import plot
    from ctrainer.display.progress import ProgressCallback
    from ctrainer.enums import IntervalStrategy, SchedulerType
    from ctrainer.seq2seq import Seq2SeqTrainer
    from ctrainer.trainer import Trainer
    from ctrainer.trainer_state import TrainerControl, TrainerState
    from ctrainer.trainer_utils import EvalPrediction, set_seed
    from ctrainer.training_args import Seq2SeqTrainingArguments, TrainingArguments

_HOMES = {
    "BMUF": "bmuf",
    "EMA": "average",
    "SWA": "average",
    "Communicator": "_C",
    "DataParallel": "comm.data_parallel",
    "DefaultFlowCallback": "callbacks",
    "EarlyStoppingCallback": "callbacks",
    "EvalPrediction": "trainer_utils",
    "IntervalStrategy": "enums",
    "LossScaler": "_C",
    "PrinterCallback": "callbacks",
    "ProgressCallback": "display.progress",
    "SchedulerType": "enums",
    "Seq2SeqTrainer": "seq2seq",
    "Seq2SeqTrainingArguments": "training_args",
    "Trainer": "trainer",
    "TrainerCallback": "callbacks",
    "TrainerControl": "trainer_state",
    "TrainerState": "trainer_state",
    "TrainingArguments": "training_args",
    "plot": "display.plotting",
    "set_seed": "trainer_utils",
}
_MODULES = {
    "optim",
    "trainer_utils",
    "training_args",
    "callbacks",
    "adapters",
    "comm",
}

__all__ = [
    "BMUF",
    "EMA",
    "SWA",
    "Communicator",
    "DataParallel",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "EvalPrediction",
    "IntervalStrategy",
    "LossScaler",
    "PrinterCallback",
    "ProgressCallback",
    "SchedulerType",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "plot",
    "set_seed",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"ctrainer.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"ctrainer.{name}")
    else:
        raise AttributeError(f"module 'ctrainer' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
