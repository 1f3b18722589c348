"""The GPU of tests/device: the emulated one, or a real one for CTRAINER_TEST_GPU=1."""

from __future__ import annotations

import os

import emulated_torch
import pytest
import torch

REAL = os.environ.get("CTRAINER_TEST_GPU") == "1"
KIND = "cuda" if REAL else "emul"
# The emulated device computes a model's passes as the host does. A GPU adds in another
# order, in bf16 and fp16 with other roundings, and of a gradient near 0 each of Adam's
# updates of 1e-2 may then have the other sign.
LIMIT = 2e-2 if REAL else 0.0
DROPOUT = 0.0 if REAL else 0.2  # torch draws otherwise on a GPU


def device() -> torch.device:
    return torch.device("cuda", 0) if REAL else emulated_torch.device()


def allocations() -> int:
    """How often the plugin has taken memory so far."""
    if REAL:
        pytest.skip("a GPU's driver does not count allocations")
    return emulated_torch.allocations()


def assert_same(found: torch.Tensor, expected: torch.Tensor, close: float = 0) -> None:
    """What a run on the GPU has come to is what one on the host has: to `close`, on a
    real GPU to LIMIT at least."""
    limit = max(close, LIMIT)
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=limit, atol=limit)
