"""ctrainer.optim against torch.optim: the same numbers, the same state, live groups."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from ctrainer import optim

SHAPES = [(3, 4), (5,), (2, 2, 2), ()]
Make = Callable[..., torch.optim.Optimizer]


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return (torch.randn(s, generator=generator).to(dtype) for s in SHAPES)


def set_gradients(params: list[Parameter], step: int) -> None:
    for param, grad in zip(params, gradients(step, params[0].dtype), strict=True):
        param.grad = grad


CASES = [
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "maximize": True}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sixty_steps_equal_torch(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    opt = getattr(optim, name)(
        [{"params": ours[:2]}, {"params": ours[2:], "lr": 0.003}], **options
    )
    ref = getattr(torch.optim, name)(
        [{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.003}], **options
    )
    for step in range(60):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        if step % 7 == 3:
            ours[1].grad = theirs[1].grad = None
        for group in (*opt.param_groups, *ref.param_groups):
            group["lr"] *= 0.98
        opt.step()
        ref.step()
    # A step's rounding differs by a few ulp of the update, which is below lr in size.
    bound = 60 * 4 * torch.finfo(dtype).eps
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)
