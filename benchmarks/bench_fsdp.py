"""Training a GPT on two ranks: sharded by us, by torch's FSDP, and copied by its DDP.

    python benchmarks/bench_fsdp.py [--steps 6] [--blocks 8] [--only ours ddp ...]

Each way of training runs alone, in two new processes of one thread each, on the same
batches: 29.5 million parameters in float32 (8 blocks of width 512, a vocabulary of
8192, tied), 4 sequences of 128 tokens a rank, AdamW, gradients clipped to 1, a unit a
block. The processor time of a step is user and system time of a rank, which other
programs disturb least; the memory is the most that a rank has had above what it had
after its imports, with malloc as it comes. Losses have to agree. Then 24 blocks of
width 32, whose processor time above DDP's is what it costs to shard a unit however
small.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

WORLD, BATCH, LENGTH, VOCABULARY = 2, 4, 128, 8192
WAYS = ("ours", "ddp", "fsdp1", "fsdp2", "fairscale")
PEERS = {"ddp": "torch's DDP", "fsdp1": "torch's FSDP1", "fsdp2": "torch's FSDP2",
         "fairscale": "fairscale's FSDP"}  # fmt: skip
PACKAGES = {"fairscale": "fairscale"}  # of ways that need one
MIB = 2**20


def make_gpt(width: int, blocks: int, wrap: Any) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.qkv = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def attend(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.qkv(x).view(*x.shape[:2], 3, -1, min(64, width))
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).flatten(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attend(self.norms[0](x))
            return x + self.down(functional.gelu(self.up(self.norms[1](x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, width)
            self.places = nn.Embedding(LENGTH, width)
            self.blocks = nn.ModuleList(wrap(Block()) for _ in range(blocks))
            self.norm = nn.LayerNorm(width)
            for table in (self.tokens, self.places):  # wider: a softmax of zeros
                nn.init.normal_(table.weight, std=0.02)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids) + self.places.weight
            for block in self.blocks:
                x = block(x)
            logits = functional.linear(self.norm(x), self.tokens.weight)
            return functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            )

    return wrap(GPT())


def wrapped(way: str, width: int, blocks: int, rank: int, folder: str) -> Any:
    """The model, and what clips its gradients."""
    import torch
    from torch.nn.utils import clip_grad_norm_

    if way == "ours":
        from ctrainer import _C
        from ctrainer.fsdp import FullyShardedDataParallel

        group = _C.shared_memory_communicator(folder, rank, WORLD, 120.0)
        model = make_gpt(
            width,
            blocks,
            lambda m: FullyShardedDataParallel(
                m, flatten_parameters=True, on_neuron=False, process_group=group
            ),
        )
        return model, model.clip_grad_norm_
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD
    )
    if way == "ddp":
        model = make_gpt(width, blocks, lambda m: m)
        model = torch.nn.parallel.DistributedDataParallel(model)
        return model, lambda most: clip_grad_norm_(model.parameters(), most)
    if way == "fairscale":
        return sharded_by_fairscale(width, blocks)
    if way == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

        model = make_gpt(
            width, blocks, lambda m: FSDP1(m, device_id=torch.device("cpu"))
        )
        return model, model.clip_grad_norm_
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    model = make_gpt(width, blocks, lambda m: fully_shard(m, mesh=mesh))
    return model, lambda most: clip_grad_norm_(model.parameters(), most)


class Idle:
    """A stream of a device that does its work at once."""

    def wait_stream(self, stream: object) -> None:
        pass


def sharded_by_fairscale(width: int, blocks: int) -> Any:
    """fairscale asks for CUDA's streams even where there is no GPU: they become things
    that wait for nothing."""
    import torch
    import torch.distributed as dist
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    os.environ["ENABLE_NCCL_BASE_COLLECTIVES"] = "0"  # gloo refuses their shapes
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    idle = Idle()
    cuda.current_stream, cuda.stream = lambda *unused: idle, contextlib.nullcontext
    cuda.synchronize = tensor.record_stream = lambda *unused: None
    from fairscale.nn import FullyShardedDataParallel

    class OnCPU(FullyShardedDataParallel):  # type: ignore[misc]
        def _setup_streams(self) -> None:
            super()._setup_streams()
            names = ("fp32_to_fp16", "all_gather", "post_backward")
            self._streams.update(dict.fromkeys(names, idle))

    def clip(most: float) -> None:  # its own brings the norm to a GPU
        parameters = list(model.parameters())
        norm = get_total_norm(p.grad for p in parameters if p.grad is not None)
        total = norm.square()
        dist.all_reduce(total)
        clip_grads_with_norm_(parameters, most, total.sqrt())

    cpu = torch.device("cpu")
    model = make_gpt(width, blocks, lambda m: OnCPU(m, compute_device=cpu))
    return model, clip


def status(name: str) -> float:
    """A line of this process's status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return float(line.split()[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run(way: str, rank: int, options: Any, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed.fsdp  # before memory is counted

    if way == "ours":  # whose settings of malloc and torch are not the peers'
        import ctrainer.fsdp  # noqa: F401

    torch.set_num_threads(1)
    before = status("VmRSS")
    torch.manual_seed(0)
    model, clip = wrapped(way, options.width, options.blocks, rank, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forget_peak()
    cpu, wall, losses = [], [], []
    for step in range(options.steps + 1):
        generator = torch.Generator().manual_seed(step * WORLD + rank)
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        began = time.process_time(), time.perf_counter()
        loss = model(ids)
        loss.backward()
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        spent = time.process_time() - began[0]
        losses.append(loss.item())
        if step > 0:
            cpu.append(spent)
            wall.append(time.perf_counter() - began[1])
    return {
        "cpu": statistics.median(cpu) * 1000,
        "wall": min(wall) * 1000,
        "memory": status("VmHWM") - before,
        "resident": status("VmRSS") - before,
        "losses": losses,
        "engine": model._unit.peak_bytes / MIB if way == "ours" else None,
        "shards": sum(p.numel() for p in model.parameters()) * 4 / MIB,
    }


def rank_main(way: str, rank: int, options: Any, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    path = Path(folder) / f"told{rank}.json"
    path.write_text(json.dumps(run(way, rank, options, folder)))


def measure(way: str, options: Any) -> dict[str, Any]:
    """Of rank 0; losses are both ranks' average."""
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            start.Process(target=rank_main, args=(way, r, options, folder), daemon=True)
            for r in range(WORLD)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"{way} ended with {process.exitcode}")
        told = [
            json.loads((Path(folder) / f"told{r}.json").read_text())
            for r in range(WORLD)
        ]
    pairs = zip(*(t["losses"] for t in told), strict=True)
    return {**told[0], "losses": [sum(pair) / WORLD for pair in pairs]}


def cost_of_units(way: str, plain: float, options: Any) -> float:
    """Processor time of a step above that of `plain`, in ms a unit."""
    above = (measure(way, options)["cpu"] - plain) / (options.blocks + 1)
    return max(above, 1e-3)  # below that it is noise


def compare_units() -> None:
    options = argparse.Namespace(steps=12, blocks=24, width=32)
    plain = measure("ddp", options)["cpu"]
    ours = cost_of_units("ours", plain, options)
    name = "GPT of 24 tiny blocks on 2 ranks: processor time of a unit above DDP's"
    for way, goal in (("fsdp1", None), ("fsdp2", 16.0)):
        theirs = cost_of_units(way, plain, options)
        compare(name, "ms", ours, PEERS[way], theirs, goal)


def compare(name: str, unit: str, ours: float, peer: str, theirs: float,
            goal: float | None = None) -> None:  # fmt: skip
    row = {"name": name, "unit": unit, "ours": ours, "peer": peer, "theirs": theirs}
    print(json.dumps({**row, "ratio": theirs / ours, "goal": goal}), flush=True)


def there(ways: list[str]) -> list[str]:
    """Those whose packages are installed."""
    missing = [
        way
        for way in ways
        if way in PACKAGES and importlib.util.find_spec(PACKAGES[way]) is None
    ]
    for way in missing:
        print(f"without {PEERS[way]}: {PACKAGES[way]} is not installed", flush=True)
    return [way for way in ways if way not in missing]


def parsed() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--only", nargs="*", default=WAYS, choices=WAYS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    found = {way: measure(way, options) for way in there(options.only)}
    for way, told in found.items():
        print(json.dumps({"way": way, **told}), flush=True)
    ours = found.pop("ours", None)
    for way, theirs in found.items() if ours else ():
        apart = max(
            abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)
        )
        if apart > 1e-3:
            raise SystemExit(f"losses differ from those of {way} by {apart}")
        goal = 1.09 if way == "ddp" else 1.0
        what = "GPT of 29.5M parameters on 2 ranks, sharded"
        compare(f"{what}: processor time of a step", "ms", ours["cpu"], PEERS[way],
                theirs["cpu"], goal)  # fmt: skip
        compare(f"{what}: memory of a rank", "MiB", ours["memory"], PEERS[way],
                theirs["memory"])  # fmt: skip
    if set(options.only) == set(WAYS):
        compare_units()


if __name__ == "__main__":
    main()
