"""Data-parallel training on a device and on the host, by the same ranks. In processes:
torch runs the backward passes of all threads on one GPU in one thread."""

import copy
from collections.abc import Callable
from typing import Any

import any_gpu
import torch
from programs.run import folder, rank, tell, world
from torch import nn

import ctrainer
from ctrainer import _C, optim
from ctrainer.compat import fairscale

UNUSED: dict[str, Any] = {"find_unused_parameters": True}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 1e-4},
    "not views": {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": False},
    "unused": UNUSED,
    "static": {"static_graph": True, "bucket_cap_mb": 1e-3},
    "fp16": {"comm_hook": "fp16"},
    "bf16": UNUSED | {"comm_hook": "bf16", "bucket_cap_mb": 1e-4},
}
Values = list[torch.Tensor]

gpu = any_gpu.device()
group = _C.shared_memory_communicator(folder, rank, world, 60.0)


class Model(nn.Module):
    """With buffers, two dtypes, a weight that is exchanged in place and, if asked for,
    a layer that some passes leave out."""

    mean: torch.Tensor
    passes: torch.Tensor

    def __init__(self, leaves_out: bool) -> None:
        super().__init__()
        torch.manual_seed(rank)  # the ranks' differ
        self.first = nn.Linear(6, 8)
        self.second, self.last = nn.Linear(8, 50_000), nn.Linear(8, 3).double()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.leaves_out = leaves_out

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        y = torch.tanh(self.first(x)) - self.mean
        self.mean.add_(y.detach().mean(0) / 2)
        self.passes.add_(1)
        leaves_out = self.leaves_out and (index + rank) % 2 == 0
        long = torch.zeros(()) if leaves_out else self.second(y[:1]).mean() * self.scale
        return self.last(y.double()).pow(2).mean() + long.to(x.device)


def batch(index: int, device: Any) -> torch.Tensor:
    draws = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(5, 6, generator=draws).to(device)


def values(module: nn.Module) -> Values:
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    tensors = [*module.state_dict().values(), *grads]
    return [t.detach().cpu().clone() for t in tensors]


def train(module: nn.Module, optimizer: Any, device: Any, passes: int) -> Values:
    found = []
    for index in range(passes):
        if index == 2:
            with module.no_sync():  # type: ignore[operator]
                module(batch(50, device), 1).backward()
        module(batch(index, device), index).backward()
        found += values(module)
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 2 == 0)
    return found + values(module)


def replicated(model: nn.Module, device: Any, options: dict[str, Any]) -> Values:
    module = ctrainer.DataParallel(model.to(device), group, **options)
    return train(module, optim.SGD(module.parameters(), lr=0.1), device, 4)


def uneven(model: nn.Module, device: Any, _: Any) -> Values:
    module = ctrainer.DataParallel(model.to(device), group, bucket_cap_mb=1e-3)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    with module.join():
        train(module, optimizer, device, 2 - rank)
    return values(module)


def owned(model: nn.Module, device: Any, options: dict[str, Any]) -> Values:
    model.to(device)
    oss = fairscale.OSS(model.parameters(), optim.SGD, lr=0.1, group=group)
    module = fairscale.ShardedDataParallel(model, oss, process_group=group, **options)
    return train(module, oss, device, 2)


def largest_difference(work: Callable[..., Values], options: dict[str, Any]) -> float:
    """Between the host's tensors and the device's; -1 where they are not as many."""
    model = Model(options.get("find_unused_parameters", False))
    here, there = (work(copy.deepcopy(model), d, options) for d in ("cpu", gpu))
    if [t.shape for t in here] != [t.shape for t in there] or not here:
        return -1.0
    return max(float((a - b).abs().max()) for a, b in zip(here, there, strict=True))


told: dict[str, Any] = {
    name: largest_difference(replicated, options) for name, options in WAYS.items()
}
told["over NCCL"] = 0.0 if group.gpu == 0 else -1.0
told["uneven"] = largest_difference(uneven, {})
told["owned"] = largest_difference(owned, {})
told["owned, fp16"] = largest_difference(owned, {"reduce_fp16": True})
try:
    ctrainer.DataParallel(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(gpu)), group
    )
except ValueError as error:
    told["two devices"] = str(error)
tell(told)
