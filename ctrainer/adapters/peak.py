"""The peak speeds of GPUs, for the model FLOPs utilization in the log."""

from __future__ import annotations

import re
from typing import Any

# bfloat16 and float16 on dense matrices, in 10^12 operations a second, from the
# vendor's data sheets; the first name that the device's name has counts.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100 80GB HBM3": 989.0,
    "A100": 312.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
}


def peak_of(name: str) -> float | None:
    """The peak of a GPU by its name; None for another, and for a part of one."""
    if "MIG" in name:
        return None
    found = (
        peak for gpu, peak in PEAK_TFLOPS.items() if re.search(rf"\b{gpu}\b", name)
    )
    return next(found, None)


def device_peak(args: Any) -> float | None:
    """Peak of one device of the run in 10^12 operations a second: peak_tflops; else of
    a known GPU in bf16 or fp16; None where neither says."""
    if getattr(args, "peak_tflops", None) is not None:
        return float(args.peak_tflops)
    if getattr(args.device, "type", "cpu") != "cuda" or not (args.bf16 or args.fp16):
        return None
    import torch

    return peak_of(torch.cuda.get_device_name(args.device))
