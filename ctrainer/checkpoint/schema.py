"""What the JSON files of a checkpoint may hold: a table of fields a file.

A new field is one line of a table. Fields that a table does not have are left alone:
other releases write them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_COUNT_LIMIT = 2**63 - 1  # what C counts in


@dataclass(frozen=True, slots=True)
class Kind:
    """`what` completes "must be ..."; holds() judges a value."""

    what: str
    holds: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)


def whole(low: int = 0, high: int = _COUNT_LIMIT) -> Kind:
    what = f"a whole number from {low}" + (
        "" if high == _COUNT_LIMIT else f" to {high}"
    )
    return Kind(what, lambda v: _is_int(v) and low <= v <= high)


def number(low: float = -math.inf) -> Kind:
    """A finite number."""
    what = "a finite number" + ("" if low == -math.inf else f" from {low}")
    return Kind(
        what,
        lambda v: _is_number(v) and abs(v) < 2.0**1023 and v >= low,
    )


def none_or(kind: Kind) -> Kind:
    return Kind(f"null or {kind.what}", lambda v: v is None or kind.holds(v))


def listing(kind: Kind) -> Kind:
    return Kind(
        f"a list, each item {kind.what}",
        lambda v: isinstance(v, list) and all(map(kind.holds, v)),
    )


def mapping(kind: Kind | None = None) -> Kind:
    return Kind(
        "an object" + ("" if kind is None else f", each value {kind.what}"),
        lambda v: (
            isinstance(v, dict) and (kind is None or all(map(kind.holds, v.values())))
        ),
    )


def either(a: Kind, b: Kind) -> Kind:
    return Kind(f"{a.what} or {b.what}", lambda v: a.holds(v) or b.holds(v))


def fields(table: Mapping[str, Kind]) -> Kind:
    """An object whose fields of the table are of their kinds."""
    what = ", ".join(f"{name!r} {kind.what}" for name, kind in table.items())
    return Kind(
        f"an object with {what}",
        lambda v: (
            isinstance(v, dict)
            and all(k.holds(v[n]) for n, k in table.items() if n in v)
        ),
    )


ANY = Kind("anything", lambda v: True)
FLAG = Kind("true or false", lambda v: isinstance(v, bool))
NUMBER = Kind("a number", _is_number)  # NaN too: losses may be
TEXT = Kind("a string without NUL", lambda v: isinstance(v, str) and "\0" not in v)
STEPS = none_or(number(0))  # logging_steps and the like: below 1 a part of the run

_CALLBACK = fields({"args": mapping(), "attributes": mapping()})

TRAINER_STATE: dict[str, Kind] = {
    "epoch": none_or(number(0)),
    "global_step": whole(),
    "max_steps": whole(),
    "logging_steps": STEPS,
    "eval_steps": STEPS,
    "save_steps": STEPS,
    "train_batch_size": none_or(whole()),
    "num_train_epochs": whole(),
    "num_input_tokens_seen": whole(),
    "total_flos": number(0),
    "log_history": listing(fields({"step": whole(), "loss": NUMBER})),
    "best_metric": none_or(NUMBER),
    "best_global_step": none_or(whole()),
    "best_model_checkpoint": none_or(TEXT),
    "is_local_process_zero": FLAG,
    "is_world_process_zero": FLAG,
    "is_hyper_param_search": FLAG,
    "trial_name": none_or(TEXT),
    "trial_params": none_or(mapping()),
    "stateful_callbacks": none_or(mapping(either(_CALLBACK, listing(_CALLBACK)))),
}

LOSS_SUMS: dict[str, Kind] = {
    "window_loss": NUMBER,
    "window_bad": whole(),
    "total_loss": NUMBER,
    "total_bad": whole(),
    "window_start": whole(),
    "nonfinite_steps": whole(),
    "nonfinite_total": whole(),
    "recent_norms": listing(number(0)),
    "spike_steps": whole(),
    "spike_total": whole(),
}

# Sums of the gradient noise scale, which is no longer measured.
FORMER_SUMS = ("noise_trace", "noise_signal", "noise_weight")

OWN_VERSION = 1  # of the format of ctrainer_state.json; docs/development/releases.md

OWN_STATE: dict[str, Kind] = {
    "version": whole(1, OWN_VERSION),
    "world_size": whole(1, 1 << 24),
    "loss": mapping(),
    "resume": mapping(),
    "evaluated": listing(mapping(NUMBER)),
}

# "data" of POSITION: the place in the training data, and what else the reader of its
# kind knows of it.
_PLACE = fields(
    {
        "kind": TEXT,
        "epoch": whole(0, 1 << 48),
        "place": whole(0, 1 << 48),
        "length": none_or(whole()),
        "rows": whole(1, 1 << 48),
        "last": none_or(whole()),
        "drawing": none_or(whole(-1, 1 << 24)),
        "workers": whole(),
        "ranks": whole(1),
        "past": whole(),
        "fetched": listing(whole()),
        "states": listing(ANY),
        "generators": listing(ANY),
        "inner": mapping(),
    }
)
_ALWAYS = ("kind", "epoch", "place", "length", "rows")
PLACE = Kind(
    f"{_PLACE.what}, and has {', '.join(map(repr, _ALWAYS))}",
    lambda v: _PLACE.holds(v) and all(name in v for name in _ALWAYS),
)

# "resume" of OWN_STATE, out of from_json(): where the run stands.
_SEED = whole(-1 << 63, 1 << 64)

POSITION: dict[str, Kind] = {
    "epoch": whole(),
    "micro_step": whole(),
    "epoch_done": FLAG,
    "epoch_rng": mapping(),
    "data": PLACE,
    "seeds": fields({"seed": _SEED, "order": none_or(_SEED)}),
}


def check_fields(
    path: str | os.PathLike[str],
    content: Any,
    table: Mapping[str, Kind],
    required: tuple[str, ...] = (),
    where: str = "",
) -> None:
    """Raise ValueError, naming file, field and value, unless `content` is an object
    whose fields of the table are of their kinds, with all the required ones."""
    name = f"{os.fspath(path)}{where and ': ' + where}"
    if not isinstance(content, dict):
        raise ValueError(f"{name}: must be an object, not {type(content).__name__}")
    for field in required:
        if field not in content:
            raise ValueError(f"{name}: lacks {field!r}")
    for field, kind in table.items():
        if field in content and not kind.holds(content[field]):
            text = repr(content[field])
            text = text if len(text) <= 80 else f"{text[:77]}..."
            raise ValueError(f"{name}: {field!r} is {text}; it must be {kind.what}")


def check_version(path: str | os.PathLike[str], content: Any, newest: int) -> None:
    """Raise ValueError where `content` has a newer version than we read. Before its
    fields are checked: another version may have others."""
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > newest:
        raise ValueError(
            f"{os.fspath(path)}: has version {version} of its format, and this "
            f"ctrainer reads versions up to {newest}: a newer release wrote it, so "
            "update ctrainer"
        )
