"""8-bit state of shards that begin with a block of it is that of whole parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from rank_threads import on_ranks, seeded
from torch import nn

from ctrainer import _C, optim
from ctrainer.fsdp import FullyShardedDataParallel as FSDP


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Not a multiple of a block's 256 elements; each part is long enough for
        # 8 bits, and so is the whole.
        self.weight = nn.Parameter(torch.randn(160, 250))

    def forward(self, update: int) -> torch.Tensor:
        return (self.weight * (self.weight + update)).sum()


def train(model: Any) -> None:
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2)
    for update in range(3):
        optimizer.zero_grad()
        model(update).backward()
        optimizer.step()
    assert all(s["state1"].dtype == torch.uint8 for s in optimizer.state.values())


def test_shards_cut_on_blocks_are_updated_as_whole_parameters() -> None:
    with seeded(0):
        plain = Squares()
    copies = [copy.deepcopy(plain) for _ in range(2)]
    train(plain)

    def work(group: _C.Communicator) -> None:
        model = FSDP(
            copies[group.rank],
            process_group=group,
            on_neuron=False,
            _shard_size_multiple=256,
        )
        train(model)
        assert torch.equal(model.full_state_dict()["weight"], plain.weight)

    on_ranks(2, work)
