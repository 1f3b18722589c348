"""Data-parallel modules on a device: gradients, buffers and weights are those of the
same ranks on the host, where they are held against torch's wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import any_gpu
import pytest
import ranks
import torch
from rank_threads import on_ranks
from torch import nn

from ctrainer import _C
from ctrainer.comm import nccl, parallel


def test_training_is_that_on_the_host(tmp_path: Path) -> None:
    for found in ranks.told(ranks.run(tmp_path, "ddp.on_device")):
        assert "parameter '1.weight' is on another device" in found.pop("two devices")
        assert len(found) == 10
        assert {
            name: d for name, d in found.items() if not 0 <= d <= any_gpu.LIMIT
        } == {}


@pytest.mark.parametrize("how", ["no", "bf16"])
def test_gradients_are_reduced_over_nccl(how: str) -> None:
    gpu = any_gpu.device()

    def reduce(group: _C.Communicator) -> list[list[torch.Tensor]]:
        stream = torch.cuda.current_stream().cuda_stream if any_gpu.REAL else 0
        over = nccl.communicator(group, 60.0, stream=stream)
        found = []
        for each, device in ((group, "cpu"), (over, gpu)):
            draws = torch.Generator().manual_seed(group.rank)
            sizes = (3, 7, 300_000, 1)
            params = [nn.Parameter(torch.zeros(n, device=device)) for n in sizes]
            names = [f"p{i}" for i in range(len(params))]
            given: list[Any] = [each, params, names, parallel.allocate]
            reducer = _C.GradReducer(*given, bucket_cap_mb=1e-5)
            reducer.compress(how)
            for _ in range(3):
                for p in params[1:]:
                    p.grad = torch.randn(p.shape, generator=draws).to(device)
                reducer.reduce()
                found.append([p.grad.cpu().clone() for p in params])
        over.close()
        return found

    for found in on_ranks(2, reduce):
        for here, there in zip(found[:3], found[3:], strict=True):
            for a, b in zip(here, there, strict=True):
                assert torch.equal(a, b)
