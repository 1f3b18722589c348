"""Tables of what sharded training needs, of models of known shapes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctrainer.fsdp.memory_plan import DTYPE_BYTES, MemoryPlan, UnitSize, memory_plan

GB = 1e9


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder with grouped attention and a gated feed-forward, without biases, as
    Llama 3 is; each block is a unit, and embedding, last norm and head the root."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False

    @property
    def block(self) -> int:
        kv = self.hidden // self.heads * self.kv_heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv
        return attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden

    @property
    def root(self) -> int:
        tables = 1 if self.tied else 2
        return tables * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.root

    def units(self) -> list[UnitSize]:
        """With flatten_parameters."""
        return [UnitSize((self.root,), kept=True)] + [UnitSize((self.block,))] * (
            self.layers
        )


# Source: config.json of Llama 3.2 1B, Llama 3.1 8B and 70B.
DECODERS = {
    "1B": Decoder(16, 2048, 8192, 32, 8, 128256, tied=True),
    "8B": Decoder(32, 4096, 14336, 32, 8, 128256),
    "70B": Decoder(80, 8192, 28672, 64, 8, 128256),
}
WORLD_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)

_COLUMNS = (
    "parameters", "gradients", "optimizer", "feedback", "gathered", "prefetched",
    "full_gradients", "codes", "total", "gather_traffic", "reduce_traffic",
    "replica_traffic", "machine_traffic",
)  # fmt: skip


def in_gb(size: float) -> str:
    return f"{size / GB:.3g}"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---:"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(plans: Sequence[MemoryPlan]) -> str:
    """The plans as a table in Markdown, in GB (1e9 bytes), without columns of zeros."""
    names = [n for n in _COLUMNS if any(getattr(plan, n) for plan in plans)]
    rows = [
        [str(plan.world_size), *(in_gb(getattr(plan, name)) for name in names)]
        for plan in plans
    ]
    return markdown(["GPUs", *(name.replace("_", " ") for name in names)], rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ctrainer plan")
    parser.add_argument("--model", choices=list(DECODERS), default="8B")
    parser.add_argument("--world_size", type=int, nargs="+", default=WORLD_SIZES)
    dtypes = list(DTYPE_BYTES)
    parser.add_argument("--compute_dtype", choices=dtypes, default="bfloat16")
    parser.add_argument("--reduce_dtype", choices=dtypes)
    parser.add_argument("--optimizer_bytes", type=int, default=8)
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument("--no_reshard_after_forward", action="store_true")
    parser.add_argument("--gather_bits", type=int, choices=(4, 8))
    parser.add_argument("--reduce_bits", type=int, choices=(4, 8))
    parser.add_argument("--no_error_feedback", action="store_true")
    parser.add_argument("--group_size", type=int, help="GPUs that share: hybrid")
    parser.add_argument("--machine_size", type=int, default=8)
    return parser


def main(arguments: list[str]) -> int:
    """`python -m ctrainer plan`."""
    parser = _parser()
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    model, sizes = DECODERS[given.pop("model")], given.pop("world_size")
    given["reshard_after_forward"] = not given.pop("no_reshard_after_forward")
    given["error_feedback"] = not given.pop("no_error_feedback")
    try:
        plans = [memory_plan(model.units(), size, **given) for size in sizes]
    except ValueError as error:
        parser.error(str(error))
    print(f"{in_gb(model.parameters)} G parameters, GB on each GPU")
    print(table(plans))
    return 0
