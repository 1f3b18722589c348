"""linear_cross_entropy on a device gives the host's losses and gradients."""

from __future__ import annotations

from typing import Any

import any_gpu
import pytest
import torch

from ctrainer import _C, linear_cross_entropy


@pytest.fixture(scope="module", autouse=True)
def gpu() -> torch.device:
    return any_gpu.device()


def run(place: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(3)
    hidden, weight = 0.3 * torch.randn(40, 8), torch.randn(300, 8)
    leaves = [t.to(place, dtype).requires_grad_() for t in (hidden, weight)]
    labels = torch.randint(0, 300, (40,))
    labels[::5] = -100
    loss = linear_cross_entropy(
        *leaves, labels.to(place), label_smoothing=0.1, chunk_rows=9
    )
    loss.backward()
    return [t.detach().cpu() for t in (loss, leaves[0].grad, leaves[1].grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_the_host(
    gpu: torch.device, dtype: torch.dtype
) -> None:
    """But for the order of sums: bfloat16 rounds some elements to the neighbour."""
    bound = 1e-6 if dtype == torch.float32 else 2**-7
    for mine, theirs in zip(run(gpu, dtype), run("cpu", dtype), strict=True):
        assert (mine - theirs).norm() <= bound * theirs.norm()


def test_a_label_of_no_class_makes_the_loss_nan(gpu: torch.device) -> None:
    hidden, weight = torch.zeros(3, 4, device=gpu), torch.zeros(5, 4, device=gpu)
    labels = torch.tensor([0, 5, 1]).to(gpu)
    assert linear_cross_entropy(hidden, weight, labels).cpu().isnan()


def test_operands_on_two_devices_are_named(gpu: torch.device) -> None:
    logits = torch.zeros(2, 3, device=gpu)
    with pytest.raises(ValueError, match="targets is on another device"):
        _C.cross_entropy(
            logits, torch.zeros(2, dtype=torch.int64), torch.zeros(2).double()
        )
