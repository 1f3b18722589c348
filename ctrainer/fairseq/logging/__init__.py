"""Metrics, meters and progress bars, by the names of fairseq.logging."""

import sys

from ctrainer.fairseq import meters, metrics, progress_bar

__all__ = ["meters", "metrics", "progress_bar"]

for _module in (meters, metrics, progress_bar):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
