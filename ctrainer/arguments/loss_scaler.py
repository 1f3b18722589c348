"""The loss scaler that the argument `loss_scaler` selects."""

from __future__ import annotations

from typing import Any

from ctrainer._C import LossScaler
from ctrainer.arguments.settings import nearest, read_keywords

PRESETS = ("torch", "fairseq", "deepspeed", "static")


def make_loss_scaler(setting: dict[str, Any] | str | None) -> LossScaler:
    """A fresh scaler.

    `setting` is the name of a preset, a dict of "preset" (by default "torch") and
    that preset's options, or None for "torch". Raises ValueError for an unknown preset
    or option, with the nearest known name, and for a value that the preset rejects.
    """
    options = _as_dict(setting)
    name = options.pop("preset", "torch")
    if name not in PRESETS:
        raise ValueError(f"loss_scaler: no preset {name!r}; {nearest(name, PRESETS)}")
    preset = getattr(LossScaler, name)
    options = read_keywords(preset, options, f"loss_scaler {name!r}")
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
