"""Data-parallel modules on a device: gradients, buffers and weights are those of the
same ranks on the host, where they are held against torch's wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import any_gpu
import pytest
import ranks
import torch
from torch import nn

from ctrainer import _C
from ctrainer.comm import parallel


@pytest.mark.skipif(any_gpu.REAL, reason="NCCL needs a GPU for each rank")
def test_training_is_that_on_the_host(tmp_path: Path) -> None:
    for found in ranks.told(ranks.run(tmp_path, "ddp.on_device")):
        assert "parameter '1.weight' is on another device" in found.pop("two devices")
        assert len(found) == 11
        assert {n: d for n, d in found.items() if not 0 <= d <= any_gpu.LIMIT} == {}


@pytest.mark.skipif(any_gpu.REAL, reason="ranks are threads of one GPU")
@pytest.mark.parametrize("how", ["no", "bf16"])
def test_gradients_are_reduced_over_nccl(how: str) -> None:
    cpu = torch.device("cpu")

    def reduced(group: _C.Communicator, device: torch.device) -> list[torch.Tensor]:
        draws = torch.Generator().manual_seed(group.rank)
        sizes = (3, 7, 300_000, 1)
        params = [nn.Parameter(torch.zeros(n, device=device)) for n in sizes]
        names = [f"p{i}" for i in range(len(params))]
        given: list[Any] = [group, params, names, parallel.allocate]
        reducer = _C.GradReducer(*given, bucket_cap_mb=1e-5)
        reducer.compress(how)
        found = []
        for _ in range(3):
            for p in params[1:]:
                p.grad = torch.randn(p.shape, generator=draws).to(device)
            reducer.reduce()
            found += [p.grad.cpu().clone() for p in params if p.grad is not None]
        return found

    on_host = any_gpu.on_nccl_ranks(lambda group, _: reduced(group, cpu))
    for here, there in zip(on_host, any_gpu.on_nccl_ranks(reduced), strict=True):
        assert len(here) == len(there) == 12
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a, b)
