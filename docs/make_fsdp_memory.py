"""Writes docs/reference/fsdp_memory.md from the formulas of ctrainer.fsdp.memory_plan.

python docs/make_fsdp_memory.py            rewrites the page
python docs/make_fsdp_memory.py --check    exits 1 when it is not current
"""

import sys
from pathlib import Path
from typing import Any

from ctrainer.fsdp.memory_plan import (
    DECODERS,
    GB,
    WORLD_SIZES,
    Decoder,
    MemoryPlan,
    in_gb,
    markdown,
    memory_plan,
    table,
)

PAGE = Path(__file__).parent / "reference" / "fsdp_memory.md"
MACHINE = 8  # GPUs

WAYS: dict[str, dict[str, Any]] = {
    "one group": {},
    "`gather_bits=8`": {"gather_bits": 8},
    "and `reduce_bits=4`": {"gather_bits": 8, "reduce_bits": 4},
    "hybrid": {"group_size": MACHINE},
    "hybrid, both quantized": {
        "gather_bits": 8,
        "reduce_bits": 4,
        "group_size": MACHINE,
    },
}

HEAD = f"""\
# Memory and traffic of sharded training

Made by `python docs/make_fsdp_memory.py` from `ctrainer.fsdp.memory_plan`; \
change the code, not this page. These are results of formulas, not measurements: \
there was no GPU to measure on. At small sizes on the CPU tests compare them with \
the bytes that the engine counts, in `tests/support/fairscale_scenarios.py`, and with \
the bytes that it sends, in `tests/python/fsdp/test_fsdp_traffic.py`.

Each block of the model is a unit with flat parameters; embedding, last norm and \
head are the root, which stays gathered from the forward to the backward. Master \
parameters, their gradients and Adam's two moments are float32 and sharded: 16 \
bytes / GPUs a parameter. Parameters are gathered, and gradients reduced, in \
bfloat16, one unit at a time, so that this part does not fall with the number of \
GPUs. Every GPU sends and receives in a step of one micro-batch

    gather:  (GPUs - 1) / GPUs * 2 bytes * (2 * parameters - those of the root)
    reduce:  (GPUs - 1) / GPUs * 2 bytes * parameters

The tables are in GB (1e9 bytes) on each GPU. *total* is the peak of the engine's \
memory, reached in the backward of a root whose parameters are used at both ends; \
activations, the allocator's fragments, CUDA and NCCL are not included. One unit is \
prefetched (`forward_prefetch`, `backward_prefetch`, the default on a GPU): without \
prefetching subtract *prefetched*. Where there is room, the memory of one more unit \
waits for the device, so that the host does not.

The first table of a model is for unquantized elements and one sharding group of all \
GPUs. *machine traffic* is the traffic of the {MACHINE} GPUs of a machine to other \
machines, in total. The other tables compare ways to shard:

- The quantized columns (`gather_bits`, `reduce_bits`) are without `error_feedback`, \
which takes 4 bytes a parameter on *every* GPU. Quantized values need buffers while \
they are sent, smaller than the gradients or parameters that are not allocated at \
that moment. Quantized parameters are not prefetched.
- Quantized parameters are sent to another machine once, as parameters are. Gradients \
are summed within a machine before they are sent to another; quantized gradients \
cannot be summed, so that every GPU sends its own: with {MACHINE} GPUs a machine \
`reduce_bits=4` sends more over the network than bfloat16 does, and pays where each \
machine has one GPU.
- Hybrid: the {MACHINE} GPUs of a machine are a sharding group, and each machine has a \
replica. Each GPU's shard of the gradients is averaged over the machines, unquantized: \
quantization saves traffic within a machine only.

`ctrainer memory 8B --world_size 8 64 --group_size 8 --gather_bits 8` prints a table \
for other settings (`--help` lists them), also of a model of transformers, `ctrainer \
memory gpt2 --zero 2`, of which only the configuration is read:

- `--zero 0` shards nothing, `1` and `2` gradients and the optimizer's state, `3` \
parameters, too.
- `--offload_optimizer` and `--offload_param` are DeepSpeed's; with them *total* is a \
GPU's, and *host* and *disk* are what is in host memory and in files. Shards are in \
files from the first on (`max_in_cpu` 0).
- `--gradient_accumulation_steps` from 2 on: gradients stay whole and in float32 \
on every GPU until the last micro-batch, the column *unreduced*; *gradients* come as \
these go.
- `--optimizer` is `optim` of TrainingArguments, `--param_dtype bfloat16` trains \
without float32 parameters, `--frozen_bits 4` has frozen blocks below adapters.

`memory_plan(units_of(module), world_size)` computes the plan of a wrapped module of \
yours. On the CPU `plan.resident` is a rank's memory: in \
`tests/python/fsdp/test_fsdp_memory.py` ranks took as much, in every stage and with \
each of these options, but for two of 12 layers and 2 MiB that ranks share, without \
the gaps of malloc's heap (MALLOC_MMAP_THRESHOLD_=131072); with \
shards in files they took less where units that are prefetched came late. A checkpoint \
takes a rank's shards of parameters and state once more in host memory, until train() \
ends; with `async_save=False`, or with shards in files, nothing.
"""


def plans(model: Decoder, **options: Any) -> list[MemoryPlan]:
    return [
        memory_plan(
            model.units(),
            size,
            compute_dtype="bfloat16",
            prefetch=1,
            error_feedback=False,
            machine_size=MACHINE,
            **options,
        )
        for size in WORLD_SIZES
    ]


def compared(ways: dict[str, list[MemoryPlan]], name: str, title: str) -> str:
    """One column a way, of the field `name` of MemoryPlan."""
    rows = [
        [str(size), *(in_gb(getattr(way[row], name)) for way in ways.values())]
        for row, size in enumerate(WORLD_SIZES)
    ]
    return f"{title}\n\n{markdown(['GPUs', *ways], rows)}\n"


def section(name: str, model: Decoder) -> str:
    ways = {way: plans(model, **options) for way, options in WAYS.items()}
    alone = 16 * model.parameters / GB
    tables = (
        compared(ways, "total", "GB on each GPU:"),
        compared(ways, "traffic", "GB that each GPU sends in a step:"),
        compared(ways, "machine_traffic", "GB that leave each machine in a step:"),
    )
    return (
        f"\n## {name}: {model.parameters / GB:.3f} billion parameters\n\n"
        f"{model.layers} blocks of {model.block / 1e6:.1f} M parameters, the root has "
        f"{model.root / 1e6:.1f} M. Not sharded, parameters, gradients and Adam's "
        f"state take {alone:.1f} GB; error feedback would take "
        f"{4 * model.parameters / GB:.1f} GB.\n\n{table(ways['one group'])}\n\n"
        + "\n".join(tables)
    )


def page() -> str:
    return HEAD + "".join(section(name, model) for name, model in DECODERS.items())


def main() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
