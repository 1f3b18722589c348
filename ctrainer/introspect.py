"""What a model's class says of its inputs and its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def base_model(model: Any) -> Any:
    """The model inside a PEFT wrapper, else the model."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return model.get_base_model()
    if any(cls.__module__.partition(".")[0] == "peft" for cls in type(model).__mro__):
        return model.base_model.model  # of PeftMixedModel
    return model  # adapters in it, too, that transformers' add_adapter() has put there


def _forward(model: Any) -> Callable[..., Any] | None:
    return getattr(model, "forward", None) or (model if callable(model) else None)


def accepts_loss_kwargs(model: Any) -> bool:
    """Does the model's forward take num_items_in_batch? It says so itself by
    `accepts_loss_kwargs`, by naming it, or by taking any keyword."""
    said = getattr(model, "accepts_loss_kwargs", None)
    if said is not None:
        return bool(said)
    forward = _forward(model)
    try:
        parameters = inspect.signature(forward).parameters if forward else {}
    except (TypeError, ValueError):
        return False
    return "num_items_in_batch" in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )


def _class_forward(cls: type) -> Callable[..., Any] | None:
    """forward of a class of torch's, __call__ of any other."""
    called = (vars(c)["__call__"] for c in cls.__mro__ if "__call__" in vars(c))
    return getattr(cls, "forward", None) or next(called, None)


def label_names(cls: type) -> list[str]:
    """The labels that forward of the model class `cls` takes. Source: transformers,
    utils/generic.py, find_labels."""
    forward = _class_forward(cls)
    if forward is None:
        return []
    names = list(inspect.signature(forward).parameters)
    answering = "QuestionAnswering" in cls.__name__
    places = ("start_positions", "end_positions") if answering else ()
    return [n for n in names if "label" in n or n in places]


def can_return_loss(cls: type) -> bool:
    """Has forward of the model class `cls` a parameter return_loss=True?"""
    forward = _class_forward(cls)
    if forward is None:
        return False
    found = inspect.signature(forward).parameters.get("return_loss")
    return found is not None and found.default is True


class LabelSmoother:
    """Label-smoothed cross entropy of a model's logits, for models of torch.

    epsilon is the weight of the uniform distribution, in [0, 1]; labels equal to
    ignore_index, -100, are left out.
    """

    def __init__(self, epsilon: float = 0.1, ignore_index: int = -100) -> None:
        if not 0.0 <= epsilon <= 1.0:
            raise ValueError(f"label_smoothing_factor must be in [0, 1], got {epsilon}")
        self.epsilon = epsilon
        self.ignore_index = ignore_index

    def __call__(
        self,
        model_output: Any,
        labels: Any,
        shift_labels: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        from ctrainer.adapters import torch as adapter

        return adapter.smoothed_loss(
            model_output, labels, self.epsilon, shift_labels, num_items_in_batch
        )


def named(datasets: Any, name: str) -> Any:
    """The data set of this name. Raises KeyError with the names there are."""
    if isinstance(datasets, dict) and name in datasets:
        return datasets[name]
    known = list(datasets) if isinstance(datasets, dict) else type(datasets).__name__
    raise KeyError(
        f"no eval_dataset is named {name!r}; the trainer has {known}: pass a name of "
        "these, or a data set"
    )
