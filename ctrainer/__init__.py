"""A trainer whose insides are C.

Names are imported on first use, so that `import ctrainer` needs neither torch nor
transformers.
"""

from typing import TYPE_CHECKING

from ctrainer.runtime.lazy import on_first_use

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ctrainer._C import Communicator as Communicator
    from ctrainer._C import LossScaler as LossScaler
    from ctrainer.adapters.cross_entropy import (
        linear_cross_entropy as linear_cross_entropy,
    )
    from ctrainer.adapters.profiler import ProfilerCallback as ProfilerCallback
    from ctrainer.average import EMA as EMA
    from ctrainer.average import SWA as SWA
    from ctrainer.bmuf import BMUF as BMUF
    from ctrainer.callbacks import DefaultFlowCallback as DefaultFlowCallback
    from ctrainer.callbacks import EarlyStoppingCallback as EarlyStoppingCallback
    from ctrainer.callbacks import PrinterCallback as PrinterCallback
    from ctrainer.callbacks import TrainerCallback as TrainerCallback
    from ctrainer.comm.data_parallel import DataParallel as DataParallel
    from ctrainer.display.plotting import plot as plot
    from ctrainer.display.progress import ProgressCallback as ProgressCallback
    from ctrainer.enums import IntervalStrategy as IntervalStrategy
    from ctrainer.enums import SchedulerType as SchedulerType
    from ctrainer.hf import patch_transformers as patch_transformers
    from ctrainer.seq2seq import Seq2SeqTrainer as Seq2SeqTrainer
    from ctrainer.trainer import Trainer as Trainer
    from ctrainer.trainer_state import TrainerControl as TrainerControl
    from ctrainer.trainer_state import TrainerState as TrainerState
    from ctrainer.trainer_utils import EvalPrediction as EvalPrediction
    from ctrainer.trainer_utils import set_seed as set_seed
    from ctrainer.training_args import (
        Seq2SeqTrainingArguments as Seq2SeqTrainingArguments,
    )
    from ctrainer.training_args import TrainingArguments as TrainingArguments

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
    "ProfilerCallback": "adapters.profiler",
    "ProgressCallback": "display.progress",
    "SchedulerType": "enums",
    "Seq2SeqTrainer": "seq2seq",
    "Seq2SeqTrainingArguments": "training_args",
    "Trainer": "trainer",
    "TrainerCallback": "callbacks",
    "TrainerControl": "trainer_state",
    "TrainerState": "trainer_state",
    "TrainingArguments": "training_args",
    "linear_cross_entropy": "adapters.cross_entropy",
    "patch_transformers": "hf",
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

__all__ = sorted(_HOMES)
__getattr__, __dir__ = on_first_use(__name__, _HOMES, _MODULES)
