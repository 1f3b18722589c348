"""Training a GPT on two ranks: sharded by us and by others, and copied by torch's DDP.

    python benchmarks/bench_fsdp.py [--steps 6] [--blocks 8] [--only ours ddp ...]
                                    [--cases late bf16 ...] [--rounds 3]

Each way of training runs alone, in two new processes of one thread each, on the same
batches: 29.5 million parameters in float32 (8 blocks of width 512, a vocabulary of
8192, tied), 4 sequences of 128 tokens a rank, AdamW (ours is ctrainer.optim's, others
have torch's), gradients clipped to 1, a unit a block. The ways take turns for a number
of rounds; a row shows the median of the rounds. The CPU time of a step is user and
system time of a rank, which other programs disturb least; the memory is the most that a
rank has had above what it had after its imports, with malloc as it comes. ctrainer.fsdp
is imported before torch makes its first tensor, but after it in the case "late". Losses
have to agree. Then 24 blocks of width 32, whose CPU time above DDP's is what it costs
to shard a unit however small; less than 0.1 ms, or less than DDP, counts as 0.1. Then
the cases: other precisions and ways to shard, beside those peers that have them, or
beside ours without ("plain").
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PEERS = {"ddp": "torch's DDP", "fsdp1": "torch's FSDP1", "fsdp2": "torch's FSDP2",
         "fairscale": "fairscale's FSDP", "zero3": "DeepSpeed's ZeRO-3",
         "plain": "ctrainer without"}  # fmt: skip
WAYS = ("ours", "ddp", "fsdp1", "fsdp2", "fairscale", "zero3")
PACKAGES = {"fairscale": "fairscale", "zero3": "deepspeed"}  # of ways that need one
MODEL = "GPT of 29.5M parameters on"
MIB = 2**20
NOISE = 0.1  # ms a unit by which runs of the tiny blocks differ


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run is of. shares: ranks that shard one model, the others being replicas;
    late: torch makes a tensor before ctrainer.fsdp is imported; more: of our
    constructor."""

    steps: int = 6
    blocks: int = 8
    width: int = 512
    batch: int = 4
    world: int = 2
    shares: int = 2
    micro: int = 1
    reduces_each: bool = False
    bf16: bool = False
    recomputes: bool = False
    late: bool = False
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row's name, whom it is compared with, and how far losses may differ."""

    name: str
    peers: tuple[str, ...]
    apart: float = 1e-3
    options: dict[str, Any]


ALL = WAYS[1:]
CASES = {
    "late": Case(name="imported after torch's first tensor",
                 peers=("ddp", "fsdp1", "fsdp2"), options={"late": True}),
    "bf16": Case(name="in bfloat16", peers=ALL, apart=2e-2, options={"bf16": True}),
    "accumulated": Case(name="2 micro-batches, reduced after the second",
                        peers=("ddp", "fsdp1", "fsdp2", "fairscale"),
                        options={"micro": 2}),
    "each": Case(name="2 micro-batches, reduced after each", peers=ALL,
                 options={"micro": 2, "reduces_each": True}),
    "recomputed": Case(name="activations recomputed", peers=ALL,
                       options={"recomputes": True}),
    "hybrid": Case(name="2 replicas of 2 shards", peers=("fsdp2",),
                   options={"world": 4}),
    "codes": Case(name="8-bit parameters, 4-bit gradients", peers=("plain",),
                  apart=5e-2,
                  options={"more": {"gather_bits": 8, "reduce_bits": 4}}),
    "prefetch": Case(name="next unit gathered ahead", peers=("plain",), options={
        "more": {"forward_prefetch": True, "backward_prefetch": "BACKWARD_PRE"}}),
}  # fmt: skip


def status(name: str) -> float:
    """A line of this process's status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return float(line.split()[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run(way: str, rank: int, options: Options, folder: str) -> dict[str, Any]:
    import sharding_ways
    import torch

    if options.late:
        torch.zeros(1)
    sharding_ways.prepare(way)
    torch.set_num_threads(1)
    before = status("VmRSS")
    torch.manual_seed(0)
    loop = sharding_ways.make(way, options, rank, folder)
    forget_peak()
    size = (options.batch, sharding_ways.LENGTH)
    cpu, wall, losses = [], [], []
    for step in range(options.steps + 1):
        generator = torch.Generator().manual_seed(step * options.world + rank)
        batches = [
            torch.randint(sharding_ways.VOCABULARY, size, generator=generator)
            for _ in range(options.micro)
        ]
        began = time.process_time(), time.perf_counter()
        losses.append(loop.step(batches))
        if step > 0:
            cpu.append(time.process_time() - began[0])
            wall.append(time.perf_counter() - began[1])
    shards = sum(p.numel() for p in loop.model.parameters()) * 4 / MIB
    unit = getattr(loop.model, "_unit", None)
    return {
        "cpu": statistics.median(cpu) * 1000,
        "wall": min(wall) * 1000,
        "memory": status("VmHWM") - before,
        "resident": status("VmRSS") - before,
        "losses": losses,
        "engine": unit.peak_bytes / MIB if way in ("ours", "plain") else None,
        "shards": shards,
    }


def rank_main(way: str, rank: int, options: Options, folder: str) -> None:
    os.environ.update(
        OMP_NUM_THREADS="1", RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options.world), LOCAL_WORLD_SIZE=str(options.world),
    )  # fmt: skip
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # peers print what they like
    path = Path(folder) / f"told{rank}.json"
    path.write_text(json.dumps(run(way, rank, options, folder)))


def measure(way: str, options: Options) -> dict[str, Any]:
    """Of rank 0; losses are all ranks' average."""
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            start.Process(target=rank_main, args=(way, r, options, folder), daemon=True)
            for r in range(options.world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"{way} ended with {process.exitcode}")
        told = [
            json.loads((Path(folder) / f"told{r}.json").read_text())
            for r in range(options.world)
        ]
    each = zip(*(t["losses"] for t in told), strict=True)
    return {**told[0], "losses": [sum(losses) / options.world for losses in each]}


