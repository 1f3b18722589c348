"""The base of criterions, by the name of fairseq's criterions/fairseq_criterion.py."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.modules.loss import _Loss

from ctrainer.fairseq import metrics
from ctrainer.fairseq.config.command_line import add_options


class FairseqCriterion(_Loss):
    """A loss: forward(model, sample) returns (loss, sample size, logging output).

    The loss is a sum, which the Trainer divides by the sample sizes of an update.
    `padding_idx` is that of the task's target dictionary, or -100.
    """

    def __init__(self, task: Any) -> None:
        super().__init__()
        self.task = task
        dictionary = getattr(task, "target_dictionary", None)
        self.padding_idx: int = -100 if dictionary is None else dictionary.pad()

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Declare the options of the class's dataclass, where it has one."""
        dataclass = getattr(cls, "__dataclass", None)
        if dataclass is not None:
            add_options(parser, dataclass)

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> Any:
        """The criterion, each argument of __init__ being the option of that name.

        Raises ValueError for an argument without a default that is no option.
        """
        arguments: dict[str, Any] = {}
        for name, parameter in inspect.signature(cls).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ValueError(
                    f"{cls.__name__}.__init__ takes any arguments; override "
                    "build_criterion() to say which"
                )
            if name == "task":
                arguments[name] = task
            elif name == "cfg":
                arguments[name] = cfg
            elif hasattr(cfg, name):
                arguments[name] = getattr(cfg, name)
            elif parameter.default is parameter.empty:
                raise ValueError(
                    f"{cls.__name__}.__init__ needs {name!r}, which is no option of "
                    "the criterion; override build_criterion() to give it"
                )
        return cls(**arguments)

    def forward(self, model: Any, sample: Any, reduce: bool = True) -> Any:
        """(loss, sample size, logging output) of a sample."""
        raise NotImplementedError

    @staticmethod
    def aggregate_logging_outputs(logging_outputs: list[dict[str, Any]]) -> Any:
        """The old name of reduce_metrics(): returns the numbers to log."""
        raise NotImplementedError

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log what the workers' logging outputs come to."""
        for key, value in cls.aggregate_logging_outputs(logging_outputs).items():
            if key not in ("nsentences", "ntokens", "sample_size"):
                metrics.log_scalar(key, value)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Whether workers may add their logging outputs up before reduce_metrics()."""
        return False


class LegacyFairseqCriterion(FairseqCriterion):
    """One that is made with (args, task)."""

    def __init__(self, args: Any, task: Any) -> None:
        super().__init__(task=task)
        self.args = args

    @classmethod
    def build_criterion(cls, args: Any, task: Any) -> Any:
        return cls(args, task)
