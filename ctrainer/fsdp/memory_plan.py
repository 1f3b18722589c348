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
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ctrainer.runtime.command_line import HelpFormatter

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCK = 256  # quantized values with one scale, a float32
_ALIGN = 8  # bytes that messages are padded to
_PIECES = 4 << 20  # elements of state in memory, of a file


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
        host (int, default 0): Of the shards, in host memory rather than the GPU's.
        disk (int, default 0): Of the shards, in a file.
        secondary (int, default 0): Secondary shards, from the forward to the backward.

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
    host: int = 0  # shards that are offloaded, and pieces of state on disk
    disk: int = 0
    secondary: int = 0  # shards of a machine's ranks, of the units that are released

    @property
    def sharded(self) -> int:
        """Bytes that stay between steps, in proportion to 1 / ranks."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def transient(self) -> int:
        """The peak of the engine's ledger, whatever the ranks; the ledger does not
        count quantized values."""
        return self.gathered + self.prefetched + self.full_gradients + self.secondary

    @property
    def total(self) -> int:
        """Bytes of a rank at the fullest moment; of its GPU where shards are offloaded,
        without the buffer that a shard is copied through."""
        staying = 0 if self.host else self.sharded
        return staying + self.feedback + self.transient + self.quantized

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
    offload: str | None = None,
    secondary_shards: int | None = None,
) -> MemoryPlan:
    """Return the bytes that a step of one micro-batch takes and sends.

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
        offload (str | None, default None): "cpu": shards, their gradients and the
            optimizer's state are in host memory; "nvme": the state is in a file, of
            which host memory has 4 pieces of 2**20 elements; None: all on the GPU.
        secondary_shards (int | None, default None): Ranks of a machine, which keep
            parameters for the backward; None, or all ranks: they do not.

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
    step = _Step(
        [_Padded(unit, group, shard_size_multiple) for unit in units],
        _Sent(group, _bytes_of("compute_dtype", compute_dtype),
              _bits("gather_bits", gather_bits)),
        _Sent(group, _bytes_of("reduce_dtype", reduce_dtype or compute_dtype),
              _bits("reduce_bits", reduce_bits)),
        reshard_after_forward,
        keeps_residual=error_feedback and reduce_bits is not None,
        secondary=_machine(secondary_shards, group),
    )  # fmt: skip
    shards = sum(size.shards for size in step.units) // group
    gradients = sum(size.gradients for size in step.units) // group
    trainable = sum(size.trainable for size in step.units) // group
    state = math.ceil(trainable * optimizer_bytes)
    pieces = math.ceil(_PIECES * optimizer_bytes)
    host, disk = _offloaded(offload, shards + gradients, state, pieces)
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
        host=host,
        disk=disk,
        secondary=step.secondary_bytes(),
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


def _offloaded(
    offload: str | None, shards: int, state: int, pieces: int
) -> tuple[int, int]:
    """Bytes in host memory and on disk."""
    if offload not in (None, "cpu", "nvme"):
        raise ValueError(f"offload must be 'cpu', 'nvme' or None, not {offload!r}")
    if offload == "nvme":
        return shards + min(state, pieces), state
    return (shards + state if offload else 0), 0


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

    @property
    def _roots(self) -> list[_Padded]:
        return [size for size in self.units if size.kept]

    @property
    def _again(self) -> list[_Padded]:
        """Those that are gathered a second time, for the backward."""
        return [u for u in self.units if not u.kept] if self.reshards else []

    @property
    def _fullest(self) -> _Padded:
        def size(unit: _Padded) -> int:
            return unit.full(self.gather.item) + unit.trainable * self.reduce.item

        inner = [unit for unit in self.units if not unit.kept]
        return max(inner, key=size, default=_Padded(UnitSize(()), 1, 1))

    def gathered(self) -> int:
        staying = self._roots if self.reshards else self.units
        at_once = [*staying, self._fullest] if self._again else staying
        return sum(unit.full(self.gather.item) for unit in at_once)

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
        units = self.units + ([] if self.secondary else self._again)
        return sum(self.gather.parts(unit.of_all) for unit in units)

    def _reduced_parts(self) -> int:
        return sum(self.reduce.parts(unit.of_trainable) for unit in self.units)

    def gather_traffic(self) -> int:
        within = self.secondary_bytes() * ((self.secondary or 1) - 1)
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

    def units(self, item: int = 4) -> list[UnitSize]:
        """With flatten_parameters; item: bytes of a shard's element."""
        block = UnitSize((self.block,), item_bytes=(item,))
        return [UnitSize((self.root,), (), True, (item,))] + [block] * self.layers


# Source: config.json of Llama 3.2 1B, Llama 3.1 8B and 70B.
DECODERS = {
    "1B": Decoder(16, 2048, 8192, 32, 8, 128256, tied=True),
    "8B": Decoder(32, 4096, 14336, 32, 8, 128256),
    "70B": Decoder(80, 8192, 28672, 64, 8, 128256),
}
WORLD_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)

_COLUMNS = (
    "parameters", "gradients", "optimizer", "feedback", "gathered", "prefetched",
    "full_gradients", "quantized", "total", "gather_traffic", "reduce_traffic",
    "replica_traffic", "machine_traffic", "secondary", "host", "disk",
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
        prog="ctrainer plan",
        description="Print memory and traffic of sharded training.",
        formatter_class=HelpFormatter,
    )
    add, dtypes = parser.add_argument, list(DTYPE_BYTES)
    add("--model", choices=list(DECODERS), default="8B", help="Size of the decoder.")
    add(
        "--world_size",
        type=int,
        nargs="+",
        default=WORLD_SIZES,
        help="Numbers of GPUs, a row of the table for each.",
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
        "--reduce_dtype",
        choices=dtypes,
        help="Dtype of the reduced gradients; unset, that of --compute_dtype.",
    )
    add(
        "--optimizer_bytes",
        type=float,
        default=8,
        help="Bytes of optimizer state for each parameter; 2.03125 with 8-bit AdamW.",
    )
    add("--prefetch", type=int, default=0, help="Units to prefetch.")
    add(
        "--no_reshard_after_forward",
        action="store_true",
        help="Keep the parameters gathered between forward and backward pass.",
    )
    add(
        "--zero",
        type=int,
        choices=(1, 2, 3),
        help="Stage of a DeepSpeed configuration; 1 and 2 are "
        "--no_reshard_after_forward.",
    )
    add(
        "--offload",
        choices=("cpu", "nvme"),
        help="Where shards and the optimizer's state are: cpu, in host memory; nvme, "
        "the state in a file; unset, on the GPU.",
    )
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


def main(arguments: list[str]) -> int:
    """`ctrainer plan`."""
    parser = _parser()
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    model, sizes = DECODERS[given.pop("model")], given.pop("world_size")
    keeps, stage = given.pop("no_reshard_after_forward"), given.pop("zero")
    if keeps and stage == 3:
        parser.error("--zero 3 reshards; leave --no_reshard_after_forward out")
    given["reshard_after_forward"] = not keeps and stage in (None, 3)
    given["error_feedback"] = not given.pop("no_error_feedback")
    units = model.units(DTYPE_BYTES[given.pop("param_dtype")])
    try:
        plans = [memory_plan(units, size, **given) for size in sizes]
    except ValueError as error:
        parser.error(str(error))
    print(f"{in_gb(model.parameters)} G parameters, GB on each GPU")
    print(table(plans))
    return 0
