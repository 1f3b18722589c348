"""Prints what runs of CASES add to the memory of a rank, and what the plan says: a line
of JSON for each case and number of ranks that the arguments name, such as 2:files.

Each run is of forked processes, which have imported everything.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import tempfile
import uuid
from typing import Any

import torch
from ranks import free_port, torchrun
from torch import nn

from ctrainer import comm, optim
from ctrainer.compat import deepspeed
from ctrainer.fsdp import FullyShardedDataParallel, UnitSize, units_of
from ctrainer.fsdp.memory_plan import plan_of_stage, state_bytes

WIDTH, DEPTH, ENDS = 1000, 12, 8
BF16 = {"compute_dtype": "bfloat16"}

# Of the layers, of their wrappers, of the run, and of the plan.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "float32": {},
    "mixed": {"wrap": BF16, "plan": BF16},
    "bfloat16": {"layers": {"dtype": "bfloat16"}, "wrap": BF16, "plan": BF16},
    "float16": {
        "layers": {"dtype": "float16"},
        "wrap": {"compute_dtype": "float16", "fp32_reduce_scatter": True},
        "plan": {"compute_dtype": "float16", "reduce_dtype": "float32"},
    },
    "mixed dtypes": {
        "layers": {"every_second": "bfloat16"}, "plan": {"optimizer_bytes": 6},
    },
    "8 bits": {"layers": {"bits": 8}},
    "4 bits": {"layers": {"bits": 4}},
    "stage 2": {"wrap": {"reshard_after_forward": False}, "run": {"sharded": 2}},
    "accumulated": {"run": {"micro_batches": 3}, "plan": {"micro_batches": 3}},
    "8-bit state": {"run": {"optim": "adamw_8bit"}},
    "sgd": {"run": {"optim": "sgd"}},
    "state in a file": {
        "run": {"offload_state": True}, "plan": {"offload_optimizer": "nvme"},
    },
    "shards in files": {
        "wrap": {"shard_folder": tempfile.gettempdir(), "read_ahead": 3},
        "plan": {"offload_param": "nvme", "read_ahead": 3},
    },
    "all in files": {
        "wrap": {"shard_folder": tempfile.gettempdir()},
        "run": {"offload_state": True},
        "plan": {"offload_param": "nvme", "offload_optimizer": "nvme"},
    },
    "quantized": {
        "wrap": {"gather_bits": 8, "reduce_bits": 4},
        "plan": {"gather_bits": 8, "reduce_bits": 4},
    },
    "stage 0": {"run": {"stage": 0}, "plan": {}},
    "stage 0 in bfloat16": {
        "run": {"stage": 0, "micro_batches": 2}, "plan": {**BF16, "micro_batches": 2},
    },
}  # fmt: skip


class Quantized(nn.Module):
    """Frozen values of a few bits, several in a byte, and a trained bias."""

    def __init__(self, width: int, bits: int) -> None:
        super().__init__()
        values = torch.ones(width * width * bits // 8, dtype=torch.uint8)
        self.values = nn.Parameter(values, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.values[: len(self.bias)] + self.bias


class As(nn.Linear):
    """Takes inputs of any dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def layer(width: int, number: int, layers: dict[str, Any]) -> nn.Module:
    if "bits" in layers and number % 2:
        return Quantized(width, layers["bits"])
    dtype = layers.get("dtype", "float32")
    if number % 2:
        dtype = layers.get("every_second", dtype)
    return As(width, width, dtype=getattr(torch, dtype))


def whole(case: dict[str, Any], width: int, depth: int, wrap: Any) -> Any:
    layers = case.get("layers", {})
    inner = [wrap(layer(width, number, layers)) for number in range(depth)]
    dtype = getattr(torch, layers.get("dtype", "float32"))
    first, last = As(ENDS, width, dtype=dtype), As(width, 2, dtype=dtype)
    return wrap(nn.Sequential(first, *inner, last))


def train(model: Any, optimizer: Any, micro_batches: int) -> None:
    for _ in range(3):
        for _ in range(micro_batches - 1):
            with model.no_sync():
                model(torch.ones(2, ENDS)).float().sum().backward()
        model(torch.ones(2, ENDS)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(case: dict[str, Any], width: int, depth: int) -> Any:
    run = case.get("run", {})
    group = comm.world(60)

    def wrap(module: nn.Module) -> Any:
        return FullyShardedDataParallel(
            module, process_group=group, on_neuron=False, flatten_parameters=True,
            **case.get("wrap", {}),
        )  # fmt: skip

    model = whole(case, width, depth, wrap)
    cls = {"sgd": optim.SGD, "adamw_8bit": optim.AdamW8bit}
    make = cls.get(run.get("optim", ""), optim.AdamW)
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    if "offload_state" in run:
        optimizer.offload_state(tempfile.gettempdir())
    train(model, optimizer, run.get("micro_batches", 1))
    return model, optimizer


def replicated(case: dict[str, Any], width: int, depth: int) -> Any:
    micro_batches = case["run"].get("micro_batches", 1)
    model = whole(case, width, depth, lambda module: module)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for _ in range(3 * micro_batches):
        with torch.autocast("cpu", torch.bfloat16, "compute_dtype" in case["plan"]):
            loss = engine(torch.ones(2, ENDS)).float().sum()
        engine.backward(loss)
        engine.step()
    return engine


def resident(field: str) -> int:
    """Bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure(name: str, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    os.environ.pop("CTRAINER_FSDP_POISON", None)  # which takes all the pages
    case = CASES[name]
    run, plan = case.get("run", {}), case.get("plan", {})
    trained = replicated if "stage" in run else sharded
    trained(case, 320, 3)  # what torch takes at the first use
    gc.collect()
    before = resident("VmRSS")
    made = trained(case, WIDTH, DEPTH)
    peak = resident("VmHWM") - before
    if int(environ["RANK"]):
        return
    world = int(environ["WORLD_SIZE"])
    dtype = case.get("layers", {}).get("dtype", "float32")
    given = {"optimizer_bytes": state_bytes(run.get("optim", "adamw_torch"), dtype)}
    units = units_of(made[0]) if "stage" not in run else [
        UnitSize((WIDTH * (ENDS + 1) + 2 * (WIDTH + 1),), kept=True),
        *DEPTH * [UnitSize((WIDTH * (WIDTH + 1),))],
    ]  # fmt: skip
    said = plan_of_stage(
        run.get("stage", run.get("sharded", 3)), units, world, **given | plan
    )
    print(json.dumps([name, world, peak, said.resident]), flush=True)


def main() -> None:
    for word in sys.argv[1:]:
        world, name = word.split(":")
        ranks, job, port = range(int(world)), uuid.uuid4().hex, free_port()
        environs = [torchrun(rank, len(ranks), job, port) for rank in ranks]
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=measure, args=(name, e)) for e in environs]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0, word


if __name__ == "__main__":
    main()
