"""Collectives of 2 processes through shared memory against torch's gloo, and MPICH's
where its wheel and mpi4py are installed; the end of a block of BMUF against fairseq's
loop over tensors, stated here in torch.

The two take turns; each figure is the median of the turns. Prints JSON lines.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ranks
import torch
import torch.distributed as dist

import ctrainer
from ctrainer.comm import from_environment, process_group

RANKS = 2
SIZES = {"1 KB": 1 << 10, "64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24,
         "100 MB": 100 << 20}  # fmt: skip
GOALS = {("all_gather", "16 MB"): 10.0, ("reduce_scatter", "16 MB"): 10.0}
# Parameters, and the goals through shared memory and over gloo
BLOCKS = {"25M": (25_000_000, 3.0, 1.7), "1M": (1_000_000, 50.0, 20.0)}
N_TENSORS = 200
MOMENTUM, LR = 0.9, 0.7

Action = Callable[[], Any]
Peer = dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]


def turns(group: ctrainer.Communicator, ours: Action, theirs: Action, n: int) -> Any:
    """Medians of both in seconds, on this rank; ranks start each turn together."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(n):
        for action, taken in zip((ours, theirs), times, strict=True):
            group.barrier()
            began = time.perf_counter()
            action()
            taken.append(time.perf_counter() - began)
    return tuple(map(statistics.median, times))


def tell(
    name: str, peer: str, medians: tuple[float, float], goal: float | None
) -> None:
    ours, theirs = medians
    unit, scale = ("us", 1e6) if theirs < 1e-3 else ("ms", 1e3)
    row = {"name": name, "unit": unit, "ours": ours * scale, "peer": peer,
           "theirs": theirs * scale, "ratio": theirs / ours, "goal": goal}  # fmt: skip
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)


def gloo() -> Peer:
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return {
        "all_reduce": lambda whole, part: dist.all_reduce(whole),
        "reduce_scatter": lambda whole, part: scatter(part, whole),
        "all_gather": lambda whole, part: gather(whole, part),
    }


def mpi() -> Peer | None:
    """MPI's, where its launcher has started the ranks."""
    if "PMI_RANK" not in os.environ:
        return None
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return {
        "all_reduce": lambda whole, part: world.Allreduce(MPI.IN_PLACE, whole.numpy()),
        "reduce_scatter": lambda whole, part: world.Reduce_scatter_block(
            whole.numpy(), part.numpy()
        ),
        "all_gather": lambda whole, part: world.Allgather(part.numpy(), whole.numpy()),
    }


