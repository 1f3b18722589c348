"""The memory and traffic of sharded training for each GPU, computed before a run.

The terms are those of the engine's ledger (FSDPUnit): shards of parameters, gradients
and optimizer state, which stay; and gathered parameters and unreduced gradients at the
peak of a step. Activations, and the memory of CUDA, the allocator and NCCL, are added
to them.

Source: Rajbhandari et al., "ZeRO", 2020, sections 5 and 7; Wang et al., "ZeRO++", 2023
(quantization); Zhang et al., "MiCS", 2022 (replicate groups); with the padding, the
order of operations and the quantization of this engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ctrainer.arguments.optimizers import RECIPES
from ctrainer.runtime.command_line import HelpFormatter

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCK = 256  # quantized values with one scale, a float32
_ALIGN = 8  # bytes that messages are padded to
_PIECE = 1 << 20  # elements of a shard that are in memory at once, of a file
_PIECES = 4


@dataclass(frozen=True, slots=True)
class UnitSize:
    """The size of a unit, in elements.

    Args:
        trainable (tuple[int, ...]): Of each group of trainable parameters: one with
            flatten_parameters, else one a parameter.
        frozen (tuple[int, ...], default ()): Of each group of frozen parameters.
        kept (bool, default False): It stays gathered from the forward to the backward
            pass, as the root does.
        item_bytes (tuple[int, ...], default ()): Of an element of each group's shards,
            those of trainable groups first: 4 of float32, 2 of bfloat16 and float16, 1
            of quantized values, which are gathered as they are; (): 4 for each.

    Example:
        >>> from ctrainer.fsdp import UnitSize
        >>> UnitSize(trainable=(1000, 10)).kept
        False
    """

    trainable: tuple[int, ...]
    frozen: tuple[int, ...] = ()
    kept: bool = False
    item_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on each rank, and bytes that each sends (and receives) in a step.

    Args:
        world_size (int): Ranks of the run.
        group_size (int): Ranks of a sharding group; there are world_size / group_size
            replicas.
        parameters (int): The shards.
        gradients (int): Of the trainable shards, in their dtype.
        optimizer (int): The optimizer's state.
        feedback (int): Error-feedback residuals of gradients, float32, of all ranks'
            shards.
        gathered (int): The root and the fullest other unit.
        prefetched (int): Units that come next.
        full_gradients (int): Of the root and that unit, until they are reduced.
        quantized (int): Buffers for quantized values, as far as they add to the peak.
        gather_traffic (int): Sent to gather parameters.
        reduce_traffic (int): Sent to reduce gradients over the sharding group.
        replica_traffic (int): Sent to average gradients over the replicas.
        machine_traffic (int): Of it all, what leaves a machine, all its ranks together.
        host (int, default 0): What is offloaded and not in files.
        disk (int, default 0): What is in files.
        secondary (int, default 0): Secondary shards, from the forward to the backward.
        unreduced (int, default 0): Gradients of all units, in float32, until the last
            micro-batch.
        copies (int, default 0): In host memory, of shards in files.
        released (int, default 0): Of the peak, what is released before all shards have
            gradients.

    Example:
        >>> from ctrainer.fsdp import UnitSize, memory_plan
        >>> plan = memory_plan([UnitSize((1024,), kept=True)], world_size=4)
        >>> plan.parameters, plan.optimizer
        (1024, 2048)
    """

    world_size: int
    group_size: int  # ranks of a sharding group
    parameters: int  # the shards
    gradients: int  # of the trainable shards
    optimizer: int
    feedback: int  # error-feedback residuals, float32, of all ranks' shards
    gathered: int  # the root and the largest other unit
    prefetched: int  # units that come next
    full_gradients: int  # of the root and that unit, until they are reduced
    quantized: int  # buffers for quantized values, as far as they add to the peak
    gather_traffic: int
    reduce_traffic: int
    replica_traffic: int
    machine_traffic: int  # bytes that leave a machine, of all its ranks together
    host: int = 0  # what is offloaded and not in files
    disk: int = 0
    secondary: int = 0  # shards of a machine's ranks, of the units that are released
    unreduced: int = 0  # gradients of all units, of micro-batches but the last
    copies: int = 0  # of shards in files
    released: int = 0  # before all shards have gradients

    @property
    def sharded(self) -> int:
        """Bytes that stay between steps, in proportion to 1 / ranks."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def transient(self) -> int:
        """The peak of the engine's ledger, whatever the ranks; the ledger does not
        count quantized values."""
        gradients = max(self.full_gradients, self.unreduced)
        gathered = self.gathered + self.prefetched + self.secondary
        return gathered + gradients + self.copies

    @property
    def total(self) -> int:
        """Bytes of a rank at the fullest moment; of its GPU where shards are offloaded,
        without the buffer that a shard is copied through."""
        if not self.host:
            return self.resident
        return self.feedback + self.transient - self.copies + self.quantized

    @property
    def resident(self) -> int:
        """Bytes of a rank that computes on the CPU, at the fullest moment. Gradients of
        shards are freed after an update, and come while `released` goes."""
        staying = self.host - self.copies if self.host else self.sharded
        absent = min(self.gradients, self.released)
        return staying - absent + self.feedback + self.transient + self.quantized

    @property
    def codes(self) -> int:
        """The former name of `quantized`."""
        warnings.warn(
            "MemoryPlan.codes is called quantized; the old name stays until 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.quantized

    @property
    def traffic(self) -> int:
        """Bytes that a rank sends in a step."""
        return self.gather_traffic + self.reduce_traffic + self.replica_traffic


def memory_plan(
    units: Iterable[UnitSize],
    world_size: int,
    *,
    compute_dtype: str = "float32",
    reduce_dtype: str | None = None,
    optimizer_bytes: float = 8,
    prefetch: int = 0,
    reshard_after_forward: bool = True,
    shard_size_multiple: int = 128,
    gather_bits: int | None = None,
    reduce_bits: int | None = None,
    error_feedback: bool = True,
    group_size: int | None = None,
    machine_size: int = 8,
    offload_optimizer: str | None = None,
    offload_param: str | None = None,
    read_ahead: int = 5,
    secondary_shards: int | None = None,
    micro_batches: int = 1,
) -> MemoryPlan:
    """Return the bytes that an update takes and sends.

    The fullest moment is that of a root whose parameters are used before and after the
    other units, as an embedding and a head are; else there is less at once.

    Args:
        units (Iterable[UnitSize]): Every unit once; a unit inside another has its own
            parameters only.
        world_size (int): Ranks of the run.
        compute_dtype (str, default 'float32'): Of gathered parameters: "float32",
            "bfloat16" or "float16".
        reduce_dtype (str | None, default None): Of gradients until they are reduced;
            None: compute_dtype.
        optimizer_bytes (float, default 8): Of state for each trainable element: Adam's
            moments have 8 where shards are float32 and 4 where they are bfloat16, in 8
            bits, with a scale for each 256, 2.03125; SGD's 4, or 0 without momentum.
        prefetch (int, default 0): Units that are prefetched; none where parameters are
            quantized.
        reshard_after_forward (bool, default True): False keeps every unit gathered
            until its backward pass.
        shard_size_multiple (int, default 128): What a rank's shard of a group is padded
            to, in elements.
        gather_bits, reduce_bits (int | None, default None): 8 or 4, of quantized
            parameters, of gradients; None: they travel whole.
        error_feedback (bool, default True): Rounding errors of quantized gradients are
            kept.
        group_size (int | None, default None): Ranks of a sharding group, side by side
            (hybrid sharding); None: world_size.
        machine_size (int, default 8): Ranks of a machine. What leaves it is counted as
            collectives send it that bring data to another machine once: NCCL's, and
            those of a group over machines.
        offload_optimizer, offload_param (str | None, default None): "cpu", of either:
            shards, their gradients and the optimizer's state are in host memory.
            "nvme": there, but for the state or the shards, which are in files, of which
            host memory has 4 pieces of 2**20 elements. None for both: all on the GPU.
        read_ahead (int, default 5): With shards in files, of how many units at most
            host memory has copies.
        secondary_shards (int | None, default None): Ranks of a machine, which keep
            parameters for the backward; None, or all ranks: they do not.
        micro_batches (int, default 1): Of an update; before the last gradients stay
            whole on each rank, as in no_sync().

    Raises:
        ValueError: a size below 1, ranks that groups and machines do not divide, an
            unknown dtype, number of bits or offload.

    Source: Rajbhandari et al., "ZeRO", 2020, sections 5 and 7; Wang et al., "ZeRO++",
    2023; Zhang et al., "MiCS", 2022.

    Example:
        >>> from ctrainer.fsdp import UnitSize, memory_plan
        >>> units = [UnitSize((1_000_000,), kept=True)] + 12 * [UnitSize((7_000_000,))]
        >>> plan = memory_plan(units, world_size=8, compute_dtype="bfloat16")
        >>> plan.sharded // 2**20, plan.total // 2**20
        (162, 192)
    """
    group = world_size if group_size is None else group_size
    _check_sizes(world_size, shard_size_multiple, prefetch, group, machine_size)
    _check_counts(micro_batches=micro_batches, read_ahead=read_ahead)
    step = _Step(
        [_Padded(unit, group, shard_size_multiple) for unit in units],
        _Sent(group, _bytes_of("compute_dtype", compute_dtype),
              _bits("gather_bits", gather_bits)),
        _Sent(group, _bytes_of("reduce_dtype", reduce_dtype or compute_dtype),
              _bits("reduce_bits", reduce_bits)),
        reshard_after_forward,
        keeps_residual=error_feedback and reduce_bits is not None,
        secondary=_machine(secondary_shards, group),
        micro_batches=micro_batches,
    )  # fmt: skip
    shards = sum(size.shards for size in step.units) // group
    gradients = sum(size.gradients for size in step.units) // group
    trainable = sum(size.trainable for size in step.units) // group
    state = math.ceil(trainable * optimizer_bytes)
    of_state, of_shards = _check_places(offload_optimizer, offload_param)
    disk = state * (of_state == "nvme") + shards * (of_shards == "nvme")
    copies = step.copies(read_ahead) if of_shards == "nvme" else 0
    pieces = _PIECES * min(step.longest(), _PIECE) * disk // max(trainable, 1)
    host = shards + gradients + state - disk + min(pieces, disk) + copies
    return MemoryPlan(
        world_size=world_size,
        group_size=group,
        parameters=shards,
        gradients=gradients,
        optimizer=state,
        feedback=trainable * group * 4 if step.keeps_residual else 0,
        gathered=step.gathered(),
        prefetched=step.prefetched(prefetch),
        full_gradients=step.full_gradients(),
        quantized=step.quantized(),
        gather_traffic=step.gather_traffic(),
        reduce_traffic=step.reduce_traffic(),
        replica_traffic=step.replica_traffic(world_size // group),
        machine_traffic=step.machine_traffic(world_size, machine_size),
        host=host if of_state or of_shards else 0,
        disk=disk,
        secondary=step.secondary_bytes(),
        unreduced=step.unreduced(),
        copies=copies,
        released=step.released() + copies,
    )


def _machine(secondary_shards: int | None, group: int) -> int | None:
    """The ranks of a machine, where its secondary shards are not those of the group."""
    if secondary_shards is None or secondary_shards == group:
        return None
    if secondary_shards < 1 or group % secondary_shards:
        raise ValueError(
            f"secondary_shards {secondary_shards} must be 1 or more, and divide the "
            f"{group} ranks of a sharding group"
        )
    return secondary_shards


def _check_places(*places: str | None) -> Sequence[str | None]:
    for name, place in zip(("optimizer", "param"), places, strict=True):
        if place not in (None, "cpu", "nvme"):
            raise ValueError(
                f"offload_{name} must be 'cpu', 'nvme' or None, not {place!r}"
            )
    return places


class _Padded:
    """The elements of a unit's groups with padding."""

    def __init__(self, unit: UnitSize, ranks: int, multiple: int) -> None:
        def padded(n: int) -> int:
            return math.ceil(n / (ranks * multiple)) * ranks * multiple

        sizes = [*unit.trainable, *unit.frozen]
        items = unit.item_bytes or (4,) * len(sizes)
        if len(items) != len(sizes):
            raise ValueError(
                f"item_bytes has {len(items)} entries, and the unit {len(sizes)} groups"
            )
        #: (elements, bytes of one in a shard) of each group.
        self.of_all = [(padded(n), b) for n, b in zip(sizes, items, strict=True)]
        self.of_trainable = self.of_all[: len(unit.trainable)]
        self.trainable = sum(n for n, _ in self.of_trainable)
        self.shards = sum(n * item for n, item in self.of_all)
        self.gradients = sum(n * item for n, item in self.of_trainable)
        self.kept = unit.kept

    def full(self, item: int) -> int:
        """Bytes of the gathered groups, whose floats have `item` bytes."""
        return sum(n * _gathered_item(own, item) for n, own in self.of_all)


