"""fairseq's options of each optimizer, as the arguments of ours."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

# The class of ctrainer.optim for each name of --optimizer.
OPTIMIZERS = {
    "adafactor": "Adafactor",
    "adam": "FairseqAdam",
    "adamax": "FairseqAdamax",
    "nag": "FairseqNAG",
    "sgd": "SGD",
    "adadelta": "Adadelta",
    "adagrad": "Adagrad",
    "composite": "Composite",
    "cpu_adam": "AdamW",
    "lamb": "LAMB",
}


def name_of(cfg: Any) -> str:
    """The optimizer that a config group names. Raises ValueError where none is."""
    name = getattr(cfg, "_name", None) or getattr(cfg, "optimizer", None)
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise ValueError(f"optimizer is {name!r}; expected one of {list(OPTIMIZERS)}")
    return name


def options_of(cfg: Any) -> tuple[str, dict[str, Any]]:
    """The optimizer's name and the arguments of the class in ctrainer.optim; not of
    composite, whose groups have them.

    Raises ValueError for a name or an option that this package does not have.
    """
    name = name_of(cfg)
    if name not in _READERS:
        raise ValueError(f"optimizer {name!r} is made of groups and cannot be in one")
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


def _adafactor(cfg: Any) -> dict[str, Any]:
    """fairseq refuses relative_step beside its lr, which is always there; here it takes
    the place of lr."""
    names = ("weight_decay", "scale_parameter", "relative_step", "warmup_init")
    defaults = dict.fromkeys(names, False) | {"weight_decay": 0.0}
    taken = _take(
        cfg,
        clip_threshold=("clip_threshold", 1.0),
        decay_rate=("decay_rate", -0.8),
        beta1=("beta1", None),
        **{name: (name, defaults[name]) for name in names},
    )
    taken["eps"] = _pair(getattr(cfg, "adafactor_eps", (1e-30, 1e-3)))
    return taken | ({"lr": None} if taken["relative_step"] else {})


def _lamb(cfg: Any) -> dict[str, Any]:
    taken = _take(cfg, eps=("lamb_eps", 1e-8), weight_decay=_DECAY)
    return {"betas": _pair(getattr(cfg, "lamb_betas", (0.9, 0.999))), **taken}


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
    "adafactor": _adafactor,
    "adam": _adam,
    "adamax": _adamax,
    "cpu_adam": _adam,
    "lamb": _lamb,
    "nag": _nag,
    "sgd": _sgd,
    "adadelta": _adadelta,
    "adagrad": _adagrad,
}
