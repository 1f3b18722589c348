"""Sharded modules that torch computes on a device: torch's stream and NCCL's beside it
are late, as those of a GPU. Ranks are threads, each with a device; what comes out is
what the CPU gives."""

from __future__ import annotations

from typing import Any

import any_gpu
import pytest
import torch
from torch import nn

from ctrainer import _C
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp import options as fsdp_options

Values = dict[str, torch.Tensor]

pytestmark = pytest.mark.skipif(any_gpu.REAL, reason="ranks are threads of one GPU")


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    return any_gpu.device()


def trained(
    group: _C.Communicator, device: torch.device, **options: Any
) -> dict[str, torch.Tensor]:
    """What three updates make of the weights: two inner units and the root."""
    source = torch.Generator().manual_seed(5)
    first, second, last = nn.Linear(9, 16), nn.Linear(16, 16), nn.Linear(16, 3)
    for layer in (first, second, last):
        for param in layer.parameters():
            param.data = torch.randn(param.shape, generator=source) / 4
        layer.to(device)
    given: dict[str, Any] = {"on_neuron": False, "flatten_parameters": True}
    given |= {"process_group": group, **options}
    model = FSDP(
        nn.Sequential(FSDP(first, **given), nn.GELU(), FSDP(second, **given), last),
        **given,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    for step in range(6):
        batch = torch.randn(4, 9, generator=source.manual_seed(10 * step + group.rank))
        if step % 2 == 0:
            with model.no_sync():
                model(batch.to(device)).pow(2).mean().backward()
            continue
        model(batch.to(device)).pow(2).mean().backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in model.full_state_dict().items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compute_dtype": "bfloat16", "watch_released": True},
        {"gather_bits": 8, "reduce_bits": 4},
        {"forward_prefetch": True, "backward_prefetch": "BACKWARD_PRE"},
    ],
    ids=["plain", "bfloat16", "quantized", "prefetch"],
)
def test_updates_on_the_device_are_those_on_the_host(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(fsdp_options, "_usable", lambda device: device)
    cpu = torch.device("cpu")
    on_host = any_gpu.on_nccl_ranks(lambda group, _: trained(group, cpu, **options))
    on_device = any_gpu.on_nccl_ranks(lambda group, gpu: trained(group, gpu, **options))
    for host, device in zip(on_host, on_device, strict=True):
        assert host.keys() == device.keys()
        for name, value in host.items():
            torch.testing.assert_close(device[name], value, msg=name)


def test_no_memory_is_taken_after_the_second_update(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp_options, "_usable", lambda device: device)
    taken: dict[int, list[int]] = {0: [], 1: []}

    def update(group: _C.Communicator, device: torch.device) -> Values:
        model = FSDP(
            nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 3)).to(device),
            on_neuron=False, process_group=group, gather_bits=8, reduce_bits=8,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            model(torch.ones(2, 64, device=device)).sum().backward()
            model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            group.barrier()  # the count is of both ranks
            taken[group.rank].append(any_gpu.allocations())
            group.barrier()
        return {}

    any_gpu.on_nccl_ranks(update)
    for counts in taken.values():
        assert counts[1:] == [counts[1]] * 4
        assert counts[0] > 0  # it is counted
