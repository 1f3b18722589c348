"""Writes docs/fsdp_memory.md from the formulas of ctrainer.fsdp.memory_plan.

python docs/make_fsdp_memory.py            rewrites the page
python docs/make_fsdp_memory.py --check    exits 1 when it is not current
"""

import sys
from pathlib import Path

from ctrainer.fsdp.memory_plan import (
    DECODERS,
    GB,
    WORLD_SIZES,
    Decoder,
    memory_plan,
    table,
)

PAGE = Path(__file__).with_name("fsdp_memory.md")

HEAD = """\
# Memory and traffic of sharded training

Made by `python docs/make_fsdp_memory.py` from `ctrainer.fsdp.memory_plan`; \
change the code, not this page. These are results of formulas, not measurements: \
no GPU has been there to measure on. At small sizes on the CPU they are held \
against what the engine counts, in `tests/fairscale_scenarios.py`.

Each block of the model is a unit with flat parameters, embedding, last norm and \
head are the root, which stays gathered from the forward to the backward. Master \
parameters, their gradients and Adam's two moments are float32 and sharded: 16 \
bytes / GPUs a parameter. Parameters are gathered, and gradients reduced, in \
bfloat16: a unit at a time, so that this part does not fall with the number of \
GPUs. Every GPU sends and receives in a step of one micro-batch

    gather:  (GPUs - 1) / GPUs * 2 bytes * (2 * parameters - those of the root)
    reduce:  (GPUs - 1) / GPUs * 2 bytes * parameters

In GB (1e9 bytes) on each GPU. *total* is what the engine holds at the fullest \
moment of the backward, that of a root whose parameters are used at both ends; \
activations, the allocator's fragments, CUDA and NCCL come on top.

`python -m ctrainer plan --model 8B --world_size 8 64 --compute_dtype bfloat16 \
--reduce_dtype float32 --optimizer_bytes 8 --prefetch 1` prints such a table for \
other settings; `memory_plan(units_of(module), world_size)` works it out for a \
wrapped module of yours.
"""


def section(name: str, model: Decoder) -> str:
    plans = [
        memory_plan(model.units(), size, compute_dtype="bfloat16")
        for size in WORLD_SIZES
    ]
    ahead = memory_plan(model.units(), 8, compute_dtype="bfloat16", prefetch=1)
    alone = 16 * model.parameters / GB
    return (
        f"\n## {name}: {model.parameters / GB:.3f} billion parameters\n\n"
        f"{model.layers} blocks of {model.block / 1e6:.1f} M parameters, the root has "
        f"{model.root / 1e6:.1f} M. Not sharded, parameters, gradients and Adam's "
        f"state take {alone:.1f} GB. A prefetched unit takes "
        f"{ahead.prefetched / GB:.3g} GB.\n\n{table(plans)}\n"
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
