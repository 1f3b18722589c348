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
    """The network between workers.

    Args:
        rate (float): Of a worker's link, each way, in bytes a second.
        latency (float): From a send to its arrival, in seconds.

    Example:
        >>> from cost import Network, all_reduce
        >>> all_reduce(1e9, 2, Network(rate=1e9, latency=0.0))
        1.0
    """

    rate: float
    latency: float


@dataclass(frozen=True)
class Worker:
    """One worker and what it trains.

    Args:
        parameters (float): Of the model, in elements.
        compute (float): Seconds of forward and backward pass of an update and of the
            optimizer's step, when alone.
        backward (float, 2 / 3 by default): The part of that in which gradients appear
            one after the other, to be sent meanwhile.
        memory (float, default 15e9): Bytes a second of passes over parameters.
        gradient_bytes (float, default 2.0): Of one element on its way.

    Example:
        >>> from cost import Network, Worker, sync_update
        >>> worker = Worker(parameters=1e8, compute=0.5)
        >>> sync_update(worker, 1, Network(1e9, 1e-5))
        0.5
    """

    parameters: float
    compute: float
    backward: float = 2 / 3
    memory: float = 15e9
    gradient_bytes: float = 2.0


def all_reduce(n_bytes: float, workers: int, network: Network) -> float:
    """Return the seconds of an all-reduce: the faster of a ring and of a tree.

    Ring: 2 (W - 1) messages, of n / W bytes each, one after the other. Tree: up and
    down log2(W) levels, all but the first message of n bytes behind each other.

    Args:
        n_bytes (float): Of a worker's tensors.
        workers (int): W.
        network (Network): Between them.
    """
    if workers < 2:
        return 0.0
    hops = 2 * (workers - 1)
    ring = hops * (network.latency + n_bytes / workers / network.rate)
    levels = math.ceil(math.log2(workers))
    tree = 2 * (levels * network.latency + n_bytes / network.rate)
    return min(ring, tree)


def coded(bits: int, block: int = 256) -> float:
    """Return the bytes of a quantized element, with a float32 scale for each block.

    Args:
        bits (int): Of a value; from 16 on there is no scale.
        block (int, default 256): Elements that share a scale.
    """
    return bits / 8 + (4 / block if bits < 16 else 0.0)


def sync_update(worker: Worker, workers: int, network: Network) -> float:
    """Return the seconds of an update of data parallelism.

    An exchange of gradients that takes longer than the part of the backward pass in
    which it is hidden is waited for.

    Args:
        worker (Worker): Each of them.
        workers (int): Their number.
        network (Network): Between them.
    """
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
    """Return the seconds of an update of workers that synchronize once in `every`,
    averaged over the block.

    The end of a block reads the parameters, the global model and its momentum and
    writes all three: 24 bytes a parameter. The computing of `overlapped` updates hides
    what it can of the exchange.

    Args:
        worker (Worker): Each of them.
        workers (int): Their number.
        network (Network): Between them.
        every (int): Updates of a block.
        element_bytes (float, default 4.0): Of a parameter in the exchange.
        overlapped (int, default 0): Updates after the end of a block in which its
            average is taken.
    """
    if workers < 2:
        return worker.compute
    exchange = all_reduce(worker.parameters * element_bytes, workers, network)
    waited = max(0.0, exchange - overlapped * worker.compute)
    passes = 24 * worker.parameters / worker.memory
    return worker.compute + (waited + passes) / every
