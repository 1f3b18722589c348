"""A sharded module in a GPU's memory, with the plugin that nvcc has made."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
cuda = pytest.importorskip("ctrainer._cuda")

from torch import nn  # noqa: E402

from ctrainer.fsdp import FullyShardedDataParallel as FSDP  # noqa: E402

pytestmark = pytest.mark.skipif(
    cuda.device_count() == 0 or not torch.cuda.is_available(), reason="needs a GPU"
)


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
    return nn.Sequential(*layers).cuda()


def test_updates_are_those_of_the_whole_module() -> None:
    whole, inner = model(), model()
    inner[0], inner[2] = (
        FSDP(inner[0], on_neuron=False),
        FSDP(inner[2], on_neuron=False),
    )
    sharded = FSDP(inner, on_neuron=False)
    assert all(shard.is_cuda for shard in sharded.parameters())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (whole, sharded)]
    for step in range(3):
        x = torch.randn(4, 8, device="cuda") + step
        for each, optimizer in zip((whole, sharded), optimizers, strict=True):
            each(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sharded._unit.live_bytes == 0
    for name, value in sharded.full_state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name])


def test_a_stream_of_the_users_orders_the_units_work() -> None:
    sharded = FSDP(model(), on_neuron=False, reshard_after_forward=True)
    x = torch.randn(64, 8, device="cuda")
    torch.cuda.synchronize()
    expected = sharded(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(20):
            found = sharded(x)
    side.synchronize()
    assert torch.equal(found, expected)


def test_a_copy_has_the_values_of_its_source() -> None:
    sharded = FSDP(model(), on_neuron=False, compute_dtype="bfloat16")
    twin = copy.deepcopy(sharded)
    assert torch.equal(
        twin.full_state_dict()["0.weight"], sharded.full_state_dict()["0.weight"]
    )
