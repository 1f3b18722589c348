"""BMUF on a device: ranks that meet in the host's memory end with the host's bits,
where it is held against the original's formulas."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import any_gpu
import pytest
import ranks
import torch
from rank_threads import on_ranks

import ctrainer
from ctrainer import optim

UPDATES = 7
BASE: dict[str, Any] = {"warmup_iterations": 0, "global_sync_iter": 2}
WAYS: dict[str, dict[str, Any]] = {
    "momentum": BASE | {"block_momentum": 0.5},
    "mean": BASE | {"block_momentum": 0.0},
    "nesterov": BASE | {"block_momentum": 0.9, "use_nbm": True},
    "warm-up": {"warmup_iterations": 3, "global_sync_iter": 2},
    "moments": BASE | {"block_momentum": 0.5, "average_sync": True,
                       "warmup_iterations": 2},
    "8 bits": BASE | {"block_momentum": 0.5, "delta_bits": 8},
    "4 bits": BASE | {"block_momentum": 0.5, "delta_bits": 4},
    "overlapping": BASE | {"block_momentum": 0.5, "overlap_steps": 1},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def gpu() -> torch.device:
    return any_gpu.device()


def make(
    group: Any, device: Any, dtypes: list[torch.dtype], **options: Any
) -> tuple[ctrainer.BMUF, list[torch.nn.Parameter]]:
    draws = torch.Generator().manual_seed(7)
    params = [
        torch.nn.Parameter(torch.randn(n, generator=draws).to(device, dtype))
        for n, dtype in zip((5, 300, 1), dtypes, strict=True)
    ]
    inner = optim.Adam(params, lr=0.1)
    made = ctrainer.BMUF(SimpleNamespace(**options), inner, communicator=group)
    made._start()
    return made, params


def trained(
    group: Any, made: ctrainer.BMUF, params: list[torch.nn.Parameter], updates: range
) -> list[torch.Tensor]:
    for update in updates:
        draws = torch.Generator().manual_seed(100 * group.rank + update)
        for p in params:
            p.grad = torch.randn(p.shape, generator=draws).to(p.device, p.dtype)
        made.step()
    return [p.detach().cpu() for p in params]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("world", [2, 3])
def test_blocks_on_the_device_are_those_on_the_host(
    gpu: torch.device, name: str, world: int
) -> None:
    dtypes = [torch.float32, torch.float64 if world == 2 else torch.bfloat16] * 2

    def train(group: Any) -> Any:
        found = []
        for device in ("cpu", gpu):
            made, params = make(group, device, dtypes[:3], **WAYS[name])
            found.append(trained(group, made, params, range(UPDATES)))
            made.finish()
            found[-1] += [p.detach().cpu() for p in params]
            state = made.blocks_state_dict()
            for values in state.values():
                if isinstance(values, list) and torch.is_tensor(values[0]):
                    found[-1] += [v.cpu() for v in values]
        return found

    for here, there in on_ranks(world, train):
        assert len(here) == len(there) >= 6
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("saved_on_host", [True, False])
@pytest.mark.parametrize("name", ["momentum", "8 bits", "overlapping"])
def test_a_run_resumes_on_the_other_device(
    gpu: torch.device, name: str, saved_on_host: bool
) -> None:
    """In the middle of a block."""
    devices = ["cpu", gpu] if saved_on_host else [gpu, "cpu"]
    dtypes = [torch.float32] * 3

    def train(group: Any) -> Any:
        made, params = make(group, devices[0], dtypes, **WAYS[name])
        trained(group, made, params, range(5))
        values = [p.detach().cpu().clone() for p in params]
        state = made._optimizer.state_dict(), made.blocks_state_dict()
        inner, blocks = copy.deepcopy(state)  # as a file would
        other, others = make(group, devices[1], dtypes, **WAYS[name])
        with torch.no_grad():
            for p, value in zip(others, values, strict=True):
                p.copy_(value)
        other._optimizer.load_state_dict(inner)
        other.load_blocks_state_dict(blocks)
        return [
            trained(group, each, of, range(5, UPDATES))
            for each, of in ((made, params), (other, others))
        ]

    for whole, resumed in on_ranks(2, train):
        for a, b in zip(whole, resumed, strict=True):
            assert torch.equal(a, b)


def test_parameters_on_two_devices_are_named(gpu: torch.device) -> None:
    params = [torch.nn.Parameter(torch.ones(2, device=d)) for d in ("cpu", gpu)]
    inner = torch.optim.SGD(params, lr=0.1)

    def train(group: Any) -> None:
        with pytest.raises(ValueError, match="parameter 1 is on another device"):
            ctrainer.BMUF(SimpleNamespace(**BASE), inner, communicator=group)

    on_ranks(2, train)


@pytest.mark.parametrize("name", ["momentum", "overlapping"])
def test_parameters_that_move_in_a_block_are_told(gpu: torch.device, name: str) -> None:
    def train(group: Any) -> None:
        made, params = make(group, "cpu", [torch.float32] * 3, **WAYS[name])
        trained(group, made, params, range(3))
        moved = [torch.nn.Parameter(p.detach().to(gpu)) for p in params]
        made.optimizer.param_groups[0]["params"] = moved
        with pytest.raises(ValueError, match="when the block began"):
            trained(group, made, moved, range(3, 8))

    on_ranks(2, train)


@pytest.mark.skipif(any_gpu.REAL, reason="ranks are threads of one GPU")
@pytest.mark.parametrize("name", WAYS)
def test_blocks_over_nccl_are_behind_torchs_stream(name: str) -> None:
    dtypes = [torch.float32, torch.float64, torch.float32]

    def train(group: Any, device: torch.device) -> list[torch.Tensor]:
        made, params = make(group, device, dtypes, **WAYS[name])
        found = trained(group, made, params, range(UPDATES))
        made.finish()
        return found + [p.detach().cpu() for p in params]

    cpu = torch.device("cpu")
    on_host = any_gpu.on_nccl_ranks(lambda group, _: train(group, cpu))
    for here, there in zip(on_host, any_gpu.on_nccl_ranks(train), strict=True):
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a, b)


@pytest.mark.skipif(any_gpu.REAL, reason="NCCL needs a GPU for each rank")
def test_blocks_of_a_trainer_are_added_over_nccl(tmp_path: Path) -> None:
    first, second = ranks.told(ranks.run(tmp_path, "bmuf.on_gpus"))
    for found in (first, second):
        assert found["gpu"]
        assert found["same"]
    assert first["weights"] == second["weights"]
