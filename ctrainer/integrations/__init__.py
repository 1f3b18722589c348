"""Other packages' configurations and reporters, read into ours."""

from __future__ import annotations

from typing import Any


def reporting_callbacks(report_to: Any) -> list[Any]:
    """Callback classes of transformers' reporters (TensorBoard, W&B, ...) by name.

    Raises ImportError where report_to names one and transformers is missing.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    names = [n for n in names if n not in ("none", "")]
    if not names:
        return []
    try:
        from transformers.integrations import get_reporting_integration_callbacks
    except ImportError as error:
        raise ImportError(
            f"report_to={names} goes through transformers' reporters; install "
            "ctrainer[hf], or set report_to='none'"
        ) from error
    return list(get_reporting_integration_callbacks(names))
