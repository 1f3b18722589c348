"""The loss scale that the argument `loss_scaler` asks for."""

from __future__ import annotations

import inspect
from typing import Any

from ctrainer._C import LossScaler
from ctrainer._settings import nearest, read, refuse_unknown

PRESETS = ("torch", "fairseq", "deepspeed", "static")


def make_loss_scaler(setting: dict[str, Any] | str | None) -> LossScaler:
    """A fresh scaler.

    `setting` is the name of a preset, a dict of "preset" (by default "torch") and
    that preset's options, or None for "torch". Raises ValueError for an unknown preset
    or option, with the nearest known, and for a value that the preset refuses.
    """
    options = _as_dict(setting)
    name = options.pop("preset", "torch")
    if name not in PRESETS:
        raise ValueError(f"loss_scaler: no preset {name!r}; {nearest(name, PRESETS)}")
    preset = getattr(LossScaler, name)
    known = inspect.signature(preset).parameters
    refuse_unknown(f"loss_scaler {name!r}", options, known)
    for option, value in options.items():
        default = known[option].default
        kind = float if default is inspect.Parameter.empty else type(default)
        hint = kind if kind in (bool, int, float) else Any
        options[option] = read(value, hint, f"loss_scaler: {option}")
    try:
        return preset(**options)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise ValueError(f"loss_scaler={setting!r}: {error}") from None


def _as_dict(setting: Any) -> dict[str, Any]:
    if setting is None:
        return {}
    if isinstance(setting, str):
        return {"preset": setting}
    if not isinstance(setting, dict):
        raise ValueError(
            "loss_scaler must be the name of a preset or a dict, not "
            f"{type(setting).__name__}"
        )
    return dict(setting)