def tensors(
    group: ctrainer.Communicator, n_bytes: int, dtype: torch.dtype, is_shared: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if not is_shared:
        n = n_bytes // dtype.itemsize
        return torch.zeros(n, dtype=dtype), torch.zeros(n // RANKS, dtype=dtype)
    whole, part = (group.memory(n) for n in (n_bytes, n_bytes // RANKS))
    return torch.frombuffer(whole, dtype=dtype), torch.frombuffer(part, dtype=dtype)


def compare(
    group: ctrainer.Communicator, size: str, name: str, peer: Peer, repeat: int,
    dtype: torch.dtype = torch.float32, is_shared: bool = False,
) -> None:  # fmt: skip
    """Our three collectives against a peer's, on tensors of `size`.

    is_shared: what ours reads lies in memory of the group; what the peer does is the
    same, on memory of its own.
    """
    n_bytes = SIZES[size]
    whole, part = tensors(group, n_bytes, dtype, is_shared)
    result, piece = tensors(group, n_bytes, dtype, False)
    ours: dict[str, Action] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "reduce_scatter": lambda: group.reduce_scatter(piece, whole),
        "all_gather": lambda: group.all_gather(result, part),
    }
    kind = "" if dtype == torch.float32 else f" of {str(dtype).removeprefix('torch.')}"
    where = ", in memory()" if is_shared else ""
    for what, action in ours.items():
        other = peer[what]
        medians = turns(group, action, lambda o=other: o(result, piece), repeat)
        goal = GOALS.get((what, size)) if name == "gloo" and is_shared else None
        tell(f"{what} of {size}{kind}, 2 processes{where}", name, medians, goal)


def gather_in_place(group: ctrainer.Communicator, peer: Peer, repeat: int) -> None:
    """all_gather of 16 MB whose result has this rank's part in its place already."""
    whole, _ = tensors(group, SIZES["16 MB"], torch.float32, True)
    result, _ = tensors(group, SIZES["16 MB"], torch.float32, False)
    ours, theirs = (t.view(RANKS, -1)[group.rank] for t in (whole, result))
    medians = turns(group, lambda: group.all_gather(whole, ours),
                    lambda: peer["all_gather"](result, theirs), repeat)  # fmt: skip
    name = "all_gather of 16 MB, 2 processes, in memory(), own part in place"
    tell(name, "gloo", medians, None)


def collectives(group: ctrainer.Communicator, quick: bool) -> None:
    for size, n_bytes in SIZES.items():
        repeat = 5 if quick or n_bytes > 1 << 25 else 21 if n_bytes > 1 << 20 else 101
        compare(group, size, "gloo", gloo(), repeat)
    repeat = 5 if quick else 21
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        compare(group, "16 MB", "gloo", gloo(), repeat, dtype, True)
    gather_in_place(group, gloo(), repeat)
    other = mpi()
    if other is not None:
        compare(group, "16 MB", "MPICH", other, repeat, is_shared=True)


class Loop:
    """fairseq's end of a block: a pass and a collective for each tensor."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        self.model = [p.detach().clone() for p in params]
        self.smoothed = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def meet(self) -> None:
        deltas = [m - p.data for m, p in zip(self.model, self.params, strict=True)]
        for delta in deltas:
            delta /= float(RANKS)
            dist.all_reduce(delta, op=dist.ReduceOp.SUM)
        for i, (param, model) in enumerate(zip(self.params, self.model, strict=True)):
            smoothed = MOMENTUM * self.smoothed[i] + LR * deltas[i]
            param.data.copy_(model - smoothed)
            self.smoothed[i] = smoothed
            model.copy_(param.data)


def parameters(n: int) -> list[torch.nn.Parameter]:
    alike = torch.Generator().manual_seed(0)
    length = n // N_TENSORS
    return [
        torch.nn.Parameter(torch.randn(length, generator=alike))
        for _ in range(N_TENSORS)
    ]


def ends_of_blocks(group: ctrainer.Communicator, quick: bool) -> None:
    cfg = SimpleNamespace(global_sync_iter=1, warmup_iterations=0, block_lr=LR,
                          block_momentum=MOMENTUM)  # fmt: skip
    ways = (("", group), (", over gloo", process_group.communicator()))
    for size, (n, *goals) in BLOCKS.items():
        for (way, communicator), goal in zip(ways, goals, strict=True):
            params = parameters(n)  # without gradients, SGD's step is nothing
            bmuf = ctrainer.BMUF(cfg, torch.optim.SGD(params, lr=0.1), communicator)
            loop = Loop(parameters(n))
            medians = turns(group, bmuf.step, loop.meet, 3 if quick else 11)
            tell(f"end of a block of BMUF, {size} parameters in 200 tensors{way}",
                 "fairseq's loop over gloo", medians, goal)  # fmt: skip


def be_rank(quick: bool) -> None:
    torch.set_num_threads(1)
    group = from_environment(120.0)
    dist.init_process_group("gloo")
    collectives(group, quick)
    ends_of_blocks(group, quick)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few turns")
    options = parser.parse_args()
    if "PMI_RANK" in os.environ:
        os.environ["RANK"] = os.environ["PMI_RANK"]
    if "RANK" in os.environ:
        be_rank(options.quick)
        return
    mpiexec = Path(sys.executable).with_name("mpiexec")  # of the mpich wheel
    if mpiexec.exists() and importlib.util.find_spec("mpi4py") is not None:
        command = [str(mpiexec), "-n", str(RANKS), *ranks.COMMAND]
        sys.exit(subprocess.run(command, env=ranks.job(RANKS)).returncode)
    sys.exit(ranks.start(RANKS))


if __name__ == "__main__":
    main()
