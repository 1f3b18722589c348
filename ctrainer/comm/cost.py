"""What an update of many workers costs: formulas, from figures that can be measured.

All times are in seconds, sizes in bytes, rates in bytes per second. The network is one
in which every worker has one link of its own to the others, full duplex, and no more
is in the way: what a real one adds is in the measured `rate` and `latency`.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005 (rings and trees); Patarasuk and Yuan, "Bandwidth Optimal
All-reduce Algorithms for Clusters of Workstations", 2009 (no all_reduce sends less).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Network", "Worker", "all_reduce", "block_update", "coded", "sync_update"]


@dataclass(frozen=True)
class Network:
    """rate: of a worker's link, each way; latency: from a send to its arrival."""

    rate: float
    latency: float


@dataclass(frozen=True)
class Worker:
    """One worker and what it trains.

    parameters: of the model; compute: forward and backward of an update and the
    optimizer's step, when alone; backward: the share of that in which gradients appear
    one after the other, to be sent meanwhile; memory: the rate at which passes over
    parameters run; gradient_bytes: of one element on its way.
    """

    parameters: float
    compute: float
    backward: float = 2 / 3
    memory: float = 15e9
    gradient_bytes: float = 2.0


def all_reduce(n_bytes: float, workers: int, network: Network) -> float:
    """The faster of a ring and of a tree.

    Ring: 2 (W - 1) messages, of n / W bytes each, one after the other. Tree: up and
    down log2(W) levels, all but the first message of n bytes behind each other.
    """
    if workers < 2:
        return 0.0
    hops = 2 * (workers - 1)
    ring = hops * (network.latency + n_bytes / workers / network.rate)
    levels = math.ceil(math.log2(workers))
    tree = 2 * (levels * network.latency + n_bytes / network.rate)
    return min(ring, tree)


def coded(bits: int, block: int = 256) -> float:
    """Bytes of an element in codes of `bits`, with a float32 scale for each block."""
    return bits / 8 + (4 / block if bits < 16 else 0.0)


def sync_update(worker: Worker, workers: int, network: Network) -> float:
    """An update of data parallelism: what the exchange of gradients takes longer than
    the part of the backward pass in which it is hidden is waited for."""
    exchange = all_reduce(worker.parameters * worker.gradient_bytes, workers, network)
    hidden = worker.compute * worker.backward
    return worker.compute + max(0.0, exchange - hidden)


def block_update(
    worker: Worker,
    workers: int,
    network: Network,
    every: int,
    element_bytes: float = 4.0,
    overlapped: int = 0,
) -> float:
    """An update of workers that meet once in `every`, averaged over the block.

    The end of a block reads the parameters, the global model and its momentum and
    writes all three: 24 bytes a parameter. Of its exchange, of `element_bytes` a
    parameter, the computing of `overlapped` updates hides what it can.
    """
    if workers < 2:
        return worker.compute
    exchange = all_reduce(worker.parameters * element_bytes, workers, network)
    waited = max(0.0, exchange - overlapped * worker.compute)
    passes = 24 * worker.parameters / worker.memory
    return worker.compute + (waited + passes) / every
