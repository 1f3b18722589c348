"""What fully sharded training needs of each GPU, worked out before a run.

The terms are those that the engine accounts for (FSDPUnit): shards of parameters,
gradients and optimizer state, which stay; and what is gathered and not yet reduced at
the fullest moment of a step. Activations, and what CUDA, the allocator and NCCL take
for themselves, come on top.

Source: Rajbhandari et al., "ZeRO", 2020, sections 5 and 7, with the padding and the
moments of this engine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GB = 1e9


@dataclass(frozen=True, slots=True)
class UnitSize:
    """A unit: the elements of each of its groups (one with flatten_parameters, else
    one a parameter), those of frozen parameters, and whether it stays gathered from
    the forward to the backward, as the root does."""

    trainable: tuple[int, ...]
    frozen: tuple[int, ...] = ()
    kept: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on each rank, and bytes that each sends (and receives) in a step."""

    world_size: int
    parameters: int  # the shards, float32
    gradients: int  # of the shards, float32
    optimizer: int
    gathered: int  # the root and the fullest other unit
    prefetched: int  # units that come next
    full_gradients: int  # of the root and that unit, until they are reduced
    gather_traffic: int
    reduce_traffic: int

    @property
    def sharded(self) -> int:
        """What stays between steps: it falls with the number of ranks."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def transient(self) -> int:
        """The most that the engine has at work at once, whatever the ranks."""
        return self.gathered + self.prefetched + self.full_gradients

    @property
    def total(self) -> int:
        return self.sharded + self.transient

    @property
    def traffic(self) -> int:
        return self.gather_traffic + self.reduce_traffic


def memory_plan(
    units: Iterable[UnitSize],
    world_size: int,
    *,
    compute_dtype: str = "float32",
    reduce_dtype: str | None = None,
    optimizer_bytes: int = 8,
    prefetch: int = 0,
    reshard_after_forward: bool = True,
    shard_size_multiple: int = 128,
) -> MemoryPlan:
    """Plan a step of one micro-batch.

    The fullest moment is that of a root whose parameters are used before and after
    the other units, as an embedding and a head are; else there is less at once.

    Args:
        units: every unit once; a unit inside another has its own parameters only.
        world_size: ranks that share.
        compute_dtype: "float32", "bfloat16" or "float16", of gathered parameters.
        reduce_dtype: of gradients until they are reduced; compute_dtype if None.
        optimizer_bytes: of state for each trainable element (Adam's float32 moments:
            8; SGD's: 0 or 4).
        prefetch: units that are gathered ahead.
        reshard_after_forward: False keeps every unit gathered until its backward.
        shard_size_multiple: what a rank's part of a group is padded to.

    Raises:
        ValueError: a size below 1 or an unknown dtype.
    """
    if world_size < 1 or prefetch < 0 or shard_size_multiple < 1:
        raise ValueError(
            "world_size and shard_size_multiple must be 1 or more and prefetch 0 or "
            f"more, got {world_size}, {shard_size_multiple} and {prefetch}"
        )
    item = _bytes_of("compute_dtype", compute_dtype)
    grad_item = _bytes_of("reduce_dtype", reduce_dtype or compute_dtype)
    sizes = [_Padded(u, world_size, shard_size_multiple) for u in units]
    trainable = sum(size.trainable for size in sizes)
    both = sum(size.both for size in sizes)
    roots = [size for size in sizes if size.kept]
    inner = [size for size in sizes if not size.kept]
    fullest = max(
        inner,
        key=lambda size: size.both * item + size.trainable * grad_item,
        default=_Padded(UnitSize(()), 1, 1),
    )
    again = inner if reshard_after_forward else []  # gathered a second time
    staying = roots if reshard_after_forward else sizes
    gathered = sum(s.both for s in staying) + (fullest.both if again else 0)
    ahead = min(prefetch, max(len(again) - 1, 0))
    grads = sum(s.trainable for s in roots) + fullest.trainable
    others = (world_size - 1) / world_size
    return MemoryPlan(
        world_size=world_size,
        parameters=both // world_size * 4,
        gradients=trainable // world_size * 4,
        optimizer=trainable // world_size * optimizer_bytes,
        gathered=gathered * item,
        prefetched=ahead * max((s.both for s in again), default=0) * item,
        full_gradients=grads * grad_item,
        gather_traffic=round((both + sum(s.both for s in again)) * item * others),
        reduce_traffic=round(trainable * grad_item * others),
    )


class _Padded:
    """A unit's elements as the ranks share them."""

    def __init__(self, unit: UnitSize, world_size: int, multiple: int) -> None:
        group = world_size * multiple
        self.trainable = sum(math.ceil(n / group) * group for n in unit.trainable)
        frozen = sum(math.ceil(n / group) * group for n in unit.frozen)
        self.both = self.trainable + frozen
        self.kept = unit.kept


def _bytes_of(name: str, dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{name} must be one of {list(DTYPE_BYTES)}, not {dtype!r}")
    return DTYPE_BYTES[dtype]


def units_of(module: Any) -> list[UnitSize]:
    """The units of a wrapped module, a FullyShardedDataParallel, it being the root."""
    return [
        UnitSize(
            tuple(g.orig_size.numel() for g in unit._groups if g.requires_grad),
            tuple(g.orig_size.numel() for g in unit._groups if not g.requires_grad),
            kept=unit is module,
        )
        for unit in module.units()
    ]


# Models of known shapes


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


def table(plans: Sequence[MemoryPlan]) -> str:
    """The plans as a table in Markdown, in GB (1e9 bytes)."""
    names = (
        "parameters", "gradients", "optimizer", "gathered", "prefetched",
        "full_gradients", "total", "gather_traffic", "reduce_traffic",
    )  # fmt: skip
    heads = [name.replace("_", " ") for name in names]
    lines = ["| GPUs | " + " | ".join(heads) + " |", "| ---: " * 10 + "|"]
    for plan in plans:
        cells = (f"{getattr(plan, name) / GB:.3g}" for name in names)
        lines.append(f"| {plan.world_size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """`python -m ctrainer plan`."""
    parser = argparse.ArgumentParser(prog="python -m ctrainer plan")
    parser.add_argument("--model", choices=list(DECODERS), default="8B")
    parser.add_argument("--world_size", type=int, nargs="+", default=WORLD_SIZES)
    dtypes = list(DTYPE_BYTES)
    parser.add_argument("--compute_dtype", choices=dtypes, default="bfloat16")
    parser.add_argument("--reduce_dtype", choices=dtypes)
    parser.add_argument("--optimizer_bytes", type=int, default=8)
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument("--no_reshard_after_forward", action="store_true")
    given = parser.parse_args(arguments)
    plans = [
        memory_plan(
            DECODERS[given.model].units(),
            world_size,
            compute_dtype=given.compute_dtype,
            reduce_dtype=given.reduce_dtype,
            optimizer_bytes=given.optimizer_bytes,
            prefetch=given.prefetch,
            reshard_after_forward=not given.no_reshard_after_forward,
        )
        for world_size in given.world_size
    ]
    print(f"{DECODERS[given.model].parameters / GB:.3f} G parameters, GB on each GPU")
    print(table(plans))
    return 0
