"""What many workers do with their time, by the cost model of cost.py.

Prints the tables of docs/concepts/scaling.md. Every assumption is an option.
"""

import argparse

from cost import Network, Worker, block_update, coded, sync_update

RATES = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 10e9 / 8, "100 Gbit/s": 100e9 / 8}
WORKERS = (8, 64, 1024)
BLOCK, DILOCO = 50, 500  # updates between two synchronizations


def ways(worker: Worker, n: int, network: Network) -> dict[str, float]:
    """Seconds of an update, by how the workers train."""
    every = {"BMUF": BLOCK, "DiLoCo": DILOCO}
    found = {"synchronous": sync_update(worker, n, network)}
    for name, updates in every.items():
        for bits in (32, 16, 8, 4):
            cost = block_update(worker, n, network, updates, coded(bits))
            found[f"{name} every {updates}, {bits} bits"] = cost
    found[f"DiLoCo every {DILOCO}, 32 bits, overlapped"] = block_update(
        worker, n, network, DILOCO, overlapped=10
    )
    return found


def table(worker: Worker, latency: float) -> None:
    print("| training | " + " | ".join(f"{n} at {r}" for r in RATES for n in WORKERS))
    print("| --- " * (1 + len(RATES) * len(WORKERS)) + "|")
    columns = [
        ways(worker, n, Network(rate, latency))
        for rate in RATES.values()
        for n in WORKERS
    ]
    for name in columns[0]:
        shares = (f"{worker.compute / c[name]:.1%}" for c in columns)
        print(f"| {name} | " + " | ".join(shares) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=[125e6, 7e9], nargs="+")
    parser.add_argument("--tokens", type=float, default=32768, help="of an update")
    parser.add_argument("--flops", type=float, default=125e12, help="that are reached")
    parser.add_argument("--memory", type=float, default=15e9, help="bytes/s of passes")
    parser.add_argument("--latency", type=float, default=50e-6, help="seconds")
    options = parser.parse_args()
    for parameters in options.parameters:
        compute = 6 * parameters * options.tokens / options.flops
        print(
            f"\n{parameters / 1e6:.0f}M parameters, {compute:.2f} s an update alone\n"
        )
        table(Worker(parameters, compute, memory=options.memory), options.latency)


if __name__ == "__main__":
    main()
