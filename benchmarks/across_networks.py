"""Updates of a sharded model on two machines of two ranks, which a link of a given rate
joins, against torch's FSDP2 over gloo: seconds, and the bytes that a machine sends.

The machines are network name spaces of this one (tests/support/networks.py), which the
user must have the right to make. All ways have the same blocks in float32 and take
turns; a figure is the median of the turns. Prints JSON lines.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import networks
import torch
import torch.distributed as dist
from torch import nn

WIDTH, BLOCKS, ROWS = 512, 8, 4
OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "secondary_shards": {"secondary_shards": 2},
    "and 8-bit parameters, 4-bit gradients": {
        "secondary_shards": 2, "gather_bits": 8, "reduce_bits": 4,
    },
}  # fmt: skip


def blocks() -> Any:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*layers)


def ours(options: dict[str, Any]) -> nn.Module:
    from ctrainer import comm
    from ctrainer.fsdp import FullyShardedDataParallel as FSDP

    common = {"process_group": comm.world(), "on_neuron": False,
              "flatten_parameters": True, **options}  # fmt: skip
    module = blocks()
    for i in range(BLOCKS):
        module[i] = FSDP(module[i], **common)
    return FSDP(module, **common)


def theirs() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module: nn.Module = blocks()
    for block in module.children():
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def update_of(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(ROWS, WIDTH)

    def update() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def rank(turns: int) -> None:
    """One of the four: the first prints the medians."""
    import ctrainer.comm

    torch.set_num_threads(1)
    ctrainer.comm.world(300.0)
    updates = {"FSDP2 over gloo": update_of(theirs())}
    updates |= {name: update_of(ours(options)) for name, options in OURS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    sent: dict[str, list[int]] = {name: [] for name in updates}
    for turn in range(turns + 1):  # the first is not counted
        for name, update in updates.items():
            dist.barrier()
            before, began = networks.sent_bytes(), time.perf_counter()
            update()
            dist.barrier()
            if turn > 0:
                seconds[name].append(time.perf_counter() - began)
                sent[name].append(networks.sent_bytes() - before)
    if dist.get_rank() == 0:
        for name in updates:
            row = {"name": name, "seconds": statistics.median(seconds[name]),
                   "megabytes": statistics.median(sent[name]) / 1e6}  # fmt: skip
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rates", type=int, nargs="+", default=[1000, 200])
    parser.add_argument("--rank", action="store_true", help="of the ranks themselves")
    given = parser.parse_args()
    if given.rank:
        rank(given.turns)
        return
    if not networks.can_be_made():
        sys.exit("needs unshare, ip and the right to make network name spaces")
    for rate in given.rates:
        with tempfile.TemporaryDirectory() as folder:
            command = [__file__, "--rank", "--turns", str(given.turns)]
            first, *_ = networks.run(Path(folder), rate, command, seconds=540)
            held = networks.is_limited(Path(folder))
        for line in first.splitlines():
            if line.startswith("{"):
                row = {"rate_mbit": rate if held else None, **json.loads(line)}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