def _gathered_item(own: int, item: int) -> int:
    """Bytes of a gathered element; quantized values are gathered as they are."""
    return own if own == 1 else item


@dataclass(frozen=True, slots=True)
class _Sent:
    """The messages of a collective: elements of `item` bytes, or quantized values."""

    ranks: int
    item: int
    bits: int | None

    def part(self, group: tuple[int, int]) -> int:
        """Bytes of the message with a rank's part of a group."""
        n, own = group[0] // self.ranks, group[1]
        if self.bits is None or own == 1:
            return n * _gathered_item(own, self.item)
        message = math.ceil(n / _BLOCK) * 4 + math.ceil(n * self.bits / 8)
        return math.ceil(message / _ALIGN) * _ALIGN

    def parts(self, groups: Iterable[tuple[int, int]]) -> int:
        return sum(map(self.part, groups))

    def buffers(self, groups: Iterable[tuple[int, int]], sent: int, blank: bool) -> int:
        """The largest buffer of a group: `sent` parts, the parts of all ranks, and with
        `blank` a float32 for each element of a part."""
        if self.bits is None:
            return 0
        floats = 4 if blank else 0
        return max(
            (self.part(group) * (sent + self.ranks) + group[0] // self.ranks * floats
             for group in groups if group[1] > 1),
            default=0,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Step:
    """One micro-batch's forward, backward and reductions on a rank."""

    units: list[_Padded]
    gather: _Sent
    reduce: _Sent
    reshards: bool
    keeps_residual: bool
    secondary: int | None  # ranks of a machine
    micro_batches: int

    @property
    def _roots(self) -> list[_Padded]:
        return [size for size in self.units if size.kept]

    @property
    def _again(self) -> list[_Padded]:
        """Those that are gathered again, for backwards and the next micro-batches."""
        return [u for u in self.units if not u.kept] if self.reshards else []

    @property
    def _times(self) -> int:
        return 2 * self.micro_batches - 1

    @property
    def _fullest(self) -> _Padded:
        def size(unit: _Padded) -> int:
            return unit.full(self.gather.item) + unit.trainable * self.reduce.item

        inner = [unit for unit in self.units if not unit.kept]
        return max(inner, key=size, default=_Padded(UnitSize(()), 1, 1))

    def _kept_and(self, inner: list[_Padded]) -> int:
        return sum(unit.full(self.gather.item) for unit in [*self._roots, *inner])

    def gathered(self) -> int:
        inner = [unit for unit in self.units if not unit.kept]
        return self._kept_and([self._fullest] if self.reshards else inner)

    def unreduced(self) -> int:
        elements = sum(unit.trainable for unit in self.units)
        return elements * 4 if self.micro_batches > 1 else 0

    def released(self) -> int:
        """Units that stay gathered or keep their gradients up to their backward."""
        units = self.gathered() - self._kept_and([self._fullest])
        return units + max(self.unreduced() - self.full_gradients(), 0)

    def longest(self) -> int:
        """Elements of the longest trained shard."""
        groups = (n for unit in self.units for n, _ in unit.of_trainable)
        return max(groups, default=0) // self.gather.ranks

    def copies(self, read_ahead: int) -> int:
        """Of the largest shards; a copy is released once its unit is gathered."""
        shards = sorted(unit.shards // self.gather.ranks for unit in self.units)
        return sum(shards[-read_ahead:])

    def secondary_bytes(self) -> int:
        of_machine = (unit.full(self.gather.item) for unit in self._again)
        return sum(of_machine) // self.secondary if self.secondary else 0

    def prefetched(self, prefetch: int) -> int:
        if self.gather.bits is not None or not self._again:
            return 0
        count = min(prefetch, len(self._again) - 1)
        return count * max(unit.full(self.gather.item) for unit in self._again)

    def full_gradients(self) -> int:
        grads = sum(unit.trainable for unit in self._roots) + self._fullest.trainable
        return grads * self.reduce.item

    def quantized(self) -> int:
        """Buffers exist where other memory is free: a unit's before its gradients or
        after its parameters, the root's outside of all units."""
        unit, roots = self._fullest, self._roots
        unit_full = unit.full(self.gather.item)
        unit_grads = unit.trainable * self.reduce.item
        root_full = sum(root.full(self.gather.item) for root in roots)
        root_grads = sum(root.trainable for root in roots) * self.reduce.item
        inner = [u for u in self.units if not u.kept]
        return max(
            0,
            self._gather_buffers(inner) - unit_grads,
            self._reduce_buffers(inner) - unit_full,
            self._gather_buffers(roots) - root_grads - unit_full - unit_grads,
            self._reduce_buffers(roots) - root_full - unit_full - unit_grads,
        )

    def _gather_buffers(self, units: list[_Padded]) -> int:
        groups = [group for unit in units for group in unit.of_all]
        return self.gather.buffers(groups, 1, blank=True)

    def _reduce_buffers(self, units: list[_Padded]) -> int:
        groups = [group for unit in units for group in unit.of_trainable]
        return self.reduce.buffers(
            groups, self.reduce.ranks, blank=not self.keeps_residual
        )

    def _gathered_parts(self) -> int:
        """Of the gathers over the whole group."""
        units = self.units + ([] if self.secondary else self._again * self._times)
        return sum(self.gather.parts(unit.of_all) for unit in units)

    def _reduced_parts(self) -> int:
        return sum(self.reduce.parts(unit.of_trainable) for unit in self.units)

    def gather_traffic(self) -> int:
        within = self.secondary_bytes() * ((self.secondary or 1) - 1) * self._times
        return self._gathered_parts() * (self.gather.ranks - 1) + within

    def reduce_traffic(self) -> int:
        return self._reduced_parts() * (self.reduce.ranks - 1)

    def _replicated(self) -> int:
        """A rank's part of all gradients, which crosses to the replicas whole."""
        elements = sum(unit.trainable for unit in self.units) // self.reduce.ranks
        return elements * self.reduce.item

    def replica_traffic(self, replicas: int) -> int:
        return round(2 * (replicas - 1) / replicas * self._replicated())

    def machine_traffic(self, world_size: int, machine: int) -> int:
        """Parameters, and gradients summed within the machine, go to another machine
        once; quantized gradients, which only their owner can sum, from every rank."""
        group = self.gather.ranks
        held = min(machine, group)  # different parts on a machine
        away = max(group // machine - 1, 0) * held  # parts on others
        senders = 1 if self.reduce.bits is None else machine
        replicas = world_size // max(group, min(machine, world_size))
        among = 2 * (replicas - 1) / replicas * self._replicated() * held
        return (
            self._gathered_parts() * away
            + self._reduced_parts() * away * senders
            + round(among)
        )


def _check_sizes(
    world: int, multiple: int, prefetch: int, group: int, machine: int
) -> None:
    if min(world, multiple, group, machine) < 1 or prefetch < 0:
        raise ValueError(
            "world_size, shard_size_multiple, group_size and machine_size must be 1 or "
            f"more and prefetch 0 or more, got {world}, {multiple}, {group}, {machine} "
            f"and {prefetch}"
        )
    if world % group:
        raise ValueError(
            f"world_size {world} must be a multiple of group_size {group}, the ranks "
            "of a sharding group"
        )
    small, large = sorted((group, min(machine, world)))
    if large % small or world % min(machine, world):
        raise ValueError(
            f"of group_size {group} and machine_size {machine} one must be a multiple "
            f"of the other, and world_size {world} of machine_size"
        )


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be 1 or more, not {count}")


def _bytes_of(name: str, dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{name} must be one of {list(DTYPE_BYTES)}, not {dtype!r}")
    return DTYPE_BYTES[dtype]


def _bits(name: str, bits: int | None) -> int | None:
    if bits not in (None, 8, 4):
        raise ValueError(f"{name} must be 8, 4 or None, not {bits!r}")
    return bits


def units_of(module: Any) -> list[UnitSize]:
    """Return the sizes of the units of a wrapped module.

    Args:
        module: A FullyShardedDataParallel, the root.

    Example:
        >>> import torch
        >>> from ctrainer.fsdp import FullyShardedDataParallel, units_of
        >>> units_of(FullyShardedDataParallel(torch.nn.Linear(4, 2, bias=False)))
        [UnitSize(trainable=(8,), frozen=(), kept=True, item_bytes=(4,))]
    """
    return [
        UnitSize(
            tuple(g.orig_size.numel() for g in unit._groups if g.requires_grad),
            tuple(g.orig_size.numel() for g in unit._groups if not g.requires_grad),
            kept=unit is module,
            item_bytes=tuple(
                g.dtype.itemsize
                for g in sorted(unit._groups, key=lambda g: not g.requires_grad)
            ),
        )
        for unit in module.units()
    ]


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

    def sizes(self) -> list[int]:
        """The parameters of the root and of each block."""
        return [self.root] + [self.block] * self.layers

    def units(self) -> list[UnitSize]:
        """With flatten_parameters, of float32."""
        return _units(self.sizes(), 4, None)


def _units(sizes: Sequence[int], item: int, frozen_bits: int | None) -> list[UnitSize]:
    """item: bytes of a shard's element. frozen_bits: of the frozen blocks; None: all
    are trained."""
    root, *blocks = sizes
    if frozen_bits is None:
        return [UnitSize((root,), (), True, (item,))] + [
            UnitSize((block,), item_bytes=(item,)) for block in blocks
        ]
    return [UnitSize((), (root,), True, (item,))] + [
        UnitSize((), (math.ceil(block * frozen_bits / 8),), item_bytes=(1,))
        for block in blocks
    ]


# Source: config.json of Llama 3.2 1B, Llama 3.1 8B and 70B.
DECODERS = {
    "1B": Decoder(16, 2048, 8192, 32, 8, 128256, tied=True),
    "8B": Decoder(32, 4096, 14336, 32, 8, 128256),
    "70B": Decoder(80, 8192, 28672, 64, 8, 128256),
}
WORLD_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)

_COLUMNS = (
    "parameters", "gradients", "optimizer", "feedback", "gathered", "prefetched",
    "full_gradients", "unreduced", "quantized", "total", "gather_traffic",
    "reduce_traffic", "replica_traffic", "machine_traffic", "secondary", "host", "disk",
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
    parser = argparse.ArgumentParser(
        prog="ctrainer memory",
        description="Print memory and traffic of sharded training.",
        formatter_class=HelpFormatter,
    )
    add, dtypes = parser.add_argument, list(DTYPE_BYTES)
    add(
        "model",
        metavar="MODEL",
        help=f"Size of a decoder, {', '.join(DECODERS)}, or what transformers' "
        "from_pretrained() takes, of which only the configuration is read.",
    )
    add(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        default=3,
        help="Stage: 0 shards nothing; 1 and 2, gradients and the optimizer's state; "
        "3, parameters, too.",
    )
    add(
        "--world_size",
        type=int,
        nargs="+",
        default=WORLD_SIZES,
        help="Numbers of GPUs, a row of the table for each.",
    )
    for name, what in (("optimizer", "the optimizer's state"), ("param", "the shards")):
        add(
            f"--offload_{name}",
            choices=("cpu", "nvme"),
            help=f"nvme, {what} in files; cpu, of either option, shards, gradients and "
            "state in host memory; unset, on the GPU.",
        )
    add(
        "--read_ahead",
        type=int,
        default=5,
        help="Units that are prefetched from files, with --offload_param nvme.",
    )
    add(
        "--optimizer",
        choices=sorted(RECIPES),
        default="adamw_torch",
        help="Optimizer, as optim of TrainingArguments.",
    )
    add(
        "--optimizer_bytes",
        type=float,
        help="Bytes of state for each parameter; unset, those of --optimizer.",
    )
    add(
        "--gradient_accumulation_steps",
        dest="micro_batches",
        type=int,
        default=1,
        help="Micro-batches of an update.",
    )
    add(
        "--compute_dtype",
        choices=dtypes,
        default="bfloat16",
        help="Dtype of the gathered parameters.",
    )
    add(
        "--param_dtype",
        choices=dtypes,
        default="float32",
        help="Dtype of the shards and their gradients.",
    )
    add(
        "--frozen_bits",
        type=int,
        choices=(4, 8),
        help="Bits of the blocks' parameters, all of which are frozen; adapters on "
        "them are not counted. Unset, all are trained.",
    )
    add(
        "--reduce_dtype",
        choices=dtypes,
        help="Dtype of the reduced gradients; unset, that of --compute_dtype.",
    )
    add("--prefetch", type=int, default=0, help="Units to prefetch.")
    add(
        "--gather_bits",
        type=int,
        choices=(4, 8),
        help="Bits of a gathered value; unset, the values are not quantized.",
    )
    add(
        "--reduce_bits",
        type=int,
        choices=(4, 8),
        help="Bits of a reduced gradient; unset, gradients are not quantized.",
    )
    add(
        "--no_error_feedback",
        action="store_true",
        help="Keep no residuals of quantized gradients.",
    )
    add(
        "--group_size",
        type=int,
        help="GPUs of a sharding group, for hybrid sharding; unset, all of them.",
    )
    add("--machine_size", type=int, default=8, help="GPUs of a machine.")
    add(
        "--secondary_shards",
        type=int,
        help="GPUs of a machine, which keep parameters for the backward pass "
        "(zero_hpz_partition_size); unset, they do not.",
    )
    return parser


def state_bytes(optim: str, dtype: str) -> float:
    """Bytes of state for each parameter of a large matrix. optim: of RECIPES."""
    import torch

    from ctrainer import optim as optimizers

    matrix = torch.empty(4096, 4096, dtype=getattr(torch, dtype), device="meta")
    recipe = RECIPES[optim]
    made = getattr(optimizers, recipe.cls)([matrix], lr=1e-3, **recipe.fixed)
    state = made._new_state(matrix, made.param_groups[0]).values()
    nbytes = sum(t.nbytes for t in state if isinstance(t, torch.Tensor))
    return round(nbytes / matrix.numel(), 5)


def _sizes(name: str) -> list[int]:
    """The parameters of a model's root, and of its blocks."""
    if name in DECODERS:
        return DECODERS[name].sizes()
    from ctrainer.adapters.empty_model import empty_model
    from ctrainer.arguments.fsdp import Sharding
    from ctrainer.fsdp import trained_model

    module = empty_model(name)
    sizes = trained_model.own_sizes(module, trained_model.choose(module, Sharding()))
    return list(sizes.values())


_SHARDING = (
    "offload_optimizer offload_param gather_bits reduce_bits reduce_dtype prefetch "
    "group_size secondary_shards"
).split()


def plan_of_stage(
    stage: int, units: Iterable[UnitSize], world_size: int, **options: Any
) -> MemoryPlan:
    """memory_plan() of a stage of ZeRO, of which 0 has no options of sharding."""
    if stage > 0:
        options["reshard_after_forward"] = stage == 3
        return memory_plan(units, world_size, **options)
    for name in _SHARDING:
        if options.get(name):
            raise ValueError(f"{name}={options[name]!r} needs a stage above 0")
    options |= {"group_size": 1, "reduce_dtype": "float32", "shard_size_multiple": 1}
    plan = memory_plan(units, world_size, reshard_after_forward=False, **options)
    # What autocast keeps of a forward for its backward.
    narrow = options.get("compute_dtype", "float32") != "float32"
    cast = plan.gathered if narrow else 0
    return dataclasses.replace(
        plan,
        gathered=cast,
        full_gradients=0,
        unreduced=0,
        released=cast if options.get("micro_batches", 1) == 1 else 0,
    )


def main(arguments: list[str]) -> int:
    """`ctrainer memory`."""
    parser = _parser()
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    name, sizes, stage = (given.pop(n) for n in ("model", "world_size", "zero"))
    given["error_feedback"] = not given.pop("no_error_feedback")
    dtype, optim = given.pop("param_dtype"), given.pop("optimizer")
    if given["optimizer_bytes"] is None:
        given["optimizer_bytes"] = state_bytes(optim, dtype)
    try:
        counts = _sizes(name)
        units = _units(counts, DTYPE_BYTES[dtype], given.pop("frozen_bits"))
        plans = [plan_of_stage(stage, units, size, **given) for size in sizes]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{in_gb(sum(counts))} G parameters, GB on each GPU")
    print(table(plans))
    return 0
