"""The device that the benchmarks for a GPU run on: torch's own GPU, or with
CTRAINER_EMULATED=1 the emulated one of the tests, to rehearse them."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import torch

EMULATED = os.environ.get("CTRAINER_EMULATED") == "1"


@functools.cache
def device() -> torch.device:
    if not EMULATED:
        return torch.device("cuda", torch.cuda.current_device())
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
    import emulated_torch

    return emulated_torch.device()


def wait(tensor: torch.Tensor) -> None:
    """Until the work on the tensor's device has ended."""
    if EMULATED:
        tensor.detach().flatten()[:1].cpu()
    else:
        torch.cuda.synchronize()
