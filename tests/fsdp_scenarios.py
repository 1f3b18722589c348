"""What every rank of a group does with sharded modules, and what has to come out.

Each scenario is called on all ranks with a communicator. The reference is the same
module in one process, on the batches of all ranks; its loss is their average.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ctrainer.fsdp import FullyShardedDataParallel as FSDP

WIDTH = 6


def tree(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 10),
        nn.Tanh(),
        nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10)),
        nn.Linear(10, 4),
    )


def batch(step: int, group: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets: this rank's part, or everybody's."""
    generator = torch.Generator().manual_seed(step)
    both = (
        torch.randn(8, WIDTH, generator=generator),
        torch.randn(8, 4, generator=generator),
    )
    if group is None:
        return both
    x, y = (t.chunk(group.world_size)[group.rank] for t in both)
    return x, y


def mse(model: nn.Module, step: int, group: Any = None) -> torch.Tensor:
    x, y = batch(step, group)
    return ((model(x) - y) ** 2).mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def wrap(group: Any, module: nn.Module, **options: Any) -> FSDP:
    return FSDP(
        module,
        **{
            "process_group": group,
            "on_neuron": False,
            "watch_released": True,
            "flatten_parameters": True,
            **options,
        },
    )


def nested(group: Any, module: nn.Sequential, **options: Any) -> FSDP:
    module[2] = wrap(group, module[2], **options)
    return wrap(group, module, **options)


def averaged(group: Any, value: float) -> float:
    box = torch.tensor([value], dtype=torch.float64)
    group.all_reduce(box, "mean")
    return float(box)


def check_same(
    group: Any,
    sharded: FSDP,
    plain: nn.Module,
    steps: int = 4,
    loss: Callable[..., torch.Tensor] = mse,
    bound: float = 2e-6,
) -> None:
    """Train both; the losses, norms and parameters have to agree.

    bound: a few roundings of float32 at values below 4, which the order of sums over
    the batch changes.
    """
    optimizers = [adamw(sharded), adamw(plain)]
    for step in range(steps):
        own, whole = loss(sharded, step, group), loss(plain, step)
        own.backward()
        whole.backward()
        norm = sharded.clip_grad_norm_(1.0)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert abs(averaged(group, own.item()) - whole.item()) < bound
        assert abs(float(norm) - float(expected)) < bound
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_parameters(sharded, plain, bound)


def check_parameters(sharded: FSDP, plain: nn.Module, bound: float = 2e-6) -> None:
    found, expected = sharded.full_state_dict(), plain.state_dict()
    assert list(found) == list(expected) or set(found) == set(expected)
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < bound, name


# ---- layouts and options


def scenario_every_layout_trains_like_one_process(group: Any) -> None:
    layouts: list[dict[str, Any]] = [
        {},
        {"flatten_parameters": False},
        {"flatten_parameters": False, "on_neuron": True},
        {"flatten_parameters": False, "shard_param_on_dim_0": True},
        {"_shard_size_multiple": 1},
        {"reshard_after_forward": False},
        {"disable_reshard_on_root": False},
    ]
    for layout in layouts:
        plain = tree()
        check_same(group, nested(group, copy.deepcopy(plain), **layout), plain)
