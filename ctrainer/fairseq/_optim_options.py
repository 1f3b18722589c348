"""fairseq's options of each optimizer, as the arguments of ours."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

# The class of ctrainer.optim for each name of --optimizer.
OPTIMIZERS = {
    "adam": "FairseqAdam",
    "adamax": "FairseqAdamax",
    "nag": "FairseqNAG",
    "sgd": "SGD",
    "adadelta": "Adadelta",
    "adagrad": "Adagrad",
}
_ELSEWHERE = {
    "adafactor": "use transformers' Adafactor with ctrainer.Trainer",
    "composite": "it is several optimizers, and this trainer drives one",
    "cpu_adam": "adam does the same here",
    "lamb": "it is NVIDIA apex's",
}


def options_of(cfg: Any) -> tuple[str, dict[str, Any]]:
    """The optimizer's name and the arguments of the class in ctrainer.optim.

    Raises ValueError for a name or an option that this package does not have.
    """
    name = getattr(cfg, "_name", None) or getattr(cfg, "optimizer", None)
    if name in _ELSEWHERE:
        raise ValueError(f"optimizer {name!r} is not here: {_ELSEWHERE[name]}")
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer is {name!r}; expected one of {list(OPTIMIZERS)}")
    return name, {"lr": _rate(cfg), **_READERS[name](cfg)}


def _rate(cfg: Any) -> float:
    lr = cfg.lr
    return float(lr if isinstance(lr, int | float) else lr[0])


def _pair(value: Any) -> tuple[float, float]:
    """(0.9, 0.98) or its text, as --adam-betas has it."""
    first, second = ast.literal_eval(value) if isinstance(value, str) else value
    return float(first), float(second)


def _take(cfg: Any, **names: Any) -> dict[str, Any]:
    """Argument = cfg's value of the option named, or its default."""
    return {key: getattr(cfg, name, value) for key, (name, value) in names.items()}


_DECAY = ("weight_decay", 0.0)


def _adam(cfg: Any) -> dict[str, Any]:
    if getattr(cfg, "fp16_adam_stats", False):
        raise ValueError(
            "fp16_adam_stats: the state is kept in float32 here; leave it off"
        )
    taken = _take(cfg, eps=("adam_eps", 1e-8), weight_decay=_DECAY)
    return {"betas": _pair(getattr(cfg, "adam_betas", (0.9, 0.999))), **taken}


def _adamax(cfg: Any) -> dict[str, Any]:
    taken = _take(cfg, eps=("adamax_eps", 1e-8), weight_decay=_DECAY)
    taken["betas"] = _pair(getattr(cfg, "adamax_betas", (0.9, 0.999)))
    taken["bias_correction"] = not getattr(cfg, "no_bias_correction", False)
    return taken


def _nag(cfg: Any) -> dict[str, Any]:
    return _take(cfg, momentum=("momentum", 0.99), weight_decay=_DECAY)


def _sgd(cfg: Any) -> dict[str, Any]:
    return _take(cfg, momentum=("momentum", 0.0), weight_decay=_DECAY)


def _adadelta(cfg: Any) -> dict[str, Any]:
    named = {"rho": ("adadelta_rho", 0.9), "eps": ("adadelta_eps", 1e-6)}
    return _take(cfg, **named, weight_decay=_DECAY)


def _adagrad(cfg: Any) -> dict[str, Any]:
    return _take(cfg, weight_decay=_DECAY)


_READERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "adam": _adam,
    "adamax": _adamax,
    "nag": _nag,
    "sgd": _sgd,
    "adadelta": _adadelta,
    "adagrad": _adagrad,
}