def in_turn(runs: dict[str, Options], rounds: int) -> dict[str, dict[str, Any]]:
    """Every way once a round; of numbers the median of the rounds."""
    told: dict[str, list[dict[str, Any]]] = {way: [] for way in runs}
    for _ in range(rounds):
        for way, options in runs.items():
            told[way].append(measure(way, options))
    return {way: median_of(each) for way, each in told.items()}


def median_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = {
        key: statistics.median(told[key] for told in rounds)
        for key, value in rounds[0].items()
        if isinstance(value, float)
    }
    return {**rounds[0], **numbers, "cpu_of_rounds": [told["cpu"] for told in rounds]}


def compare_units(rounds: int) -> None:
    options = Options(steps=12, blocks=24, width=32)
    found = in_turn(dict.fromkeys(("ours", "ddp", "fsdp1", "fsdp2"), options), rounds)
    plain = found["ddp"]["cpu"]
    above = {
        way: max((told["cpu"] - plain) / (options.blocks + 1), NOISE)
        for way, told in found.items()
    }
    name = "GPT of 24 tiny blocks on 2 ranks: CPU time of a unit above DDP's"
    for way, goal in (("fsdp1", None), ("fsdp2", 16.0)):
        compare(name, "ms", above["ours"], PEERS[way], above[way], goal)


def compare(name: str, unit: str, ours: float, peer: str, theirs: float,
            goal: float | None = None) -> None:  # fmt: skip
    row = {"name": name, "unit": unit, "ours": ours, "peer": peer, "theirs": theirs}
    print(json.dumps({**row, "ratio": theirs / ours, "goal": goal}), flush=True)


def compare_all(what: str, found: dict[str, dict[str, Any]], apart: float,
                goals: dict[str, float]) -> None:  # fmt: skip
    """Rows of what was measured of ours beside every other way."""
    for way, told in found.items():
        print(json.dumps({"way": way, "of": what, **told}), flush=True)
    ours = found.pop("ours", None)
    for way, theirs in found.items() if ours else ():
        pairs = zip(ours["losses"], theirs["losses"], strict=True)
        differ = max(abs(a - b) for a, b in pairs)
        if differ > apart:
            raise SystemExit(f"{what}: losses differ from those of {way} by {differ}")
        compare(f"{what}: CPU time of a step", "ms", ours["cpu"], PEERS[way],
                theirs["cpu"], goals.get(way))  # fmt: skip
        compare(f"{what}: memory of a rank", "MiB", ours["memory"], PEERS[way],
                theirs["memory"])  # fmt: skip


def compare_case(case: Case, given: dict[str, Any], rounds: int) -> None:
    options = {**given, **case.options, "steps": min(given["steps"], 4)}
    runs = {"ours": Options(**options)}
    for way in there(case.peers):
        more = {} if way == "plain" else options.get("more", {})
        runs[way] = Options(**{**options, "more": more})
    found = in_turn(runs, rounds)
    world = runs["ours"].world
    compare_all(f"{MODEL} {world} ranks, sharded, {case.name}", found, case.apart, {})


def there(ways: tuple[str, ...]) -> list[str]:
    """Those whose packages are installed."""
    missing = [
        way
        for way in ways
        if way in PACKAGES and importlib.util.find_spec(PACKAGES[way]) is None
    ]
    for way in missing:
        print(f"without {PEERS[way]}: {PACKAGES[way]} is missing", file=sys.stderr)
    return [way for way in ways if way not in missing]


def parsed() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--only", nargs="*", choices=WAYS, help="no cases by default")
    parser.add_argument("--cases", nargs="*", choices=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    given = vars(parsed())
    only, cases, rounds = (given.pop(key) for key in ("only", "cases", "rounds"))
    ways = only if only is not None else [] if cases else WAYS
    found = in_turn(dict.fromkeys(there(tuple(ways)), Options(**given)), rounds)
    peers = ("fsdp1", "fsdp2", "fairscale", "zero3")
    goals = {"ddp": 1.09, **dict.fromkeys(peers, 1.0)}
    compare_all(f"{MODEL} 2 ranks, sharded", found, 1e-3, goals)
    if only is None and cases is None:
        compare_units(rounds)
    chosen = CASES if only is None and cases is None else cases or ()
    for name in chosen:
        compare_case(CASES[name], given, rounds)


if __name__ == "__main__":
    main()
