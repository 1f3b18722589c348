"""The base of criterions, by the name of fairseq's criterions/fairseq_criterion.py."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.modules.loss import _Loss

from ctrainer.fairseq import metrics
from ctrainer.fairseq.registry import Registered


class FairseqCriterion(Registered, _Loss):
    """A loss: forward(model, sample) returns (loss, sample size, logging output).

    The loss is a sum, which the Trainer divides by the sample sizes of an update.
    `padding_idx` is that of the task's target dictionary, or -100.

    Args:
        task: The task.

    Example:
        >>> from ctrainer.fairseq.criterions import FairseqCriterion
        >>> class Squares(FairseqCriterion):
        ...     def forward(self, model, sample, reduce=True):
        ...         loss = (model(sample["x"]) - sample["target"]).square().sum()
        ...         return loss, len(sample["x"]), {"loss": loss.item()}
        >>> Squares(task=None).padding_idx
        -100
    """

    def __init__(self, task: Any) -> None:
        super().__init__()
        self.task = task
        dictionary = getattr(task, "target_dictionary", None)
        self.padding_idx: int = -100 if dictionary is None else dictionary.pad()

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> Any:
        """Return the criterion, each argument of __init__ being the option of that
        name.

        Args:
            cfg: The options.
            task: The task.

        Raises:
            ValueError: an argument without a default that is no option, or *args or
                **kwargs.
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
        """Return (loss, sample size, logging output) of a sample.

        Args:
            model: The model.
            sample: A batch.
            reduce (bool, default True): Sum the losses; False: one for each target.
        """
        raise NotImplementedError

    @staticmethod
    def aggregate_logging_outputs(logging_outputs: list[dict[str, Any]]) -> Any:
        """Return the numbers to log; the old name of reduce_metrics().

        Args:
            logging_outputs (list[dict[str, Any]]): Of all micro-batches and ranks.
        """
        raise NotImplementedError

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log what the workers' logging outputs come to.

        Args:
            logging_outputs (list[dict[str, Any]]): Of all micro-batches and ranks.
        """
        for key, value in cls.aggregate_logging_outputs(logging_outputs).items():
            if key not in ("nsentences", "ntokens", "sample_size"):
                metrics.log_scalar(key, value)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return whether workers may add their logging outputs up before
        reduce_metrics()."""
        return False


class LegacyFairseqCriterion(FairseqCriterion):
    """A criterion that is made with (args, task).

    Args:
        args: Flat options.
        task: The task.
    """

    def __init__(self, args: Any, task: Any) -> None:
        super().__init__(task=task)
        self.args = args

    @classmethod
    def build_criterion(cls, args: Any, task: Any) -> Any:
        """Return the criterion.

        Args:
            args: Flat options.
            task: The task.
        """
        return cls(args, task)
