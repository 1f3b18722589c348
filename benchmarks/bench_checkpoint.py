"""A checkpoint of 50M parameters with AdamW's state: how long training stands still.

Against torch.save and torch.load of the same, in alternation in one process, medians.
torch.save is not synchronised to the disk; ours is, after training has gone on. The
snapshot's memory is readied in the background before, as a Trainer does; that and the
first save are told apart. Then the same model in shards on two ranks, each of which
saves its own, by one thread. Prints JSON lines. --gpu: on the GPU, where a time goes
from an idle GPU to an idle GPU, so that copies count; saves on one rank alone. --small:
few parameters.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ranks
import torch
from gpu_device import device, wait

from ctrainer.adapters import _torch_checkpoint as files
from ctrainer.checkpoint import CheckpointWriter, Sink, load_safetensors_into
from ctrainer.comm import world
from ctrainer.fsdp import FullyShardedDataParallel, trained_model

WIDTH, LAYERS = 1024, 48  # 50.4M parameters
RANKS = 2


def make(
    width: int, place: torch.device, shards: bool = False
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    layers = [torch.nn.Linear(width, width) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).to(place)
    if shards:
        model = FullyShardedDataParallel(model, on_neuron=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Bench:
    """Saves and loads of one model, ours and torch's."""

    def __init__(self, root: Path, width: int, on_gpu: bool) -> None:
        place = device() if on_gpu else torch.device("cpu")
        self.model, self.optimizer = make(width, place)
        self.on_gpu = on_gpu
        self.writer = CheckpointWriter()
        self.ours, self.theirs = root / "ours" / "checkpoint-1", root / "theirs"
        self.theirs.mkdir()

    def save_ours(self) -> None:
        folder = self.writer.begin(self.ours)
        sink = Sink(folder, self.writer)
        files.save_model(sink, self.model, None)
        files.save_object(sink, "optimizer.pt", self.optimizer.state_dict())
        self.writer.commit()
        self.settle()

    def settle(self) -> None:
        """Until the GPU is idle."""
        if self.on_gpu:
            wait(next(self.model.parameters()))

    def reserve(self) -> None:
        """As a Trainer does at its start."""
        nbytes, like = files.snapshot_bytes(self.model, self.optimizer)
        self.writer.reserve(nbytes + nbytes // 64 + (1 << 20), like)

    def save_theirs(self) -> None:
        torch.save(self.model.state_dict(), self.theirs / "model.pt")
        torch.save(self.optimizer.state_dict(), self.theirs / "optimizer.pt")

    def load_weights_ours(self) -> None:
        state = self.model.state_dict()
        load_safetensors_into(self.ours / "model.safetensors", state)

    def load_weights_theirs(self) -> None:
        state = torch.load(self.theirs / "model.pt", weights_only=True)
        self.model.load_state_dict(state)

    def load_ours(self) -> None:
        self.load_weights_ours()
        self.optimizer.load_state_dict(
            files.load_object(str(self.ours), "optimizer.pt")
        )

    def load_theirs(self) -> None:
        self.load_weights_theirs()
        state = torch.load(self.theirs / "optimizer.pt", weights_only=True)
        self.optimizer.load_state_dict(state)


def milliseconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def compare(
    name: str, goal: float, rounds: int, ours: Any, theirs: Any, after: Any = None,
    shown: bool = True,
) -> None:  # fmt: skip
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for function, kept in zip((ours, theirs), times, strict=True):
            kept.append(milliseconds(function))
            if after is not None:
                after()
    mine, other = (statistics.median(kept) for kept in times)
    if not shown:
        return
    print(
        json.dumps({
            "benchmark": "checkpoint", "name": name, "unit": "ms", "peer": "torch",
            "ours": mine, "theirs": other, "ratio": other / mine, "goal": goal,
        })
    )  # fmt: skip


def save_shards(root: Path, width: int, rounds: int) -> None:
    """One rank of those that save their shards, each time together."""
    group, writer = world(), CheckpointWriter()
    model, optimizer = make(width, torch.device("cpu"), shards=True)

    def begin() -> str:
        folder = writer.begin(root / "checkpoint-1") if group.rank == 0 else ""
        return group.broadcast_bytes(folder.encode()).decode()

    def ours() -> None:
        folder = begin()
        if group.rank > 0:
            writer.join(folder, group.rank)
        shards = trained_model.Shards.of(model, optimizer)
        shards.save(Sink(folder, writer))
        group.barrier()
        writer.commit(parts=[] if group.rank else range(1, RANKS))

    def theirs() -> None:
        shards = trained_model.Shards.of(model, optimizer)
        torch.save(shards.content, root / f"theirs-{group.rank}")
        group.barrier()

    def settle() -> None:
        writer.wait()
        group.barrier()

    nbytes, like = files.snapshot_bytes(model, optimizer)
    writer.reserve(nbytes + nbytes // 64 + (1 << 20), like)
    settle()
    name = f"training stands still for a save of {RANKS} ranks' shards"
    compare(name, 4.0, rounds, ours, theirs, settle, shown=group.rank == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=None, help="on the file system to measure")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--shards", default=None, help="a folder: of one rank alone")
    options = parser.parse_args()
    width = 16 if options.small else WIDTH
    if options.shards is not None:
        return save_shards(Path(options.shards), width, options.rounds)
    root = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        bench = Bench(root, width, options.gpu)
        bench.reserve()
        bench.settle()
        reserved = milliseconds(bench.writer.wait)
        first = milliseconds(bench.save_ours)
        whole = first + milliseconds(bench.writer.wait)
        n = sum(p.numel() for p in bench.model.parameters())
        record = {
            "benchmark": "first save",
            "parameters": n,
            "stands_ms": round(first, 1),
        }
        record["reserved_in_background_ms"] = round(reserved, 1)
        print(json.dumps({**record, "on_disk_ms": round(whole, 1)}))
        bench.save_theirs()
        rounds, written = options.rounds, bench.writer.wait
        compare(
            "training stands still for a save" + " of a GPU's memory" * options.gpu,
            4.0,
            rounds,
            bench.save_ours,
            bench.save_theirs,
            written,
        )
        if options.gpu:
            return
        weights = bench.load_weights_ours, bench.load_weights_theirs
        compare("weights loaded", 1.0, rounds, *weights)
        compare(
            "weights and AdamW's state loaded",
            1.0,
            rounds,
            bench.load_ours,
            bench.load_theirs,
        )
        if ranks.start(RANKS, "--shards", str(root), OMP_NUM_THREADS="1") != 0:
            raise SystemExit("a rank failed; its output says why")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
